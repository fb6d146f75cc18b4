//! Settings of a session: `SET elmo.rules = false`, `SHOW elmo.rules`.

use std::{any::Any, str::FromStr};

use datafusion::{
    common::{Result, config::ConfigExtension, config_err},
    config::{ConfigEntry, ConfigOptions, ExtensionOptions},
};

/// Settings of the planner extension.
///
/// Written out, as DataFusion's macro lists settings without their prefix: SHOW would not find them, and another process
/// would not take them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ElmoConfig {
    /// Compute each embedding of a query once, after everything that makes rows fewer. Without it the plain functions
    /// do the same, slower.
    pub rules: bool,
    /// Mebibytes for vectors of texts that were embedded lately, over all queries that share the models; 0 remembers
    /// none but constants.
    pub cache_mb: usize,
}

impl Default for ElmoConfig {
    fn default() -> Self {
        Self { rules: true, cache_mb: 256 }
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
            "rules" => self.rules = parsed(key, value, "true or false")?,
            "cache_mb" => self.cache_mb = parsed(key, value, "a whole number of mebibytes")?,
            _ => return config_err!("elmo.{key}: no such setting; there are elmo.rules, elmo.cache_mb"),
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
                "Compute each embedding of a query once, after everything that makes rows fewer",
            ),
            entry(
                "cache_mb",
                self.cache_mb.to_string(),
                "Mebibytes for vectors of texts that were embedded lately, over all queries; 0 remembers none but constants",
            ),
        ]
    }
}

fn parsed<T: FromStr>(key: &str, value: &str, wanted: &str) -> Result<T> {
    value.trim().to_ascii_lowercase().parse().or_else(|_| config_err!("elmo.{key}: no value {value:?}; it is {wanted}"))
}

impl ElmoConfig {
    /// The session's settings, or the defaults where the extension was not registered.
    pub(crate) fn of(options: &ConfigOptions) -> Self {
        options.extensions.get::<Self>().cloned().unwrap_or_default()
    }
}
