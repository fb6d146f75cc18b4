//! Which waiting sentences run together, and how. Pure: lengths and a budget in, batches out.
//!
//! A batch is a number of *rows* that run side by side, one step a token. A row holds one sentence after the other
//! (each begins from its own start state), so that rows of one batch end at about the same step, whatever the lengths
//! are:
//!
//! ```text
//! row 0  | a1 a2 a3 a4 a5 a6 a7       a batch of sentences of 7, 5, 4, 3 and 2 tokens
//! row 1  | b1 b2 b3 b4 b5 e1 e2
//! row 2  | c1 c2 c3 c4 d1 d2 d3
//! ```
//!
//! * The longest sentence of the oldest epoch's highest group says how many steps a batch has, whatever waits behind
//!   it; there are more steps where sentences are so short that the most rows would not use the budget up. Every row
//!   takes the longest that still fits.
//! * The budget counts *padded tokens*: rows x steps. There are at least [`MIN_ROWS`] rows, as narrower products cost
//!   the same, so a sentence of any length leaves the queue.
//! * Sentences wait in *epochs* of some batches' worth, in the order they came. A batch begins with the oldest epoch
//!   and takes from the next one only what fills its rows, so nothing is overtaken for long.
//! * An idle device never waits for more work: with an empty queue behind it, a partly filled batch goes at once, so no
//!   caller can be left hanging. Under load the queue fills while devices are busy, and batches are full by themselves.
//! * Near the end of the work the rest is shared out: a batch takes at most its device's share.
//!
//! What a sentence's vector is never depends on any of this.

use std::collections::{BTreeMap, VecDeque};

/// Rows that cost as much as fewer: the model computes no narrower product.
pub(crate) const MIN_ROWS: usize = 16;

/// Tokens of the smallest batch that is worth one of its own while others could share it.
const SMALLEST_SHARE: usize = 512;

/// Batches' worth of tokens of one epoch, for each device.
const EPOCH_BATCHES: usize = 2;

/// Sentences of one batch must agree on this: the start state and whether boundaries are read.
pub(crate) type Group = u8;

/// A batch: ids row by row, each row in the order its sentences run.
pub(crate) type Batch = Vec<Vec<u64>>;

/// The waiting sentences of all callers.
#[derive(Debug)]
pub(crate) struct Planner {
    budget: usize,
    most_rows: usize,
    devices: usize,
    epochs: VecDeque<Epoch>,
    tokens: usize,
}

/// Sentences that came one after the other.
#[derive(Debug, Default)]
struct Epoch {
    /// (group, length) -> sentences in the order they came; no queue is empty.
    waiting: BTreeMap<(Group, usize), VecDeque<u64>>,
    /// Tokens that ever came.
    tokens: usize,
}

impl Epoch {
    /// Takes a longest sentence of `group` with at most `most` tokens.
    fn take(&mut self, group: Group, most: usize) -> Option<(usize, u64)> {
        let (&key, queue) = self.waiting.range_mut((group, 0)..=(group, most)).next_back()?;
        let id = queue.pop_front()?;
        if queue.is_empty() {
            self.waiting.remove(&key);
        }
        Some((key.1, id))
    }
}

impl Planner {
    /// `budget` padded tokens a batch, for `devices` that take batches in turn. Of short sentences a batch has
    /// `most_rows` rows at the most, and more steps instead.
    pub(crate) fn new(budget: usize, most_rows: usize, devices: usize) -> Self {
        Self {
            budget: budget.max(1),
            most_rows: most_rows.max(MIN_ROWS),
            devices: devices.max(1),
            epochs: VecDeque::new(),
            tokens: 0,
        }
    }

    /// Forgets all waiting sentences; from now on `devices` take batches in turn.
    pub(crate) fn restart(&mut self, devices: usize) {
        *self = Self::new(self.budget, self.most_rows, devices);
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

    /// Tokens that wait.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Takes the next batch out of the queue; `None` when nothing waits.
    pub(crate) fn next_batch(&mut self) -> Option<Batch> {
        let &(group, longest) = self.epochs.front()?.waiting.keys().next_back()?;
        let share = match self.devices {
            1 => self.budget,
            devices => (self.tokens / devices).max(SMALLEST_SHARE).min(self.budget),
        };
        let steps = longest.max(share.min(self.tokens).div_ceil(self.most_rows));
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

        /// What the model computes (rows leave when they end, no step is narrower than the smallest product) against
        /// tokens, for batches that the queue can fill. Lengths are skewed as those of sentences
        /// are: the mean is 26, the longest 99.
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
