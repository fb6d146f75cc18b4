//! Errors of the stream.

use thiserror::Error;

use crate::error::{Exit, Fault};

/// Why a stream cannot start or go on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The broker refuses, or nobody answers.
    #[error("{what}: {reason}")]
    Broker {
        /// What was asked of it, with the brokers' addresses or the topic.
        what: String,
        /// Its answer, without secrets.
        reason: String,
        /// What to check.
        help: Option<String>,
    },
    /// A setting that cannot work.
    #[error("{message}")]
    Settings {
        /// What is wrong.
        message: String,
        /// What to do instead.
        help: Option<String>,
    },
}

impl Fault for StreamError {
    fn exit(&self) -> Exit {
        match self {
            Self::Broker { .. } => Exit::Storage,
            Self::Settings { .. } => Exit::Usage,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::Broker { help, .. } | Self::Settings { help, .. } => help.clone(),
        }
    }
}
