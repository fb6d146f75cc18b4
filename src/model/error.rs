//! Errors of a device.

use thiserror::Error;

/// A model cannot be put on a device, or a batch cannot be run there.
#[derive(Debug, Error, Clone)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device has no room for this batch; a smaller one may fit.
    #[error("out of memory on the device: {message}")]
    OutOfMemory {
        /// What libtorch said, first line.
        message: String,
    },
    /// The requested device does not exist.
    #[error("device {asked} does not exist: {found}; `elmo doctor` lists the devices")]
    Missing {
        /// The requested device.
        asked: String,
        /// The available devices, or why there are none.
        found: String,
    },
    /// The device does not have this precision.
    #[error("--precision {precision} does not run on {device}: {reason}")]
    Precision {
        /// The requested precision.
        precision: super::Precision,
        /// The device.
        device: super::DeviceName,
        /// Why, and what to do.
        reason: &'static str,
    },
    /// The weights lack a tensor that the options require.
    #[error("the weights lack `{name}`, which the options require; are these options and weights of the same model?")]
    MissingTensor {
        /// Name of the tensor.
        name: String,
    },
    /// A tensor of the weights does not have the shape that the options require, or not as many values as its shape.
    #[error(
        "`{name}` has shape {found:?} and {values} values, but the options require {expected:?}; \
         are these options and weights of the same model?"
    )]
    TensorShape {
        /// Name of the tensor.
        name: String,
        /// Shape that the options require.
        expected: Vec<usize>,
        /// Shape of the tensor.
        found: Vec<usize>,
        /// Number of values of the tensor.
        values: usize,
    },
    /// The arguments of a call contradict each other.
    #[error("invalid batch: {reason}")]
    InvalidBatch {
        /// The contradiction.
        reason: &'static str,
    },
    /// The operating system refused to start a thread.
    #[error(
        "cannot start a thread: {reason}; use fewer threads, or raise the limit of processes (`ulimit -u`, or that of the container)"
    )]
    NoThread {
        /// Error of the operating system.
        reason: String,
    },
    /// libtorch failed for another reason.
    #[error("libtorch: {message}")]
    Torch {
        /// What libtorch said, first line.
        message: String,
    },
    /// A bug of this crate.
    #[error("internal error: {message}")]
    Internal {
        /// What happened.
        message: String,
    },
}

impl DeviceError {
    /// Whether a smaller batch may succeed.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. })
    }

    pub(crate) fn no_thread(error: &std::io::Error) -> Self {
        Self::NoThread { reason: error.to_string() }
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::Internal { message: message.into() }
    }
}

/// Messages of allocators, lower case: the CUDA allocator, the CPU allocator, and the libraries on CUDA
/// (`CUBLAS_STATUS_ALLOC_FAILED` and its siblings), which allocate their workspaces themselves.
const OUT_OF_MEMORY: [&str; 3] = ["out of memory", "allocate memory", "_status_alloc_failed"];

impl From<tch::TchError> for DeviceError {
    fn from(error: tch::TchError) -> Self {
        let text = error.to_string();
        let message = text.lines().next().unwrap_or_default().trim().to_owned();
        let lower = text.to_ascii_lowercase();
        if OUT_OF_MEMORY.iter().any(|words| lower.contains(words)) {
            Self::OutOfMemory { message }
        } else {
            Self::Torch { message }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages: PyTorch 2.11, `c10/cuda/CUDACachingAllocator.cpp`, `c10/core/impl/alloc_cpu.cpp` and the macro
    /// `TORCH_CUDABLAS_CHECK` of `aten/src/ATen/cuda/Exceptions.h`.
    #[test]
    fn failed_allocations_are_told_from_other_failures() {
        let kind = |message: &str| DeviceError::from(tch::TchError::Torch(message.to_owned()));
        for message in [
            "CUDA out of memory. Tried to allocate 2.00 GiB.",
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory.",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        ] {
            assert!(kind(message).is_out_of_memory(), "{message}");
        }
        for message in [
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`",
            "CUDA error: an illegal memory access was encountered",
            "index out of range in self",
        ] {
            assert!(!kind(message).is_out_of_memory(), "{message}");
        }
    }
}
