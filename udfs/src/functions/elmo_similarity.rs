//! `elmo_similarity(text_a, text_b [, options])`: the cosine of the vectors of two texts.

use std::sync::LazyLock;

use datafusion::{
    arrow::datatypes::{DataType, Field, FieldRef},
    common::{ScalarValue, internal_err},
    error::Result,
    logical_expr::{
        ColumnarValue, Documentation, Expr, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature,
        Volatility,
    },
};
use elmo::spec::Level;

use super::{
    downcast::to_volatile,
    elmo_cosine::ElmoCosine,
    elmo_embed::{self, ElmoEmbed},
};
use crate::{
    args::{EmbedOptions, Parameters, coerce_text, literal_value},
    call::{Call, Kind},
    documentation::{TEXT, document},
    measure::{Measure, MeasureFunction},
    models::Models,
    text_function::TextFunction,
};

/// The name in SQL.
pub const NAME: &str = "elmo_similarity";

pub(crate) const PARAMETERS: Parameters = Parameters {
    function: NAME,
    names: &[
        "text_a",
        "text_b",
        "layers",
        "pooling",
        "model",
        "tokenizer",
        "sentences",
        "state",
        "on_long",
        "on_error",
        "normalize",
        "max_tokens",
    ],
    columns: 2,
};

static DOCUMENTATION: LazyLock<Documentation> = LazyLock::new(|| {
    document(
        &[&PARAMETERS],
        "Returns the cosine similarity of the vectors that elmo_embed gives two texts, `Float32` from -1 to 1. \
         Returns NULL if a text is NULL or blank.",
        &[("text_a", TEXT), ("text_b", "The other text.")],
        "SELECT id, elmo_similarity(text, 'cold soup') AS near FROM reviews ORDER BY near DESC LIMIT 5;",
    )
});

/// The function, with the models that it may use: `Float32`.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct ElmoSimilarity {
    pub(super) models: Models,
    signature: Signature,
}

impl ElmoSimilarity {
    /// The function over these models.
    #[must_use]
    pub fn new(models: Models) -> Self {
        Self { models, signature: PARAMETERS.signature(Volatility::Immutable) }
    }

    fn embed(&self) -> TextFunction {
        TextFunction::new(elmo_embed::PARAMETERS, Kind::Vector, self.models.clone())
    }

    /// The call for either text. Its errors name this function.
    fn call(&self, options: &[Option<&ScalarValue>]) -> Result<Call> {
        let options = EmbedOptions::parse(&PARAMETERS, Level::Sentence, &self.models, options)?;
        Ok(Call { function: NAME, kind: Kind::Vector, options })
    }

    /// Rewrites a call as `elmo_cosine(elmo_embed(text_a), elmo_embed(text_b))`, so that a text that is compared with
    /// several others is embedded once.
    pub(crate) fn expand(&self, args: &[Expr]) -> Result<Expr> {
        let (texts, options) = PARAMETERS.split(args)?;
        let vector = |text: &Expr| {
            let args = [text].into_iter().chain(options).cloned().collect();
            to_volatile(ScalarUDF::new_from_impl(ElmoEmbed(self.embed())).call(args)).data
        };
        let cosine = ScalarUDF::new_from_impl(ElmoCosine::default());
        Ok(cosine.call(texts.iter().map(vector).collect()))
    }
}

impl ScalarUDFImpl for ElmoSimilarity {
    fn name(&self) -> &str {
        NAME
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _: &[DataType]) -> Result<DataType> {
        Ok(DataType::Float32)
    }

    fn coerce_types(&self, types: &[DataType]) -> Result<Vec<DataType>> {
        let (texts, options) = PARAMETERS.split(types)?;
        let texts =
            texts.iter().zip(PARAMETERS.names).map(|(data_type, name)| coerce_text(&PARAMETERS, name, data_type));
        texts.chain(options.iter().map(|data_type| Ok(data_type.clone()))).collect()
    }

    fn return_field_from_args(&self, args: ReturnFieldArgs) -> Result<FieldRef> {
        let (_, options) = PARAMETERS.split(args.scalar_arguments)?;
        // Invalid options are planning errors.
        self.call(options)?.field(&self.models)?;
        Ok(FieldRef::new(Field::new(NAME, DataType::Float32, true)))
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let (texts, options) = PARAMETERS.split(&args.args)?;
        let call = self.call(&options.iter().map(literal_value).collect::<Vec<_>>())?;
        let [a, b] = texts else { return internal_err!("{NAME} compares two texts") };
        let vector = |text: &ColumnarValue| {
            let rows = match text {
                ColumnarValue::Array(column) => column.len(),
                ColumnarValue::Scalar(_) => 1,
            };
            call.embed(&self.models, &text.clone().into_array(rows)?).map(|column| match text {
                ColumnarValue::Array(_) => Ok(ColumnarValue::Array(column)),
                ColumnarValue::Scalar(_) => ScalarValue::try_from_array(&column, 0).map(ColumnarValue::Scalar),
            })?
        };
        let args = ScalarFunctionArgs { args: vec![vector(a)?, vector(b)?], ..args };
        MeasureFunction::new(NAME, Measure::Cosine).invoke(&args)
    }

    fn documentation(&self) -> Option<&Documentation> {
        Some(&DOCUMENTATION)
    }
}
