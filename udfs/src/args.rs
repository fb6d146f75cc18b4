//! Options of a call: literals, read once, when the query is planned.
//!
//! Positions are those of [`PARAMETERS`]; a missing or NULL option has its default.

use std::str::FromStr;

use datafusion::{
    arrow::datatypes::DataType,
    common::{ScalarValue, plan_err},
    error::{DataFusionError, Result},
};
use elmo::spec::{EmbedSpec, Layers, OnError, SpecError, StateMode};

/// Names of the arguments, in the order in which they may be given without names.
pub(crate) const PARAMETERS: [&str; 9] =
    ["text", "layers", "pooling", "model", "tokenizer", "sentences", "state", "on_long", "on_error"];

/// What a call asks for, besides the text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct EmbedOptions {
    /// `None`: the default model.
    pub(crate) model: Option<String>,
    pub(crate) spec: EmbedSpec,
}

impl EmbedOptions {
    /// Reads the arguments that follow the text; `None` stands for one that is not a literal.
    ///
    /// # Errors
    /// A planning error that names the option and its legal values.
    pub(crate) fn parse(function: &str, options: &[Option<&ScalarValue>]) -> Result<Self> {
        let given = Given { function, options };
        let defaults = EmbedSpec::default();
        let state = given.word("state")?.unwrap_or(defaults.state);
        if state == StateMode::Carry {
            // The order of rows is the engine's to choose, and it would change the result.
            return plan_err!("{function}: state: no value \"carry\"; legal values are zero, warm");
        }
        let on_error = given.word("on_error")?.unwrap_or(defaults.on_error);
        if on_error == OnError::Skip {
            return plan_err!(
                "{function}: on_error: no value \"skip\"; legal values are fail, null (a function has a value for every row)"
            );
        }
        let spec = EmbedSpec {
            layers: given.word::<Layers>("layers")?.unwrap_or(defaults.layers),
            pooling: given.word("pooling")?.unwrap_or(defaults.pooling),
            tokenizer: given.word("tokenizer")?.unwrap_or(defaults.tokenizer),
            sentences: given.word("sentences")?.unwrap_or(defaults.sentences),
            on_long: given.word("on_long")?.unwrap_or(defaults.on_long),
            state,
            on_error,
            ..defaults
        };
        Ok(Self { model: given.text("model")?, spec })
    }
}

/// The literals of one call.
struct Given<'a> {
    function: &'a str,
    options: &'a [Option<&'a ScalarValue>],
}

impl Given<'_> {
    fn word<T: FromStr<Err = SpecError>>(&self, name: &str) -> Result<Option<T>> {
        let text = self.text(name)?;
        let parsed = text.map(|text| text.parse::<T>()).transpose();
        parsed.map_err(|e| DataFusionError::Plan(format!("{}: {e}", self.function)))
    }

    fn text(&self, name: &str) -> Result<Option<String>> {
        let function = self.function;
        let place = PARAMETERS.iter().skip(1).position(|parameter| *parameter == name);
        let Some(literal) = place.and_then(|place| self.options.get(place)) else { return Ok(None) };
        match literal {
            None => plan_err!("{function}: {name} must be a literal: it is read when the query is planned"),
            Some(ScalarValue::Utf8(text) | ScalarValue::LargeUtf8(text) | ScalarValue::Utf8View(text)) => {
                Ok(text.clone())
            }
            // layers => 1
            Some(ScalarValue::Int64(Some(number))) => Ok(Some(number.to_string())),
            Some(value) if value.is_null() => Ok(None),
            Some(value) => plan_err!("{function}: {name} is a string, not {}", value.data_type()),
        }
    }
}

/// Argument types as they are to be: texts and literals stay what they are.
///
/// Left to DataFusion, a literal beside a `Utf8View` column is wrapped into a cast, and then it is no literal any more
/// when the options are read.
pub(crate) fn coerce(function: &str, types: &[DataType]) -> Result<Vec<DataType>> {
    let [text, options @ ..] = types else {
        return plan_err!("{function} needs a text: {function}({})", PARAMETERS.join(", "));
    };
    if types.len() > PARAMETERS.len() {
        return plan_err!("{function} takes at most {} arguments: {}", PARAMETERS.len(), PARAMETERS.join(", "));
    }
    if !is_text(text) {
        return plan_err!("{function}: text is a string, a binary, or a list of tokens, not {text}");
    }
    let text = if text == &DataType::Null { DataType::Utf8 } else { text.clone() };
    Ok([text].into_iter().chain(options.iter().cloned()).collect())
}

fn is_text(kind: &DataType) -> bool {
    use DataType::*;
    match kind {
        Null | Utf8 | LargeUtf8 | Utf8View | Binary | LargeBinary | BinaryView => true,
        Dictionary(_, values) => is_text(values),
        List(item) | LargeList(item) | FixedSizeList(item, _) | ListView(item) | LargeListView(item) => {
            is_string(item.data_type())
        }
        _ => false,
    }
}

fn is_string(kind: &DataType) -> bool {
    use DataType::*;
    match kind {
        Null | Utf8 | LargeUtf8 | Utf8View => true,
        Dictionary(_, values) => is_string(values),
        _ => false,
    }
}
