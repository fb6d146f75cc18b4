//! Windows of rows: what the engine is given at once, and forms its batches from.

use std::sync::Arc;

use super::BulkJob;
use crate::{
    error::Result,
    source::{Plan, Position, Rows, Slice, row_bytes},
    stage::Stage,
};

/// Bytes of token vectors that a window may come to.
const WINDOW_VECTOR_BYTES: usize = 48 << 20;
/// Bytes of text of a window in any case.
const WINDOW_TEXT_BYTES: u64 = 8 << 20;
/// Bytes of text that are worth a window of their own.
const LEAST_TEXT_BYTES: u64 = 4096;
/// Batches of every device that a window holds: less than devices pack together, so that few windows are half done when a
/// job is asked to stop.
const WINDOW_BATCHES: usize = 1;
/// Bytes of English text per token, with the space.
const BYTES_PER_TOKEN: usize = 5;

/// Cuts the rows of the input into windows.
pub(super) struct Cutter {
    rows: Rows,
    /// The window that is being read: here, and not in the call that reads it, which may be dropped.
    open: Open,
    /// Read, but not yet in a window.
    rest: Option<Slice>,
    /// Nothing more is read.
    closed: bool,
    window_rows: usize,
    window_bytes: u64,
    /// State `carry`: windows hold whole batches.
    multiple: usize,
}

#[derive(Default)]
struct Open {
    slices: Vec<Slice>,
    rows: usize,
    bytes: u64,
}

impl Cutter {
    pub(super) fn new(job: &BulkJob, stage: &dyn Stage, plan: Arc<Plan>, from: Position) -> Self {
        let multiple = stage.spec().batch_rows.unwrap_or(1);
        Self {
            rows: Rows::new(plan, from),
            open: Open::default(),
            rest: None,
            closed: false,
            window_rows: job.window_rows.div_ceil(multiple).saturating_mul(multiple),
            window_bytes: window_bytes(stage),
            multiple,
        }
    }

    /// The row that the next window begins with.
    pub(super) fn position(&self) -> Position {
        let next = self.open.slices.first().or(self.rest.as_ref());
        next.map_or_else(|| self.rows.position(), |slice| slice.start)
    }

    /// Bytes of the input that were read so far.
    pub(super) fn bytes_read(&self) -> u64 {
        self.rows.bytes_read()
    }

    /// From now on there are only the rows that were read already: for an input that does not come again.
    pub(super) fn close(&mut self) {
        self.closed = true;
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Whether no row is left.
    pub(super) async fn is_at_end(&mut self) -> Result<bool> {
        Ok(self.open.slices.is_empty() && self.peek().await?.is_none())
    }

    async fn peek(&mut self) -> Result<Option<&Slice>> {
        if self.rest.is_none() {
            self.rest = if self.closed { self.rows.buffered().await? } else { self.rows.next().await? };
        }
        Ok(self.rest.as_ref())
    }

    /// Slices of the next window, none at the end: at most `most` rows, and at least one batch. They stay the next window
    /// until [`Cutter::taken`] is called, so whoever asks may be dropped before that.
    pub(super) async fn next(&mut self, most: u64) -> Result<Vec<Slice>> {
        let most = usize::try_from(most).unwrap_or(usize::MAX).min(self.window_rows);
        while self.open.rows < most && self.peek().await?.is_some() {
            if !self.add(most) {
                break;
            }
        }
        Ok(self.open.slices.clone())
    }

    /// Goes on to the window after the one that was given last.
    pub(super) fn taken(&mut self) {
        self.open = Open::default();
    }

    /// Takes rows of what was read into the window; false when the window is full before their end.
    fn add(&mut self, most: usize) -> bool {
        let Some(slice) = self.rest.take() else { return true };
        let mut sizes = vec![0; slice.len()];
        row_bytes(&slice.text, &mut sizes);
        let open = &mut self.open;
        let mut taken = 0;
        for size in sizes {
            let is_whole = (open.rows + taken).is_multiple_of(self.multiple);
            if open.rows + taken == most || (open.bytes >= self.window_bytes && is_whole) {
                break;
            }
            open.bytes += size;
            taken += 1;
        }
        open.rows += taken;
        if taken > 0 {
            open.slices.push(slice.slice(0, taken));
        }
        let left = slice.len() - taken;
        self.rest = (left > 0).then(|| slice.slice(taken, left));
        left == 0
    }
}

/// Bytes of text after which a window is full: devices are busy with it for some batches, and at token level its
/// vectors fit into memory.
fn window_bytes(stage: &dyn Stage) -> u64 {
    let mut tokens = stage.tokens_at_once().saturating_mul(WINDOW_BATCHES);
    if stage.spec().level == elmo::spec::Level::Token {
        tokens = tokens.min(WINDOW_VECTOR_BYTES / (4 * stage.width().max(1)));
    }
    (tokens.saturating_mul(BYTES_PER_TOKEN) as u64).clamp(LEAST_TEXT_BYTES, WINDOW_TEXT_BYTES)
}
