//! Word -> token vector: character embedding, convolutions, highway layers, projection. No context.

use elmo::{
    options::{Activation, CharCnnOptions, Filter},
    weights::Weights,
};

use super::{Round, add_scaled, affine, char_ids, sigmoid, tensor};

/// Rows of the stored character table; the zero row for padding tokens is not stored.
const STORED_CHARACTERS: usize = 261;

pub(crate) struct TokenLayer<'a> {
    options: &'a CharCnnOptions,
    round: Round,
    /// `(261, C)`; id `i` is row `i - 1`.
    char_embed: &'a [f32],
    convolutions: Vec<Convolution<'a>>,
    highways: Vec<Highway<'a>>,
    /// `(F, P)` and `(P,)`; none when `F == P`.
    projection: Option<(&'a [f32], &'a [f32])>,
}

struct Convolution<'a> {
    filter: Filter,
    /// `(1, width, C, n)`.
    w: &'a [f32],
    /// `(n,)`.
    b: &'a [f32],
}

/// `(F, F)` and `(F,)` each. The names of the file mislead: "carry" gates the transformed part.
struct Highway<'a> {
    w_carry: &'a [f32],
    b_carry: &'a [f32],
    w_transform: &'a [f32],
    b_transform: &'a [f32],
}

impl<'a> TokenLayer<'a> {
    pub(crate) fn new(options: &'a CharCnnOptions, projection_dim: usize, weights: &'a Weights, round: Round) -> Self {
        let c = options.embedding_dim;
        let f = options.filters.iter().map(|filter| filter.n).sum();
        let convolution = |(i, &filter): (usize, &Filter)| Convolution {
            filter,
            w: tensor(weights, &format!("CNN/W_cnn_{i}"), &[1, filter.width, c, filter.n]),
            b: tensor(weights, &format!("CNN/b_cnn_{i}"), &[filter.n]),
        };
        let highway = |i: usize| Highway {
            w_carry: tensor(weights, &format!("CNN_high_{i}/W_carry"), &[f, f]),
            b_carry: tensor(weights, &format!("CNN_high_{i}/b_carry"), &[f]),
            w_transform: tensor(weights, &format!("CNN_high_{i}/W_transform"), &[f, f]),
            b_transform: tensor(weights, &format!("CNN_high_{i}/b_transform"), &[f]),
        };
        let projection = || {
            let w = tensor(weights, "CNN_proj/W_proj", &[f, projection_dim]);
            (w, tensor(weights, "CNN_proj/b_proj", &[projection_dim]))
        };
        Self {
            options,
            round,
            char_embed: tensor(weights, "char_embed", &[STORED_CHARACTERS, c]),
            convolutions: options.filters.iter().enumerate().map(convolution).collect(),
            highways: (0..options.n_highway).map(highway).collect(),
            projection: (f != projection_dim).then(projection),
        }
    }

    /// The token vector of one word: `(P,)`.
    pub(crate) fn vector(&self, word: &str) -> Vec<f64> {
        let ids = char_ids(word, self.options.max_characters_per_token);
        let characters: Vec<&[f32]> = ids.iter().map(|&id| self.embedding(id)).collect(); // (M, C)

        let mut x = Vec::new(); // (F,) in the order of the filter table
        for convolution in &self.convolutions {
            x.extend(convolution.apply(&characters, self.options.activation));
        }
        for highway in &self.highways {
            x = highway.apply(&x, self.round);
        }
        match self.projection {
            Some((w, b)) => affine(&(self.round)(&x), w, b),
            None => x,
        }
    }

    /// Row of the character table: `(C,)`. A word never holds id 0, whose row would be zeros.
    fn embedding(&self, id: u16) -> &'a [f32] {
        let c = self.options.embedding_dim;
        let row = usize::from(id) - 1;
        &self.char_embed[row * c..(row + 1) * c]
    }
}

impl Convolution<'_> {
    /// Cross-correlation with bias, largest value over the positions, activation: `(M, C) -> (n,)`.
    /// Padding inside the word takes part like any other character.
    fn apply(&self, characters: &[&[f32]], activation: Activation) -> Vec<f64> {
        let mut largest = vec![f64::NEG_INFINITY; self.filter.n];
        for window in characters.windows(self.filter.width) {
            for (largest, u) in largest.iter_mut().zip(self.at(window)) {
                *largest = largest.max(u);
            }
        }
        largest.into_iter().map(|u| activate(activation, u)).collect()
    }

    /// `u[o] = b[o] + sum over k, c of window[k][c] * w[0][k][c][o]`: `(width, C) -> (n,)`.
    fn at(&self, window: &[&[f32]]) -> Vec<f64> {
        let mut u: Vec<f64> = self.b.iter().copied().map(f64::from).collect();
        let inputs = window.iter().copied().flatten(); // (width * C,) in the order of w's rows
        for (x, row) in inputs.zip(self.w.chunks_exact(self.filter.n)) {
            add_scaled(f64::from(*x), row, &mut u);
        }
        u
    }
}

impl Highway<'_> {
    /// `g * relu(x Wt + bt) + (1 - g) * x` with `g = sigmoid(x Wc + bc)`: `(F,) -> (F,)`.
    /// Always relu, whatever the activation of the convolutions.
    fn apply(&self, x: &[f64], round: Round) -> Vec<f64> {
        let gate = affine(&round(x), self.w_carry, self.b_carry);
        let transformed = affine(&round(x), self.w_transform, self.b_transform);
        let mut y = Vec::new();
        for ((x, gate), transformed) in x.iter().zip(gate).zip(transformed) {
            let g = sigmoid(gate);
            y.push(g * transformed.max(0.0) + (1.0 - g) * x);
        }
        y
    }
}

fn activate(activation: Activation, u: f64) -> f64 {
    match activation {
        Activation::Relu => u.max(0.0),
        Activation::Tanh => u.tanh(),
    }
}
