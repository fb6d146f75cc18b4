//! `elmo_tokens(text [, options])`: the tokens of a text, each with its place and its vector.

use datafusion::logical_expr::ScalarUDFImpl;
use datafusion_macros::user_doc;

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

/// The function, with the models it may use: `List<Struct<token, start, end, sentence, embedding>>`.
#[user_doc(
    doc_section(label = "ELMo Functions"),
    description = "Returns the tokens of a text as a list of structs: `token`, `start` and `end` (byte offsets: `text[start..end]` is the token as written), `sentence` (counted from 0) and `embedding`. NULL for a NULL text, an empty list for a blank one.",
    syntax_example = "elmo_tokens(text [, layers => , model => , tokenizer => , sentences => , state => , on_long => , on_error => ])",
    sql_example = r"```sql
> SELECT id, t['token'], t['embedding'] FROM (SELECT id, unnest(elmo_tokens(text)) AS t FROM reviews);
```",
    argument(
        name = "text",
        description = "A string in any Arrow encoding, a binary (its UTF-8 is checked), or a list of tokens that is one sentence; offsets then count in the tokens joined by single spaces."
    ),
    argument(
        name = "layers",
        description = "`'average'` (default), `'top'`, `'token'`, a layer's number, or `'all'`: every layer, one after the other."
    ),
    argument(name = "model", description = "Name of a registered model; the default one if not given."),
    argument(name = "tokenizer", description = "`'moses'` (default), `'words'` or `'whitespace'`."),
    argument(name = "sentences", description = "`'split'` (default) or `'off'`: the text is one sentence."),
    argument(name = "state", description = "Where a sentence starts: `'zero'` (default) or `'warm'`."),
    argument(
        name = "on_long",
        description = "A sentence of more than 512 tokens: `'window'` (default), `'truncate'` or `'error'`."
    ),
    argument(name = "on_error", description = "A text that cannot be embedded: `'fail'` (default) or `'null'`.")
)]
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
