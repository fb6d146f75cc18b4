//! The bulk job: files in, Parquet with embedding columns out, resumable.
//!
//! ```text
//! list -> plan -> manifest says what is durable -> Rows -> windows -> stage -> one part file -> manifest entry -> ...
//! ```
//!
//! A *part* holds a fixed number of input rows, so its bytes are a function of the input and the settings and of
//! nothing else: not of memory flags, not of batches, not of how often the job was killed. A *window* is the rows that
//! the engine is given at once; some are under way, so that the next one is read and tokenised while devices work.

pub mod dry_run;
pub mod manifest;
mod open;
mod windows;

use std::{
    cmp::Ordering,
    sync::Arc,
    time::{Duration, Instant},
};

use arrow::{
    array::{Array, ArrayRef, BooleanArray, RecordBatch},
    compute::{concat, concat_batches, filter_record_batch},
    datatypes::{Schema, SchemaRef},
};
use elmo::{EmbeddedColumns, RowError, spec::Level};
use futures::future::{FutureExt, Shared};
use serde::Serialize;

use self::{
    manifest::{Counts, InputRecord, Job, Manifest, ManifestError, PartEntry, part_name},
    open::{OpenPart, Partial},
    windows::Cutter,
};
use crate::{
    crash::bulk as crash,
    error::{Error, Result},
    report::{Progress, Snapshot},
    sink::{Buffering, Codec, Encoding, PartWriter},
    source::{self, Keep, KeptTypes, Plan, Position, Request, Slice},
    stage::{Pending, Stage, Work},
    stores::{Location, Stores},
};

/// Windows under way.
const WINDOWS: usize = 8;
/// Bytes that the vectors of a part come to by default.
const PART_BYTES: u64 = 128 << 20;
/// Tokens that a row is taken to have when nothing is known about it.
const TOKENS_PER_ROW: u64 = 32;
/// How long a job that is asked to stop waits for a store.
const PATIENCE: Duration = Duration::from_secs(10);
/// Rows left out that everybody is told of.
const TOLD: usize = 20;
/// How often somebody who watches hears of it while devices work.
const TICK: Duration = Duration::from_millis(250);

/// What a job is to do.
#[derive(Debug, Clone)]
pub struct BulkJob {
    /// Files, folders, patterns, URLs, or `-`.
    pub inputs: Vec<String>,
    /// Folder of the parts, path or URL.
    pub output: String,
    /// The column to embed.
    pub column: String,
    /// A column that comes first in the output.
    pub id: Option<String>,
    /// Other columns that go on to the output.
    pub keep: Keep,
    /// Types of kept columns of CSV files.
    pub types: KeptTypes,
    /// Input rows of one part; by default so many that their vectors have about 128 MiB.
    pub rows_per_file: Option<u64>,
    /// Bytes of one row group, not encoded.
    pub row_group_bytes: u64,
    /// Packing of the parts.
    pub codec: Codec,
    /// Most rows of a window.
    pub window_rows: usize,
    /// Begin anew whatever is there.
    pub overwrite: bool,
    /// How long a job that is asked to stop waits for the rows that devices work on: what they finish is safe, the rest
    /// is computed again.
    pub grace: Duration,
}

/// How a job ended.
#[derive(Debug, Clone, Default, Serialize)]
pub struct BulkReport {
    /// The output.
    pub output: String,
    /// Part files.
    pub parts: usize,
    /// Totals over the whole output.
    #[serde(flatten)]
    pub counts: Counts,
    /// Bytes of the whole output.
    pub bytes: u64,
    /// Files of input folders that were not read, by their names or extensions.
    pub files_left_out: u64,
    /// Input rows that were durable before this run.
    pub resumed_rows: u64,
    /// Seconds of this run, without loading the model.
    pub seconds: f64,
    /// Tokens of this run per second.
    pub tokens_per_second: f64,
}

/// The parts of a job that are settled before anything is computed.
#[derive(Debug)]
pub struct Prepared {
    /// What is read.
    pub plan: Arc<Plan>,
    /// Files of input folders that are not read.
    pub left_out: u64,
    /// Columns of the output.
    pub schema: SchemaRef,
    /// Where to.
    pub output: Location,
    /// Input rows of one part.
    pub part_rows: u64,
    /// What the manifest knows it by.
    pub(crate) job: Job,
}

/// Lists the inputs, looks into them, and settles the columns. Reads no rows and writes nothing.
///
/// # Errors
/// [`Error::Store`] when the output's address is wrong or its store cannot be set up, [`Error::Usage`] when it is an
/// http(s) URL, [`Error::Source`] when inputs are not there, cannot be read, lack a column or disagree about one.
pub async fn prepare(job: &BulkJob, stage: &dyn Stage, stores: &Stores) -> Result<Prepared> {
    let output = stores.locate(&job.output)?;
    if output.is_http() {
        return Err(Error::usage("the output is an http(s) URL", "write to a path, s3://, gs:// or az://"));
    }
    let listing = source::listing(stores, &job.inputs, Some(&output)).await?;
    let fields = stage.fields();
    let request = Request {
        column: job.column.clone(),
        id: job.id.clone(),
        keep: job.keep.clone(),
        reserved: fields.iter().map(|field| field.name().clone()).collect(),
        types: job.types,
    };
    let plan = Plan::resolve(listing.files, &request).await?;
    let kept = plan.kept().fields().iter().map(|field| field.as_ref().clone());
    let schema = Arc::new(Schema::new(kept.chain(fields).collect::<Vec<_>>()));
    let inputs = plan.files().map(InputRecord::from).collect();
    let part_rows = part_rows(job, stage);
    let settings = settings(job, stage, &schema, part_rows);
    let left_out = listing.left_out.len() as u64;
    Ok(Prepared { plan: Arc::new(plan), left_out, schema, output, part_rows, job: Job { settings, inputs } })
}

/// Rows of a part; in state `carry` a whole number of batches, as a batch that is cut in two gives other vectors.
fn part_rows(job: &BulkJob, stage: &dyn Stage) -> u64 {
    let spec = stage.spec();
    let vectors = if spec.level == Level::Token { TOKENS_PER_ROW } else { 1 };
    let row_bytes = 4 * vectors * stage.width().max(1) as u64;
    let rows = job.rows_per_file.unwrap_or((PART_BYTES / row_bytes).clamp(1024, 1 << 20)).max(1);
    let batch = spec.batch_rows.unwrap_or(1).max(1) as u64;
    rows.div_ceil(batch).checked_mul(batch).unwrap_or(u64::MAX / batch * batch)
}

/// Everything that changes the bytes of the output.
fn settings(
    job: &BulkJob,
    stage: &dyn Stage,
    schema: &Schema,
    part_rows: u64,
) -> std::collections::BTreeMap<String, String> {
    let mut settings: std::collections::BTreeMap<String, String> = stage.metadata().into_iter().collect();
    let spec = stage.spec();
    let columns: Vec<String> = schema.fields().iter().map(|f| format!("{}: {}", f.name(), f.data_type())).collect();
    settings.extend([
        ("column".to_owned(), job.column.clone()),
        ("columns".to_owned(), columns.join(", ")),
        ("compression".to_owned(), job.codec.as_str().to_owned()),
        ("device".to_owned(), stage.device()),
        ("on-error".to_owned(), spec.on_error.to_string()),
        ("row-group-mb".to_owned(), format!("{}", job.row_group_bytes as f64 / f64::from(1 << 20))),
        ("rows-per-file".to_owned(), part_rows.to_string()),
    ]);
    settings
}

/// Runs a job to its end, or until `shutdown`: finished parts stay, what is complete of the open one is put aside, and
/// the same job goes on from there.
///
/// # Errors
/// As [`prepare`]; [`Error::Manifest`] when the output is locked, is of another job, holds foreign files, or changes
/// under the job; [`Error::Usage`] when standard input would have to be read again; [`Error::Source`] or
/// [`Error::Input`] (a row, with on-error `fail`) when the input cannot be read or embedded, [`Error::Elmo`] when a
/// device fails, [`Error::Sink`] or [`Error::Store`] when a file cannot be written; [`Error::Interrupted`] after
/// `shutdown`.
pub async fn run(
    job: &BulkJob,
    stage: &dyn Stage,
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
    let Some(opened) = patiently(&stop, PATIENCE, Manifest::open(&prepared.output, &prepared.job, job.overwrite)).await
    else {
        return Err(Error::Interrupted { rows: 0, again, begun: false });
    };
    let mut manifest = opened?;
    let resumed = manifest.totals();
    let started = Instant::now();
    let mut run = Run {
        job,
        stage,
        prepared: &prepared,
        progress,
        seen: Snapshot::default(),
        began: resumed,
        work_before: stage.work(),
        told: 0,
    };
    // What does not come again is worth any wait; a second signal ends the process.
    let limit = if again { job.grace + PATIENCE } else { Duration::MAX };
    let outcome = match again_from_stdin(&prepared.plan, &manifest) {
        Ok(()) if manifest.done && manifest.damaged.is_empty() => Ok(()),
        Ok(()) => match patiently(&stop, limit, run.parts(&mut manifest, &stop)).await {
            Some(outcome) => outcome,
            None => Err(Error::Interrupted { rows: manifest.totals().rows_in, again, begun: true }),
        },
        Err(error) => Err(error),
    };
    progress.finish();
    let report = BulkReport { files_left_out: prepared.left_out, ..report(&manifest, &resumed, started) };
    // A lock that a silent store still has ends by itself.
    let _ = patiently(&stop, PATIENCE, manifest.close()).await;
    outcome.map(|()| report)
}

/// Waits for work; once the job is asked to stop no longer than `patience`. `None`: it was given up.
async fn patiently<T>(
    stop: &Shared<impl Future<Output = ()>>,
    patience: Duration,
    work: impl Future<Output = T>,
) -> Option<T> {
    let late = stop.clone().then(|()| tokio::time::sleep(patience));
    tokio::select! {
        biased;
        done = work => Some(done),
        () = late => None,
    }
}

/// What came through standard input is gone: whether the same lines come again, nobody knows.
fn again_from_stdin(plan: &Plan, manifest: &Manifest) -> Result<()> {
    if manifest.parts.is_empty() || plan.files().all(|file| file.location.is_some()) {
        return Ok(());
    }
    let message = "the output holds rows of an earlier standard input, which cannot be read again";
    Err(Error::usage(message, "give a file to have a job that can go on, another --output, or --overwrite"))
}

fn report(manifest: &Manifest, resumed: &Counts, started: Instant) -> BulkReport {
    let counts = manifest.totals();
    let seconds = started.elapsed().as_secs_f64();
    BulkReport {
        output: manifest.output().to_string(),
        parts: manifest.parts.len(),
        counts,
        bytes: manifest.bytes(),
        files_left_out: 0,
        resumed_rows: resumed.rows_in,
        seconds,
        tokens_per_second: (counts.tokens - resumed.tokens) as f64 / seconds.max(1e-9),
    }
}

struct Run<'j> {
    job: &'j BulkJob,
    stage: &'j dyn Stage,
    prepared: &'j Prepared,
    progress: &'j dyn Progress,
    seen: Snapshot,
    began: Counts,
    /// What devices had done before this job.
    work_before: Option<Work>,
    /// Rows left out that were named.
    told: usize,
}

/// A window on its way through the engine.
struct Window {
    slices: Vec<Slice>,
    kept: RecordBatch,
    pending: Pending,
    /// Bytes of the input that were read when it was.
    bytes_read: u64,
}

impl Window {
    /// The row after its last.
    fn end(&self) -> Position {
        let last = self.slices.last();
        last.map(|s| Position { row: s.start.row + s.len() as u64, ..s.start }).unwrap_or_default()
    }
}

impl Run<'_> {
    async fn parts(&mut self, manifest: &mut Manifest, stop: &Shared<impl Future<Output = ()>>) -> Result<()> {
        self.seen.rows = self.began.rows_in;
        self.seen.bytes_total = Some(self.prepared.plan.files().map(|file| file.size).sum()).filter(|bytes| *bytes > 0);
        let carried = self.stage.spec().batch_rows.is_some();
        let missing = manifest.position().is_some() || !manifest.damaged.is_empty();
        let mut cutter = self.cutter(Position::default());
        if carried && missing {
            self.replay(&mut cutter, manifest, stop).await?;
        } else {
            self.mend(manifest, stop).await?;
            cutter = self.cutter(manifest.position().unwrap_or_default());
        }
        while manifest.position().is_some() {
            crash::before_part();
            let part = self.part(&mut cutter, manifest, manifest.parts.len(), stop).await?;
            manifest.enter(part).await?;
            crash::after_manifest();
            manifest.remove_partial().await?;
            if manifest.position().is_some() && cutter.is_closed() && cutter.is_at_end().await? {
                return Err(self.interrupted(manifest.totals().rows_in));
            }
        }
        finish(manifest).await
    }

    fn cutter(&self, from: Position) -> Cutter {
        Cutter::new(self.job, self.stage, Arc::clone(&self.prepared.plan), from)
    }

    /// Writes parts again whose files are gone or have another size, wherever they are in the order.
    async fn mend(&mut self, manifest: &Manifest, stop: &Shared<impl Future<Output = ()>>) -> Result<()> {
        for &number in &manifest.damaged {
            let mut cutter = self.cutter(manifest.parts[number].start);
            self.rewrite(&mut cutter, manifest, number, stop).await?;
        }
        Ok(())
    }

    /// Writes a part that the manifest has; the bytes must be those of the first time.
    async fn rewrite(
        &mut self,
        cutter: &mut Cutter,
        manifest: &Manifest,
        number: usize,
        stop: &Shared<impl Future<Output = ()>>,
    ) -> Result<()> {
        tracing::warn!(file = %manifest.part(number), "lost or damaged; written again");
        let again = self.part(cutter, manifest, number, stop).await?;
        // Such a file was not put in its place.
        let then = &manifest.parts[number];
        if (&again.sha256, again.bytes) != (&then.sha256, then.bytes) {
            return Err(ManifestError::Part { file: manifest.part(number).to_string() }.into());
        }
        Ok(())
    }

    /// State `carry`: the rows of finished parts must be read again, for the state that they leave behind.
    async fn replay(
        &mut self,
        cutter: &mut Cutter,
        manifest: &Manifest,
        stop: &Shared<impl Future<Output = ()>>,
    ) -> Result<()> {
        for (number, part) in manifest.parts.iter().enumerate() {
            if manifest.damaged.contains(&number) {
                self.rewrite(cutter, manifest, number, stop).await?;
                continue;
            }
            let mut left = part.counts.rows_in;
            while left > 0 {
                let again = async {
                    let slices = cutter.next(left).await?;
                    if slices.is_empty() {
                        return Ok(0);
                    }
                    let window = self.window(slices, cutter.bytes_read()).await?;
                    cutter.taken();
                    window.pending.await?;
                    Ok::<_, Error>(window.kept.num_rows() as u64)
                };
                let rows = tokio::select! {
                    biased;
                    () = stop.clone() => return Err(self.interrupted(self.began.rows_in)),
                    rows = again => rows?,
                };
                if rows == 0 {
                    return Ok(());
                }
                left -= rows;
            }
            // As after a part that is written: the next one begins in the file that has its first row.
            cutter.is_at_end().await?;
        }
        Ok(())
    }

    /// Writes one part and says what is in it.
    async fn part(
        &mut self,
        cutter: &mut Cutter,
        manifest: &Manifest,
        number: usize,
        stop: &Shared<impl Future<Output = ()>>,
    ) -> Result<PartEntry> {
        let begun = manifest.parts.get(number).map(|part| part.start);
        let start = begun.or(manifest.position()).unwrap_or_else(|| cutter.position());
        let before = manifest.parts.get(number).map(|part| part.sha256.as_str());
        let mut open = self.open(manifest.part(number), start)?;
        if self.can_pause(manifest, number)
            && let Some(partial) = Partial::load(&manifest.partial(), start, &self.prepared.schema).await
        {
            *cutter = self.cutter(partial.end);
            open.take_up(partial).await?;
        }
        let filled = match self.fill(cutter, &mut open, stop).await {
            Ok(true) if cutter.is_closed() && open.counts.rows_in == 0 => {
                Err(self.interrupted(manifest.totals().rows_in))
            }
            Ok(true) => self.publishable(cutter, manifest, start, stop).await,
            Ok(false) => return Err(self.pause(open, manifest, number).await),
            Err(error) => Err(error),
        };
        let (end, last) = match filled {
            Ok(filled) => filled,
            Err(error) => {
                open.writer.abort().await;
                return Err(error);
            }
        };
        let written = open.writer.replace(&self.stage.metadata(), before, manifest.fence()).await?;
        crash::after_upload_before_manifest();
        manifest.hold().await?;
        Ok(PartEntry {
            file: part_name(number),
            start,
            end,
            last,
            bytes: written.bytes,
            sha256: written.sha256,
            counts: open.counts,
        })
    }

    /// Where a part that begins at `start` and is complete now ends, and whether it is the last: if it may take its place.
    async fn publishable(
        &self,
        cutter: &mut Cutter,
        manifest: &Manifest,
        start: Position,
        stop: &Shared<impl Future<Output = ()>>,
    ) -> Result<(Position, bool)> {
        let waits_for_lines = !self.comes_again() && !cutter.is_closed();
        // What is wrong with the next row is the next part's affair, which meets it again; this one is complete.
        let last = tokio::select! {
            biased;
            () = stop.clone(), if waits_for_lines => None,
            last = self.is_at_end(cutter) => Some(last?),
        };
        if last.is_none() {
            cutter.close();
        }
        let end = cutter.position();
        // When the end of the input was seen before it was closed, nothing is missing.
        let is_behind = end.file >= self.prepared.plan.files().len();
        let last = last.unwrap_or(false) && (is_behind || !cutter.is_closed());
        self.still_ours(manifest, start, end).await?;
        Ok((end, last))
    }

    /// Whether the row that was read last is the last of all. A store that fails for a moment is asked again; a fault that
    /// stays is not of the rows before it, but standard input shows it only once.
    async fn is_at_end(&self, cutter: &mut Cutter) -> Result<bool> {
        match cutter.is_at_end().await {
            Err(_) if self.comes_again() => Ok(cutter.is_at_end().await.unwrap_or(false)),
            answer => answer,
        }
    }

    /// Nobody else writes to the output, and the files that a part was read from are those that were listed.
    async fn still_ours(&self, manifest: &Manifest, start: Position, end: Position) -> Result<()> {
        let files = self.prepared.plan.files().take(end.file + 1).skip(start.file);
        source::check_unchanged(files).await?;
        Ok(manifest.hold().await?)
    }

    fn open(&self, location: Location, start: Position) -> Result<OpenPart> {
        let vectors = self.stage.fields().first().map(|field| field.name().clone()).unwrap_or_default();
        let encoding = Encoding { vectors, codec: self.job.codec, row_group_bytes: self.job.row_group_bytes };
        let writer = PartWriter::new(location, &self.prepared.schema, &encoding, Buffering::Chunk)?;
        Ok(OpenPart::new(writer, start))
    }

    /// Whether the input can be read a second time: standard input cannot.
    fn comes_again(&self) -> bool {
        self.prepared.plan.files().all(|file| file.location.is_some())
    }

    /// Whether the rows of an open part can be taken up again: not when a state would be missing, not when the rest of
    /// the input is gone, and not for a part that is only mended.
    fn can_pause(&self, manifest: &Manifest, number: usize) -> bool {
        let carried = self.stage.spec().batch_rows.is_some();
        !carried && number == manifest.parts.len() && self.comes_again()
    }

    /// The job was asked to stop: the rows that devices work on may end, and what is complete of the part is put aside.
    async fn pause(&mut self, mut open: OpenPart, manifest: &Manifest, number: usize) -> Error {
        let mut rows = manifest.totals().rows_in;
        if self.can_pause(manifest, number) {
            // An error of a row comes again, in its place, when the job goes on.
            let _ = tokio::time::timeout(self.job.grace, self.next_window(&mut open)).await;
            while let Some(Ok(true)) = self.next_window(&mut open).now_or_never() {}
            let saved = match manifest.hold().await {
                Ok(()) => open.kept.save(&manifest.partial()).await.map_err(Error::from),
                Err(error) => Err(error.into()),
            };
            match saved {
                Ok(kept) => rows += kept,
                Err(error) => tracing::warn!(%error, "the rows of the open part could not be kept"),
            }
        }
        open.writer.abort().await;
        self.interrupted(rows)
    }

    fn interrupted(&self, rows: u64) -> Error {
        Error::Interrupted { rows, again: self.comes_again(), begun: true }
    }

    /// Writes the rows of one part; the next window is read and tokenised while devices work on this one. False when the
    /// job is asked to stop before; of an input that does not come again what was read is written nevertheless.
    async fn fill(
        &mut self,
        cutter: &mut Cutter,
        open: &mut OpenPart,
        stop: &Shared<impl Future<Output = ()>>,
    ) -> Result<bool> {
        let mut left = self.prepared.part_rows - open.counts.rows_in;
        loop {
            let step = self.step(cutter, open, &mut left, stop).await?;
            match step {
                Some(true) => {}
                Some(false) => return Ok(true),
                None if self.comes_again() => return Ok(false),
                None => cutter.close(),
            }
            if let Some(batch) = open.unwritten.take() {
                open.writer.write(&batch).await?;
            }
            crash::mid_part();
        }
    }

    /// Reads ahead and takes the next finished window into the part; `Some(false)` when there is none, `None` when the job
    /// is asked to stop before.
    async fn step(
        &mut self,
        cutter: &mut Cutter,
        open: &mut OpenPart,
        left: &mut u64,
        stop: &Shared<impl Future<Output = ()>>,
    ) -> Result<Option<bool>> {
        let heeds = !cutter.is_closed();
        while open.under_way.len() < WINDOWS && *left > 0 {
            let slices = tokio::select! {
                biased;
                () = stop.clone(), if heeds => return Ok(None),
                slices = cutter.next(*left) => slices?,
            };
            if slices.is_empty() {
                break;
            }
            let bytes_read = cutter.bytes_read();
            let window = tokio::select! {
                biased;
                // Rows that come once are given to the engine once: a carried state must not see them again.
                () = stop.clone(), if heeds && self.comes_again() => return Ok(None),
                window = self.window(slices, bytes_read) => window?,
            };
            cutter.taken();
            *left -= window.kept.num_rows() as u64;
            open.under_way.push_back(window);
        }
        tokio::select! {
            biased;
            () = stop.clone(), if heeds => Ok(None),
            more = self.next_window(open) => more.map(Some),
        }
    }

    /// Takes the next finished window into the part; false when none is under way. May be dropped while it waits.
    async fn next_window(&mut self, open: &mut OpenPart) -> Result<bool> {
        let Some(window) = open.under_way.front_mut() else { return Ok(false) };
        let added = loop {
            tokio::select! {
                done = &mut window.pending => break done,
                () = tokio::time::sleep(TICK) => {}
            }
            count_work(&mut self.seen, self.stage, self.work_before);
            self.progress.update(&self.seen);
        };
        let Some(window) = open.under_way.pop_front() else { return Ok(false) };
        let added = added.map_err(|e| {
            // Nothing may follow a window that failed, and what has answered may not be asked again.
            open.under_way.clear();
            self.place(e, &window.slices)
        })?;
        self.seen.bytes = window.bytes_read;
        let (batch, counts) = self.finish_window(&window, added)?;
        open.add(batch, counts, window.end());
        Ok(true)
    }

    /// Hands the rows of a window, which has at least one, to the engine.
    async fn window(&self, slices: Vec<Slice>, bytes_read: u64) -> Result<Window> {
        let texts: Vec<&dyn Array> = slices.iter().map(|slice| slice.text.as_ref()).collect();
        let text: ArrayRef = concat(&texts).map_err(elmo::Error::from)?;
        let kept = concat_batches(self.prepared.plan.kept(), slices.iter().map(|slice| &slice.kept))
            .map_err(elmo::Error::from)?;
        let pending = self.stage.submit(&text).await.map_err(|e| self.place(e, &slices))?;
        Ok(Window { slices, kept, pending, bytes_read })
    }

    /// Puts the columns of a window together.
    fn finish_window(&mut self, window: &Window, added: EmbeddedColumns) -> Result<(RecordBatch, Counts)> {
        let stats = added.stats;
        let mut columns = window.kept.columns().to_vec();
        let error = Arc::new(added.error.clone()) as ArrayRef;
        columns.extend([added.vectors, Arc::new(added.truncated) as ArrayRef, error]);
        let batch = RecordBatch::try_new(Arc::clone(&self.prepared.schema), columns).map_err(elmo::Error::from)?;
        let batch = match &added.keep {
            None => batch,
            Some(keep) => {
                self.tell_skipped(&window.slices, &added.row_errors);
                filter_record_batch(&batch, keep).map_err(elmo::Error::from)?
            }
        };
        let rows_in = stats.rows as u64;
        let counts = Counts {
            rows_in,
            rows_out: batch.num_rows() as u64,
            nulls: stats.nulls as u64,
            empty: stats.empty as u64,
            truncated: stats.truncated as u64,
            errors: stats.errors as u64,
            skipped: skipped(added.keep.as_ref()),
            sentences: stats.sentences as u64,
            tokens: stats.tokens as u64,
        };
        self.seen.rows += rows_in;
        if !count_work(&mut self.seen, self.stage, self.work_before) {
            self.seen.tokens += counts.tokens;
            self.seen.padded_tokens += counts.tokens;
        }
        self.progress.update(&self.seen);
        Ok((batch, counts))
    }

    /// Rows that are left out are in no column of errors, so they are named here: the first for everybody.
    fn tell_skipped(&mut self, slices: &[Slice], row_errors: &[(usize, RowError)]) {
        for (row, reason) in row_errors {
            let (file, row_there) = row_at(&self.prepared.plan, slices, *row).unwrap_or_default();
            let label = reason.label();
            self.told += 1;
            match self.told.cmp(&TOLD) {
                Ordering::Less => tracing::warn!(file, row = row_there, label, %reason, "row left out"),
                Ordering::Equal => {
                    tracing::warn!(file, row = row_there, label, %reason, "row left out; more of them are told with -v");
                }
                Ordering::Greater => tracing::info!(file, row = row_there, label, %reason, "row left out"),
            }
        }
    }

    fn place(&self, error: elmo::Error, slices: &[Slice]) -> Error {
        place(&self.prepared.plan, error, slices)
    }
}

/// Gives a row of consecutive slices its file and its row there.
pub(crate) fn place(plan: &Plan, error: elmo::Error, slices: &[Slice]) -> Error {
    let elmo::Error::Row { row, reason } = error else { return error.into() };
    match row_at(plan, slices, row) {
        Some((file, row)) => Error::Input {
            file,
            row: Some(row),
            reason: reason.to_string(),
            help: Some("--on-error null keeps such rows without a vector, --on-error skip leaves them out".into()),
        },
        None => Error::Failed(reason.to_string()),
    }
}

/// File of the `row`th row of consecutive slices, and its row there.
fn row_at(plan: &Plan, slices: &[Slice], row: usize) -> Option<(String, u64)> {
    let mut left = row;
    for slice in slices {
        if left < slice.len() {
            let file = plan.files().nth(slice.start.file)?;
            return Some((file.to_string(), slice.start.row + left as u64));
        }
        left -= slice.len();
    }
    None
}

fn skipped(keep: Option<&BooleanArray>) -> u64 {
    keep.map_or(0, |keep| keep.false_count() as u64)
}

/// Takes over what devices did for this job so far; false where the stage does not say.
fn count_work(seen: &mut Snapshot, stage: &dyn Stage, before: Option<Work>) -> bool {
    let (Some(before), Some(now)) = (before, stage.work()) else { return false };
    seen.tokens = now.tokens - before.tokens;
    seen.padded_tokens = now.padded_tokens - before.padded_tokens;
    true
}

async fn finish(manifest: &mut Manifest) -> Result<()> {
    crash::before_done();
    Ok(manifest.finish().await?)
}
