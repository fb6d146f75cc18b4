//! What every step and every measurement gave: `steps.jsonl` and `valid.jsonl` have a line of JSON each, and TensorBoard's event
//! files the same numbers.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

use elmo::train::StepReport;
use serde::{Deserialize, Serialize};

use super::{
    checkpoint::exact,
    held_out::ValidLine,
    tensorboard::{Events, FOLDER},
};
use crate::error::{Error, Result};

pub(super) const STEPS: &str = "steps.jsonl";
pub(super) const VALID: &str = "valid.jsonl";

/// All that a run writes down.
#[derive(Debug)]
pub(super) struct Journals {
    steps: Journal,
    valid: Journal,
    events: Events,
}

impl Journals {
    /// Opens the journals of a run to go on after a step, or to begin.
    ///
    /// # Errors
    /// [`Error::Io`], as all methods of this type.
    pub(super) fn open(run: &Path, after: Option<u64>) -> Result<Self> {
        let (steps, valid, events) = (run.join(STEPS), run.join(VALID), run.join(FOLDER));
        Ok(Self {
            steps: at(Journal::open(&steps, after), &steps)?,
            valid: at(Journal::open(&valid, after), &valid)?,
            events: at(Events::open(&events, after), &events)?,
        })
    }

    /// Adds a line of steps.
    ///
    /// # Errors
    /// As [`Journals::open`].
    pub(super) fn step(&mut self, line: &StepLine) -> Result<()> {
        at(self.steps.add(line), &self.steps.path)?;
        at(self.events.step(line), &self.events.folder)
    }

    /// Adds a measurement.
    ///
    /// # Errors
    /// As [`Journals::open`].
    pub(super) fn measurement(&mut self, line: &ValidLine) -> Result<()> {
        at(self.valid.add(line), &self.valid.path)?;
        at(self.events.measurement(line), &self.events.folder)
    }

    /// Makes all of them durable.
    ///
    /// # Errors
    /// As [`Journals::open`].
    pub(super) fn sync(&self) -> Result<()> {
        at(self.steps.sync(), &self.steps.path)?;
        at(self.valid.sync(), &self.valid.path)?;
        at(self.events.sync(), &self.events.folder)
    }
}

fn at<T>(outcome: io::Result<T>, path: &Path) -> Result<T> {
    outcome.map_err(|source| Error::io(path, source))
}

/// Lines with the number of a step.
#[derive(Debug)]
struct Journal {
    path: PathBuf,
    file: File,
}

#[derive(Deserialize)]
struct Numbered {
    step: u64,
}

impl Journal {
    /// Opens a journal to go on after a step: lines of later steps, which will be made again, are removed; those of all steps
    /// for `None`.
    ///
    /// # Errors
    /// Those of the disk.
    fn open(path: &Path, after: Option<u64>) -> io::Result<Self> {
        let text = match fs::read(path) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error),
        };
        let stays = |line: &&str| {
            let step = serde_json::from_str::<Numbered>(line).ok().map(|line| line.step);
            line.ends_with('\n') && step.is_some() && step <= after
        };
        let kept: String = text.split_inclusive('\n').filter(stays).collect();
        if kept != text {
            super::model::write_file(path, kept.as_bytes())?;
        }
        Ok(Self { path: path.to_owned(), file: OpenOptions::new().create(true).append(true).open(path)? })
    }

    /// Adds a line.
    ///
    /// # Errors
    /// Those of the disk.
    fn add(&mut self, line: &impl Serialize) -> io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        self.file.write_all(&text)
    }

    /// Makes all lines durable.
    ///
    /// # Errors
    /// Those of the disk.
    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

/// Classes over which the loss is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Softmax {
    /// All words.
    Full,
    /// An estimate with some of the words, which is not comparable with held-out perplexity.
    Sampled,
}

/// A line of `steps.jsonl`: means over the steps since the line before, except where it says otherwise.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct StepLine {
    /// The last step.
    pub(super) step: u64,
    pub(super) loss_forward: f64,
    pub(super) loss_backward: f64,
    pub(super) loss: f64,
    pub(super) softmax: Softmax,
    /// Before clipping.
    pub(super) grad_norm: f64,
    pub(super) clip_scale: f64,
    /// Of the last step.
    pub(super) learning_rate: f64,
    /// Predictions of one direction in these steps.
    pub(super) tokens: u64,
    /// Duration of these steps.
    pub(super) seconds: f64,
    /// Passes over the corpus since the beginning, by counted tokens.
    pub(super) epoch: f64,
    /// Operations of the products of this process per second, over those that its matrix products were measured to reach.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) share_of_ceiling: Option<f64>,
}

impl StepLine {
    pub(super) fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds.max(1e-9)
    }
}

/// Sums of the steps since the last line. Part of a checkpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Pending {
    steps: u64,
    tokens: u64,
    #[serde(with = "exact")]
    loss_forward: f64,
    #[serde(with = "exact")]
    loss_backward: f64,
    #[serde(with = "exact")]
    grad_norm: f64,
    #[serde(with = "exact")]
    clip_scale: f64,
    #[serde(with = "exact")]
    seconds: f64,
    /// Operations of the products of this process, in 1e9.
    #[serde(default, with = "exact")]
    gflop: f64,
}

impl Pending {
    pub(super) fn add(&mut self, report: &StepReport, seconds: f64) {
        self.steps += 1;
        self.tokens += report.tokens;
        self.loss_forward += report.loss_forward;
        self.loss_backward += report.loss_backward;
        self.grad_norm += report.grad_norm;
        self.clip_scale += report.clip_scale;
        self.seconds += seconds;
        self.gflop += report.gflop;
    }

    /// The line of these steps, of which `last` was the last one; starts over. `ceiling` is in GFLOP/s.
    pub(super) fn take_line(
        &mut self,
        last: &StepReport,
        softmax: Softmax,
        epoch: f64,
        ceiling: Option<f64>,
    ) -> StepLine {
        let Self { steps, tokens, loss_forward, loss_backward, grad_norm, clip_scale, seconds, gflop } =
            std::mem::take(self);
        let mean = |sum: f64| sum / steps as f64;
        let (loss_forward, loss_backward) = (mean(loss_forward), mean(loss_backward));
        StepLine {
            step: last.step,
            loss_forward,
            loss_backward,
            loss: f64::midpoint(loss_forward, loss_backward),
            softmax,
            grad_norm: mean(grad_norm),
            clip_scale: mean(clip_scale),
            learning_rate: last.learning_rate,
            tokens,
            seconds,
            epoch,
            share_of_ceiling: ceiling.map(|ceiling| gflop / seconds.max(1e-9) / ceiling),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize)]
    struct Line {
        step: u64,
    }

    #[test]
    fn a_journal_goes_on_after_a_step() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("steps.jsonl");
        let mut journal = Journal::open(&path, None).unwrap();
        for step in 0..=4 {
            journal.add(&Line { step }).unwrap();
        }
        // The process was killed while it wrote.
        fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"step\":").unwrap();
        let mut journal = Journal::open(&path, Some(2)).unwrap();
        journal.add(&Line { step: 3 }).unwrap();
        journal.sync().unwrap();
        let text = "{\"step\":0}\n{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n";
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        Journal::open(&path, None).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "");
    }

    /// By hand: means of two steps.
    #[test]
    fn a_line_has_means() {
        let report = |step: u64, loss: f64| StepReport {
            step,
            loss_forward: loss,
            loss_backward: loss + 2.0,
            loss: loss + 1.0,
            grad_norm: 4.0 * loss,
            clip_scale: 0.5,
            learning_rate: 0.1 * step as f64,
            tokens: 20,
            words: 3,
            gflop: 9.0 - 3.0 * step as f64,
        };
        let mut pending = Pending::default();
        pending.add(&report(1, 1.0), 0.25);
        let mut restored: Pending = serde_json::from_str(&serde_json::to_string(&pending).unwrap()).unwrap();
        assert_eq!(restored, pending);
        restored.add(&report(2, 3.0), 0.5);
        let line = restored.take_line(&report(2, 3.0), Softmax::Full, 0.5, Some(16.0));
        assert_eq!((line.step, line.loss_forward, line.loss_backward, line.loss), (2, 2.0, 4.0, 3.0));
        assert_eq!((line.grad_norm, line.clip_scale, line.learning_rate), (8.0, 0.5, 0.2));
        assert_eq!((line.tokens, line.seconds, restored), (40, 0.75, Pending::default()));
        // 6 and 3 GFLOP in 0.75 s are 12 GFLOP/s.
        assert_eq!(line.share_of_ceiling, Some(0.75));
    }
}
