//! Schemas that messages were written with.

use std::collections::HashMap;

use arrow::error::ArrowError;
use arrow_avro::{
    reader::{Decoder, ReaderBuilder},
    schema::{AvroSchema, Fingerprint, FingerprintAlgorithm, SchemaStore},
};
use serde_json::{Value, json};

use crate::source::{contain::contain, reason::one_line};

/// The id by which the reader knows the only schema that it is given.
const ID: u32 = 1;
/// Confluent's framing with this id: what the reader expects before each datum.
pub(super) const FRAME: [u8; 5] = [0, 0, 0, 0, ID as u8];
/// Name of the only field of the record that a schema which is no record is wrapped in.
const WRAPPED: &str = "value";

/// A schema, ready to read the fields that are wanted.
#[derive(Debug)]
pub(super) struct WriterSchema {
    schema: AvroSchema,
    /// The fields that are read, by their places; `None`: all.
    projection: Option<Vec<usize>>,
    /// Whether the schema is no record, and became the only field of one. A record is encoded as its fields are, so the
    /// data are the same.
    pub(super) is_wrapped: bool,
}

impl WriterSchema {
    /// Prepares to read data of `schema`: the fields of a record in `wanted`, or all for `None`.
    ///
    /// # Errors
    /// Why the schema cannot be used.
    pub(super) fn new(mut schema: Value, wanted: Option<&[String]>) -> Result<Self, String> {
        normalize(&mut schema)?;
        let is_wrapped = schema.get("type").is_none_or(|kind| kind != "record");
        let wanted = wanted.filter(|_| !is_wrapped).and_then(|wanted| places(&schema, wanted));
        if is_wrapped {
            schema = json!({"type": "record", "name": "ElmoWrapped", "fields": [{"name": WRAPPED, "type": schema}]});
        }
        let schema = AvroSchema::new(schema.to_string());
        let mut of_wanted = Self { schema, projection: wanted, is_wrapped };
        if of_wanted.decoder(0).is_err() {
            // A type that is defined in a field which is not read may be mentioned in one which is.
            of_wanted.projection = None;
            of_wanted.decoder(0).map_err(|e| format!("cannot be used: {}", one_line(&e.to_string())))?;
        }
        Ok(of_wanted)
    }

    /// A decoder for at most `rows` data.
    pub(super) fn decoder(&self, rows: usize) -> Result<Decoder, ArrowError> {
        let build = || {
            let mut store = SchemaStore::new_with_type(FingerprintAlgorithm::Id);
            store.set(Fingerprint::Id(ID), self.schema.clone())?;
            // A full decoder would leave the rest of a message for the next batch.
            let builder = ReaderBuilder::new().with_batch_size(rows + 2).with_writer_schema_store(store);
            match &self.projection {
                Some(places) => builder.with_projection(places.clone()).build_decoder(),
                None => builder.build_decoder(),
            }
        };
        contain(build).unwrap_or_else(|| Err(ArrowError::SchemaError("the reader fails on it".to_owned())))
    }
}

/// The places of these fields of a record, in order; `None` if it has none of them.
fn places(record: &Value, wanted: &[String]) -> Option<Vec<usize>> {
    let fields = record.get("fields")?.as_array()?;
    let is_wanted = |field: &Value| wanted.iter().any(|name| field["name"] == **name);
    let places: Vec<usize> = (0..fields.len()).filter(|place| is_wanted(&fields[*place])).collect();
    (!places.is_empty()).then_some(places)
}

/// The fingerprint of a schema in the single-object encoding.
pub(super) fn fingerprint(schema: &str) -> Result<[u8; 8], ArrowError> {
    match AvroSchema::new(schema.to_owned()).fingerprint(FingerprintAlgorithm::Rabin)? {
        Fingerprint::Rabin(number) => Ok(number.to_le_bytes()),
        other => Err(ArrowError::SchemaError(format!("a fingerprint of another kind: {other:?}"))),
    }
}

/// Takes out what changes how strings are read, and refuses what makes small messages large.
fn normalize(schema: &mut Value) -> Result<(), String> {
    match schema {
        Value::Array(branches) => branches.iter_mut().try_for_each(normalize),
        Value::Object(parts) => {
            // The reader would make bytes of a string that is a UUID.
            if parts.get("logicalType").is_some_and(|kind| kind == "uuid") {
                parts.remove("logicalType");
            }
            // Each takes no byte, so a message of ten bytes may hold 2^62 of them.
            if parts.get("type").is_some_and(|kind| kind == "array")
                && parts.get("items").is_some_and(|items| items == "null")
            {
                return Err("has an array of nulls".to_owned());
            }
            let inner =
                parts.iter_mut().filter(|(key, _)| matches!(key.as_str(), "type" | "fields" | "items" | "values"));
            inner.map(|(_, value)| value).try_for_each(normalize)
        }
        _ => Ok(()),
    }
}

/// Replaces the first mention of each type of `definitions` in `schema` by its definition, and takes it out of them.
pub(super) fn inline(schema: &mut Value, namespace: &str, definitions: &mut HashMap<String, Value>) {
    match schema {
        Value::String(name) => {
            let full = format!("{namespace}.{name}");
            if let Some(definition) = definitions.remove(&full).or_else(|| definitions.remove(name)) {
                *schema = definition;
                inline(schema, "", definitions);
            }
        }
        Value::Array(branches) => branches.iter_mut().for_each(|branch| inline(branch, namespace, definitions)),
        Value::Object(parts) => {
            let of_name = |name: &Value| name.as_str()?.rsplit_once('.').map(|(namespace, _)| namespace.to_owned());
            let own = parts.get("name").and_then(of_name);
            let own = own.or_else(|| Some(parts.get("namespace")?.as_str()?.to_owned()));
            let namespace = own.as_deref().unwrap_or(namespace);
            for key in ["type", "items", "values"] {
                if let Some(inner) = parts.get_mut(key) {
                    inline(inner, namespace, definitions);
                }
            }
            let fields = parts.get_mut("fields").and_then(Value::as_array_mut).into_iter().flatten();
            for kind in fields.filter_map(|field| field.get_mut("type")) {
                inline(kind, namespace, definitions);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand, from the rules for names of the Avro specification.
    #[test]
    fn definitions_are_inlined_once() {
        let address = json!({"type": "record", "name": "Address", "namespace": "shop", "fields": [{"name": "city", "type": "string"}]});
        let mut schema = json!({"type": "record", "name": "shop.Order", "fields": [
            {"name": "to", "type": ["null", "Address"], "default": "Address"},
            {"name": "from", "type": {"type": "array", "items": "shop.Address"}},
        ]});
        let mut definitions = HashMap::from([("shop.Address".to_owned(), address.clone())]);
        inline(&mut schema, "", &mut definitions);
        assert_eq!(schema["fields"][0]["type"][1], address);
        assert_eq!(
            (&schema["fields"][0]["default"], &schema["fields"][1]["type"]["items"]),
            (&json!("Address"), &json!("shop.Address"))
        );
        assert!(definitions.is_empty() && WriterSchema::new(schema, None).is_ok());
    }

    #[test]
    fn schemas_that_cannot_be_used() {
        let field = |kind: Value| json!({"type": "record", "name": "R", "fields": [{"name": "a", "type": kind}]});
        for (schema, reason) in [
            (json!(7), "cannot be used"),
            (json!("nosuch"), "cannot be used"),
            (field(json!("nosuch")), "cannot be used"),
            (field(json!(["null", "R"])), "cannot be used"),
            (field(json!({"type": "array", "items": "null"})), "array of nulls"),
        ] {
            let error = WriterSchema::new(schema.clone(), None).unwrap_err();
            assert!(error.contains(reason), "{schema}: {error}");
        }
    }

    /// A type that is defined in a skipped field and used in a wanted one.
    #[test]
    fn a_projection_that_needs_a_skipped_definition() {
        let named = json!({"type": "enum", "name": "E", "symbols": ["x"]});
        let schema = json!({"type": "record", "name": "R", "fields": [{"name": "a", "type": named}, {"name": "b", "type": "E"}]});
        let schema = WriterSchema::new(schema, Some(&["b".to_owned()])).unwrap();
        let mut decoder = schema.decoder(1).unwrap();
        decoder.decode(&[&FRAME[..], &[0, 0]].concat()).unwrap();
        assert!(decoder.flush().unwrap().unwrap().column_by_name("b").is_some());
    }
}
