//! Forward and backward pass of a layer without a graph, for training on a GPU: the derivatives of `trained.rs`, with both directions in
//! one product and our own kernels between the products, as in `device.rs`. All rows have the same number of steps.
//!
//! Libtorch's graph would launch some forty kernels for each step, forward and backward, and in bfloat16 it would round the gradient of a
//! weight after every step; here that is one product over all steps, which adds in float32.

use tch::{Kind, Tensor};

use super::{LstmLayer, device::bound};
use crate::model::{
    DeviceError,
    cell::{CellKernels, GateGradients, KeptGates, OutputGradients, Outputs},
    scalar_ops,
    start_state::LayerState,
    tensors,
};

/// What the backward pass needs from the forward pass, in the number format of the computation unless said otherwise. Rows are step by
/// step, `W` at each of `T` steps; cells begin with the start state.
pub(crate) struct Kept {
    rows: Tensor,  // [2, T W, 2P], the input and the previous output
    raw: Tensor,   // [T, 2, W, P], the projection before its clip
    gates: Tensor, // [2, T W, 4D], after their non-linearities
    cells: Tensor, // [1 + T, 2, W, D] float32
    m: Tensor,     // [2, T W, D], what is projected
    clip: f32,
}

impl Kept {
    fn steps(&self) -> i64 {
        self.raw.size()[0]
    }

    /// Rows of a step.
    fn width(&self) -> i64 {
        self.raw.size()[2]
    }

    /// State after the last step, `[2, W, P]` and `[2, W, D]`.
    pub(super) fn last(&self) -> Result<LayerState, DeviceError> {
        let steps = self.steps();
        let (clip, raw) = (f64::from(self.clip), self.raw.f_select(0, steps - 1)?);
        let h = scalar_ops::clamp(&raw, -clip, clip)?;
        Ok(LayerState { h, c: self.cells.f_select(0, steps)?.f_to_kind(raw.kind())? })
    }
}

impl LstmLayer {
    /// The projection without columns that were added for products.
    fn projection_weight(&self) -> Result<Option<Tensor>, DeviceError> {
        Ok(self.w_p.as_ref().map(|w_p| w_p.f_narrow(2, 0, self.projection)).transpose()?)
    }

    /// `x` `[2, T W, in]` from `start` `[2, W, P]`, `[2, W, D]` to `y` `[2, T W, P]`.
    pub(super) fn forward_on_device(
        &self,
        kernels: CellKernels,
        x: &Tensor,
        start: &LayerState,
    ) -> Result<(Tensor, Kept), DeviceError> {
        let (d, p, width, all) = (self.dim as i64, self.projection, start.h.size()[1], x.size()[1]);
        let steps = all / width;
        let empty = |shape: &[i64], kind| Tensor::f_empty(shape, (kind, x.device()));
        let of = |shape: &[i64]| empty(shape, x.kind());
        let kept = Kept {
            rows: of(&[2, all, 2 * p])?,
            raw: of(&[steps, 2, width, p])?,
            gates: of(&[2, all, 4 * d])?,
            cells: empty(&[1 + steps, 2, width, d], Kind::Float)?,
            m: of(&[2, all, d])?,
            clip: bound(self.clips.projection),
        };
        let [mut input, previous] = tensors::split(&kept.rows, [p, p], 2)?;
        input.f_copy_(x)?;
        previous.f_narrow(1, 0, width)?.f_copy_(&start.h)?;
        kept.cells.f_select(0, 0)?.f_copy_(&start.c)?;
        let weights = Tensor::f_cat(&[&self.w_x, &self.w_h], 1)?; // [2, 2P, 4D]
        let bias = self.bias.f_to_kind(Kind::Float)?.f_reshape([2, 4 * d])?.f_contiguous()?;
        let w_p = self.projection_weight()?;
        let y = of(&[2, all, p])?;
        for t in 0..steps {
            let offset = t * width;
            let at = |tensor: &Tensor| tensor.f_narrow(1, offset, width);
            let _ = at(&kept.rows)?.f_bmm_out(&at(&kept.gates)?, &weights)?;
            let gates = KeptGates {
                gates: &kept.gates,
                bias: &bias,
                before: &kept.cells.f_select(0, t)?,
                after: &kept.cells.f_select(0, t + 1)?,
                out: &kept.m,
                offset: offset as usize,
            };
            kernels.cell_kept(&gates, bound(self.clips.cell))?;
            let (m, mut raw) = (at(&kept.m)?, kept.raw.f_select(0, t)?);
            match &w_p {
                Some(w_p) => drop(m.f_bmm_out(&raw, w_p)?),
                None => raw.f_copy_(&m)?,
            }
            let next = (t + 1 < steps).then_some(((offset + width) as usize, width as usize));
            let outputs = Outputs {
                projected: &raw,
                rows: &kept.rows,
                residual: self.residual,
                offset: offset as usize,
                next,
                y: &y,
                start: &raw, // not read: no sentence begins after another one in its row
                begins: None,
            };
            kernels.outputs(&outputs, kept.clip)?;
        }
        Ok((y, kept))
    }

    /// From the derivatives of `y` those of `x` `[2, T W, in]`, and of the tensors of this layer in the order of
    /// [`LstmLayer::map`]. Derivatives take the place of the gates that were kept.
    pub(super) fn backward_on_device(
        &self,
        kernels: CellKernels,
        kept: &Kept,
        dy: &Tensor,
    ) -> Result<(Tensor, Vec<Tensor>), DeviceError> {
        let (d, p, width, steps) = (self.dim as i64, self.projection, kept.width(), kept.steps());
        let options = (dy.kind(), dy.device());
        let dy = dy.f_contiguous()?;
        let dp = dy.f_empty_like()?;
        let (next, dm) = (Tensor::f_empty([2, width, p], options)?, Tensor::f_empty([2, width, d], options)?);
        let dc = Tensor::f_zeros([2, width, d], (Kind::Float, dy.device()))?;
        let transposed = |t: &Tensor| t.f_transpose(1, 2);
        let w_h = transposed(&self.w_h)?;
        let w_p = self.projection_weight()?.as_ref().map(transposed).transpose()?;
        for t in (0..steps).rev() {
            let offset = t * width;
            let is_last = t + 1 == steps;
            if !is_last {
                let _ = kept.gates.f_narrow(1, offset + width, width)?.f_bmm_out(&next, &w_h)?;
            }
            let outputs = OutputGradients {
                y: &dy,
                next: (!is_last).then_some(&next),
                projected: &kept.raw.f_select(0, t)?,
                to: &dp,
                offset: offset as usize,
            };
            kernels.output_backward(&outputs, kept.clip)?;
            let dp = dp.f_narrow(1, offset, width)?;
            match &w_p {
                Some(w_p) => drop(dp.f_bmm_out(&dm, w_p)?),
                None => dm.shallow_clone().f_copy_(&dp)?,
            }
            let gates = GateGradients {
                gates: &kept.gates,
                before: &kept.cells.f_select(0, t)?,
                after: &kept.cells.f_select(0, t + 1)?,
                out: &dm,
                state: &dc,
                offset: offset as usize,
            };
            kernels.cell_backward(&gates, bound(self.clips.cell))?;
        }
        let dz = &kept.gates;
        let weights = transposed(&kept.rows)?.f_bmm(dz)?; // [2, 2P, 4D]
        let [dw_x, dw_h] = tensors::split(&weights, [p, p], 1)?;
        let dbias = dz.f_sum_dim_intlist([1_i64].as_slice(), true, Kind::Float)?;
        let mut gradients = vec![dw_x, dw_h, dbias];
        if self.w_p.is_some() {
            gradients.push(tensors::with_enough_columns(transposed(&kept.m)?.f_bmm(&dp)?)?);
        }
        let mut dx = dz.f_bmm(&transposed(&self.w_x)?)?;
        if self.residual {
            let _ = dx.f_add_(&dy)?;
        }
        Ok((dx, gradients))
    }
}
