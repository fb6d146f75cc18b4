//! `elmo_surprisal(text [, options])`: how surprising each token is to the language model.

use datafusion::logical_expr::ScalarUDFImpl;
use datafusion_macros::user_doc;

use crate::{
    args::Parameters,
    call::Kind,
    models::Models,
    text_function::{TextFunction, text_function},
};

/// The name in SQL.
pub const NAME: &str = "elmo_surprisal";

pub(crate) const PARAMETERS: Parameters = Parameters {
    function: NAME,
    names: &["text", "model", "tokenizer", "sentences", "state", "on_long", "on_error"],
    columns: 1,
};

/// The function, with the models it may use: [`elmo::surprisal::surprisal_type`].
#[user_doc(
    doc_section(label = "ELMo Functions"),
    description = "Returns the tokens of a text, each with its byte range, its sentence, and its surprisal in bits: `forward`, after the tokens before it, and `backward`, before those behind it. `known` is false where the word is not in the vocabulary and `<UNK>` is scored in its place. The model needs its vocabulary and softmax (`vocab.txt`, `softmax.safetensors`) beside the weights: published weights lack them. NULL for a NULL text, an empty list for a blank one.",
    syntax_example = "elmo_surprisal(text [, model => , tokenizer => , sentences => , state => , on_long => , on_error => ])",
    sql_example = r"```sql
> SELECT id, unnest(elmo_surprisal(text)) FROM reviews;
```",
    argument(
        name = "text",
        description = "A string in any Arrow encoding, a binary (its UTF-8 is checked), or a list of tokens that is one sentence."
    ),
    argument(name = "model", description = "Name of a registered model; the default one if not given."),
    argument(name = "tokenizer", description = "`'moses'` (default), `'words'` or `'whitespace'`."),
    argument(name = "sentences", description = "`'split'` (default) or `'off'`: the text is one sentence."),
    argument(name = "state", description = "Where a sentence starts: `'zero'` (default) or `'warm'`."),
    argument(
        name = "on_long",
        description = "A sentence of more than 512 tokens: `'window'` (default), `'truncate'` or `'error'`."
    ),
    argument(name = "on_error", description = "A text that cannot be scored: `'fail'` (default) or `'null'`.")
)]
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
