//! Writes the parts of a job: first lost parts again, then those after the last one.

use std::{sync::Arc, time::Duration};

use futures::future::{Either, Shared, join_all, select};
use tokio::{
    sync::{
        OwnedSemaphorePermit, Semaphore,
        mpsc::{self, UnboundedReceiver, UnboundedSender},
    },
    time::{Instant, timeout_at},
};

use super::{
    chunks::{Chunk, Chunker},
    feed::{Feed, Until},
    manifest::{Counts, Manifest, Part, PartEntry},
    part::{CompletePart, Filled},
    partial::{OpenPart, Partial},
    place::{self, log_malformed},
    prepare::Parts,
};
use crate::{
    crash::bulk as crash,
    error::{Error, Result},
    in_order::{InFlightLimit, InOrder},
    report::{Progress, Snapshot},
    sink::row_groups_at_once,
    source::{Mark, Plan, Position, Slice},
    stage::{Stage, Work},
    stores::Location,
};

/// Limit of chunks in flight.
const MAX_IN_FLIGHT: InFlightLimit = InFlightLimit { batches: 8, bytes: 512 << 20 };

/// Rows of complete parts that wait until their part is published, before compression.
const MAX_WAITING_BYTES: u64 = 512 << 20;

/// Malformed rows that a report names.
pub(super) const MAX_NAMED: usize = 5;

/// A running job.
pub(super) struct Run<'j> {
    pub(super) stage: &'j dyn Stage,
    pub(super) parts: Parts,
    /// How long an interrupted job waits for the rows in flight.
    pub(super) grace: Duration,
    pub(super) progress: &'j dyn Progress,
    pub(super) seen: Snapshot,
    /// Limit of chunks in flight.
    in_flight: InFlightLimit,
    /// Totals of the durable parts when the run began.
    resumed: Counts,
    /// Work of the devices before this job.
    work_before: Option<Work>,
    /// Number of skipped rows that were logged.
    pub(super) logged: usize,
    /// Where the first malformed rows are.
    pub(super) malformed_rows: Vec<String>,
}

impl<'j> Run<'j> {
    pub(super) fn new(
        stage: &'j dyn Stage,
        (parts, grace): (Parts, Duration),
        progress: &'j dyn Progress,
        resumed: Counts,
    ) -> Self {
        let (seen, work_before) = (Snapshot::default(), stage.work());
        let in_flight = MAX_IN_FLIGHT;
        Self {
            stage,
            parts,
            grace,
            progress,
            seen,
            in_flight,
            resumed,
            work_before,
            logged: 0,
            malformed_rows: Vec::new(),
        }
    }

    /// A part that another process asked for, with at most so many bytes in flight.
    pub(super) fn of_unit(stage: &'j dyn Stage, parts: Parts, progress: &'j dyn Progress, bytes: u64) -> Self {
        let in_flight = InFlightLimit { bytes: bytes.min(MAX_IN_FLIGHT.bytes), ..MAX_IN_FLIGHT };
        // Devices work for other units too, so that tokens are counted by rows.
        Self { in_flight, work_before: None, ..Self::new(stage, (parts, Duration::ZERO), progress, Counts::default()) }
    }

    /// Writes the parts that are not durable and finishes the job.
    pub(super) async fn run(&mut self, manifest: &mut Manifest, stop: &Shared<impl Future<Output = ()>>) -> Result<()> {
        self.seen.rows = self.resumed.rows_in;
        // With a limit it is not known how many bytes will be read.
        let is_whole = self.parts.limit.is_none();
        self.seen.bytes_total =
            Some(self.parts.plan.files().map(|file| file.size).sum()).filter(|bytes| *bytes > 0 && is_whole);
        if self.carries_state() && !manifest.is_complete() {
            let chunker = self.replay(self.chunker(Position::default()), manifest, stop).await?;
            if let Some(start) = manifest.position() {
                self.append(chunker, (start, None), manifest, stop).await?;
            }
        } else {
            self.repair(manifest, stop).await?;
            if let Some(start) = manifest.position() {
                let saved = self.saved(manifest, start).await;
                let chunker = self.chunker(saved.as_ref().map_or(start, Partial::end));
                self.append(chunker, (start, saved), manifest, stop).await?;
            }
        }
        crash::before_done();
        Ok(manifest.finish().await?)
    }

    /// The rows of the next part that an interrupted run saved.
    async fn saved(&self, manifest: &Manifest, start: Position) -> Option<Partial> {
        let (number, job) = (manifest.parts().len(), manifest.job_digest());
        if !self.can_resume(manifest, number) {
            return None;
        }
        Partial::load(&manifest.partial(), &self.parts.schema, (start, &job)).await
    }

    /// Writes the parts after the last one of the manifest. While a part is filled, those before it are finished and published.
    async fn append(
        &mut self,
        chunker: Chunker,
        (start, saved): (Position, Option<Partial>),
        manifest: &mut Manifest,
        stop: &Shared<impl Future<Output = ()>>,
    ) -> Result<()> {
        let mut number = manifest.parts().len();
        let mut open = self.open(manifest.part(number), start, manifest.job_digest())?;
        let read = saved.as_ref().map_or(0, |saved| saved.counts().rows_in);
        if let Some(saved) = saved {
            self.count_resumed(saved.counts());
            if let Err(error) = open.resume(saved).await {
                open.writer.abort().await;
                return Err(error);
            }
        }
        let mut feed = self.feed(chunker, (number, read), Until::LastPart);
        let mut open = Some(open);
        let (next, mut waiting) = Next::new(manifest, self.stage.metadata(), self.parts.row_group_bytes);
        let (plan, grace) = (Arc::clone(&self.parts.plan), self.grace);
        let publishing = publish_all(&mut waiting, &plan, manifest);
        let ended = both(publishing, self.fill_all(&mut feed, (&mut number, &mut open), next, stop), grace).await;
        // There are some only if one could not be published, or not in time.
        waiting.close();
        let mut left = Vec::new();
        while let Some(part) = waiting.recv().await {
            left.push(part.abort());
        }
        join_all(left).await;
        let Some(open) = open else { return ended.map(drop) };
        if let Ok(Ended::Stopped(at)) = ended {
            return Err(self.pause(open, &mut feed, manifest, (number, at)).await);
        }
        open.writer.abort().await;
        ended.and(Err(self.interrupted(manifest.durable_totals().rows_in)))
    }

    /// Fills one part after the other, from the `number`th on, which is `open`. The last one is `None` when all rows were read.
    async fn fill_all(
        &mut self,
        feed: &mut Feed<'_>,
        (number, open): (&mut usize, &mut Option<OpenPart>),
        next: Next<impl Fn(usize) -> Location>,
        stop: &Shared<impl Future<Output = ()>>,
    ) -> Result<Ended> {
        loop {
            crash::before_part();
            let Some(filling) = open else { return Ok(Ended::AllRead) };
            let end = match self.fill(feed, filling, stop).await? {
                Filled::Complete(end) => end,
                Filled::Stopped(at) => return Ok(Ended::Stopped(at)),
                Filled::Nothing => return Ok(Ended::Closed),
            };
            let room = tokio::select! {
                biased;
                () = stop.clone(), if self.parts.is_repeatable() => None, // the next part is the one that is not filled
                room = next.room(filling.writer.row_groups()) => Some(room?),
            };
            let (last, start) = (end.last, end.end);
            let complete = open.take().map(|open| CompletePart::new(*number, open, end, &next.metadata, room));
            // The receiver lives longer than this.
            complete.into_iter().for_each(|part| drop(next.complete.send(part)));
            if last {
                return Ok(Ended::AllRead);
            }
            *number += 1;
            *open = Some(self.open((next.location)(*number), start, next.job.clone())?);
        }
    }

    /// Totals of the rows that were durable when the run began.
    pub(super) fn resumed(&self) -> Counts {
        self.resumed
    }

    /// Counts rows of the open part that an earlier run saved.
    pub(super) fn count_resumed(&mut self, saved: Counts) {
        self.resumed += saved;
        self.seen.rows += saved.rows_in;
    }

    /// Logs the malformed rows of a chunk, which are not in the output, and keeps the first ones for the report.
    pub(super) fn note_malformed(&mut self, chunk: &Chunk) {
        for (file, malformed) in chunk.malformed(&self.parts.plan) {
            log_malformed(&file, malformed, &mut self.logged);
            if self.malformed_rows.len() < MAX_NAMED {
                self.malformed_rows.push(format!("{file}, line {}: {}", malformed.line, malformed.reason));
            }
        }
    }

    pub(super) fn chunker(&self, from: Position) -> Chunker {
        self.chunker_at(from, None)
    }

    /// `mark` may say where a row begins that is not after `from`.
    pub(super) fn chunker_at(&self, from: Position, mark: Option<Mark>) -> Chunker {
        Chunker::new(self.parts.window_rows, self.stage, Arc::clone(&self.parts.plan), from, mark)
    }

    pub(super) fn in_flight(&self) -> InOrder<'j, Box<Chunk>> {
        InOrder::new(self.stage, self.in_flight)
    }

    /// State `carry`: a row's vectors depend on all rows before it.
    pub(super) fn carries_state(&self) -> bool {
        self.stage.spec().batch_rows.is_some()
    }

    /// Writes lost and damaged parts again, wherever they are in the order.
    async fn repair(&mut self, manifest: &mut Manifest, stop: &Shared<impl Future<Output = ()>>) -> Result<()> {
        for number in manifest.damaged() {
            let chunker = self.chunker(manifest.start_of(number).unwrap_or_default());
            self.rewrite(chunker, manifest, number, stop).await?;
        }
        Ok(())
    }

    /// Writes a lost or damaged part and its entry again. On other hardware its bytes may differ.
    async fn rewrite(
        &mut self,
        chunker: Chunker,
        manifest: &mut Manifest,
        number: usize,
        stop: &Shared<impl Future<Output = ()>>,
    ) -> Result<Chunker> {
        let (entry, chunker) = self.part_again(chunker, manifest, number, stop).await?;
        self.restore(manifest, number, entry).await?;
        Ok(chunker)
    }

    /// Writes the entry of a part that was written again.
    pub(super) async fn restore(&self, manifest: &mut Manifest, number: usize, entry: PartEntry) -> Result<()> {
        let file = manifest.part(number);
        match manifest.parts()[number].entry() {
            Some(then) if then.sha256 == entry.sha256 => tracing::warn!(%file, "was lost or damaged; written again"),
            Some(_) => tracing::warn!(
                %file,
                "was lost or damaged; written again with other bytes than the first time; its manifest entry was replaced too"
            ),
            None => tracing::warn!(%file, "its manifest entry was lost or damaged; both are written again"),
        }
        Ok(manifest.restore(number, entry).await?)
    }

    /// State `carry`: submits the rows of finished parts again, to restore the state after them.
    async fn replay(
        &mut self,
        mut chunker: Chunker,
        manifest: &mut Manifest,
        stop: &Shared<impl Future<Output = ()>>,
    ) -> Result<Chunker> {
        for number in 0..manifest.parts().len() {
            let Part::Durable(entry) = &manifest.parts()[number] else {
                chunker = self.rewrite(chunker, manifest, number, stop).await?;
                continue;
            };
            let mut left = entry.counts.rows_in;
            while left > 0 {
                let rows = tokio::select! {
                    biased;
                    () = stop.clone() => return Err(self.interrupted(self.resumed.rows_in)),
                    rows = self.replay_chunk(&mut chunker, left) => rows?,
                };
                if rows == 0 {
                    return Ok(chunker);
                }
                left -= rows;
            }
            // As after a part that is written: the next one begins in the file that has its first row.
            chunker.is_at_end().await?;
        }
        Ok(chunker)
    }

    /// Submits the next chunk, waits for it and drops the vectors; returns its rows, 0 at the end.
    async fn replay_chunk(&self, chunker: &mut Chunker, max_rows: u64) -> Result<u64> {
        let slices = chunker.next(max_rows).await?;
        if slices.is_empty() {
            return Ok(0);
        }
        let (chunk, texts) = Chunk::new(&self.parts.plan, slices, chunker.bytes_read())?;
        let rows = chunk.rows() as u64;
        let columns = self.stage.submit(&texts).await.map_err(|e| self.place(e, &chunk.slices))?;
        chunker.advance();
        columns.await.map_err(|e| self.place(e, &chunk.slices))?;
        Ok(rows)
    }

    pub(super) fn interrupted(&self, rows: u64) -> Error {
        Error::Interrupted { rows, again: self.parts.is_repeatable(), begun: true }
    }

    pub(super) fn place(&self, error: elmo::Error, slices: &[Slice]) -> Error {
        place::place(&self.parts.plan, error, slices)
    }

    /// Counts the work of devices for this job so far; false where the stage does not measure it.
    pub(super) fn count_work(&mut self) -> bool {
        let (Some(before), Some(now)) = (self.work_before, self.stage.work()) else { return false };
        let work = now.since(&before);
        (self.seen.tokens, self.seen.padded_tokens) = (work.tokens, work.padded_tokens);
        true
    }
}

/// Why no more parts are filled.
enum Ended {
    AllRead,
    /// Reading was closed, and the open part has no rows.
    Closed,
    /// The job was interrupted, at this time.
    Stopped(Instant),
    /// It was interrupted, and complete parts could not be published in time.
    Late,
}

/// What new parts need, and where complete ones go.
struct Next<L> {
    location: L,
    job: String,
    metadata: Vec<(String, String)>,
    complete: UnboundedSender<CompletePart>,
    /// Row groups that may wait until their part is published, and their number.
    room: Arc<Semaphore>,
    most: usize,
}

impl Next<()> {
    /// For the parts after those of a manifest, which are received to be published.
    fn new(
        manifest: &Manifest,
        metadata: Vec<(String, String)>,
        row_group_bytes: u64,
    ) -> (Next<impl Fn(usize) -> Location + use<>>, UnboundedReceiver<CompletePart>) {
        let (complete, waiting) = mpsc::unbounded_channel();
        let (location, job) = (manifest.new_parts(), manifest.job_digest());
        let most = most_waiting(row_group_bytes);
        (Next { location, job, metadata, complete, room: Arc::new(Semaphore::new(most)), most }, waiting)
    }
}

impl<L> Next<L> {
    /// Waits until so many row groups of a part may wait beside those of earlier parts.
    async fn room(&self, row_groups: usize) -> Result<OwnedSemaphorePermit> {
        let groups = row_groups.clamp(1, self.most);
        let room = Arc::clone(&self.room).acquire_many_owned(groups as u32).await;
        room.map_err(|_| Error::Failed("parts are not published any more".to_owned()))
    }
}

/// Most row groups of complete parts that wait until their part is published. A part of the default size has two. On a GPU, it takes
/// about twice as long to encode, hash, write and synchronise it as to fill another one (estimated from the rates of a job). Of large row
/// groups fewer wait.
fn most_waiting(row_group_bytes: u64) -> usize {
    let of_bytes = MAX_WAITING_BYTES / row_group_bytes.max(1);
    (row_groups_at_once() * 3 / 2).min(usize::try_from(of_bytes).unwrap_or(usize::MAX)).max(1)
}

/// Publishes parts in order, and appends their entries to the manifest.
async fn publish_all(
    waiting: &mut UnboundedReceiver<CompletePart>,
    plan: &Plan,
    manifest: &mut Manifest,
) -> Result<()> {
    while let Some(complete) = waiting.recv().await {
        let entry = complete.publish(plan, manifest).await?;
        manifest.append(entry).await?;
        crash::after_manifest();
        manifest.remove_partial().await?;
    }
    Ok(())
}

/// Publishes parts while others are filled. Complete parts are published even if a later one fails, and after an interruption within the
/// grace period; if one cannot be published, no more are filled.
async fn both(
    publishing: impl Future<Output = Result<()>>,
    filling: impl Future<Output = Result<Ended>>,
    grace: Duration,
) -> Result<Ended> {
    // Boxed: without optimisation both together are larger than the stack of some threads.
    match select(Box::pin(publishing), Box::pin(filling)).await {
        Either::Left((published, filling)) => {
            published?;
            filling.await
        }
        Either::Right((Ok(Ended::Stopped(at)), publishing)) => match timeout_at(at + grace, publishing).await {
            Ok(published) => published.map(|()| Ended::Stopped(at)),
            Err(_) => {
                tracing::warn!(
                    "complete files could not be published in time; their rows are computed again on resume"
                );
                Ok(Ended::Late)
            }
        },
        Either::Right((filled, publishing)) => {
            publishing.await?;
            filled
        }
    }
}
