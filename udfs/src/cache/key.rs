//! Keys of cached results: what is computed, and the text that it is computed for.

use std::sync::Arc;

use datafusion::{
    arrow::{
        array::ArrayRef,
        datatypes::DataType,
        row::{RowConverter, SortField},
    },
    error::Result,
};

/// Estimated bytes of a cache entry besides its text and its result.
pub(super) const ENTRY_BYTES: usize = 96;

/// A text in Arrow's row format: equal texts have equal bytes in every string encoding.
pub(super) type TextKey = Arc<[u8]>;

/// The key of a call over texts of a type. Lists of tokens and strings are different inputs, even if their bytes are
/// equal.
pub(super) fn call_key(call: &str, data_type: &DataType) -> String {
    let data_type = match data_type {
        DataType::Dictionary(_, values) => values,
        data_type => data_type,
    };
    format!("{call} {}", if data_type.is_nested() { "tokens" } else { "text" })
}

/// The keys of a column of texts.
///
/// # Errors
/// When Arrow's row format does not support the type.
pub(super) fn text_keys(texts: &ArrayRef) -> Result<Vec<TextKey>> {
    let converter = RowConverter::new(vec![SortField::new(texts.data_type().clone())])?;
    let rows = converter.convert_columns(&[Arc::clone(texts)])?;
    Ok(rows.iter().map(|row| row.as_ref().into()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_tokens_have_different_keys() {
        let list = DataType::new_list(DataType::Utf8, true);
        assert_ne!(call_key("f", &list), call_key("f", &DataType::Utf8));
        let dictionary = DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::Utf8));
        assert_eq!(call_key("f", &dictionary), call_key("f", &DataType::Utf8View));
    }
}
