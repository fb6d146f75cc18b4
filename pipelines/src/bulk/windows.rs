//! Windows of rows: what the engine is given at once, and forms its batches from.

use std::sync::Arc;

use super::BulkJob;
use crate::{
    error::Result,
    source::{Plan, Position, Rows, Slice, row_bytes},
    stage::Stage,
};

/// Bytes of token vectors that a window may come to.
const WINDOW_VECTOR_BYTES: usize = 128 << 20;
/// Bytes of text of a window in any case.
const WINDOW_TEXT_BYTES: u64 = 8 << 20;
/// Bytes of text that are worth a window of their own.
const LEAST_TEXT_BYTES: u64 = 4096;
/// Batches of every device that a window holds. More would only mean that more is computed again after a kill: the
/// engine packs batches well from any few thousand sentences.
const WINDOW_BATCHES: usize = 4;
/// Bytes of English text per token, with the space.
const BYTES_PER_TOKEN: usize = 5;

/// Cuts the rows of the input into windows.
pub(super) struct Cutter {
    rows: Rows,
    /// Read, but not yet handed out.
    rest: Option<Slice>,
    window_rows: usize,
    window_bytes: u64,
    /// State `carry`: windows hold whole batches.
    multiple: usize,
}

impl Cutter {
    pub(super) fn new(job: &BulkJob, stage: &dyn Stage, plan: Arc<Plan>, from: Position) -> Self {
        let multiple = stage.spec().batch_rows.unwrap_or(1);
        Self {
            rows: Rows::new(plan, from),
            rest: None,
            window_rows: job.window_rows.div_ceil(multiple).saturating_mul(multiple),
            window_bytes: window_bytes(stage),
            multiple,
        }
    }

    /// The row that the next window begins with.
    pub(super) fn position(&self) -> Position {
        self.rest.as_ref().map_or_else(|| self.rows.position(), |slice| slice.start)
    }

    /// Bytes of the input that were read so far.
    pub(super) fn bytes_read(&self) -> u64 {
        self.rows.bytes_read()
    }

    /// Whether no row is left.
    pub(super) async fn is_at_end(&mut self) -> Result<bool> {
        Ok(self.peek().await?.is_none())
    }

    async fn peek(&mut self) -> Result<Option<&Slice>> {
        if self.rest.is_none() {
            self.rest = self.rows.next().await?;
        }
        Ok(self.rest.as_ref())
    }

    /// Slices of the next window, none at the end: at most `most` rows, and at least one batch.
    pub(super) async fn next(&mut self, most: u64) -> Result<Vec<Slice>> {
        let most = usize::try_from(most).unwrap_or(usize::MAX).min(self.window_rows);
        let (mut slices, mut rows, mut bytes) = (Vec::new(), 0, 0);
        while rows < most {
            let full_at = most - rows;
            let (window_bytes, multiple) = (self.window_bytes, self.multiple);
            let Some(slice) = self.peek().await? else { break };
            let mut take = 0;
            let mut sizes = vec![0; slice.len()];
            row_bytes(&slice.text, &mut sizes);
            for size in sizes {
                if take == full_at || (bytes >= window_bytes && (rows + take) % multiple == 0) {
                    break;
                }
                bytes += size;
                take += 1;
            }
            let (len, slice) = (slice.len(), slice.slice(0, take));
            if take == len {
                self.rest = None;
            } else if let Some(rest) = &mut self.rest {
                *rest = rest.slice(take, len - take);
            }
            rows += take;
            if take > 0 {
                slices.push(slice);
            }
            if take < len {
                break;
            }
        }
        Ok(slices)
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
