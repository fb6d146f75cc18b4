//! Number format of weights and activations on the device.

use std::{fmt, str::FromStr};

use crate::spec::SpecError;

/// Number format of weights and activations on the device; outputs are float32 always.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Precision {
    /// float32 throughout: exact, and bit-equal whatever the batch on CPU.
    #[default]
    F32,
    /// bfloat16 weights and products: for GPUs and CPUs with matrix units, vectors are good to two or three digits.
    Bf16,
}

impl Precision {
    /// Every legal word.
    pub const WORDS: &'static [&'static str] = &["f32", "bf16"];

    pub(crate) fn kind(self) -> tch::Kind {
        match self {
            Self::F32 => tch::Kind::Float,
            Self::Bf16 => tch::Kind::BFloat16,
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        })
    }
}

impl FromStr for Precision {
    type Err = SpecError;

    fn from_str(s: &str) -> Result<Self, SpecError> {
        match s {
            "f32" => Ok(Self::F32),
            "bf16" => Ok(Self::Bf16),
            _ => Err(SpecError::Value { option: "precision", value: s.to_owned(), legal: Self::WORDS.to_vec() }),
        }
    }
}
