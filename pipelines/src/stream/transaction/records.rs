//! Rows to messages, and what becomes of one that is too large for the broker.

use std::sync::Arc;

use arrow::{
    array::{Array, ArrayRef, RecordBatch, StringArray, new_null_array},
    error::ArrowError,
};

use super::{
    encode::{self, ValueEncoding},
    producer::Record,
};
use crate::{
    error::{Error, Result},
    stream::{
        StreamError, TopicPartition,
        decode::{DeadLetter, Format, OnError, Rejection, dead_letter},
        finished::Rows,
    },
};

/// How rows become messages.
#[derive(Debug, Clone)]
pub(in crate::stream) struct Records {
    /// Where they go.
    pub(in crate::stream) topic: Arc<str>,
    /// Where rejected messages go.
    pub(in crate::stream) dead_letters: Option<Arc<str>>,
    pub(in crate::stream) encoding: ValueEncoding,
    pub(in crate::stream) format: Format,
    pub(in crate::stream) on_error: OnError,
    /// Number of columns that the stage adds, the vectors first and `error` last.
    pub(in crate::stream) added: usize,
    /// The most bytes of a message that the producer takes.
    pub(in crate::stream) max_bytes: usize,
}

/// What the broker adds to a message, at most.
const OVERHEAD: usize = 512;

impl Records {
    /// The messages of a batch: one per row, then those for the dead-letter topic.
    ///
    /// # Errors
    /// [`Error::Failed`] when a column has no form in the encoding; [`StreamError::Refused`] for a message that is too
    /// large, with on-error `fail`.
    pub(in crate::stream) fn of(&self, source: &TopicPartition, rows: &Rows) -> Result<Vec<Record>> {
        let kept = rows.kept();
        let originals: Vec<_> = kept.iter().map(|row| self.original(rows.messages.get(*row).value)).collect();
        let values = self.values(&rows.batch, &originals).map_err(odd)?;
        let more = self.headers(&rows.batch).map_err(odd)?;
        let mut records = Vec::with_capacity(values.len() + rows.dead.len());
        for (index, (value, more)) in values.into_iter().zip(more).enumerate() {
            let mut record = self.record(source, rows, (index, kept[index]), value);
            record.headers.extend(more);
            match record.bytes() > self.max_bytes {
                false => records.push(record),
                true => records.extend(self.too_large(source, rows, index, record.bytes())?),
            }
        }
        for (row, rejection) in &rows.dead {
            records.extend(self.dead(source, rows, *row, rejection));
        }
        Ok(records)
    }

    /// What takes the place of row `index`, whose message of `bytes` the producer or the broker refuses: by the policy for
    /// errors, a message without the vector, a dead letter, or nothing.
    ///
    /// # Errors
    /// As [`Records::of`].
    pub(super) fn too_large(
        &self,
        source: &TopicPartition,
        rows: &Rows,
        index: usize,
        bytes: usize,
    ) -> Result<Option<Record>> {
        let reason = format!("a message of {bytes} bytes; the limit of the producer or of the broker is lower");
        let rejection = Rejection::from(elmo::RowError::from(reason));
        let row = rows.kept()[index];
        match self.on_error {
            OnError::Skip => Ok(None),
            OnError::DeadLetter => Ok(self.dead(source, rows, row, &rejection)),
            OnError::Fail => {
                let offset = rows.messages.get(row).offset;
                Err(StreamError::Refused { partition: source.clone(), offset, reason: rejection.to_string() }.into())
            }
            OnError::Null => self.without_vector(source, rows, index, &rejection).map(Some),
        }
    }

    /// Row `index` with NULL for the vector, and the reason. If that is too large as well, only its key and origin stay.
    fn without_vector(
        &self,
        source: &TopicPartition,
        rows: &Rows,
        index: usize,
        rejection: &Rejection,
    ) -> Result<Record> {
        let batch = rows.batch.slice(index, 1);
        let mut columns = batch.columns().to_vec();
        let vectors = columns.len() - self.added;
        columns[vectors] = new_null_array(columns[vectors].data_type(), 1);
        let last = columns.len() - 1;
        columns[last] = Arc::new(StringArray::from(vec![rejection.to_string()])) as ArrayRef;
        let batch = RecordBatch::try_new(batch.schema(), columns).map_err(odd)?;
        let row = rows.kept()[index];
        let original = self.original(rows.messages.get(row).value);
        let value = self.values(&batch, &[original]).map_err(odd)?.pop().flatten();
        let mut record = self.record(source, rows, (index, row), value);
        record.last_resort = true;
        if record.bytes() > self.max_bytes {
            record.value = Some(Vec::new());
        }
        let mut add = |name: &str, value: String| record.headers.push((name.to_owned(), Some(value.into_bytes())));
        add(dead_letter::LABEL, rejection.label().to_owned());
        add(dead_letter::ERROR, rejection.to_string());
        Ok(record)
    }

    /// The message itself, where values are JSON objects to which columns can be added.
    fn original<'m>(&self, value: Option<&'m [u8]>) -> Option<&'m [u8]> {
        value.filter(|_| self.format == Format::Json)
    }

    fn values(&self, batch: &RecordBatch, originals: &[Option<&[u8]>]) -> Result<Vec<Option<Vec<u8>>>, ArrowError> {
        let columns = batch.num_columns();
        let first = columns - self.added;
        let some = |values: Vec<Vec<u8>>| values.into_iter().map(Some).collect();
        match self.encoding {
            ValueEncoding::Json if self.format == Format::Json => {
                let added: Vec<usize> = (first..columns).collect();
                encode::json(&batch.project(&added)?, originals).map(some)
            }
            ValueEncoding::Json => encode::json(batch, originals).map(some),
            // An empty value is no tombstone, which would delete the key of a compacted topic.
            ValueEncoding::Raw => {
                Ok(encode::raw(batch.column(first)).into_iter().map(Option::unwrap_or_default).map(Some).collect())
            }
            ValueEncoding::Arrow => encode::arrow(batch).map(some),
        }
    }

    /// The columns beside the vectors, where the value holds only these.
    fn headers(&self, batch: &RecordBatch) -> Result<Vec<Vec<encode::Header>>, ArrowError> {
        match self.encoding {
            ValueEncoding::Raw => {
                let vectors = batch.num_columns() - self.added;
                let rest: Vec<usize> = (0..batch.num_columns()).filter(|column| *column != vectors).collect();
                encode::headers(&batch.project(&rest)?)
            }
            _ => Ok(vec![Vec::new(); batch.num_rows()]),
        }
    }

    /// The message of row `index`, made of message `number`: with its key, its time, its headers and its origin.
    fn record(
        &self,
        source: &TopicPartition,
        rows: &Rows,
        (index, number): (usize, usize),
        value: Option<Vec<u8>>,
    ) -> Record {
        let message = rows.messages.get(number);
        let mut headers = message.headers.to_vec();
        let mut add = |name: &str, value: String| headers.push((name.to_owned(), Some(value.into_bytes())));
        add(dead_letter::TOPIC, source.topic.to_string());
        add(dead_letter::PARTITION, source.partition.to_string());
        add(dead_letter::OFFSET, message.offset.to_string());
        let key = message.key.map(<[u8]>::to_vec);
        let (topic, timestamp) = (Arc::clone(&self.topic), message.timestamp);
        Record { topic, key, value, headers, timestamp, row: Some(index), last_resort: false }
    }

    fn dead(&self, source: &TopicPartition, rows: &Rows, row: usize, rejection: &Rejection) -> Option<Record> {
        let topic = Arc::clone(self.dead_letters.as_ref()?);
        let message = rows.messages.get(row);
        let letter = DeadLetter::new(source, message, rejection);
        let (key, value) = (letter.key.map(<[u8]>::to_vec), letter.value.map(<[u8]>::to_vec));
        Some(Record {
            topic,
            key,
            value,
            headers: letter.headers,
            timestamp: message.timestamp,
            row: None,
            last_resort: false,
        })
    }
}

impl Record {
    /// Its size for the broker, rounded up.
    pub(in crate::stream) fn bytes(&self) -> usize {
        let length = |bytes: &Option<Vec<u8>>| bytes.as_ref().map_or(0, Vec::len);
        let headers: usize = self.headers.iter().map(|(name, value)| name.len() + length(value) + 16).sum();
        length(&self.key) + length(&self.value) + headers + OVERHEAD
    }
}

fn odd(error: ArrowError) -> Error {
    Error::Failed(format!("rows could not be encoded as messages: {error}"))
}
