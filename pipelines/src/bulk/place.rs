//! Maps a row of a chunk to its file and its row number in that file, for errors and for skipped rows.

use std::{cmp::Ordering, fmt};

use elmo::RowError;

use crate::{
    error::Error,
    source::{Malformed, Plan, Slice},
};

/// Number of skipped rows that are logged as warnings; later ones are logged with `-v`.
const MAX_WARNINGS: usize = 20;

/// Names the file and the row of an error whose row counts from the start of `slices`.
pub(crate) fn place(plan: &Plan, error: elmo::Error, slices: &[Slice]) -> Error {
    let elmo::Error::Row { row, reason } = error else { return error.into() };
    match row_at(plan, slices, row) {
        Some((file, row)) => Error::Input {
            file,
            row: Some(row),
            reason: reason.to_string(),
            help: Some("--on-error null keeps such rows without a vector, --on-error skip leaves them out".into()),
        },
        None => Error::Failed(reason.to_string()),
    }
}

/// Logs skipped rows, which are not in the output. `logged` counts them over the whole job.
pub(super) fn log_skipped(plan: &Plan, slices: &[Slice], rows: &[(usize, RowError)], logged: &mut usize) {
    for (row, reason) in rows {
        let (file, row_there) = row_at(plan, slices, *row).unwrap_or_default();
        log(&file, row_there, reason.label(), reason, logged);
    }
}

/// Logs a malformed row, which is skipped.
pub(super) fn log_malformed(file: &str, malformed: &Malformed, logged: &mut usize) {
    let reason = format!("line {}: {}", malformed.line, malformed.reason);
    log(file, malformed.row, "malformed", &reason, logged);
}

fn log(file: &str, row: u64, label: &str, reason: &dyn fmt::Display, logged: &mut usize) {
    *logged += 1;
    match (*logged).cmp(&MAX_WARNINGS) {
        Ordering::Less => tracing::warn!(file, row, label, %reason, "row skipped"),
        Ordering::Equal => tracing::warn!(file, row, label, %reason, "row skipped; further ones are logged with -v"),
        Ordering::Greater => tracing::info!(file, row, label, %reason, "row skipped"),
    }
}

/// File of the `row`th row of consecutive slices, and its row there.
fn row_at(plan: &Plan, slices: &[Slice], row: usize) -> Option<(String, u64)> {
    let mut left = row;
    for slice in slices {
        if left < slice.len() {
            let file = plan.files().nth(slice.start.file)?;
            return Some((file.to_string(), slice.start.row + left as u64));
        }
        left -= slice.len();
    }
    None
}
