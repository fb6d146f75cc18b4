//! One word in two senses, and which of its contexts are nearest to each other.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, StringArray};
use elmo::{
    ColumnEmbedder, Elmo, EmbedSpec,
    spec::{Layers, Level, SentenceMode, TokenizerKind},
};
use serde::Serialize;

use super::cosine;
use crate::{
    error::{Error, Result},
    output::vectors::vectors_of_row,
};

/// The word of the demo.
const WORD: &str = "grave";
/// Its senses, and contexts that were written for this project.
const CONTEXTS: [(&str, &str); 8] = [
    ("burial", "They carried the old sailor to his grave in the rain."),
    ("serious", "The captain looked grave, and sent for the doctor."),
    ("burial", "Grass had grown over the grave, and nobody knew the name."),
    ("serious", "Her voice was grave, though her eyes were laughing."),
    ("burial", "The two brothers stood beside the grave without a word."),
    ("serious", "He was a grave and silent child who seldom played."),
    ("burial", "A great tree throws its shadow upon my mother's grave."),
    ("serious", "There are grave reasons, said the lawyer, for keeping the matter quiet."),
];
/// The layer that tells the senses of this word apart best (`src/books/MODEL.md` has figures of all layers).
const LAYER: usize = 1;

/// A word in its contexts.
#[derive(Debug, Serialize)]
pub struct Senses {
    /// The word.
    pub word: &'static str,
    /// Its contexts.
    pub contexts: Vec<Context>,
    /// The cosine of each context with each other.
    pub cosines: Vec<Vec<f64>>,
}

/// A context of the word.
#[derive(Debug, Serialize)]
pub struct Context {
    /// The sentence.
    pub text: &'static str,
    /// What the word means in it, as labelled by hand.
    pub sense: &'static str,
    /// The index of the context whose vector of the word is nearest.
    pub nearest: usize,
    /// The cosine of both.
    pub cosine: f64,
}

impl Senses {
    /// Embeds the word in its contexts.
    ///
    /// # Errors
    /// Those of the embedder; [`Error::Failed`] when the model cuts texts so that the word is no token.
    pub fn of(elmo: &Elmo) -> Result<Self> {
        let vectors = word_vectors(elmo)?;
        let cosines: Vec<Vec<f64>> = vectors.iter().map(|a| vectors.iter().map(|b| cosine(a, b)).collect()).collect();
        let contexts = CONTEXTS.iter().zip(&cosines).enumerate().map(|(at, ((sense, text), row))| {
            let others = row.iter().copied().enumerate().filter(|(other, _)| *other != at);
            let (nearest, cosine) = others.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((at, 1.0));
            Context { text, sense, nearest, cosine }
        });
        Ok(Self { word: WORD, contexts: contexts.collect(), cosines })
    }

    /// How many contexts have a nearest one of the same sense.
    pub fn right(&self) -> usize {
        self.contexts.iter().filter(|context| self.contexts[context.nearest].sense == context.sense).count()
    }
}

/// The vector of the word in each context.
fn word_vectors(elmo: &Elmo) -> Result<Vec<Vec<f32>>> {
    // The contexts are raw text, also for a model of text that was tokenised in advance.
    let (tokenizer, sentences) = (TokenizerKind::Moses, SentenceMode::Off);
    let spec = EmbedSpec { level: Level::Token, layers: Layers::One(LAYER), tokenizer, sentences, ..elmo.spec() };
    let texts: ArrayRef = Arc::new(StringArray::from_iter_values(CONTEXTS.iter().map(|(_, text)| *text)));
    let column = ColumnEmbedder::new(elmo, spec)?.embed(&texts)?.vectors;
    let tokens = column.as_list::<i32>();
    let of_row = |row: usize| {
        let items = tokens.value(row);
        let words = items.as_struct().column_by_name("token")?.as_string::<i32>().clone();
        let at = (0..words.len()).find(|&at| words.value(at) == WORD)?;
        vectors_of_row(&column, row).get(at).map(|vector| vector.values().to_vec())
    };
    let found: Option<Vec<_>> = (0..tokens.len()).map(of_row).collect();
    found.ok_or_else(|| Error::Failed(format!("this model's tokenizer does not give the token {WORD:?}")))
}
