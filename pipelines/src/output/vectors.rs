//! The vectors in a column of an output.

use arrow::{
    array::{Array, ArrayRef, AsArray, Float32Array},
    datatypes::{DataType, Float32Type},
};

/// Every vector of a column: one per row, or one per token of each row.
pub(super) fn vectors_of(column: &ArrayRef) -> Vec<Float32Array> {
    (0..column.len()).filter(|&row| column.is_valid(row)).flat_map(|row| vectors_of_row(column, row)).collect()
}

/// The vectors of one row that is not NULL.
pub(crate) fn vectors_of_row(column: &ArrayRef, row: usize) -> Vec<Float32Array> {
    let inner = match column.data_type() {
        DataType::FixedSizeList(_, _) => column.as_fixed_size_list().value(row),
        DataType::List(_) => column.as_list::<i32>().value(row),
        _ => return Vec::new(),
    };
    match inner.data_type() {
        DataType::Float32 => vec![inner.as_primitive::<Float32Type>().clone()],
        DataType::Struct(_) => inner.as_struct().column_by_name("embedding").map(vectors_of).unwrap_or_default(),
        DataType::FixedSizeList(_, _) | DataType::List(_) => vectors_of(&inner),
        _ => Vec::new(),
    }
}
