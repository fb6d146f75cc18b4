//! Errors of the engine.

use thiserror::Error;

use crate::model::{DeviceError, DeviceName};

/// Why the engine did not compute a sentence.
#[derive(Debug, Error, Clone)]
#[non_exhaustive]
pub enum EngineError {
    /// libtorch or the device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Every lane has ended before the engine was closed.
    #[error("no device is left: the last one failed with: {reason}")]
    NoDeviceLeft {
        /// Why the last lane ended.
        reason: String,
    },
    /// A lane panicked.
    #[error("a device thread panicked; this is a bug in elmo")]
    Panicked,
    /// The operating system refused to start a thread.
    #[error("cannot start a thread for device {device}: {reason}")]
    NoThread {
        /// The device.
        device: DeviceName,
        /// Error of the operating system.
        reason: String,
    },
    /// The engine was closed.
    #[error("the embedder is closed")]
    Closed,
}

impl EngineError {
    /// Whether a smaller batch may succeed.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Device(error) if error.is_out_of_memory())
    }
}
