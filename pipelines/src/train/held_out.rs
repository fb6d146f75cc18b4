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
/// Percent of the predictions that the windows hold at least, unless a single row holds fewer.
const LEAST: u64 = 90;

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
    ((predictions / (POSITIONS * WINDOWS)).clamp(1, MAX_ROWS), predictions.clamp(1, POSITIONS))
}

/// Predictions of sentences of so many tokens: every token, and the end of the sentence.
fn predictions(lengths: &[u32]) -> impl Iterator<Item = u64> {
    lengths.iter().map(|&tokens| u64::from(tokens) + 1)
}

/// At most so many rows. With few long sentences, a row that finds no other sentence ends the last window early, while the others have
/// much left to read: then fewer rows leave out less of the text.
fn rows_for(lengths: &[u32], most: u64, positions: u64) -> u64 {
    let all: u64 = predictions(lengths).sum();
    let mut rows = most;
    while rows > 1 && 100 * measured(lengths, rows, positions) < LEAST * all {
        rows /= 2;
    }
    rows
}

/// Predictions in the windows of a single pass, with sentences dealt to rows as [`Packer`](elmo::train::Packer) deals them.
fn measured(lengths: &[u32], rows: u64, positions: u64) -> u64 {
    let mut sentences = predictions(lengths);
    let (mut unread, mut windows) = (vec![0; rows as usize], 0_u64);
    while unread.iter_mut().all(|row| fill(row, positions, &mut sentences)) {
        windows += 1;
    }
    windows * rows * positions
}

/// Reads so many predictions of a row, of whose sentence so many are unread; false when there is no other sentence.
fn fill(unread: &mut u64, positions: u64, sentences: &mut impl Iterator<Item = u64>) -> bool {
    let mut left = positions;
    while left > *unread {
        left -= *unread;
        match sentences.next() {
            Some(next) => *unread = next,
            None => return false,
        }
    }
    *unread -= left;
    true
}

impl HeldOut {
    /// Text that was surveyed, with the number of tokens of each sentence.
    pub(super) fn new(corpus: Arc<Corpus>, words: &Arc<Words>, shards: Vec<Shard>, lengths: &[u32]) -> Self {
        let (most, positions) = window_size(predictions(lengths).sum());
        let rows = rows_for(lengths, most, positions);
        Self { corpus, words: Arc::clone(words), shards, rows: rows as usize, positions: positions as usize }
    }

    /// Rows of its windows.
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Rows that are no text and were left out.
    pub(super) fn bad_rows(&self) -> u64 {
        self.shards.iter().map(|shard| shard.bad_rows).sum()
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
    use std::convert::Infallible;

    use elmo::train::{Boundaries, Direction, Packer, Places, SentenceList};

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

    /// By hand, for documents of 6100 predictions, which are 305 windows of a row. Ten of them could have 30 rows, but fill neither
    /// 30 nor 15. With 7 rows, three rows get a second document and the fourth none: 7 of 10 are measured. With 3 rows, three
    /// rounds of three are measured, which are 90 %. A single document has a single row, and sentences of ordinary length have all rows.
    #[test]
    fn few_long_sentences_have_few_rows() {
        assert_eq!(window_size(61_000), (30, 20));
        let documents = [6099; 10];
        let found = [30, 15, 7, 3, 1].map(|rows| measured(&documents, rows, POSITIONS));
        assert_eq!(found, [0, 0, 42_700, 54_900, 61_000]);
        assert_eq!(rows_for(&documents, 30, POSITIONS), 3);
        assert_eq!(rows_for(&[60_999], 30, POSITIONS), 1);
        assert_eq!(rows_for(&[9; 12_800], MAX_ROWS, POSITIONS), MAX_ROWS);
        // Whatever the text, one row measures something.
        assert_eq!((rows_for(&[0], 1, 1), measured(&[0], 1, 1)), (1, 1));
    }

    /// Counted by the packer itself, for sentences of none to 39 tokens.
    #[test]
    fn predictions_are_those_of_the_packer() {
        let vocabulary: Arc<[Arc<str>]> = ["<S>", "</S>", "<UNK>"].map(Arc::from).into();
        let mut list = SentenceList::new(Arc::clone(&vocabulary));
        let lengths: Vec<u32> = (0..50).map(|n| n * n * 7 % 40).collect();
        for &tokens in &lengths {
            (0..tokens).for_each(|_| list.push_word(2));
            list.end();
        }
        let list = Arc::new(list);
        for (rows, positions) in [(1, 1), (1, 20), (3, 7), (8, 20), (49, 20), (50, 20), (60, 3)] {
            let boundaries = Boundaries { begin: 0, end: 1 };
            let mut packer = Packer::new(Direction::Forward, boundaries, rows, positions);
            let mut places = Places::new(Arc::clone(&vocabulary));
            let (mut next, mut expected) = (0, 0);
            let mut source = || {
                next += 1;
                Ok::<_, Infallible>(list.sentence(next - 1))
            };
            while let Ok(Some(window)) = packer.next_window(&mut places, &mut source) {
                places.finish();
                expected += window.targets.len() as u64;
            }
            assert_eq!(measured(&lengths, rows as u64, positions as u64), expected, "{rows} {positions}");
        }
    }
}
