//! Errors of object stores and of addresses.

use thiserror::Error;

use super::Location;
use crate::{
    error::{Exit, Fault},
    reply::summary,
};

/// An invalid address, or a request that a store refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Neither a path nor a URL of a known scheme.
    #[error("{address}: {reason}; give a local path or an s3://, gs://, az://, http(s):// or file:// URL")]
    Address {
        /// What was given, without credentials.
        address: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The store's client cannot be built, usually because a setting is missing in the environment.
    #[error("{address}: cannot set up the object store: {}", summary(source))]
    Setup {
        /// What was given.
        address: String,
        /// The error of the client's builder.
        source: Box<object_store::Error>,
    },
    /// A request failed, after all its retries.
    #[error("{operation} {address}: {}", summary(source))]
    Request {
        /// `read`, `write`, `list`, …
        operation: &'static str,
        /// The object.
        address: String,
        /// The store's error.
        source: Box<object_store::Error>,
    },
    /// The local file system failed.
    #[error("{operation} {address}: {}", summary(source))]
    Local {
        /// `lock`, `create`, `sync`, …
        operation: &'static str,
        /// The file.
        address: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The store accepts writes whose condition does not hold, so it cannot keep a second writer out.
    #[error("{address}: the object store does not honour conditional writes ({header}): {reason}")]
    Unconditional {
        /// The object that the probe wrote.
        address: String,
        /// The header that was ignored.
        header: &'static str,
        /// What was seen.
        reason: String,
    },
}

impl Fault for StoreError {
    fn exit(&self) -> Exit {
        if self.is_usage() { Exit::Usage } else { Exit::Storage }
    }

    fn help(&self) -> Option<String> {
        if let Self::Unconditional { .. } = self {
            return Some(
                "two jobs could overwrite each other there; use a store or a version of it that supports conditional \
                 writes (Amazon S3, Google Cloud Storage and Azure Blob do), or write to a local --output and copy it"
                    .into(),
            );
        }
        let Self::Request { source, .. } = self else { return None };
        match **source {
            object_store::Error::NotFound { .. } => {
                Some("check the name; stores distinguish upper and lower case".into())
            }
            object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
                Some("give credentials through the environment of the store, such as AWS_ACCESS_KEY_ID".into())
            }
            _ => None,
        }
    }
}

impl StoreError {
    pub(crate) fn request(operation: &'static str, location: &Location, source: object_store::Error) -> Self {
        Self::Request { operation, address: location.to_string(), source: Box::new(source) }
    }

    pub(crate) fn local(operation: &'static str, path: &std::path::Path, source: std::io::Error) -> Self {
        Self::Local { operation, address: path.display().to_string(), source }
    }

    /// The address itself is wrong, as opposed to a store that fails.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Address { .. })
    }

    /// The object does not exist.
    pub fn is_not_found(&self) -> bool {
        match self {
            Self::Request { source, .. } => matches!(**source, object_store::Error::NotFound { .. }),
            Self::Local { source, .. } => source.kind() == std::io::ErrorKind::NotFound,
            _ => false,
        }
    }
}
