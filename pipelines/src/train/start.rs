//! Begins a run, or finds where it goes on. All that can be known to be wrong before the first step is found here.

use std::{
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use elmo::{
    Fingerprint, ModelData, ModelOptions,
    lm_head::{LmHeadData, LmHeadError},
    model::DeviceName,
    options::TensorSpec,
    train::{Classes, LanguageModel, Recipe, Resources, Schedule, Snapshot, Trainer},
    weights::{Tensor, Weights, safetensors},
};
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;

use super::{
    checkpoint::{Checkpoints, FOLDER as CHECKPOINTS, Found, RunState},
    corpus::{Corpus, Hashes, LONG, LONG_ENOUGH, Order, Reading, Shard, Shards, Survey, Wanted, differences},
    error::TrainFault,
    feed::StreamState,
    held_out::HeldOut,
    job::{ModelSource, TrainJob, schedule_for},
    journal::{STEPS, VALID},
    model,
    room::{self, Load, Room},
    run::{Run, TrainReport},
    settings::Settings,
    tensorboard,
    together::{concluded, shared, together},
    upload::{Copied, Copies, Target},
    words::Words,
};
use crate::{
    crash::train as crash,
    error::{Error, Result},
    memory::Memory,
    models::{Cache, Models},
    report::{TARGET, count},
    stores::{Stores, sync::create_folder},
};

/// Settings of the run, for people and for a run that has no checkpoint yet.
pub(super) const RUN: &str = "train.json";
const LOCK: &str = "train.lock";
const VOCAB: &str = "vocab.txt";
/// Random numbers are a function of the step in 32 bits.
const MOST_STEPS: u64 = u32::MAX as u64;
/// Files of a run beside its checkpoints and the vocabulary, which may be the one that was given. A mix and a warm state
/// belong to the weights.
const FILES: [&str; 9] = [
    RUN,
    STEPS,
    VALID,
    "options.json",
    "weights.safetensors",
    "softmax.safetensors",
    model::DESCRIPTION,
    "mix.json",
    "warm_state.safetensors",
];
/// Most steps between two checkpoints, unless told otherwise: as bilm-tf.
const CHECKPOINT_EVERY: u64 = 1250;
/// Whether a path within the folder of a run is that of a file which the run writes, so that it is no text to read.
pub(super) fn is_of_run(path: &str) -> bool {
    let first = path.split('/').next().unwrap_or_default();
    let is_staged = first.starts_with('.');
    is_staged || FOLDERS.contains(&first) || FILES.contains(&path) || [LOCK, VOCAB].contains(&path)
}

/// Folders of a run.
const FOLDERS: [&str; 2] = [CHECKPOINTS, tensorboard::FOLDER];
/// More of the tokens outside of the vocabulary is worth a warning.
const MANY_UNKNOWN: f64 = 0.05;
/// How much further back words stand than by their counts: worth a warning, as in a vocabulary of other text, and when a
/// vocabulary is not sorted. (Words in random order: 9 with a thousand words and 56 with 50,000; counts of another text, each
/// changed by a factor of about e: 1.7.)
const SOME_DISORDER: f64 = 1.5;
const MUCH_DISORDER: f64 = 3.0;
/// A corpus of fewer shards, with at least so many blocks each, is read nearly in its own order.
const FEW_SHARDS: u64 = 10;
const MANY_BLOCKS: u64 = 4;

/// `train.json`
#[derive(Debug, Serialize, Deserialize)]
struct RunFile {
    version: u32,
    /// The program that began the run.
    elmo: String,
    settings: Settings,
    /// The run has made a checkpoint. If none is left, it must not begin anew by itself and replace its model.
    #[serde(default)]
    has_checkpoint: bool,
    /// Step of a best measurement whose weights are lost. It does not count any more, also in checkpoints that name it.
    #[serde(default)]
    lost_best: Option<u64>,
}

/// A job whose inputs were read and checked.
pub(super) struct Prepared {
    pub(super) job: TrainJob,
    pub(super) words: Arc<Words>,
    pub(super) corpus: Arc<Corpus>,
    pub(super) survey: Survey,
    pub(super) held_out: Option<HeldOut>,
    /// Different sentences of the held-out text that are also in the corpus, and all of them; short ones do not count.
    overlap: (usize, usize),
    pub(super) options: ModelOptions,
    pub(super) recipe: Recipe,
    pub(super) steps: u64,
    settings: Settings,
    initial: Initial,
}

/// Weights with which a run begins.
enum Initial {
    Random,
    /// With the softmax, if it is kept.
    Given(Box<Weights>, Option<(Tensor, Tensor)>),
}

impl Prepared {
    /// Reads vocabulary, corpus and model. Shards that are what `known` says are not read again.
    ///
    /// # Errors
    /// Whatever is wrong with them, with what to do.
    pub(super) async fn new(job: TrainJob, stores: &Stores, known: &[Shard]) -> Result<Self> {
        let existing = existing(&job, stores).await?;
        let words = Arc::new(words(&job, existing.as_ref()).await?);
        check_words(&job, words.len())?;
        let (mut options, initial, init) = initial(&job, existing, &words)?;
        options.text = job.text.record;
        let reading = Reading {
            tokenizer: job.text.tokenizer,
            sentences: job.text.sentences,
            block_sentences: job.text.block_sentences,
        };
        let run = stores.locate(&job.output.to_string_lossy())?;
        let shards = |inputs, order| Shards {
            inputs,
            run: Some(&run),
            column: &job.text.column,
            reading,
            order,
            seed: job.recipe.seed,
            skip_bad_rows: job.text.skip_bad_rows,
        };
        let corpus = Arc::new(Corpus::open(stores, shards(&job.shards, job.order), &words).await?);
        let (mut held_out, mut hashes, mut long_sentences) = (None, Hashes::None, 0);
        if !job.valid.is_empty() {
            let text = Arc::new(Corpus::open(stores, shards(&job.valid, Order::Bilm), &words).await?);
            let wanted = Wanted { hashes: Hashes::All, lengths: true };
            let survey = text.survey(&wanted, &[], job.threads).await?;
            long_sentences = survey.hashes.len();
            hashes = Hashes::Common(Arc::new(survey.hashes));
            held_out = Some(HeldOut::new(text, &words, survey.shards, &survey.lengths));
        }
        let survey = corpus.survey(&Wanted { hashes, lengths: false }, known, job.threads).await?;
        let of_step = (job.recipe.rows * job.recipe.positions) as u64;
        let steps = job.until.steps(survey.predictions(), of_step);
        if steps > MOST_STEPS {
            return Err(Error::usage(
                format!("the run has {} steps, and at most {} can be made", count(steps), count(MOST_STEPS)),
                "give fewer --steps or --epochs, or more --rows",
            ));
        }
        let recipe = Recipe { schedule: schedule_for(job.recipe.schedule, steps), ..job.recipe.clone() };
        let valid: &[Shard] = held_out.as_ref().map_or(&[], |text| &text.shards);
        let settings = Settings::new(&job, &recipe, &options.canonical_json(), &init, &words.sha256, valid);
        let overlap = (survey.hashes.len(), long_sentences);
        let prepared =
            Self { job, words, corpus, survey, held_out, overlap, options, recipe, steps, settings, initial };
        if known.is_empty() {
            prepared.check_sorted()?;
        }
        Ok(prepared)
    }

    /// The trainer of a run that begins.
    ///
    /// # Errors
    /// [`TrainFault::Step`] when the recipe contradicts itself or the device has no room.
    pub(super) fn trainer(&self) -> Result<Trainer> {
        let (words, seed) = (self.words.len(), self.recipe.seed);
        let model = match &self.initial {
            Initial::Random => LanguageModel::initial(&self.options, words, seed),
            Initial::Given(weights, head) => {
                let width = self.options.lstm.projection_dim;
                let head = head.clone().unwrap_or_else(|| elmo::train::initial_softmax(words, width, seed));
                LanguageModel { weights: (**weights).clone(), softmax_weight: head.0, softmax_bias: head.1 }
            }
        };
        let trainer = Trainer::new(&self.options, self.recipe.clone(), self.resources(), &model);
        Ok(trainer.map_err(TrainFault::Step)?)
    }

    /// Parameters of the biLM, and of the softmax.
    pub(super) fn parameters(&self) -> [u64; 2] {
        [self.options.parameters(), (self.words.len() * (self.options.lstm.projection_dim + 1)) as u64]
    }

    /// Bytes of the parameters and the state of the optimiser.
    pub(super) fn state_bytes(&self) -> u64 {
        self.room().state
    }

    /// Bytes that a process is expected to take of the memory of the host, or of the GPU.
    pub(super) fn needed_bytes(&self) -> u64 {
        match self.job.device {
            DeviceName::Cpu => self.room().on_host(),
            DeviceName::Cuda(_) => self.room().on_device(),
        }
    }

    fn room(&self) -> Room {
        let TrainJob { device, threads, part_rows, .. } = self.job;
        let (all, processes) = (self.recipe.rows, self.job.processes);
        let rows = all.div_ceil(processes).min(part_rows);
        let share = |process: usize| process * all / processes..(process + 1) * all / processes;
        let replicas = |process: usize| self.recipe.replicas_of(&share(process)).len();
        let replicas = (0..processes).map(replicas).max().unwrap_or(1);
        let (options, recipe, words) = (&self.options, &self.recipe, self.words.len());
        let samples = recipe.classes.samples(words);
        Room::of(&Load { options, recipe, words, samples, replicas, device, threads, rows })
    }

    /// Refuses what cannot fit before anything is allocated: the system would kill the process later. All processes of this
    /// machine need as much, of the memory that they share on a CPU.
    ///
    /// # Errors
    /// [`TrainFault::Memory`].
    pub(super) fn check_memory(&self) -> Result<()> {
        let (device, state) = (self.job.device, self.state_bytes());
        let processes = if device == DeviceName::Cpu { self.job.neighbours } else { 1 };
        let needed = self.needed_bytes().saturating_mul(processes as u64);
        match crash::free_memory().or_else(|| free_memory(device)) {
            Some(available) if needed > available => {
                Err(TrainFault::Memory { state, needed, available, processes, device }.into())
            }
            _ => Ok(()),
        }
    }

    /// How much further back the words stand than by their counts in the corpus, if negatives are drawn by rank. The counts of
    /// shards that were not read again are not known.
    fn disorder(&self) -> Option<f64> {
        let is_sampled = self.recipe.classes.samples(self.words.len()).is_some();
        let counted: u64 = self.survey.counts.iter().sum();
        (is_sampled && counted == self.survey.tokens()).then(|| self.words.disorder(&self.survey.counts))
    }

    /// Refuses a vocabulary in another order than that of frequency for a new model. That of a model that goes on is the one
    /// it has.
    fn check_sorted(&self) -> Result<()> {
        let is_new = matches!(self.initial, Initial::Random);
        if !is_new || self.disorder().is_none_or(|disorder| disorder <= MUCH_DISORDER) {
            return Ok(());
        }
        let word = |(id, n): (usize, u64)| {
            let word = self.words.list().get(id).map_or("", AsRef::as_ref);
            format!("{word:?} in line {} is counted {} times", id + 1, count(n))
        };
        let found = self.words.first_out_of_order(&self.survey.counts);
        let words = found.map_or(String::new(), |[first, later]| format!("{}, and {}", word(first), word(later)));
        Err(TrainFault::Unsorted { file: vocabulary(&self.job), words }.into())
    }

    /// The trainer of a run that resumes from a checkpoint.
    ///
    /// # Errors
    /// As [`Prepared::snapshot`] and [`Prepared::trainer`].
    fn restored(&self, found: &Found) -> Result<Trainer> {
        let snapshot = self.snapshot(found)?;
        let trainer = Trainer::restore(&self.options, self.recipe.clone(), self.resources(), &snapshot);
        together(&self.job.group, trainer.map_err(|error| TrainFault::Step(error).into()))
    }

    /// Goes back to a checkpoint, in the memory that the run has already: room for a second trainer was not asked for.
    ///
    /// # Errors
    /// As [`Prepared::restored`].
    pub(super) fn reset(&self, trainer: &mut Trainer, found: &Found) -> Result<()> {
        let snapshot = self.snapshot(found)?;
        together(&self.job.group, trainer.reset(&snapshot).map_err(|error| TrainFault::Step(error).into()))
    }

    /// The tensors of a checkpoint, which process 0 reads.
    ///
    /// # Errors
    /// [`Error::Io`] when the checkpoint cannot be read; [`TrainFault::Step`] when the processes cannot exchange it.
    fn snapshot(&self, found: &Found) -> Result<Snapshot> {
        let group = &self.job.group;
        let read = || found.snapshot().map(Some).map_err(|source| Error::io(&found.path, source));
        let snapshot = together(group, if group.is_first() { read() } else { Ok(None) })?;
        Ok(Snapshot::shared(snapshot, group).map_err(TrainFault::Step)?)
    }

    fn resources(&self) -> Resources {
        let TrainJob { device, threads, part_rows, .. } = self.job;
        Resources { device, threads, part_rows, group: self.job.group.clone() }
    }

    /// The state of a run that begins.
    pub(super) fn beginning(&self) -> RunState {
        let streams = StreamState::begin(self.words.boundaries(), self.recipe.rows, self.recipe.positions);
        RunState::begin(self.settings.clone(), self.survey.shards.clone(), streams, self.remarks())
    }

    /// The same job with the rows of one of its processes alone, to be measured.
    pub(super) fn of_one_process(mut self) -> Self {
        let rows = self.recipe.rows.div_ceil(self.job.processes);
        self.recipe.replica_rows = self.recipe.replica_rows.filter(|&of_each| rows.is_multiple_of(of_each));
        self.recipe.rows = rows;
        self.recipe.lanes = self.recipe.lanes.min(rows);
        self.job.processes = 1;
        self
    }

    /// Steps between two checkpoints.
    pub(super) fn checkpoint_every(&self) -> u64 {
        let by_length = (self.steps / 10).clamp(1, CHECKPOINT_EVERY);
        self.job.checkpoint_every.unwrap_or(by_length)
    }

    /// Steps between two measurements of the held-out text.
    pub(super) fn eval_every(&self) -> u64 {
        self.job.eval_every.unwrap_or_else(|| self.checkpoint_every())
    }

    /// What determines the order in which the processes of a run exchange something, beside the settings: it may change when a
    /// run goes on, but must be the same in all processes.
    fn order_of_calls(&self) -> Vec<(String, String)> {
        let patience = self.job.patience.map_or("none".to_owned(), |patience| patience.to_string());
        [
            ("steps", self.steps.to_string()),
            ("checkpoint-every", self.checkpoint_every().to_string()),
            ("eval-every", self.eval_every().to_string()),
            ("patience", patience),
            ("on-spike", self.job.on_spike.to_string()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into()
    }

    pub(super) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What of the settings is not as in the run, and only changes the rounding of sums.
    fn changes(&self, of_run: &Settings) -> Option<String> {
        let changes = of_run.rounding_differences(&self.settings);
        let rows = self.recipe.rows;
        let window = match self.job.processes {
            1 => String::new(),
            processes => {
                format!("; each of the {processes} processes takes about {} of the {rows} rows", rows / processes)
            }
        };
        (!changes.is_empty()).then(|| {
            let changes = changes.join("; ");
            format!(
                "this run goes on with sums in another order, so its numbers are rounded otherwise: {changes}{window}"
            )
        })
    }

    /// A warning of a corpus that is read nearly in its own order.
    fn few_shards(&self) -> Option<String> {
        let (shards, of_block) = (self.survey.shards.len() as u64, self.job.text.block_sentences as u64);
        let blocks: u64 = self.survey.shards.iter().map(|shard| shard.sentences.div_ceil(of_block)).sum();
        let is_shuffled = self.job.order == Order::Shuffle;
        (is_shuffled && shards < FEW_SHARDS && blocks >= shards * MANY_BLOCKS).then(|| {
            format!(
                "the corpus has {blocks} blocks of {} sentences in {shards} shards, and the blocks of a shard are read in its own \
                 order: if the text is sorted, by source or date for example, deal its sentences over more shards \
                 (split -n r/64)",
                count(of_block)
            )
        })
    }

    /// A warning of a learning rate that does not reach its peak.
    fn long_warm_up(&self) -> Option<String> {
        let warm_up = match self.recipe.schedule {
            Schedule::Constant => 0,
            Schedule::Cosine { warm_up, .. } | Schedule::InverseSquareRoot { warm_up } => warm_up,
        };
        (warm_up >= self.steps && warm_up > 0).then(|| {
            let (rises, steps) = (count(warm_up), count(self.steps));
            format!("the learning rate rises for {rises} steps, and the run has {steps}: it never reaches its peak")
        })
    }

    /// Remarks on the texts that do not keep a run from beginning.
    pub(super) fn remarks(&self) -> Vec<String> {
        let (tokens, unknown) = (self.survey.tokens(), self.survey.unknown());
        let share = unknown as f64 / tokens as f64;
        let mut remarks = Vec::new();
        if share > MANY_UNKNOWN {
            remarks.push(format!(
                "{:.1} % of the tokens of the corpus are not in the vocabulary: is it a vocabulary of this text, read with \
                 --tokenizer {}?",
                100.0 * share,
                self.job.text.tokenizer
            ));
        }
        if self.survey.bad_rows() > 0 {
            remarks.push(format!("{} rows of the corpus are not text and are left out", count(self.survey.bad_rows())));
        }
        if self.survey.long > 0 {
            remarks.push(format!(
                "{} sentences of the corpus have more than {} tokens: put one sentence on a line, or give --sentences split",
                count(self.survey.long),
                count(LONG as u64),
            ));
        }
        remarks.extend(self.few_shards());
        remarks.extend(self.long_warm_up());
        if let Some(disorder) = self.disorder().filter(|disorder| *disorder > SOME_DISORDER) {
            remarks.push(format!(
                "the vocabulary is not sorted by the frequency of words in this corpus: their ranks are {disorder:.1} times \
                 those that they should have, and negatives are drawn by rank; elmo vocab writes a sorted one, and \
                 --samples 0 takes all words"
            ));
        }
        let (common, all) = self.overlap;
        if common > 0 {
            let matters = if common * 100 > all { "; its perplexity is too low" } else { "" };
            remarks.push(format!(
                "{} of the {} different sentences of the held-out text with at least {LONG_ENOUGH} tokens are also in the \
                 corpus{matters}",
                count(common as u64),
                count(all as u64),
            ));
        }
        if let Some(text) = &self.held_out {
            if text.bad_rows() > 0 {
                remarks.push(format!(
                    "{} rows of the held-out text are not text and are left out",
                    count(text.bad_rows())
                ));
            }
            let unknown: u64 = text.shards.iter().map(|shard| shard.unknown).sum();
            let tokens: u64 = text.shards.iter().map(|shard| shard.tokens).sum();
            if unknown as f64 > 2.0 * MANY_UNKNOWN * tokens as f64 {
                let percent = 100.0 * unknown as f64 / tokens as f64;
                remarks.push(format!(
                    "{percent:.1} % of the tokens of the held-out text are not in the vocabulary, and <UNK> is easy to \
                     predict: its perplexity is not comparable with that of another vocabulary"
                ));
            }
        }
        remarks
    }
}

/// Refuses more processes on the CPU of this machine than its memory holds, before they are started. What their shares of a run
/// need is checked when they have met.
///
/// # Errors
/// [`TrainFault::Processes`].
pub fn check_processes(processes: usize) -> Result<()> {
    let needed = room::OF_A_PROCESS.saturating_mul(processes as u64);
    match crash::free_memory().or_else(|| free_memory(DeviceName::Cpu)) {
        Some(available) if needed > available => Err(TrainFault::Processes { processes, needed, available }.into()),
        _ => Ok(()),
    }
}

/// Bytes of the memory of a device that are free, where the system tells.
pub(super) fn free_memory(device: DeviceName) -> Option<u64> {
    match device {
        DeviceName::Cpu => Memory::now().map(|memory| memory.available),
        gpu => gpu.free_memory(),
    }
}

/// Refuses negatives that cannot be drawn, and a vocabulary of another size than the options file says.
fn check_words(job: &TrainJob, words: usize) -> Result<()> {
    if let Some((named, file)) = job.words.as_ref().filter(|(named, _)| *named != words) {
        return Err(Error::usage(
            format!("{file}: `n_tokens_vocab` is {named}, but {} has {words} words", vocabulary(job)),
            "give the vocabulary of these options, or remove the key",
        ));
    }
    match job.recipe.classes {
        Classes::Sampled(samples) if samples >= words => Err(Error::usage(
            format!("{samples} negatives cannot be drawn from a vocabulary of {words} words"),
            "give fewer --samples, or --samples 0 for the softmax over all words; --preset bilm needs a larger vocabulary",
        )),
        _ => Ok(()),
    }
}

/// A model that exists, and its LM head if it has one.
type Existing = (ModelData, Option<LmHeadData>);

/// The model with which the run begins, if it is an existing one.
async fn existing(job: &TrainJob, stores: &Stores) -> Result<Option<Existing>> {
    let ModelSource::Model(spec) = &job.model else { return Ok(None) };
    let cache = Cache::from_env();
    let data = Models { stores, cache: &cache, offline: job.offline }.resolve(spec).await?;
    let head = data.lm_head.as_ref().map(|files| files.read(data.options.lstm.projection_dim)).transpose()?;
    Ok(Some((data, head)))
}

/// The vocabulary: the one that was given, or that of the model.
async fn words(job: &TrainJob, existing: Option<&Existing>) -> Result<Words> {
    match (&job.vocab, existing) {
        (Some(vocab), _) => Words::read(vocab).await,
        (None, Some((_, Some(head)))) => Ok(Words::of_list(head.words().to_vec())),
        (None, Some((model, None))) => Err(elmo::Error::from(LmHeadError::Missing(model.name.clone())).into()),
        (None, None) => Err(Error::usage("no vocabulary was given", "elmo vocab writes one")),
    }
}

/// The vocabulary in messages.
fn vocabulary(job: &TrainJob) -> String {
    job.vocab.as_ref().map_or_else(|| "the vocabulary of the model".to_owned(), ToString::to_string)
}

/// Sizes, initial weights, and what they are called among the settings.
fn initial(job: &TrainJob, existing: Option<Existing>, words: &Words) -> Result<(ModelOptions, Initial, String)> {
    match &job.model {
        ModelSource::Random(options) => Ok((options.clone(), Initial::Random, "random".to_owned())),
        ModelSource::Model(spec) => {
            let (data, head) = existing.ok_or_else(|| Error::Failed(format!("{spec} was not read")))?;
            if head.as_ref().is_some_and(|head| !words.are(head.words().iter().map(String::as_str))) {
                return Err(Error::usage(
                    format!("the vocabulary of {spec} is another one than {}", vocabulary(job)),
                    format!(
                        "the softmax of that model has a row for each of its words: elmo finetune --model {spec} uses its own \
                         vocabulary; to begin with the weights and a new softmax, remove softmax.safetensors and vocab.txt \
                         from a copy of the model"
                    ),
                ));
            }
            let softmax = head.map(|head: LmHeadData| (head.weight().clone(), head.bias().clone()));
            let kept = if softmax.is_some() { "with its softmax" } else { "with a new softmax" };
            let init = format!("{} {kept}", data.fingerprint);
            Ok((data.options, Initial::Given(Box::new(data.weights), softmax), init))
        }
        ModelSource::Tensors { options, path } => {
            let (weights, softmax) = tensors_of(path, options, words.len())?;
            let kept = if softmax.is_some() { "with its softmax" } else { "with a new softmax" };
            let init = format!("{} {kept}", Fingerprint::of(options, &weights));
            Ok((options.clone(), Initial::Given(Box::new(weights), softmax), init))
        }
    }
}

/// The weights of a safetensors file, and the softmax if the file has one.
fn tensors_of(path: &Path, options: &ModelOptions, words: usize) -> Result<(Weights, Option<(Tensor, Tensor)>)> {
    let mut plan = options.weight_plan();
    let read = |plan: &[TensorSpec]| safetensors::read_file(path, plan).map_err(elmo::Error::from);
    let loaded = read(&plan)?;
    if !loaded.surplus.iter().any(|name| name.starts_with("softmax/")) {
        return Ok((loaded.weights, None));
    }
    let width = options.lstm.projection_dim;
    plan.push(TensorSpec { name: "softmax/W".to_owned(), shape: vec![words, width] });
    plan.push(TensorSpec { name: "softmax/b".to_owned(), shape: vec![words] });
    let mut weights = read(&plan)?.weights;
    let softmax = weights.remove("softmax/W").zip(weights.remove("softmax/b"));
    Ok((weights, softmax))
}

/// The folder of a run, which no other process writes to.
struct RunFolder {
    path: PathBuf,
    /// Locked until the process ends.
    _lock: File,
}

impl RunFolder {
    fn lock(path: &Path) -> Result<Self> {
        let failed = |source| Error::io(path, source);
        create_folder(path).map_err(failed)?;
        let lock = File::create(path.join(LOCK)).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {
                if path.join(RUN).exists() {
                    model::finish_export(path)?;
                }
                Ok(Self { path: path.to_owned(), _lock: lock })
            }
            Err(TryLockError::WouldBlock) => Err(TrainFault::Locked { output: path.to_owned() }.into()),
            Err(TryLockError::Error(source)) => Err(failed(source)),
        }
    }

    /// Removes an earlier run.
    fn clear(&self) -> Result<()> {
        // If it is interrupted, the run begins anew.
        if let Ok(Some(run)) = run_of(&self.path) {
            write_run(&self.path, &RunFile { has_checkpoint: false, ..run })?;
        }
        // The file that makes the folder a run is the last one, so that a clearing that was interrupted is repeated.
        let remove = |name: &&str| model::ignore_missing(fs::remove_file(self.path.join(name)));
        let remove_folder = |name: &&str| model::ignore_missing(fs::remove_dir_all(self.path.join(name)));
        (FOLDERS.iter().try_for_each(remove_folder))
            .and_then(|()| model::clear_exports(&self.path))
            .and_then(|()| FILES.iter().rev().try_for_each(remove))
            .map_err(|source| Error::io(&self.path, source))
    }

    fn begin(&self, settings: &Settings) -> Result<()> {
        let (elmo, settings) = (env!("CARGO_PKG_VERSION").to_owned(), settings.clone());
        write_run(&self.path, &RunFile { version: 1, elmo, settings, has_checkpoint: false, lost_best: None })
    }
}

fn write_run(folder: &Path, run: &RunFile) -> Result<()> {
    let path = folder.join(RUN);
    let text = serde_json::to_vec_pretty(run).map_err(|e| Error::Failed(e.to_string()))?;
    model::write_file(&path, &text).map_err(|source| Error::Io { path, source })
}

/// Notes that the run in a folder has made a checkpoint.
///
/// # Errors
/// [`Error::Io`] when the disk fails.
pub(super) fn note_checkpoint(folder: &Path) -> Result<()> {
    match run_of(folder)? {
        Some(run) if !run.has_checkpoint => write_run(folder, &RunFile { has_checkpoint: true, ..run }),
        _ => Ok(()),
    }
}

/// Notes that the weights of the best measurement, at this step, are lost.
///
/// # Errors
/// As [`note_checkpoint`].
pub(super) fn note_lost(folder: &Path, step: u64) -> Result<()> {
    run_of(folder)?.map_or(Ok(()), |run| write_run(folder, &RunFile { lost_best: Some(step), ..run }))
}

/// The step that was given to [`note_lost`].
///
/// # Errors
/// As [`note_checkpoint`].
pub(super) fn lost_best(folder: &Path) -> Result<Option<u64>> {
    Ok(run_of(folder)?.and_then(|run| run.lost_best))
}

/// Refuses a run without a checkpoint that has made one. A run that was killed before its first checkpoint begins again, although
/// it may have a journal and the model of a measurement.
fn check_lost(folder: &Path) -> Result<()> {
    match run_of(folder)?.is_some_and(|run| run.has_checkpoint) {
        true => Err(TrainFault::Lost { folder: folder.join(CHECKPOINTS) }.into()),
        false => Ok(()),
    }
}

/// The settings of the run in a folder, if one has begun.
fn settings_of(folder: &Path) -> Result<Option<Settings>> {
    Ok(run_of(folder)?.map(|run| run.settings))
}

/// The run in a folder, if one has begun.
fn run_of(folder: &Path) -> Result<Option<RunFile>> {
    let path = folder.join(RUN);
    match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Io { path, source }),
        Ok(bytes) => match elmo::json::from_slice::<RunFile>(&bytes) {
            Ok(run) => Ok(Some(run)),
            Err(reason) => {
                let help = "restore it, or start over with --overwrite";
                Err(Error::Check { message: format!("{}: {reason}", path.display()), help: Some(help.to_owned()) })
            }
        },
    }
}

/// Refuses a folder that holds a model or other files of the same names, but no run.
fn check_foreign(folder: &Path) -> Result<()> {
    let names = FILES.iter().chain(&FOLDERS).chain(&["weights.hdf5"]);
    let found = names.into_iter().find(|name| folder.join(name).exists());
    match found.filter(|_| !folder.join(RUN).exists()) {
        Some(file) => Err(TrainFault::Foreign { output: folder.to_owned(), file: (*file).to_owned() }.into()),
        None => Ok(()),
    }
}

/// A job that was checked as a run checks it, without its output being changed, and the step from which it would go on.
pub(super) async fn look(job: TrainJob, stores: &Stores) -> Result<(Prepared, Option<u64>)> {
    let (output, overwrite) = (job.output.clone(), job.overwrite);
    let checkpoints = Checkpoints::new(&output, job.keep_checkpoints);
    check_foreign(&output)?;
    let Last { found, copied, .. } = last(&job, &checkpoints).await?;
    let begun = if overwrite { None } else { settings_of(&output)? };
    let further = newer(copied.as_ref(), found.as_ref(), &checkpoints);
    let resumed = further.as_ref().or(found.as_ref());
    let job = dealt(job, resumed.map(|found| &found.state.settings).or(begun.as_ref()));
    let prepared = Prepared::new(job, stores, &[]).await?;
    check_vocab(&prepared)?;
    if !overwrite {
        check_same(&prepared, begun.as_ref(), found.as_ref())?;
        check_copy(&prepared, copied.as_ref())?;
    }
    Ok((prepared, resumed.map(|found| found.state.counters.step)))
}

/// Refuses to replace another vocabulary than that of a run.
fn check_vocab(prepared: &Prepared) -> Result<()> {
    let output = &prepared.job.output;
    let text = fs::read(output.join(VOCAB)).ok().filter(|_| !output.join(RUN).exists());
    let is_same = |text: Vec<u8>| prepared.words.are(String::from_utf8_lossy(&text).lines());
    match text.is_some_and(|text| !is_same(text)) {
        true => Err(TrainFault::Foreign { output: output.clone(), file: VOCAB.to_owned() }.into()),
        false => Ok(()),
    }
}

/// Trains until the end of the run, or until `stop`: then the run resumes from there when the same job is given again.
///
/// # Errors
/// [`TrainFault`]; those of the corpus, the vocabulary and the model, found before the first step as far as they can be;
/// [`TrainFault::Interrupted`] after `stop`.
pub async fn train(
    job: TrainJob,
    stores: &Stores,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<TrainReport> {
    let group = job.group.clone();
    let outcome = trained(job, stores, stop).await;
    let concluded = tokio::task::spawn_blocking(move || concluded(&group, outcome));
    concluded.await.map_err(|e| Error::Failed(format!("the training thread died: {e}")))?
}

async fn trained(
    job: TrainJob,
    stores: &Stores,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<TrainReport> {
    let (overwrite, group, output) = (job.overwrite, job.group.clone(), job.output.clone());
    let is_first = group.is_first();
    let busy = group.busy();
    let checkpoints = Checkpoints::new(&output, job.keep_checkpoints);
    // Only process 0 needs the folder.
    let opened = if is_first { open(&job, &checkpoints).await } else { Ok(Opened::default()) };
    let Opened { mut locked, last, begun } = together(&group, opened)?;
    let Last { found, copied, is_checked } = last;
    let on_disk = found.as_ref().map(|found| found.state.clone());
    let further = newer(copied.as_ref(), found.as_ref(), &checkpoints);
    let is_copied = further.is_some();
    let (found, begun): (Option<Found>, Option<Settings>) = shared(&group, (further.or(found), begun))?;
    let of_run = found.as_ref().map(|found| &found.state.settings).or(begun.as_ref());
    let job = dealt(job, of_run);
    let known = found.as_ref().map_or(&[][..], |found| &found.state.corpus);
    let prepared = together(&group, Prepared::new(job, stores, known).await)?;
    together(&group, check_equal(&prepared))?;
    let checked = || {
        check_vocab(&prepared)?;
        if overwrite {
            return Ok(());
        }
        check_copy(&prepared, copied.as_ref())?;
        match locked.is_some() {
            true => check_state(&prepared, &output, begun.as_ref(), on_disk.as_ref()),
            false => Ok(()),
        }
    };
    together(&group, if is_first { checked() } else { Ok(()) })?;
    if is_first {
        let made = found.as_ref().and_then(|found| found.state.remarks.clone());
        made.unwrap_or_else(|| prepared.remarks()).iter().for_each(|remark| tracing::warn!("{remark}"));
        of_run.and_then(|of_run| prepared.changes(of_run)).iter().for_each(|change| tracing::warn!("{change}"));
    }
    if let Some(copied) = copied.filter(|_| is_copied) {
        locked = together(&group, fetch(&prepared, &checkpoints, locked, &copied).await.map(Some))?;
    } else {
        together(&group, Ok(()))?;
    }
    // Before one process takes what the others need, and before anything is removed: the model must fit the device.
    together(&group, prepared.check_memory())?;
    let trainer = match &found {
        Some(found) => prepared.restored(found)?,
        None => together(&group, prepared.trainer())?,
    };
    let late = match (is_first, locked) {
        (false, _) => Ok((None, found, trainer)),
        (true, Some(folder)) => Ok((Some(folder), found, trainer)),
        (true, None) => {
            lock_late(&prepared, &checkpoints, trainer).map(|(folder, found, trainer)| (Some(folder), found, trainer))
        }
    };
    let (folder, found, trainer) = together(&group, late)?;
    let copies = copies(&prepared.job).filter(|_| is_first);
    let begun = begin(&prepared, folder.as_ref(), found.as_ref(), copies.as_ref()).await;
    together(&group, begun)?;
    let target = copies.map(|copies| Target { copies, is_checked: is_checked || overwrite });
    drop(busy);
    let stopped = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stopped);
    tokio::spawn(async move {
        stop.await;
        flag.store(true, Ordering::Relaxed);
    });
    let runtime = Handle::current();
    let run = tokio::task::spawn_blocking(move || {
        let _entered = runtime.enter();
        let outcome = Run::new(prepared, checkpoints, found, trainer, target, stopped).and_then(Run::run);
        drop(folder);
        outcome
    });
    run.await.map_err(|e| Error::Failed(format!("the training thread died: {e}")))?
}

/// Makes the folder that of the run, unless it goes on with one.
async fn begin(
    prepared: &Prepared,
    folder: Option<&RunFolder>,
    found: Option<&Found>,
    copies: Option<&Copies>,
) -> Result<()> {
    let Some(folder) = folder else { return Ok(()) };
    if prepared.job.overwrite {
        // Otherwise a new machine would go on with the earlier run.
        if let Some(copies) = copies {
            copies.clear().await?;
        }
        folder.clear()?;
    }
    if found.is_none() { folder.begin(prepared.settings()) } else { Ok(()) }
}

/// What is there of a run.
#[derive(Default)]
struct Opened {
    /// Its folder, locked if it exists.
    locked: Option<RunFolder>,
    last: Last,
    /// The settings of the run.
    begun: Option<Settings>,
}

/// The last checkpoints of a run.
#[derive(Default)]
struct Last {
    /// On the disk.
    found: Option<Found>,
    /// In the store.
    copied: Option<Copied>,
    /// The store was asked.
    is_checked: bool,
}

async fn open(job: &TrainJob, checkpoints: &Checkpoints) -> Result<Opened> {
    let output = &job.output;
    check_foreign(output)?;
    // A folder is created when everything else is right.
    let locked = if output.exists() { Some(RunFolder::lock(output)?) } else { None };
    let last = last(job, checkpoints).await?;
    let begun = locked.as_ref().filter(|_| !job.overwrite).map_or(Ok(None), |_| settings_of(output))?;
    Ok(Opened { locked, last, begun })
}

/// The last checkpoints, unless the run starts over. That copies cannot be made is an error only if there is no checkpoint on the disk.
async fn last(job: &TrainJob, checkpoints: &Checkpoints) -> Result<Last> {
    let last = if job.overwrite { Last::default() } else { newest(job, checkpoints).await? };
    if !job.overwrite && last.found.is_none() && last.copied.is_none() {
        check_lost(&job.output)?;
    }
    // A store that has not answered is not asked again.
    if let Some(copies) = copies(job).filter(|_| job.overwrite || last.is_checked)
        && let Err(error) = copies.check_writable().await
    {
        if last.found.is_none() {
            return Err(error);
        }
        tracing::warn!("{}; checkpoints will not be copied until this is corrected", error.report());
    }
    Ok(last)
}

/// The last checkpoints. A store that does not answer is an error only if there is none on the disk.
async fn newest(job: &TrainJob, checkpoints: &Checkpoints) -> Result<Last> {
    let Some(copies) = copies(job) else { return Ok(Last { found: checkpoints.latest()?, ..Last::default() }) };
    match (checkpoints.latest(), copies.newest().await) {
        (Ok(found), Ok(copied)) => Ok(Last { found, copied, is_checked: true }),
        (Ok(found @ Some(_)), Err(error)) => {
            tracing::warn!("{}; resuming from the checkpoint on the disk", error.report());
            Ok(Last { found, ..Last::default() })
        }
        (Ok(None), Err(error)) => Err(error),
        (Err(damaged), Ok(copied @ Some(_))) => {
            tracing::warn!("{damaged}; taking the copy in {}", copies.folder());
            Ok(Last { found: None, copied, is_checked: true })
        }
        (Err(damaged), _) => Err(damaged.into()),
    }
}

/// The copies of the checkpoints of a run, if they are wanted.
fn copies(job: &TrainJob) -> Option<Copies> {
    job.upload.as_ref().map(|folder| Copies::new(folder.clone(), job.keep_checkpoints))
}

/// The copy, as it will be on the disk, if it is of a later step than what is there.
fn newer(copied: Option<&Copied>, found: Option<&Found>, checkpoints: &Checkpoints) -> Option<Found> {
    let step = |found: &Found| found.state.counters.step;
    let copied = copied?.found(checkpoints);
    Some(copied).filter(|copied| found.is_none_or(|found| step(found) < step(copied)))
}

/// Copies the run from the store to its folder, which is created if it does not exist.
async fn fetch(
    prepared: &Prepared,
    checkpoints: &Checkpoints,
    locked: Option<RunFolder>,
    copied: &Copied,
) -> Result<RunFolder> {
    let output = &prepared.job.output;
    let folder = match locked {
        Some(folder) => folder,
        None => {
            let folder = RunFolder::lock(output)?;
            if output.join(RUN).exists() {
                return Err(TrainFault::Begun { output: output.clone() }.into());
            }
            check_foreign(output)?;
            folder
        }
    };
    let step = copied.state.counters.step;
    tracing::info!(target: TARGET, "resuming from step {step}, whose checkpoint is copied from {}", copied.folder());
    folder.begin(&copied.state.settings)?;
    copied.fetch(output, checkpoints).await?;
    Ok(folder)
}

/// The job with the window of the run: processes that go on with it share its rows, whatever their number is.
fn dealt(mut job: TrainJob, of_run: Option<&Settings>) -> TrainJob {
    if let Some((rows, part_rows)) = of_run.and_then(Settings::rows)
        && part_rows == job.part_rows
    {
        job.recipe.rows = rows;
        job.recipe.lanes = job.recipe.lanes.min(rows);
    }
    job
}

/// Refuses a process that reads other text, or has other settings, than process 0.
fn check_equal(prepared: &Prepared) -> Result<()> {
    let group = &prepared.job.group;
    let (settings, shards): (Settings, Vec<Shard>) =
        shared(group, (prepared.settings.clone(), prepared.survey.shards.clone()))?;
    let mut differing = settings.differences(&prepared.settings);
    let own = prepared.order_of_calls();
    let first: Vec<(String, String)> = shared(group, own.clone())?;
    let unequal = first.iter().zip(&own).filter(|(first, own)| first != own);
    differing.extend(unequal.map(|((name, first), (_, own))| format!("{name}: {first} in process 0, {own} here")));
    differing.extend(settings.rounding_differences(&prepared.settings));
    differing.extend(differences(&shards, &prepared.survey.shards));
    match differing.is_empty() {
        true => Ok(()),
        false => Err(TrainFault::Unequal { rank: group.rank(), differences: differing }.into()),
    }
}

/// Creates and locks a folder that did not exist before the corpus was read. Another process may have begun a run there, and
/// ended it, in the meantime: then this one goes on with that run.
fn lock_late(prepared: &Prepared, checkpoints: &Checkpoints, trainer: Trainer) -> Result<LockedRun> {
    crash::before_lock();
    let output = &prepared.job.output;
    let folder = RunFolder::lock(output)?;
    if prepared.job.overwrite {
        return Ok((folder, None, trainer));
    }
    check_foreign(output)?;
    check_vocab(prepared)?;
    let found = checkpoints.latest()?;
    if found.is_some() && !prepared.job.group.is_single() {
        // The other processes have begun already.
        return Err(TrainFault::Begun { output: output.clone() }.into());
    }
    if found.is_none() {
        check_lost(output)?;
    }
    check_same(prepared, settings_of(output)?.as_ref(), found.as_ref())?;
    let trainer = match &found {
        Some(found) => prepared.restored(found)?,
        None => trainer,
    };
    Ok((folder, found, trainer))
}

type LockedRun = (RunFolder, Option<Found>, Trainer);

/// Refuses to go on with other settings or another corpus.
fn check_same(prepared: &Prepared, begun: Option<&Settings>, found: Option<&Found>) -> Result<()> {
    check_state(prepared, &prepared.job.output, begun, found.map(|found| &found.state))
}

/// Refuses copies of a run with other settings or another corpus.
fn check_copy(prepared: &Prepared, copied: Option<&Copied>) -> Result<()> {
    let place = prepared.job.upload.as_ref().map(|folder| PathBuf::from(folder.to_string())).unwrap_or_default();
    copied.map_or(Ok(()), |copied| check_state(prepared, &place, None, Some(&copied.state)))
}

fn check_state(prepared: &Prepared, place: &Path, begun: Option<&Settings>, state: Option<&RunState>) -> Result<()> {
    let output = place.to_owned();
    let settings = state.map(|state| &state.settings).or(begun);
    let differing = settings.map_or(Vec::new(), |settings| settings.differences(prepared.settings()));
    let is_text = |line: &String| line.starts_with("held-out text:");
    if differing.iter().any(|line| !is_text(line)) {
        return Err(TrainFault::Differs { output, differences: differing }.into());
    }
    if !differing.is_empty() {
        return Err(TrainFault::Corpus { output, what: "held-out text", differences: differing }.into());
    }
    let differing = state.map_or(Vec::new(), |state| differences(&state.corpus, &prepared.survey.shards));
    match differing.is_empty() {
        true => Ok(()),
        false => Err(TrainFault::Corpus { output, what: "corpus", differences: differing }.into()),
    }
}
