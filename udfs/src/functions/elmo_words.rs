//! `elmo_words(text, word [, options])`: the vectors of all occurrences of a word, each in the context of its sentence.

use std::sync::LazyLock;

use datafusion::{
    arrow::datatypes::{DataType, FieldRef},
    common::{ScalarValue, internal_err, plan_err},
    error::Result,
    logical_expr::{
        ColumnarValue, Documentation, Expr, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDFImpl, Signature, Volatility,
    },
};
use elmo::spec::Level;

use super::{
    elmo_word::{BY_WORD, search},
    word_search::Occurrences,
};
use crate::{
    args::{EmbedOptions, Parameters, coerce_text, coerce_word, is_string, literal_value},
    call::{Call, Kind},
    documentation::{TEXT, document},
    models::Models,
};

/// The name in SQL.
pub const NAME: &str = "elmo_words";

pub(crate) const PARAMETERS: Parameters = Parameters { function: NAME, ..BY_WORD };

static DOCUMENTATION: LazyLock<Documentation> = LazyLock::new(|| {
    document(
        &[&PARAMETERS],
        "Returns the vectors of all occurrences of a word in a text, `List<FixedSizeList<Float32, D>>`, in the order of the \
         text. elmo_word says what an occurrence is, and returns the first of these vectors. Occurrences do not overlap. \
         Returns NULL if the text or the word is NULL, and an empty list if the word is blank or does not occur.",
        &[("text", TEXT), ("word", "The word, a string in any encoding: a literal or a column.")],
        "SELECT id, unnest(elmo_words(text, 'bank')) AS bank FROM reviews;",
    )
});

/// The function, with the models that it may use: `List<FixedSizeList<Float32, D>>`.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct ElmoWords {
    pub(super) models: Models,
    signature: Signature,
}

impl ElmoWords {
    /// The function over these models.
    #[must_use]
    pub fn new(models: Models) -> Self {
        Self { models, signature: PARAMETERS.signature(Volatility::Immutable) }
    }

    /// Rewrites a call as `elmo_words_in(elmo_tokens(text), text, word)`, so that a text with several calls is embedded
    /// once. `None` if the text must not be evaluated twice.
    pub(crate) fn expand(&self, args: &[Expr]) -> Result<Option<Expr>> {
        let (columns, options) = PARAMETERS.split(args)?;
        let [text, word] = columns else { return internal_err!("{NAME} has two columns") };
        Ok(search(Occurrences::All, &self.models, text, word, options))
    }

    /// The call for the text. Its errors name this function.
    fn call(&self, options: &[Option<&ScalarValue>]) -> Result<Call> {
        let options = EmbedOptions::parse(&PARAMETERS, Level::Token, &self.models, options)?;
        Ok(Call { function: NAME, kind: Kind::Tokens, options })
    }
}

impl ScalarUDFImpl for ElmoWords {
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
        let [text, word] = columns else { return internal_err!("{NAME} has two columns") };
        if !is_string(word) {
            return plan_err!("{NAME}: word is a string, not {word}");
        }
        let columns = [coerce_text(&PARAMETERS, "text", text)?, coerce_word(word)];
        Ok(columns.into_iter().chain(options.iter().cloned()).collect())
    }

    fn return_field_from_args(&self, args: ReturnFieldArgs) -> Result<FieldRef> {
        let (_, options) = PARAMETERS.split(args.scalar_arguments)?;
        let tokens = self.call(options)?.field(&self.models)?;
        Occurrences::All.field(NAME, &tokens).map(FieldRef::new)
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let (columns, options) = PARAMETERS.split(&args.args)?;
        let [text, word] = columns else { return internal_err!("{NAME} has two columns") };
        let call = self.call(&options.iter().map(literal_value).collect::<Vec<_>>())?;
        let tokens = call.evaluate(&self.models, text)?;
        Ok(ColumnarValue::Array(Occurrences::All.of(&tokens, text, word, args.number_rows)?))
    }

    fn documentation(&self) -> Option<&Documentation> {
        Some(&DOCUMENTATION)
    }
}
