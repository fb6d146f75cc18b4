//! Pure functions over Arrow types: what is text, which type holds two, how large a row is.

use arrow::{
    array::{Array, ArrayRef, AsArray, OffsetSizeTrait},
    datatypes::{DataType, Field, FieldRef, IntervalUnit, Schema, TimeUnit, UnionFields, UnionMode},
};
use parquet::arrow::ArrowSchemaConverter;

/// Strings and bytes, as [`text`] has them.
fn is_string(kind: &DataType) -> bool {
    use DataType::{Binary, BinaryView, LargeBinary, LargeUtf8, Utf8, Utf8View};
    matches!(kind, Utf8 | LargeUtf8 | Utf8View | Binary | LargeBinary | BinaryView)
}

/// Lists of strings, as [`text`] has them: texts that are tokenised already.
pub(crate) fn is_words(kind: &DataType) -> bool {
    matches!(kind, DataType::List(item) | DataType::LargeList(item) if is_utf8(item.data_type()))
}

/// Whether a column of this type can be embedded: strings, bytes and lists of strings in every Arrow encoding. One of
/// type Null holds NULL texts, and agrees with every other.
pub fn is_text(kind: &DataType) -> bool {
    let kind = text(kind);
    kind == DataType::Null || is_string(&kind) || is_words(&kind)
}

/// The plain type that a text column is read as.
pub(crate) fn text(kind: &DataType) -> DataType {
    match stored(kind) {
        DataType::FixedSizeBinary(_) => DataType::Binary,
        DataType::FixedSizeList(item, _) => DataType::List(item),
        plain => plain,
    }
}

/// The type in which a kept column is written, at any depth. Values instead of dictionaries and runs, as those of
/// several files or batches do not fit together and Parquet makes its own; lists instead of views.
///
/// Parquet has no seconds and no dates with a time of day: it would store bare integers, which only Arrow's readers
/// take for times. So seconds become milliseconds, and Date64, which counts milliseconds, a timestamp without a zone:
/// DATE would cut off the time of day that some writers put in. Only more than 292 million years overflow, and the cast
/// says so.
pub(crate) fn stored(kind: &DataType) -> DataType {
    map_leaves(kind, &|leaf| match leaf {
        DataType::Dictionary(_, value) => stored(value),
        DataType::RunEndEncoded(_, value) => stored(value.data_type()),
        DataType::ListView(item) => stored(&DataType::List(FieldRef::clone(item))),
        DataType::LargeListView(item) => stored(&DataType::LargeList(FieldRef::clone(item))),
        DataType::Timestamp(TimeUnit::Second, zone) => DataType::Timestamp(TimeUnit::Millisecond, zone.clone()),
        DataType::Time32(TimeUnit::Second) => DataType::Time32(TimeUnit::Millisecond),
        DataType::Date64 => DataType::Timestamp(TimeUnit::Millisecond, None),
        other => other.clone(),
    })
}

/// Whether our Parquet writer takes a column of this type.
pub(crate) fn is_storable(field: &Field) -> bool {
    // The first makes the converter panic and the last the writer, the other is refused only when rows come.
    let is_odd = |kind: &DataType| {
        use DataType::{FixedSizeBinary, Interval, Union};
        matches!(kind, Union(..) | Interval(IntervalUnit::MonthDayNano) | FixedSizeBinary(0))
    };
    let alone = || Schema::new(vec![field.clone()]);
    !has_leaf(field.data_type(), &is_odd) && ArrowSchemaConverter::new().convert(&alone()).is_ok()
}

fn has_leaf(kind: &DataType, is_it: &dyn Fn(&DataType) -> bool) -> bool {
    let found = std::cell::Cell::new(false);
    map_leaves(kind, &|leaf| {
        found.set(found.get() || is_it(leaf));
        leaf.clone()
    });
    found.get()
}

/// The type of a JSON column that has single values in some rows and lists or objects in others: no Arrow type holds
/// these, and a union without members holds nothing.
pub(crate) fn mixed() -> DataType {
    DataType::Union(UnionFields::empty(), UnionMode::Sparse)
}

/// A type, for messages.
pub(crate) fn shown(kind: &DataType) -> String {
    match kind {
        DataType::Struct(fields) if fields.is_empty() => "an object without keys".to_owned(),
        mixed if mixed == &self::mixed() => "a single value in some rows, a list or an object in others".to_owned(),
        other => other.to_string(),
    }
}

/// How a column that should have type `kind` is read from CSV or JSON, and what `--types string` keeps: every single
/// value as it is written.
pub(crate) fn as_written(kind: &DataType) -> DataType {
    map_leaves(kind, &|leaf| match leaf {
        DataType::Null | DataType::Union(..) => leaf.clone(),
        _ => DataType::Utf8,
    })
}

/// Strings in the place of floats: for columns with numbers that no float holds.
pub(crate) fn floats_as_written(kind: &DataType) -> DataType {
    map_leaves(kind, &|leaf| if leaf.is_floating() { DataType::Utf8 } else { leaf.clone() })
}

/// Inside lists and objects, strings where nothing was seen: they hold whatever comes later.
pub(crate) fn with_items(kind: &DataType) -> DataType {
    let item = |leaf: &DataType| if leaf == &DataType::Null { DataType::Utf8 } else { leaf.clone() };
    if kind.is_nested() { map_leaves(kind, &item) } else { kind.clone() }
}

fn map_leaves(kind: &DataType, leaf: &dyn Fn(&DataType) -> DataType) -> DataType {
    let inside = |field: &FieldRef| FieldRef::new(with_leaves(field, leaf));
    match kind {
        DataType::List(item) => DataType::List(inside(item)),
        DataType::LargeList(item) => DataType::LargeList(inside(item)),
        DataType::FixedSizeList(item, n) => DataType::FixedSizeList(inside(item), *n),
        DataType::Struct(fields) => DataType::Struct(fields.iter().map(inside).collect()),
        DataType::Map(entries, sorted) => DataType::Map(inside(entries), *sorted),
        other => leaf(other),
    }
}

fn with_leaves(field: &Field, leaf: &dyn Fn(&DataType) -> DataType) -> Field {
    field.clone().with_data_type(map_leaves(field.data_type(), leaf))
}

/// A type as its columns are best read from Parquet, given which of its leaves, counted through from `first`, are INT96.
///
/// Dictionaries are read as plain values: the reader makes them of strings only, and refuses the others. INT96, the time
/// of older Spark, Hive and Impala, is read in microseconds as Spark has it: in nanoseconds, which the reader prefers,
/// there is nothing before 1677 and after 2262, and 9999-12-31 would silently become another date.
pub(crate) fn from_parquet(
    kind: &DataType,
    first: &std::cell::Cell<usize>,
    is_int96: &dyn Fn(usize) -> bool,
) -> DataType {
    map_leaves(kind, &|leaf| {
        let place = first.replace(first.get() + 1);
        match leaf {
            DataType::Dictionary(_, value) => value.as_ref().clone(),
            DataType::Timestamp(_, zone) if is_int96(place) => DataType::Timestamp(TimeUnit::Microsecond, zone.clone()),
            other => other.clone(),
        }
    })
}

/// A list of strings, as we make it.
pub(crate) fn words() -> DataType {
    DataType::List(FieldRef::new(Field::new_list_field(DataType::Utf8, true)))
}

/// The one type in which the text columns of all files are given to the embedder. Equal types stay; strings of several
/// encodings become bytes, which costs no copy and loses nothing.
pub(crate) fn unify_text(a: &DataType, b: &DataType) -> Option<DataType> {
    match (a, b) {
        _ if a == b => return Some(a.clone()),
        (DataType::Null, other) | (other, DataType::Null) => return Some(other.clone()),
        _ => {}
    }
    if is_string(a) && is_string(b) {
        return Some(DataType::Binary);
    }
    (is_words(a) && is_words(b)).then(words)
}

/// A column's type in a file, and whether it was only guessed from words (CSV, JSON).
pub(crate) type Seen<'a> = (&'a DataType, bool);

/// The type that holds the values of both without loss; `None` when there is none. A guessed type gives way.
pub(crate) fn unify((a, a_guessed): Seen<'_>, (b, b_guessed): Seen<'_>) -> Option<DataType> {
    if a == b {
        return Some(a.clone());
    }
    match (a_guessed, b_guessed) {
        (true, true) => unify_guessed(a, b),
        (true, false) => parses_as(a, b).then(|| b.clone()),
        (false, true) => parses_as(b, a).then(|| a.clone()),
        (false, false) => unify_typed(a, b),
    }
}

/// Both are words in a file, so at worst they stay words.
fn unify_guessed(a: &DataType, b: &DataType) -> Option<DataType> {
    match (a, b) {
        // Nothing was seen in one of them.
        (DataType::Null, seen) | (seen, DataType::Null) => Some(seen.clone()),
        (DataType::Int64, DataType::Float64) | (DataType::Float64, DataType::Int64) => Some(DataType::Float64),
        _ if a.is_nested() || b.is_nested() => None,
        _ => Some(DataType::Utf8),
    }
}

/// Words that look like `guessed` can be read as `typed`. A number that does not fit is reported with its row.
fn parses_as(guessed: &DataType, typed: &DataType) -> bool {
    match guessed {
        DataType::Null => true,
        DataType::Int64 => typed.is_integer() || typed.is_floating() || is_utf8(typed),
        DataType::Float64 => typed.is_floating() || is_utf8(typed),
        DataType::Binary => is_utf8(typed),
        _ if guessed.is_nested() => false,
        _ => is_utf8(typed),
    }
}

fn is_utf8(kind: &DataType) -> bool {
    matches!(kind, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View)
}

fn unify_typed(a: &DataType, b: &DataType) -> Option<DataType> {
    use DataType::{LargeUtf8, Null};
    match (a, b) {
        (Null, other) | (other, Null) => Some(other.clone()),
        _ if is_utf8(a) && is_utf8(b) => Some(LargeUtf8),
        _ if is_string(a) && is_string(b) && !is_utf8(a) && !is_utf8(b) => Some(DataType::LargeBinary),
        _ => wider(a, b),
    }
}

/// The larger of two numeric types that holds every value of the smaller.
fn wider(a: &DataType, b: &DataType) -> Option<DataType> {
    use DataType::{Float32, Float64, Int8, Int16, Int32, Int64, UInt8, UInt16, UInt32, UInt64};
    let ladders: [&[DataType]; 4] =
        [&[Int8, Int16, Int32, Int64], &[UInt8, UInt16, UInt32, UInt64], &[UInt8, Int16], &[Float32, Float64]];
    let crossings =
        [(UInt16, Int32), (UInt32, Int64), (UInt8, Int32), (UInt8, Int64), (UInt16, Int64), (Int32, Float64)];
    for ladder in ladders {
        let rung = |kind: &DataType| ladder.iter().position(|k| k == kind);
        if let (Some(i), Some(j)) = (rung(a), rung(b)) {
            return Some(ladder[i.max(j)].clone());
        }
    }
    let crossing = crossings.iter().find(|(small, large)| (small == a && large == b) || (small == b && large == a));
    crossing.map(|(_, large)| large.clone())
}

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
    use super::*;
    use arrow::{
        array::{
            BinaryArray, DictionaryArray, FixedSizeListArray, Int32Array, ListArray, StringArray, StringViewArray,
            StructArray,
        },
        datatypes::{Float32Type, Int32Type},
    };
    use std::sync::Arc;

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

    /// Parquet's LogicalTypes.md: TIME and TIMESTAMP have MILLIS, MICROS and NANOS, DATE has days; no unions, and
    /// decimals with a scale from 0 to the precision.
    #[test]
    fn what_parquet_holds() {
        use DataType::*;
        let list = |kind: &DataType| List(FieldRef::new(Field::new_list_field(kind.clone(), true)));
        let object = |kind: &DataType| Struct(vec![Field::new("a", kind.clone(), true)].into());
        let millis = |zone: Option<&str>| Timestamp(TimeUnit::Millisecond, zone.map(Into::into));
        for (kind, expected) in [
            (Timestamp(TimeUnit::Second, None), millis(None)),
            (Timestamp(TimeUnit::Second, Some("+02:00".into())), millis(Some("+02:00"))),
            (Time32(TimeUnit::Second), Time32(TimeUnit::Millisecond)),
            (Date64, millis(None)),
            (Date32, Date32),
            (Dictionary(Box::new(Int8), Box::new(Date64)), millis(None)),
        ] {
            assert_eq!((stored(&kind), stored(&list(&kind))), (expected.clone(), list(&expected)));
            assert_eq!(stored(&object(&list(&kind))), object(&list(&expected)));
        }
        let storable = |kind: &DataType| is_storable(&Field::new("x", kind.clone(), true));
        for kind in [Utf8, Null, Float16, Decimal128(38, 10), Interval(IntervalUnit::DayTime), list(&Utf8)] {
            assert!(storable(&kind) && storable(&object(&kind)), "{kind}");
        }
        let empty = Struct(arrow::datatypes::Fields::empty());
        for kind in [mixed(), Interval(IntervalUnit::MonthDayNano), Decimal128(5, -2), empty] {
            assert!(!storable(&kind) && !storable(&object(&list(&kind))), "{kind}");
        }
    }

    #[test]
    fn one_type_for_two() {
        use DataType::*;
        let cases = [
            ((Int64, true), (Float64, true), Some(Float64)),
            ((Int64, true), (Utf8, true), Some(Utf8)),
            ((Boolean, true), (Int64, true), Some(Utf8)),
            ((Int64, true), (Int32, false), Some(Int32)),
            ((Utf8, true), (Int32, false), None),
            ((Utf8, true), (LargeUtf8, false), Some(LargeUtf8)),
            ((Int8, false), (Int64, false), Some(Int64)),
            ((UInt32, false), (Int64, false), Some(Int64)),
            ((UInt64, false), (Int64, false), None),
            ((Int64, false), (Float64, false), None),
            ((Utf8, false), (Utf8View, false), Some(LargeUtf8)),
            ((Utf8, false), (Int64, false), None),
            ((words(), false), (Utf8, false), None),
        ];
        for (a, b, expected) in cases {
            assert_eq!(unify((&a.0, a.1), (&b.0, b.1)), expected, "{a:?} {b:?}");
            assert_eq!(unify((&b.0, b.1), (&a.0, a.1)), expected, "{b:?} {a:?}");
        }
    }
}
