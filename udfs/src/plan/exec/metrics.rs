//! Metrics of the operator, as EXPLAIN ANALYZE shows them.

use std::time::Duration;

use datafusion::physical_plan::metrics::{
    BaselineMetrics, Count, ExecutionPlanMetricsSet, MetricBuilder, RatioMetrics, Time,
};
use elmo::EmbeddedColumns;

/// Metrics of one partition.
#[derive(Debug, Clone)]
pub(super) struct EmbedMetrics {
    pub(super) baseline: BaselineMetrics,
    /// Texts that the model embedded.
    rows_embedded: Count,
    tokens: Count,
    /// Rows whose vector was in the cache.
    pub(super) cache_hits: Count,
    /// Rows whose text occurred earlier in the same chunk.
    pub(super) dedup_hits: Count,
    /// Padding as a share of all tokens.
    padding: RatioMetrics,
    queue_time: Time,
    device_time: Time,
}

impl EmbedMetrics {
    pub(super) fn new(metrics: &ExecutionPlanMetricsSet, partition: usize) -> Self {
        let count = |name: &'static str| MetricBuilder::new(metrics).counter(name, partition);
        Self {
            baseline: BaselineMetrics::new(metrics, partition),
            rows_embedded: count("rows_embedded"),
            tokens: count("tokens"),
            cache_hits: count("cache_hits"),
            dedup_hits: count("dedup_hits"),
            padding: MetricBuilder::new(metrics).ratio_metrics("padding_ratio", partition),
            queue_time: MetricBuilder::new(metrics).subset_time("queue_time", partition),
            device_time: MetricBuilder::new(metrics).subset_time("device_time", partition),
        }
    }

    /// Adds the statistics of embedded texts.
    pub(super) fn add(&self, embedded: &EmbeddedColumns) {
        let (stats, cost) = (&embedded.stats, &embedded.cost);
        self.rows_embedded.add(stats.rows - stats.nulls - stats.empty);
        self.tokens.add(stats.tokens);
        // A submission's share of a batch is a fraction; only the sums are whole numbers.
        let whole = |number: f64| number.round().max(0.0) as usize;
        self.padding.add_part(whole(cost.padded_tokens - cost.tokens));
        self.padding.add_total(whole(cost.padded_tokens));
        self.queue_time.add_duration(Duration::from_secs_f64(cost.queue_seconds.max(0.0)));
        self.device_time.add_duration(Duration::from_secs_f64(cost.device_seconds.max(0.0)));
    }
}
