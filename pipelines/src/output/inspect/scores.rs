//! Statistics of the columns of `elmo score`.

use arrow::{
    array::{Array, AsArray, Float64Array, RecordBatch, UInt32Array},
    datatypes::{Float64Type, UInt32Type},
};
use serde::Serialize;

use super::norms::Norms;
use crate::{report::count, scores::PERPLEXITY};

/// Statistics of the perplexities of an output.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Scores {
    /// Rows with a perplexity.
    pub texts: u64,
    /// Rows without one.
    pub null_rows: u64,
    /// Tokens of these texts.
    pub tokens: u64,
    /// Tokens that are not in the vocabulary.
    pub unknown: u64,
    /// Perplexities that are NaN or infinite, of either direction or of both.
    pub not_finite: u64,
    /// Smallest perplexity of a text.
    pub perplexity_min: f32,
    /// Median; estimated from evenly spaced texts when there are more than two million.
    pub perplexity_median: f32,
    /// Largest.
    pub perplexity_max: f32,
}

impl Scores {
    /// Counts the rows of a batch; those of other columns than the ones of `elmo score` are NULL rows.
    pub(super) fn add(&mut self, rows: &RecordBatch, perplexities: &mut Norms) {
        let column = rows.column_by_name(PERPLEXITY).and_then(|column| column.as_struct_opt());
        let Some(column) = column else {
            self.null_rows += rows.num_rows() as u64;
            return;
        };
        let number = |name| column.column_by_name(name)?.as_primitive_opt::<Float64Type>();
        let number_of = |name| column.column_by_name(name)?.as_primitive_opt::<UInt32Type>();
        let (average, forward, backward) = (number("average"), number("forward"), number("backward"));
        let at = |column: Option<&Float64Array>, row: usize| column.map_or(f64::NAN, |column| column.value(row));
        let of = |column: Option<&UInt32Array>, row: usize| column.map_or(0, |column| u64::from(column.value(row)));
        let (tokens, unknown) = (number_of("tokens"), number_of("unknown"));
        for row in 0..column.len() {
            if column.is_null(row) {
                self.null_rows += 1;
                continue;
            }
            self.texts += 1;
            self.tokens += of(tokens, row);
            self.unknown += of(unknown, row);
            match [average, forward, backward].iter().all(|column| at(*column, row).is_finite()) {
                true => perplexities.add(at(average, row).min(f64::from(f32::MAX)) as f32),
                false => self.not_finite += 1,
            }
        }
    }

    pub(super) fn lines(&self) -> Vec<(&'static str, String)> {
        let Self { perplexity_min: min, perplexity_median: median, perplexity_max: max, .. } = self;
        vec![
            ("texts scored", count(self.texts)),
            ("tokens", format!("{}, {} not in the vocabulary", count(self.tokens), count(self.unknown))),
            ("perplexity", format!("{min:.2} to {max:.2}, median {median:.2}")),
            ("NULL rows", count(self.null_rows)),
            ("NaN or infinite", count(self.not_finite)),
        ]
    }

    /// Sets what is known when all rows were seen.
    pub(super) fn finish(&mut self, perplexities: &mut Norms) {
        if let Some(median) = perplexities.median() {
            (self.perplexity_min, self.perplexity_median, self.perplexity_max) =
                (perplexities.min, median, perplexities.max);
        }
    }
}
