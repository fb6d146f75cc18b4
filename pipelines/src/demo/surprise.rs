//! How unexpected each word of a sentence is to the language model.

use std::sync::Arc;

use arrow::{
    array::{Array, ArrayRef, AsArray, StringArray},
    datatypes::Float32Type,
};
use elmo::{
    ColumnEmbedder, Elmo, EmbedSpec,
    spec::{SentenceMode, TokenizerKind},
    surprisal::Scorer,
};
use serde::Serialize;

use crate::error::{Error, Result};

/// A sentence with one odd word, written for this project.
const SENTENCE: &str = "The old man sat down by the fire and began to whale his pipe.";

/// A word and its surprisal in bits.
#[derive(Debug, Serialize)]
pub struct Surprise {
    /// The word.
    pub word: String,
    /// After the words before it.
    pub forward: f64,
    /// Before the words after it.
    pub backward: f64,
}

/// The words of the sentence; none without an LM head.
///
/// # Errors
/// Those of the embedder and of the LM head.
pub(super) fn of(elmo: &Elmo) -> Result<Vec<Surprise>> {
    if !elmo.has_lm_head() {
        return Ok(Vec::new());
    }
    let (tokenizer, sentences) = (TokenizerKind::Moses, SentenceMode::Off);
    let spec = EmbedSpec { tokenizer, sentences, ..elmo.spec() };
    let texts: ArrayRef = Arc::new(StringArray::from(vec![SENTENCE]));
    let embedded = ColumnEmbedder::new(elmo, Scorer::spec(&spec))?.embed(&texts)?;
    let scored = Scorer::new(elmo, &spec)?.score(&texts, &embedded)?.surprisals()?;
    let items = scored.as_list::<i32>().value(0);
    let column = |name: &str| {
        let found = items.as_struct().column_by_name(name);
        found.ok_or_else(|| Error::Failed(format!("surprisals have no column {name}")))
    };
    let words = column("token")?.as_string::<i32>();
    let (forward, backward) =
        (column("forward")?.as_primitive::<Float32Type>(), column("backward")?.as_primitive::<Float32Type>());
    Ok((0..words.len())
        .map(|at| Surprise {
            word: words.value(at).to_owned(),
            forward: forward.value(at).into(),
            backward: backward.value(at).into(),
        })
        .collect())
}
