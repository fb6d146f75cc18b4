//! Which columns a file has, and of what type.
//!
//! Parquet and Arrow files say so. For CSV and JSON the types are guessed from the first thousand rows; a column in
//! which nothing was seen takes the type of other files, or that of strings. Columns,
//! and keys inside objects, that only later rows of a JSON file have are not read.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use arrow::{
    array::{ArrayRef, AsArray, RecordBatch},
    csv,
    datatypes::{DataType, Field, FieldRef, Schema, SchemaRef},
    error::ArrowError,
    json,
};
use serde_json::{Map, Value, value::RawValue};
use tokio::io::AsyncBufReadExt;

use super::{
    Format, InputFile, KeptTypes, SourceError,
    bytes::{self, Bytes, Taken},
    csv::decoder as csv_decoder,
    decode::Decode,
    escapes::Escapes,
    ipc::Ipc,
    lines,
    lossless::is_double,
    parquet,
    reason::{Broken, own},
    rows, types,
};

/// Rows that guessing looks at, as in DataFusion.
const GUESS_ROWS: usize = 1000;
/// Bytes that guessing looks at, unless not even one row is complete by then.
const GUESS_BYTES: usize = 1 << 20;
/// The first row must be complete by then.
const GUESS_BYTES_MAX: usize = 256 << 20;

/// The schema of a file, without metadata of the schema: it may speak of columns that we leave out. `None`: the file is
/// of a format that says nothing of its columns, and there is nothing in it.
pub(super) async fn of_file(file: &InputFile, types: KeptTypes) -> Result<Option<SchemaRef>, SourceError> {
    match (file.format, types) {
        (Format::Text, _) => Ok(Some(lines::schema())),
        (Format::Parquet, _) => parquet::schema(file).await.map(Some),
        (Format::Arrow, _) => arrow_schema(file).await.map(Some),
        (Format::Csv, KeptTypes::Strings) => guess(file, csv_strings).await,
        (Format::Csv, KeptTypes::Guess) => guess(file, csv_guess).await,
        (Format::Json, KeptTypes::Strings) => guess(file, json_strings).await,
        (Format::Json, KeptTypes::Guess) => guess(file, json_guess).await,
    }
}

async fn arrow_schema(file: &InputFile) -> Result<SchemaRef, SourceError> {
    let malformed = |e: ArrowError| SourceError::malformed(file, 0, e);
    let mut bytes = bytes::open(file, &Taken::default()).await?;
    let mut decoder = Ipc::whole();
    loop {
        if let Some(schema) = decoder.schema() {
            return Ok(Arc::new(Schema::new(schema.fields().clone())));
        }
        let chunk = bytes.fill_buf().await.map_err(|e| bytes::read_error(file, 0, e))?;
        if chunk.is_empty() {
            decoder.finish().map_err(malformed)?;
            let none = || SourceError::malformed(file, 0, "there is no schema in it");
            return decoder.schema().map(|schema| Arc::new(Schema::new(schema.fields().clone()))).ok_or_else(none);
        }
        // The schema comes first, and a small step keeps from reading on into the rows.
        let used = decoder.decode(&chunk[..chunk.len().min(4096)]).map_err(malformed)?;
        bytes.consume(used);
        decoder.flush().map_err(malformed)?;
    }
}

/// The first bytes of a file, and whether that is all of it.
struct Head<'a> {
    bytes: &'a [u8],
    all: bool,
}

/// `Ok(None)` asks for more bytes.
type Guess = fn(Head<'_>) -> Result<Option<Schema>, Broken>;

/// Byte order marks of UTF-16.
const UTF_16: [&[u8]; 2] = [&[0xff, 0xfe], &[0xfe, 0xff]];

async fn guess(file: &InputFile, guess: Guess) -> Result<Option<SchemaRef>, SourceError> {
    let mut bytes = bytes::open(file, &Taken::default()).await?;
    let mut head = Vec::new();
    let mut limit = GUESS_BYTES;
    loop {
        let all = fill(file, &mut bytes, &mut head, limit).await?;
        if all && head.trim_ascii().is_empty() {
            return Ok(None);
        }
        if UTF_16.iter().any(|mark| head.starts_with(mark)) {
            return Err(SourceError::malformed(file, 0, "the file is UTF-16"));
        }
        let malformed = |broken: Broken| SourceError::malformed(file, broken.row, broken.reason);
        let guessed = guess(Head { bytes: &head, all }).map_err(malformed)?;
        if let Some(schema) = guessed {
            return Ok(Some(Arc::new(with_items(&schema))));
        }
        limit *= 4;
        if all || limit > GUESS_BYTES_MAX {
            return Err(SourceError::malformed(file, 0, format!("no complete row in the first {} bytes", head.len())));
        }
    }
}

/// Reads until `head` has `limit` bytes; true when the file ends before that.
async fn fill(file: &InputFile, bytes: &mut Bytes, head: &mut Vec<u8>, limit: usize) -> Result<bool, SourceError> {
    while head.len() < limit {
        let chunk = bytes.fill_buf().await.map_err(|e| bytes::read_error(file, 0, e))?;
        if chunk.is_empty() {
            return Ok(true);
        }
        let used = chunk.len().min(limit - head.len());
        head.extend_from_slice(&chunk[..used]);
        bytes.consume(used);
    }
    Ok(false)
}

fn csv_guess(head: Head<'_>) -> Result<Option<Schema>, Broken> {
    let Some(rows) = csv_rows(&head)? else { return Ok(None) };
    let format = csv::reader::Format::default().with_header(true);
    let (guessed, _) = format.infer_schema(head.bytes, Some(rows.num_rows()))?;
    let fields = guessed.fields().iter().zip(rows.columns()).map(|(field, written)| {
        let kind = types::stored(&with_zone(field.data_type(), written));
        // What would be lost by the type, as later rows are asked, too.
        let holds = kind == DataType::Null || rows::convert(written, &kind).is_ok();
        let kind = if holds { kind } else { DataType::Utf8 };
        Field::new(field.name(), kind, true)
    });
    Ok(Some(Schema::new(fields.collect::<Vec<_>>())))
}

/// Times that all end in `Z` are times of UTC.
fn with_zone(kind: &DataType, written: &ArrayRef) -> DataType {
    match kind {
        DataType::Timestamp(unit, None) if written.as_string::<i32>().iter().flatten().all(|t| t.ends_with('Z')) => {
            DataType::Timestamp(*unit, Some("+00:00".into()))
        }
        other => other.clone(),
    }
}

fn csv_strings(head: Head<'_>) -> Result<Option<Schema>, Broken> {
    Ok(csv_rows(&head)?.map(|rows| rows.schema().as_ref().clone()))
}

/// The complete rows among the first thousand, as strings; `None` when there is no complete one yet.
fn csv_rows(head: &Head<'_>) -> Result<Option<RecordBatch>, Broken> {
    let format = csv::reader::Format::default().with_header(true);
    let (names, _) = format.infer_schema(head.bytes, Some(0))?;
    let names = Arc::new(strings(&names));
    let read = |rows: usize| -> Result<csv::reader::Decoder, ArrowError> {
        let mut decoder = csv_decoder(&names, (0..names.fields().len()).collect(), true, rows);
        let mut rest = head.bytes;
        while !rest.is_empty() && decoder.capacity() > 0 {
            rest = &rest[decoder.decode(rest)?..];
        }
        // Only the end of the file completes a row without its line end.
        if head.all && decoder.capacity() > 0 {
            decoder.decode(&[])?;
        }
        Ok(decoder)
    };
    // The last row is cut somewhere, perhaps inside quotes: a decoder for so many as are complete does not begin it.
    match GUESS_ROWS - read(GUESS_ROWS)?.capacity() {
        0 if head.all => Ok(Some(RecordBatch::new_empty(names))),
        0 => Ok(None),
        rows => Ok(read(rows)?.flush()?),
    }
}

fn json_strings(head: Head<'_>) -> Result<Option<Schema>, Broken> {
    let written = |field: &FieldRef| Field::clone(field).with_data_type(types::as_written(field.data_type()));
    let guessed = json_types(&head)?;
    Ok(guessed.map(|schema| Schema::new(schema.fields().iter().map(written).collect::<Vec<_>>())))
}

/// Columns that are numbers become so only if that keeps every one; inside lists and objects a number that is not kept
/// is reported with its row.
fn json_guess(head: Head<'_>) -> Result<Option<Schema>, Broken> {
    let Some(guessed) = json_types(&head)? else { return Ok(None) };
    let lossy = lossy_numbers(head.bytes);
    // Where all are integers that fit, the type is Int64, which is exact.
    let fields = guessed.fields().iter().map(|field| match lossy.contains(field.name()) {
        true => Field::new(field.name(), types::floats_as_written(field.data_type()), true),
        false => Field::clone(field),
    });
    Ok(Some(Schema::new(fields.collect::<Vec<_>>())))
}

/// Columns with a number, at any depth, that a float does not hold.
fn lossy_numbers(bytes: &[u8]) -> HashSet<String> {
    let mut lossy = HashSet::new();
    for line in bytes.split(|&b| b == b'\n').take(GUESS_ROWS) {
        let Ok(row) = serde_json::from_slice::<BTreeMap<String, &RawValue>>(line) else { continue };
        lossy.extend(row.into_iter().filter(|(_, value)| has_lossy_number(value.get())).map(|(name, _)| name));
    }
    lossy
}

/// Whether a number in this JSON, outside its strings, is none that a float holds.
fn has_lossy_number(json: &str) -> bool {
    let mut rest = json;
    while let Some(at) = rest.find(|c: char| c == '"' || c == '-' || c.is_ascii_digit()) {
        rest = &rest[at..];
        let length = match rest.strip_prefix('"') {
            Some(string) => 1 + string_length(string),
            None => rest.find(|c: char| !c.is_ascii_digit() && !"+-.eE".contains(c)).unwrap_or(rest.len()),
        };
        if !rest.starts_with('"') && !is_double(&rest[..length]) {
            return true;
        }
        rest = &rest[length..];
    }
    false
}

/// Bytes of a JSON string behind its first quotation mark, the last one counted in.
fn string_length(string: &str) -> usize {
    let mut escaped = false;
    let end = string.bytes().position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    });
    end.map_or(string.len(), |end| end + 1)
}

fn json_types(head: &Head<'_>) -> Result<Option<Schema>, Broken> {
    let end = match head.bytes.iter().rposition(|&b| b == b'\n') {
        _ if head.all => head.bytes.len(),
        Some(end) => end,
        None => return Ok(None),
    };
    let columns = json_columns(&Escapes::rewritten(&head.bytes[..end]))?;
    let fields = columns.into_iter().map(|(name, values)| Field::new(&name, json_type(&name, values), true));
    Ok(Some(Schema::new(fields.collect::<Vec<_>>())))
}

/// The values of each column, in the order in which the columns turn up.
fn json_columns(bytes: &[u8]) -> Result<Vec<(String, Vec<Value>)>, Broken> {
    let (mut columns, mut places) = (Vec::<(String, Vec<Value>)>::new(), HashMap::new());
    let lines = bytes.split(|&b| b == b'\n').enumerate().filter(|(_, line)| !line.trim_ascii().is_empty());
    for (row, (line, text)) in lines.take(GUESS_ROWS).enumerate() {
        for (name, value) in json_row(text).map_err(|reason| Broken {
            row: row as u64,
            reason: own(format!("Json error: line {} of the file: {reason}", line + 1)),
        })? {
            let place = *places.entry(name.clone()).or_insert(columns.len());
            if place == columns.len() {
                columns.push((name, Vec::new()));
            }
            columns[place].1.push(value);
        }
    }
    Ok(columns)
}

/// A line as an object, or what is wrong with it.
fn json_row(line: &[u8]) -> Result<Map<String, Value>, String> {
    let line = std::str::from_utf8(line).map_err(|e| format!("not UTF-8: byte {} of the line", e.valid_up_to()))?;
    match serde_json::from_str(line) {
        Ok(Value::Object(row)) => Ok(row),
        Ok(_) => Err("not a JSON object".to_owned()),
        // The position is one within the line.
        Err(e) => Err(format!("not valid JSON: {}", e.to_string().replace(" at line 1 column", " at byte"))),
    }
}

/// The type of one column. Its values are alike, or it has none that anything could be read as.
fn json_type(name: &str, values: Vec<Value>) -> DataType {
    let shape = |value: &Value| match value {
        Value::Null => None,
        Value::Array(_) => Some('l'),
        Value::Object(_) => Some('o'),
        _ => Some('s'),
    };
    let shapes: HashSet<char> = values.iter().filter_map(shape).collect();
    if shapes.len() > 1 {
        return types::mixed();
    }
    let values = values.into_iter().map(without_null_items);
    let rows = values.map(|value| Ok(Value::Object(Map::from_iter([(name.to_owned(), value)]))));
    let guessed = json::reader::infer_json_schema_from_iterator(rows);
    guessed.ok().and_then(|schema| schema.fields().first().map(|f| f.data_type().clone())).unwrap_or(types::mixed())
}

/// A value without the nulls in its lists, which say nothing about what the other items are.
fn without_null_items(value: Value) -> Value {
    match value {
        Value::Array(items) => {
            Value::Array(items.into_iter().filter(|item| !item.is_null()).map(without_null_items).collect())
        }
        Value::Object(members) => {
            Value::Object(members.into_iter().map(|(name, value)| (name, without_null_items(value))).collect())
        }
        other => other,
    }
}

/// Lists and objects in which nothing was seen hold strings; columns in which nothing was seen may be anything yet.
fn with_items(schema: &Schema) -> Schema {
    let with_items = |field: &FieldRef| Field::clone(field).with_data_type(types::with_items(field.data_type()));
    Schema::new(schema.fields().iter().map(with_items).collect::<Vec<_>>())
}

fn strings(schema: &Schema) -> Schema {
    let string = |field: &FieldRef| Field::new(field.name(), DataType::Utf8, true);
    Schema::new(schema.fields().iter().map(string).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use arrow::datatypes::TimeUnit;

    use super::*;

    fn shown(schema: &Schema) -> Vec<(String, DataType)> {
        schema.fields().iter().map(|f| (f.name().clone(), f.data_type().clone())).collect()
    }

    #[test]
    fn numbers_that_no_float_holds_are_found_at_any_depth() {
        for (json, lossy) in [
            ("18446744073709551615", true),
            (r#"{"id": [1, {"x": 18446744073709551615}]}"#, true),
            (r#"{"id \\\" 18446744073709551615": "18446744073709551615", "y": [0.5, -1e300]}"#, false),
            (r#"["\\", 0.12345678901234567890123]"#, true),
        ] {
            assert_eq!(has_lossy_number(json), lossy, "{json}");
        }
        let nested = br#"{"v": {"id": 18446744073709551615, "n": 1, "none": null, "empty": []}}"#;
        let schema = with_items(&json_guess(Head { bytes: nested, all: true }).unwrap().unwrap());
        let DataType::Struct(fields) = schema.field(0).data_type().clone() else { panic!("{schema}") };
        let kind = |name: &str| fields.iter().find(|field| field.name() == name).unwrap().data_type().clone();
        assert_eq!(["id", "n", "none"].map(kind), [DataType::Utf8, DataType::Int64, DataType::Utf8]);
        assert_eq!(kind("empty"), types::words());
    }

    #[test]
    fn csv_whose_last_row_is_cut_inside_quotes() {
        let text = b"id,text\n1,\"two\nlines\"\n2,\"cut here\nand";
        let schema = csv_guess(Head { bytes: text, all: false }).unwrap().unwrap();
        assert_eq!(shown(&schema), [("id".to_owned(), DataType::Int64), ("text".to_owned(), DataType::Utf8)]);
        assert!(csv_guess(Head { bytes: b"id,text\n1,\"tw", all: false }).unwrap().is_none());
    }

    #[test]
    fn what_would_be_lost_as_a_number_stays_a_string() {
        let text = b"zip,plus,n,x,long,none\n00123,+1,-9007199254740993,0.5,0.5,\n17,2,0,1e3,9007199254740993,\n";
        let schema = csv_guess(Head { bytes: text, all: true }).unwrap().unwrap();
        let (utf8, float) = (DataType::Utf8, DataType::Float64);
        let expected =
            [("zip", utf8.clone()), ("plus", utf8.clone()), ("n", DataType::Int64), ("x", float), ("long", utf8)];
        assert_eq!(shown(&schema)[..5], expected.map(|(n, t)| (n.to_owned(), t)));
        let strings = csv_strings(Head { bytes: text, all: true }).unwrap().unwrap();
        assert!(strings.fields().iter().all(|field| field.data_type() == &DataType::Utf8));
        let times = b"day,seconds,fractions,utc,offset,some,decimal,huge\n\
            2024-01-01,2024-01-01 10:00:00,2024-01-01T10:00:00.25,2024-01-01T10:00:00Z,2024-01-01T10:00:00+02:00,\
            2024-01-01T10:00:00Z,0.1234567890123456789,1e400\n\
            2024-02-29,2024-01-01 10:00:01,2024-01-01T10:00:00.123456,2024-01-01T10:00:00Z,2024-01-01T10:00:00+02:00,\
            2024-01-01T10:00:00,0.5,1\n";
        let schema = csv_guess(Head { bytes: times, all: true }).unwrap().unwrap();
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
        let empty = csv_guess(Head { bytes: b"id,text\n", all: true }).unwrap().unwrap();
        assert_eq!(empty.fields().len(), 2);
    }

    #[test]
    fn integers_that_no_number_holds_stay_as_written() {
        let text =
            br#"{"a": 18446744073709551615, "b": 9007199254740993, "c": 1.5, "d": {"e": 1}, "f": 1234567890123456789}
{"a": 1, "b": 1.5, "c": 3, "d": {"e": 2}, "f": 2}"#;
        let guessed = json_guess(Head { bytes: text, all: true }).unwrap().unwrap();
        let kinds: Vec<_> = guessed.fields().iter().map(|f| f.data_type().to_string()).collect();
        assert_eq!(
            (&kinds[..3], &kinds[4]),
            (&["Utf8", "Utf8", "Float64"].map(str::to_owned)[..], &"Int64".to_owned())
        );
        let written = json_strings(Head { bytes: text, all: true }).unwrap().unwrap();
        assert_eq!(written.field(3).data_type().to_string(), r#"Struct("e": Utf8)"#);
    }

    #[test]
    fn a_line_that_is_no_json_is_named() {
        for broken in ["{\"a\": ", "[1]", "{\"a\": 1e400}"] {
            let text = format!("{{\"a\": 1}}\n\n{{\"a\": 2}}\n{broken}\n{{\"a\": 4}}\n");
            let error = json_guess(Head { bytes: text.as_bytes(), all: true }).unwrap_err();
            assert!(error.row == 2 && error.reason.to_string().contains("line 4 of the file: not"), "{error:?}");
        }
    }

    #[test]
    fn json_columns_that_are_not_alike_in_all_rows() {
        let text = br#"{"a": 1, "b": {}, "c": [1], "d": [{"x": 1}], "e": null, "f": "\ud800"}
{"a": [1], "b": "x", "c": {"x": 1}, "d": [2], "e": [1], "f": 1}"#;
        for guess in [json_guess, json_strings] {
            let schema = guess(Head { bytes: text, all: true }).unwrap().unwrap();
            let mixed: Vec<_> = schema.fields().iter().map(|f| f.data_type() == &types::mixed()).collect();
            assert_eq!(mixed, [true, true, true, true, false, false]);
        }
    }

    #[test]
    fn json_types() {
        let text = br#"{"a": 1, "b": null, "c": ["x"], "d": [], "f": [null, [1], []], "g": {"h": [null, {"x": 1}]}}
{"a": 1.5, "c": [], "e": "late", "f": null}
{"a": cut"#;
        let schema = with_items(&json_guess(Head { bytes: text, all: false }).unwrap().unwrap());
        let (utf8, words) = (DataType::Utf8, super::types::words());
        let list = |item: DataType| DataType::List(Arc::new(Field::new_list_field(item, true)));
        let object = |name: &str, kind: DataType| DataType::Struct(vec![Field::new(name, kind, true)].into());
        let expected = [
            ("a", DataType::Float64),
            ("b", DataType::Null),
            ("c", words.clone()),
            ("d", words),
            ("f", list(list(DataType::Int64))),
            ("g", object("h", list(object("x", DataType::Int64)))),
            ("e", utf8),
        ];
        assert_eq!(shown(&schema), expected.map(|(n, t)| (n.to_owned(), t)));
    }
}
