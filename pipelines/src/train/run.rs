//! The loop of a run: windows in, steps, and what follows from them.

use std::{
    fmt,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use elmo::{
    engine::lanes,
    model::libtorch_ceiling,
    train::{Group, StepReport, TrainError, Trainer},
};
use serde::Serialize;

use super::{
    checkpoint::{Checkpoints, Found, RunState},
    corpus::Passes,
    error::TrainFault,
    feed::{Fed, Feed, StreamState},
    held_out::{HeldOut, Measured},
    job::OnSpike,
    journal::{Journals, Softmax, StepLine},
    model,
    settings::length,
    spike::Spike,
    start::{self, Prepared, note_checkpoint},
    together::{Wish, agree, elsewhere, shared, together},
    upload::{Target, UploadReport, Uploads},
    warm,
};
use crate::{
    crash::train as crash,
    error::{Error, Result},
    report::{TARGET, count, duration, table},
};

/// Seconds between two lines of progress.
const PROGRESS_EVERY: Duration = Duration::from_secs(10);
/// Steps after which the weights of all processes are compared, beside every checkpoint.
const CHECK_EVERY: u64 = 100;
/// Seconds for which the speed of matrix products is measured before the first step.
const CEILING_SECONDS: f64 = 0.2;
/// How long one look at the last copy of a checkpoint waits for it.
const LAST_COPY: Duration = Duration::from_secs(1);
/// Rollbacks without a checkpoint between them, after which a run ends.
const MAX_ROLLBACKS: u32 = 3;

/// What a run did.
#[derive(Debug, Clone, Serialize)]
pub struct TrainReport {
    /// Folder of the run, a model directory.
    pub output: PathBuf,
    /// Why the run has ended.
    pub ended: &'static str,
    /// Steps of the whole run.
    pub steps: u64,
    /// Passes over the corpus, by counted tokens.
    pub epochs: f64,
    /// Predictions of each direction in the whole run.
    pub tokens: u64,
    /// Negatives of the sampled softmax; `None`: all words.
    pub negatives: Option<usize>,
    /// Held-out perplexity of the initial weights, if it was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub perplexity_before: Option<f64>,
    /// Step of the weights in the folder.
    pub model_step: u64,
    /// Held-out perplexity of these weights: forward, backward, geometric mean.
    pub perplexity_forward: Option<f64>,
    /// Backward.
    pub perplexity_backward: Option<f64>,
    /// Geometric mean of both.
    pub perplexity: Option<f64>,
    /// Rows of the corpus and of the held-out text that are no text and were left out.
    pub bad_rows: u64,
    /// Seconds of the whole run.
    pub seconds: f64,
    /// Predictions of one direction per second, in this process.
    pub tokens_per_second: f64,
    /// Seconds for which the step waited for the corpus, in this process.
    pub waited_seconds: f64,
    /// Operations of the products of this process per second, over those that its matrix products were measured to reach; a mean
    /// over the steps of this process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_of_ceiling: Option<f64>,
    /// The copies of the checkpoints, if they were wanted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upload: Option<UploadReport>,
    /// How the model is used.
    pub use_with: String,
}

/// A run.
pub(super) struct Run {
    prepared: Prepared,
    checkpoints: Checkpoints,
    trainer: Trainer,
    state: RunState,
    feed: Feed,
    group: Group,
    /// Sentences after which the start state of the model is taken, in process 0.
    warm_text: Vec<Vec<String>>,
    /// Process 0 writes them.
    journals: Option<Journals>,
    /// Process 0 makes them, if they are wanted.
    uploads: Option<Uploads>,
    stopped: Arc<AtomicBool>,
    last_checkpoint: Option<PathBuf>,
    /// Step of the last checkpoint.
    saved: Option<u64>,
    /// Speed of the matrix products of this process, in GFLOP/s; not measured when there is no step to make.
    ceiling: Option<f64>,
    /// Operations of the products of this process, in 1e9, and the seconds of its steps.
    work: (f64, f64),
    started: Instant,
    /// Tokens before this process.
    tokens_before: u64,
    shown: Option<Instant>,
}

impl Run {
    pub(super) fn new(
        prepared: Prepared,
        checkpoints: Checkpoints,
        found: Option<Found>,
        trainer: Trainer,
        target: Option<Target>,
        stopped: Arc<AtomicBool>,
    ) -> Result<Self> {
        let (last_checkpoint, state) = match found {
            // What is written from now on has the settings of now, which may round sums otherwise.
            Some(Found { path, state }) => (Some(path), RunState { settings: prepared.settings().clone(), ..state }),
            None => (None, prepared.beginning()),
        };
        let step = state.counters.step;
        let group = prepared.job.group.clone();
        let _busy = group.busy();
        let after = last_checkpoint.as_ref().map(|_| step);
        let journals = if group.is_first() { Journals::open(&prepared.job.output, after).map(Some) } else { Ok(None) };
        let journals = together(&group, journals)?;
        let begin = |target| Uploads::start(&prepared.job.output, target, prepared.settings().clone());
        let uploads = together(&group, target.map(begin).transpose())?;
        let warm_text = if group.is_first() { warm::sentences(&prepared.corpus) } else { Ok(Vec::new()) };
        let warm_text = together(&group, warm_text)?;
        // Before threads begin to read the corpus, which would take processor time from the products.
        let ceiling = if step < prepared.steps { ceiling(&prepared) } else { None };
        let feed = Feed::start(&prepared.corpus, state.streams.clone(), prepared.recipe.rows, Passes::Endless);
        let feed = together(&group, feed)?;
        Ok(Self {
            group,
            warm_text,
            journals,
            uploads,
            feed,
            checkpoints,
            trainer,
            stopped,
            saved: last_checkpoint.as_ref().map(|_| step),
            last_checkpoint,
            ceiling,
            work: (0.0, 0.0),
            started: Instant::now(),
            tokens_before: state.counters.tokens,
            state,
            shown: None,
            prepared,
        })
    }

    /// Makes steps until the run ends, and waits for the last copy.
    ///
    /// # Errors
    /// As [`train`](super::train).
    pub(super) fn run(mut self) -> Result<TrainReport> {
        let ended = self.steps();
        self.finish_uploads(&ended);
        Ok(self.report(ended?))
    }

    /// Makes steps until the run ends; why it has ended.
    fn steps(&mut self) -> Result<&'static str> {
        if let Some(checkpoint) = self.last_checkpoint.as_ref().filter(|_| self.group.is_first()) {
            let step = self.state.counters.step;
            tracing::info!(target: TARGET, step, checkpoint = %checkpoint.display(), "resuming");
        }
        let is_resumed = self.group.is_first() && self.saved.is_some();
        let noted = if is_resumed { self.note_checkpoint() } else { Ok(()) };
        together(&self.group, noted)?;
        self.forget_lost()?;
        self.restore_model()?;
        self.upload();
        if self.is_due() {
            self.measure()?;
        }
        if self.saved.is_none() && self.prepared.job.on_spike == OnSpike::Rollback {
            self.checkpoint()?;
        }
        let ended = loop {
            // Also after a restart, when the run was interrupted in the measurement.
            if self.is_due() {
                self.measure()?;
            }
            if let Some(ended) = self.ended() {
                break ended;
            }
            let begun = Instant::now();
            let fed = self.next_window()??;
            let made = match crash::spike() {
                false => self.trainer.step(&fed.window),
                true => Err(TrainError::NotFinite { step: self.state.counters.step + 1, what: "the loss" }),
            };
            match made.map_err(not_finite) {
                Ok(report) => match self.jump(&report) {
                    Some(spike) => self.go_back(spike, fed.after)?,
                    None => self.after_step(&report, fed, begun)?,
                },
                Err(Ok(spike)) => self.go_back(spike, fed.after)?,
                Err(Err(error)) => return Err(TrainFault::Step(error).into()),
            }
        };
        self.checkpoint()?;
        Ok(ended)
    }

    /// The next window, which all processes have; the inner error ends the run after its state was written.
    fn next_window(&mut self) -> Result<Result<Fed>> {
        let is_stopped = self.stopped.load(Ordering::Relaxed);
        if is_stopped && self.group.is_single() {
            return Ok(Err(self.interrupted()));
        }
        let ended = || Error::Failed("the corpus has ended, which it never does".to_owned());
        let fed = {
            let _busy = self.group.busy();
            self.feed.next().and_then(|fed| fed.ok_or_else(ended))
        };
        let wish = match &fed {
            _ if is_stopped => Wish::Stop,
            Err(_) => Wish::Fail,
            Ok(_) => Wish::GoOn,
        };
        Ok(match agree(&self.group, wish)? {
            (Wish::GoOn, _) => fed,
            (Wish::Stop, _) => Err(self.interrupted()),
            (Wish::Fail, rank) => {
                let error = fed.err().unwrap_or_else(|| elsewhere(rank));
                Err(self.saved_before(error))
            }
        })
    }

    /// Writes the state and says where it is.
    fn interrupted(&mut self) -> Error {
        match self.checkpoint() {
            Ok(checkpoint) => TrainFault::Interrupted { step: self.state.counters.step, checkpoint }.into(),
            Err(error) => error,
        }
    }

    /// The error of a text after the state was written: no step is lost.
    fn saved_before(&mut self, error: Error) -> Error {
        if self.state.counters.step == 0 {
            return error;
        }
        match self.checkpoint() {
            Ok(checkpoint) => {
                TrainFault::Saved { error: Box::new(error), step: self.state.counters.step, checkpoint }.into()
            }
            // The first error is the cause.
            Err(_) => error,
        }
    }

    /// Whether the held-out text must be measured before the next step.
    fn is_due(&self) -> bool {
        let step = self.state.counters.step;
        let is_measured = self.state.last.is_some_and(|last| last.step == step);
        let at_end = step >= self.prepared.steps;
        self.prepared.held_out.is_some()
            && (step > 0 || self.prepared.job.measure_first)
            && !is_measured
            && (at_end || step.is_multiple_of(self.prepared.eval_every()))
    }

    /// Why the run has ended, if it has.
    fn ended(&self) -> Option<&'static str> {
        if self.prepared.job.patience.is_some_and(|patience| self.state.stale >= patience) {
            return Some("the held-out perplexity no longer falls");
        }
        (self.state.counters.step >= self.prepared.steps).then_some("all steps were made")
    }

    /// The jump of the loss in this step, unless jumps are ignored.
    fn jump(&self, report: &StepReport) -> Option<Spike> {
        let spike = self.state.recent.spike(report.step, report.loss)?;
        if self.prepared.job.on_spike != OnSpike::Ignore {
            return Some(spike);
        }
        if self.group.is_first() {
            tracing::warn!("{}", spike.reason);
        }
        None
    }

    fn after_step(&mut self, report: &StepReport, fed: Fed, begun: Instant) -> Result<()> {
        let seconds = begun.elapsed().as_secs_f64();
        self.state.counters = self.trainer.counters();
        self.state.streams = fed.after;
        self.state.recent.add(report.loss);
        self.state.pending.add(report, seconds);
        self.state.seconds += seconds;
        self.work = (self.work.0 + report.gflop, self.work.1 + seconds);
        let is_last = report.step >= self.prepared.steps;
        self.log(report, is_last)?;
        crash::after_step();
        if report.step.is_multiple_of(CHECK_EVERY) {
            self.trainer.check_equal().map_err(TrainFault::Step)?;
        }
        if self.is_due() {
            self.measure()?;
        }
        if report.step.is_multiple_of(self.prepared.checkpoint_every())
            && let Err(spike) = self.try_checkpoint()?
        {
            let after = self.state.streams.clone();
            self.go_back(spike, after)?;
        }
        Ok(())
    }

    fn log(&mut self, report: &StepReport, is_last: bool) -> Result<()> {
        let epoch = self.epoch();
        if is_last || report.step.is_multiple_of(self.prepared.job.log_every) {
            let line = self.state.pending.take_line(report, self.softmax(), epoch, self.ceiling);
            self.journal(|journals| journals.step(&line))?;
            self.show(&line);
        }
        Ok(())
    }

    /// A line of progress, now and then.
    fn show(&mut self, line: &StepLine) {
        if !self.group.is_first() || self.shown.is_some_and(|shown| shown.elapsed() < PROGRESS_EVERY) {
            return;
        }
        self.shown = Some(Instant::now());
        let speed = self.tokens_per_second();
        let left = (self.prepared.steps - line.step) as f64 * self.tokens_of_step() as f64 / speed.max(1e-9);
        // A loss over some of the words must not be taken for that of held-out text.
        let (loss, sampled_loss) = match line.softmax {
            Softmax::Full => (Some(rounded(line.loss)), None),
            Softmax::Sampled => (None, Some(rounded(line.loss))),
        };
        tracing::info!(
            target: TARGET,
            step = line.step,
            steps = self.prepared.steps,
            epoch = rounded(line.epoch),
            loss,
            sampled_loss,
            held_out_perplexity = self.state.last.map(|last| rounded(last.average)),
            tokens_per_second = speed.round(),
            percent_of_matmul_ceiling = line.share_of_ceiling.map(|share| (100.0 * share).round()),
            left = duration(Duration::from_secs_f64(left.min(1e9))),
            "training"
        );
    }

    fn measure(&mut self) -> Result<()> {
        let Some(text) = &self.prepared.held_out else { return Ok(()) };
        let begun = Instant::now();
        let measured = match text.measure(&self.trainer, &self.group, &self.stopped) {
            Ok(Some(measured)) => measured,
            Ok(None) => return Err(self.interrupted()),
            // The others are not at the same place, so that there can be no checkpoint.
            Err(error) if !self.group.is_single() && is_of_step(&error) => return Err(error),
            Err(error) => return Err(self.saved_before(error)),
        };
        let better = self.state.best.is_none_or(|best| measured.average < best.average);
        let is_best = better && measured.average.is_finite();
        self.state.last = Some(measured);
        if measured.step == 0 {
            self.state.first = Some(measured);
        }
        self.state.stale = if is_best { 0 } else { self.state.stale + 1 };
        self.state.seconds += begun.elapsed().as_secs_f64();
        let line = measured.line(self.epoch(), is_best);
        self.journal(|journals| journals.measurement(&line))?;
        if self.group.is_first() {
            tracing::info!(
                target: TARGET,
                step = measured.step,
                forward = rounded(measured.forward),
                backward = rounded(measured.backward),
                perplexity = rounded(measured.average),
                best = is_best,
                "held-out perplexity"
            );
        }
        if is_best {
            self.state.best = Some(measured);
        }
        self.export_if(|_| is_best)
    }

    /// Writes a checkpoint, unless there is one of this step, and the model unless a better one is kept.
    fn checkpoint(&mut self) -> Result<PathBuf> {
        self.try_checkpoint()?.map_err(|spike| self.fault(spike).into())
    }

    /// As [`Run::checkpoint`]; the inner error says that the state is not finite, so that it is no checkpoint.
    fn try_checkpoint(&mut self) -> Result<Result<PathBuf, Spike>> {
        let step = self.state.counters.step;
        if let Some(last) = self.last_checkpoint.as_ref().filter(|_| self.saved == Some(step)) {
            return Ok(Ok(last.clone()));
        }
        self.trainer.check_equal().map_err(TrainFault::Step)?;
        let snapshot = match self.group.is_first() {
            true => Some(self.trainer.snapshot().map_err(TrainFault::Step)?),
            false => self.trainer.join_snapshot().map(|()| None).map_err(TrainFault::Step)?,
        };
        if !shared(&self.group, snapshot.as_ref().is_none_or(elmo::train::Snapshot::is_finite))? {
            let error = TrainError::NotFinite { step, what: "a weight or the state of the optimiser" };
            return Ok(Err(not_finite(error).map_err(TrainFault::Step)?));
        }
        if self.state.spiked.is_none_or(|(spiked, _)| step > spiked) {
            (self.state.rollbacks, self.state.spiked) = (0, None);
        }
        let written = snapshot.map_or(Ok(()), |snapshot| self.write(&snapshot));
        together(&self.group, written)?;
        let path = self.checkpoints.path(step);
        (self.last_checkpoint, self.saved) = (Some(path.clone()), Some(step));
        self.export_if(|run| run.state.best.is_none() && step > 0)?;
        self.upload();
        Ok(Ok(path))
    }

    /// Hands the last checkpoint over to be copied.
    fn upload(&mut self) {
        if let (Some(uploads), Some(path), Some(step)) = (&mut self.uploads, &self.last_checkpoint, self.saved) {
            uploads.add(path, step, self.state.best.is_some());
        }
    }

    /// Waits for the last copy. The other processes wait too: whoever has started them takes one that ends early for a failure.
    fn finish_uploads(&mut self, ended: &Result<&'static str>) {
        let is_orderly = match ended {
            Ok(_) => true,
            Err(error) => matches!(error.module(), Some(TrainFault::Interrupted { .. })),
        };
        let mut is_said = false;
        loop {
            let own = self.uploads.as_mut().is_none_or(|uploads| uploads.has_ended(LAST_COPY));
            // The error of another process has ended the run already.
            let has_ended = if is_orderly { shared(&self.group, own).unwrap_or(own) } else { own };
            if has_ended {
                break;
            }
            if !own && !is_said {
                tracing::info!(target: TARGET, "waiting until the last checkpoint is copied");
                is_said = true;
            }
        }
        let report = self.uploads.as_ref().map(Uploads::report);
        if let Some(UploadReport { url, failed: Some(reason), .. }) = report.filter(|_| ended.is_err()) {
            tracing::warn!("the last checkpoint was not copied to {url}: {reason}");
        }
    }

    /// Writes down that there is a checkpoint, which `train.json` of an older run, or of one that was killed, does not say.
    fn note_checkpoint(&self) -> Result<()> {
        let _busy = self.group.busy();
        note_checkpoint(&self.prepared.job.output).map_err(|error| self.of_disk(error))
    }

    /// Writes journals and checkpoint.
    fn write(&self, snapshot: &elmo::train::Snapshot) -> Result<()> {
        let _busy = self.group.busy();
        self.journals.as_ref().map_or(Ok(()), Journals::sync).map_err(|error| self.of_disk(error))?;
        self.checkpoints.write(&self.state, snapshot, self.last_checkpoint.as_deref())?;
        self.note_checkpoint()
    }

    /// Writes something down in process 0.
    fn journal(&mut self, write: impl FnOnce(&mut Journals) -> Result<()>) -> Result<()> {
        let _busy = self.group.busy();
        self.journals.as_mut().map_or(Ok(()), write).map_err(|error| self.of_disk(error))
    }

    fn fault(&self, Spike { reason, is_finite }: Spike) -> TrainFault {
        let (last, went_back) = (self.last_checkpoint.clone(), self.state.rollbacks > 0);
        TrainFault::Spike { reason, is_finite, last, went_back }
    }

    /// Goes back to a checkpoint and passes over the text of the spike, or ends the run.
    fn go_back(&mut self, spike: Spike, after: [StreamState; 2]) -> Result<()> {
        let group = self.group.clone();
        let _busy = group.busy();
        let can_go_back = self.prepared.job.on_spike == OnSpike::Rollback && self.state.rollbacks < MAX_ROLLBACKS;
        let found = if self.group.is_first() { self.checkpoint_before_spike() } else { Ok(None) };
        let found = shared(&self.group, together(&self.group, found)?)?;
        let Some(last) = found.filter(|_| can_go_back) else {
            return Err(self.fault(spike).into());
        };
        if self.group.is_first() {
            let reason = spike.reason;
            tracing::warn!("{reason}; going back to {} and passing over this text", last.path.display());
        }
        self.prepared.reset(&mut self.trainer, &last)?;
        let (step, at) = (self.state.counters.step + 1, last.state.counters.step);
        let removed = if self.group.is_first() { self.checkpoints.remove_after(at) } else { Ok(()) };
        together(&self.group, removed.map_err(Error::from))?;
        (self.last_checkpoint, self.saved) = (Some(last.path), Some(at));
        if let Some(uploads) = &self.uploads {
            uploads.remove_after(at);
        }
        // The model of the best measurement is in the folder, also if it is younger than the checkpoint.
        let RunState { seconds, best, rollbacks, .. } = self.state;
        let (rollbacks, spiked) = (rollbacks + 1, Some((step, at)));
        // The run goes on with the settings of now, which may differ from those of the checkpoint in the rounding of sums.
        let settings = self.prepared.settings().clone();
        self.state = RunState { settings, streams: after, seconds, best, rollbacks, spiked, ..last.state };
        let is_first = self.group.is_first();
        let opened = is_first.then(|| Journals::open(&self.prepared.job.output, Some(at))).transpose();
        self.journals = together(&self.group, opened)?;
        Ok(())
    }

    /// The last checkpoint; when the run has gone back to it already, the one before, if there is one.
    fn checkpoint_before_spike(&self) -> Result<Option<Found>> {
        let last = self.checkpoints.latest()?;
        let is_used = |found: &Found| self.state.spiked.is_some_and(|(_, at)| at == found.state.counters.step);
        match last {
            Some(found) if is_used(&found) => {
                // Damaged ones, or none: this one is tried again.
                let earlier = self.checkpoints.latest_before(found.state.counters.step).unwrap_or_default();
                Ok(Some(earlier.unwrap_or(found)))
            }
            other => Ok(other),
        }
    }

    /// Process 0 writes the model if it must, and the others wait for it.
    fn export_if(&self, must: impl Fn(&Self) -> bool) -> Result<()> {
        let exported = if self.group.is_first() && must(self) { self.export() } else { Ok(()) };
        together(&self.group, exported)
    }

    /// A checkpoint may name a best measurement whose weights were lost since.
    fn forget_lost(&mut self) -> Result<()> {
        let lost = if self.group.is_first() { start::lost_best(&self.prepared.job.output) } else { Ok(None) };
        let lost = shared(&self.group, together(&self.group, lost)?)?;
        self.state.best = self.state.best.filter(|best| Some(best.step) != lost);
        Ok(())
    }

    /// Writes the model of a run that resumes again if a file of it is missing: the weights of the best measurement, or those of the
    /// last checkpoint. After a rollback, a checkpoint of the step of the best measurement may have other weights, for which it has
    /// another measurement.
    fn restore_model(&mut self) -> Result<()> {
        let missing = if self.saved.is_some() { model::missing(&self.prepared.job.output) } else { None };
        let Some(file) = shared(&self.group, missing.map(str::to_owned))? else { return Ok(()) };
        let at = self.state.counters.step;
        let best = self.state.best;
        let step = best.map_or(at, |best| best.step);
        if step == at && self.state.last == best || best.is_none() {
            return self.export_if(|_| true);
        }
        let found = if self.group.is_first() { self.checkpoints.of_step(step) } else { None };
        match shared(&self.group, found)?.filter(|found| found.state.last == best) {
            Some(found) => self.export_checkpoint(found),
            None => self.replace_model(&file, step),
        }
    }

    /// Writes the model of an earlier checkpoint, which has the weights of the best measurement, and returns to the last one.
    fn export_checkpoint(&mut self, found: Found) -> Result<()> {
        let Some(path) = self.last_checkpoint.clone() else { return Ok(()) };
        let last = Found { path, state: self.state.clone() };
        self.prepared.reset(&mut self.trainer, &found)?;
        self.state = RunState { last: last.state.best, ..found.state };
        let exported = self.export_if(|_| true);
        self.state = last.state.clone();
        exported?;
        self.prepared.reset(&mut self.trainer, &last)
    }

    /// Writes the model of the last checkpoint, because that of the best measurement is lost. A run that is complete would not find
    /// a better one, so it fails.
    fn replace_model(&mut self, file: &str, step: u64) -> Result<()> {
        let path = self.prepared.job.output.join(file);
        if self.ended().is_some() {
            return Err(TrainFault::ModelLost { path, step }.into());
        }
        let noted = if self.group.is_first() { start::note_lost(&self.prepared.job.output, step) } else { Ok(()) };
        together(&self.group, noted)?;
        if self.group.is_first() {
            tracing::warn!(
                "{} is missing: it belongs to the model of step {step}, and there is no complete checkpoint of that step; writing \
                 the model of step {} instead, and the next measurement counts as the best one",
                path.display(),
                self.state.counters.step
            );
        }
        self.state.best = None;
        self.export_if(|_| true)
    }

    fn export(&self) -> Result<()> {
        let _busy = self.group.busy();
        let Prepared { job, options, words, .. } = &self.prepared;
        let export = model::Export {
            trainer: &self.trainer,
            options,
            words,
            warm_text: &self.warm_text,
            description: self.description(),
        };
        model::export(&job.output, export).map_err(|error| self.of_disk(error))
    }

    /// The text of `MODEL.md`.
    fn description(&self) -> String {
        let Prepared { job, survey, steps, .. } = &self.prepared;
        let mut text = format!(
            "# A biLM trained by elmo {}\n\nStep {} of {} ({:.2} epochs, {} tokens in each direction).\n\n",
            env!("CARGO_PKG_VERSION"),
            self.state.counters.step,
            length(job.until, *steps),
            self.epoch(),
            count(self.state.counters.tokens),
        );
        text += &format!(
            "Text is read with `{}`, as recorded in options.json; other options override it.\n\n## Held-out text\n\n",
            self.reading()
        );
        match (&self.prepared.held_out, &self.state.last) {
            (Some(held_out), Some(measured)) => {
                let names: Vec<&str> = held_out.shards.iter().map(|shard| shard.name()).collect();
                text += &format!(
                    "Perplexity {:.3} (forward {:.3}, backward {:.3}) on {} predictions in each direction of {}: all words \
                     of the vocabulary, state carried from sentence to sentence.\n",
                    measured.average,
                    measured.forward,
                    measured.backward,
                    count(measured.tokens),
                    names.join(", "),
                );
            }
            _ => text += "Not measured.\n",
        }
        text += &format!(
            "\n## Corpus\n\n{} sentences, {} tokens, {:.2} % of them not among the {} words of the vocabulary.\n\n\
             | shard | sentences | tokens | SHA-256 of its text |\n|---|---|---|---|\n",
            count(survey.sentences()),
            count(survey.tokens()),
            100.0 * survey.unknown() as f64 / survey.tokens() as f64,
            count(self.prepared.words.len() as u64),
        );
        for shard in &survey.shards {
            let (sentences, tokens) = (count(shard.sentences), count(shard.tokens));
            text += &format!("| {} | {sentences} | {tokens} | `{}` |\n", shard.name(), &shard.sha256[..16]);
        }
        text += "\n## Recipe\n\n| setting | value |\n|---|---|\n";
        for (name, value) in self.prepared.settings().iter().filter(|(name, _)| *name != "model") {
            text += &format!("| {name} | {value} |\n");
        }
        text
    }

    /// What the model records for its users: the options that read text as the corpus was read.
    fn reading(&self) -> String {
        let text = self.prepared.options.spec();
        format!("--tokenizer {} --sentences {} --state {}", text.tokenizer, text.sentences, text.state)
    }

    fn report(&self, ended: &'static str) -> TrainReport {
        let kept: Option<Measured> = self.state.best;
        let counters = self.state.counters;
        let output = self.prepared.job.output.clone();
        TrainReport {
            use_with: format!("elmo embed FILE --model {} --output OUT", output.display()),
            output,
            ended,
            steps: counters.step,
            epochs: self.epoch(),
            tokens: counters.tokens,
            negatives: self.trainer.samples(),
            perplexity_before: self.state.first.map(|first| first.average),
            model_step: kept.map_or(counters.step, |best| best.step),
            perplexity_forward: kept.map(|best| best.forward),
            perplexity_backward: kept.map(|best| best.backward),
            perplexity: kept.map(|best| best.average),
            bad_rows: self.prepared.survey.bad_rows() + self.prepared.held_out.as_ref().map_or(0, HeldOut::bad_rows),
            seconds: self.state.seconds,
            tokens_per_second: self.tokens_per_second(),
            waited_seconds: self.feed.waited.as_secs_f64(),
            share_of_ceiling: self.share_of_ceiling(),
            upload: self.uploads.as_ref().map(Uploads::report),
        }
    }

    /// That of all steps of this process.
    fn share_of_ceiling(&self) -> Option<f64> {
        let (gflop, seconds) = self.work;
        self.ceiling.filter(|_| seconds > 0.0).map(|ceiling| gflop / seconds / ceiling)
    }

    fn tokens_of_step(&self) -> u64 {
        (self.prepared.recipe.rows * self.prepared.recipe.positions) as u64
    }

    fn tokens_per_second(&self) -> f64 {
        let tokens = self.state.counters.tokens.saturating_sub(self.tokens_before);
        tokens as f64 / self.started.elapsed().as_secs_f64().max(1e-9)
    }

    /// Passes over the corpus, by counted tokens.
    fn epoch(&self) -> f64 {
        self.state.counters.tokens as f64 / self.prepared.survey.predictions() as f64
    }

    fn softmax(&self) -> Softmax {
        if self.trainer.samples().is_some() { Softmax::Sampled } else { Softmax::Full }
    }

    /// An error that may be one of the disk, such as a full one: the run resumes from its last checkpoint.
    fn of_disk(&self, error: Error) -> Error {
        let (path, source) = match error {
            Error::Io { path, source } => (path, source),
            other => match other.module() {
                Some(elmo::Error::Io { path, source }) => {
                    (path.clone(), std::io::Error::new(source.kind(), source.to_string()))
                }
                _ => return other,
            },
        };
        TrainFault::Write { path, source, last: self.last_checkpoint.clone() }.into()
    }
}

/// The spike that an error of a step is, or the error.
fn not_finite(error: TrainError) -> Result<Spike, TrainError> {
    match error {
        TrainError::NotFinite { .. } => {
            let reason = error.to_string().split(';').next().unwrap_or_default().to_owned();
            Ok(Spike { reason, is_finite: false })
        }
        other => Err(other),
    }
}

/// Whether the device or an exchange with the other processes has failed.
fn is_of_step(error: &Error) -> bool {
    matches!(error.module(), Some(TrainFault::Step(_)))
}

/// The speed of matrix products of this model on the device and the threads of this process, which has no share in the result:
/// an error of the measurement is none of the run.
fn ceiling(prepared: &Prepared) -> Option<f64> {
    let Prepared { job, options, recipe, .. } = prepared;
    let lanes = lanes(&[job.device], Some(job.threads));
    let measured = libtorch_ceiling(options, &lanes, recipe.precision, CEILING_SECONDS);
    measured.inspect_err(|error| tracing::debug!("the matmul ceiling was not measured: {error}")).ok()
}

/// Four decimals, for people.
fn rounded(value: f64) -> f64 {
    (10_000.0 * value).round() / 10_000.0
}

impl fmt::Display for TrainReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = vec![
            ("model", format!("{}, the weights of step {}", self.output.display(), count(self.model_step))),
            ("ended", format!("after {} steps ({:.2} epochs): {}", count(self.steps), self.epochs, self.ended)),
            ("tokens", format!("{} in each direction", count(self.tokens))),
        ];
        if let Some(before) = self.perplexity_before {
            rows.push(("held-out before", format!("perplexity {before:.3}, over all words")));
        }
        if let (Some(both), Some(forward), Some(backward)) =
            (self.perplexity, self.perplexity_forward, self.perplexity_backward)
        {
            let text = format!("{both:.3} (forward {forward:.3}, backward {backward:.3}), over all words");
            rows.push(("held-out perplexity", text));
        }
        if self.bad_rows > 0 {
            rows.push(("rows left out", count(self.bad_rows)));
        }
        rows.push(("time", duration(Duration::from_secs_f64(self.seconds.clamp(0.0, 1e9)))));
        if self.tokens_per_second > 0.0 {
            let (speed, waited) = (count(self.tokens_per_second as u64), self.waited_seconds);
            let share = self.share_of_ceiling.map(|share| format!(", {:.0} % of the matmul ceiling", 100.0 * share));
            let share = share.unwrap_or_default();
            rows.push(("speed", format!("{speed} tokens/s in each direction{share}, {waited:.1} s waiting for text")));
        }
        if let Some(UploadReport { url, step: Some(step), .. }) = &self.upload {
            rows.push(("copied", format!("the checkpoint of step {}, to {url}", count(*step))));
        }
        rows.push(("use it with", self.use_with.clone()));
        f.write_str(&table(&rows))
    }
}
