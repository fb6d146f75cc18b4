//! The files of a model on this machine.

use std::{
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use elmo::{
    BuiltIn, ModelData, ModelOptions,
    lm_head::{LmHeadData, LmHeadFiles},
    mix::ScalarMix,
    model_dir,
};

use super::{error::ModelsError, spec::ModelSpec};

/// A model on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelFiles {
    /// Built into the binary.
    BuiltIn(BuiltIn),
    /// A model directory.
    Directory(PathBuf),
    /// Two files with any names.
    Pair {
        /// `options.json`
        options: PathBuf,
        /// `weights.hdf5` or `weights.safetensors`
        weights: PathBuf,
    },
}

/// A file that is open for reading, and its path for messages.
pub(super) type OpenFile = (PathBuf, Box<dyn Read>);

impl ModelFiles {
    /// Reads and checks the model; `spec` is named in the error. Blocks.
    ///
    /// # Errors
    /// [`ModelsError::Bad`] when the files are not a usable model.
    pub fn read(&self, spec: &ModelSpec) -> Result<ModelData, ModelsError> {
        let data = match self {
            Self::BuiltIn(model) => ModelData::built_in(*model),
            Self::Directory(dir) => ModelData::open(dir),
            Self::Pair { options, weights } => ModelData::open_pair(options, weights),
        };
        data.map_err(|source| ModelsError::Bad { model: spec.to_string(), source })
    }

    /// The LM head, if the directory has one.
    pub fn lm_head(&self) -> Option<LmHeadFiles> {
        match self {
            Self::Directory(dir) => LmHeadFiles::find(dir),
            Self::BuiltIn(model) => LmHeadFiles::built_in(*model),
            Self::Pair { .. } => None,
        }
    }

    /// Reads the LM head of the model that these files are, if it has one. A model with a broken LM head can be opened, as its vectors do
    /// not need it. Blocks.
    ///
    /// # Errors
    /// [`LmHeadError::Half`](elmo::lm_head::LmHeadError::Half) in [`elmo::Error::LmHead`] when one of its files is missing; as
    /// [`LmHeadFiles::read`].
    pub fn read_lm_head(&self, data: &ModelData) -> elmo::Result<Option<LmHeadData>> {
        if let Self::Directory(dir) = self {
            LmHeadFiles::refuse_half(dir)?;
        }
        data.lm_head.as_ref().map(|head| head.read(data.options.lstm.projection_dim)).transpose()
    }

    /// The scalar mix, if the directory has one; `spec` is named in the error. Blocks.
    ///
    /// # Errors
    /// [`ModelsError::Bad`] when it is invalid or for another number of layers than `options` has.
    pub fn mix(&self, spec: &ModelSpec, options: &ModelOptions) -> Result<Option<ScalarMix>, ModelsError> {
        let mix = match self {
            Self::Directory(dir) => model_dir::mix_of(dir, options),
            Self::BuiltIn(_) | Self::Pair { .. } => Ok(None),
        };
        mix.map_err(|source| ModelsError::Bad { model: spec.to_string(), source })
    }

    /// Opens the file that has this name in a model directory, if there is one. Its path is for messages.
    ///
    /// # Errors
    /// [`ModelsError::Io`] when it cannot be opened.
    pub(super) fn open(&self, name: &str) -> Result<Option<OpenFile>, ModelsError> {
        match self {
            Self::BuiltIn(model) => {
                let path = Path::new(model.name()).join(name);
                Ok(model.file(name).map(|bytes| (path, Box::new(bytes) as Box<dyn Read>)))
            }
            Self::Directory(dir) if dir.join(name).is_file() => {
                let path = dir.join(name);
                let file = File::open(&path).map_err(|e| ModelsError::io(&path, e))?;
                Ok(Some((path, Box::new(file))))
            }
            Self::Directory(_) | Self::Pair { .. } => Ok(None),
        }
    }

    /// The known files of the model, sorted by name.
    pub fn list(&self) -> Vec<PathBuf> {
        match self {
            Self::BuiltIn(_) => Vec::new(),
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

/// File names of a model directory.
const KNOWN_FILES: [&str; 8] =
    [OPTIONS, SAFETENSORS, HDF5, "mix.json", "warm_state.safetensors", "vocab.txt", "softmax.safetensors", "MODEL.md"];
pub(super) const OPTIONS: &str = "options.json";
pub(super) const SAFETENSORS: &str = "weights.safetensors";
pub(super) const HDF5: &str = "weights.hdf5";

/// The standard name for a file called `name`; `None` when it is not part of a model. Published files have long names,
/// such as `elmo_2x1024_128_2048cnn_1xhighway_weights.hdf5`.
pub(super) fn role_name(name: &str) -> Option<&'static str> {
    let by_end = [("_options.json", OPTIONS), ("_weights.hdf5", HDF5), ("_weights.safetensors", SAFETENSORS)];
    let long = by_end.iter().find(|(end, _)| name.ends_with(end)).map(|(_, known)| *known);
    // macOS adds `._options.json` to a zip, which holds the metadata of the file.
    KNOWN_FILES.iter().find(|known| **known == name).copied().or(long).filter(|_| !name.starts_with("._"))
}
