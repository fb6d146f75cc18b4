//! Held-out perplexity by the full softmax, with states carried from window to window as bilm-tf measures it.

use std::{ops::Range, sync::Arc};

use tch::{Kind, Tensor};

use super::{
    TrainError,
    collective::Group,
    loss::{Output, block_rows, log_probabilities},
    pool::{Pool, Task},
    trainer::{Resources, Trainer},
    window::Window,
};
use crate::{
    lm_head::LmHeadData,
    model::{BiLm, DeviceError, DeviceName, NoDropout, PackedBatch, Precision, StartState, tensors},
    model_dir::ModelData,
    weights,
};

/// Most rows that are computed together.
const ROWS_OF_A_LANE: usize = 64;
/// Fewest rows that a thread of a CPU computes together: fewer are padded to as many.
const ROWS_OF_A_THREAD: usize = 16;
/// Fewest words whose vectors a thread computes together.
const WORDS_OF_A_THREAD: usize = 64;

/// Sums over predictions.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Evaluated {
    /// Sum of the natural logarithms of the probabilities, forward and backward.
    pub log_probability: [f64; 2],
    /// Predictions of each direction.
    pub tokens: u64,
}

impl Evaluated {
    /// Adds the sums of another part of the text.
    pub fn add(&mut self, other: Self) {
        self.log_probability[0] += other.log_probability[0];
        self.log_probability[1] += other.log_probability[1];
        self.tokens += other.tokens;
    }

    /// Perplexity of a direction (0 is forward).
    pub fn perplexity_of(&self, direction: usize) -> f64 {
        (-self.log_probability[direction] / self.tokens as f64).exp()
    }

    /// Geometric mean of both directions' perplexities, the figure that bilm-tf reports.
    pub fn perplexity(&self) -> f64 {
        (self.perplexity_of(0) * self.perplexity_of(1)).sqrt()
    }
}

/// A language model that reads a held-out text window by window.
#[derive(Debug)]
pub struct Evaluation {
    model: BiLm,
    output: Output,
    pool: Arc<Pool>,
    group: Group,
    /// Of each lane; `None` before the first window.
    states: Option<Vec<StartState>>,
    rows: usize,
    /// Threads that compute.
    threads: usize,
}

impl Evaluation {
    /// The parameters of a run as they are now, for windows of so many rows, from zero states.
    ///
    /// # Errors
    /// [`TrainError::Device`] when the device has no room.
    pub fn of_run(trainer: &Trainer, rows: usize) -> Result<Self, TrainError> {
        let precision = trainer.recipe().precision;
        let model = BiLm::of_parameters_without_gradients(trainer.options(), trainer.parameters(), precision)?;
        let output = trainer.output().to_kind(precision.kind())?;
        let (pool, group) = (trainer.pool(), trainer.group().clone());
        Ok(Self { threads: pool.threads(), model, output, pool, group, states: None, rows })
    }

    /// A model with its LM head, for windows of so many rows, from zero states. On a CPU in float32 it has the bits of
    /// [`Evaluation::of_run`] for a run with the same weights.
    ///
    /// # Errors
    /// [`TrainError::Device`] when the device has no room, or `head` is that of a model of another width.
    pub fn of_model(
        model: &ModelData,
        head: &LmHeadData,
        precision: Precision,
        resources: Resources,
        rows: usize,
    ) -> Result<Self, TrainError> {
        let Resources { device, threads, group, .. } = resources;
        let width = model.options.lstm.projection_dim;
        if head.weight().shape.get(1) != Some(&width) {
            let shape = &head.weight().shape;
            return Err(DeviceError::internal(format!("a softmax of shape {shape:?} for width {width}")).into());
        }
        let model = BiLm::new(&model.options, &model.weights, device, precision)?;
        let place = |tensor: &weights::Tensor| {
            let shape: Vec<i64> = tensor.shape.iter().map(|&n| n as i64).collect();
            tensors::upload(&tensor.data, &shape, Kind::Float, device.torch())
        };
        let output = Output { weight: place(head.weight())?, bias: place(head.bias())? }.to_kind(precision.kind())?;
        let threads = if device == DeviceName::Cpu { threads } else { 1 };
        Ok(Self { model, output, pool: Arc::new(Pool::new(threads)?), group, states: None, rows, threads })
    }

    /// Reads the next window. With several processes, each of them computes its rows, and all get the sums over all rows.
    ///
    /// # Errors
    /// As [`Trainer::step`].
    pub fn window(&mut self, window: &Window) -> Result<Evaluated, TrainError> {
        if let Some(problem) = window.problem(self.rows, self.output.words()) {
            return Err(TrainError::Window(problem));
        }
        let own = self.group.share(self.rows);
        let share = (!self.group.is_single()).then(|| window.of_rows(own));
        let mut total = self.share(share.as_ref().unwrap_or(window))?;
        self.group.sum_numbers(&mut total.log_probability)?;
        Ok(Evaluated { tokens: window.predictions() as u64, ..total })
    }

    /// The rows of this process: none, when there are fewer than processes.
    fn share(&mut self, window: &Window) -> Result<Evaluated, TrainError> {
        if window.rows == 0 {
            return Ok(Evaluated::default());
        }
        let _no_gradients = tch::no_grad_guard();
        let table = self.token_table(window)?;
        let rows = window.rows;
        // A function of the rows alone, so that states stay with their rows.
        let lanes = match self.model.device() {
            DeviceName::Cpu => (rows / ROWS_OF_A_THREAD).max(1),
            DeviceName::Cuda(_) => rows.div_ceil(ROWS_OF_A_LANE),
        };
        let mut tasks: Vec<Task<_>> = Vec::with_capacity(lanes);
        for lane in 0..lanes {
            let rows = lane * rows / lanes..(lane + 1) * rows / lanes;
            let start = match &self.states {
                Some(states) => states[lane].share(),
                None => self.model.zero_state()?,
            };
            let (model, table, inputs) = (self.model.share(), table.shallow_clone(), inputs_of(window, rows));
            tasks.push(Box::new(move || run(&model, &table, &inputs, &start)));
        }
        let mut tops = [Vec::with_capacity(lanes), Vec::with_capacity(lanes)];
        let mut states = Vec::with_capacity(lanes);
        for ([forward, backward], state) in self.pool.run(tasks)? {
            tops[0].push(forward);
            tops[1].push(backward);
            states.push(state);
        }
        self.states = Some(states);
        let mut total = Evaluated::default();
        for (direction, tops) in tops.iter().enumerate() {
            let top = Tensor::f_cat(tops, 0).map_err(DeviceError::from)?;
            total.log_probability[direction] = self.log_probability(&top, &window.targets[direction])?;
        }
        Ok(total)
    }

    /// Token vectors of the words of a window.
    fn token_table(&self, window: &Window) -> Result<Tensor, TrainError> {
        let of_thread = window.words.len().div_ceil(self.threads).max(WORDS_OF_A_THREAD);
        let tasks = (0..window.words.len()).step_by(of_thread).map(|first| -> Task<Tensor> {
            let words = window.words.select(first..window.words.len().min(first + of_thread));
            let model = self.model.share();
            Box::new(move || {
                let _no_gradients = tch::no_grad_guard();
                model.token_table(&words.iter().collect::<Vec<_>>())
            })
        });
        let parts = self.pool.run(tasks.collect())?;
        Ok(Tensor::f_cat(&parts, 0).map_err(DeviceError::from)?)
    }

    /// Sum of the logarithms of the probabilities of `targets [N]` after `x [N, P]`. The blocks, and the order of the sum, do not
    /// depend on lanes or threads.
    fn log_probability(&self, x: &Tensor, targets: &[u32]) -> Result<f64, TrainError> {
        let rows = block_rows(x.device());
        let mut tasks: Vec<Task<Vec<f64>>> = Vec::new();
        for (block, targets) in targets.chunks(rows).enumerate() {
            let x = x.f_narrow(0, (block * rows) as i64, targets.len() as i64).map_err(DeviceError::from)?;
            let (output, targets) = (self.output.share(), targets.to_vec());
            tasks.push(Box::new(move || log_probabilities(&output, &x, &targets)));
        }
        Ok(self.pool.run(tasks)?.into_iter().flatten().sum())
    }
}

/// The inputs of some rows of a window.
fn inputs_of(window: &Window, rows: Range<usize>) -> [Vec<Vec<i64>>; 2] {
    let cells = rows.start * window.positions..rows.end * window.positions;
    let row = |row: &[u32]| row.iter().map(|&input| i64::from(input)).collect();
    window.inputs.each_ref().map(|inputs| inputs[cells.clone()].chunks(window.positions).map(row).collect())
}

/// The top layer of both directions, and the state after the window.
fn run(
    model: &BiLm,
    table: &Tensor,
    inputs: &[Vec<Vec<i64>>; 2],
    start: &StartState,
) -> Result<([Tensor; 2], StartState), DeviceError> {
    let _no_gradients = tch::no_grad_guard();
    let batch = PackedBatch::of_directions([&inputs[0], &inputs[1]])?;
    let activations = model.forward(table, &batch, start, &NoDropout, true)?;
    let top = activations.n_layers() - 1;
    let tops = [activations.tokens(top, 0)?, activations.tokens(top, 1)?];
    let last = activations.into_last()?.ok_or_else(|| DeviceError::internal("no state was captured"))?;
    Ok((tops, last))
}
