//! Object stores: from an address that a user types to requests that are retried, conditional and durable.
//!
//! A local path, a `file://` URL and a cloud URL all become a [`Location`], so that no other module treats local files
//! differently. [`Stores`] is the only code that knows URL schemes and credentials. Credentials come from the environment
//! (`AWS_*`, `AZURE_*`, `GOOGLE_*`): a URL that holds a password is rejected, so that none is printed or written into a
//! manifest.
//!
//! | file | |
//! |---|---|
//! | `address` | which URLs are accepted, and how they are shown |
//! | `registry` | [`Stores`]: clients by origin and retry budget |
//! | `location` | [`Location`]: the requests |
//! | `client`, `retry` | HTTP clients: timeouts, retries, warnings |
//! | `http` | files of HTTP servers, downloaded once |
//! | `local` | local files, which have a hidden name until they are complete |
//! | [`create_once`] | create if absent, compare, and the probe for conditional writes |
//! | `uploads` | uploads in chunks that another process can abort |
//! | `sync`, `walk`, `file`, `obstacle`, `writable` | local durability, local listings, Parquet readers, what is no folder, what takes files |

mod address;
#[cfg(any(feature = "aws", feature = "azure", feature = "gcp", feature = "http"))]
mod client;
pub mod create_once;
mod error;
pub(crate) mod file;
#[cfg(test)]
pub(crate) mod hooked;
#[cfg(feature = "http")]
mod http;
pub(crate) mod local;
mod location;
mod obstacle;
mod registry;
mod retry;
pub(crate) mod sync;
pub(crate) mod uploads;
mod walk;
pub(crate) mod writable;

pub use self::{
    error::StoreError,
    location::Location,
    obstacle::Obstacle,
    registry::Stores,
    retry::{INTERACTIVE_RETRY_FOR, RETRY_FOR},
    uploads::UploadId,
};

/// Stores without a network always answer.
#[cfg(not(any(feature = "aws", feature = "azure", feature = "gcp", feature = "http")))]
mod client {
    pub(super) fn is_unanswered(_: &object_store::Error) -> bool {
        false
    }

    pub(super) fn is_broken(_: &object_store::Error) -> bool {
        false
    }
}
