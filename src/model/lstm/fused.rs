//! The time loop with our own products and pass over the gates, direction by direction: float32 on CPU, no gradients.
//!
//! The gates of 16 cells are one panel of 64 columns, and the cells are updated as soon as the gates of a few rows are known: gates are
//! not written to memory, unless the input's part of several steps is computed at once. See `panels.rs`.

use std::ops::Range;

use tch::{Kind, Tensor};

use super::{Clips, LayerOutput, both_directions, last_state, name_in, steps_of, with_forget_bias};
use crate::{
    model::{
        DeviceError, kernels,
        packing::{Chunk, Packing, Packings},
        panels::{self, CELLS, COLUMNS, Gates, Rows},
        parameters::NamedTensors,
        start_state::LayerState,
        tensors::{self, Change, FLOAT_ON_HOST},
    },
    options::ModelOptions,
};

/// Steps of fewer packed rows share one product of their inputs: alone, each would read all weights of the input for a few rows.
const CHUNK_ROWS: usize = 32;

/// Both directions of one layer: `N` panels with the gates of 16 cells each, the last filled up with zeros.
#[derive(Debug)]
pub(crate) struct FusedLayer {
    w_x: Tensor,         // [2, N, in, 64]
    w_h: Tensor,         // [2, N, P, 64]
    bias: Tensor,        // [2, N, 64], +1 in the forget block
    w_p: Option<Tensor>, // [2, ceil(P / 64), D, 64]
    projection: usize,   // P
    residual: bool,
    dim: usize,
    clips: Clips,
}

impl FusedLayer {
    /// Derives one layer from the tensors of `RNN_0` and `RNN_1`.
    pub(crate) fn new(options: &ModelOptions, source: &dyn NamedTensors, layer: usize) -> Result<Self, DeviceError> {
        let lstm = &options.lstm;
        let (d, p) = (lstm.dim as i64, lstm.projection_dim as i64);
        let [bias] = both_directions(source, layer, "B", [4 * d], Kind::Float)?;
        let bias = with_forget_bias(&bias, d)?;
        let gate_bias = Tensor::f_empty([2, panels_of(lstm.dim) as i64, 1, COLUMNS as i64], FLOAT_ON_HOST)?;
        for direction in 0..2 {
            panels::cut_gates(&bias.f_narrow(0, direction, 1)?, &gate_bias.f_select(0, direction)?)?;
        }
        let w_p = match options.has_projection() {
            true => {
                let [w_p] = both_directions(source, layer, "W_P_0", [d], Kind::Float)?;
                Some(panels::cut(&w_p)?)
            }
            false => None,
        };
        Ok(Self {
            w_x: gates_of(source, layer, [0, p], lstm.dim)?,
            w_h: gates_of(source, layer, [p, p], lstm.dim)?,
            bias: gate_bias.f_squeeze_dim(2)?,
            w_p,
            projection: lstm.projection_dim,
            residual: layer > 0 && lstm.use_skip_connections,
            dim: lstm.dim,
            clips: Clips::new(options),
        })
    }

    /// As [`LstmLayer::map`](super::LstmLayer::map).
    pub(crate) fn map<E>(&self, change: &mut Change<'_, E>) -> Result<Self, E> {
        let (w_x, w_h, bias) = (change(&self.w_x)?, change(&self.w_h)?, change(&self.bias)?);
        Ok(Self { w_x, w_h, bias, w_p: self.w_p.as_ref().map(change).transpose()?, ..*self })
    }

    /// As [`LstmLayer::flop`](super::LstmLayer::flop).
    pub(crate) fn flop(&self) -> f64 {
        let (d, p) = (self.dim as f64, self.projection as f64);
        let projection = self.w_p.as_ref().map_or(0.0, |_| d * p);
        2.0 * 2.0 * (2.0 * p * 4.0 * d + projection)
    }

    /// As [`LstmLayer::forward`](super::LstmLayer::forward).
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        packings: &Packings,
        start: LayerState,
        capture: bool,
    ) -> Result<LayerOutput, DeviceError> {
        let (h, last_cells) = self.steps(x, packings, start, capture)?;
        let last = last_state(&h, last_cells, packings)?;
        let y = if self.residual { h.f_add(x)? } else { h };
        Ok(LayerOutput { y, last })
    }

    /// `x` `[2, R, in]` -> `h` `[2, R, P]`, and `c` `[2, B, D]` after each row's last token if requested.
    fn steps(
        &self,
        x: &Tensor,
        packings: &Packings,
        start: LayerState,
        capture: bool,
    ) -> Result<(Tensor, Option<Tensor>), DeviceError> {
        let (d, p) = (self.dim, self.projection);
        let chunks = packings.chunks(CHUNK_ROWS);
        let most = chunks.iter().filter(|chunk| !is_one_step(chunk)).map(|chunk| chunk.rows).max().unwrap_or(0);
        let mut gates = vec![0.0; most * panels_of(d) * COLUMNS];
        let mut activated = vec![0.0; packings.width() * d];
        let out = Tensor::f_empty([2, packings.packed_rows() as i64, p as i64], FLOAT_ON_HOST)?;
        let last = Captured::new(capture, packings, d as i64)?;
        for direction in 0..2 {
            let packing = packings.of(direction);
            let direction = direction as i64;
            let weights = self.of(direction)?;
            let (x, mut out) = (x.f_select(0, direction)?, out.f_select(0, direction)?);
            // SAFETY: the input is read only, and the output is new.
            let (x, out) = unsafe { (tensors::values::<f32>(&x), tensors::values_mut::<f32>(&mut out)) };
            let (mut h, mut cell) = (start.h.f_select(0, direction)?, start.c.f_select(0, direction)?);
            // Rows hold several sentences only where all start from one constant, which any row has.
            let constant = |state: &Tensor| tensors::download(&rows_of(state, 0, 1)?);
            let (first_h, first_cell) = (constant(&h)?, constant(&cell)?);
            for chunk in &chunks {
                let input = &x[chunk.offset * p..][..chunk.rows * p];
                if !is_one_step(chunk) {
                    weights.read_input(input, &mut gates);
                }
                for (t, step) in steps_of(packings, chunk) {
                    begin(&mut h, &first_h, packing.begins(t));
                    begin(&mut cell, &first_cell, packing.begins(t));
                    // SAFETY: states of this call, which only this thread accesses.
                    let (h, c) = unsafe { (tensors::values_mut(&mut h), tensors::values_mut(&mut cell)) };
                    let (h, c) = (&mut h[..step.width * p], &mut c[..step.width * d]);
                    let m = &mut activated[..step.width * d];
                    match is_one_step(chunk) {
                        true => weights.step_with_input(input, h, c, m),
                        false => weights.step(&gates, chunk.rows, step.offset - chunk.offset, h, c, m),
                    }
                    weights.project(m, h);
                    out[step.offset * p..][..step.width * p].copy_from_slice(h);
                    last.keep(packing, t, direction, &cell)?;
                }
            }
        }
        Ok((out, last.cells))
    }

    fn of(&self, direction: i64) -> Result<Direction, DeviceError> {
        let part = |tensor: &Tensor| Ok::<_, DeviceError>(tensor.f_select(0, direction)?);
        let bound = |clip: Option<f64>| clip.map_or(f32::INFINITY, |clip| clip as f32);
        Ok(Direction {
            w_x: part(&self.w_x)?,
            w_h: part(&self.w_h)?,
            bias: part(&self.bias)?,
            w_p: self.w_p.as_ref().map(part).transpose()?,
            projection: self.projection,
            dim: self.dim,
            cell_clip: bound(self.clips.cell),
            clip: bound(self.clips.projection),
        })
    }
}

/// One direction of a layer.
struct Direction {
    w_x: Tensor,         // [N, in, 64]
    w_h: Tensor,         // [N, P, 64]
    bias: Tensor,        // [N, 64]
    w_p: Option<Tensor>, // [ceil(P / 64), D, 64]
    projection: usize,   // P
    dim: usize,
    cell_clip: f32,
    clip: f32,
}

impl Direction {
    /// Cells of each panel, its bias, and its weights for the input and for the previous output.
    fn panels(&self) -> impl Iterator<Item = (Range<usize>, &[f32], &[f32], &[f32])> {
        // SAFETY: nothing writes to the weights while a model computes.
        let (bias, w_x, w_h) =
            unsafe { (tensors::values(&self.bias), tensors::values(&self.w_x), tensors::values(&self.w_h)) };
        let one = self.projection * COLUMNS;
        let weights = w_x.chunks_exact(one).zip(w_h.chunks_exact(one));
        let cells = (0..self.dim).step_by(CELLS).map(|first| first..(first + CELLS).min(self.dim));
        cells.zip(bias.chunks_exact(COLUMNS)).zip(weights).map(|((cells, bias), (w_x, w_h))| (cells, bias, w_x, w_h))
    }

    /// The part of the gates that does not depend on the previous step: `[r, in] -> [N, r, 64]`
    fn read_input(&self, input: &[f32], gates: &mut [f32]) {
        let input = Rows::of(input, self.projection);
        for ((_, bias, w_x, _), gates) in self.panels().zip(gates.chunks_exact_mut(input.count() * COLUMNS)) {
            panels::multiply(input, w_x, Some(bias), gates);
        }
    }

    /// One step after [`Direction::read_input`] of `rows` rows, of which the step's begin at `offset`: `c` `[w, D]` is updated, and `m`
    /// `[w, D]` becomes `sigmoid(o) * tanh(c)`.
    fn step(&self, gates: &[f32], rows: usize, offset: usize, h: &[f32], c: &mut [f32], m: &mut [f32]) {
        let h = Rows::of(h, self.projection);
        for ((cells, _, _, w_h), gates) in self.panels().zip(gates.chunks_exact(rows * COLUMNS)) {
            let start = &gates[offset * COLUMNS..][..h.count() * COLUMNS];
            panels::lstm_step(Gates { start, products: &[(h, w_h)] }, c, m, self.dim, cells, self.cell_clip);
        }
    }

    /// The same from the input of the step.
    fn step_with_input(&self, input: &[f32], h: &[f32], c: &mut [f32], m: &mut [f32]) {
        let (input, h) = (Rows::of(input, self.projection), Rows::of(h, self.projection));
        for (cells, bias, w_x, w_h) in self.panels() {
            let gates = Gates { start: bias, products: &[(input, w_x), (h, w_h)] };
            panels::lstm_step(gates, c, m, self.dim, cells, self.cell_clip);
        }
    }

    /// `h = clip(m W_P)`: `[w, D] -> [w, P]`
    fn project(&self, m: &[f32], h: &mut [f32]) {
        match &self.w_p {
            // SAFETY: nothing writes to the weights while a model computes.
            Some(w_p) => panels::multiply(Rows::of(m, self.dim), unsafe { tensors::values(w_p) }, None, h),
            None => h.copy_from_slice(m),
        }
        kernels::clip(h, self.clip);
    }
}

/// Whether the chunk is a single step, whose gates need not be written to memory.
fn is_one_step(chunk: &Chunk) -> bool {
    chunk.end - chunk.first == 1
}

/// Number of panels of a layer with `d` cells.
fn panels_of(d: usize) -> usize {
    d.div_ceil(CELLS)
}

/// Some rows of `W_0` `[in + P, 4D]` in both directions as panels: `[2, N, rows, 64]`. Weights are copied once.
fn gates_of(source: &dyn NamedTensors, layer: usize, [first, rows]: [i64; 2], d: usize) -> Result<Tensor, DeviceError> {
    let result = Tensor::f_empty([2, panels_of(d) as i64, rows, COLUMNS as i64], FLOAT_ON_HOST)?;
    for direction in 0..2 {
        let panels = result.f_select(0, direction as i64)?;
        let mut copy = |weights: &Tensor| panels::cut_gates(&weights.f_narrow(0, first, rows)?, &panels);
        // SAFETY: the weights are copied.
        unsafe { source.read(&name_in(direction, layer, "W_0"), &mut copy)? };
    }
    Ok(result)
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

#[cfg(test)]
mod tests {
    use crate::{
        model::{BiLm, DeviceName, Precision},
        tiny,
    };

    /// Several panels; steps of more rows than a chunk has, of fewer, and of one; rows with several sentences. Expected: the bits of each
    /// sentence alone, and the numbers of libtorch's operations.
    #[test]
    fn a_sentence_has_the_same_bits_in_steps_of_any_width() {
        let mut options = tiny::options();
        (options.lstm.dim, options.lstm.projection_dim) = (256, 32);
        let weights = tiny::weights(&options);
        let model = BiLm::new(&options, &weights, DeviceName::Cpu, Precision::F32).unwrap();
        let words = ["it", "rained", "so", "we", "stayed", "at", "home"];
        let table = model.token_vectors(&words).unwrap();
        let sentence =
            |s: usize| (0..1 + s * s % 5).map(|t| ((s * 3 + t * t) % words.len()) as i64).collect::<Vec<_>>();
        let sentences: Vec<Vec<i64>> = (0..700).map(sentence).collect();
        let places: Vec<usize> = (0..sentences.len()).collect();
        let start = model.zero_state().unwrap();
        let vectors = |model: &BiLm, batch: &[Vec<i64>], in_row: usize| -> Vec<Vec<f32>> {
            let rows = places[..batch.len()].chunks(in_row).map(<[usize]>::to_vec).collect();
            let found = model.run_in_rows(&table, batch, rows, &start).unwrap();
            let layer = found.combine(&[(found.n_layers() - 1, 1.0)]).unwrap();
            let of = |(s, sentence): (usize, &Vec<i64>)| {
                let mut all = vec![0.0; sentence.len() * layer.width()];
                all.chunks_mut(layer.width()).enumerate().for_each(|(i, out)| layer.token(&found, s, i, out));
                all
            };
            batch.iter().enumerate().map(of).collect()
        };
        let together = vectors(&model, &sentences, 2);
        for size in [1, 3, 20, 300] {
            let parts: Vec<Vec<f32>> =
                sentences.chunks(size).take(40).flat_map(|part| vectors(&model, part, 1)).collect();
            assert!(parts.iter().zip(&together).all(|(a, b)| a == b), "batches of {size}");
        }
        let torch = BiLm::with_torch_operations(&options, &weights, DeviceName::Cpu, Precision::F32).unwrap();
        let expected = vectors(&torch, &sentences, 1);
        for (found, expected) in together.iter().flatten().zip(expected.iter().flatten()) {
            assert!((found - expected).abs() <= 2e-6, "{found} {expected}");
        }
    }
}
