//! skeleton
use crate::{Elmo, error::Result, spec::EmbedSpec};
use arrow::{
    array::{ArrayRef, BooleanArray, StringArray},
    datatypes::Field,
};
use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};
/// embeds columns
#[derive(Debug, Clone)]
pub struct ColumnEmbedder {}
impl ColumnEmbedder {
    /// Checks `spec` against the model.
    pub fn new(_elmo: &Elmo, _spec: EmbedSpec) -> Result<Self> {
        todo!()
    }
    /// The spec.
    pub fn spec(&self) -> &EmbedSpec {
        todo!()
    }
    /// The vector field, then `truncated` and `error`.
    pub fn fields(&self) -> Vec<Field> {
        todo!()
    }
    /// `elmo.*` footer pairs.
    pub fn metadata(&self) -> Vec<(String, String)> {
        todo!()
    }
    /// Queues a column; blocks only while the queue is full.
    pub fn submit(&self, _column: &ArrayRef) -> Result<PendingColumns> {
        todo!()
    }
    /// Queues a column; waits without blocking while the queue is full.
    pub async fn submit_async(&self, _column: &ArrayRef) -> Result<PendingColumns> {
        todo!()
    }
    /// Embeds a column.
    pub fn embed(&self, column: &ArrayRef) -> Result<EmbeddedColumns> {
        self.submit(column)?.wait()
    }
}
/// Answer on its way.
#[derive(Debug)]
#[must_use]
pub struct PendingColumns {}
impl PendingColumns {
    /// Blocks until the answer is there.
    pub fn wait(self) -> Result<EmbeddedColumns> {
        todo!()
    }
}
impl Future for PendingColumns {
    type Output = Result<EmbeddedColumns>;
    fn poll(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<Self::Output> {
        todo!()
    }
}
/// Columns of an answer; as many rows as the column given, in its order.
#[derive(Debug)]
pub struct EmbeddedColumns {
    /// `embedding` or `tokens`
    pub vectors: ArrayRef,
    /// a sentence was cut
    pub truncated: BooleanArray,
    /// why a row has no vector; NULL when fine
    pub error: StringArray,
    /// rows to keep with on-error skip; `None` when all
    pub keep: Option<BooleanArray>,
    /// counts
    pub stats: ColumnStats,
}
/// counts of one column
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ColumnStats {
    /// rows
    pub rows: usize,
    /// NULL texts
    pub nulls: usize,
    /// empty or blank texts
    pub empty: usize,
    /// sentences given to the biLM
    pub sentences: usize,
    /// tokens given to the biLM
    pub tokens: usize,
    /// rows with a truncated sentence
    pub truncated: usize,
    /// rows with an error
    pub errors: usize,
}
