//! Finds the model that a user named: a built-in one, a directory, a zip, a URL of either, or the published pair of
//! files.
//!
//! [`ModelSpec`] parses the name, and [`Models::resolve`] opens the model. What comes from a store or a zip is first
//! copied into the [`Cache`]: complete, checked, and under the hash of its content, so that an interrupted or changed
//! download is never taken for a model. [`info`], [`check`] and [`convert`] are the subcommands of `elmo model`;
//! `LazyModel` is a model that SQL opens when it is needed, and [`Fingerprints`] lets a query be planned without
//! reading the weights.

mod cache;
pub mod check;
pub mod convert;
mod error;
mod files;
mod fingerprints;
pub mod info;
mod lazy;
mod magic;
mod spec;
mod unzip;

use std::{
    path::{Path, PathBuf},
    sync::Once,
};

use elmo::{BuiltIn, ModelData};

pub(crate) use self::lazy::{LazyModel, Warn};
pub use self::{
    cache::Cache,
    error::ModelsError,
    files::ModelFiles,
    fingerprints::Fingerprints,
    magic::{Role, WrongContent},
    spec::{ModelSpec, Place},
};
use crate::{redact::redact, stores::Stores};

/// Access to models: stores, a cache, and whether the network may be used.
#[derive(Debug, Clone, Copy)]
pub struct Models<'a> {
    /// Stores for URLs.
    pub stores: &'a Stores,
    /// Holds fetched and unpacked models.
    pub cache: &'a Cache,
    /// Use the cache only.
    pub offline: bool,
}

impl Models<'_> {
    /// Finds a model, fetches it if necessary, reads and checks it.
    ///
    /// # Errors
    /// As [`Models::locate`]; [`ModelsError::Bad`] when the files are not a usable model,
    /// [`ModelsError::Internal`] when reading them panics.
    pub async fn resolve(&self, spec: &ModelSpec) -> Result<ModelData, ModelsError> {
        self.open(spec).await.map(|(data, _)| data)
    }

    /// As [`Models::resolve`]; also returns the files.
    ///
    /// # Errors
    /// As [`Models::resolve`].
    pub async fn open(&self, spec: &ModelSpec) -> Result<(ModelData, ModelFiles), ModelsError> {
        let (spec, files) = (spec.clone(), self.locate(spec).await?);
        let read = tokio::task::spawn_blocking(move || files.read(&spec).map(|data| (data, files)));
        read.await.map_err(|e| ModelsError::Internal(format!("reading the model failed: {e}")))?
    }

    /// The local files of a model, which are fetched or unpacked if necessary.
    ///
    /// # Errors
    /// [`ModelsError::NotFound`] when a local path does not exist, [`ModelsError::Content`] when a file has
    /// another format, [`ModelsError::Zip`] or [`ModelsError::Incomplete`] when a zip is rejected or lacks the weights;
    /// [`ModelsError::Offline`], [`ModelsError::Url`], [`ModelsError::Store`] or [`ModelsError::Fetch`] when a URL is
    /// not in the cache and must not or cannot be fetched; [`ModelsError::Io`] when a local file cannot be read,
    /// [`ModelsError::Write`] when the cache cannot be written; [`ModelsError::Internal`] when a file is larger than
    /// any model.
    pub async fn locate(&self, spec: &ModelSpec) -> Result<ModelFiles, ModelsError> {
        match spec {
            ModelSpec::BuiltIn(model) => {
                warn_of_folder(*model);
                Ok(ModelFiles::BuiltIn(*model))
            }
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

/// Warns, once per process, that the name of a built-in model does not stand for a model directory of this name.
fn warn_of_folder(model: BuiltIn) {
    static WARNED: Once = Once::new();
    let name = model.name();
    if Path::new(name).join("options.json").is_file() {
        WARNED.call_once(|| tracing::warn!("{name} is the built-in model here; ./{name} names the folder"));
    }
}

/// Warns, once per process, that a job uses the untrained model.
pub(crate) fn warn_untrained() {
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        tracing::warn!(
            model = BuiltIn::Tiny.name(),
            "this model is untrained: its vectors are for trying elmo out and have no meaning"
        );
    });
}
