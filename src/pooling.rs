//! Token vectors to one vector per text.
//!
//! A text may hold several sentences, and a long sentence several windows, which run in different batches. Each of them
//! is reduced to a [`Partial`], and a [`Joiner`] joins the partials in the order of the text. So the result does not
//! depend on the batches.

use crate::spec::Pooling;

/// What one sentence (or window) contributes to the vector of its text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Partial {
    /// Sum, maximum, or selected values; `2P` per layer. In float64, because a float32 sum of some thousand tokens
    /// loses two digits.
    pub(crate) values: Vec<f64>,
    /// Number of tokens.
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
    /// For vectors of `width` values, `layer` values per layer.
    pub(crate) fn new(pooling: Pooling, width: usize, layer: usize) -> Self {
        let neutral = if pooling == Pooling::Max { f64::NEG_INFINITY } else { 0.0 };
        Self { pooling, layer, partial: Partial { values: vec![neutral; width], tokens: 0 } }
    }

    /// Adds the next token of the sentence.
    pub(crate) fn push(&mut self, vector: &[f32]) {
        let first = self.partial.tokens == 0;
        self.partial.tokens += 1;
        let values = &mut self.partial.values;
        match self.pooling {
            Pooling::Mean => values.iter_mut().zip(vector).for_each(|(a, b)| *a += f64::from(*b)),
            Pooling::Max => values.iter_mut().zip(vector).for_each(|(a, b)| *a = larger(*a, f64::from(*b))),
            Pooling::First if !first => {}
            Pooling::First | Pooling::Last => values.iter_mut().zip(vector).for_each(|(a, b)| *a = f64::from(*b)),
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

/// Joins the partials of a text in order. It does not keep them: a text may hold millions of sentences.
#[derive(Debug)]
pub(crate) struct Joiner {
    pooling: Pooling,
    layer: usize,
    /// As in [`Partial`]; `None` before the first.
    values: Option<Vec<f64>>,
    tokens: usize,
}

impl Joiner {
    /// For vectors of `layer` values per layer.
    pub(crate) fn new(pooling: Pooling, layer: usize) -> Self {
        Self { pooling, layer, values: None, tokens: 0 }
    }

    /// Adds the next partial of the text.
    pub(crate) fn push(&mut self, next: Partial) {
        if next.tokens == 0 {
            return;
        }
        self.tokens += next.tokens;
        let Some(values) = &mut self.values else {
            self.values = Some(next.values);
            return;
        };
        match self.pooling {
            Pooling::Mean => values.iter_mut().zip(&next.values).for_each(|(a, b)| *a += b),
            Pooling::Max => values.iter_mut().zip(&next.values).for_each(|(a, b)| *a = larger(*a, *b)),
            Pooling::Last => *values = next.values,
            Pooling::Ends => copy_halves(values, &next.values, self.layer, Half::Forward),
            Pooling::First => {}
        }
    }

    /// The vector; `None` when there was no token.
    pub(crate) fn finish(self) -> Option<Vec<f32>> {
        let n = if self.pooling == Pooling::Mean { self.tokens as f64 } else { 1.0 };
        self.values.map(|values| values.iter().map(|value| (value / n) as f32).collect())
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Half {
    Forward,
    Backward,
}

/// The larger number, or NaN if one of them is NaN.
fn larger(a: f64, b: f64) -> f64 {
    if b > a || b.is_nan() { b } else { a }
}

/// Copies the half of one direction in every layer.
fn copy_halves<T: Copy + Into<f64>>(to: &mut [f64], from: &[T], layer: usize, half: Half) {
    let range = if half == Half::Forward { 0..layer / 2 } else { layer / 2..layer };
    for (to, from) in to.chunks_exact_mut(layer).zip(from.chunks_exact(layer)) {
        to[range.clone()].iter_mut().zip(&from[range.clone()]).for_each(|(to, from)| *to = (*from).into());
    }
}

/// Scales each layer of a vector to Euclidean length 1; a zero vector stays zero.
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
    fn a_mean_of_many_tokens_keeps_its_digits_and_nan_shows() {
        // By hand: 60,000 times the float32 nearest to 0.1 has itself as its mean.
        let mut reducer = Reducer::new(Pooling::Mean, 2, 2);
        (0..60_000).for_each(|_| reducer.push(&[0.1, -3.0]));
        let mut joiner = Joiner::new(Pooling::Mean, 2);
        joiner.push(reducer.finish());
        assert_eq!(joiner.finish(), Some(vec![0.1, -3.0]));
        let mut reducer = Reducer::new(Pooling::Max, 2, 2);
        [[1.0, f32::NAN], [2.0, 1.0]].iter().for_each(|token| reducer.push(token));
        let values = reducer.finish().values;
        assert!(values[0] == 2.0 && values[1].is_nan());
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
