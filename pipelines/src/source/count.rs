//! Estimates the number of rows of a file from a sample of its bytes.

use std::sync::Arc;

use arrow::datatypes::Schema;

use super::{Plan, Position, Rows, SourceError, plan::FilePlan, row_bytes};

/// Rows of a Parquet file that are read to measure texts: its footer counts texts that are stored once, as in dictionaries,
/// only once.
const SAMPLE_ROWS: u64 = 4096;

/// Number of rows of a file, and size of its texts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Counted {
    /// Number of rows.
    pub rows: u64,
    /// Bytes of text, extrapolated from the part that was read.
    pub text_bytes: u64,
    /// Whether `rows` is exact: counted to the end of the file, or taken from its footer.
    pub exact: bool,
}

impl Plan {
    /// Counts the rows of file `number`. The footer of a Parquet file holds their number, and some thousand rows are read
    /// to measure texts. Of other formats about `max_bytes` are read at most, and the result is extrapolated. Rows after the
    /// first `limit` do not count.
    ///
    /// # Errors
    /// [`SourceError::Malformed`] or [`SourceError::Store`] when the file cannot be read.
    pub async fn count(&self, number: usize, max_bytes: u64, limit: Option<u64>) -> Result<Counted, SourceError> {
        let Some(plan) = self.files.get(number) else { return Ok(Counted { rows: 0, text_bytes: 0, exact: true }) };
        let mut reader = Rows::new(Arc::new(self.texts(plan)), Position::default());
        let (mut rows, mut text_bytes) = (0, 0);
        let limit = limit.unwrap_or(u64::MAX);
        while let Some(slice) = reader.next().await? {
            let wanted = usize::try_from(limit - rows).unwrap_or(usize::MAX).min(slice.len());
            let slice = slice.slice(0, wanted);
            let mut sizes = vec![0; slice.len()];
            row_bytes(&slice.text, &mut sizes);
            rows += slice.len() as u64;
            text_bytes += sizes.iter().sum::<u64>();
            let scale = |n: u64, whole: u64, part: u64| (n as f64 * whole as f64 / part as f64) as u64;
            let taken = reader.bytes_read();
            if rows == limit {
                break;
            }
            match reader.rows_in_footer() {
                Some(all) if rows >= SAMPLE_ROWS.min(all) => {
                    let all = all.min(limit);
                    return Ok(Counted { rows: all, text_bytes: scale(text_bytes, all, rows), exact: true });
                }
                None if taken >= max_bytes && taken < plan.file.size => {
                    let [rows, text_bytes] = [rows, text_bytes].map(|n| scale(n, plan.file.size, taken));
                    let whole = limit.min(rows);
                    let text_bytes = scale(text_bytes, whole, rows);
                    return Ok(Counted { rows: whole, text_bytes, exact: false });
                }
                _ => {}
            }
        }
        Ok(Counted { rows, text_bytes, exact: true })
    }

    /// A plan that reads only the texts of file `number`, which is its file 0.
    pub(crate) fn only(&self, number: usize) -> Option<Self> {
        self.files.get(number).map(|file| self.texts(file))
    }

    /// A plan that reads only the texts of one file.
    fn texts(&self, file: &FilePlan) -> Self {
        let read = file.read.get(file.text).copied().into_iter().collect();
        let file = FilePlan { read, text: 0, kept: Vec::new(), wants_all: false, ..file.clone() };
        Self { files: vec![file], text: self.text.clone(), kept: Arc::new(Schema::empty()) }
    }
}
