//! Named tensors of a model, read from and written to HDF5 (the bilm-tf layout) and safetensors.
//!
//! What may be read is decided by the options before a file is opened: [`read`] takes the plan of
//! names and shapes ([`ModelOptions::weight_plan`](crate::options::ModelOptions::weight_plan)),
//! compares every dataset with it, and only then allocates.

mod bounded_source;
mod error;
pub mod hdf5;
mod links;
pub mod safetensors;

use std::{collections::BTreeMap, fmt, fs::File, io::Read, path::Path};

pub use self::error::{Problem, WeightsError, What};
pub use crate::file_kind::{FileKind, file_kind};
use crate::{
    messages::{list, printable},
    options::TensorSpec,
};

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
