//! Errors of a cluster.

use datafusion::common::DataFusionError;
use thiserror::Error;
use tonic::{Code, Status};

use super::envelope;
use crate::error::{Error, Exit, Fault};

/// Why a query or a job on a cluster failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// None of the workers answers.
    #[error("none of the workers answers: {reasons}")]
    NoWorkers {
        /// Each with its reason.
        reasons: String,
    },
    /// The list of workers cannot be read, or is empty.
    #[error("cannot tell the workers of {list}: {reason}")]
    List {
        /// The list as it was given.
        list: String,
        /// Why.
        reason: String,
    },
    /// A worker does not accept the caller, or is not fit for its query.
    #[error("the worker at {worker} refuses: {reason}")]
    Refused {
        /// Its address.
        worker: String,
        /// Why.
        reason: String,
    },
    /// A worker stopped, or is cut off.
    #[error("the worker at {worker} was lost: {reason}")]
    Lost {
        /// Its address.
        worker: String,
        /// The error of the connection.
        reason: String,
    },
    /// A task failed.
    #[error("{message}")]
    Failed {
        /// The worker's error.
        message: String,
        /// The exit code.
        exit: Exit,
        /// A hint for the user.
        help: Option<String>,
    },
}

impl ClusterError {
    /// The error of a worker, which it names if it is about its disk or its stores.
    pub(super) fn at(self, worker: &str) -> Self {
        const WORKER: &str = "the worker at ";
        match self {
            // One that has got it from another worker need not be named.
            Self::Failed { message, exit: Exit::Storage, help } if !message.starts_with(WORKER) => {
                Self::Failed { message: format!("{WORKER}{worker}: {message}"), exit: Exit::Storage, help }
            }
            other => other,
        }
    }
}

impl Fault for ClusterError {
    fn exit(&self) -> Exit {
        match self {
            Self::NoWorkers { .. } | Self::Lost { .. } => Exit::Storage,
            Self::List { .. } | Self::Refused { .. } => Exit::Usage,
            Self::Failed { exit, .. } => *exit,
        }
    }

    fn help(&self) -> Option<String> {
        Some(match self {
            Self::NoWorkers { .. } => "start one with elmo cluster worker, or leave out --cluster".to_owned(),
            Self::List { .. } => {
                "give HOST:PORT,HOST:PORT, dns:NAME:PORT, or a file with a HOST:PORT per line".to_owned()
            }
            Self::Lost { .. } => "run it again; the other workers do the work of this one".to_owned(),
            Self::Refused { .. } => return None,
            Self::Failed { help, .. } => return help.clone(),
        })
    }
}

impl From<ClusterError> for DataFusionError {
    fn from(error: ClusterError) -> Self {
        Self::External(Box::new(Error::from(error)))
    }
}

/// The error of a request to a worker.
pub(super) fn of_status(worker: &str, status: &Status) -> ClusterError {
    let (worker, reason) = (worker.to_owned(), reason(status));
    match status.code() {
        Code::Unauthenticated | Code::FailedPrecondition | Code::PermissionDenied => {
            ClusterError::Refused { worker, reason }
        }
        Code::InvalidArgument | Code::NotFound | Code::AlreadyExists | Code::OutOfRange | Code::DataLoss => {
            let (message, help) =
                (format!("the worker at {worker}: {reason}"), "run the same build of elmo everywhere");
            ClusterError::Failed { message, exit: Exit::Usage, help: Some(help.to_owned()) }
        }
        Code::Unimplemented => ClusterError::Refused { worker, reason: format!("not a worker of elmo: {reason}") },
        _ => ClusterError::Lost { worker, reason },
    }
}

/// What a status says, with the innermost source: tonic's own text is only "transport error".
fn reason(status: &Status) -> String {
    let mut source = std::error::Error::source(status);
    while let Some(inner) = source.and_then(std::error::Error::source) {
        source = Some(inner);
    }
    source.map_or_else(|| status.message().to_owned(), ToString::to_string)
}

/// An error of `datafusion-distributed` with the name of the worker, or the worker's own error from its [`envelope`].
pub(super) fn named(worker: &str, error: DataFusionError) -> DataFusionError {
    if let DataFusionError::External(inner) = error.find_root() {
        if inner.is::<Error>() {
            return error;
        }
        if let Some(status) = inner.downcast_ref::<Status>() {
            return of_status(worker, status).into();
        }
    }
    match envelope::decode(&error.to_string()) {
        Some(failed) => failed.at(worker).into(),
        None => error,
    }
}
