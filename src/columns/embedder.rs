//! The embedder of columns: one model with one set of settings.

use std::sync::{Arc, Mutex, PoisonError};

use arrow::{array::ArrayRef, datatypes::Field};

use crate::{
    columns::{
        embedded::{EmbeddedColumns, PendingColumns},
        layout::ColumnLayout,
        request::Request,
        setup::Setup,
    },
    elmo::Elmo,
    engine::{EmbedderMetrics, Recipe, Sentence, block_on},
    error::Result,
    model::DeviceName,
    spec::{EmbedSpec, Level, StateMode},
    states::Carry,
};

/// Embeds columns of text with one model and one set of settings. Clones share the state of mode `carry`.
#[derive(Debug, Clone)]
pub struct ColumnEmbedder {
    setup: Arc<Setup>,
    metadata: Arc<[(String, String)]>,
    device_kind: &'static str,
    /// State `carry` only: runs columns in the order of the calls, outside the engine.
    carry: Option<Arc<Mutex<Carry>>>,
}

impl ColumnEmbedder {
    /// Checks `spec` against itself and the model. State `warm` computes the warm state here, unless it came with the
    /// model or was computed before.
    ///
    /// # Errors
    /// [`Error::Spec`](crate::error::Error::Spec) when settings exclude each other, the model has no such layer, or the
    /// mix is for another number of layers; [`Error::Device`](crate::error::Error::Device) when the device fails
    /// (states `warm` and `carry` only).
    pub fn new(elmo: &Elmo, spec: EmbedSpec) -> Result<Self> {
        let ColumnLayout { vector_type, output } = ColumnLayout::new(elmo.options(), elmo.fingerprint(), &spec)?;
        let recipe = Arc::new(Recipe {
            warm: spec.state == StateMode::Warm,
            boundaries: spec.boundaries,
            output,
            pooling: (spec.level == Level::Sentence).then_some(spec.pooling),
        });
        let carry = match spec.state {
            StateMode::Carry => Some(Arc::new(Mutex::new(elmo.carry()?))),
            StateMode::Zero | StateMode::Warm => None,
        };
        let metadata = metadata(elmo, &spec)?.into();
        let device_kind = if elmo.devices().contains(&DeviceName::Cpu) { "cpu" } else { "cuda" };
        let setup = Arc::new(Setup { embedder: elmo.embedder().clone(), spec, recipe, vector_type });
        Ok(Self { setup, metadata, device_kind, carry })
    }

    /// The settings.
    pub fn spec(&self) -> &EmbedSpec {
        &self.setup.spec
    }

    /// Values of one vector: `2P`, times the layers with `layers all`.
    pub fn width(&self) -> usize {
        self.setup.vector_type.width()
    }

    /// The vector field (`embedding` or `tokens`), then `truncated` and `error`.
    pub fn fields(&self) -> Vec<Field> {
        self.setup.vector_type.fields()
    }

    /// The `elmo.*` pairs that name the model and the settings in every output.
    pub fn metadata(&self) -> Vec<(String, String)> {
        self.metadata.to_vec()
    }

    /// Counters of the engine since it started, over all of its callers.
    pub fn metrics(&self) -> EmbedderMetrics {
        self.setup.embedder.metrics()
    }

    /// `cpu` or `cuda`: vectors of one kind of device differ from the other's by rounding.
    pub fn device_kind(&self) -> &'static str {
        self.device_kind
    }

    /// Padded tokens of a batch, summed over all devices.
    pub fn tokens_at_once(&self) -> usize {
        self.setup.embedder.tokens_at_once()
    }

    /// Queues a column; blocks while the queue is full.
    ///
    /// `column` holds strings, binary (UTF-8) or lists of strings, in any Arrow encoding. State `carry` embeds the
    /// column before this returns, in batches of `batch_rows`; if the number of rows is not a multiple of that, the
    /// last batch is shorter.
    ///
    /// # Errors
    /// [`Error::Column`](crate::error::Error::Column) when the column's type holds no text,
    /// [`Error::Closed`](crate::error::Error::Closed) when the engine was closed,
    /// [`Error::Engine`](crate::error::Error::Engine) when no device is left, and
    /// [`Error::Device`](crate::error::Error::Device) when the device fails in state `carry`; a call that fails leaves
    /// the carried state as it was. Errors of rows are returned by [`PendingColumns`].
    pub fn submit(&self, column: &ArrayRef) -> Result<PendingColumns> {
        block_on(self.submit_async(column))
    }

    /// Queues a column; yields while the queue is full. State `carry` embeds the column here and does not yield.
    ///
    /// # Errors
    /// As [`ColumnEmbedder::submit`].
    pub async fn submit_async(&self, column: &ArrayRef) -> Result<PendingColumns> {
        let (request, sentences) = Request::new(&self.setup, column, self.carry.is_some())?;
        if let Some(carry) = &self.carry {
            return self.run_carried(carry, request, &sentences);
        }
        let ticket = self.setup.embedder.submit(sentences, &self.setup.recipe).await?;
        Ok(PendingColumns::new(request.finish(ticket)))
    }

    /// Embeds a column and blocks until it is done.
    ///
    /// # Errors
    /// As [`ColumnEmbedder::submit`] and [`PendingColumns::wait`].
    pub fn embed(&self, column: &ArrayRef) -> Result<EmbeddedColumns> {
        self.submit(column)?.wait()
    }

    /// State `carry`. The state is committed once the columns are complete, so that a column that fails can be
    /// submitted again.
    fn run_carried(&self, carry: &Mutex<Carry>, request: Request, sentences: &[Sentence]) -> Result<PendingColumns> {
        let mut carry = carry.lock().unwrap_or_else(PoisonError::into_inner);
        let batch_rows = self.setup.spec.batch_rows.unwrap_or(1);
        let (vectors, state) = carry.run(sentences, batch_rows, &self.setup.recipe)?;
        let columns = request.finish_with(vectors);
        if columns.is_ok() {
            carry.commit(state);
        }
        Ok(PendingColumns::new(std::future::ready(columns)))
    }
}

/// Version of the columns and of the metadata pairs; incremented when readers have to change.
pub const SCHEMA_VERSION: u32 = 1;

fn metadata(elmo: &Elmo, spec: &EmbedSpec) -> Result<Vec<(String, String)>> {
    let mut pairs: Vec<(String, String)> =
        spec.identity().into_iter().map(|(key, value)| (format!("elmo.{key}"), value)).collect();
    if spec.state == StateMode::Warm {
        let digest = elmo.warm_digest()?;
        if let Some(state) = pairs.iter_mut().find(|(key, _)| key == "elmo.state") {
            state.1 = format!("warm:{digest}");
        }
    }
    let mut push = |key: &str, value: String| pairs.push((format!("elmo.{key}"), value));
    push("fingerprint", elmo.fingerprint().to_string());
    push("options", elmo.options().canonical_json());
    push("precision", elmo.precision().to_string());
    push("version", env!("CARGO_PKG_VERSION").to_owned());
    push("schema_version", SCHEMA_VERSION.to_string());
    if elmo.is_untrained() {
        push("untrained", "true".to_owned());
    }
    pairs.sort();
    Ok(pairs)
}
