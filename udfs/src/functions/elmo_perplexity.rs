//! `elmo_perplexity(text [, options])`: how well the language model expects a text.

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

/// The function, with the models it may use: [`elmo::surprisal::perplexity_type`].
#[user_doc(
    doc_section(label = "ELMo Functions"),
    description = "Returns the perplexity of a text: `forward`, `backward`, and their geometric mean `average`, over its tokens and a boundary per sentence, with the full softmax; besides, `tokens` and how many of them are `unknown` to the vocabulary. The model needs its vocabulary and softmax (`vocab.txt`, `softmax.safetensors`) beside the weights: published weights lack them. NULL for a NULL or blank text.",
    syntax_example = "elmo_perplexity(text [, model => , tokenizer => , sentences => , state => , on_long => , on_error => ])",
    sql_example = r"```sql
> SELECT id FROM reviews ORDER BY elmo_perplexity(text)['average'] DESC LIMIT 10;
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
