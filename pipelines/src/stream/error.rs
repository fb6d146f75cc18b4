//! Errors of the stream.

use thiserror::Error;

use super::TopicPartition;
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
    /// A message that cannot be embedded, with on-error `fail`. Everything before it is in the output.
    #[error("{partition} at offset {offset}: {reason}")]
    Refused {
        /// Its partition.
        partition: TopicPartition,
        /// Its offset.
        offset: i64,
        /// Why.
        reason: String,
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
            Self::Refused { .. } => Exit::Input,
            Self::Settings { .. } => Exit::Usage,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::Broker { help, .. } | Self::Settings { help, .. } => help.clone(),
            Self::Refused { .. } => Some(
                "everything before it is in the output; go on with --on-error null, skip or dead-letter".to_owned(),
            ),
        }
    }
}
