//! `try_elmo_embed(text [, options])`: a vector, or the error that prevented it.

use datafusion::logical_expr::ScalarUDFImpl;
use datafusion_macros::user_doc;

use crate::{
    args::Parameters,
    call::Kind,
    models::Models,
    text_function::{TextFunction, text_function},
};

/// The name in SQL.
pub const NAME: &str = "try_elmo_embed";

pub(crate) const PARAMETERS: Parameters = Parameters {
    function: NAME,
    names: &["text", "layers", "pooling", "model", "tokenizer", "sentences", "state", "on_long"],
    columns: 1,
};

/// The function, with the models that it may use: `Struct<embedding, error, truncated, tokens>`.
#[user_doc(
    doc_section(label = "ELMo Functions"),
    description = "Embeds a text like elmo_embed, but a text that cannot be embedded does not fail the query. Returns a struct of `embedding`, `error` (why there is no vector, or NULL), `truncated` (whether a sentence was truncated) and `tokens` (the number of tokens that were embedded). Returns NULL if the text is NULL.",
    syntax_example = "try_elmo_embed(text [, layers => , pooling => , model => , tokenizer => , sentences => , state => , on_long => ])",
    sql_example = r"```sql
> SELECT id, r['error'] FROM (SELECT id, try_elmo_embed(text) AS r FROM reviews) WHERE r['error'] IS NOT NULL;
```",
    argument(
        name = "text",
        description = "A string in any Arrow encoding, a binary that holds UTF-8, or a list of tokens, which is one sentence."
    ),
    argument(
        name = "layers",
        description = "The layers: `'average'` (default), `'top'`, `'token'`, the number of a layer, or `'all'`, which concatenates all layers."
    ),
    argument(
        name = "pooling",
        description = "How token vectors are combined: `'mean'` (default), `'max'`, `'first'`, `'last'`, or `'ends'`, which is the forward half of the last token and the backward half of the first."
    ),
    argument(
        name = "model",
        description = "The name of a registered model. The default is the session's default model."
    ),
    argument(name = "tokenizer", description = "The tokenizer: `'moses'` (default), `'words'` or `'whitespace'`."),
    argument(
        name = "sentences",
        description = "How sentences are found: `'split'` (default), or `'off'` if each text is one sentence."
    ),
    argument(
        name = "state",
        description = "The state of the LSTMs at the start of a sentence: `'zero'` (default) or `'warm'`."
    ),
    argument(
        name = "on_long",
        description = "What to do with a sentence of more than 512 tokens: `'window'` (default), `'truncate'` or `'error'`."
    )
)]
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
