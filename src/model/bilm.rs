//! The bidirectional language model: token layer, two LSTM stacks, layers out.

use std::convert::Infallible;

use tch::{Device, Kind, Tensor};

use super::{
    Activations, DeviceError, DeviceName, Dropout, NoDropout, PackedBatch, Parameters, Precision, StartState,
    activations::Reading,
    cell::{CellKernels, Usage},
    char_cnn::{self, CharCnn, WordIds},
    device::set_up_cpu,
    device_table::DeviceTable,
    indices::{Form, Indices},
    lstm::{DeviceLayer, FusedLayer, LayerOutput, LstmLayer, Words},
    packing::MIN_WIDTH,
    parameters::{FileTensors, NamedTensors},
    start_state::{LayerState, OTHER_MODEL, StateShape},
    tensors::{self, Change},
    word_parts::WordParts,
};
use crate::{chars, options::ModelOptions, weights::Weights};

/// A model whose tensors are leaves of a graph of their own, so that several threads can take gradients of it, and the
/// derivation from parameters has its gradients taken once.
#[derive(Debug)]
pub(crate) struct Cut {
    /// Computes with `leaves`.
    pub(crate) model: BiLm,
    /// What the model derived from parameters, in their graph; in the order of `leaves`.
    pub(crate) derived: Vec<Tensor>,
    /// The same numbers as leaves.
    pub(crate) leaves: Vec<Tensor>,
    /// Number of leaves of the token layer; they come first.
    pub(crate) of_token_layer: usize,
}

/// The biLM on one device.
///
/// Inference and training share it. [`BiLm::token_table`] and [`BiLm::forward`] work on tensors, and gradients flow
/// through them to the parameters of [`BiLm::from_parameters`]. [`BiLm::token_vectors`] and [`BiLm::run`] are their
/// callers for inference: they upload, switch gradients off, and download.
#[derive(Debug)]
pub struct BiLm {
    char_cnn: CharCnn,
    layers: Vec<Layer>,
    device: DeviceName,
    precision: Precision,
    state: StateShape,
    max_characters: usize,
    /// Floating point operations of the token layer's products for a word of so many characters.
    word_flop: Vec<f64>, // [M + 1]
}

/// One layer of the LSTM stacks.
#[derive(Debug)]
enum Layer {
    Float(LstmLayer),
    Fused(FusedLayer),
    Device(DeviceLayer),
}

/// The passes between products.
#[derive(Debug, Clone, Copy)]
enum Passes {
    /// libtorch's operations.
    Torch,
    /// Our own in host memory, for float32 on the CPU and for products of 8-bit integers.
    Host,
    /// Our own kernels of GPUs.
    Kernels(CellKernels),
}

impl Passes {
    /// Those of computations without gradients, on a device that is set up.
    fn of_inference(device: DeviceName, precision: Precision) -> Result<Self, DeviceError> {
        Ok(match (device, precision) {
            (DeviceName::Cpu, Precision::F32 | Precision::Int8) => Self::Host,
            (DeviceName::Cpu, _) | (_, Precision::F64 | Precision::Int8) => Self::Torch,
            (DeviceName::Cuda(_), _) => {
                CellKernels::of(device.torch(), Usage::Inference, precision.kind())?.map_or(Self::Torch, Self::Kernels)
            }
        })
    }
}

impl Layer {
    fn map<E>(&self, change: &mut Change<'_, E>) -> Result<Self, E> {
        Ok(match self {
            Self::Float(layer) => Self::Float(layer.map(change)?),
            Self::Fused(layer) => Self::Fused(layer.map(change)?),
            Self::Device(layer) => Self::Device(layer.map(change)?),
        })
    }

    /// `table`, if given, is where the batch has read `x`.
    fn forward(
        &self,
        x: &Tensor,
        table: Option<&Tensor>,
        batch: &PackedBatch,
        indices: &Indices,
        start: LayerState,
        capture: bool,
    ) -> Result<LayerOutput, DeviceError> {
        let packings = batch.packings();
        match self {
            Self::Float(layer) => layer.forward(x, packings, &indices.begins, start, capture),
            Self::Fused(layer) => layer.forward(x, table.map(|_| batch.ids()), packings, start, capture),
            Self::Device(layer) => {
                let words = table.zip(indices.words.as_ref()).map(|(table, indices)| Words { table, indices });
                layer.forward(x, words.as_ref(), packings, indices.marks.as_ref(), start, capture)
            }
        }
    }

    fn float(&self) -> Option<&LstmLayer> {
        match self {
            Self::Float(layer) => Some(layer),
            Self::Fused(_) | Self::Device(_) => None,
        }
    }

    /// Whether products of few rows have the bits of taller ones.
    fn is_narrow(&self) -> bool {
        match self {
            Self::Float(_) | Self::Device(_) => false,
            Self::Fused(_) => true,
        }
    }

    /// In which form it reads where sentences begin.
    fn form(&self) -> Form {
        match self {
            Self::Float(_) => Form::Rows,
            Self::Device(_) => Form::Marks,
            Self::Fused(_) => Form::Host,
        }
    }

    /// Most words that it multiplies at once, if it multiplies words instead of tokens and reads their numbers on the device.
    fn words_at_once(&self) -> Option<usize> {
        match self {
            Self::Float(_) | Self::Fused(_) => None,
            Self::Device(layer) => Some(layer.words_at_once()),
        }
    }

    /// How its outputs are read.
    fn reading(&self) -> Reading {
        match self {
            Self::Float(_) => Reading::Torch,
            Self::Fused(_) => Reading::Host,
            Self::Device(layer) => Reading::Kernels(layer.kernels()),
        }
    }

    fn flop(&self) -> f64 {
        match self {
            Self::Float(layer) => layer.flop(),
            Self::Fused(layer) => layer.flop(),
            Self::Device(layer) => layer.flop(),
        }
    }
}

/// Refuses [`Precision::Int8`] on GPUs and for gradients.
fn check_int8(device: DeviceName, passes: Passes) -> Result<(), DeviceError> {
    let refused = |reason| Err(DeviceError::Precision { precision: Precision::Int8, device, reason });
    if device != DeviceName::Cpu {
        return refused("it is for CPUs; use --device cpu, or bf16, f16 or tf32 on GPUs");
    }
    match passes {
        Passes::Host => Ok(()),
        _ => refused("it has no gradients, and no version of libtorch's operations"),
    }
}

impl BiLm {
    /// Puts a model for inference on a device.
    ///
    /// # Errors
    /// [`DeviceError::Missing`] when there is no such device, [`DeviceError::MissingTensor`] and
    /// [`DeviceError::TensorShape`] when `weights` do not match the options, [`DeviceError::OutOfMemory`] when the device
    /// has no room for the weights, [`DeviceError::Precision`] when it does not have the precision, [`DeviceError::Torch`] when
    /// libtorch fails.
    pub fn new(
        options: &ModelOptions,
        weights: &Weights,
        device: DeviceName,
        precision: Precision,
    ) -> Result<Self, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        let passes = || Passes::of_inference(device, precision);
        Self::derive(options, &FileTensors::new(options, weights), device, precision, passes)
    }

    /// As [`BiLm::new`], but with libtorch's operations in place of our own passes: the code of gradients, of float64, and of GPUs
    /// without kernels of our own, so that it can be tested anywhere.
    ///
    /// # Errors
    /// As [`BiLm::new`].
    pub fn with_torch_operations(
        options: &ModelOptions,
        weights: &Weights,
        device: DeviceName,
        precision: Precision,
    ) -> Result<Self, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        Self::derive(options, &FileTensors::new(options, weights), device, precision, || Ok(Passes::Torch))
    }

    /// As [`BiLm::new`] on the CPU, but with the time loop and the kernels of GPUs, which are compiled for the CPU too: in float32 and
    /// bfloat16, for tests.
    ///
    /// # Errors
    /// As [`BiLm::new`].
    pub fn with_kernels_on_host(
        options: &ModelOptions,
        weights: &Weights,
        precision: Precision,
    ) -> Result<Self, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        let device = DeviceName::Cpu;
        if !matches!(precision, Precision::F32 | Precision::Bf16) {
            let reason = "the kernels of GPUs are compiled for the CPU in f32 and bf16 only";
            return Err(DeviceError::Precision { precision, device, reason });
        }
        let passes = || Ok(Passes::Kernels(CellKernels::Host));
        Self::derive(options, &FileTensors::new(options, weights), device, precision, passes)
    }

    /// A model for training, derived from parameters on their device. What it derives is part of the graph: after a
    /// step of the optimiser, derive it again. The former model then computes with old and new values together, as some
    /// of its tensors are the parameters themselves and others are copies.
    ///
    /// `precision` is that of the computation. With parameters in float32 and a computation in bfloat16, gradients are
    /// float32.
    ///
    /// # Errors
    /// [`DeviceError::MissingTensor`] when `parameters` are those of other options, [`DeviceError::OutOfMemory`] when
    /// the device has no room, [`DeviceError::Torch`] when libtorch fails.
    pub fn from_parameters(
        options: &ModelOptions,
        parameters: &Parameters,
        precision: Precision,
    ) -> Result<Self, DeviceError> {
        Self::derive(options, parameters, parameters.device(), precision, || Ok(Passes::Torch))
    }

    /// A model for the evaluation of parameters, without gradients, which computes as inference does.
    ///
    /// # Errors
    /// As [`BiLm::from_parameters`].
    pub(crate) fn of_parameters_without_gradients(
        options: &ModelOptions,
        parameters: &Parameters,
        precision: Precision,
    ) -> Result<Self, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        let passes = || Passes::of_inference(parameters.device(), precision);
        Self::derive(options, parameters, parameters.device(), precision, passes)
    }

    fn derive(
        options: &ModelOptions,
        source: &dyn NamedTensors,
        device: DeviceName,
        precision: Precision,
        passes: impl FnOnce() -> Result<Passes, DeviceError>,
    ) -> Result<Self, DeviceError> {
        // Products of float16 take libtorch hundreds of times as long on most CPUs.
        if matches!(precision, Precision::Tf32 | Precision::F16) && device == DeviceName::Cpu {
            return Err(DeviceError::Precision {
                precision,
                device,
                reason: "it is for GPUs; use f32 or int8 on CPUs",
            });
        }
        device.set_up()?;
        let passes = passes()?;
        let torch = device.torch();
        if precision == Precision::Int8 {
            check_int8(device, passes)?;
        }
        let layer = |layer: usize| -> Result<Layer, DeviceError> {
            Ok(match passes {
                Passes::Kernels(kernels) => {
                    Layer::Device(DeviceLayer::new(options, source, layer, precision, torch, kernels)?)
                }
                Passes::Host => Layer::Fused(FusedLayer::new(options, source, layer, precision)?),
                Passes::Torch => Layer::Float(LstmLayer::new(options, source, layer, precision, torch)?),
            })
        };
        let layers = (0..options.lstm.n_layers).map(layer).collect::<Result<_, _>>()?;
        Ok(Self {
            char_cnn: match passes {
                Passes::Host => CharCnn::fused(options, source, precision)?,
                Passes::Torch | Passes::Kernels(_) => CharCnn::batched(options, source, precision.kind(), torch)?,
            },
            layers,
            device,
            precision,
            state: StateShape {
                layers: options.lstm.n_layers,
                projection_dim: options.lstm.projection_dim,
                cells: options.lstm.dim,
                kind: precision.kind(),
                device: torch,
            },
            max_characters: options.char_cnn.max_characters_per_token,
            word_flop: (0..=options.char_cnn.max_characters_per_token)
                .map(|used| char_cnn::flop(options, used))
                .collect(),
        })
    }

    /// With the passes of training on GPUs, by the same code on the CPU.
    #[cfg(test)]
    pub(super) fn with_training_kernels_on_host(mut self) -> Self {
        let of_layer = |layer| match layer {
            Layer::Float(layer) => Layer::Float(layer.with_kernels_on_host()),
            other => other,
        };
        self.layers = self.layers.into_iter().map(of_layer).collect();
        self
    }

    /// Another handle on the same tensors, for another thread.
    pub fn share(&self) -> Self {
        let Ok(shared) = self.map::<Infallible>(&mut |tensor| Ok(tensor.shallow_clone()));
        shared
    }

    /// The same with every tensor changed, always in the same order: those of the token layer first.
    fn map<E>(&self, change: &mut Change<'_, E>) -> Result<Self, E> {
        let char_cnn = self.char_cnn.map(change)?;
        let layers = self.layers.iter().map(|layer| layer.map(change)).collect::<Result<_, _>>()?;
        Ok(Self { char_cnn, layers, word_flop: self.word_flop.clone(), ..*self })
    }

    /// Cuts the graph between the parameters and this model.
    ///
    /// # Errors
    /// [`DeviceError::Torch`] when libtorch fails.
    pub(crate) fn cut(&self) -> Result<Cut, DeviceError> {
        let (mut derived, mut leaves) = (Vec::new(), Vec::new());
        let change: &mut Change<'_, DeviceError> = &mut |tensor: &Tensor| {
            let leaf = tensor.f_detach()?.f_set_requires_grad(true)?;
            derived.push(tensor.shallow_clone());
            leaves.push(leaf.shallow_clone());
            Ok(leaf)
        };
        let model = self.map(change)?;
        let mut of_token_layer = 0;
        let Ok(_) = self.char_cnn.map::<Infallible>(&mut |tensor| {
            of_token_layer += 1;
            Ok(tensor.shallow_clone())
        });
        Ok(Cut { model, derived, leaves, of_token_layer })
    }

    /// The device of the tensors.
    pub fn device(&self) -> DeviceName {
        self.device
    }

    /// The layers of a model in libtorch's operations; none of another one.
    pub(super) fn layers(&self) -> Vec<&LstmLayer> {
        self.layers.iter().filter_map(Layer::float).collect()
    }

    pub(super) fn state_shape(&self) -> StateShape {
        self.state
    }

    /// Switches libtorch to the products of this precision, where it has a switch.
    pub(super) fn choose_precision(&self) {
        self.precision.choose(self.device);
    }

    /// Minimum number of rows of a step: 1 where products of any height give a row the same bits.
    pub(super) fn min_width(&self) -> usize {
        if self.layers.iter().all(Layer::is_narrow) { 1 } else { MIN_WIDTH }
    }

    /// Kind of token vectors.
    pub(super) fn kind(&self) -> Kind {
        self.state.kind
    }

    pub(super) fn torch_device(&self) -> Device {
        self.state.device
    }

    /// `P`: half of a vector.
    pub fn projection_dim(&self) -> usize {
        self.state.projection_dim
    }

    /// Token vectors of words, `[U, P]` on the device, in the order of the words.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room or libtorch fails.
    pub fn token_table(&self, words: &[&str]) -> Result<Tensor, DeviceError> {
        if words.is_empty() {
            let shape = [0, self.state.projection_dim as i64];
            return Ok(Tensor::f_zeros(shape, (self.state.kind, self.state.device))?);
        }
        set_up_cpu();
        self.precision.choose(self.device);
        self.char_cnn.forward(&WordIds::new(words.iter().copied(), self.max_characters))
    }

    /// The layers of a batch, from a table of token vectors `[U, P]` and the state in which its sentences start.
    ///
    /// The result has `L + 1` layers `[2, R, P]` in packed rows, the token layer first, with `dropout` applied to each.
    /// With `capture`, [`Activations::into_last`] returns the state after each sentence's last token.
    ///
    /// The table is in the precision and on the device of the model; `start` is a state of this model or of one with the
    /// same options, precision and device.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the batch does not fit the device (a smaller one may),
    /// [`DeviceError::InvalidBatch`] when an index of the batch is not in the table, when `start` is a state of another
    /// model, or when a row holds several sentences and `start` is not a constant or `capture` is set;
    /// [`DeviceError::Torch`] when libtorch fails.
    pub fn forward(
        &self,
        table: &Tensor,
        batch: &PackedBatch,
        start: &StartState,
        dropout: &dyn Dropout,
        capture: bool,
    ) -> Result<Activations, DeviceError> {
        set_up_cpu();
        self.precision.choose(self.device);
        let packings = batch.packings();
        if (capture || !start.is_constant()) && !packings.of(0).is_one_per_row() {
            return Err(DeviceError::InvalidBatch { reason: "a state per sentence needs a row per sentence" });
        }
        // A kernel that meets such an index makes a GPU useless for the rest of the process.
        if !batch.is_within(table.size().first().copied().unwrap_or(0)) {
            return Err(DeviceError::InvalidBatch { reason: "an index of the batch is not in the token table" });
        }
        if !start.is_of(self.state) {
            return Err(DeviceError::InvalidBatch { reason: OTHER_MODEL });
        }
        let form = self.layers.first().map_or(Form::Host, Layer::form);
        // Dropout gives tokens of one word different vectors.
        let table_of_first = dropout.keeps_all().then_some(table);
        let words_at_once = table_of_first.and_then(|_| self.layers.first()?.words_at_once());
        let parts = words_at_once.map(|most| WordParts::new(batch.ids(), packings.steps(), most));
        let indices = Indices::new(batch, form, parts.as_ref(), self.state.device)?;
        let [forward, backward] = &indices.read;
        let read = [table.f_index_select(0, forward)?, table.f_index_select(0, backward)?]; // [R, P] each
        let mut x = dropout.apply(0, Tensor::f_stack(&read, 0)?)?; // [2, R, P]
        let (mut layers, mut last, mut saved_flop) = (Vec::new(), Vec::new(), 0.0);
        for (k, (lstm, start)) in self.layers.iter().zip(start.in_packed_rows(packings)?).enumerate() {
            let output = lstm.forward(&x, table_of_first.filter(|_| k == 0), batch, &indices, start, capture)?;
            saved_flop += output.saved_flop;
            layers.push(std::mem::replace(&mut x, dropout.apply(k + 1, output.y)?));
            last.extend(output.last);
        }
        layers.push(x);
        let last = capture.then(|| StartState::per_sentence(last));
        let reading = self.layers.first().map_or(Reading::Host, Layer::reading);
        Ok(Activations::new(packings.clone(), layers, last, reading, saved_flop))
    }

    /// Token vectors of words, `[U, P]` row-major float32 on the host, in the order of the words.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room or libtorch fails.
    pub fn token_vectors(&self, words: &[&str]) -> Result<Vec<f32>, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        tensors::download(&self.token_table(words)?)
    }

    /// Runs a batch of sentences, one in each row.
    ///
    /// `table` holds token vectors, `[U, P]` row-major, as [`BiLm::token_vectors`] gives them; a sentence is one index
    /// `0..U` per token. The result has `L + 1` layers `[2, R, P]` in packed rows, the token layer first;
    /// [`Activations::combine`] and [`LayerValues::token`](super::LayerValues::token) find a token's vector in them.
    ///
    /// In a state per sentence, row `b` is for sentence `b`; sentences beyond its last row start from zeros.
    ///
    /// With `capture` the state after each sentence's last token is kept; [`Activations::into_last`] returns it.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the batch does not fit the device (a smaller one may),
    /// [`DeviceError::InvalidBatch`] when there is no sentence, one has no token, an index is not in the table, the table
    /// is not a number of token vectors, or `start` is a state of another model; [`DeviceError::Torch`] when libtorch
    /// fails.
    pub fn run(
        &self,
        table: &[f32],
        sentences: &[Vec<i64>],
        start: &StartState,
        capture: bool,
    ) -> Result<Activations, DeviceError> {
        self.infer(table, &PackedBatch::of_sentences_in(sentences, self.min_width())?, start, capture)
    }

    /// As [`BiLm::run`], with several sentences in a row of the batch, one after the other: `rows` holds every index
    /// into `sentences` once. Rows of about equal numbers of tokens leave no padding. `start` is a constant.
    ///
    /// The result is read as that of [`BiLm::run`], sentence by sentence, whatever row they ran in; no state is kept.
    ///
    /// # Errors
    /// As [`BiLm::run`]; [`DeviceError::InvalidBatch`] also when a sentence is in no row or in two, a row has none, or
    /// `start` is not a constant.
    pub fn run_in_rows(
        &self,
        table: &[f32],
        sentences: &[Vec<i64>],
        rows: Vec<Vec<usize>>,
        start: &StartState,
    ) -> Result<Activations, DeviceError> {
        self.infer(table, &PackedBatch::of_rows_in(sentences, rows, self.min_width())?, start, false)
    }

    /// As [`BiLm::run_in_rows`], with the vectors of words in the rows `words` of a table that is on the device.
    ///
    /// # Errors
    /// As [`BiLm::run_in_rows`].
    pub(crate) fn run_on_table(
        &self,
        table: &DeviceTable,
        words: &[i64],
        sentences: &[Vec<i64>],
        rows: Vec<Vec<usize>>,
        start: &StartState,
    ) -> Result<Activations, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        let batch = PackedBatch::of_rows_in(sentences, rows, self.min_width())?;
        let table = table.rows()?.f_index_select(0, &tensors::index(words, self.state.device)?)?;
        self.forward(&table, &batch, start, &NoDropout, false)
    }

    /// Uploads the table and runs a batch without gradients.
    fn infer(
        &self,
        table: &[f32],
        batch: &PackedBatch,
        start: &StartState,
        capture: bool,
    ) -> Result<Activations, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        let StateShape { projection_dim, kind, device, .. } = self.state;
        if !table.len().is_multiple_of(projection_dim) {
            return Err(DeviceError::InvalidBatch { reason: "the table must hold whole token vectors" });
        }
        let shape = [(table.len() / projection_dim) as i64, projection_dim as i64];
        let table = tensors::upload(table, &shape, kind, device)?;
        self.forward(&table, batch, start, &NoDropout, capture)
    }

    /// The zero state, a constant.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room or libtorch fails.
    pub fn zero_state(&self) -> Result<StartState, DeviceError> {
        StartState::zero(self.state)
    }

    /// A constant state from `2 L (P + D)` numbers: for each layer, the lowest first, `h` forward (`P`), `h` backward
    /// (`P`), `c` forward (`D`), `c` backward (`D`).
    ///
    /// # Errors
    /// [`DeviceError::InvalidBatch`] when there are more numbers or fewer, [`DeviceError::OutOfMemory`] when the device
    /// has no room, [`DeviceError::Torch`] when libtorch fails.
    pub fn state_from_numbers(&self, numbers: &[f32]) -> Result<StartState, DeviceError> {
        StartState::constant(self.state, numbers)
    }

    /// A state per sentence from the numbers of [`StartState::numbers`]: what a checkpoint of training keeps. The number
    /// of sentences follows from how many there are.
    ///
    /// # Errors
    /// As [`BiLm::state_from_numbers`].
    pub fn states_from_numbers(&self, numbers: &[f32]) -> Result<StartState, DeviceError> {
        StartState::per_sentence_from(self.state, numbers)
    }

    /// The state after the forward direction has read `<S>` and the backward direction `</S>`.
    ///
    /// It depends on `start` alone, so a sentence of `n` words needs `n` steps instead of `n + 2` whenever
    /// the boundaries' own vectors are not needed. `start` and the result are constants.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room or libtorch fails.
    pub fn after_boundaries(&self, start: &StartState) -> Result<StartState, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        let table = self.token_vectors(&[chars::BEGIN_SENTENCE_TOKEN, chars::END_SENTENCE_TOKEN])?;
        // One sentence of two tokens is read as `<S>` first by the forward and `</S>` first by the backward
        // direction; two sentences of one token each give both after one step.
        let last = self.run(&table, &[vec![0], vec![1]], start, true)?.into_last()?;
        last.ok_or_else(|| DeviceError::internal("no state was captured"))?.of_two_sentences()
    }

    /// Floating point operations of the products of the LSTM stacks for one token.
    pub fn flop_per_token(&self) -> f64 {
        self.layers.iter().map(Layer::flop).sum()
    }

    /// Floating point operations of the products of the token layer for these words.
    pub fn flop_of_words<'w>(&self, words: impl IntoIterator<Item = &'w str>) -> f64 {
        let mut ids = vec![0; self.max_characters];
        words.into_iter().map(|word| self.word_flop[chars::char_ids(word, self.max_characters, &mut ids)]).sum()
    }
}

#[cfg(test)]
#[path = "cut_tests.rs"]
mod cut_tests;
