//! Writes rows to Parquet files that appear complete or not at all.
//!
//! | file | |
//! |---|---|
//! | `encoding` | codec and encoding of the columns |
//! | `encoder` | rows into the bytes of one file, on the caller's thread |
//! | `groups` | the same on other threads, several row groups at the same time |
//! | `parquet` | [`PartWriter`]: rows into one file |
//! | `row_group` | the columns of a row group |
//! | `units` | row boundaries at which the encoder is called |
//! | `upload`, `chunks` | bytes on their way to the store |
//! | `publish` | how a complete file gets its name |
//! | `staged` | a complete file to which another process gives its name |
//! | `copy` | any bytes as a file |

mod chunks;
mod copy;
mod encoder;
mod encoding;
mod groups;
mod parquet;
mod publish;
mod row_group;
mod staged;
mod units;
mod upload;

use thiserror::Error;

use crate::{
    error::{Exit, Fault},
    stores::StoreError,
};

pub(crate) use self::{copy::copy, encoder::Encoder, groups::row_groups_at_once};
pub use self::{
    encoding::{Codec, Encoding},
    parquet::{Complete, PartWriter, Written},
    publish::Fence,
    staged::Staged,
    upload::Buffering,
};

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
        /// The encoder's message.
        reason: String,
    },
    /// The file exists, and was to be created.
    #[error("{file} exists")]
    Exists {
        /// The file.
        file: String,
    },
}

impl Fault for SinkError {
    fn exit(&self) -> Exit {
        match self {
            Self::Store(error) => error.exit(),
            Self::Encode { .. } => Exit::Input,
            Self::Exists { .. } => Exit::Storage,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::Store(error) => error.help(),
            Self::Encode { .. } | Self::Exists { .. } => None,
        }
    }
}
