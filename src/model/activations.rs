//! The layers of one batch: on the device, and read back.

use tch::{Device, Kind, Tensor};

use super::{
    DeviceError, StartState,
    cell::CellKernels,
    packing::Packings,
    scalar_ops,
    tensors::{self, HostTensor},
};

/// How the layers of a batch are read.
#[derive(Debug, Clone, Copy)]
pub(super) enum Reading {
    /// In host memory, where they are float32 numbers.
    Host,
    /// On the device, by libtorch's operations.
    Torch,
    /// On the device, by kernels of our own.
    Kernels(CellKernels),
}

/// The layers of one batch, on the device.
#[derive(Debug)]
pub struct Activations {
    packings: Packings,
    /// Layer 0 first, each `[2, R, P]` in packed rows.
    layers: Vec<Tensor>,
    /// State after the last token of each row, in packed order.
    last: Option<StartState>,
    reading: Reading,
    saved_flop: f64,
}

impl Activations {
    pub(super) fn new(
        packings: Packings,
        layers: Vec<Tensor>,
        last: Option<StartState>,
        reading: Reading,
        saved_flop: f64,
    ) -> Self {
        Self { packings, layers, last, reading, saved_flop }
    }

    /// With NaN in the forward half of token `i` of a sentence, in all layers.
    #[cfg(test)]
    pub(crate) fn with_nan(self, sentence: usize, i: usize) -> Self {
        let row = self.packings.of(0).forward(sentence, i) as i64;
        for layer in &self.layers {
            let _ = layer.select(0, 0).select(0, row).fill_(f64::NAN);
        }
        self
    }

    /// Whether the layers are read in host memory: on the CPU, unless the model computes as on a GPU.
    pub(crate) fn is_on_host(&self) -> bool {
        matches!(self.reading, Reading::Host)
    }

    /// Kernels that reduce the layers.
    pub(super) fn kernels(&self) -> Option<CellKernels> {
        match self.reading {
            Reading::Kernels(kernels) => Some(kernels),
            Reading::Host | Reading::Torch => None,
        }
    }

    /// Layer 0 first, each `[2, R, P]` in packed rows.
    pub(super) fn layers(&self) -> &[Tensor] {
        &self.layers
    }

    pub(crate) fn packings(&self) -> &Packings {
        &self.packings
    }

    pub(crate) fn torch_device(&self) -> Device {
        self.layers[0].device()
    }

    /// Values of one vector: `2P`.
    pub(crate) fn width(&self) -> usize {
        self.layers[0].size().last().map_or(0, |&half| 2 * half as usize)
    }

    /// Number of layers: `L + 1`.
    pub fn n_layers(&self) -> usize {
        self.layers.len()
    }

    /// Rows that were computed for each direction: its tokens, and rows that nothing reads.
    pub fn packed_rows(&self) -> usize {
        self.packings.packed_rows()
    }

    /// Floating point operations of products that were not computed, as other tokens have the same. Without padding,
    /// [`BiLm::flop_per_token`](super::BiLm::flop_per_token) counts them.
    pub(crate) fn saved_flop(&self) -> f64 {
        self.saved_flop
    }

    /// `[N, P]`: the outputs of a layer for the `N` tokens of one direction (0 is forward, 1 backward), sentence by
    /// sentence in the order in which they were given, each in reading order: from the last token of the text where the
    /// batch is [`PackedBatch::of_sentences`](super::PackedBatch::of_sentences) and the direction is backward.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room or libtorch fails.
    ///
    /// # Panics
    /// When there is no such layer or direction.
    pub fn tokens(&self, layer: usize, direction: usize) -> Result<Tensor, DeviceError> {
        let rows = self.packings.of(direction).rows_in_order();
        let layer = self.layers[layer].f_select(0, direction as i64)?; // [R, P]
        Ok(layer.f_index_select(0, &tensors::index(&rows, layer.device())?)?)
    }

    /// `sum_k factor_k * layer_k` over pairs of layer and factor, copied to the host as float32. A single factor of 1
    /// copies the layer as it is.
    ///
    /// # Errors
    /// [`DeviceError::InvalidBatch`] when `factors` is empty, [`DeviceError::OutOfMemory`] when the device has no room,
    /// [`DeviceError::Torch`] when libtorch fails.
    ///
    /// # Panics
    /// When there is no such layer; [`Activations::n_layers`] says how many there are.
    pub fn combine(&self, factors: &[(usize, f32)]) -> Result<LayerValues, DeviceError> {
        let sum = self.mixed(factors)?; // [2, R, P]
        let [_, rows, half] = sum.size3()?.into();
        Ok(LayerValues { host: tensors::on_host(&sum)?, half: half as usize, rows: rows as usize })
    }

    /// The same on the device, `[2, R, P]` float32.
    pub(crate) fn mixed(&self, factors: &[(usize, f32)]) -> Result<Tensor, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        let terms = factors.iter().map(|&(layer, factor)| {
            // Layers may have 16 bits; their mix has not.
            let layer = self.layers[layer].f_to_kind(Kind::Float)?;
            if factor == 1.0 { Ok(layer) } else { scalar_ops::mul(&layer, f64::from(factor)) }
        });
        tensors::sum(terms)
    }

    /// State after each sentence's last token, row `b` for sentence `b` of those given; `None` when it was not
    /// requested.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room or libtorch fails.
    pub fn into_last(self) -> Result<Option<StartState>, DeviceError> {
        self.last.map(|last| last.in_order_of_sentences(&self.packings)).transpose()
    }
}

/// One layer or one combination of layers of a batch, on the host.
#[derive(Debug)]
pub struct LayerValues {
    /// `[2, R, P]`, float32 and contiguous. A copy into a `Vec` would cost a GPU a fifth of its speed.
    host: HostTensor,
    half: usize,
    rows: usize,
}

impl LayerValues {
    /// Values of one vector: `2P`.
    pub fn width(&self) -> usize {
        2 * self.half
    }

    /// Writes `[forward ; backward]` of token `i` of a sentence to `out` (`2P` values), for a batch in which both
    /// directions read the same sentences. `activations` are those that the values came from; `sentence` and `i` count
    /// from 0 in the order of the text.
    pub fn token(&self, activations: &Activations, sentence: usize, i: usize, out: &mut [f32]) {
        let packings = &activations.packings;
        let forward = packings.of(0).forward(sentence, i) * self.half;
        let backward = (self.rows + packings.of(1).backward(sentence, i)) * self.half;
        // SAFETY: contiguous float32 on the host, and nothing writes to it.
        let values = unsafe { tensors::values(&self.host) };
        out[..self.half].copy_from_slice(&values[forward..forward + self.half]);
        out[self.half..].copy_from_slice(&values[backward..backward + self.half]);
    }
}
