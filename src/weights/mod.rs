//! Named tensors of a model, read from and written to HDF5 (the bilm-tf layout) and safetensors.
//!
//! What may be read is decided by the options before a file is opened: [`read`] takes the plan of
//! names and shapes ([`ModelOptions::weight_plan`](crate::options::ModelOptions::weight_plan)),
//! compares every dataset with it, and only then allocates.

mod bounded_source;
pub mod hdf5;
mod links;
pub mod safetensors;

use std::{
    collections::BTreeMap,
    fmt,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

use thiserror::Error;

use crate::options::TensorSpec;

/// A tensor in float32.
#[derive(Clone, PartialEq)]
pub struct Tensor {
    /// Dimensions, the slowest first.
    pub shape: Vec<usize>,
    /// Values in row-major order.
    pub data: Vec<f32>,
}

/// The shape and a few values: models have millions, and a message must not.
impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor {:?} {:?}..", self.shape, &self.data[..self.data.len().min(3)])
    }
}

/// The tensors of a model by name; names are the paths of the bilm-tf HDF5 file, such as
/// `RNN_0/RNN/MultiRNNCell/Cell0/LSTMCell/W_0`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Weights(BTreeMap<String, Tensor>);

impl Weights {
    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.0.get(name)
    }

    /// Adds or replaces a tensor.
    pub fn insert(&mut self, name: String, tensor: Tensor) {
        self.0.insert(name, tensor);
    }

    /// Takes a tensor out.
    pub fn remove(&mut self, name: &str) -> Option<Tensor> {
        self.0.remove(name)
    }

    /// Names and tensors in byte order of the names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.0.iter().map(|(n, t)| (n.as_str(), t))
    }

    /// How many tensors there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Numbers in all tensors together.
    pub fn parameters(&self) -> usize {
        self.0.values().map(|t| t.data.len()).sum()
    }

    /// Checks that every tensor of `plan` is there with its shape and finite values; `origin` stands
    /// in the error. Readers do this themselves; a trainer that builds weights calls it.
    ///
    /// # Errors
    /// As [`read`]: all missing and mis-shaped tensors together, or the first value that is NaN or
    /// infinite.
    pub fn check(&self, plan: &[TensorSpec], origin: &Path) -> Result<(), WeightsError> {
        let problems = plan.iter().filter_map(|spec| self.problem(spec)).collect();
        refuse(origin, problems)?;
        plan.iter().filter_map(|s| Some((s, self.get(&s.name)?))).try_for_each(|(s, t)| finite(s, &t.data, origin))
    }

    fn problem(&self, spec: &TensorSpec) -> Option<Problem> {
        let what = match self.get(&spec.name) {
            None => What::Missing { hint: "" },
            Some(t) if t.shape != spec.shape || t.data.len() != spec.len() => What::wrong_shape(spec, &t.shape),
            Some(_) => return None,
        };
        Some(Problem { name: spec.name.clone(), what })
    }
}

/// What [`load`] found.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Loaded {
    /// The tensors of the plan.
    pub weights: Weights,
    /// Full names of datasets that are not in the plan, sorted; a name that ends in `/` is a group
    /// that was not looked into. They are not read and do no harm.
    pub surplus: Vec<String>,
    /// `(name, type)` of the tensors that were not float32 in the file and were converted.
    pub converted: Vec<(String, &'static str)>,
    /// Free text pairs of a safetensors header.
    pub metadata: BTreeMap<String, String>,
}

impl Loaded {
    /// Surplus tensors that a biLM computes with belong to another model than the options describe: leaving them out
    /// would give other vectors without a word.
    pub(crate) fn refuse_parts_of_another_model(&self, path: &Path) -> Result<(), WeightsError> {
        const PARTS: [&str; 5] = ["CNN/W_cnn_", "CNN/b_cnn_", "CNN_high_", "CNN_proj", "RNN_"];
        let parts = self.surplus.iter().filter(|name| PARTS.iter().any(|part| name.starts_with(part)));
        refuse(path, parts.map(|name| Problem { name: name.clone(), what: What::Unexpected }).collect())
    }

    /// One sentence per thing that a user should know about the file.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if !self.surplus.is_empty() {
            let names = printable(&list(&self.surplus));
            notes.push(format!("{} names in the weights are not used: {names}", self.surplus.len()));
        }
        if let Some((name, dtype)) = self.converted.first() {
            let n = self.converted.len();
            notes.push(format!("{n} tensors were converted to float32, the first is {name} ({dtype})"));
        }
        notes
    }
}

/// Why weights cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The file could not be opened or read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Another kind of file.
    #[error("{path}: this is {kind}, not a weights file; {}", kind.remedy())]
    NotWeights {
        /// The file.
        path: PathBuf,
        /// What it is.
        kind: FileKind,
    },
    /// Not readable as what its first bytes say.
    #[error("{path}: broken {kind}: {reason}; download or convert the file again")]
    Broken {
        /// The file.
        path: PathBuf,
        /// What it says it is.
        kind: FileKind,
        /// What is wrong.
        reason: String,
    },
    /// Tensors are missing or are not what the options ask for; all of them.
    #[error(
        "{path}: {} of the tensors that options.json asks for cannot be used: {}; are these options and weights of the same model?",
        problems.len(),
        list(problems)
    )]
    Tensors {
        /// The file.
        path: PathBuf,
        /// What is wrong, by full name.
        problems: Vec<Problem>,
    },
    /// A value is NaN or infinite.
    #[error(
        "{path}: `{name}` holds {value} at {index:?}; every weight must be finite, download or convert the file again"
    )]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// Full name of the tensor.
        name: String,
        /// Position of the first such value.
        index: Vec<usize>,
        /// The value.
        value: f64,
    },
    /// Weights that no file format can hold.
    #[error("cannot write the weights: {reason}")]
    Write {
        /// Why.
        reason: String,
    },
}

/// What is wrong with one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Full name.
    pub name: String,
    /// What is wrong.
    pub what: What,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {}", self.name, self.what)
    }
}

/// Kinds of [`Problem`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum What {
    /// No such dataset.
    #[error("is missing{hint}")]
    Missing {
        /// Why it may be so, or nothing.
        hint: &'static str,
    },
    /// A link to another place, which is never followed: it can point out of the model.
    #[error("is {0}, which is never followed; store the values themselves")]
    Link(&'static str),
    /// A group.
    #[error("is not a dataset")]
    NotADataset,
    /// Another shape.
    #[error("has shape {found:?} instead of {expected:?}")]
    Shape {
        /// What the options ask for.
        expected: Vec<usize>,
        /// What the file says.
        found: Vec<u64>,
    },
    /// Not a floating-point type that is understood.
    #[error("has type {found} instead of float32")]
    Type {
        /// The type in the file.
        found: String,
    },
    /// The values lie in other files.
    #[error("keeps its values in other files (external storage), which is refused; store the values themselves")]
    ExternalStorage,
    /// The values are those of other datasets.
    #[error("is a virtual dataset, which is refused; store the values themselves")]
    Virtual,
    /// A compression that is not known.
    #[error("uses the HDF5 filter {name}, which is not supported; store it uncompressed or with gzip")]
    Filter {
        /// Name or number of the filter.
        name: String,
    },
    /// Chunks larger than the dataset.
    #[error("has chunks of {bytes} bytes, larger than the dataset")]
    Chunk {
        /// Bytes of one chunk.
        bytes: u64,
    },
    /// Part of a biLM, but not of the one that the options describe.
    #[error("is there, but the options describe a model without it")]
    Unexpected,
    /// Declared, but never written.
    #[error("was never written completely")]
    Unwritten,
    /// The file is damaged there.
    #[error("cannot be read: {0}")]
    Broken(String),
}

impl What {
    fn wrong_shape(spec: &TensorSpec, found: &[usize]) -> Self {
        Self::Shape { expected: spec.shape.clone(), found: found.iter().map(|&d| d as u64).collect() }
    }
}

/// What a file is by its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileKind {
    /// HDF5.
    Hdf5,
    /// safetensors.
    Safetensors,
    /// HTML or XML.
    Markup,
    /// A zip archive; also what `torch.save` writes today.
    Zip,
    /// gzip.
    Gzip,
    /// A Python pickle.
    Pickle,
    /// A pointer of Git LFS.
    LfsPointer,
    /// JSON.
    Json,
    /// Nothing.
    Empty,
    /// Something else.
    Unknown,
}

impl FileKind {
    /// What to do about a file of this kind.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Markup => "it is probably an error page: open it in a text editor and download again",
            Self::Zip => "unpack it, or give the archive itself as the model; weights saved by torch must be converted",
            Self::Gzip => "unpack it first",
            Self::Pickle => "pickles can run code when opened and are never read: convert them to safetensors",
            Self::LfsPointer => "fetch the file itself with `git lfs pull`",
            Self::Json => "are options and weights exchanged?",
            Self::Empty => "download it again",
            _ => "weights are HDF5 in the bilm-tf layout or safetensors",
        }
    }
}

impl fmt::Display for FileKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hdf5 => "HDF5",
            Self::Safetensors => "safetensors",
            Self::Markup => "an HTML or XML page",
            Self::Zip => "a zip archive",
            Self::Gzip => "a gzip file",
            Self::Pickle => "a Python pickle",
            Self::LfsPointer => "a Git LFS pointer",
            Self::Json => "JSON",
            Self::Empty => "an empty file",
            Self::Unknown => "an unknown kind of file",
        })
    }
}

/// Tells what a file is from its first bytes; 64 of them are enough.
pub fn file_kind(head: &[u8]) -> FileKind {
    let text = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head).trim_ascii_start();
    match head {
        [] => FileKind::Empty,
        [0x89, b'H', b'D', b'F', b'\r', b'\n', 0x1a, b'\n', ..] => FileKind::Hdf5,
        [_, _, _, _, _, 0, 0, 0, b'{', ..] => FileKind::Safetensors,
        [b'P', b'K', 3 | 5, ..] => FileKind::Zip,
        [0x1f, 0x8b, ..] => FileKind::Gzip,
        [0x80, 2..=5, ..] => FileKind::Pickle,
        _ if text.starts_with(b"<") => FileKind::Markup,
        _ if text.starts_with(b"version https://git-lfs") => FileKind::LfsPointer,
        _ if text.starts_with(b"{") || text.starts_with(b"[") => FileKind::Json,
        _ => FileKind::Unknown,
    }
}

/// Reads the tensors of `plan` from a file that is HDF5 or safetensors, told apart by its first
/// bytes; the name does not matter.
///
/// # Errors
/// Every tensor that is missing or not as planned is named in one error. Nothing outside the file is
/// ever opened on its behalf, whatever it says.
pub fn read(path: &Path, plan: &[TensorSpec]) -> Result<Weights, WeightsError> {
    Ok(load(path, plan)?.weights)
}

/// As [`read`], with what else was noticed.
///
/// # Errors
/// As [`read`].
pub fn load(path: &Path, plan: &[TensorSpec]) -> Result<Loaded, WeightsError> {
    match file_kind(&head(path)?) {
        FileKind::Hdf5 => hdf5::read_file(path, plan),
        FileKind::Safetensors => safetensors::read_file(path, plan),
        kind => Err(WeightsError::NotWeights { path: path.to_owned(), kind }),
    }
}

fn head(path: &Path) -> Result<Vec<u8>, WeightsError> {
    let mut head = Vec::new();
    open(path)?.take(64).read_to_end(&mut head).map_err(|e| io(path, e))?;
    Ok(head)
}

fn open(path: &Path) -> Result<File, WeightsError> {
    File::open(path).map_err(|e| io(path, e))
}

fn io(path: &Path, source: std::io::Error) -> WeightsError {
    WeightsError::Io { path: path.to_owned(), source }
}

fn broken(path: &Path, kind: FileKind, reason: impl fmt::Display) -> WeightsError {
    WeightsError::Broken { path: path.to_owned(), kind, reason: printable(&reason.to_string()) }
}

/// Text that may come from a file, for a message: short, and without control characters, which could
/// rewrite a terminal.
pub(crate) fn printable(text: &str) -> String {
    const SHOWN: usize = 300;
    let mut out: String = text.chars().take(SHOWN).map(|c| if c.is_control() { '?' } else { c }).collect();
    if text.chars().nth(SHOWN).is_some() {
        out += "...";
    }
    out
}

fn refuse(path: &Path, problems: Vec<Problem>) -> Result<(), WeightsError> {
    if problems.is_empty() { Ok(()) } else { Err(WeightsError::Tensors { path: path.to_owned(), problems }) }
}

/// Fails on the first value that is NaN or infinite.
fn finite(spec: &TensorSpec, data: &[f32], path: &Path) -> Result<(), WeightsError> {
    let Some(at) = data.iter().position(|v| !v.is_finite()) else { return Ok(()) };
    Err(WeightsError::NotFinite {
        path: path.to_owned(),
        name: spec.name.clone(),
        index: position(at, &spec.shape),
        value: f64::from(data[at]),
    })
}

/// Row-major position -> index per dimension.
fn position(mut at: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (i, &dim) in shape.iter().enumerate().rev() {
        index[i] = at % dim.max(1);
        at /= dim.max(1);
    }
    index
}

/// A few items and how many more.
fn list<T: fmt::Display>(items: &[T]) -> String {
    const SHOWN: usize = 12;
    let mut text = items.iter().take(SHOWN).map(T::to_string).collect::<Vec<_>>().join(", ");
    if items.len() > SHOWN {
        text += &format!(" and {} more", items.len() - SHOWN);
    }
    text
}

/// Before writing: the shape has to describe the values.
fn consistent(name: &str, tensor: &Tensor) -> Result<(), WeightsError> {
    let n: usize = tensor.shape.iter().product();
    if n == tensor.data.len() {
        return Ok(());
    }
    Err(WeightsError::Write {
        reason: format!("`{name}` has {} values and shape {:?}", tensor.data.len(), tensor.shape),
    })
}
