//! Derives the format and the compression of COPY from the extension of its target, as FROM does, and takes its options
//! `append` and `overwrite`. DataFusion knows neither them, nor `.jsonl`, `.tsv` and compressed extensions.

use std::io::ErrorKind;

use datafusion::{
    datasource::{listing::ListingTableUrl, physical_plan::FileOutputMode},
    sql::{parser::CopyToStatement, sqlparser::ast::Value},
};
use elmo_udfs::Statement;

use super::{
    error::sql_error,
    output_folder::{Existing, OutputFolder},
};
use crate::{
    error::{Error, Result},
    redact::redact,
    source::{Format, of_name},
    stores::{Location, Stores},
};

/// Formats that COPY writes.
const COPY_FORMATS: [&str; 4] = ["ARROW", "CSV", "JSON", "PARQUET"];

/// Checks the target of a COPY and adds the format and the compression; also below EXPLAIN. Returns the folder if the
/// statement writes to one.
///
/// # Errors
/// If the target is not a valid URL or is a pattern, or if COPY does not write files with its extension.
pub(super) fn complete(statement: &mut Statement, stores: &Stores) -> Result<Option<OutputFolder>> {
    match statement {
        Statement::CopyTo(copy) => {
            // Rejects invalid URLs. DataFusion's error would contain the secrets in them.
            let target = stores.locate(&copy.target)?;
            check_writable(&target)?;
            // DataFusion treats it as a pattern and writes a file with a random name.
            let is_pattern = |c| matches!(c, '*' | '[') || (c == '?' && !copy.target.contains("://"));
            if copy.target.contains(is_pattern) {
                let message = format!("{}: the target of COPY must not be a pattern", redact(&copy.target));
                return Err(Error::usage(message, "use a name without *, ? and ["));
            }
            let (existing, is_folder) = (take_existing(&mut copy.options)?, is_folder(copy)?);
            if existing == Existing::Append && !is_folder {
                let message = format!("{}: COPY cannot append to a file", redact(&copy.target));
                return Err(Error::usage(message, "name a folder, such as 'rows/', or leave out the option append"));
            }
            set_format(copy, is_folder)?;
            Ok(is_folder.then(|| OutputFolder::new(target, existing)))
        }
        Statement::Explain(explain) => {
            let folder = complete(&mut explain.statement, stores)?;
            Ok(folder.filter(|_| explain.options.analyze))
        }
        _ => Ok(None),
    }
}

/// Takes the options that say what happens to the files of the folder.
fn take_existing(options: &mut Vec<(String, Value)>) -> Result<Existing> {
    let mut take = |name: &str| {
        let place = options.iter().position(|(key, _)| key.eq_ignore_ascii_case(name));
        place.map_or(Ok(false), |place| is_true(name, &options.remove(place).1))
    };
    match (take("append")?, take("overwrite")?) {
        (false, false) => Ok(Existing::Refuse),
        (true, false) => Ok(Existing::Append),
        (false, true) => Ok(Existing::Overwrite),
        (true, true) => {
            Err(Error::usage("COPY … OPTIONS: append and overwrite exclude each other", "give one of them"))
        }
    }
}

fn is_true(name: &str, value: &Value) -> Result<bool> {
    match value.to_string().trim_matches('\'').to_ascii_lowercase().as_str() {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(Error::usage(format!("COPY … OPTIONS: {name} is true or false"), format!("write ({name} true)"))),
    }
}

/// Whether DataFusion writes a folder of files rather than one file.
fn is_folder(copy: &CopyToStatement) -> Result<bool> {
    let url = ListingTableUrl::parse(&copy.target).map_err(sql_error)?;
    Ok(!copy.partitioned_by.is_empty() || !FileOutputMode::Automatic.single_file_output(&url))
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
fn set_format(copy: &mut CopyToStatement, is_folder: bool) -> Result<()> {
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
        (None, Some((Format::Tsv, _))) if is_folder => {
            let message = format!(
                "{}: the files of a folder are called .csv, so tabs cannot separate their cells",
                redact(&copy.target)
            );
            return Err(Error::usage(message, "add STORED AS CSV, or write one file"));
        }
        (None, Some((Format::Tsv, _))) => {
            add_option(copy, "delimiter", "\t");
            "CSV".to_owned()
        }
        (None, Some((Format::Text, _))) => return Err(unsupported_extension(&copy.target)),
        // Left to DataFusion: folders, and formats with internal compression.
        (None, _) if compression.is_none() => return Ok(()),
        (None, _) => return Err(unsupported_extension(&copy.target)),
    };
    let has_file_compression = matches!(format.as_str(), "CSV" | "JSON");
    copy.stored_as = Some(format);
    if let Some(codec) = compression.filter(|_| has_file_compression) {
        add_option(copy, "compression", codec);
    }
    Ok(())
}

/// Adds an option of the format unless the statement has it.
fn add_option(copy: &mut CopyToStatement, name: &str, value: &str) {
    let full = format!("format.{name}");
    if !copy.options.iter().any(|(key, _)| key.eq_ignore_ascii_case(name) || key.eq_ignore_ascii_case(&full)) {
        copy.options.push((full, Value::SingleQuotedString(value.to_owned())));
    }
}

fn unsupported_extension(target: &str) -> Error {
    Error::usage(
        format!("{}: COPY cannot write files with this extension", redact(target)),
        "use .parquet, .arrow, .csv, .tsv or .jsonl (the last three also with .gz or .zst), or add STORED AS",
    )
}
