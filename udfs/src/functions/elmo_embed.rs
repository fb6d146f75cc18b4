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

/// The function, with the models it may use: `FixedSizeList<Float32, D>` with the metadata of `arrow.fixed_shape_tensor`
/// and of the model.
#[user_doc(
    doc_section(label = "ELMo Functions"),
    description = "Returns the ELMo vector of a text: the mean of its tokens' vectors, each token read in its sentence. NULL for a NULL or blank text. Options are literals; a NULL option has its default.",
    syntax_example = "elmo_embed(text [, layers => , pooling => , model => , tokenizer => , sentences => , state => , on_long => , on_error => ])",
    sql_example = r"```sql
> SELECT id, elmo_embed(text, layers => 'top', pooling => 'max') AS embedding FROM reviews;
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
    ),
    argument(name = "on_error", description = "A text that cannot be embedded: `'fail'` (default) or `'null'`.")
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
