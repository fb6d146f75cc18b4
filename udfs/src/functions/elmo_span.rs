//! `elmo_span(tokens, start, end)`: the mean vector of the tokens in a byte range of a text.

use std::{ops::Range, sync::Arc};

use datafusion::{
    arrow::{
        array::{Array, ArrayRef, AsArray, FixedSizeListArray, Float32Array},
        buffer::NullBuffer,
        datatypes::{DataType, FieldRef, Float32Type, Int64Type, UInt32Type},
    },
    common::{ScalarValue, internal_err, plan_err},
    error::Result,
    logical_expr::{
        ColumnarValue, Documentation, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDFImpl, Signature, Volatility,
    },
};
use datafusion_macros::user_doc;

/// The name in SQL.
pub const NAME: &str = "elmo_span";

/// The function: `FixedSizeList<Float32, D>`, with the field of the tokens' vectors.
#[user_doc(
    doc_section(label = "ELMo Functions"),
    description = "Returns the mean of the vectors of the tokens that overlap the byte range `start..end` of a text. Returns NULL if no token does. The tokens come from elmo_tokens, or from a file that elmo embed wrote at token level.",
    syntax_example = "elmo_span(tokens, start, end)",
    sql_example = r"```sql
> SELECT id, elmo_span(tokens, 0, 8) AS first_words FROM (SELECT id, elmo_tokens(text) AS tokens FROM reviews);
```",
    argument(name = "tokens", description = "The tokens of the text: a result of elmo_tokens."),
    argument(name = "start", description = "The byte offset of the start of the range."),
    argument(name = "end", description = "The byte offset of the end, exclusive.")
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
        embedding(tokens)?;
        for (name, data_type) in [("start", start), ("end", end)] {
            if !data_type.is_integer() && data_type != &DataType::Null {
                return plan_err!("{NAME}: {name} is a byte offset, not {data_type}");
            }
        }
        Ok(vec![tokens.clone(), DataType::Int64, DataType::Int64])
    }

    fn return_field_from_args(&self, args: ReturnFieldArgs) -> Result<FieldRef> {
        let Some(tokens) = args.arg_fields.first() else { return plan_err!("{NAME} needs tokens") };
        Ok(Arc::new(embedding(tokens.data_type())?.as_ref().clone().with_name(NAME).with_nullable(true)))
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let [tokens, start, end] = args.args.as_slice() else { return internal_err!("{NAME} takes three arguments") };
        Ok(ColumnarValue::Array(spans(tokens, start, end, args.number_rows)?))
    }

    fn documentation(&self) -> Option<&Documentation> {
        self.doc()
    }
}

/// The field of a token's vector, given the type of a list of tokens.
fn embedding(tokens: &DataType) -> Result<&FieldRef> {
    let field = match tokens {
        DataType::List(item) => match item.data_type() {
            DataType::Struct(fields) => {
                let is_offset =
                    |name: &&str| fields.find(name).is_some_and(|(_, f)| f.data_type() == &DataType::UInt32);
                let offsets = ["start", "end"].iter().all(is_offset);
                fields.find("embedding").map(|(_, field)| field).filter(|_| offsets)
            }
            _ => None,
        },
        _ => None,
    };
    let is_vector = |field: &&FieldRef| match field.data_type() {
        DataType::FixedSizeList(item, width) => item.data_type() == &DataType::Float32 && *width > 0,
        _ => false,
    };
    match field.filter(is_vector) {
        Some(field) => Ok(field),
        None => plan_err!("{NAME}: tokens must be the result of elmo_tokens, not {tokens}"),
    }
}

/// The tokens of each row. A constant list is shared by all rows, not copied.
struct Tokens {
    lists: ArrayRef,
    is_constant: bool,
}

impl Tokens {
    fn of(column: &ColumnarValue, rows: usize) -> Result<Self> {
        Ok(match column {
            ColumnarValue::Scalar(ScalarValue::List(list)) => {
                Self { lists: Arc::clone(list) as ArrayRef, is_constant: true }
            }
            column => Self { lists: column.to_array_of_size(rows)?, is_constant: false },
        })
    }

    /// The range of a row's tokens among all tokens. `None` when the list is NULL.
    fn of_row(&self, row: usize) -> Option<Range<usize>> {
        let row = if self.is_constant { 0 } else { row };
        let offsets = self.lists.as_list::<i32>().value_offsets();
        self.lists.is_valid(row).then(|| offsets[row] as usize..offsets[row + 1] as usize)
    }
}

/// One vector per row: the mean over the tokens that overlap `start..end`. If all arguments are constants, one row.
pub(crate) fn spans(
    tokens: &ColumnarValue,
    start: &ColumnarValue,
    end: &ColumnarValue,
    rows: usize,
) -> Result<ArrayRef> {
    let is_constant = |column: &&ColumnarValue| matches!(column, ColumnarValue::Scalar(_));
    let rows = if [tokens, start, end].iter().all(is_constant) { 1 } else { rows };
    let tokens = Tokens::of(tokens, rows)?;
    let (start, end) = (start.to_array_of_size(rows)?, end.to_array_of_size(rows)?);
    let items = tokens.lists.as_list::<i32>().values().as_struct();
    let column = |name: &str| match items.column_by_name(name) {
        Some(column) => Ok(column),
        None => internal_err!("tokens without {name}"),
    };
    let (token_start, token_end) =
        (column("start")?.as_primitive::<UInt32Type>(), column("end")?.as_primitive::<UInt32Type>());
    let vectors = column("embedding")?.as_fixed_size_list();
    let width = vectors.value_length() as usize;
    let numbers = vectors.values().as_primitive::<Float32Type>().values();
    let (start, end) = (start.as_primitive::<Int64Type>(), end.as_primitive::<Int64Type>());
    let mut values = vec![0.0_f32; rows * width];
    let mut valid = vec![false; rows];
    for (row, mean) in values.chunks_exact_mut(width).enumerate() {
        let Some(tokens) = tokens.of_row(row) else { continue };
        if start.is_null(row) || end.is_null(row) {
            continue;
        }
        let overlaps = |t: &usize| {
            i64::from(token_start.value(*t)) < end.value(row) && i64::from(token_end.value(*t)) > start.value(row)
        };
        let vector = |t: usize| {
            let at = vectors.value_offset(t) as usize;
            &numbers[at..at + width]
        };
        let found: Vec<usize> = tokens.filter(overlaps).collect();
        match found.as_slice() {
            [] => continue,
            [one] => mean.copy_from_slice(vector(*one)),
            several => write_mean(several.iter().map(|t| vector(*t)), several.len(), mean),
        }
        valid[row] = true;
    }
    let DataType::FixedSizeList(item, _) = vectors.data_type() else { return internal_err!("vectors of another type") };
    let item = Arc::clone(item);
    let values = Arc::new(Float32Array::from(values));
    Ok(Arc::new(FixedSizeListArray::try_new(item, width as i32, values, Some(NullBuffer::from(valid)))?))
}

fn write_mean<'v>(vectors: impl Iterator<Item = &'v [f32]>, count: usize, mean: &mut [f32]) {
    let mut sums = vec![0.0_f64; mean.len()];
    for vector in vectors {
        sums.iter_mut().zip(vector).for_each(|(sum, value)| *sum += f64::from(*value));
    }
    mean.iter_mut().zip(sums).for_each(|(value, sum)| *value = (sum / count as f64) as f32);
}

#[cfg(test)]
mod tests {
    use super::*;
    use datafusion::arrow::{
        array::{Int64Array, ListArray, StructArray, UInt32Array, UInt64Array},
        buffer::OffsetBuffer,
        compute::take,
        datatypes::Field,
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

    /// By hand: both tokens, the second, the first, none, and a NULL offset.
    #[test]
    fn a_constant_list_is_not_copied_for_each_row() {
        let list = Arc::new(tokens());
        let one = ColumnarValue::Scalar(ScalarValue::List(Arc::clone(&list)));
        let read = Tokens::of(&one, 1 << 40).unwrap();
        assert!(read.is_constant && std::ptr::addr_eq(Arc::as_ptr(&read.lists), Arc::as_ptr(&list)));
        let starts: ArrayRef = Arc::new(Int64Array::from(vec![Some(0), Some(1), Some(-5), Some(3), None]));
        let ends: ArrayRef = Arc::new(Int64Array::from(vec![3, 9, 2, 9, 9]));
        let (starts, ends) = (ColumnarValue::Array(starts), ColumnarValue::Array(ends));
        let found = spans(&one, &starts, &ends, 5).unwrap();
        let vectors = found.as_fixed_size_list();
        let numbers = vectors.values().as_primitive::<Float32Type>();
        assert_eq!(numbers.values().to_vec(), [2.0, 3.0, 1.0, 0.0, 0.0]);
        assert_eq!((0..5).map(|row| vectors.is_valid(row)).collect::<Vec<_>>(), [true, true, true, false, false]);
        // A column of equal lists gives the same.
        let column = take(list.as_ref(), &UInt64Array::from(vec![0; 5]), None).unwrap();
        assert_eq!(&spans(&ColumnarValue::Array(column), &starts, &ends, 5).unwrap(), &found);
        // A NULL list gives NULLs. Constants give one vector, however many rows there are.
        let nothing = ScalarValue::try_from(list.data_type()).unwrap();
        assert_eq!(spans(&nothing.into(), &starts, &ends, 5).unwrap().null_count(), 5);
        let (start, end) = (ScalarValue::Int64(Some(0)).into(), ScalarValue::Int64(Some(3)).into());
        assert_eq!(spans(&one, &start, &end, 1 << 40).unwrap().len(), 1);
    }
}
