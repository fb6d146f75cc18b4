//! The time loop of GPUs, without gradients: both directions in one product, and our own kernels between the products.
//!
//! A row of a step is its input and the previous output side by side, so that one product makes its gates. The gates go through
//! memory once. If the products of the input were computed for many steps at once, as in `batched.rs`, the gates would go through memory
//! three times. From some 300 rows on, that takes longer than reading the weights of the input at every step.
//!
//! The first layer reads words, and most tokens are words that occur often: here the input products are computed for many steps at once,
//! but for words instead of tokens ([`WordParts`](crate::model::word_parts::WordParts)), and the pass over the gates adds them.

use tch::{Device, Kind, Tensor};

use super::{Clips, LayerOutput, batched::Finished, both_directions, last_state, with_forget_bias};
use crate::{
    model::{
        DeviceError, DeviceName, Precision,
        cell::{CellKernels, Gates, InputProducts, Outputs},
        indices::WordIndices,
        packing::{Packings, Step},
        parameters::NamedTensors,
        start_state::LayerState,
        tensors::{self, Change},
    },
    options::ModelOptions,
};

/// Part of a GPU's memory for the input products of words, in each lane.
const SHARE_FOR_PRODUCTS: u64 = 64;
/// Memory for them on a GPU whose memory is not known.
const PRODUCT_BYTES: u64 = 256 << 20;
/// The same on the CPU, where small batches of tests have several parts.
const PRODUCT_BYTES_ON_HOST: u64 = 256 << 10;

/// What the first layer reads: rows of a table of token vectors `[U, P]`.
pub(crate) struct Words<'b> {
    pub(crate) table: &'b Tensor,
    pub(crate) indices: &'b WordIndices,
}

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
    words_at_once: usize,
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
            words_at_once: product_bytes(kernels, device) as usize / (2 * 4 * lstm.dim * kind.elt_size_in_bytes()),
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

    pub(crate) fn kernels(&self) -> CellKernels {
        self.kernels
    }

    /// Most words whose input products are computed at once, if a step has no more.
    pub(crate) fn words_at_once(&self) -> usize {
        self.words_at_once
    }

    /// As [`LstmLayer::forward`](super::LstmLayer::forward). `words`, if given, are those whose vectors `x` has. `begins` `[R]` is not 0
    /// where a sentence begins in a row after another.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        words: Option<&Words<'_>>,
        packings: &Packings,
        begins: Option<&Tensor>,
        start: LayerState,
        capture: bool,
    ) -> Result<LayerOutput, DeviceError> {
        // States are changed in place.
        let _no_gradients = tch::no_grad_guard();
        let mut pass = Pass::new(self, x, words, packings, begins, &start, capture)?;
        match words {
            Some(Words { table, indices }) => {
                for (steps, words) in &indices.parts {
                    let products = self.input_products(table, words)?;
                    steps.clone().try_for_each(|t| pass.step(t, Some(&products)))?;
                }
            }
            None => (0..packings.steps().len()).try_for_each(|t| pass.step(t, None))?,
        }
        let Pass { finished, y, .. } = pass;
        let last = last_state(&y, finished.cells()?, packings)?;
        let last = last.map(|last| Ok::<_, DeviceError>(LayerState { c: last.c.f_to_kind(x.kind())?, ..last }));
        let y = if self.residual && capture { y.f_add(x)? } else { y };
        let saved = words.map_or(0, |words| packings.tokens().saturating_sub(words.indices.products));
        let saved_flop = saved as f64 * 2.0 * (self.projection * 4) as f64 * self.dim as f64;
        Ok(LayerOutput { y, last: last.transpose()?, saved_flop })
    }

    /// Products of the input weights with rows `words` `[2 U]` of a table `[T, P]`, those of the forward direction first: `[2, U, 4D]`
    fn input_products(&self, table: &Tensor, words: &Tensor) -> Result<Tensor, DeviceError> {
        let p = self.projection;
        let vectors = table.f_index_select(0, words)?.f_view([2, -1, p])?;
        Ok(vectors.f_bmm(&self.weights.f_narrow(1, 0, p)?)?)
    }
}

/// One pass of a layer over a batch: what its steps read and write.
struct Pass<'b> {
    layer: &'b DeviceLayer,
    packings: &'b Packings,
    begins: Option<&'b Tensor>,
    /// `[2, R]`: rows of input products, where `rows` have no input.
    places: Option<&'b Tensor>,
    /// `[2, C, 4D]`: the weights of `rows`.
    weights: Tensor,
    /// `[2, R, C]`: `C` is `2P`, input and previous output of each packed row; or `P`, the previous output alone.
    rows: Tensor,
    /// `[2, W, D]` float32.
    state: Tensor,
    /// `[2, P]` and `[2, D]`: the state in which a sentence begins in a row after another.
    start_h: Tensor,
    start_c: Tensor,
    /// Of a step, each for as many rows as it has: `[2, w, 4D]`, `[2, w, D]`, `[2, w, P]`.
    sums: Tensor,
    out: Tensor,
    projected: Tensor,
    residual: bool,
    finished: Finished,
    /// `[2, R, P]`
    y: Tensor,
}

impl<'b> Pass<'b> {
    fn new(
        layer: &'b DeviceLayer,
        x: &Tensor,
        words: Option<&Words<'b>>,
        packings: &'b Packings,
        begins: Option<&'b Tensor>,
        start: &LayerState,
        capture: bool,
    ) -> Result<Self, DeviceError> {
        let (d, p) = (layer.dim as i64, layer.projection);
        let (all, width) = (packings.packed_rows() as i64, packings.width() as i64);
        let empty = |shape: &[i64]| Tensor::f_empty(shape, (x.kind(), x.device()));
        let columns = if words.is_some() { p } else { 2 * p };
        let rows = empty(&[2, all, columns])?;
        if words.is_none() {
            rows.f_narrow(2, 0, p)?.f_copy_(x)?;
        }
        rows.f_narrow(2, columns - p, p)?.f_narrow(1, 0, width)?.f_copy_(&start.h)?;
        // Rows hold several sentences only where all start from one constant, which any row has.
        let constant = |t: &Tensor| Ok::<_, DeviceError>(t.f_narrow(1, 0, 1)?.f_reshape([2, -1])?);
        Ok(Self {
            layer,
            packings,
            begins,
            places: words.map(|words| &words.indices.places),
            weights: layer.weights.f_narrow(1, 2 * p - columns, columns)?,
            rows,
            state: start.c.f_to_kind(Kind::Float)?.f_contiguous()?,
            start_h: constant(&start.h)?.f_contiguous()?,
            start_c: tensors::copied(&constant(&start.c.f_to_kind(Kind::Float)?)?)?, // the state is changed in place
            sums: empty(&[2 * width * 4 * d])?,
            out: empty(&[2 * width * d])?,
            projected: empty(&[2 * width * p])?,
            // A state that is captured is without the input.
            residual: layer.residual && !capture,
            finished: Finished::new(capture),
            y: empty(&[2, all, p])?,
        })
    }

    /// Computes a step; `products` `[2, U, 4D]` are those that `places` are rows of.
    fn step(&mut self, t: usize, products: Option<&Tensor>) -> Result<(), DeviceError> {
        let (layer, steps) = (self.layer, self.packings.steps());
        let (step, next) = (&steps[t], steps.get(t + 1));
        let w = step.width as i64;
        let first = |buffer: &Tensor, columns: i64| -> Result<Tensor, DeviceError> {
            Ok(buffer.f_narrow(0, 0, 2 * w * columns)?.f_view([2, w, columns])?)
        };
        let (d, p) = (layer.dim as i64, layer.projection);
        let (sums, out, projected) = (first(&self.sums, 4 * d)?, first(&self.out, d)?, first(&self.projected, p)?);
        let of_step =
            |step: &Step| self.begins.map(|all| all.f_narrow(0, step.offset as i64, step.width as i64)).transpose();
        let _ = self.rows.f_narrow(1, step.offset as i64, w)?.f_bmm_out(&sums, &self.weights)?;
        let inputs = products.zip(self.places);
        let gates = Gates {
            sums: &sums,
            inputs: inputs.map(|(products, places)| InputProducts { products, places, offset: step.offset }),
            bias: &layer.bias,
            state: &self.state,
            start: &self.start_c,
            begins: of_step(step)?,
            out: &out,
        };
        layer.kernels.cell(&gates, bound(layer.clips.cell))?;
        self.finished.keep(&self.state, self.packings, t)?;
        if let Some(w_p) = &layer.w_p {
            let _ = out.f_bmm_out(&projected, w_p)?;
        }
        let outputs = Outputs {
            projected: if layer.w_p.is_some() { &projected } else { &out },
            rows: &self.rows,
            residual: self.residual,
            offset: step.offset,
            next: next.map(|next| (next.offset, next.width)),
            y: &self.y,
            start: &self.start_h,
            begins: next.map(of_step).transpose()?.flatten(),
        };
        layer.kernels.outputs(&outputs, bound(layer.clips.projection))
    }
}

/// Memory for the input products of words.
fn product_bytes(kernels: CellKernels, device: Device) -> u64 {
    match (kernels, device) {
        (CellKernels::Cuda(_), Device::Cuda(number)) => {
            DeviceName::Cuda(number).memory().map_or(PRODUCT_BYTES, |bytes| bytes / SHARE_FOR_PRODUCTS)
        }
        _ => PRODUCT_BYTES_ON_HOST,
    }
}

/// A clip for the kernels: infinite if there is none.
pub(super) fn bound(clip: Option<f64>) -> f32 {
    clip.map_or(f32::INFINITY, |clip| clip as f32)
}
