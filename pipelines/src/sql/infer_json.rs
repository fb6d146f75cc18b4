//! Infers the columns of lines of JSON, over all lines of a file: a key that only a late row has is a column, too.
//!
//! No values are built: a visitor adds the kind of each value to what is known of its column.

use std::{
    collections::HashMap,
    fmt,
    io::{BufRead, Read},
};

use arrow::datatypes::{DataType, Field, Schema};
use datafusion::common::{DataFusionError, Result};
use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use super::{error::external, plain_text::Broken};

/// Maximum bytes of a line.
const MAX_LINE_BYTES: u64 = 256 << 20;

/// The columns of the first `max_rows` rows, in the order in which they are first seen.
pub(super) fn infer(mut lines: impl BufRead, max_rows: u64) -> Result<Schema> {
    let (mut columns, mut line, mut rows, mut number) = (Keys::default(), Vec::new(), 0, 0);
    while rows < max_rows {
        line.clear();
        let read = (&mut lines).take(MAX_LINE_BYTES).read_until(b'\n', &mut line).map_err(DataFusionError::IoError)?;
        if read == 0 {
            break;
        }
        number += 1;
        // Leading blanks stay, because errors name a byte of the line.
        let text = line.trim_ascii_end();
        if text.is_empty() {
            continue;
        }
        add(&mut columns, text).map_err(|reason| {
            external(Broken { row: rows, reason: format!("Json error: line {number} of the file: {reason}") })
        })?;
        rows += 1;
    }
    Ok(Schema::new(columns.fields()))
}

/// Adds a line with one object.
fn add(columns: &mut Keys, line: &[u8]) -> Result<(), String> {
    if !line.trim_ascii_start().starts_with(b"{") {
        return Err(match serde_json::from_slice::<serde::de::IgnoredAny>(line) {
            Ok(_) => "not a JSON object".to_owned(),
            Err(error) => not_json(&error),
        });
    }
    let mut json = serde_json::Deserializer::from_slice(line);
    let added = json.deserialize_map(Row(columns)).and_then(|()| json.end());
    added.map_err(|error| not_json(&error))
}

/// The position is within the line.
fn not_json(error: &serde_json::Error) -> String {
    format!("not valid JSON: {}", error.to_string().replace(" at line 1 column", " at byte"))
}

/// The keys of objects.
#[derive(Debug, Default)]
struct Keys {
    list: Vec<(String, Kind)>,
    places: HashMap<String, usize>,
}

impl Keys {
    /// The place of a key; `expected` if it is the one there, as rows are mostly alike.
    fn place(&mut self, name: &str, expected: usize) -> usize {
        if self.list.get(expected).is_some_and(|(there, _)| there == name) {
            return expected;
        }
        if let Some(place) = self.places.get(name) {
            return *place;
        }
        self.list.push((name.to_owned(), Kind::Null));
        self.places.insert(name.to_owned(), self.list.len() - 1);
        self.list.len() - 1
    }

    fn fields(&self) -> Vec<Field> {
        self.list.iter().map(|(name, kind)| Field::new(name, kind.data_type(), true)).collect()
    }
}

/// What the values of a column or key are. The first kind counts if there are several, except for numbers: the scan reports
/// the first row with another.
#[derive(Debug, Default)]
enum Kind {
    /// No value yet.
    #[default]
    Null,
    Boolean,
    Integer,
    Float,
    String,
    List(Box<Self>),
    Object(Keys),
}

impl Kind {
    fn add(&mut self, value: Self) {
        match (&self, &value) {
            (Self::Null, _) | (Self::Integer, Self::Float) => *self = value,
            _ => {}
        }
    }

    fn data_type(&self) -> DataType {
        match self {
            Self::Null => DataType::Null,
            Self::Boolean => DataType::Boolean,
            Self::Integer => DataType::Int64,
            Self::Float => DataType::Float64,
            Self::String => DataType::Utf8,
            Self::List(item) => DataType::List(Field::new_list_field(item.data_type(), true).into()),
            Self::Object(keys) => DataType::Struct(keys.fields().into()),
        }
    }
}

/// The keys of an object, and their values.
struct Row<'k>(&'k mut Keys);

impl<'de> Visitor<'de> for Row<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        let mut expected = 0;
        while let Some(place) = members.next_key_seed(Key(self.0, expected))? {
            members.next_value_seed(Value(&mut self.0.list[place].1))?;
            expected = place + 1;
        }
        Ok(())
    }
}

/// The place of a key, and the one where it is expected.
struct Key<'k>(&'k mut Keys, usize);

impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = usize;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<usize, D::Error> {
        json.deserialize_str(self)
    }
}

impl Visitor<'_> for Key<'_> {
    type Value = usize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E>(self, name: &str) -> Result<usize, E> {
        Ok(self.0.place(name, self.1))
    }
}

/// Adds a value.
struct Value<'k>(&'k mut Kind);

impl<'de> DeserializeSeed<'de> for Value<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Value<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        self.0.add(Kind::Boolean);
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        self.0.add(Kind::Integer);
        Ok(())
    }

    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        self.0.add(if i64::try_from(value).is_ok() { Kind::Integer } else { Kind::Float });
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        self.0.add(Kind::Float);
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        self.0.add(Kind::String);
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        self.0.add(Kind::List(Box::default()));
        let mut nowhere = Kind::Null;
        let item = if let Kind::List(item) = self.0 { item } else { &mut nowhere };
        while items.next_element_seed(Value(item))?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, members: A) -> Result<(), A::Error> {
        self.0.add(Kind::Object(Keys::default()));
        let mut nowhere = Keys::default();
        let keys = if let Kind::Object(keys) = self.0 { keys } else { &mut nowhere };
        Row(keys).visit_map(members)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(lines: &str) -> Vec<String> {
        let schema = infer(lines.as_bytes(), u64::MAX).unwrap();
        schema.fields().iter().map(|field| format!("{}: {}", field.name(), field.data_type())).collect()
    }

    /// Expected: the types of Arrow's inference (`infer_json_schema_from_iterator`), in the order of the file.
    #[test]
    fn types_are_those_of_arrow() {
        let lines = r#"{"z": 1, "b": null, "c": ["x", null], "d": [], "g": {"h": [null, {"x": 1}]}, "n": 18446744073709551615}

{"z": 1.5, "c": [], "e": "late", "t": true, "m": [[1], [2.5]]}
"#;
        let expected = [
            "z: Float64",
            "b: Null",
            "c: List(Utf8)",
            "d: List(Null)",
            "g: Struct(\"h\": List(Struct(\"x\": Int64)))",
            "n: Float64",
            "e: Utf8",
            "t: Boolean",
            "m: List(List(Float64))",
        ];
        assert_eq!(shown(lines), expected);
    }

    #[test]
    fn the_first_kind_counts() {
        let lines =
            "{\"a\": 1, \"b\": {\"x\": 1}, \"c\": [1]}\n{\"a\": \"x\", \"b\": [1], \"c\": 2}\n{\"b\": {\"y\": 1}}";
        assert_eq!(shown(lines), ["a: Int64", "b: Struct(\"x\": Int64, \"y\": Int64)", "c: List(Int64)"]);
    }

    #[test]
    fn a_line_that_is_no_json_is_named() {
        for broken in ["{\"a\": ", "[1]", "{\"a\": 1e400}", "{\"a\": 1} {\"a\": 2}", "{'a': 1}"] {
            let text = format!("{{\"a\": 1}}\n\n{{\"a\": 2}}\n{broken}\n{{\"a\": 4}}\n");
            let error = infer(text.as_bytes(), u64::MAX).unwrap_err().to_string();
            assert!(error.contains("after row 2: Json error: line 4 of the file: not "), "{error}");
        }
        assert!(infer("{\"a\": 1}\n[1]".as_bytes(), 1).is_ok());
    }
}
