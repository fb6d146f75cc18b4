//! `elmo verify`: recomputes rows of an output with the model and compares them with the files.
//!
//! 1. `settings` makes a stage with the settings that the footers name.
//! 2. The files are checked against the manifest.
//! 3. `sample` picks rows, and `texts` finds their texts: in a kept column, or in the inputs of the job.
//! 4. `compare` gives the texts to the stage again and compares everything that the model decides: the bits of the numbers
//!    first, then tokens, offsets, `truncated` and `error`; `scores` does so for the columns of `elmo score`. `report` counts
//!    the differences.

mod compare;
mod report;
mod sample;
mod scores;
mod settings;
mod texts;

use arrow::{
    array::{RecordBatch, UInt64Array},
    compute::take,
};
use elmo::{Elmo, mix::ScalarMix};

pub use self::report::{Mismatch, MismatchedRow, VerifyReport};
use self::{
    compare::{SampledRows, compare},
    sample::{pick, within},
    texts::Texts,
};
use super::{
    chain,
    opened::{Output, OutputFile},
    parquet::{next_batch, read_rows, unreadable},
};
use crate::{error::Result, scores::LEVEL, stage::Stage, stores::Stores};

/// What to recompute.
#[derive(Debug, Clone)]
pub struct Verify {
    /// A file or folder of a bulk job.
    pub output: String,
    /// Number of rows to recompute.
    pub sample: usize,
    /// Seed of the sample.
    pub seed: u64,
    /// Column with the texts, in the output or else in the inputs of the job. `None` means the one that the manifest
    /// names, or `text` without a manifest.
    pub column: Option<String>,
    /// The scalar mix that the job used, if any.
    pub mix: Option<ScalarMix>,
}

/// Recomputes a sample of an output's rows with `elmo`. Rows that differ are not an error here: see
/// [`VerifyReport::error`].
///
/// # Errors
/// Of this crate's [`Error`](crate::Error):
/// * [`StoreError`](crate::stores::StoreError) or `Input` when the output cannot be read, is not an output of elmo or
///   names invalid settings, or an input changed since the job read it;
/// * `Check` when the files were made differently, by another model, with other settings than the footer says or in
///   state `carry`, lack the column of vectors, or do not match the manifest so that their texts are not known;
/// * `Usage` when the model has another precision, or the mix or the texts are not available;
/// * [`SourceError`](crate::source::SourceError) or [`ManifestError`](crate::bulk::manifest::ManifestError) when the
///   inputs or the manifest of the job cannot be read;
/// * [`elmo::Error`] when this model does not support the settings of the footer, or the device fails.
pub async fn verify(job: &Verify, elmo: &Elmo, stores: &Stores) -> Result<VerifyReport> {
    let output = Output::open(&job.output, stores).await?;
    let stage = settings::stage(&output, job.mix.as_ref(), elmo)?;
    let rows: u64 = output.files.iter().map(|file| file.rows).sum();
    let picked = pick(rows, job.sample, job.seed);
    let manifest = output.check().await?;
    let chain = chain::check(&output).await?;
    let scores = output.footer.pairs.contains_key(LEVEL).then_some(0);
    let unrecorded = settings::unrecorded(&output);
    let sampled = picked.len();
    let mut report = VerifyReport { rows, sampled, scores, manifest, chain, unrecorded, ..VerifyReport::default() };
    if picked.is_empty() {
        return Ok(report);
    }
    let texts = Texts::find(job.column.as_deref(), &output, stage.fields().len(), stores).await?;
    let mut first = 0;
    for file in &output.files {
        let picked = within(&picked, first, file.rows);
        if !picked.is_empty() {
            compare_file(stage.as_ref(), file, (first, &picked), &texts, &mut report).await?;
        }
        first += file.rows;
    }
    Ok(report)
}

/// Compares the rows `picked` of a file whose first row is row `first` of the output. It goes batch by batch, because
/// the vectors of all rows may exceed memory.
async fn compare_file(
    stage: &dyn Stage,
    file: &OutputFile,
    (first, picked): (u64, &[u64]),
    texts: &Texts<'_>,
    report: &mut VerifyReport,
) -> Result<()> {
    let mut texts = texts.of_file(file)?;
    let mut rows = read_rows(&file.location).await?;
    let (last, mut read) = (picked.last().copied().unwrap_or(0), 0_u64);
    while read <= last {
        let batch = next_batch(&mut rows, &file.location).await?;
        let batch = batch.ok_or_else(|| unreadable(&file.location, &"fewer rows than its footer says"))?;
        let count = batch.num_rows() as u64;
        let places = within(picked, read, count);
        if !places.is_empty() {
            let in_file: Vec<u64> = places.iter().map(|place| read + place).collect();
            let found = take_rows(&batch, places)?;
            let texts = texts.of_rows(&found, &in_file).await?;
            let rows = in_file.iter().map(|row| first + row).collect();
            let of_stream = file.span.is_some();
            compare(stage, &SampledRows { rows, found, texts, of_stream }, report).await?;
        }
        read += count;
    }
    Ok(())
}

fn take_rows(batch: &RecordBatch, rows: Vec<u64>) -> Result<RecordBatch> {
    let rows = UInt64Array::from(rows);
    let columns = batch.columns().iter().map(|column| take(column, &rows, None)).collect::<Result<_, _>>();
    let taken = columns.and_then(|columns| RecordBatch::try_new(batch.schema(), columns));
    Ok(taken.map_err(elmo::Error::from)?)
}
