//! Forward and backward pass of a layer without a graph, for training in float32 on CPU: all rows have the same number of
//! steps.
//!
//! Libtorch's graph would add a product of few rows to the gradient of every weight at every step. Here the time loop
//! runs backward over the gates alone, and each weight's gradient is one product over all steps afterwards. With `z` the
//! gates before, and `i, j, f, o` after their non-linearities, and `s` the sum that the cell clip bounds:
//!
//! ```text
//! dp = dh where |m W_P| <= clip        dm = dp W_P^T            dW_P = sum of m^T dp
//! dc = dc' + dm o (1 - tanh(c)^2), 0 where |s| > clip           (dc' comes from the step after)
//! dz = dc j i(1-i), dc i (1-j^2), dc c_before f(1-f), dm tanh(c) o(1-o)
//! dc' = dc f                           dh' = dz W_h^T           dW_h = sum of h_before^T dz
//! dx = dz W_x^T                        dW_x = sum of x^T dz     dB = sum of dz
//! ```

use tch::{Device, Kind, Tensor};

use super::LstmLayer;
use crate::model::{DeviceError, kernels, start_state::LayerState, tensors};

const FLOAT_ON_HOST: (Kind, Device) = (Kind::Float, Device::Cpu);

/// What the backward pass needs from the forward pass. Rows are step by step, `W` at each of `T` steps; `h` and `cells`
/// begin with the start state.
pub(crate) struct Kept {
    x: Tensor,     // [2, T W, in]
    h: Tensor,     // [2, (1 + T) W, P]
    raw: Tensor,   // [2, T W, P], the projection before its clip
    gates: Tensor, // [2, T W, 4D], after their non-linearities
    cells: Tensor, // [2, (1 + T) W, D]
    m: Tensor,     // [2, T W, D], what is projected
    width: i64,
}

impl Kept {
    /// State after the last step, `[2, W, P]` and `[2, W, D]`.
    pub(super) fn last(&self) -> Result<LayerState, DeviceError> {
        let last = |t: &Tensor| Tensor::f_contiguous(&t.f_narrow(1, t.size()[1] - self.width, self.width)?);
        Ok(LayerState { h: last(&self.h)?, c: last(&self.cells)? })
    }
}

/// Views of one direction.
struct Direction {
    x: Tensor,
    h: Tensor,
    raw: Tensor,
    gates: Tensor,
    cells: Tensor,
    m: Tensor,
    width: i64,
}

impl Direction {
    fn of(kept: &Kept, direction: i64) -> Result<Self, DeviceError> {
        let part = |t: &Tensor| t.f_select(0, direction);
        Ok(Self {
            x: part(&kept.x)?,
            h: part(&kept.h)?,
            raw: part(&kept.raw)?,
            gates: part(&kept.gates)?,
            cells: part(&kept.cells)?,
            m: part(&kept.m)?,
            width: kept.width,
        })
    }

    fn steps(&self) -> i64 {
        self.m.size()[0] / self.width
    }

    /// Rows of a step.
    fn at(&self, t: &Tensor, step: i64) -> Result<Tensor, DeviceError> {
        Ok(t.f_narrow(0, step * self.width, self.width)?)
    }
}

/// Weights of one direction.
struct Weights {
    w_x: Tensor,         // [in, 4D]
    w_h: Tensor,         // [P, 4D]
    bias: Tensor,        // [1, 4D]
    w_p: Option<Tensor>, // [D, P]
}

impl LstmLayer {
    fn of_direction(&self, direction: i64) -> Result<Weights, DeviceError> {
        let w_p = match &self.w_p {
            Some(w_p) => Some(w_p.f_select(0, direction)?.f_narrow(1, 0, self.projection)?),
            None => None,
        };
        let part = |t: &Tensor| t.f_select(0, direction);
        Ok(Weights { w_x: part(&self.w_x)?, w_h: part(&self.w_h)?, bias: part(&self.bias)?, w_p })
    }

    fn cell_clip(&self) -> f32 {
        self.clips.cell.map_or(f32::INFINITY, |clip| clip as f32)
    }

    fn projection_clip(&self) -> f32 {
        self.clips.projection.map_or(f32::INFINITY, |clip| clip as f32)
    }

    /// `x` `[2, T W, in]` from `start` `[2, W, P]`, `[2, W, D]` to `y` `[2, T W, P]`.
    pub(super) fn forward_on_host(&self, x: Tensor, start: &LayerState) -> Result<(Tensor, Kept), DeviceError> {
        let (d, width) = (self.dim as i64, start.h.size()[1]);
        let rows = x.size()[1];
        let empty = |rows: i64, columns: i64| Tensor::f_empty([2, rows, columns], FLOAT_ON_HOST);
        let kept = Kept {
            h: empty(width + rows, self.projection)?,
            raw: empty(rows, self.projection)?,
            gates: empty(rows, 4 * d)?,
            cells: empty(width + rows, d)?,
            m: empty(rows, d)?,
            x,
            width,
        };
        kept.h.f_narrow(1, 0, width)?.f_copy_(&start.h)?;
        kept.cells.f_narrow(1, 0, width)?.f_copy_(&start.c)?;
        for direction in 0..2 {
            self.run_forward(&Direction::of(&kept, direction)?, &self.of_direction(direction)?)?;
        }
        let h = kept.h.f_narrow(1, width, rows)?;
        let y = if self.residual { h.f_add(&kept.x)? } else { h.f_contiguous()? };
        Ok((y, kept))
    }

    fn run_forward(&self, kept: &Direction, weights: &Weights) -> Result<(), DeviceError> {
        let _ = weights.bias.f_addmm_out(&kept.gates, &kept.x, &weights.w_x)?;
        for t in 0..kept.steps() {
            let mut gates = kept.at(&kept.gates, t)?;
            let _ = gates.f_addmm_(&kept.at(&kept.h, t)?, &weights.w_h)?;
            let (before, mut cell, mut m) =
                (kept.at(&kept.cells, t)?, kept.at(&kept.cells, t + 1)?, kept.at(&kept.m, t)?);
            {
                // SAFETY: rows of different steps, or of different buffers, that only this thread accesses.
                let (gates, before, cell, m) = unsafe {
                    let gates = tensors::values_mut(&mut gates);
                    (gates, tensors::values(&before), tensors::values_mut(&mut cell), tensors::values_mut(&mut m))
                };
                kernels::lstm_cell_kept(gates, before, cell, m, self.dim, self.cell_clip());
            }
            let mut raw = kept.at(&kept.raw, t)?;
            match &weights.w_p {
                Some(w_p) => drop(m.f_mm_out(&raw, w_p)?),
                None => raw.f_copy_(&m)?,
            }
            let mut h = kept.at(&kept.h, t + 1)?;
            h.f_copy_(&raw)?;
            if let Some(clip) = self.clips.projection {
                let _ = h.f_clamp_(-clip, clip)?;
            }
        }
        Ok(())
    }

    /// From the derivatives of `y` those of `x` `[2, T W, in]`, and of the tensors of this layer in the order of
    /// [`LstmLayer::map`].
    pub(super) fn backward_on_host(&self, kept: &Kept, dy: &Tensor) -> Result<(Tensor, Vec<Tensor>), DeviceError> {
        let dx = Tensor::f_empty(kept.x.size(), FLOAT_ON_HOST)?;
        let gradients = self.of_tensors(|t| Ok(t.f_zeros_like()?))?;
        for direction in 0..2 {
            let part = |t: &Tensor| t.f_select(0, direction);
            let of_direction = gradients.iter().map(part).collect::<Result<Vec<_>, _>>()?;
            let (kept, weights) = (Direction::of(kept, direction)?, self.of_direction(direction)?);
            self.run_backward(&kept, &weights, &part(dy)?, &part(&dx)?, &of_direction)?;
        }
        let dx = if self.residual { dx.f_add(dy)? } else { dx };
        Ok((dx, gradients))
    }

    /// The tensors of this layer, changed, in the order of [`LstmLayer::map`].
    fn of_tensors(&self, change: impl Fn(&Tensor) -> Result<Tensor, DeviceError>) -> Result<Vec<Tensor>, DeviceError> {
        let mut all = Vec::new();
        self.map::<DeviceError>(&mut |t| {
            all.push(change(t)?);
            Ok(t.shallow_clone())
        })?;
        Ok(all)
    }

    fn run_backward(
        &self,
        kept: &Direction,
        weights: &Weights,
        dy: &Tensor,
        dx: &Tensor,
        gradients: &[Tensor],
    ) -> Result<(), DeviceError> {
        let (d, rows) = (self.dim as i64, kept.m.size()[0]);
        let dp = Tensor::f_empty([rows, self.projection], FLOAT_ON_HOST)?;
        let mut dm = Tensor::f_empty([kept.width, d], FLOAT_ON_HOST)?;
        let mut dc = Tensor::f_zeros([kept.width, d], FLOAT_ON_HOST)?;
        let w_h = weights.w_h.f_tr()?;
        let w_p = weights.w_p.as_ref().map(Tensor::f_tr).transpose()?;
        let last = kept.steps() - 1;
        for t in (0..=last).rev() {
            let mut dp = kept.at(&dp, t)?;
            dp.f_copy_(&kept.at(dy, t)?)?;
            if t < last {
                let _ = dp.f_addmm_(&kept.at(&kept.gates, t + 1)?, &w_h)?; // derivatives of the step after
            }
            {
                let raw = kept.at(&kept.raw, t)?;
                // SAFETY: two buffers that only this thread accesses.
                let (raw, dp) = unsafe { (tensors::values(&raw), tensors::values_mut(&mut dp)) };
                kernels::clip_gradients(raw, dp, self.projection_clip());
            }
            match &w_p {
                Some(w_p) => drop(dp.f_mm_out(&dm, w_p)?),
                None => dm.f_copy_(&dp)?,
            }
            let (mut gates, before, cell) =
                (kept.at(&kept.gates, t)?, kept.at(&kept.cells, t)?, kept.at(&kept.cells, t + 1)?);
            // SAFETY: buffers that only this thread accesses, or rows of different steps that are only read.
            let (gates, before, cell, dm, dc) = unsafe {
                let gates = tensors::values_mut(&mut gates);
                let (before, cell) = (tensors::values(&before), tensors::values(&cell));
                (gates, before, cell, tensors::values(&dm), tensors::values_mut(&mut dc))
            };
            kernels::lstm_cell_backward(gates, before, cell, dm, dc, self.dim, self.cell_clip());
        }
        let [dw_x, dw_h, dbias, dw_p @ ..] = gradients else {
            return Err(DeviceError::internal("a layer has three tensors or four"));
        };
        let dz = &kept.gates;
        let _ = kept.x.f_tr()?.f_mm_out(dw_x, dz)?;
        let _ = kept.h.f_narrow(0, 0, rows)?.f_tr()?.f_mm_out(dw_h, dz)?;
        let _ = dz.f_sum_intlist_out(dbias, [0_i64].as_slice(), true, Kind::Float)?;
        if let [dw_p] = dw_p {
            dw_p.f_narrow(1, 0, self.projection)?.f_copy_(&kept.m.f_tr()?.f_mm(&dp)?)?;
        }
        let _ = dz.f_mm_out(dx, &weights.w_x.f_tr()?)?;
        Ok(())
    }
}
