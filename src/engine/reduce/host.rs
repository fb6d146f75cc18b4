//! Reduces layers that lie in host memory.

use std::ops::Range;

use super::{LAYER_NORM_EPSILON, Wanted};
use crate::{
    engine::sentence::{Output, Vectors},
    model::{Activations, DeviceError, LayerValues},
    pooling::Reducer,
    spec::Pooling,
};

/// Each distinct combination of layers is computed once.
pub(super) fn reduce(activations: &Activations, wanted: &[Wanted<'_>]) -> Result<Vec<Vectors>, DeviceError> {
    let mut outputs: Vec<(&Output, Vec<LayerValues>)> = Vec::new();
    let mut answers = Vec::with_capacity(wanted.len());
    for (sentence, Wanted { recipe, keep, real }) in wanted.iter().enumerate() {
        let output = &recipe.output;
        let known = outputs.iter().position(|(o, _)| *o == output);
        let place = match known {
            Some(place) => place,
            None => {
                outputs.push((output, layer_values(activations, output)?));
                outputs.len() - 1
            }
        };
        let source = TokenSource { activations, layers: &outputs[place].1, output, sentence, real: real.clone() };
        answers.push(source.reduce(keep, recipe.pooling));
    }
    Ok(answers)
}

fn layer_values(activations: &Activations, output: &Output) -> Result<Vec<LayerValues>, DeviceError> {
    match output {
        Output::Combined(factors) => Ok(vec![activations.combine(factors)?]),
        Output::Normalized(_) | Output::All => {
            (0..activations.n_layers()).map(|layer| activations.combine(&[(layer, 1.0)])).collect()
        }
    }
}

/// Vectors of one sentence of a batch.
struct TokenSource<'a> {
    activations: &'a Activations,
    layers: &'a [LayerValues],
    output: &'a Output,
    sentence: usize,
    /// Its tokens without the boundaries.
    real: Range<usize>,
}

impl TokenSource<'_> {
    fn reduce(&self, keep: &Range<usize>, pooling: Option<Pooling>) -> Vectors {
        let layer = self.layers[0].width();
        let stacked = layer * self.layers.len();
        let statistics = self.statistics();
        let mut one = vec![0.0; stacked];
        let mut reducer = pooling.map(|p| Reducer::new(p, self.width(), layer));
        let mut tokens = Vec::with_capacity(if pooling.is_none() { keep.len() * self.width() } else { 0 });
        for i in keep.clone() {
            self.read(i, &mut one);
            let vector = match &statistics {
                None => &one[..],
                Some(statistics) => self.normalized(&mut one, statistics),
            };
            match &mut reducer {
                Some(reducer) => reducer.push(vector),
                None => tokens.extend_from_slice(vector),
            }
        }
        match reducer {
            Some(reducer) => Vectors::Pooled(reducer.finish()),
            None => Vectors::Tokens(tokens),
        }
    }

    /// Number of values of an output vector.
    fn width(&self) -> usize {
        let layer = self.layers[0].width();
        if matches!(self.output, Output::All) { layer * self.layers.len() } else { layer }
    }

    fn read(&self, i: usize, out: &mut [f32]) {
        let width = self.layers[0].width();
        for (layer, out) in self.layers.iter().zip(out.chunks_exact_mut(width)) {
            layer.token(self.activations, self.sentence, i, out);
        }
    }

    /// Mean and inverse standard deviation of each layer over the real tokens of the sentence; `None` unless layers are
    /// normalised.
    fn statistics(&self) -> Option<Vec<(f64, f64)>> {
        if !matches!(self.output, Output::Normalized(_)) {
            return None;
        }
        if self.real.is_empty() {
            // A blank row in state `carry` has boundaries only, and no token to take statistics of.
            return Some(vec![(0.0, 1.0); self.layers.len()]);
        }
        let width = self.layers[0].width();
        let mut token = vec![0.0; width];
        let statistics = self.layers.iter().map(|layer| {
            let (mut sum, mut squares) = (0.0_f64, 0.0_f64);
            for i in self.real.clone() {
                layer.token(self.activations, self.sentence, i, &mut token);
                sum += token.iter().map(|&v| f64::from(v)).sum::<f64>();
            }
            let n = (self.real.len() * width) as f64;
            let mean = sum / n;
            for i in self.real.clone() {
                layer.token(self.activations, self.sentence, i, &mut token);
                squares += token.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>();
            }
            (mean, 1.0 / (squares / n + LAYER_NORM_EPSILON).sqrt())
        });
        Some(statistics.collect())
    }

    /// Combines the normalised layers into the first `2P` values of `stacked`.
    fn normalized<'v>(&self, stacked: &'v mut [f32], statistics: &[(f64, f64)]) -> &'v [f32] {
        let Output::Normalized(factors) = self.output else { return stacked };
        let width = self.layers[0].width();
        for k in 0..width {
            let mut sum = 0.0;
            for (layer, ((mean, scale), factor)) in statistics.iter().zip(factors).enumerate() {
                sum += f64::from(*factor) * (f64::from(stacked[layer * width + k]) - mean) * scale;
            }
            stacked[k] = sum as f32;
        }
        &stacked[..width]
    }
}
