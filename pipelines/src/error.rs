//! What can go wrong outside the model, as data: whose fault it is, and what to do next.

use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::{
    config::ConfigError,
    manifest::ManifestError,
    models::ModelsError,
    redact::redact,
    sink::SinkError,
    source::SourceError,
    stores::{StoreError, brief},
};

/// Any error of this crate.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// Wrong words on the command line or settings that exclude each other.
    #[error("{message}")]
    Usage {
        /// What is wrong.
        message: String,
        /// What to do instead.
        help: Option<String>,
    },
    /// Wrong words in the environment or in `elmo.toml`.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A file of the input, or a row of it.
    #[error("{file}{}: {reason}", row.map(|row| format!(", row {row}")).unwrap_or_default())]
    Input {
        /// Path or URL.
        file: String,
        /// Row within the file, from 0.
        row: Option<u64>,
        /// Why it cannot be read.
        reason: String,
        /// What to do next.
        help: Option<String>,
    },
    /// A model could not be found, fetched or unpacked.
    #[error(transparent)]
    Models(#[from] ModelsError),
    /// The model itself.
    #[error(transparent)]
    Elmo(#[from] elmo::Error),
    /// An address that is none, or an object store that answered with an error.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// An input that cannot be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// An output that cannot be written.
    #[error(transparent)]
    Sink(#[from] SinkError),
    /// An output that is not ours to write to.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// A local file.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The job was told to stop; everything finished so far is durable.
    #[error("interrupted after {rows} rows; they are safe")]
    Interrupted {
        /// Rows that are durable.
        rows: u64,
        /// The same command can go on: its input can be read again.
        again: bool,
        /// The output is this job's by now: one that began anew must not do so again.
        begun: bool,
    },
    /// A statement that cannot be planned or run.
    #[error("{message}")]
    Sql {
        /// What DataFusion said.
        message: String,
        /// Whose fault it is.
        exit: Exit,
        /// What to do next.
        help: Option<String>,
    },
    /// Another process is gone.
    #[error("{message}")]
    Lost {
        /// Which.
        message: String,
        /// What to do next.
        help: String,
    },
    /// Told to stop, with nothing to go on from.
    #[error("interrupted")]
    Stopped,
    /// An output, a model or a machine did not pass a check that was asked for.
    #[error("{0}")]
    Check(String),
    /// Whoever read stdout has gone away, as `head` does; no failure.
    #[error("stdout is closed")]
    BrokenPipe,
    /// Anything that names neither the input nor the model nor a store.
    #[error("{0}")]
    Failed(String),
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How a command ended, as the shell sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Everything done.
    Done = 0,
    /// Failed, and nothing below fits.
    Failed = 1,
    /// Wrong words.
    Usage = 2,
    /// The input data.
    Input = 3,
    /// The model.
    Model = 4,
    /// Storage or broker.
    Storage = 5,
    /// Done, but rows were rejected.
    Rejected = 6,
    /// Interrupted; the same command continues.
    Interrupted = 130,
}

impl Exit {
    /// The way to end that another process wrote as a number.
    #[cfg(feature = "cluster")]
    pub(crate) fn from_code(code: &str) -> Option<Self> {
        let all = [Self::Failed, Self::Usage, Self::Input, Self::Model, Self::Storage];
        all.into_iter().find(|exit| (*exit as u8).to_string() == code)
    }
}

impl Error {
    /// The exit code that this error asks for.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Usage { .. } | Self::Config(_) => Exit::Usage,
            Self::Input { .. } => Exit::Input,
            Self::Models(error) => error.exit(),
            Self::Elmo(error) => exit_of_elmo(error),
            Self::Store(error) | Self::Sink(SinkError::Store(error)) | Self::Manifest(ManifestError::Store(error)) => {
                exit_of_store(error)
            }
            Self::Manifest(ManifestError::Differs { .. } | ManifestError::NoFolder { .. }) => Exit::Usage,
            Self::Source(error) => exit_of_source(error),
            Self::Sink(_) => Exit::Input,
            Self::Manifest(_) | Self::Io { .. } | Self::Lost { .. } => Exit::Storage,
            Self::Sql { exit, .. } => *exit,
            Self::Interrupted { .. } | Self::Stopped => Exit::Interrupted,
            Self::BrokenPipe => Exit::Done,
            Self::Check(_) | Self::Failed(_) => Exit::Failed,
        }
    }

    /// What to do next, when that is not obvious from the message.
    pub fn help(&self) -> Option<String> {
        match self {
            Self::Usage { help, .. } | Self::Input { help, .. } | Self::Sql { help, .. } => help.clone(),
            Self::Lost { help, .. } => Some(help.clone()),
            Self::Config(error) => error.help(),
            Self::Models(error) => error.help(),
            #[cfg(feature = "cluster")]
            Self::Elmo(error) => crate::cluster::cluster_error(error).and_then(crate::cluster::ClusterError::help),
            Self::Store(error) | Self::Source(SourceError::Store(error)) | Self::Sink(SinkError::Store(error)) => {
                store_help(error)
            }
            Self::Source(error) => error.help(),
            Self::Manifest(error) => error.help(),
            Self::Interrupted { again: true, .. } => {
                Some("run the same command again, without --overwrite: it continues where this one stopped".into())
            }
            Self::Interrupted { .. } => Some(
                "standard input is gone, so this job cannot go on; put the lines into a file to have one that can"
                    .into(),
            ),
            _ => None,
        }
    }

    /// The whole chain of reasons in one line, secrets left out.
    ///
    /// Parts that a reason repeats from the one above it are said once: several libraries put their source into their
    /// own message *and* return it as `source()`.
    pub fn report(&self) -> String {
        let mut text = self.to_string();
        let mut reason = std::error::Error::source(self);
        while let Some(error) = reason {
            let whole = error.to_string();
            let more = brief(&whole);
            let said = text.contains(&whole);
            if !said && !text.contains(&more) {
                text.push_str(": ");
                text.push_str(&more);
            }
            if !said && more != whole {
                // What was left out, a page of a web server say, would come back with the reasons below.
                break;
            }
            reason = error.source();
        }
        redact(&text)
    }

    /// Wrong words, with a remedy.
    pub fn usage(message: impl Into<String>, help: impl Into<String>) -> Self {
        Self::Usage { message: message.into(), help: Some(help.into()) }
    }

    /// A local file.
    pub fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_path_buf(), source }
    }
}

pub(crate) fn exit_of_source(error: &SourceError) -> Exit {
    match error {
        SourceError::Store(error) => exit_of_store(error),
        SourceError::Pattern { .. } | SourceError::InOutput { .. } => Exit::Usage,
        _ => Exit::Input,
    }
}

pub(crate) fn exit_of_store(error: &StoreError) -> Exit {
    if error.is_usage() { Exit::Usage } else { Exit::Storage }
}

fn exit_of_elmo(error: &elmo::Error) -> Exit {
    #[cfg(feature = "cluster")]
    if let Some(error) = crate::cluster::cluster_error(error) {
        return error.exit();
    }
    exit_of_kind(error.kind())
}

pub(crate) fn exit_of_kind(kind: elmo::ErrorKind) -> Exit {
    match kind {
        elmo::ErrorKind::Usage => Exit::Usage,
        elmo::ErrorKind::Input => Exit::Input,
        elmo::ErrorKind::Model => Exit::Model,
        _ => Exit::Failed,
    }
}

/// The two answers of a store that a newcomer meets first.
fn store_help(error: &StoreError) -> Option<String> {
    let StoreError::Request { source, .. } = error else { return None };
    match **source {
        object_store::Error::NotFound { .. } => Some("check the name; stores distinguish upper and lower case".into()),
        object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
            Some("give credentials through the environment of the store, such as AWS_ACCESS_KEY_ID".into())
        }
        _ => None,
    }
}
