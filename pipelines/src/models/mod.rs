//! Finds the model that a user named: built in, a directory, a zip, a URL of either, or the published pair of files.
//!
//! What comes from elsewhere is copied into a cache directory first: whole, checked, and under a name made of its
//! hash, so that a half-finished or exchanged download can never be mistaken for a model.

mod cache;
pub mod check;
pub mod convert;
mod fingerprints;
pub mod info;
mod lazy;
mod magic;
mod unzip;

use std::{
    path::{Path, PathBuf},
    str::FromStr,
};

use elmo::{ModelData, lm_head::LmHeadFiles};
use thiserror::Error;

pub(crate) use self::lazy::LazyModel;
pub use self::{
    cache::Cache,
    fingerprints::Fingerprints,
    magic::{Role, WrongContent},
};
use crate::{
    error::{Exit, Fault},
    redact::redact,
    reply::summary,
    stores::{StoreError, Stores},
};

/// The name of the model that is built in.
pub const TINY: &str = "tiny";

/// Between the two files of a pair: no path and no URL has it.
const PAIR: char = '\0';

/// What `--model`, `--options` and `--weights` said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSpec {
    /// The seeded, untrained model inside the binary.
    Tiny,
    /// A model directory or a zip of one.
    Whole(Place),
    /// The published pair.
    Pair {
        /// `options.json`
        options: Place,
        /// `weights.hdf5` or `weights.safetensors`
        weights: Place,
    },
}

/// Where a file or directory is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// On this machine.
    Local(PathBuf),
    /// In an object store or on a web server.
    Remote(url::Url),
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
            "file" => url.to_file_path().map(Self::Local).map_err(|()| not_a_url("not a path of this machine".into())),
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
            Self::Tiny => f.write_str(TINY),
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
            Self::Tiny => TINY.to_owned(),
            Self::Pair { .. } => String::new(),
            // `.` and `..` have a name too.
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
    /// What names the model to processes elsewhere: the path from the root, or the URL with everything in it.
    pub fn address(&self) -> String {
        match self {
            Self::Tiny => TINY.to_owned(),
            Self::Whole(place) => place.address(),
            Self::Pair { options, weights } => format!("{}{PAIR}{}", options.address(), weights.address()),
        }
    }

    /// The model that [`ModelSpec::address`] named.
    ///
    /// # Errors
    /// [`ModelsError::Url`] when it is a URL that none can be.
    pub fn from_address(address: &str) -> Result<Self, ModelsError> {
        match address.split_once(PAIR) {
            None => address.parse(),
            Some((options, weights)) => Ok(Self::Pair { options: options.parse()?, weights: weights.parse()? }),
        }
    }
}

impl FromStr for ModelSpec {
    type Err = ModelsError;

    fn from_str(text: &str) -> Result<Self, ModelsError> {
        match text {
            TINY => Ok(Self::Tiny),
            _ => text.parse().map(Self::Whole),
        }
    }
}

/// No model where the user said there is one.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ModelsError {
    /// Not a URL.
    #[error("{url} is not a URL: {reason}")]
    Url {
        /// What was given.
        url: String,
        /// Why.
        reason: String,
    },
    /// Neither a directory nor a zip, and no built-in name.
    #[error("no model {0}: neither a model directory, nor a zip of one, nor a built-in name")]
    NotFound(String),
    /// A zip lacks a file.
    #[error("the model {model} has no {missing}")]
    Incomplete {
        /// The model.
        model: String,
        /// File names.
        missing: &'static str,
    },
    /// A file is not what its name says.
    #[error("{file}: {wrong}")]
    Content {
        /// Path or URL.
        file: String,
        /// What it is instead.
        wrong: WrongContent,
    },
    /// A zip that we do not unpack.
    #[error("the zip {file} is refused: {reason}")]
    Zip {
        /// Path or URL.
        file: String,
        /// Why.
        reason: String,
    },
    /// `--offline`, and the model is not in the cache.
    #[error("{0} is not in the cache, and --offline forbids to fetch it")]
    Offline(String),
    /// The store or web server does not give the file.
    #[error("cannot fetch {url}: {}", summary(source))]
    Fetch {
        /// The file.
        url: String,
        /// What the store said.
        source: object_store::Error,
    },
    /// The store for a URL cannot be opened.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A local file of a model.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file or directory that we write: in the cache, or a converted model. No fault of a model.
    #[error("cannot write {path}: {source}")]
    Write {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The files are there and complete, but the model is bad.
    #[error("the model {model} cannot be used: {source}")]
    Bad {
        /// The model.
        model: String,
        /// Why.
        source: elmo::Error,
    },
    /// Nothing is written over a model.
    #[error("{0} exists already")]
    Exists(PathBuf),
    /// A broken promise of ours.
    #[error("{0}")]
    Internal(String),
}

impl Fault for ModelsError {
    fn exit(&self) -> Exit {
        match self {
            Self::Url { .. } => Exit::Usage,
            Self::Store(error) => error.exit(),
            Self::Fetch { .. } | Self::Write { .. } => Exit::Storage,
            Self::Exists(_) => Exit::Usage,
            Self::Internal(_) => Exit::Failed,
            _ => Exit::Model,
        }
    }

    fn help(&self) -> Option<String> {
        let text = match self {
            Self::Store(error) => return error.help(),
            Self::NotFound(_) => "give --model DIR, ZIP, URL or the built-in name tiny",
            Self::Incomplete { .. } => {
                "a model directory holds options.json and weights.hdf5 or weights.safetensors; \
                 files with other names are given as --options FILE --weights FILE"
            }
            Self::Content { wrong, .. } => wrong.remedy(),
            Self::Offline(_) => "run the command once without --offline, or give a local directory",
            Self::Exists(_) => "give the name of a new directory",
            Self::Fetch { .. } => "check the URL, the network and the credentials of the store",
            Self::Write { .. } => "check the permissions of the directory and the space on its disk",
            _ => return None,
        };
        Some(text.into())
    }
}

impl ModelsError {
    fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_path_buf(), source }
    }

    fn write(path: &Path, source: std::io::Error) -> Self {
        Self::Write { path: path.to_path_buf(), source }
    }
}

/// Where models come from: stores, a cache, and whether the network may be used.
#[derive(Debug, Clone, Copy)]
pub struct Models<'a> {
    /// Opens URLs.
    pub stores: &'a Stores,
    /// Keeps what was fetched.
    pub cache: &'a Cache,
    /// Never open a socket.
    pub offline: bool,
}

impl Models<'_> {
    /// Finds, fetches where needed, reads and checks a model.
    ///
    /// # Errors
    /// As [`Models::locate`]; [`ModelsError::Bad`] when the files are no model that can be used,
    /// [`ModelsError::Internal`] when reading them panics.
    pub async fn resolve(&self, spec: &ModelSpec) -> Result<ModelData, ModelsError> {
        let (spec, files) = (spec.clone(), self.locate(spec).await?);
        let read = tokio::task::spawn_blocking(move || files.read(&spec));
        read.await.map_err(|e| ModelsError::Internal(format!("reading the model failed: {e}")))?
    }

    /// Local files of a model, fetched or unpacked where needed.
    ///
    /// # Errors
    /// [`ModelsError::NotFound`] when a local path does not exist, [`ModelsError::Content`] when a file is not what it
    /// has to be, [`ModelsError::Zip`] or [`ModelsError::Incomplete`] when a zip is refused or lacks the weights;
    /// [`ModelsError::Offline`], [`ModelsError::Url`], [`ModelsError::Store`] or [`ModelsError::Fetch`] when a URL is
    /// not in the cache and may not or cannot be fetched; [`ModelsError::Io`] when a local file cannot be read,
    /// [`ModelsError::Write`] when the cache cannot be written; [`ModelsError::Internal`] when a file is larger than
    /// any model.
    pub async fn locate(&self, spec: &ModelSpec) -> Result<ModelFiles, ModelsError> {
        match spec {
            ModelSpec::Tiny => Ok(ModelFiles::Tiny),
            ModelSpec::Pair { options, weights } => Ok(ModelFiles::Pair {
                options: self.file(options, Role::Options).await?,
                weights: self.file(weights, Role::Weights).await?,
            }),
            ModelSpec::Whole(Place::Local(path)) => self.local(path).await,
            ModelSpec::Whole(Place::Remote(url)) => self.remote(url).await,
        }
    }

    async fn local(&self, path: &Path) -> Result<ModelFiles, ModelsError> {
        if path.is_dir() {
            return Ok(ModelFiles::Directory(path.to_path_buf()));
        }
        if !path.is_file() {
            return Err(ModelsError::NotFound(path.display().to_string()));
        }
        Role::Zip.check_file(path, &path.display().to_string())?;
        self.cache.unpack(path, &path.display().to_string()).await.map(ModelFiles::Directory)
    }

    async fn remote(&self, url: &url::Url) -> Result<ModelFiles, ModelsError> {
        let is_zip = url.path().to_ascii_lowercase().ends_with(".zip");
        if is_zip {
            let zip = self.cache.file(self, url, Role::Zip).await?;
            return self.cache.unpack(&zip, &redact(url.as_str())).await.map(ModelFiles::Directory);
        }
        self.cache.directory(self, url).await.map(ModelFiles::Directory)
    }

    async fn file(&self, place: &Place, role: Role) -> Result<PathBuf, ModelsError> {
        match place {
            Place::Remote(url) => self.cache.file(self, url, role).await,
            Place::Local(path) => {
                role.check_file(path, &path.display().to_string())?;
                Ok(path.clone())
            }
        }
    }
}

/// Says so when the vectors of a model mean nothing.
pub(crate) fn warn_untrained(data: &ModelData) {
    if data.untrained {
        tracing::warn!(
            model = data.name,
            "this model is untrained: its vectors show how elmo works, they mean nothing"
        );
    }
}

/// A model on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelFiles {
    /// Inside the binary.
    Tiny,
    /// A model directory.
    Directory(PathBuf),
    /// Two files of any name.
    Pair {
        /// `options.json`
        options: PathBuf,
        /// `weights.hdf5` or `weights.safetensors`
        weights: PathBuf,
    },
}

impl ModelFiles {
    /// Reads and checks the model that `spec` named; blocks.
    ///
    /// # Errors
    /// [`ModelsError::Bad`] when the files are no model that can be used.
    pub fn read(&self, spec: &ModelSpec) -> Result<ModelData, ModelsError> {
        let data = match self {
            Self::Tiny => Ok(ModelData::tiny()),
            Self::Directory(dir) => ModelData::open(dir),
            Self::Pair { options, weights } => ModelData::open_pair(options, weights),
        };
        data.map_err(|source| ModelsError::Bad { model: spec.to_string(), source })
    }

    /// The LM head, if there is one beside the weights.
    pub fn lm_head(&self) -> Option<LmHeadFiles> {
        match self {
            Self::Directory(dir) => LmHeadFiles::find(dir),
            Self::Tiny | Self::Pair { .. } => None,
        }
    }

    /// Every file of the model that we know the purpose of, by name.
    pub fn list(&self) -> Vec<PathBuf> {
        match self {
            Self::Tiny => Vec::new(),
            Self::Directory(dir) => known_files(dir),
            Self::Pair { options, weights } => vec![options.clone(), weights.clone()],
        }
    }
}

fn known_files(dir: &Path) -> Vec<PathBuf> {
    let names = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> =
        names.filter(|path| path.file_name().and_then(|n| n.to_str()).and_then(role_name).is_some()).collect();
    files.sort();
    files
}

/// What may lie in a model directory.
pub(crate) const KNOWN_FILES: [&str; 8] =
    [OPTIONS, SAFETENSORS, HDF5, "mix.json", "warm_state.safetensors", "vocab.txt", "softmax.safetensors", "MODEL.md"];
pub(crate) const OPTIONS: &str = "options.json";
pub(crate) const SAFETENSORS: &str = "weights.safetensors";
pub(crate) const HDF5: &str = "weights.hdf5";

/// The name in a model directory of a file called `name`. The published files have long names, such as
/// `elmo_2x1024_128_2048cnn_1xhighway_weights.hdf5`.
pub(crate) fn role_name(name: &str) -> Option<&'static str> {
    let by_end = [("_options.json", OPTIONS), ("_weights.hdf5", HDF5), ("_weights.safetensors", SAFETENSORS)];
    let long = by_end.iter().find(|(end, _)| name.ends_with(end)).map(|(_, known)| *known);
    // macOS puts `._options.json` beside a file in a zip; it holds icons.
    KNOWN_FILES.iter().find(|known| **known == name).copied().or(long).filter(|_| !name.starts_with("._"))
}
