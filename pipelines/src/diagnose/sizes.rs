//! Models of the published sizes with random weights, for measurements and self-tests: speed does not depend on the
//! weights.

use std::str::FromStr;

use elmo::{ModelData, ModelOptions, options::PublishedSize, spec::SpecError};

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
        Ok(ModelData::random(self.options(), &format!("{}, random weights", self.word()))?)
    }
}

impl FromStr for Size {
    type Err = SpecError;

    fn from_str(word: &str) -> std::result::Result<Self, SpecError> {
        let known = Self::ALL.into_iter().find(|size| size.word() == word);
        known.ok_or_else(|| SpecError::Value { option: "size", value: word.to_owned(), legal: Self::WORDS.to_vec() })
    }
}
