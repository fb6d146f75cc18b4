//! The time loop in libtorch's operations, both directions in one product: for gradients, other precisions on CPUs, and GPUs without
//! kernels of our own.
//!
//! Nothing is changed in place, and the parts of a tensor are taken with `split`: the backward pass of `narrow` would
//! fill a tensor of the whole input's size at every step.

use tch::{Device, Tensor};

use super::{LstmLayer, steps_of};
use crate::model::{DeviceError, packing::Packings, scalar_ops, start_state::LayerState, tensors};

/// Packed rows of one input product on CPU: larger outputs leave the cache before the time loop reads them.
const CHUNK_ROWS_HOST: usize = 256;
/// On a GPU, large products are the fast ones; this bounds the gates to some GiB.
const CHUNK_ROWS_DEVICE: usize = 8192;

impl LstmLayer {
    /// `x` `[2, R, in]` -> `h` `[2, R, P]`, and `c` `[2, B, D]` after each row's last token if requested. `begins` are those of
    /// [`Indices`](crate::model::indices::Indices).
    pub(super) fn steps_batched(
        &self,
        x: &Tensor,
        packings: &Packings,
        begins: &[Option<Tensor>],
        start: LayerState,
        capture: bool,
    ) -> Result<(Tensor, Option<Tensor>), DeviceError> {
        // Rows hold several sentences only where all start from one constant, which any row has.
        let bias = self.bias.f_to_kind(x.kind())?;
        let constant = LayerState { h: start.h.f_narrow(1, 0, 1)?, c: start.c.f_narrow(1, 0, 1)? };
        let LayerState { mut h, mut c } = start; // [2, W, P], [2, W, D]
        let chunk_rows = if x.device() == Device::Cpu { CHUNK_ROWS_HOST } else { CHUNK_ROWS_DEVICE };
        let chunks = packings.chunks(chunk_rows);
        let rows: Vec<i64> = chunks.iter().map(|chunk| chunk.rows as i64).collect();
        let mut outputs = Vec::with_capacity(packings.steps().len());
        let mut finished = Finished::new(capture);
        for (chunk, input) in chunks.iter().zip(x.f_split_with_sizes(rows, 1)?) {
            let hoisted = scalar_ops::baddbmm(&bias, &input, &self.w_x)?; // [2, r, 4D]
            let widths: Vec<i64> = steps_of(packings, chunk).map(|(_, step)| step.width as i64).collect();
            for ((t, step), gates) in steps_of(packings, chunk).zip(hoisted.f_split_with_sizes(widths, 1)?) {
                (h, c) = (first_rows(h, step.width)?, first_rows(c, step.width)?);
                if let Some(rows) = &begins[t] {
                    (h, c) = (begin(&h, &constant.h, rows)?, begin(&c, &constant.c, rows)?);
                }
                let z = scalar_ops::baddbmm(&gates, &h, &self.w_h)?; // [2, w, 4D]
                (h, c) = self.cell(&z, &c)?;
                finished.keep(&c, packings, t)?;
                outputs.push(h.shallow_clone());
            }
        }
        Ok((Tensor::f_cat(&outputs, 1)?, finished.cells()?))
    }

    /// One step from its gates: `[2, w, 4D], [2, w, D] -> h [2, w, P], c [2, w, D]`
    fn cell(&self, z: &Tensor, c: &Tensor) -> Result<(Tensor, Tensor), DeviceError> {
        let [i, j, f, o] = tensors::split(z, [self.dim as i64; 4], 2)?;
        let candidate = i.f_sigmoid()?.f_mul(&j.f_tanh()?)?;
        let c = clipped(f.f_sigmoid()?.f_mul(c)?.f_add(&candidate)?, self.clips.cell)?;
        let mut h = o.f_sigmoid()?.f_mul(&c.f_tanh()?)?;
        if let Some(w_p) = &self.w_p {
            h = tensors::first_columns(h.f_bmm(w_p)?, self.projection)?;
        }
        Ok((clipped(h, self.clips.projection)?, c))
    }
}

/// Bounds every value by `-clip..=clip`. The gradient is 1 up to the bound itself and 0 beyond it.
fn clipped(t: Tensor, clip: Option<f64>) -> Result<Tensor, DeviceError> {
    match clip {
        Some(clip) => scalar_ops::clamp(&t, -clip, clip),
        None => Ok(t),
    }
}

/// `[2, W, dim] -> [2, w, dim]`
fn first_rows(t: Tensor, width: usize) -> Result<Tensor, DeviceError> {
    if t.size()[1] == width as i64 { Ok(t) } else { Ok(t.f_narrow(1, 0, width as i64)?) }
}

/// Sets `rows` `[n]` of a state `[2, w, dim]` to the start state `[2, 1, dim]`.
fn begin(state: &Tensor, start: &Tensor, rows: &Tensor) -> Result<Tensor, DeviceError> {
    let [directions, _, dim] = start.size3()?.into();
    let start = start.f_expand([directions, rows.size()[0], dim], false)?;
    Ok(state.f_index_copy(1, rows, &start)?)
}

/// Cells of the rows of each direction as their last token is read.
pub(super) struct Finished {
    parts: Option<[Vec<Tensor>; 2]>, // of [1, n, D]
}

impl Finished {
    pub(super) fn new(capture: bool) -> Self {
        Self { parts: capture.then(Default::default) }
    }

    /// Keeps a copy of the rows of `c` `[2, w, D]` that end at step `t`.
    pub(super) fn keep(&mut self, c: &Tensor, packings: &Packings, t: usize) -> Result<(), DeviceError> {
        let Some(parts) = &mut self.parts else { return Ok(()) };
        for (direction, parts) in parts.iter_mut().enumerate() {
            let ends = packings.of(direction).ends(t);
            if !ends.is_empty() {
                let c = c.f_narrow(0, direction as i64, 1)?;
                // Other time loops change the cells in place.
                parts.push(tensors::copied(&c.f_narrow(1, ends.start as i64, ends.len() as i64)?)?);
            }
        }
        Ok(())
    }

    /// `[2, B, D]` in the order of the rows of each direction.
    pub(super) fn cells(self) -> Result<Option<Tensor>, DeviceError> {
        let Some(parts) = self.parts else { return Ok(None) };
        let [forward, backward] = parts.map(|mut parts| {
            parts.reverse(); // the last rows end first
            Tensor::f_cat(&parts, 1)
        });
        Ok(Some(Tensor::f_cat(&[forward?, backward?], 0)?))
    }
}
