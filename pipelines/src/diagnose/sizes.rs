//! Models of the published sizes with random weights, for measurements and self-tests: speed does not depend on the
//! weights.

use std::str::FromStr;

use elmo::{
    ModelData, ModelOptions,
    options::PublishedSize,
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
    pub fn options(self) -> ModelOptions {
        match self {
            Self::Small => PublishedSize::Small.options(),
            Self::Medium => PublishedSize::Medium.options(),
            Self::Original => PublishedSize::Original.options(),
            Self::Tiny => ModelData::tiny().options,
        }
    }

    /// A model of this size with seeded random weights; the built-in one for [`Size::Tiny`].
    ///
    /// # Errors
    /// None for these constants; [`ModelData::new`] returns a `Result`.
    pub fn model(self) -> Result<ModelData> {
        if self == Self::Tiny {
            return Ok(ModelData::tiny());
        }
        let options = self.options();
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
