//! Metrics of the operator, as EXPLAIN ANALYZE shows them.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use datafusion::physical_plan::{
    Metric,
    metrics::{
        BaselineMetrics, Count, ExecutionPlanMetricsSet, MetricBuilder, MetricCategory, MetricValue, MetricsSet,
        RatioMetrics, Time,
    },
};
use elmo::EmbeddedColumns;

use crate::sync::lock;

/// Metrics of all partitions.
#[derive(Debug, Clone, Default)]
pub(super) struct OperatorMetrics {
    /// Metrics that are summed over partitions.
    sums: ExecutionPlanMetricsSet,
    totals: Arc<Mutex<Totals>>,
}

/// Metrics that are derived from sums over all partitions.
#[derive(Debug, Default)]
struct Totals {
    sentences: usize,
    /// Seconds that sentences waited in the queue of the engine, summed over sentences.
    queue_seconds: f64,
    /// Texts that cannot be embedded, by the label of their error.
    failed: BTreeMap<&'static str, usize>,
}

impl Totals {
    fn add(&mut self, sentences: usize, queue_seconds: f64, failed: impl IntoIterator<Item = &'static str>) {
        self.sentences += sentences;
        self.queue_seconds += queue_seconds;
        failed.into_iter().for_each(|label| *self.failed.entry(label).or_default() += 1);
    }

    /// Mean time that a sentence waited. The sum would exceed the duration of the query, as sentences wait together.
    fn queue_time(&self) -> Duration {
        Duration::from_secs_f64((self.queue_seconds / self.sentences.max(1) as f64).max(0.0))
    }
}

impl OperatorMetrics {
    /// The current values.
    pub(super) fn snapshot(&self) -> MetricsSet {
        let mut metrics = self.sums.clone_inner();
        let totals = lock(&self.totals);
        for (label, texts) in &totals.failed {
            let count = Count::new();
            count.add(*texts);
            let name = format!("rows_failed_{label}").into();
            push(&mut metrics, MetricValue::Count { name, count }, MetricCategory::Rows);
        }
        let time = Time::new();
        if totals.sentences > 0 {
            time.add_duration(totals.queue_time());
        }
        push(&mut metrics, MetricValue::Time { name: "queue_time".into(), time }, MetricCategory::Timing);
        metrics
    }
}

fn push(metrics: &mut MetricsSet, value: MetricValue, category: MetricCategory) {
    metrics.push(Arc::new(Metric::new(value, None).with_category(category)));
}

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
    device_time: Time,
    totals: Arc<Mutex<Totals>>,
}

impl EmbedMetrics {
    pub(super) fn new(metrics: &OperatorMetrics, partition: usize) -> Self {
        let OperatorMetrics { sums, totals } = metrics;
        let count = |name: &'static str| MetricBuilder::new(sums).counter(name, partition);
        Self {
            baseline: BaselineMetrics::new(sums, partition),
            rows_embedded: count("rows_embedded"),
            tokens: count("tokens"),
            cache_hits: count("cache_hits"),
            dedup_hits: count("dedup_hits"),
            padding: MetricBuilder::new(sums).ratio_metrics("padding_ratio", partition),
            device_time: MetricBuilder::new(sums).subset_time("device_time", partition),
            totals: Arc::clone(totals),
        }
    }

    /// Adds the statistics of embedded texts.
    pub(super) fn add(&self, embedded: &EmbeddedColumns) {
        let (stats, cost) = (&embedded.stats, &embedded.cost);
        self.rows_embedded.add(stats.rows - stats.nulls - stats.empty - stats.errors);
        self.tokens.add(stats.tokens);
        // A submission's share of a batch is a fraction; only the sums are whole numbers.
        let whole = |number: f64| number.round().max(0.0) as usize;
        self.padding.add_part(whole(cost.padded_tokens - cost.tokens));
        self.padding.add_total(whole(cost.padded_tokens));
        self.device_time.add_duration(Duration::from_secs_f64(cost.device_seconds.max(0.0)));
        let failed = embedded.row_errors.iter().map(|(_, error)| error.label());
        lock(&self.totals).add(stats.sentences, cost.queue_seconds, failed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: three sentences waited 6 s together and one waited 2 s, so the mean is 2 s, whatever the number of
    /// partitions.
    #[test]
    fn the_queue_time_is_the_mean_over_sentences_of_all_partitions() {
        let metrics = OperatorMetrics::default();
        for (partition, (sentences, seconds)) in [(3, 6.0), (1, 2.0)].into_iter().enumerate() {
            lock(&EmbedMetrics::new(&metrics, partition).totals).add(sentences, seconds, []);
        }
        assert!(shown(&metrics).contains(&"queue_time=2.00s".to_owned()), "{:?}", shown(&metrics));
    }

    #[test]
    fn only_labels_that_occurred_are_counted() {
        let metrics = OperatorMetrics::default();
        for (partition, failed) in [vec!["not_utf8", "too_many_tokens"], vec!["not_utf8"]].into_iter().enumerate() {
            lock(&EmbedMetrics::new(&metrics, partition).totals).add(0, 0.0, failed);
        }
        let mut failed: Vec<String> = shown(&metrics).into_iter().filter(|m| m.starts_with("rows_failed")).collect();
        failed.sort_unstable();
        assert_eq!(failed, ["rows_failed_not_utf8=2", "rows_failed_too_many_tokens=1"]);
    }

    /// The metrics as EXPLAIN ANALYZE aggregates them.
    fn shown(metrics: &OperatorMetrics) -> Vec<String> {
        metrics.snapshot().aggregate_by_name().iter().map(ToString::to_string).collect()
    }
}
