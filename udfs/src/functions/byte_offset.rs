//! `elmo_byte_offset(text, characters)`: the byte offset of a character of a text.
//!
//! `elmo_word(text, start, end, unit => 'characters')` is defined by this function. It is not registered: it occurs in
//! plans only.

use std::sync::Arc;

use datafusion::{
    arrow::{
        array::{Array, ArrayRef, AsArray, Int64Array},
        datatypes::{DataType, Int64Type, UInt64Type},
    },
    common::{internal_err, plan_err},
    error::Result,
    logical_expr::{ColumnarValue, ScalarFunctionArgs, ScalarUDFImpl, Signature, Volatility},
};

use super::token_lists::rows_of;
use crate::{args::without_runs, texts::Texts};

const NAME: &str = "elmo_byte_offset";

/// The type to which an offset is coerced. Not every UInt64 is an Int64.
pub(super) fn coerce_offset(data_type: &DataType) -> DataType {
    if data_type == &DataType::UInt64 { DataType::UInt64 } else { DataType::Int64 }
}

/// Offsets of a type that [`coerce_offset`] returns. One that is larger than any Int64 is behind every text.
pub(super) fn to_int64(offsets: &ColumnarValue, rows: usize) -> Result<Int64Array> {
    let offsets = offsets.to_array_of_size(rows)?;
    Ok(match offsets.as_primitive_opt::<UInt64Type>() {
        Some(offsets) => offsets.unary(|offset| i64::try_from(offset).unwrap_or(i64::MAX)),
        None => offsets.as_primitive::<Int64Type>().clone(),
    })
}

/// The byte offset of each row's character. Negative offsets stay as they are, and offsets behind the text stay behind
/// it. If all arguments are constants, one row.
pub(super) fn byte_offsets(text: &ColumnarValue, characters: &ColumnarValue, rows: usize) -> Result<ArrayRef> {
    let rows = rows_of(&[text, characters], rows);
    let (texts, characters) = (Texts::of(text)?, to_int64(characters, rows)?);
    let offset = |row| Some(byte_offset(texts.get(row)?, characters.is_valid(row).then(|| characters.value(row))?));
    Ok(Arc::new((0..rows).map(offset).collect::<Int64Array>()))
}

fn byte_offset(text: &[u8], character: i64) -> i64 {
    let Ok(skipped) = usize::try_from(character) else { return character };
    let is_first_byte = |(_, byte): &(usize, &u8)| **byte & 0b1100_0000 != 0b1000_0000;
    let mut starts = text.iter().enumerate().filter(is_first_byte);
    match starts.nth(skipped) {
        Some((offset, _)) => offset as i64,
        // No token overlaps what is behind the text.
        None => character.max(text.len() as i64),
    }
}

/// The function.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct ByteOffset {
    signature: Signature,
}

impl Default for ByteOffset {
    fn default() -> Self {
        Self { signature: Signature::user_defined(Volatility::Immutable) }
    }
}

impl ScalarUDFImpl for ByteOffset {
    fn name(&self) -> &str {
        NAME
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _: &[DataType]) -> Result<DataType> {
        Ok(DataType::Int64)
    }

    fn coerce_types(&self, types: &[DataType]) -> Result<Vec<DataType>> {
        let [text, offset] = types else { return plan_err!("{NAME} takes two arguments") };
        match offset.is_integer() || offset == &DataType::Null {
            true => Ok(vec![without_runs(text), coerce_offset(offset)]),
            false => plan_err!("elmo_word: start and end are integers, not {offset}"),
        }
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let [text, characters] = args.args.as_slice() else { return internal_err!("{NAME} takes two arguments") };
        Ok(ColumnarValue::Array(byte_offsets(text, characters, args.number_rows)?))
    }
}

#[cfg(test)]
mod tests {
    use super::byte_offset;

    /// By hand: `ï` has two bytes, the emoji four.
    #[test]
    fn characters_are_counted_in_bytes() {
        let text = "naïve 🎉!".as_bytes();
        let expected = [(-1, -1), (0, 0), (2, 2), (3, 4), (6, 7), (7, 11), (8, 12), (9, 12), (99, 99)];
        for (character, byte) in expected {
            assert_eq!(byte_offset(text, character), byte, "{character}");
        }
    }
}
