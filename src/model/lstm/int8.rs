//! The time loop with products of 8-bit integers, direction by direction, on CPU.
//!
//! As in `fused.rs`, but a step's gates are two integer sums, of the input's codes and of the codes of the previous output, with the
//! scales of their rows. The pass over the gates rescales them, adds the bias and goes on in float32: the cell state is never rounded.

use tch::{Kind, Tensor};

use super::{
    Clips, LayerOutput,
    fused::{Captured, begin, rows_of},
    last_state, steps_of, with_forget_bias,
};
use crate::{
    model::{
        DeviceError,
        int8::{self, Codes, Rows},
        kernels,
        packing::Packings,
        parameters::NamedTensors,
        start_state::LayerState,
        tensors::{self, Change, FLOAT_ON_HOST},
    },
    options::ModelOptions,
};

/// Packed rows of one input product: larger outputs leave the cache before the time loop reads them.
const CHUNK_ROWS: usize = 256;

/// Both directions of one layer.
#[derive(Debug)]
pub(crate) struct Int8Layer {
    w_x: Tensor,         // codes [2, in, 4D]
    w_h: Tensor,         // codes [2, P, 4D]
    gate_scales: Tensor, // [2, 4D], of the columns of both
    bias: Tensor,        // [2, 4D], +1 in the forget block
    w_p: Option<Codes>,  // [2, D, P]
    no_bias: Vec<f32>,   // [P]
    residual: bool,
    dim: usize,
    projection: usize, // P
    clips: Clips,
}

impl Int8Layer {
    /// Rounds one layer from the tensors of `RNN_0` and `RNN_1` to codes up to `largest`.
    pub(crate) fn new(
        options: &ModelOptions,
        source: &dyn NamedTensors,
        layer: usize,
        largest: i64,
    ) -> Result<Self, DeviceError> {
        let lstm = &options.lstm;
        let (d, p) = (lstm.dim as i64, lstm.projection_dim as i64);
        let [weights] = super::both_directions(source, layer, "W_0", [2 * p], Kind::Float)?;
        let [bias] = super::both_directions(source, layer, "B", [4 * d], Kind::Float)?;
        // One scale per column, shared by the input and the recurrent part.
        let Codes { codes, scales } = Codes::new(&weights, largest)?; // [2, P + P, 4D]
        let [w_x, w_h] = tensors::split(&codes, [p, p], 1)?;
        let w_p = match options.has_projection() {
            true => {
                let [w_p] = super::both_directions(source, layer, "W_P_0", [d], Kind::Float)?;
                Some(Codes::new(&w_p, largest)?)
            }
            false => None,
        };
        Ok(Self {
            w_x: w_x.f_contiguous()?,
            w_h: w_h.f_contiguous()?,
            gate_scales: scales,
            bias: with_forget_bias(&bias, d)?.f_contiguous()?,
            w_p,
            no_bias: vec![0.0; lstm.projection_dim],
            residual: layer > 0 && lstm.use_skip_connections,
            dim: lstm.dim,
            projection: lstm.projection_dim,
            clips: Clips::new(options),
        })
    }

    /// As [`LstmLayer::map`](super::LstmLayer::map).
    pub(crate) fn map<E>(&self, change: &mut Change<'_, E>) -> Result<Self, E> {
        Ok(Self {
            w_x: change(&self.w_x)?,
            w_h: change(&self.w_h)?,
            gate_scales: change(&self.gate_scales)?,
            bias: change(&self.bias)?,
            w_p: self.w_p.as_ref().map(|w_p| w_p.map(change)).transpose()?,
            no_bias: self.no_bias.clone(),
            ..*self
        })
    }

    /// As [`LstmLayer::flop`](super::LstmLayer::flop): operations on integers.
    pub(crate) fn flop(&self) -> f64 {
        let numel = |t: &Tensor| t.numel() as f64;
        2.0 * (numel(&self.w_x) + numel(&self.w_h) + self.w_p.as_ref().map_or(0.0, |w_p| numel(&w_p.codes)))
    }

    /// As [`LstmLayer::forward`](super::LstmLayer::forward).
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        packings: &Packings,
        start: LayerState,
        capture: bool,
    ) -> Result<LayerOutput, DeviceError> {
        let (h, cells) = self.steps(x, packings, start, capture)?;
        let last = last_state(&h, cells, packings)?;
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
        let (d, p, width) = (self.dim as i64, self.projection as i64, packings.width() as i64);
        let chunks = packings.chunks(CHUNK_ROWS);
        let largest = chunks.iter().map(|chunk| chunk.rows).max().unwrap_or(0) as i64;
        let out = Tensor::f_empty([2, packings.packed_rows() as i64, p], FLOAT_ON_HOST)?;
        let (of_input, of_output) = (int8::sums(largest, 4 * d)?, int8::sums(width, 4 * d)?);
        let projected = int8::sums(width, p)?;
        let activated = Tensor::f_empty([width, d], FLOAT_ON_HOST)?;
        let (mut input, mut previous) = (Rows::new(largest, p)?, Rows::new(width, p)?);
        let mut unprojected = Rows::new(width, d)?;
        let last = Captured::new(capture, packings, d)?;
        for direction in 0..2 {
            let packing = packings.of(direction);
            let direction = direction as i64;
            let (x, out) = (x.f_select(0, direction)?, out.f_select(0, direction)?);
            let weights = self.of(direction)?;
            let mut cell = start.c.f_select(0, direction)?;
            let h = start.h.f_select(0, direction)?;
            previous.quantise(&h);
            let mut first = Rows::new(1, p)?;
            first.quantise(&rows_of(&h, 0, 1)?);
            let first_cell = tensors::download(&rows_of(&cell, 0, 1)?)?;
            for chunk in &chunks {
                input.quantise(&rows_of(&x, chunk.offset, chunk.rows)?);
                input.multiply(&weights.w_x, &rows_of(&of_input, 0, chunk.rows)?)?;
                for (t, step) in steps_of(packings, chunk) {
                    let (offset, w) = (step.offset - chunk.offset, step.width);
                    if !packing.begins(t).is_empty() {
                        previous.set(packing.begins(t), &first);
                        begin(&mut cell, &first_cell, packing.begins(t));
                    }
                    let (read, own) = (rows_of(&of_input, offset, w)?, rows_of(&of_output, 0, w)?);
                    previous.multiply(&weights.w_h, &own)?;
                    let mut c = rows_of(&cell, 0, w)?;
                    let mut m = rows_of(&activated, 0, w)?;
                    // SAFETY: rows of buffers of the time loop, which only this thread accesses.
                    unsafe {
                        let sums = kernels::GateSums {
                            input: tensors::values(&read),
                            input_scales: &input.scales()[offset..][..w],
                            previous: tensors::values(&own),
                            previous_scales: &previous.scales()[..w],
                            scales: tensors::values(&weights.gate_scales),
                            bias: tensors::values(&weights.bias),
                        };
                        let clip = self.clips.cell.map_or(f32::INFINITY, |clip| clip as f32);
                        kernels::lstm_cell_int8(&sums, tensors::values_mut(&mut c), tensors::values_mut(&mut m), clip);
                    }
                    last.keep(packing, t, direction, &cell)?;
                    let mut h = rows_of(&out, step.offset, w)?;
                    match &weights.w_p {
                        Some(w_p) => {
                            unprojected.quantise(&m);
                            let sums = rows_of(&projected, 0, w)?;
                            unprojected.multiply(&w_p.codes, &sums)?;
                            let clip = self.clips.projection.map_or(f32::INFINITY, |clip| clip as f32);
                            // SAFETY: as above.
                            unsafe {
                                let (sums, h) = (tensors::values(&sums), tensors::values_mut(&mut h));
                                let scales = tensors::values(&w_p.scales);
                                kernels::rescale(sums, &unprojected.scales()[..w], scales, &self.no_bias, h, clip);
                            }
                        }
                        None => h.f_copy_(&m)?,
                    }
                    previous.quantise(&h);
                }
            }
        }
        Ok((out, last.cells))
    }

    fn of(&self, direction: i64) -> Result<Direction, DeviceError> {
        Ok(Direction {
            w_x: self.w_x.f_select(0, direction)?,
            w_h: self.w_h.f_select(0, direction)?,
            gate_scales: self.gate_scales.f_select(0, direction)?,
            bias: self.bias.f_select(0, direction)?,
            w_p: self.w_p.as_ref().map(|w_p| w_p.of(direction)).transpose()?,
        })
    }
}

/// The weights of one direction.
struct Direction {
    w_x: Tensor,         // codes [in, 4D]
    w_h: Tensor,         // codes [P, 4D]
    gate_scales: Tensor, // [4D]
    bias: Tensor,        // [4D]
    w_p: Option<Codes>,  // [D, P]
}
