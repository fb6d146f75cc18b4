//! The unit of work: a sentence, its settings, and its result.

use std::ops::Range;

use crate::{planner::Group, pooling::Partial, spec::Pooling};

/// The output vector of a token.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Output {
    /// `sum factor_k * layer_k`.
    Combined(Vec<(usize, f32)>),
    /// Each layer normalised over the sentence (mean and variance of all its values), then combined.
    Normalized(Vec<f32>),
    /// All layers, one after the other.
    All,
}

/// How a sentence is computed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Recipe {
    /// Start from the warm state, not from zeros.
    pub(crate) warm: bool,
    /// Return the vectors of `<S>` and `</S>` too.
    pub(crate) boundaries: bool,
    pub(crate) output: Output,
    /// `None`: the vector of every token.
    pub(crate) pooling: Option<Pooling>,
}

impl Recipe {
    /// Sentences of one batch share the start state and whether boundaries are read.
    pub(super) fn group(&self) -> Group {
        Group::from(self.warm) * 2 + Group::from(self.boundaries)
    }
}

/// The words of one sentence (or window) in one allocation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Words {
    text: String,
    ends: Vec<u32>,
}

impl Words {
    /// With room for so many words of so many bytes in all.
    pub(crate) fn with_capacity(words: usize, bytes: usize) -> Self {
        Self { text: String::with_capacity(bytes), ends: Vec::with_capacity(words) }
    }

    pub(crate) fn push(&mut self, word: &str) {
        self.text.push_str(word);
        self.ends.push(self.text.len() as u32);
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &str> {
        let starts = std::iter::once(0).chain(self.ends.iter().map(|&e| e as usize));
        starts.zip(&self.ends).map(|(start, &end)| &self.text[start..end as usize])
    }
}

/// One unit of work.
#[derive(Debug, Clone)]
pub(crate) struct Sentence {
    pub(crate) words: Words,
    /// Tokens whose vectors are wanted: all, or the middle of a window.
    pub(crate) keep: Range<usize>,
}

/// The result of one sentence: the vectors of its kept tokens one after the other, or their reduction.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Vectors {
    Tokens(Vec<f32>),
    Pooled(Partial),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_back_as_they_went_in() {
        let mut words = Words::default();
        for word in ["a", "", "日本", "z"] {
            words.push(word);
        }
        assert_eq!(words.iter().collect::<Vec<_>>(), ["a", "", "日本", "z"]);
        assert_eq!(words.len(), 4);
    }
}
