//! Models of the published sizes with random weights, for measurements and self-tests: speed does not depend on the
//! weights.

use std::str::FromStr;

use elmo::{
    ModelData, ModelOptions,
    spec::SpecError,
    weights::{Tensor, Weights},
};

use crate::error::Result;

/// A published size of ELMo, or that of the built-in model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// 1024/128, one highway layer.
    Small,
    /// 2048/256, one highway layer.
    Medium,
    /// 4096/512, two highway layers.
    Original,
    /// The built-in model.
    Tiny,
}

impl Size {
    /// All sizes.
    pub const ALL: [Self; 4] = [Self::Small, Self::Medium, Self::Original, Self::Tiny];
    /// The names of all sizes.
    pub const WORDS: &'static [&'static str] = &["small", "medium", "original", "tiny"];

    /// The name on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Self::Small => "small",
            Self::Medium => "medium",
            Self::Original => "original",
            Self::Tiny => "tiny",
        }
    }

    /// The options of a model of this size.
    ///
    /// # Errors
    /// None, because the options are constants; the parser returns a `Result`.
    pub fn options(self) -> Result<ModelOptions> {
        let (dim, projection, highways) = match self {
            Self::Small => (1024, 128, 1),
            Self::Medium => (2048, 256, 1),
            Self::Original => (4096, 512, 2),
            Self::Tiny => return Ok(ModelData::tiny().options),
        };
        let json = format!(
            r#"{{"lstm": {{"use_skip_connections": true, "projection_dim": {projection}, "cell_clip": 3, "proj_clip": 3,
                "dim": {dim}, "n_layers": 2}}, "char_cnn": {{"activation": "relu", "n_highway": {highways},
                "filters": [[1, 32], [2, 32], [3, 64], [4, 128], [5, 256], [6, 512], [7, 1024]],
                "embedding": {{"dim": 16}}, "n_characters": 262, "max_characters_per_token": 50}}}}"#
        );
        ModelOptions::from_json(json.as_bytes(), self.word()).map_err(|e| elmo::Error::from(e).into())
    }

    /// A model of this size with seeded random weights; the built-in one for [`Size::Tiny`].
    ///
    /// # Errors
    /// As [`Size::options`].
    pub fn model(self) -> Result<ModelData> {
        if self == Self::Tiny {
            return Ok(ModelData::tiny());
        }
        let options = self.options()?;
        let mut weights = Weights::default();
        for spec in options.weight_plan() {
            let fan_in: usize = spec.shape[..spec.shape.len() - 1].iter().product::<usize>().max(1);
            let bound = (3.0 / fan_in as f32).sqrt();
            let data = random(spec.len(), bound);
            weights.insert(spec.name, Tensor { shape: spec.shape, data });
        }
        Ok(ModelData::new(options, weights, &format!("{}, random weights", self.word()))?)
    }
}

/// Uniform numbers in `[-bound, bound)` by a linear congruential generator.
fn random(n: usize, bound: f32) -> Vec<f32> {
    let mut state = n as u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * bound
    };
    (0..n).map(|_| next()).collect()
}

impl FromStr for Size {
    type Err = SpecError;

    fn from_str(word: &str) -> std::result::Result<Self, SpecError> {
        let known = Self::ALL.into_iter().find(|size| size.word() == word);
        known.ok_or_else(|| SpecError::Value { option: "size", value: word.to_owned(), legal: Self::WORDS.to_vec() })
    }
}
