//! The dry run: estimates rows, tokens, size and time of a bulk job. It writes nothing.

use std::{fmt, sync::Arc, time::Instant};

use arrow::{
    array::{Array, ArrayRef, StringArray},
    compute::concat,
};
use serde::Serialize;

use super::{
    BulkJob, check_inputs,
    manifest::{FOLDER, OutputState, Survey, survey},
    partial::Partial,
    place,
    prepare::{Prepared, prepare},
};
use crate::{
    error::Result,
    models::warn_untrained,
    report::{bytes, count, duration, table},
    source::{Counted, Plan, Position, Rows, Slice, row_bytes},
    stage::Stage,
    stores::{Location, Stores, create_once, writable::check_folder},
};

/// Rows that are embedded to estimate tokens per byte and tokens per second.
const SAMPLE_ROWS: usize = 512;
/// Bytes of text of that sample, and of a row in it.
const SAMPLE_BYTES: u64 = 32 << 10;
/// The text that is embedded when every row is too large for a sample.
const TYPICAL: &str = "The road to the harbour was closed, so we took the old bridge and came late.";
/// Bytes of input that are read to count rows, over all files.
const COUNT_BYTES: u64 = 256 << 20;
/// Bytes that are read of each file, even if [`COUNT_BYTES`] is exceeded.
const COUNT_BYTES_EACH: u64 = 1 << 20;

/// What a job would do.
#[derive(Debug, Clone, Serialize)]
pub struct DryRun {
    /// Files that would be read.
    pub files: usize,
    /// Rows of all files.
    pub rows: u64,
    /// Whether `rows` was counted; of large files only a part is read.
    pub rows_exact: bool,
    /// Size of the text, in bytes.
    pub text_bytes: u64,
    /// Tokens, estimated from a sample.
    pub tokens: u64,
    /// Size of the vectors, or scores, before compression, in bytes, estimated.
    pub vector_bytes: u64,
    /// Number of part files.
    pub parts: u64,
    /// Rows that are not durable in the output yet.
    pub rows_left: u64,
    /// Tokens of these rows, estimated.
    pub tokens_left: u64,
    /// Time that they take in seconds, estimated from the sample.
    pub seconds: f64,
    /// Columns of the output.
    pub columns: Vec<String>,
    /// What the job would find in the output.
    pub output: OutputState,
}

/// Reads the inputs, embeds a small sample, and checks that the job may write to its output.
///
/// # Errors
/// As [`prepare()`](super::prepare()); [`ManifestError`](super::manifest::ManifestError) when the output is of another job or holds foreign
/// files, [`Error::Io`](crate::error::Error::Io) or [`StoreError`](crate::stores::StoreError) when it cannot be written to or its store ignores conditions, [`SourceError`](crate::source::SourceError) when
/// the inputs cannot be read, [`elmo::Error`] when a row of the sample or the device fails.
pub async fn dry_run(job: &BulkJob, stage: &dyn Stage, stores: &Stores) -> Result<DryRun> {
    let prepared = prepare(job, stage, stores).await?;
    let found = survey(&prepared.output, &prepared.job, job.overwrite).await?;
    check_inputs(&prepared, &found.parts, &found.changed_inputs).await?;
    probe(&prepared.output).await?;
    let files = prepared.plan.files().len();
    let counted = count_rows(&prepared.plan, prepared.limit).await?;
    let output = with_saved(stage, &prepared, found).await;
    let pace = Pace::measure(&prepared.plan, stage).await?;
    let tokens = pace.tokens_per_byte * counted.text_bytes as f64;
    if stage.is_untrained() {
        warn_untrained();
    }
    let rows_left = match output {
        OutputState::New | OutputState::Overwritten => counted.rows,
        OutputState::Begun { rows } => counted.rows.saturating_sub(rows),
        OutputState::Complete => 0,
    };
    let tokens_left = tokens * rows_left as f64 / counted.rows.max(1) as f64;
    Ok(DryRun {
        files,
        rows: counted.rows,
        rows_exact: counted.exact,
        text_bytes: counted.text_bytes,
        tokens: tokens as u64,
        vector_bytes: stage.output_bytes(counted.rows, tokens as u64),
        parts: counted.rows.div_ceil(prepared.part_rows).max(1),
        rows_left,
        tokens_left: tokens_left as u64,
        seconds: tokens_left * pace.seconds_per_token,
        columns: prepared.schema.fields().iter().map(|f| f.name().clone()).collect(),
        output,
    })
}

/// The state of the output, with the rows of the open part that an interrupted run saved.
async fn with_saved(stage: &dyn Stage, prepared: &Prepared, found: Survey) -> OutputState {
    // State `carry` does not use them.
    let saved = found.saved.filter(|_| stage.spec().batch_rows.is_none());
    match (found.state, saved) {
        (OutputState::Begun { rows }, Some(saved)) => {
            let part = (saved.start, saved.job.as_str());
            let saved = Partial::load(&saved.location, &prepared.schema, part).await;
            OutputState::Begun { rows: rows + saved.map_or(0, |saved| saved.counts().rows_in) }
        }
        (state, _) => state,
    }
}

/// Rows and bytes of text of the first `limit` rows of all files. Standard input is not read, because it can be read only once.
async fn count_rows(plan: &Arc<Plan>, limit: Option<u64>) -> Result<Counted> {
    let files = plan.files().len();
    let each = (COUNT_BYTES / files.max(1) as u64).max(COUNT_BYTES_EACH);
    let mut sum = Counted { rows: 0, text_bytes: 0, exact: true };
    for (number, file) in plan.files().enumerate() {
        if file.location.is_none() {
            sum.exact = false;
            continue;
        }
        let left = limit.map(|limit| limit.saturating_sub(sum.rows));
        if left == Some(0) {
            break;
        }
        let counted = plan.count(number, each, left).await?;
        sum.rows += counted.rows;
        sum.text_bytes += counted.text_bytes;
        sum.exact &= counted.exact;
    }
    Ok(sum)
}

/// Rates of a sample of the first rows.
#[derive(Debug, Clone, Copy, Default)]
struct Pace {
    tokens_per_byte: f64,
    seconds_per_token: f64,
}

impl Pace {
    async fn measure(plan: &Arc<Plan>, stage: &dyn Stage) -> Result<Self> {
        if plan.files().any(|file| file.location.is_none()) {
            return Ok(Self::default());
        }
        let slices = sample(plan).await?;
        let texts: Vec<&dyn Array> = slices.iter().map(|slice| slice.text.as_ref()).collect();
        let texts: ArrayRef = match texts.is_empty() {
            true => Arc::new(StringArray::from(vec![TYPICAL; SAMPLE_ROWS])),
            false => concat(&texts).map_err(elmo::Error::from)?,
        };
        let mut sizes = vec![0; texts.len()];
        row_bytes(&texts, &mut sizes);
        let started = Instant::now();
        let placed = |error| place(plan, error, &slices);
        let stats = stage.submit(&texts).await.map_err(placed)?.await.map_err(placed)?.stats;
        Ok(Self {
            tokens_per_byte: stats.tokens as f64 / sizes.iter().sum::<u64>().max(1) as f64,
            seconds_per_token: started.elapsed().as_secs_f64() / stats.tokens.max(1) as f64,
        })
    }
}

/// The first rows, without very large ones, which would take as long as the job. Formats that are read in small steps give
/// several slices.
async fn sample(plan: &Arc<Plan>) -> Result<Vec<Slice>> {
    let mut reader = Rows::new(Arc::clone(plan), Position::default());
    let (mut slices, mut rows, mut bytes) = (Vec::new(), 0, 0);
    while rows < SAMPLE_ROWS
        && bytes < SAMPLE_BYTES
        && let Some(slice) = reader.next().await?
    {
        let mut sizes = vec![0; slice.len()];
        row_bytes(&slice.text, &mut sizes);
        for (row, size) in sizes.into_iter().enumerate().take(SAMPLE_ROWS - rows) {
            rows += 1;
            if bytes < SAMPLE_BYTES && size <= SAMPLE_BYTES {
                bytes += size;
                slices.push(slice.slice(row, 1));
            }
        }
    }
    Ok(slices)
}

/// Probes the store as a job does, with an object that is deleted again; on a local disk it creates a file in the closest
/// folder that exists, so that nothing is left.
async fn probe(output: &Location) -> Result<()> {
    if let Some(path) = output.local_path() {
        return check_folder(&path);
    }
    // There is no lock, so a job may be using the name of its own probe.
    let probe = output.child(FOLDER).child(&format!("probe-{}", uuid::Uuid::new_v4()));
    Ok(create_once::probe(&probe).await?)
}

impl fmt::Display for DryRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let output = match self.output {
            OutputState::New => "nothing there yet".to_owned(),
            OutputState::Overwritten => "the files of an earlier job would be removed".to_owned(),
            OutputState::Begun { rows } => format!(
                "resumes after {} rows; about {} rows and {} tokens are left",
                count(rows),
                count(self.rows_left),
                count(self.tokens_left)
            ),
            OutputState::Complete => "complete; nothing to do".to_owned(),
        };
        let columns = self.columns.join(", ");
        if self.rows == 0 && !self.rows_exact {
            let rows = "not known: standard input can be read only once, by the job".to_owned();
            return f.write_str(&table(&[("rows", rows), ("columns", columns), ("output", output)]));
        }
        f.write_str(&table(&[
            ("files", count(self.files as u64)),
            ("rows", format!("{}{}", if self.rows_exact { "" } else { "about " }, count(self.rows))),
            ("text", bytes(self.text_bytes)),
            ("tokens", format!("about {}", count(self.tokens))),
            ("size", format!("about {} before compression, in {} files", bytes(self.vector_bytes), count(self.parts))),
            ("time", format!("about {}", duration(std::time::Duration::from_secs_f64(self.seconds.min(1e9))))),
            ("columns", columns),
            ("output", output),
        ]))
    }
}
