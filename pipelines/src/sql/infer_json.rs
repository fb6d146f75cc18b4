//! Infers the columns of JSON, over all rows of a file: a key that only a late row has is a column, too.

use std::io::{self, BufRead, Read};

use arrow::datatypes::Schema;
use datafusion::common::{DataFusionError, Result};

use super::{error::external, plain_text::Broken};
use crate::source::{
    Shape,
    infer_json::{Inference, Reader},
    reason::{Reason, of_own_io},
};

/// Maximum bytes of a line.
const MAX_LINE_BYTES: u64 = 256 << 20;

/// The columns of the first `max_rows` rows; of all for `None`. `shape` is that of the text whose lines these are.
pub(super) fn infer(mut lines: impl BufRead, shape: Shape, max_rows: Option<usize>) -> Result<Schema> {
    let (mut inference, mut line) = (Inference::new(Reader::Query, shape, max_rows), Vec::new());
    while !inference.is_full() {
        line.clear();
        let read = (&mut lines).take(MAX_LINE_BYTES).read_until(b'\n', &mut line);
        if read.map_err(|error| read_error(inference.rows() as u64, error))? == 0 {
            break;
        }
        inference
            .add(&line)
            .map_err(|broken| external(Broken { row: broken.row, reason: Reason::from(&broken.reason).to_string() }))?;
    }
    Ok(inference.schema())
}

/// An array that is not valid has rows before the error; other errors are those of the store or of compressed data.
fn read_error(row: u64, error: io::Error) -> DataFusionError {
    match of_own_io(&error) {
        Some(reason) => external(Broken { row, reason: Reason::from(reason).to_string() }),
        None => DataFusionError::IoError(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_is_no_json_is_named() {
        for broken in ["{\"a\": ", "[1]", "{\"a\": 1e400}", "{\"a\": 1} {\"a\": 2}", "{'a': 1}"] {
            let text = format!("{{\"a\": 1}}\n\n{{\"a\": 2}}\n{broken}\n{{\"a\": 4}}\n");
            let error = infer(text.as_bytes(), Shape::default(), None).unwrap_err().to_string();
            assert!(error.contains("after row 2: Json error: line 4 of the file: not "), "{error}");
        }
        assert!(infer("{\"a\": 1}\n[1]".as_bytes(), Shape::default(), Some(1)).is_ok());
    }
}
