//! Reads JSON with the decoder of `elmo embed`, in place of DataFusion's reader: a column of strings holds numbers and
//! booleans as they are written, and every escape is read. A file that is an array has no parts that could be read alone.

use std::sync::Arc;

use arrow::{array::RecordBatch, datatypes::SchemaRef};
use bytes::{Buf, Bytes};
use datafusion::{
    common::{Result, tree_node::TreeNodeRecursion},
    datasource::{
        listing::PartitionedFile,
        physical_plan::{FileOpenFuture, FileOpener, FileScanConfig, FileSource},
        table_schema::TableSchema,
    },
    physical_expr::PhysicalExpr,
    physical_plan::metrics::ExecutionPlanMetricsSet,
};
use datafusion_datasource::{
    boundary_stream::AlignedBoundaryStream,
    projection::{ProjectionOpener, SplitProjection},
};
use futures::{StreamExt, TryStreamExt, stream, stream::BoxStream};
use object_store::{ObjectStore, ObjectStoreExt, path::Path};

use crate::source::{Decode, Json};

/// Bytes at the beginning of a file that tell whether it is an array.
const START_BYTES: u64 = 4 << 10;

/// The reader of the files of a scan. It lives as long as one partition is opened.
pub(super) struct JsonReader {
    /// DataFusion's source, which knows the columns.
    pub(super) source: Arc<dyn FileSource>,
    pub(super) batch_rows: usize,
}

impl FileSource for JsonReader {
    fn create_file_opener(
        &self,
        store: Arc<dyn ObjectStore>,
        _: &FileScanConfig,
        _: usize,
    ) -> Result<Arc<dyn FileOpener>> {
        let table = self.source.table_schema();
        let columns = table.file_schema();
        let projection = match self.source.projection() {
            Some(projection) => SplitProjection::new(columns, projection),
            None => SplitProjection::unprojected(table),
        };
        let schema = Arc::new(columns.project(&projection.file_indices)?);
        let opener = Arc::new(JsonOpener { store, schema, batch_rows: self.batch_rows });
        ProjectionOpener::try_new(projection, opener, columns)
    }

    fn table_schema(&self) -> &TableSchema {
        self.source.table_schema()
    }

    fn with_batch_size(&self, rows: usize) -> Arc<dyn FileSource> {
        Arc::new(Self { source: Arc::clone(&self.source), batch_rows: rows })
    }

    fn metrics(&self) -> &ExecutionPlanMetricsSet {
        self.source.metrics()
    }

    fn file_type(&self) -> &str {
        self.source.file_type()
    }

    fn apply_expressions(
        &self,
        f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        self.source.apply_expressions(f)
    }
}

/// Opens files of a store whose files are text.
struct JsonOpener {
    store: Arc<dyn ObjectStore>,
    schema: SchemaRef,
    batch_rows: usize,
}

impl FileOpener for JsonOpener {
    fn open(&self, file: PartitionedFile) -> Result<FileOpenFuture> {
        let decoder = Json::new(Arc::clone(&self.schema), self.batch_rows, false)?;
        let store = Arc::clone(&self.store);
        Ok(Box::pin(async move {
            let rows = Rows { text: text(store, &file).await?, bytes: Bytes::new(), ended: false, decoder };
            let next = |mut rows: Rows| async move { Ok(rows.next().await?.map(|batch| (batch, rows))) };
            Ok(stream::try_unfold(rows, next).boxed())
        }))
    }
}

type Text = BoxStream<'static, object_store::Result<Bytes>>;

/// The lines of a file, or of a part of it. An array belongs to its first part.
async fn text(store: Arc<dyn ObjectStore>, file: &PartitionedFile) -> Result<Text> {
    let path = &file.object_meta.location;
    let ((start, end), is_part) = (file.range(), file.range.is_some());
    match is_part && is_array(store.as_ref(), path).await? {
        true if start > 0 => Ok(stream::empty().boxed()),
        false if is_part => {
            let size = file.object_meta.size;
            Ok(AlignedBoundaryStream::new(store, path.clone(), start, end, size, b'\n').await?.boxed())
        }
        _ => Ok(store.get(path).await?.into_stream()),
    }
}

async fn is_array(store: &dyn ObjectStore, path: &Path) -> Result<bool> {
    let start = store.get_range(path, 0..START_BYTES).await?;
    Ok(start.trim_ascii_start().starts_with(b"["))
}

/// The rows of a text.
struct Rows {
    text: Text,
    /// What was read and not decoded yet.
    bytes: Bytes,
    ended: bool,
    decoder: Json,
}

impl Rows {
    async fn next(&mut self) -> Result<Option<RecordBatch>> {
        loop {
            while self.bytes.is_empty() && !self.ended {
                match self.text.try_next().await? {
                    Some(bytes) => self.bytes = bytes,
                    None => self.ended = true,
                }
            }
            if self.bytes.is_empty() {
                self.decoder.finish()?;
                return Ok(self.decoder.flush()?);
            }
            let offered = self.bytes.len();
            let used = self.decoder.decode(&self.bytes)?;
            self.bytes.advance(used);
            if self.decoder.is_full(used, offered)
                && let Some(batch) = self.decoder.flush()?
            {
                return Ok(Some(batch));
            }
        }
    }
}
