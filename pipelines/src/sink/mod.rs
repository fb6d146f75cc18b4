//! Rows out: Parquet files that are there whole or not at all.

mod parquet;
mod units;
mod upload;

use thiserror::Error;

use crate::stores::StoreError;

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
