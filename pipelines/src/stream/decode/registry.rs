//! A client of schema registries (Confluent's protocol): schemas by their ids.

use std::fmt;

/// Where a registry is, and who asks.
#[derive(Clone, PartialEq, Eq)]
pub struct RegistrySettings {
    /// Its address.
    pub url: String,
    /// `user:password` for basic authentication; never shown.
    pub user_info: Option<String>,
}

impl fmt::Debug for RegistrySettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let user_info = self.user_info.as_ref().map(|_| "***");
        f.debug_struct("RegistrySettings")
            .field("url", &crate::redact::redact(&self.url))
            .field("user_info", &user_info)
            .finish()
    }
}
