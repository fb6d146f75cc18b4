//! Reads the input ahead of the rows that are submitted, on another task.

use std::sync::Arc;

use datafusion::common::runtime::SpawnedTask;
use tokio::sync::mpsc::{self, Receiver, Sender};

use crate::{
    error::{Error, Result},
    source::{Mark, Plan, Position, Rows, Slice, SourceError},
};

/// The rows of all files, of which the next slice is read while the one before is being processed.
pub(super) struct Reader {
    state: State,
    /// The row after those that were returned.
    position: Position,
    /// Bytes of the input that were read for them.
    bytes_read: u64,
}

enum State {
    Here(Box<Rows>),
    /// An error was returned; the next call reads ahead again.
    Failed(Box<Rows>),
    Ahead {
        slices: Receiver<Read>,
        /// Ends at the end of the input, or with an error.
        task: SpawnedTask<(Box<Rows>, Option<SourceError>)>,
    },
    /// The task panicked; the panic hook has logged it.
    Gone,
}

/// A slice, and where the reader was after it.
struct Read {
    slice: Slice,
    position: Position,
    bytes_read: u64,
}

impl Reader {
    /// `mark` may say where a row begins that is not after `from`. With `ahead` a slice is read in advance; then
    /// [`buffered`](Self::buffered) has nothing to return.
    pub(super) fn new(plan: Arc<Plan>, from: Position, mark: Option<Mark>, ahead: bool) -> Self {
        let rows = Box::new(Rows::from_mark(plan, from, mark));
        let position = rows.position();
        let state = if ahead { ahead_of(rows) } else { State::Here(rows) };
        Self { state, position, bytes_read: 0 }
    }

    /// The row after those that were returned; past the last one at the end.
    pub(super) fn position(&self) -> Position {
        self.position
    }

    /// Bytes of the input that were read for the rows that were returned, for progress.
    pub(super) fn bytes_read(&self) -> u64 {
        self.bytes_read
    }

    /// The next rows; `None` at the end. The future may be dropped: no row is lost.
    ///
    /// # Errors
    /// [`SourceError`] when the row after those that were returned cannot be read, each time.
    pub(super) async fn next(&mut self) -> Result<Option<Slice>> {
        self.state = match std::mem::replace(&mut self.state, State::Gone) {
            State::Failed(rows) => ahead_of(rows),
            other => other,
        };
        if let State::Ahead { slices, task } = &mut self.state {
            if let Some(read) = slices.recv().await {
                (self.position, self.bytes_read) = (read.position, read.bytes_read);
                return Ok(Some(read.slice));
            }
            let ended = task.await;
            self.state = State::Gone;
            let (rows, error) = ended.map_err(|e| Error::Failed(format!("the reading task panicked: {e}")))?;
            self.position = rows.position();
            if let Some(error) = error {
                self.state = State::Failed(rows);
                return Err(error.into());
            }
            self.state = State::Here(rows);
        }
        let State::Here(rows) = &mut self.state else {
            return Err(Error::Failed("the reading task has ended after a panic".to_owned()));
        };
        let slice = rows.next().await;
        (self.position, self.bytes_read) = (rows.position(), rows.bytes_read());
        Ok(slice?)
    }

    /// The rows that are complete in the bytes read so far, when the rest of the input is not read.
    ///
    /// # Errors
    /// As [`next`](Self::next).
    pub(super) async fn buffered(&mut self) -> Result<Option<Slice>> {
        let State::Here(rows) = &mut self.state else { return Ok(None) };
        let slice = rows.buffered().await;
        (self.position, self.bytes_read) = (rows.position(), rows.bytes_read());
        Ok(slice?)
    }
}

fn ahead_of(rows: Box<Rows>) -> State {
    let (sender, slices) = mpsc::channel(1);
    State::Ahead { slices, task: SpawnedTask::spawn(read_all(rows, sender)) }
}

/// Reads a slice whenever there is room for it, so that a single one waits.
async fn read_all(mut rows: Box<Rows>, slices: Sender<Read>) -> (Box<Rows>, Option<SourceError>) {
    while let Ok(room) = slices.reserve().await {
        match rows.next().await {
            Ok(Some(slice)) => {
                room.send(Read { slice, position: rows.position(), bytes_read: rows.bytes_read() });
            }
            Ok(None) => break,
            Err(error) => return (rows, Some(error)),
        }
    }
    (rows, None)
}
