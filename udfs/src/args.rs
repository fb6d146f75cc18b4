//! Arguments of a call: the columns, and the options, which are literals and are read when the query is planned.
//!
//! An option that is missing or NULL has its default value; that of `tokenizer`, `sentences` and `state` is what the model records.

use std::{num::IntErrorKind, str::FromStr};

use datafusion::{
    arrow::datatypes::DataType,
    common::{ScalarValue, plan_datafusion_err, plan_err, utils::datafusion_strsim::normalized_levenshtein},
    error::{DataFusionError, Result},
    logical_expr::{ColumnarValue, Expr, Signature, Volatility},
};
use elmo::{
    mix::MODEL_MIX,
    spec::{EmbedSpec, Layers, Level, SpecError},
};

use crate::models::Models;

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

    /// The number of texts, which come first.
    pub(crate) fn texts(&self) -> usize {
        self.names.iter().take_while(|name| name.starts_with("text")).count()
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
    /// Parses the options of a call. `None` stands for an argument that is not a literal. Describes the model,
    /// which may record defaults of its own.
    ///
    /// # Errors
    /// A planning error that names the option and its legal values.
    pub(crate) fn parse(
        parameters: &Parameters,
        level: Level,
        models: &Models,
        options: &[Option<&ScalarValue>],
    ) -> Result<Self> {
        let literals = Literals { parameters, options };
        let defaults = EmbedSpec::default();
        let model = literals.text("model")?;
        // `carry` is not allowed: results would depend on the order in which DataFusion evaluates rows.
        let state = literals.parse_except("state", "carry")?;
        // `skip` is not allowed: a function returns one value per row.
        let on_error = literals.parse_except("on_error", "skip")?.unwrap_or(defaults.on_error);
        let (tokenizer, sentences) = (literals.parse("tokenizer")?, literals.parse("sentences")?);
        let layers = literals.layers(models, model.as_deref())?;
        let recorded = match (tokenizer, sentences, state) {
            (Some(_), Some(_), Some(_)) => defaults.clone(),
            _ => models.card_for(parameters.function, model.as_deref())?.options.spec(),
        };
        let spec = EmbedSpec {
            level,
            layers: layers.unwrap_or(defaults.layers),
            pooling: literals.parse("pooling")?.unwrap_or(defaults.pooling),
            tokenizer: tokenizer.unwrap_or(recorded.tokenizer),
            sentences: sentences.unwrap_or(recorded.sentences),
            on_long: literals.parse("on_long")?.unwrap_or(defaults.on_long),
            normalize: literals.parse("normalize")?.unwrap_or(defaults.normalize),
            max_tokens: literals.positive("max_tokens")?.unwrap_or(defaults.max_tokens),
            state: state.unwrap_or(recorded.state),
            on_error,
            ..defaults
        };
        Ok(Self { model, spec })
    }

    /// Metadata of the vectors' field besides that of their layout: the options that it does not name. `normalize` and
    /// `max_tokens` are left out if they are the defaults.
    pub(crate) fn metadata(&self) -> impl Iterator<Item = (String, String)> {
        let defaults = EmbedSpec::default().identity();
        let named = self.spec.identity().into_iter().filter(move |pair| match pair.0 {
            // Their defaults depend on the model.
            "on_long" | "sentences" | "state" | "tokenizer" => true,
            "max_tokens" | "normalize" => !defaults.contains(pair),
            _ => false,
        });
        named.map(|(key, value)| (format!("elmo.{key}"), value))
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

    /// The layers of the option `layers`: a built-in name, a number, or the name of a scalar mix.
    fn layers(&self, models: &Models, model: Option<&str>) -> Result<Option<Layers>> {
        let function = self.parameters.function;
        let Some(name) = self.text("layers")? else { return Ok(None) };
        let mix = match name == MODEL_MIX {
            true => Some(models.mix_of_model(function, model)?),
            false => models.mix(&name).cloned(),
        };
        if let Some(mix) = mix {
            return Ok(Some(Layers::Mix(mix)));
        }
        name.parse().map(Some).map_err(|_| self.unknown_layers(models, model, &name))
    }

    /// The error for a name that is neither built in nor one of the scalar mixes of this call. It lists what is legal here:
    /// the model has a mix of its own or none, and other mixes are those that were added.
    fn unknown_layers(&self, models: &Models, model: Option<&str>, name: &str) -> DataFusionError {
        let function = self.parameters.function;
        let own = models.card(model).is_ok_and(|card| card.mix.is_some()).then_some(MODEL_MIX);
        let mixes: Vec<&str> = own.into_iter().chain(models.mix_names()).collect();
        let legal: Vec<&str> = Layers::WORDS.iter().copied().chain(mixes.iter().copied()).collect();
        let none = if mixes.is_empty() { "; no scalar mix was added" } else { "" };
        let hint = nearest(name, &legal).map(|word| format!("; did you mean {word}?")).unwrap_or_default();
        let legal = legal.join(", ");
        plan_datafusion_err!("{function}: layers: unknown value {name:?}; legal values are {legal}{none}{hint}")
    }

    /// A whole number of at least 1, as a number or, as on the command line, as a string.
    fn positive(&self, option: &str) -> Result<Option<usize>> {
        let function = self.parameters.function;
        let is_number = |value: &ScalarValue| value.is_null() || is_string(&value.data_type()) || is_whole(value);
        if let Some(Some(value)) = self.literal(option)
            && !is_number(value)
        {
            return plan_err!("{function}: {option} is a whole number, not {}", value.data_type());
        }
        let Some(text) = self.text(option)? else { return Ok(None) };
        match text.replace('_', "").parse::<usize>() {
            Ok(0) => plan_err!("{function}: {option} is 0; it must be at least 1"),
            Ok(number) => Ok(Some(number)),
            Err(error) if *error.kind() == IntErrorKind::PosOverflow => {
                plan_err!("{function}: {option} is {text}; it is too large")
            }
            Err(_) => plan_err!("{function}: {option} is {text:?}; it must be a whole number of at least 1"),
        }
    }

    /// The literal of an option: `None` if it was not given, `Some(None)` if it is not a literal.
    fn literal(&self, option: &str) -> Option<Option<&ScalarValue>> {
        let position = self.parameters.options().iter().position(|name| *name == option);
        position.and_then(|position| self.options.get(position)).copied()
    }

    fn text(&self, option: &str) -> Result<Option<String>> {
        let function = self.parameters.function;
        match self.literal(option) {
            None => Ok(None),
            Some(None) => plan_err!("{function}: {option} must be a literal: it is read when the query is planned"),
            Some(Some(ScalarValue::Utf8(text) | ScalarValue::LargeUtf8(text) | ScalarValue::Utf8View(text))) => {
                Ok(text.clone())
            }
            Some(Some(value)) if value.is_null() => Ok(None),
            // layers => 1
            Some(Some(value)) if is_whole(value) => Ok(Some(value.to_string())),
            Some(Some(value)) => plan_err!("{function}: {option} is a string, not {}", value.data_type()),
        }
    }
}

/// The most similar of some words, if one is similar.
fn nearest<'w>(name: &str, words: &[&'w str]) -> Option<&'w str> {
    const SIMILAR: f64 = 0.6;
    let similarity = |word: &str| normalized_levenshtein(&name.to_lowercase(), &word.to_lowercase());
    let rated = words.iter().map(|word| (similarity(word), *word)).filter(|(similarity, _)| *similarity >= SIMILAR);
    rated.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, word)| word)
}

/// The value of an option that is a string. `None` stands for an argument that is not a literal.
pub(crate) fn literal_text(
    parameters: &Parameters,
    option: &str,
    options: &[Option<&ScalarValue>],
) -> Result<Option<String>> {
    Literals { parameters, options }.text(option)
}

/// Whether a literal is a whole number, as SQL and Rust write it.
fn is_whole(value: &ScalarValue) -> bool {
    value.data_type().is_integer()
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

/// The type to which a text argument is coerced: its own, in every encoding but run-end encoding.
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
    Ok(coerce_word(data_type))
}

/// The type to which the argument `word` is coerced, as that of a text.
pub(crate) fn coerce_word(data_type: &DataType) -> DataType {
    match without_runs(data_type) {
        DataType::Null => DataType::Utf8,
        other => other,
    }
}

/// The type of the values of a run-end encoded column, on which few operators of DataFusion work; any other type as it is.
pub(crate) fn without_runs(data_type: &DataType) -> DataType {
    match data_type {
        DataType::RunEndEncoded(_, values) => values.data_type().clone(),
        other => other.clone(),
    }
}

fn is_text(data_type: &DataType) -> bool {
    use DataType::*;
    match data_type {
        Null | Utf8 | LargeUtf8 | Utf8View | Binary | LargeBinary | BinaryView => true,
        Dictionary(_, values) => is_text(values),
        RunEndEncoded(_, values) => is_text(values.data_type()),
        List(item) | LargeList(item) | FixedSizeList(item, _) | ListView(item) | LargeListView(item) => {
            is_string(item.data_type())
        }
        _ => false,
    }
}

/// Whether a type is a string in some encoding, or of NULL.
pub(crate) fn is_string(data_type: &DataType) -> bool {
    use DataType::*;
    match data_type {
        Null | Utf8 | LargeUtf8 | Utf8View => true,
        Dictionary(_, values) => is_string(values),
        RunEndEncoded(_, values) => is_string(values.data_type()),
        _ => false,
    }
}
