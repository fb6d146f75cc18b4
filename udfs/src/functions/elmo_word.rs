//! `elmo_word(text, word [, options])` and `elmo_word(text, start, end [, options])`: the vector of one word in the
//! context of its sentence.

use std::{str::FromStr, sync::LazyLock};

use datafusion::{
    arrow::datatypes::{DataType, FieldRef},
    common::{DFSchema, ScalarValue, internal_err, plan_datafusion_err, plan_err},
    error::Result,
    logical_expr::{
        ColumnarValue, Documentation, Expr, ExprSchemable, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF,
        ScalarUDFImpl, Signature, Volatility,
    },
};
use elmo::spec::Level;

use super::{
    byte_offset::{ByteOffset, byte_offsets, coerce_offset},
    elmo_span::{ElmoSpan, spans},
    elmo_tokens::tokens_of,
    word_search::{Occurrences, WordSearch},
};
use crate::{
    args::{EmbedOptions, Parameters, coerce_text, coerce_word, is_string, literal_expr, literal_text, literal_value},
    call::{Call, Kind},
    documentation::{TEXT, document},
    models::Models,
};

/// The name in SQL.
pub const NAME: &str = "elmo_word";

/// The parameters of `elmo_word(text, word)`.
pub(crate) const BY_WORD: Parameters = Parameters {
    function: NAME,
    names: &[
        "text",
        "word",
        "layers",
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

/// The parameters of `elmo_word(text, start, end)`.
pub(crate) const BY_RANGE: Parameters = Parameters {
    function: NAME,
    names: &[
        "text",
        "start",
        "end",
        "layers",
        "model",
        "tokenizer",
        "sentences",
        "state",
        "on_long",
        "on_error",
        "normalize",
        "max_tokens",
        UNIT,
    ],
    columns: 3,
};

const UNIT: &str = "unit";

static DOCUMENTATION: LazyLock<Documentation> = LazyLock::new(|| {
    document(
        &[&BY_WORD, &BY_RANGE],
        "Returns the vector of a word in the context of its sentence, `FixedSizeList<Float32, D>`: of the first occurrence \
         of `word` in the text, or of the part `start..end` of the text. An occurrence is a part of the text that equals \
         `word`, including upper and lower case, and that begins and ends where tokens do: `bank` does not occur in \
         `banks`. If the word is several tokens, as `didn't`, returns the mean of their vectors. Returns NULL if an \
         argument is NULL, `word` is blank or does not occur, `start` is negative, `end` is not after `start`, or no token \
         overlaps the range.",
        &[
            ("text", TEXT),
            ("word", "The word, a string in any encoding: a literal or a column."),
            (
                "start",
                "The offset of the start of the word, an integer of any type, from 0. Offsets into a list of tokens refer \
                 to the tokens joined by single spaces.",
            ),
            ("end", "The offset of the end, exclusive, an integer of any type."),
            (
                UNIT,
                "An option of `start` and `end`: whether they count `'bytes'` (default) or `'characters'`. strpos counts \
                 characters, from 1.",
            ),
        ],
        "SELECT id, elmo_word(text, 'bank') AS bank FROM reviews;",
    )
});

/// What the offsets of a range count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit {
    Bytes,
    Characters,
}

impl FromStr for Unit {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "bytes" => Ok(Self::Bytes),
            "characters" => Ok(Self::Characters),
            _ => Err(()),
        }
    }
}

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
        // DataFusion's own parser knows the names of one form. The parser of this crate knows both.
        Self { models, signature: BY_RANGE.signature(Volatility::Immutable) }
    }

    /// Rewrites a call as `elmo_word_in(elmo_tokens(text), text, word)` or `elmo_span(elmo_tokens(text), start, end)`, so
    /// that a text with several calls is embedded once. `None` if the text must not be evaluated twice.
    pub(crate) fn expand(&self, args: &[Expr], schema: &DFSchema) -> Result<Option<Expr>> {
        let types: Vec<DataType> = args.iter().map(|arg| arg.get_type(schema).unwrap_or(DataType::Null)).collect();
        check_second(&types)?;
        let parameters = form(&types);
        let (columns, options) = parameters.split(args)?;
        match columns {
            [text, word] => Ok(search(Occurrences::First, &self.models, text, word, options)),
            [text, start, end] => self.expand_range(text, [start, end], options),
            _ => internal_err!("{NAME} has two or three columns"),
        }
    }

    fn expand_range(&self, text: &Expr, range: [&Expr; 2], options: &[Expr]) -> Result<Option<Expr>> {
        // The types of other expressions are checked by `elmo_span`.
        for (bound, name) in range.iter().zip(["start", "end"]) {
            if let Expr::Literal(value, _) = bound {
                check_offset(name, &value.data_type())?;
            }
        }
        let literals: Vec<_> = options.iter().map(literal_expr).collect();
        let range = match unit(&literals)? {
            Unit::Bytes => range.map(Clone::clone),
            Unit::Characters if text.is_volatile() => return Ok(None),
            Unit::Characters => range
                .map(|bound| ScalarUDF::new_from_impl(ByteOffset::default()).call(vec![text.clone(), bound.clone()])),
        };
        let [start, end] = range;
        let tokens = tokens_of(&self.models, text, options);
        Ok(Some(ScalarUDF::new_from_impl(ElmoSpan::default()).call(vec![tokens, start, end])))
    }

    /// The call for the text. Its errors name this function.
    fn call(&self, parameters: &Parameters, options: &[Option<&ScalarValue>]) -> Result<Call> {
        let options = EmbedOptions::parse(parameters, Level::Token, &self.models, options)?;
        Ok(Call { function: NAME, kind: Kind::Tokens, options })
    }
}

/// The parameters of a call with arguments of these types: a word is a string, a start is not.
fn form(types: &[DataType]) -> &'static Parameters {
    match types {
        [_, DataType::Null] => &BY_WORD,
        // `end` is no string, and the option `layers` may be one.
        [_, DataType::Null, third, ..] if third != &DataType::Null && is_string(third) => &BY_WORD,
        [_, second, ..] if second != &DataType::Null && is_string(second) => &BY_WORD,
        _ => &BY_RANGE,
    }
}

/// Rejects a second argument that is neither a word nor, as far as numbers go, a start.
fn check_second(types: &[DataType]) -> Result<()> {
    match types.get(1) {
        Some(second) if !is_string(second) && !second.is_numeric() => plan_err!(
            "{NAME}: the second argument is a word, a string, or start, an integer, but not {second}; CAST(… AS VARCHAR) \
             makes a string of a binary"
        ),
        _ => Ok(()),
    }
}

/// A call of [`WordSearch`] over the tokens of a text. `None` if the text must not be evaluated twice.
pub(super) fn search(
    occurrences: Occurrences,
    models: &Models,
    text: &Expr,
    word: &Expr,
    options: &[Expr],
) -> Option<Expr> {
    let function = ScalarUDF::new_from_impl(WordSearch::new(occurrences));
    let tokens = || tokens_of(models, text, options);
    (!text.is_volatile()).then(|| function.call(vec![tokens(), text.clone(), word.clone()]))
}

/// The value of the option `unit` among the options of [`BY_RANGE`].
fn unit(options: &[Option<&ScalarValue>]) -> Result<Unit> {
    match literal_text(&BY_RANGE, UNIT, options)? {
        None => Ok(Unit::Bytes),
        Some(text) => text.parse().map_err(|()| {
            plan_datafusion_err!("{NAME}: {UNIT}: unknown value {text:?}; legal values are bytes, characters")
        }),
    }
}

fn check_offset(name: &str, data_type: &DataType) -> Result<()> {
    match data_type.is_integer() || data_type == &DataType::Null {
        true => Ok(()),
        false => plan_err!("{NAME}: {name} is an integer, not {data_type}"),
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
        if types.len() < BY_WORD.columns {
            return plan_err!(
                "{NAME} needs a word, or a start and an end: {NAME}(text, word) or {NAME}(text, start, end)"
            );
        }
        check_second(types)?;
        let parameters = form(types);
        let (columns, options) = parameters.split(types)?;
        let mut coerced = vec![coerce_text(parameters, "text", &columns[0])?];
        match columns {
            [_, word] => coerced.push(coerce_word(word)),
            columns => {
                for (data_type, name) in columns.iter().zip(parameters.names).skip(1) {
                    check_offset(name, data_type)?;
                    coerced.push(coerce_offset(data_type));
                }
            }
        }
        coerced.extend(options.iter().cloned());
        Ok(coerced)
    }

    fn return_field_from_args(&self, args: ReturnFieldArgs) -> Result<FieldRef> {
        let types: Vec<DataType> = args.arg_fields.iter().map(|field| field.data_type().clone()).collect();
        let parameters = form(&types);
        let (_, options) = parameters.split(args.scalar_arguments)?;
        if parameters == &BY_RANGE {
            unit(options)?;
        }
        let tokens = self.call(parameters, options)?.field(&self.models)?;
        Occurrences::First.field(NAME, &tokens).map(FieldRef::new)
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let types: Vec<DataType> = args.args.iter().map(ColumnarValue::data_type).collect();
        let (parameters, rows) = (form(&types), args.number_rows);
        let (columns, options) = parameters.split(&args.args)?;
        let literals: Vec<_> = options.iter().map(literal_value).collect();
        let tokens = self.call(parameters, &literals)?.evaluate(&self.models, &columns[0])?;
        let vectors = match columns {
            [text, word] => Occurrences::First.of(&tokens, text, word, rows)?,
            [text, start, end] => match unit(&literals)? {
                Unit::Bytes => spans(&tokens, start, end, rows)?,
                Unit::Characters => {
                    let bytes = |bound| offsets(text, bound, rows);
                    spans(&tokens, &bytes(start)?, &bytes(end)?, rows)?
                }
            },
            _ => return internal_err!("{NAME} has two or three columns"),
        };
        Ok(ColumnarValue::Array(vectors))
    }

    fn documentation(&self) -> Option<&Documentation> {
        Some(&DOCUMENTATION)
    }
}

/// The byte offsets of characters; a constant if the text and the character are constants.
fn offsets(text: &ColumnarValue, characters: &ColumnarValue, rows: usize) -> Result<ColumnarValue> {
    let offsets = byte_offsets(text, characters, rows)?;
    Ok(match (text, characters) {
        (ColumnarValue::Scalar(_), ColumnarValue::Scalar(_)) => {
            ColumnarValue::Scalar(ScalarValue::try_from_array(&offsets, 0)?)
        }
        _ => ColumnarValue::Array(offsets),
    })
}
