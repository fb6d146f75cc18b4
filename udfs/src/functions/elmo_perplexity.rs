//! `elmo_perplexity(text [, options])`: the perplexity of a text.

use std::sync::LazyLock;

use datafusion::logical_expr::{Documentation, ScalarUDFImpl};

use super::documentation::{TEXT, document};
use crate::{
    args::Parameters,
    call::Kind,
    models::Models,
    text_function::{TextFunction, text_function},
};

/// The name in SQL.
pub const NAME: &str = "elmo_perplexity";

pub(crate) const PARAMETERS: Parameters = Parameters {
    function: NAME,
    names: &["text", "model", "tokenizer", "sentences", "state", "on_long", "on_error"],
    columns: 1,
};

static DOCUMENTATION: LazyLock<Documentation> = LazyLock::new(|| {
    document(
        &PARAMETERS,
        "Returns the perplexity of a text as a struct: `forward`, `backward` and their geometric mean `average`, over the tokens and one boundary per sentence, with the full softmax; and the number of `tokens` and of `unknown` tokens, which are not in the vocabulary. The model needs its vocabulary and softmax (`vocab.txt` and `softmax.safetensors`) beside the weights; published weights lack them. Returns NULL if the text is NULL or blank.",
        "SELECT id FROM reviews ORDER BY elmo_perplexity(text)['average'] DESC LIMIT 10;",
        &[TEXT],
    )
});

/// The function, with the models that it may use: [`elmo::surprisal::perplexity_type`].
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct ElmoPerplexity(pub(crate) TextFunction);

impl ElmoPerplexity {
    /// The function over these models.
    #[must_use]
    pub fn new(models: Models) -> Self {
        Self(TextFunction::new(PARAMETERS, Kind::Perplexity, models))
    }
}

impl ScalarUDFImpl for ElmoPerplexity {
    text_function!();
}
