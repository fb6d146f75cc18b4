//! Rows to messages, and what becomes of one that the broker refuses.

use std::sync::Arc;

use arrow::{
    array::{Array, ArrayRef, RecordBatch, StringArray, new_null_array},
    error::ArrowError,
};
use rdkafka::error::RDKafkaErrorCode as Code;

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
        totals::Tally,
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

/// The messages of a batch.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) records: Vec<Record>,
    /// Behind the last message that they stand for.
    pub(super) end: i64,
    /// Why the stream stops there.
    pub(super) refusal: Option<StreamError>,
    pub(super) tally: Tally,
}

/// Why the message of a row is refused.
#[derive(Debug, Clone, Copy)]
pub(super) enum Refusal {
    /// The producer or the broker takes no message of so many bytes.
    Size(usize),
    /// The broker does not take what is in it.
    Content(Code),
}

/// What takes the place of a message that is refused.
#[derive(Debug)]
pub(super) enum Instead {
    Record(Box<Record>),
    Nothing,
    /// The stream stops before the message at this offset.
    Stop {
        offset: i64,
        refusal: StreamError,
    },
}

impl Records {
    /// The messages of a batch: one per row, then those for the dead-letter topic.
    ///
    /// # Errors
    /// [`Error::Failed`] when a column has no form in the encoding.
    pub(super) fn of(&self, source: &TopicPartition, rows: &Rows) -> Result<Made> {
        let kept = rows.kept();
        let originals: Vec<_> = kept.iter().map(|row| self.original(rows.messages.get(*row).value)).collect();
        let values = self.values(&rows.batch, &originals).map_err(odd)?;
        let more = self.headers(&rows.batch).map_err(odd)?;
        let (mut records, mut tally) = (Vec::with_capacity(values.len() + rows.dead.len()), Tally::of(rows));
        for (index, (value, more)) in values.into_iter().zip(more).enumerate() {
            let mut record = self.record(source, rows, (index, kept[index]), value);
            record.headers.extend(more);
            if record.bytes() <= self.max_bytes {
                records.push(record);
                continue;
            }
            let refusal = Refusal::Size(record.alone());
            let instead = self.instead(source, rows, index, &refusal)?;
            instead.count(&mut tally, &refusal);
            match instead {
                Instead::Record(other) => records.push(*other),
                Instead::Nothing => {}
                Instead::Stop { offset, refusal } => {
                    return Ok(Made { records, end: offset, refusal: Some(refusal), tally });
                }
            }
        }
        for (row, rejection) in &rows.dead {
            records.extend(self.dead(source, rows, *row, rejection));
        }
        Ok(Made { records, end: rows.end, refusal: None, tally })
    }

    /// What takes the place of row `index`, whose message is refused: by the policy for errors, a message without the vector,
    /// a dead letter, or nothing.
    ///
    /// # Errors
    /// As [`Records::of`].
    pub(super) fn instead(
        &self,
        source: &TopicPartition,
        rows: &Rows,
        index: usize,
        refusal: &Refusal,
    ) -> Result<Instead> {
        let rejection = refusal.rejection();
        let row = rows.kept()[index];
        let mut record = match self.on_error {
            OnError::Skip => return Ok(Instead::Nothing),
            OnError::DeadLetter => match self.dead(source, rows, row, &rejection) {
                Some(record) => record,
                None => return Ok(Instead::Nothing),
            },
            OnError::Fail => {
                let offset = rows.messages.get(row).offset;
                let refusal = StreamError::Refused { partition: source.clone(), offset, reason: rejection.to_string() };
                return Ok(Instead::Stop { offset, refusal });
            }
            OnError::Null => self.without_vector(source, rows, index, &rejection)?,
        };
        // It may be the time that the broker refuses.
        if matches!(refusal, Refusal::Content(_)) {
            record.timestamp = None;
        }
        Ok(Instead::Record(Box::new(record)))
    }

    /// What takes the place of a dead letter that is refused, or of a row without its vector: its key and its headers.
    ///
    /// # Errors
    /// [`StreamError::Broker`] when that was tried.
    pub(super) fn last_resort(&self, source: &TopicPartition, record: Record, refusal: &Refusal) -> Result<Instead> {
        let is_empty = record.value.as_ref().is_none_or(Vec::is_empty);
        let other = match refusal {
            Refusal::Size(_) if !is_empty => Record { last_resort: true, ..record.without_value() },
            Refusal::Content(_) if record.timestamp.is_some() => {
                Record { timestamp: None, last_resort: true, ..record }
            }
            _ => return Err(refused(source, &record, refusal).into()),
        };
        Ok(Instead::Record(Box::new(other)))
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
            record = record.without_value();
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
        let (topic, offset, timestamp) = (Arc::clone(&self.topic), message.offset, message.timestamp);
        Record { topic, key, value, headers, timestamp, offset, row: Some(index), last_resort: false }
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
            offset: message.offset,
            row: None,
            last_resort: false,
        })
    }
}

impl Record {
    /// Its key, its headers, and one that says that its value is left out.
    fn without_value(mut self) -> Self {
        self.value = Some(Vec::new());
        self.headers.push((dead_letter::DROPPED.to_owned(), Some(b"value".to_vec())));
        self
    }

    /// Its size for the broker, rounded up.
    pub(in crate::stream) fn bytes(&self) -> usize {
        let length = |bytes: &Option<Vec<u8>>| bytes.as_ref().map_or(0, Vec::len);
        let headers: usize = self.headers.iter().map(|(name, value)| name.len() + length(value) + 16).sum();
        length(&self.key) + length(&self.value) + headers + OVERHEAD
    }
}

impl Refusal {
    /// Why the message has no vector.
    fn rejection(self) -> Rejection {
        match self {
            Self::Size(bytes) => Rejection::TooLarge { bytes },
            Self::Content(code) => Rejection::Refused { reason: code.to_string() },
        }
    }
}

impl Instead {
    /// Counts the refusal of a row. A dead letter is no row.
    pub(super) fn count(&self, tally: &mut Tally, refusal: &Refusal) {
        let has_row = matches!(self, Self::Record(other) if other.row.is_some());
        tally.refused(refusal.rejection().label(), has_row);
    }
}

/// The error for a message of which nothing is left that could be left out.
fn refused(source: &TopicPartition, record: &Record, refusal: &Refusal) -> StreamError {
    let offset =
        record.headers.iter().rfind(|(name, _)| name == dead_letter::OFFSET).and_then(|(_, value)| value.clone());
    let offset = String::from_utf8_lossy(&offset.unwrap_or_default()).into_owned();
    let (reason, help) = match refusal {
        Refusal::Size(_) => (
            "the key and the headers of the message are larger than the broker takes".to_owned(),
            "raise max.message.bytes of the topic",
        ),
        Refusal::Content(code) => (
            format!("the broker refuses the message, even without its vector and its time: {code}"),
            "a compacted topic takes no message without a key; leave such messages out with --on-error skip, or send them \
             elsewhere with --on-error dead-letter",
        ),
    };
    let what = format!("write the message of {source} at offset {offset} to topic {}", record.topic);
    StreamError::Broker { what, reason, help: Some(help.to_owned()) }
}

fn odd(error: ArrowError) -> Error {
    Error::Failed(format!("rows could not be encoded as messages: {error}"))
}
