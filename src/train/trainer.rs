//! The training step.
//!
//! ```text
//! parameters --derive--> biLM --cut--> leaves, shared by all lanes
//! distinct words of the window --char CNN, in chunks--> token vectors --cut--> leaf of each lane
//! lane: rows of the window --LSTM--> top outputs --softmax--> loss and derivatives --LSTM backward--> gradients
//! sums over lanes in order --char CNN backward--> --derivation backward--> gradients of the parameters
//! sums over processes, one norm, clip, optimiser
//! ```
//!
//! The number of chunks and lanes is a setting of the recipe, and sums are taken in their order: the bits do not depend
//! on the number of threads. A lane is added to the sum as soon as those before it are, so memory depends on the number of
//! threads and not on that of lanes.
//!
//! With several processes, each of them reads the whole window and computes its rows of it. Negatives belong to the replicas
//! of the recipe, groups of rows of the window: not to processes, which may be more or fewer. Every process draws those of all
//! replicas. So it knows all words of the softmax that the step changes, and nothing but sums is exchanged.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    ops::Range,
    panic::resume_unwind,
    sync::Arc,
    thread::{self, JoinHandle},
};

use tch::{Kind, Tensor};

use super::{
    TrainError,
    collective::Group,
    draws::{Draws, SeededDraws},
    lane::{Lane, LaneGradients, product},
    loss::{Drawn, Head, Output, exact_kind},
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

/// Numbers whose squares are computed together, on a CPU and on a GPU.
const PIECE: (i64, i64) = (1 << 20, 1 << 26);
/// Squares of a run.
const RUN: i64 = 1 << 10;

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

/// Where a run computes. None of it changes what the run computes, except that sums are rounded otherwise by a GPU, and with
/// another number of processes or parts.
#[derive(Debug, Clone)]
pub struct Resources {
    /// The device.
    pub device: DeviceName,
    /// Threads on a CPU.
    pub threads: usize,
    /// Most rows that this process computes at a time. Gradients of several parts are added, so that a window of many rows
    /// needs the memory of few.
    pub part_rows: usize,
    /// The processes of the run.
    pub group: Group,
}

impl Default for Resources {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Self { device: DeviceName::Cpu, threads, part_rows: usize::MAX, group: Group::default() }
    }
}

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepReport {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean negative logarithm of the probabilities over the rows of all processes, forward. That of a sampled softmax is not comparable with others.
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
    /// Predictions of each direction, of all processes.
    pub tokens: u64,
    /// Words for which the char CNN ran in this process.
    pub words: u64,
    /// Floating point operations of the products of this process, in 1e9: three times those of the forward pass.
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
    /// Of each lane of each part.
    states: Vec<StartState>,
    pool: Arc<Pool>,
    counters: Counters,
}

/// Gradients of the scaled loss.
struct Gradients {
    /// In the order of the names of the parameters, then weight and bias of the softmax.
    tensors: Vec<Tensor>,
    /// Words of the rows of the softmax; `None`: all.
    rows: Option<Tensor>,
    /// Mean loss of each direction.
    losses: [f64; 2],
    /// States after the window.
    states: Vec<StartState>,
    words: usize,
    gflop: f64,
}

/// Negatives of one direction that are being drawn.
enum Drawing {
    Running(JoinHandle<Result<Vec<Drawn>, TrainError>>),
    Done(Result<Vec<Drawn>, TrainError>),
}

impl Drawing {
    /// On a thread of its own for a GPU; otherwise at once, as a CPU has other work for its cores.
    fn begin(device: DeviceName, draw: impl FnOnce() -> Result<Vec<Drawn>, TrainError> + Send + 'static) -> Self {
        match device {
            DeviceName::Cpu => Self::Done(draw()),
            DeviceName::Cuda(_) => match thread::Builder::new().name("elmo negatives".to_owned()).spawn(draw) {
                Ok(thread) => Self::Running(thread),
                Err(error) => Self::Done(Err(DeviceError::no_thread(&error).into())),
            },
        }
    }

    fn finish(self) -> Result<Vec<Drawn>, TrainError> {
        match self {
            Self::Running(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            Self::Done(drawn) => drawn,
        }
    }
}

/// Sums over the lanes of this process.
#[derive(Default)]
struct Sums {
    /// Of the leaves of the token layer.
    tokens: Vec<Tensor>,
    /// Of the leaves of the LSTM layers.
    layers: Vec<Tensor>,
    /// Of the classes of the softmax, per direction.
    classes: [Vec<Tensor>; 2],
    /// Of the targets of all rows, per direction.
    targets: [Vec<Output>; 2],
    /// Of each lane, per direction.
    losses: [Vec<Tensor>; 2],
    /// Of each lane.
    states: Vec<StartState>,
    /// Words for which the char CNN ran, and the operations of it in 1e9.
    words: usize,
    word_flop: f64,
}

impl Sums {
    /// Adds the gradients of the lane that follows those before.
    fn add(&mut self, lane: LaneGradients, table: &mut Vec<Tensor>) -> Result<(), DeviceError> {
        add(table, vec![lane.table])?;
        add(&mut self.layers, lane.leaves)?;
        for (direction, head) in lane.heads.into_iter().enumerate() {
            let Output { weight, bias } = head.classes;
            add(&mut self.classes[direction], vec![weight, bias])?;
            self.targets[direction].extend(head.targets);
            self.losses[direction].push(head.loss);
        }
        self.states.push(lane.last);
        Ok(())
    }

    /// Sums of the losses of both directions.
    fn losses(&self) -> Result<[f64; 2], DeviceError> {
        let sum = |lanes: &[Tensor]| -> Result<f64, DeviceError> {
            let sums = Vec::<f64>::try_from(Tensor::f_stack(lanes, 0)?.f_to_device(tch::Device::Cpu)?)?;
            Ok(sums.iter().sum())
        };
        Ok([sum(&self.losses[0])?, sum(&self.losses[1])?])
    }
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

    /// A run that resumes from a snapshot of one with the same recipe; number of lanes, threads and device may differ.
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
        if recipe.precision == Precision::Tf32 && resources.device == DeviceName::Cpu {
            return Err(TrainError::Recipe("TF32 is a number format of GPUs, which the CPU does not have".to_owned()));
        }
        recipe.precision.choose(resources.device);
        let own = resources.group.share(recipe.rows).len();
        if recipe.rows < resources.group.size() {
            let (rows, processes) = (recipe.rows, resources.group.size());
            let text = format!(
                "{rows} rows for {processes} processes, each of which needs one: give more rows or fewer processes"
            );
            return Err(TrainError::Recipe(text));
        }
        if resources.part_rows == 0 {
            return Err(TrainError::Recipe("parts of no rows".to_owned()));
        }
        let parameters = parameters.require_gradients()?;
        let mut slots = BTreeMap::new();
        for (name, tensor) in parameters.iter().chain(SOFTMAX.into_iter().zip([&output.weight, &output.bias])) {
            slots.insert(name.to_owned(), recipe.optimizer.initial(tensor)?);
        }
        let threads =
            if resources.device == DeviceName::Cpu { resources.threads.min(recipe.lanes).min(own) } else { 1 };
        Ok(Self {
            options: options.clone(),
            recipe,
            resources,
            parameters,
            output,
            slots,
            states: Vec::new(),
            pool: Arc::new(Pool::new(threads)?),
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
        self.step_with(window, &(Arc::new(SeededDraws { seed, step, rate }) as _))
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
        let mut gradients = self.gradients(window, draws)?;
        self.resources.group.sum(&mut gradients.tensors)?;
        let [loss_forward, loss_backward, grad_norm] = self.agreed(&gradients)?;
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

    /// The losses over all processes, and the norm of the gradients that process 0 has found: processors of different kinds
    /// round sums differently.
    fn agreed(&self, gradients: &Gradients) -> Result<[f64; 3], TrainError> {
        let group = &self.resources.group;
        let [forward, backward] = gradients.losses;
        let norm = self.norm(gradients)?;
        let mut numbers = [forward, backward, if group.is_first() { norm } else { 0.0 }];
        group.sum_numbers(&mut numbers)?;
        Ok(numbers)
    }

    /// The share of this process in the gradients of the scaled loss for a window. Changes nothing.
    fn gradients(&self, window: &Window, draws: &Arc<dyn Draws>) -> Result<Gradients, TrainError> {
        let own = self.own_rows();
        let share = (!self.resources.group.is_single()).then(|| window.of_rows(own.clone()));
        let share = share.as_ref().unwrap_or(window);
        let drawing = self.draw(share, draws);
        let derived = BiLm::from_parameters(&self.options, &self.parameters, self.recipe.precision)?;
        let cut = derived.cut()?;
        let (mut sums, parts) = (Sums::default(), self.parts());
        let part_of = |rows: &Range<usize>| -> Result<Part<'_>, DeviceError> {
            let window = if parts.len() > 1 { Cow::Owned(share.of_rows(rows.clone())) } else { Cow::Borrowed(share) };
            let tokens = Tokens::compute(&self.pool, &cut, &window, self.recipe.lanes)?;
            Ok(Part { window, rows: rows.clone(), tokens })
        };
        // A GPU computes the first token vectors while the negatives are drawn.
        let mut ready = parts.first().map(part_of).transpose()?;
        let heads = self.heads(share, window.predictions(), drawing)?;
        for rows in &parts {
            let part = ready.take().map_or_else(|| part_of(rows), Ok)?;
            self.part(&mut sums, &cut, part, &heads, draws)?;
        }
        let (of_tokens, of_layers) = (std::mem::take(&mut sums.tokens), std::mem::take(&mut sums.layers));
        let mut tensors = self.underived(&cut, of_tokens, of_layers)?;
        let (classes, targets) = (std::mem::take(&mut sums.classes), std::mem::take(&mut sums.targets));
        let (Output { weight, bias }, rows) = softmax_gradients(classes, targets, &heads, window, self.output.words())?;
        tensors.extend([weight, bias]);
        let gflop = self.gflop(&derived, share.predictions(), sums.word_flop);
        // Last, as it waits for the device.
        let losses = sums.losses()?.map(|sum| sum / window.predictions() as f64);
        Ok(Gradients { tensors, rows, losses, states: sums.states, words: sums.words, gflop })
    }

    /// Adds the gradients of some of the rows of this process.
    fn part(
        &self,
        sums: &mut Sums,
        cut: &Cut,
        Part { window, rows, tokens }: Part<'_>,
        heads: &[Head; 2],
        draws: &Arc<dyn Draws>,
    ) -> Result<(), DeviceError> {
        let (all, mut table) = (tokens.table()?, Vec::new());
        let lane = |(lane, start): (Range<usize>, StartState)| -> Task<LaneGradients> {
            let (positions, first) = (window.positions, rows.start);
            let cells = lane.start * positions..lane.end * positions;
            let inputs = window.inputs.each_ref().map(|inputs| {
                let row = |row: &[u32]| row.iter().map(|&input| tokens.places[input as usize]).collect();
                inputs[cells.start - first * positions..cells.end - first * positions]
                    .chunks(positions)
                    .map(row)
                    .collect()
            });
            let own = self.own_rows().start;
            let lane = Lane {
                model: cut.model.share(),
                leaves: cut.leaves[cut.of_token_layer..].iter().map(Tensor::shallow_clone).collect(),
                table: all.shallow_clone(),
                inputs,
                heads: heads.each_ref().map(|head| head.part(cells.start, cells.len())),
                start,
                draws: Arc::clone(draws),
                dropout: self.recipe.dropout,
                rows: own + lane.start..own + lane.end,
                positions,
            };
            Box::new(move || lane.run())
        };
        let starts = self.states[sums.states.len()..].iter().map(StartState::share);
        let lanes: Vec<_> = self.lanes_of(&rows).zip(starts).collect();
        self.pool.fold(lanes.into_iter().map(lane), |gradients| sums.add(gradients, &mut table))?;
        sums.words += window.words.len();
        sums.word_flop += cut.model.flop_of_words(window.words.iter());
        let table = table.pop().ok_or_else(|| DeviceError::internal("a part without lanes"))?;
        tokens.backward(&self.pool, cut, &table, &mut sums.tokens)
    }

    /// Operations of the products of a step, in 1e9. The backward pass has two products for each of the forward pass.
    fn gflop(&self, model: &BiLm, predictions: usize, of_words: f64) -> f64 {
        let classes = self.samples().unwrap_or(self.output.words());
        let of_classes = 4.0 * (classes * self.options.lstm.projection_dim) as f64; // both directions
        3.0 * (predictions as f64 * (model.flop_per_token() + of_classes) + of_words) / 1e9
    }

    /// Begins to draw the negatives of both directions for the rows of this process. `None` for the full softmax.
    fn draw(&self, window: &Window, draws: &Arc<dyn Draws>) -> Option<[Drawing; 2]> {
        let samples = self.samples()?;
        let begin = |direction: usize| {
            let (recipe, own, words) = (self.recipe.clone(), self.own_rows(), self.output.words());
            let (targets, positions) = (window.targets[direction].clone(), window.positions);
            let draws = Arc::clone(draws);
            Drawing::begin(self.resources.device, move || {
                let of_replica = |replica: usize| {
                    let Range { start, end } = recipe.rows_of(replica, &own);
                    let negatives = draws.negatives(direction, words, samples, replica);
                    Drawn::new(words, &targets, start * positions..end * positions, negatives)
                };
                recipe.replicas_of(&(0..recipe.rows)).map(of_replica).collect()
            })
        };
        Some([begin(0), begin(1)])
    }

    /// The losses of both directions for the rows of this process, of so many predictions in all processes.
    fn heads(
        &self,
        window: &Window,
        predictions: usize,
        drawing: Option<[Drawing; 2]>,
    ) -> Result<[Head; 2], TrainError> {
        let _no_gradients = tch::no_grad_guard();
        let kind = self.recipe.precision.kind();
        // The mean over the predictions, and half of the sum of both directions.
        let scale = self.recipe.gradient_scale / (2.0 * predictions as f64);
        let [forward, backward] = &window.targets;
        let Some([of_forward, of_backward]) = drawing else {
            let head = |targets: &[u32]| Head::full(&self.output, targets, scale, kind);
            return Ok([head(forward)?, head(backward)?]);
        };
        let head = |targets: &[u32], drawing: Drawing| -> Result<Head, TrainError> {
            Ok(Head::sampled(&self.output, targets, &drawing.finish()?, scale, kind)?)
        };
        Ok([head(forward, of_forward)?, head(backward, of_backward)?])
    }

    /// Rows of this process in the window of all processes.
    fn own_rows(&self) -> Range<usize> {
        self.resources.group.share(self.recipe.rows)
    }

    /// Rows that are computed at a time, counted from the first row of this process.
    fn parts(&self) -> Vec<Range<usize>> {
        let rows = self.own_rows().len();
        let parts = rows.div_ceil(self.resources.part_rows);
        (0..parts).map(|part| part * rows / parts..(part + 1) * rows / parts).collect()
    }

    /// Rows of each lane of a part.
    fn lanes_of(&self, part: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let (first, rows) = (part.start, part.len());
        let lanes = self.recipe.lanes.min(rows);
        (0..lanes).map(move |lane| first + lane * rows / lanes..first + (lane + 1) * rows / lanes)
    }

    /// Rows of each lane of each part.
    fn lane_rows(&self) -> Vec<Range<usize>> {
        self.parts().iter().flat_map(|part| self.lanes_of(part)).collect()
    }

    /// Gradients of the parameters from those of what the model derived from them.
    fn underived(&self, cut: &Cut, tokens: Vec<Tensor>, layers: Vec<Tensor>) -> Result<Vec<Tensor>, DeviceError> {
        let gradients: Vec<Tensor> = tokens.into_iter().chain(layers).collect();
        let ends = cut.derived.iter().zip(&gradients).map(|(derived, gradient)| product(derived, gradient));
        let ends = ends.collect::<Result<Vec<_>, _>>()?;
        let parameters: Vec<&Tensor> = self.parameters.iter().map(|(_, tensor)| tensor).collect();
        Ok(Tensor::f_run_backward(&ends, &parameters, false, false)?)
    }

    /// Norm of all gradients together.
    fn norm(&self, gradients: &Gradients) -> Result<f64, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        let task = |tensor: &Tensor| -> Task<Tensor> {
            let tensor = tensor.shallow_clone();
            Box::new(move || sum_of_squares(&tensor))
        };
        let squares = Tensor::f_stack(&self.pool.run(gradients.tensors.iter().map(task).collect())?, 0)?;
        let norm = f64::try_from(squares.f_sum(Kind::Double)?.f_sqrt()?)?;
        if norm.is_finite() || self.resources.device == DeviceName::Cpu {
            return Ok(norm);
        }
        // A square may be too large for float32.
        let all = gradients.tensors.iter().map(squares_in_f64).collect::<Result<Vec<_>, _>>()?;
        Ok(f64::try_from(Tensor::f_stack(&all, 0)?.f_sum(Kind::Double)?.f_sqrt()?)?)
    }

    /// Updates all parameters. Returns the states after the window.
    fn apply(&self, gradients: Gradients, update: Update) -> Result<Vec<StartState>, DeviceError> {
        let slots = |name: &str| -> Vec<Tensor> {
            self.slots.get(name).into_iter().flatten().map(Tensor::shallow_clone).collect()
        };
        let mut tasks: Vec<Task<()>> = Vec::new();
        for ((name, weight), gradient) in self.named_parameters().zip(gradients.tensors) {
            let (weight, slots) = (weight.shallow_clone(), slots(name));
            match gradients.rows.as_ref().filter(|_| SOFTMAX.contains(&name)) {
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

    /// The whole state of the run. With several processes, all of them must call this or [`Trainer::join_snapshot`].
    ///
    /// # Errors
    /// [`TrainError::Device`] when libtorch fails or the host has no room; [`TrainError::Collective`].
    pub fn snapshot(&self) -> Result<Snapshot, TrainError> {
        let mut tensors = BTreeMap::new();
        for (name, tensor) in self.named_parameters() {
            tensors.insert(format!("weights/{name}"), Saved::of(tensor)?);
            let slots = self.slots.get(name).into_iter().flatten();
            for (slot, tensor) in self.recipe.optimizer.slots().iter().zip(slots) {
                tensors.insert(format!("optimizer/{slot}/{name}"), Saved::of(tensor)?);
            }
        }
        for (name, state) in self.all_states()? {
            tensors.insert(name, Saved::of(&state)?);
        }
        Ok(Snapshot { tensors, counters: self.counters })
    }

    /// What a process does while another one calls [`Trainer::snapshot`].
    ///
    /// # Errors
    /// As [`Trainer::snapshot`].
    pub fn join_snapshot(&self) -> Result<(), TrainError> {
        self.all_states().map(drop)
    }

    /// Names and LSTM states `[2, rows, _]` of the rows of all processes.
    fn all_states(&self) -> Result<Vec<(String, Tensor)>, TrainError> {
        let _no_gradients = tch::no_grad_guard();
        let mut all = Vec::new();
        for layer in 0..self.options.lstm.n_layers {
            let own = |part: fn(&LayerState) -> &Tensor| -> Result<Tensor, TrainError> {
                let of_lane = |state: &StartState| part(&state.layers()[layer]).shallow_clone();
                self.gathered(Tensor::f_cat(&self.states.iter().map(of_lane).collect::<Vec<_>>(), 1)?)
            };
            all.push((format!("lstm/{layer}/h"), own(|state| &state.h)?));
            all.push((format!("lstm/{layer}/c"), own(|state| &state.c)?));
        }
        Ok(all)
    }

    /// Puts the rows `[2, rows, _]` of all processes together.
    fn gathered(&self, own: Tensor) -> Result<Tensor, TrainError> {
        let (group, all_rows) = (&self.resources.group, self.recipe.rows);
        if group.is_single() {
            return Ok(own);
        }
        // All processes send tensors of one shape.
        let most = all_rows.div_ceil(group.size()) as i64;
        let rows = own.size()[1];
        let padded = own.f_constant_pad_nd([0, 0, 0, most - rows])?;
        let all = group.all_gather(&padded)?;
        let share = |rank: usize| {
            let rows = (rank + 1) * all_rows / group.size() - rank * all_rows / group.size();
            all.f_select(0, rank as i64)?.f_narrow(1, 0, rows as i64)
        };
        let shares = (0..group.size()).map(share).collect::<Result<Vec<_>, _>>()?;
        Ok(Tensor::f_cat(&shares, 1)?)
    }

    /// Checks that all processes have the same parameters and the same state of the optimiser, bit for bit.
    ///
    /// # Errors
    /// [`TrainError::Diverged`] names the first tensor that differs; [`TrainError::Collective`].
    pub fn check_equal(&self) -> Result<(), TrainError> {
        let group = &self.resources.group;
        if group.is_single() {
            return Ok(());
        }
        let (mut names, mut sums) = (Vec::new(), Vec::new());
        for (name, tensor) in self.named_parameters() {
            names.push(format!("weights/{name}"));
            sums.push(bit_sum(tensor)?);
            let slots = self.slots.get(name).into_iter().flatten();
            for (slot, tensor) in self.recipe.optimizer.slots().iter().zip(slots) {
                names.push(format!("optimizer/{slot}/{name}"));
                sums.push(bit_sum(tensor)?);
            }
        }
        let all = group.gather(&sums)?;
        for (rank, other) in all.iter().enumerate() {
            if let Some(differs) = other.iter().zip(&all[0]).position(|(one, first)| one != first) {
                let (step, name) = (self.counters.step, names.swap_remove(differs));
                return Err(TrainError::Diverged { step, name, rank });
            }
        }
        Ok(())
    }

    /// Names and parameters, the softmax last.
    fn named_parameters(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.parameters.iter().chain(SOFTMAX.into_iter().zip([&self.output.weight, &self.output.bias]))
    }

    /// Goes back to a snapshot of this run, in the memory that the run has already. After an error the state is that of neither.
    ///
    /// # Errors
    /// [`TrainError::Snapshot`] when a tensor is missing or has another shape, [`TrainError::Device`] when libtorch fails.
    pub fn reset(&mut self, snapshot: &Snapshot) -> Result<(), TrainError> {
        self.restore_weights(snapshot)?;
        self.restore_slots(snapshot)?;
        self.states = self.saved_states(snapshot)?;
        self.counters = snapshot.counters;
        Ok(())
    }

    fn restore_weights(&self, snapshot: &Snapshot) -> Result<(), TrainError> {
        let _no_gradients = tch::no_grad_guard();
        let softmax = SOFTMAX.into_iter().zip([&self.output.weight, &self.output.bias]);
        for (name, tensor) in self.parameters.iter().chain(softmax) {
            let shape: Vec<usize> = tensor.size().iter().map(|&dim| dim as usize).collect();
            let saved = snapshot.find(&format!("weights/{name}"), Some(&shape))?;
            tensor.shallow_clone().f_copy_(&saved.tensor()?)?;
        }
        Ok(())
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
        self.lane_rows().into_iter().map(lane).collect()
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
        let first = self.own_rows().start;
        let lane = |rows: Range<usize>| {
            let part = |t: &Tensor| t.f_narrow(1, (first + rows.start) as i64, rows.len() as i64)?.f_contiguous();
            let layer = |state: &LayerState| Ok(LayerState { h: part(&state.h)?, c: part(&state.c)? });
            Ok(StartState::per_sentence(layers.iter().map(layer).collect::<Result<_, DeviceError>>()?))
        };
        self.lane_rows().into_iter().map(lane).collect()
    }

    pub(super) fn group(&self) -> &Group {
        &self.resources.group
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

    pub(super) fn pool(&self) -> Arc<Pool> {
        Arc::clone(&self.pool)
    }
}

/// The sum of the squares of all numbers of a tensor, as float64: libtorch adds those of a float32 tensor in float32, which
/// loses the small ones of many. In pieces, because squares take room.
fn sum_of_squares(tensor: &Tensor) -> Result<Tensor, DeviceError> {
    let _no_gradients = tch::no_grad_guard();
    let flat = tensor.f_reshape([-1])?;
    let mut sum = Tensor::f_zeros([1], (Kind::Double, tensor.device()))?;
    for piece in flat.f_split(piece_on(tensor.device()), 0)? {
        let squares =
            if tensor.device() == tch::Device::Cpu { squares_in_f64(&piece)? } else { squares_by_runs(&piece)? };
        let _ = sum.f_add_(&squares)?;
    }
    Ok(sum)
}

fn squares_in_f64(piece: &Tensor) -> Result<Tensor, DeviceError> {
    Ok(piece.f_to_kind(Kind::Double)?.f_square()?.f_sum(Kind::Double)?)
}

/// Nearly the same for a GPU, which would move three times as many bytes for it: the squares of short runs are added in the number format
/// of the tensor.
fn squares_by_runs(piece: &Tensor) -> Result<Tensor, DeviceError> {
    let n = piece.size1()?;
    let whole = n / RUN * RUN;
    let runs = piece.f_narrow(0, 0, whole)?.f_view([-1, RUN])?.f_square()?;
    let sums = runs.f_sum_dim_intlist([1_i64].as_slice(), false, piece.kind())?;
    Ok(sums.f_sum(Kind::Double)?.f_add(&squares_in_f64(&piece.f_narrow(0, whole, n - whole)?)?)?)
}

fn piece_on(device: tch::Device) -> i64 {
    if device == tch::Device::Cpu { PIECE.0 } else { PIECE.1 }
}

/// Parameters of a computation in bfloat16 are float32: most updates are smaller than the distance of two numbers of
/// bfloat16.
fn parameter_precision(recipe: &Recipe) -> Precision {
    if recipe.precision == Precision::F64 { Precision::F64 } else { Precision::F32 }
}

/// The sum of the bits of all numbers of a tensor, each times its odd place: numbers that are swapped change it.
fn bit_sum(tensor: &Tensor) -> Result<i64, DeviceError> {
    let _no_gradients = tch::no_grad_guard();
    let bits = if tensor.kind() == Kind::Double { Kind::Int64 } else { Kind::Int };
    let flat = tensor.f_contiguous()?.f_view([-1])?.f_view_dtype(bits)?;
    let mut sum = 0i64;
    for (piece, numbers) in flat.f_split(PIECE.0, 0)?.into_iter().enumerate() {
        let first = 2 * PIECE.0 * piece as i64 + 1;
        let n = numbers.size1()?;
        let places = Tensor::f_arange_start_step(first, first + 2 * n, 2, (Kind::Int64, tensor.device()))?;
        let weighted = numbers.f_to_kind(Kind::Int64)?.f_mul(&places)?.f_sum(Kind::Int64)?;
        sum = sum.wrapping_add(i64::try_from(weighted)?);
    }
    Ok(sum)
}

/// Adds tensors to sums, in place; the first ones become the sums.
fn add(sums: &mut Vec<Tensor>, terms: Vec<Tensor>) -> Result<(), DeviceError> {
    let _no_gradients = tch::no_grad_guard();
    if sums.is_empty() {
        *sums = terms.iter().map(|term| term.f_to_kind(exact_kind(term.kind()))).collect::<Result<_, _>>()?;
        return Ok(());
    }
    for (sum, term) in sums.iter_mut().zip(terms) {
        let _ = sum.f_add_(&term)?;
    }
    Ok(())
}

/// Gradients of the softmax from both directions: dense, or for the rows of all words that the window of all processes has as
/// targets or negatives.
fn softmax_gradients(
    classes: [Vec<Tensor>; 2],
    targets: [Vec<Output>; 2],
    heads: &[Head; 2],
    window: &Window,
    words: usize,
) -> Result<(Output, Option<Tensor>), DeviceError> {
    let _no_gradients = tch::no_grad_guard();
    let output = |sums: Vec<Tensor>| -> Result<Output, DeviceError> {
        let [weight, bias] = <[Tensor; 2]>::try_from(sums).map_err(|_| DeviceError::internal("a sum over no lanes"))?;
        Ok(Output { weight, bias })
    };
    let ids: Vec<&[i64]> = heads.iter().filter_map(Head::ids).collect();
    if ids.is_empty() {
        let mut all = Vec::new();
        classes.into_iter().try_for_each(|sums| add(&mut all, sums))?;
        return Ok((output(all)?, None));
    }
    // The words that are changed, by their ids, and the row of each.
    let mut rows_of = vec![None::<u32>; words];
    let changed = heads.iter().filter_map(Head::ids_of_all).flatten().map(|&id| id as usize);
    changed.chain(window.targets.iter().flatten().map(|&id| id as usize)).for_each(|id| rows_of[id] = Some(0));
    let mut rows = Vec::new();
    for (id, row) in rows_of.iter_mut().enumerate().filter_map(|(id, row)| Some((id, row.as_mut()?))) {
        *row = rows.len() as u32;
        rows.push(id as i64);
    }
    let mut pieces = classes.into_iter().map(output).collect::<Result<Vec<_>, _>>()?;
    for lanes in targets {
        let (weights, biases): (Vec<_>, Vec<_>) = lanes.into_iter().map(|lane| (lane.weight, lane.bias)).unzip();
        pieces.push(Output { weight: Tensor::f_cat(&weights, 0)?, bias: Tensor::f_cat(&biases, 0)? });
    }
    let ids: Vec<&[i64]> = ids.into_iter().chain(heads.iter().map(Head::targets)).collect();
    let (kind, device) = (pieces[0].weight.kind(), pieces[0].weight.device());
    let n = rows.len() as i64;
    let mut total = Output {
        weight: Tensor::f_zeros([n, pieces[0].weight.size()[1]], (kind, device))?,
        bias: Tensor::f_zeros([n], (kind, device))?,
    };
    for (ids, piece) in ids.iter().zip(&pieces) {
        let places: Vec<i64> = ids.iter().map(|&id| i64::from(rows_of[id as usize].unwrap_or_default())).collect();
        let places = tensors::index(&places, device)?;
        let _ = total.weight.f_index_add_(0, &places, &piece.weight)?;
        let _ = total.bias.f_index_add_(0, &places, &piece.bias)?;
    }
    Ok((total, Some(tensors::index(&rows, device)?)))
}

/// Some rows of a window.
struct Part<'w> {
    window: Cow<'w, Window>,
    /// Counted from the first row of this process.
    rows: Range<usize>,
    tokens: Tokens,
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
        order.sort_by_cached_key(|&word| words.word(word).len()); // each chunk gets words of all lengths
        let n = chunks.min(words.len()).max(1);
        let dealt: Vec<Vec<usize>> =
            (0..n).map(|chunk| order.iter().skip(chunk).step_by(n).copied().collect()).collect();
        let mut places = vec![0; words.len()];
        dealt.iter().flatten().zip(0..).for_each(|(&word, place)| places[word] = place);
        let task = |chunk: &Vec<usize>| -> Task<Tensor> {
            let words = words.select(chunk.iter().copied());
            let model = cut.model.share();
            Box::new(move || model.token_table(&words.iter().collect::<Vec<_>>()))
        };
        Ok(Self { chunks: pool.run(dealt.iter().map(task).collect())?, places })
    }

    /// All token vectors `[U, P]`, without a graph.
    fn table(&self) -> Result<Tensor, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        Ok(Tensor::f_cat(&self.chunks, 0)?)
    }

    /// Adds the gradients of the leaves of the token layer, from those of the token vectors.
    fn backward(self, pool: &Pool, cut: &Cut, table: &Tensor, sums: &mut Vec<Tensor>) -> Result<(), DeviceError> {
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
        pool.fold(tasks, |gradients| add(sums, gradients))
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
        for n in [0, 1, RUN - 1, RUN, (1 << 25) + 3] {
            let sum = f64::try_from(squares_by_runs(&Tensor::full([n], 0.5, (Kind::Float, tch::Device::Cpu))).unwrap());
            assert_eq!(sum.unwrap(), n as f64 / 4.0, "{n}");
        }
        // A sum in float32 would lose small squares beside the large one: 2^24 + 2^22 x 2^-4, in which a run has at most 2^6.
        let mixed = Tensor::full([(1 << 22) + RUN], 0.25, (Kind::Float, tch::Device::Cpu));
        let _ = mixed.narrow(0, 0, RUN).zero_();
        let _ = mixed.narrow(0, 0, 1).fill_(4096.0);
        let sum = f64::try_from(squares_by_runs(&mixed).unwrap()).unwrap();
        assert_eq!(sum, 2.0_f64.powi(24) + 2.0_f64.powi(18));
        let none = Tensor::zeros([0, 3], (Kind::Float, tch::Device::Cpu));
        assert_eq!(f64::try_from(sum_of_squares(&none).unwrap()).unwrap(), 0.0);
    }
}
