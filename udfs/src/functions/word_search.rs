//! The occurrences of a word among the tokens of a text: `elmo_word_in(tokens, text, word)` and
//! `elmo_words_in(tokens, text, word)`.
//!
//! `elmo_word(text, word)` and `elmo_words(text, word)` are defined by these functions, over `elmo_tokens(text)`. They
//! are not registered: they occur in plans only.

use std::{ops::Range, sync::Arc};

use datafusion::{
    arrow::{
        array::{Array, ArrayRef, ListArray},
        buffer::{NullBuffer, OffsetBuffer},
        datatypes::{DataType, Field, FieldRef},
    },
    common::{internal_err, plan_err},
    error::Result,
    logical_expr::{ColumnarValue, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDFImpl, Signature, Volatility},
};

use super::token_lists::{TokenLists, rows_of, vector_field};
use crate::{args::without_runs, texts::Texts};

/// Which occurrences a function returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Occurrences {
    /// The vector of the first.
    First,
    /// The list of the vectors of all.
    All,
}

impl Occurrences {
    fn name(self) -> &'static str {
        match self {
            Self::First => "elmo_word_in",
            Self::All => "elmo_words_in",
        }
    }

    /// The field of the result, given the field of the tokens. `name` is the name of the function.
    pub(super) fn field(self, name: &str, tokens: &Field) -> Result<Field> {
        let vector = vector_field(name, tokens)?;
        Ok(match self {
            Self::First => vector.with_name(name),
            Self::All => {
                let metadata = vector.metadata().iter().filter(|(key, _)| key.starts_with("elmo."));
                let metadata = metadata.map(|(key, value)| (key.clone(), value.clone())).collect();
                Field::new(name, DataType::List(item(vector.data_type())), true).with_metadata(metadata)
            }
        })
    }

    /// The result for each row. If all arguments are constants, one row.
    pub(super) fn of(
        self,
        tokens: &ColumnarValue,
        text: &ColumnarValue,
        word: &ColumnarValue,
        rows: usize,
    ) -> Result<ArrayRef> {
        let rows = rows_of(&[tokens, text, word], rows);
        let (tokens, texts, words) = (TokenLists::of(tokens, rows)?, Texts::of(text)?, Texts::of(word)?);
        let of_row = |row| Some(Row { tokens: tokens.of_row(row)?, text: texts.get(row)?, word: words.get(row)? });
        match self {
            Self::First => first(&tokens, (0..rows).map(of_row)),
            Self::All => all(&tokens, (0..rows).map(of_row)),
        }
    }
}

fn item(vector: &DataType) -> FieldRef {
    Arc::new(Field::new_list_field(vector.clone(), false))
}

fn first<'a>(tokens: &TokenLists, rows: impl ExactSizeIterator<Item = Option<Row<'a>>>) -> Result<ArrayRef> {
    let (width, mut valid) = (tokens.width(), Vec::with_capacity(rows.len()));
    let mut values = vec![0.0; rows.len() * width];
    for (row, mean) in rows.zip(values.chunks_exact_mut(width)) {
        let found = row.and_then(|row| row.next(tokens, row.tokens.start, 0));
        valid.push(found.is_some_and(|found| found.write_mean(tokens, mean)));
    }
    tokens.array(values, Some(NullBuffer::from(valid)))
}

fn all<'a>(tokens: &TokenLists, rows: impl ExactSizeIterator<Item = Option<Row<'a>>>) -> Result<ArrayRef> {
    let (mut lengths, mut valid) = (Vec::with_capacity(rows.len()), Vec::with_capacity(rows.len()));
    let mut values = Vec::new();
    let mut mean = vec![0.0; tokens.width()];
    for row in rows {
        valid.push(row.is_some());
        let mut length = 0;
        if let Some(row) = row {
            let (mut token, mut behind) = (row.tokens.start, 0);
            while let Some(found) = row.next(tokens, token, behind) {
                (token, behind) = (found.tokens.end, found.end);
                if found.write_mean(tokens, &mut mean) {
                    values.extend_from_slice(&mean);
                    length += 1;
                }
            }
        }
        lengths.push(length);
    }
    let vectors = tokens.array(values, None)?;
    let item = item(vectors.data_type());
    let offsets = OffsetBuffer::from_lengths(lengths);
    Ok(Arc::new(ListArray::try_new(item, offsets, vectors, Some(NullBuffer::from(valid)))?))
}

/// One row of the arguments.
struct Row<'a> {
    /// The range of its tokens among all tokens.
    tokens: Range<usize>,
    text: &'a [u8],
    word: &'a [u8],
}

/// An occurrence of a word.
struct Found {
    /// The tokens that overlap it.
    tokens: Range<usize>,
    /// The bytes of the text.
    start: i64,
    end: i64,
}

impl Found {
    fn write_mean(&self, tokens: &TokenLists, mean: &mut [f32]) -> bool {
        tokens.write_mean(self.tokens.clone(), self.start, self.end, mean)
    }
}

impl Row<'_> {
    /// The first occurrence of the word that starts with the token `from` or a later one, and not before the byte
    /// `behind`: bytes of the text that equal the word, start where a token does, and end where a token does.
    fn next(&self, tokens: &TokenLists, from: usize, behind: i64) -> Option<Found> {
        if self.word.trim_ascii().is_empty() {
            return None;
        }
        (from..self.tokens.end).find_map(|first| {
            let start = tokens.start(first);
            let rest = self.text.get(usize::try_from(start).ok()?..)?;
            if start < behind || !rest.starts_with(self.word) {
                return None;
            }
            let end = start + self.word.len() as i64;
            // Tokens are in the order of the text.
            let inside = (first..self.tokens.end).take_while(|token| tokens.start(*token) < end);
            let last = inside.last()?;
            (first..=last).any(|token| tokens.end(token) == end).then(|| Found { tokens: first..last + 1, start, end })
        })
    }
}

/// One of the functions.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct WordSearch {
    occurrences: Occurrences,
    signature: Signature,
}

impl WordSearch {
    pub(super) fn new(occurrences: Occurrences) -> Self {
        Self { occurrences, signature: Signature::user_defined(Volatility::Immutable) }
    }
}

impl ScalarUDFImpl for WordSearch {
    fn name(&self) -> &str {
        self.occurrences.name()
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _: &[DataType]) -> Result<DataType> {
        internal_err!("the type depends on the tokens: see return_field_from_args")
    }

    /// The types were checked when the call was expanded.
    fn coerce_types(&self, types: &[DataType]) -> Result<Vec<DataType>> {
        Ok(types.iter().map(without_runs).collect())
    }

    fn return_field_from_args(&self, args: ReturnFieldArgs) -> Result<FieldRef> {
        let Some(tokens) = args.arg_fields.first() else { return plan_err!("{} needs tokens", self.name()) };
        self.occurrences.field(self.name(), tokens).map(FieldRef::new)
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let [tokens, text, word] = args.args.as_slice() else {
            return internal_err!("{} takes three arguments", self.name());
        };
        Ok(ColumnarValue::Array(self.occurrences.of(tokens, text, word, args.number_rows)?))
    }
}
