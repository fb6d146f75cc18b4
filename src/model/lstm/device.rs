//! The time loop of GPUs, without gradients: both directions in one product, and our own kernels between the products.
//!
//! A row of a step is its input and the previous output side by side, so that one product makes its gates. The gates go through
//! memory once. If the products of the input were computed for many steps at once, as in `batched.rs`, the gates would go through memory
//! three times. From some 300 rows on, that takes longer than reading the weights of the input at every step.

use tch::{Device, Kind, Tensor};

use super::{Clips, LayerOutput, batched::Finished, both_directions, last_state, with_forget_bias};
use crate::{
    model::{
        DeviceError, Precision,
        cell::{CellKernels, Gates, Outputs},
        packing::{Packings, Step},
        parameters::NamedTensors,
        start_state::LayerState,
        tensors::{self, Change},
    },
    options::ModelOptions,
};

/// Both directions of one layer.
#[derive(Debug)]
pub(crate) struct DeviceLayer {
    weights: Tensor,     // [2, P + P, 4D], of the input and of the previous output
    bias: Tensor,        // [2, 4D] float32, +1 in the forget block
    w_p: Option<Tensor>, // [2, D, P]
    residual: bool,
    dim: usize,
    projection: i64, // P
    clips: Clips,
    kernels: CellKernels,
}

impl DeviceLayer {
    /// Derives one layer from the tensors of `RNN_0` and `RNN_1`.
    pub(crate) fn new(
        options: &ModelOptions,
        source: &dyn NamedTensors,
        layer: usize,
        precision: Precision,
        device: Device,
        kernels: CellKernels,
    ) -> Result<Self, DeviceError> {
        let lstm = &options.lstm;
        let (d, p) = (lstm.dim as i64, lstm.projection_dim as i64);
        let [weights] = both_directions(source, layer, "W_0", [2 * p], Kind::Float)?;
        let [bias] = both_directions(source, layer, "B", [4 * d], Kind::Float)?;
        let place = |t: &Tensor, kind| -> Result<Tensor, DeviceError> {
            Ok(t.f_to_device(device)?.f_to_kind(kind)?.f_contiguous()?)
        };
        let kind = precision.kind();
        let w_p = match options.has_projection() {
            true => {
                let [w_p] = both_directions(source, layer, "W_P_0", [d], Kind::Float)?;
                Some(place(&w_p, kind)?)
            }
            false => None,
        };
        Ok(Self {
            weights: place(&weights, kind)?,
            bias: place(&with_forget_bias(&bias, d)?, Kind::Float)?,
            w_p,
            residual: layer > 0 && lstm.use_skip_connections,
            dim: lstm.dim,
            projection: p,
            clips: Clips::new(options),
            kernels,
        })
    }

    /// As [`LstmLayer::map`](super::LstmLayer::map).
    pub(crate) fn map<E>(&self, change: &mut Change<'_, E>) -> Result<Self, E> {
        let (weights, bias) = (change(&self.weights)?, change(&self.bias)?);
        Ok(Self { weights, bias, w_p: self.w_p.as_ref().map(change).transpose()?, ..*self })
    }

    /// As [`LstmLayer::flop`](super::LstmLayer::flop).
    pub(crate) fn flop(&self) -> f64 {
        2.0 * (self.weights.numel() + self.w_p.as_ref().map_or(0, Tensor::numel)) as f64
    }

    /// As [`LstmLayer::forward`](super::LstmLayer::forward). `begins` `[R]` is not 0 where a sentence begins in a row after another.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        packings: &Packings,
        begins: Option<&Tensor>,
        start: LayerState,
        capture: bool,
    ) -> Result<LayerOutput, DeviceError> {
        // States are changed in place.
        let _no_gradients = tch::no_grad_guard();
        let (d, p) = (self.dim as i64, self.projection);
        let (all, width) = (packings.packed_rows() as i64, packings.width() as i64);
        let empty = |shape: &[i64]| Tensor::f_empty(shape, (x.kind(), x.device()));
        // Rows hold several sentences only where all start from one constant, which any row has.
        let constant = |t: &Tensor| Ok::<_, DeviceError>(t.f_narrow(1, 0, 1)?.f_reshape([2, -1])?);
        let start_h = constant(&start.h)?.f_contiguous()?;
        let start_c = tensors::copied(&constant(&start.c.f_to_kind(Kind::Float)?)?)?; // the state is changed in place
        let state = start.c.f_to_kind(Kind::Float)?.f_contiguous()?; // [2, W, D]
        let rows = empty(&[2, all, 2 * p])?;
        let [mut input, previous] = tensors::split(&rows, [p, p], 2)?;
        input.f_copy_(x)?;
        previous.f_narrow(1, 0, width)?.f_copy_(&start.h)?;
        // A state that is captured is without the input.
        let residual = self.residual && !capture;
        let (sums, out) = (empty(&[2 * width * 4 * d])?, empty(&[2 * width * d])?);
        let (projected, y) = (empty(&[2 * width * p])?, empty(&[2, all, p])?);
        let mut finished = Finished::new(capture);
        let steps = packings.steps();
        let of_step =
            |step: &Step| begins.map(|all| all.f_narrow(0, step.offset as i64, step.width as i64)).transpose();
        for (t, step) in steps.iter().enumerate() {
            let first = |buffer: &Tensor, columns: i64| -> Result<Tensor, DeviceError> {
                let w = step.width as i64;
                Ok(buffer.f_narrow(0, 0, 2 * w * columns)?.f_view([2, w, columns])?)
            };
            let (sums, out, projected) = (first(&sums, 4 * d)?, first(&out, d)?, first(&projected, p)?);
            let _ = rows.f_narrow(1, step.offset as i64, step.width as i64)?.f_bmm_out(&sums, &self.weights)?;
            let gates = Gates {
                sums: &sums,
                bias: &self.bias,
                state: &state,
                start: &start_c,
                begins: of_step(step)?,
                out: &out,
            };
            self.kernels.cell(&gates, bound(self.clips.cell))?;
            finished.keep(&state, packings, t)?;
            if let Some(w_p) = &self.w_p {
                let _ = out.f_bmm_out(&projected, w_p)?;
            }
            let next = steps.get(t + 1);
            let outputs = Outputs {
                projected: if self.w_p.is_some() { &projected } else { &out },
                rows: &rows,
                residual,
                offset: step.offset,
                next: next.map(|next| (next.offset, next.width)),
                y: &y,
                start: &start_h,
                begins: next.map(of_step).transpose()?.flatten(),
            };
            self.kernels.outputs(&outputs, bound(self.clips.projection))?;
        }
        let last = last_state(&y, finished.cells()?, packings)?;
        let last = last.map(|last| Ok::<_, DeviceError>(LayerState { c: last.c.f_to_kind(x.kind())?, ..last }));
        let y = if self.residual && capture { y.f_add(x)? } else { y };
        Ok(LayerOutput { y, last: last.transpose()?, saved_flop: 0.0 })
    }
}

/// A clip for the kernels: infinite if there is none.
pub(super) fn bound(clip: Option<f64>) -> f32 {
    clip.map_or(f32::INFINITY, |clip| clip as f32)
}
