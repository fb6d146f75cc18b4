//! How many bytes a row takes.

use arrow::{
    array::{Array, ArrayRef, AsArray, OffsetSizeTrait},
    datatypes::DataType,
};

/// Adds the bytes that each row of `array` takes to `sizes`. The figure depends on the row's value only, not on how
/// rows are cut into arrays: it decides where windows and row groups end.
///
/// `sizes` has one element per row.
pub fn row_bytes(array: &ArrayRef, sizes: &mut [u64]) {
    match array.data_type() {
        DataType::Utf8 => offset_bytes(array.as_string::<i32>().value_offsets(), sizes),
        DataType::LargeUtf8 => offset_bytes(array.as_string::<i64>().value_offsets(), sizes),
        DataType::Binary => offset_bytes(array.as_binary::<i32>().value_offsets(), sizes),
        DataType::LargeBinary => offset_bytes(array.as_binary::<i64>().value_offsets(), sizes),
        DataType::Utf8View => view_bytes(array.as_string_view().views(), sizes),
        DataType::BinaryView => view_bytes(array.as_binary_view().views(), sizes),
        DataType::Dictionary(_, _) => dictionary_bytes(array, sizes),
        DataType::List(_) => {
            let list = array.as_list::<i32>();
            list_bytes(list.value_offsets(), list.values(), sizes);
        }
        DataType::LargeList(_) => {
            let list = array.as_list::<i64>();
            list_bytes(list.value_offsets(), list.values(), sizes);
        }
        DataType::FixedSizeList(_, n) => fixed_list_bytes(array, usize::try_from(*n).unwrap_or(0), sizes),
        DataType::Struct(_) => array.as_struct().columns().iter().for_each(|column| row_bytes(column, sizes)),
        kind => add_each(sizes, kind.primitive_width().unwrap_or(ODD_WIDTH) as u64),
    }
}

/// What a row of a type without a simple width counts for (maps, unions, booleans and the like).
const ODD_WIDTH: usize = 16;

fn add_each(sizes: &mut [u64], bytes: u64) {
    sizes.iter_mut().for_each(|size| *size += bytes);
}

fn offset_bytes<O: OffsetSizeTrait>(offsets: &[O], sizes: &mut [u64]) {
    for (size, pair) in sizes.iter_mut().zip(offsets.windows(2)) {
        *size += (pair[1] - pair[0]).as_usize() as u64;
    }
}

fn view_bytes(views: &[u128], sizes: &mut [u64]) {
    for (size, view) in sizes.iter_mut().zip(views) {
        // The low 32 bits of a view are its length.
        *size += u64::from(*view as u32);
    }
}

fn dictionary_bytes(array: &ArrayRef, sizes: &mut [u64]) {
    let dictionary = array.as_any_dictionary();
    let mut values = vec![0; dictionary.values().len()];
    row_bytes(dictionary.values(), &mut values);
    let keys = dictionary.normalized_keys();
    for (row, size) in sizes.iter_mut().enumerate() {
        *size += if dictionary.is_valid(row) { values.get(keys[row]).copied().unwrap_or(0) } else { 0 };
    }
}

fn list_bytes<O: OffsetSizeTrait>(offsets: &[O], values: &ArrayRef, sizes: &mut [u64]) {
    let (Some(first), Some(last)) = (offsets.first(), offsets.last()) else { return };
    let (first, last) = (first.as_usize(), last.as_usize());
    let mut items = vec![0; last - first];
    row_bytes(&values.slice(first, last - first), &mut items);
    for (size, pair) in sizes.iter_mut().zip(offsets.windows(2)) {
        *size += items[pair[0].as_usize() - first..pair[1].as_usize() - first].iter().sum::<u64>();
    }
}

fn fixed_list_bytes(array: &ArrayRef, n: usize, sizes: &mut [u64]) {
    let values = array.as_fixed_size_list().values();
    if let Some(width) = values.data_type().primitive_width() {
        return add_each(sizes, (n * width) as u64);
    }
    let mut items = vec![0; values.len()];
    row_bytes(values, &mut items);
    for (size, row) in sizes.iter_mut().zip(items.chunks(n.max(1))) {
        *size += row.iter().sum::<u64>();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::{
        array::{
            BinaryArray, DictionaryArray, FixedSizeListArray, Int32Array, ListArray, StringArray, StringViewArray,
            StructArray,
        },
        datatypes::{Field, Float32Type, Int32Type},
    };

    use super::*;

    fn sizes(array: impl Array + 'static) -> Vec<u64> {
        let array: ArrayRef = Arc::new(array);
        let mut sizes = vec![0; array.len()];
        row_bytes(&array, &mut sizes);
        let tail = array.slice(1, array.len() - 1);
        let mut again = vec![0; tail.len()];
        row_bytes(&tail, &mut again);
        assert_eq!(again, sizes[1..], "a slice counts as the whole does");
        sizes
    }

    #[test]
    fn bytes_of_rows() {
        let words = [Some("four"), None, Some("a text that is longer than a view holds inline"), Some("")];
        let expected = [4, 0, 46, 0];
        assert_eq!(sizes(StringArray::from(words.to_vec())), expected);
        assert_eq!(sizes(StringViewArray::from(words.to_vec())), expected);
        assert_eq!(sizes(BinaryArray::from_iter(words.map(|w| w.map(str::as_bytes)))), expected);
        assert_eq!(sizes(words.into_iter().collect::<DictionaryArray<Int32Type>>()), expected);
        assert_eq!(sizes(Int32Array::from(vec![1, 2, 3])), [4, 4, 4]);
        let list = ListArray::from_iter_primitive::<Float32Type, _, _>([Some(vec![Some(1.0); 3]), None, Some(vec![])]);
        assert_eq!(sizes(list), [12, 0, 0]);
        let fixed = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>([Some(vec![Some(1.0); 2]), None], 2);
        assert_eq!(sizes(fixed), [8, 8]);
        let pair = StructArray::from(vec![(
            Arc::new(Field::new("a", DataType::Utf8, true)),
            Arc::new(StringArray::from(words.to_vec())) as ArrayRef,
        )]);
        assert_eq!(sizes(pair), expected);
    }
}
