//! The bidirectional language model: token layer, two LSTM stacks, layers out.

use tch::{Kind, Tensor};

use super::{
    DeviceError, DeviceName, Precision,
    char_cnn::{CharCnn, WordIds},
    device,
    lstm::{LayerState, LstmLayer},
    packing::Packing,
    tensors,
};
use crate::{chars, options::ModelOptions, weights::Weights};

/// `(h, c)` of every layer and both directions from which sentences start.
///
/// Per layer `h` is `[2, B, P]` and `c` `[2, B, D]`: row `b` for sentence `b` of a batch, or one row that serves every
/// sentence (a *constant*). They lie on the device and have the number format of the [`BiLm`] that made them, and serve
/// that model only.
#[derive(Debug)]
pub struct StartState {
    layers: Vec<LayerState>,
    /// Row `b` belongs to sentence `b` of the batch; otherwise one constant row serves every sentence.
    per_sentence: bool,
}

impl StartState {
    /// Another handle on the same tensors.
    pub fn share(&self) -> Self {
        Self { layers: self.layers.iter().map(LayerState::share).collect(), per_sentence: self.per_sentence }
    }

    fn map(&self, change: impl Fn(&Tensor) -> Result<Tensor, DeviceError>) -> Result<Vec<LayerState>, DeviceError> {
        self.layers.iter().map(|layer| Ok(LayerState { h: change(&layer.h)?, c: change(&layer.c)? })).collect()
    }

    /// This state after a batch left `last` behind: rows of sentences that ran are replaced, others stay
    /// (AllenNLP `_EncoderBase._update_states`). Of a constant nothing stays. Both are states of one model.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room or libtorch fails.
    pub fn replaced_by(&self, last: &Self) -> Result<Self, DeviceError> {
        let join = |old: &Tensor, new: &Tensor| -> Result<Tensor, DeviceError> {
            let (had, ran) = (if self.per_sentence { old.size()[1] } else { 0 }, new.size()[1]);
            if had <= ran {
                return Ok(new.shallow_clone());
            }
            Ok(Tensor::f_cat(&[new.shallow_clone(), old.f_narrow(1, ran, had - ran)?], 1)?)
        };
        let layers = self
            .layers
            .iter()
            .zip(&last.layers)
            .map(|(old, new)| Ok(LayerState { h: join(&old.h, &new.h)?, c: join(&old.c, &new.c)? }))
            .collect::<Result<_, DeviceError>>()?;
        Ok(Self { layers, per_sentence: true })
    }

    /// The rows of this state in the order of a packing; sentences beyond the last row start from zero.
    fn packed(&self, packing: &Packing) -> Result<Vec<LayerState>, DeviceError> {
        if !self.per_sentence {
            return Ok(self.layers.iter().map(LayerState::share).collect());
        }
        let order: Vec<i64> = (0..packing.sentences()).map(|row| packing.sentence_at(row) as i64).collect();
        self.map(|t| {
            let [directions, rows, dim] = t.size3()?.into();
            let missing = (order.len() as i64 - rows).max(0);
            let zeros = Tensor::f_zeros([directions, missing, dim], (t.kind(), t.device()))?;
            let all = Tensor::f_cat(&[t, &zeros], 1)?;
            let rows = all.f_index_select(1, &tensors::index(&order, t.device())?)?;
            // One row alone would be taken for a constant: a second one says otherwise.
            let filler = Tensor::f_zeros([directions, 1, dim], (t.kind(), t.device()))?;
            Ok(Tensor::f_cat(&[rows, filler], 1)?)
        })
    }

    /// The only row of a per-sentence state, for every sentence from now on.
    pub(crate) fn into_constant(self) -> Result<Self, DeviceError> {
        Ok(Self { layers: self.map(|t| Ok(t.f_narrow(1, 0, 1)?))?, per_sentence: false })
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

    /// The numbers, layer by layer, `h` before `c`, forward before backward: what a hash or a file is made of. Those of
    /// a constant are `2 L (P + D)`.
    pub(crate) fn numbers(&self) -> Result<Vec<f32>, DeviceError> {
        let mut all = Vec::new();
        for layer in &self.layers {
            for t in [&layer.h, &layer.c] {
                all.extend_from_slice(tensors::values(&tensors::download(t)?));
            }
        }
        Ok(all)
    }
}

/// The layers of one batch, on the device.
#[derive(Debug)]
pub struct Activations {
    packing: Packing,
    /// Layer 0 first, each `[2, R, P]` in packed rows.
    layers: Vec<Tensor>,
    /// State after each row's last token, in packed row order, where it was asked for.
    last: Option<StartState>,
}

/// One layer or one combination of layers of a batch, on the host.
#[derive(Debug)]
pub struct LayerValues {
    host: Tensor, // [2, R, P] float32
    half: usize,
    rows: usize,
}

impl LayerValues {
    /// Values of one vector: `2P`.
    pub fn width(&self) -> usize {
        2 * self.half
    }

    /// Writes `[forward ; backward]` of token `i` of a sentence to `out` (`2P` values). `activations` are those that
    /// the values came from; `sentence` and `i` count from 0 in what was run.
    pub fn token(&self, activations: &Activations, sentence: usize, i: usize, out: &mut [f32]) {
        let values = tensors::values(&self.host);
        let forward = activations.packing.forward(sentence, i) * self.half;
        let backward = (self.rows + activations.packing.backward(sentence, i)) * self.half;
        out[..self.half].copy_from_slice(&values[forward..forward + self.half]);
        out[self.half..].copy_from_slice(&values[backward..backward + self.half]);
    }
}

impl Activations {
    /// Layers that there are: `L + 1`.
    pub fn n_layers(&self) -> usize {
        self.layers.len()
    }

    /// Packed rows, those that only fill a step up counted in.
    pub fn packed_rows(&self) -> usize {
        self.packing.packed_rows()
    }

    /// `sum_k factor_k * layer_k` over pairs of layer and factor, brought to the host as float32. A single factor of 1
    /// copies the layer as it is.
    ///
    /// # Errors
    /// [`DeviceError::Torch`] when `factors` is empty or libtorch fails, [`DeviceError::OutOfMemory`] when the device
    /// has no room.
    ///
    /// # Panics
    /// When there is no such layer; [`Activations::n_layers`] says how many there are.
    pub fn combine(&self, factors: &[(usize, f32)]) -> Result<LayerValues, DeviceError> {
        let mut sum: Option<Tensor> = None;
        for &(layer, factor) in factors {
            // Layers may be bfloat16; their mix is not.
            let layer = self.layers[layer].f_to_kind(Kind::Float)?;
            let term = if factor == 1.0 { layer.shallow_clone() } else { layer.f_mul_scalar(f64::from(factor))? };
            sum = Some(match sum {
                None => term,
                Some(sum) => sum.f_add(&term)?,
            });
        }
        let sum = sum.ok_or_else(|| DeviceError::Torch { message: "a combination of no layers".to_owned() })?;
        let host = tensors::download(&sum)?;
        let [_, rows, half] = host.size3()?.into();
        Ok(LayerValues { host, half: half as usize, rows: rows as usize })
    }
}

/// The biLM on one device.
#[derive(Debug)]
pub struct BiLm {
    char_cnn: CharCnn,
    layers: Vec<LstmLayer>,
    kind: Kind,
    device: DeviceName,
    projection_dim: usize,
    cells: usize,
    max_characters: usize,
}

impl BiLm {
    /// Puts a model on a device.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the device has no room for the weights, [`DeviceError::Torch`] when `weights`
    /// lack a tensor of the options or libtorch fails.
    pub fn new(
        options: &ModelOptions,
        weights: &Weights,
        device: DeviceName,
        precision: Precision,
    ) -> Result<Self, DeviceError> {
        let fused = device == DeviceName::Cpu && precision == Precision::F32;
        Self::build(options, weights, device, precision, fused)
    }

    /// As [`BiLm::new`], but with libtorch's operations where the CPU would use our own passes: the code that
    /// GPUs and gradients use, so that it can be tested anywhere.
    ///
    /// # Errors
    /// As [`BiLm::new`].
    pub fn with_torch_operations(
        options: &ModelOptions,
        weights: &Weights,
        device: DeviceName,
        precision: Precision,
    ) -> Result<Self, DeviceError> {
        Self::build(options, weights, device, precision, false)
    }

    fn build(
        options: &ModelOptions,
        weights: &Weights,
        device: DeviceName,
        precision: Precision,
        fused: bool,
    ) -> Result<Self, DeviceError> {
        device::set_up_cpu();
        let _no_gradients = tch::no_grad_guard();
        let (kind, torch) = (precision.kind(), device.torch());
        let layers = (0..options.lstm.n_layers)
            .map(|layer| LstmLayer::new(options, weights, layer, kind, torch, fused))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            char_cnn: CharCnn::new(options, weights, kind, torch, fused)?,
            layers,
            kind,
            device,
            projection_dim: options.lstm.projection_dim,
            cells: options.lstm.dim,
            max_characters: options.char_cnn.max_characters_per_token,
        })
    }

    /// Another handle on the same tensors, for another thread.
    pub fn share(&self) -> Self {
        Self { char_cnn: self.char_cnn.share(), layers: self.layers.iter().map(LstmLayer::share).collect(), ..*self }
    }

    /// Where it runs.
    pub fn device(&self) -> DeviceName {
        self.device
    }

    /// `P`: half of a vector.
    pub fn projection_dim(&self) -> usize {
        self.projection_dim
    }

    /// Token vectors of words, `[U, P]` row-major float32 on the host, in the order of the words.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room or libtorch fails.
    pub fn token_vectors(&self, words: &[&str]) -> Result<Vec<f32>, DeviceError> {
        if words.is_empty() {
            return Ok(Vec::new());
        }
        let _no_gradients = tch::no_grad_guard();
        let ids = WordIds::new(words.iter().copied(), self.max_characters);
        let table = tensors::download(&self.char_cnn.forward(&ids)?)?;
        Ok(tensors::values(&table).to_vec())
    }

    /// Runs a batch of sentences, one in each row.
    ///
    /// `table` holds token vectors, `[U, P]` row-major, as [`BiLm::token_vectors`] gives them; a sentence is one index
    /// `0..U` per token. The result has `L + 1` layers `[2, R, P]` in packed rows, the token layer first;
    /// [`Activations::combine`] and [`LayerValues::token`] find a token's vector in them.
    ///
    /// The caller sees to it that there is a sentence, that each has at least one token, that every index is in the
    /// table, and that `start` is a state of this model. Of a state per sentence, row `b` is for sentence `b`;
    /// sentences beyond its last row start from zeros.
    ///
    /// With `capture` the state after each sentence's last token is kept; [`Activations::into_last`] returns it.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the batch does not fit the device (a smaller one may), [`DeviceError::Torch`]
    /// when libtorch fails.
    pub fn run(
        &self,
        table: &[f32],
        sentences: &[Vec<i64>],
        start: &StartState,
        capture: bool,
    ) -> Result<Activations, DeviceError> {
        let lengths: Vec<usize> = sentences.iter().map(Vec::len).collect();
        self.run_packed(table, sentences, Packing::new(&lengths), start, capture)
    }

    /// As [`BiLm::run`], with several sentences in a row of the batch, one after the other: `rows` holds every sentence
    /// once, by its place in `sentences`. Rows of about equal numbers of tokens leave no padding.
    ///
    /// The result is read as that of [`BiLm::run`], sentence by sentence, whatever row they ran in; no state is kept.
    /// The caller sees to the same, and to `start` being one constant for all sentences.
    ///
    /// # Errors
    /// As [`BiLm::run`]; [`DeviceError::Torch`] also when a sentence is in no row or in two, or `start` is no constant.
    pub fn run_in_rows(
        &self,
        table: &[f32],
        sentences: &[Vec<i64>],
        rows: Vec<Vec<usize>>,
        start: &StartState,
    ) -> Result<Activations, DeviceError> {
        let mut places = rows.concat();
        places.sort_unstable();
        if start.per_sentence || !places.into_iter().eq(0..sentences.len()) {
            let message = "rows of sentences need every sentence once, and one start state for all".to_owned();
            return Err(DeviceError::Torch { message });
        }
        let lengths: Vec<usize> = sentences.iter().map(Vec::len).collect();
        self.run_packed(table, sentences, Packing::chained(&lengths, rows), start, false)
    }

    fn run_packed(
        &self,
        table: &[f32],
        sentences: &[Vec<i64>],
        packing: Packing,
        start: &StartState,
        capture: bool,
    ) -> Result<Activations, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        let half = self.projection_dim as i64;
        let table = tensors::upload(
            table,
            &[(table.len() / self.projection_dim) as i64, half],
            self.kind,
            self.device.torch(),
        )?;
        let [forward, backward] = packing.gather(sentences, 0);
        let read = |ids: &[i64]| -> Result<Tensor, DeviceError> {
            Ok(table.f_index_select(0, &tensors::index(ids, self.device.torch())?)?)
        };
        let mut layers = vec![Tensor::f_stack(&[read(&forward)?, read(&backward)?], 0)?]; // [2, R, P]
        let mut last = Vec::new();
        for (lstm, start) in self.layers.iter().zip(&start.packed(&packing)?) {
            let output = lstm.forward(&layers[layers.len() - 1], &packing, start, capture)?;
            layers.push(output.y);
            last.extend(output.last);
        }
        let last = capture.then_some(StartState { layers: last, per_sentence: true });
        Ok(Activations { packing, layers, last })
    }

    /// The zero state, a constant.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room or libtorch fails.
    pub fn zero_state(&self) -> Result<StartState, DeviceError> {
        let zeros = |dim: usize| Tensor::f_zeros([2, 1, dim as i64], (self.kind, self.device.torch()));
        let layers = (0..self.layers.len())
            .map(|_| Ok(LayerState { h: zeros(self.projection_dim)?, c: zeros(self.cells)? }))
            .collect::<Result<_, DeviceError>>()?;
        Ok(StartState { layers, per_sentence: false })
    }

    /// A constant state from `2 L (P + D)` numbers: for each layer, the lowest first, `h` forward (`P`), `h` backward
    /// (`P`), `c` forward (`D`), `c` backward (`D`).
    ///
    /// # Errors
    /// [`DeviceError::Torch`] when there are more numbers or fewer, or libtorch fails, [`DeviceError::OutOfMemory`] when the
    /// device has no room.
    pub fn state_from_numbers(&self, numbers: &[f32]) -> Result<StartState, DeviceError> {
        let other = || DeviceError::Torch { message: "a start state of another model".to_owned() };
        if numbers.len() != 2 * self.layers.len() * (self.projection_dim + self.cells) {
            return Err(other());
        }
        let mut rest = numbers;
        let mut take = |dim: usize| -> Result<Tensor, DeviceError> {
            let (part, after) = rest.split_at_checked(2 * dim).ok_or_else(other)?;
            rest = after;
            tensors::upload(part, &[2, 1, dim as i64], self.kind, self.device.torch())
        };
        let layers = (0..self.layers.len())
            .map(|_| Ok(LayerState { h: take(self.projection_dim)?, c: take(self.cells)? }))
            .collect::<Result<_, DeviceError>>()?;
        Ok(StartState { layers, per_sentence: false })
    }

    /// The state after the forward direction has read `<S>` and the backward direction `</S>`.
    ///
    /// It depends on `start` alone, so a sentence of `n` words needs `n` steps instead of `n + 2` whenever
    /// the boundaries' own vectors are not wanted. `start` and what comes out are constants.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room or libtorch fails.
    pub fn after_boundaries(&self, start: &StartState) -> Result<StartState, DeviceError> {
        let table = self.token_vectors(&[chars::BEGIN_SENTENCE_TOKEN, chars::END_SENTENCE_TOKEN])?;
        // One sentence of two tokens is read as `<S>` first by the forward and `</S>` first by the backward
        // direction; two sentences of one token each give both after one step.
        let run = self.run(&table, &[vec![0], vec![1]], start, true)?;
        let last = run.last.ok_or_else(|| DeviceError::Torch { message: "no state was captured".to_owned() })?;
        let pick = |t: &Tensor| -> Result<Tensor, DeviceError> {
            let forward = t.f_narrow(0, 0, 1)?.f_narrow(1, 0, 1)?;
            let backward = t.f_narrow(0, 1, 1)?.f_narrow(1, 1, 1)?;
            Ok(Tensor::f_cat(&[forward, backward], 0)?)
        };
        Ok(StartState { layers: last.map(pick)?, per_sentence: false })
    }

    /// Floating point operations of the products of the LSTM stacks for one token.
    pub fn flop_per_token(&self) -> f64 {
        self.layers.iter().map(LstmLayer::flop).sum()
    }

    /// Floating point operations of the products of the token layer for these words.
    pub fn flop_of_words<'w>(&self, words: impl IntoIterator<Item = &'w str>) -> f64 {
        let mut ids = vec![0; self.max_characters];
        words.into_iter().map(|word| self.char_cnn.flop(chars::char_ids(word, self.max_characters, &mut ids))).sum()
    }
}

impl Activations {
    /// State after each sentence's last token, row `b` for sentence `b` of those given; `None` when it was not asked
    /// for.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room or libtorch fails.
    pub fn into_last(self) -> Result<Option<StartState>, DeviceError> {
        let Some(last) = self.last else { return Ok(None) };
        let mut place = vec![0_i64; self.packing.sentences()];
        for row in 0..place.len() {
            place[self.packing.sentence_at(row)] = row as i64;
        }
        let unsort = |t: &Tensor| -> Result<Tensor, DeviceError> {
            Ok(t.f_index_select(1, &tensors::index(&place, t.device())?)?)
        };
        Ok(Some(StartState { layers: last.map(unsort)?, per_sentence: true }))
    }
}
