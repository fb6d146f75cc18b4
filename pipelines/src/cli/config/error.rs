//! Errors in the environment and in `elmo.toml`.

use std::path::PathBuf;

use thiserror::Error;

use crate::error::{Exit, Fault};

/// Invalid settings in the environment or in `elmo.toml`.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(in crate::cli) enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the settings in {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{path} is not TOML: {reason}")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Line, column and reason.
        reason: String,
    },
    /// A key that no command has.
    #[error("{path}: unknown key {key}{}", did_you_mean(nearest))]
    UnknownKey {
        /// The file.
        path: PathBuf,
        /// `key` or `section.key`.
        key: String,
        /// The most similar known key.
        nearest: Option<String>,
    },
    /// A section that is not a command.
    #[error("{path}: unknown section [{section}]{}", did_you_mean(nearest))]
    UnknownSection {
        /// The file.
        path: PathBuf,
        /// The section.
        section: String,
        /// The most similar known section.
        nearest: Option<String>,
    },
    /// A value of the wrong type.
    #[error("{path}: key {key}: {reason}")]
    Value {
        /// The file.
        path: PathBuf,
        /// `key` or `section.key`.
        key: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A variable that looks like a misspelt setting.
    #[error("environment variable {name} is not a setting{}", did_you_mean(&Some(nearest.clone())))]
    UnknownVariable {
        /// The variable.
        name: String,
        /// The most similar setting.
        nearest: String,
    },
}

impl Fault for ConfigError {
    fn exit(&self) -> Exit {
        Exit::Usage
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::Read { .. } => Some("check the path given with --config".into()),
            Self::UnknownKey { .. } | Self::UnknownSection { .. } => Some(
                "keys are the long options of a command without the leading dashes; see elmo COMMAND --help".into(),
            ),
            _ => None,
        }
    }
}

fn did_you_mean(nearest: &Option<String>) -> String {
    nearest.as_ref().map(|name| format!("; did you mean {name}?")).unwrap_or_default()
}
