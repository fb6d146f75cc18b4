//! Errors of a cluster.

use ballista_core::error::BallistaError;
use datafusion::common::DataFusionError;
use thiserror::Error;

use super::{Address, envelope};
use crate::error::{Error, Exit, Fault};

/// The scheduler's answer to queries while no executor is registered. Clients recognise it and retry.
pub(super) const NO_EXECUTORS: &str = "no executor is connected to the scheduler";

/// Why a query on a cluster failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// No process listens at the address, or it is not a scheduler.
    #[error("the scheduler at {scheduler} does not answer: {reason}")]
    Unreachable {
        /// Its address.
        scheduler: Address,
        /// The error of the connection or the request.
        reason: String,
    },
    /// The scheduler cannot read or run the plan.
    #[error("the scheduler at {scheduler} rejected the query: {reason}")]
    Rejected {
        /// Its address.
        scheduler: Address,
        /// The scheduler's error.
        reason: String,
    },
    /// No executor has registered with the scheduler.
    #[error("{NO_EXECUTORS} at {scheduler}")]
    NoExecutors {
        /// The scheduler's address.
        scheduler: Address,
    },
    /// All executors failed while the query was running.
    #[error("all executors of the scheduler at {scheduler} were lost")]
    AllExecutorsLost {
        /// The scheduler's address.
        scheduler: Address,
    },
    /// A task failed.
    #[error("{message}")]
    Failed {
        /// The executor's error.
        message: String,
        /// The exit code.
        exit: Exit,
        /// A hint for the user.
        help: Option<String>,
    },
    /// A partition of the result cannot be fetched from the executor that holds it.
    #[error("cannot fetch a part of the result from the executor at {executor}: {reason}")]
    ResultLost {
        /// Its address.
        executor: String,
        /// The error of the connection or the request.
        reason: String,
    },
    /// An executor lost its connection to the scheduler, or the scheduler removed it.
    #[error("the scheduler stopped, or removed the executor at {executor} after missing heartbeats")]
    Evicted {
        /// The executor's address.
        executor: String,
    },
    /// The number of fetched rows differs from the number that the executor wrote.
    #[error("the executor at {executor} returned {rows} of {expected} rows")]
    RowCount {
        /// Its address.
        executor: String,
        /// Rows received.
        rows: u64,
        /// Rows written.
        expected: u64,
    },
}

impl Fault for ClusterError {
    fn exit(&self) -> Exit {
        match self {
            Self::Unreachable { .. }
            | Self::Evicted { .. }
            | Self::NoExecutors { .. }
            | Self::AllExecutorsLost { .. }
            | Self::ResultLost { .. }
            | Self::RowCount { .. } => Exit::Storage,
            Self::Rejected { .. } => Exit::Usage,
            Self::Failed { exit, .. } => *exit,
        }
    }

    fn help(&self) -> Option<String> {
        Some(match self {
            Self::Evicted { .. } => {
                "restart it when the scheduler is running; a supervisor such as systemd can do so".to_owned()
            }
            Self::Unreachable { .. } => "start one with elmo cluster scheduler, or leave out --cluster".to_owned(),
            Self::NoExecutors { scheduler } | Self::AllExecutorsLost { scheduler } => {
                format!("start one with elmo cluster executor --scheduler {scheduler}")
            }
            Self::ResultLost { .. } | Self::RowCount { .. } => "run the query again".to_owned(),
            Self::Failed { help, .. } => return help.clone(),
            Self::Rejected { .. } => return None,
        })
    }
}

impl ClusterError {
    /// Converts the error text of a Ballista job. If it contains an [`envelope`], that is the error.
    pub(super) fn of_job(text: &str) -> Self {
        let (message, exit, help) =
            envelope::decode(text).unwrap_or_else(|| (text.trim_end().to_owned(), Exit::Failed, None));
        Self::Failed { message, exit, help }
    }
}

impl From<ClusterError> for DataFusionError {
    fn from(error: ClusterError) -> Self {
        Self::External(Box::new(Error::from(error)))
    }
}

/// Wraps an error of Ballista's own processes.
pub(super) fn ballista_error(error: BallistaError) -> Error {
    Error::Failed(error.to_string())
}
