//! `elmo_span(tokens, start, end)`: the mean vector of the tokens in a byte range of a text.

use std::sync::Arc;

use datafusion::{
    arrow::{
        array::{Array, ArrayRef},
        buffer::NullBuffer,
        datatypes::{DataType, FieldRef},
    },
    common::{internal_err, plan_err},
    error::Result,
    logical_expr::{
        ColumnarValue, Documentation, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDFImpl, Signature, Volatility,
    },
};
use datafusion_macros::user_doc;

use super::{
    byte_offset::{coerce_offset, to_int64},
    token_lists::{TokenLists, embedding, of_null, rows_of, vector_field},
};

/// The name in SQL.
pub const NAME: &str = "elmo_span";

/// The function: `FixedSizeList<Float32, D>`, with the field of the tokens' vectors.
#[user_doc(
    doc_section(label = "ELMo Functions"),
    description = "Returns the mean of the vectors of the tokens that overlap the byte range `start..end` of a text, of the type of these vectors: `FixedSizeList<Float32, D>`, or `List<Float32>` from a file that was written with `--list-type list`. The tokens come from elmo_tokens, or from a file that elmo embed wrote at token level. There is no text in which characters could be counted: only elmo_word has the option `unit`. Returns NULL if an argument is NULL, `start` is negative, `end` is not after `start`, or no token overlaps the range.",
    syntax_example = "elmo_span(tokens, start, end)",
    sql_example = r"```sql
> SELECT id, elmo_span(tokens, 0, 8) AS first_words FROM (SELECT id, elmo_tokens(text) AS tokens FROM reviews);
```",
    argument(
        name = "tokens",
        description = "The tokens of the text: a result of elmo_tokens, or a list of structs with its fields `start`, `end` and `embedding`."
    ),
    argument(name = "start", description = "The byte offset of the start of the range, an integer of any type."),
    argument(name = "end", description = "The byte offset of the end, exclusive, an integer of any type.")
)]
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct ElmoSpan {
    signature: Signature,
}

impl Default for ElmoSpan {
    fn default() -> Self {
        let mut signature = Signature::user_defined(Volatility::Immutable);
        signature.parameter_names = Some(["tokens", "start", "end"].map(str::to_owned).to_vec());
        Self { signature }
    }
}

impl ScalarUDFImpl for ElmoSpan {
    fn name(&self) -> &str {
        NAME
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _: &[DataType]) -> Result<DataType> {
        internal_err!("the type depends on the tokens: see return_field_from_args")
    }

    fn coerce_types(&self, types: &[DataType]) -> Result<Vec<DataType>> {
        let [tokens, start, end] = types else { return plan_err!("{NAME} needs {NAME}(tokens, start, end)") };
        let tokens = match tokens {
            DataType::Null => of_null(),
            tokens => embedding(NAME, tokens).map(|_| tokens.clone())?,
        };
        for (name, data_type) in [("start", start), ("end", end)] {
            if !data_type.is_integer() && data_type != &DataType::Null {
                return plan_err!("{NAME}: {name} is a byte offset, not {data_type}");
            }
        }
        Ok(vec![tokens, coerce_offset(start), coerce_offset(end)])
    }

    fn return_field_from_args(&self, args: ReturnFieldArgs) -> Result<FieldRef> {
        let Some(tokens) = args.arg_fields.first() else { return plan_err!("{NAME} needs tokens") };
        Ok(Arc::new(vector_field(NAME, tokens)?.with_name(NAME)))
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let [tokens, start, end] = args.args.as_slice() else { return internal_err!("{NAME} takes three arguments") };
        Ok(ColumnarValue::Array(spans(tokens, start, end, args.number_rows)?))
    }

    fn documentation(&self) -> Option<&Documentation> {
        self.doc()
    }
}

/// One vector per row: the mean over the tokens that overlap `start..end`. If all arguments are constants, one row.
pub(super) fn spans(
    tokens: &ColumnarValue,
    start: &ColumnarValue,
    end: &ColumnarValue,
    rows: usize,
) -> Result<ArrayRef> {
    let rows = rows_of(&[tokens, start, end], rows);
    let tokens = TokenLists::of(tokens, rows)?;
    let (start, end) = (to_int64(start, rows)?, to_int64(end, rows)?);
    let width = tokens.width();
    let mut values = vec![0.0_f32; rows * width];
    let mut valid = vec![false; rows];
    for (row, mean) in values.chunks_exact_mut(width).enumerate() {
        let Some(of_row) = tokens.of_row(row) else { continue };
        if start.is_null(row) || end.is_null(row) {
            continue;
        }
        let (start, end) = (start.value(row), end.value(row));
        // A negative start is that of a word that was not found: `strpos(text, word) - 1`.
        if start >= 0 && start < end {
            valid[row] = tokens.write_mean(of_row, start, end, mean);
        }
    }
    tokens.array(values, Some(NullBuffer::from(valid)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use datafusion::{
        arrow::{
            array::{
                AsArray, FixedSizeListArray, Float32Array, Int64Array, ListArray, StructArray, UInt32Array, UInt64Array,
            },
            buffer::OffsetBuffer,
            compute::take,
            datatypes::{Field, Float32Type},
        },
        common::ScalarValue,
    };

    /// Tokens at bytes 0..1 and 2..3, with vectors of one number: 1 and 3.
    fn tokens() -> ListArray {
        let item = Arc::new(Field::new_list_field(DataType::Float32, false));
        let numbers = Arc::new(Float32Array::from(vec![1.0, 3.0]));
        let columns: [(&str, ArrayRef); 3] = [
            ("start", Arc::new(UInt32Array::from(vec![0, 2]))),
            ("end", Arc::new(UInt32Array::from(vec![1, 3]))),
            ("embedding", Arc::new(FixedSizeListArray::new(item, 1, numbers, None))),
        ];
        let named =
            columns.map(|(name, column)| (Arc::new(Field::new(name, column.data_type().clone(), false)), column));
        let items = StructArray::from(named.to_vec());
        let item = Arc::new(Field::new_list_field(items.data_type().clone(), false));
        ListArray::new(item, OffsetBuffer::from_lengths([2]), Arc::new(items), None)
    }

    /// By hand: both tokens, the second, none before the text, none behind it, none between 1 and 1, and a NULL offset.
    #[test]
    fn a_constant_list_is_not_copied_for_each_row() {
        let list = Arc::new(tokens());
        let one = ColumnarValue::Scalar(ScalarValue::List(Arc::clone(&list)));
        assert!(TokenLists::of(&one, 1 << 40).unwrap().is_shared_with(&list));
        let starts: ArrayRef = Arc::new(Int64Array::from(vec![Some(0), Some(1), Some(-5), Some(3), Some(2), None]));
        let ends: ArrayRef = Arc::new(Int64Array::from(vec![3, 9, 2, 9, 2, 9]));
        let (starts, ends) = (ColumnarValue::Array(starts), ColumnarValue::Array(ends));
        let found = spans(&one, &starts, &ends, 6).unwrap();
        let vectors = found.as_fixed_size_list();
        let numbers = vectors.values().as_primitive::<Float32Type>();
        assert_eq!(numbers.values().to_vec(), [2.0, 3.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(
            (0..6).map(|row| vectors.is_valid(row)).collect::<Vec<_>>(),
            [true, true, false, false, false, false]
        );
        // A column of equal lists gives the same.
        let column = take(list.as_ref(), &UInt64Array::from(vec![0; 6]), None).unwrap();
        assert_eq!(&spans(&ColumnarValue::Array(column), &starts, &ends, 6).unwrap(), &found);
        // A NULL list gives NULLs. Constants give one vector, however many rows there are.
        let nothing = ScalarValue::try_from(list.data_type()).unwrap();
        assert_eq!(spans(&nothing.into(), &starts, &ends, 6).unwrap().null_count(), 6);
        let (start, end) = (ScalarValue::Int64(Some(0)).into(), ScalarValue::Int64(Some(3)).into());
        assert_eq!(spans(&one, &start, &end, 1 << 40).unwrap().len(), 1);
    }
}
