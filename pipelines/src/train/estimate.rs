//! The dry run: checks everything, makes a few steps to measure time and memory, and writes nothing.

use std::{
    fmt,
    path::Path,
    sync::atomic::AtomicBool,
    time::{Duration, Instant},
};

use elmo::model::DeviceName;
use serde::Serialize;
use tokio::runtime::Handle;

use super::{
    corpus::Passes,
    error::TrainFault,
    feed::Feed,
    job::TrainJob,
    start::{Prepared, free_memory, look},
};
use crate::{
    error::{Error, Result},
    report::{bytes, count, duration, table},
    stores::{Stores, writable::check_folder},
};

/// The time for steps that are measured after the first one.
const MEASURED: Duration = Duration::from_secs(3);
/// Most of them.
const MAX_STEPS: u32 = 10;
/// The time for which text is read without steps.
const READING: Duration = Duration::from_secs(1);

/// What a run would take.
#[derive(Debug, Clone, Serialize)]
pub struct Estimate {
    /// Files of the corpus.
    pub shards: usize,
    /// Sentences of the corpus.
    pub sentences: u64,
    /// Tokens of the corpus.
    pub tokens: u64,
    /// Words that an epoch predicts in each direction.
    pub predictions: u64,
    /// Words of the vocabulary.
    pub words: usize,
    /// Share of the tokens that are in the vocabulary.
    pub coverage: f64,
    /// Negatives of the sampled softmax; `None`: all words.
    pub negatives: Option<usize>,
    /// Parameters of the biLM.
    pub parameters: u64,
    /// Parameters of the softmax.
    pub softmax_parameters: u64,
    /// Bytes of all parameters and the state of the optimiser.
    pub state_bytes: u64,
    /// Bytes that a process is expected to take of the memory of the host, or of the GPU.
    pub needed_bytes: u64,
    /// Largest resident memory of this process in the steps that were made, a checkpoint and a measurement of the held-out text, or
    /// on a GPU what they have taken of its memory,
    /// where the system tells.
    pub peak_bytes: Option<u64>,
    /// The device, which `peak_bytes` is of.
    pub device: String,
    /// Steps of the run.
    pub steps: u64,
    /// Steps that the run in the output has made; `None`: it would begin.
    pub steps_made: Option<u64>,
    /// Passes over the corpus.
    pub epochs: f64,
    /// Seconds of a step, measured.
    pub seconds_per_step: f64,
    /// Hours of the steps that are left.
    pub hours: f64,
    /// Tokens of each direction in a second of steps, measured.
    pub tokens_per_second: f64,
    /// Tokens of each direction that the corpus gives in a second when nothing else is done, measured.
    pub read_tokens_per_second: f64,
    /// What may be wrong.
    pub warnings: Vec<String>,
}

/// Checks a job and estimates what it takes.
///
/// # Errors
/// As [`train`](super::train) before the first step.
pub async fn estimate(job: TrainJob, stores: &Stores) -> Result<Estimate> {
    check_folder(&job.output)?;
    let (prepared, begun) = look(job, stores).await?;
    let runtime = Handle::current();
    let measured = tokio::task::spawn_blocking(move || {
        let _entered = runtime.enter();
        // Room for all processes of this machine.
        prepared.check_memory()?;
        let processes = prepared.job.processes;
        measure(&prepared.of_one_process(), processes, begun)
    });
    measured.await.map_err(|e| Error::Failed(format!("the training thread died: {e}")))?
}

/// Measures one of so many processes.
fn measure(prepared: &Prepared, processes: usize, begun: Option<u64>) -> Result<Estimate> {
    let Prepared { survey, words, recipe, steps, .. } = prepared;
    let device = prepared.job.device;
    let free = free_memory(device);
    let mut trainer = prepared.trainer()?;
    let mut feed = Feed::start(&prepared.corpus, prepared.beginning().streams, recipe.rows, Passes::Endless)?;
    let mut step = || -> Result<()> {
        let fed = feed.next()?.ok_or_else(|| Error::Failed("the corpus has ended".to_owned()))?;
        trainer.step(&fed.window).map_err(TrainFault::Step)?;
        Ok(())
    };
    // The first step allocates.
    step()?;
    let started = Instant::now();
    let mut made = 0;
    while made == 0 || (made < MAX_STEPS && started.elapsed() < MEASURED) {
        step()?;
        made += 1;
    }
    let seconds_per_step = started.elapsed().as_secs_f64() / f64::from(made);
    drop(feed);
    // What a run has in memory besides: a copy of its state for a checkpoint, and logits over all words for held-out text.
    drop(trainer.snapshot().map_err(TrainFault::Step)?);
    if let Some(text) = &prepared.held_out {
        let after_a_window = AtomicBool::new(true);
        text.measure(&trainer, &prepared.job.group, &after_a_window)?;
    }
    let tokens_of_step = (recipe.rows * recipe.positions) as f64;
    let [parameters, softmax_parameters] = prepared.parameters();
    Ok(Estimate {
        shards: survey.shards.len(),
        sentences: survey.sentences(),
        tokens: survey.tokens(),
        predictions: survey.predictions(),
        words: words.len(),
        coverage: 1.0 - survey.unknown() as f64 / survey.tokens() as f64,
        negatives: trainer.samples(),
        parameters,
        softmax_parameters,
        state_bytes: prepared.state_bytes(),
        needed_bytes: prepared.needed_bytes(),
        peak_bytes: match device {
            DeviceName::Cpu => peak_memory(),
            // libtorch keeps what it has taken.
            gpu => free.zip(free_memory(gpu)).map(|(before, after)| before.saturating_sub(after)),
        },
        device: device.to_string(),
        steps: *steps,
        steps_made: begun,
        epochs: (*steps as f64) * tokens_of_step * processes as f64 / survey.predictions() as f64,
        seconds_per_step,
        tokens_per_second: tokens_of_step / seconds_per_step,
        read_tokens_per_second: reading_speed(prepared)?,
        hours: steps.saturating_sub(begun.unwrap_or(0)) as f64 * seconds_per_step / 3600.0,
        warnings: prepared.remarks(),
    })
}

/// Tokens of each direction that are read, encoded and packed in a second.
fn reading_speed(prepared: &Prepared) -> Result<f64> {
    let recipe = &prepared.recipe;
    let mut feed = Feed::start(&prepared.corpus, prepared.beginning().streams, recipe.rows, Passes::Endless)?;
    // The first window comes when both directions have opened a shard and read a block.
    feed.next()?;
    let (started, mut windows) = (Instant::now(), 0);
    while started.elapsed() < READING {
        feed.next()?;
        windows += 1;
    }
    Ok((windows * recipe.rows * recipe.positions) as f64 / started.elapsed().as_secs_f64())
}

/// Largest resident memory of this process in bytes; `None` where there is no `/proc`.
fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string(Path::new("/proc/self/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let softmax = match self.negatives {
            Some(negatives) => format!("sampled, {} negatives", count(negatives as u64)),
            None => "over all words".to_owned(),
        };
        let mut rows = vec![
            ("shards", count(self.shards as u64)),
            ("sentences", count(self.sentences)),
            ("tokens", format!("{}, {:.2} % of them in the vocabulary", count(self.tokens), 100.0 * self.coverage)),
            ("epoch", format!("{} predictions in each direction", count(self.predictions))),
            ("parameters", format!("{} and {} of the softmax", count(self.parameters), count(self.softmax_parameters))),
            ("softmax", format!("{softmax}, vocabulary of {}", count(self.words as u64))),
            ("weights and optimiser", bytes(self.state_bytes)),
        ];
        let memory = match self.device.as_str() {
            "cpu" => "memory of this process".to_owned(),
            device => format!("memory of {device}"),
        };
        let measured = self.peak_bytes.map_or(String::new(), |peak| format!("; {} measured", bytes(peak)));
        rows.push((memory.as_str(), format!("{} estimated{measured}", bytes(self.needed_bytes))));
        rows.push(("steps", format!("{} ({:.2} epochs)", count(self.steps), self.epochs)));
        rows.extend(self.steps_made.map(|made| ("steps that were made", count(made))));
        let (needed, read) = (count(self.tokens_per_second as u64), count(self.read_tokens_per_second as u64));
        rows.push(("step", format!("{:.3} s, {needed} tokens/s, measured", self.seconds_per_step)));
        rows.push(("text alone", format!("{read} tokens/s, measured")));
        rows.push(("time", duration(Duration::from_secs_f64((3600.0 * self.hours).clamp(0.0, 1e9)))));
        rows.extend(self.warnings.iter().map(|warning| ("warning", warning.clone())));
        f.write_str(&table(&rows))
    }
}
