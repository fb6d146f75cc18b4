//! The result of a comparison.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::Serialize;

use crate::{error::Error, output::manifest::ManifestCheck, report::table, stream::chain::ChainCheck};

/// Mismatched rows that a report lists.
const MAX_LISTED_ROWS: usize = 10;
/// Mismatched rows that an error lists.
const MAX_ERROR_ROWS: usize = 3;

/// A way in which a row of an output differs from what the model computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Mismatch {
    /// Vectors or scores on one side, NULL on the other.
    Null,
    /// Another number of vectors or scores, or vectors of another width.
    Shape,
    /// NaN or infinite numbers that are not reproduced.
    NotFinite,
    /// The string of a token.
    Token,
    /// The first byte of a token.
    Start,
    /// The end of a token.
    End,
    /// The sentence of a token.
    Sentence,
    /// Whether a token is in the vocabulary.
    Known,
    /// Numbers of tokens beside a perplexity.
    Tokens,
    /// The column `truncated`.
    Truncated,
    /// The column `error`.
    Error,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Null => "values or NULL",
            Self::Shape => "number or width of vectors, or number of scores",
            Self::NotFinite => "NaN or infinite numbers",
            Self::Token => "token",
            Self::Start => "start",
            Self::End => "end",
            Self::Sentence => "sentence",
            Self::Known => "known",
            Self::Tokens => "numbers of tokens",
            Self::Truncated => "truncated",
            Self::Error => "error",
        })
    }
}

/// A row with a mismatch.
#[derive(Debug, Clone, Serialize)]
pub struct MismatchedRow {
    /// Row of the output, from 0, counted over all files.
    pub row: u64,
    /// What differs.
    pub what: Vec<Mismatch>,
}

impl fmt::Display for MismatchedRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what: Vec<String> = self.what.iter().map(ToString::to_string).collect();
        write!(f, "row {}: {}", self.row, what.join(", "))
    }
}

/// The comparison of one row.
#[derive(Debug, Default)]
pub(super) struct Compared {
    pub(super) vectors: u64,
    pub(super) scores: u64,
    pub(super) bits_differ: bool,
    /// Largest finite difference.
    pub(super) largest: f32,
    pub(super) mismatches: BTreeSet<Mismatch>,
}

/// The result of a comparison.
#[derive(Debug, Clone, Default, Serialize)]
pub struct VerifyReport {
    /// Rows of the output.
    pub rows: u64,
    /// Rows in the sample.
    pub sampled: usize,
    /// Vectors compared.
    pub vectors: u64,
    /// Scores compared, of texts and of tokens; `None` for an output of vectors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scores: Option<u64>,
    /// Largest absolute difference of two numbers, of those that are finite.
    pub largest_difference: f32,
    /// Row of the output with that difference; `None` without a difference.
    pub largest_difference_row: Option<u64>,
    /// Rows that are equal in everything, vectors to the last bit. Includes NULL rows.
    pub bit_equal_rows: usize,
    /// Rows with a mismatch of any kind.
    pub mismatched_rows: usize,
    /// Rows with a mismatch, by its kind.
    pub mismatches: BTreeMap<Mismatch, usize>,
    /// The first rows with a mismatch.
    pub first_mismatches: Vec<MismatchedRow>,
    /// Sampled rows that were not UTF-8: their vector is NULL, and the kept text is not what the job read. Of a stream,
    /// also messages without a text, which were rejected before they were embedded.
    pub not_recomputed: usize,
    /// The files compared with the manifest; `None` without a manifest.
    pub manifest: Option<ManifestCheck>,
    /// The objects of a stream compared with each other; `None` for other outputs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chain: Option<ChainCheck>,
    /// Settings that the output does not record, with the options of `elmo embed` that set them. Those of the model were
    /// assumed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unrecorded: Vec<String>,
}

impl VerifyReport {
    /// The faults of the output; `None` when every sampled row is what the model computes, numbers within `tolerance`,
    /// and the files match the manifest of a finished job.
    pub fn error(&self, tolerance: f32) -> Option<Error> {
        let message = self.failure(tolerance)?;
        let help = self.manifest.as_ref().and_then(ManifestCheck::help);
        let help = help.or_else(|| self.chain.as_ref().and_then(ChainCheck::help));
        let differs = self.mismatched_rows > 0 || self.largest_difference > tolerance;
        let is_assumed = differs && !self.unrecorded.is_empty();
        let again = || "write the vectors again with elmo embed or COPY, which record all settings".to_owned();
        Some(Error::Check { message, help: help.or_else(|| is_assumed.then(again)) })
    }

    fn failure(&self, tolerance: f32) -> Option<String> {
        let manifest = self.manifest.as_ref();
        let unfinished = manifest.filter(|check| !check.complete).map(|_| {
            "the job that writes the output is not finished; run its elmo command again to finish it".to_owned()
        });
        let failures = [
            manifest.and_then(ManifestCheck::failure),
            unfinished,
            self.chain.as_ref().and_then(ChainCheck::failure),
            self.mismatch_failure(),
            self.number_failure(tolerance),
        ];
        let failures: Vec<String> = failures.into_iter().flatten().collect();
        (!failures.is_empty()).then(|| failures.join("; "))
    }

    /// Why rows differ: settings that had to be assumed, or else `otherwise`.
    fn cause(&self, otherwise: &str) -> String {
        match self.unrecorded.as_slice() {
            [] => otherwise.to_owned(),
            unrecorded => format!(
                "the output does not record {}, so that the settings of the model were assumed, and was probably made \
                 with others",
                unrecorded.join(", ")
            ),
        }
    }

    fn mismatch_failure(&self) -> Option<String> {
        let first: Vec<String> = self.first_mismatches.iter().take(MAX_ERROR_ROWS).map(ToString::to_string).collect();
        let (rows, sampled) = (self.mismatched_rows, self.sampled);
        (rows > 0).then(|| {
            let cause = self.cause("the output or the texts were changed, or another version of elmo wrote the output");
            format!(
                "{rows} of {sampled} rows are not what this model computes for their texts ({}): {cause}",
                first.join("; ")
            )
        })
    }

    fn number_failure(&self, tolerance: f32) -> Option<String> {
        if self.largest_difference > tolerance {
            let row = self.largest_difference_row.map(|row| format!(" in row {row}")).unwrap_or_default();
            let cause = self.cause(
                "the output or the texts were changed, SQL wrote rows of several settings into the column, or another kind of device computed the output, which needs a \
                 larger --tolerance",
            );
            return Some(format!(
                "numbers differ by up to {:e}{row}, more than the tolerance of {tolerance:e}: {cause}",
                self.largest_difference
            ));
        }
        // Rows counted in none of these differ in the sign of zeros only.
        let counted = self.bit_equal_rows + self.mismatched_rows + self.not_recomputed;
        let unequal = self.sampled.saturating_sub(counted);
        (tolerance <= 0.0 && unequal > 0)
            .then(|| format!("{unequal} rows are not bit-identical, which a tolerance of 0 requires"))
    }

    pub(super) fn add(&mut self, row: u64, compared: Compared) {
        self.vectors += compared.vectors;
        self.scores = self.scores.map(|scores| scores + compared.scores);
        if compared.largest > self.largest_difference {
            self.largest_difference = compared.largest;
            self.largest_difference_row = Some(row);
        }
        if compared.mismatches.is_empty() {
            self.bit_equal_rows += usize::from(!compared.bits_differ);
            return;
        }
        self.mismatched_rows += 1;
        for mismatch in &compared.mismatches {
            *self.mismatches.entry(*mismatch).or_default() += 1;
        }
        if self.first_mismatches.len() < MAX_LISTED_ROWS {
            self.first_mismatches.push(MismatchedRow { row, what: compared.mismatches.into_iter().collect() });
        }
    }
}

impl fmt::Display for VerifyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = vec![
            ("rows", self.rows.to_string()),
            ("recomputed", self.sampled.saturating_sub(self.not_recomputed).to_string()),
            self.scores.map_or(("vectors compared", self.vectors.to_string()), |n| ("scores compared", n.to_string())),
            ("bit-identical", format!("{} rows", self.bit_equal_rows)),
            ("largest difference", format!("{:e}", self.largest_difference)),
            ("mismatched rows", self.mismatched_rows.to_string()),
        ];
        rows.extend(self.mismatches.iter().map(|(what, n)| ("differing rows", format!("{n} in {what}"))));
        rows.extend(self.first_mismatches.iter().map(|row| ("mismatch", row.to_string())));
        if !self.unrecorded.is_empty() {
            rows.push(("not recorded", self.unrecorded.join(", ")));
        }
        if self.not_recomputed > 0 {
            let label = if self.chain.is_some() { "rejected" } else { "not UTF-8" };
            rows.push((label, format!("{} rows, not recomputed", self.not_recomputed)));
        }
        if let Some(manifest) = &self.manifest {
            rows.extend(manifest.lines());
        }
        let chain = self.chain.as_ref().map(ChainCheck::lines).unwrap_or_default();
        rows.extend(chain.iter().map(|(key, line)| (key.as_str(), line.clone())));
        f.write_str(&table(&rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand.
    #[test]
    fn settings_that_are_not_recorded_explain_differences() {
        let report = |unrecorded: &[&str]| VerifyReport {
            sampled: 1,
            largest_difference: 0.5,
            unrecorded: unrecorded.iter().map(ToString::to_string).collect(),
            ..VerifyReport::default()
        };
        let error = |unrecorded: &[&str]| match report(unrecorded).error(1e-5) {
            Some(Error::Check { message, help }) => (message, help),
            other => panic!("{other:?}"),
        };
        let (message, help) = error(&["elmo.state (--state)"]);
        assert!(message.contains("does not record elmo.state (--state)"), "{message}");
        assert!(!message.contains("changed") && help.is_some(), "{message}");
        let (message, help) = error(&[]);
        assert!(message.contains("the output or the texts were changed") && help.is_none(), "{message}");
        assert!(report(&["elmo.state (--state)"]).error(1.0).is_none());
    }
}
