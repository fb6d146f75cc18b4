//! `elmo_tokens(text [, options])`: the tokens of a text, each with its byte offsets and its vector.

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

/// The function, with the models that it may use: `List<Struct<token, start, end, sentence, embedding>>`.
#[user_doc(
    doc_section(label = "ELMo Functions"),
    description = "Returns the tokens of a text as a list of structs: `token`, `start` and `end` (byte offsets; `text[start..end]` is the token as written), `sentence` (the number of the sentence, from 0) and `embedding`. Returns NULL if the text is NULL, and an empty list if it is blank.",
    syntax_example = "elmo_tokens(text [, layers => , model => , tokenizer => , sentences => , state => , on_long => , on_error => ])",
    sql_example = r"```sql
> SELECT id, t['token'], t['embedding'] FROM (SELECT id, unnest(elmo_tokens(text)) AS t FROM reviews);
```",
    argument(
        name = "text",
        description = "A string in any Arrow encoding, a binary that holds UTF-8, or a list of tokens, which is one sentence. Offsets into a list of tokens refer to the tokens joined by single spaces."
    ),
    argument(
        name = "layers",
        description = "The layers: `'average'` (default), `'top'`, `'token'`, the number of a layer, or `'all'`, which concatenates all layers."
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
    ),
    argument(
        name = "on_error",
        description = "What to do with a text that cannot be embedded: `'fail'` (default) or `'null'`."
    )
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
