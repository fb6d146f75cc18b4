//! Derives the format and the compression of COPY from the extension of its target, as FROM does, and takes its options
//! `append` and `overwrite`. DataFusion knows neither them, nor `.jsonl`, tabs and compressed extensions.

use std::{collections::HashSet, path::PathBuf, sync::Arc};

use arrow::datatypes::{DataType, Field};
use datafusion::{
    common::config::ConfigOptions,
    datasource::{listing::ListingTableUrl, physical_plan::FileOutputMode},
    logical_expr::{LogicalPlan, dml::CopyTo},
    sql::{parser::CopyToStatement, sqlparser::ast::Value},
};
use elmo_udfs::Statement;

use super::{
    copy_place,
    error::sql_error,
    format_options::Options,
    output_folder::{Existing, OutputFolder, check_outside_outputs},
};
use crate::{
    error::{Error, Result},
    redact::redact,
    source::{Compression, Format, of_name},
    stores::{Location, Stores},
};

/// Formats that COPY writes.
const COPY_FORMATS: [&str; 5] = ["ARROW", "CSV", "JSON", "PARQUET", "TSV"];
/// Options of COPY that are not those of a format.
const OPTIONS: [&str; 3] = ["append", KEEP_COLUMNS, "overwrite"];
/// Whether the files of a folder keep the columns that name their folders.
const KEEP_COLUMNS: &str = "execution.keep_partition_by_columns";

/// What a COPY or INSERT writes to.
#[derive(Debug, Clone)]
pub(super) struct Target {
    /// The folder, if it is one.
    pub(super) folder: Option<OutputFolder>,
    /// The file, if it is one.
    pub(super) file: Option<Location>,
    /// False of EXPLAIN without ANALYZE.
    pub(super) is_written: bool,
    /// The files of the folder are called `.tsv`.
    pub(super) has_tabs: bool,
    /// The file or folder, on a local disk.
    #[cfg_attr(not(feature = "cluster"), expect(dead_code, reason = "workers write there"))]
    pub(super) local: Option<PathBuf>,
}

impl Target {
    /// Checks what lies where the statement writes to, before anything is computed. The commit checks folders again.
    ///
    /// # Errors
    /// If the statement must not write there, or if that cannot be found out.
    pub(super) async fn check(&self) -> Result<()> {
        match (&self.folder, &self.file) {
            _ if !self.is_written => Ok(()),
            (Some(folder), _) => folder.replaced().await.map(drop),
            (None, Some(file)) => check_outside_outputs(file).await,
            (None, None) => Ok(()),
        }
    }
}

/// Checks the target of a COPY and adds the format and the compression; also below EXPLAIN. `None` for other statements.
///
/// # Errors
/// If the target is not a valid URL, is a pattern or cannot be written, if COPY does not write files with its extension, or
/// if an option is unknown.
pub(super) fn complete(statement: &mut Statement, stores: &Stores) -> Result<Option<Target>> {
    match statement {
        Statement::CopyTo(copy) => complete_copy(copy, stores).map(Some),
        Statement::Explain(explain) => {
            let target = complete(&mut explain.statement, stores)?;
            Ok(target.map(|target| Target { is_written: explain.options.analyze, ..target }))
        }
        _ => Ok(None),
    }
}

fn complete_copy(copy: &mut CopyToStatement, stores: &Stores) -> Result<Target> {
    // Rejects invalid URLs. DataFusion's error would contain the secrets in them.
    let target = stores.locate(&copy.target)?;
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
    let format = format(copy, is_folder)?;
    copy_place::check(&target, is_folder)?;
    set_format(copy, &format);
    Options { statement: "COPY", file_type: &format, others: &OPTIONS, given: &copy.options }.check()?;
    let local = target.local_path();
    let has_tabs = is_folder && format == "TSV";
    let (folder, file) = match is_folder {
        true => (Some(OutputFolder::new(target, existing)), None),
        // COPY cannot write to web servers.
        false => (None, Some(target).filter(|target| !target.is_http())),
    };
    Ok(Target { folder, file, is_written: true, has_tabs, local })
}

/// Takes the options that say what happens to the files of the folder.
fn take_existing(options: &mut Vec<(String, Value)>) -> Result<Existing> {
    let mut take = |name: &str| {
        let given: Vec<_> = options.extract_if(.., |(key, _)| key.eq_ignore_ascii_case(name)).collect();
        match given.as_slice() {
            [] => Ok(false),
            [(_, value)] => is_true(name, value),
            _ => Err(Error::usage(format!("COPY … OPTIONS: {name} is given twice"), "give it once")),
        }
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

/// The format, in upper case: that of STORED AS, which the extension of a file must not contradict, or that of the extension.
fn format(copy: &CopyToStatement, is_folder: bool) -> Result<String> {
    let named = of_name(copy.target.trim_end_matches('/'));
    let by_name = named.and_then(|(format, _)| match format {
        Format::Csv => Some("CSV"),
        Format::Tsv => Some("TSV"),
        Format::Json => Some("JSON"),
        Format::Parquet => Some("PARQUET"),
        Format::Arrow => Some("ARROW"),
        Format::Text => None,
    });
    let by_name = by_name.filter(|_| named.is_none_or(|(format, compression)| can_be_compressed(format, compression)));
    let Some(stored_as) = &copy.stored_as else {
        return match by_name {
            Some(format) => Ok(format.to_owned()),
            None if is_folder => Err(Error::usage(
                format!("{}: a folder needs STORED AS, and a file an extension", redact(&copy.target)),
                format!("add STORED AS and one of {}, or name a file such as 'rows.parquet'", COPY_FORMATS.join(", ")),
            )),
            None => Err(unsupported_extension(&copy.target)),
        };
    };
    let format = match stored_as.to_ascii_uppercase().as_str() {
        "JSONL" | "NDJSON" => "JSON".to_owned(),
        format if COPY_FORMATS.contains(&format) => format.to_owned(),
        format => {
            let message = format!("COPY … STORED AS {format}: unknown file type, or one that cannot be written");
            return Err(Error::usage(message, format!("use one of {}", COPY_FORMATS.join(", "))));
        }
    };
    match by_name {
        _ if is_folder => Ok(format),
        // The delimiter says which of them is meant.
        Some("CSV" | "TSV") if matches!(format.as_str(), "CSV" | "TSV") && has_option(copy, "delimiter") => Ok(format),
        Some(other) if other != format => Err(Error::usage(
            format!(
                "{}: STORED AS {format} contradicts the extension, by which FROM reads {other}",
                redact(&copy.target)
            ),
            format!("write STORED AS {other}, or give the file another extension"),
        )),
        None if has_unwritten_compression(copy, &format) => Err(unsupported_extension(&copy.target)),
        _ => Ok(format),
    }
}

/// Parquet and Arrow compress inside the file.
fn can_be_compressed(format: Format, compression: Compression) -> bool {
    compression == Compression::None || !matches!(format, Format::Parquet | Format::Arrow)
}

/// Whether the extension names a compression that COPY does not derive from it.
fn has_unwritten_compression(copy: &CopyToStatement, format: &str) -> bool {
    match extension(&copy.target).as_str() {
        "gz" | "zst" => !is_text(format),
        "bz2" | "xz" => !is_text(format) || !has_option(copy, "compression"),
        _ => false,
    }
}

fn is_text(format: &str) -> bool {
    matches!(format, "CSV" | "TSV" | "JSON")
}

/// The last extension, in lower case.
fn extension(target: &str) -> String {
    target.rsplit_once('.').map(|(_, extension)| extension.to_ascii_lowercase()).unwrap_or_default()
}

/// Adds the format and the compression to the statement.
fn set_format(copy: &mut CopyToStatement, format: &str) {
    let compression = match extension(&copy.target).as_str() {
        "gz" => Some("gzip"),
        "zst" => Some("zstd"),
        _ => None,
    };
    if let Some(codec) = compression.filter(|_| is_text(format)) {
        add_option(copy, "compression", codec);
    }
    if format == "TSV" {
        add_option(copy, "delimiter", "\t");
    }
    copy.stored_as = Some(if format == "TSV" { "CSV" } else { format }.to_owned());
}

fn has_option(copy: &CopyToStatement, name: &str) -> bool {
    let full = format!("format.{name}");
    copy.options.iter().any(|(key, _)| key.eq_ignore_ascii_case(name) || key.eq_ignore_ascii_case(&full))
}

/// Adds an option of the format unless the statement has it.
fn add_option(copy: &mut CopyToStatement, name: &str, value: &str) {
    if !has_option(copy, name) {
        copy.options.push((format!("format.{name}"), Value::SingleQuotedString(value.to_owned())));
    }
}

/// Whether DataFusion makes names of folders from values of a type.
fn can_name(data_type: &DataType) -> bool {
    use DataType::{Boolean, Date32, Date64, Dictionary, LargeUtf8, Utf8, Utf8View};
    data_type.is_integer()
        || data_type.is_floating()
        || matches!(data_type, Boolean | Date32 | Date64 | Dictionary(..) | Utf8 | LargeUtf8 | Utf8View)
}

fn unsupported_extension(target: &str) -> Error {
    Error::usage(
        format!("{}: COPY cannot write files with this extension", redact(target)),
        "use .parquet, .arrow, .csv, .tsv or .jsonl (the last three also with .gz or .zst), or add STORED AS",
    )
}

/// Whether the files of a COPY keep the columns that name their folders.
pub(super) fn keeps_partition_columns(copy: &CopyTo, config: &ConfigOptions) -> bool {
    copy.options.get(KEEP_COLUMNS).map_or(config.execution.keep_partition_by_columns, |value| value.trim() == "true")
}

/// Checks that columns have different names: readers of a file find one of several with the same name.
///
/// # Errors
/// [`Error::Usage`] with the first name that occurs again.
pub(super) fn check_names<'f>(output: &str, fields: impl IntoIterator<Item = &'f Arc<Field>>) -> Result<()> {
    let mut names = HashSet::new();
    let Some(again) = fields.into_iter().find(|field| !names.insert(field.name().as_str())) else { return Ok(()) };
    Err(Error::usage(
        format!("{output}: the query has several columns called {}, of which readers find one", again.name()),
        format!("give each column another name with AS, such as \"{0}\" AS \"{0}_2\"", again.name()),
    ))
}

/// Checks the columns of a COPY before anything is computed.
///
/// # Errors
/// [`Error::Usage`] if two columns have the same name; if every column of the query is a partition column, as files without
/// columns cannot be written; or if a partition column has a type whose values cannot be names of folders.
pub(super) fn check_columns(plan: &LogicalPlan, config: &ConfigOptions) -> Result<()> {
    let copy = match plan {
        LogicalPlan::Copy(copy) => copy,
        LogicalPlan::Analyze(analyze) => return check_columns(&analyze.input, config),
        LogicalPlan::Explain(explain) => return check_columns(&explain.plan, config),
        _ => return Ok(()),
    };
    let fields = copy.input.schema().fields();
    check_names("COPY", fields)?;
    let has_no_names = |field: &&Arc<Field>| copy.partition_by.contains(field.name()) && !can_name(field.data_type());
    if let Some(field) = fields.iter().find(has_no_names) {
        return Err(Error::usage(
            format!("COPY … PARTITIONED BY {0}: values of {0} cannot be names of folders", field.name()),
            format!("write a string to it, such as CAST({0} AS VARCHAR) AS {0}", field.name()),
        ));
    }
    let is_partition = |name: &String| copy.partition_by.contains(name);
    let none_left = !copy.partition_by.is_empty() && fields.iter().all(|field| is_partition(field.name()));
    match none_left && !keeps_partition_columns(copy, config) {
        true => Err(Error::usage(
            format!(
                "COPY … PARTITIONED BY ({}): these are all columns of the query, and the files would have none",
                copy.partition_by.join(", ")
            ),
            "leave out one of them, or add a column to the query",
        )),
        false => Ok(()),
    }
}
