//! The step that adds columns to a column of texts: embeddings, or the scores of [`crate::scores`].
//!
//! An interface between jobs and the model: the bulk job, the stream and `elmo verify` submit a column of texts and get
//! the columns of the output, and use nothing else of a model. Tests implement it without a model, to test the job
//! alone.

use std::{pin::Pin, sync::Arc, time::Duration};

use arrow::{
    array::{ArrayRef, AsArray},
    datatypes::Field,
};
use async_trait::async_trait;
use datafusion::common::runtime::SpawnedTask;
use elmo::{ColumnEmbedder, EmbedSpec, EmbeddedColumns, spec::Level};

/// Columns that are being computed.
pub type Pending = Pin<Box<dyn Future<Output = elmo::Result<EmbeddedColumns>> + Send>>;

/// Work of the devices since they started, for this job and all other users.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Tokens run.
    pub tokens: u64,
    /// Rows computed for them.
    pub padded_tokens: u64,
    /// Tokens whose word was in the word cache.
    pub cache_hits: u64,
    /// Time in which devices were busy, summed over them.
    pub device_time: Duration,
    /// Time that sentences waited for a batch, summed over them.
    pub queue_time: Duration,
    /// Batches that were split because a device had too little memory.
    pub oom_splits: u64,
}

impl Work {
    /// What was done since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            tokens: self.tokens.saturating_sub(before.tokens),
            padded_tokens: self.padded_tokens.saturating_sub(before.padded_tokens),
            cache_hits: self.cache_hits.saturating_sub(before.cache_hits),
            device_time: self.device_time.saturating_sub(before.device_time),
            queue_time: self.queue_time.saturating_sub(before.queue_time),
            oom_splits: self.oom_splits.saturating_sub(before.oom_splits),
        }
    }
}

/// Adds embedding columns to a column of texts.
#[async_trait]
pub trait Stage: Send + Sync {
    /// The settings it works with.
    fn spec(&self) -> &EmbedSpec;

    /// The columns it adds: vectors first, then `truncated`, then `error`. A stage with several columns in the place of the
    /// vectors returns them as the fields of a struct ([`results`]).
    fn fields(&self) -> Vec<Field>;

    /// Metadata pairs that name the model and the settings in every output.
    fn metadata(&self) -> Vec<(String, String)>;

    /// Whether the model is untrained, so that its vectors have no meaning.
    fn is_untrained(&self) -> bool {
        self.metadata().iter().any(|(key, _)| key == "elmo.untrained")
    }

    /// Queues a column and returns while it is worked on; waits only while the queue is full. In state `carry` columns
    /// are taken in the order of the calls.
    async fn submit(&self, texts: &ArrayRef) -> elmo::Result<Pending>;

    /// The kind of device that computes: results of other kinds differ by rounding.
    fn device(&self) -> String {
        "cpu".to_owned()
    }

    /// Tokens that all devices take at once; a few times as many must be queued to keep them busy.
    fn tokens_at_once(&self) -> usize {
        8192
    }

    /// Work of the devices so far; `None` where it is not measured.
    fn work(&self) -> Option<Work> {
        None
    }

    /// Expected size of the columns of so many rows, which have so many tokens, in bytes before they are encoded.
    fn output_bytes(&self, rows: u64, tokens: u64) -> u64 {
        let vectors = if self.spec().level == Level::Token { tokens } else { rows };
        vectors.saturating_mul(4 * self.width().max(1) as u64)
    }

    /// Numbers in one vector, known before any is computed.
    fn width(&self) -> usize {
        let fields = self.fields();
        fields.first().map_or(0, |field| vector_width(field.data_type()))
    }
}

/// Columns of [`Stage::fields`] behind those with results: `truncated` and `error`.
pub const REMARKS: usize = 2;

/// The columns before `truncated`, when the stage has `fields` and has returned `vectors`.
pub fn results(fields: usize, vectors: &ArrayRef) -> Vec<ArrayRef> {
    match vectors.as_struct_opt() {
        Some(columns) if fields > 1 + REMARKS => columns.columns().to_vec(),
        _ => vec![Arc::clone(vectors)],
    }
}

/// Numbers in the vectors of a column type; 0 where the type does not tell.
fn vector_width(kind: &arrow::datatypes::DataType) -> usize {
    use arrow::datatypes::DataType::{FixedSizeList, LargeList, List, Struct};
    match kind {
        FixedSizeList(_, width) => usize::try_from(*width).unwrap_or(0),
        List(item) | LargeList(item) => vector_width(item.data_type()),
        Struct(fields) => fields.iter().map(|field| vector_width(field.data_type())).max().unwrap_or(0),
        _ => 0,
    }
}

/// The real one.
#[derive(Debug, Clone)]
pub struct EmbedStage {
    embedder: ColumnEmbedder,
    width: usize,
}

impl EmbedStage {
    /// Embeds with `embedder`, whose vectors have `width` numbers.
    pub fn new(embedder: ColumnEmbedder, width: usize) -> Arc<Self> {
        Arc::new(Self { embedder, width })
    }
}

#[async_trait]
impl Stage for EmbedStage {
    fn spec(&self) -> &EmbedSpec {
        self.embedder.spec()
    }

    fn fields(&self) -> Vec<Field> {
        self.embedder.fields()
    }

    fn metadata(&self) -> Vec<(String, String)> {
        self.embedder.metadata()
    }

    /// Submits on a thread of its own: texts take long to tokenise, a full queue blocks, and state `carry` runs the model there. Builds the
    /// columns on a task of their own: with a GPU, a task that builds the columns of all batches delays everything else that it does.
    async fn submit(&self, texts: &ArrayRef) -> elmo::Result<Pending> {
        let (embedder, texts) = (self.embedder.clone(), Arc::clone(texts));
        let submitted = tokio::task::spawn_blocking(move || embedder.submit(&texts)).await;
        // It dies only with the runtime, or of a defect that was reported where it happened.
        let building = SpawnedTask::spawn(submitted.unwrap_or(Err(elmo::Error::Closed))?);
        Ok(Box::pin(async { building.join_unwind().await.unwrap_or(Err(elmo::Error::Closed)) }))
    }

    fn device(&self) -> String {
        self.embedder.device_kind().to_owned()
    }

    fn tokens_at_once(&self) -> usize {
        self.embedder.tokens_at_once()
    }

    fn work(&self) -> Option<Work> {
        let metrics = self.embedder.metrics();
        let time = |seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        Some(Work {
            tokens: metrics.tokens,
            padded_tokens: metrics.padded_tokens,
            cache_hits: metrics.cache_hits,
            device_time: time(metrics.device_seconds),
            queue_time: time(metrics.queue_seconds),
            oom_splits: metrics.oom_splits,
        })
    }

    fn width(&self) -> usize {
        self.width
    }
}
