//! Token vectors to one vector per text.
//!
//! A text may hold several sentences, and a long sentence several windows, which run in different
//! batches. So each sentence is reduced on its own to a [`Partial`], and a [`Joiner`] takes partials in the
//! order of the text: the result does not depend on how sentences were batched.

use crate::spec::Pooling;

/// What one sentence (or window) contributes to the vector of its text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Partial {
    /// Sum, maximum, or the picked values; `2P` per layer.
    pub(crate) values: Vec<f32>,
    /// Tokens behind it.
    pub(crate) tokens: usize,
}

/// Running reduction of the token vectors of one sentence.
#[derive(Debug)]
pub(crate) struct Reducer {
    pooling: Pooling,
    /// Width of one layer, `2P`; vectors hold one or more layers.
    layer: usize,
    partial: Partial,
}

impl Reducer {
    /// For vectors of `width` values, `layer` values a layer.
    pub(crate) fn new(pooling: Pooling, width: usize, layer: usize) -> Self {
        let neutral = if pooling == Pooling::Max { f32::NEG_INFINITY } else { 0.0 };
        Self { pooling, layer, partial: Partial { values: vec![neutral; width], tokens: 0 } }
    }

    /// The next token of the sentence.
    pub(crate) fn push(&mut self, vector: &[f32]) {
        let first = self.partial.tokens == 0;
        self.partial.tokens += 1;
        let values = &mut self.partial.values;
        match self.pooling {
            Pooling::Mean => values.iter_mut().zip(vector).for_each(|(a, b)| *a += b),
            Pooling::Max => values.iter_mut().zip(vector).for_each(|(a, b)| *a = a.max(*b)),
            Pooling::First if first => values.copy_from_slice(vector),
            Pooling::First => {}
            Pooling::Last => values.copy_from_slice(vector),
            Pooling::Ends => {
                copy_halves(values, vector, self.layer, Half::Forward);
                if first {
                    copy_halves(values, vector, self.layer, Half::Backward);
                }
            }
        }
    }

    pub(crate) fn finish(self) -> Partial {
        self.partial
    }
}

/// Joins the partials of a text in order, without keeping them: a text may hold millions of sentences.
#[derive(Debug)]
pub(crate) struct Joiner {
    pooling: Pooling,
    layer: usize,
    /// Mean: sums, in float64 because there may be millions of tokens.
    sums: Vec<f64>,
    /// Every other pooling.
    values: Option<Vec<f32>>,
    tokens: usize,
}

impl Joiner {
    /// `layer` values a layer.
    pub(crate) fn new(pooling: Pooling, layer: usize) -> Self {
        Self { pooling, layer, sums: Vec::new(), values: None, tokens: 0 }
    }

    /// The next partial of the text.
    pub(crate) fn push(&mut self, next: Partial) {
        if next.tokens == 0 {
            return;
        }
        self.tokens += next.tokens;
        if self.pooling == Pooling::Mean {
            self.sums.resize(next.values.len(), 0.0);
            self.sums.iter_mut().zip(&next.values).for_each(|(sum, v)| *sum += f64::from(*v));
            return;
        }
        let Some(values) = &mut self.values else {
            self.values = Some(next.values);
            return;
        };
        match self.pooling {
            Pooling::Max => values.iter_mut().zip(&next.values).for_each(|(a, b)| *a = a.max(*b)),
            Pooling::Last => *values = next.values,
            Pooling::Ends => copy_halves(values, &next.values, self.layer, Half::Forward),
            Pooling::First | Pooling::Mean => {}
        }
    }

    /// The vector; `None` when there was no token at all.
    pub(crate) fn finish(self) -> Option<Vec<f32>> {
        if self.pooling != Pooling::Mean {
            return self.values;
        }
        let n = self.tokens as f64;
        (self.tokens > 0).then(|| self.sums.iter().map(|sum| (sum / n) as f32).collect())
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Half {
    Forward,
    Backward,
}

/// Copies one direction's half of every layer.
fn copy_halves(to: &mut [f32], from: &[f32], layer: usize, half: Half) {
    let range = if half == Half::Forward { 0..layer / 2 } else { layer / 2..layer };
    for (to, from) in to.chunks_exact_mut(layer).zip(from.chunks_exact(layer)) {
        to[range.clone()].copy_from_slice(&from[range.clone()]);
    }
}

/// Scales a vector to Euclidean length 1, each layer by itself; a zero vector stays zero.
pub(crate) fn normalize_l2(vector: &mut [f32], layer: usize) {
    for part in vector.chunks_exact_mut(layer) {
        let norm = part.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>().sqrt();
        if norm > 0.0 {
            part.iter_mut().for_each(|v| *v = (f64::from(*v) / norm) as f32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sentences of 2 and 1 tokens, one layer of width 4; expected values by hand.
    fn pooled(pooling: Pooling) -> Vec<f32> {
        let sentences = [vec![[1.0, 2.0, 3.0, 4.0], [5.0, -6.0, 7.0, 8.0]], vec![[0.0, 1.0, 8.0, 9.0]]];
        let partials = sentences.iter().map(|tokens| {
            let mut reducer = Reducer::new(pooling, 4, 4);
            tokens.iter().for_each(|t| reducer.push(t));
            reducer.finish()
        });
        let mut joiner = Joiner::new(pooling, 4);
        partials.for_each(|p| joiner.push(p));
        joiner.finish().unwrap()
    }

    #[test]
    fn each_pooling_by_hand() {
        assert_eq!(pooled(Pooling::Mean), [2.0, -1.0, 6.0, 7.0]);
        assert_eq!(pooled(Pooling::Max), [5.0, 2.0, 8.0, 9.0]);
        assert_eq!(pooled(Pooling::First), [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(pooled(Pooling::Last), [0.0, 1.0, 8.0, 9.0]);
        assert_eq!(pooled(Pooling::Ends), [0.0, 1.0, 3.0, 4.0]);
    }

    #[test]
    fn ends_takes_the_halves_of_every_layer() {
        let mut reducer = Reducer::new(Pooling::Ends, 4, 2);
        reducer.push(&[1.0, 2.0, 3.0, 4.0]);
        reducer.push(&[5.0, 6.0, 7.0, 8.0]);
        assert_eq!(reducer.finish().values, [5.0, 2.0, 7.0, 4.0]);
    }

    #[test]
    fn no_tokens_no_vector_and_zero_stays_zero() {
        assert_eq!(Joiner::new(Pooling::Mean, 4).finish(), None);
        assert_eq!(Joiner::new(Pooling::Max, 4).finish(), None);
        let mut v = [0.0, 0.0, 3.0, 4.0];
        normalize_l2(&mut v, 2);
        assert_eq!(v, [0.0, 0.0, 0.6, 0.8]);
    }
}
