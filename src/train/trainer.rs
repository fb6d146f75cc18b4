//! The training step.
//!
//! ```text
//! parameters --derive--> biLM --cut--> leaves, shared by all lanes
//! distinct words of the window --char CNN, in chunks--> token vectors --cut--> leaf of each lane
//! lane: rows of the window --LSTM--> top outputs --softmax--> loss and derivatives --LSTM backward--> gradients
//! sums over lanes in order --char CNN backward--> --derivation backward--> gradients of the parameters
//! one norm, clip, optimiser
//! ```
//!
//! The number of chunks and lanes is a setting of the recipe, and sums are taken in their order: the bits do not depend
//! on the number of threads.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use tch::{Kind, Tensor};

use super::{
    TrainError,
    draws::{Draws, SeededDraws},
    lane::{Lane, LaneGradients, product},
    loss::{Head, HeadGradients, Output, exact_kind},
    optimizer::Update,
    pool::{Pool, Task},
    recipe::Recipe,
    snapshot::{Counters, Saved, Snapshot},
    window::Window,
};
use crate::{
    model::{BiLm, Cut, DeviceError, DeviceName, Parameters, Precision, StartState, start_state::LayerState, tensors},
    options::ModelOptions,
    weights::{self, Weights},
};

/// Names of the softmax among the parameters.
const SOFTMAX: [&str; 2] = ["softmax/W", "softmax/b"];

/// Numbers that are converted to float64 together.
const PIECE: i64 = 1 << 20;

/// A biLM and its LM head in float32.
#[derive(Debug, Clone, PartialEq)]
pub struct LanguageModel {
    /// The tensors of the weights file.
    pub weights: Weights,
    /// `softmax/W [V, P]`
    pub softmax_weight: weights::Tensor,
    /// `softmax/b [V]`
    pub softmax_bias: weights::Tensor,
}

impl LanguageModel {
    /// Initial values for a vocabulary of so many words.
    pub fn initial(options: &ModelOptions, words: usize, seed: u64) -> Self {
        let (softmax_weight, softmax_bias) = super::initial_softmax(words, options.lstm.projection_dim, seed);
        Self { weights: super::initial_weights(options, seed), softmax_weight, softmax_bias }
    }
}

/// Where a run computes. None of it changes what the run computes, except that a GPU rounds in other places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resources {
    /// The device.
    pub device: DeviceName,
    /// Threads on a CPU.
    pub threads: usize,
    /// Number of this process's first row among the rows of all processes: dropout depends on it.
    pub first_row: usize,
}

impl Default for Resources {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Self { device: DeviceName::Cpu, threads, first_row: 0 }
    }
}

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepReport {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean negative logarithm of the probabilities, forward. That of a sampled softmax is not comparable with others.
    pub loss_forward: f64,
    /// Backward.
    pub loss_backward: f64,
    /// Half of their sum.
    pub loss: f64,
    /// Norm of all gradients of the scaled loss, before clipping.
    pub grad_norm: f64,
    /// Factor of all gradients: below 1 if they were clipped.
    pub clip_scale: f64,
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Predictions of each direction.
    pub tokens: u64,
    /// Distinct words, for which the char CNN ran.
    pub words: u64,
    /// Floating point operations of the products, in 1e9: three times those of the forward pass.
    pub gflop: f64,
}

/// A run: parameters, state of the optimiser, LSTM states and counters.
#[derive(Debug)]
pub struct Trainer {
    options: ModelOptions,
    recipe: Recipe,
    resources: Resources,
    parameters: Parameters,
    output: Output,
    /// By name of the parameter.
    slots: BTreeMap<String, Vec<Tensor>>,
    /// Of each lane.
    states: Vec<StartState>,
    pool: Pool,
    counters: Counters,
}

/// Gradients of the scaled loss.
struct Gradients {
    /// In the order of the names of the parameters.
    dense: Vec<Tensor>,
    softmax: Output,
    /// Words of the rows of `softmax`; `None`: all.
    rows: Option<Tensor>,
    /// Mean loss of each direction.
    losses: [f64; 2],
    /// States after the window.
    states: Vec<StartState>,
    words: usize,
    gflop: f64,
}

impl Trainer {
    /// A run that begins with a model.
    ///
    /// # Errors
    /// [`TrainError::Recipe`] when the recipe is not one for this model, [`TrainError::Device`] when the weights do not fit
    /// the options or the device has no room.
    pub fn new(
        options: &ModelOptions,
        recipe: Recipe,
        resources: Resources,
        model: &LanguageModel,
    ) -> Result<Self, TrainError> {
        let LanguageModel { weights, softmax_weight, softmax_bias } = model;
        let place = |tensor: &weights::Tensor| {
            Saved { shape: tensor.shape.clone(), values: super::Values::F32(tensor.data.clone()) }.tensor()
        };
        let softmax = [place(softmax_weight)?, place(softmax_bias)?];
        let parameters = Parameters::new(options, weights, resources.device, parameter_precision(&recipe))?;
        let mut trainer = Self::assemble(options, recipe, resources, parameters, softmax)?;
        trainer.states = trainer.zero_states()?;
        Ok(trainer)
    }

    /// A run that goes on from a snapshot of one with the same recipe; number of lanes, threads and device may differ.
    ///
    /// # Errors
    /// As [`Trainer::new`]; [`TrainError::Snapshot`] when a tensor is missing or has another shape.
    pub fn restore(
        options: &ModelOptions,
        recipe: Recipe,
        resources: Resources,
        snapshot: &Snapshot,
    ) -> Result<Self, TrainError> {
        let find = |name: &str, shape: Option<&[usize]>| snapshot.find(name, shape);
        // A closure of the model returns its own error: what is missing is found first.
        for spec in options.weight_plan() {
            find(&format!("weights/{}", spec.name), Some(&spec.shape))?;
        }
        let parameters = Parameters::of_tensors(options, resources.device, parameter_precision(&recipe), |spec| {
            let missing = || DeviceError::MissingTensor { name: spec.name.clone() };
            snapshot.tensors.get(&format!("weights/{}", spec.name)).ok_or_else(missing)?.tensor()
        })?;
        let softmax = [find("weights/softmax/W", None)?.tensor()?, find("weights/softmax/b", None)?.tensor()?];
        let mut trainer = Self::assemble(options, recipe, resources, parameters, softmax)?;
        trainer.restore_slots(snapshot)?;
        trainer.states = trainer.saved_states(snapshot)?;
        trainer.counters = snapshot.counters;
        Ok(trainer)
    }

    fn assemble(
        options: &ModelOptions,
        recipe: Recipe,
        resources: Resources,
        parameters: Parameters,
        softmax: [Tensor; 2],
    ) -> Result<Self, TrainError> {
        let kind = parameter_precision(&recipe).kind();
        let [weight, bias] = softmax
            .map(|t| -> Result<Tensor, DeviceError> { Ok(t.f_to_device(resources.device.torch())?.f_to_kind(kind)?) });
        let output = Output { weight: weight?, bias: bias? };
        let (words, width) = (output.words() as i64, options.lstm.projection_dim as i64);
        if output.weight.size() != [words, width] || output.bias.size() != [words] {
            let found = (output.weight.size(), output.bias.size());
            return Err(TrainError::Recipe(format!("softmax weight and bias of shapes {found:?} for width {width}")));
        }
        recipe.check(options, output.words())?;
        let parameters = parameters.require_gradients()?;
        let mut slots = BTreeMap::new();
        for (name, tensor) in parameters.iter().chain(SOFTMAX.into_iter().zip([&output.weight, &output.bias])) {
            slots.insert(name.to_owned(), recipe.optimizer.initial(tensor)?);
        }
        let threads = if resources.device == DeviceName::Cpu { resources.threads.min(recipe.lanes) } else { 1 };
        Ok(Self {
            options: options.clone(),
            recipe,
            resources,
            parameters,
            output,
            slots,
            states: Vec::new(),
            pool: Pool::new(threads),
            counters: Counters::default(),
        })
    }

    /// The settings of the run.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// Steps and tokens so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Negatives of each direction; `None` for the full softmax.
    pub fn samples(&self) -> Option<usize> {
        self.recipe.classes.samples(self.output.words())
    }

    /// Makes a step with the window that follows that of the step before.
    ///
    /// # Errors
    /// [`TrainError::Window`] when the window has other rows or unknown words, [`TrainError::NotFinite`] when the loss or the
    /// norm of the gradient is not finite, [`TrainError::Device`] when the device has no room or libtorch fails before the
    /// update begins: in these cases nothing was changed.
    pub fn step(&mut self, window: &Window) -> Result<StepReport, TrainError> {
        let step = u32::try_from(self.counters.step + 1).map_err(|_| TrainError::Recipe("2^32 steps".to_owned()))?;
        let Recipe { seed, dropout: rate, .. } = self.recipe;
        self.step_with(window, &(Arc::new(SeededDraws { seed, step, rate, first_row: self.resources.first_row }) as _))
    }

    /// As [`Trainer::step`], with given random choices.
    ///
    /// # Errors
    /// As [`Trainer::step`].
    pub fn step_with(&mut self, window: &Window, draws: &Arc<dyn Draws>) -> Result<StepReport, TrainError> {
        if let Some(problem) = window.problem(self.recipe.rows, self.output.words()) {
            return Err(TrainError::Window(problem));
        }
        let step = self.counters.step + 1;
        let gradients = self.gradients(window, draws)?;
        let [loss_forward, loss_backward] = gradients.losses;
        let grad_norm = self.norm(&gradients)?;
        for (what, value) in [
            ("the forward loss", loss_forward),
            ("the backward loss", loss_backward),
            ("the gradient's norm", grad_norm),
        ] {
            if !value.is_finite() {
                return Err(TrainError::NotFinite { step, what });
            }
        }
        let clip_scale =
            self.recipe.clip_norm.map_or(1.0, |clip| if grad_norm > clip { clip / grad_norm } else { 1.0 });
        let learning_rate = self.recipe.learning_rate * self.recipe.schedule.factor(step);
        let (words, gflop) = (gradients.words as u64, gradients.gflop);
        let update = Update { optimizer: self.recipe.optimizer, rate: learning_rate, clip: clip_scale, step };
        self.states = self.apply(gradients, update)?;
        let tokens = window.predictions() as u64;
        self.counters = Counters { step, tokens: self.counters.tokens + tokens };
        Ok(StepReport {
            step,
            loss_forward,
            loss_backward,
            loss: f64::midpoint(loss_forward, loss_backward),
            grad_norm,
            clip_scale,
            learning_rate,
            tokens,
            words,
            gflop,
        })
    }

    /// Gradients of the scaled loss for a window. Changes nothing.
    fn gradients(&self, window: &Window, draws: &Arc<dyn Draws>) -> Result<Gradients, TrainError> {
        let heads = self.heads(window, &**draws)?;
        let derived = BiLm::from_parameters(&self.options, &self.parameters, self.recipe.precision)?;
        let cut = derived.cut()?;
        let tokens = Tokens::compute(&self.pool, &cut, window, self.recipe.lanes)?;
        let lanes = self.lanes(&cut, &tokens.table()?, &tokens.places, window, &heads, draws)?;
        let (mut of_heads, mut tables, mut leaves, mut states) = ([vec![], vec![]], vec![], vec![], vec![]);
        for LaneGradients { heads: [forward, backward], table, leaves: of_lane, last } in lanes {
            of_heads[0].push(forward);
            of_heads[1].push(backward);
            tables.push(table);
            leaves.push(of_lane);
            states.push(last);
        }
        let table = sum(tables)?;
        let of_tokens = tokens.backward(&self.pool, &cut, &table)?;
        let mut sums = self.sums(of_tokens)?;
        sums.extend(self.sums(leaves)?);
        let dense = self.underived(&cut, &sums)?;
        let losses = losses(&of_heads, window.predictions())?;
        let (softmax, rows) = softmax_gradients(of_heads, &heads)?;
        let (words, gflop) = (window.words.len(), self.gflop(&derived, window));
        Ok(Gradients { dense, softmax, rows, losses, states, words, gflop })
    }

    /// Operations of the products of a step, in 1e9. The backward pass has two products for each of the forward pass.
    fn gflop(&self, model: &BiLm, window: &Window) -> f64 {
        let classes = self.samples().unwrap_or(self.output.words());
        let of_classes = 4.0 * (classes * self.options.lstm.projection_dim) as f64; // both directions
        let of_tokens = window.predictions() as f64 * (model.flop_per_token() + of_classes);
        3.0 * (of_tokens + model.flop_of_words(window.words.iter().map(AsRef::as_ref))) / 1e9
    }

    /// The losses of both directions.
    fn heads(&self, window: &Window, draws: &dyn Draws) -> Result<[Head; 2], TrainError> {
        let _no_gradients = tch::no_grad_guard();
        let kind = self.recipe.precision.kind();
        // The mean over the predictions, and half of the sum of both directions.
        let scale = self.recipe.gradient_scale / (2.0 * window.predictions() as f64);
        let head = |direction: usize| -> Result<Head, TrainError> {
            let targets = &window.targets[direction];
            match self.samples() {
                None => Ok(Head::full(&self.output, targets, scale, kind)?),
                Some(samples) => {
                    let negatives = draws.negatives(direction, self.output.words(), samples);
                    Head::sampled(&self.output, targets, negatives, scale, kind)
                }
            }
        };
        Ok([head(0)?, head(1)?])
    }

    /// Runs all lanes forward and backward.
    fn lanes(
        &self,
        cut: &Cut,
        table: &Tensor,
        places: &[i64],
        window: &Window,
        heads: &[Head; 2],
        draws: &Arc<dyn Draws>,
    ) -> Result<Vec<LaneGradients>, DeviceError> {
        let positions = window.positions;
        let task = |(rows, start): (Range<usize>, &StartState)| -> Task<LaneGradients> {
            let cells = rows.start * positions..rows.end * positions;
            let inputs = window.inputs.each_ref().map(|inputs| {
                let row = |row: &[u32]| row.iter().map(|&input| places[input as usize]).collect();
                inputs[cells.clone()].chunks(positions).map(row).collect()
            });
            let lane = Lane {
                model: cut.model.share(),
                leaves: cut.leaves[cut.of_token_layer..].iter().map(Tensor::shallow_clone).collect(),
                table: table.shallow_clone(),
                inputs,
                heads: heads.each_ref().map(|head| head.part(cells.start, cells.len())),
                start: start.share(),
                draws: Arc::clone(draws),
                dropout: self.recipe.dropout,
                rows,
                positions,
            };
            Box::new(move || lane.run())
        };
        self.pool.run(self.lane_rows().zip(&self.states).map(task).collect())
    }

    /// Rows of each lane.
    fn lane_rows(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let Recipe { rows, lanes, .. } = self.recipe;
        (0..lanes).map(move |lane| lane * rows / lanes..(lane + 1) * rows / lanes)
    }

    /// Sums over lanes, tensor by tensor.
    fn sums(&self, lanes: Vec<Vec<Tensor>>) -> Result<Vec<Tensor>, DeviceError> {
        let n = lanes.first().map_or(0, Vec::len);
        let mut by_tensor: Vec<Vec<Tensor>> = (0..n).map(|_| Vec::with_capacity(lanes.len())).collect();
        for lane in lanes {
            by_tensor.iter_mut().zip(lane).for_each(|(terms, term)| terms.push(term));
        }
        let task = |terms: Vec<Tensor>| -> Task<Tensor> { Box::new(move || sum(terms)) };
        self.pool.run(by_tensor.into_iter().map(task).collect())
    }

    /// Gradients of the parameters from those of what the model derived from them.
    fn underived(&self, cut: &Cut, gradients: &[Tensor]) -> Result<Vec<Tensor>, DeviceError> {
        let ends = cut.derived.iter().zip(gradients).map(|(derived, gradient)| product(derived, gradient));
        let ends = ends.collect::<Result<Vec<_>, _>>()?;
        let parameters: Vec<&Tensor> = self.parameters.iter().map(|(_, tensor)| tensor).collect();
        Ok(Tensor::f_run_backward(&ends, &parameters, false, false)?)
    }

    /// Norm of all gradients together.
    fn norm(&self, gradients: &Gradients) -> Result<f64, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        let all = gradients.dense.iter().chain([&gradients.softmax.weight, &gradients.softmax.bias]);
        let task = |tensor: &Tensor| -> Task<Tensor> {
            let tensor = tensor.shallow_clone();
            Box::new(move || sum_of_squares(&tensor))
        };
        let squares = Tensor::f_stack(&self.pool.run(all.map(task).collect())?, 0)?;
        Ok(f64::try_from(squares.f_sum(Kind::Double)?.f_sqrt()?)?)
    }

    /// Updates all parameters. Returns the states after the window.
    fn apply(&self, gradients: Gradients, update: Update) -> Result<Vec<StartState>, DeviceError> {
        let slots = |name: &str| -> Vec<Tensor> {
            self.slots.get(name).into_iter().flatten().map(Tensor::shallow_clone).collect()
        };
        let mut tasks: Vec<Task<()>> = Vec::new();
        for ((name, weight), gradient) in self.parameters.iter().zip(gradients.dense) {
            let (weight, slots) = (weight.shallow_clone(), slots(name));
            tasks.push(Box::new(move || update.dense(weight, &slots, gradient)));
        }
        let Output { weight, bias } = gradients.softmax;
        for ((name, tensor), gradient) in
            SOFTMAX.iter().zip([&self.output.weight, &self.output.bias]).zip([weight, bias])
        {
            let (weight, slots) = (tensor.shallow_clone(), slots(name));
            match &gradients.rows {
                None => tasks.push(Box::new(move || update.dense(weight, &slots, gradient))),
                Some(rows) => {
                    let rows = rows.shallow_clone();
                    tasks.push(Box::new(move || update.rows(&weight, &slots, &rows, gradient)));
                }
            }
        }
        self.pool.run(tasks)?;
        Ok(gradients.states)
    }

    /// The model as files hold it.
    ///
    /// # Errors
    /// [`TrainError::Device`] when libtorch fails.
    pub fn model(&self) -> Result<LanguageModel, TrainError> {
        let host = |tensor: &Tensor| -> Result<weights::Tensor, DeviceError> {
            let shape = tensor.size().iter().map(|&dim| dim as usize).collect();
            Ok(weights::Tensor { shape, data: tensors::download(tensor)? })
        };
        Ok(LanguageModel {
            weights: self.parameters.to_weights()?,
            softmax_weight: host(&self.output.weight)?,
            softmax_bias: host(&self.output.bias)?,
        })
    }

    /// The whole state of the run.
    ///
    /// # Errors
    /// [`TrainError::Device`] when libtorch fails or the host has no room.
    pub fn snapshot(&self) -> Result<Snapshot, TrainError> {
        let mut tensors = BTreeMap::new();
        for (name, tensor) in self.named_parameters() {
            tensors.insert(format!("weights/{name}"), Saved::of(tensor)?);
            let slots = self.slots.get(name).into_iter().flatten();
            for (slot, tensor) in self.recipe.optimizer.slots().iter().zip(slots) {
                tensors.insert(format!("optimizer/{slot}/{name}"), Saved::of(tensor)?);
            }
        }
        for layer in 0..self.options.lstm.n_layers {
            let joined = |part: fn(&LayerState) -> &Tensor| -> Result<Saved, DeviceError> {
                let of_lane = |state: &StartState| part(&state.layers()[layer]).shallow_clone();
                Saved::of(&Tensor::f_cat(&self.states.iter().map(of_lane).collect::<Vec<_>>(), 1)?)
            };
            tensors.insert(format!("lstm/{layer}/h"), joined(|state| &state.h)?);
            tensors.insert(format!("lstm/{layer}/c"), joined(|state| &state.c)?);
        }
        Ok(Snapshot { tensors, counters: self.counters })
    }

    /// Names and parameters, the softmax last.
    fn named_parameters(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.parameters.iter().chain(SOFTMAX.into_iter().zip([&self.output.weight, &self.output.bias]))
    }

    fn restore_slots(&mut self, snapshot: &Snapshot) -> Result<(), TrainError> {
        let _no_gradients = tch::no_grad_guard();
        for (name, slots) in &mut self.slots {
            for (kind, slot) in self.recipe.optimizer.slots().iter().zip(slots) {
                let shape: Vec<usize> = slot.size().iter().map(|&dim| dim as usize).collect();
                slot.f_copy_(&snapshot.find(&format!("optimizer/{kind}/{name}"), Some(&shape))?.tensor()?)?;
            }
        }
        Ok(())
    }

    fn zero_states(&self) -> Result<Vec<StartState>, DeviceError> {
        let lstm = &self.options.lstm;
        let options = (self.recipe.precision.kind(), self.resources.device.torch());
        let zeros = |rows: i64, dim: usize| Tensor::f_zeros([2, rows, dim as i64], options);
        let lane = |rows: Range<usize>| {
            let rows = rows.len() as i64;
            let layer = |_| Ok(LayerState { h: zeros(rows, lstm.projection_dim)?, c: zeros(rows, lstm.dim)? });
            Ok(StartState::per_sentence((0..lstm.n_layers).map(layer).collect::<Result<_, DeviceError>>()?))
        };
        self.lane_rows().map(lane).collect()
    }

    fn saved_states(&self, snapshot: &Snapshot) -> Result<Vec<StartState>, TrainError> {
        let lstm = &self.options.lstm;
        let mut layers = Vec::with_capacity(lstm.n_layers);
        for layer in 0..lstm.n_layers {
            let find = |part: &str, dim: usize| -> Result<Tensor, TrainError> {
                let saved = snapshot.find(&format!("lstm/{layer}/{part}"), Some(&[2, self.recipe.rows, dim]))?;
                let device = self.resources.device.torch();
                Ok(saved.tensor()?.f_to_device(device)?.f_to_kind(self.recipe.precision.kind())?)
            };
            layers.push(LayerState { h: find("h", lstm.projection_dim)?, c: find("c", lstm.dim)? });
        }
        let lane = |rows: Range<usize>| {
            let part = |t: &Tensor| t.f_narrow(1, rows.start as i64, rows.len() as i64)?.f_contiguous();
            let layer = |state: &LayerState| Ok(LayerState { h: part(&state.h)?, c: part(&state.c)? });
            Ok(StartState::per_sentence(layers.iter().map(layer).collect::<Result<_, DeviceError>>()?))
        };
        self.lane_rows().map(lane).collect()
    }

    pub(super) fn options(&self) -> &ModelOptions {
        &self.options
    }

    pub(super) fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    pub(super) fn output(&self) -> &Output {
        &self.output
    }

    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }
}

/// The sum of the squares of all numbers of a tensor, in float64: libtorch adds those of a float32 tensor in float32, which
/// loses the small ones of many. In pieces, because the numbers in float64 take room.
fn sum_of_squares(tensor: &Tensor) -> Result<Tensor, DeviceError> {
    let _no_gradients = tch::no_grad_guard();
    let flat = tensor.f_reshape([-1])?;
    let mut sum = Tensor::f_zeros([1], (Kind::Double, tensor.device()))?;
    for piece in flat.f_split(PIECE, 0)? {
        let piece = piece.f_to_kind(Kind::Double)?;
        let _ = sum.f_add_(&piece.f_square()?.f_sum(Kind::Double)?)?;
    }
    Ok(sum)
}

/// Parameters of a computation in bfloat16 are float32: most updates are smaller than the distance of two numbers of
/// bfloat16.
fn parameter_precision(recipe: &Recipe) -> Precision {
    if recipe.precision == Precision::F64 { Precision::F64 } else { Precision::F32 }
}

/// The sum of tensors of one shape, in their order; the first one is used up.
fn sum(terms: Vec<Tensor>) -> Result<Tensor, DeviceError> {
    let _no_gradients = tch::no_grad_guard();
    let mut terms = terms.into_iter();
    let first = terms.next().ok_or_else(|| DeviceError::internal("a sum over no lanes"))?;
    let mut sum = first.f_to_kind(exact_kind(first.kind()))?;
    for term in terms {
        let _ = sum.f_add_(&term)?;
    }
    Ok(sum)
}

/// Mean loss of each direction.
fn losses(heads: &[Vec<HeadGradients>; 2], predictions: usize) -> Result<[f64; 2], DeviceError> {
    let sums = heads.each_ref().map(|lanes| lanes.iter().map(|lane| lane.loss.shallow_clone()).collect::<Vec<_>>());
    let mean = |lanes: &[Tensor]| -> Result<f64, DeviceError> {
        let sums = Vec::<f64>::try_from(Tensor::f_stack(lanes, 0)?.f_to_device(tch::Device::Cpu)?)?;
        Ok(sums.iter().sum::<f64>() / predictions as f64)
    };
    Ok([mean(&sums[0])?, mean(&sums[1])?])
}

/// Gradients of the softmax from both directions and all lanes: dense, or the rows of some words.
fn softmax_gradients(
    lanes: [Vec<HeadGradients>; 2],
    heads: &[Head; 2],
) -> Result<(Output, Option<Tensor>), DeviceError> {
    let _no_gradients = tch::no_grad_guard();
    let (mut classes, mut targets) = (Vec::new(), Vec::new());
    for lanes in lanes {
        let (mut of_classes, mut of_targets) = ([vec![], vec![]], [vec![], vec![]]);
        for lane in lanes {
            of_classes[0].push(lane.classes.weight);
            of_classes[1].push(lane.classes.bias);
            if let Some(Output { weight, bias }) = lane.targets {
                of_targets[0].push(weight);
                of_targets[1].push(bias);
            }
        }
        let [weights, biases] = of_classes;
        classes.push(Output { weight: sum(weights)?, bias: sum(biases)? });
        let [weights, biases] = of_targets;
        if !weights.is_empty() {
            targets.push(Output { weight: Tensor::f_cat(&weights, 0)?, bias: Tensor::f_cat(&biases, 0)? });
        }
    }
    let ids: Vec<&[i64]> = heads.iter().filter_map(Head::ids).chain(heads.iter().map(Head::targets)).collect();
    if targets.is_empty() {
        let (weights, biases) = classes.into_iter().map(|Output { weight, bias }| (weight, bias)).unzip();
        return Ok((Output { weight: sum(weights)?, bias: sum(biases)? }, None));
    }
    let pieces: Vec<Output> = classes.into_iter().chain(targets).collect();
    let mut rows = ids.concat();
    rows.sort_unstable();
    rows.dedup();
    let (kind, device) = (pieces[0].weight.kind(), pieces[0].weight.device());
    let n = rows.len() as i64;
    let mut total = Output {
        weight: Tensor::f_zeros([n, pieces[0].weight.size()[1]], (kind, device))?,
        bias: Tensor::f_zeros([n], (kind, device))?,
    };
    for (ids, piece) in ids.iter().zip(&pieces) {
        let places: Vec<i64> = ids.iter().map(|id| rows.binary_search(id).unwrap_or_default() as i64).collect();
        let places = tensors::index(&places, device)?;
        let _ = total.weight.f_index_add_(0, &places, &piece.weight)?;
        let _ = total.bias.f_index_add_(0, &places, &piece.bias)?;
    }
    Ok((total, Some(tensors::index(&rows, device)?)))
}

/// Token vectors of the distinct words of a window, in chunks of about equal work.
struct Tokens {
    /// `[u, P]`, each with its graph.
    chunks: Vec<Tensor>,
    /// Row of each word in the chunks, one after the other.
    places: Vec<i64>,
}

impl Tokens {
    fn compute(pool: &Pool, cut: &Cut, window: &Window, chunks: usize) -> Result<Self, DeviceError> {
        let words = &window.words;
        let mut order: Vec<usize> = (0..words.len()).collect();
        order.sort_by_key(|&word| words[word].len()); // each chunk gets words of all lengths
        let n = chunks.min(words.len()).max(1);
        let dealt: Vec<Vec<usize>> =
            (0..n).map(|chunk| order.iter().skip(chunk).step_by(n).copied().collect()).collect();
        let mut places = vec![0; words.len()];
        dealt.iter().flatten().zip(0..).for_each(|(&word, place)| places[word] = place);
        let task = |chunk: &Vec<usize>| -> Task<Tensor> {
            let words: Vec<Arc<str>> = chunk.iter().map(|&word| Arc::clone(&words[word])).collect();
            let model = cut.model.share();
            Box::new(move || model.token_table(&words.iter().map(AsRef::as_ref).collect::<Vec<_>>()))
        };
        Ok(Self { chunks: pool.run(dealt.iter().map(task).collect())?, places })
    }

    /// All token vectors `[U, P]`, without a graph.
    fn table(&self) -> Result<Tensor, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        Ok(Tensor::f_cat(&self.chunks, 0)?)
    }

    /// Gradients of the leaves of the token layer by chunk, from those of the token vectors.
    fn backward(self, pool: &Pool, cut: &Cut, table: &Tensor) -> Result<Vec<Vec<Tensor>>, DeviceError> {
        let mut tasks: Vec<Task<Vec<Tensor>>> = Vec::with_capacity(self.chunks.len());
        let mut first = 0;
        for chunk in self.chunks {
            let n = chunk.size()[0];
            let gradients = table.f_narrow(0, first, n)?;
            first += n;
            let leaves: Vec<Tensor> = cut.leaves[..cut.of_token_layer].iter().map(Tensor::shallow_clone).collect();
            tasks.push(Box::new(move || {
                let end = product(&chunk, &gradients)?;
                Ok(Tensor::f_run_backward(&[end], &leaves, false, false)?)
            }));
        }
        pool.run(tasks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: the root of 2^25 x 0.25 is 2^11.5; a sum in float32 stops growing at 2^24 times its terms.
    #[test]
    fn the_norm_of_many_numbers_is_exact() {
        let many = Tensor::full([1 << 25], 0.5, (Kind::Float, tch::Device::Cpu));
        let norm = f64::try_from(sum_of_squares(&many).unwrap().sqrt()).unwrap();
        assert!((norm / 2.0_f64.powf(11.5) - 1.0).abs() < 1e-12, "{norm}");
        let none = Tensor::zeros([0, 3], (Kind::Float, tch::Device::Cpu));
        assert_eq!(f64::try_from(sum_of_squares(&none).unwrap()).unwrap(), 0.0);
    }
}
