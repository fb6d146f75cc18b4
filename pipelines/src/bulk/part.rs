//! Writes one part: reads and submits rows, writes the results in order, and publishes the complete file.

use std::time::Duration;

use arrow::array::RecordBatch;
use elmo::EmbeddedColumns;
use futures::future::{FutureExt, Shared};

use super::{
    chunks::{Chunk, Chunker},
    digest::RowDigest,
    manifest::{Counts, Manifest, PartEntry},
    partial::{OpenPart, Partial},
    place::log_skipped,
    run::Run,
};
use crate::{
    crash::bulk as crash,
    error::{Error, Result},
    sink::{Buffering, Encoding, PartWriter},
    source::{self, Position},
    stores::Location,
};

/// Interval of progress updates while devices work.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);

/// The next event of an open part.
enum Step {
    /// Rows of a chunk were added.
    Added,
    /// No chunk is in flight and none follows: the part is complete.
    Complete,
    /// The job was interrupted.
    Stopped,
}

impl<'j> Run<'j> {
    /// Writes part `number`, for the first time or again, and returns its entry.
    pub(super) async fn part(
        &mut self,
        chunker: &mut Chunker,
        manifest: &mut Manifest,
        number: usize,
        stop: &Shared<impl Future<Output = ()>>,
    ) -> Result<PartEntry> {
        let start = manifest.start_of(number).unwrap_or_else(|| chunker.position());
        let job = manifest.job_digest();
        let mut open = self.open(manifest.part(number), start, &job)?;
        if self.can_resume(manifest, number)
            && let Some(partial) = Partial::load(&manifest.partial(), &self.parts.schema, (start, &job)).await
        {
            *chunker = self.chunker(partial.end());
            self.count_resumed(partial.counts());
            open.resume(partial).await?;
        }
        let filled = match self.fill(chunker, &mut open, number, stop).await {
            Ok(true) if chunker.is_closed() && open.counts.rows_in == 0 => {
                Err(self.interrupted(manifest.totals().rows_in))
            }
            Ok(true) => self.check_publishable(chunker, manifest, (start, number), &open.digest, stop).await,
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
        let (file, rows_digest) = (manifest.part_file(number), open.digest.value());
        let written = open.writer.replace(&self.stage.metadata(), None, manifest.fence()).await?;
        crash::after_upload_before_manifest();
        manifest.hold_published(&file).await?;
        let (bytes, sha256) = (written.bytes, written.sha256);
        Ok(PartEntry { file, start, end, last, bytes, sha256, rows_digest, counts: open.counts })
    }

    /// Returns where the complete part that begins at `start` ends, and whether it is the last one, if it may be published:
    /// the output is still this job's, and the input files did not change. The entry of a part that is written again is
    /// emptied before.
    async fn check_publishable(
        &self,
        chunker: &mut Chunker,
        manifest: &mut Manifest,
        (start, number): (Position, usize),
        digest: &RowDigest,
        stop: &Shared<impl Future<Output = ()>>,
    ) -> Result<(Position, bool)> {
        let (end, last) = self.ended(chunker, (start, number), stop).await?;
        manifest.prepare(number, end, digest.value().as_deref()).await?;
        Ok((end, last))
    }

    /// Returns where the complete part that begins at `start` ends, and whether it is the last one.
    ///
    /// # Errors
    /// [`SourceError::Changed`](source::SourceError::Changed) when its files did.
    pub(super) async fn ended(
        &self,
        chunker: &mut Chunker,
        (start, number): (Position, usize),
        stop: &Shared<impl Future<Output = ()>>,
    ) -> Result<(Position, bool)> {
        let waits_for_lines = !self.is_repeatable() && !chunker.is_closed();
        let last = tokio::select! {
            biased;
            () = stop.clone(), if waits_for_lines => None,
            last = self.is_at_end(chunker, number) => Some(last?),
        };
        if last.is_none() {
            chunker.close();
        }
        let end = chunker.position();
        let at_limit = self.parts.ends_with(number) && last == Some(true);
        // When reading was closed at the end of the input, nothing is missing.
        let is_behind = end.file >= self.parts.plan.files().len();
        let last = last.unwrap_or(false) && (is_behind || at_limit || !chunker.is_closed());
        let files = self.parts.plan.files().take(end.file + 1).skip(start.file);
        source::check_unchanged(files).await?;
        Ok((end, last))
    }

    /// Whether no row follows part `number`. After an error this part is complete, and the error is returned again for the
    /// next part; only standard input returns an error once. One retry excludes a temporary failure of the store.
    async fn is_at_end(&self, chunker: &mut Chunker, number: usize) -> Result<bool> {
        if self.parts.ends_with(number) {
            return Ok(true);
        }
        match chunker.is_at_end().await {
            Err(_) if self.is_repeatable() => Ok(chunker.is_at_end().await.unwrap_or(false)),
            answer => answer,
        }
    }

    fn open(&self, location: Location, start: Position, job: &str) -> Result<OpenPart<'j>> {
        let writer = PartWriter::new(location, &self.parts.schema, &self.encoding(), Buffering::Chunk)?;
        Ok(OpenPart::new(writer, self.in_flight(), start, job.to_owned()))
    }

    pub(super) fn encoding(&self) -> Encoding {
        let vectors = self.stage.fields().first().map(|field| field.name().clone()).unwrap_or_default();
        Encoding { vectors, codec: self.parts.codec, row_group_bytes: self.parts.row_group_bytes }
    }

    /// Whether saved rows of the open part can be used: not in state `carry`, where the state after them is missing,
    /// not when the rest of the input cannot be read, and not for a part that is repaired.
    fn can_resume(&self, manifest: &Manifest, number: usize) -> bool {
        !self.carries_state() && number == manifest.parts().len() && self.is_repeatable()
    }

    /// Interrupts the part: the rows in flight may complete within the grace period, and the complete rows are saved.
    async fn pause(&mut self, mut open: OpenPart<'_>, manifest: &Manifest, number: usize) -> Error {
        let mut rows = manifest.durable_totals().rows_in;
        if self.can_resume(manifest, number) {
            // If a row fails, it fails again when the job is resumed.
            let _ = tokio::time::timeout(self.grace, self.add_next(&mut open)).await;
            while let Some(Ok(true)) = self.add_next(&mut open).now_or_never() {}
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

    /// Writes the rows of one part; false when the job is interrupted before the part is complete. If the input cannot
    /// be read again, the rows that were read are written even then.
    pub(super) async fn fill(
        &mut self,
        chunker: &mut Chunker,
        open: &mut OpenPart<'_>,
        number: usize,
        stop: &Shared<impl Future<Output = ()>>,
    ) -> Result<bool> {
        let mut left = self.parts.rows_of(number).saturating_sub(open.counts.rows_in);
        loop {
            match self.step(chunker, open, &mut left, stop).await? {
                Step::Added => {}
                Step::Complete => return Ok(true),
                Step::Stopped if self.is_repeatable() => return Ok(false),
                Step::Stopped => chunker.close(),
            }
            if let Some(batch) = open.unwritten.take() {
                open.writer.write(&batch).await?;
            }
            crash::mid_part();
        }
    }

    /// Submits chunks while there is room, then adds the oldest chunk to the part.
    async fn step(
        &mut self,
        chunker: &mut Chunker,
        open: &mut OpenPart<'_>,
        left: &mut u64,
        stop: &Shared<impl Future<Output = ()>>,
    ) -> Result<Step> {
        let stoppable = !chunker.is_closed();
        while *left > 0 && open.in_flight.has_room(0) {
            let slices = tokio::select! {
                biased;
                () = stop.clone(), if stoppable => return Ok(Step::Stopped),
                slices = chunker.next(*left) => slices?,
            };
            let bytes = chunker.next_bytes();
            if slices.is_empty() || !open.in_flight.has_room(bytes) {
                break;
            }
            let (chunk, texts) = Chunk::new(&self.parts.plan, slices, chunker.bytes_read())?;
            let rows = chunk.rows() as u64;
            tokio::select! {
                biased;
                // Rows that cannot be read again are submitted exactly once: state `carry` must not see them twice.
                () = stop.clone(), if stoppable && self.is_repeatable() => return Ok(Step::Stopped),
                pushed = open.in_flight.push(chunk, &texts, bytes) => debug_assert!(pushed.is_ok(), "there was room"),
            }
            chunker.advance();
            *left -= rows;
        }
        tokio::select! {
            biased;
            () = stop.clone(), if stoppable => Ok(Step::Stopped),
            added = self.add_next(open) => Ok(if added? { Step::Added } else { Step::Complete }),
        }
    }

    /// Waits for the oldest chunk and adds its rows to the part; false when none is in flight. The future may be dropped
    /// while it waits.
    async fn add_next(&mut self, open: &mut OpenPart<'_>) -> Result<bool> {
        let (chunk, added) = loop {
            match tokio::time::timeout(PROGRESS_INTERVAL, open.in_flight.next()).await {
                Ok(None) => return Ok(false),
                Ok(Some(Ok(done))) => break done,
                Ok(Some(Err(failed))) => return Err(self.place(failed.error, &failed.tag.slices)),
                Err(_) => {
                    self.count_work();
                    self.progress.update(&self.seen);
                }
            }
        };
        let (batch, counts) = self.finish(&chunk, &added)?;
        open.add(&chunk, batch, counts)?;
        Ok(true)
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
