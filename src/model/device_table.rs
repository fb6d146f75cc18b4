//! A table of token vectors that stays on the device from batch to batch.

use tch::Tensor;

use super::{BiLm, DeviceError};

/// Rows of the first allocation.
const FIRST_ROWS: i64 = 4096;

/// Token vectors of words, `[U, P]` in the precision and on the device of a model. Vectors are appended; a table that is full begins
/// anew.
#[derive(Debug)]
pub(crate) struct DeviceTable {
    /// Allocated as words come: twice as many rows each time.
    vectors: Tensor,
    used: i64,
    capacity: i64,
}

impl DeviceTable {
    /// A table of at most `bytes`; it may have more for a single batch with more words.
    ///
    /// # Errors
    /// [`DeviceError`] when libtorch fails.
    pub(crate) fn new(model: &BiLm, bytes: usize) -> Result<Self, DeviceError> {
        let row = (model.projection_dim() * model.kind().elt_size_in_bytes()).max(1);
        // Row numbers and sizes stay far below the limits of 64 bits.
        let capacity = i64::try_from(bytes / row).unwrap_or(i64::MAX).min(1 << 32);
        Ok(Self { vectors: empty(model, 0)?, used: 0, capacity })
    }

    /// Number of words that can be appended.
    pub(crate) fn room(&self) -> usize {
        usize::try_from(self.capacity - self.used).unwrap_or(0)
    }

    /// Removes all words, and the memory of a table that is larger than its limit.
    ///
    /// # Errors
    /// [`DeviceError`] when libtorch fails.
    pub(crate) fn clear(&mut self, model: &BiLm) -> Result<(), DeviceError> {
        self.used = 0;
        if self.rows_allocated() > self.capacity {
            self.vectors = empty(model, 0)?;
        }
        Ok(())
    }

    /// Computes the vectors of words and appends them; returns the row of the first one. An empty table takes any number of words.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room or libtorch fails; then nothing was appended.
    pub(crate) fn append(&mut self, model: &BiLm, words: &[&str]) -> Result<i64, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        let first = self.used;
        if words.is_empty() {
            return Ok(first);
        }
        let new = model.token_table(words)?; // [n, P]
        let end = first + words.len() as i64;
        if first == 0 && end > self.capacity {
            self.vectors = new;
        } else {
            if self.rows_allocated() < end {
                let rows = end.max(2 * self.rows_allocated()).max(FIRST_ROWS).min(self.capacity);
                let larger = empty(model, rows)?;
                larger.f_narrow(0, 0, first)?.f_copy_(&self.rows()?)?;
                self.vectors = larger;
            }
            self.vectors.f_narrow(0, first, words.len() as i64)?.f_copy_(&new)?;
        }
        self.used = end;
        Ok(first)
    }

    fn rows_allocated(&self) -> i64 {
        self.vectors.size()[0]
    }

    /// The rows that are used, `[U, P]`.
    pub(super) fn rows(&self) -> Result<Tensor, DeviceError> {
        Ok(self.vectors.f_narrow(0, 0, self.used)?)
    }
}

fn empty(model: &BiLm, rows: i64) -> Result<Tensor, DeviceError> {
    Ok(Tensor::f_empty([rows, model.projection_dim() as i64], (model.kind(), model.torch_device()))?)
}
