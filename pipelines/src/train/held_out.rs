//! Perplexity of held-out text: full softmax, state carried from sentence to sentence, as bilm-tf measures it.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use elmo::train::{Evaluated, Evaluation, Group, Trainer};
use serde::{Deserialize, Serialize};

use super::{
    checkpoint::exact,
    corpus::{Corpus, Passes, Shard},
    error::TrainFault,
    feed::{Feed, StreamState},
    together::{Wish, agree, elsewhere, together},
    words::Words,
};
use crate::{crash::train as crash, error::Result};

/// Tokens of a row of a window.
const POSITIONS: u64 = 20;
/// Most rows of a window.
const MAX_ROWS: u64 = 64;
/// Windows that a text has at least: what does not fill another one is left out.
const WINDOWS: u64 = 100;

/// Held-out text.
#[derive(Debug)]
pub(super) struct HeldOut {
    corpus: Arc<Corpus>,
    words: Arc<Words>,
    /// What it is.
    pub(super) shards: Vec<Shard>,
    rows: usize,
    positions: usize,
}

/// A measurement.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Measured {
    /// Steps before it.
    pub(super) step: u64,
    #[serde(with = "exact")]
    pub(super) forward: f64,
    #[serde(with = "exact")]
    pub(super) backward: f64,
    /// Geometric mean of both.
    #[serde(with = "exact")]
    pub(super) average: f64,
    /// Predictions of each direction.
    pub(super) tokens: u64,
}

/// A line of `valid.jsonl`.
#[derive(Debug, Serialize)]
pub(super) struct ValidLine {
    pub(super) step: u64,
    pub(super) epoch: f64,
    pub(super) perplexity_forward: f64,
    pub(super) perplexity_backward: f64,
    pub(super) perplexity: f64,
    pub(super) tokens: u64,
    /// No earlier measurement is better.
    pub(super) best: bool,
}

impl Measured {
    pub(super) fn line(&self, epoch: f64, best: bool) -> ValidLine {
        ValidLine {
            step: self.step,
            epoch,
            perplexity_forward: self.forward,
            perplexity_backward: self.backward,
            perplexity: self.average,
            tokens: self.tokens,
            best,
        }
    }
}

/// Rows and positions of windows for so many predictions: many rows are fast, and many windows lose little of the text.
fn window_size(predictions: u64) -> (u64, u64) {
    ((predictions / (POSITIONS * WINDOWS)).clamp(1, MAX_ROWS), POSITIONS.min(predictions))
}

impl HeldOut {
    /// Text that was surveyed.
    pub(super) fn new(corpus: Arc<Corpus>, words: &Arc<Words>, shards: Vec<Shard>) -> Self {
        let (rows, positions) = window_size(shards.iter().map(|shard| shard.tokens + shard.sentences).sum());
        Self { corpus, words: Arc::clone(words), shards, rows: rows as usize, positions: positions as usize }
    }

    /// Rows of its windows.
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Measures the model of a run, as [`HeldOut::read`].
    ///
    /// # Errors
    /// Those of the text and of the device.
    pub(super) fn measure(&self, trainer: &Trainer, group: &Group, stopped: &AtomicBool) -> Result<Option<Measured>> {
        let evaluation = Evaluation::of_run(trainer, self.rows).map_err(|error| TrainFault::Step(error).into());
        let evaluation = together(group, evaluation)?;
        let total = self.read(evaluation, group, stopped, |_| {})?;
        Ok(total.map(|total| Measured {
            step: trainer.counters().step,
            forward: total.perplexity_of(0),
            backward: total.perplexity_of(1),
            average: total.perplexity(),
            tokens: total.tokens,
        }))
    }

    /// Reads all of the text with a model for windows of [`HeldOut::rows`], each process with its rows of the windows; `None`
    /// when `stopped` was set in one of them before the end. `read` learns the predictions until then. Blocks; must be called within
    /// the runtime.
    ///
    /// # Errors
    /// Those of the text and of the device.
    pub(super) fn read(
        &self,
        mut evaluation: Evaluation,
        group: &Group,
        stopped: &AtomicBool,
        mut read: impl FnMut(u64),
    ) -> Result<Option<Evaluated>> {
        let from = StreamState::begin(self.words.boundaries(), self.rows, self.positions);
        let mut feed = together(group, Feed::start(&self.corpus, from, self.rows, Passes::One))?;
        let mut total = Evaluated::default();
        loop {
            let fed = {
                let _busy = group.busy();
                feed.next()
            };
            let wish = if fed.is_err() { Wish::Fail } else { Wish::GoOn };
            let fed = match agree(group, wish)? {
                (Wish::GoOn, _) => fed?,
                (_, rank) => return Err(fed.err().unwrap_or_else(|| elsewhere(rank))),
            };
            let Some(fed) = fed else { return Ok(Some(total)) };
            total.add(evaluation.window(&fed.window).map_err(TrainFault::Step)?);
            read(total.tokens);
            crash::in_measurement();
            let wish = if stopped.load(Ordering::Relaxed) { Wish::Stop } else { Wish::GoOn };
            if agree(group, wish)?.0 == Wish::Stop {
                return Ok(None);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A window is at most a hundredth of a long text; a short one has a single row.
    #[test]
    fn windows_lose_little_of_the_text() {
        for predictions in [5, 19, 20, 1000, 4000, 100_000, 128_000, 10_000_000] {
            let (rows, positions) = window_size(predictions);
            assert!((1..=MAX_ROWS).contains(&rows) && (1..=POSITIONS).contains(&positions));
            assert!(rows * positions <= predictions, "{predictions}");
            assert!(predictions < 4000 || rows * positions * WINDOWS <= predictions, "{predictions}");
        }
        assert_eq!((window_size(128_000), window_size(64_000)), ((64, 20), (32, 20)));
    }
}
