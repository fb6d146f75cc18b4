//! skeleton
use crate::{error::Result, fingerprint::Fingerprint, mix::ScalarMix, options::ModelOptions, weights::Weights};
use std::path::Path;
/// data
#[derive(Debug, Clone)]
pub struct ModelData {
    /// o
    pub options: ModelOptions,
    /// w
    pub weights: Weights,
    /// f
    pub fingerprint: Fingerprint,
    /// m
    pub mix: Option<ScalarMix>,
    /// n
    pub name: String,
    /// u
    pub untrained: bool,
}
impl ModelData {
    /// open
    pub fn open(_dir: &Path) -> Result<Self> {
        todo!()
    }
    /// open
    pub fn open_pair(_options: &Path, _weights: &Path) -> Result<Self> {
        todo!()
    }
    /// tiny
    pub fn tiny() -> Self {
        todo!()
    }
}
