//! Decodes lines of JSON.

use std::mem;

use arrow::{array::RecordBatch, datatypes::SchemaRef, error::ArrowError, json};

use super::{
    decode::{BATCH_BYTES, Decode},
    escapes::Escapes,
    reason::own,
};

/// Replaces the escapes that Arrow's decoder gets wrong, then decodes.
pub(crate) struct Json {
    decoder: json::reader::Decoder,
    escapes: Escapes,
    /// How many of the next bytes are known to need no rewriting, so that each byte is searched once.
    plain: usize,
    /// Rewritten bytes, and how many of them were decoded.
    rewritten: Vec<u8>,
    taken: usize,
    full: bool,
    /// Bytes of the rows that were not flushed yet.
    bytes: usize,
    strict: bool,
}

impl Json {
    /// Reads the columns of `schema`. If it is `strict`, a key that the schema lacks is an error; otherwise it is ignored.
    pub(crate) fn new(schema: SchemaRef, batch_rows: usize, strict: bool) -> Result<Self, ArrowError> {
        let builder = json::ReaderBuilder::new(schema).with_batch_size(batch_rows).with_coerce_primitive(true);
        let builder = builder.with_strict_mode(strict);
        Ok(Self {
            decoder: builder.build_decoder()?,
            escapes: Escapes::default(),
            plain: 0,
            rewritten: Vec::new(),
            taken: 0,
            full: false,
            bytes: 0,
            strict,
        })
    }

    /// Passes bytes to the decoder; returns how many it took. It is full after [`BATCH_BYTES`], at the end of a row.
    fn feed(&mut self, bytes: &[u8]) -> Result<usize, ArrowError> {
        let mut used = 0;
        self.full = false;
        while used < bytes.len() && !self.full {
            let piece = to_brace(&bytes[used..], BATCH_BYTES.saturating_sub(self.bytes));
            let n = self.decoder.decode(piece)?;
            (used, self.bytes) = (used + n, self.bytes + n);
            self.full = n < piece.len() || (self.bytes >= BATCH_BYTES && !self.decoder.has_partial_record());
        }
        Ok(used)
    }

    /// Passes the rewritten bytes to the decoder.
    fn feed_rewritten(&mut self) -> Result<(), ArrowError> {
        let rewritten = mem::take(&mut self.rewritten);
        self.taken += self.feed(&rewritten[self.taken..])?;
        if self.taken < rewritten.len() {
            self.rewritten = rewritten;
        } else {
            self.taken = 0;
        }
        Ok(())
    }
}

/// Says what to do about a key that the schema lacks. Names of columns are no data.
fn unknown_key(error: ArrowError) -> ArrowError {
    const KEY: (&str, &str) = ("column '", "' missing from schema");
    let ArrowError::JsonError(reason) = &error else { return error };
    let key = reason.strip_suffix(KEY.1).and_then(|reason| reason.rsplit_once(KEY.0));
    let Some((_, key)) = key else { return error };
    own(format!("the key {key:?} is not in the rows from which the columns were inferred"))
}

/// The first `min` bytes, and on to the first closing brace: every row ends with one.
fn to_brace(bytes: &[u8], min: usize) -> &[u8] {
    let min = min.min(bytes.len());
    let brace = bytes[min..].iter().position(|&byte| byte == b'}');
    brace.map_or(bytes, |at| &bytes[..min + at + 1])
}

impl Decode for Json {
    fn decode(&mut self, bytes: &[u8]) -> Result<usize, ArrowError> {
        if !self.rewritten.is_empty() {
            self.feed_rewritten()?;
            return Ok(0);
        }
        if self.plain == 0 && self.escapes.is_plain(bytes) {
            self.plain = bytes.len();
        }
        if self.plain > 0 {
            let used = self.feed(&bytes[..self.plain.min(bytes.len())])?;
            self.plain -= used;
            return Ok(used);
        }
        self.escapes.rewrite(bytes, &mut self.rewritten);
        self.feed_rewritten()?;
        Ok(bytes.len())
    }

    fn is_full(&self, _: usize, _: usize) -> bool {
        self.full
    }

    fn finish(&mut self) -> Result<(), ArrowError> {
        self.escapes.finish(&mut self.rewritten);
        self.feed_rewritten()?;
        if self.rewritten.is_empty() {
            // The decoder ends a number only at the next character.
            self.decoder.decode(b"\n")?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<Option<RecordBatch>, ArrowError> {
        self.bytes = 0;
        self.decoder.flush().map_err(unknown_key)
    }

    fn waiting(&self) -> usize {
        // The decoder counts the row that it is in.
        self.decoder.len().saturating_sub(1)
    }

    fn held(&self) -> Vec<u8> {
        [&self.rewritten[self.taken..], self.escapes.open()].concat()
    }

    fn again(&self, schema: &SchemaRef, read: &[usize], _: bool) -> Option<Box<dyn Decode>> {
        let wanted = schema.project(read).ok()?;
        Some(Box::new(Self::new(wanted.into(), 1, self.strict).ok()?))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::datatypes::{DataType, Field, Schema};

    use super::*;

    /// Each byte is searched once. Searching the rest again for every batch would search each byte several times.
    #[test]
    fn json_is_searched_for_escapes_once() {
        let text = "{\"a\": 1}\n".repeat(10_000);
        let schema = Arc::new(Schema::new(vec![Field::new("a", DataType::Utf8, true)]));
        let mut json = Json::new(schema, 4, true).unwrap();
        let (mut rest, mut rows) = (text.as_bytes(), 0);
        while !rest.is_empty() {
            let used = json.decode(rest).unwrap();
            let offered = rest.len();
            rest = &rest[used..];
            if json.is_full(used, offered) {
                rows += json.flush().unwrap().map_or(0, |batch| batch.num_rows());
            }
        }
        json.finish().unwrap();
        rows += json.flush().unwrap().map_or(0, |batch| batch.num_rows());
        assert_eq!((rows, json.escapes.searched), (10_000, text.len()));
    }
}
