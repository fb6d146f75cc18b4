//! Weights from an integer generator, so that fixtures need not hold any. `golden.py` has the same recipe.
//!
//! Recipe, for a tensor of a given name:
//! 1. `state = fnv1a64(UTF-8 bytes of the name) xor mix(seed)`, in wrapping 64-bit arithmetic;
//! 2. element `i` (row-major, from 0) draws `bits = mix(state + (i + 1) * 0x9E3779B97F4A7C15)`: the
//!    output of splitmix64 (Steele, Lea, Flood 2014) at that point of its sequence;
//! 3. `u = (bits >> 40) / 2^23 - 1`, one of 2^24 equidistant numbers of `[-1, 1)`, all exact in float32;
//! 4. `value = float32(u * s)`, product in float64, rounded once.
//!
//! `s` is `scale * sqrt(3 / fan_in)` for filters and matrices (standard deviation `scale / sqrt(fan_in)`;
//! `fan_in` is the product of all axes but the last), twice that for the matrices of the LSTM, 1 for the
//! character table and `scale / 2` for biases. Division and square root are rounded correctly everywhere, so
//! both languages agree on every bit.
//!
//! With `scale` 1 to 1.25 outputs are of size 1, both clips at 3 are reached, and float32 is good for 5e-6
//! (measured; `float32_error` in cases.json). From about 1.5 on the LSTM is chaotic: it enlarges rounding
//! errors from step to step, and no tolerance would mean anything.

use elmo::{
    options::{ModelOptions, TensorSpec},
    weights::{Tensor, Weights},
};

use super::{CellState, LstmState};

const GOLDEN_GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;
/// Bound of the numbers of [`seeded_state`].
const STATE_BOUND: f64 = 0.5;

/// Weights for every tensor of the options' plan. A wrong name or shape in the plan does not pass: the
/// reference asks for its tensors by names and shapes of its own, and so does `golden.py`.
pub(crate) fn seeded_weights(options: &ModelOptions, seed: u64, scale: f64) -> Weights {
    let mut weights = Weights::default();
    for TensorSpec { name, shape } in options.weight_plan() {
        let s = bound(&name, &shape, scale);
        let data = uniform(&name, seed, shape.iter().product(), s);
        weights.insert(name, Tensor { shape, data });
    }
    weights
}

/// `softmax/W [V, P]` with bound `scale * sqrt(3 / P)` and `softmax/b [V]`, as the fixtures of training have them.
pub(crate) fn seeded_softmax(words: usize, width: usize, seed: u64, scale: f64) -> (Tensor, Tensor) {
    let bound = scale * (3.0 / width as f64).sqrt();
    let weight = uniform("softmax/W", seed, words * width, bound);
    let bias = uniform("softmax/b", seed, words, scale * 0.5);
    (Tensor { shape: vec![words, width], data: weight }, Tensor { shape: vec![words], data: bias })
}

/// A start state other than zero: uniform in `[-0.5, 0.5)`, tensors `state/RNN_r/Cell_i/h` and `/c`.
pub(crate) fn seeded_state(options: &ModelOptions, seed: u64) -> LstmState {
    let numbers = |name: String, n| uniform(&name, seed, n, STATE_BOUND).into_iter().map(f64::from).collect();
    let cell = |direction: usize, layer: usize| CellState {
        h: numbers(format!("state/RNN_{direction}/Cell{layer}/h"), options.lstm.projection_dim),
        c: numbers(format!("state/RNN_{direction}/Cell{layer}/c"), options.lstm.dim),
    };
    let stack = |direction| (0..options.lstm.n_layers).map(|layer| cell(direction, layer)).collect();
    LstmState([stack(0), stack(1)])
}

/// `s`: the numbers of a tensor lie in `[-s, s)`.
fn bound(name: &str, shape: &[usize], scale: f64) -> f64 {
    if name == "char_embed" {
        return 1.0;
    }
    if shape.len() == 1 {
        return scale * 0.5;
    }
    let fan_in: usize = shape[..shape.len() - 1].iter().product();
    let gain = if name.starts_with("RNN_") { 2.0 } else { 1.0 };
    scale * gain * (3.0 / fan_in as f64).sqrt()
}

/// `n` numbers in `[-s, s)`.
fn uniform(name: &str, seed: u64, n: usize, s: f64) -> Vec<f32> {
    let state = fnv1a64(name.as_bytes()) ^ mix(seed);
    let bits = |i: usize| mix(state.wrapping_add((i as u64 + 1).wrapping_mul(GOLDEN_GAMMA)));
    let unit = |bits: u64| (bits >> 40) as f64 / 8_388_608.0 - 1.0;
    (0..n).map(|i| (unit(bits(i)) * s) as f32).collect()
}

/// The output function of splitmix64.
fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn fnv1a64(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3);
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, step)
}
