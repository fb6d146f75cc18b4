//! Where a partition writes its rows: files of the offset chain, or another topic.

use std::{future::ready, ops::ControlFlow, pin::Pin, sync::Arc};

use super::{
    TopicPartition,
    finished::Rows,
    metrics::PartitionMetrics,
    rotation::CloseReason,
    source::{Budget, Epoch},
};
use crate::error::Result;

/// A partition that this process owns.
#[derive(Debug, Clone)]
pub(super) struct Owned {
    pub(super) source: TopicPartition,
    /// Of its assignment.
    pub(super) epoch: Epoch,
    /// Of all partitions.
    pub(super) budget: Budget,
    pub(super) metrics: Arc<PartitionMetrics>,
}

/// Rows that are not ready to be written.
pub(super) type Preparing = Pin<Box<dyn Future<Output = Result<Rows>> + Send>>;

/// The output of one partition.
pub(super) trait Output: Send {
    /// Whether [`write`](Self::write) may be called now; if not, [`step`](Self::step) makes room.
    fn has_room(&self) -> bool;

    /// What has to be done before rows are written, and may take long. Meanwhile [`step`](Self::step) is called.
    fn prepare(&self, rows: Rows) -> Preparing {
        Box::pin(ready(Ok(rows)))
    }

    /// Bytes of the rows that were written and wait as they are, with all that was made of them. Files are no rows.
    fn waiting_bytes(&self) -> u64 {
        0
    }

    /// Adds rows, which follow those before and were prepared.
    fn write(&mut self, rows: Rows) -> impl Future<Output = Result<()>> + Send;

    /// Waits for the next thing that happens by itself: a file is old enough, or something was published. May be dropped
    /// and called again. Breaks with the offset at which the output goes on when another process has written what this
    /// one was about to write.
    fn step(&mut self) -> impl Future<Output = Result<ControlFlow<i64>>> + Send;

    /// Begins to publish all rows that were written.
    fn close(&mut self, reason: CloseReason);

    /// Whether everything that was written is published.
    fn is_published(&self) -> bool;

    /// Behind the last message that was published.
    fn end(&self) -> i64;

    /// Whether the output itself counts what became of rows, because a broker may still refuse some of them.
    fn counts_rows(&self) -> bool {
        false
    }
}
