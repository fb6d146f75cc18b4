//! The rows of the input on their way through the stage, across the ends of parts.
//!
//! ```text
//! reader -> chunks -> submitted, several at a time -> in order -> rows of part n, its end, rows of part n + 1, ...
//! ```
//!
//! So devices have work while a part is encoded, uploaded and entered in the manifest.

use std::{collections::VecDeque, future::poll_fn, pin::pin};

use elmo::EmbeddedColumns;

use super::{
    chunks::{Chunk, Chunker},
    place::place,
    prepare::Parts,
};
use crate::{
    error::Result,
    in_order::{FailedBatch, InOrder},
    source::{Position, Slice},
};

/// The next item of a part.
pub(super) enum Item {
    /// Rows of the current part.
    Rows(Box<Chunk>, Box<EmbeddedColumns>),
    /// The current part has all of its rows.
    End(End),
    /// Reading was closed, and no row is left for the current part.
    Closed,
}

/// Where a part ends.
#[derive(Debug, Clone, Copy)]
pub(super) struct End {
    /// The row after its last.
    pub(super) end: Position,
    /// Whether no row follows.
    pub(super) last: bool,
}

/// Which parts are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Until {
    /// The part with which reading begins.
    ThisPart,
    /// The last one.
    LastPart,
}

/// Reads parts one after the other, and submits their rows.
pub(super) struct Feed<'j> {
    parts: Parts,
    /// Whether the input can be read a second time.
    repeatable: bool,
    chunker: Chunker,
    in_flight: InOrder<'j, Box<Chunk>>,
    until: Until,
    /// The part that is read.
    number: usize,
    /// Rows of it that were not read.
    left: u64,
    /// Rows of it that were read, also by an earlier run.
    read: u64,
    /// All parts were read.
    is_read: bool,
    /// The next chunk does not fit the limit.
    is_full: bool,
    /// Ends of parts and an error of reading, each with the number of chunks before it.
    ends: VecDeque<(u64, Result<Item>)>,
    /// Chunks submitted, and chunks returned.
    submitted: u64,
    returned: u64,
}

impl<'j> Feed<'j> {
    /// Begins with part `number`, of which an earlier run has read `read` rows.
    pub(super) fn new(
        parts: Parts,
        chunker: Chunker,
        in_flight: InOrder<'j, Box<Chunk>>,
        (number, read): (usize, u64),
        until: Until,
    ) -> Self {
        let left = parts.rows_of(number).saturating_sub(read);
        Self {
            repeatable: parts.is_repeatable(),
            parts,
            chunker,
            in_flight,
            until,
            number,
            left,
            read,
            is_read: false,
            is_full: false,
            ends: VecDeque::new(),
            submitted: 0,
            returned: 0,
        }
    }

    /// Ends reading: only the rows that were read already follow. For an input that cannot be read again.
    pub(super) fn close(&mut self) {
        self.chunker.close();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.chunker.is_closed()
    }

    /// What reads the rows after those that were submitted.
    pub(super) fn into_chunker(self) -> Chunker {
        self.chunker
    }

    /// Rows of the next chunk, or the end of the part. The future may be dropped: what it would have returned comes the next time, but
    /// rows of standard input that are not complete may be lost.
    ///
    /// # Errors
    /// As [`Chunker::next`], and those of the stage, in the order of the rows.
    pub(super) async fn next(&mut self) -> Result<Item> {
        loop {
            if let Some(due) = self.due() {
                return due;
            }
            let can_read = !self.is_read && !self.is_full && self.in_flight.has_room(0);
            // A part of standard input is published before rows of the next one are waited for: they may not come for long.
            let reads_on = self.repeatable || self.ends.is_empty();
            let position = (self.number, self.left);
            if can_read && reads_on && !self.repeatable {
                let read = self.read_undisturbed(position).await;
                self.take(read);
                continue;
            }
            tokio::select! {
                biased;
                read = read(&mut self.chunker, &self.parts, position), if can_read && reads_on => self.take(read),
                Some(done) = self.in_flight.next() => return self.returned(done),
                else => return Ok(Item::Closed),
            }
        }
    }

    /// Reads while the chunks in flight proceed, but waits for no result: what a dropped future has read of standard input may be lost.
    async fn read_undisturbed(&mut self, position: (usize, u64)) -> Result<Read> {
        let (in_flight, mut reading) = (&mut self.in_flight, pin!(read(&mut self.chunker, &self.parts, position)));
        poll_fn(|context| {
            in_flight.proceed(context);
            reading.as_mut().poll(context)
        })
        .await
    }

    /// As [`next`](Self::next), without reading or submitting more; `None` when no chunk of the current part is in flight.
    pub(super) async fn next_in_flight(&mut self) -> Option<Result<Item>> {
        if self.ends.front().is_some_and(|(after, _)| *after == self.returned) {
            return None;
        }
        let done = self.in_flight.next().await?;
        Some(self.returned(done))
    }

    fn due(&mut self) -> Option<Result<Item>> {
        let is_due = self.ends.front().is_some_and(|(after, _)| *after == self.returned);
        if is_due { self.ends.pop_front().map(|(_, due)| due) } else { None }
    }

    /// Submits what was read. An error comes after the rows before it.
    fn take(&mut self, read: Result<Read>) {
        let taken = match read {
            Ok(Read::Rows(slices)) => self.submit(slices),
            Ok(Read::End(end)) => {
                // A part without rows is written where the input has none, but not where reading was closed.
                let is_nothing = self.read == 0 && !end.last && self.chunker.is_closed();
                self.is_read = is_nothing || end.last || self.until == Until::ThisPart;
                let item = if is_nothing { Item::Closed } else { Item::End(end) };
                self.ends.push_back((self.submitted, Ok(item)));
                self.number += 1;
                (self.left, self.read) = (self.parts.rows_of(self.number), 0);
                Ok(())
            }
            Err(error) => Err(error),
        };
        if let Err(error) = taken {
            self.is_read = true;
            self.ends.push_back((self.submitted, Err(error)));
        }
    }

    fn submit(&mut self, slices: Vec<Slice>) -> Result<()> {
        let bytes = self.chunker.next_bytes();
        self.is_full = !self.in_flight.has_room(bytes);
        if self.is_full {
            return Ok(());
        }
        let (chunk, texts) = Chunk::new(&self.parts.plan, slices, self.chunker.bytes_read())?;
        let rows = chunk.rows() as u64;
        let pushed = self.in_flight.push(Box::new(chunk), texts, bytes);
        debug_assert!(pushed.is_ok(), "there was room");
        self.chunker.advance();
        self.submitted += 1;
        self.left -= rows;
        self.read += rows;
        Ok(())
    }

    fn returned(&mut self, done: Result<(Box<Chunk>, EmbeddedColumns), FailedBatch<Box<Chunk>>>) -> Result<Item> {
        self.returned += 1;
        self.is_full = false;
        match done {
            Ok((chunk, columns)) => Ok(Item::Rows(chunk, Box::new(columns))),
            Err(failed) => Err(place(&self.parts.plan, failed.error, &failed.tag.slices)),
        }
    }
}

/// What was read.
enum Read {
    /// Rows of the part.
    Rows(Vec<Slice>),
    /// The part has no more rows.
    End(End),
}

/// Reads the next rows of part `number`, which has at most `left` more. The future may be dropped.
async fn read(chunker: &mut Chunker, parts: &Parts, (number, left): (usize, u64)) -> Result<Read> {
    if left > 0 {
        let slices = chunker.next(left).await?;
        if !slices.is_empty() {
            return Ok(Read::Rows(slices));
        }
    }
    let last = match left == 0 && parts.ends_with(number) {
        true => true,
        // When reading was closed at the end of the input, nothing is missing.
        false => is_at_end(chunker, parts).await? && (!chunker.is_closed() || chunker.position().file >= parts.files()),
    };
    Ok(Read::End(End { end: chunker.position(), last }))
}

/// Whether no row follows. After an error this part is complete, and the error is returned again for the next part; only standard input
/// returns an error once. One retry excludes a temporary failure of the store.
async fn is_at_end(chunker: &mut Chunker, parts: &Parts) -> Result<bool> {
    match chunker.is_at_end().await {
        Err(_) if parts.is_repeatable() => Ok(chunker.is_at_end().await.unwrap_or(false)),
        answer => answer,
    }
}
