//! `elmo_span(tokens, start, end)`: one vector for a piece of a text whose tokens are known.

use std::sync::Arc;

use datafusion::{
    arrow::{
        array::{Array, ArrayRef, AsArray, FixedSizeListArray, Float32Array},
        buffer::NullBuffer,
        datatypes::{DataType, FieldRef, Float32Type, Int64Type, UInt32Type},
    },
    common::{internal_err, plan_err},
    error::Result,
    logical_expr::{
        ColumnarValue, Documentation, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDFImpl, Signature, Volatility,
    },
};
use datafusion_macros::user_doc;

/// The name in SQL.
pub const NAME: &str = "elmo_span";

/// The function: a vector as `elmo_tokens` has them.
#[user_doc(
    doc_section(label = "ELMo Functions"),
    description = "Returns the vector of a piece of a text: the mean of the vectors of those tokens that lie in it, even if only in part. NULL where there is none. Tokens come from elmo_tokens, or from a file that elmo embed wrote at token level.",
    syntax_example = "elmo_span(tokens, start, end)",
    sql_example = r"```sql
> SELECT id, elmo_span(tokens, 0, 8) AS first_words FROM (SELECT id, elmo_tokens(text) AS tokens FROM reviews);
```",
    argument(name = "tokens", description = "What elmo_tokens gives."),
    argument(name = "start", description = "First byte of the piece in the text."),
    argument(name = "end", description = "The byte after its last.")
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
        internal_err!("return_field_from_args says the type")
    }

    fn coerce_types(&self, types: &[DataType]) -> Result<Vec<DataType>> {
        let [tokens, start, end] = types else { return plan_err!("{NAME} needs {NAME}(tokens, start, end)") };
        embedding(tokens)?;
        for (name, kind) in [("start", start), ("end", end)] {
            if !kind.is_integer() && kind != &DataType::Null {
                return plan_err!("{NAME}: {name} is a number of bytes, not {kind}");
            }
        }
        Ok(vec![tokens.clone(), DataType::Int64, DataType::Int64])
    }

    fn return_field_from_args(&self, args: ReturnFieldArgs) -> Result<FieldRef> {
        let Some(tokens) = args.arg_fields.first() else { return plan_err!("{NAME} needs tokens") };
        Ok(Arc::new(embedding(tokens.data_type())?.as_ref().clone().with_name(NAME).with_nullable(true)))
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let arrays = ColumnarValue::values_to_arrays(&args.args)?;
        let [tokens, start, end] = arrays.as_slice() else { return internal_err!("{NAME} takes three arguments") };
        Ok(ColumnarValue::Array(spans(tokens, start, end)?))
    }

    fn documentation(&self) -> Option<&Documentation> {
        self.doc()
    }
}

/// The field of a token's vector.
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
        None => plan_err!("{NAME}: tokens is what elmo_tokens gives, not {tokens}"),
    }
}

/// One vector per row: the mean over the tokens that share a byte with `start..end`.
pub(crate) fn spans(tokens: &ArrayRef, start: &ArrayRef, end: &ArrayRef) -> Result<ArrayRef> {
    let lists = tokens.as_list::<i32>();
    let items = lists.values().as_struct();
    let column = |name: &str| match items.column_by_name(name) {
        Some(column) => Ok(column),
        None => internal_err!("tokens without {name}"),
    };
    let (first, behind) = (column("start")?.as_primitive::<UInt32Type>(), column("end")?.as_primitive::<UInt32Type>());
    let vectors = column("embedding")?.as_fixed_size_list();
    let width = vectors.value_length() as usize;
    let numbers = vectors.values().as_primitive::<Float32Type>().values();
    let (start, end) = (start.as_primitive::<Int64Type>(), end.as_primitive::<Int64Type>());
    let mut values = vec![0.0_f32; lists.len() * width];
    let mut valid = vec![false; lists.len()];
    for (row, place) in values.chunks_exact_mut(width).enumerate() {
        if lists.is_null(row) || start.is_null(row) || end.is_null(row) {
            continue;
        }
        let offsets = lists.value_offsets();
        let tokens = offsets[row] as usize..offsets[row + 1] as usize;
        let shares =
            |t: &usize| i64::from(first.value(*t)) < end.value(row) && i64::from(behind.value(*t)) > start.value(row);
        let vector = |t: usize| {
            let at = vectors.value_offset(t) as usize;
            &numbers[at..at + width]
        };
        let found: Vec<usize> = tokens.filter(shares).collect();
        match found.as_slice() {
            [] => continue,
            [one] => place.copy_from_slice(vector(*one)),
            several => mean(several.iter().map(|t| vector(*t)), several.len(), place),
        }
        valid[row] = true;
    }
    let DataType::FixedSizeList(item, _) = vectors.data_type() else { return internal_err!("vectors of another type") };
    let item = Arc::clone(item);
    let values = Arc::new(Float32Array::from(values));
    Ok(Arc::new(FixedSizeListArray::try_new(item, width as i32, values, Some(NullBuffer::from(valid)))?))
}

fn mean<'v>(vectors: impl Iterator<Item = &'v [f32]>, count: usize, place: &mut [f32]) {
    let mut sums = vec![0.0_f64; place.len()];
    for vector in vectors {
        sums.iter_mut().zip(vector).for_each(|(sum, value)| *sum += f64::from(*value));
    }
    place.iter_mut().zip(sums).for_each(|(value, sum)| *value = (sum / count as f64) as f32);
}
