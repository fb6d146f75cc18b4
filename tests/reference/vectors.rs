//! From the layers of a sentence to its vectors: choice or mix of layers, pooling, unit length.

use super::Layers;

/// Added to the variance in the layer norm.
const NORM_EPS: f64 = 1e-12;

/// How token vectors become one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pooling {
    Mean,
    Max,
    First,
    Last,
    /// Forward half of the last token, backward half of the first.
    Ends,
}

/// Plain mean of the layers: `(n * 2P,)`.
pub(crate) fn average(layers: &Layers) -> Vec<f64> {
    let mut out = vec![0.0; layers[0].len()];
    for layer in layers {
        out.iter_mut().zip(layer).for_each(|(out, x)| *out += x / layers.len() as f64);
    }
    out
}

/// The highest layer: `(n * 2P,)`.
pub(crate) fn top(layers: &Layers) -> Vec<f64> {
    layers[layers.len() - 1].clone()
}

/// The token layer: `(n * 2P,)`.
pub(crate) fn token(layers: &Layers) -> Vec<f64> {
    layers[0].clone()
}

/// All layers of a token one after the other, layer 0 first: `(n * (L + 1) * 2P,)`.
pub(crate) fn all(layers: &Layers, width: usize) -> Vec<f64> {
    let n = layers[0].len() / width;
    let mut out = Vec::new();
    for token in 0..n {
        for layer in layers {
            out.extend_from_slice(&layer[token * width..(token + 1) * width]);
        }
    }
    out
}

/// `gamma * sum over k of softmax(scalars)_k * layer_k`: `(n * 2P,)`.
///
/// With `layer_norm` each layer is first brought to mean 0 and variance 1 over all positions and
/// dimensions given here, that is over one sentence; published programs take the whole batch, which would
/// make a vector depend on its neighbours.
pub(crate) fn mix(layers: &Layers, scalars: &[f32], gamma: f32, layer_norm: bool) -> Vec<f64> {
    assert_eq!(scalars.len(), layers.len(), "one scalar per layer");
    let mut out = vec![0.0; layers[0].len()];
    for (weight, layer) in softmax(scalars).into_iter().zip(layers) {
        let layer = if layer_norm { normalized(layer) } else { layer.clone() };
        out.iter_mut().zip(layer).for_each(|(out, x)| *out += f64::from(gamma) * weight * x);
    }
    out
}

fn softmax(scalars: &[f32]) -> Vec<f64> {
    let largest = scalars.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exp: Vec<f64> = scalars.iter().map(|&s| (f64::from(s) - f64::from(largest)).exp()).collect();
    let sum: f64 = exp.iter().sum();
    exp.into_iter().map(|e| e / sum).collect()
}

/// `(x - mean) / sqrt(variance + eps)`, biased variance.
fn normalized(layer: &[f64]) -> Vec<f64> {
    let n = layer.len() as f64;
    let mean = layer.iter().sum::<f64>() / n;
    let variance = layer.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
    layer.iter().map(|x| (x - mean) / (variance + NORM_EPS).sqrt()).collect()
}

/// Tokens `(n * width,)` to one vector `(width,)`; none of no tokens. Only real tokens may be given.
///
/// `width` is a multiple of `2P`: for [`all`] every layer is pooled by itself, so `ends` needs `half = P`.
pub(crate) fn pool(tokens: &[f64], width: usize, half: usize, pooling: Pooling) -> Option<Vec<f64>> {
    let rows: Vec<&[f64]> = tokens.chunks_exact(width).collect();
    let (first, last) = (*rows.first()?, *rows.last()?);
    Some(match pooling {
        Pooling::Mean => per_dimension(width, |k| rows.iter().map(|row| row[k]).sum::<f64>() / rows.len() as f64),
        Pooling::Max => per_dimension(width, |k| rows.iter().map(|row| row[k]).fold(f64::NEG_INFINITY, f64::max)),
        Pooling::First => first.to_vec(),
        Pooling::Last => last.to_vec(),
        Pooling::Ends => per_dimension(width, |k| if (k / half).is_multiple_of(2) { last[k] } else { first[k] }),
    })
}

fn per_dimension(width: usize, value: impl Fn(usize) -> f64) -> Vec<f64> {
    (0..width).map(value).collect()
}

/// The vector at Euclidean length 1; zeros stay zeros.
pub(crate) fn l2(vector: &[f64]) -> Vec<f64> {
    let length = vector.iter().map(|x| x * x).sum::<f64>().sqrt();
    if length == 0.0 {
        return vector.to_vec();
    }
    vector.iter().map(|x| x / length).collect()
}
