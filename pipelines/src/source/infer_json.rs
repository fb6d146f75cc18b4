//! Infers the columns and types of lines of JSON, for jobs and for SQL.
//!
//! [`Inference`] takes lines in pieces and keeps types only, so it can read a file of any size.

use std::collections::{BTreeMap, HashMap};

use arrow::datatypes::{DataType, Field, Schema};
use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::{
    escapes::Escapes,
    json_array::Shape,
    lossless::is_double,
    reason::{Broken, own},
    types,
};

/// Who reads the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Reader {
    /// A job: columns, and keys in objects, are in the order in which they are first seen, and those of one row by name.
    /// Outputs of earlier versions have this order, so their jobs can be resumed. Numbers that no float holds stay as
    /// they are written.
    #[default]
    Job,
    /// A query: columns and keys are in the order of the file, and numbers stay numbers.
    Query,
}

/// What is known of the values of some lines.
#[derive(Debug, Default)]
pub(crate) struct Inference {
    reader: Reader,
    /// Whether the lines are the elements of an array.
    shape: Shape,
    columns: Keys,
    /// Objects so far.
    rows: usize,
    /// Line ends so far.
    lines: u64,
    max_rows: Option<usize>,
}

impl Inference {
    /// Infers from the first `max_rows` objects; from all for `None`.
    pub(crate) fn new(reader: Reader, shape: Shape, max_rows: Option<usize>) -> Self {
        Self { reader, shape, max_rows, ..Self::default() }
    }

    /// Whether further lines are not looked at.
    pub(crate) fn is_full(&self) -> bool {
        self.max_rows.is_some_and(|rows| self.rows >= rows)
    }

    /// Objects so far.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Takes complete lines.
    ///
    /// # Errors
    /// The row of the first line that is not a JSON object, and why.
    pub(crate) fn add(&mut self, lines: &[u8]) -> Result<(), Broken> {
        for line in Escapes::rewritten(lines).split_inclusive(|&byte| byte == b'\n') {
            if self.is_full() {
                break;
            }
            let before = self.lines;
            self.lines += u64::from(line.ends_with(b"\n"));
            if line.trim_ascii().is_empty() {
                continue;
            }
            let row = self.rows as u64;
            self.add_row(line).map_err(|reason| {
                let reason = own(format!("Json error: {}: {reason}", self.shape.place(row, before)));
                Broken { row, reason }
            })?;
            self.rows += 1;
        }
        Ok(())
    }

    fn add_row(&mut self, line: &[u8]) -> Result<(), String> {
        let line = std::str::from_utf8(line.trim_ascii_end())
            .map_err(|e| format!("not UTF-8: invalid at byte {} of the {}", e.valid_up_to(), self.shape.unit()))?;
        let mut found = Found::default();
        let mut json = serde_json::Deserializer::from_str(line);
        // Another value than an object is parsed all the same, so that what is not valid JSON is said first.
        let mut other = Kind::Null;
        let row = Value { kind: &mut other, keys: Some(&mut self.columns), found: &mut found };
        let parsed = row.deserialize(&mut json).and_then(|()| json.end());
        parsed.map_err(|e| {
            let reason = e.to_string().replace(" at line 1 column", " at byte");
            // A line end in a string was made one.
            let reason = if self.shape.is_array() {
                reason.replace("invalid escape", "a line end or an invalid escape in a string")
            } else {
                reason
            };
            format!("not valid JSON: {reason} of the {}", self.shape.unit())
        })?;
        if !line.trim_ascii_start().starts_with('{') {
            return Err("not a JSON object".to_owned());
        }
        if found.floats && self.reader == Reader::Job {
            self.mark_lossy(line);
        }
        Ok(())
    }

    /// Marks the columns with a number, at any depth, that a float does not represent exactly.
    fn mark_lossy(&mut self, line: &str) {
        let Ok(row) = serde_json::from_str::<BTreeMap<String, &RawValue>>(line) else { return };
        for (name, _) in row.into_iter().filter(|(_, value)| has_lossy_number(value.get())) {
            let place = self.columns.place(&name, 0);
            self.columns.list[place].lossy = true;
        }
    }

    /// The columns with types that hold all values. For a job, a column with a number that no float represents exactly is
    /// read as strings. A query that does not use a column whose values no type holds can be answered, so it is one of
    /// strings.
    pub(crate) fn schema(&self) -> Schema {
        self.schema_of(|column, kind| match self.reader {
            // Columns of integers that fit are Int64, which is exact, and stay so.
            Reader::Job if column.lossy => types::floats_as_written(&kind),
            Reader::Query if kind == types::mixed() => DataType::Utf8,
            _ => kind,
        })
    }

    /// The columns with strings for all single values.
    pub(crate) fn strings(&self) -> Schema {
        self.schema_of(|_, kind| types::as_written(&kind))
    }

    fn schema_of(&self, kind: impl Fn(&Column, DataType) -> DataType) -> Schema {
        let inferred = |column: &Column| kind(column, column.kind.data_type(self.reader));
        let field = |column: &Column| Field::new(&column.name, inferred(column), true);
        Schema::new(self.columns.sorted(self.reader).into_iter().map(field).collect::<Vec<_>>())
    }
}

/// The keys of objects.
#[derive(Debug, Default)]
struct Keys {
    list: Vec<Column>,
    places: HashMap<String, usize>,
    /// Number of objects with keys of this list.
    objects: usize,
}

#[derive(Debug)]
struct Column {
    name: String,
    /// The object in which it was first seen.
    object: usize,
    kind: Kind,
    /// Of a column of the file: a number in it is not exact as a float.
    lossy: bool,
}

impl Keys {
    /// The place of a key; `expected` if it is the one there, as rows are mostly alike.
    fn place(&mut self, name: &str, expected: usize) -> usize {
        if self.list.get(expected).is_some_and(|there| there.name == name) {
            return expected;
        }
        if let Some(place) = self.places.get(name) {
            return *place;
        }
        self.list.push(Column { name: name.to_owned(), object: self.objects, kind: Kind::Null, lossy: false });
        self.places.insert(name.to_owned(), self.list.len() - 1);
        self.list.len() - 1
    }

    /// The keys in the order in which they are first seen; for a job, those of one object by name.
    fn sorted(&self, reader: Reader) -> Vec<&Column> {
        let mut sorted: Vec<&Column> = self.list.iter().collect();
        if reader == Reader::Job {
            sorted.sort_unstable_by(|a, b| (a.object, &a.name).cmp(&(b.object, &b.name)));
        }
        sorted
    }
}

/// What the values of a column or key have in common.
#[derive(Debug, Default)]
enum Kind {
    /// No value yet.
    #[default]
    Null,
    Boolean,
    Integer,
    Float,
    /// Strings, or single values of several kinds.
    String,
    List(Box<Self>),
    Object(Keys),
    /// Single values in some rows, lists or objects in others.
    Mixed,
}

impl Kind {
    /// Adds a single value.
    fn add(&mut self, value: Self) {
        *self = match (std::mem::take(self), value) {
            (Self::Null, value) => value,
            (Self::Boolean, Self::Boolean) => Self::Boolean,
            (Self::Integer, Self::Integer) => Self::Integer,
            (Self::Integer | Self::Float, Self::Integer | Self::Float) => Self::Float,
            (Self::List(_) | Self::Object(_) | Self::Mixed, _) => Self::Mixed,
            _ => Self::String,
        };
    }

    /// The item of a list; `None` when there are other values.
    fn item(&mut self) -> Option<&mut Self> {
        match self {
            Self::Null => *self = Self::List(Box::default()),
            Self::List(_) => {}
            _ => *self = Self::Mixed,
        }
        if let Self::List(item) = self { Some(item) } else { None }
    }

    /// The keys of an object; `None` when there are other values.
    fn keys(&mut self) -> Option<&mut Keys> {
        match self {
            Self::Null => *self = Self::Object(Keys::default()),
            Self::Object(_) => {}
            _ => *self = Self::Mixed,
        }
        if let Self::Object(keys) = self { Some(keys) } else { None }
    }

    fn is_mixed(&self) -> bool {
        match self {
            Self::Mixed => true,
            Self::List(item) => item.is_mixed(),
            Self::Object(keys) => keys.list.iter().any(|key| key.kind.is_mixed()),
            _ => false,
        }
    }

    /// The type; [`types::mixed`] if that of some value inside is not known.
    fn data_type(&self, reader: Reader) -> DataType {
        let field = |key: &Column| Field::new(&key.name, key.kind.data_type(reader), true);
        match self {
            kind if kind.is_mixed() => types::mixed(),
            Self::Null | Self::Mixed => DataType::Null,
            Self::Boolean => DataType::Boolean,
            Self::Integer => DataType::Int64,
            Self::Float => DataType::Float64,
            Self::String => DataType::Utf8,
            Self::List(item) => DataType::List(Field::new_list_field(item.data_type(reader), true).into()),
            Self::Object(keys) => DataType::Struct(keys.sorted(reader).into_iter().map(field).collect()),
        }
    }
}

/// What was found in a row beside its types.
#[derive(Debug, Default)]
struct Found {
    /// A number that is no integer of 64 bits.
    floats: bool,
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

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E>(self, name: &str) -> Result<usize, E> {
        Ok(self.0.place(name, self.1))
    }
}

/// Adds a value to what is known of a column or key.
struct Value<'k> {
    kind: &'k mut Kind,
    /// Where the keys of an object belong, if not to `kind`.
    keys: Option<&'k mut Keys>,
    found: &'k mut Found,
}

impl<'de> DeserializeSeed<'de> for Value<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Value<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        self.kind.add(Kind::Boolean);
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        self.kind.add(Kind::Integer);
        Ok(())
    }

    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        let fits = i64::try_from(value).is_ok();
        self.found.floats |= !fits;
        self.kind.add(if fits { Kind::Integer } else { Kind::Float });
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        self.found.floats = true;
        self.kind.add(Kind::Float);
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        self.kind.add(Kind::String);
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let mut nowhere = Kind::Null;
        let item = self.kind.item().unwrap_or(&mut nowhere);
        while items.next_element_seed(Value { kind: item, keys: None, found: self.found })?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        let mut nowhere = Keys::default();
        let keys = self.keys.or_else(|| self.kind.keys()).unwrap_or(&mut nowhere);
        keys.objects += 1;
        let mut expected = 0;
        while let Some(place) = members.next_key_seed(Key(keys, expected))? {
            members.next_value_seed(Value { kind: &mut keys.list[place].kind, keys: None, found: self.found })?;
            expected = place + 1;
        }
        Ok(())
    }
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::source::schema::with_items;

    fn inference(lines: &str) -> Result<Inference, Broken> {
        inferred_for(Reader::Job, lines)
    }

    fn inferred_for(reader: Reader, lines: &str) -> Result<Inference, Broken> {
        let mut inference = Inference::new(reader, Shape::default(), None);
        inference.add(lines.as_bytes())?;
        Ok(inference)
    }

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
        let nested = r#"{"v": {"id": 18446744073709551615, "n": 1, "none": null, "empty": []}}"#;
        let schema = with_items(&inference(nested).unwrap().schema());
        let DataType::Struct(fields) = schema.field(0).data_type().clone() else { panic!("{schema}") };
        let kind = |name: &str| fields.iter().find(|field| field.name() == name).unwrap().data_type().clone();
        assert_eq!(["id", "n", "none"].map(kind), [DataType::Utf8, DataType::Int64, DataType::Utf8]);
        assert_eq!(kind("empty"), types::words());
    }

    #[test]
    fn integers_that_no_number_holds_stay_as_written() {
        let text = r#"{"a": 18446744073709551615, "b": 9007199254740993, "c": 1.5, "d": {"e": 1}, "f": 1234567890123456789}
{"a": 1, "b": 1.5, "c": 3, "d": {"e": 2}, "f": 2}"#;
        let inference = inference(text).unwrap();
        let inferred = inference.schema();
        let kinds: Vec<_> = inferred.fields().iter().map(|f| f.data_type().to_string()).collect();
        assert_eq!(
            (&kinds[..3], &kinds[4]),
            (&["Utf8", "Utf8", "Float64"].map(str::to_owned)[..], &"Int64".to_owned())
        );
        let written = inference.strings();
        assert_eq!(written.field(3).data_type().to_string(), r#"Struct("e": Utf8)"#);
    }

    #[test]
    fn a_line_that_is_no_json_is_named() {
        for broken in ["{\"a\": ", "[1]", "{\"a\": 1e400}"] {
            let text = format!("{{\"a\": 1}}\n\n{{\"a\": 2}}\n{broken}\n{{\"a\": 4}}\n");
            let error = inference(&text).unwrap_err();
            assert!(error.row == 2 && error.reason.to_string().contains("line 4 of the file: not"), "{error:?}");
        }
    }

    #[test]
    fn json_columns_that_are_not_alike_in_all_rows() {
        let text = r#"{"a": 1, "b": {}, "c": [1], "d": [{"x": 1}], "e": null, "f": "\ud800"}
{"a": [1], "b": "x", "c": {"x": 1}, "d": [2], "e": [1], "f": 1}"#;
        let inference = inference(text).unwrap();
        for schema in [inference.schema(), inference.strings()] {
            let mixed: Vec<_> = schema.fields().iter().map(|f| f.data_type() == &types::mixed()).collect();
            assert_eq!(mixed, [true, true, true, true, false, false]);
        }
    }

    #[test]
    fn json_types() {
        let text = r#"{"a": 1, "b": null, "c": ["x"], "d": [], "f": [null, [1], []], "g": {"h": [null, {"x": 1}]}}
{"a": 1.5, "c": [], "e": "late", "f": null}
"#;
        let schema = with_items(&inference(text).unwrap().schema());
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

    /// Expected by hand: keys by row and then by name, at any depth, whatever the pieces.
    #[test]
    fn pieces_and_order_of_keys() {
        let text = "{\"z\": 1, \"a\": {\"y\": [1], \"b\": null}}\n\n{\"m\": true, \"a\": {\"c\": 1, \"y\": [2.5]}}\n";
        let mut pieces = Inference::new(Reader::Job, Shape::default(), None);
        text.split_inclusive('\n').for_each(|piece| pieces.add(piece.as_bytes()).unwrap());
        assert_eq!(pieces.schema(), inference(text).unwrap().schema());
        let shown = shown(&pieces.schema());
        assert_eq!(shown.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["a", "z", "m"]);
        let DataType::Struct(fields) = &shown[0].1 else { panic!("{shown:?}") };
        let inner: Vec<_> = fields.iter().map(|field| (field.name().as_str(), field.data_type().to_string())).collect();
        assert_eq!(inner, [("b", "Null".to_owned()), ("y", "List(Float64)".to_owned()), ("c", "Int64".to_owned())]);
        let mut first = Inference::new(Reader::Job, Shape::default(), Some(1));
        first.add(text.as_bytes()).unwrap();
        assert!(first.is_full() && first.rows() == 1 && first.schema().fields().len() == 2);
    }

    /// Expected: the types of Arrow's inference (`infer_json_schema_from_iterator`), in the order of the file.
    #[test]
    fn a_query_has_the_order_of_the_file_and_numbers() {
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
        let schema = |lines: &str| inferred_for(Reader::Query, lines).unwrap().schema();
        let shown = |schema: Schema| -> Vec<String> {
            schema.fields().iter().map(|field| format!("{}: {}", field.name(), field.data_type())).collect()
        };
        assert_eq!(shown(schema(lines)), expected);
        // Single values of several kinds, and values that no type holds. Expected by hand.
        let unlike = "{\"a\": 1, \"b\": {\"y\": 1, \"x\": 1}, \"c\": [1], \"d\": {\"e\": true}}\n\
                      {\"a\": \"x\", \"b\": {\"x\": 2.5}, \"c\": 2, \"d\": {\"e\": 1}}";
        let expected = ["a: Utf8", "b: Struct(\"y\": Int64, \"x\": Float64)", "c: Utf8", "d: Struct(\"e\": Utf8)"];
        assert_eq!(shown(schema(unlike)), expected);
    }
}
