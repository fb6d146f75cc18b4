//! Decodes CSV.

use arrow::{array::RecordBatch, csv, datatypes::SchemaRef, error::ArrowError};

use super::{
    decode::{BATCH_BYTES, Decode},
    reading::Cells,
    reason::{csv_row, own},
};

/// Tracks where rows end, as Arrow's decoder cannot be flushed in the middle of a row.
pub(super) struct Csv {
    decoder: csv::reader::Decoder,
    quotes: Quotes,
    /// How rows are divided; whether the header line is the first record.
    cells: Cells,
    batch_rows: usize,
    /// Bytes of the rows that were not flushed yet.
    bytes: usize,
}

impl Csv {
    /// Reads the columns `read` (indices into `schema`, ascending) of a file from its beginning or, if `cells` has no
    /// header, from the beginning of a row.
    pub(super) fn new(schema: &SchemaRef, read: Vec<usize>, cells: Cells, batch_rows: usize) -> Self {
        let batch_rows = self::batch_rows(batch_rows, schema.fields().len());
        let decoder = decoder(schema, read, cells, batch_rows);
        Self { decoder, quotes: Quotes::default(), cells, batch_rows, bytes: 0 }
    }

    /// The same from the beginning of a row.
    pub(super) fn from_row(
        schema: &SchemaRef,
        read: Vec<usize>,
        cells: Cells,
        batch_rows: usize,
    ) -> Result<Self, ArrowError> {
        let mut csv = Self::new(schema, read, Cells { header: false, ..cells }, batch_rows);
        // The decoder drops a byte order mark at its beginning, which belongs to a cell here; an empty line is no row.
        csv.feed(b"\n")?;
        Ok(csv)
    }

    /// Passes bytes to the decoder; returns how many it took.
    fn feed(&mut self, bytes: &[u8]) -> Result<usize, ArrowError> {
        if bytes.is_empty() {
            // The decoder would take it for the end of the file.
            return Ok(0);
        }
        let used = self.decoder.decode(bytes)?;
        self.quotes.read(&bytes[..used], self.cells.delimiter);
        self.bytes += used;
        Ok(used)
    }
}

impl Decode for Csv {
    fn decode(&mut self, bytes: &[u8]) -> Result<usize, ArrowError> {
        let (rest_of_batch, after) = bytes.split_at(BATCH_BYTES.saturating_sub(self.bytes).min(bytes.len()));
        let used = self.feed(rest_of_batch)?;
        match used == rest_of_batch.len() {
            true => Ok(used + self.feed(&after[..self.quotes.row_end(after, self.cells.delimiter)])?),
            false => Ok(used),
        }
    }

    fn finish(&mut self) -> Result<(), ArrowError> {
        if self.quotes == Quotes::Inside {
            // Arrow's decoder would return the rest of the file as one cell.
            return Err(own("a quotation that begins in the next row is never closed"));
        }
        self.decoder.decode(&[]).map(drop)
    }

    fn flush(&mut self) -> Result<Option<RecordBatch>, ArrowError> {
        self.bytes = 0;
        self.decoder.flush()
    }

    fn waiting(&self) -> usize {
        self.batch_rows - self.decoder.capacity()
    }

    fn broken_row(&self, error: &ArrowError) -> Option<u64> {
        csv_row(error).map(|row| row + u64::from(!self.cells.header))
    }

    fn again(&self, schema: &SchemaRef, read: &[usize], from_start: bool) -> Option<Box<dyn Decode>> {
        Some(Box::new(match from_start {
            true => Self::new(schema, read.to_vec(), self.cells, 1),
            false => Self::from_row(schema, read.to_vec(), self.cells, 1).ok()?,
        }))
    }
}

/// Maximum number of cells of a batch. The decoder allocates eight bytes for each of them at once: 64 MiB.
const BATCH_CELLS: usize = 8 << 20;

/// Rows of a batch, fewer than `rows` for thousands of columns.
pub(crate) fn batch_rows(rows: usize, columns: usize) -> usize {
    rows.min(BATCH_CELLS / columns.max(1)).max(1)
}

/// Arrow's decoder of the columns `read`.
pub(super) fn decoder(schema: &SchemaRef, read: Vec<usize>, cells: Cells, batch_rows: usize) -> csv::reader::Decoder {
    csv::ReaderBuilder::new(SchemaRef::clone(schema))
        .with_header(cells.header)
        .with_delimiter(cells.delimiter)
        .with_projection(read)
        .with_batch_size(batch_rows)
        .build_decoder()
}

/// State of the CSV grammar (RFC 4180), as far as quotation marks matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Quotes {
    /// Before the first byte of a cell.
    #[default]
    Start,
    /// In a cell that does not begin with a quotation mark: marks in it are ordinary characters.
    Plain,
    /// In a cell that begins with a quotation mark.
    Inside,
    /// After a mark in such a cell: its end, or the first of two that stand for one.
    Closed,
}

impl Quotes {
    fn read(&mut self, bytes: &[u8], delimiter: u8) {
        bytes.iter().for_each(|&byte| *self = self.after(byte, delimiter));
    }

    /// The state after the next byte.
    pub(super) fn after(self, byte: u8, delimiter: u8) -> Self {
        match (self, byte) {
            (Self::Start, b'"') | (Self::Closed, b'"') => Self::Inside,
            (Self::Inside, b'"') => Self::Closed,
            (Self::Inside, _) => Self::Inside,
            (_, b'\n' | b'\r') => Self::Start,
            (_, byte) if byte == delimiter => Self::Start,
            _ => Self::Plain,
        }
    }

    /// Length of `bytes` up to and with the first end of a row; of all if no row ends.
    fn row_end(mut self, bytes: &[u8], delimiter: u8) -> usize {
        let end = bytes.iter().position(|&byte| {
            self = self.after(byte, delimiter);
            self == Self::Start && byte != delimiter
        });
        end.map_or(bytes.len(), |at| at + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotations_that_are_closed_and_one_that_is_not() {
        // By RFC 4180: a mark inside a cell that does not begin with one is an ordinary character.
        let closed =
            ["a,b\n", "\"a\",b\n", "\"a \"\" b\"\n", "5\" disk,x\n", "\"\"\n", "\"two\nlines\"", "", "\"a\"\r\nb"];
        for text in closed {
            let mut quotes = Quotes::default();
            quotes.read(text.as_bytes(), b',');
            assert_ne!(quotes, Quotes::Inside, "{text:?}");
        }
        for text in ["\"", "a,\"b\nc,d\n", "\"a\"\"\n", "x\n\"\"\"y"] {
            let mut quotes = Quotes::default();
            text.as_bytes().chunks(1).for_each(|byte| quotes.read(byte, b','));
            assert_eq!(quotes, Quotes::Inside, "{text:?}");
        }
    }

    #[test]
    fn the_end_of_a_row_is_not_inside_quotation_marks() {
        let text = b"a,\"b\nc\"\nd,e\n";
        let end_after = |start: usize| {
            let mut quotes = Quotes::default();
            quotes.read(&text[..start], b',');
            start + quotes.row_end(&text[start..], b',')
        };
        assert_eq!([end_after(0), end_after(7), end_after(8), end_after(9), end_after(12)], [8, 8, 12, 12, 12]);
        assert_eq!(Quotes::default().row_end(b"a,b", b','), 3);
    }
}
