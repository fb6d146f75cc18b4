//! `elmo_tokens(text [, options])`: the tokens of a text, each with its byte offsets and its vector.

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
pub const NAME: &str = "elmo_tokens";

pub(crate) const PARAMETERS: Parameters = Parameters {
    function: NAME,
    names: &["text", "layers", "model", "tokenizer", "sentences", "state", "on_long", "on_error"],
    columns: 1,
};

static DOCUMENTATION: LazyLock<Documentation> = LazyLock::new(|| {
    document(
        &PARAMETERS,
        "Returns the tokens of a text as a list of structs: `token`, `start` and `end` (byte offsets; `text[start..end]` is the token as written), `sentence` (the number of the sentence, from 0) and `embedding`. Returns NULL if the text is NULL, and an empty list if it is blank.",
        "SELECT id, t['token'], t['embedding'] FROM (SELECT id, unnest(elmo_tokens(text)) AS t FROM reviews);",
        &[&format!("{TEXT} Offsets into a list of tokens refer to the tokens joined by single spaces.")],
    )
});

/// The function, with the models that it may use: `List<Struct<token, start, end, sentence, embedding>>`.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct ElmoTokens(pub(crate) TextFunction);

impl ElmoTokens {
    /// The function over these models.
    #[must_use]
    pub fn new(models: Models) -> Self {
        Self(TextFunction::new(PARAMETERS, Kind::Tokens, models))
    }
}

impl ScalarUDFImpl for ElmoTokens {
    text_function!();
}
