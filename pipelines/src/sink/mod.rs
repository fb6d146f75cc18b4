//! Rows out: Parquet files that are there whole or not at all.

mod parquet;
mod units;
mod upload;

use thiserror::Error;

use crate::{
    error::{Exit, Fault},
    stores::StoreError,
};

pub use self::parquet::{Codec, Encoding, PartWriter, Written};

/// A file that could not be written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SinkError {
    /// The store fails.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The rows cannot be encoded.
    #[error("{file}: cannot encode rows as Parquet: {reason}")]
    Encode {
        /// The file.
        file: String,
        /// What the encoder said.
        reason: String,
    },
}

impl Fault for SinkError {
    fn exit(&self) -> Exit {
        match self {
            Self::Store(error) => error.exit(),
            Self::Encode { .. } => Exit::Input,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::Store(error) => error.help(),
            Self::Encode { .. } => None,
        }
    }
}
