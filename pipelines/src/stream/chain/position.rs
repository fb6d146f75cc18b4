//! Where a partition is read from, given the end of its chain and what the broker has.

use std::{ops::Range, str::FromStr};

use super::ChainError;
use crate::stream::TopicPartition;

/// What to do when the broker has deleted messages that are not in the dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnGap {
    /// Stop with an error.
    #[default]
    Fail,
    /// Continue at the first message that is left; the next object records the gap.
    Skip,
}

impl FromStr for OnGap {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "fail" => Ok(Self::Fail),
            "skip" => Ok(Self::Skip),
            other => Err(format!("{other:?} is no policy for gaps; possible are fail, skip")),
        }
    }
}

/// Where a partition is read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Position {
    /// The offset of the first message to read.
    pub start: i64,
    /// Offsets before it that are lost. They are given to the first open file ([`OpenFile::gap`](super::OpenFile::gap)).
    pub gap: Option<Range<i64>>,
}

/// Where to read a partition whose chain ends at `end`, and of which the broker has the offsets from `low` to `high`, the
/// high watermark.
///
/// A topic that was deleted, created again and filled beyond the chain's end is not recognised here: offsets do not tell
/// it from the old one.
///
/// # Errors
/// [`ChainError::Recreated`] when the chain ends beyond `high`, [`ChainError::Gap`] when messages between its end and
/// `low` are lost and `on_gap` is [`OnGap::Fail`].
pub fn position(
    partition: &TopicPartition,
    end: i64,
    (low, high): (i64, i64),
    on_gap: OnGap,
) -> Result<Position, ChainError> {
    if end > high {
        return Err(ChainError::Recreated { partition: partition.clone(), end, high });
    }
    match (end < low, on_gap) {
        (false, _) => Ok(Position { start: end, gap: None }),
        (true, OnGap::Skip) => Ok(Position { start: low, gap: Some(end..low) }),
        (true, OnGap::Fail) => Err(ChainError::Gap { partition: partition.clone(), end, low }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Fault;

    #[test]
    fn positions() {
        let partition = TopicPartition::new("reviews", 3);
        let at = |end, range, on_gap| position(&partition, end, range, on_gap);
        let start = |start| Position { start, gap: None };
        assert_eq!(at(5, (0, 9), OnGap::Fail).unwrap(), start(5));
        assert_eq!(at(5, (5, 5), OnGap::Fail).unwrap(), start(5));
        assert_eq!(at(5, (7, 9), OnGap::Skip).unwrap(), Position { start: 7, gap: Some(5..7) });
        let gap = at(5, (7, 9), OnGap::Fail).unwrap_err();
        assert_eq!(
            gap.to_string(),
            "reviews[3]: the dataset ends at offset 5, but the broker has deleted all messages before offset 7: 2 are lost"
        );
        assert!(gap.help().unwrap().contains("--on-gap skip"));
        for on_gap in [OnGap::Fail, OnGap::Skip] {
            let created_again = at(5, (0, 4), on_gap).unwrap_err();
            assert!(created_again.help().unwrap().contains("--generation"), "{created_again}");
        }
    }
}
