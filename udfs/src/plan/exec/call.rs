//! An embedding call that is bound to the columns of an input.

use std::sync::Arc;

use datafusion::{
    arrow::datatypes::FieldRef,
    common::{Result, exec_datafusion_err, runtime::SpawnedTask},
    physical_expr::PhysicalExpr,
};
use elmo::ColumnEmbedder;

use crate::{call::Call, models::Models};

/// A call whose text is a physical expression over the columns of the operator's input.
#[derive(Debug, Clone)]
pub(crate) struct BoundCall {
    pub(crate) models: Models,
    pub(crate) call: Call,
    /// The call as EXPLAIN shows it.
    pub(crate) display: String,
    pub(crate) text: Arc<dyn PhysicalExpr>,
    /// The field of the column that the call becomes.
    pub(crate) field: FieldRef,
}

impl BoundCall {
    /// Numbers per vector.
    pub(super) fn width(&self) -> usize {
        let layout = self.models.layout(self.call.options.model.as_deref(), &self.call.options.spec);
        layout.map_or(1, |layout| layout.width())
    }

    /// The embedder of the call. A model that is not open yet is opened on a thread that may block.
    pub(super) async fn embedder(&self) -> Result<ColumnEmbedder> {
        let name = self.call.options.model.as_deref().unwrap_or_else(|| self.models.default_name());
        if self.models.is_open(name) {
            return self.call.embedder(&self.models);
        }
        let (call, models) = (self.call.clone(), self.models.clone());
        let opened = SpawnedTask::spawn_blocking(move || call.embedder(&models)).join().await;
        opened.map_err(|e| exec_datafusion_err!("the model was not opened: {e}"))?
    }
}
