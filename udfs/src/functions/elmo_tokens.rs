//! `elmo_tokens(text [, options])`: the tokens of a text, each with its byte offsets and its vector.

use std::sync::LazyLock;

use datafusion::logical_expr::{Documentation, Expr, ScalarUDF, ScalarUDFImpl};

use super::downcast::to_volatile;
use crate::{
    args::Parameters,
    call::Kind,
    documentation::{TEXT, document},
    models::Models,
    text_function::{TextFunction, text_function},
};

/// The name in SQL.
pub const NAME: &str = "elmo_tokens";

pub(crate) const PARAMETERS: Parameters = Parameters {
    function: NAME,
    names: &[
        "text",
        "layers",
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
        "Returns the tokens of a text, `List<Struct<token: Utf8, start: UInt32, end: UInt32, sentence: UInt32, \
         embedding: FixedSizeList<Float32, D>>>`. `start` and `end` are byte offsets (`text[start..end]` is the token \
         as written; offsets into a list of tokens refer to the tokens joined by single spaces), and `sentence` is \
         the number of the sentence, from 0. Returns NULL if the text is NULL, and an empty list if it is blank.",
        &[("text", TEXT)],
        "SELECT id, t['token'], t['embedding'] FROM (SELECT id, unnest(elmo_tokens(text)) AS t FROM reviews);",
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

/// A call of `elmo_tokens` with the options of a function that is defined by it, of which it has the first ones.
/// Functions with the same options share one call, and so one embedding of the text.
pub(super) fn tokens_of(models: &Models, text: &Expr, options: &[Expr]) -> Expr {
    let is_default = |option: &&Expr| matches!(option, Expr::Literal(value, _) if value.is_null());
    let own = &options[..options.len().min(PARAMETERS.options().len())];
    let given = own.len() - own.iter().rev().take_while(is_default).count();
    let args = [text].into_iter().chain(&own[..given]).cloned().collect();
    to_volatile(ScalarUDF::new_from_impl(ElmoTokens::new(models.clone())).call(args)).data
}

impl ScalarUDFImpl for ElmoTokens {
    text_function!();
}
