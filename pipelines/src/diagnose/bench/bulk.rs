//! Measures everything that a bulk job does beside the model: reading, tokenising, Arrow, Parquet, digests, the store.
//!
//! Short texts are written in every format, and each file is a job in which the model is replaced by a constant vector. Two things
//! are measured by themselves: a core that cuts the same texts into tokens, and all cores that encode the same rows as Parquet.

use std::{
    fmt,
    future::pending,
    hint::black_box,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use arrow::{
    array::{ArrayRef, Int64Array, RecordBatch, StringArray},
    datatypes::{DataType, Field, Schema, SchemaRef},
};
use elmo::columns::count_sentences;
use serde::Serialize;
use tempfile::TempDir;

use super::{
    constant::Constant,
    encoder::{self, ROW_GROUP_BYTES, cpu_seconds},
    input,
};
use crate::{
    bulk::{self, BulkJob},
    error::{Error, Result},
    report::{Silent, count, grid, table},
    sink::Codec,
    source::{Format, InferRows, Keep, KeptTypes, Reading},
    stage::Stage,
    stores::Stores,
};

/// Rows of a batch that is encoded or tokenised by itself.
const BATCH_ROWS: usize = 8192;
/// As the default of `--window-rows`.
const WINDOW_ROWS: usize = 8192;

/// What to measure.
#[derive(Debug)]
pub struct BulkBench {
    /// A file or URL with a column `text`, instead of files that are written for the measurement.
    pub text: Option<String>,
    /// Folder or URL for the output, which is kept; `None` for a temporary folder.
    pub output: Option<String>,
    /// Rows of a file; of [`text`](Self::text) no more than these are read.
    pub rows: usize,
    /// Numbers of a vector.
    pub width: u16,
}

/// The result of a measurement.
#[derive(Debug, Clone, Serialize)]
pub struct BulkBenchReport {
    /// Numbers of a vector.
    pub width: u16,
    /// A job for each input.
    pub jobs: Vec<JobSpeed>,
    /// Megabytes of text per second that one core cuts into sentences and tokens, and nothing else.
    pub tokeniser_mb_per_second: f64,
    /// Rows per second that the Parquet encoder alone takes, on all cores.
    pub encoder_rows_per_second: f64,
}

/// The speed of one job.
#[derive(Debug, Clone, Serialize)]
pub struct JobSpeed {
    /// Its format, or its address.
    pub input: String,
    /// Rows read, all of which were written.
    pub rows: u64,
    /// Duration in seconds, from listing the input until the output is durable.
    pub seconds: f64,
    /// Rows per second.
    pub rows_per_second: f64,
    /// Seconds of CPU time.
    pub cpu_seconds: f64,
    /// Size of the output in bytes.
    pub output_bytes: u64,
    /// `rows_per_second` over that of the Parquet encoder alone.
    pub share_of_encoder: f64,
}

/// Runs a measurement.
///
/// # Errors
/// As [`bulk::run`]; [`Error::Io`] when the input cannot be written.
pub async fn run(bench: BulkBench) -> Result<BulkBenchReport> {
    let folder = tempfile::tempdir().map_err(|e| Error::Failed(format!("no temporary folder: {e}")))?;
    let stage = Constant::new(bench.width);
    let tokeniser_mb_per_second = tokeniser(&stage)?;
    let encoder_rows_per_second = encoder_alone(&stage, bench.rows)?;
    let mut jobs = Vec::new();
    for (name, format) in bench.inputs() {
        let address = match format {
            Some(format) => bench.write(&folder, format).await?.to_string_lossy().into_owned(),
            None => name.clone(),
        };
        let job = bench.measure(&folder, &address, (&name, format.map(|(format, _)| format)), &stage).await?;
        jobs.push(JobSpeed { share_of_encoder: job.rows_per_second / encoder_rows_per_second, ..job });
    }
    Ok(BulkBenchReport { width: bench.width, jobs, tokeniser_mb_per_second, encoder_rows_per_second })
}

/// A format, and the extension of its files.
type Kind = (Format, &'static str);

impl BulkBench {
    fn inputs(&self) -> Vec<(String, Option<Kind>)> {
        match &self.text {
            Some(address) => vec![(address.clone(), None)],
            None => input::FORMATS.map(|kind| (kind.1.to_owned(), Some(kind))).to_vec(),
        }
    }

    async fn write(&self, folder: &TempDir, kind: Kind) -> Result<PathBuf> {
        let (path, rows) = (folder.path().to_owned(), self.rows);
        let written = tokio::task::spawn_blocking(move || input::write(&path, kind, rows)).await;
        written.map_err(|e| Error::Failed(format!("a thread died: {e}")))?
    }

    async fn measure(
        &self,
        folder: &TempDir,
        address: &str,
        (name, format): (&str, Option<Format>),
        stage: &Constant,
    ) -> Result<JobSpeed> {
        let base = self.output.clone().unwrap_or_else(|| folder.path().to_string_lossy().into_owned());
        // A folder of its own: it overwrites what an earlier measurement left.
        let output = format!("{base}/elmo-bench/{}", if format.is_some() { name } else { "text" });
        let has_id = format.is_some_and(|format| format != Format::Text);
        let job = BulkJob {
            inputs: vec![address.to_owned()],
            reading: Reading::default(),
            limit: Some(self.rows as u64),
            output,
            column: "text".to_owned(),
            id: has_id.then(|| "id".to_owned()),
            keep: Keep::None,
            types: KeptTypes::default(),
            infer_rows: InferRows::default(),
            rows_per_file: None,
            row_group_bytes: ROW_GROUP_BYTES,
            codec: Codec::default(),
            window_rows: WINDOW_ROWS,
            overwrite: true,
            check: false,
            grace: Duration::ZERO,
        };
        let (cpu, started) = (cpu_seconds(), Instant::now());
        let report = bulk::run(&job, stage, &Stores::from_env(), pending(), &Silent).await?;
        let (seconds, cpu_seconds) = (started.elapsed().as_secs_f64(), cpu_seconds() - cpu);
        let rows = report.counts.rows_in;
        let rows_per_second = rows as f64 / seconds;
        Ok(JobSpeed {
            input: name.to_owned(),
            rows,
            seconds,
            rows_per_second,
            cpu_seconds,
            output_bytes: report.bytes,
            share_of_encoder: 0.0,
        })
    }
}

fn texts(rows: usize) -> ArrayRef {
    Arc::new(StringArray::from_iter_values(input::short_texts().iter().cycle().take(rows)))
}

/// Megabytes per second of one core that tokenises.
fn tokeniser(stage: &Constant) -> Result<f64> {
    let texts = texts(BATCH_ROWS);
    let bytes: usize = input::short_texts().iter().cycle().take(BATCH_ROWS).map(String::len).sum();
    let (started, mut rounds) = (Instant::now(), 0);
    while rounds < 3 || started.elapsed() < Duration::from_secs(1) {
        black_box(count_sentences(&texts, stage.spec())?);
        rounds += 1;
    }
    Ok((rounds * bytes) as f64 / 1e6 / started.elapsed().as_secs_f64())
}

fn encoder_alone(stage: &Constant, rows: usize) -> Result<f64> {
    let texts = texts(BATCH_ROWS);
    let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(0..BATCH_ROWS as i64));
    let embedded = stage.embed(&texts)?;
    let fields = std::iter::once(Field::new("id", DataType::Int64, false)).chain(stage.fields());
    let schema: SchemaRef = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
    let columns = vec![ids, embedded.vectors, Arc::new(embedded.truncated), Arc::new(embedded.error)];
    let batch = RecordBatch::try_new(Arc::clone(&schema), columns).map_err(elmo::Error::from)?;
    encoder::rows_per_second(&[batch], &schema, rows)
}

impl fmt::Display for BulkBenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let header = ["input", "rows", "seconds", "rows/s", "CPU s", "output MB", "of encoder"];
        let rows = self.jobs.iter().map(|job| {
            vec![
                job.input.clone(),
                count(job.rows),
                format!("{:.2}", job.seconds),
                count(job.rows_per_second as u64),
                format!("{:.2}", job.cpu_seconds),
                format!("{:.1}", job.output_bytes as f64 / 1e6),
                format!("{:.1} %", 100.0 * job.share_of_encoder),
            ]
        });
        f.write_str(&grid(&header, &rows.collect::<Vec<_>>()))?;
        f.write_str("\n")?;
        f.write_str(&table(&[
            ("vector", format!("{} numbers, constant", self.width)),
            ("encoder alone", format!("{} rows/s on all cores", count(self.encoder_rows_per_second as u64))),
            ("tokenising alone", format!("{:.1} MB/s on one core", self.tokeniser_mb_per_second)),
        ]))
    }
}
