//! Errors of this crate as data: whose fault it is (the exit code) and what to do next.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use thiserror::Error;

use crate::{redact::redact, reply::summary};

/// The error of a module, as the command line sees it. The module knows best whose fault it is.
pub trait Fault: std::error::Error + Send + Sync + 'static {
    /// Exit code of a command that ends with this error.
    fn exit(&self) -> Exit;

    /// What to do next, when that is not obvious from the message.
    fn help(&self) -> Option<String> {
        None
    }
}

/// A [`Fault`] of any type.
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

/// Any error of this crate: of a module ([`Error::Module`]), or one that several modules have.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The error of a module.
    #[error(transparent)]
    Module(AnyFault),
    /// Wrong words on the command line or settings that exclude each other.
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

impl<F: Fault> From<F> for Error {
    fn from(fault: F) -> Self {
        Self::Module(AnyFault(Box::new(fault)))
    }
}

impl Error {
    /// The exit code that this error asks for.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Module(fault) => fault.0.exit(),
            Self::Usage { .. } => Exit::Usage,
            Self::Input { .. } => Exit::Input,
            Self::Io { .. } => Exit::Storage,
            Self::Interrupted { .. } | Self::Stopped => Exit::Interrupted,
            Self::BrokenPipe => Exit::Done,
            Self::Check(_) | Self::Failed(_) => Exit::Failed,
        }
    }

    /// What to do next, when that is not obvious from the message.
    pub fn help(&self) -> Option<String> {
        match self {
            Self::Module(fault) => fault.0.help(),
            Self::Usage { help, .. } | Self::Input { help, .. } => help.clone(),
            Self::Interrupted { again: true, .. } => {
                Some("run the same command again, without --overwrite: it continues where this one stopped".into())
            }
            Self::Interrupted { .. } => Some(
                "standard input cannot be read again, so this job cannot be resumed; write the lines to a file to have \
                 a job that can"
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

    /// The whole chain of reasons in one line, secrets left out.
    ///
    /// Parts that a reason repeats from the one above it are said once: several libraries put their source into their
    /// own message *and* return it as `source()`.
    pub fn report(&self) -> String {
        let mut text = self.to_string();
        let mut reason = std::error::Error::source(self);
        while let Some(error) = reason {
            let whole = error.to_string();
            let more = summary(&whole);
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

/// An error that a process elsewhere sent is judged by what it says of itself.
impl Fault for elmo::Error {
    fn exit(&self) -> Exit {
        match remote(self) {
            Some(error) => error.exit(),
            None => self.kind().into(),
        }
    }

    fn help(&self) -> Option<String> {
        remote(self).and_then(Error::help)
    }
}

fn remote(error: &elmo::Error) -> Option<&Error> {
    let elmo::Error::Elsewhere(error) = error else { return None };
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
