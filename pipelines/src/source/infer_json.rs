//! Infers the schema of lines of JSON.

use std::collections::{BTreeMap, HashMap, HashSet};

use arrow::{
    datatypes::{DataType, Field, FieldRef, Schema},
    json,
};
use serde_json::{Map, Value, value::RawValue};

use super::{
    escapes::Escapes,
    lossless::is_double,
    reason::{Broken, own},
    schema::{Head, INFERENCE_ROWS},
    types,
};

/// The schema with strings for all single values.
pub(super) fn strings(head: Head<'_>) -> Result<Option<Schema>, Broken> {
    let written = |field: &FieldRef| Field::clone(field).with_data_type(types::as_written(field.data_type()));
    let types = types_of(&head)?;
    Ok(types.map(|schema| Schema::new(schema.fields().iter().map(written).collect::<Vec<_>>())))
}

/// The types of the columns. A column with a number that no float represents exactly is read as strings; a later one is an
/// error with its row.
pub(super) fn inferred(head: Head<'_>) -> Result<Option<Schema>, Broken> {
    let Some(inferred) = types_of(&head)? else { return Ok(None) };
    let lossy = lossy_numbers(head.bytes);
    // Columns of integers that fit are Int64, which is exact, and stay so.
    let fields = inferred.fields().iter().map(|field| match lossy.contains(field.name()) {
        true => Field::new(field.name(), types::floats_as_written(field.data_type()), true),
        false => Field::clone(field),
    });
    Ok(Some(Schema::new(fields.collect::<Vec<_>>())))
}

/// Columns with a number, at any depth, that a float does not represent exactly.
fn lossy_numbers(bytes: &[u8]) -> HashSet<String> {
    let mut lossy = HashSet::new();
    for line in bytes.split(|&b| b == b'\n').take(INFERENCE_ROWS) {
        let Ok(row) = serde_json::from_slice::<BTreeMap<String, &RawValue>>(line) else { continue };
        lossy.extend(row.into_iter().filter(|(_, value)| has_lossy_number(value.get())).map(|(name, _)| name));
    }
    lossy
}

/// Whether a float does not represent some number of this JSON exactly. Digits in strings do not count.
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

/// Length of a JSON string after its first quotation mark, including the last one.
fn string_length(string: &str) -> usize {
    let mut escaped = false;
    let end = string.bytes().position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    });
    end.map_or(string.len(), |end| end + 1)
}

fn types_of(head: &Head<'_>) -> Result<Option<Schema>, Broken> {
    let end = match head.bytes.iter().rposition(|&b| b == b'\n') {
        _ if head.all => head.bytes.len(),
        Some(end) => end,
        None => return Ok(None),
    };
    let columns = columns(&Escapes::rewritten(&head.bytes[..end]))?;
    let fields = columns.into_iter().map(|(name, values)| Field::new(&name, type_of(&name, values), true));
    Ok(Some(Schema::new(fields.collect::<Vec<_>>())))
}

/// The values of each column; columns in the order in which they are first seen.
fn columns(bytes: &[u8]) -> Result<Vec<(String, Vec<Value>)>, Broken> {
    let (mut columns, mut places) = (Vec::<(String, Vec<Value>)>::new(), HashMap::new());
    let lines = bytes.split(|&b| b == b'\n').enumerate().filter(|(_, line)| !line.trim_ascii().is_empty());
    for (row, (line, text)) in lines.take(INFERENCE_ROWS).enumerate() {
        for (name, value) in parse_row(text).map_err(|reason| Broken {
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

/// Parses a line as an object.
fn parse_row(line: &[u8]) -> Result<Map<String, Value>, String> {
    let line =
        std::str::from_utf8(line).map_err(|e| format!("not UTF-8: invalid at byte {} of the line", e.valid_up_to()))?;
    match serde_json::from_str(line) {
        Ok(Value::Object(row)) => Ok(row),
        Ok(_) => Err("not a JSON object".to_owned()),
        // The position is within the line.
        Err(e) => Err(format!("not valid JSON: {}", e.to_string().replace(" at line 1 column", " at byte"))),
    }
}

/// The type of a column with these values, [`types::mixed`] when no type holds them.
fn type_of(name: &str, values: Vec<Value>) -> DataType {
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
    let inferred = json::reader::infer_json_schema_from_iterator(rows);
    inferred.ok().and_then(|schema| schema.fields().first().map(|f| f.data_type().clone())).unwrap_or(types::mixed())
}

/// A value without the nulls in its lists, which Arrow's inference rejects.
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::source::schema::with_items;

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
        let schema = with_items(&inferred(Head { bytes: nested, all: true }).unwrap().unwrap());
        let DataType::Struct(fields) = schema.field(0).data_type().clone() else { panic!("{schema}") };
        let kind = |name: &str| fields.iter().find(|field| field.name() == name).unwrap().data_type().clone();
        assert_eq!(["id", "n", "none"].map(kind), [DataType::Utf8, DataType::Int64, DataType::Utf8]);
        assert_eq!(kind("empty"), types::words());
    }

    #[test]
    fn integers_that_no_number_holds_stay_as_written() {
        let text =
            br#"{"a": 18446744073709551615, "b": 9007199254740993, "c": 1.5, "d": {"e": 1}, "f": 1234567890123456789}
{"a": 1, "b": 1.5, "c": 3, "d": {"e": 2}, "f": 2}"#;
        let inferred = inferred(Head { bytes: text, all: true }).unwrap().unwrap();
        let kinds: Vec<_> = inferred.fields().iter().map(|f| f.data_type().to_string()).collect();
        assert_eq!(
            (&kinds[..3], &kinds[4]),
            (&["Utf8", "Utf8", "Float64"].map(str::to_owned)[..], &"Int64".to_owned())
        );
        let written = strings(Head { bytes: text, all: true }).unwrap().unwrap();
        assert_eq!(written.field(3).data_type().to_string(), r#"Struct("e": Utf8)"#);
    }

    #[test]
    fn a_line_that_is_no_json_is_named() {
        for broken in ["{\"a\": ", "[1]", "{\"a\": 1e400}"] {
            let text = format!("{{\"a\": 1}}\n\n{{\"a\": 2}}\n{broken}\n{{\"a\": 4}}\n");
            let error = inferred(Head { bytes: text.as_bytes(), all: true }).unwrap_err();
            assert!(error.row == 2 && error.reason.to_string().contains("line 4 of the file: not"), "{error:?}");
        }
    }

    #[test]
    fn json_columns_that_are_not_alike_in_all_rows() {
        let text = br#"{"a": 1, "b": {}, "c": [1], "d": [{"x": 1}], "e": null, "f": "\ud800"}
{"a": [1], "b": "x", "c": {"x": 1}, "d": [2], "e": [1], "f": 1}"#;
        for infer in [inferred, strings] {
            let schema = infer(Head { bytes: text, all: true }).unwrap().unwrap();
            let mixed: Vec<_> = schema.fields().iter().map(|f| f.data_type() == &types::mixed()).collect();
            assert_eq!(mixed, [true, true, true, true, false, false]);
        }
    }

    #[test]
    fn json_types() {
        let text = br#"{"a": 1, "b": null, "c": ["x"], "d": [], "f": [null, [1], []], "g": {"h": [null, {"x": 1}]}}
{"a": 1.5, "c": [], "e": "late", "f": null}
{"a": cut"#;
        let schema = with_items(&inferred(Head { bytes: text, all: false }).unwrap().unwrap());
        let (utf8, words) = (DataType::Utf8, types::words());
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
