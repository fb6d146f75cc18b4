//! `elmo_word(text, start, end [, options])`: the vector of one word in the context of its sentence.

use std::sync::LazyLock;

use datafusion::{
    arrow::datatypes::{DataType, FieldRef},
    common::{ScalarValue, internal_err, plan_err},
    error::Result,
    logical_expr::{
        ColumnarValue, Documentation, Expr, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature,
        Volatility,
    },
};
use elmo::spec::Level;

use super::{
    documentation::{TEXT, document},
    downcast::to_volatile,
    elmo_span::{ElmoSpan, spans},
    elmo_tokens::{self, ElmoTokens},
};
use crate::{
    args::{EmbedOptions, Parameters, coerce_text, literal_value},
    call::{Call, Kind},
    models::Models,
    text_function::TextFunction,
};

/// The name in SQL.
pub const NAME: &str = "elmo_word";

pub(crate) const PARAMETERS: Parameters = Parameters {
    function: NAME,
    names: &["text", "start", "end", "layers", "model", "tokenizer", "sentences", "state", "on_long", "on_error"],
    columns: 3,
};

static DOCUMENTATION: LazyLock<Documentation> = LazyLock::new(|| {
    document(
        &PARAMETERS,
        "Returns the vector of one word in the context of its sentence. The word is the byte range `start..end` of the text. If several tokens overlap the range, as in `didn't`, returns the mean of their vectors. If none does, returns NULL.",
        "SELECT id, elmo_word(text, strpos(text, 'bank') - 1, strpos(text, 'bank') + 3) AS bank FROM ascii_reviews;",
        &[TEXT, "The byte offset of the start of the word.", "The byte offset of the end, exclusive."],
    )
});

/// The function, with the models that it may use: `FixedSizeList<Float32, D>`.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct ElmoWord {
    pub(super) models: Models,
    signature: Signature,
}

impl ElmoWord {
    /// The function over these models.
    #[must_use]
    pub fn new(models: Models) -> Self {
        Self { models, signature: PARAMETERS.signature(Volatility::Immutable) }
    }

    fn tokens(&self) -> TextFunction {
        TextFunction::new(elmo_tokens::PARAMETERS, Kind::Tokens, self.models.clone())
    }

    /// Rewrites a call as `elmo_span(elmo_tokens(text), start, end)`, so that a text with several calls is embedded
    /// once.
    pub(crate) fn expand(&self, args: &[Expr]) -> Result<Expr> {
        let (columns, options) = PARAMETERS.split(args)?;
        let [text, start, end] = columns else { return internal_err!("{NAME} has three columns") };
        // The types of other expressions are checked by `elmo_span`.
        for (bound, name) in [(start, "start"), (end, "end")] {
            if let Expr::Literal(value, _) = bound {
                check_offset(name, &value.data_type())?;
            }
        }
        let tokens = [text].into_iter().chain(options).cloned().collect();
        let tokens = to_volatile(ScalarUDF::new_from_impl(ElmoTokens(self.tokens())).call(tokens)).data;
        Ok(ScalarUDF::new_from_impl(ElmoSpan::default()).call(vec![tokens, start.clone(), end.clone()]))
    }

    /// The call for the text. Its errors name this function.
    fn call(&self, options: &[Option<&ScalarValue>]) -> Result<Call> {
        let options = EmbedOptions::parse(&PARAMETERS, Level::Token, options)?;
        Ok(Call { function: NAME, kind: Kind::Tokens, options })
    }
}

fn check_offset(name: &str, data_type: &DataType) -> Result<()> {
    match data_type.is_integer() || data_type == &DataType::Null {
        true => Ok(()),
        false => plan_err!("{NAME}: {name} is a byte offset, not {data_type}"),
    }
}

impl ScalarUDFImpl for ElmoWord {
    fn name(&self) -> &str {
        NAME
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _: &[DataType]) -> Result<DataType> {
        internal_err!("the type depends on the options: see return_field_from_args")
    }

    fn coerce_types(&self, types: &[DataType]) -> Result<Vec<DataType>> {
        let (columns, options) = PARAMETERS.split(types)?;
        let text = coerce_text(&PARAMETERS, "text", &columns[0])?;
        for (data_type, name) in columns.iter().zip(PARAMETERS.names).skip(1) {
            check_offset(name, data_type)?;
        }
        Ok([text, DataType::Int64, DataType::Int64].into_iter().chain(options.iter().cloned()).collect())
    }

    fn return_field_from_args(&self, args: ReturnFieldArgs) -> Result<FieldRef> {
        let (_, options) = PARAMETERS.split(args.scalar_arguments)?;
        let tokens = self.call(options)?.field(&self.models)?;
        let span = [FieldRef::new(tokens)];
        ElmoSpan::default()
            .return_field_from_args(ReturnFieldArgs { arg_fields: &span, scalar_arguments: &[None] })
            .map(|field| FieldRef::new(field.as_ref().clone().with_name(NAME)))
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let (columns, options) = PARAMETERS.split(&args.args)?;
        let call = self.call(&options.iter().map(literal_value).collect::<Vec<_>>())?;
        let [text, start, end] = columns else { return internal_err!("{NAME} has three columns") };
        let tokens = call.evaluate(&self.models, text)?;
        Ok(ColumnarValue::Array(spans(&tokens, start, end, args.number_rows)?))
    }

    fn documentation(&self) -> Option<&Documentation> {
        Some(&DOCUMENTATION)
    }
}
