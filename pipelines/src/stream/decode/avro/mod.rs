//! Decodes messages of Avro.
//!
//! ```text
//! registry  schemas by id, from a schema registry
//! schema    a schema, ready to read the fields that are wanted
//! read      data of one schema to records (arrow-avro)
//! values    records to columns by pointer
//! ```
//!
//! The messages of a batch are read in groups of one schema each, and put back into their order.

mod read;
mod registry;
mod schema;
mod values;

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use arrow::{
    array::{Array, ArrayRef, AsArray, BooleanArray, StringArray, StructArray, UInt32Array, new_null_array},
    compute::{concat, nullif, take},
    error::ArrowError,
};
use parking_lot::Mutex;
use serde_json::Value;

pub use self::registry::RegistrySettings;
use self::{
    read::{Datum, Read},
    registry::Registry,
    schema::{WriterSchema, fingerprint},
    values::{Found, find},
};
use super::{
    Body,
    json::{of_length, specs},
    pointer::Pointer,
    rejection::Rejection,
    settings::{AvroSchemas, ColumnSpec, ColumnType, Columns, DecodeSettings, TEXT},
};
use crate::stream::{Messages, StreamError};

/// Bytes of Confluent's framing: 0, and the id.
const CONFLUENT: usize = 5;
/// The marker of the single-object encoding; the fingerprint follows.
const SINGLE: [u8; 2] = [0xC3, 0x01];
/// A registry is asked again for a schema that it did not know after this time.
const FORGET: Duration = Duration::from_secs(60);
/// Answers of a registry that are kept; those with a schema are always.
const MAX_KNOWN: usize = 10_000;

/// Decodes messages of Avro.
#[derive(Debug)]
pub(super) struct Avro {
    schemas: Schemas,
    text: Pointer,
    text_path: Arc<str>,
    specs: Vec<ColumnSpec>,
    /// The fields of a record that are read; `None`: all.
    wanted: Option<Vec<String>>,
    max_text_bytes: usize,
}

/// Where schemas are from.
#[derive(Debug)]
enum Schemas {
    Registry(Registry, Mutex<HashMap<u32, Known>>),
    /// With the fingerprint in the single-object encoding.
    File(Arc<WriterSchema>, Option<[u8; 8]>),
}

/// A schema, or why there is none.
type Usable = Result<Arc<WriterSchema>, Arc<str>>;

/// What the registry answered.
#[derive(Debug)]
struct Known {
    schema: Usable,
    since: Instant,
}

impl Avro {
    pub(super) fn new(settings: &DecodeSettings) -> Result<Self, StreamError> {
        let (text, specs) = (settings.text_pointer(), specs(&settings.columns));
        let wanted = wanted(settings, &text, &specs);
        let schemas = match &settings.schemas {
            Some(AvroSchemas::Registry(registry)) => Schemas::Registry(Registry::new(registry)?, Mutex::default()),
            Some(AvroSchemas::SingleObject(file)) => Schemas::of_file(file, true, wanted.as_deref())?,
            Some(AvroSchemas::Raw(file)) => Schemas::of_file(file, false, wanted.as_deref())?,
            None => unreachable!("checked with the settings"),
        };
        let text_path = text.to_string().into();
        Ok(Self { schemas, text, text_path, specs, wanted, max_text_bytes: settings.max_text_bytes })
    }

    /// Checks that the registry, if there is one, answers.
    pub(super) async fn probe(&self) -> Result<(), StreamError> {
        match &self.schemas {
            Schemas::Registry(registry, _) => registry.probe().await,
            Schemas::File(..) => Ok(()),
        }
    }

    /// Decodes messages. Fails only when the registry does.
    pub(super) async fn decode(&self, messages: &Messages) -> Result<Body, StreamError> {
        let mut assembly = Assembly::new(messages.len(), &self.specs);
        let mut groups: BTreeMap<u32, Vec<Datum<'_>>> = BTreeMap::new();
        for (row, message) in messages.iter().enumerate() {
            match self.schemas.unframed(message.value) {
                Ok((id, datum)) => groups.entry(id).or_default().push((row, datum)),
                Err(rejection) => assembly.bad.push((row, rejection)),
            }
        }
        for (id, data) in groups {
            match self.schema(id).await? {
                Ok(schema) => self.read(&schema, &data, &mut assembly),
                Err(reason) => {
                    let rejection = Rejection::UnknownSchema { id: id.to_string(), reason };
                    assembly.bad.extend(data.iter().map(|(row, _)| (*row, rejection.clone())));
                }
            }
        }
        Ok(assembly.finish())
    }

    /// The schema with an id; an answer of the registry is kept.
    async fn schema(&self, id: u32) -> Result<Usable, StreamError> {
        let (registry, known) = match &self.schemas {
            Schemas::File(schema, _) => return Ok(Ok(Arc::clone(schema))),
            Schemas::Registry(registry, known) => (registry, known),
        };
        if let Some(known) =
            known.lock().get(&id).filter(|known| known.schema.is_ok() || known.since.elapsed() < FORGET)
        {
            return Ok(known.schema.clone());
        }
        let answer = registry.schema(id).await?;
        let schema = answer.and_then(|schema| WriterSchema::new(schema, self.wanted.as_deref()));
        let schema = schema.map(Arc::new).map_err(Arc::from);
        let mut known = known.lock();
        // Messages may name any number of schemas that do not exist.
        if known.len() >= MAX_KNOWN {
            known.retain(|_, known| known.schema.is_ok());
        }
        known.insert(id, Known { schema: schema.clone(), since: Instant::now() });
        Ok(schema)
    }

    /// Reads data of one schema.
    fn read(&self, schema: &WriterSchema, data: &[Datum<'_>], assembly: &mut Assembly) {
        let mut read = Read::default();
        read.add(schema, data);
        let reason = "the value is not what its schema describes";
        assembly.bad.extend(read.bad.into_iter().map(|row| (row, Rejection::BadAvro { reason })));
        for (rows, records) in read.records {
            self.add(schema, &rows, &records, assembly);
        }
    }

    /// Adds records, which are those of the messages `rows`.
    fn add(&self, schema: &WriterSchema, rows: &[usize], records: &StructArray, assembly: &mut Assembly) {
        let found = |pointer, kind| find(records, schema.is_wrapped, pointer, kind);
        let text = found(&self.text, ColumnType::String);
        let columns: Vec<Found> = self.specs.iter().map(|spec| found(&spec.pointer, spec.kind)).collect();
        let mut is_bad = vec![false; rows.len()];
        for (at, row) in rows.iter().enumerate() {
            if let Err(rejection) = self.check(at, &text, &columns) {
                assembly.bad.push((*row, rejection));
                is_bad[at] = true;
            }
        }
        // Never fails: both have one length.
        let texts = nullif(&text.values, &BooleanArray::from(is_bad)).unwrap_or(text.values);
        assembly.add(rows, texts, columns.into_iter().map(|column| column.values));
    }

    /// What is wrong with a row, if anything.
    fn check(&self, at: usize, text: &Found, columns: &[Found]) -> Result<(), Rejection> {
        let wrong = |column: &Arc<str>, kind: ColumnType| {
            Err(Rejection::WrongType { column: Arc::clone(column), expected: kind.name() })
        };
        if text.is_wrong[at] {
            return wrong(&TEXT.into(), ColumnType::String);
        }
        if text.is_missing[at] {
            return Err(Rejection::NoText { path: Arc::clone(&self.text_path) });
        }
        if text.values.is_valid(at) {
            of_length(text.values.as_string::<i32>().value(at), self.max_text_bytes)?;
        }
        let spec = self.specs.iter().zip(columns).find(|(_, column)| column.is_wrong[at]);
        spec.map_or(Ok(()), |(spec, _)| wrong(&spec.name, spec.kind))
    }
}

impl Schemas {
    fn of_file(path: &Path, is_single: bool, wanted: Option<&[String]>) -> Result<Self, StreamError> {
        let refuse = |reason: String| StreamError::Settings {
            message: format!("--avro-schema {}: {reason}", path.display()),
            help: Some("give a file with one Avro schema in JSON (.avsc)".to_owned()),
        };
        let text = std::fs::read_to_string(path).map_err(|e| refuse(e.to_string()))?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        let schema: Value =
            serde_json::from_str(text).map_err(|e| refuse(format!("not JSON: {}", elmo::json::reason(&e))))?;
        let fingerprint =
            is_single.then(|| fingerprint(text)).transpose().map_err(|e: ArrowError| refuse(e.to_string()))?;
        let schema = WriterSchema::new(schema, wanted).map_err(refuse)?;
        Ok(Self::File(Arc::new(schema), fingerprint))
    }

    /// The id of the schema of a value, and the datum.
    fn unframed<'m>(&self, value: Option<&'m [u8]>) -> Result<(u32, &'m [u8]), Rejection> {
        let value = value.ok_or(Rejection::Tombstone)?;
        match self {
            Self::Registry(..) => match value.split_first_chunk::<CONFLUENT>() {
                Some(([0, id @ ..], datum)) => Ok((u32::from_be_bytes(*id), datum)),
                _ => Err(Rejection::BadAvro { reason: "it does not begin with byte 0 and the id of a schema" }),
            },
            Self::File(_, None) => Ok((0, value)),
            Self::File(_, Some(expected)) => {
                let framed = value.strip_prefix(&SINGLE).and_then(|rest| rest.split_first_chunk::<8>());
                let Some((found, datum)) = framed else {
                    return Err(Rejection::BadAvro { reason: "it is not in the single-object encoding" });
                };
                if found == expected {
                    return Ok((0, datum));
                }
                let id = format!("{:016x}", u64::from_le_bytes(*found));
                Err(Rejection::UnknownSchema { id, reason: "the given schema has another fingerprint".into() })
            }
        }
    }
}

/// The fields of a record at which pointers begin; `None` when one takes the whole record.
fn wanted(settings: &DecodeSettings, text: &Pointer, specs: &[ColumnSpec]) -> Option<Vec<String>> {
    if settings.columns == Columns::All {
        return None;
    }
    let pointers = std::iter::once(text).chain(specs.iter().map(|spec| &spec.pointer));
    pointers.map(|pointer| pointer.tokens().first().cloned()).collect()
}

/// Columns in pieces, of which each has some of the rows.
struct Assembly<'s> {
    specs: &'s [ColumnSpec],
    texts: Vec<ArrayRef>,
    columns: Vec<Vec<ArrayRef>>,
    /// Where each row is among the pieces.
    places: Vec<Option<u32>>,
    added: u32,
    bad: Vec<(usize, Rejection)>,
}

impl<'s> Assembly<'s> {
    fn new(rows: usize, specs: &'s [ColumnSpec]) -> Self {
        let columns = vec![Vec::new(); specs.len()];
        Self { specs, texts: Vec::new(), columns, places: vec![None; rows], added: 0, bad: Vec::new() }
    }

    fn add(&mut self, rows: &[usize], texts: ArrayRef, columns: impl Iterator<Item = ArrayRef>) {
        self.texts.push(texts);
        self.columns.iter_mut().zip(columns).for_each(|(pieces, piece)| pieces.push(piece));
        for row in rows {
            self.places[*row] = Some(self.added);
            self.added += 1;
        }
    }

    /// The columns in the order of the messages.
    fn finish(mut self) -> Body {
        let places = UInt32Array::from(self.places);
        let in_order = |pieces: &[ArrayRef], kind: ColumnType| -> ArrayRef {
            let pieces: Vec<&dyn Array> = pieces.iter().map(AsRef::as_ref).collect();
            let whole = concat(&pieces).and_then(|whole| take(&whole, &places, None));
            // Without pieces there is nothing to concatenate.
            whole.unwrap_or_else(|_| new_null_array(&kind.data_type(), places.len()))
        };
        let columns = self.columns.iter().zip(self.specs).map(|(pieces, spec)| in_order(pieces, spec.kind)).collect();
        let texts: StringArray = in_order(&self.texts, ColumnType::String).as_string::<i32>().clone();
        self.bad.sort_by_key(|(row, _)| *row);
        Body { texts, columns, bad: self.bad }
    }
}
