//! A table of token vectors that stays on the device from batch to batch.

use tch::{Device, Kind, Tensor};

use super::{BiLm, DeviceError};

/// Token vectors of words, `[U, P]` in the precision and on the device of a model. Vectors are appended; a table that is full begins
/// anew.
#[derive(Debug)]
pub(crate) struct DeviceTable {
    /// Has room for `capacity` rows, or is the table of a single batch with more words.
    vectors: Tensor,
    used: i64,
    capacity: i64,
}

impl DeviceTable {
    /// A table of at most `bytes`; it may have more for a batch with more words.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room or libtorch fails.
    pub(crate) fn new(model: &BiLm, bytes: usize) -> Result<Self, DeviceError> {
        let width = model.projection_dim();
        let capacity = bytes / (width * model.kind().elt_size_in_bytes()).max(1);
        let capacity = i64::try_from(capacity).unwrap_or(i64::MAX);
        let vectors = empty(capacity, width, model.kind(), model.torch_device())?;
        Ok(Self { vectors, used: 0, capacity })
    }

    /// Number of words that can be appended.
    pub(crate) fn room(&self) -> usize {
        usize::try_from(self.capacity - self.used).unwrap_or(0)
    }

    /// Removes all words.
    pub(crate) fn clear(&mut self) {
        self.used = 0;
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
        let count = words.len() as i64;
        if first == 0 && count > self.capacity {
            self.vectors = new;
        } else {
            if self.vectors.size()[0] != self.capacity {
                self.vectors = empty(self.capacity, model.projection_dim(), model.kind(), model.torch_device())?;
            }
            self.vectors.f_narrow(0, first, count)?.f_copy_(&new)?;
        }
        self.used = first + count;
        Ok(first)
    }

    /// The rows that are used, `[U, P]`.
    pub(super) fn rows(&self) -> Result<Tensor, DeviceError> {
        Ok(self.vectors.f_narrow(0, 0, self.used)?)
    }
}

fn empty(rows: i64, width: usize, kind: Kind, device: Device) -> Result<Tensor, DeviceError> {
    Ok(Tensor::f_empty([rows, width as i64], (kind, device))?)
}
