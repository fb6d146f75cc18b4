//! Settings of a session: `SET elmo.rules = false`.

use datafusion::{
    common::{config::ConfigExtension, extensions_options},
    config::ConfigOptions,
};

extensions_options! {
    /// Settings of the planner extension.
    pub struct ElmoConfig {
        /// Compute each embedding of a query once, after everything that makes rows fewer. Without it the plain functions
        /// do the same, slower.
        pub rules: bool, default = true
        /// Mebibytes for vectors of texts that were embedded lately, over all queries that share the models; 0 remembers
        /// none but constants.
        pub cache_mb: usize, default = 256
    }
}

impl ConfigExtension for ElmoConfig {
    const PREFIX: &'static str = "elmo";
}

impl ElmoConfig {
    /// The session's settings, or the defaults where the extension was not registered.
    pub(crate) fn of(options: &ConfigOptions) -> Self {
        options.extensions.get::<Self>().cloned().unwrap_or_default()
    }
}
