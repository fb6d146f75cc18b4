//! The version of the messages. Sender and receiver must have the same.

use super::model::ModelHost;

/// The version of this crate: in another version, messages may have another meaning.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Why a message of this version cannot be read by the process `here`. `None` if it can.
#[must_use]
pub fn other_version(version: &str, here: &dyn ModelHost) -> Option<String> {
    (version != VERSION).then(|| {
        format!(
            "the query was planned by elmo {version}, and {} is elmo {VERSION}: run one version on the client \
             and all workers",
            here.name()
        )
    })
}
