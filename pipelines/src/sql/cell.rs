//! Formats values for table cells; abbreviates vectors and long lists.

use arrow::{
    array::{Array, ArrayRef, AsArray, StructArray},
    datatypes::{DataType, Float16Type, Float32Type, Float64Type},
    error::ArrowError,
    util::display::{ArrayFormatter, FormatOptions},
};

/// Lists of up to this many items are shown in full.
const MAX_FULL_ITEMS: usize = 4;
/// Numbers shown of a longer vector.
const SHOWN_NUMBERS: usize = 2;
/// Items shown of any other longer list.
const SHOWN_ITEMS: usize = 3;

/// Formats the values of a column.
pub(super) fn cells(column: &dyn Array) -> Result<Vec<String>, ArrowError> {
    (0..column.len()).map(|row| cell(column, row)).collect()
}

fn cell(column: &dyn Array, row: usize) -> Result<String, ArrowError> {
    if column.is_null(row) || column.data_type() == &DataType::Null {
        return Ok("NULL".to_owned());
    }
    match column.data_type() {
        DataType::FixedSizeList(..) => list(&column.as_fixed_size_list().value(row)),
        DataType::List(_) => list(&column.as_list::<i32>().value(row)),
        DataType::LargeList(_) => list(&column.as_list::<i64>().value(row)),
        DataType::Struct(_) => fields(column.as_struct(), row),
        DataType::Dictionary(..) => {
            let dictionary = column.as_any_dictionary();
            cell(dictionary.values(), dictionary.normalized_keys()[row])
        }
        _ => Ok(ArrayFormatter::try_new(column, &FormatOptions::new())?.value(row).try_to_string()?),
    }
}

/// `[0.12, -0.03, …] (1024)`
fn list(items: &ArrayRef) -> Result<String, ArrowError> {
    let shown = match (items.len() <= MAX_FULL_ITEMS, items.data_type().is_floating()) {
        (true, _) => items.len(),
        (false, true) => SHOWN_NUMBERS,
        (false, false) => SHOWN_ITEMS,
    };
    let mut parts: Vec<String> = (0..shown).map(|row| item(items, row)).collect::<Result<_, _>>()?;
    if shown < items.len() {
        parts.push("…".to_owned());
        return Ok(format!("[{}] ({})", parts.join(", "), items.len()));
    }
    Ok(format!("[{}]", parts.join(", ")))
}

fn item(items: &ArrayRef, row: usize) -> Result<String, ArrowError> {
    let number = match items.data_type() {
        _ if items.is_null(row) => return Ok("NULL".to_owned()),
        DataType::Float16 => items.as_primitive::<Float16Type>().value(row).to_f64(),
        DataType::Float32 => items.as_primitive::<Float32Type>().value(row).into(),
        DataType::Float64 => items.as_primitive::<Float64Type>().value(row),
        _ => return cell(items, row),
    };
    Ok(format_number(number))
}

/// Two decimal places; two significant digits for very small and very large numbers.
fn format_number(number: f64) -> String {
    match number.abs() {
        size if size != 0.0 && !(0.005..1e6).contains(&size) => format!("{number:.1e}"),
        _ => format!("{number:.2}"),
    }
}

/// `{token: It, start: 0}`
fn fields(value: &StructArray, row: usize) -> Result<String, ArrowError> {
    let fields = value.fields().iter().zip(value.columns());
    let parts = fields.map(|(field, column)| Ok(format!("{}: {}", field.name(), cell(column, row)?)));
    Ok(format!("{{{}}}", parts.collect::<Result<Vec<_>, ArrowError>>()?.join(", ")))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::{
        array::{FixedSizeListArray, Float32Array, Int32Array, ListArray, StringArray},
        buffer::OffsetBuffer,
        datatypes::{Field, Fields},
    };

    use super::*;

    fn vectors(width: i32, numbers: Vec<f32>) -> FixedSizeListArray {
        let item = Arc::new(Field::new("item", DataType::Float32, false));
        FixedSizeListArray::new(item, width, Arc::new(Float32Array::from(numbers)), None)
    }

    fn shown(column: &dyn Array) -> Vec<String> {
        cells(column).unwrap()
    }

    // Expected values are rounded by hand.
    #[test]
    fn a_long_vector_is_abbreviated() {
        let numbers: Vec<f32> = [0.1234, -0.0312].into_iter().chain(std::iter::repeat_n(9.0, 1022)).collect();
        assert_eq!(shown(&vectors(1024, numbers)), ["[0.12, -0.03, …] (1024)"]);
        assert_eq!(shown(&vectors(2, vec![0.0, 0.00123, 2e7, -1.0])), ["[0.00, 1.2e-3]", "[2.0e7, -1.00]"]);
        assert_eq!(shown(&vectors(2, vec![f32::NAN, f32::INFINITY])), ["[NaN, inf]"]);
    }

    #[test]
    fn lists_of_structs_are_abbreviated() {
        let token: ArrayRef = Arc::new(StringArray::from(vec!["It", "rained", "all", "day", "."]));
        let start: ArrayRef = Arc::new(Int32Array::from(vec![Some(0), None, Some(10), Some(14), Some(17)]));
        let fields =
            Fields::from(vec![Field::new("token", DataType::Utf8, false), Field::new("start", DataType::Int32, true)]);
        let tokens = StructArray::new(fields, vec![token, start], None);
        let item = Arc::new(Field::new("item", tokens.data_type().clone(), false));
        let lists = ListArray::new(item, OffsetBuffer::from_lengths([5, 0]), Arc::new(tokens), None);
        assert_eq!(
            shown(&lists),
            ["[{token: It, start: 0}, {token: rained, start: NULL}, {token: all, start: 10}, …] (5)", "[]"]
        );
    }

    #[test]
    fn other_values_are_not_abbreviated() {
        assert_eq!(shown(&StringArray::from(vec![Some("a\nb"), None, Some("")])), ["a\nb", "NULL", ""]);
        assert_eq!(shown(&Float32Array::from(vec![0.123_456_7])), ["0.1234567"]);
    }
}
