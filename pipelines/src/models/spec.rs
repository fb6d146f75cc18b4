//! The names that users give models: `--model`, `--options` and `--weights`.

use std::{path::PathBuf, str::FromStr};

use elmo::BuiltIn;

use super::error::ModelsError;
use crate::redact::redact;

/// Separates the files of a pair in an address. No path and no URL contains it.
const PAIR_SEPARATOR: char = '\0';

/// A model as the user named it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSpec {
    /// A model that is built into the binary.
    BuiltIn(BuiltIn),
    /// A model directory or a zip of one.
    Whole(Place),
    /// The published pair of files.
    Pair {
        /// `options.json`
        options: Place,
        /// `weights.hdf5` or `weights.safetensors`
        weights: Place,
    },
}

/// The location of a file or directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// On this machine.
    Local(PathBuf),
    /// In an object store or on a web server.
    Remote(url::Url),
}

/// The model that a command uses when none is named.
impl Default for ModelSpec {
    fn default() -> Self {
        Self::BuiltIn(BuiltIn::Books)
    }
}

impl FromStr for Place {
    type Err = ModelsError;

    fn from_str(text: &str) -> Result<Self, ModelsError> {
        if !text.contains("://") {
            return Ok(Self::Local(PathBuf::from(text)));
        }
        let not_a_url = |reason: String| ModelsError::Url { url: redact(text), reason };
        let url = url::Url::parse(text).map_err(|e| not_a_url(e.to_string()))?;
        match url.scheme() {
            "file" => url.to_file_path().map(Self::Local).map_err(|()| not_a_url("not a local path".into())),
            _ => Ok(Self::Remote(url)),
        }
    }
}

impl Place {
    fn address(&self) -> String {
        match self {
            Self::Local(path) => std::path::absolute(path).unwrap_or_else(|_| path.clone()).display().to_string(),
            Self::Remote(url) => url.to_string(),
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Local(path) => path.display().fmt(f),
            Self::Remote(url) => f.write_str(&redact(url.as_str())),
        }
    }
}

impl std::fmt::Display for ModelSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::BuiltIn(model) => model.fmt(f),
            Self::Whole(place) => place.fmt(f),
            Self::Pair { options, weights } => write!(f, "{options} + {weights}"),
        }
    }
}

impl ModelSpec {
    /// A short name: the last part of a path or URL, without `.zip`.
    pub fn name(&self) -> String {
        let last = |text: &str| text.trim_end_matches('/').rsplit('/').next().unwrap_or_default().to_owned();
        let name = match self {
            Self::BuiltIn(model) => model.name().to_owned(),
            Self::Pair { .. } => String::new(),
            // The canonical path of `.` and `..` has a name.
            Self::Whole(Place::Local(path)) => {
                let path = path.canonicalize().unwrap_or_else(|_| path.clone());
                path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
            }
            Self::Whole(Place::Remote(url)) => last(url.path()),
        };
        match name.strip_suffix(".zip").unwrap_or(&name) {
            "" => "model".to_owned(),
            name => name.to_owned(),
        }
    }
}

impl ModelSpec {
    /// The name of the model for other processes: an absolute path, or the URL with its secrets.
    pub fn address(&self) -> String {
        match self {
            Self::BuiltIn(model) => model.name().to_owned(),
            Self::Whole(place) => place.address(),
            Self::Pair { options, weights } => format!("{}{PAIR_SEPARATOR}{}", options.address(), weights.address()),
        }
    }

    /// The inverse of [`ModelSpec::address`].
    ///
    /// # Errors
    /// [`ModelsError::Url`] when a URL is invalid.
    pub fn from_address(address: &str) -> Result<Self, ModelsError> {
        match address.split_once(PAIR_SEPARATOR) {
            None => address.parse(),
            Some((options, weights)) => Ok(Self::Pair { options: options.parse()?, weights: weights.parse()? }),
        }
    }
}

impl FromStr for ModelSpec {
    type Err = ModelsError;

    fn from_str(text: &str) -> Result<Self, ModelsError> {
        match BuiltIn::named(text) {
            Some(model) => Ok(Self::BuiltIn(model)),
            None => text.parse().map(Self::Whole),
        }
    }
}
