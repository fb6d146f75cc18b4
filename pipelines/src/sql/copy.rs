//! What the end of a COPY's target says: what it would say in FROM. DataFusion goes by its own list of endings, which knows
//! no JSON lines and nothing packed.

use std::io::ErrorKind;

use datafusion::sql::{parser::CopyToStatement, sqlparser::ast::Value};
use elmo_udfs::Statement;

use crate::{
    error::{Error, Result},
    redact::redact,
    source::{Format, of_name},
    stores::{Location, Stores},
};

/// What COPY writes.
const WRITTEN: [&str; 4] = ["ARROW", "CSV", "JSON", "PARQUET"];

/// Completes a COPY, also one that is explained, and looks at its target.
///
/// # Errors
/// When the target is no URL that can be written to, or its name ends like a format that COPY does not write.
pub(super) fn complete(statement: &mut Statement, stores: &Stores) -> Result<()> {
    match statement {
        Statement::CopyTo(copy) => {
            // A URL that is none is refused by us: DataFusion's words would repeat what is secret in it.
            takes_files(&stores.locate(&copy.target)?)?;
            // DataFusion takes it for a pattern, and writes a file of a random name.
            let is_pattern = |c| matches!(c, '*' | '[') || (c == '?' && !copy.target.contains("://"));
            if copy.target.contains(is_pattern) {
                let message = format!("{}: COPY writes to one place, and this is a pattern", redact(&copy.target));
                return Err(Error::usage(message, "give a name without *, ? and ["));
            }
            by_ending(copy)
        }
        Statement::Explain(explain) => complete(&mut explain.statement, stores),
        _ => Ok(()),
    }
}

/// Folders of the kernel take no new files and say that they are not there, upon which the store makes them, again and
/// again.
fn takes_files(target: &Location) -> Result<()> {
    let Some(path) = target.local_path() else { return Ok(()) };
    let Some(folder) = path.ancestors().skip(1).find(|folder| folder.is_dir()) else { return Ok(()) };
    match tempfile::tempfile_in(folder) {
        Err(e) if e.kind() == ErrorKind::NotFound => Err(Error::io(&path, e)),
        // What else is wrong is said by who writes.
        _ => Ok(()),
    }
}

fn by_ending(copy: &mut CopyToStatement) -> Result<()> {
    let named = of_name(&copy.target);
    let packed = match copy.target.rsplit_once('.').map(|(_, ending)| ending.to_ascii_lowercase()).as_deref() {
        Some("gz") => Some("gzip"),
        Some("zst") => Some("zstd"),
        _ => None,
    };
    let format = match (&copy.stored_as, named) {
        (Some(format), _) => match format.to_ascii_uppercase().as_str() {
            "JSONL" | "NDJSON" => "JSON".to_owned(),
            format if WRITTEN.contains(&format) => format.to_owned(),
            _ => {
                let message = format!("COPY … STORED AS {format}: no such kind of files, or none that is written");
                return Err(Error::usage(message, format!("one of {}", WRITTEN.join(", "))));
            }
        },
        (None, Some((Format::Csv, _))) => "CSV".to_owned(),
        (None, Some((Format::Json, _))) => "JSON".to_owned(),
        (None, Some((Format::Text, _))) => return Err(not_written(&copy.target)),
        // DataFusion's own: folders, and formats that pack their columns themselves.
        (None, _) if packed.is_none() => return Ok(()),
        (None, _) => return Err(not_written(&copy.target)),
    };
    let is_packed_whole = matches!(format.as_str(), "CSV" | "JSON");
    copy.stored_as = Some(format);
    let Some(word) = packed.filter(|_| is_packed_whole) else { return Ok(()) };
    let says = |key: &str| ["compression", "format.compression"].iter().any(|there| key.eq_ignore_ascii_case(there));
    if !copy.options.iter().any(|(key, _)| says(key)) {
        copy.options.push(("format.compression".to_owned(), Value::SingleQuotedString(word.to_owned())));
    }
    Ok(())
}

fn not_written(target: &str) -> Error {
    Error::usage(
        format!("{}: COPY writes no such files", redact(target)),
        "let the name end in .parquet, .arrow, .csv or .jsonl, the last two also with .gz or .zst, or say STORED AS",
    )
}
