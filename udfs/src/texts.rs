//! The bytes of texts, which the offsets of their tokens count.

use std::sync::Arc;

use datafusion::{
    arrow::{
        array::{Array, ArrayRef, AsArray, LargeBinaryArray, LargeBinaryBuilder},
        compute::cast,
        datatypes::{DataType, Field},
    },
    error::Result,
    logical_expr::ColumnarValue,
};

/// The texts of a column, or a constant text.
pub(crate) struct Texts {
    bytes: LargeBinaryArray,
    is_constant: bool,
}

impl Texts {
    pub(crate) fn of(column: &ColumnarValue) -> Result<Self> {
        let (column, is_constant) = match column {
            ColumnarValue::Array(column) => (Arc::clone(column), false),
            ColumnarValue::Scalar(text) => (text.to_array()?, true),
        };
        Ok(Self { bytes: bytes(&column)?, is_constant })
    }

    /// The text of a row. `None` if it is NULL.
    pub(crate) fn get(&self, row: usize) -> Option<&[u8]> {
        let row = if self.is_constant { 0 } else { row };
        self.bytes.is_valid(row).then(|| self.bytes.value(row))
    }
}

fn bytes(column: &ArrayRef) -> Result<LargeBinaryArray> {
    use DataType::{FixedSizeList, LargeBinary, LargeList, LargeListView, LargeUtf8, List, ListView};
    match column.data_type() {
        FixedSizeList(item, _) | ListView(item) | LargeListView(item) => bytes(&cast(column, &List(Arc::clone(item)))?),
        List(_) | LargeList(_) => {
            let lists = cast(column, &LargeList(Arc::new(Field::new_list_field(LargeUtf8, true))))?;
            Ok(joined(&lists))
        }
        _ => Ok(cast(column, &LargeBinary)?.as_binary::<i64>().clone()),
    }
}

/// The tokens of each row, joined by single spaces: the offsets of `elmo_tokens` refer to this text. A row with a NULL
/// token has no text.
fn joined(lists: &ArrayRef) -> LargeBinaryArray {
    let mut texts = LargeBinaryBuilder::new();
    for tokens in lists.as_list::<i64>().iter() {
        let tokens = tokens.map(|tokens| tokens.as_string::<i64>().iter().map(|t| t.map(str::to_owned)).collect());
        let tokens: Option<Vec<String>> = tokens.flatten();
        texts.append_option(tokens.map(|tokens| tokens.join(" ")));
    }
    texts.finish()
}

#[cfg(test)]
mod tests {
    use datafusion::arrow::array::{DictionaryArray, FixedSizeListArray, ListArray, StringArray};
    use datafusion::arrow::datatypes::Int32Type;

    use super::*;

    fn read(column: &ArrayRef) -> Vec<Option<Vec<u8>>> {
        let texts = Texts::of(&ColumnarValue::Array(Arc::clone(column))).unwrap();
        (0..column.len()).map(|row| texts.get(row).map(<[u8]>::to_vec)).collect()
    }

    #[test]
    fn every_encoding_has_the_same_bytes() {
        let words = [Some("naïve 🎉"), None, Some("")];
        let strings: ArrayRef = Arc::new(StringArray::from(words.to_vec()));
        let expected: Vec<_> = words.iter().map(|word| word.map(|word| word.as_bytes().to_vec())).collect();
        for data_type in [
            DataType::Utf8,
            DataType::LargeUtf8,
            DataType::Utf8View,
            DataType::Binary,
            DataType::LargeBinary,
            DataType::BinaryView,
        ] {
            assert_eq!(read(&cast(&strings, &data_type).unwrap()), expected, "{data_type}");
        }
        let dictionary: ArrayRef = Arc::new(words.into_iter().collect::<DictionaryArray<Int32Type>>());
        assert_eq!(read(&dictionary), expected);
    }

    #[test]
    fn tokens_are_joined_by_spaces() {
        let item = Arc::new(Field::new_list_field(DataType::Utf8, true));
        let tokens: ArrayRef = Arc::new(StringArray::from(vec![Some("ein"), Some("Wörtchen"), Some("a"), None]));
        let lists: ArrayRef = Arc::new(FixedSizeListArray::new(Arc::clone(&item), 2, tokens, None));
        let expected = vec![Some("ein Wörtchen".as_bytes().to_vec()), None];
        for data_type in [DataType::List(Arc::clone(&item)), DataType::LargeList(item), lists.data_type().clone()] {
            assert_eq!(read(&cast(&lists, &data_type).unwrap()), expected, "{data_type}");
        }
        let empty: ArrayRef = Arc::new(ListArray::new_null(Arc::new(Field::new_list_field(DataType::Utf8, true)), 1));
        assert_eq!(read(&empty), [None]);
    }
}
