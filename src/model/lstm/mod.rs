//! The two LSTM stacks with projection and clips (bilm-tf `bilm/model.py`, AllenNLP `elmo_lstm.py`).
//!
//! Per direction and layer, with `x` the layer's input and `h` the projected output of the previous step:
//!
//! ```text
//! i, j, f, o = split([x, h] W_0 + B, 4)
//! c = clip(sigmoid(f + 1) * c + sigmoid(i) * tanh(j))
//! h = clip((sigmoid(o) * tanh(c)) W_P)
//! y = h            first layer
//! y = h + x        higher layers, with skip connections
//! ```
//!
//! Where a row of the batch holds several sentences, `h` and `c` of the row are set to the start state before the first
//! token of each.
//!
//! | time loop | where |
//! |---|---|
//! | `fused.rs` | inference on a CPU, in float32 or with products of 8-bit integers: direction by direction, with our own products and the pass over the gates in them. All cores are busy, so running the directions at once would gain nothing |
//! | `device.rs` | inference on a GPU: products batched over both directions, which is half as many launches, each of twice the work, and our own kernels between them; in the first layer, input products of words instead of tokens |
//! | `batched.rs` | everything else, in libtorch's operations: gradients flow through this loop only |
//! | `trained.rs` | training on a CPU in float32, forward and backward, without a graph |
//! | `trained_device.rs` | the same on a GPU, in float32 and bfloat16 |

mod batched;
mod device;
mod fused;
mod inputs;
mod trained;
mod trained_device;

pub(crate) use self::{
    device::{DeviceLayer, Words},
    fused::FusedLayer,
};

use tch::{Device, Kind, Tensor};

use super::{
    DeviceError, Precision,
    cell::{CellKernels, Usage},
    packing::{Chunk, Packings, Step},
    parameters::NamedTensors,
    scalar_ops,
    start_state::LayerState,
    tensors::{self, Change},
};
use crate::options::ModelOptions;

/// Both directions of one layer.
#[derive(Debug)]
pub(crate) struct LstmLayer {
    w_x: Tensor,         // [2, in, 4D]
    w_h: Tensor,         // [2, P, 4D]
    bias: Tensor,        // [2, 1, 4D] float32 or float64, +1 in the forget block
    w_p: Option<Tensor>, // [2, D, P], at least `tensors::MIN_COLUMNS` wide
    projection: i64,     // P
    residual: bool,
    dim: usize,
    clips: Clips,
    passes: Option<TrainingPasses>,
}

/// Passes of a layer, forward and backward, without libtorch's graph.
#[derive(Debug, Clone, Copy)]
enum TrainingPasses {
    /// On the CPU, in float32.
    Host,
    /// By the kernels of a GPU.
    Kernels(CellKernels),
}

impl TrainingPasses {
    /// Those for a number format on a device; `None` where only the graph serves.
    fn of(kind: Kind, device: Device) -> Result<Option<Self>, DeviceError> {
        Ok(match (device, kind) {
            (Device::Cpu, Kind::Float) => Some(Self::Host),
            (Device::Cuda(_), Kind::Float | Kind::BFloat16) => {
                CellKernels::of(device, Usage::Training, kind)?.map(Self::Kernels)
            }
            _ => None,
        })
    }
}

/// What the backward pass of a layer needs from its forward pass.
pub(crate) enum Kept {
    Host(trained::Kept),
    Device(TrainingKernels),
}

/// The forward pass of a GPU, and its kernels.
pub(crate) struct TrainingKernels {
    kept: trained_device::Kept,
    kernels: CellKernels,
}

impl Kept {
    /// State after the last step, `[2, W, P]` and `[2, W, D]`.
    pub(crate) fn last(&self) -> Result<LayerState, DeviceError> {
        match self {
            Self::Host(kept) => kept.last(),
            Self::Device(TrainingKernels { kept, .. }) => kept.last(),
        }
    }
}

/// Bounds of the cell state and of the projected output, as the options give them.
#[derive(Debug, Clone, Copy)]
struct Clips {
    cell: Option<f64>,
    projection: Option<f64>,
}

impl Clips {
    fn new(options: &ModelOptions) -> Self {
        let lstm = &options.lstm;
        // Without a projection bilm-tf builds a plain cell, which has no projection to clip.
        Self { cell: lstm.cell_clip, projection: lstm.proj_clip.filter(|_| options.has_projection()) }
    }
}

/// What a layer gives back: `[2, R, P]` in packed rows, and the state after each row's last token if requested, in the
/// order of the rows of each direction.
pub(crate) struct LayerOutput {
    pub(crate) y: Tensor,
    pub(crate) last: Option<LayerState>,
    /// Floating point operations of products that were not computed, as another token has the same.
    pub(crate) saved_flop: f64,
}

impl LstmLayer {
    /// Derives one layer from the tensors of `RNN_0` and `RNN_1`.
    pub(crate) fn new(
        options: &ModelOptions,
        source: &dyn NamedTensors,
        layer: usize,
        precision: Precision,
        device: Device,
    ) -> Result<Self, DeviceError> {
        let lstm = &options.lstm;
        let (d, p) = (lstm.dim as i64, lstm.projection_dim as i64);
        let kind = precision.derivation_kind();
        let place = |t: Tensor| -> Result<Tensor, DeviceError> {
            Ok(t.f_contiguous()?.f_to_device(device)?.f_to_kind(precision.kind())?)
        };
        // Near the 1 of the forget gate, bfloat16 has no room for the steps of training.
        let wide = |t: Tensor| -> Result<Tensor, DeviceError> { Ok(t.f_contiguous()?.f_to_device(device)?) };
        let [w_x, w_h] = both_directions(source, layer, "W_0", [p, p], kind)?;
        let [bias] = both_directions(source, layer, "B", [4 * d], kind)?;
        let w_p = match options.has_projection() {
            true => {
                let [w_p] = both_directions(source, layer, "W_P_0", [d], kind)?;
                Some(tensors::with_enough_columns(place(w_p)?)?)
            }
            false => None,
        };
        Ok(Self {
            w_x: place(w_x)?,
            w_h: place(w_h)?,
            bias: wide(with_forget_bias(&bias, d)?.f_unsqueeze(1)?)?,
            w_p,
            projection: p,
            residual: layer > 0 && lstm.use_skip_connections,
            dim: lstm.dim,
            clips: Clips::new(options),
            passes: TrainingPasses::of(precision.kind(), device)?,
        })
    }

    /// Whether [`LstmLayer::forward_kept`] can compute this layer.
    pub(crate) fn can_trace(&self) -> bool {
        self.passes.is_some()
    }

    /// The passes of a GPU, by the same code on the CPU.
    #[cfg(test)]
    pub(crate) fn with_kernels_on_host(self) -> Self {
        Self { passes: Some(TrainingPasses::Kernels(CellKernels::Host)), ..self }
    }

    /// Forward pass without a graph: `x` `[2, T W, in]` from `start` `[2, W, P]`, `[2, W, D]` to `y` `[2, T W, P]`.
    pub(crate) fn forward_kept(&self, x: Tensor, start: &LayerState) -> Result<(Tensor, Kept), DeviceError> {
        match self.passes {
            Some(TrainingPasses::Host) => {
                let (y, kept) = self.forward_on_host(x, start)?;
                Ok((y, Kept::Host(kept)))
            }
            Some(TrainingPasses::Kernels(kernels)) => {
                let (y, kept) = self.forward_on_device(kernels, &x, start)?;
                Ok((y, Kept::Device(TrainingKernels { kept, kernels })))
            }
            None => Err(DeviceError::internal("a layer without passes of its own")),
        }
    }

    /// From the derivatives of `y` those of `x` `[2, T W, in]`, and of the tensors of this layer in the order of
    /// [`LstmLayer::map`]. What was kept is used up.
    pub(crate) fn backward(&self, kept: Kept, dy: &Tensor) -> Result<(Tensor, Vec<Tensor>), DeviceError> {
        match kept {
            Kept::Host(kept) => self.backward_on_host(&kept, dy),
            Kept::Device(TrainingKernels { kept, kernels }) => self.backward_on_device(kernels, &kept, dy),
        }
    }

    /// The same with every tensor changed, always in the same order.
    pub(crate) fn map<E>(&self, change: &mut Change<'_, E>) -> Result<Self, E> {
        let (w_x, w_h, bias) = (change(&self.w_x)?, change(&self.w_h)?, change(&self.bias)?);
        Ok(Self { w_x, w_h, bias, w_p: self.w_p.as_ref().map(change).transpose()?, ..*self })
    }

    /// Runs both directions over a packed batch: `x` `[2, R, in]`, `start` in packed rows; other time loops than this one change it in place.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        packings: &Packings,
        begins: &[Option<Tensor>],
        start: LayerState,
        capture: bool,
    ) -> Result<LayerOutput, DeviceError> {
        let (h, last_cells) = self.steps_batched(x, packings, begins, start, capture)?;
        let last = last_state(&h, last_cells, packings)?;
        let y = if self.residual { h.f_add(x)? } else { h };
        Ok(LayerOutput { y, last, saved_flop: 0.0 })
    }

    /// Floating point operations of the products for one token, both directions.
    pub(crate) fn flop(&self) -> f64 {
        let numel = |t: &Tensor| t.numel() as f64;
        let projection = self.w_p.as_ref().map_or(0.0, |_| 2.0 * (self.dim as f64) * self.projection as f64);
        2.0 * (numel(&self.w_x) + numel(&self.w_h) + projection)
    }
}

/// The name of a tensor of a direction (0 is forward, 1 backward) and layer.
fn name_in(direction: usize, layer: usize, what: &str) -> String {
    format!("RNN_{direction}/RNN/MultiRNNCell/Cell{layer}/LSTMCell/{what}")
}

/// A tensor of a layer, cut along its first dimension, in both directions, the forward one first: parts `[2, size, ..]`.
fn both_directions<const N: usize>(
    source: &dyn NamedTensors,
    layer: usize,
    what: &str,
    sizes: [i64; N],
    kind: Kind,
) -> Result<[Tensor; N], DeviceError> {
    let parts = source.stacked([&name_in(0, layer, what), &name_in(1, layer, what)], &sizes)?;
    let parts = parts.into_iter().map(|part| Ok(part.f_to_kind(kind)?)).collect::<Result<Vec<_>, DeviceError>>()?;
    tensors::exactly(parts)
}

/// The state after each row's last token, if the cells `[2, B, D]` were captured.
fn last_state(h: &Tensor, cells: Option<Tensor>, packings: &Packings) -> Result<Option<LayerState>, DeviceError> {
    let Some(c) = cells else { return Ok(None) };
    let [forward, backward] = packings.each(|packing| packing.last_rows());
    Ok(Some(LayerState { h: tensors::rows_of_each(h, [&forward, &backward])?, c }))
}

/// Adds 1 to the forget gates, as TensorFlow does at run time; the files do not hold it. `[2, 4D]`
fn with_forget_bias(bias: &Tensor, d: i64) -> Result<Tensor, DeviceError> {
    let [i, j, f, o] = tensors::split(bias, [d; 4], 1)?;
    Ok(Tensor::f_cat(&[i, j, scalar_ops::add(&f, 1.0)?, o], 1)?)
}

/// Time steps of a chunk.
fn steps_of<'p>(packings: &'p Packings, chunk: &Chunk) -> impl Iterator<Item = (usize, &'p Step)> + use<'p> {
    (chunk.first..chunk.end).map(|t| (t, &packings.steps()[t]))
}

#[cfg(test)]
mod tests;
