//! Decodes lines of text, a row each.

use std::sync::Arc;

use arrow::{
    array::{ArrayRef, BinaryBuilder, RecordBatch},
    datatypes::{DataType, Field, Schema, SchemaRef},
    error::ArrowError,
};

use super::{
    decode::{Decode, MAX_ROW_BYTES},
    reason::own,
};

/// A batch ends with the line that reaches this many bytes.
const BATCH_BYTES: usize = 1 << 20;
const BATCH_ROWS: usize = 8192;

/// The only column of a text file. Binary, as a line need not be UTF-8: the embedder reports such a row.
pub(super) fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![Field::new("text", DataType::Binary, true)]))
}

/// Splits at `\n` and `\r\n`. What follows the last line end is a row if it is not empty.
#[derive(Debug)]
pub(super) struct Lines {
    /// The beginning of the current line.
    open: Vec<u8>,
    rows: BinaryBuilder,
    n_rows: usize,
    n_bytes: usize,
}

impl Lines {
    pub(super) fn new() -> Self {
        Self { open: Vec::new(), rows: BinaryBuilder::new(), n_rows: 0, n_bytes: 0 }
    }

    fn close_line(&mut self) {
        let line = self.open.strip_suffix(b"\r").unwrap_or(&self.open);
        self.rows.append_value(line);
        self.n_rows += 1;
        self.n_bytes += line.len();
        self.open.clear();
        // Release the memory of a huge line.
        self.open.shrink_to(BATCH_BYTES);
    }

    fn is_full(&self) -> bool {
        self.n_rows >= BATCH_ROWS || self.n_bytes >= BATCH_BYTES
    }
}

impl Decode for Lines {
    fn decode(&mut self, bytes: &[u8]) -> Result<usize, ArrowError> {
        let mut used = 0;
        while used < bytes.len() && !self.is_full() {
            let rest = &bytes[used..];
            let end = rest.iter().position(|&b| b == b'\n');
            let line = &rest[..end.unwrap_or(rest.len())];
            if self.open.len() + line.len() > MAX_ROW_BYTES {
                return Err(own(format!("the line is longer than {} MiB", MAX_ROW_BYTES >> 20)));
            }
            self.open.extend_from_slice(line);
            used += line.len();
            if end.is_some() {
                used += 1;
                self.close_line();
            }
        }
        Ok(used)
    }

    fn finish(&mut self) -> Result<(), ArrowError> {
        if !self.open.is_empty() {
            self.close_line();
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<Option<RecordBatch>, ArrowError> {
        if self.n_rows == 0 {
            return Ok(None);
        }
        (self.n_rows, self.n_bytes) = (0, 0);
        let column: ArrayRef = Arc::new(self.rows.finish());
        RecordBatch::try_new(schema(), vec![column]).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow::array::AsArray;

    fn lines(chunks: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut decoder = Lines::new();
        for chunk in chunks {
            assert_eq!(decoder.decode(chunk).unwrap(), chunk.len());
        }
        decoder.finish().unwrap();
        let Some(batch) = decoder.flush().unwrap() else { return vec![] };
        batch.column(0).as_binary::<i32>().iter().map(|line| line.unwrap().to_vec()).collect()
    }

    #[test]
    fn ends_of_lines() {
        let cases: [(&[u8], &[&[u8]]); 7] = [
            (b"", &[]),
            (b"a", &[b"a"]),
            (b"a\n", &[b"a"]),
            (b"a\r\nb", &[b"a", b"b"]),
            (b"\n\na\n", &[b"", b"", b"a"]),
            (b"a\rb\n\xff\n", &[b"a\rb", b"\xff"]),
            (b"a\n\r", &[b"a", b""]),
        ];
        for (bytes, expected) in cases {
            assert_eq!(lines(&[bytes]), expected, "{bytes:?}");
            let single: Vec<&[u8]> = bytes.chunks(1).collect();
            assert_eq!(lines(&single), expected, "byte by byte: {bytes:?}");
        }
    }
}
