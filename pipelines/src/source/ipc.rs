//! Decodes Arrow IPC, files and streams, as a sequence of messages.
//!
//! An IPC file is a magic word, a stream, and a footer for random access. Files are read as streams, so compressed files
//! (`.arrow.zst`) need no other reader. Messages are framed here, so that their lengths are checked before anything is
//! allocated.

use arrow::{
    array::RecordBatch,
    buffer::Buffer,
    datatypes::SchemaRef,
    error::ArrowError,
    ipc::{self, MessageHeader, reader::StreamDecoder},
};

use super::{NOT_ARROW, decode::Decode, reason::own};

const MAGIC: &[u8] = b"ARROW1";
const CONTINUATION: [u8; 4] = [0xff; 4];
/// Streams that were joined: readers stop after the first one.
const JOINED: &str = "bytes follow the end of the Arrow stream; several streams cannot be joined";
/// Maximum number of zeros after the magic word.
const MAX_PADDING: usize = 4096;
/// A schema of thousands of columns has some hundred kilobytes.
const MAX_METADATA_BYTES: usize = 64 << 20;
/// Maximum decompressed size that a buffer may declare.
const MAX_BUFFER_BYTES: i64 = 4 << 30;
/// Maximum size of a record batch, which is held in memory: a compressed file of some kilobytes may declare any size.
const MAX_BODY_BYTES: usize = 2 << 30;

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    /// Before the first eight bytes: magic word or first prefix.
    Start,
    /// Before the length of a message.
    Prefix,
    /// `start..start + len` of the buffer is the message.
    Message { start: usize, len: usize },
    /// The message's body ends at `end`.
    Body { start: usize, end: usize },
    /// After the end marker of the stream; the footer of a file follows.
    Done,
}

/// Decodes messages as their bytes arrive.
#[derive(Debug)]
pub(super) struct Ipc {
    state: State,
    /// The message so far, from its prefix on.
    message: Vec<u8>,
    decoder: StreamDecoder,
    ready: Option<RecordBatch>,
    read: Option<Vec<usize>>,
    /// Whether it is a file, whose footer must list as many batches as were decoded.
    file: bool,
    batches: usize,
    /// Zeros after the magic word.
    padding: usize,
    /// Whether the decoder was given the continuation marker of the next message.
    marked: bool,
}

impl Ipc {
    /// Returns the columns `read`, indices into the file's schema.
    pub(super) fn new(read: Vec<usize>) -> Self {
        Self { read: Some(read), ..Self::whole() }
    }

    /// Returns all columns.
    pub(super) fn whole() -> Self {
        let (decoder, message) = (StreamDecoder::new(), Vec::new());
        let (ready, read) = (None, None);
        Self { state: State::Start, message, decoder, ready, read, file: false, batches: 0, padding: 0, marked: false }
    }

    /// The schema, after its message was decoded.
    pub(super) fn schema(&self) -> Option<SchemaRef> {
        self.decoder.schema()
    }

    /// Bytes of `message` that the current step needs.
    fn wanted(&self) -> usize {
        match self.state {
            State::Start | State::Prefix => 8,
            State::Message { start, len } => start + len,
            State::Body { end, .. } => end,
            State::Done => 0,
        }
    }

    /// Passes a whole message to the decoder.
    ///
    /// The decoder returns a message without a body (a schema, a batch of NULLs) only when more bytes follow. So it is
    /// given the continuation marker of the next message, and that message is then passed without its marker.
    fn push(&mut self) -> Result<Option<RecordBatch>, ArrowError> {
        let mut bytes = Buffer::from_vec(std::mem::take(&mut self.message));
        if std::mem::take(&mut self.marked) && bytes.starts_with(&CONTINUATION) {
            bytes.advance(CONTINUATION.len());
        }
        contain(|| {
            if let Some(batch) = self.decoder.decode(&mut bytes)? {
                return Ok(Some(batch));
            }
            let mut marker = Buffer::from(CONTINUATION);
            let batch = self.decoder.decode(&mut marker)?;
            self.marked = marker.is_empty();
            Ok(batch)
        })
    }

    /// Whether the message so far is padding of the magic word.
    fn is_padding(&self) -> bool {
        self.message == [0; 8] && self.padding < MAX_PADDING
    }

    fn expect_schema(&self) -> Result<(), ArrowError> {
        let none = || invalid(NOT_ARROW);
        self.schema().map(drop).ok_or_else(none)
    }

    /// Collects the footer of a file. Nothing follows a stream.
    fn footer(&mut self, bytes: &[u8]) -> Result<(), ArrowError> {
        if !self.file {
            return Err(invalid(JOINED));
        }
        self.message.extend_from_slice(bytes);
        match self.message.len() > MAX_METADATA_BYTES {
            true => Err(invalid("not an Arrow file, or damaged: its footer does not end")),
            false => Ok(()),
        }
    }

    /// Takes the next step; `message` holds the bytes that it needs.
    fn step(&mut self) -> Result<(), ArrowError> {
        self.state = match self.state {
            State::Start if self.message.starts_with(MAGIC) => {
                self.file = true;
                self.message.clear();
                State::Prefix
            }
            // Writers pad the magic word to their alignment, which may be more than eight bytes.
            State::Prefix if self.file && self.schema().is_none() && self.is_padding() => {
                self.padding += self.message.len();
                self.message.clear();
                State::Prefix
            }
            State::Start | State::Prefix => {
                let next = prefix(&self.message)?;
                if next == State::Done {
                    self.expect_schema()?;
                    // Before format version 5 the end marker has four bytes; the rest belongs to the footer.
                    self.message.drain(..if self.message.starts_with(&CONTINUATION) { 8 } else { 4 });
                }
                next
            }
            State::Message { start, len } => {
                let body = body_length(&self.message[start..])?;
                State::Body { start, end: start + len + body }
            }
            State::Body { start, .. } => {
                check_buffers(&self.message, start)?;
                self.batches +=
                    usize::from(message(&self.message[start..])?.header_type() == MessageHeader::RecordBatch);
                let batch = self.push()?;
                self.ready = match (batch, &self.read) {
                    (Some(batch), Some(read)) => Some(batch.project(read)?),
                    (batch, _) => batch,
                };
                State::Prefix
            }
            State::Done => State::Done,
        };
        Ok(())
    }
}

impl Decode for Ipc {
    fn decode(&mut self, bytes: &[u8]) -> Result<usize, ArrowError> {
        let mut used = 0;
        while self.ready.is_none() && used < bytes.len() {
            if self.state == State::Done {
                return self.footer(&bytes[used..]).map(|()| bytes.len());
            }
            let missing = self.wanted().saturating_sub(self.message.len());
            let taken = missing.min(bytes.len() - used);
            self.message.extend_from_slice(&bytes[used..used + taken]);
            used += taken;
            while self.ready.is_none() && self.state != State::Done && self.message.len() >= self.wanted() {
                self.step()?;
            }
        }
        Ok(used)
    }

    fn finish(&mut self) -> Result<(), ArrowError> {
        match self.state {
            State::Done if self.file => check_footer(&self.message, self.batches),
            State::Done if self.message.iter().any(|byte| *byte != 0) => Err(invalid(JOINED)),
            State::Done => self.expect_schema(),
            // A stream may end without an end marker.
            State::Prefix if (self.message.is_empty() || self.message == [0; 4]) && !self.file => self.expect_schema(),
            _ if self.schema().is_none() => Err(invalid(NOT_ARROW)),
            _ => Err(invalid("the file ends inside a message; it is cut off")),
        }
    }

    fn flush(&mut self) -> Result<Option<RecordBatch>, ArrowError> {
        Ok(self.ready.take())
    }
}

fn invalid(what: &str) -> ArrowError {
    own(what)
}

/// The length of the next message, from eight bytes. Before format version 5 there was no continuation marker.
fn prefix(bytes: &[u8]) -> Result<State, ArrowError> {
    let word = |at: usize| <[u8; 4]>::try_from(&bytes[at..at + 4]).unwrap_or_default();
    let (start, len) = if word(0) == CONTINUATION { (8, word(4)) } else { (4, word(0)) };
    match u32::from_le_bytes(len) as usize {
        0 => Ok(State::Done),
        len if len <= MAX_METADATA_BYTES => Ok(State::Message { start, len }),
        len => Err(invalid(&format!("not an Arrow file, or damaged: a message declares {len} bytes of metadata"))),
    }
}

fn message(bytes: &[u8]) -> Result<ipc::Message<'_>, ArrowError> {
    ipc::root_as_message(bytes).map_err(|e| invalid(&format!("damaged message: {e}")))
}

fn body_length(bytes: &[u8]) -> Result<usize, ArrowError> {
    let length = message(bytes)?.bodyLength();
    // The bytes are collected as they arrive, so the declared length is not allocated.
    match usize::try_from(length) {
        Ok(length) if length <= MAX_BODY_BYTES => Ok(length),
        _ => Err(invalid(&format!("a record batch of {length} bytes; at most {MAX_BODY_BYTES} are read at once"))),
    }
}

/// Checks the footer: a file that was cut off between two batches is a valid stream.
fn check_footer(bytes: &[u8], batches: usize) -> Result<(), ArrowError> {
    let cut_off = || invalid("the file has no footer; it is cut off");
    let rest = bytes.strip_suffix(MAGIC).ok_or_else(cut_off)?;
    let (rest, length) = rest.split_last_chunk::<4>().ok_or_else(cut_off)?;
    let start = usize::try_from(i32::from_le_bytes(*length)).ok().and_then(|length| rest.len().checked_sub(length));
    let footer = ipc::root_as_footer(&rest[start.ok_or_else(cut_off)?..]);
    let footer = footer.map_err(|e| invalid(&format!("damaged footer: {e}")))?;
    let known = footer.recordBatches().map_or(0, |blocks| blocks.len());
    match known == batches {
        true => Ok(()),
        false => Err(invalid(&format!("damaged: {batches} record batches, but {known} in its footer"))),
    }
}

/// Checks the declared sizes of compressed buffers, which the decoder allocates.
fn check_buffers(bytes: &[u8], start: usize) -> Result<(), ArrowError> {
    let message = message(&bytes[start..])?;
    let batch = match message.header_type() {
        MessageHeader::RecordBatch => message.header_as_record_batch(),
        MessageHeader::DictionaryBatch => message.header_as_dictionary_batch().and_then(|d| d.data()),
        _ => None,
    };
    let Some((batch, true)) = batch.map(|b| (b, b.compression().is_some())) else { return Ok(()) };
    let body_length = usize::try_from(message.bodyLength()).unwrap_or(0);
    let body = &bytes[bytes.len().saturating_sub(body_length)..];
    for buffer in batch.buffers().iter().flatten() {
        let at = usize::try_from(buffer.offset()).unwrap_or(usize::MAX);
        let Some(claim) = body.get(at..).and_then(|rest| rest.first_chunk::<8>()) else { continue };
        let claim = i64::from_le_bytes(*claim);
        if buffer.length() >= 8 && claim > MAX_BUFFER_BYTES {
            return Err(invalid(&format!(
                "a compressed buffer declares {claim} bytes; at most {MAX_BUFFER_BYTES} are decompressed"
            )));
        }
    }
    Ok(())
}

/// Converts panics of the decoder to errors.
fn contain<T>(f: impl FnOnce() -> Result<T, ArrowError>) -> Result<T, ArrowError> {
    super::contain::contain(f).unwrap_or_else(|| Err(invalid("damaged: the reader cannot make sense of it")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow::{
        array::{ArrayRef, DictionaryArray, Int32Array, NullArray, StringArray},
        compute::concat_batches,
        datatypes::Int32Type,
        ipc::{
            MetadataVersion,
            writer::{FileWriter, IpcWriteOptions, StreamWriter},
        },
    };
    use proptest::prelude::*;
    use std::sync::Arc;

    fn batches() -> Vec<RecordBatch> {
        let batch = |from: i32| {
            let n = Int32Array::from_iter_values(from..from + 5);
            let text = StringArray::from_iter_values((from..from + 5).map(|i| format!("row {i}")));
            let words: DictionaryArray<Int32Type> = (from..from + 5).map(|_| Some("same")).collect();
            let columns: [(_, ArrayRef); 3] = [("n", Arc::new(n)), ("text", Arc::new(text)), ("w", Arc::new(words))];
            RecordBatch::try_from_iter(columns).unwrap()
        };
        vec![batch(0), batch(5), batch(10)]
    }

    fn file(options: IpcWriteOptions) -> Vec<u8> {
        let mut writer = FileWriter::try_new_with_options(Vec::new(), &batches()[0].schema(), options).unwrap();
        batches().iter().for_each(|batch| writer.write(batch).unwrap());
        writer.into_inner().unwrap()
    }

    fn stream() -> Vec<u8> {
        let mut writer = StreamWriter::try_new(Vec::new(), &batches()[0].schema()).unwrap();
        batches().iter().for_each(|batch| writer.write(batch).unwrap());
        writer.into_inner().unwrap()
    }

    fn read(bytes: &[u8], chunk: usize) -> Result<Vec<RecordBatch>, ArrowError> {
        let mut decoder = Ipc::new(vec![1, 2]);
        let mut batches = Vec::new();
        for mut chunk in bytes.chunks(chunk) {
            while !chunk.is_empty() {
                let used = decoder.decode(chunk)?;
                chunk = &chunk[used..];
                batches.extend(decoder.flush()?);
            }
        }
        decoder.finish()?;
        batches.extend(decoder.flush()?);
        Ok(batches)
    }

    #[test]
    fn files_and_streams_in_pieces_of_any_size() {
        let zstd = IpcWriteOptions::default().try_with_compression(Some(ipc::CompressionType::ZSTD)).unwrap();
        let expected = concat_batches(&batches()[0].schema(), &batches()).unwrap().project(&[1, 2]).unwrap();
        for bytes in [stream(), file(IpcWriteOptions::default()), file(zstd)] {
            for chunk in [1, 7, 64, 4096, usize::MAX] {
                let read = read(&bytes, chunk).unwrap();
                assert_eq!(concat_batches(&expected.schema(), &read).unwrap(), expected);
            }
        }
    }

    #[test]
    fn a_stream_cut_off_anywhere_is_an_error_or_whole_batches() {
        let bytes = stream();
        for end in 0..bytes.len() {
            if let Ok(read) = read(&bytes[..end], 100) {
                assert!(read.iter().all(|batch| batch.num_rows() == 5), "cut at {end}");
            }
        }
    }

    #[test]
    fn a_file_cut_off_anywhere_is_an_error() {
        let bytes = file(IpcWriteOptions::default());
        for end in 0..bytes.len() {
            assert!(read(&bytes[..end], 100).is_err(), "cut at {end} of {}", bytes.len());
        }
    }

    #[test]
    fn what_never_ends_is_refused() {
        for start in [&b""[..], b"ARROW1\0\0"] {
            let endless = [start, &[0; 10_000]].concat();
            for chunk in [1, 7, usize::MAX] {
                assert_eq!(read(&endless, chunk).unwrap_err().to_string(), format!("External error: {NOT_ARROW}"));
            }
        }
        // Of joined streams, only the first would be read.
        for more in [stream(), vec![0; 100]] {
            let error = read(&[stream(), more].concat(), 64).unwrap_err().to_string();
            assert!(error.contains("bytes follow the end of the Arrow stream"), "{error}");
        }
    }

    #[test]
    fn files_and_streams_of_the_time_before_version_5() {
        let old = || IpcWriteOptions::try_new(8, true, MetadataVersion::V4).unwrap();
        let mut writer = StreamWriter::try_new_with_options(Vec::new(), &batches()[0].schema(), old()).unwrap();
        batches().iter().for_each(|batch| writer.write(batch).unwrap());
        for bytes in [file(old()), writer.into_inner().unwrap()] {
            for chunk in [1, 7, usize::MAX] {
                let rows: usize = read(&bytes, chunk).unwrap().iter().map(RecordBatch::num_rows).sum();
                assert_eq!(rows, 15);
            }
        }
    }

    #[test]
    fn batches_without_a_byte_keep_their_rows() {
        let rows = |n| RecordBatch::try_from_iter([("none", Arc::new(NullArray::new(n)) as ArrayRef)]).unwrap();
        let mut writer = StreamWriter::try_new(Vec::new(), &rows(0).schema()).unwrap();
        [3, 0, 4].into_iter().for_each(|n| writer.write(&rows(n)).unwrap());
        let bytes = writer.into_inner().unwrap();
        let mut decoder = Ipc::whole();
        let (mut counts, mut rest) = (Vec::new(), &bytes[..]);
        while !rest.is_empty() {
            rest = &rest[decoder.decode(rest).unwrap()..];
            counts.extend(decoder.flush().unwrap().map(|batch| batch.num_rows()));
        }
        decoder.finish().unwrap();
        assert_eq!(counts, [3, 0, 4]);
    }

    #[test]
    fn files_and_streams_without_a_row() {
        let schema = batches()[0].schema();
        let file = FileWriter::try_new(Vec::new(), &schema).unwrap().into_inner().unwrap();
        let stream = StreamWriter::try_new(Vec::new(), &schema).unwrap().into_inner().unwrap();
        let without_end = &stream[..stream.len() - 8];
        for bytes in [&file[..], &stream[..], without_end] {
            for chunk in [1, 7, usize::MAX] {
                assert!(read(bytes, chunk).unwrap().is_empty());
                let mut decoder = Ipc::whole();
                for chunk in bytes.chunks(chunk) {
                    assert_eq!(decoder.decode(chunk).unwrap(), chunk.len());
                }
                decoder.finish().unwrap();
                assert_eq!(decoder.schema().unwrap(), schema);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]
        #[test]
        fn damaged_bytes_never_panic(at in 0_usize..4000, to: u8, packed: bool) {
            let zstd = packed.then_some(ipc::CompressionType::ZSTD);
            let mut bytes = file(IpcWriteOptions::default().try_with_compression(zstd).unwrap());
            let at = at % bytes.len();
            bytes[at] = to;
            let _ = read(&bytes, 256);
        }
    }
}
