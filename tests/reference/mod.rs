//! The biLM in plain float64 Rust: the readable specification, with which the fast model is compared.
//!
//! Loops over slices, one word and one time step after the other, no padding, no batching, no
//! tensor library. Nothing here calls the code under test; only its plain types for options and
//! weights come in. A second program, `golden.py` beside this file, computes the same with padded
//! batches in numpy; `tests/golden` holds both against each other.
//!
//! Read in this order: `char_ids.rs` (word -> ids), `token_layer.rs` (ids -> token vector),
//! `lstm.rs` (one direction), this file (sentences, boundaries, states), `vectors.rs` (layers -> one
//! vector). `seeded.rs` makes the weights of the fixtures.
//!
//! Letters: `C` character embedding width, `M` characters per token, `F` filters in all,
//! `P` projection_dim, `D` LSTM dim, `L` LSTM layers. A token vector is `2P` wide, there are `L + 1` layers.
//!
//! Choices where published programs differ:
//! * the forget gate's +1 is added in float64, as TensorFlow does at run time. AllenNLP adds it to the
//!   float32 bias while loading, which rounds the bias once more and moves outputs by about 2e-8;
//! * `<S>` and `</S>` in a text are boundary tokens wherever they stand (AllenNLP);
//! * the eps of the layer norm is 1e-12 (AllenNLP 0.9 and bilm-tf), its mean and variance are those of one sentence.

// Each test binary that includes this module uses its own part of it.
#![allow(dead_code)]

mod char_ids;
mod lstm;
pub(crate) mod seeded;
mod token_layer;
pub(crate) mod vectors;

use elmo::{
    options::ModelOptions,
    weights::{Tensor, Weights},
};

pub(crate) use char_ids::char_ids;
pub(crate) use lstm::CellState;
use lstm::{Stack, StackRun};
use token_layer::TokenLayer;

/// The layers of one sentence: `[layer][token * 2P + dimension]`.
pub(crate) type Layers = Vec<Vec<f64>>;

/// Reading left to right.
pub(crate) const FORWARD: usize = 0;
/// Reading right to left.
pub(crate) const BACKWARD: usize = 1;

/// What the two stacks remember: `[direction][layer]`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LstmState(pub(crate) [Vec<CellState>; 2]);

/// From which state the sentences of a series of batches start.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum StartState {
    /// Zeros, for every sentence.
    Zero,
    /// The same given state, for every sentence.
    Given(LstmState),
    /// Zeros in the first batch; later, row `b` starts where the last sentence in row `b` ended.
    /// Rows that a larger batch adds start from zeros; rows that a smaller batch lacks keep their state.
    Carry,
}

/// Rounds a row.
pub(crate) type Round = fn(&[f64]) -> Vec<f64>;

/// A row as integers of up to 127 times the scale of the row.
pub(crate) fn as_codes(row: &[f64]) -> Vec<f64> {
    let scale = row.iter().fold(0.0, |max: f64, x| max.max(x.abs())) / 127.0;
    row.iter().map(|x| if scale > 0.0 { (x / scale).round_ties_even() * scale } else { 0.0 }).collect()
}

/// The weights that `--precision int8` has: each column of the LSTMs, the highway layers and the projections as integers of up to
/// 127 times the scale of the column. They are rounded in float32, as there: weights of 16 bits are often just between two
/// integers.
pub(crate) fn weights_as_codes(weights: &Weights) -> Weights {
    let mut all = weights.clone();
    let of_products = ["W_0", "W_P_0", "W_carry", "W_transform", "W_proj"];
    for (name, Tensor { shape, data }) in weights.iter() {
        if !of_products.contains(&name.rsplit('/').next().unwrap()) {
            continue;
        }
        let mut tensor = Tensor { shape: shape.clone(), data: vec![0.0; data.len()] };
        for column in 0..shape[1] {
            let places = || (column..data.len()).step_by(shape[1]);
            let scale = places().fold(0.0, |max: f32, place| max.max(data[place].abs())) / 127.0;
            for place in places().filter(|_| scale > 0.0) {
                tensor.data[place] = (data[place] / scale).round_ties_even() * scale;
            }
        }
        all.insert(name.to_owned(), tensor);
    }
    all
}

/// One sentence, read.
pub(crate) struct SentenceRun {
    /// The layers of the kept positions.
    pub(crate) layers: Layers,
    /// Forward: the state after `</S>`; backward: the state after `<S>`.
    pub(crate) end: LstmState,
}

/// A biLM in float64. Borrows the float32 weights and widens each number when it is used.
pub(crate) struct Reference<'a> {
    token_layer: TokenLayer<'a>,
    stacks: [Stack<'a>; 2],
}

impl<'a> Reference<'a> {
    /// Looks every tensor up by its name; panics when one is missing or has another shape than the options say.
    pub(crate) fn new(options: &'a ModelOptions, weights: &'a Weights) -> Self {
        Self::with_rounding(options, weights, <[f64]>::to_vec)
    }

    /// The biLM with a rounding of what stands on the left side of products: of the LSTMs, the highway layers and the projections.
    pub(crate) fn with_rounding(options: &'a ModelOptions, weights: &'a Weights, round: Round) -> Self {
        let stack = |direction| Stack::new(&options.lstm, direction, weights, round);
        Self {
            token_layer: TokenLayer::new(&options.char_cnn, options.lstm.projection_dim, weights, round),
            stacks: [stack(FORWARD), stack(BACKWARD)],
        }
    }

    /// All layers of one sentence from state zero, boundaries removed: `[layer][token * 2P + dimension]`.
    pub(crate) fn layers<S: AsRef<str>>(&self, words: &[S]) -> Layers {
        self.sentence(words, &self.zero_state(), false).layers
    }

    /// Batches in order: `[batch][sentence]`. Only with [`StartState::Carry`] does one batch influence the next.
    pub(crate) fn run<S: AsRef<str>>(
        &self,
        batches: &[Vec<Vec<S>>],
        start: &StartState,
        boundaries: bool,
    ) -> Vec<Vec<Layers>> {
        let mut rows = Vec::new();
        batches.iter().map(|batch| self.batch(batch, start, &mut rows, boundaries)).collect()
    }

    /// One batch; `rows` holds the carried state of each row, and is used by [`StartState::Carry`] only.
    fn batch<S: AsRef<str>>(
        &self,
        batch: &[Vec<S>],
        start: &StartState,
        rows: &mut Vec<LstmState>,
        boundaries: bool,
    ) -> Vec<Layers> {
        while rows.len() < batch.len() {
            rows.push(self.zero_state());
        }
        let mut outputs = Vec::new();
        for (words, row) in batch.iter().zip(rows) {
            let from = match start {
                StartState::Zero => self.zero_state(),
                StartState::Given(state) => state.clone(),
                StartState::Carry => row.clone(),
            };
            let run = self.sentence(words, &from, boundaries);
            *row = run.end;
            outputs.push(run.layers);
        }
        outputs
    }

    /// One sentence from any state. An empty one still reads `<S> </S>`, and so changes the state.
    pub(crate) fn sentence<S: AsRef<str>>(&self, words: &[S], start: &LstmState, boundaries: bool) -> SentenceRun {
        let tokens = self.token_vectors(words);
        let forward = self.read(FORWARD, &tokens, start);
        let backward = self.read(BACKWARD, &tokens, start);

        let keep = if boundaries { 0..tokens.len() } else { 1..tokens.len() - 1 };
        let token_layer = side_by_side(&tokens[keep.clone()], &tokens[keep.clone()]);
        let mut layers = vec![token_layer];
        for (f, b) in forward.outputs.iter().zip(&backward.outputs) {
            layers.push(side_by_side(&f[keep.clone()], &b[keep.clone()]));
        }
        SentenceRun { layers, end: LstmState([forward.end, backward.end]) }
    }

    /// One direction over token vectors, from `start`'s state of that direction. The backward stack
    /// reads the last token first; its outputs come back in the order of the text.
    pub(crate) fn read(&self, direction: usize, tokens: &[Vec<f64>], start: &LstmState) -> StackRun {
        let mut input = tokens.to_vec();
        if direction == BACKWARD {
            input.reverse();
        }
        let mut run = self.stacks[direction].run(&input, &start.0[direction]);
        if direction == BACKWARD {
            run.outputs.iter_mut().for_each(|layer| layer.reverse());
        }
        run
    }

    /// One direction over words in reading order, without boundaries, and with dropout: see [`Stack::run_with`].
    pub(crate) fn window(
        &self,
        direction: usize,
        words: &[&str],
        start: &[CellState],
        drop: &dyn Fn(usize, usize, &mut [f64]),
    ) -> StackRun {
        let tokens: Vec<Vec<f64>> = words.iter().map(|word| self.token_layer.vector(word)).collect();
        self.stacks[direction].run_with(&tokens, start, drop)
    }

    /// The token vectors of `<S> words.. </S>`: `(n + 2, P)`.
    pub(crate) fn token_vectors<S: AsRef<str>>(&self, words: &[S]) -> Vec<Vec<f64>> {
        let words = words.iter().map(AsRef::as_ref);
        let bounded = ["<S>"].into_iter().chain(words).chain(["</S>"]);
        bounded.map(|word| self.token_layer.vector(word)).collect()
    }

    /// Zeros for every cell.
    pub(crate) fn zero_state(&self) -> LstmState {
        LstmState([self.stacks[FORWARD].zero_state(), self.stacks[BACKWARD].zero_state()])
    }
}

/// `[forward ; backward]` per position: two `(n, P)` -> `(n * 2P,)`.
fn side_by_side(forward: &[Vec<f64>], backward: &[Vec<f64>]) -> Vec<f64> {
    let mut rows = Vec::new();
    for (f, b) in forward.iter().zip(backward) {
        rows.extend_from_slice(f);
        rows.extend_from_slice(b);
    }
    rows
}

/// The numbers of one tensor, after a check of its shape.
fn tensor<'a>(weights: &'a Weights, name: &str, shape: &[usize]) -> &'a [f32] {
    let Some(Tensor { shape: found, data }) = weights.get(name) else { panic!("no tensor {name}") };
    assert_eq!(found, shape, "shape of {name}");
    assert_eq!(data.len(), shape.iter().product::<usize>(), "length of {name}");
    data
}

/// `x @ w + b`: `(in,) @ (in, out) + (out,) -> (out,)`.
fn affine(x: &[f64], w: &[f32], b: &[f32]) -> Vec<f64> {
    let mut out: Vec<f64> = b.iter().copied().map(f64::from).collect();
    add_product(x, w, &mut out);
    out
}

/// `out += x @ w`: `(in,) @ (in, out) -> (out,)`. Row by row of `w`, so that memory is read in order
/// and the inner loop becomes vector instructions.
fn add_product(x: &[f64], w: &[f32], out: &mut [f64]) {
    assert_eq!(w.len(), x.len() * out.len());
    for (x, row) in x.iter().zip(w.chunks_exact(out.len())) {
        add_scaled(*x, row, out);
    }
}

/// `out += x * row`.
fn add_scaled(x: f64, row: &[f32], out: &mut [f64]) {
    for (out, w) in out.iter_mut().zip(row) {
        *out += x * f64::from(*w);
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
