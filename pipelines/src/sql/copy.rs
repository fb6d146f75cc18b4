//! Derives the format and the compression of COPY from the extension of its target, as FROM does. DataFusion knows
//! neither `.jsonl` nor compressed extensions.

use std::io::ErrorKind;

use datafusion::sql::{parser::CopyToStatement, sqlparser::ast::Value};
use elmo_udfs::Statement;

use crate::{
    error::{Error, Result},
    redact::redact,
    source::{Format, of_name},
    stores::{Location, Stores},
};

/// Formats that COPY writes.
const COPY_FORMATS: [&str; 4] = ["ARROW", "CSV", "JSON", "PARQUET"];

/// Checks the target of a COPY and adds the format and the compression; also below EXPLAIN.
///
/// # Errors
/// If the target is not a valid URL or is a pattern, or if COPY does not write files with its extension.
pub(super) fn complete(statement: &mut Statement, stores: &Stores) -> Result<()> {
    match statement {
        Statement::CopyTo(copy) => {
            // Rejects invalid URLs. DataFusion's error would contain the secrets in them.
            check_writable(&stores.locate(&copy.target)?)?;
            // DataFusion treats it as a pattern and writes a file with a random name.
            let is_pattern = |c| matches!(c, '*' | '[') || (c == '?' && !copy.target.contains("://"));
            if copy.target.contains(is_pattern) {
                let message = format!("{}: the target of COPY must not be a pattern", redact(&copy.target));
                return Err(Error::usage(message, "use a name without *, ? and ["));
            }
            set_format(copy)
        }
        Statement::Explain(explain) => complete(&mut explain.statement, stores),
        _ => Ok(()),
    }
}

/// Rejects folders such as `/proc`, which report a new file as not found. The local store would then create its folder
/// and retry without end.
fn check_writable(target: &Location) -> Result<()> {
    let Some(path) = target.local_path() else { return Ok(()) };
    let Some(folder) = path.ancestors().skip(1).find(|folder| folder.is_dir()) else { return Ok(()) };
    match tempfile::tempfile_in(folder) {
        Err(e) if e.kind() == ErrorKind::NotFound => Err(Error::io(&path, e)),
        // The writer reports other errors.
        _ => Ok(()),
    }
}

/// Sets the format and the compression from the extension, unless the statement specifies them.
fn set_format(copy: &mut CopyToStatement) -> Result<()> {
    let by_extension = of_name(&copy.target);
    let compression = match copy.target.rsplit_once('.').map(|(_, extension)| extension.to_ascii_lowercase()).as_deref()
    {
        Some("gz") => Some("gzip"),
        Some("zst") => Some("zstd"),
        _ => None,
    };
    let format = match (&copy.stored_as, by_extension) {
        (Some(format), _) => match format.to_ascii_uppercase().as_str() {
            "JSONL" | "NDJSON" => "JSON".to_owned(),
            format if COPY_FORMATS.contains(&format) => format.to_owned(),
            _ => {
                let message = format!("COPY … STORED AS {format}: unknown file type, or one that cannot be written");
                return Err(Error::usage(message, format!("use one of {}", COPY_FORMATS.join(", "))));
            }
        },
        (None, Some((Format::Csv, _))) => "CSV".to_owned(),
        (None, Some((Format::Json, _))) => "JSON".to_owned(),
        (None, Some((Format::Text | Format::Tsv, _))) => return Err(unsupported_extension(&copy.target)),
        // Left to DataFusion: folders, and formats with internal compression.
        (None, _) if compression.is_none() => return Ok(()),
        (None, _) => return Err(unsupported_extension(&copy.target)),
    };
    let has_file_compression = matches!(format.as_str(), "CSV" | "JSON");
    copy.stored_as = Some(format);
    let Some(codec) = compression.filter(|_| has_file_compression) else { return Ok(()) };
    let is_compression = |key: &str| ["compression", "format.compression"].iter().any(|k| key.eq_ignore_ascii_case(k));
    if !copy.options.iter().any(|(key, _)| is_compression(key)) {
        copy.options.push(("format.compression".to_owned(), Value::SingleQuotedString(codec.to_owned())));
    }
    Ok(())
}

fn unsupported_extension(target: &str) -> Error {
    Error::usage(
        format!("{}: COPY cannot write files with this extension", redact(target)),
        "use .parquet, .arrow, .csv or .jsonl (the last two also with .gz or .zst), or add STORED AS",
    )
}
