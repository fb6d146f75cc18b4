//! The indices of a batch on the device of the model.

use tch::{Device, Tensor};

use super::{DeviceError, batch::PackedBatch, tensors};

/// In which form the time loop reads where sentences begin in a row after another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// In host memory, from the packing.
    Host,
    /// Rows of each step.
    Rows,
    /// A number per packed row.
    Marks,
}

/// The indices of a batch, in one upload, because each is a copy and a call.
#[derive(Debug)]
pub(crate) struct Indices {
    /// For each direction and packed row, the row of the token table that it reads, `[R]`.
    pub(crate) read: [Tensor; 2],
    /// [`Form::Rows`]: the rows in which a sentence begins, of each step; `None` where none does.
    pub(crate) begins: Vec<Option<Tensor>>,
    /// [`Form::Marks`]: `[R]`, 1 where a sentence begins in a row after another one and 0 elsewhere; `None` if none does.
    pub(crate) marks: Option<Tensor>,
}

impl Indices {
    /// Uploads the indices of a batch.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room or libtorch fails.
    pub(crate) fn new(batch: &PackedBatch, form: Form, device: Device) -> Result<Self, DeviceError> {
        let [forward, backward] = batch.ids();
        // Both directions read the same sentences wherever a row holds several.
        let packing = batch.packings().of(0);
        let marks = if form == Form::Marks { packing.marks() } else { Vec::new() };
        let steps = if form == Form::Rows { packing.steps().len() } else { 0 };
        let rows = (0..steps).map(|t| packing.begins(t));
        let parts: Vec<&[i64]> = [forward.as_slice(), backward, &marks].into_iter().chain(rows).collect();
        let sizes: Vec<i64> = parts.iter().map(|part| part.len() as i64).collect();
        let uploaded = tensors::index(&parts.concat(), device)?.f_split_with_sizes(&sizes, 0)?;
        let mut parts = uploaded.into_iter().zip(&sizes).map(|(part, size)| (*size > 0).then_some(part));
        let (Some(forward), Some(backward), Some(marks)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(DeviceError::internal("an upload has no parts"));
        };
        let (Some(forward), Some(backward)) = (forward, backward) else {
            return Err(DeviceError::internal("a batch has no rows"));
        };
        Ok(Self { read: [forward, backward], begins: parts.collect(), marks })
    }
}
