//! Options of a call: literals, read once, when the query is planned.
//!
//! Positions are those of a function's list of parameters; a missing or NULL option has its default.

use std::str::FromStr;

use datafusion::{
    arrow::datatypes::DataType,
    common::{ScalarValue, plan_err},
    error::{DataFusionError, Result},
};
use elmo::spec::{EmbedSpec, Layers, Level, SpecError};

/// A function and the names of its arguments, in the order in which they may be given without names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    pub(crate) name: &'static str,
    pub(crate) parameters: &'static [&'static str],
    /// The first so many are columns, the others literals.
    pub(crate) columns: usize,
}

impl Shape {
    /// The columns of a call, and its options.
    ///
    /// # Errors
    /// A planning error when there are too few or too many arguments.
    pub(crate) fn split<'a, T>(&self, args: &'a [T]) -> Result<(&'a [T], &'a [T])> {
        let (name, parameters) = (self.name, self.parameters.join(", "));
        if args.len() < self.columns {
            let needed = match self.columns {
                1 => "a text".to_owned(),
                columns => self.parameters[..columns].join(", "),
            };
            return plan_err!("{name} needs {needed}: {name}({parameters})");
        }
        if args.len() > self.parameters.len() {
            return plan_err!("{name} takes at most {} arguments: {parameters}", self.parameters.len());
        }
        Ok(args.split_at(self.columns))
    }

    fn options(&self) -> &'static [&'static str] {
        &self.parameters[self.columns..]
    }
}

/// What a call asks for, besides the text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct EmbedOptions {
    /// `None`: the default model.
    pub(crate) model: Option<String>,
    pub(crate) spec: EmbedSpec,
}

impl EmbedOptions {
    /// Reads the options of a call; `None` stands for one that is not a literal.
    ///
    /// # Errors
    /// A planning error that names the option and its legal values.
    pub(crate) fn parse(shape: &Shape, level: Level, options: &[Option<&ScalarValue>]) -> Result<Self> {
        let given = Given { shape, options };
        let defaults = EmbedSpec::default();
        // With `carry` the order of rows would change the result, and that is the engine's to choose.
        let state = given.word_but("state", "carry")?.unwrap_or(defaults.state);
        // With `skip` there would be rows without a value.
        let on_error = given.word_but("on_error", "skip")?.unwrap_or(defaults.on_error);
        let spec = EmbedSpec {
            level,
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
    shape: &'a Shape,
    options: &'a [Option<&'a ScalarValue>],
}

impl Given<'_> {
    fn word<T: FromStr<Err = SpecError>>(&self, name: &'static str) -> Result<Option<T>> {
        self.word_but(name, "")
    }

    /// A word of those that the command line takes, but for one. Errors have the option's name and legal values in SQL.
    fn word_but<T: FromStr<Err = SpecError>>(&self, name: &'static str, refused: &str) -> Result<Option<T>> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        // What is no word of any option tells the legal ones.
        let parsed = if text == refused { "\0".parse::<T>() } else { text.parse::<T>() };
        parsed.map(Some).map_err(|error| {
            let error = match error {
                SpecError::Value { mut legal, .. } => {
                    legal.retain(|word| *word != refused);
                    SpecError::Value { option: name, value: text, legal }
                }
                other => other,
            };
            DataFusionError::Plan(format!("{}: {error}", self.shape.name))
        })
    }

    fn text(&self, name: &str) -> Result<Option<String>> {
        let function = self.shape.name;
        let place = self.shape.options().iter().position(|parameter| *parameter == name);
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

/// The type of a text argument as it is to be: what it is, in every encoding.
///
/// Left to DataFusion, a literal beside a `Utf8View` column is wrapped into a cast, and then it is no literal any more
/// when the options are read.
///
/// # Errors
/// A planning error when it is no text.
pub(crate) fn coerce_text(shape: &Shape, parameter: &str, kind: &DataType) -> Result<DataType> {
    if !is_text(kind) {
        let function = shape.name;
        return plan_err!("{function}: {parameter} is a string, a binary, or a list of tokens, not {kind}");
    }
    Ok(if kind == &DataType::Null { DataType::Utf8 } else { kind.clone() })
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
