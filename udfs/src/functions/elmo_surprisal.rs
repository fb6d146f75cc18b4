//! `elmo_surprisal(text [, options])`: the surprisal of each token of a text.

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

/// The function, with the models that it may use: [`elmo::surprisal::surprisal_type`].
#[user_doc(
    doc_section(label = "ELMo Functions"),
    description = "Returns the tokens of a text with their surprisals in bits, as a list of structs: `token`, `start`, `end` and `sentence` as elmo_tokens, `forward` (given the tokens before), `backward` (given the tokens after), and `known` (false if the word is not in the vocabulary and `<UNK>` was scored instead). The model needs its vocabulary and softmax (`vocab.txt` and `softmax.safetensors`) beside the weights; published weights lack them. Returns NULL if the text is NULL, and an empty list if it is blank.",
    syntax_example = "elmo_surprisal(text [, model => , tokenizer => , sentences => , state => , on_long => , on_error => ])",
    sql_example = r"```sql
> SELECT id, unnest(elmo_surprisal(text)) FROM reviews;
```",
    argument(
        name = "text",
        description = "A string in any Arrow encoding, a binary that holds UTF-8, or a list of tokens, which is one sentence."
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
        description = "What to do with a text that cannot be scored: `'fail'` (default) or `'null'`."
    )
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
