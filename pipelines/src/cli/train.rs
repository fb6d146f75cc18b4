//! `elmo train`: its arguments. The run is in [`crate::train`].

use std::{
    env, fs,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use clap::{ArgAction, Args, ValueHint, builder::BoolishValueParser};
use elmo::{
    EmbedSpec,
    engine::{DeviceChoice, Precision, parse_devices},
    model::{DeviceName, cuda_devices, resolve_devices},
    options::TextOptions,
    spec::{SentenceMode, SpecError, StateMode, TokenizerKind},
    train::{Classes, Group, Limits, Meeting, Optimizer, RUN, Recipe, Schedule, keep_freed_memory},
};

use super::{
    CommonArgs,
    args::{block_on, fraction, one_of, positive, threads},
    print, print_json,
    processes::{self, Places},
    shutdown,
};
use crate::{
    diagnose::sizes::Size,
    error::{Error, Exit, Fault, Result},
    models::{ModelSpec, Place},
    redact::redact,
    stores::{Location, Stores},
    train::{
        ModelSource, OnSpike, OptionsFile, Order, TextSettings, TrainFault, TrainJob, TrainReport, Until, UploadReport,
        check_processes, estimate, train, would_read_copies,
    },
};

/// Train a biLM on sharded text; the same command resumes an interrupted run exactly
///
/// The folder of the run is a model directory for every other command. On a CPU, a run that was interrupted and resumed
/// has the bits of one that was not, for any number of threads.
#[derive(Debug, Args)]
#[command(
    override_usage = "elmo train [OPTIONS] --shards <INPUT>... --vocab <FILE> --output <DIR>\n                  <--size <SIZE>|--options <FILE>|--init <MODEL>>",
    after_help = "\
Examples:
  elmo vocab --input 'corpus/shard-*.txt' --output vocab.txt --size 50000
  elmo train --shards 'corpus/shard-*.txt' --vocab vocab.txt --size tiny --epochs 3 --output model
  elmo train --shards corpus --vocab vocab.txt --size tiny --steps 9 --output trial --dry-run

The text is one sentence per line, tokenised, in a random order. The exit code is 6 if rows were
left out. docs/training.md describes the recipe, the files of a run, and how it is resumed."
)]
pub(super) struct TrainArgs {
    /// Training text: files, folders, glob patterns or URLs
    ///
    /// The formats are those of elmo embed: .txt (a sentence per line), .csv, .tsv, .jsonl, .json, .parquet, .arrow, each
    /// also compressed as .gz or .zst.
    #[arg(short, long, num_args = 1.., value_name = "INPUT", value_hint = ValueHint::AnyPath, help_heading = "Text")]
    shards: Vec<String>,

    /// Held-out text, of which the perplexity is measured
    #[arg(long, num_args = 1.., value_name = "INPUT", value_hint = ValueHint::AnyPath, help_heading = "Text")]
    valid: Vec<String>,

    /// Column of texts, or of lists of tokens
    #[arg(long, value_name = "NAME", default_value = "text", help_heading = "Text")]
    column: String,

    /// How texts become tokens: whitespace (already tokenised), moses or words [default: whitespace]
    #[arg(long, value_name = "KIND", value_parser = one_of::<TokenizerKind>(TokenizerKind::WORDS), help_heading = "Text")]
    tokenizer: Option<TokenizerKind>,

    /// Cut texts into sentences, split or off [default: off with --tokenizer whitespace, else split]
    #[arg(long, value_name = "MODE", value_parser = one_of::<SentenceMode>(SentenceMode::WORDS), help_heading = "Text")]
    sentences: Option<SentenceMode>,

    /// Tokenizer that the model records for its users [default: --tokenizer]
    ///
    /// It is the default of elmo embed, sql and stream for this model. Give it for text that another program has
    /// tokenised: --record-tokenizer moses says that raw text is read with moses.
    #[arg(long, value_name = "KIND", value_parser = one_of::<TokenizerKind>(TokenizerKind::WORDS), help_heading = "Text")]
    record_tokenizer: Option<TokenizerKind>,

    /// Sentence mode that the model records [default: split with another --record-tokenizer, else --sentences]
    #[arg(long, value_name = "MODE", value_parser = one_of::<SentenceMode>(SentenceMode::WORDS), hide_short_help = true, help_heading = "Text")]
    record_sentences: Option<SentenceMode>,

    /// Order of sentences: shuffle, or bilm (shards by name, nothing shuffled: for comparisons)
    ///
    /// shuffle takes the shards of an epoch in random order and shuffles blocks of consecutive sentences. The order is a
    /// function of seed, epoch and direction.
    #[arg(long, value_name = "ORDER", default_value = "shuffle", value_parser = one_of::<Order>(Order::WORDS), help_heading = "Text")]
    order: Order,

    /// Sentences that are shuffled together
    #[arg(long, value_name = "N", default_value = "65536", value_parser = positive, hide_short_help = true, help_heading = "Text")]
    block_sentences: usize,

    /// Rows that are not text: fail ends the run before its first step, skip leaves them out
    #[arg(long, value_name = "WHAT", default_value = "fail", value_parser = ["fail", "skip"], help_heading = "Text")]
    on_error: String,

    /// Vocabulary, a path or URL: elmo vocab writes one
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Model")]
    vocab: Option<String>,

    /// Size of a new model: small (1024 cells), medium (2048), original (4096), or tiny for trials
    #[arg(long, value_name = "SIZE", value_parser = Size::WORDS.to_vec(), conflicts_with = "options", help_heading = "Model")]
    size: Option<String>,

    /// Options file of a new model; its keys for training are used where no option is given
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Model")]
    options: Option<PathBuf>,

    /// Begin with the weights of a model, or of a safetensors file with --size or --options
    #[arg(long, value_name = "MODEL", value_hint = ValueHint::AnyPath, help_heading = "Model")]
    pub(super) init: Option<String>,

    /// Do not use the network for the model of --init
    #[arg(long, hide_short_help = true, help_heading = "Model")]
    pub(super) offline: bool,

    /// Folder of the run, which becomes a model directory
    #[arg(short, long, value_name = "DIR", value_hint = ValueHint::DirPath, help_heading = "Run")]
    output: Option<String>,

    /// Steps of the run, instead of --epochs
    #[arg(long, value_name = "N", value_parser = positive, conflicts_with = "epochs", help_heading = "Run")]
    steps: Option<usize>,

    /// Passes over the training text, which is counted before the first step [default: 10]
    #[arg(long, value_name = "X", value_parser = above_zero, help_heading = "Run")]
    epochs: Option<f64>,

    /// Delete an earlier run in the folder and start over
    ///
    /// --overwrite=false resumes, overriding the environment and elmo.toml.
    #[arg(long, value_name = "BOOL", action = ArgAction::Set, hide_possible_values = true, num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true", hide_default_value = true, value_parser = BoolishValueParser::new(), help_heading = "Run")]
    overwrite: bool,

    /// Check everything, make a few steps to measure time and memory, and write nothing
    #[arg(short = 'n', long, help_heading = "Run")]
    dry_run: bool,

    /// Print the report as JSON
    #[arg(long, help_heading = "Run")]
    json: bool,

    /// Steps between two measurements of the held-out perplexity [default: as --checkpoint-every]
    #[arg(long, value_name = "N", value_parser = positive, help_heading = "Run")]
    eval_every: Option<usize>,

    /// End the run when so many measurements in a row are no better than the best one
    #[arg(long, value_name = "N", value_parser = positive, requires = "valid", help_heading = "Run")]
    patience: Option<usize>,

    /// Steps between two lines of steps.jsonl
    #[arg(long, value_name = "N", default_value = "10", value_parser = positive, help_heading = "Run")]
    log_every: usize,

    /// Steps between two checkpoints [default: a tenth of the run, at most 1250]
    #[arg(long, value_name = "N", value_parser = positive, help_heading = "Run")]
    checkpoint_every: Option<usize>,

    /// Checkpoints that are kept
    #[arg(long, value_name = "N", default_value = "2", value_parser = positive, help_heading = "Run")]
    keep_checkpoints: usize,

    /// Folder of a store to which every checkpoint is copied: s3://, gs://, az:// or a path
    ///
    /// Copies are made while the run goes on, and rotated as the checkpoints are. On a new machine, the same command resumes from
    /// the newest one. A store that fails does not end the run; the exit code is 5 if the last checkpoint could not be copied.
    #[arg(long, value_name = "URL", value_hint = ValueHint::AnyPath, help_heading = "Run")]
    upload: Option<String>,

    /// A loss that jumps or is not finite: stop ends the run, rollback returns to the last checkpoint and skips the
    /// text that caused it, ignore continues after a jump
    #[arg(long, value_name = "WHAT", default_value = "stop", value_parser = one_of::<OnSpike>(OnSpike::WORDS), help_heading = "Run")]
    on_spike: OnSpike,

    #[command(flatten)]
    step: StepArgs,

    /// Device: auto, cpu, cuda, or GPUs such as cuda:0 or cuda:0,1,2,3
    ///
    /// auto is the first GPU, or the CPU where there is none; cuda is all GPUs. Each of several GPUs has a process of its own.
    /// Under torchrun, srun and the like, every process takes one of the GPUs, by its number on its machine.
    #[arg(long, value_name = "DEVICE", default_value = "auto", help_heading = "Speed and devices")]
    device: String,

    /// GPUs of this machine: --gpus 0,1 is --device cuda:0,1
    #[arg(long, value_name = "LIST", help_heading = "Speed and devices")]
    gpus: Option<String>,

    /// Processes on the CPU of this machine
    #[arg(long, value_name = "N", value_parser = threads, hide_short_help = true, help_heading = "Speed and devices")]
    processes: Option<usize>,

    /// Parts of --rows rows that a process computes one after the other for each step
    ///
    /// A window has as many rows as all parts of all processes together. Memory is that of one part.
    #[arg(long, value_name = "N", default_value = "1", value_parser = positive, help_heading = "Speed and devices")]
    accumulate: usize,

    /// Seconds in which all processes must join the run
    ///
    /// Processes of a cluster may start at different times. The error names those that have not joined.
    #[arg(long, value_name = "N", default_value = "600", value_parser = positive, hide_short_help = true, help_heading = "Speed and devices")]
    start_timeout: usize,

    /// Seconds after which a process that does not answer ends the run
    ///
    /// Time in which a process reads or writes files does not count.
    #[arg(long, value_name = "N", default_value = "600", value_parser = positive, hide_short_help = true, help_heading = "Speed and devices")]
    process_timeout: usize,

    /// CPU threads of a process, which do not change the result [default: all cores, shared by the processes]
    #[arg(long, value_name = "N", value_parser = threads, help_heading = "Speed and devices")]
    threads: Option<usize>,

    /// Groups of rows that are computed one by one, or in parallel on a CPU
    ///
    /// By default one for each 32 rows of a part on a CPU, and for each 1024 on a GPU. Their number changes the rounding of sums, and the memory for activations. Gradients of as many as there are threads are
    /// in memory.
    #[arg(long, value_name = "N", value_parser = positive, hide_short_help = true, help_heading = "Speed and devices")]
    lanes: Option<usize>,
}

/// What determines a step.
#[derive(Debug, Args)]
#[command(next_help_heading = "Step")]
struct StepArgs {
    /// Recipe to the letter: bilm is that of the published models
    ///
    /// Its values are the defaults of the options below. With --preset bilm, other values are refused, and negatives are
    /// drawn whatever the size of the vocabulary, anew for each 128 rows of the window of all processes.
    #[arg(long, value_name = "NAME", value_parser = ["bilm"])]
    preset: Option<String>,

    /// Rows of a window in each process, each a stream of sentences [default: 128]
    #[arg(long, value_name = "N", value_parser = positive)]
    rows: Option<usize>,

    /// Tokens of a row of a window, over which gradients flow [default: 20]
    #[arg(long, value_name = "N", value_parser = positive)]
    unroll: Option<usize>,

    /// Seed of all random numbers
    #[arg(long, value_name = "N", default_value = "0")]
    seed: u64,

    /// Probability of dropout [default: 0.1]
    #[arg(long, value_name = "P", value_parser = fraction)]
    dropout: Option<f64>,

    /// Negatives of the sampled softmax; 0 for the softmax over all words
    ///
    /// By default 8192 with vocabularies of at least twice as many words, and all words with smaller ones.
    #[arg(long, value_name = "N")]
    samples: Option<usize>,

    /// Optimiser
    #[arg(long, value_name = "NAME", default_value = "adagrad", value_parser = ["adagrad", "adamw"])]
    optimizer: String,

    /// Learning rate [default: 0.2 for adagrad, 0.001 for adamw]
    #[arg(long, value_name = "X", value_parser = above_zero)]
    learning_rate: Option<f64>,

    /// How the learning rate changes: constant, cosine or inverse-sqrt
    #[arg(long, value_name = "NAME", default_value = "constant", value_parser = ["constant", "cosine", "inverse-sqrt"])]
    schedule: String,

    /// Steps in which the learning rate rises from 0, with cosine and inverse-sqrt
    #[arg(long, value_name = "N", default_value = "0")]
    warm_up: u64,

    /// Last learning rate of cosine, as a share of the first [default: 0.1]
    #[arg(long, value_name = "X", value_parser = fraction, hide_short_help = true)]
    final_ratio: Option<f64>,

    /// Limit of the norm of all gradients, or off [default: 10, or 1 with adamw]
    #[arg(long, value_name = "X|off")]
    clip_norm: Option<Clip>,

    /// Weight decay of adamw [default: 0.01]
    #[arg(long, value_name = "X", value_parser = fraction, hide_short_help = true)]
    weight_decay: Option<f64>,

    /// Factor of the loss before gradients are taken [default: --unroll, or 1 with adamw]
    #[arg(long, value_name = "X", value_parser = above_zero, hide_short_help = true)]
    gradient_scale: Option<f64>,

    /// Number format: f32; tf32 or bf16 for products of GPUs; or f64 (slow, for comparisons on a CPU)
    ///
    /// tf32 rounds the factors of float32 products to three digits, and bf16 also the activations, to two or three digits. tf32
    /// needs an NVIDIA GPU (Ampere or later); bf16 is fast on such a GPU, and slow on a CPU. Weights and the state of the optimiser stay float32.
    #[arg(long, value_name = "PRECISION", default_value = "f32", value_parser = ["f32", "tf32", "bf16", "f64"])]
    precision: String,
}

/// The value of `--clip-norm`.
#[derive(Debug, Clone, Copy)]
struct Clip(Option<f64>);

impl FromStr for Clip {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" { Ok(Self(None)) } else { above_zero(text).map(|norm| Self(Some(norm))) }
    }
}

fn above_zero(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| "it must be a number above 0".to_owned())
}

/// The published passes over the corpus; of a text on which a trained model goes on.
const EPOCHS: (f64, f64) = (10.0, 1.0);
/// Defaults of adamw and of cosine.
const WEIGHT_DECAY: f64 = 0.01;
const FINAL_RATIO: f64 = 0.1;
/// Rows of a lane, below which products of a CPU are slow.
const ROWS_OF_A_LANE: usize = 32;
/// Rows of a lane of a GPU: with fewer than some 250, its time goes to the start of operations and to reading weights.
const ROWS_OF_A_GPU_LANE: usize = 1024;
const MAX_LANES: usize = 64;

impl StepArgs {
    /// What contradicts `--preset bilm` in the recipe of a part, of which a process computes so many: options, or keys of the
    /// options file.
    fn contradictions(&self, recipe: &Recipe, accumulate: usize, file: Option<&OptionsFile>) -> Vec<String> {
        let bilm = Recipe::bilm();
        let (rows, has_parts) = (recipe.rows * accumulate, accumulate > 1);
        let of_rows = if has_parts { "--rows times --accumulate" } else { "--rows" };
        let is_bilm = self.optimizer == "adagrad";
        let is_sampled = matches!(recipe.classes, Classes::Sampled(n) | Classes::Auto(n) if n == Recipe::BILM_SAMPLES);
        let fields = [
            (of_rows, "batch_size", self.rows.is_some() || has_parts, rows == bilm.rows),
            ("--unroll", "unroll_steps", self.unroll.is_some(), recipe.positions == bilm.positions),
            ("--dropout", "dropout", self.dropout.is_some(), recipe.dropout == bilm.dropout),
            ("--samples", "n_negative_samples_batch, or sample_softmax,", self.samples.is_some(), is_sampled),
            (
                "--learning-rate",
                "learning_rate",
                self.learning_rate.is_some(),
                recipe.learning_rate == bilm.learning_rate,
            ),
            ("--clip-norm", "all_clip_norm_val", self.clip_norm.is_some(), recipe.clip_norm == bilm.clip_norm),
        ];
        let mut all = Vec::new();
        for (option, key, is_given, is_same) in fields {
            match (is_same, is_given, file) {
                (false, true, _) => all.push(option.to_owned()),
                // Another optimiser has other defaults.
                (false, false, Some(file)) if is_bilm => all.push(format!("{key} in {}", file.origin())),
                _ => {}
            }
        }
        let scale = self.gradient_scale.is_some_and(|scale| scale != bilm.gradient_scale);
        let others = [
            ("--optimizer", !is_bilm),
            ("--schedule", self.schedule != "constant"),
            ("--warm-up", self.warm_up != 0),
            ("--gradient-scale", scale),
        ];
        all.extend(others.into_iter().filter(|(_, differs)| *differs).map(|(option, _)| option.to_owned()));
        all
    }

    /// Refuses options that would not change anything.
    fn check_unused(&self) -> Result<()> {
        let refused = |option: &str, needs: &str| Err(unused(option, needs));
        match self.schedule.as_str() {
            "constant" if self.warm_up > 0 => refused("--warm-up", "--schedule cosine or inverse-sqrt"),
            "constant" | "inverse-sqrt" if self.final_ratio.is_some() => refused("--final-ratio", "--schedule cosine"),
            _ if self.weight_decay.is_some() && self.optimizer != "adamw" => {
                refused("--weight-decay", "--optimizer adamw")
            }
            _ => Ok(()),
        }
    }

    /// Refuses what contradicts the preset.
    fn check_preset(&self, recipe: &Recipe, accumulate: usize, file: Option<&OptionsFile>) -> Result<()> {
        let Some(preset) = &self.preset else { return Ok(()) };
        let contradictions = self.contradictions(recipe, accumulate, file);
        if contradictions.is_empty() {
            return Ok(());
        }
        Err(Error::usage(
            format!(
                "--preset {preset} is the published recipe to the letter, from which these differ: {}",
                contradictions.join(", ")
            ),
            "leave --preset out: the published values are the defaults of all that is not given",
        ))
    }

    /// The recipe: that of the published models, changed by the options file, changed by options.
    fn recipe(&self, file: Option<&OptionsFile>, lanes: Option<usize>) -> Recipe {
        let mut recipe = Recipe::bilm();
        if self.preset.is_some() {
            recipe.classes = Classes::Sampled(Recipe::BILM_SAMPLES);
            recipe.replica_rows = Some(recipe.rows);
        }
        let is_adagrad = self.optimizer == "adagrad";
        if !is_adagrad {
            let weight_decay = self.weight_decay.unwrap_or(WEIGHT_DECAY);
            recipe.optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay };
            (recipe.learning_rate, recipe.clip_norm) = (0.001, Some(1.0));
        }
        if let Some(file) = file {
            file.apply(&mut recipe);
        }
        recipe.seed = self.seed;
        recipe.rows = self.rows.unwrap_or(recipe.rows);
        recipe.positions = self.unroll.unwrap_or(recipe.positions);
        recipe.dropout = self.dropout.unwrap_or(recipe.dropout);
        recipe.learning_rate = self.learning_rate.unwrap_or(recipe.learning_rate);
        recipe.clip_norm = self.clip_norm.map_or(recipe.clip_norm, |clip| clip.0);
        recipe.classes = match self.samples {
            Some(0) => Classes::Full,
            Some(samples) => Classes::Sampled(samples),
            None => recipe.classes,
        };
        let (warm_up, final_ratio) = (self.warm_up, self.final_ratio.unwrap_or(FINAL_RATIO));
        recipe.schedule = match self.schedule.as_str() {
            "cosine" => Schedule::Cosine { warm_up, total: 0, final_ratio },
            "inverse-sqrt" => Schedule::InverseSquareRoot { warm_up },
            _ => Schedule::Constant,
        };
        recipe.precision = match self.precision.as_str() {
            "f64" => Precision::F64,
            "bf16" => Precision::Bf16,
            "tf32" => Precision::Tf32,
            _ => Precision::F32,
        };
        let scale = if is_adagrad { recipe.positions as f64 } else { 1.0 };
        recipe.gradient_scale = self.gradient_scale.unwrap_or(scale);
        recipe.lanes = lanes.unwrap_or((recipe.rows / ROWS_OF_A_LANE).clamp(1, MAX_LANES));
        recipe
    }
}

/// The error for an option that would not change anything.
pub(super) fn unused(option: &str, needs: &str) -> Error {
    Error::usage(format!("{option} changes nothing without {needs}"), format!("give {needs}, or leave {option} out"))
}

const STOPPING: &str = "this step is made and a checkpoint is written";
/// The same where the process that has started this one ends it at the second signal.
const STOPPING_TOGETHER: &str = "this step is made and a checkpoint is written; a second signal stops at once";
/// What a process says that a signal has ended early.
const MISSED: &str = "a signal has ended it before the first step";

pub(super) fn run(args: &TrainArgs, _: &CommonArgs) -> Result<Exit> {
    start(args, None)
}

/// Runs the job. A model that goes on has read its text as in `recorded`; its vocabulary is the default.
pub(super) fn start(args: &TrainArgs, recorded: Option<&EmbedSpec>) -> Result<Exit> {
    let file = args.options_file()?;
    let stores = Stores::from_env();
    let meeting = Meeting::from_env(|name| env::var(name).ok());
    let meeting = meeting.map_err(|e| Error::usage(e.to_string(), e.help()))?;
    args.check_processes(meeting.as_ref())?;
    // One process says it for all.
    if env::var_os(RUN).is_none() && meeting.as_ref().is_none_or(|meeting| meeting.rank == 0) {
        file.iter().flat_map(OptionsFile::remarks).for_each(|remark| tracing::warn!("{remark}"));
    }
    let several = args.places()?.filter(|_| meeting.is_none() || is_slurm_script());
    let meeting = meeting.filter(|_| several.is_none());
    if args.dry_run && meeting.as_ref().is_some_and(|meeting| meeting.rank > 0) {
        return Ok(Exit::Done);
    }
    let processes = several.as_ref().map_or(meeting.as_ref().map_or(1, |meeting| meeting.size), Places::len);
    // Also before processes are started: whatever is wrong is said once.
    let job = args.job(file.as_ref(), recorded, &stores, processes, meeting.as_ref())?;
    if args.dry_run {
        keep_freed_memory();
        let estimate = block_on(estimate(job, &stores))?;
        return if args.json { print_json(&estimate) } else { print(&estimate.to_string()) }.map(|()| Exit::Done);
    }
    if let Some(places) = several {
        if let Places::Cpu(processes) = places {
            check_processes(processes)?;
        }
        return processes::run(&places);
    }
    keep_freed_memory();
    let is_first = meeting.as_ref().is_none_or(|meeting| meeting.rank == 0);
    let job = match &meeting {
        Some(meeting) => args.met(job, meeting)?,
        None => job,
    };
    let (overwrite, group) = (job.overwrite, job.group.clone());
    let outcome = match meeting.is_some() {
        false => block_on(async { train(job, &stores, shutdown::requested(STOPPING)?).await }),
        true => block_on(async {
            let what = if env::var_os(RUN).is_some() { STOPPING_TOGETHER } else { STOPPING };
            let stop = shutdown::requested_of_several(what, move || group.tell(MISSED))?;
            train(job, &stores, stop).await
        }),
    };
    if let Err(error) = &outcome
        && !is_first
        && let Some(fault @ (TrainFault::Interrupted { .. } | TrainFault::Elsewhere { .. } | TrainFault::Spike { .. })) =
            error.module()
    {
        // Another process says it.
        return Ok(fault.exit());
    }
    if let Err(error) = &outcome
        && matches!(error.module(), Some(TrainFault::Interrupted { .. }))
    {
        note_command(overwrite);
    }
    let report: TrainReport = outcome?;
    match is_first {
        true if args.json => print_json(&report)?,
        true => print(&report.to_string())?,
        false => {}
    }
    if let Some(UploadReport { url, failed: Some(reason), .. }) = report.upload {
        return Err(TrainFault::NotUploaded { url, reason }.into());
    }
    Ok(if report.bad_rows > 0 { Exit::Rejected } else { Exit::Done })
}

/// Whether this is the script of a Slurm job, and not a step of it that `srun` has started.
fn is_slurm_script() -> bool {
    let is_set = |name: &str| env::var_os(name).is_some_and(|value| !value.is_empty());
    !is_set("RANK") && is_set("SLURM_PROCID") && !is_set("SLURM_STEP_NUM_TASKS")
}

/// Says how the run goes on.
fn note_command(overwrite: bool) {
    let args = std::env::args_os().map(|arg| arg.to_string_lossy().into_owned());
    let command = shutdown::resume_command(args, overwrite);
    // A redacted command would not work.
    if redact(&command) == command {
        super::logging::note(&format!("to resume: {command}"));
    }
}

/// The folder of `--upload`.
fn copies(upload: &str, output: &Path, stores: &Stores) -> Result<Location> {
    let folder = stores.locate(upload)?;
    if folder.is_http() {
        let help = "give a folder of an object store (s3://, gs://, az://), or a path";
        return Err(Error::usage(format!("--upload {folder}: a web server cannot be written to"), help));
    }
    let run = stores.locate(&output.to_string_lossy())?;
    match folder.local_path().zip(run.local_path()) {
        Some((copies, run)) if copies.starts_with(&run) => Err(Error::usage(
            format!("--upload {upload} is in the folder of the run"),
            "give a folder that outlives the one of the run, on another disk or in a store",
        )),
        _ => Ok(folder),
    }
}

impl TrainArgs {
    fn options_file(&self) -> Result<Option<OptionsFile>> {
        let Some(path) = &self.options else { return Ok(None) };
        let bytes = fs::read(path).map_err(|source| Error::io(path, source))?;
        OptionsFile::parse(&bytes, &path.display().to_string()).map(Some)
    }

    /// Refuses to start processes in each of several processes. Those that this program has started have its arguments.
    fn check_processes(&self, meeting: Option<&Meeting>) -> Result<()> {
        match (meeting, self.processes) {
            (Some(Meeting { rank, size, .. }), Some(processes)) if env::var_os(RUN).is_none() && !is_slurm_script() => {
                Err(Error::usage(
                    format!(
                        "--processes {processes} would start processes, but RANK and WORLD_SIZE, or those of Slurm, say that this is \
                         process {rank} of {size}"
                    ),
                    "leave --processes out: whatever starts this process starts the others too",
                ))
            }
            _ => Ok(()),
        }
    }

    /// The processes that this one starts, if several devices are given.
    fn places(&self) -> Result<Option<Places>> {
        let gpus = |devices: &[DeviceName]| -> Option<Places> {
            let number = |device: &DeviceName| if let DeviceName::Cuda(number) = device { Some(*number) } else { None };
            Some(Places::Gpus(devices.iter().filter_map(number).collect())).filter(|places| places.len() > 1)
        };
        let choices = self.choices()?;
        match self.processes {
            Some(_) if choices != [DeviceChoice::Cpu] => Err(Error::usage(
                "--processes is for the CPU",
                "give --device cpu, or leave it out: every GPU has a process of its own",
            )),
            Some(processes) => Ok(Some(Places::Cpu(processes)).filter(|_| processes > 1)),
            None if matches!(choices.as_slice(), [DeviceChoice::Cuda(None)]) || choices.len() > 1 => {
                // Those that are not there are reported by the job.
                Ok(resolve_devices(&choices).ok().as_deref().and_then(gpus))
            }
            None => Ok(None),
        }
    }

    fn choices(&self) -> Result<Vec<DeviceChoice>> {
        let text = match (&self.gpus, self.device.as_str()) {
            (Some(gpus), "auto") => format!("cuda:{gpus}"),
            (Some(_), device) => {
                let message = format!("--gpus and --device {device} both name the devices");
                return Err(Error::usage(message, "give one of them"));
            }
            (None, device) => device.to_owned(),
        };
        let choices = parse_devices(&text).map_err(|error: SpecError| elmo::Error::from(error))?;
        // Processes are for the CPU, also on a machine with GPUs.
        let is_auto = self.processes.is_some() && choices == [DeviceChoice::Auto];
        Ok(if is_auto { vec![DeviceChoice::Cpu] } else { choices })
    }

    /// The job of one of several processes, which has met the others.
    fn met(&self, job: TrainJob, meeting: &Meeting) -> Result<TrainJob> {
        let seconds = |n: usize| Duration::from_secs(n as u64);
        let limits = Limits { start: seconds(self.start_timeout), answer: seconds(self.process_timeout) };
        let group = Group::meet(meeting, job.device, limits).map_err(|e| TrainFault::Step(e.into()))?;
        Ok(TrainJob { group, ..job })
    }

    fn job(
        &self,
        file: Option<&OptionsFile>,
        recorded: Option<&EmbedSpec>,
        stores: &Stores,
        processes: usize,
        meeting: Option<&Meeting>,
    ) -> Result<TrainJob> {
        let example = match recorded {
            None => "for example: elmo train --shards 'corpus/*.txt' --vocab vocab.txt --size small --output model",
            Some(_) => "for example: elmo finetune --model trained --shards domain.txt --output finetuned",
        };
        let missing = |what: &str| Error::usage(format!("{what} was given"), example);
        if self.shards.is_empty() {
            return Err(missing("no --shards"));
        }
        let mut recipe = self.step.recipe(file, self.lanes);
        self.step.check_preset(&recipe, self.accumulate, file)?;
        self.step.check_unused()?;
        if self.eval_every.is_some() && self.valid.is_empty() {
            tracing::warn!("--eval-every changes nothing without --valid");
        }
        let part_rows = recipe.rows;
        recipe.rows = rows_of_window(&recipe, self.accumulate, processes)?;
        let output = self.output.as_ref().ok_or_else(|| missing("no --output"))?;
        let output = match stores.locate(output)?.local_path() {
            Some(_) if !output.contains("://") => PathBuf::from(output),
            Some(path) => path,
            None => {
                let help = "give a local folder, and copy it when the run has ended";
                return Err(Error::usage(format!("{output}: a run writes to a local folder"), help));
            }
        };
        let upload = self.upload.as_ref().map(|upload| copies(upload, &output, stores)).transpose()?;
        upload.as_ref().map_or(Ok(()), |folder| self.check_no_text(folder, stores))?;
        let device = self.device(meeting)?;
        if self.lanes.is_none() && device != DeviceName::Cpu {
            recipe.lanes = part_rows.div_ceil(ROWS_OF_A_GPU_LANE);
        }
        if recipe.precision == Precision::F64 && device != DeviceName::Cpu {
            return Err(Error::usage("--precision f64 is for the CPU", "give --device cpu, or --precision f32"));
        }
        if recipe.precision == Precision::Tf32 && device == DeviceName::Cpu {
            let message = "--precision tf32 is for GPUs: the CPU has no products in TF32";
            return Err(Error::usage(message, "give --device cuda, or --precision f32"));
        }
        let epochs = self.epochs.or_else(|| file.and_then(OptionsFile::epochs)).unwrap_or(if recorded.is_some() {
            EPOCHS.1
        } else {
            EPOCHS.0
        });
        let recorded_tokenizer = recorded.map_or(TokenizerKind::Whitespace, |spec| spec.tokenizer);
        let tokenizer = self.tokenizer.unwrap_or(recorded_tokenizer);
        let whole = tokenizer == TokenizerKind::Whitespace;
        let by_tokenizer = if whole { SentenceMode::Off } else { SentenceMode::Split };
        let recorded_sentences = recorded.filter(|_| self.tokenizer.is_none()).map(|spec| spec.sentences);
        let sentences = self.sentences.or(recorded_sentences).unwrap_or(by_tokenizer);
        let vocab = match &self.vocab {
            Some(vocab) => Some(stores.locate(vocab)?),
            None if recorded.is_some() => None,
            None => return Err(missing("no --vocab")),
        };
        let model = self.model(file).ok_or_else(|| missing("none of --size, --options and --init"))??;
        check_output(&output, &model)?;
        let neighbours = meeting.map_or(processes, |meeting| meeting.local_size.unwrap_or(1)).max(1);
        let every = |steps: Option<usize>| steps.map(|steps| steps as u64);
        Ok(TrainJob {
            shards: self.shards.clone(),
            valid: self.valid.clone(),
            text: TextSettings {
                column: self.column.clone(),
                tokenizer,
                sentences,
                record: self.record(tokenizer, sentences),
                block_sentences: self.block_sentences,
                skip_bad_rows: self.on_error == "skip",
            },
            order: self.order,
            vocab,
            model,
            words: file.and_then(OptionsFile::words),
            recipe,
            part_rows,
            accumulate: self.accumulate,
            processes,
            neighbours,
            group: Group::default(),
            until: self.steps.map_or(Until::Epochs(epochs), |steps| Until::Steps(steps as u64)),
            output,
            device,
            threads: self.threads.unwrap_or_else(|| {
                std::thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(neighbours))
            }),
            measure_first: recorded.is_some(),
            eval_every: every(self.eval_every),
            patience: every(self.patience),
            log_every: self.log_every as u64,
            checkpoint_every: every(self.checkpoint_every),
            keep_checkpoints: self.keep_checkpoints,
            upload,
            on_spike: self.on_spike,
            overwrite: self.overwrite,
            offline: self.offline,
        })
    }

    /// Refuses a folder of copies that is read as text: the text would be another one when the run resumes.
    fn check_no_text(&self, copies: &Location, stores: &Stores) -> Result<()> {
        for (option, inputs) in [("--shards", &self.shards), ("--valid", &self.valid)] {
            for input in inputs {
                if would_read_copies(stores, input, copies)? {
                    return Err(Error::usage(
                        format!("--upload {copies}: {option} {input} would read the copies as text"),
                        "give a folder outside of the text",
                    ));
                }
            }
        }
        Ok(())
    }

    /// What the model records: how its users read text as the corpus was read.
    fn record(&self, read: TokenizerKind, sentences: SentenceMode) -> TextOptions {
        let tokenizer = self.record_tokenizer.unwrap_or(read);
        let is_same = tokenizer == read;
        let sentences = self.record_sentences.unwrap_or(if is_same { sentences } else { SentenceMode::Split });
        // Training carries states from sentence to sentence, and never sees one that starts from zeros.
        TextOptions { tokenizer: Some(tokenizer), sentences: Some(sentences), state: Some(StateMode::Warm) }
    }

    /// Where the model begins; `None` when nothing says it.
    fn model(&self, file: Option<&OptionsFile>) -> Option<Result<ModelSource>> {
        let of_size = |word: &String| Size::ALL.into_iter().find(|size| size.word() == word).map(Size::options);
        let options = file.map(|file| file.model.clone()).or_else(|| self.size.as_ref().and_then(of_size));
        match (&self.init, options) {
            (Some(init), Some(options)) if init.ends_with(".safetensors") => {
                Some(Ok(ModelSource::Tensors { options, path: PathBuf::from(init) }))
            }
            (Some(init), None) if init.ends_with(".safetensors") => Some(Err(Error::usage(
                format!("{init}: the sizes of the model are not known"),
                "give --options or --size beside a safetensors file, or the directory of a model",
            ))),
            (Some(_), Some(_)) => Some(Err(Error::usage(
                "--size and --options cannot be given beside a model of --init, which has sizes of its own",
                "leave them out; keys of an options file for training are options of this command: --dropout, --rows, \
                 --learning-rate and others",
            ))),
            (Some(init), None) => Some(init.parse::<ModelSpec>().map(ModelSource::Model).map_err(Error::from)),
            (None, options) => options.map(|options| Ok(ModelSource::Random(options))),
        }
    }

    /// The device of this process: that of its number on its machine when there are several.
    fn device(&self, meeting: Option<&Meeting>) -> Result<DeviceName> {
        let choices = self.choices()?;
        // Whoever has started this process may have left it a single GPU, which is number 0 then.
        let alone = [DeviceChoice::Cuda(Some(0))];
        let is_listed = |choice: &DeviceChoice| matches!(choice, DeviceChoice::Cuda(Some(_)));
        let choices = match meeting {
            Some(_) if cuda_devices() == 1 && choices.iter().all(is_listed) => &alone[..],
            _ => &choices[..],
        };
        let devices = resolve_devices(choices).map_err(elmo::Error::from)?;
        device_of(&devices, meeting)
    }
}

/// Rows of the window of all processes.
fn rows_of_window(recipe: &Recipe, accumulate: usize, processes: usize) -> Result<usize> {
    let rows = recipe.rows.checked_mul(accumulate).and_then(|rows| rows.checked_mul(processes));
    let fits = |rows: &usize| rows.checked_mul(recipe.positions).is_some_and(|tokens| tokens <= i32::MAX as usize);
    rows.filter(fits).ok_or_else(|| {
        let message = format!(
            "a window of {} rows, times {accumulate} parts, times {processes} processes, of {} tokens has more than {} tokens",
            recipe.rows,
            recipe.positions,
            i32::MAX
        );
        Error::usage(message, "give fewer --rows, --accumulate or --unroll")
    })
}

/// Refuses to write a run over the model that it begins with.
fn check_output(output: &Path, model: &ModelSource) -> Result<()> {
    // A path that does not exist is reported by whatever reads the model.
    let folder = match model {
        ModelSource::Model(ModelSpec::Whole(Place::Local(path))) => path.canonicalize().ok(),
        ModelSource::Model(ModelSpec::Pair { weights: Place::Local(path), .. }) | ModelSource::Tensors { path, .. } => {
            path.canonicalize().ok().and_then(|path| path.parent().map(Path::to_path_buf))
        }
        ModelSource::Model(_) | ModelSource::Random(_) => None,
    };
    match folder.is_some() && folder == output.canonicalize().ok() {
        true => Err(Error::usage(
            format!("{}: the model with which the run begins is in this folder, and would be lost", output.display()),
            "give another --output",
        )),
        false => Ok(()),
    }
}

/// The device of a process: the only one, or that of its number on its machine.
fn device_of(devices: &[DeviceName], meeting: Option<&Meeting>) -> Result<DeviceName> {
    let all = devices.len();
    match (devices, meeting) {
        (&[only], _) => Ok(only),
        (_, None) => devices.first().copied().ok_or_else(|| Error::usage("no device is given", "give --device")),
        (_, Some(Meeting { rank, local_rank: None, .. })) => Err(Error::usage(
            format!("process {rank} may use {all} GPUs, and LOCAL_RANK, its number on its machine, is not set"),
            "set LOCAL_RANK for each process, as torchrun does, or leave it a single GPU: --device cuda:N",
        )),
        (_, Some(Meeting { rank, local_rank: Some(number), .. })) => devices.get(*number).copied().ok_or_else(|| {
            Error::usage(
                format!("process {rank} is number {number} on its machine, from 0, but only {all} devices are given"),
                "start as many processes on a machine as it has GPUs",
            )
        }),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Parsed {
        #[command(flatten)]
        args: TrainArgs,
    }

    fn recipe(words: &str) -> Recipe {
        let args = args(words);
        args.step.recipe(None, args.lanes)
    }

    /// By hand.
    #[test]
    fn every_process_has_a_gpu_of_its_own() {
        let gpus: Vec<_> = (0..3).map(DeviceName::Cuda).collect();
        let process = |rank: usize, local: Option<usize>| {
            let set = |name: &str| match name {
                "RANK" => Some(rank.to_string()),
                "WORLD_SIZE" => Some("8".to_owned()),
                "LOCAL_RANK" => local.map(|local| local.to_string()),
                "MASTER_ADDR" => Some("node-0".to_owned()),
                _ => None,
            };
            Meeting::from_env(set).unwrap().unwrap()
        };
        let of = |devices: &[DeviceName], rank, local| {
            device_of(devices, Some(&process(rank, local))).map_err(|error| error.to_string())
        };
        assert_eq!(device_of(&gpus, None).unwrap(), DeviceName::Cuda(0));
        assert_eq!(of(&gpus, 5, Some(2)), Ok(DeviceName::Cuda(2)));
        // A container of Kubernetes has one, and does not say LOCAL_RANK.
        assert_eq!(of(&gpus[1..2], 5, None), Ok(DeviceName::Cuda(1)));
        assert!(of(&gpus, 5, None).unwrap_err().contains("process 5 may use 3 GPUs, and LOCAL_RANK"));
        assert!(of(&gpus, 5, Some(3)).unwrap_err().contains("number 3 on its machine, from 0, but only 3 devices"));
    }

    /// Also where there are GPUs.
    #[test]
    fn processes_are_on_the_cpu() {
        let parse = |words: &str| Parsed::parse_from(format!("train {words}").split_whitespace()).args;
        assert_eq!(parse("--processes 2").choices().unwrap(), [DeviceChoice::Cpu]);
        assert_eq!(parse("--processes 2").places().unwrap(), Some(Places::Cpu(2)));
        assert_eq!(parse("").choices().unwrap(), [DeviceChoice::Auto]);
        assert!(parse("--processes 2 --gpus 0,1").places().is_err());
    }

    fn args(words: &str) -> TrainArgs {
        let all = format!("train --shards a --vocab b --size tiny --output c {words}");
        Parsed::parse_from(all.split_whitespace()).args
    }

    /// Options and keys that contradict `--preset bilm`, by the published `options.json` and README of bilm-tf.
    #[test]
    fn what_contradicts_the_preset_is_named() {
        let found = |words: &str, file: Option<&OptionsFile>| {
            let args = args(words);
            args.step.contradictions(&args.step.recipe(file, None), args.accumulate, file).join(" ")
        };
        let same = "--preset bilm --optimizer adagrad --learning-rate 0.2 --schedule constant --warm-up 0 --clip-norm 10 \
                    --dropout 0.1 --rows 128 --unroll 20 --samples 8192 --seed 7 --precision f64 --lanes 2";
        assert_eq!(found(same, None), "");
        // Parts of a process make up its rows.
        assert_eq!(found("--preset bilm --rows 32 --accumulate 4", None), "");
        assert_eq!(found("--preset bilm --accumulate 4", None), "--rows times --accumulate");
        for words in [
            "--rows 64",
            "--unroll 10",
            "--dropout 0",
            "--samples 0",
            "--samples 100",
            "--learning-rate 0.1",
            "--clip-norm off",
            "--optimizer adamw",
            "--schedule cosine",
            "--warm-up 5",
            "--gradient-scale 1",
        ] {
            let option = words.split(' ').next().unwrap();
            assert_eq!(found(&format!("--preset bilm {words}"), None), option);
        }
        let file = |keys: &str| {
            let model = elmo::ModelData::tiny().options.canonical_json();
            OptionsFile::parse(model.replacen('{', &format!("{{{keys},"), 1).as_bytes(), "o.json").unwrap()
        };
        let published =
            file("\"dropout\": 0.1, \"batch_size\": 128, \"n_negative_samples_batch\": 8192, \"unroll_steps\": 20");
        assert_eq!(found("--preset bilm", Some(&published)), "");
        let other = file("\"dropout\": 0.2, \"sample_softmax\": false");
        assert_eq!(
            found("--preset bilm", Some(&other)),
            "dropout in o.json n_negative_samples_batch, or sample_softmax, in o.json"
        );
        assert_eq!(found("--preset bilm --dropout 0.1 --samples 8192", Some(&other)), "");
    }

    #[test]
    fn the_preset_is_the_published_recipe_and_options_change_it() {
        assert_eq!(recipe(""), Recipe::bilm());
        let preset = Recipe { classes: Classes::Sampled(8192), replica_rows: Some(128), ..Recipe::bilm() };
        assert_eq!(recipe("--preset bilm"), preset);
        let parts = recipe("--preset bilm --rows 32 --accumulate 4");
        assert_eq!(parts, Recipe { rows: 32, lanes: 1, ..preset });
        let changed = recipe("--rows 64 --unroll 5 --samples 0 --clip-norm off --schedule cosine --warm-up 3 --seed 9");
        let expected = Recipe {
            rows: 64,
            positions: 5,
            classes: Classes::Full,
            clip_norm: None,
            schedule: Schedule::Cosine { warm_up: 3, total: 0, final_ratio: 0.1 },
            seed: 9,
            gradient_scale: 5.0,
            lanes: 2,
            ..Recipe::bilm()
        };
        assert_eq!(changed, expected);
        let adamw = recipe("--optimizer adamw --rows 4");
        let expected = (Optimizer::ADAMW, 0.001, Some(1.0), 1.0, 1);
        assert_eq!(
            (adamw.optimizer, adamw.learning_rate, adamw.clip_norm, adamw.gradient_scale, adamw.lanes),
            expected
        );
    }
}
