//! Number format of weights and activations on the device.

use std::{fmt, str::FromStr};

use tch::Kind;

use crate::spec::SpecError;

/// Number format of weights and activations on the device. Outputs are float32 always.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Precision {
    /// float32 throughout: exact, and bit-equal whatever the batch on CPU.
    #[default]
    F32,
    /// bfloat16 weights and products: for GPUs and CPUs with matrix units, vectors are good to two or three digits.
    Bf16,
    /// float64 throughout: for training and for checks of gradients. Inference does not offer it.
    F64,
}

impl Precision {
    /// The values of `--precision` for inference.
    pub const WORDS: &'static [&'static str] = &["f32", "bf16"];

    pub(crate) fn kind(self) -> Kind {
        match self {
            Self::F32 => Kind::Float,
            Self::Bf16 => Kind::BFloat16,
            Self::F64 => Kind::Double,
        }
    }

    /// Kind in which tensors are derived from parameters. Weights in bfloat16 are rounded once, at the end.
    pub(crate) fn derivation_kind(self) -> Kind {
        match self {
            Self::F32 | Self::Bf16 => Kind::Float,
            Self::F64 => Kind::Double,
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F64 => "f64",
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
