//! `elmo_embed(text [, options])`: one vector per text.

use datafusion::logical_expr::ScalarUDFImpl;
use datafusion_macros::user_doc;

use crate::{
    args::Parameters,
    call::Kind,
    models::Models,
    text_function::{TextFunction, text_function},
};

/// The name in SQL.
pub const NAME: &str = "elmo_embed";

pub(crate) const PARAMETERS: Parameters = Parameters {
    function: NAME,
    names: &["text", "layers", "pooling", "model", "tokenizer", "sentences", "state", "on_long", "on_error"],
    columns: 1,
};

/// The function, with the models that it may use: `FixedSizeList<Float32, D>` with the metadata of
/// `arrow.fixed_shape_tensor` and of the model.
#[user_doc(
    doc_section(label = "ELMo Functions"),
    description = "Returns the ELMo vector of a text: the mean of its tokens' vectors, each computed in the context of its sentence. Returns NULL if the text is NULL or blank. Options must be literals; NULL selects the default.",
    syntax_example = "elmo_embed(text [, layers => , pooling => , model => , tokenizer => , sentences => , state => , on_long => , on_error => ])",
    sql_example = r"```sql
> SELECT id, elmo_embed(text, layers => 'top', pooling => 'max') AS embedding FROM reviews;
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
    ),
    argument(
        name = "on_error",
        description = "What to do with a text that cannot be embedded: `'fail'` (default) or `'null'`."
    )
)]
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct ElmoEmbed(pub(crate) TextFunction);

impl ElmoEmbed {
    /// The function over these models.
    #[must_use]
    pub fn new(models: Models) -> Self {
        Self(TextFunction::new(PARAMETERS, Kind::Vector, models))
    }
}

impl ScalarUDFImpl for ElmoEmbed {
    text_function!();
}
