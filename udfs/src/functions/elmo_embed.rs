//! `elmo_embed(text [, options])`: one vector per text.
//!
//! A plain synchronous function: it hands its rows to the embedder that all queries share and waits. It is right
//! wherever DataFusion evaluates an expression (CASE, joins, sort keys, aggregates), which an asynchronous function is
//! not.

use datafusion::{
    arrow::{
        array::ArrayRef,
        datatypes::{DataType, FieldRef},
    },
    common::{ScalarValue, internal_err, plan_err},
    error::{DataFusionError, Result},
    logical_expr::{
        ColumnarValue, Documentation, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDFImpl, Signature, Volatility,
    },
};
use datafusion_macros::user_doc;
use elmo::ColumnEmbedder;

use crate::{
    Models,
    args::{self, EmbedOptions, PARAMETERS},
};

/// The name in SQL.
pub const NAME: &str = "elmo_embed";

/// The function, with the models it may use.
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
pub struct ElmoEmbed {
    models: Models,
    signature: Signature,
}

impl ElmoEmbed {
    /// The function over these models.
    #[must_use]
    pub fn new(models: Models) -> Self {
        // Immutable: the weights never change, so equal texts have equal vectors. DataFusion may then compute a repeated
        // call once, and a call on a literal when it plans.
        let mut signature = Signature::user_defined(Volatility::Immutable);
        signature.parameter_names = Some(PARAMETERS.map(str::to_owned).to_vec());
        Self { models, signature }
    }

    fn embedder(&self, options: &[Option<&ScalarValue>]) -> Result<ColumnEmbedder> {
        let options = EmbedOptions::parse(NAME, options)?;
        let made = self.models.embedder(options.model.as_deref(), &options.spec);
        made.map_err(|reason| DataFusionError::Plan(format!("{NAME}: {reason}")))
    }
}

impl ScalarUDFImpl for ElmoEmbed {
    fn name(&self) -> &str {
        NAME
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _: &[DataType]) -> Result<DataType> {
        internal_err!("the type of {NAME} depends on its options; return_field_from_args says it")
    }

    fn coerce_types(&self, types: &[DataType]) -> Result<Vec<DataType>> {
        args::coerce(NAME, types)
    }

    /// `FixedSizeList<Float32, D>` with the metadata of `arrow.fixed_shape_tensor` and of the model. Always nullable,
    /// because a blank text has no vector.
    fn return_field_from_args(&self, args: ReturnFieldArgs) -> Result<FieldRef> {
        let options = args.scalar_arguments.get(1..).unwrap_or_default();
        match self.embedder(options)?.fields().into_iter().next() {
            Some(field) => Ok(FieldRef::new(field.with_name(NAME))),
            None => internal_err!("an embedder without a vector field"),
        }
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let Some((text, options)) = args.args.split_first() else {
            return plan_err!("{NAME} needs a text");
        };
        let literals: Vec<_> = options.iter().map(literal).collect();
        let embedder = self.embedder(&literals)?;
        match text {
            ColumnarValue::Array(column) => Ok(ColumnarValue::Array(embed(&embedder, column)?)),
            // One text for all rows: embedded once, and handed on as one value.
            ColumnarValue::Scalar(text) => {
                let vectors = embed(&embedder, &text.to_array()?)?;
                Ok(ColumnarValue::Scalar(ScalarValue::try_from_array(&vectors, 0)?))
            }
        }
    }

    fn documentation(&self) -> Option<&Documentation> {
        self.doc()
    }
}

fn literal(value: &ColumnarValue) -> Option<&ScalarValue> {
    match value {
        ColumnarValue::Scalar(value) => Some(value),
        ColumnarValue::Array(_) => None,
    }
}

fn embed(embedder: &ColumnEmbedder, column: &ArrayRef) -> Result<ArrayRef> {
    let embedded = embedder.embed(column).map_err(|e| DataFusionError::External(Box::new(e)))?;
    Ok(embedded.vectors)
}
