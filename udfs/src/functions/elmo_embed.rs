//! `elmo_embed(text [, options])`: one vector per text.

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
pub const NAME: &str = "elmo_embed";

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
        "on_error",
        "normalize",
        "max_tokens",
    ],
    columns: 1,
};

static DOCUMENTATION: LazyLock<Documentation> = LazyLock::new(|| {
    document(
        &[&PARAMETERS],
        "Returns the ELMo vector of a text, `FixedSizeList<Float32, D>`: the mean of its tokens' vectors, each \
         computed in the context of its sentence. Returns NULL if the text is NULL or blank.",
        &[("text", TEXT)],
        "SELECT id, elmo_embed(text, layers => 'top', pooling => 'max') AS embedding FROM reviews;",
    )
});

/// The function, with the models that it may use: `FixedSizeList<Float32, D>` with the metadata of
/// `arrow.fixed_shape_tensor` and of the model.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct ElmoEmbed(pub(crate) TextFunction);

impl ElmoEmbed {
    /// The function over these models.
    #[must_use]
    pub fn new(models: Models) -> Self {
        Self(TextFunction::new(PARAMETERS, Kind::Vector, models))
    }
}

impl ScalarUDFImpl for ElmoEmbed {
    text_function!();
}
