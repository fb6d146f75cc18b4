//! Lists of tokens with their vectors, as elmo_tokens returns them.

use std::{ops::Range, sync::Arc};

use datafusion::{
    arrow::{
        array::{Array, ArrayRef, AsArray, FixedSizeListArray, Float32Array, ListArray, UInt32Array},
        buffer::{NullBuffer, OffsetBuffer},
        datatypes::{DataType, Field, FieldRef, Float32Type, UInt32Type},
    },
    common::{ScalarValue, exec_err, internal_err, plan_err},
    error::Result,
    logical_expr::ColumnarValue,
};

/// The field of a token's vector, given the field of a list of tokens. The metadata `elmo.*` is that of the list, but for the level,
/// which a file may record of it: the result is no list of tokens.
/// `function` is named in errors.
pub(super) fn vector_field(function: &str, tokens: &Field) -> Result<Field> {
    let vector = embedding(function, tokens.data_type())?;
    let of_list = tokens.metadata().iter().filter(|(key, _)| key.starts_with("elmo.") && *key != "elmo.level");
    let metadata = vector.metadata().iter().chain(of_list).map(|(key, value)| (key.clone(), value.clone()));
    Ok(vector.as_ref().clone().with_metadata(metadata.collect()).with_nullable(true))
}

/// The field of a token's vector, given the type of a list of tokens.
pub(super) fn embedding<'t>(function: &str, tokens: &'t DataType) -> Result<&'t FieldRef> {
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
        // As elmo embed --list-type list writes them.
        DataType::List(item) => item.data_type() == &DataType::Float32,
        _ => false,
    };
    match field.filter(is_vector) {
        Some(field) => Ok(field),
        None => plan_err!("{function}: tokens must be the result of elmo_tokens, not {tokens}"),
    }
}

/// The type of a list of tokens of which only NULL is known: its vectors may have any length.
pub(super) fn of_null() -> DataType {
    let vector = DataType::new_list(DataType::Float32, true);
    let fields = [("start", DataType::UInt32), ("end", DataType::UInt32), ("embedding", vector)];
    let fields = fields.map(|(name, data_type)| Field::new(name, data_type, true));
    DataType::new_list(DataType::Struct(fields.into_iter().collect()), true)
}

/// The tokens of each row. A constant list is shared by all rows, not copied.
pub(super) struct TokenLists {
    lists: ArrayRef,
    is_constant: bool,
    starts: UInt32Array,
    ends: UInt32Array,
    vectors: FixedSizeListArray,
    /// The type of the tokens' vectors, which is that of results.
    vector_type: DataType,
}

impl TokenLists {
    /// # Errors
    /// If vectors in lists of any length have different lengths.
    pub(super) fn of(column: &ColumnarValue, rows: usize) -> Result<Self> {
        let (lists, is_constant) = match column {
            ColumnarValue::Scalar(ScalarValue::List(list)) => (Arc::clone(list) as ArrayRef, true),
            column => (column.to_array_of_size(rows)?, false),
        };
        let items = lists.as_list::<i32>().values().as_struct();
        let column = |name: &str| match items.column_by_name(name) {
            Some(column) => Ok(column),
            None => internal_err!("tokens without {name}"),
        };
        let starts = column("start")?.as_primitive::<UInt32Type>().clone();
        let ends = column("end")?.as_primitive::<UInt32Type>().clone();
        let embeddings = column("embedding")?;
        let vectors = of_one_length(embeddings)?;
        let vector_type = embeddings.data_type().clone();
        Ok(Self { lists, is_constant, starts, ends, vectors, vector_type })
    }

    /// The range of a row's tokens among all tokens. `None` when the list is NULL.
    pub(super) fn of_row(&self, row: usize) -> Option<Range<usize>> {
        let row = if self.is_constant { 0 } else { row };
        let offsets = self.lists.as_list::<i32>().value_offsets();
        self.lists.is_valid(row).then(|| offsets[row] as usize..offsets[row + 1] as usize)
    }

    /// Whether the lists are the same for all rows.
    #[cfg(test)]
    pub(super) fn is_shared_with(&self, list: &Arc<datafusion::arrow::array::ListArray>) -> bool {
        self.is_constant && std::ptr::addr_eq(Arc::as_ptr(&self.lists), Arc::as_ptr(list))
    }

    /// The byte offset of the start of a token.
    pub(super) fn start(&self, token: usize) -> i64 {
        i64::from(self.starts.value(token))
    }

    /// The byte offset of the end of a token, exclusive.
    pub(super) fn end(&self, token: usize) -> i64 {
        i64::from(self.ends.value(token))
    }

    /// The number of values of a vector.
    pub(super) fn width(&self) -> usize {
        self.vectors.value_length() as usize
    }

    /// Writes the mean of the vectors of those `tokens` that overlap the bytes `start..end`. Returns whether there are
    /// any.
    pub(super) fn write_mean(&self, tokens: Range<usize>, start: i64, end: i64, mean: &mut [f32]) -> bool {
        let overlapping: Vec<usize> = tokens.filter(|t| self.start(*t) < end && self.end(*t) > start).collect();
        match overlapping.as_slice() {
            [] => return false,
            [one] => mean.copy_from_slice(self.vector(*one)),
            several => {
                let mut sums = vec![0.0_f64; mean.len()];
                for token in several {
                    sums.iter_mut().zip(self.vector(*token)).for_each(|(sum, value)| *sum += f64::from(*value));
                }
                mean.iter_mut().zip(sums).for_each(|(value, sum)| *value = (sum / several.len() as f64) as f32);
            }
        }
        true
    }

    fn vector(&self, token: usize) -> &[f32] {
        let at = self.vectors.value_offset(token) as usize;
        &self.vectors.values().as_primitive::<Float32Type>().values()[at..at + self.width()]
    }

    /// The array of vectors that are stored one after the other, of the type of the tokens' vectors.
    pub(super) fn array(&self, values: Vec<f32>, valid: Option<NullBuffer>) -> Result<ArrayRef> {
        let (width, values) = (self.width(), Arc::new(Float32Array::from(values)));
        match &self.vector_type {
            DataType::FixedSizeList(item, n) => {
                Ok(Arc::new(FixedSizeListArray::try_new(Arc::clone(item), *n, values, valid)?))
            }
            DataType::List(item) => {
                let offsets = OffsetBuffer::from_repeated_length(width, values.len() / width);
                Ok(Arc::new(ListArray::try_new(Arc::clone(item), offsets, values, valid)?))
            }
            other => internal_err!("vectors of type {other}"),
        }
    }
}

/// Vectors as lists of a fixed size, which is 1 if there are none.
fn of_one_length(vectors: &ArrayRef) -> Result<FixedSizeListArray> {
    let Some(lists) = vectors.as_list_opt::<i32>() else { return Ok(vectors.as_fixed_size_list().clone()) };
    let width = lists.offsets().lengths().next().unwrap_or(1);
    if let Some(other) = lists.offsets().lengths().find(|length| *length != width || *length == 0) {
        return exec_err!("tokens have vectors of {width} and of {other} dimensions");
    }
    let item = Arc::new(Field::new_list_field(DataType::Float32, true));
    let values = lists.values().slice(lists.value_offsets()[0] as usize, lists.len() * width);
    Ok(FixedSizeListArray::try_new(item, width as i32, values, None)?)
}

/// The number of rows of a result: one if all arguments are constants.
pub(super) fn rows_of(args: &[&ColumnarValue], rows: usize) -> usize {
    let is_constant = |column: &&ColumnarValue| matches!(column, ColumnarValue::Scalar(_));
    if args.iter().all(is_constant) { 1 } else { rows }
}
