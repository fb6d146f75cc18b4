//! [`ScanExec`] stands above a scan of files that is sent to workers, and restores there what `datafusion-proto` 55 leaves
//! out: the compression of CSV and JSON files, that files stay in their partitions, and limits above 32 bits.

use std::{any::Any, fmt, sync::Arc};

use datafusion::{
    common::{Result, internal_err, plan_datafusion_err},
    datasource::{
        file_format::file_compression_type::FileCompressionType,
        physical_plan::{CsvSource, FileScanConfig},
        source::DataSourceExec,
    },
    execution::{SendableRecordBatchStream, TaskContext},
    physical_expr::PhysicalSortExpr,
    physical_plan::{DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties, SortOrderPushdownResult},
};
use serde::{Deserialize, Serialize};

use crate::{operator::operator, sql::name_files_in_errors};

type Plan = Arc<dyn ExecutionPlan>;

/// What is restored.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub(super) struct Restored {
    compression: String,
    limit: Option<u64>,
}

impl Restored {
    fn of(files: &FileScanConfig) -> Self {
        let compression = files.file_compression_type.get_variant().to_string();
        Self { compression, limit: files.limit.map(|rows| rows as u64) }
    }

    /// The scan with these properties, whose errors name the file.
    fn applied(&self, scan: &Plan) -> Result<Plan> {
        let Some(files) = files_of(scan) else { return internal_err!("{} is not a scan of files", scan.name()) };
        let mut files = files.clone();
        let compression = self.compression.parse::<FileCompressionType>();
        files.file_compression_type = compression.map_err(|e| plan_datafusion_err!("{}: {e}", self.compression))?;
        files.limit = self.limit.map(|rows| usize::try_from(rows).unwrap_or(usize::MAX));
        // Idle partitions would take the files of others.
        files.preserve_order = true;
        name_files_in_errors(DataSourceExec::from_data_source(files))
    }
}

/// The files of a scan.
pub(super) fn files_of(plan: &Plan) -> Option<&FileScanConfig> {
    let scan = plan.downcast_ref::<DataSourceExec>()?;
    (scan.data_source().as_ref() as &dyn Any).downcast_ref()
}

/// Whether a worker would read the same rows from a scan. Not sent are the record terminator of CSV, virtual columns such as
/// the row index, and that Arrow files are streams. Whether JSON files are arrays is not in the scan; see
/// [`reads_json_arrays`](super::scans::reads_json_arrays).
pub(super) fn can_send(files: &FileScanConfig) -> bool {
    let source = files.file_source().as_ref() as &dyn Any;
    let has_terminator = source.downcast_ref::<CsvSource>().is_some_and(|csv| csv.terminator().is_some());
    let has_virtual = !files.file_source().table_schema().virtual_columns().is_empty();
    let is_known = ["parquet", "csv", "json", "arrow", "avro"].contains(&files.file_source().file_type());
    is_known && !has_terminator && !has_virtual
}

/// See the module.
#[derive(Debug)]
pub(super) struct ScanExec {
    scan: Plan,
    pub(super) restored: Restored,
    properties: Arc<PlanProperties>,
}

impl ScanExec {
    /// The scan of these files.
    pub(super) fn new(files: FileScanConfig) -> Self {
        let restored = Restored::of(&files);
        let scan = DataSourceExec::from_data_source(files) as Plan;
        let properties = Arc::clone(scan.properties());
        Self { scan, restored, properties }
    }

    fn over(&self, scan: Plan) -> Self {
        let properties = Arc::clone(scan.properties());
        Self { scan, restored: self.restored.clone(), properties }
    }

    /// The operator that a worker has decoded.
    ///
    /// # Errors
    /// If the input is not a scan of files.
    pub(super) fn received(scan: &Plan, restored: Restored) -> Result<Self> {
        let scan = restored.applied(scan)?;
        let properties = Arc::clone(scan.properties());
        Ok(Self { scan, restored, properties })
    }
}

impl DisplayAs for ScanExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ScanExec")
    }
}

impl ExecutionPlan for ScanExec {
    operator!("ScanExec", inputs: [scan]);

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn with_new_children(self: Arc<Self>, children: Vec<Plan>) -> Result<Plan> {
        let Ok([scan]) = <[_; 1]>::try_from(children) else { return internal_err!("ScanExec has one input") };
        Ok(Arc::new(self.over(scan)))
    }

    fn try_pushdown_sort(&self, order: &[PhysicalSortExpr]) -> Result<SortOrderPushdownResult<Plan>> {
        Ok(self.scan.try_pushdown_sort(order)?.map(|scan| Arc::new(self.over(scan)) as Plan))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        self.scan.execute(partition, context)
    }
}
