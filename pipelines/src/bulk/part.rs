//! Writes one part: adds rows in order, and publishes the complete file.

use std::{pin::pin, time::Duration};

use arrow::array::RecordBatch;
use datafusion::common::runtime::SpawnedTask;
use elmo::EmbeddedColumns;
use futures::future::{FutureExt, Shared};
use tokio::{
    sync::{OwnedSemaphorePermit, oneshot},
    time::Instant,
};

use super::{
    chunks::{Chunk, Chunker},
    feed::{End, Feed, Item, Until},
    manifest::{Counts, Manifest, PartEntry},
    partial::OpenPart,
    place::log_skipped,
    run::Run,
};
use crate::{
    crash::bulk as crash,
    error::{Error, Result},
    sink::{Buffering, Complete, Encoding, PartWriter, SinkError},
    source::{self, Plan, Position},
    stores::Location,
};

/// Interval of progress updates while devices work.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);

/// Time in which the columns of a chunk are built once all of its vectors are computed, on a machine that is busy.
const BUILDING_TIME: Duration = Duration::from_millis(500);

/// Why no more rows are added to a part.
pub(super) enum Filled {
    /// It is complete.
    Complete(End),
    /// Reading was closed, and the part has no rows.
    Nothing,
    /// The job was interrupted, at this time.
    Stopped(Instant),
}

/// A part that has all of its rows. It is not durable yet: its last rows are encoded and uploaded on a task of its own.
pub(super) struct CompletePart {
    number: usize,
    finishing: SpawnedTask<Result<Option<Complete>, SinkError>>,
    /// Cancels it.
    cancel: oneshot::Sender<()>,
    start: Position,
    end: End,
    counts: Counts,
    rows_digest: Option<String>,
    /// Its share of what may wait to be published.
    room: Option<OwnedSemaphorePermit>,
}

impl CompletePart {
    /// Begins to finish it, with these key-value pairs in the footer. The rows that were kept for an interruption are dropped.
    pub(super) fn new(
        number: usize,
        open: OpenPart,
        end: End,
        metadata: &[(String, String)],
        room: Option<OwnedSemaphorePermit>,
    ) -> Self {
        let OpenPart { writer, start, counts, digest, .. } = open;
        let metadata = metadata.to_vec();
        let (cancel, cancelled) = oneshot::channel();
        let finishing = SpawnedTask::spawn(async move { writer.complete(&metadata, cancelled.map(drop)).await });
        Self { number, finishing, cancel, start, end, counts, rows_digest: digest.value(), room }
    }

    /// Publishes it and returns its entry, after checking that this job still holds the output and that the input files did not
    /// change. The entry of a part that is written again is emptied before.
    pub(super) async fn publish(self, plan: &Plan, manifest: &mut Manifest) -> Result<PartEntry> {
        let Self { number, finishing, cancel, start, end: End { end, last }, counts, rows_digest, room } = self;
        let complete = finished(finishing).await?;
        drop(cancel);
        let complete = complete.ok_or_else(|| Error::Failed("a part was cancelled".to_owned()))?;
        let prepared = match check_unchanged(plan, start, end).await {
            Ok(()) => manifest.prepare(number, end, rows_digest.as_deref()).await.map_err(Error::from),
            changed => changed,
        };
        if let Err(error) = prepared {
            complete.abort().await;
            return Err(error);
        }
        let file = manifest.part_file(number);
        let written = complete.replace(manifest.fence()).await?;
        crash::after_upload_before_manifest();
        manifest.hold_published(&file).await?;
        drop(room);
        let (bytes, sha256) = (written.bytes, written.sha256);
        Ok(PartEntry { file, start, end, last, bytes, sha256, rows_digest, counts })
    }

    /// Discards it.
    pub(super) async fn abort(self) {
        drop(self.cancel);
        if let Ok(Some(complete)) = finished(self.finishing).await {
            complete.abort().await;
        }
    }
}

/// A panic of the encoder goes on here.
async fn finished(finishing: SpawnedTask<Result<Option<Complete>, SinkError>>) -> Result<Option<Complete>> {
    match finishing.join_unwind().await {
        Ok(complete) => Ok(complete?),
        Err(error) => Err(Error::Failed(format!("a part could not be finished: {error}"))),
    }
}

/// Checks that the files of a part are those that were listed.
///
/// # Errors
/// [`SourceError::Changed`](source::SourceError::Changed) when they are not.
pub(super) async fn check_unchanged(plan: &Plan, start: Position, end: Position) -> Result<()> {
    Ok(source::check_unchanged(plan.files().take(end.file + 1).skip(start.file)).await?)
}

impl<'j> Run<'j> {
    /// Writes part `number` again, which begins where `chunker` is, and returns its entry.
    pub(super) async fn part_again(
        &mut self,
        chunker: Chunker,
        manifest: &mut Manifest,
        number: usize,
        stop: &Shared<impl Future<Output = ()>>,
    ) -> Result<(PartEntry, Chunker)> {
        let start = manifest.start_of(number).unwrap_or_else(|| chunker.position());
        let mut open = self.open(manifest.part(number), start, manifest.job_digest())?;
        let mut feed = self.feed(chunker, (number, 0), Until::ThisPart);
        let end = match self.fill(&mut feed, &mut open, stop).await {
            Ok(Filled::Complete(end)) => end,
            Ok(Filled::Nothing | Filled::Stopped(_)) => {
                open.writer.abort().await;
                return Err(self.interrupted(manifest.durable_totals().rows_in));
            }
            Err(error) => {
                open.writer.abort().await;
                return Err(error);
            }
        };
        let complete = CompletePart::new(number, open, end, &self.stage.metadata(), None);
        let entry = complete.publish(&self.parts.plan, manifest).await?;
        Ok((entry, feed.into_chunker()))
    }

    /// Begins a part of the job with this digest.
    pub(super) fn open(&self, location: Location, start: Position, job: String) -> Result<OpenPart> {
        let writer = PartWriter::new(location, &self.parts.schema, &self.encoding(), Buffering::Chunk)?;
        Ok(OpenPart::new(writer, start, job))
    }

    pub(super) fn feed(&self, chunker: Chunker, part: (usize, u64), until: Until) -> Feed<'j> {
        Feed::new(self.parts.clone(), chunker, self.in_flight(), part, until)
    }

    pub(super) fn encoding(&self) -> Encoding {
        let vectors = self.stage.fields().first().map(|field| field.name().clone()).unwrap_or_default();
        Encoding { vectors, codec: self.parts.codec, row_group_bytes: self.parts.row_group_bytes }
    }

    /// Whether saved rows of the open part can be used: not in state `carry`, where the state after them is missing,
    /// not when the rest of the input cannot be read, and not for a part that is repaired.
    pub(super) fn can_resume(&self, manifest: &Manifest, number: usize) -> bool {
        !self.carries_state() && number == manifest.parts().len() && self.parts.is_repeatable()
    }

    /// Interrupts the part: the rows in flight may complete within the grace period after `stopped`, and the complete rows are saved.
    pub(super) async fn pause(
        &mut self,
        mut open: OpenPart,
        feed: &mut Feed<'_>,
        manifest: &Manifest,
        (number, stopped): (usize, Instant),
    ) -> Error {
        let mut rows = manifest.durable_totals().rows_in;
        if self.can_resume(manifest, number) {
            // If a row fails, it fails again when the job is resumed.
            let _ = tokio::time::timeout_at(stopped + self.grace, self.add_in_flight(feed, &mut open)).await;
            // The vectors of later chunks may be complete, too, while other tasks build their columns.
            while let Ok(Ok(true)) = tokio::time::timeout(BUILDING_TIME, self.add_in_flight(feed, &mut open)).await {}
            let saved = match manifest.hold().await {
                Ok(()) => open.prefix.save(&manifest.partial()).await.map_err(Error::from),
                Err(error) => Err(error.into()),
            };
            match saved {
                Ok(saved) => rows += saved,
                Err(error) => tracing::warn!(%error, "the rows of the open part could not be saved"),
            }
        }
        open.writer.abort().await;
        self.interrupted(rows)
    }

    /// Adds the rows of the oldest chunk in flight, to save them; false when there is none, or after a failure.
    async fn add_in_flight(&mut self, feed: &mut Feed<'_>, open: &mut OpenPart) -> Result<bool> {
        match feed.next_in_flight().await {
            Some(Ok(Item::Rows(chunk, added))) => {
                let (batch, counts) = self.finish(&chunk, &added)?;
                open.add(&chunk, &batch, counts)?;
                Ok(true)
            }
            Some(Err(error)) => Err(error),
            Some(Ok(Item::End(_) | Item::Closed)) | None => Ok(false),
        }
    }

    /// Adds the rows of one part until it is complete or the job is interrupted. If the input cannot be read again, the rows that were
    /// read are written even then.
    pub(super) async fn fill(
        &mut self,
        feed: &mut Feed<'_>,
        open: &mut OpenPart,
        stop: &Shared<impl Future<Output = ()>>,
    ) -> Result<Filled> {
        loop {
            let stoppable = !feed.is_closed();
            let item = tokio::select! {
                biased;
                () = stop.clone(), if stoppable => match self.parts.is_repeatable() {
                    true => return Ok(Filled::Stopped(Instant::now())),
                    false => {
                        feed.close();
                        continue;
                    }
                },
                item = self.next(feed) => item?,
            };
            match item {
                Item::Rows(chunk, added) => {
                    let (batch, counts) = self.finish(&chunk, &added)?;
                    open.add(&chunk, &batch, counts)?;
                    open.writer.write(&batch).await?;
                    crash::mid_part();
                }
                Item::End(end) => return Ok(Filled::Complete(end)),
                Item::Closed => return Ok(Filled::Nothing),
            }
        }
    }

    /// The next item of the feed, with progress updates until it comes. May be dropped as [`Feed::next`].
    async fn next(&mut self, feed: &mut Feed<'_>) -> Result<Item> {
        let mut next = pin!(feed.next());
        loop {
            match tokio::time::timeout(PROGRESS_INTERVAL, next.as_mut()).await {
                Ok(item) => return item,
                Err(_) => {
                    self.count_work();
                    self.progress.update(&self.seen);
                }
            }
        }
    }

    /// The rows that a chunk adds to the output.
    fn finish(&mut self, chunk: &Chunk, added: &EmbeddedColumns) -> Result<(RecordBatch, Counts)> {
        let output = chunk.output(&self.parts.schema, added)?;
        self.note_malformed(chunk);
        if added.keep.is_some() {
            log_skipped(&self.parts.plan, &chunk.slices, &added.row_errors, &mut self.logged);
        }
        self.seen.bytes = chunk.bytes_read;
        self.seen.rows += output.1.rows_in;
        if !self.count_work() {
            self.seen.tokens += output.1.tokens;
            self.seen.padded_tokens += output.1.tokens;
        }
        self.progress.update(&self.seen);
        Ok(output)
    }
}
