//! skeleton
use crate::options::TensorSpec;
use std::{collections::BTreeMap, path::Path};
use thiserror::Error;
/// error
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WeightsError {}
/// tensor
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// shape
    pub shape: Vec<usize>,
    /// data
    pub data: Vec<f32>,
}
/// weights
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Weights(BTreeMap<String, Tensor>);
impl Weights {
    /// get
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.0.get(name)
    }
    /// insert
    pub fn insert(&mut self, name: String, tensor: Tensor) {
        self.0.insert(name, tensor);
    }
    /// iter
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.0.iter().map(|(n, t)| (n.as_str(), t))
    }
}
/// read
pub fn read(_path: &Path, _plan: &[TensorSpec]) -> Result<Weights, WeightsError> {
    todo!()
}
