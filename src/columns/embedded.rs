//! The result columns, their counts, and the handle to columns that are being computed.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use arrow::array::{ArrayRef, BooleanArray, StringArray, UInt32Array};

use crate::{
    engine::{Cost, block_on},
    error::Result,
    row_error::RowError,
};

/// Columns for the rows of one input column, in its order.
#[derive(Debug)]
pub struct EmbeddedColumns {
    /// The column `embedding` or `tokens`, with `V` = `FixedSizeList<Float32, W>`, or `List<Float32>` with list type
    /// `list`, and `W` = [`ColumnEmbedder::width`](super::ColumnEmbedder::width) values:
    ///
    /// * level `sentence`: `V`; NULL for a NULL text, a text without tokens and a row with an error.
    /// * level `token`: `List<Struct<token: Utf8, start: UInt32, end: UInt32, sentence: UInt32, embedding: V>>`;
    ///   `start` and `end` are byte offsets in the text (of a list of tokens: in the tokens joined by single spaces),
    ///   `sentence` counts from 0 in it. A text without tokens is an empty list, a NULL text and a row with an error
    ///   are NULL.
    pub vectors: ArrayRef,
    /// Whether a sentence of the row was truncated.
    pub truncated: BooleanArray,
    /// Message of the error of a row; NULL for a row without an error.
    pub error: StringArray,
    /// The same errors with their labels: pairs of row and error, in the order of the rows.
    pub row_errors: Vec<(usize, RowError)>,
    /// Number of tokens of each row. Boundaries are not counted, and tokens in the overlap of windows once.
    pub tokens: UInt32Array,
    /// Rows to keep with on-error `skip`; `None` when all rows are kept.
    pub keep: Option<BooleanArray>,
    /// Counts.
    pub stats: ColumnStats,
    /// What the rows cost; zero in state `carry`.
    pub cost: Cost,
}

/// Counts of one column.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ColumnStats {
    /// Rows.
    pub rows: usize,
    /// NULL texts.
    pub nulls: usize,
    /// Empty or blank texts.
    pub empty: usize,
    /// Sentences given to the biLM; each window of a sentence counts.
    pub sentences: usize,
    /// Tokens given to the biLM; tokens in the overlap of windows count twice.
    pub tokens: usize,
    /// Rows with a truncated sentence.
    pub truncated: usize,
    /// Rows with an error.
    pub errors: usize,
}

/// Columns that are being computed: block on [`PendingColumns::wait`], or await them. Dropping this cancels the
/// request.
#[must_use]
pub struct PendingColumns {
    columns: Pin<Box<dyn Future<Output = Result<EmbeddedColumns>> + Send>>,
}

impl fmt::Debug for PendingColumns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingColumns").finish_non_exhaustive()
    }
}

impl PendingColumns {
    pub(super) fn new(columns: impl Future<Output = Result<EmbeddedColumns>> + Send + 'static) -> Self {
        Self { columns: Box::pin(columns) }
    }

    /// Blocks until the columns are ready.
    ///
    /// # Errors
    /// [`Error::Row`](crate::error::Error::Row) for the first row that cannot be embedded, with on-error `fail`;
    /// [`Error::Device`](crate::error::Error::Device) or [`Error::Engine`](crate::error::Error::Engine) when the engine
    /// fails; [`Error::Arrow`](crate::error::Error::Arrow) when there are more values than Arrow's offsets can count;
    /// [`Error::Closed`](crate::error::Error::Closed) when the engine was closed before all of a huge text was queued.
    pub fn wait(self) -> Result<EmbeddedColumns> {
        block_on(self)
    }
}

impl Future for PendingColumns {
    type Output = Result<EmbeddedColumns>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.columns.as_mut().poll(context)
    }
}
