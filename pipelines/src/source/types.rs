//! Pure functions over Arrow types: which are texts, the common type of two, and the type in which values are stored.

use arrow::datatypes::{DataType, Field, FieldRef, IntervalUnit, Schema, TimeUnit, UnionFields, UnionMode};
use parquet::arrow::ArrowSchemaConverter;

use super::reason::one_line;

/// Whether a type that [`text`] returned is strings or bytes.
fn is_string(kind: &DataType) -> bool {
    use DataType::{Binary, BinaryView, LargeBinary, LargeUtf8, Utf8, Utf8View};
    matches!(kind, Utf8 | LargeUtf8 | Utf8View | Binary | LargeBinary | BinaryView)
}

/// Whether a type that [`text`] returned is lists of strings, which are tokenised texts.
pub(crate) fn is_words(kind: &DataType) -> bool {
    matches!(kind, DataType::List(item) | DataType::LargeList(item) if is_utf8(item.data_type()))
}

/// Whether a column of this type can be embedded: strings, bytes and lists of strings in every Arrow encoding, and Null,
/// which holds NULL texts.
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

/// The type in which a kept column is written, at any depth. Dictionaries and runs become plain values, as those of
/// several files differ and Parquet builds its own; list views become lists.
///
/// Times have the units that Parquet has ([`times_of_parquet`]).
pub(crate) fn stored(kind: &DataType) -> DataType {
    map_leaves(kind, &|leaf| match leaf {
        DataType::Dictionary(_, value) => stored(value),
        DataType::RunEndEncoded(_, value) => stored(value.data_type()),
        DataType::ListView(item) => stored(&DataType::List(FieldRef::clone(item))),
        DataType::LargeListView(item) => stored(&DataType::LargeList(FieldRef::clone(item))),
        other => times_of_parquet(other),
    })
}

/// The type with other times, at any depth.
///
/// Parquet has no seconds and no Date64: it would store integers, which only Arrow's readers read as times. So seconds
/// become milliseconds, and Date64, which counts milliseconds, becomes a timestamp without a zone, as some writers store
/// a time of day in it. The cast fails beyond 292 million years.
pub(crate) fn times_of_parquet(kind: &DataType) -> DataType {
    map_leaves(kind, &|leaf| match leaf {
        DataType::Timestamp(TimeUnit::Second, zone) => DataType::Timestamp(TimeUnit::Millisecond, zone.clone()),
        DataType::Time32(TimeUnit::Second) => DataType::Time32(TimeUnit::Millisecond),
        DataType::Date64 => DataType::Timestamp(TimeUnit::Millisecond, None),
        other => other.clone(),
    })
}

/// Whether our Parquet writer supports a column of this type.
pub(crate) fn is_storable(field: &Field) -> bool {
    // The converter panics on unions, the writer on FixedSizeBinary(0), and on intervals it fails with the first rows.
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

/// Stands for the type of a JSON column that has single values in some rows and lists or objects in others, which no
/// Arrow type holds: a union without members.
pub(crate) fn mixed() -> DataType {
    DataType::Union(UnionFields::empty(), UnionMode::Sparse)
}

/// A type, for messages.
pub(crate) fn shown(kind: &DataType) -> String {
    match kind {
        DataType::Struct(fields) if fields.is_empty() => "an object without keys".to_owned(),
        mixed if mixed == &self::mixed() => "a single value in some rows, a list or an object in others".to_owned(),
        // Of an object that is the names of its keys.
        other => one_line(&other.to_string()),
    }
}

/// The type in which CSV and JSON decoders read a column of type `kind`, and which `--types string` keeps: single values
/// are strings.
pub(crate) fn as_written(kind: &DataType) -> DataType {
    map_leaves(kind, &|leaf| match leaf {
        DataType::Null | DataType::Union(..) => leaf.clone(),
        _ => DataType::Utf8,
    })
}

/// Replaces floats by strings, for columns with numbers that no float represents exactly.
pub(crate) fn floats_as_written(kind: &DataType) -> DataType {
    map_leaves(kind, &|leaf| if leaf.is_floating() { DataType::Utf8 } else { leaf.clone() })
}

/// Replaces Null inside lists and objects by strings, which hold any later value.
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

/// The type in which a Parquet column is read, given which of its leaves, numbered from `first`, are INT96.
///
/// Dictionaries are read as plain values, as the reader supports dictionaries of strings only. INT96, the timestamp of
/// older Spark, Hive and Impala, is read in microseconds, as in Spark: nanoseconds, the reader's default, overflow before
/// 1677 and after 2262, and 9999-12-31 would silently become another date.
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

/// A list of strings.
pub(crate) fn words() -> DataType {
    DataType::List(FieldRef::new(Field::new_list_field(DataType::Utf8, true)))
}

/// The type for text columns of both types. Strings of several encodings become bytes, without a copy.
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

/// The type of a column in a file, and whether it was inferred from text (CSV, JSON).
pub(crate) type Seen<'a> = (&'a DataType, bool);

/// The type that holds the values of both without loss; `None` when there is none. An inferred type yields to a declared
/// one.
pub(crate) fn unify((a, a_inferred): Seen<'_>, (b, b_inferred): Seen<'_>) -> Option<DataType> {
    if a == b {
        return Some(a.clone());
    }
    match (a_inferred, b_inferred) {
        (true, true) => unify_inferred(a, b),
        (true, false) => parses_as(a, b).then(|| b.clone()),
        (false, true) => parses_as(b, a).then(|| a.clone()),
        (false, false) => unify_typed(a, b),
    }
}

/// Both are read as strings, so strings hold them in any case.
fn unify_inferred(a: &DataType, b: &DataType) -> Option<DataType> {
    match (a, b) {
        // One of them has no values.
        (DataType::Null, seen) | (seen, DataType::Null) => Some(seen.clone()),
        (DataType::Int64, DataType::Float64) | (DataType::Float64, DataType::Int64) => Some(DataType::Float64),
        _ if a.is_nested() || b.is_nested() => None,
        _ => Some(DataType::Utf8),
    }
}

/// Whether texts of type `inferred` can be parsed as `typed`. A number that does not fit is an error with its row.
fn parses_as(inferred: &DataType, typed: &DataType) -> bool {
    match inferred {
        DataType::Null => true,
        DataType::Int64 => typed.is_integer() || typed.is_floating() || is_utf8(typed),
        DataType::Float64 => typed.is_floating() || is_utf8(typed),
        DataType::Binary => is_utf8(typed),
        _ if inferred.is_nested() => false,
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

/// The wider of two numeric types, if it holds every value of the other.
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

#[cfg(test)]
mod tests {
    use super::*;

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
