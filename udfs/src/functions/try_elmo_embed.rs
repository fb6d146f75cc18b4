//! `try_elmo_embed(text [, options])`: a vector, or the error that prevented it.

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
pub const NAME: &str = "try_elmo_embed";

pub(crate) const PARAMETERS: Parameters = Parameters {
    function: NAME,
    names: &[
        "text",
        "layers",
        "pooling",
        "model",
        "tokenizer",
        "sentences",
        "state",
        "on_long",
        "normalize",
        "max_tokens",
    ],
    columns: 1,
};

static DOCUMENTATION: LazyLock<Documentation> = LazyLock::new(|| {
    document(
        &[&PARAMETERS],
        "Embeds a text like elmo_embed, but a text that cannot be embedded does not fail the query. Returns \
         `Struct<embedding: FixedSizeList<Float32, D>, error: Utf8, truncated: Boolean, tokens: UInt32>`: the vector, \
         why there is none, whether a sentence was truncated, and the number of tokens that were embedded. Returns \
         NULL if the text is NULL. `embedding` is NULL if the text is blank or cannot be embedded, and `error` is \
         NULL unless it cannot.",
        &[("text", TEXT)],
        "SELECT id, r['error'] FROM (SELECT id, try_elmo_embed(text) AS r FROM reviews) WHERE r['error'] IS NOT NULL;",
    )
});

/// The function, with the models that it may use: `Struct<embedding, error, truncated, tokens>`.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct TryElmoEmbed(pub(crate) TextFunction);

impl TryElmoEmbed {
    /// The function over these models.
    #[must_use]
    pub fn new(models: Models) -> Self {
        Self(TextFunction::new(PARAMETERS, Kind::Checked, models))
    }
}

impl ScalarUDFImpl for TryElmoEmbed {
    text_function!();
}
