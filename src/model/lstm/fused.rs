//! The time loop with our own pass over the gates, direction by direction: float32 on CPU, no gradients.

use tch::{Device, Kind, Tensor};

use super::{LstmLayer, steps_of};
use crate::model::{
    DeviceError, kernels, narrow,
    packing::{MIN_WIDTH, Packing, Packings},
    start_state::LayerState,
    tensors,
};

/// Packed rows of one input product: larger outputs leave the cache before the time loop reads them.
pub(super) const CHUNK_ROWS: usize = 256;

const FLOAT_ON_HOST: (Kind, Device) = (Kind::Float, Device::Cpu);

impl LstmLayer {
    /// `x` `[2, R, in]` -> `h` `[2, R, P]`, and `c` `[2, B, D]` after each row's last token if requested.
    pub(super) fn steps_fused(
        &self,
        x: &Tensor,
        packings: &Packings,
        start: LayerState,
        capture: bool,
    ) -> Result<(Tensor, Option<Tensor>), DeviceError> {
        let d = self.dim as i64;
        let chunks = packings.chunks(CHUNK_ROWS);
        let out = Tensor::f_empty([2, packings.packed_rows() as i64, self.projection], FLOAT_ON_HOST)?;
        let largest = chunks.iter().map(|chunk| chunk.rows).max().unwrap_or(0) as i64;
        let gates = Tensor::f_empty([largest, 4 * d], FLOAT_ON_HOST)?;
        let activated = Tensor::f_empty([packings.width() as i64, d], FLOAT_ON_HOST)?;
        let last = Captured::new(capture, packings, d)?;
        for direction in 0..2 {
            let packing = packings.of(direction);
            let direction = direction as i64;
            let (x, out) = (x.f_select(0, direction)?, out.f_select(0, direction)?);
            let (w_x, w_h) = (self.w_x.f_select(0, direction)?, self.w_h.f_select(0, direction)?);
            let bias = self.bias.f_select(0, direction)?;
            let (mut h, mut cell) = (start.h.f_select(0, direction)?, start.c.f_select(0, direction)?);
            // Rows hold several sentences only where all start from one constant, which any row has.
            let constant =
                Constant { h: tensors::download(&rows_of(&h, 0, 1)?)?, c: tensors::download(&rows_of(&cell, 0, 1)?)? };
            for chunk in &chunks {
                let input = rows_of(&x, chunk.offset, chunk.rows)?;
                // [r, in] x [in, 4D]: the part of the gates that does not depend on the previous step
                let mut of_chunk = rows_of(&gates, 0, chunk.rows)?;
                of_chunk.f_copy_(&bias.f_expand_as(&of_chunk)?)?;
                add_product(&mut of_chunk, &input, &w_x)?;
                for (t, step) in steps_of(packings, chunk) {
                    let mut z = rows_of(&gates, step.offset - chunk.offset, step.width)?;
                    h = rows_of(&h, 0, step.width)?;
                    if !packing.begins(t).is_empty() {
                        h = owned(&h)?; // it is a part of the output
                        begin(&mut h, &constant.h, packing.begins(t));
                        begin(&mut cell, &constant.c, packing.begins(t));
                    }
                    add_product(&mut z, &h, &w_h)?;
                    let mut c = rows_of(&cell, 0, step.width)?;
                    let mut m = rows_of(&activated, 0, step.width)?;
                    self.activate(&z, &mut c, &mut m);
                    last.keep(packing, t, direction, &cell)?;
                    h = rows_of(&out, step.offset, step.width)?;
                    self.project_into(&mut h, &m, direction)?;
                }
            }
        }
        Ok((out, last.cells))
    }

    /// The gates of one step: `z` `[w, 4D]`, `c` `[w, D]` is updated, `m` `[w, D]` becomes `sigmoid(o) * tanh(c)`.
    fn activate(&self, z: &Tensor, c: &mut Tensor, m: &mut Tensor) {
        let clip = self.clips.cell.map_or(f32::INFINITY, |clip| clip as f32);
        // SAFETY: rows of three buffers of the time loop (gates, cells, activated), which only this thread accesses.
        let (z, c, m) = unsafe { (tensors::values(z), tensors::values_mut(c), tensors::values_mut(m)) };
        kernels::lstm_cell(z, c, m, self.dim, clip);
    }

    /// `h = clip(m W_P)` into rows of the output: `[w, D] -> [w, P]`
    fn project_into(&self, h: &mut Tensor, m: &Tensor, direction: i64) -> Result<(), DeviceError> {
        match &self.w_p {
            Some(w_p) if self.projection < tensors::MIN_COLUMNS => {
                let product = m.f_mm(&w_p.f_select(0, direction)?)?;
                h.f_copy_(&product.f_narrow(1, 0, self.projection)?)?;
            }
            // SAFETY: rows of buffers of the time loop, which only this thread accesses.
            Some(w_p) if is_few(m) => unsafe { narrow::multiply(h, m, &w_p.f_select(0, direction)?, false) },
            Some(w_p) => {
                let _ = m.f_mm_out(h, &w_p.f_select(0, direction)?)?;
            }
            None => h.f_copy_(m)?,
        }
        if let Some(clip) = self.clips.projection {
            let _ = h.f_clamp_(-clip, clip)?;
        }
        Ok(())
    }
}

/// Rows for which MKL has no steady bits. Only layers whose narrow products are exact have such steps.
fn is_few(rows: &Tensor) -> bool {
    rows.size()[0] < MIN_WIDTH as i64
}

/// `c += a b`
fn add_product(c: &mut Tensor, a: &Tensor, b: &Tensor) -> Result<(), DeviceError> {
    if is_few(a) {
        // SAFETY: `c` is rows of a buffer of the time loop, which only this thread accesses; the input and weights are not changed.
        unsafe { narrow::multiply(c, a, b, true) };
    } else {
        let _ = c.f_addmm_(a, b)?;
    }
    Ok(())
}

/// The start state of one direction.
struct Constant {
    h: Vec<f32>, // [P]
    c: Vec<f32>, // [D]
}

/// A contiguous copy: the time loop writes to it.
fn owned(t: &Tensor) -> Result<Tensor, DeviceError> {
    let mut copy = Tensor::f_empty(t.size(), (t.kind(), t.device()))?;
    copy.f_copy_(t)?;
    Ok(copy)
}

/// Sets rows of a state `[W, dim]` to the start state `[dim]`.
pub(super) fn begin(state: &mut Tensor, start: &[f32], rows: &[i64]) {
    // SAFETY: a buffer of the time loop, which only this thread accesses.
    let state = unsafe { tensors::values_mut(state) };
    for &row in rows {
        let first = row as usize * start.len();
        state[first..first + start.len()].copy_from_slice(start);
    }
}

pub(super) fn rows_of(t: &Tensor, offset: usize, rows: usize) -> Result<Tensor, DeviceError> {
    Ok(t.f_narrow(0, offset as i64, rows as i64)?)
}

/// Cells of rows as their last token is read: later steps may still write to the row.
pub(super) struct Captured {
    pub(super) cells: Option<Tensor>, // [2, B, D]
}

impl Captured {
    pub(super) fn new(capture: bool, packings: &Packings, d: i64) -> Result<Self, DeviceError> {
        let rows = packings.of(0).sentences() as i64;
        let cells = if capture { Some(Tensor::f_empty([2, rows, d], FLOAT_ON_HOST)?) } else { None };
        Ok(Self { cells })
    }

    pub(super) fn keep(&self, packing: &Packing, t: usize, direction: i64, cell: &Tensor) -> Result<(), DeviceError> {
        let Some(cells) = &self.cells else { return Ok(()) };
        let ends = packing.ends(t);
        if !ends.is_empty() {
            let mut kept = rows_of(&cells.f_select(0, direction)?, ends.start, ends.len())?;
            kept.f_copy_(&rows_of(cell, ends.start, ends.len())?)?;
        }
        Ok(())
    }
}
