//! How many rows there are, without reading more than a little.

use std::sync::Arc;

use arrow::datatypes::Schema;

use super::{Plan, Position, Rows, SourceError, plan::FilePlan, row_bytes};

/// Rows of a Parquet file that are read for their size: it knows what its texts take when each is stored once, not how
/// long they are.
const SAMPLE_ROWS: u64 = 4096;

/// Rows of a file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Counted {
    /// Rows.
    pub rows: u64,
    /// Bytes of text; those of a large file follow from the part that was read.
    pub text_bytes: u64,
    /// Whether `rows` was counted to the end, or is said by the file.
    pub exact: bool,
}

impl Plan {
    /// Counts the rows of file `number`. Parquet says so in its footer, and some thousand are read for their size; of
    /// others at most about `most` bytes are read, and the rest of the file is taken to be like them.
    ///
    /// # Errors
    /// [`SourceError::Malformed`] or [`SourceError::Store`] when the file cannot be read.
    pub async fn count(&self, number: usize, most: u64) -> Result<Counted, SourceError> {
        let Some(plan) = self.files.get(number) else { return Ok(Counted { rows: 0, text_bytes: 0, exact: true }) };
        let mut reader = Rows::new(Arc::new(self.texts(plan)), Position::default());
        let (mut rows, mut text_bytes) = (0, 0);
        while let Some(slice) = reader.next().await? {
            let mut sizes = vec![0; slice.len()];
            row_bytes(&slice.text, &mut sizes);
            rows += slice.len() as u64;
            text_bytes += sizes.iter().sum::<u64>();
            let scale = |n: u64, whole: u64, part: u64| (n as f64 * whole as f64 / part as f64) as u64;
            let taken = reader.bytes_read();
            match reader.rows_in_footer() {
                Some(all) if rows >= SAMPLE_ROWS.min(all) => {
                    return Ok(Counted { rows: all, text_bytes: scale(text_bytes, all, rows), exact: true });
                }
                None if taken >= most && taken < plan.file.size => {
                    let [rows, text_bytes] = [rows, text_bytes].map(|n| scale(n, plan.file.size, taken));
                    return Ok(Counted { rows, text_bytes, exact: false });
                }
                _ => {}
            }
        }
        Ok(Counted { rows, text_bytes, exact: true })
    }

    /// The texts of one file, and nothing else.
    fn texts(&self, file: &FilePlan) -> Self {
        let read = file.read.get(file.text).copied().into_iter().collect();
        let file = FilePlan { read, text: 0, kept: Vec::new(), ..file.clone() };
        Self { files: vec![file], text: self.text.clone(), kept: Arc::new(Schema::empty()) }
    }
}
