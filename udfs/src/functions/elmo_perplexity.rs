//! `elmo_perplexity(text [, options])`: the perplexity of a text.

use std::sync::LazyLock;

use datafusion::logical_expr::{Documentation, ScalarUDFImpl};

use crate::{
    args::Parameters,
    call::Kind,
    documentation::{TEXT, document},
    models::Models,
    text_function::{TextFunction, text_function},
};

/// The name in SQL.
pub const NAME: &str = "elmo_perplexity";

pub(crate) const PARAMETERS: Parameters = Parameters {
    function: NAME,
    names: &["text", "model", "tokenizer", "sentences", "state", "on_long", "on_error", "max_tokens"],
    columns: 1,
};

static DOCUMENTATION: LazyLock<Documentation> = LazyLock::new(|| {
    document(
        &[&PARAMETERS],
        "Returns the perplexity of a text, `Struct<average: Float64, forward: Float64, backward: Float64, tokens: \
         UInt32, unknown: UInt32>`, over the tokens and one boundary per sentence, with the full softmax. `average` \
         is the geometric mean of `forward` and `backward`, `tokens` the number of tokens, and `unknown` the number \
         of those that are not in the vocabulary. The model needs its vocabulary and softmax (`vocab.txt` and \
         `softmax.safetensors`) beside the weights; published weights lack them. Returns NULL if the text is NULL or \
         blank.",
        &[("text", TEXT)],
        "SELECT id FROM reviews ORDER BY elmo_perplexity(text)['average'] DESC LIMIT 10;",
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
