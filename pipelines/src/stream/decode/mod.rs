//! Messages to texts and columns.
//!
//! ```text
//! settings   what messages hold, and which columns are made of them
//! json       messages of JSON and of plain text: pick (values by pointer) -> cells (columns)
//! avro       messages of Avro, with schemas of a registry or a file
//! metadata   columns about messages: topic, partition, offset, time, key, headers
//! rejection  why a message has no vector
//! policy     what becomes of such messages
//! dead_letter records for the dead-letter topic
//! ```
//!
//! A message that cannot be decoded never affects another one: row `i` of every column is message `i`, NULL if it was
//! rejected. A JSON `null` where the text is expected is a NULL text, which has no vector and is no error.

mod avro;
mod cells;
pub mod dead_letter;
mod json;
mod metadata;
mod pick;
mod pointer;
mod policy;
mod rejection;
mod settings;
mod unescape;

#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use arrow::{
    array::{Array, ArrayRef, BooleanArray, StringArray},
    compute::nullif,
    datatypes::{DataType, Field},
};

use self::{avro::Avro, json::Json};
pub use self::{
    avro::RegistrySettings,
    dead_letter::DeadLetter,
    pointer::Pointer,
    policy::{Applied, Counts, Failed, OnError, merged},
    rejection::Rejection,
    settings::{
        AvroSchemas, ColumnSpec, ColumnType, Columns, DecodeSettings, Format, Keys, MAX_TEXT_BYTES, MESSAGE, TEXT,
    },
};
use super::{Messages, StreamError, clock};

/// Pauses before a schema registry is asked again: the first, which is doubled each time, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// An error of the registry is shown again after this time.
const SAY_AGAIN: Duration = Duration::from_secs(60);

/// Decodes messages. A clone is cheap, and shares the schemas that were fetched.
#[derive(Debug, Clone)]
pub struct Decoder {
    settings: Arc<DecodeSettings>,
    fields: Arc<[Field]>,
    values: Values,
}

/// How values are decoded.
#[derive(Debug, Clone)]
enum Values {
    Text,
    Json(Arc<Json>),
    Avro(Arc<Avro>),
}

/// Messages, decoded: row `i` is message `i`.
#[derive(Debug)]
pub struct Decoded {
    /// The texts, a `StringArray`; NULL for a rejected message, and for a text that is NULL.
    pub texts: ArrayRef,
    /// The columns of [`Decoder::fields`]. A rejected message has the values that could be read of it.
    pub columns: Vec<ArrayRef>,
    /// The rejected messages, in order.
    pub bad: Vec<(usize, Rejection)>,
}

/// What the values of messages hold.
struct Body {
    texts: StringArray,
    /// The columns of the user.
    columns: Vec<ArrayRef>,
    bad: Vec<(usize, Rejection)>,
}

impl Decoder {
    /// Prepares to decode.
    ///
    /// # Errors
    /// Settings that do not fit each other, and a file with a schema that cannot be read.
    pub fn new(settings: DecodeSettings) -> Result<Self, StreamError> {
        settings.check()?;
        let values = match settings.format {
            Format::Text => Values::Text,
            Format::Json => Values::Json(Arc::new(Json::new(&settings))),
            Format::Avro => Values::Avro(Arc::new(Avro::new(&settings)?)),
        };
        let fields = fields(&settings).into();
        Ok(Self { settings: Arc::new(settings), fields, values })
    }

    /// The columns: those of the user in their order, `text`, `_key` and `_headers` if wanted, `_topic`, `_partition`,
    /// `_offset` and `_timestamp`.
    pub fn fields(&self) -> &[Field] {
        &self.fields
    }

    /// Checks what decoding depends on, before the first message.
    ///
    /// # Errors
    /// A schema registry that does not answer, or refuses.
    pub async fn probe(&self) -> Result<(), StreamError> {
        match &self.values {
            Values::Avro(avro) => avro.probe().await,
            Values::Text | Values::Json(_) => Ok(()),
        }
    }

    /// Decodes messages.
    ///
    /// # Errors
    /// A schema registry that does not answer, or refuses; none for a message. The same messages can be decoded again.
    pub async fn decode(&self, messages: &Messages) -> Result<Decoded, StreamError> {
        let body = match &self.values {
            Values::Text => json::texts(messages, self.settings.max_text_bytes),
            Values::Json(json) => json.decode(messages),
            Values::Avro(avro) => avro.decode(messages).await?,
        };
        Ok(self.with_metadata(body, messages))
    }

    /// As [`decode`](Self::decode), for as long as it takes: a schema registry that does not answer, or refuses, is asked
    /// again. It may be started, and keys are replaced while a stream runs.
    pub(in crate::stream) async fn outlast(&self, messages: &Messages) -> Decoded {
        let (mut pause, mut say_at) = (FIRST_PAUSE, clock::now());
        loop {
            match self.decode(messages).await {
                Ok(decoded) => return decoded,
                Err(error) if clock::now() >= say_at => {
                    tracing::error!(partition = %messages.source, %error, "messages wait until their schemas are known");
                    say_at = clock::now() + SAY_AGAIN;
                }
                Err(_) => {}
            }
            clock::sleep(pause).await;
            pause = LONGEST_PAUSE.min(2 * pause);
        }
    }

    /// Adds the text and the columns about messages to those of the user.
    fn with_metadata(&self, body: Body, messages: &Messages) -> Decoded {
        let Body { texts, mut columns, mut bad } = body;
        let mut texts: ArrayRef = Arc::new(texts);
        let keys = match self.settings.keys {
            Keys::Drop => None,
            Keys::Binary => Some(metadata::binary_keys(messages)),
            Keys::Text => {
                let (keys, odd) = metadata::text_keys(messages);
                reject_keys(&odd, &mut texts, &mut bad);
                Some(keys)
            }
        };
        columns.extend(self.settings.keep_text.then(|| Arc::clone(&texts)));
        columns.extend(keys);
        columns.extend(self.settings.headers.then(|| metadata::headers(messages)));
        columns.extend(metadata::columns(messages));
        Decoded { texts, columns, bad }
    }
}

/// Rejects the rows with `odd` keys, unless they are rejected already.
fn reject_keys(odd: &[usize], texts: &mut ArrayRef, bad: &mut Vec<(usize, Rejection)>) {
    if odd.is_empty() {
        return;
    }
    let mut is_odd = vec![false; texts.len()];
    odd.iter().for_each(|row| is_odd[*row] = true);
    if let Ok(without) = nullif(texts, &BooleanArray::from(is_odd)) {
        *texts = without;
    }
    let rejection = Rejection::WrongType { column: metadata::KEY.into(), expected: ColumnType::String.name() };
    bad.extend(odd.iter().map(|row| (*row, rejection.clone())));
    bad.sort_by_key(|(row, _)| *row);
    bad.dedup_by_key(|(row, _)| *row);
}

fn fields(settings: &DecodeSettings) -> Vec<Field> {
    let of_user = json::specs(&settings.columns);
    let mut fields: Vec<Field> =
        of_user.iter().map(|spec| Field::new(&*spec.name, spec.kind.data_type(), true)).collect();
    fields.extend(settings.keep_text.then(|| Field::new(TEXT, DataType::Utf8, true)));
    fields.extend(match settings.keys {
        Keys::Drop => None,
        Keys::Binary => Some(Field::new(metadata::KEY, DataType::Binary, true)),
        Keys::Text => Some(Field::new(metadata::KEY, DataType::Utf8, true)),
    });
    fields.extend(settings.headers.then(metadata::header_field));
    fields.extend(metadata::fields());
    fields
}
