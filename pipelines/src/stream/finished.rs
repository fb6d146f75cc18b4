//! From messages to rows: decoding before the stage, the policy for rejected messages after it.

use std::sync::Arc;

use arrow::{
    array::{Array, ArrayRef, BooleanArray, RecordBatch, RecordBatchOptions},
    compute::filter_record_batch,
    datatypes::{Field, Schema, SchemaRef},
};
use elmo::EmbeddedColumns;

use super::{
    Messages, StreamError, TopicPartition,
    decode::{Applied, Counts, Decoder, Failed, OnError, Rejection, merged},
    expected::Expected,
    metrics::Queued,
    source::{Batch, Permit},
};
use crate::{
    error::{Error, Result},
    source::row_bytes,
    stage::Stage,
};

/// Makes rows of messages; the same for all partitions.
#[derive(Debug, Clone)]
pub(super) struct Finisher {
    decoder: Decoder,
    on_error: OnError,
    schema: SchemaRef,
    expected: Expected,
}

/// Messages that the stage works on.
#[derive(Debug)]
pub(super) struct Waiting {
    messages: Messages,
    columns: Vec<ArrayRef>,
    bad: Vec<(usize, Rejection)>,
    permit: Permit,
    /// Since the stage has them.
    pub(super) queued: Option<Queued>,
}

/// Rows that are ready to be written.
#[derive(Debug)]
pub(super) struct Rows {
    /// All columns, without the rows of messages that get none.
    pub(super) batch: RecordBatch,
    /// The messages, those without a row included.
    pub(super) messages: Messages,
    /// Which messages have a row; `None` when all have.
    pub(super) keep: Option<BooleanArray>,
    /// Behind the last message.
    pub(super) end: i64,
    /// Rejected messages by label.
    pub(super) counts: Counts,
    /// Messages for the dead-letter topic, by their number in `messages`.
    pub(super) dead: Vec<(usize, Rejection)>,
    /// Bytes of the vectors.
    pub(super) vectors: u64,
    /// What they take of the memory budget, until they are written.
    permit: Permit,
}

/// Rows, and why the stream stops behind them.
#[derive(Debug)]
pub(super) struct Finished {
    pub(super) rows: Rows,
    pub(super) refused: Option<StreamError>,
}

impl Finisher {
    /// Decodes with `decoder` and adds the columns of `stage`.
    ///
    /// # Errors
    /// [`StreamError::Settings`] when a column of the messages has the name of a column of the stage.
    pub(super) fn new(decoder: Decoder, on_error: OnError, stage: &dyn Stage) -> Result<Self, StreamError> {
        let fields: Vec<Field> = decoder.fields().iter().cloned().chain(stage.fields()).collect();
        for (index, field) in fields.iter().enumerate() {
            if fields[..index].iter().any(|earlier| earlier.name() == field.name()) {
                let message = format!("two columns of the output have the name {:?}", field.name());
                let help = Some("give the column another name in --columns".to_owned());
                return Err(StreamError::Settings { message, help });
            }
        }
        let (schema, expected) = (Arc::new(Schema::new(fields)), Expected::new(stage));
        Ok(Self { decoder, on_error, schema, expected })
    }

    /// The columns of the output.
    pub(super) fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// What is expected of a partition before it has any vectors.
    pub(super) fn expected(&self) -> Expected {
        self.expected.clone()
    }

    /// Decodes a batch, which is expected to take `bytes` until it is written: its texts, and what is needed to finish it.
    /// It waits for as long as a schema registry does not answer.
    pub(super) async fn decode(&self, batch: Batch, bytes: u64) -> (ArrayRef, Waiting) {
        let decoded = self.decoder.outlast(&batch.messages).await;
        let Batch { messages, mut permit, .. } = batch;
        permit.resize(usize::try_from(bytes).unwrap_or(usize::MAX));
        (decoded.texts, Waiting { messages, columns: decoded.columns, bad: decoded.bad, permit, queued: None })
    }

    /// Adds the columns of the stage, and applies the policy. From now on the rows count what they take, and not what was
    /// expected.
    ///
    /// # Errors
    /// [`Error::Failed`] when the columns have other types than the stage said.
    pub(super) fn finish(
        &self,
        source: &TopicPartition,
        waiting: Waiting,
        embedded: EmbeddedColumns,
    ) -> Result<Finished> {
        let Waiting { messages, columns, bad, mut permit, queued: _ } = waiting;
        let (rows, decoded) = (messages.len(), columns.len());
        let bad = merged(bad, embedded.row_errors);
        let (rows, end, applied, refused) = match self.on_error.apply(rows, bad) {
            Ok(applied) => (rows, messages.end, applied, None),
            Err(Failed { row, rejection }) => {
                let offset = messages.get(row).offset;
                let refused = StreamError::Refused { partition: source.clone(), offset, reason: rejection.to_string() };
                // No row before it was rejected.
                let applied = OnError::Null.apply(row, Vec::new()).map_err(|_| odd("a row was rejected twice"))?;
                (row, offset, applied, Some(refused))
            }
        };
        let Applied { keep, errors, dead, counts } = applied;
        let added: [ArrayRef; 3] = [embedded.vectors, Arc::new(embedded.truncated), Arc::new(errors)];
        let all = columns.into_iter().chain(added).map(|column| column.slice(0, rows)).collect();
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        let batch = RecordBatch::try_new_with_options(Arc::clone(&self.schema), all, &options).map_err(odd)?;
        let batch = match &keep {
            Some(keep) => filter_record_batch(&batch, keep).map_err(odd)?,
            None => batch,
        };
        let vectors = bytes_of(batch.column(decoded));
        permit.resize(2 * messages.size() + usize::try_from(vectors).unwrap_or(usize::MAX));
        let rows = Rows { batch, messages, keep, end, counts, dead, vectors, permit };
        Ok(Finished { rows, refused })
    }
}

/// Bytes of the rows of a column, without what its buffers hold besides, which other columns may share.
fn bytes_of(column: &ArrayRef) -> u64 {
    let mut sizes = vec![0; column.len()];
    row_bytes(column, &mut sizes);
    sizes.iter().sum()
}

fn odd(reason: impl std::fmt::Display) -> Error {
    Error::Failed(format!("rows could not be put together: {reason}"))
}

impl Waiting {
    /// Number of messages.
    pub(super) fn len(&self) -> usize {
        self.messages.len()
    }

    /// Bytes that they take until they are written.
    pub(super) fn bytes(&self) -> u64 {
        self.permit.bytes() as u64
    }
}

impl Rows {
    /// Declares more memory, until the rows are written.
    pub(super) fn hold(&mut self, bytes: usize) {
        self.permit.resize(self.permit.bytes() + bytes);
    }

    /// Bytes that they take until they are written.
    pub(super) fn bytes(&self) -> u64 {
        self.permit.bytes() as u64
    }

    /// Number of messages that are done, those without a row included.
    pub(super) fn done(&self) -> usize {
        self.keep.as_ref().map_or(self.batch.num_rows(), Array::len)
    }

    /// The numbers in `messages` of the rows of `batch`.
    pub(super) fn kept(&self) -> Vec<usize> {
        let all = 0..self.done();
        all.filter(|row| self.keep.as_ref().is_none_or(|keep| keep.value(*row))).collect()
    }
}
