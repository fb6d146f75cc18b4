//! Where dropout applies: between the layers. Inference has none.

use tch::Tensor;

use super::DeviceError;

/// Drops values of a layer's output before anything reads it.
///
/// [`BiLm::forward`](super::BiLm::forward) calls it once per layer, for both directions together. The result takes the
/// place of the output: the next layer reads it, the skip connection of the next layer adds it, and
/// [`Activations`](super::Activations) hold it. Those are the three points of bilm-tf (`bilm/training.py`, where
/// `DropoutWrapper` encloses `ResidualWrapper`): the input of layer 1, the input of layer 2, and the top output.
///
/// It multiplies each value by a factor that does not depend on the values, and is the same for every call with the same
/// layer: derivatives go through it as values do.
pub trait Dropout {
    /// `x` `[2, R, P]` is the output of `layer` (0 is the token layer) in packed rows;
    /// [`PackedBatch::rows`](super::PackedBatch::rows) says which row belongs to which token. The result has the same
    /// shape.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room or libtorch fails.
    fn apply(&self, layer: usize, x: Tensor) -> Result<Tensor, DeviceError>;
}

/// Keeps every value.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoDropout;

impl Dropout for NoDropout {
    fn apply(&self, _layer: usize, x: Tensor) -> Result<Tensor, DeviceError> {
        Ok(x)
    }
}
