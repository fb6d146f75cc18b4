//! The indices of a batch on the device of the model.

use std::ops::Range;

use tch::{Device, Tensor};

use super::{DeviceError, batch::PackedBatch, tensors, word_parts::WordParts};

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
    /// The words that the first layer multiplies before its steps; `None` where it multiplies the input of every step.
    pub(crate) words: Option<WordIndices>,
}

/// [`WordParts`] on the device.
#[derive(Debug)]
pub(crate) struct WordIndices {
    /// Steps, and their words `[2 U]`: those of the forward direction first.
    pub(crate) parts: Vec<(Range<usize>, Tensor)>,
    /// `[2, R]`: which word of its part a packed row reads.
    pub(crate) places: Tensor,
    /// As in [`WordParts`].
    pub(crate) products: usize,
}

impl Indices {
    /// Uploads the indices of a batch.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room or libtorch fails.
    pub(crate) fn new(
        batch: &PackedBatch,
        form: Form,
        words: Option<&WordParts>,
        device: Device,
    ) -> Result<Self, DeviceError> {
        let [forward, backward] = batch.ids();
        // Both directions read the same sentences wherever a row holds several.
        let packing = batch.packings().of(0);
        let marks = if form == Form::Marks { packing.marks() } else { Vec::new() };
        let steps = if form == Form::Rows { packing.steps().len() } else { 0 };
        let begins = (0..steps).map(|t| packing.begins(t));
        let places = words.map_or_else(Vec::new, |words| words.places.concat());
        let word_parts = words.map_or(&[][..], |words| &words.parts);
        let of_parts: Vec<Vec<i64>> = word_parts.iter().map(|part| part.words.concat()).collect();
        let lists: Vec<&[i64]> = [forward, backward, &marks, &places]
            .into_iter()
            .chain(&of_parts)
            .map(Vec::as_slice)
            .chain(begins)
            .collect();
        let sizes: Vec<i64> = lists.iter().map(|list| list.len() as i64).collect();
        let uploaded = tensors::index(&lists.concat(), device)?.f_split_with_sizes(&sizes, 0)?;
        let mut lists = uploaded.into_iter().zip(&sizes).map(|(list, size)| (*size > 0).then_some(list));
        let mut next = || lists.next().flatten();
        let (Some(forward), Some(backward)) = (next(), next()) else {
            return Err(DeviceError::internal("a batch has no rows"));
        };
        let (marks, places) = (next(), next());
        let parts = word_parts.iter().filter_map(|part| Some((part.steps.clone(), next()?))).collect();
        let words = words.zip(places).map(|(words, places)| {
            let places = places.f_view([2, -1])?;
            Ok::<_, DeviceError>(WordIndices { parts, places, products: words.products })
        });
        Ok(Self { read: [forward, backward], begins: lists.collect(), marks, words: words.transpose()? })
    }
}
