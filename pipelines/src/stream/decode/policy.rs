//! What becomes of rejected messages: a pure function over the rows of one batch.

use std::{collections::BTreeMap, str::FromStr};

use arrow::array::{BooleanArray, StringArray, StringBuilder};
use elmo::RowError;

use super::rejection::Rejection;

/// What is done with a message that cannot be decoded or embedded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnError {
    /// Its row has NULL for the vector, and the reason in the column `error`.
    #[default]
    Null,
    /// It gets no row.
    Skip,
    /// The stream stops before it.
    Fail,
    /// It gets no row, and goes to the dead-letter topic.
    DeadLetter,
}

impl FromStr for OnError {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "null" => Ok(Self::Null),
            "skip" => Ok(Self::Skip),
            "fail" => Ok(Self::Fail),
            "dead-letter" => Ok(Self::DeadLetter),
            other => Err(format!("{other:?} is no policy for errors; possible are null, skip, fail, dead-letter")),
        }
    }
}

/// Number of rejections by label.
pub type Counts = BTreeMap<&'static str, u64>;

/// What becomes of the rows of a batch.
#[derive(Debug, PartialEq)]
pub struct Applied {
    /// Which rows stay; `None` when all do.
    pub keep: Option<BooleanArray>,
    /// The column `error` of all rows, those that do not stay included: NULL for a row without an error.
    pub errors: StringArray,
    /// Rows that go to the dead-letter topic, in order.
    pub dead: Vec<(usize, Rejection)>,
    /// Rejections by label.
    pub counts: Counts,
}

/// The row at which the stream stops.
#[derive(Debug, PartialEq, Eq)]
pub struct Failed {
    /// Its index in the batch.
    pub row: usize,
    /// Why.
    pub rejection: Rejection,
}

/// The rejections of decoding and of the model in the order of the rows. A row that could not be decoded is NULL to the
/// model, which refuses no NULL; if a row is in both all the same, the reason of decoding counts.
pub fn merged(bad: Vec<(usize, Rejection)>, refused: Vec<(usize, RowError)>) -> Vec<(usize, Rejection)> {
    let refused = refused.into_iter().map(|(row, error)| (row, Rejection::from(error)));
    let mut all: Vec<_> = bad.into_iter().chain(refused).collect();
    all.sort_by_key(|(row, _)| *row);
    all.dedup_by_key(|(row, _)| *row);
    all
}

impl OnError {
    /// Applies the policy to a batch of `rows` rows, of which those in `bad`, in ascending order, were rejected.
    ///
    /// # Errors
    /// The first rejected row with the policy `fail`.
    pub fn apply(self, rows: usize, bad: Vec<(usize, Rejection)>) -> Result<Applied, Failed> {
        let mut counts = Counts::new();
        for (_, rejection) in &bad {
            *counts.entry(rejection.label()).or_default() += 1;
        }
        let errors = error_column(rows, &bad);
        let keep = || {
            let mut keep = vec![true; rows];
            bad.iter().for_each(|(row, _)| keep[*row] = false);
            (!bad.is_empty()).then(|| BooleanArray::from(keep))
        };
        let (keep, dead) = match self {
            Self::Null => (None, Vec::new()),
            Self::Skip => (keep(), Vec::new()),
            Self::DeadLetter => (keep(), bad),
            Self::Fail => match bad.into_iter().next() {
                Some((row, rejection)) => return Err(Failed { row, rejection }),
                None => (None, Vec::new()),
            },
        };
        Ok(Applied { keep, errors, dead, counts })
    }
}

fn error_column(rows: usize, bad: &[(usize, Rejection)]) -> StringArray {
    let mut errors = StringBuilder::new();
    for (row, rejection) in bad {
        errors.append_nulls(row - errors_len(&errors));
        errors.append_value(rejection.to_string());
    }
    errors.append_nulls(rows - errors_len(&errors));
    errors.finish()
}

fn errors_len(errors: &StringBuilder) -> usize {
    arrow::array::ArrayBuilder::len(errors)
}

#[cfg(test)]
mod tests {
    use arrow::array::Array;

    use super::*;

    fn bad() -> Vec<(usize, Rejection)> {
        let refused = vec![(1, RowError::from("odd")), (4, RowError::TooManyTokens { tokens: 3, max_tokens: 2 })];
        merged(
            vec![(0, Rejection::Tombstone), (3, Rejection::Tombstone), (4, Rejection::BadAvro { reason: "x" })],
            refused,
        )
    }

    fn kept(applied: &Applied) -> Option<Vec<bool>> {
        applied.keep.as_ref().map(|keep| keep.iter().flatten().collect())
    }

    /// By hand: rows 0, 1, 3 and 4 of 6 are bad; the reason of decoding counts for row 4.
    #[test]
    fn each_policy() {
        let counts = Counts::from([("bad_avro", 1), ("other", 1), ("tombstone", 2)]);
        let stay = vec![false, false, true, false, false, true];
        for (policy, keep, dead) in
            [(OnError::Null, None, 0), (OnError::Skip, Some(stay.clone()), 0), (OnError::DeadLetter, Some(stay), 4)]
        {
            let applied = policy.apply(6, bad()).unwrap();
            assert_eq!((kept(&applied), applied.dead.len(), &applied.counts), (keep, dead, &counts));
            let tombstone = "a tombstone: the message has no value";
            let errors = [Some(tombstone), Some("odd"), None, Some(tombstone), Some("not valid Avro: x"), None];
            assert_eq!(applied.errors.iter().collect::<Vec<_>>(), errors);
        }
        assert_eq!(OnError::Fail.apply(6, bad()), Err(Failed { row: 0, rejection: Rejection::Tombstone }));
        for name in ["null", "skip", "fail", "dead-letter"] {
            let fine = name.parse::<OnError>().unwrap().apply(2, Vec::new()).unwrap();
            assert!(fine.keep.is_none() && fine.errors.null_count() == 2 && fine.counts.is_empty(), "{name}");
        }
        assert!("ignore".parse::<OnError>().unwrap_err().contains("dead-letter"));
    }
}
