//! Scalar mix: `gamma * sum_k softmax(s)_k * layer_k` (Peters et al. 2018, equation 1).

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use thiserror::Error;

use crate::json;

/// The bytes are no scalar mix.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MixError {
    /// The bytes are no JSON of a mix.
    #[error("{origin}: not a scalar mix: {reason}")]
    Json {
        /// File or URL.
        origin: String,
        /// Error of the parser, with line and column.
        reason: String,
    },
    /// There is no scalar, or a number is not finite.
    #[error("{origin}: a scalar mix needs one finite scalar per layer and a finite gamma")]
    NotFinite {
        /// File or URL.
        origin: String,
    },
    /// `gamma` is out of range.
    #[error("{origin}: gamma is {gamma}; it must be between -{MAX_GAMMA} and {MAX_GAMMA}")]
    Gamma {
        /// File or URL.
        origin: String,
        /// The number in scientific notation.
        gamma: String,
    },
}

/// The value of `layers` in SQL that selects the scalar mix in the model's own folder.
pub const MODEL_MIX: &str = "mix";

/// A fitted combination of the layers; the content of `mix.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScalarMix {
    /// One scalar per layer, before the softmax; layer 0 first.
    pub scalars: Vec<f32>,
    /// Scale of the whole vector.
    #[serde(default = "one")]
    pub gamma: f32,
    /// Normalise each layer before weighting, with one mean and one variance over all real tokens and dimensions of the
    /// *sentence* (or window of a long one). AllenNLP takes them over the whole batch, so that a vector depends on its
    /// neighbours.
    #[serde(default)]
    pub layer_norm: bool,
}

fn one() -> f32 {
    1.0
}

/// Maximum absolute value of `gamma`. Fitted values are near 1; near the maximum of float32, vectors would be infinite.
const MAX_GAMMA: f32 = 1e6;

impl ScalarMix {
    /// Equal weights: the mean of `n_layers` layers.
    pub fn average(n_layers: usize) -> Self {
        Self { scalars: vec![0.0; n_layers], gamma: 1.0, layer_norm: false }
    }

    /// Parses `mix.json`; `origin` names it in errors.
    ///
    /// # Errors
    /// [`MixError`] when the bytes are not JSON of this form (unknown fields are rejected), there is no scalar, a
    /// number is not finite, or the absolute value of `gamma` exceeds a million.
    pub fn from_json(bytes: &[u8], origin: &str) -> Result<Self, MixError> {
        let mix: Self =
            json::from_slice(bytes).map_err(|reason| MixError::Json { origin: origin.to_owned(), reason })?;
        mix.check(origin)?;
        Ok(mix)
    }

    /// Refuses numbers that [`ScalarMix::from_json`] would refuse; `origin` names the mix in errors.
    ///
    /// # Errors
    /// [`MixError::NotFinite`] and [`MixError::Gamma`].
    pub fn check(&self, origin: &str) -> Result<(), MixError> {
        let origin = || origin.to_owned();
        if self.scalars.is_empty() || self.scalars.iter().any(|s| !s.is_finite()) || !self.gamma.is_finite() {
            return Err(MixError::NotFinite { origin: origin() });
        }
        if self.gamma.abs() > MAX_GAMMA {
            return Err(MixError::Gamma { origin: origin(), gamma: format!("{:e}", self.gamma) });
        }
        Ok(())
    }

    /// `gamma * softmax(scalars)`, computed in float64, one factor per layer.
    pub fn factors(&self) -> Vec<f64> {
        let scalars: Vec<f64> = self.scalars.iter().copied().map(f64::from).collect();
        let largest = scalars.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let exp: Vec<f64> = scalars.iter().map(|s| (s - largest).exp()).collect();
        let sum: f64 = exp.iter().sum();
        exp.iter().map(|e| f64::from(self.gamma) * e / sum).collect()
    }

    /// Identifies the numbers of this mix by twelve hexadecimal digits.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<ScalarMix, MixError> {
        ScalarMix::from_json(json.as_bytes(), "mix.json")
    }

    #[test]
    fn gamma_and_layer_norm_may_be_left_out() {
        let mix = read(r#"{"scalars": [0.5, -1, 2]}"#).unwrap();
        assert_eq!(mix, ScalarMix { scalars: vec![0.5, -1.0, 2.0], gamma: 1.0, layer_norm: false });
    }

    #[test]
    fn a_gamma_that_would_make_vectors_infinite_is_refused() {
        let error = read(r#"{"scalars": [3e38, 2, 3], "gamma": 3e38}"#).unwrap_err();
        assert_eq!(error.to_string(), "mix.json: gamma is 3e38; it must be between -1000000 and 1000000");
        assert!(read(r#"{"scalars": [1], "gamma": -2e6}"#).is_err());
        for gamma in ["1e6", "-1e6", "0"] {
            let mix = read(&format!("{{\"scalars\": [3e38, -3e38], \"gamma\": {gamma}}}")).unwrap();
            assert!(mix.factors().iter().all(|factor| factor.is_finite()), "{gamma}");
        }
    }

    #[test]
    fn what_is_no_mix_is_refused() {
        for json in ["", "[]", r#"{"scalars": []}"#, r#"{"gamma": 1}"#, r#"{"scalars": [1], "weights": [1]}"#, "{"] {
            assert!(read(json).unwrap_err().to_string().starts_with("mix.json: "), "{json}");
        }
        assert!(read(r#"{"scalars": [1e39]}"#).is_err());
    }

    #[test]
    fn editors_on_windows_write_a_byte_order_mark() {
        assert_eq!(read("\u{feff}{\"scalars\": [1, 2, 3]}"), read("{\"scalars\": [1, 2, 3]}"));
        // The file may be another one, with secrets.
        for json in ["\u{feff}{\"scalars\": \"hunter2\"}", r#"{"scalars": ["hunter2"]}"#, r#"{"gamma": "hunter2"}"#] {
            let error = read(json).unwrap_err().to_string();
            assert!(error.contains("not a scalar mix: invalid type: string, expected "), "{error}");
            assert!(error.contains(" at line 1 column ") && !error.contains("hunter2"), "{error}");
        }
    }
}
