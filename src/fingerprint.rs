//! The fingerprint of a model, which every output names.

use std::{fmt, str::FromStr};

use sha2::{Digest, Sha256};
use thiserror::Error;

use crate::{
    options::ModelOptions,
    weights::{Tensor, Weights},
};

/// SHA-256 over the canonical options and every tensor, as 64 lower-case hexadecimal digits.
///
/// The hashed bytes, with every number a little-endian `u64`: `elmo-model-1\n`, length and text of
/// [`ModelOptions::canonical_json`], then for each tensor of [`ModelOptions::weight_plan`] in byte order of the names:
/// length of the name, name, rank, each dimension, the values as little-endian float32. The file format does not
/// matter: HDF5 and safetensors files of the same numbers have the same fingerprint. Tensors outside the plan do not
/// count.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Fingerprint(String);

impl Fingerprint {
    /// Computes the fingerprint of a model.
    pub fn of(options: &ModelOptions, weights: &Weights) -> Self {
        let mut hash = Sha256::new();
        hash.update(b"elmo-model-1\n");
        text(&mut hash, &options.canonical_json());
        let mut plan = options.weight_plan();
        plan.sort_by(|a, b| a.name.cmp(&b.name));
        for spec in &plan {
            if let Some(tensor) = weights.get(&spec.name) {
                text(&mut hash, &spec.name);
                values(&mut hash, tensor);
            }
        }
        Self(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// The digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The text is not a fingerprint.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[error("{0:?} is not a fingerprint, which has 64 hexadecimal digits")]
pub struct FingerprintError(String);

impl FromStr for Fingerprint {
    type Err = FingerprintError;

    fn from_str(text: &str) -> Result<Self, FingerprintError> {
        match text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
            true => Ok(Self(text.to_owned())),
            false => Err(FingerprintError(text.to_owned())),
        }
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn number(hash: &mut Sha256, n: usize) {
    hash.update((n as u64).to_le_bytes());
}

fn text(hash: &mut Sha256, text: &str) {
    number(hash, text.len());
    hash.update(text);
}

fn values(hash: &mut Sha256, tensor: &Tensor) {
    number(hash, tensor.shape.len());
    for &dim in &tensor.shape {
        number(hash, dim);
    }
    // A small buffer avoids a copy of the whole tensor, which may have 64 MB.
    let mut buffer = Vec::with_capacity(4 * 4096);
    for chunk in tensor.data.chunks(4096) {
        buffer.clear();
        buffer.extend(chunk.iter().flat_map(|v| v.to_le_bytes()));
        hash.update(&buffer);
    }
}
