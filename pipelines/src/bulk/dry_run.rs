//! What a bulk job would do: inputs, rows, tokens, size and time. It leaves nothing behind.

use std::{fmt, sync::Arc, time::Instant};

use ::bytes::Bytes;
use arrow::{
    array::{Array, ArrayRef, StringArray},
    compute::concat,
};
use object_store::PutMode;
use serde::Serialize;

use super::{
    BulkJob,
    manifest::{FOLDER, Outlook, outlook},
    place, prepare,
};
use crate::{
    error::{Error, Result},
    report::{bytes, count, duration, table},
    source::{Counted, Plan, Position, Rows, Slice, row_bytes},
    stage::Stage,
    stores::{Location, StoreError, Stores},
};

/// Rows that are embedded to learn tokens per byte and tokens per second.
const SAMPLE_ROWS: usize = 512;
/// Bytes of text of that sample, and of a row in it, at the most.
const SAMPLE_BYTES: u64 = 32 << 10;
/// What is embedded where every row is too large for a sample.
const TYPICAL: &str = "The road to the harbour was closed, so we took the old bridge and came late.";
/// Bytes of input that are read to count rows, over all files.
const COUNT_BYTES: u64 = 256 << 20;
/// Bytes that are read of each file in any case.
const COUNT_BYTES_EACH: u64 = 1 << 20;

/// What a job would do.
#[derive(Debug, Clone, Serialize)]
pub struct DryRun {
    /// Files that would be read.
    pub files: usize,
    /// Rows of all files.
    pub rows: u64,
    /// Whether `rows` was counted; large files are read in part.
    pub rows_exact: bool,
    /// Bytes of text.
    pub text_bytes: u64,
    /// Tokens, estimated from a sample.
    pub tokens: u64,
    /// Bytes of vectors before packing, estimated.
    pub vector_bytes: u64,
    /// Part files.
    pub parts: u64,
    /// Seconds, estimated from the pace of the sample.
    pub seconds: f64,
    /// Columns of the output.
    pub columns: Vec<String>,
    /// What the job would find in the output.
    pub output: Outlook,
}

/// Looks into the inputs, embeds a small sample, and makes sure that the job would not be refused by its output.
///
/// # Errors
/// As [`prepare`]; [`Error::Manifest`] when the output is of another job or holds foreign files, [`Error::Io`] or [`Error::Store`] when the output cannot be written to, [`Error::Source`] when the
/// inputs cannot be read, [`Error::Elmo`] when a row of the sample or the device fails.
pub async fn dry_run(job: &BulkJob, stage: &dyn Stage, stores: &Stores) -> Result<DryRun> {
    let prepared = prepare(job, stage, stores).await?;
    let output = outlook(&prepared.output, &prepared.job, job.overwrite).await?;
    probe(&prepared.output).await?;
    let files = prepared.plan.files().len();
    let counted = count_rows(&prepared.plan).await?;
    let pace = Pace::measure(&prepared.plan, stage).await?;
    let tokens = pace.tokens_per_byte * counted.text_bytes as f64;
    let vectors = if stage.spec().level == elmo::spec::Level::Token { tokens } else { counted.rows as f64 };
    Ok(DryRun {
        files,
        rows: counted.rows,
        rows_exact: counted.exact,
        text_bytes: counted.text_bytes,
        tokens: tokens as u64,
        vector_bytes: (vectors * 4.0 * stage.width() as f64) as u64,
        parts: counted.rows.div_ceil(prepared.part_rows).max(1),
        seconds: tokens * pace.seconds_per_token,
        columns: prepared.schema.fields().iter().map(|f| f.name().clone()).collect(),
        output,
    })
}

/// Rows and bytes of text of all files. Standard input can be read only once, so it is left to the job.
async fn count_rows(plan: &Arc<Plan>) -> Result<Counted> {
    let files = plan.files().len();
    let each = (COUNT_BYTES / files.max(1) as u64).max(COUNT_BYTES_EACH);
    let mut sum = Counted { rows: 0, text_bytes: 0, exact: true };
    for (number, file) in plan.files().enumerate() {
        if file.location.is_none() {
            sum.exact = false;
            continue;
        }
        let counted = plan.count(number, each).await?;
        sum.rows += counted.rows;
        sum.text_bytes += counted.text_bytes;
        sum.exact &= counted.exact;
    }
    Ok(sum)
}

/// What a sample of the first rows tells.
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

/// The first rows, without those that are so large that a sample of them would take as long as the job; formats that are
/// read in small steps give several slices.
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

/// Writes a small object and removes it; on a disk into the folder that is there already, so that nothing stays.
async fn probe(output: &Location) -> Result<()> {
    if let Some(path) = output.local_path() {
        let folder = path.ancestors().find(|folder| folder.is_dir()).unwrap_or(&path).to_path_buf();
        return tempfile::NamedTempFile::new_in(&folder).map(drop).map_err(|e| Error::io(&folder, e));
    }
    let probe = output.child(FOLDER).child(&format!("probe-{}", uuid::Uuid::new_v4()));
    match probe.put(Bytes::new(), PutMode::Create).await {
        // The name is ours alone: the first answer was lost.
        Ok(_) | Err(object_store::Error::AlreadyExists { .. }) => {}
        Err(e) => return Err(StoreError::request("write", &probe, e).into()),
    }
    Ok(probe.delete().await?)
}

impl fmt::Display for DryRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let output = match self.output {
            Outlook::New => "nothing there yet".to_owned(),
            Outlook::Overwritten => "the files of an earlier job would be removed".to_owned(),
            Outlook::Begun { rows } => format!("goes on after {} rows", count(rows)),
            Outlook::Complete => "complete; nothing to do".to_owned(),
        };
        f.write_str(&table(&[
            ("files", count(self.files as u64)),
            ("rows", format!("{}{}", if self.rows_exact { "" } else { "about " }, count(self.rows))),
            ("text", bytes(self.text_bytes)),
            ("tokens", format!("about {}", count(self.tokens))),
            ("vectors", format!("about {} before packing, in {} files", bytes(self.vector_bytes), count(self.parts))),
            ("time", format!("about {}", duration(std::time::Duration::from_secs_f64(self.seconds.min(1e9))))),
            ("columns", self.columns.join(", ")),
            ("output", output),
        ]))
    }
}
