//! The two LSTM stacks with projection and clips (bilm-tf `bilm/model.py`, AllenNLP `elmo_lstm.py`).
//!
//! Per direction and layer, with `x` the layer's input and `h` the projected output of the step before:
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
//! The half `x W_x` knows no recurrence, so it is one product over many steps (a [`Chunk`]); only
//! `h W_h` is left in the time loop.
//!
//! On a CPU in float32 the two directions run one after the other inside one thread: the engine has one thread per
//! core, each with its own batch, so all cores are busy and running the directions at once would gain nothing. On a
//! GPU, and wherever libtorch's operations run, every product of a step is batched over both directions: half as many
//! launches, each of twice the work.

use tch::{Device, IndexOp, Kind, Tensor};

use super::{
    DeviceError,
    kernels::{self, Clips},
    packing::{Chunk, Packing, Step},
    tensors,
};
use crate::{options::ModelOptions, weights::Weights};

/// Packed rows of one input product on CPU: larger outputs leave the cache before the time loop reads them.
const CHUNK_ROWS_HOST: usize = 256;
/// On a GPU, large products are the fast ones; this bounds the gates to some GiB.
const CHUNK_ROWS_DEVICE: usize = 8192;

/// `h` and `c` of one layer for both directions: `[2, W, P]` and `[2, W, D]`, or `W = 1` for a constant.
#[derive(Debug)]
pub(crate) struct LayerState {
    pub(crate) h: Tensor,
    pub(crate) c: Tensor,
}

impl LayerState {
    pub(crate) fn share(&self) -> Self {
        Self { h: self.h.shallow_clone(), c: self.c.shallow_clone() }
    }

    /// Rows `0..width`, repeated when this is a constant, filled up with zeros when rows are missing.
    fn rows(&self, width: usize) -> Result<Self, DeviceError> {
        let fit = |t: &Tensor| -> Result<Tensor, DeviceError> {
            let [directions, rows, dim] = t.size3()?.into();
            let width = width as i64;
            if rows == 1 {
                return owned(&t.f_expand([directions, width, dim], false)?);
            }
            if rows >= width {
                return owned(&t.f_narrow(1, 0, width)?);
            }
            let missing = Tensor::f_zeros([directions, width - rows, dim], (t.kind(), t.device()))?;
            Ok(Tensor::f_cat(&[t, &missing], 1)?)
        };
        Ok(Self { h: fit(&self.h)?, c: fit(&self.c)? })
    }
}

/// Both directions of one layer.
#[derive(Debug)]
pub(crate) struct LstmLayer {
    w_x: Tensor,         // [2, in, 4D]
    w_h: Tensor,         // [2, P, 4D]
    bias: Tensor,        // [2, 1, 4D], +1 in the forget block
    w_p: Option<Tensor>, // [2, D, P], at least `tensors::MIN_COLUMNS` wide
    projection: i64,     // P
    residual: bool,
    dim: usize,
    clips: Clips,
    fused: bool,
}

/// What a layer gives back: `[2, R, P]` in packed rows, and the state after each row's last token if asked for.
pub(crate) struct LayerOutput {
    pub(crate) y: Tensor,
    pub(crate) last: Option<LayerState>,
}

impl LstmLayer {
    pub(crate) fn new(
        options: &ModelOptions,
        weights: &Weights,
        layer: usize,
        kind: Kind,
        device: Device,
        fused: bool,
    ) -> Result<Self, DeviceError> {
        let lstm = &options.lstm;
        let (d, p) = (lstm.dim as i64, lstm.projection_dim as i64);
        let both = |what: &str| -> Result<Tensor, DeviceError> {
            let load = |r: usize| {
                let name = format!("RNN_{r}/RNN/MultiRNNCell/Cell{layer}/LSTMCell/{what}");
                tensors::weight(tensors::require(weights, &name)?, Kind::Float, Device::Cpu)
            };
            Ok(Tensor::f_stack(&[load(0)?, load(1)?], 0)?)
        };
        let place =
            |t: Tensor| -> Result<Tensor, DeviceError> { Ok(t.f_contiguous()?.f_to_device(device)?.f_to_kind(kind)?) };
        let w_0 = both("W_0")?; // [2, P + P, 4D]
        let mut bias = both("B")?.f_unsqueeze(1)?;
        // TensorFlow adds 1 to the forget gate while running; it is not in the file.
        let _ = bias.f_narrow(2, 2 * d, d)?.f_add_scalar_(1.0)?;
        bias = place(bias)?;
        let w_p =
            if options.has_projection() { Some(tensors::with_enough_columns(place(both("W_P_0")?)?)?) } else { None };
        let clip = |c: Option<f64>| c.map_or(f32::INFINITY, |c| c as f32);
        Ok(Self {
            w_x: place(w_0.f_narrow(1, 0, p)?)?,
            w_h: place(w_0.f_narrow(1, p, p)?)?,
            bias,
            w_p,
            projection: p,
            residual: layer > 0 && lstm.use_skip_connections,
            dim: lstm.dim,
            // Without its own projection bilm-tf builds a plain cell, which has no projection to clip.
            clips: Clips {
                cell: clip(lstm.cell_clip),
                projection: clip(lstm.proj_clip.filter(|_| options.has_projection())),
            },
            fused,
        })
    }

    pub(crate) fn share(&self) -> Self {
        Self {
            w_x: self.w_x.shallow_clone(),
            w_h: self.w_h.shallow_clone(),
            bias: self.bias.shallow_clone(),
            w_p: self.w_p.as_ref().map(Tensor::shallow_clone),
            ..*self
        }
    }

    /// Runs both directions over a packed batch. `x` `[2, R, in]`.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        packing: &Packing,
        start: &LayerState,
        capture: bool,
    ) -> Result<LayerOutput, DeviceError> {
        let (h, last_cells) = if self.fused {
            self.steps_fused(x, packing, start, capture)?
        } else {
            self.steps_in_torch(x, packing, start, capture)?
        };
        let last = match last_cells {
            None => None,
            Some(c) => Some(LayerState { h: last_outputs(&h, packing)?, c }),
        };
        let y = if self.residual { h.f_add(x)? } else { h };
        Ok(LayerOutput { y, last })
    }

    /// Time loop with our own pass over the gates: float32 on CPU, no gradients.
    fn steps_fused(
        &self,
        x: &Tensor,
        packing: &Packing,
        start: &LayerState,
        capture: bool,
    ) -> Result<(Tensor, Option<Tensor>), DeviceError> {
        let state = start.rows(packing.width())?;
        let options = (Kind::Float, Device::Cpu);
        let d = self.dim as i64;
        let chunks = packing.chunks(CHUNK_ROWS_HOST);
        let p = state.h.size()[2];
        let out = Tensor::f_empty([2, packing.packed_rows() as i64, p], options)?;
        let most = chunks.iter().map(|c| c.rows).max().unwrap_or(0) as i64;
        let gates = Tensor::f_empty([most, 4 * d], options)?;
        let activated = Tensor::f_empty([packing.width() as i64, d], options)?;
        let last = Captured::new(capture, packing, d)?;
        for direction in 0..2 {
            let (x, out) = (x.f_select(0, direction)?, out.f_select(0, direction)?);
            let (w_x, w_h) = (self.w_x.f_select(0, direction)?, self.w_h.f_select(0, direction)?);
            let bias = self.bias.f_select(0, direction)?;
            let (start_h, start_c) = (start.h.f_select(0, direction)?, start.c.f_select(0, direction)?);
            let mut cell = state.c.f_select(0, direction)?;
            let mut h = state.h.f_select(0, direction)?;
            for chunk in &chunks {
                let input = rows_of(&x, chunk.offset, chunk.rows)?;
                // [r, in] x [in, 4D]: the hoisted half of the gates
                let _ = bias.f_addmm_out(&rows_of(&gates, 0, chunk.rows)?, &input, &w_x)?;
                for (t, step) in steps_of(packing, chunk) {
                    let mut z = rows_of(&gates, step.offset - chunk.offset, step.width)?;
                    h = rows_of(&h, 0, step.width)?;
                    if !packing.begins(t).is_empty() {
                        h = owned(&h)?; // it is a part of the output
                        begin(&mut h, &start_h, packing.begins(t));
                        begin(&mut cell, &start_c, packing.begins(t));
                    }
                    let _ = z.f_addmm_(&h, &w_h)?;
                    let mut c = rows_of(&cell, 0, step.width)?;
                    let mut m = rows_of(&activated, 0, step.width)?;
                    kernels::lstm_cell(
                        tensors::values(&z),
                        tensors::values_mut(&mut c),
                        tensors::values_mut(&mut m),
                        self.dim,
                        self.clips.cell,
                    );
                    last.keep(packing, t, direction, &cell)?;
                    h = rows_of(&out, step.offset, step.width)?;
                    self.project_into(&mut h, &m, direction)?;
                }
            }
        }
        Ok((out, last.cells))
    }

    /// `h = clip(m W_P)` into rows of the output. `[w, D] -> [w, P]`
    fn project_into(&self, h: &mut Tensor, m: &Tensor, direction: i64) -> Result<(), DeviceError> {
        match &self.w_p {
            Some(w_p) if self.projection < tensors::MIN_COLUMNS => {
                let product = m.f_mm(&w_p.f_select(0, direction)?)?;
                h.f_copy_(&product.f_narrow(1, 0, self.projection)?)?;
            }
            Some(w_p) => {
                let _ = m.f_mm_out(h, &w_p.f_select(0, direction)?)?;
            }
            None => h.f_copy_(m)?,
        }
        if self.clips.projection.is_finite() {
            let clip = f64::from(self.clips.projection);
            let _ = h.f_clamp_(-clip, clip)?;
        }
        Ok(())
    }

    /// Time loop in libtorch's operations, both directions in one product: GPUs, other precisions, and
    /// gradients (nothing is changed in place).
    fn steps_in_torch(
        &self,
        x: &Tensor,
        packing: &Packing,
        start: &LayerState,
        capture: bool,
    ) -> Result<(Tensor, Option<Tensor>), DeviceError> {
        let LayerState { mut h, mut c } = start.rows(packing.width())?;
        let rows = if x.device() == Device::Cpu { CHUNK_ROWS_HOST } else { CHUNK_ROWS_DEVICE };
        let mut outputs = Vec::with_capacity(packing.steps().len());
        let mut finished = Vec::new();
        for chunk in packing.chunks(rows) {
            let input = x.f_narrow(1, chunk.offset as i64, chunk.rows as i64)?;
            let hoisted = self.bias.f_baddbmm(&input, &self.w_x, 1.0, 1.0)?; // [2, r, 4D]
            for (t, step) in steps_of(packing, &chunk) {
                let width = step.width as i64;
                (h, c) = (h.f_narrow(1, 0, width)?, c.f_narrow(1, 0, width)?);
                if !packing.begins(t).is_empty() {
                    let rows = tensors::index(packing.begins(t), x.device())?;
                    let begin = |state: &Tensor, start: &Tensor| -> Result<Tensor, DeviceError> {
                        let [directions, _, dim] = start.size3()?.into();
                        let start = start.f_expand([directions, packing.begins(t).len() as i64, dim], false)?;
                        Ok(state.f_index_copy(1, &rows, &start)?)
                    };
                    (h, c) = (begin(&h, &start.h)?, begin(&c, &start.c)?);
                }
                let z = hoisted
                    .f_narrow(1, (step.offset - chunk.offset) as i64, width)?
                    .f_baddbmm(&h, &self.w_h, 1.0, 1.0)?;
                (h, c) = self.cell(&z, &c)?;
                if capture {
                    let next = next_live(packing, t) as i64;
                    finished.push(c.f_narrow(1, next, step.live as i64 - next)?);
                }
                outputs.push(h.shallow_clone());
            }
        }
        // Rows leave from the bottom, the longest last: turned round they are in row order.
        finished.reverse();
        let cells = if capture { Some(Tensor::f_cat(&finished, 1)?) } else { None };
        Ok((Tensor::f_cat(&outputs, 1)?, cells))
    }

    /// One step from its gates: `[2, w, 4D], [2, w, D] -> h [2, w, P], c [2, w, D]`
    fn cell(&self, z: &Tensor, c: &Tensor) -> Result<(Tensor, Tensor), DeviceError> {
        let gate = |k: i64| z.f_narrow(2, k * self.dim as i64, self.dim as i64);
        let candidate = gate(0)?.f_sigmoid()?.f_mul(&gate(1)?.f_tanh()?)?;
        let mut c = gate(2)?.f_sigmoid()?.f_mul(c)?.f_add(&candidate)?;
        if self.clips.cell.is_finite() {
            let clip = f64::from(self.clips.cell);
            c = c.f_clamp(-clip, clip)?;
        }
        let mut h = gate(3)?.f_sigmoid()?.f_mul(&c.f_tanh()?)?;
        if let Some(w_p) = &self.w_p {
            h = tensors::first_columns(h.f_bmm(w_p)?, self.projection)?;
        }
        if self.clips.projection.is_finite() {
            let clip = f64::from(self.clips.projection);
            h = h.f_clamp(-clip, clip)?;
        }
        Ok((h, c))
    }

    /// Floating point operations of the products for one token, both directions.
    pub(crate) fn flop(&self) -> f64 {
        let numel = |t: &Tensor| t.numel() as f64;
        let projection = self.w_p.as_ref().map_or(0.0, |_| 2.0 * (self.dim as f64) * self.projection as f64);
        2.0 * (numel(&self.w_x) + numel(&self.w_h) + projection)
    }
}

/// A contiguous copy: the time loop writes to it.
fn owned(t: &Tensor) -> Result<Tensor, DeviceError> {
    let mut copy = Tensor::f_empty(t.size(), (t.kind(), t.device()))?;
    copy.f_copy_(t)?;
    Ok(copy)
}

/// Sets rows of a state `[W, dim]` on the host to the start state `[1, dim]`.
fn begin(state: &mut Tensor, start: &Tensor, rows: &[i64]) {
    let start = tensors::values(start);
    let state = tensors::values_mut(state);
    for &row in rows {
        let first = row as usize * start.len();
        state[first..first + start.len()].copy_from_slice(start);
    }
}

fn rows_of(t: &Tensor, offset: usize, rows: usize) -> Result<Tensor, DeviceError> {
    Ok(t.f_narrow(0, offset as i64, rows as i64)?)
}

fn steps_of<'p>(packing: &'p Packing, chunk: &Chunk) -> impl Iterator<Item = (usize, &'p Step)> + use<'p> {
    (chunk.first..chunk.end).map(|t| (t, &packing.steps()[t]))
}

/// Rows that go on after step `t`.
fn next_live(packing: &Packing, t: usize) -> usize {
    packing.steps().get(t + 1).map_or(0, |s| s.live)
}

/// `h` of each row after its last token: `[2, B, P]`. Forward and backward steps have the same rows.
fn last_outputs(h: &Tensor, packing: &Packing) -> Result<Tensor, DeviceError> {
    let places: Vec<i64> = (0..packing.sentences())
        .map(|row| {
            let sentence = packing.sentence_at(row);
            packing.backward(sentence, 0) as i64
        })
        .collect();
    Ok(h.f_index_select(1, &tensors::index(&places, h.device())?)?)
}

/// Cells of rows as they leave the fused loop, which goes on writing to rows that only fill a step up.
struct Captured {
    cells: Option<Tensor>, // [2, B, D]
}

impl Captured {
    fn new(wanted: bool, packing: &Packing, d: i64) -> Result<Self, DeviceError> {
        let rows = packing.sentences() as i64;
        let cells = if wanted { Some(Tensor::f_empty([2, rows, d], (Kind::Float, Device::Cpu))?) } else { None };
        Ok(Self { cells })
    }

    fn keep(&self, packing: &Packing, t: usize, direction: i64, cell: &Tensor) -> Result<(), DeviceError> {
        let Some(cells) = &self.cells else { return Ok(()) };
        let (next, live) = (next_live(packing, t), packing.steps()[t].live);
        if next < live {
            let mut kept = cells.i(direction).f_narrow(0, next as i64, (live - next) as i64)?;
            kept.f_copy_(&rows_of(cell, next, live - next)?)?;
        }
        Ok(())
    }
}
