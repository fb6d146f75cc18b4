//! Settings of a session: `SET elmo.rules = false`, `SHOW elmo.rules`.

use std::{any::Any, str::FromStr};

use datafusion::{
    common::{Result, config::ConfigExtension, config_err},
    config::{ConfigEntry, ConfigOptions, ExtensionOptions},
};

/// Settings of the planner extension.
///
/// Implemented by hand: DataFusion's macro lists settings without their prefix, so SHOW would not find them, and other
/// processes of a cluster would not accept them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ElmoConfig {
    /// Whether the planner rules compute each embedding once, after filters, joins and limits. Results are the same
    /// without them, but take longer.
    pub rules: bool,
    /// Size of the vector cache in MiB, which all queries over the same models share. 0 caches the vectors of constants
    /// only.
    pub cache_mb: usize,
    /// Whether a query without ORDER BY returns the rows of files in their order. Read by `elmo sql`.
    pub keep_order: bool,
}

impl Default for ElmoConfig {
    fn default() -> Self {
        Self { rules: true, cache_mb: 256, keep_order: true }
    }
}

impl ConfigExtension for ElmoConfig {
    const PREFIX: &'static str = "elmo";
}

impl ExtensionOptions for ElmoConfig {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn cloned(&self) -> Box<dyn ExtensionOptions> {
        Box::new(self.clone())
    }

    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        match key {
            "rules" => self.rules = parse(key, value, "true or false")?,
            "cache_mb" => self.cache_mb = parse(key, value, "a whole number of MiB")?,
            "keep_order" => self.keep_order = parse(key, value, "true or false")?,
            _ => {
                return config_err!(
                    "elmo.{key}: no such setting; known settings: elmo.rules, elmo.cache_mb, elmo.keep_order"
                );
            }
        }
        Ok(())
    }

    fn entries(&self) -> Vec<ConfigEntry> {
        let entry = |key: &str, value: String, description| ConfigEntry {
            key: format!("{}.{key}", Self::PREFIX),
            value: Some(value),
            description,
        };
        vec![
            entry(
                "rules",
                self.rules.to_string(),
                "Compute each embedding of a query once, after filters, joins and limits",
            ),
            entry(
                "cache_mb",
                self.cache_mb.to_string(),
                "Size in MiB of the cache of vectors that all queries share; 0 caches the vectors of constants only",
            ),
            entry(
                "keep_order",
                self.keep_order.to_string(),
                "Return the rows of files in their order in queries without ORDER BY",
            ),
        ]
    }
}

fn parse<T: FromStr>(key: &str, value: &str, expected: &str) -> Result<T> {
    value
        .trim()
        .to_ascii_lowercase()
        .parse()
        .or_else(|_| config_err!("elmo.{key}: invalid value {value:?}: expected {expected}"))
}

impl ElmoConfig {
    /// The settings of a session, or the defaults if the extension is not registered.
    pub fn from_options(options: &ConfigOptions) -> Self {
        options.extensions.get::<Self>().cloned().unwrap_or_default()
    }
}
