//! Results on stdout.

use std::io::{self, Write};

use serde::Serialize;

use crate::{
    error::{Error, Result},
    redact::{redact, redact_json},
};

/// Prints a report for people, secrets left out. A reader that has gone away ends the command without complaint.
///
/// # Errors
/// [`Error::BrokenPipe`] when the reader has gone away, [`Error::Failed`] when stdout cannot be written to.
pub(super) fn print(text: &str) -> Result<()> {
    print_raw(redact(text).as_bytes())
}

/// Prints a report for programs: one JSON object, secrets left out.
///
/// # Errors
/// As [`print()`].
pub(super) fn print_json(report: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(report).map_err(|e| Error::Failed(format!("cannot write JSON: {e}")))?;
    print_raw((redact_json(&text) + "\n").as_bytes())
}

/// Prints bytes as they are.
pub(super) fn print_raw(bytes: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes).and_then(|()| out.flush()).map_err(|e| match e.kind() {
        io::ErrorKind::BrokenPipe => Error::BrokenPipe,
        _ => Error::Failed(format!("cannot write to stdout: {e}")),
    })
}
