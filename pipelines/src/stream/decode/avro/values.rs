//! Values of Avro records by pointer, as columns of the types that are wanted.
//!
//! Types that hold all values of the Avro type are cast. For everything else, and inside arrays, maps and unions, the
//! value is written as JSON and read by the rules for JSON.

use std::sync::Arc;

use arrow::{
    array::{Array, ArrayRef, AsArray, StructArray, UnionArray, make_array, new_null_array},
    buffer::NullBuffer,
    compute::cast,
    datatypes::{DataType, Field, FieldRef, TimeUnit},
    error::ArrowError,
    json::writer::{Encoder, EncoderFactory, EncoderOptions, NullableEncoder, make_encoder},
};

use super::super::{cells::Cells, pick::Picker, pointer::Pointer, settings::ColumnType};

/// The values of a column.
pub(super) struct Found {
    /// Of the type that is wanted; NULL where there is none.
    pub(super) values: ArrayRef,
    /// Rows without such a field.
    pub(super) is_missing: Vec<bool>,
    /// Rows with a value that the type would not hold.
    pub(super) is_wrong: Vec<bool>,
}

impl Found {
    fn nothing(rows: usize, kind: ColumnType) -> Self {
        let values = new_null_array(&kind.data_type(), rows);
        Self { values, is_missing: vec![true; rows], is_wrong: vec![false; rows] }
    }
}

/// Finds the values at a pointer.
pub(super) fn find(records: &StructArray, is_wrapped: bool, pointer: &Pointer, kind: ColumnType) -> Found {
    let rows = records.len();
    let mut place: ArrayRef = if is_wrapped { Arc::clone(records.column(0)) } else { Arc::new(records.clone()) };
    let mut is_missing = vec![false; rows];
    let mut tokens = pointer.tokens();
    while let (Some(object), Some((token, rest))) = (place.as_struct_opt(), tokens.split_first()) {
        let Some(child) = object.column_by_name(token) else { return Found::nothing(rows, kind) };
        (0..rows).for_each(|row| is_missing[row] |= object.is_null(row));
        (place, tokens) = (with_nulls(child, object.nulls()), rest);
    }
    let (values, is_wrong) = match tokens {
        [] if place.data_type() == &DataType::Null => (new_null_array(&kind.data_type(), rows), vec![false; rows]),
        [] if is_held(place.data_type(), kind) => converted(&place, kind),
        below => as_json(&place, below, kind, &mut is_missing),
    };
    Found { values, is_missing, is_wrong }
}

/// The fields of a record that is NULL are NULL too.
fn with_nulls(child: &ArrayRef, nulls: Option<&NullBuffer>) -> ArrayRef {
    let Some(nulls) = nulls.filter(|_| child.data_type() != &DataType::Null) else { return Arc::clone(child) };
    let all = NullBuffer::union(Some(nulls), child.nulls());
    let data = child.to_data().into_builder().nulls(all).build();
    data.map_or_else(|_| Arc::clone(child), make_array)
}

/// Whether a cast gives every value exactly, or NULL.
fn is_held(from: &DataType, kind: ColumnType) -> bool {
    use DataType::{Binary, Boolean, Date32, Float32, Float64, Int32, Int64, Timestamp, Utf8};
    match (from, kind) {
        // An enum is a dictionary.
        (Utf8 | Binary | DataType::Dictionary(..), ColumnType::String)
        | (Int32 | Int64, ColumnType::Int64)
        | (Int32, ColumnType::Int32 | ColumnType::Float64)
        | (Float32 | Float64, ColumnType::Float64)
        | (Float32, ColumnType::Float32)
        | (Boolean, ColumnType::Bool)
        | (Date32, ColumnType::Date)
        | (Timestamp(TimeUnit::Millisecond | TimeUnit::Microsecond, Some(_)), ColumnType::Timestamp) => true,
        _ => false,
    }
}

/// The cast values, and the rows that became NULL.
fn converted(place: &ArrayRef, kind: ColumnType) -> (ArrayRef, Vec<bool>) {
    let rows = place.len();
    match cast(place, &kind.data_type()) {
        Ok(values) => {
            let is_wrong = (0..rows).map(|row| place.is_valid(row) && values.is_null(row)).collect();
            (values, is_wrong)
        }
        Err(_) => (new_null_array(&kind.data_type(), rows), (0..rows).map(|row| place.is_valid(row)).collect()),
    }
}

/// The values below each value of `place`, by way of JSON, and the rows that the type would not hold.
fn as_json(place: &ArrayRef, below: &[String], kind: ColumnType, is_missing: &mut [bool]) -> (ArrayRef, Vec<bool>) {
    let rows = place.len();
    let (picker, _) = Picker::new(&[&Pointer::of(below)]);
    let field: FieldRef = Arc::new(Field::new("", place.data_type().clone(), true));
    let options = EncoderOptions::default().with_explicit_nulls(true).with_encoder_factory(Arc::new(Unions));
    let Ok(mut encoder) = make_encoder(&field, place, &options) else {
        return (new_null_array(&kind.data_type(), rows), (0..rows).map(|row| place.is_valid(row)).collect());
    };
    let (mut cells, mut json, mut is_wrong) = (Cells::new(kind), Vec::new(), vec![false; rows]);
    for row in 0..rows {
        json.clear();
        match encoder.is_null(row) {
            true => json.extend_from_slice(b"null"),
            false => encoder.encode(row, &mut json),
        }
        let (json, mut picked) = (str::from_utf8(&json).unwrap_or_default(), Vec::new());
        match picker.pick(json, &mut picked).map(|()| picked[0]) {
            Ok(Some(value)) => is_wrong[row] = !cells.push_json(value),
            Ok(None) => {
                is_missing[row] = true;
                cells.push_null();
            }
            Err(_) => {
                is_wrong[row] = true;
                cells.push_null();
            }
        }
    }
    (cells.finish(), is_wrong)
}

/// Writes a union as its value, which arrow-json does not know.
#[derive(Debug)]
struct Unions;

impl EncoderFactory for Unions {
    fn make_default_encoder<'a>(
        &self,
        _: &'a FieldRef,
        array: &'a dyn Array,
        options: &'a EncoderOptions,
    ) -> Result<Option<NullableEncoder<'a>>, ArrowError> {
        let (DataType::Union(fields, _), Some(union)) =
            (array.data_type(), array.as_any().downcast_ref::<UnionArray>())
        else {
            return Ok(None);
        };
        let encoder = |(id, field): (i8, &'a FieldRef)| Ok((id, make_encoder(field, union.child(id), options)?));
        let branches = fields.iter().map(encoder).collect::<Result<_, ArrowError>>()?;
        Ok(Some(NullableEncoder::new(Box::new(Branches { union, branches }), None)))
    }
}

struct Branches<'a> {
    union: &'a UnionArray,
    branches: Vec<(i8, NullableEncoder<'a>)>,
}

impl Encoder for Branches<'_> {
    fn encode(&mut self, row: usize, out: &mut Vec<u8>) {
        let (id, place) = (self.union.type_id(row), self.union.value_offset(row));
        let is_null = self.union.child(id).data_type() == &DataType::Null;
        match self.branches.iter_mut().find(|(branch, _)| *branch == id) {
            Some((_, encoder)) if !is_null && !encoder.is_null(place) => encoder.encode(place, out),
            _ => out.extend_from_slice(b"null"),
        }
    }
}
