//! Held-out perplexity by the full softmax, with states carried from window to window as bilm-tf measures it.

use std::{ops::Range, sync::Arc};

use tch::Kind;

use super::{
    TrainError,
    collective::Group,
    loss::{Output, log_probabilities},
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

/// Rows that are computed together.
const ROWS_OF_A_LANE: usize = 64;

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
        Ok(Self { model, output, pool: trainer.pool(), group: trainer.group().clone(), states: None, rows })
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
        let threads = if device == DeviceName::Cpu { threads.min(lanes(rows)) } else { 1 };
        Ok(Self { model, output, pool: Arc::new(Pool::new(threads)), group, states: None, rows })
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
        let words: Vec<&str> = window.words.iter().map(AsRef::as_ref).collect();
        let table = self.model.token_table(&words)?;
        let rows = window.rows;
        let lanes = lanes(rows);
        let ranges = (0..lanes).map(|lane| lane * rows / lanes..(lane + 1) * rows / lanes);
        let mut tasks: Vec<Task<_>> = Vec::with_capacity(lanes);
        for (lane, rows) in ranges.enumerate() {
            let start = match &self.states {
                Some(states) => states[lane].share(),
                None => self.model.zero_state()?,
            };
            let (model, output, table) = (self.model.share(), self.output.share(), table.shallow_clone());
            let part = Part::of(window, rows);
            tasks.push(Box::new(move || part.run(&model, &output, &table, &start)));
        }
        let mut total = Evaluated::default();
        let mut states = Vec::with_capacity(lanes);
        for (sums, state) in self.pool.run(tasks)? {
            total.log_probability[0] += sums[0];
            total.log_probability[1] += sums[1];
            states.push(state);
        }
        self.states = Some(states);
        Ok(total)
    }
}

/// Groups of rows that are computed in parallel.
fn lanes(rows: usize) -> usize {
    rows.div_ceil(ROWS_OF_A_LANE)
}

/// Some rows of a window.
struct Part {
    inputs: [Vec<Vec<i64>>; 2],
    targets: [Vec<u32>; 2],
}

impl Part {
    fn of(window: &Window, rows: Range<usize>) -> Self {
        let cells = rows.start * window.positions..rows.end * window.positions;
        let row = |row: &[u32]| row.iter().map(|&input| i64::from(input)).collect();
        let inputs = |inputs: &Vec<u32>| inputs[cells.clone()].chunks(window.positions).map(row).collect();
        Self {
            inputs: window.inputs.each_ref().map(inputs),
            targets: window.targets.each_ref().map(|targets| targets[cells.clone()].to_vec()),
        }
    }

    /// Sums of both directions, and the state after the window.
    fn run(
        self,
        model: &BiLm,
        output: &Output,
        table: &tch::Tensor,
        start: &StartState,
    ) -> Result<([f64; 2], StartState), DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        let batch = PackedBatch::of_directions([&self.inputs[0], &self.inputs[1]])?;
        let activations = model.forward(table, &batch, start, &NoDropout, true)?;
        let top = activations.n_layers() - 1;
        let mut sums = [0.0; 2];
        for (direction, targets) in self.targets.iter().enumerate() {
            sums[direction] = log_probabilities(output, &activations.tokens(top, direction)?, targets)?.iter().sum();
        }
        let last = activations.into_last()?.ok_or_else(|| DeviceError::internal("no state was captured"))?;
        Ok((sums, last))
    }
}
