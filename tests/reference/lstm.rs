//! One direction of the biLM: `L` LSTM cells with projection, one above the other.

use elmo::{options::LstmOptions, weights::Weights};

use super::{Round, add_product, affine, sigmoid, tensor};

/// Added to the forget gate; not in the file.
const FORGET_BIAS: f64 = 1.0;

/// What one cell remembers between two steps.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CellState {
    /// Projected output, before the residual is added: `(P,)`.
    pub(crate) h: Vec<f64>,
    /// Memory, clipped: `(D,)`.
    pub(crate) c: Vec<f64>,
}

/// One direction over one sequence.
pub(crate) struct StackRun {
    /// `[position][P]`: what the first layer read.
    pub(crate) input: Vec<Vec<f64>>,
    /// `[layer - 1][position][P]`: the outputs of the LSTM layers, residual included.
    pub(crate) outputs: Vec<Vec<Vec<f64>>>,
    /// State of each layer after the last position that was read.
    pub(crate) end: Vec<CellState>,
}

pub(crate) struct Stack<'a> {
    options: &'a LstmOptions,
    cells: Vec<Cell<'a>>,
}

struct Cell<'a> {
    options: &'a LstmOptions,
    round: Round,
    /// `(2P, 4D)`: the first `P` rows meet the input, the last `P` the previous output. Columns i, j, f, o.
    w: &'a [f32],
    /// `(4D,)`.
    b: &'a [f32],
    /// `(D, P)`; none when `P == D`: a plain LSTM, without projection and without its clip.
    w_projection: Option<&'a [f32]>,
}

impl<'a> Stack<'a> {
    pub(crate) fn new(options: &'a LstmOptions, direction: usize, weights: &'a Weights, round: Round) -> Self {
        let (p, d) = (options.projection_dim, options.dim);
        assert!(p <= d, "projection_dim {p} above dim {d}: layers would differ in width");
        let cell = |layer: usize| {
            let name = |what| format!("RNN_{direction}/RNN/MultiRNNCell/Cell{layer}/LSTMCell/{what}");
            Cell {
                options,
                round,
                w: tensor(weights, &name("W_0"), &[2 * p, 4 * d]),
                b: tensor(weights, &name("B"), &[4 * d]),
                w_projection: (p < d).then(|| tensor(weights, &name("W_P_0"), &[d, p])),
            }
        };
        Self { options, cells: (0..options.n_layers).map(cell).collect() }
    }

    pub(crate) fn zero_state(&self) -> Vec<CellState> {
        let zeros = CellState { h: vec![0.0; self.options.projection_dim], c: vec![0.0; self.options.dim] };
        vec![zeros; self.cells.len()]
    }

    /// Layer after layer, each over the whole sequence: input `(n, P)` in reading order.
    pub(crate) fn run(&self, input: &[Vec<f64>], start: &[CellState]) -> StackRun {
        self.run_with(input, start, &|_, _, _| ())
    }

    /// As [`Stack::run`], where `drop` changes what a layer (0 is the input) has at a position before anything reads
    /// it: the next layer, that layer's residual, and the caller.
    pub(crate) fn run_with(
        &self,
        input: &[Vec<f64>],
        start: &[CellState],
        drop: &dyn Fn(usize, usize, &mut [f64]),
    ) -> StackRun {
        assert_eq!(start.len(), self.cells.len(), "one state per layer");
        let mut x = input.to_vec();
        x.iter_mut().enumerate().for_each(|(position, x)| drop(0, position, x));
        let mut run = StackRun { input: x.clone(), outputs: Vec::new(), end: Vec::new() };
        for (layer, (cell, start)) in self.cells.iter().zip(start).enumerate() {
            // Never on the first layer: there the input is the token vector.
            let residual = layer > 0 && self.options.use_skip_connections;
            let (mut y, end) = cell.run(&x, start, residual);
            y.iter_mut().enumerate().for_each(|(position, y)| drop(layer + 1, position, y));
            run.outputs.push(y.clone());
            run.end.push(end);
            x = y;
        }
        run
    }
}

impl Cell<'_> {
    /// `(n, P) -> (n, P)` and the state at the end.
    fn run(&self, input: &[Vec<f64>], start: &CellState, residual: bool) -> (Vec<Vec<f64>>, CellState) {
        let mut state = start.clone();
        let mut outputs = Vec::new();
        for x in input {
            state = self.step(x, &state);
            let mut y = state.h.clone();
            if residual {
                y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
            }
            outputs.push(y);
        }
        (outputs, state)
    }

    /// One time step: input `(P,)`.
    fn step(&self, x: &[f64], before: &CellState) -> CellState {
        let d = self.options.dim;
        let z = affine(&[(self.round)(x), (self.round)(&before.h)].concat(), self.w, self.b); // [x, h] @ W + B: (4D,)

        let mut c = vec![0.0; d];
        let mut output = vec![0.0; d];
        for k in 0..d {
            let (i, j, f, o) = (z[k], z[d + k], z[2 * d + k], z[3 * d + k]);
            let memory = sigmoid(f + FORGET_BIAS) * before.c[k] + sigmoid(i) * j.tanh();
            c[k] = clip(memory, self.options.cell_clip); // stored clipped, and used clipped
            output[k] = sigmoid(o) * c[k].tanh();
        }
        CellState { h: self.project(output), c }
    }

    /// `(D,) -> (P,)`, clipped.
    fn project(&self, output: Vec<f64>) -> Vec<f64> {
        let Some(w) = self.w_projection else { return output };
        let mut h = vec![0.0; self.options.projection_dim];
        add_product(&(self.round)(&output), w, &mut h);
        h.into_iter().map(|h| clip(h, self.options.proj_clip)).collect()
    }
}

fn clip(x: f64, bound: Option<f64>) -> f64 {
    match bound {
        Some(bound) => x.clamp(-bound, bound),
        None => x,
    }
}
