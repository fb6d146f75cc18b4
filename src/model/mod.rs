//! The biLM on libtorch: the only home of `tch` in this crate.
//!
//! ```text
//! words --char_cnn--> token table [U, P] --packing--> input [2, R, P] --lstm--> layers [L+1][2, R, P]
//! ```
//!
//! `U` distinct words, `R` packed rows (`packing.rs`), `P` projection, `D` cells, `C` character
//! embedding, `F` filters, `M` characters of a token; the leading 2 are the forward and the backward
//! direction.

mod bilm;
mod char_cnn;
mod device;
mod kernels;
mod lstm;
mod mkl;
mod packing;
mod precision;
mod self_test;
mod softmax;
mod tensors;

use thiserror::Error;

pub use bilm::{Activations, BiLm, LayerValues, StartState};
pub use device::{
    DeviceChoice, DeviceName, cuda_devices, libtorch_version, parse_devices, resolve_devices, set_up_cpu,
};
pub use precision::Precision;
pub(crate) use self_test::products;
pub use self_test::{Heights, SelfTest, compare, matmul_ceiling, self_test, steady_height};
pub use softmax::Softmax;

/// libtorch or a device failed.
#[derive(Debug, Error, Clone)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device has no room for this batch; a smaller one may fit.
    #[error("out of memory on the device: {message}")]
    OutOfMemory {
        /// What libtorch said, first line.
        message: String,
    },
    /// A device that was asked for is not there.
    #[error("device {asked} is not there: {found}; `elmo doctor` shows what is")]
    Missing {
        /// What was asked for.
        asked: String,
        /// What there is, or why there is none.
        found: String,
    },
    /// Any other failure of libtorch.
    #[error("libtorch: {message}")]
    Torch {
        /// What libtorch said, first line.
        message: String,
    },
}

impl DeviceError {
    /// Whether a smaller batch may succeed.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. })
    }
}

impl From<tch::TchError> for DeviceError {
    fn from(error: tch::TchError) -> Self {
        let text = error.to_string();
        let message = text.lines().next().unwrap_or_default().trim().to_owned();
        // The CUDA allocator says "out of memory", the CPU allocator "can't allocate memory".
        let lower = text.to_ascii_lowercase();
        if lower.contains("out of memory") || lower.contains("allocate memory") {
            Self::OutOfMemory { message }
        } else {
            Self::Torch { message }
        }
    }
}
