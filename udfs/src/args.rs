//! Arguments of a call: the columns, and the options, which are literals and are read when the query is planned.
//!
//! An option that is missing or NULL has its default value.

use std::str::FromStr;

use datafusion::{
    arrow::datatypes::DataType,
    common::{ScalarValue, plan_err},
    error::{DataFusionError, Result},
    logical_expr::{ColumnarValue, Expr, Signature, Volatility},
};
use elmo::spec::{EmbedSpec, Layers, Level, SpecError};

/// The parameters of a function, in positional order: first the columns, then the options.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Parameters {
    /// The name of the function.
    pub(crate) function: &'static str,
    /// The names of all parameters.
    pub(crate) names: &'static [&'static str],
    /// The number of columns. The remaining parameters are options.
    pub(crate) columns: usize,
}

impl Parameters {
    /// Splits the arguments of a call into columns and options.
    ///
    /// # Errors
    /// A planning error when there are too few or too many arguments.
    pub(crate) fn split<'a, T>(&self, args: &'a [T]) -> Result<(&'a [T], &'a [T])> {
        let (function, names) = (self.function, self.names.join(", "));
        if args.len() < self.columns {
            let required = match self.columns {
                1 => "a text".to_owned(),
                columns => self.names[..columns].join(", "),
            };
            return plan_err!("{function} needs {required}: {function}({names})");
        }
        if args.len() > self.names.len() {
            return plan_err!("{function} takes at most {} arguments: {names}", self.names.len());
        }
        Ok(args.split_at(self.columns))
    }

    /// The names of the options.
    pub(crate) fn options(&self) -> &'static [&'static str] {
        &self.names[self.columns..]
    }

    /// The signature of the function, which accepts arguments by position and by name.
    pub(crate) fn signature(&self, volatility: Volatility) -> Signature {
        let mut signature = Signature::user_defined(volatility);
        signature.parameter_names = Some(self.names.iter().map(ToString::to_string).collect());
        signature
    }
}

/// The options of a call.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct EmbedOptions {
    /// The name of the model; `None` for the default model.
    pub(crate) model: Option<String>,
    pub(crate) spec: EmbedSpec,
}

impl EmbedOptions {
    /// Parses the options of a call. `None` stands for an argument that is not a literal.
    ///
    /// # Errors
    /// A planning error that names the option and its legal values.
    pub(crate) fn parse(parameters: &Parameters, level: Level, options: &[Option<&ScalarValue>]) -> Result<Self> {
        let literals = Literals { parameters, options };
        let defaults = EmbedSpec::default();
        // `carry` is not allowed: results would depend on the order in which DataFusion evaluates rows.
        let state = literals.parse_except("state", "carry")?.unwrap_or(defaults.state);
        // `skip` is not allowed: a function returns one value per row.
        let on_error = literals.parse_except("on_error", "skip")?.unwrap_or(defaults.on_error);
        let spec = EmbedSpec {
            level,
            layers: literals.parse::<Layers>("layers")?.unwrap_or(defaults.layers),
            pooling: literals.parse("pooling")?.unwrap_or(defaults.pooling),
            tokenizer: literals.parse("tokenizer")?.unwrap_or(defaults.tokenizer),
            sentences: literals.parse("sentences")?.unwrap_or(defaults.sentences),
            on_long: literals.parse("on_long")?.unwrap_or(defaults.on_long),
            state,
            on_error,
            ..defaults
        };
        Ok(Self { model: literals.text("model")?, spec })
    }
}

/// The options of one call as literals.
struct Literals<'a> {
    parameters: &'a Parameters,
    options: &'a [Option<&'a ScalarValue>],
}

impl Literals<'_> {
    fn parse<T: FromStr<Err = SpecError>>(&self, option: &'static str) -> Result<Option<T>> {
        self.parse_except(option, "")
    }

    /// Parses an option as the command line does, except for one value that SQL does not allow. Errors name the option
    /// and its legal values in SQL.
    fn parse_except<T: FromStr<Err = SpecError>>(&self, option: &'static str, excluded: &str) -> Result<Option<T>> {
        let Some(text) = self.text(option)? else { return Ok(None) };
        // An invalid value gives the error that lists the legal ones.
        let parsed = if text == excluded { "\0".parse::<T>() } else { text.parse::<T>() };
        parsed.map(Some).map_err(|error| {
            let error = match error {
                SpecError::Value { mut legal, .. } => {
                    legal.retain(|value| *value != excluded);
                    SpecError::Value { option, value: text, legal }
                }
                other => other,
            };
            DataFusionError::Plan(format!("{}: {error}", self.parameters.function))
        })
    }

    fn text(&self, option: &str) -> Result<Option<String>> {
        let function = self.parameters.function;
        let position = self.parameters.options().iter().position(|name| *name == option);
        let Some(literal) = position.and_then(|position| self.options.get(position)) else { return Ok(None) };
        match literal {
            None => plan_err!("{function}: {option} must be a literal: it is read when the query is planned"),
            Some(ScalarValue::Utf8(text) | ScalarValue::LargeUtf8(text) | ScalarValue::Utf8View(text)) => {
                Ok(text.clone())
            }
            // layers => 1
            Some(ScalarValue::Int64(Some(number))) => Ok(Some(number.to_string())),
            Some(value) if value.is_null() => Ok(None),
            Some(value) => plan_err!("{function}: {option} is a string, not {}", value.data_type()),
        }
    }
}

/// The value of an evaluated argument that is a literal.
pub(crate) fn literal_value(value: &ColumnarValue) -> Option<&ScalarValue> {
    match value {
        ColumnarValue::Scalar(value) => Some(value),
        ColumnarValue::Array(_) => None,
    }
}

/// The value of an expression that is a literal.
pub(crate) fn literal_expr(expr: &Expr) -> Option<&ScalarValue> {
    match expr {
        Expr::Literal(value, _) => Some(value),
        _ => None,
    }
}

/// The type to which a text argument is coerced: its own, in every encoding.
///
/// DataFusion's own coercion would wrap a literal beside a `Utf8View` column into a cast; it would no longer be a
/// literal when the options are read.
///
/// # Errors
/// A planning error when the type is not a text.
pub(crate) fn coerce_text(parameters: &Parameters, name: &str, data_type: &DataType) -> Result<DataType> {
    if !is_text(data_type) {
        let function = parameters.function;
        return plan_err!("{function}: {name} is a string, a binary, or a list of tokens, not {data_type}");
    }
    Ok(if data_type == &DataType::Null { DataType::Utf8 } else { data_type.clone() })
}

fn is_text(data_type: &DataType) -> bool {
    use DataType::*;
    match data_type {
        Null | Utf8 | LargeUtf8 | Utf8View | Binary | LargeBinary | BinaryView => true,
        Dictionary(_, values) => is_text(values),
        List(item) | LargeList(item) | FixedSizeList(item, _) | ListView(item) | LargeListView(item) => {
            is_string(item.data_type())
        }
        _ => false,
    }
}

fn is_string(data_type: &DataType) -> bool {
    use DataType::*;
    match data_type {
        Null | Utf8 | LargeUtf8 | Utf8View => true,
        Dictionary(_, values) => is_string(values),
        _ => false,
    }
}
