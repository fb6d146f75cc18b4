//! Errors of this crate: each knows its exit code and how to proceed.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use elmo::lm_head::LmHeadError;
use thiserror::Error;

use crate::{redact::redact, reply::summary};

/// The error of a module as the command line needs it. Each module decides which exit code its errors have.
pub trait Fault: std::error::Error + Send + Sync + 'static {
    /// Exit code of a command that fails with this error.
    fn exit(&self) -> Exit;

    /// What to do next, when that is not obvious from the message.
    fn help(&self) -> Option<String> {
        None
    }
}

/// A boxed [`Fault`].
#[derive(Debug)]
pub struct AnyFault(Box<dyn Fault>);

impl fmt::Display for AnyFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for AnyFault {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

/// Any error of this crate: that of a module ([`Error::Module`]), or one that several modules share.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The error of a module.
    #[error(transparent)]
    Module(AnyFault),
    /// Invalid arguments, or settings that exclude each other.
    #[error("{message}")]
    Usage {
        /// What is wrong.
        message: String,
        /// What to do instead.
        help: Option<String>,
    },
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
    /// A local file.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
    /// The job was interrupted; everything finished so far is durable.
    #[error("interrupted after {rows} rows, which are saved")]
    Interrupted {
        /// Rows that are durable.
        rows: u64,
        /// The same command can resume, because its input can be read again.
        again: bool,
        /// The output belongs to this job by now. A job that began with `--overwrite` must resume without it.
        begun: bool,
    },
    /// Interrupted with nothing to resume.
    #[error("interrupted")]
    Stopped,
    /// An output, a model or a machine failed a check that the user asked for.
    #[error("{message}")]
    Check {
        /// What is wrong.
        message: String,
        /// How to repair it.
        help: Option<String>,
    },
    /// The reader of stdout has closed it, as `head` does. Not a failure.
    #[error("stdout is closed")]
    BrokenPipe,
    /// A failure of neither the input nor the model nor a store.
    #[error("{0}")]
    Failed(String),
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How a command ended, as the shell sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Success.
    Done = 0,
    /// Failed for a reason that has no code of its own.
    Failed = 1,
    /// Invalid arguments or settings.
    Usage = 2,
    /// Invalid input data.
    Input = 3,
    /// A model that cannot be used.
    Model = 4,
    /// A failure of storage or broker.
    Storage = 5,
    /// Done, but rows were rejected.
    Rejected = 6,
    /// Interrupted; the same command resumes.
    Interrupted = 130,
}

impl Exit {
    /// The exit code of a process.
    pub(crate) fn of_code(code: i32) -> Option<Self> {
        let all = [Self::Done, Self::Failed, Self::Usage, Self::Input, Self::Model, Self::Storage, Self::Rejected];
        all.into_iter().chain([Self::Interrupted]).find(|exit| *exit as i32 == code)
    }

    /// The exit code that another process reported as a number.
    #[cfg(feature = "cluster")]
    pub(crate) fn from_code(code: &str) -> Option<Self> {
        let all = [Self::Failed, Self::Usage, Self::Input, Self::Model, Self::Storage];
        all.into_iter().find(|exit| (*exit as u8).to_string() == code)
    }
}

impl<F: Fault> From<F> for Error {
    fn from(fault: F) -> Self {
        Self::Module(AnyFault(Box::new(fault)))
    }
}

impl Error {
    /// The exit code of a command that fails with this error.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Module(fault) => fault.0.exit(),
            Self::Usage { .. } => Exit::Usage,
            Self::Input { .. } => Exit::Input,
            Self::Io { .. } => Exit::Storage,
            Self::Interrupted { .. } | Self::Stopped => Exit::Interrupted,
            Self::BrokenPipe => Exit::Done,
            Self::Check { .. } | Self::Failed(_) => Exit::Failed,
        }
    }

    /// What to do next, when that is not obvious from the message.
    pub fn help(&self) -> Option<String> {
        match self {
            Self::Module(fault) => fault.0.help(),
            Self::Usage { help, .. } | Self::Input { help, .. } | Self::Check { help, .. } => help.clone(),
            Self::Interrupted { again: true, .. } => {
                Some("run the same command again without --overwrite to resume the job".into())
            }
            Self::Interrupted { .. } => Some(
                "standard input cannot be read again, so this job cannot be resumed; to be able to resume, write the \
                 lines to a file first"
                    .into(),
            ),
            _ => None,
        }
    }

    /// The error of a module, if it is of type `F`.
    pub fn module<F: Fault>(&self) -> Option<&F> {
        let Self::Module(fault) = self else { return None };
        let error: &(dyn std::error::Error + 'static) = &*fault.0;
        error.downcast_ref()
    }

    /// The message and its chain of sources in one line, without secrets.
    ///
    /// A source that the message already contains is not repeated: several libraries include their source in their own
    /// message *and* return it from `source()`.
    pub fn report(&self) -> String {
        let mut text = self.to_string();
        let mut reason = std::error::Error::source(self);
        while let Some(error) = reason {
            let whole = error.to_string();
            let more = summary(&whole);
            let is_contained = text.contains(&whole);
            if !is_contained && !text.contains(&more) {
                text.push_str(": ");
                text.push_str(&more);
            }
            if !is_contained && more != whole {
                // The sources below would repeat what the summary left out, such as the page of a web server.
                break;
            }
            reason = error.source();
        }
        redact(&text)
    }

    /// Invalid arguments, and what to do instead.
    pub fn usage(message: impl Into<String>, help: impl Into<String>) -> Self {
        Self::Usage { message: message.into(), help: Some(help.into()) }
    }

    /// A check that failed, without advice.
    pub fn check(message: impl Into<String>) -> Self {
        Self::Check { message: message.into(), help: None }
    }

    /// A local file.
    pub fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_path_buf(), source }
    }
}

/// An error that another process sent keeps its exit code and help.
impl Fault for elmo::Error {
    fn exit(&self) -> Exit {
        match remote(self) {
            Some(error) => error.exit(),
            None => self.kind().into(),
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::LmHead(LmHeadError::Missing(_)) => {
                let help =
                    "elmo finetune --vocab trains a softmax for such a model; elmo model info shows what a model has";
                Some(help.to_owned())
            }
            error => remote(error).and_then(Error::help),
        }
    }
}

fn remote(error: &elmo::Error) -> Option<&Error> {
    let elmo::Error::Remote(error) = error else { return None };
    error.downcast_ref()
}

impl From<elmo::ErrorKind> for Exit {
    fn from(kind: elmo::ErrorKind) -> Self {
        match kind {
            elmo::ErrorKind::Usage => Self::Usage,
            elmo::ErrorKind::Input => Self::Input,
            elmo::ErrorKind::Model => Self::Model,
            _ => Self::Failed,
        }
    }
}
