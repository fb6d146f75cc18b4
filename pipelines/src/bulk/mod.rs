//! The bulk job: files in, Parquet with embedding columns out, resumable.
//!
//! ```text
//! list and plan      prepare.rs   files, columns, the job's identity; reads no rows
//! open the manifest  manifest/    lock the output, read what is durable, or begin
//! compare inputs     inputs.rs    only if their names or versions changed: by digests of the rows that were read
//! repair             run.rs       write lost parts again
//! continue           run.rs       the parts after the last one
//!   read             reader.rs    on a task of its own
//!   submit           feed.rs      chunks of rows (chunks.rs), several at a time, and their results in order (`crate::in_order`)
//!   encode           part.rs      on other threads (`crate::sink`), several parts at the same time
//!   publish          part.rs      in order, while other parts are filled; then append the manifest entry
//! finish             manifest/    check that every file exists, record the totals
//! ```
//!
//! Parts may be computed by other processes (`units.rs`, `unit.rs`), which write them; this one publishes them.
//!
//! A *part* holds a fixed number of input rows, so its bytes are a function of the input and the settings alone: not of
//! memory flags, of batches, or of interruptions. A *chunk* is the rows that are submitted to the stage at once; several
//! chunks are in flight, so that rows are read and tokenised while devices work. `partial` keeps the complete rows of
//! the open part when the job is interrupted.

mod chunks;
mod digest;
pub mod dry_run;
mod feed;
mod inputs;
pub mod manifest;
mod part;
mod partial;
mod place;
mod prepare;
mod reader;
mod run;
mod unit;
mod units;

use std::time::{Duration, Instant};

use futures::future::{FutureExt, Shared};
use serde::Serialize;

pub(crate) use self::{inputs::rows_are_unchanged, place::place, prepare::columns_setting};
use self::{
    manifest::{Counts, Manifest, ManifestError, Part},
    prepare::Parts,
    run::Run,
};
pub use self::{
    prepare::{Prepared, prepare},
    unit::{Unit, UnitDone},
    units::{Computed, UnitProgress, Units},
};
use crate::{
    crash::bulk as crash,
    error::{Error, Result},
    models::warn_untrained,
    report::Progress,
    sink::Codec,
    source::{self, InferRows, Keep, KeptTypes, Plan, Reading},
    stage::Stage,
    stores::Stores,
};

/// How long an interrupted job waits for a request to a store.
const STORE_GRACE: Duration = Duration::from_secs(10);

/// A bulk job.
#[derive(Debug, Clone)]
pub struct BulkJob {
    /// Input files, folders, glob patterns and URLs, or `-` for standard input.
    pub inputs: Vec<String>,
    /// How the inputs are read where their names do not tell.
    pub reading: Reading,
    /// Read only so many rows, the first ones of all files in their order.
    pub limit: Option<u64>,
    /// Output folder, path or URL.
    pub output: String,
    /// Name of the column to embed.
    pub column: String,
    /// Name of a column that is the first of the output.
    pub id: Option<String>,
    /// Other columns that are copied to the output.
    pub keep: Keep,
    /// Types of kept columns of CSV and JSON files.
    pub types: KeptTypes,
    /// Rows of CSV and JSON files from which columns and types are inferred.
    pub infer_rows: InferRows,
    /// Input rows of one part; `None`: as many as give about 128 MiB of vectors.
    pub rows_per_file: Option<u64>,
    /// Size of a row group before encoding, in bytes.
    pub row_group_bytes: u64,
    /// Compression codec of the parts.
    pub codec: Codec,
    /// Maximum number of rows of a chunk.
    pub window_rows: usize,
    /// Remove the parts of an earlier job and start over.
    pub overwrite: bool,
    /// Compare the SHA-256 of every part with the manifest before resuming. Sizes are always compared.
    pub check: bool,
    /// How long an interrupted job waits for the rows in flight. What completes is saved; the rest is computed again.
    pub grace: Duration,
}

/// Result of a job.
#[derive(Debug, Clone, Default, Serialize)]
pub struct BulkReport {
    /// The output.
    pub output: String,
    /// Number of part files.
    pub parts: usize,
    /// Totals over the whole output.
    #[serde(flatten)]
    pub counts: Counts,
    /// Size of the whole output, in bytes.
    pub bytes: u64,
    /// Files of input folders that were not read, by their names or extensions.
    pub files_left_out: u64,
    /// Where the first malformed rows are that this run left out, and what is wrong with them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub malformed_rows: Vec<String>,
    /// Input rows that were durable before this run, in parts or saved.
    pub resumed_rows: u64,
    /// Duration of this run without loading the model, in seconds.
    pub seconds: f64,
    /// Tokens of this run per second.
    pub tokens_per_second: f64,
}

/// Runs a job to its end, or until `shutdown`: finished parts stay, the complete rows of the open part are saved, and the
/// same job continues from there.
///
/// # Errors
/// As [`prepare()`]; [`ManifestError`] when the output is locked, belongs to another job, holds
/// foreign files, or changes while the job runs; [`Error::Usage`] when standard input would have to be read again;
/// [`SourceError`](source::SourceError) or [`Error::Input`] (a row, with on-error `fail`) when the input cannot be read or
/// embedded, [`elmo::Error`] when a device fails, [`SinkError`](crate::sink::SinkError) or
/// [`StoreError`](crate::stores::StoreError) when a file cannot be written; [`Error::Interrupted`] after `shutdown`.
pub async fn run(
    job: &BulkJob,
    stage: &dyn Stage,
    stores: &Stores,
    shutdown: impl Future<Output = ()>,
    progress: &dyn Progress,
) -> Result<BulkReport> {
    run_by(job, stage, None, stores, shutdown, progress).await
}

/// As [`run()`]; where `units` are given, they compute the parts, and `stage` only describes the output. An interrupted job keeps the
/// parts that are complete.
///
/// # Errors
/// As [`run()`], and those of `units`.
pub async fn run_by(
    job: &BulkJob,
    stage: &dyn Stage,
    units: Option<&dyn Units>,
    stores: &Stores,
    shutdown: impl Future<Output = ()>,
    progress: &dyn Progress,
) -> Result<BulkReport> {
    let stop = shutdown.shared();
    let again = !job.inputs.iter().any(|input| input == source::STDIN);
    let prepared = tokio::select! {
        biased;
        () = stop.clone() => return Err(Error::Interrupted { rows: 0, again, begun: false }),
        prepared = prepare(job, stage, stores) => prepared?,
    };
    crash::after_list();
    let opening = Manifest::open(&prepared.output, &prepared.job, job.overwrite);
    let Some(opened) = unless_stopped(&stop, STORE_GRACE, opening).await else {
        return Err(Error::Interrupted { rows: 0, again, begun: false });
    };
    let mut manifest = opened?;
    let started = Instant::now();
    let checked = tokio::select! {
        biased;
        () = stop.clone() => Err(Error::Interrupted { rows: manifest.durable_totals().rows_in, again, begun: true }),
        checked = check(job, &prepared, &mut manifest) => checked,
    };
    if checked.is_ok() && stage.is_untrained() {
        warn_untrained();
    }
    let resumed = manifest.durable_totals();
    let parts = Parts::new(job, &prepared);
    let mut run = Run::new(stage, (parts, job.grace), progress, resumed);
    // Input that cannot be read again is waited for without a limit; a second signal ends the process.
    let limit = if again { job.grace + STORE_GRACE } else { Duration::MAX };
    let outcome = match checked {
        Ok(()) if manifest.is_complete() => Ok(()),
        Ok(()) => match unless_stopped(&stop, limit, run_parts(&mut run, units, &mut manifest, &stop)).await {
            Some(outcome) => outcome,
            None => Err(Error::Interrupted { rows: manifest.durable_totals().rows_in, again, begun: true }),
        },
        Err(error) => Err(error),
    };
    progress.finish();
    let resumed = run.resumed();
    let report = BulkReport {
        files_left_out: prepared.left_out,
        malformed_rows: run.malformed_rows,
        ..report(&manifest, &resumed, started)
    };
    // If the store does not answer, the lease expires.
    let _ = unless_stopped(&stop, STORE_GRACE, manifest.close()).await;
    outcome.map(|()| report)
}

async fn run_parts(
    run: &mut Run<'_>,
    units: Option<&dyn Units>,
    manifest: &mut Manifest,
    stop: &Shared<impl Future<Output = ()>>,
) -> Result<()> {
    match units {
        Some(units) => run.elsewhere(units, manifest, stop).await,
        None => run.run(manifest, stop).await,
    }
}

/// Waits for `work`, but no longer than `grace` after the job was interrupted; then `None`.
async fn unless_stopped<T>(
    stop: &Shared<impl Future<Output = ()>>,
    grace: Duration,
    work: impl Future<Output = T>,
) -> Option<T> {
    let expired = stop.clone().then(|()| tokio::time::sleep(grace));
    tokio::select! {
        biased;
        done = work => Some(done),
        () = expired => None,
    }
}

/// Checks before a job continues: its input can be read again and has the rows that were read, and its parts are
/// undamaged.
async fn check(job: &BulkJob, prepared: &Prepared, manifest: &mut Manifest) -> Result<()> {
    check_standard_input(&prepared.plan, manifest)?;
    check_inputs(prepared, manifest.parts(), manifest.changed_inputs()).await?;
    manifest.record().await?;
    if job.check {
        manifest.check_digests().await?;
    }
    Ok(())
}

/// Compares the content of inputs whose names or versions changed.
async fn check_inputs(prepared: &Prepared, parts: &[Part], changed: &[usize]) -> Result<()> {
    let entries = parts.iter().filter_map(Part::entry);
    if changed.is_empty() || inputs::rows_are_unchanged(&prepared.plan, entries, changed).await? {
        return Ok(());
    }
    let files = changed.iter().filter_map(|&index| prepared.plan.files().nth(index));
    let differences = files
        .map(|file| format!("  input {file}: changed since; its rows cannot be compared with those that were read"));
    Err(ManifestError::Differs { output: prepared.output.to_string(), differences: differences.collect() }.into())
}

/// A job that reads standard input cannot be resumed: its rows cannot be read again.
fn check_standard_input(plan: &Plan, manifest: &Manifest) -> Result<()> {
    if manifest.parts().is_empty() || plan.files().all(|file| file.location.is_some()) {
        return Ok(());
    }
    let message = "the output holds rows of an earlier standard input, which cannot be read again";
    Err(Error::usage(
        message,
        "save the input to a file, from which a job can be resumed; or use another --output or --overwrite",
    ))
}

fn report(manifest: &Manifest, resumed: &Counts, started: Instant) -> BulkReport {
    let counts = manifest.totals();
    let seconds = started.elapsed().as_secs_f64();
    BulkReport {
        output: manifest.output().to_string(),
        parts: manifest.parts().len(),
        counts,
        bytes: manifest.bytes(),
        files_left_out: 0,
        malformed_rows: Vec::new(),
        resumed_rows: resumed.rows_in,
        seconds,
        tokens_per_second: counts.tokens.saturating_sub(resumed.tokens) as f64 / seconds.max(1e-9),
    }
}
