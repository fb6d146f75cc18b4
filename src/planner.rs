//! Which waiting sentences run together. Pure: lengths and a budget in, batches out.
//!
//! * Sentences of similar length share a batch, longest first: a batch that is too big for a device
//!   shows itself at once, and short sentences fill the end of a job evenly.
//! * The budget counts *padded tokens*: sentences x longest sentence. A sentence longer than the budget
//!   runs alone, so every sentence leaves the queue.
//! * An idle device never waits for more work: with an empty queue behind it, a partly filled batch goes
//!   at once, so no caller can be left hanging. Under load the queue fills while devices are busy, and
//!   batches are full by themselves.
//! * A sentence that was passed over [`PATIENCE`] times is served next, so that a steady stream of long
//!   sentences cannot starve a short one.
//! * Near the end of the work the rest is shared out: a batch takes at most its device's share.
//!
//! What a sentence's vector is never depends on any of this.

use std::collections::{BTreeMap, VecDeque};

/// Batches after which the oldest waiting sentence is served whatever its length.
const PATIENCE: u64 = 16;

/// The smallest share of the budget that is worth a batch of its own while others could share it.
const SMALLEST_SHARE: usize = 8;

/// Sentences of one batch must agree on this: the start state and whether boundaries are read.
pub(crate) type Group = u8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Waiting {
    id: u64,
    /// Batches planned when the sentence came.
    since: u64,
}

/// The waiting sentences of all callers.
#[derive(Debug)]
pub(crate) struct Planner {
    budget: usize,
    devices: usize,
    /// (group, length) -> sentences in the order they came.
    waiting: BTreeMap<(Group, usize), VecDeque<Waiting>>,
    tokens: usize,
    batches: u64,
}

impl Planner {
    /// `budget` padded tokens a batch, for `devices` that take batches in turn.
    pub(crate) fn new(budget: usize, devices: usize) -> Self {
        Self { budget: budget.max(1), devices: devices.max(1), waiting: BTreeMap::new(), tokens: 0, batches: 0 }
    }

    /// Adds a sentence of `length` tokens.
    pub(crate) fn push(&mut self, group: Group, length: usize, id: u64) {
        self.waiting.entry((group, length)).or_default().push_back(Waiting { id, since: self.batches });
        self.tokens += length;
    }

    /// Tokens that wait.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Takes the next batch out of the queue; `None` when nothing waits.
    pub(crate) fn next_batch(&mut self) -> Option<Vec<u64>> {
        let (group, longest) = self.anchor()?;
        let share = match self.devices {
            1 => self.budget,
            devices => (self.tokens / devices).clamp(self.budget / SMALLEST_SHARE, self.budget),
        };
        let most = (share / longest).max(1);
        let lengths: Vec<usize> =
            self.waiting.range((group, 0)..=(group, longest)).rev().map(|((_, length), _)| *length).collect();
        let mut batch = Vec::new();
        for length in lengths {
            while batch.len() < most
                && let Some(id) = self.take(group, length)
            {
                batch.push(id);
            }
            if batch.len() == most {
                break;
            }
        }
        self.batches += 1;
        Some(batch)
    }

    /// Group and length of the longest sentence of the next batch.
    fn anchor(&self) -> Option<(Group, usize)> {
        let oldest = self.waiting.iter().filter_map(|(key, queue)| Some((queue.front()?.since, *key))).min()?;
        if self.batches - oldest.0 > PATIENCE {
            return Some(oldest.1);
        }
        self.waiting.keys().next_back().copied()
    }

    fn take(&mut self, group: Group, length: usize) -> Option<u64> {
        let queue = self.waiting.get_mut(&(group, length))?;
        let taken = queue.pop_front()?;
        if queue.is_empty() {
            self.waiting.remove(&(group, length));
        }
        self.tokens -= length;
        Some(taken.id)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn drain(planner: &mut Planner) -> Vec<Vec<u64>> {
        std::iter::from_fn(|| planner.next_batch()).collect()
    }

    #[test]
    fn similar_lengths_share_a_batch_longest_first() {
        let mut planner = Planner::new(40, 1);
        for (id, length) in [3, 20, 4, 19, 20].into_iter().enumerate() {
            planner.push(0, length, id as u64);
        }
        // 66 tokens wait; 40 padded tokens hold two sentences of 20, then 19 + 4, then the 3.
        assert_eq!(drain(&mut planner), [vec![1, 4], vec![3, 2], vec![0]]);
    }

    #[test]
    fn an_oversize_sentence_runs_alone() {
        let mut planner = Planner::new(10, 1);
        planner.push(0, 1000, 7);
        planner.push(0, 2, 8);
        assert_eq!(drain(&mut planner), [vec![7], vec![8]]);
    }

    #[test]
    fn a_short_sentence_is_not_starved_by_long_ones() {
        let mut planner = Planner::new(10, 1);
        planner.push(0, 1, 0);
        let served = (1..1000).position(|id| {
            planner.push(0, 10, id);
            planner.next_batch().is_some_and(|batch| batch.contains(&0))
        });
        assert_eq!(served, Some(PATIENCE as usize + 1));
    }

    proptest! {
        #[test]
        fn every_sentence_leaves_once_and_the_budget_is_kept(
            lengths in prop::collection::vec(1_usize..200, 0..300),
            budget in 1_usize..2000,
            devices in 1_usize..5,
        ) {
            let mut planner = Planner::new(budget, devices);
            for (id, &length) in lengths.iter().enumerate() {
                planner.push((id % 2) as Group, length, id as u64);
            }
            prop_assert_eq!(planner.tokens(), lengths.iter().sum::<usize>());
            let batches = drain(&mut planner);
            for batch in &batches {
                let longest = batch.iter().map(|&id| lengths[id as usize]).max().unwrap_or(0);
                prop_assert!(!batch.is_empty());
                prop_assert!(batch.len() == 1 || batch.len() * longest <= budget);
                prop_assert!(batch.iter().all(|id| id % 2 == batch[0] % 2), "groups never mix");
            }
            let mut all: Vec<u64> = batches.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..lengths.len() as u64).collect::<Vec<_>>());
            prop_assert_eq!(planner.tokens(), 0);
        }
    }
}
