//! Where dropout applies: between the layers. Inference has none.

use tch::{Kind, Tensor};

use super::{
    DeviceError,
    cell::{CellKernels, Dropping, Usage},
};

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

    /// Whether every value stays as it is, so that tokens of the same word have the same vector.
    fn keeps_all(&self) -> bool {
        false
    }
}

/// Keeps every value.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoDropout;

impl Dropout for NoDropout {
    fn apply(&self, _layer: usize, x: Tensor) -> Result<Tensor, DeviceError> {
        Ok(x)
    }

    fn keeps_all(&self) -> bool {
        true
    }
}

/// Random numbers of dropout after a layer, which a GPU draws itself: those of Philox for a key and a counter of the block of four
/// values, the row of the window, the step and the purpose ([`train::Random`](crate::train::Random)).
#[derive(Debug, Clone, Copy)]
pub struct DropoutNumbers {
    pub(crate) key: [u32; 2],
    pub(crate) step: u32,
    /// Of each direction.
    pub(crate) purposes: [u32; 2],
    /// A value is dropped where its number is below this, of 2^32.
    pub(crate) below: u64,
}

/// Tokens of the rows of a window in a packed batch, on the device.
pub(crate) struct DropoutRows {
    /// `[2, N]`: packed row of each token, row by row of the window.
    pub(crate) packed: Tensor,
    /// Tokens of a row.
    pub(crate) positions: usize,
    /// Number of the first row.
    pub(crate) first: u32,
}

impl DropoutRows {
    /// The factor of each number of `x` `[2, R, P]`, on its device: `kept` or 0. `None` where there is no kernel for it. Rows that no token
    /// has are dropped.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room or a kernel fails.
    pub(crate) fn factors(
        &self,
        x: &Tensor,
        kept: f64,
        numbers: DropoutNumbers,
    ) -> Result<Option<Tensor>, DeviceError> {
        if !matches!(x.kind(), Kind::Float | Kind::BFloat16) {
            return Ok(None);
        }
        let kernels = CellKernels::of(x.device(), Usage::Training, x.kind())?;
        kernels.map(|kernels| self.factors_by(kernels, x, kept, numbers)).transpose()
    }

    fn factors_by(
        &self,
        kernels: CellKernels,
        x: &Tensor,
        kept: f64,
        numbers: DropoutNumbers,
    ) -> Result<Tensor, DeviceError> {
        let factors = Tensor::f_zeros(x.size(), (x.kind(), x.device()))?;
        kernels.dropout(&Dropping {
            packed: &self.packed,
            factors: &factors,
            positions: self.positions,
            first_row: self.first,
            kept: kept as f32,
            numbers,
        })?;
        Ok(factors)
    }

    /// As `factors`, by the code of the kernels on the CPU.
    #[cfg(test)]
    pub(crate) fn factors_on_host(
        &self,
        x: &Tensor,
        kept: f64,
        numbers: DropoutNumbers,
    ) -> Result<Tensor, DeviceError> {
        self.factors_by(CellKernels::Host, x, kept, numbers)
    }
}
