//! The state of the LSTM layers in which sentences start.

use tch::{Device, Kind, Tensor};

use super::{DeviceError, packing::Packings, tensors};

/// `h` `[2, B, P]` and `c` `[2, B, D]` of one layer, both directions.
#[derive(Debug)]
pub(crate) struct LayerState {
    pub(crate) h: Tensor,
    pub(crate) c: Tensor,
}

impl LayerState {
    fn map(&self, change: impl Fn(&Tensor) -> Result<Tensor, DeviceError>) -> Result<Self, DeviceError> {
        Ok(Self { h: change(&self.h)?, c: change(&self.c)? })
    }
}

/// What the rows of a state belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rows {
    /// The only row is for every sentence.
    Constant,
    /// Row `b` is for sentence `b` of a batch, in both directions.
    PerSentence,
}

/// `(h, c)` of every layer and both directions in which sentences start.
///
/// Per layer `h` is `[2, B, P]` and `c` `[2, B, D]`: row `b` for sentence `b` of a batch, or one row for every sentence
/// (a *constant*). The tensors are on the device and in the precision of the [`BiLm`](super::BiLm) that made them, and
/// fit only that model and models of the same options.
#[derive(Debug)]
pub struct StartState {
    layers: Vec<LayerState>,
    rows: Rows,
}

/// What the states of one model have in common.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StateShape {
    pub(crate) layers: usize,
    /// `P`
    pub(crate) projection_dim: usize,
    /// `D`
    pub(crate) cells: usize,
    pub(crate) kind: Kind,
    pub(crate) device: Device,
}

impl StateShape {
    /// Numbers of a constant, or of one row.
    fn numbers(&self) -> usize {
        2 * self.layers * (self.projection_dim + self.cells)
    }
}

/// Why a state cannot be used.
pub(crate) const OTHER_MODEL: &str = "the start state is that of a model of another shape, precision or device";

impl StartState {
    /// Zeros, a constant.
    pub(crate) fn zero(shape: StateShape) -> Result<Self, DeviceError> {
        let zeros = |dim: usize| Tensor::f_zeros([2, 1, dim as i64], (shape.kind, shape.device));
        let layer = |_| Ok(LayerState { h: zeros(shape.projection_dim)?, c: zeros(shape.cells)? });
        let layers = (0..shape.layers).map(layer).collect::<Result<_, DeviceError>>()?;
        Ok(Self { layers, rows: Rows::Constant })
    }

    /// A constant from numbers in the order of [`StartState::numbers`].
    pub(crate) fn constant(shape: StateShape, numbers: &[f32]) -> Result<Self, DeviceError> {
        if numbers.len() != shape.numbers() {
            return Err(DeviceError::InvalidBatch { reason: OTHER_MODEL });
        }
        Ok(Self { rows: Rows::Constant, ..Self::per_sentence_from(shape, numbers)? })
    }

    /// A state with a row per sentence, from numbers in the order of [`StartState::numbers`].
    pub(crate) fn per_sentence_from(shape: StateShape, numbers: &[f32]) -> Result<Self, DeviceError> {
        let rows = numbers.len().checked_div(shape.numbers()).unwrap_or(0);
        if rows == 0 || numbers.len() != rows * shape.numbers() {
            return Err(DeviceError::InvalidBatch { reason: OTHER_MODEL });
        }
        let upload = |numbers: &[f32], dim: usize| {
            tensors::upload(numbers, &[2, rows as i64, dim as i64], shape.kind, shape.device)
        };
        let layer = |numbers: &[f32]| {
            let (h, c) = numbers.split_at(2 * rows * shape.projection_dim);
            Ok(LayerState { h: upload(h, shape.projection_dim)?, c: upload(c, shape.cells)? })
        };
        let layers = numbers.chunks_exact(numbers.len() / shape.layers).map(layer);
        Ok(Self::per_sentence(layers.collect::<Result<_, DeviceError>>()?))
    }

    /// `h` and `c` of each layer.
    pub(crate) fn layers(&self) -> &[LayerState] {
        &self.layers
    }

    /// A state with a row per sentence.
    pub(crate) fn per_sentence(layers: Vec<LayerState>) -> Self {
        Self { layers, rows: Rows::PerSentence }
    }

    /// Another handle on the same tensors.
    pub fn share(&self) -> Self {
        let share = |layer: &LayerState| LayerState { h: layer.h.shallow_clone(), c: layer.c.shallow_clone() };
        Self { layers: self.layers.iter().map(share).collect(), rows: self.rows }
    }

    /// The same values outside the graph: no gradient flows back through them. Training calls it between windows.
    ///
    /// # Errors
    /// [`DeviceError::Torch`] when libtorch fails.
    pub fn detach(&self) -> Result<Self, DeviceError> {
        self.map(|t| Ok(t.f_detach()?))
    }

    /// Whether a model of this shape can start from it.
    pub(crate) fn is_of(&self, shape: StateShape) -> bool {
        let fits = |t: &Tensor, dim: usize| {
            t.size().last() == Some(&(dim as i64)) && t.kind() == shape.kind && t.device() == shape.device
        };
        let layers = &self.layers;
        layers.len() == shape.layers
            && layers.iter().all(|l| fits(&l.h, shape.projection_dim) && fits(&l.c, shape.cells))
    }

    pub(crate) fn is_constant(&self) -> bool {
        self.rows == Rows::Constant
    }

    fn map(&self, change: impl Fn(&Tensor) -> Result<Tensor, DeviceError>) -> Result<Self, DeviceError> {
        let layers = self.layers.iter().map(|layer| layer.map(&change)).collect::<Result<_, _>>()?;
        Ok(Self { layers, rows: self.rows })
    }

    /// This state after a batch ended in `last`: the rows of sentences that ran are replaced, the others stay
    /// (AllenNLP `_EncoderBase._update_states`). Of a constant nothing stays. Both are states of one model.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room or libtorch fails.
    pub fn replaced_by(&self, last: &Self) -> Result<Self, DeviceError> {
        let join = |old: &Tensor, new: &Tensor| -> Result<Tensor, DeviceError> {
            let (had, ran) = (if self.is_constant() { 0 } else { old.size()[1] }, new.size()[1]);
            if had <= ran {
                return Ok(new.shallow_clone());
            }
            Ok(Tensor::f_cat(&[new.shallow_clone(), old.f_narrow(1, ran, had - ran)?], 1)?)
        };
        let layers = self.layers.iter().zip(&last.layers);
        let layers = layers.map(|(old, new)| Ok(LayerState { h: join(&old.h, &new.h)?, c: join(&old.c, &new.c)? }));
        Ok(Self::per_sentence(layers.collect::<Result<_, DeviceError>>()?))
    }

    /// The state of each layer in the order of packed rows, `[2, W, P]` and `[2, W, D]` for `W` rows of the first step.
    /// Rows without a state are zero. The tensors are fresh: the caller may change them in place.
    pub(crate) fn in_packed_rows(&self, packings: &Packings) -> Result<Vec<LayerState>, DeviceError> {
        let width = packings.width();
        if self.is_constant() {
            return Ok(self.map(|t| Ok(t.f_repeat([1, width as i64, 1])?))?.layers);
        }
        let order =
            packings.each(|packing| (0..packing.sentences()).map(|row| packing.sentence_at(row) as i64).collect());
        let spread = self.map(|t| {
            let [directions, had, dim] = t.size3()?.into();
            let sentences = order[0].len() as i64;
            let missing = (sentences - had).max(0) + 1; // at least one, for rows beyond the last sentence
            let zeros = Tensor::f_zeros([directions, missing, dim], (t.kind(), t.device()))?;
            let all = Tensor::f_cat(&[t, &zeros], 1)?;
            let zero = had + missing - 1;
            let rows = order
                .each_ref()
                .map(|order| order.iter().copied().chain(std::iter::repeat(zero)).take(width).collect::<Vec<_>>());
            tensors::rows_of_each(&all, [&rows[0], &rows[1]])
        })?;
        Ok(spread.layers)
    }

    /// The rows of this state, which are in the order of packed rows, in the order of the sentences.
    pub(crate) fn in_order_of_sentences(&self, packings: &Packings) -> Result<Self, DeviceError> {
        let [forward, backward] = packings.each(|packing| packing.row_of_each());
        self.map(|t| tensors::rows_of_each(t, [&forward, &backward]))
    }

    /// The state after the forward direction has run sentence 0 and the backward direction sentence 1, a constant.
    pub(crate) fn of_two_sentences(&self) -> Result<Self, DeviceError> {
        let pick = |t: &Tensor| -> Result<Tensor, DeviceError> {
            let forward = t.f_narrow(0, 0, 1)?.f_narrow(1, 0, 1)?;
            let backward = t.f_narrow(0, 1, 1)?.f_narrow(1, 1, 1)?;
            Ok(Tensor::f_cat(&[forward, backward], 0)?)
        };
        Ok(Self { rows: Rows::Constant, ..self.map(pick)? })
    }

    /// The state of the first sentence, for every sentence from now on.
    pub(crate) fn into_constant(self) -> Result<Self, DeviceError> {
        Ok(Self { rows: Rows::Constant, ..self.map(|t| Ok(t.f_narrow(1, 0, 1)?))? })
    }

    /// Largest absolute difference to a state of the same shape.
    pub(crate) fn distance(&self, other: &Self) -> Result<f64, DeviceError> {
        let mut largest = 0.0_f64;
        for (a, b) in self.layers.iter().zip(&other.layers) {
            for (a, b) in [(&a.h, &b.h), (&a.c, &b.c)] {
                let difference = a.f_sub(b)?.f_abs()?.f_max()?;
                largest = largest.max(f64::try_from(difference)?);
            }
        }
        Ok(largest)
    }

    /// The numbers as float32, layer by layer, `h` before `c`, forward before backward, row by row: what a hash or a file
    /// is made of. A constant has `2 L (P + D)`, a state per sentence as many for each row. Only those of a computation
    /// in float64 are rounded.
    ///
    /// # Errors
    /// [`DeviceError`] when libtorch fails.
    pub fn numbers(&self) -> Result<Vec<f32>, DeviceError> {
        let mut all = Vec::new();
        for layer in &self.layers {
            for t in [&layer.h, &layer.c] {
                all.extend(tensors::download(t)?);
            }
        }
        Ok(all)
    }
}
