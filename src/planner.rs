//! Decides which waiting sentences run together, and in which rows. Pure: lengths and a budget in, batches out.
//!
//! A batch consists of *rows* that run side by side, one token per step. A row holds several sentences, one after the
//! other, each of which begins from its own start state. So all rows of a batch end at about the same step, whatever
//! the lengths of the sentences are:
//!
//! ```text
//! row 0  | a1 a2 a3 a4 a5 a6 a7       a batch of sentences of 7, 5, 4, 3 and 2 tokens
//! row 1  | b1 b2 b3 b4 b5 e1 e2
//! row 2  | c1 c2 c3 c4 d1 d2 d3
//! ```
//!
//! * `steps = max(longest sentence of the first group, ceil(share / max_rows))`, where `share` is at most the budget.
//!   The second term matters when sentences are so short that `max_rows` rows would not use the budget up. Each row is
//!   filled with the longest sentences that still fit.
//! * The budget counts *padded tokens*: rows x steps. A batch may have [`MIN_ROWS`] rows even if these exceed the
//!   budget, because, where products are libtorch's, narrower ones take little less time. So a sentence of any length leaves the queue.
//! * Sentences wait in *epochs*, in the order in which they arrive; an epoch holds the tokens of a few batches. A batch
//!   takes sentences from the oldest epoch, and from the next one only to fill its rows. So no sentence is overtaken
//!   for long.
//! * An idle device never waits for a batch to fill up: it takes what is in the queue, so that no caller waits for
//!   ever. Under load the queue fills while devices are busy, and batches are full.
//! * Near the end of the work a batch takes at most its device's share of what is left.
//!
//! The vector of a sentence depends on none of this.

use std::collections::{BTreeMap, VecDeque};

/// Minimum number of rows for which a batch has room. Where products are libtorch's, the model pads narrower ones to this height.
pub(crate) const MIN_ROWS: usize = 16;

/// Batches are not made smaller than this number of tokens to give every device a share.
const MIN_SHARE: usize = 512;

/// Size of an epoch: the tokens of this many batches per device.
const EPOCH_BATCHES: usize = 2;

/// Sentences of one batch have the same group: the same start state, and boundaries either read or not.
pub(crate) type Group = u8;

/// A batch: ids row by row, each row in the order its sentences run.
pub(crate) type Batch = Vec<Vec<u64>>;

/// The waiting sentences of all callers.
#[derive(Debug)]
pub(crate) struct Planner {
    budget: usize,
    max_rows: usize,
    devices: usize,
    epochs: VecDeque<Epoch>,
    tokens: usize,
}

/// Sentences that arrived one after the other.
#[derive(Debug, Default)]
struct Epoch {
    /// (group, length) -> sentences in the order in which they arrived; no queue is empty.
    waiting: BTreeMap<(Group, usize), VecDeque<u64>>,
    /// Tokens that have ever been added.
    tokens: usize,
}

impl Epoch {
    /// Takes a longest sentence of `group` with at most `max` tokens.
    fn take(&mut self, group: Group, max: usize) -> Option<(usize, u64)> {
        let (&key, queue) = self.waiting.range_mut((group, 0)..=(group, max)).next_back()?;
        let id = queue.pop_front()?;
        if queue.is_empty() {
            self.waiting.remove(&key);
        }
        Some((key.1, id))
    }
}

impl Planner {
    /// For batches of `budget` padded tokens and at most `max_rows` rows, which `devices` take in turn.
    pub(crate) fn new(budget: usize, max_rows: usize, devices: usize) -> Self {
        Self {
            budget: budget.max(1),
            max_rows: max_rows.max(MIN_ROWS),
            devices: devices.max(1),
            epochs: VecDeque::new(),
            tokens: 0,
        }
    }

    /// Removes all waiting sentences; from now on `devices` take batches in turn.
    pub(crate) fn restart(&mut self, devices: usize) {
        *self = Self::new(self.budget, self.max_rows, devices);
    }

    /// Adds a sentence of `length` tokens.
    pub(crate) fn push(&mut self, group: Group, length: usize, id: u64) {
        let full = EPOCH_BATCHES.saturating_mul(self.budget).saturating_mul(self.devices);
        if self.epochs.back().is_none_or(|epoch| epoch.tokens >= full) {
            self.epochs.push_back(Epoch::default());
        }
        if let Some(epoch) = self.epochs.back_mut() {
            epoch.waiting.entry((group, length)).or_default().push_back(id);
            epoch.tokens += length;
        }
        self.tokens += length;
    }

    /// Number of waiting tokens.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Takes the next batch out of the queue; `None` when it is empty.
    pub(crate) fn next_batch(&mut self) -> Option<Batch> {
        let &(group, longest) = self.epochs.front()?.waiting.keys().next_back()?;
        let share = match self.devices {
            1 => self.budget,
            devices => (self.tokens / devices).max(MIN_SHARE).min(self.budget),
        };
        let steps = longest.max(share.min(self.tokens).div_ceil(self.max_rows));
        let rows = (share / steps).max(MIN_ROWS);
        let batch: Batch = (0..rows).map_while(|_| self.row(group, steps)).collect();
        while self.epochs.front().is_some_and(|epoch| epoch.waiting.is_empty()) {
            self.epochs.pop_front();
        }
        Some(batch)
    }

    /// Fills one row of `steps` tokens; `None` when nothing fits.
    fn row(&mut self, group: Group, steps: usize) -> Option<Vec<u64>> {
        let (mut row, mut space) = (Vec::new(), steps);
        while space > 0
            && let Some((length, id)) = self.epochs.iter_mut().take(2).find_map(|epoch| epoch.take(group, space))
        {
            row.push(id);
            space -= length;
            self.tokens -= length;
        }
        (!row.is_empty()).then_some(row)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn drain(planner: &mut Planner) -> Vec<Batch> {
        std::iter::from_fn(|| planner.next_batch()).collect()
    }

    #[test]
    fn the_example_of_the_module_documentation() {
        // Worked out by hand: 7 steps; 5 leaves room for the 2, 4 for the 3.
        let mut planner = Planner::new(21, 256, 1);
        for (id, length) in [7, 5, 4, 3, 2].into_iter().enumerate() {
            planner.push(0, length, id as u64);
        }
        assert_eq!(drain(&mut planner), [[vec![0], vec![1, 4], vec![2, 3]]]);
    }

    #[test]
    fn many_short_sentences_make_no_product_of_thousands_of_rows() {
        let mut planner = Planner::new(4096, 256, 1);
        (0..4096).for_each(|id| planner.push(0, 1, id));
        let batches = drain(&mut planner);
        assert_eq!(batches.len(), 1);
        assert_eq!(batches[0].len(), 256);
        assert!(batches[0].iter().all(|row| row.len() == 16));
    }

    #[test]
    fn what_came_first_is_not_overtaken_for_long() {
        // One token waits while long sentences keep coming: its epoch holds 2 x 160 tokens, and an epoch's batches
        // take 16 rows of 10 tokens.
        let mut planner = Planner::new(160, 256, 1);
        planner.push(0, 1, 0);
        let mut id = 0;
        let served = (1..1000).position(|_| {
            for _ in 0..16 {
                id += 1;
                planner.push(0, 10, id);
            }
            planner.next_batch().is_some_and(|batch| batch.concat().contains(&0))
        });
        assert!(served.is_some_and(|batches| batches <= 3), "{served:?}");
    }

    proptest! {
        #[test]
        fn every_sentence_leaves_once_and_the_budget_is_kept(
            lengths in prop::collection::vec(1_usize..200, 0..300),
            budget in 1_usize..2000,
            devices in 1_usize..5,
        ) {
            let mut planner = Planner::new(budget, 256, devices);
            for (id, &length) in lengths.iter().enumerate() {
                planner.push((id % 2) as Group, length, id as u64);
            }
            prop_assert_eq!(planner.tokens(), lengths.iter().sum::<usize>());
            let batches = drain(&mut planner);
            for batch in &batches {
                let of = |row: &Vec<u64>| row.iter().map(|&id| lengths[id as usize]).sum::<usize>();
                let steps = batch.iter().map(of).max().unwrap_or(0);
                prop_assert!(!batch.is_empty() && batch.iter().all(|row| !row.is_empty()));
                prop_assert!(batch.len() <= MIN_ROWS || batch.len() * steps <= budget);
                let ids = batch.concat();
                prop_assert!(ids.iter().all(|id| id % 2 == ids[0] % 2), "groups never mix");
            }
            let mut all: Vec<u64> = batches.concat().concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..lengths.len() as u64).collect::<Vec<_>>());
            prop_assert_eq!(planner.tokens(), 0);
        }

        /// Compares the rows that the model computes with the tokens, for batches that the queue can fill. A row leaves
        /// the batch when it ends, and no step is narrower than the smallest product. The distribution of lengths is
        /// skewed as that of sentences: the mean is 26, the maximum 99.
        #[test]
        fn little_is_padding(pairs in prop::collection::vec((1_usize..100, 1_usize..100), 2000..3000)) {
            let lengths: Vec<usize> = pairs.iter().map(|(a, b)| 1 + a * b / 100).collect();
            let mut planner = Planner::new(4096, 256, 2);
            for (id, &length) in lengths.iter().enumerate() {
                planner.push(0, length, id as u64);
            }
            let batches = drain(&mut planner);
            let (mut tokens, mut padded) = (0, 0);
            for batch in &batches[..batches.len() - 4] {
                let rows: Vec<usize> =
                    batch.iter().map(|row| row.iter().map(|&id| lengths[id as usize]).sum()).collect();
                tokens += rows.iter().sum::<usize>();
                let live = |step: usize| rows.iter().filter(|&&row| row > step).count();
                padded += (0..rows.iter().copied().max().unwrap_or(0)).map(|t| live(t).max(MIN_ROWS)).sum::<usize>();
            }
            prop_assert!((padded - tokens) * 50 <= padded, "{padded} rows for {tokens} tokens");
        }
    }
}
