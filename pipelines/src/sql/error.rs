//! Converts DataFusion's errors to [`SqlError`]: a message without row values, an exit code and a hint.

use std::{borrow::Cow, io::ErrorKind};

use datafusion::{arrow::error::ArrowError, error::DataFusionError, sql::sqlparser::parser::ParserError};
use thiserror::Error;

use super::exhausted;
use crate::{
    error::{Error, Exit, Fault},
    source::{
        SourceError,
        reason::{Reason, one_line, without_data},
    },
    stores::StoreError,
};

/// A statement that cannot be planned or run.
#[derive(Debug, Error)]
#[error("{message}")]
pub struct SqlError {
    /// The message, without row values.
    pub message: String,
    /// The exit code.
    pub exit: Exit,
    /// A hint for the user.
    pub help: Option<String>,
}

impl Fault for SqlError {
    fn exit(&self) -> Exit {
        self.exit
    }

    fn help(&self) -> Option<String> {
        self.help.clone()
    }
}

/// Converts an error; for `map_err`.
pub(crate) fn sql_error(error: DataFusionError) -> Error {
    to_sql_error(&error)
}

/// Converts a borrowed error.
pub(crate) fn to_sql_error(error: &DataFusionError) -> Error {
    let (exit, help) = classify(error.find_root());
    SqlError { message: message(error).into_owned(), exit, help: help.map(Cow::into_owned) }.into()
}

/// The error's message without DataFusion's prefixes for error kinds, and without row values.
pub(super) fn message(error: &DataFusionError) -> Cow<'_, str> {
    use DataFusionError as E;
    match error {
        E::Plan(text) | E::Configuration(text) => match no_match(text) {
            Some((call, _)) => format!("{call}: no form of this function takes these arguments").into(),
            None => coercion_reason(text),
        },
        E::Execution(text) => without_values(coercion_reason(text)),
        E::SQL(error, _) => match error.as_ref() {
            ParserError::ParserError(text) | ParserError::TokenizerError(text) => Cow::Borrowed(text),
            other => other.to_string().into(),
        },
        E::External(error) if is_own(error.as_ref()) => error.to_string().into(),
        E::External(error) => without_values(without_excerpt(&error.to_string()).into()),
        // Errors of stores contain addresses, and no values.
        E::ArrowError(error, _) if is_caused_by_store(error.as_ref()) => one_line(&error.to_string()).into(),
        E::ParquetError(error) if is_caused_by_store(error.as_ref()) => one_line(&error.to_string()).into(),
        // Arrow and Parquet readers quote the values that they reject.
        E::ArrowError(error, _) => Reason::from(error.as_ref()).to_string().into(),
        E::ParquetError(error) => without_data(&error.to_string()).into(),
        E::ObjectStore(error) if let Some(inner) = wrapped_by_store(error) => message(inner),
        E::Context(_, error) | E::Diagnostic(_, error) => message(error),
        E::Shared(error) => message(error),
        E::Internal(text) if is_invalid_arrow(text) => "not an Arrow file or stream, or truncated".into(),
        E::Internal(text) if let Some((wanted, given)) = uncast(text) => {
            format!("a function takes {wanted}, and its argument is {given}").into()
        }
        E::Internal(text) if is_uncomparable(text) => "min and max do not compare values of this type".into(),
        E::ResourcesExhausted(text) => exhausted::message(text).into(),
        E::Collection(errors) => errors.first().map_or("unknown".into(), message),
        other => other.strip_backtrace().into(),
    }
}

/// The message of a function's own `coerce_types`, if the text contains one.
fn coercion_reason(text: &str) -> Cow<'_, str> {
    let own = text.split_once("user-defined coercion failed with: Error during planning: ");
    own.map_or(text, |(_, own)| own.split_once(" No function matches").map_or(own, |(own, _)| own)).into()
}

/// The call that an error is about, and the forms of its function. The errors of DataFusion 55 quote each other, and call
/// some of themselves internal.
fn no_match(text: &str) -> Option<(String, String)> {
    if text.contains("user-defined coercion failed with: ") {
        return None;
    }
    let (_, call) = text.split_once("No function matches the given name and argument types '")?;
    let (call, forms) = call.split_once("'. You might need to add explicit type casts.")?;
    let forms: Vec<&str> = forms.lines().skip(2).map(str::trim).collect();
    Some((shortened(call), forms.join(", ")))
}

/// The type that a function takes, and the type that it is given, of an error that DataFusion 55 calls internal.
fn uncast(text: &str) -> Option<(&str, &str)> {
    let (_, types) = text.split_once("Unavailable default cast for native type ")?;
    let (wanted, given) = types.split_once(" from physical type ")?;
    // The fields of a struct, and their metadata, can be long.
    Some((wanted, given.split(['(', '.', ' ']).next().unwrap_or(given)))
}

/// Maximum characters of a call in a message.
const CALL_CHARS: usize = 120;

fn shortened(call: &str) -> String {
    match call.char_indices().nth(CALL_CHARS) {
        Some((end, _)) => format!("{}…", &call[..end]),
        None => call.to_owned(),
    }
}

/// Replaces the row values that functions of DataFusion quote in their errors, such as `Error parsing 'x' as time`.
/// Keeps the errors of our own functions and those about tables, which quote names of the statement.
fn without_values(text: Cow<'_, str>) -> Cow<'_, str> {
    if let Some((before, _)) = text.split_once(DUPLICATE_KEY) {
        return format!("{before}{DUPLICATE_KEY}\u{2026}").into();
    }
    let is_own = text.starts_with("elmo_") || text.starts_with("try_elmo_");
    let is_about_table = ["exist", "exists"].iter().any(|end| text.trim_end_matches('.').ends_with(end));
    match is_own || is_about_table {
        true => text,
        false => ['\'', '"', '`'].into_iter().fold(text.into_owned(), without_quotation).into(),
    }
}

/// The error of `map` ends with a value that is not quoted.
const DUPLICATE_KEY: &str = "duplicate key found: ";

/// Replaces everything between the first opening and the last closing quote: a value may contain quotes itself.
fn without_quotation(mut text: String, quote: char) -> String {
    let quotes = || text.match_indices(quote).map(|(at, _)| at);
    // An apostrophe stands between letters.
    let opening = quotes().find(|at| !text[..*at].ends_with(char::is_alphanumeric));
    let closing = quotes().rfind(|at| !text[at + 1..].starts_with(char::is_alphanumeric));
    if let Some(open) = opening {
        let close = closing.filter(|close| *close > open).unwrap_or(text.len());
        text.replace_range(open + 1..close, "\u{2026}");
    }
    text
}

/// The first and the last line of a message: the regex parser shows the pattern between them.
fn without_excerpt(text: &str) -> String {
    let mut lines = text.lines();
    let first = lines.next().unwrap_or_default();
    lines.next_back().map_or_else(|| first.to_owned(), |last| format!("{first} {last}"))
}

/// Whether DataFusion rejected bytes as Arrow, which it reports as an internal error.
pub(super) fn is_invalid_arrow(text: &str) -> bool {
    text.starts_with("Failed to parse Arrow file")
}

const FOLDER_HELP: &str = "a folder stands for its files with the default extension of the type, such as .json; use a \
                           pattern for others: 'logs/*.jsonl'";

/// Whether min or max rejects two values, which DataFusion 55 quotes in an error that it calls internal.
fn is_uncomparable(text: &str) -> bool {
    text.starts_with("Uncomparable values")
}

const UNCOMPARABLE_HELP: &str =
    "they compare numbers, strings, dates and the like, such as one item of a list: max(v[1])";

fn other_function(given: &str) -> &'static str {
    match given.contains("List") {
        true => {
            "array_length(…) is the number of items of a list; SHOW FUNCTIONS LIKE 'array%' lists functions of lists"
        }
        false => "convert the argument, or call another function; SHOW FUNCTIONS lists them",
    }
}

/// The exit code and the hint for an error.
pub(super) fn classify(root: &DataFusionError) -> (Exit, Option<Cow<'static, str>>) {
    use DataFusionError as E;
    match root {
        E::Plan(text) if text.contains("Cannot infer schema from an empty") => (Exit::Usage, Some(FOLDER_HELP.into())),
        E::Plan(text) if let Some((_, forms)) = no_match(text) => (
            Exit::Usage,
            Some(format!("its forms are {forms}; convert the arguments, or call another function").into()),
        ),
        E::Internal(text) if is_uncomparable(text) => (Exit::Usage, Some(UNCOMPARABLE_HELP.into())),
        E::Internal(text) if let Some((_, given)) = uncast(text) => (Exit::Usage, Some(other_function(given).into())),
        E::SQL(..) | E::Plan(_) | E::SchemaError(..) | E::Configuration(_) | E::NotImplemented(_) => {
            (Exit::Usage, None)
        }
        E::ObjectStore(error) if let Some(inner) = wrapped_by_store(error) => classify(inner.find_root()),
        E::IoError(error) if is_invalid_data(error) => (Exit::Input, None),
        E::ParquetError(error) if is_caused_by_store(error.as_ref()) => (Exit::Storage, None),
        E::ObjectStore(_) | E::IoError(_) => (Exit::Storage, None),
        E::ResourcesExhausted(text) => (Exit::Failed, Some(exhausted::help(text).into())),
        E::Internal(_) => (Exit::Failed, Some("this is a bug; please report it with the statement".into())),
        E::ArrowError(error, _) if let ArrowError::IoError(_, error) = error.as_ref() => {
            (if is_invalid_data(error) { Exit::Input } else { Exit::Storage }, None)
        }
        E::External(inner) => classify_external(inner.as_ref()),
        _ => (Exit::Input, None),
    }
}

/// Whether the content of a file is invalid, such as a truncated compressed stream, as opposed to a failing disk or
/// store.
pub(super) fn is_invalid_data(error: &std::io::Error) -> bool {
    use ErrorKind::{InvalidData, InvalidInput, Other, UnexpectedEof};
    match error.kind() {
        InvalidData | InvalidInput | UnexpectedEof => true,
        // Decompressors report invalid streams as `Other`.
        Other => !is_caused_by_store(error),
        _ => false,
    }
}

type AnyError = dyn std::error::Error + 'static;

/// Whether an error has an error of an object store among its sources.
pub(super) fn is_caused_by_store(error: &AnyError) -> bool {
    /// The next source. [`std::io::Error::source`] skips the error that it wraps.
    fn below(error: &AnyError) -> Option<&AnyError> {
        match error.downcast_ref::<std::io::Error>() {
            Some(error) => error.get_ref().map(|inner| inner as &AnyError),
            None => error.source(),
        }
    }
    std::iter::successors(Some(error), |error| below(*error)).any(|error| error.is::<object_store::Error>())
}

/// The error that DataFusion wrapped in an error of an object store: decoding the bytes failed, not the store.
pub(super) fn wrapped_by_store(error: &object_store::Error) -> Option<&DataFusionError> {
    let object_store::Error::Generic { source, .. } = error else { return None };
    source.downcast_ref()
}

/// Wraps an error of this crate for DataFusion.
pub(super) fn external(error: impl std::error::Error + Send + Sync + 'static) -> DataFusionError {
    DataFusionError::External(Box::new(error))
}

/// Whether an external error is one of our types, whose messages contain no row values.
fn is_own(error: &AnyError) -> bool {
    error.is::<Error>()
        || error.is::<elmo_udfs::ModelFailed>()
        || error.is::<elmo::Error>()
        || error.is::<SourceError>()
        || error.is::<StoreError>()
}

/// The exit code and the hint for an external error. Errors that a worker of a cluster sent are [`Error`](enum@Error)s.
fn classify_external(error: &AnyError) -> (Exit, Option<Cow<'static, str>>) {
    if let Some(error) = error.downcast_ref::<Error>() {
        return (error.exit(), error.help().map(Cow::Owned));
    }
    let exit = if error.is::<elmo_udfs::ModelFailed>() {
        Exit::Model
    } else if let Some(error) = error.downcast_ref::<elmo::Error>() {
        error.kind().into()
    } else if let Some(error) = error.downcast_ref::<SourceError>() {
        error.exit()
    } else {
        error.downcast_ref::<StoreError>().map_or(Exit::Input, Fault::exit)
    };
    (exit, None)
}

#[cfg(test)]
mod tests {
    use std::{io, sync::Arc};

    use datafusion::parquet::errors::ParquetError;

    use super::*;

    fn converted(error: DataFusionError) -> (String, Exit) {
        let error = sql_error(error);
        (error.to_string(), error.exit())
    }

    #[test]
    fn the_root_error_gives_message_and_exit_code() {
        let plan = || DataFusionError::Plan("elmo_embed: no".into());
        assert_eq!(converted(plan()), ("elmo_embed: no".into(), Exit::Usage));
        let deep = DataFusionError::Shared(Arc::new(plan().context("type_coercion").context("analyzer")));
        assert_eq!(converted(deep), ("elmo_embed: no".into(), Exit::Usage));
        let model = elmo::Error::Closed;
        let text = model.to_string();
        assert_eq!(converted(DataFusionError::External(Box::new(model))), (text, Exit::Failed));
    }

    /// A store that does not answer is a storage error, whichever reader reports it.
    #[test]
    fn errors_of_stores_differ_from_errors_of_contents() {
        let store = || object_store::Error::Generic { store: "S3", source: "timed out".into() };
        let contents = || io::Error::other("Unknown frame descriptor");
        let read = |error: io::Error| DataFusionError::from(ArrowError::IoError("read".into(), error));
        let wrapped = |error: DataFusionError| {
            DataFusionError::from(object_store::Error::Generic { store: "read", source: Box::new(error) })
        };
        for (error, exit) in [
            (DataFusionError::from(ParquetError::External(Box::new(store()))), Exit::Storage),
            (DataFusionError::from(ParquetError::General("Corrupt footer".into())), Exit::Input),
            (read(io::Error::other(store())), Exit::Storage),
            (read(contents()), Exit::Input),
            (DataFusionError::from(store()), Exit::Storage),
            (wrapped(DataFusionError::from(contents())), Exit::Input),
        ] {
            let text = error.to_string();
            assert_eq!(converted(error).1, exit, "{text}");
        }
    }

    /// The messages are those of `datafusion-functions` 55.2.
    #[test]
    fn values_are_replaced_and_names_are_kept() {
        for (text, expected) in [
            (
                "Error parsing 'my: secret' as time. Tried formats: [\"%H:%M\"]",
                "Error parsing '…' as time. Tried formats: [\"…\"]",
            ),
            ("Error parsing timestamp from 'it's' using format '%Y': input", "Error parsing timestamp from '…': input"),
            ("map key must be unique, duplicate key found: exists", "map key must be unique, duplicate key found: …"),
            ("Date part 'secret", "Date part '…"),
            ("Can't compute it", "Can't compute it"),
            ("Table 'reviews' doesn't exist.", "Table 'reviews' doesn't exist."),
            ("elmo_word: unknown value \"sum\"", "elmo_word: unknown value \"sum\""),
        ] {
            assert_eq!(converted(DataFusionError::Execution(text.into())).0, expected);
        }
        let regex = "regex parse error:\n    (?secret)b\n      ^\nerror: unrecognized flag";
        let regex = DataFusionError::External(regex.into());
        assert_eq!(converted(regex).0, "regex parse error: error: unrecognized flag");
    }

    #[test]
    fn a_message_of_coerce_types_is_kept() {
        let text = "Execution error: Function 'f' user-defined coercion failed with: Error during planning: f: text is a \
                    string, not Int64. No function matches the given name and argument types 'f(Int64)'.";
        assert_eq!(converted(DataFusionError::Plan(text.into())).0, "f: text is a string, not Int64.");
    }
}
