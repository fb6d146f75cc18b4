//! The values of enriched messages.

use std::{io::Write, str::FromStr};

use arrow::{
    array::{Array, ArrayRef, AsArray, RecordBatch},
    datatypes::{DataType, Float32Type},
    error::ArrowError,
    ipc::writer::StreamWriter,
};
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::source::escapes::Escapes;

/// How a row becomes the value of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueEncoding {
    /// The JSON message with the columns of the output added; for other formats, an object of all columns.
    Json,
    /// The vector as little-endian float32. The other columns are in the headers.
    Raw,
    /// An Arrow IPC stream of one row with all columns.
    Arrow,
}

impl ValueEncoding {
    /// The names of all encodings.
    pub const WORDS: &'static [&'static str] = &["json", "raw", "arrow"];
}

impl FromStr for ValueEncoding {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "json" => Ok(Self::Json),
            "raw" => Ok(Self::Raw),
            "arrow" => Ok(Self::Arrow),
            _ => Err(format!("{text:?} is no encoding; possible are json, raw, arrow")),
        }
    }
}

/// A header of an enriched message.
pub(super) type Header = (String, Option<Vec<u8>>);

/// The JSON object of each row, one after the other.
///
/// # Errors
/// [`ArrowError`] when a column has no form in JSON.
fn objects(rows: &RecordBatch) -> Result<Vec<Vec<u8>>, ArrowError> {
    let mut writer = arrow::json::WriterBuilder::new()
        .with_explicit_nulls(true)
        .build::<_, arrow::json::writer::LineDelimited>(Vec::new());
    writer.write(rows)?;
    writer.finish()?;
    Ok(writer.into_inner().split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).map(<[u8]>::to_vec).collect())
}

/// Values of rows in JSON: `added` are the columns of the output, and `originals` the JSON objects of the messages, where
/// they are JSON. A member of the message that has the name of an added column is replaced.
///
/// # Errors
/// [`ArrowError`] when a column has no form in JSON.
pub(super) fn json(added: &RecordBatch, originals: &[Option<&[u8]>]) -> Result<Vec<Vec<u8>>, ArrowError> {
    let names: Vec<&str> = added.schema_ref().fields().iter().map(|field| field.name().as_str()).collect();
    let objects = objects(added)?;
    Ok(objects.into_iter().zip(originals).map(|(object, original)| spliced(object, *original, &names)).collect())
}

/// The members of `original` that `object` lacks, then those of `object`. Escapes are replaced as for decoding, which takes what
/// serde_json rejects.
fn spliced(object: Vec<u8>, original: Option<&[u8]>, names: &[&str]) -> Vec<u8> {
    let original = original.map(Escapes::rewritten);
    let original = original.as_deref().unwrap_or_default();
    let Some(members) = members(original, names) else { return object };
    let mut value = Vec::with_capacity(object.len() + original.len());
    value.push(b'{');
    for (name, member) in &members {
        // Writing to memory cannot fail, nor can a string be no JSON.
        let _ = serde_json::to_writer(&mut value, name);
        let _ = write!(value, ":{},", member.get());
    }
    value.extend_from_slice(&object[1..]);
    value
}

/// The members of a JSON object whose names are not among `names`; `None` if it is no object.
fn members<'m>(object: &'m [u8], names: &[&str]) -> Option<Vec<(String, &'m RawValue)>> {
    struct Members<'n>(&'n [&'n str]);
    impl<'de> Visitor<'de> for Members<'_> {
        type Value = Vec<(String, &'de RawValue)>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut members = Vec::new();
            while let Some((name, value)) = map.next_entry::<String, &RawValue>()? {
                if !self.0.contains(&name.as_str()) {
                    members.push((name, value));
                }
            }
            Ok(members)
        }
    }
    serde_json::Deserializer::from_slice(object).deserialize_map(Members(names)).ok()
}

/// The vectors as little-endian numbers; `None` for rows without a vector.
pub(super) fn raw(vectors: &ArrayRef) -> Vec<Option<Vec<u8>>> {
    let row = |index: usize| -> Option<Vec<u8>> {
        let values = match vectors.data_type() {
            _ if vectors.is_null(index) => return None,
            DataType::FixedSizeList(..) => vectors.as_fixed_size_list().value(index),
            _ => vectors.as_list::<i32>().value(index),
        };
        let numbers = values.as_primitive::<Float32Type>().values();
        Some(numbers.iter().flat_map(|number| number.to_le_bytes()).collect())
    };
    (0..vectors.len()).map(row).collect()
}

/// The columns of each row as headers: strings as they are, other types in JSON. NULL is a header without a value.
///
/// # Errors
/// [`ArrowError`] when a column has no form in JSON.
pub(super) fn headers(columns: &RecordBatch) -> Result<Vec<Vec<Header>>, ArrowError> {
    let all = objects(columns)?;
    Ok(all.iter().map(|object| members(object, &[]).unwrap_or_default().into_iter().map(header).collect()).collect())
}

fn header((name, value): (String, &RawValue)) -> Header {
    let value = match value.get() {
        "null" => None,
        text => {
            Some(serde_json::from_str::<String>(text).map_or_else(|_| text.as_bytes().to_vec(), String::into_bytes))
        }
    };
    (format!("elmo.{name}"), value)
}

/// An Arrow IPC stream for each row.
///
/// # Errors
/// [`ArrowError`] when a column cannot be written.
pub(super) fn arrow(rows: &RecordBatch) -> Result<Vec<Vec<u8>>, ArrowError> {
    let stream = |index: usize| -> Result<Vec<u8>, ArrowError> {
        let mut writer = StreamWriter::try_new(Vec::new(), &rows.schema())?;
        writer.write(&rows.slice(index, 1))?;
        writer.into_inner()
    };
    (0..rows.num_rows()).map(stream).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values are written by hand; Python reads `json.loads` of both sides alike, but for the half of a pair.
    #[test]
    fn a_message_keeps_its_members() {
        let added = br#"{"error":null,"n":2}"#;
        for (original, expected) in [
            (r#"{"n": 1, "a" : {"b": [1.50]}}"#, r#"{"a":{"b": [1.50]},"error":null,"n":2}"#),
            (r#"{}"#, r#"{"error":null,"n":2}"#),
            (r#"["no object"]"#, r#"{"error":null,"n":2}"#),
            // Half of a pair in a name and in a value, a pair, and a name that only its escape hides.
            (r#"{"\ud800":1,"text":"a\udc00"}"#, "{\"\u{fffd}\":1,\"text\":\"a\u{fffd}\",\"error\":null,\"n\":2}"),
            (r#"{"\ud83d\ude00":1,"\u006e":3}"#, "{\"\u{1f600}\":1,\"error\":null,\"n\":2}"),
        ] {
            let value = spliced(added.to_vec(), Some(original.as_bytes()), &["error", "n"]);
            assert_eq!(String::from_utf8(value).unwrap(), expected, "{original}");
        }
        assert_eq!(spliced(added.to_vec(), None, &["error", "n"]), added);
    }
}
