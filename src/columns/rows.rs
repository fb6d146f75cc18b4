//! Rows of an Arrow column as text or as tokens, in any encoding.

use arrow::{
    array::{Array, ArrayRef, AsArray, LargeListArray, ListArray},
    compute::cast,
    datatypes::DataType,
};

use crate::{
    error::{Error, Result},
    row_error::RowError,
};

/// One row of a column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Row<'a> {
    /// NULL.
    Null,
    /// A text that is not tokenised yet.
    Text(&'a str),
    /// One sentence, tokenised by the caller.
    Tokens(Vec<&'a str>),
    /// Not readable.
    Bad(RowError),
}

/// A column of texts, or of lists of tokens.
#[derive(Debug)]
pub(crate) struct Rows {
    column: ArrayRef,
    /// Values of a list column as Utf8.
    tokens: Option<ArrayRef>,
}

impl Rows {
    /// Accepts Utf8, LargeUtf8, Utf8View, Binary (all four), dictionaries and runs of these, and lists of strings.
    pub(crate) fn new(column: &ArrayRef) -> Result<Self> {
        match column.data_type() {
            DataType::Utf8
            | DataType::LargeUtf8
            | DataType::Utf8View
            | DataType::Binary
            | DataType::LargeBinary
            | DataType::BinaryView
            | DataType::Null => Ok(Self { column: ArrayRef::clone(column), tokens: None }),
            DataType::Dictionary(_, values) => Self::new(&cast_to(column, values)?),
            DataType::RunEndEncoded(_, values) => Self::new(&cast_to(column, values.data_type())?),
            DataType::FixedSizeBinary(_) => Self::new(&cast_to(column, &DataType::Binary)?),
            DataType::List(_) => {
                let tokens = strings(column.as_list::<i32>().values())?;
                Ok(Self { column: ArrayRef::clone(column), tokens: Some(tokens) })
            }
            DataType::LargeList(_) => {
                let tokens = strings(column.as_list::<i64>().values())?;
                Ok(Self { column: ArrayRef::clone(column), tokens: Some(tokens) })
            }
            DataType::FixedSizeList(item, _) | DataType::ListView(item) | DataType::LargeListView(item) => {
                Self::new(&cast_to(column, &DataType::List(std::sync::Arc::clone(item)))?)
            }
            other => Err(unsupported(other)),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.column.len()
    }

    /// Row `i`; `i` is below [`Rows::len`].
    pub(crate) fn get(&self, i: usize) -> Row<'_> {
        if self.column.is_null(i) || self.column.data_type() == &DataType::Null {
            return Row::Null;
        }
        match self.column.data_type() {
            DataType::Utf8 => Row::Text(self.column.as_string::<i32>().value(i)),
            DataType::LargeUtf8 => Row::Text(self.column.as_string::<i64>().value(i)),
            DataType::Utf8View => Row::Text(self.column.as_string_view().value(i)),
            DataType::Binary => utf8(self.column.as_binary::<i32>().value(i)),
            DataType::LargeBinary => utf8(self.column.as_binary::<i64>().value(i)),
            DataType::BinaryView => utf8(self.column.as_binary_view().value(i)),
            _ => self.tokens(i),
        }
    }

    fn tokens(&self, i: usize) -> Row<'_> {
        let Some(values) = &self.tokens else { return Row::Null };
        let values = values.as_string::<i32>();
        let range = match self.column.data_type() {
            DataType::LargeList(_) => range_of_large(self.column.as_list::<i64>(), i),
            _ => range_of(self.column.as_list::<i32>(), i),
        };
        let mut tokens = Vec::with_capacity(range.len());
        for (index, k) in range.enumerate() {
            if values.is_null(k) {
                return Row::Bad(RowError::NullToken { index });
            }
            tokens.push(values.value(k));
        }
        Row::Tokens(tokens)
    }
}

fn range_of(list: &ListArray, i: usize) -> std::ops::Range<usize> {
    list.value_offsets()[i] as usize..list.value_offsets()[i + 1] as usize
}

fn range_of_large(list: &LargeListArray, i: usize) -> std::ops::Range<usize> {
    list.value_offsets()[i] as usize..list.value_offsets()[i + 1] as usize
}

fn utf8(bytes: &[u8]) -> Row<'_> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Row::Text(text),
        Err(e) => Row::Bad(RowError::NotUtf8 { valid_up_to: e.valid_up_to(), bytes: bytes.len() }),
    }
}

fn strings(values: &ArrayRef) -> Result<ArrayRef> {
    match values.data_type() {
        DataType::Utf8 => Ok(ArrayRef::clone(values)),
        DataType::LargeUtf8 | DataType::Utf8View | DataType::Dictionary(_, _) | DataType::Null => {
            cast_to(values, &DataType::Utf8)
        }
        DataType::RunEndEncoded(_, words) => strings(&cast_to(values, words.data_type())?),
        other => Err(unsupported(&DataType::new_list(other.clone(), true))),
    }
}

fn cast_to(column: &ArrayRef, to: &DataType) -> Result<ArrayRef> {
    cast(column, to).map_err(|e| Error::Column { reason: e.to_string() })
}

fn unsupported(found: &DataType) -> Error {
    Error::Column {
        reason: format!(
            "a column of type {found} holds no text; wanted are strings, binary (UTF-8) or lists of strings (tokens)"
        ),
    }
}
