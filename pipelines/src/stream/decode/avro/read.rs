//! Reads data of one schema; a datum that cannot be read affects no other.

use arrow::array::{RecordBatch, StructArray};
use arrow_avro::reader::Decoder;

use super::schema::{FRAME, WriterSchema};
use crate::source::contain::contain;

/// A message's index, and its datum.
pub(super) type Datum<'m> = (usize, &'m [u8]);

/// What was read of some messages.
#[derive(Debug, Default)]
pub(super) struct Read {
    /// Records, with the indices of their messages.
    pub(super) records: Vec<(Vec<usize>, StructArray)>,
    /// Indices of messages that cannot be read.
    pub(super) bad: Vec<usize>,
}

/// Where reading failed.
enum Failure {
    /// At this datum; those before it were read.
    At(usize),
    /// When the columns were built.
    Somewhere,
}

impl Read {
    /// Reads data. The reader's columns are of no use after an error, so it reads what comes before the error again: each
    /// datum twice at most. An error that shows only when the columns are built, such as a string that is not UTF-8, is
    /// searched for by halves.
    pub(super) fn add(&mut self, schema: &WriterSchema, mut data: &[Datum<'_>]) {
        while !data.is_empty() {
            match read(schema, data) {
                Ok(records) => {
                    self.records.push((data.iter().map(|(row, _)| *row).collect(), records.into()));
                    return;
                }
                Err(Failure::At(at)) => {
                    self.add(schema, &data[..at]);
                    self.bad.push(data[at].0);
                    data = &data[at + 1..];
                }
                Err(Failure::Somewhere) if data.len() == 1 => {
                    self.bad.push(data[0].0);
                    return;
                }
                Err(Failure::Somewhere) => {
                    let (first, second) = data.split_at(data.len() / 2);
                    self.add(schema, first);
                    data = second;
                }
            }
        }
    }
}

fn read(schema: &WriterSchema, data: &[Datum<'_>]) -> Result<RecordBatch, Failure> {
    // The schema was built before.
    let mut decoder = schema.decoder(data.len()).map_err(|_| Failure::Somewhere)?;
    for (at, (_, datum)) in data.iter().enumerate() {
        if contain(|| is_read(&mut decoder, datum)) != Some(true) {
            return Err(Failure::At(at));
        }
    }
    match contain(|| decoder.flush()) {
        Some(Ok(Some(records))) if records.num_rows() == data.len() => Ok(records),
        _ => Err(Failure::Somewhere),
    }
}

/// Reads a datum; false unless all of it is one record.
fn is_read(decoder: &mut Decoder, datum: &[u8]) -> bool {
    let before = decoder.capacity();
    let is_framed = decoder.decode(&FRAME).is_ok_and(|used| used == FRAME.len());
    is_framed && decoder.decode(datum).is_ok_and(|used| used == datum.len()) && decoder.capacity() + 1 == before
}
