//! Computes the columns of texts again and compares them with rows of an output.

use std::sync::Arc;

use arrow::{
    array::{Array, ArrayRef, AsArray, Float32Array, RecordBatch, StructArray},
    compute::cast,
    datatypes::DataType,
};
use elmo::EmbeddedColumns;

use super::{
    report::{Compared, Mismatch, VerifyReport},
    scores,
};
use crate::{
    error::{Error, Result},
    output::vectors::vectors_of_row,
    stage::{REMARKS, Stage, results},
};

/// Prefix of the error of a row whose bytes are not UTF-8.
const NOT_UTF8: &str = "not UTF-8";

/// Sampled rows of one file, and their texts.
pub(super) struct SampledRows {
    /// Their numbers in the output.
    pub(super) rows: Vec<u64>,
    pub(super) found: RecordBatch,
    pub(super) texts: ArrayRef,
    /// A stream wrote them.
    pub(super) of_stream: bool,
}

impl SampledRows {
    /// Whether a row was rejected because of bytes that its kept text no longer has: invalid UTF-8 is kept as U+FFFD,
    /// which is valid. A message of a stream that could not be decoded has no text at all.
    fn lost_bytes(&self, row: usize) -> bool {
        let error = self.found.column_by_name("error").and_then(|column| column.as_string_opt::<i32>());
        if self.of_stream && self.texts.is_null(row) {
            return error.is_some_and(|error| error.is_valid(row));
        }
        let was_invalid = error.is_some_and(|error| error.is_valid(row) && error.value(row).starts_with(NOT_UTF8));
        was_invalid && string_at(&self.texts, row).is_some_and(|text| text.contains(char::REPLACEMENT_CHARACTER))
    }
}

/// The string in a row of a column of strings.
fn string_at(column: &ArrayRef, row: usize) -> Option<&str> {
    if column.is_null(row) {
        return None;
    }
    match column.data_type() {
        DataType::Utf8 => Some(column.as_string::<i32>().value(row)),
        DataType::LargeUtf8 => Some(column.as_string::<i64>().value(row)),
        DataType::Utf8View => Some(column.as_string_view().value(row)),
        _ => None,
    }
}

/// Recomputes the sampled rows and adds the differences to the report.
pub(super) async fn compare(stage: &dyn Stage, sample: &SampledRows, report: &mut VerifyReport) -> Result<()> {
    let recomputed = stage.submit(&sample.texts).await?.await?;
    let fields = stage.fields();
    let found = |name: &String| {
        let missing = || Error::check(format!("the output has no column {name:?}, which the job writes"));
        sample.found.column_by_name(name).ok_or_else(missing)
    };
    let names = fields.iter().rev().skip(REMARKS).rev().map(|field| field.name());
    let found = names.map(found).collect::<Result<Vec<_>>>()?;
    let columns = found.iter().copied().zip(results(fields.len(), &recomputed.vectors)).collect();
    let compared = Columns { columns, remarks: remarks(&sample.found, recomputed) };
    for (place, row) in sample.rows.iter().enumerate() {
        if found.iter().all(|found| found.is_null(place)) && sample.lost_bytes(place) {
            report.not_recomputed += 1;
        } else {
            report.add(*row, compared.row(place));
        }
    }
    Ok(())
}

/// The columns of an output and the recomputed ones.
struct Columns<'o> {
    columns: Vec<(&'o ArrayRef, ArrayRef)>,
    /// `truncated` and `error`, if the output has them.
    remarks: Vec<(Mismatch, ColumnPair)>,
}

fn remarks(rows: &RecordBatch, recomputed: EmbeddedColumns) -> Vec<(Mismatch, ColumnPair)> {
    let remarks: [(&str, Mismatch, ArrayRef); REMARKS] = [
        ("truncated", Mismatch::Truncated, Arc::new(recomputed.truncated)),
        ("error", Mismatch::Error, Arc::new(recomputed.error)),
    ];
    let remarks = remarks.into_iter().filter_map(|(name, mismatch, recomputed)| {
        rows.column_by_name(name).map(|found| (mismatch, ColumnPair::new(found, recomputed)))
    });
    remarks.collect()
}

impl Columns<'_> {
    fn row(&self, row: usize) -> Compared {
        let mut compared = Compared::default();
        for (found, recomputed) in &self.columns {
            match (found.is_valid(row), recomputed.is_valid(row)) {
                (true, true) => compare_results(found, recomputed, row, &mut compared),
                (false, false) => {}
                _ => {
                    compared.mismatches.insert(Mismatch::Null);
                }
            }
        }
        let unequal = self.remarks.iter().filter(|(_, column)| !column.is_equal(row));
        compared.mismatches.extend(unequal.map(|(mismatch, _)| *mismatch));
        compared
    }
}

fn compare_results(found: &ArrayRef, recomputed: &ArrayRef, row: usize, compared: &mut Compared) {
    if scores::are_scores(recomputed) {
        return scores::compare(found, recomputed, row, compared);
    }
    let (vectors, again) = (vectors_of_row(found, row), vectors_of_row(recomputed, row));
    let widths = |vectors: &[Float32Array]| vectors.iter().map(Float32Array::len).collect::<Vec<usize>>();
    if widths(&vectors) != widths(&again) || vectors.iter().any(|vector| vector.null_count() > 0) {
        compared.mismatches.insert(Mismatch::Shape);
        return;
    }
    for (found, recomputed) in vectors.iter().zip(&again) {
        compared.vectors += 1;
        compare_numbers(found.values(), recomputed.values(), compared);
    }
    if let (Some(found), Some(recomputed)) = (tokens_of_row(found, row), tokens_of_row(recomputed, row)) {
        compared.mismatches.extend(unequal_columns(&found, &recomputed));
    }
}

/// Compares bits first, because the difference of two equal NaN is not 0 but NaN.
pub(super) fn compare_numbers(found: &[f32], recomputed: &[f32], compared: &mut Compared) {
    for (x, y) in found.iter().zip(recomputed) {
        if x.to_bits() == y.to_bits() {
            continue;
        }
        compared.bits_differ = true;
        let difference = (x - y).abs();
        if difference.is_finite() {
            compared.largest = compared.largest.max(difference);
        } else {
            compared.mismatches.insert(Mismatch::NotFinite);
        }
    }
}

/// The tokens of a row that is not NULL; `None` for a column without tokens.
pub(super) fn tokens_of_row(column: &ArrayRef, row: usize) -> Option<StructArray> {
    let tokens = column.as_list_opt::<i32>()?.value(row);
    tokens.as_struct_opt().cloned()
}

/// The columns in which the tokens of one row differ, except the numbers.
pub(super) fn unequal_columns(found: &StructArray, recomputed: &StructArray) -> Vec<Mismatch> {
    let columns = [
        ("token", Mismatch::Token),
        ("start", Mismatch::Start),
        ("end", Mismatch::End),
        ("sentence", Mismatch::Sentence),
        ("known", Mismatch::Known),
    ];
    let unequal =
        columns.into_iter().filter(|(name, _)| recomputed.column_by_name(name).is_some()).filter(|(name, _)| {
            let columns = found.column_by_name(name).zip(recomputed.column_by_name(name));
            !columns.is_some_and(|(found, recomputed)| ColumnPair::new(found, Arc::clone(recomputed)).all_equal())
        });
    unequal.map(|(_, mismatch)| mismatch).collect()
}

/// A column of the output and the recomputed one.
struct ColumnPair {
    /// Cast to the type of `recomputed`, because other writers use other string types; `None` if that is impossible.
    found: Option<ArrayRef>,
    recomputed: ArrayRef,
}

impl ColumnPair {
    fn new(found: &ArrayRef, recomputed: ArrayRef) -> Self {
        Self { found: cast(found, recomputed.data_type()).ok(), recomputed }
    }

    fn is_equal(&self, row: usize) -> bool {
        let recomputed = self.recomputed.slice(row, 1);
        self.found.as_ref().is_some_and(|found| found.slice(row, 1).to_data() == recomputed.to_data())
    }

    fn all_equal(&self) -> bool {
        self.found.as_ref().is_some_and(|found| found.to_data() == self.recomputed.to_data())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn compared(found: &[f32], recomputed: &[f32]) -> Compared {
        let mut compared = Compared::default();
        compare_numbers(found, recomputed, &mut compared);
        compared
    }

    #[test]
    fn bits_come_first() {
        let same = compared(&[f32::NAN, 1.0], &[f32::NAN, 1.0]);
        assert!(!same.bits_differ && same.mismatches.is_empty());
        for (found, again) in [(f32::NAN, 1.0), (1.0, f32::NAN), (f32::INFINITY, 1.0), (f32::MAX, f32::MIN)] {
            let unlike = compared(&[found, 1.0], &[again, 0.5]);
            assert_eq!(unlike.mismatches, BTreeSet::from([Mismatch::NotFinite]), "{found} {again}");
            assert_eq!(unlike.largest, 0.5);
        }
    }

    #[test]
    fn a_tolerance_of_zero_asks_for_equal_bits() {
        let mut report = VerifyReport { sampled: 1, ..VerifyReport::default() };
        report.add(0, compared(&[-0.0], &[0.0]));
        assert!(report.error(1e-5).is_none());
        assert!(report.error(0.0).is_some());
    }
}
