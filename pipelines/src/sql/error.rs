//! What DataFusion says went wrong, as an error of ours: whose fault it is, and what to do next.

use std::{borrow::Cow, io::ErrorKind};

use datafusion::{arrow::error::ArrowError, error::DataFusionError, sql::sqlparser::parser::ParserError};
use thiserror::Error;

use crate::{
    error::{Error, Exit, Fault},
    source::{SourceError, reason::without_data},
    stores::StoreError,
};

/// A statement that cannot be planned or run.
#[derive(Debug, Error)]
#[error("{message}")]
pub struct SqlError {
    /// What DataFusion said.
    pub message: String,
    /// Whose fault it is.
    pub exit: Exit,
    /// What to do next.
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

/// An error of a statement.
pub(crate) fn sql_error(error: DataFusionError) -> Error {
    judged(&error)
}

/// The same for a borrowed error.
pub(crate) fn judged(error: &DataFusionError) -> Error {
    let (exit, help) = judge(error.find_root());
    SqlError { message: message(error).into_owned(), exit, help: help.map(Cow::into_owned) }.into()
}

/// What is wrong, without the names that DataFusion has for its kinds of errors.
pub(super) fn message(error: &DataFusionError) -> Cow<'_, str> {
    use DataFusionError as E;
    match error {
        E::Plan(text) | E::Execution(text) | E::Configuration(text) => plain(text),
        E::SQL(error, _) => match error.as_ref() {
            ParserError::ParserError(text) | ParserError::TokenizerError(text) => Cow::Borrowed(text),
            other => other.to_string().into(),
        },
        E::External(error) => error.to_string().into(),
        // Arrow's readers quote what they cannot read.
        E::ArrowError(error, _) => without_data(&error.to_string()).into(),
        E::ParquetError(error) => without_data(&error.to_string()).into(),
        E::ObjectStore(error) if let Some(inner) = within_store(error) => message(inner),
        E::Context(_, error) | E::Diagnostic(_, error) => message(error),
        E::Shared(error) => message(error),
        E::Internal(text) if is_no_arrow(text) => "no Arrow file or stream, or one that is cut short".into(),
        E::Collection(errors) => errors.first().map_or("unknown".into(), message),
        other => other.strip_backtrace().into(),
    }
}

/// Of a call with wrong arguments, what the function says itself.
fn plain(text: &str) -> Cow<'_, str> {
    let own = text.split_once("user-defined coercion failed with: Error during planning: ");
    own.map_or(text, |(_, own)| own.split_once(" No function matches").map_or(own, |(own, _)| own)).into()
}

/// Bytes that are no Arrow; DataFusion takes that for an error of its own.
pub(super) fn is_no_arrow(text: &str) -> bool {
    text.starts_with("Failed to parse Arrow file")
}

const OWN_ENDINGS: &str = "of a folder, files with the ending of their kind are taken, such as .json; name others by a pattern: 'logs/*.jsonl'";

/// Whose fault an error is.
fn judge(root: &DataFusionError) -> (Exit, Option<Cow<'static, str>>) {
    use DataFusionError as E;
    match root {
        E::Plan(text) if text.contains("Cannot infer schema from an empty") => (Exit::Usage, Some(OWN_ENDINGS.into())),
        E::SQL(..) | E::Plan(_) | E::SchemaError(..) | E::Configuration(_) | E::NotImplemented(_) => {
            (Exit::Usage, None)
        }
        E::ObjectStore(error) if let Some(inner) = within_store(error) => judge(inner.find_root()),
        E::IoError(error) if is_of_contents(error) => (Exit::Input, None),
        E::ParquetError(error) if is_of_store(error.as_ref()) => (Exit::Storage, None),
        E::ObjectStore(_) | E::IoError(_) => (Exit::Storage, None),
        E::ResourcesExhausted(_) => (
            Exit::Failed,
            Some("give more by --memory-limit, or fewer rows at once by SET datafusion.execution.batch_size".into()),
        ),
        E::Internal(_) => (Exit::Failed, Some("this is a defect; please report it with the statement".into())),
        E::ArrowError(error, _) if let ArrowError::IoError(_, error) = error.as_ref() => {
            (if is_of_contents(error) { Exit::Input } else { Exit::Storage }, None)
        }
        E::External(inner) => of_external(inner.as_ref()),
        _ => (Exit::Input, None),
    }
}

/// Whether what was read is wrong, a packed file that is torn say, and not the disk or the store.
pub(super) fn is_of_contents(error: &std::io::Error) -> bool {
    use ErrorKind::{InvalidData, InvalidInput, Other, UnexpectedEof};
    match error.kind() {
        InvalidData | InvalidInput | UnexpectedEof => true,
        // Those who unpack have no kind for it.
        Other => !is_of_store(error),
        _ => false,
    }
}

type AnyError = dyn std::error::Error + 'static;

/// Whether a store's error is at the bottom of another.
pub(super) fn is_of_store(error: &AnyError) -> bool {
    /// An I/O error skips the one that it was made of.
    fn below(error: &AnyError) -> Option<&AnyError> {
        match error.downcast_ref::<std::io::Error>() {
            Some(error) => error.get_ref().map(|inner| inner as &AnyError),
            None => error.source(),
        }
    }
    std::iter::successors(Some(error), |error| below(*error)).any(|error| error.is::<object_store::Error>())
}

/// What went wrong with the bytes that a store gave, which DataFusion says is an error of the store.
pub(super) fn within_store(error: &object_store::Error) -> Option<&DataFusionError> {
    let object_store::Error::Generic { source, .. } = error else { return None };
    source.downcast_ref()
}

/// An error of ours that DataFusion carried. One that an executor of a cluster sent is an [`Error`] already.
fn of_external(error: &(dyn std::error::Error + Send + Sync + 'static)) -> (Exit, Option<Cow<'static, str>>) {
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

    fn said(error: DataFusionError) -> (String, Exit) {
        let error = sql_error(error);
        (error.to_string(), error.exit())
    }

    #[test]
    fn the_innermost_error_is_said_and_judged() {
        let plan = || DataFusionError::Plan("elmo_embed: no".into());
        assert_eq!(said(plan()), ("elmo_embed: no".into(), Exit::Usage));
        let deep = DataFusionError::Shared(Arc::new(plan().context("type_coercion").context("analyzer")));
        assert_eq!(said(deep), ("elmo_embed: no".into(), Exit::Usage));
        let model = elmo::Error::Closed;
        let text = model.to_string();
        assert_eq!(said(DataFusionError::External(Box::new(model))), (text, Exit::Failed));
    }

    /// A store that does not answer is no broken file, whoever read from it.
    #[test]
    fn stores_and_what_they_hold_are_told_apart() {
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
            assert_eq!(said(error).1, exit, "{text}");
        }
    }

    #[test]
    fn a_function_speaks_for_itself() {
        let text = "Execution error: Function 'f' user-defined coercion failed with: Error during planning: f: text is a \
                    string, not Int64. No function matches the given name and argument types 'f(Int64)'.";
        assert_eq!(said(DataFusionError::Plan(text.into())).0, "f: text is a string, not Int64.");
    }
}
