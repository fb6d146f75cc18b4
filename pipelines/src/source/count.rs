//! How many rows there are, without reading more than a little.

use std::sync::Arc;

use super::{Format, Plan, Position, Rows, SourceError, parquet, row_bytes};

/// Rows of a file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Counted {
    /// Rows.
    pub rows: u64,
    /// Bytes of text.
    pub text_bytes: u64,
    /// Counted to the end, or said by the file; otherwise it follows from the part that was read.
    pub exact: bool,
}

impl Plan {
    /// Counts the rows of file `number`. Parquet says so in its footer; of others at most about `most` bytes are read,
    /// and the rest of the file is taken to be like them.
    ///
    /// # Errors
    /// [`SourceError::Malformed`] or [`SourceError::Store`] when the file cannot be read.
    pub async fn count(self: &Arc<Self>, number: usize, most: u64) -> Result<Counted, SourceError> {
        let Some(plan) = self.files.get(number) else { return Ok(Counted { rows: 0, text_bytes: 0, exact: true }) };
        if plan.file.format == Format::Parquet {
            let (rows, text_bytes) = parquet::count(&plan.file, plan.read[plan.text]).await?;
            return Ok(Counted { rows, text_bytes, exact: true });
        }
        let mut reader = Rows::new(Arc::clone(self), Position { file: number, row: 0 });
        let before = reader.bytes_read();
        let (mut rows, mut text_bytes) = (0, 0);
        while let Some(slice) = reader.next().await?.filter(|slice| slice.start.file == number) {
            let mut sizes = vec![0; slice.len()];
            row_bytes(&slice.text, &mut sizes);
            rows += slice.len() as u64;
            text_bytes += sizes.iter().sum::<u64>();
            let taken = reader.bytes_read() - before;
            if taken >= most && taken < plan.file.size {
                let scale = |n: u64| (n as f64 * plan.file.size as f64 / taken as f64) as u64;
                return Ok(Counted { rows: scale(rows), text_bytes: scale(text_bytes), exact: false });
            }
        }
        Ok(Counted { rows, text_bytes, exact: true })
    }
}
