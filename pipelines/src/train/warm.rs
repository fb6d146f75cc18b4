//! The start state `warm` of a trained model, computed from its own text.

use std::sync::Arc;

use elmo::{Elmo, EmbedderSettings, ModelData, train::Sentence};

use super::corpus::{Corpus, Passes, Sentences, StreamPosition};
use crate::error::Result;

/// Sentences that are read to compute the state.
const SENTENCES: usize = 6;
/// Their tokens: a shorter one may be a heading, and a longer one a text that was not split into sentences.
const TOKENS: std::ops::RangeInclusive<usize> = 5..=40;
/// Sentences among which they are looked for.
const AMONG: usize = 10_000;

/// The first sentences of usual length, in the order in which the run reads them. Must be called within the runtime.
///
/// # Errors
/// Those of the corpus.
pub(super) fn sentences(corpus: &Arc<Corpus>) -> Result<Vec<Vec<String>>> {
    let mut read = Sentences::start(corpus, 0, StreamPosition::default(), Passes::One)?;
    let mut found = Vec::new();
    for _ in 0..AMONG {
        let Some(sentence) = read.next()?.filter(|_| found.len() < SENTENCES) else { break };
        if TOKENS.contains(&sentence.len()) {
            found.push(tokens(&sentence));
        }
    }
    Ok(found)
}

fn tokens(sentence: &Sentence) -> Vec<String> {
    sentence.tokens().map(str::to_owned).collect()
}

/// The state of a model after reading these sentences; `None` when there are none.
///
/// # Errors
/// Those of the device.
pub(super) fn state(model: &ModelData, text: &[Vec<String>], settings: &EmbedderSettings) -> Result<Option<Vec<f32>>> {
    if text.is_empty() {
        return Ok(None);
    }
    Ok(Some(Elmo::from_data(model.clone(), settings)?.state_after(text)?))
}
