//! `steps.jsonl` and `valid.jsonl`: what every step and every measurement gave, a line of JSON each.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

use elmo::train::StepReport;
use serde::{Deserialize, Serialize};

use super::checkpoint::exact;

/// Lines with the number of a step.
#[derive(Debug)]
pub(super) struct Journal {
    pub(super) path: PathBuf,
    file: File,
}

#[derive(Deserialize)]
struct Numbered {
    step: u64,
}

impl Journal {
    /// Opens a journal to go on after `step`: lines of later steps, which will be made again, are removed.
    ///
    /// # Errors
    /// Those of the disk.
    pub(super) fn open(path: &Path, step: u64) -> io::Result<Self> {
        let text = match fs::read(path) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error),
        };
        let stays = |line: &&str| {
            line.ends_with('\n') && serde_json::from_str::<Numbered>(line).is_ok_and(|line| line.step <= step)
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
    pub(super) fn add(&mut self, line: &impl Serialize) -> io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        self.file.write_all(&text)
    }

    /// Makes all lines durable.
    ///
    /// # Errors
    /// Those of the disk.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

/// A line of `steps.jsonl`: means over the steps since the line before, except where it says otherwise.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct StepLine {
    /// The last step.
    pub(super) step: u64,
    pub(super) loss_forward: f64,
    pub(super) loss_backward: f64,
    pub(super) loss: f64,
    /// `sampled`: an estimate with some of the words, which is not comparable with held-out perplexity. `full`: all words.
    pub(super) softmax: &'static str,
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
    }

    /// The line of these steps, of which `last` was the last one; begins anew.
    pub(super) fn take_line(&mut self, last: &StepReport, softmax: &'static str, epoch: f64) -> StepLine {
        let Self { steps, tokens, loss_forward, loss_backward, grad_norm, clip_scale, seconds } = std::mem::take(self);
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
        let mut journal = Journal::open(&path, 0).unwrap();
        for step in 1..=4 {
            journal.add(&Line { step }).unwrap();
        }
        // The process was killed while it wrote.
        fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"step\":").unwrap();
        let mut journal = Journal::open(&path, 2).unwrap();
        journal.add(&Line { step: 3 }).unwrap();
        journal.sync().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n");
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
            gflop: 1.0,
        };
        let mut pending = Pending::default();
        pending.add(&report(1, 1.0), 0.25);
        let mut restored: Pending = serde_json::from_str(&serde_json::to_string(&pending).unwrap()).unwrap();
        assert_eq!(restored, pending);
        restored.add(&report(2, 3.0), 0.5);
        let line = restored.take_line(&report(2, 3.0), "full", 0.5);
        assert_eq!((line.step, line.loss_forward, line.loss_backward, line.loss), (2, 2.0, 4.0, 3.0));
        assert_eq!((line.grad_norm, line.clip_scale, line.learning_rate), (8.0, 0.5, 0.2));
        assert_eq!((line.tokens, line.seconds, restored), (40, 0.75, Pending::default()));
    }
}
