//! The time loop with our own pass over the gates, direction by direction: float32 on CPU, no gradients.
//!
//! The cells are cut into *tiles*. The weights of the gates of a tile are one matrix, which MKL reads from its first to its last number,
//! and the gates of a step of 256 rows are still in the second-level cache when the pass over them begins. One product over all cells
//! takes more time: see `benches/NOTES.md`. Columns of a product are summed independently of each other.

use tch::{Device, Kind, Tensor};

use super::{Clips, LayerOutput, both_directions, last_state, name_in, steps_of, with_forget_bias};
use crate::{
    model::{
        DeviceError, kernels, narrow,
        packing::{Chunk, MIN_WIDTH, Packing, Packings},
        parameters::NamedTensors,
        start_state::LayerState,
        tensors::{self, Change},
    },
    options::ModelOptions,
};

/// Packed rows of one input product: larger outputs leave the cache before the time loop reads them.
pub(super) const CHUNK_ROWS: usize = 256;

/// Largest number of cells of a tile: the gates of 256 rows are some 0.6 MiB.
const MOST_CELLS: i64 = 160;
/// Cells of a tile are a multiple of this number, so that products have whole vectors.
const CELLS_STEP: i64 = 16;

const FLOAT_ON_HOST: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Cells of a tile of a layer with `d` cells: all, if there is no number that divides them.
pub(crate) fn tile_cells(d: i64) -> i64 {
    let sizes = (1..=MOST_CELLS / CELLS_STEP).rev().map(|n| n * CELLS_STEP);
    // Smaller tiles would be more calls than they are worth.
    sizes.take_while(|&cells| 2 * cells > MOST_CELLS).find(|cells| d % cells == 0).unwrap_or(d)
}

/// Both directions of one layer: `N` tiles of `G / 4` cells, which have `G` gates.
#[derive(Debug)]
pub(crate) struct FusedLayer {
    w_x: Tensor,         // [2, N, in, G]
    w_h: Tensor,         // [2, N, P, G]
    bias: Tensor,        // [2, N, G], +1 in the forget block
    w_p: Option<Tensor>, // [2, D, P], at least `tensors::MIN_COLUMNS` wide
    projection: i64,     // P
    residual: bool,
    dim: usize,
    clips: Clips,
    /// Products of fewer rows than MKL has steady bits for are our own.
    narrow: bool,
}

/// The weights of the gates of a tile in one direction.
struct Tile {
    w_x: Tensor,  // [in, G]
    w_h: Tensor,  // [P, G]
    bias: Tensor, // [G]
}

impl FusedLayer {
    /// Derives one layer from the tensors of `RNN_0` and `RNN_1`.
    pub(crate) fn new(options: &ModelOptions, source: &dyn NamedTensors, layer: usize) -> Result<Self, DeviceError> {
        let lstm = &options.lstm;
        let (d, p) = (lstm.dim as i64, lstm.projection_dim as i64);
        let cells = tile_cells(d);
        let tiles = d / cells;
        let [bias] = both_directions(source, layer, "B", [4 * d], Kind::Float)?;
        let bias = with_forget_bias(&bias, d)?.f_view([2, 4, tiles, cells])?.f_permute([0, 2, 1, 3])?;
        let w_p = match options.has_projection() {
            true => {
                let [w_p] = both_directions(source, layer, "W_P_0", [d], Kind::Float)?;
                Some(tensors::with_enough_columns(w_p.f_contiguous()?)?)
            }
            false => None,
        };
        Ok(Self {
            w_x: tiled(source, layer, [0, p], [tiles, cells])?,
            w_h: tiled(source, layer, [p, p], [tiles, cells])?,
            bias: bias.f_reshape([2, tiles, 4 * cells])?.f_contiguous()?,
            w_p,
            projection: p,
            residual: layer > 0 && lstm.use_skip_connections,
            dim: lstm.dim,
            clips: Clips::new(options),
            narrow: narrow::is_exact_for(options)?,
        })
    }

    /// As [`LstmLayer::map`](super::LstmLayer::map).
    pub(crate) fn map<E>(&self, change: &mut Change<'_, E>) -> Result<Self, E> {
        let (w_x, w_h, bias) = (change(&self.w_x)?, change(&self.w_h)?, change(&self.bias)?);
        Ok(Self { w_x, w_h, bias, w_p: self.w_p.as_ref().map(change).transpose()?, ..*self })
    }

    /// Whether products of few rows have the bits of taller ones.
    pub(crate) fn is_narrow(&self) -> bool {
        self.narrow
    }

    /// As [`LstmLayer::flop`](super::LstmLayer::flop).
    pub(crate) fn flop(&self) -> f64 {
        let projection = self.w_p.as_ref().map_or(0.0, |_| 2.0 * (self.dim as f64) * self.projection as f64);
        2.0 * ((self.w_x.numel() + self.w_h.numel()) as f64 + projection)
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
        let [_, tiles, columns] = self.bias.size3()?.into();
        let chunks = packings.chunks(CHUNK_ROWS);
        let out = Tensor::f_empty([2, packings.packed_rows() as i64, self.projection], FLOAT_ON_HOST)?;
        // The gates of several steps are computed for all tiles before the first step, those of one step tile by tile.
        let is_one_step = |chunk: &Chunk| chunk.end - chunk.first == 1;
        let largest = |one_step: bool| {
            let rows = chunks.iter().filter(|chunk| is_one_step(chunk) == one_step).map(|chunk| chunk.rows);
            rows.max().unwrap_or(0) as i64
        };
        let gates = Tensor::f_empty([tiles, largest(false), columns], FLOAT_ON_HOST)?.f_unbind(0)?;
        let gates_of_one = Tensor::f_empty([largest(true), columns], FLOAT_ON_HOST)?;
        let activated = Tensor::f_empty([packings.width() as i64, self.dim as i64], FLOAT_ON_HOST)?;
        let last = Captured::new(capture, packings, self.dim as i64)?;
        for direction in 0..2 {
            let packing = packings.of(direction);
            let direction = direction as i64;
            let (x, out) = (x.f_select(0, direction)?, out.f_select(0, direction)?);
            let tiles = self.tiles(direction)?;
            let (mut h, mut cell) = (start.h.f_select(0, direction)?, start.c.f_select(0, direction)?);
            // Rows hold several sentences only where all start from one constant, which any row has.
            let constant =
                Constant { h: tensors::download(&rows_of(&h, 0, 1)?)?, c: tensors::download(&rows_of(&cell, 0, 1)?)? };
            for chunk in &chunks {
                let input = rows_of(&x, chunk.offset, chunk.rows)?;
                let is_one_step = is_one_step(chunk);
                if !is_one_step {
                    for (tile, gates) in tiles.iter().zip(&gates) {
                        tile.read_input(&mut rows_of(gates, 0, chunk.rows)?, &input)?;
                    }
                }
                for (t, step) in steps_of(packings, chunk) {
                    h = rows_of(&h, 0, step.width)?;
                    if !packing.begins(t).is_empty() {
                        h = tensors::copied(&h)?; // it is a part of the output
                        begin(&mut h, &constant.h, packing.begins(t));
                        begin(&mut cell, &constant.c, packing.begins(t));
                    }
                    let mut c = rows_of(&cell, 0, step.width)?;
                    let mut m = rows_of(&activated, 0, step.width)?;
                    for (n, tile) in tiles.iter().enumerate() {
                        let gates = if is_one_step { &gates_of_one } else { &gates[n] };
                        let mut z = rows_of(gates, step.offset - chunk.offset, step.width)?;
                        if is_one_step {
                            tile.read_input(&mut z, &input)?;
                        }
                        add_product(&mut z, &h, &tile.w_h)?;
                        self.activate(&z, n, &mut c, &mut m);
                    }
                    last.keep(packing, t, direction, &cell)?;
                    h = rows_of(&out, step.offset, step.width)?;
                    self.project_into(&mut h, &m, direction)?;
                }
            }
        }
        Ok((out, last.cells))
    }

    fn tiles(&self, direction: i64) -> Result<Vec<Tile>, DeviceError> {
        let parts = |t: &Tensor| Ok::<_, DeviceError>(t.f_select(0, direction)?.f_unbind(0)?);
        let weights = parts(&self.w_x)?.into_iter().zip(parts(&self.w_h)?).zip(parts(&self.bias)?);
        Ok(weights.map(|((w_x, w_h), bias)| Tile { w_x, w_h, bias }).collect())
    }

    /// The gates of tile `n` in one step: `z` `[w, G]`, its columns of `c` `[w, D]` are updated, and of `m` `[w, D]` become
    /// `sigmoid(o) * tanh(c)`.
    fn activate(&self, z: &Tensor, n: usize, c: &mut Tensor, m: &mut Tensor) {
        let clip = self.clips.cell.map_or(f32::INFINITY, |clip| clip as f32);
        // SAFETY: rows of three buffers of the time loop (gates, cells, activated), which only this thread accesses.
        let (z, c, m) = unsafe { (tensors::values(z), tensors::values_mut(c), tensors::values_mut(m)) };
        let cells = tile_cells(self.dim as i64) as usize;
        kernels::lstm_cell(z, c, m, self.dim, n * cells..(n + 1) * cells, clip);
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

impl Tile {
    /// The part of the gates that does not depend on the previous step: `[r, in] -> [r, G]`
    fn read_input(&self, gates: &mut Tensor, input: &Tensor) -> Result<(), DeviceError> {
        gates.f_copy_(&self.bias.f_expand_as(&*gates)?)?;
        add_product(gates, input, &self.w_x)
    }
}

/// Some rows of `W_0` `[in + P, 4D]` in both directions, cut into tiles: `[2, N, rows, G]`. Weights are copied once.
fn tiled(
    source: &dyn NamedTensors,
    layer: usize,
    [first, rows]: [i64; 2],
    [tiles, cells]: [i64; 2],
) -> Result<Tensor, DeviceError> {
    let result = Tensor::f_empty([2, tiles, rows, 4 * cells], FLOAT_ON_HOST)?;
    for direction in 0..2 {
        let mut copy = |weights: &Tensor| {
            let parts = weights.f_narrow(0, first, rows)?.f_view([rows, 4, tiles, cells])?.f_permute([2, 0, 1, 3])?;
            result.f_select(0, direction as i64)?.f_view([tiles, rows, 4, cells])?.f_copy_(&parts)?;
            Ok(())
        };
        // SAFETY: the weights are copied.
        unsafe { source.read(&name_in(direction, layer, "W_0"), &mut copy)? };
    }
    Ok(result)
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
    use super::*;
    use crate::{
        model::{BiLm, DeviceName, Precision},
        tiny,
    };

    #[test]
    fn cells_of_tiles() {
        let sizes =
            [(4096, 128), (2048, 128), (1024, 128), (480, 160), (128, 128), (256, 128), (11, 11), (200, 200), (96, 96)];
        for (d, cells) in sizes {
            assert_eq!(tile_cells(d), cells, "{d}");
        }
    }

    /// Several tiles; steps of more rows than a chunk has, of fewer, and of one; rows with several sentences. Expected: the bits of each
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
