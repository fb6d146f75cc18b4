//! `elmo_perplexity(text [, options])`: the perplexity of a text.

use datafusion::logical_expr::ScalarUDFImpl;
use datafusion_macros::user_doc;

use crate::{
    args::Parameters,
    call::Kind,
    models::Models,
    text_function::{TextFunction, text_function},
};

/// The name in SQL.
pub const NAME: &str = "elmo_perplexity";

pub(crate) const PARAMETERS: Parameters = Parameters {
    function: NAME,
    names: &["text", "model", "tokenizer", "sentences", "state", "on_long", "on_error"],
    columns: 1,
};

/// The function, with the models that it may use: [`elmo::surprisal::perplexity_type`].
#[user_doc(
    doc_section(label = "ELMo Functions"),
    description = "Returns the perplexity of a text as a struct: `forward`, `backward` and their geometric mean `average`, over the tokens and one boundary per sentence, with the full softmax; and the number of `tokens` and of `unknown` tokens, which are not in the vocabulary. The model needs its vocabulary and softmax (`vocab.txt` and `softmax.safetensors`) beside the weights; published weights lack them. Returns NULL if the text is NULL or blank.",
    syntax_example = "elmo_perplexity(text [, model => , tokenizer => , sentences => , state => , on_long => , on_error => ])",
    sql_example = r"```sql
> SELECT id FROM reviews ORDER BY elmo_perplexity(text)['average'] DESC LIMIT 10;
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
pub struct ElmoPerplexity(pub(crate) TextFunction);

impl ElmoPerplexity {
    /// The function over these models.
    #[must_use]
    pub fn new(models: Models) -> Self {
        Self(TextFunction::new(PARAMETERS, Kind::Perplexity, models))
    }
}

impl ScalarUDFImpl for ElmoPerplexity {
    text_function!();
}
