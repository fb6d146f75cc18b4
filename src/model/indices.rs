//! The indices of a batch on the device of the model.

use tch::{Device, Tensor};

use super::{DeviceError, batch::PackedBatch, tensors};

/// The indices of a batch, in one upload: a GPU finishes its work before each.
#[derive(Debug)]
pub(crate) struct Indices {
    /// For each direction and packed row, the row of the token table that it reads, `[R]`.
    pub(crate) read: [Tensor; 2],
    /// The rows in which a sentence begins, of each step; `None` where none does.
    pub(crate) begins: Vec<Option<Tensor>>,
}

impl Indices {
    /// Uploads the indices of a batch; without `begins` only those of the token table.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room or libtorch fails.
    pub(crate) fn new(batch: &PackedBatch, begins: bool, device: Device) -> Result<Self, DeviceError> {
        let [forward, backward] = batch.ids();
        let steps = if begins { batch.packings().steps().len() } else { 0 };
        // Both directions read the same sentences wherever a row holds several.
        let rows: Vec<&[i64]> = (0..steps).map(|t| batch.packings().of(0).begins(t)).collect();
        let sizes: Vec<i64> = [forward.len(), backward.len()]
            .into_iter()
            .chain(rows.iter().map(|rows| rows.len()))
            .map(|n| n as i64)
            .collect();
        let all = [forward.as_slice(), backward].into_iter().chain(rows).collect::<Vec<_>>().concat();
        let mut parts = tensors::index(&all, device)?.f_split_with_sizes(&sizes, 0)?.into_iter();
        let (Some(forward), Some(backward)) = (parts.next(), parts.next()) else {
            return Err(DeviceError::internal("an upload has no parts"));
        };
        let begins = parts.zip(&sizes[2..]).map(|(part, size)| (*size > 0).then_some(part)).collect();
        Ok(Self { read: [forward, backward], begins })
    }
}
