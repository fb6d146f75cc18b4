//! `elmo_surprisal(text [, options])`: the surprisal of each token of a text.

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
pub const NAME: &str = "elmo_surprisal";

pub(crate) const PARAMETERS: Parameters = Parameters {
    function: NAME,
    names: &["text", "model", "tokenizer", "sentences", "state", "on_long", "on_error", "max_tokens"],
    columns: 1,
};

static DOCUMENTATION: LazyLock<Documentation> = LazyLock::new(|| {
    document(
        &[&PARAMETERS],
        "Returns the tokens of a text with their surprisals in bits, `List<Struct<token: Utf8, start: UInt32, end: \
         UInt32, sentence: UInt32, forward: Float32, backward: Float32, known: Boolean>>`: `token`, `start`, `end` \
         and `sentence` as elmo_tokens, `forward` given the tokens before, `backward` given the tokens after, and \
         `known`, which is false if the word is not in the vocabulary and `<UNK>` was scored instead. The model needs \
         its vocabulary and softmax (`vocab.txt` and `softmax.safetensors`) beside the weights; published weights \
         lack them. Returns NULL if the text is NULL, and an empty list if it is blank.",
        &[("text", TEXT)],
        "SELECT id, unnest(elmo_surprisal(text)) FROM reviews;",
    )
});

/// The function, with the models that it may use: [`elmo::surprisal::surprisal_type`].
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct ElmoSurprisal(pub(crate) TextFunction);

impl ElmoSurprisal {
    /// The function over these models.
    #[must_use]
    pub fn new(models: Models) -> Self {
        Self(TextFunction::new(PARAMETERS, Kind::Surprisal, models))
    }
}

impl ScalarUDFImpl for ElmoSurprisal {
    text_function!();
}
