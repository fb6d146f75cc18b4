//! `try_elmo_embed(text [, options])`: a vector, or why there is none.

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

/// The function, with the models it may use: `Struct<embedding, error, truncated, tokens>`.
#[user_doc(
    doc_section(label = "ELMo Functions"),
    description = "Returns what became of a text: a struct of `embedding` (as elmo_embed), `error` (why there is no vector; NULL when fine), `truncated` (a sentence was cut) and `tokens` (how many were read). A text that cannot be embedded never ends the query. NULL for a NULL text.",
    syntax_example = "try_elmo_embed(text [, layers => , pooling => , model => , tokenizer => , sentences => , state => , on_long => ])",
    sql_example = r"```sql
> SELECT id, r['error'] FROM (SELECT id, try_elmo_embed(text) AS r FROM reviews) WHERE r['error'] IS NOT NULL;
```",
    argument(
        name = "text",
        description = "A string in any Arrow encoding, a binary (its UTF-8 is checked), or a list of tokens that is one sentence."
    ),
    argument(
        name = "layers",
        description = "`'average'` (default), `'top'`, `'token'`, a layer's number, or `'all'`: every layer, one after the other."
    ),
    argument(
        name = "pooling",
        description = "`'mean'` (default), `'max'`, `'first'`, `'last'`, or `'ends'`: forward half of the last token, backward half of the first."
    ),
    argument(name = "model", description = "Name of a registered model; the default one if not given."),
    argument(name = "tokenizer", description = "`'moses'` (default), `'words'` or `'whitespace'`."),
    argument(name = "sentences", description = "`'split'` (default) or `'off'`: the text is one sentence."),
    argument(name = "state", description = "Where a sentence starts: `'zero'` (default) or `'warm'`."),
    argument(
        name = "on_long",
        description = "A sentence of more than 512 tokens: `'window'` (default), `'truncate'` or `'error'`."
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
