//! Printing results on stdout.

use std::io::{self, Write};

use serde::Serialize;

use crate::{
    error::{Error, Result},
    redact::{redact, redact_json},
    report,
};

/// Prints a report for people, without secrets.
///
/// # Errors
/// [`Error::BrokenPipe`] when the reader has closed the pipe, [`Error::Failed`] when writing fails otherwise.
pub(super) fn print(text: &str) -> Result<()> {
    print_raw(redact(text).as_bytes())
}

/// Prints a report for programs as one JSON object, without secrets.
///
/// # Errors
/// As [`print()`].
pub(super) fn print_json(report: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(report).map_err(|e| Error::Failed(format!("cannot write JSON: {e}")))?;
    print_raw((redact_json(&text) + "\n").as_bytes())
}

/// Prints bytes unchanged.
pub(super) fn print_raw(bytes: &[u8]) -> Result<()> {
    let written = report::above_bar(|| {
        let mut out = io::stdout().lock();
        out.write_all(bytes).and_then(|()| out.flush())
    });
    written.map_err(|e| match e.kind() {
        io::ErrorKind::BrokenPipe => Error::BrokenPipe,
        _ => Error::Failed(format!("cannot write to stdout: {e}")),
    })
}
