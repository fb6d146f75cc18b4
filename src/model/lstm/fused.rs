//! The time loop with our own products and pass over the gates, direction by direction: on CPU, in float32 or with products of 8-bit
//! integers; no gradients.
//!
//! The gates of 16 cells are one panel of 64 columns, and the cells are updated as soon as the gates of a few rows are known: gates are
//! not written to memory, unless several tokens share an input product or several steps compute theirs at once (`inputs.rs`). See
//! `products.rs`. Cell states are float32 always.

use std::ops::Range;

use tch::{Kind, Tensor};

use super::{Clips, LayerOutput, both_directions, inputs::Inputs, last_state, name_in, with_forget_bias};
use crate::{
    model::{
        DeviceError, Precision,
        codes::Buffer,
        kernels,
        packing::{Packing, Packings},
        panels::{self, CELLS, COLUMNS},
        parameters::NamedTensors,
        products::{self, Gates, Left, Place, Start, Weights},
        start_state::LayerState,
        tensors::{self, Change, FLOAT_ON_HOST},
    },
    options::ModelOptions,
};

/// With fewer 8-bit integers per input, sharing a product is not faster: reading it from memory takes as long as computing it.
pub(super) const FEWEST_CODES: usize = 256;

/// Both directions of one layer: `N` panels with the gates of 16 cells each, the last filled up with zeros.
#[derive(Debug)]
pub(crate) struct FusedLayer {
    w_x: Weights,         // 2 x [in, 4D]
    w_h: Weights,         // 2 x [P, 4D]
    bias: Tensor,         // [2, N, 64], +1 in the forget block
    w_p: Option<Weights>, // 2 x [D, P]
    projection: usize,    // P
    residual: bool,
    dim: usize,
    clips: Clips,
    /// Tokens with the same input share its product.
    shares: bool,
}

impl FusedLayer {
    /// Derives one layer from the tensors of `RNN_0` and `RNN_1`.
    pub(crate) fn new(
        options: &ModelOptions,
        source: &dyn NamedTensors,
        layer: usize,
        precision: Precision,
    ) -> Result<Self, DeviceError> {
        let lstm = &options.lstm;
        let d = lstm.dim as i64;
        let [bias] = both_directions(source, layer, "B", [4 * d], Kind::Float)?;
        let bias = with_forget_bias(&bias, d)?;
        let gate_bias = Tensor::f_empty([2, panels_of(lstm.dim) as i64, 1, COLUMNS as i64], FLOAT_ON_HOST)?;
        for direction in 0..2 {
            panels::cut_gates(&bias.f_narrow(0, direction, 1)?, &gate_bias.f_select(0, direction)?)?;
        }
        let w_p = match options.has_projection() {
            true => {
                let [w_p] = both_directions(source, layer, "W_P_0", [d], Kind::Float)?;
                Some(Weights::new(&w_p, precision)?)
            }
            false => None,
        };
        let [w_x, w_h] = gates_of(options, source, layer, precision)?;
        Ok(Self {
            w_x,
            w_h,
            bias: gate_bias.f_squeeze_dim(2)?,
            w_p,
            projection: lstm.projection_dim,
            residual: layer > 0 && lstm.use_skip_connections,
            dim: lstm.dim,
            clips: Clips::new(options),
            shares: precision != Precision::Int8 || lstm.projection_dim >= FEWEST_CODES,
        })
    }

    /// As [`LstmLayer::map`](super::LstmLayer::map).
    pub(crate) fn map<E>(&self, change: &mut Change<'_, E>) -> Result<Self, E> {
        let (w_x, w_h, bias) = (self.w_x.map(change)?, self.w_h.map(change)?, change(&self.bias)?);
        let w_p = self.w_p.as_ref().map(|w_p| w_p.map(change)).transpose()?;
        Ok(Self { w_x, w_h, bias, w_p, ..*self })
    }

    /// As [`LstmLayer::flop`](super::LstmLayer::flop).
    pub(crate) fn flop(&self) -> f64 {
        let (d, p) = (self.dim as f64, self.projection as f64);
        let projection = self.w_p.as_ref().map_or(0.0, |_| d * p);
        2.0 * 2.0 * (2.0 * p * 4.0 * d + projection)
    }

    /// As [`LstmLayer::forward`](super::LstmLayer::forward). Packed rows of a direction that have the same number in `words`, if given, have
    /// the same input.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        words: Option<&[Vec<i64>; 2]>,
        packings: &Packings,
        start: LayerState,
        capture: bool,
    ) -> Result<LayerOutput, DeviceError> {
        let words = words.filter(|_| self.shares);
        let (h, last_cells, saved) = self.steps(x, words, packings, start, capture)?;
        let last = last_state(&h, last_cells, packings)?;
        let y = if self.residual { h.f_add(x)? } else { h };
        let saved_flop = saved as f64 * 2.0 * (self.projection * 4 * self.dim) as f64;
        Ok(LayerOutput { y, last, saved_flop })
    }

    /// `x` `[2, R, in]` -> `h` `[2, R, P]`; `c` `[2, B, D]` after each row's last token if requested; and the number of input products that
    /// were not computed.
    fn steps(
        &self,
        x: &Tensor,
        words: Option<&[Vec<i64>; 2]>,
        packings: &Packings,
        start: LayerState,
        capture: bool,
    ) -> Result<(Tensor, Option<Tensor>, usize), DeviceError> {
        let (d, p) = (self.dim, self.projection);
        let columns = panels_of(d) * COLUMNS;
        let (mut of_shared, mut of_own) = (Vec::new(), Vec::new());
        let mut saved = 0;
        let mut activated = vec![0.0; packings.width() * d];
        let out = Tensor::f_empty([2, packings.packed_rows() as i64, p as i64], FLOAT_ON_HOST)?;
        let last = Captured::new(capture, packings, d as i64)?;
        let [mut of_input, mut of_output, mut of_cells] = [(); 3].map(|()| Buffer::default());
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
            let words = words.map(|words| words[direction as usize].as_slice());
            let inputs = Inputs::new(x, p, words, packings.steps(), columns);
            saved += inputs.saved();
            let of_shared = resized(&mut of_shared, inputs.shared_count() * columns);
            weights.read_input(weights.w_x.left(inputs.shared(), p, &mut of_input), of_shared);
            let (of_shared, _) = of_shared.as_chunks();
            for part in inputs.parts() {
                let input = weights.w_x.left(inputs.own(part), p, &mut of_input);
                let one_step = part.steps.len() == 1;
                let written = if !one_step {
                    columns
                } else if of_shared.is_empty() {
                    0
                } else {
                    COLUMNS
                };
                let of_own = resized(&mut of_own, input.count() * written);
                if !one_step {
                    weights.read_input(input, of_own);
                }
                for t in part.steps.clone() {
                    let step = &packings.steps()[t];
                    begin(&mut h, &first_h, packing.begins(t));
                    begin(&mut cell, &first_cell, packing.begins(t));
                    // SAFETY: states of this call, which only this thread accesses.
                    let (h, c) = unsafe { (tensors::values_mut(&mut h), tensors::values_mut(&mut cell)) };
                    let (h, c) = (&mut h[..step.width * p], &mut c[..step.width * d]);
                    let m = &mut activated[..step.width * d];
                    let previous = weights.w_h.left(h, p, &mut of_output);
                    let places = inputs.places(step);
                    match one_step {
                        true if of_shared.is_empty() => weights.step_with_input(input, previous, c, m),
                        true => weights.step_with_shared(of_shared, (input, &mut *of_own), places, previous, c, m),
                        false => weights.step([of_shared, of_own.as_chunks().0], places, previous, c, m),
                    }
                    weights.project(m, h, &mut of_cells);
                    out[step.offset * p..][..step.width * p].copy_from_slice(h);
                    last.keep(packing, t, direction, &cell)?;
                }
            }
        }
        Ok((out, last.cells, saved))
    }

    fn of(&self, direction: i64) -> Result<Direction, DeviceError> {
        let bound = |clip: Option<f64>| clip.map_or(f32::INFINITY, |clip| clip as f32);
        Ok(Direction {
            w_x: self.w_x.of(direction)?,
            w_h: self.w_h.of(direction)?,
            bias: self.bias.f_select(0, direction)?,
            w_p: self.w_p.as_ref().map(|w_p| w_p.of(direction)).transpose()?,
            dim: self.dim,
            cell_clip: bound(self.clips.cell),
            clip: bound(self.clips.projection),
        })
    }
}

/// One direction of a layer.
struct Direction {
    w_x: Weights,         // [in, 4D]
    w_h: Weights,         // [P, 4D]
    bias: Tensor,         // [N, 64]
    w_p: Option<Weights>, // [D, P]
    dim: usize,
    cell_clip: f32,
    clip: f32,
}

impl Direction {
    /// The cells of each panel, and its bias.
    fn panels(&self) -> impl Iterator<Item = (Range<usize>, &[f32; COLUMNS])> {
        // SAFETY: nothing writes to the weights while a model computes.
        let bias = unsafe { tensors::values(&self.bias) };
        let cells = (0..self.dim).step_by(CELLS).map(|first| first..(first + CELLS).min(self.dim));
        cells.zip(bias.as_chunks().0)
    }

    /// The part of the gates that does not depend on the previous step: `[r, in] -> [N, r, 64]`
    fn read_input(&self, input: Left<'_>, gates: &mut [f32]) {
        let w_x = self.w_x.panels();
        let height = input.count() * COLUMNS;
        for (n, (_, bias)) in self.panels().enumerate() {
            products::multiply(input, w_x.one(n), Some(bias), &mut gates[n * height..][..height]);
        }
    }

    /// One step after [`Direction::read_input`] of inputs that rows share and of others, `[N, r, 64]` each: `c` `[w, D]` is updated, and `m`
    /// `[w, D]` becomes `sigmoid(o) * tanh(c)`.
    fn step(
        &self,
        of_input: [&[[f32; COLUMNS]]; 2],
        places: &[Place],
        previous: Left<'_>,
        c: &mut [f32],
        m: &mut [f32],
    ) {
        let w_h = self.w_h.panels();
        for (n, (cells, _)) in self.panels().enumerate() {
            let gates = of_input.map(|gates| of_panel(gates, n, panels_of(self.dim)));
            let start = Start::Input { gates, places };
            let gates = Gates { start, products: &[(previous, w_h.one(n))] };
            products::lstm_step(gates, c, m, self.dim, cells, self.cell_clip);
        }
    }

    /// The same from the inputs of the step that no other row shares, with memory for their gates in one panel: `[r, in]`, `[r, 64]`.
    fn step_with_shared(
        &self,
        shared: &[[f32; COLUMNS]],
        (input, own_gates): (Left<'_>, &mut [f32]),
        places: &[Place],
        previous: Left<'_>,
        c: &mut [f32],
        m: &mut [f32],
    ) {
        let (w_x, w_h) = (self.w_x.panels(), self.w_h.panels());
        for (n, (cells, bias)) in self.panels().enumerate() {
            products::multiply(input, w_x.one(n), Some(bias), own_gates);
            let gates = [of_panel(shared, n, panels_of(self.dim)), own_gates.as_chunks().0];
            let start = Start::Input { gates, places };
            let gates = Gates { start, products: &[(previous, w_h.one(n))] };
            products::lstm_step(gates, c, m, self.dim, cells, self.cell_clip);
        }
    }

    /// The same where no row shares its input: the gates stay in registers.
    fn step_with_input(&self, input: Left<'_>, previous: Left<'_>, c: &mut [f32], m: &mut [f32]) {
        let (w_x, w_h) = (self.w_x.panels(), self.w_h.panels());
        for (n, (cells, bias)) in self.panels().enumerate() {
            let gates = Gates { start: Start::Bias(bias), products: &[(input, w_x.one(n)), (previous, w_h.one(n))] };
            products::lstm_step(gates, c, m, self.dim, cells, self.cell_clip);
        }
    }

    /// `h = clip(m W_P)`: `[w, D] -> [w, P]`
    fn project(&self, m: &[f32], h: &mut [f32], buffer: &mut Buffer) {
        match &self.w_p {
            Some(w_p) => products::multiply(w_p.left(m, self.dim, buffer), w_p.panels(), None, h),
            None => h.copy_from_slice(m),
        }
        kernels::clip(h, self.clip);
    }
}

/// The first `len` numbers of a buffer, which grows if it is shorter.
fn resized(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    buffer.resize(buffer.len().max(len), 0.0);
    &mut buffer[..len]
}

/// The rows of panel `n` of `count`.
fn of_panel<T>(rows: &[T], n: usize, count: usize) -> &[T] {
    let height = rows.len() / count;
    &rows[n * height..][..height]
}

/// Number of panels of a layer with `d` cells.
fn panels_of(d: usize) -> usize {
    d.div_ceil(CELLS)
}

/// The rows of `W_0` `[in + P, 4D]` for the input and those for the previous output. Weights are copied once.
fn gates_of(
    options: &ModelOptions,
    source: &dyn NamedTensors,
    layer: usize,
    precision: Precision,
) -> Result<[Weights; 2], DeviceError> {
    let empty = || Weights::empty_gates(options.lstm.projection_dim, options.lstm.dim, precision);
    let [w_x, w_h] = [empty()?, empty()?];
    for direction in 0..2 {
        let mut copy = |weights: &Tensor| Weights::fill_gates([&w_x, &w_h], direction as i64, weights);
        // SAFETY: the weights are copied.
        unsafe { source.read(&name_in(direction, layer, "W_0"), &mut copy)? };
    }
    Ok([w_x, w_h])
}

/// Sets rows of a state `[W, dim]` to the start state `[dim]`.
fn begin(state: &mut Tensor, start: &[f32], rows: &[i64]) {
    // SAFETY: a buffer of the time loop, which only this thread accesses.
    let state = unsafe { tensors::values_mut(state) };
    for &row in rows {
        let first = row as usize * start.len();
        state[first..first + start.len()].copy_from_slice(start);
    }
}

fn rows_of(t: &Tensor, offset: usize, rows: usize) -> Result<Tensor, DeviceError> {
    Ok(t.f_narrow(0, offset as i64, rows as i64)?)
}

/// Cells of rows as their last token is read: later steps may still write to the row.
struct Captured {
    cells: Option<Tensor>, // [2, B, D]
}

impl Captured {
    fn new(capture: bool, packings: &Packings, d: i64) -> Result<Self, DeviceError> {
        let rows = packings.of(0).sentences() as i64;
        let cells = if capture { Some(Tensor::f_empty([2, rows, d], FLOAT_ON_HOST)?) } else { None };
        Ok(Self { cells })
    }

    fn keep(&self, packing: &Packing, t: usize, direction: i64, cell: &Tensor) -> Result<(), DeviceError> {
        let Some(cells) = &self.cells else { return Ok(()) };
        let ends = packing.ends(t);
        if !ends.is_empty() {
            let mut kept = rows_of(&cells.f_select(0, direction)?, ends.start, ends.len())?;
            kept.f_copy_(&rows_of(cell, ends.start, ends.len())?)?;
        }
        Ok(())
    }
}
