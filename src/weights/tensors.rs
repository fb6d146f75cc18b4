//! Tensors in memory, and their checks against a plan.

use std::{collections::BTreeMap, fmt, path::Path};

use half::f16;

use super::error::{Problem, WeightsError, What};
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

/// Prints the shape and the first values only: a model has millions.
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

    /// Removes a tensor.
    pub fn remove(&mut self, name: &str) -> Option<Tensor> {
        self.0.remove(name)
    }

    /// Names and tensors in byte order of the names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.0.iter().map(|(n, t)| (n.as_str(), t))
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no tensors.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Total number of values.
    pub fn parameters(&self) -> usize {
        self.0.values().map(|t| t.data.len()).sum()
    }

    /// Checks that every tensor of `plan` exists with its shape and finite values; `origin` names the weights in
    /// errors. Readers do this themselves; it is for weights from other sources, such as a trainer.
    ///
    /// # Errors
    /// As [`read`](super::read): all missing and mis-shaped tensors together, or the first value that is NaN or
    /// infinite.
    pub fn check(&self, plan: &[TensorSpec], origin: &Path) -> Result<(), WeightsError> {
        let problems = plan.iter().filter_map(|spec| self.problem(spec)).collect();
        refuse(origin, problems)?;
        plan.iter().filter_map(|s| Some((s, self.get(&s.name)?))).try_for_each(|(s, t)| finite(s, &t.data, origin))
    }

    /// Every value rounded to the nearest float16, ties to even; `origin` names the weights in errors.
    ///
    /// # Errors
    /// The first value that is above the largest float16, 65,504.
    pub fn to_half(&self, origin: &Path) -> Result<Self, WeightsError> {
        let rounded = self.0.iter().map(|(name, tensor)| {
            let data: Vec<f32> = tensor.data.iter().map(|v| f16::from_f32(*v).to_f32()).collect();
            finite(&TensorSpec { name: name.clone(), shape: tensor.shape.clone() }, &data, origin)?;
            Ok((name.clone(), Tensor { shape: tensor.shape.clone(), data }))
        });
        rounded.collect::<Result<_, WeightsError>>().map(Self)
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

/// The result of [`load`](super::load).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Loaded {
    /// The tensors of the plan.
    pub weights: Weights,
    /// Full names of datasets that are not in the plan and were not read, sorted. A name that ends in `/` is a group
    /// whose content was not listed.
    pub surplus: Vec<String>,
    /// Name and type of the tensors that were converted to float32.
    pub converted: Vec<(String, &'static str)>,
    /// Metadata of a safetensors header.
    pub metadata: BTreeMap<String, String>,
}

impl Loaded {
    /// Rejects surplus tensors that are part of a biLM: they belong to a larger model than the options describe, and
    /// ignoring them would silently give other vectors.
    pub(crate) fn refuse_parts_of_another_model(&self, path: &Path) -> Result<(), WeightsError> {
        const PARTS: [&str; 5] = ["CNN/W_cnn_", "CNN/b_cnn_", "CNN_high_", "CNN_proj", "RNN_"];
        let parts = self.surplus.iter().filter(|name| PARTS.iter().any(|part| name.starts_with(part)));
        refuse(path, parts.map(|name| Problem { name: name.clone(), what: What::Unexpected }).collect())
    }

    /// Remarks on the file, one sentence each.
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

pub(super) fn refuse(path: &Path, problems: Vec<Problem>) -> Result<(), WeightsError> {
    if problems.is_empty() { Ok(()) } else { Err(WeightsError::Tensors { path: path.to_owned(), problems }) }
}

/// Rejects values that are NaN or infinite.
pub(super) fn finite(spec: &TensorSpec, data: &[f32], path: &Path) -> Result<(), WeightsError> {
    let Some(at) = data.iter().position(|v| !v.is_finite()) else { return Ok(()) };
    Err(WeightsError::NotFinite {
        path: path.to_owned(),
        name: spec.name.clone(),
        index: position(at, &spec.shape),
        value: f64::from(data[at]),
    })
}

/// The index per dimension of a row-major position.
fn position(mut at: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (i, &dim) in shape.iter().enumerate().rev() {
        index[i] = at % dim.max(1);
        at /= dim.max(1);
    }
    index
}

/// Checks before writing that shape and number of values agree.
pub(super) fn check_size(name: &str, tensor: &Tensor) -> Result<(), WeightsError> {
    let n: usize = tensor.shape.iter().product();
    if n == tensor.data.len() {
        return Ok(());
    }
    Err(WeightsError::Write {
        reason: format!("`{name}` has {} values and shape {:?}", tensor.data.len(), tensor.shape),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn weights(data: Vec<f32>) -> Weights {
        let mut weights = Weights::default();
        weights.insert("w".into(), Tensor { shape: vec![data.len()], data });
        weights
    }

    /// By hand: float16 has 11 significant bits, and its largest number is 65504. 1/3 is 1365/4096 of it rounded; 2049 is
    /// halfway between 2048 and 2050, and 2048 has the even last bit; the smallest number above 0 is 2^-24.
    #[test]
    fn rounding_to_float16() {
        let rounded = weights(vec![1.0 / 3.0, 2049.0, 65504.0, -0.5, 6.0e-8]).to_half(Path::new("m")).unwrap();
        let expected = vec![1365.0 / 4096.0, 2048.0, 65504.0, -0.5, 0.5_f32.powi(24)];
        assert_eq!(rounded.get("w").unwrap().data, expected);
        assert_eq!(rounded.to_half(Path::new("m")).unwrap(), rounded);
        let error = weights(vec![0.0, 65520.0]).to_half(Path::new("m")).unwrap_err().to_string();
        assert!(error.contains("`w`") && error.contains("inf"), "{error}");
    }
}
