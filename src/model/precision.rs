//! Number format of weights and activations on the device.

use std::{fmt, str::FromStr};

use tch::Kind;

use super::{DeviceName, tf32};
use crate::spec::SpecError;

/// Number format of weights and activations on the device. Outputs are float32 always.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Precision {
    /// float32 throughout: exact, and bit-equal whatever the batch on CPU.
    #[default]
    F32,
    /// bfloat16 weights and products: for GPUs and CPUs with matrix units, vectors are good to two or three digits.
    Bf16,
    /// float16 weights and products, with three digits and numbers up to 65,504. CPUs do not have it.
    F16,
    /// float32 weights and activations, whose products on GPUs are rounded to 10 bits of mantissa and summed in float32: three
    /// digits. CPUs do not have it.
    Tf32,
    /// Products of 8-bit integers: weights with a scale per column, left sides with a scale per row. Sums are exact; all else is
    /// float32. For CPUs: vectors are good to two digits, and bit-equal whatever the batch.
    Int8,
    /// float64 throughout: for training and for checks of gradients. Inference does not offer it.
    F64,
}

impl Precision {
    /// The values of `--precision` for inference.
    pub const WORDS: &'static [&'static str] = &["f32", "tf32", "bf16", "f16", "int8"];

    /// Kind of activations between products, and of the state of the LSTMs.
    pub(crate) fn kind(self) -> Kind {
        match self {
            Self::F32 | Self::Tf32 | Self::Int8 => Kind::Float,
            Self::Bf16 => Kind::BFloat16,
            Self::F16 => Kind::Half,
            Self::F64 => Kind::Double,
        }
    }

    /// Prepares a device for products in this format, which all products of the process have from then on.
    pub(crate) fn choose(self, device: DeviceName) {
        if device != DeviceName::Cpu {
            tf32::set(self == Self::Tf32);
        }
    }

    /// Kind in which tensors are derived from parameters. Weights of 16 bits are rounded once, at the end.
    pub(crate) fn derivation_kind(self) -> Kind {
        match self {
            Self::F32 | Self::Tf32 | Self::Bf16 | Self::F16 | Self::Int8 => Kind::Float,
            Self::F64 => Kind::Double,
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Int8 => "int8",
            Self::F64 => "f64",
        })
    }
}

impl FromStr for Precision {
    type Err = SpecError;

    fn from_str(s: &str) -> Result<Self, SpecError> {
        match s {
            "f32" => Ok(Self::F32),
            "tf32" => Ok(Self::Tf32),
            "bf16" => Ok(Self::Bf16),
            "f16" => Ok(Self::F16),
            "int8" => Ok(Self::Int8),
            _ => Err(SpecError::Value { option: "precision", value: s.to_owned(), legal: Self::WORDS.to_vec() }),
        }
    }
}
