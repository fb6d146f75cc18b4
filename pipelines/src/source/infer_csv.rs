//! Infers the schema of CSV.

use std::sync::Arc;

use arrow::{
    array::{ArrayRef, AsArray, RecordBatch},
    csv,
    datatypes::{DataType, Field, FieldRef, Schema},
    error::ArrowError,
};

use super::{csv::decoder, reading::Cells, reason::Broken, rows::convert, schema::Head, types};

/// Maximum number of rows for inference.
const MAX_ROWS: usize = 1 << 20;

/// The schema with types that hold all values of the first rows without loss.
pub(super) fn inferred(head: &Head<'_>) -> Result<Option<Schema>, Broken> {
    let Some(rows) = rows(head)? else { return Ok(None) };
    let (inferred, _) = format(head.cells).infer_schema(head.bytes, Some(rows.num_rows()))?;
    let fields = inferred.fields().iter().zip(rows.columns()).map(|(field, written)| {
        let kind = types::stored(&with_zone(field.data_type(), written));
        // The same check as of later rows.
        let holds = kind == DataType::Null || convert(written, &kind).is_ok();
        let kind = if holds { kind } else { DataType::Utf8 };
        Field::new(field.name(), kind, true)
    });
    Ok(Some(Schema::new(fields.collect::<Vec<_>>())))
}

/// Timestamps that all end in `Z` get the time zone UTC.
fn with_zone(kind: &DataType, written: &ArrayRef) -> DataType {
    match kind {
        DataType::Timestamp(unit, None) if written.as_string::<i32>().iter().flatten().all(|t| t.ends_with('Z')) => {
            DataType::Timestamp(*unit, Some("+00:00".into()))
        }
        other => other.clone(),
    }
}

fn format(cells: Cells) -> csv::reader::Format {
    csv::reader::Format::default().with_header(cells.header).with_delimiter(cells.delimiter)
}

/// The schema with strings for all columns.
pub(super) fn strings(head: &Head<'_>) -> Result<Option<Schema>, Broken> {
    Ok(rows(head)?.map(|rows| rows.schema().as_ref().clone()))
}

/// The complete rows among the first ones, as strings; `None` when more bytes may hold more of them.
fn rows(head: &Head<'_>) -> Result<Option<RecordBatch>, Broken> {
    let max_rows = head.max_rows.unwrap_or(MAX_ROWS).min(MAX_ROWS);
    let (names, _) = format(head.cells).infer_schema(head.bytes, Some(0))?;
    let names = Arc::new(as_strings(&names));
    let columns = names.fields().len();
    // The decoder allocates memory for all cells at once, and each cell has a byte, its delimiter or the line end.
    let fitting = max_rows.min(head.bytes.len() / columns.max(1) + 1);
    let read = |rows: usize| -> Result<csv::reader::Decoder, ArrowError> {
        let mut decoder = decoder(&names, (0..columns).collect(), head.cells, rows);
        let mut rest = head.bytes;
        while !rest.is_empty() && decoder.capacity() > 0 {
            rest = &rest[decoder.decode(rest)?..];
        }
        // At the end of the file a row is complete without a line end.
        if head.all && decoder.capacity() > 0 {
            decoder.decode(&[])?;
        }
        Ok(decoder)
    };
    // The last row is cut off, perhaps inside quotes: decode again only as many rows as are complete.
    match fitting - read(fitting)?.capacity() {
        0 if head.all => Ok(Some(RecordBatch::new_empty(names))),
        0 => Ok(None),
        rows if rows < max_rows && !head.is_last() => Ok(None),
        rows => Ok(read(rows)?.flush()?),
    }
}

fn as_strings(schema: &Schema) -> Schema {
    let string = |field: &FieldRef| Field::new(field.name(), DataType::Utf8, true);
    Schema::new(schema.fields().iter().map(string).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use arrow::datatypes::TimeUnit;

    use super::*;

    fn head(bytes: &[u8], all: bool) -> Head<'_> {
        Head { bytes, all, most: true, cells: Cells { delimiter: b',', header: true }, max_rows: Some(1000) }
    }

    fn shown(schema: &Schema) -> Vec<(String, DataType)> {
        schema.fields().iter().map(|f| (f.name().clone(), f.data_type().clone())).collect()
    }

    #[test]
    fn csv_whose_last_row_is_cut_inside_quotes() {
        let text = b"id,text\n1,\"two\nlines\"\n2,\"cut here\nand";
        let schema = inferred(&head(text, false)).unwrap().unwrap();
        assert_eq!(shown(&schema), [("id".to_owned(), DataType::Int64), ("text".to_owned(), DataType::Utf8)]);
        assert!(inferred(&head(b"id,text\n1,\"tw", false)).unwrap().is_none());
    }

    #[test]
    fn what_would_be_lost_as_a_number_stays_a_string() {
        let text = b"zip,plus,n,x,long,none\n00123,+1,-9007199254740993,0.5,0.5,\n17,2,0,1e3,9007199254740993,\n";
        let schema = inferred(&head(text, true)).unwrap().unwrap();
        let (utf8, float) = (DataType::Utf8, DataType::Float64);
        let expected =
            [("zip", utf8.clone()), ("plus", utf8.clone()), ("n", DataType::Int64), ("x", float), ("long", utf8)];
        assert_eq!(shown(&schema)[..5], expected.map(|(n, t)| (n.to_owned(), t)));
        let strings = strings(&head(text, true)).unwrap().unwrap();
        assert!(strings.fields().iter().all(|field| field.data_type() == &DataType::Utf8));
        let times = b"day,seconds,fractions,utc,offset,some,decimal,huge\n\
            2024-01-01,2024-01-01 10:00:00,2024-01-01T10:00:00.25,2024-01-01T10:00:00Z,2024-01-01T10:00:00+02:00,\
            2024-01-01T10:00:00Z,0.1234567890123456789,1e400\n\
            2024-02-29,2024-01-01 10:00:01,2024-01-01T10:00:00.123456,2024-01-01T10:00:00Z,2024-01-01T10:00:00+02:00,\
            2024-01-01T10:00:00,0.5,1\n";
        let schema = inferred(&head(times, true)).unwrap().unwrap();
        let time = |unit, zone: Option<&str>| DataType::Timestamp(unit, zone.map(Into::into));
        let expected = [
            ("day", DataType::Date32),
            ("seconds", time(TimeUnit::Millisecond, None)),
            ("fractions", time(TimeUnit::Microsecond, None)),
            ("utc", time(TimeUnit::Millisecond, Some("+00:00"))),
            ("offset", DataType::Utf8),
            ("some", DataType::Utf8),
            ("decimal", DataType::Utf8),
            ("huge", DataType::Utf8),
        ];
        assert_eq!(shown(&schema), expected.map(|(n, t)| (n.to_owned(), t)));
        let empty = inferred(&head(b"id,text\n", true)).unwrap().unwrap();
        assert_eq!(empty.fields().len(), 2);
    }
}
