//! Drives a physical plan: fetches its batches, reports progress, and writes them to a [`Printer`].

use std::{sync::Arc, time::Duration};

use arrow::{
    array::{AsArray, RecordBatch},
    datatypes::UInt64Type,
};
use datafusion::{
    execution::SendableRecordBatchStream,
    physical_plan::{ExecutionPlan, metrics::MetricValue},
};
use futures::StreamExt;

use super::{Outcome, error::sql_error, file_errors::CLUSTER_EXEC, print::Printer};
use crate::{
    error::Result,
    report::{Progress, Snapshot},
};

/// Progress interval.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);

/// Writes all batches of a query to a printer, or as many as the printer takes.
pub(super) async fn write_results(
    plan: &Arc<dyn ExecutionPlan>,
    mut stream: SendableRecordBatchStream,
    mut printer: Printer,
    progress: &dyn Progress,
) -> Result<Outcome> {
    let (mut rows, mut truncated) = (0, false);
    while let Some(batch) = next_batch(plan, &mut stream, progress).await? {
        rows += batch.num_rows() as u64;
        if !printer.write(&batch)? {
            truncated = true;
            break;
        }
    }
    // Cancels the rest of the query before the printer blocks on its output.
    drop(stream);
    progress.finish();
    let hidden_columns = printer.finish()?;
    Ok(Outcome { rows: Some(rows), truncated, hidden_columns })
}

/// Waits for the next batch and reports progress meanwhile.
pub(super) async fn next_batch(
    plan: &Arc<dyn ExecutionPlan>,
    stream: &mut SendableRecordBatchStream,
    progress: &dyn Progress,
) -> Result<Option<RecordBatch>> {
    let mut interval = tokio::time::interval(PROGRESS_INTERVAL);
    loop {
        tokio::select! {
            batch = stream.next() => return batch.transpose().map_err(sql_error),
            _ = interval.tick() => {
                if let Some(snapshot) = embedding_progress(plan) {
                    progress.update(&snapshot);
                }
            }
        }
    }
}

/// The sum of the metrics of all embedding operators of a plan, here and on workers; `None` if it has none.
pub(crate) fn embedding_progress(plan: &Arc<dyn ExecutionPlan>) -> Option<Snapshot> {
    let is_elsewhere = plan.name() == CLUSTER_EXEC;
    // What is below runs on workers, which have told how much they have embedded.
    let inputs = if is_elsewhere { Vec::new() } else { plan.children() };
    let below = inputs.into_iter().filter_map(embedding_progress);
    let metrics = plan.metrics().unwrap_or_default();
    let sum = |name: &str| metrics.sum_by_name(name).map(|value| value.as_usize() as u64);
    let here = sum("rows_embedded").map(|rows| {
        let padded = metrics.iter().map(|metric| match metric.value() {
            MetricValue::Ratio { name, ratio_metrics } if name == "padding_ratio" => ratio_metrics.total() as u64,
            _ => 0,
        });
        let padded_tokens = padded.sum::<u64>() + sum("padded_tokens").unwrap_or_default();
        Snapshot { rows, tokens: sum("tokens").unwrap_or_default(), padded_tokens, ..Snapshot::default() }
    });
    below.chain(here).reduce(|a, b| Snapshot {
        rows: a.rows + b.rows,
        tokens: a.tokens + b.tokens,
        padded_tokens: a.padded_tokens + b.padded_tokens,
        ..a
    })
}

/// The row count in a result of COPY or INSERT.
pub(super) fn written_rows(batch: &RecordBatch) -> u64 {
    let counts = batch.columns().first().and_then(|column| column.as_primitive_opt::<UInt64Type>());
    counts.map_or(0, |counts| counts.values().iter().sum())
}
