//! Scalar mix: `gamma * sum_k softmax(s)_k * layer_k` (Peters et al. 2018, equation 1).

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::spec::SpecError;

/// A fitted combination of the layers, as `mix.json` holds it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScalarMix {
    /// One scalar per layer, before the softmax; layer 0 first.
    pub scalars: Vec<f32>,
    /// Scale of the whole vector.
    #[serde(default = "one")]
    pub gamma: f32,
    /// Normalise each layer before weighting: one mean and one variance over all real tokens and
    /// dimensions of the *sentence* (or window of a long one). AllenNLP takes them over the whole batch, which would make a
    /// vector depend on its neighbours.
    #[serde(default)]
    pub layer_norm: bool,
}

fn one() -> f32 {
    1.0
}

impl ScalarMix {
    /// Equal weights: the plain mean of `n_layers` layers.
    pub fn average(n_layers: usize) -> Self {
        Self { scalars: vec![0.0; n_layers], gamma: 1.0, layer_norm: false }
    }

    /// Parses `mix.json`; `origin` stands in the error.
    pub fn from_json(bytes: &[u8], origin: &str) -> Result<Self, SpecError> {
        let mix: Self = serde_json::from_slice(bytes)
            .map_err(|e| SpecError::Conflict(format!("{origin}: not a scalar mix: {e}")))?;
        if mix.scalars.is_empty() || mix.scalars.iter().any(|s| !s.is_finite()) || !mix.gamma.is_finite() {
            return Err(SpecError::Conflict(format!(
                "{origin}: a scalar mix needs one finite scalar per layer and a finite gamma"
            )));
        }
        Ok(mix)
    }

    /// `gamma * softmax(scalars)`, computed in float64, one factor per layer.
    pub fn factors(&self) -> Vec<f64> {
        let scalars: Vec<f64> = self.scalars.iter().copied().map(f64::from).collect();
        let largest = scalars.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let exp: Vec<f64> = scalars.iter().map(|s| (s - largest).exp()).collect();
        let sum: f64 = exp.iter().sum();
        exp.iter().map(|e| f64::from(self.gamma) * e / sum).collect()
    }

    /// Twelve hexadecimal digits that identify the numbers of this mix.
    pub fn digest(&self) -> String {
        let mut hash = Sha256::new();
        for s in &self.scalars {
            hash.update(s.to_le_bytes());
        }
        hash.update(self.gamma.to_le_bytes());
        hash.update([u8::from(self.layer_norm)]);
        hash.finalize().iter().take(6).map(|b| format!("{b:02x}")).collect()
    }
}
