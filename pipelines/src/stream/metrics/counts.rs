//! Counters and histograms. Updates are atomic operations on shared counters: tasks update them once per batch of rows.

use std::{
    fmt,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use prometheus_client::{
    encoding::text,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Metric as Encodable, Registry},
};

use super::{
    names::{self, Metric},
    partitions::{PartitionMetrics, Partitions},
};
use crate::{stage::Work, stream::TopicPartition};

/// What became of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// A row with a vector, or with none because its text is blank.
    Embedded,
    /// A row without a vector, with the reason.
    Null,
    /// No row.
    Skipped,
    /// A message of the dead-letter topic.
    DeadLetter,
}

/// Who had created an object that was to be published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Conflict {
    /// This process, by a request whose reply was lost.
    Own,
    /// Another process.
    Foreign,
}

/// A change of the assignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RebalanceKind {
    /// Partitions were added.
    Assign,
    /// Partitions were taken in an orderly way.
    Revoke,
    /// Partitions were taken before this process heard of it.
    Lost,
}

/// How a transaction ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransactionEnd {
    /// Its messages are visible.
    Committed,
    /// Its messages will be sent again.
    Aborted,
}

/// One label with a word of this program.
type Labelled = Family<[(&'static str, &'static str); 1], Counter>;

/// The metrics of one process.
pub struct Metrics {
    registry: Registry,
    partitions: Arc<Partitions>,
    messages: Counter,
    rows: [Counter; 4],
    rejected: Labelled,
    lost_letters: Counter,
    rebalances: [Counter; 3],
    objects: Counter,
    object_bytes: Counter,
    publish: Histogram,
    conflicts: [Counter; 2],
    retries: Counter,
    transactions: [Counter; 2],
    memory: Gauge,
    memory_limit: Gauge,
    queue: Gauge,
    tokens: Counter,
    padded: Counter,
    cache_hits: Counter,
    device: Counter<f64, AtomicU64>,
    queued: Counter<f64, AtomicU64>,
    oom_splits: Counter,
}

/// Rows that the model has. They count until this is dropped.
#[derive(Debug)]
pub struct Queued {
    metrics: Arc<Metrics>,
    rows: i64,
}

impl Drop for Queued {
    fn drop(&mut self) {
        self.metrics.queue.dec_by(self.rows);
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All metrics at 0.
    pub fn new() -> Self {
        let mut registry = Registry::default();
        let all = &mut registry;
        let partitions = Arc::new(Partitions::new());
        let metrics = Self {
            messages: add(all, names::MESSAGES, Counter::default()),
            rows: add_words(all, names::ROWS, ["embedded", "null", "skipped", "dead_letter"]),
            rejected: add(all, names::REJECTED, Labelled::default()),
            lost_letters: add(all, names::LOST_LETTERS, Counter::default()),
            rebalances: add_words(all, names::REBALANCES, ["assign", "revoke", "lost"]),
            objects: add(all, names::OBJECTS, Counter::default()),
            object_bytes: add(all, names::OBJECT_BYTES, Counter::default()),
            publish: add(all, names::PUBLISH, Histogram::new(PUBLISH_SECONDS)),
            conflicts: add_words(all, names::CONFLICTS, ["own", "foreign"]),
            retries: add(all, names::RETRIES, Counter::default()),
            transactions: add_words(all, names::TRANSACTIONS, ["committed", "aborted"]),
            memory: add(all, names::MEMORY, Gauge::default()),
            memory_limit: add(all, names::MEMORY_LIMIT, Gauge::default()),
            queue: add(all, names::QUEUE, Gauge::default()),
            tokens: add(all, names::TOKENS, Counter::default()),
            padded: add(all, names::PADDED, Counter::default()),
            cache_hits: add(all, names::CACHE_HITS, Counter::default()),
            device: add(all, names::DEVICE, Counter::default()),
            queued: add(all, names::QUEUED, Counter::default()),
            oom_splits: add(all, names::OOM_SPLITS, Counter::default()),
            registry: Registry::default(),
            partitions: Arc::clone(&partitions),
        };
        registry.register_collector(Box::new(partitions));
        Self { registry, ..metrics }
    }

    /// Messages were read.
    pub fn read(&self, messages: u64) {
        self.messages.inc_by(messages);
    }

    /// Messages are done.
    pub fn done(&self, outcome: Outcome, rows: u64) {
        self.rows[outcome as usize].inc_by(rows);
    }

    /// Messages could not be decoded or embedded. `reason` is the label of the error's type.
    pub fn rejected(&self, reason: &'static str, messages: u64) {
        self.rejected.get_or_create(&[(names::REJECTED.labels[0], reason)]).inc_by(messages);
    }

    /// A message could not become a dead letter.
    pub fn dead_letter_refused(&self) {
        self.lost_letters.inc();
    }

    /// The state of a partition that was assigned. It is shown until it is dropped.
    pub fn partition(&self, source: TopicPartition) -> PartitionMetrics {
        self.partitions.add(source)
    }

    /// The assignment changed.
    pub fn rebalanced(&self, kind: RebalanceKind) {
        self.rebalances[kind as usize].inc();
    }

    /// An object was published.
    pub fn published(&self, bytes: u64, took: Duration) {
        self.objects.inc();
        self.object_bytes.inc_by(bytes);
        self.publish.observe(took.as_secs_f64());
    }

    /// An object to be published existed.
    pub fn conflict(&self, kind: Conflict) {
        self.conflicts[kind as usize].inc();
    }

    /// A request to create an object is repeated.
    pub fn retried(&self) {
        self.retries.inc();
    }

    /// A transaction ended.
    pub fn transaction(&self, end: TransactionEnd) {
        self.transactions[end as usize].inc();
    }

    /// Bytes in memory, and their limit.
    pub fn memory(&self, used: usize, limit: usize) {
        self.memory.set(number(used));
        self.memory_limit.set(number(limit));
    }

    /// Rows are given to the model. They count until the result is dropped: they came back, or nobody waits for them.
    pub fn submitted(self: &Arc<Self>, rows: usize) -> Queued {
        let rows = number(rows);
        self.queue.inc_by(rows);
        Queued { metrics: Arc::clone(self), rows }
    }

    /// The devices did this work.
    pub fn computed(&self, work: &Work) {
        self.tokens.inc_by(work.tokens);
        self.padded.inc_by(work.padded_tokens);
        self.cache_hits.inc_by(work.cache_hits);
        self.device.inc_by(work.device_time.as_secs_f64());
        self.queued.inc_by(work.queue_time.as_secs_f64());
        self.oom_splits.inc_by(work.oom_splits);
    }

    /// All metrics in the text format of OpenMetrics.
    pub fn encode(&self) -> String {
        let mut out = String::new();
        // Writing to a string does not fail.
        let _ = text::encode(&mut out, &self.registry);
        out
    }
}

/// Bounds of the buckets: a PUT of a small object takes some hundredths of a second, one that outlasts an outage, minutes.
const PUBLISH_SECONDS: [f64; 13] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0];

fn add<M: Encodable + Clone>(registry: &mut Registry, metric: Metric, counter: M) -> M {
    registry.register(metric.base(), metric.help, counter.clone());
    counter
}

/// One counter per word of the only label. All of them are shown from the start, so that rates begin at 0.
fn add_words<const N: usize>(registry: &mut Registry, metric: Metric, words: [&'static str; N]) -> [Counter; N] {
    let family = add(registry, metric, Labelled::default());
    words.map(|word| family.get_or_create_owned(&[(metric.labels[0], word)]))
}

fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::PathBuf};

    use super::*;
    use crate::stream::metrics::{METRICS, MetricType};

    /// One of everything.
    fn busy() -> (Arc<Metrics>, PartitionMetrics, Queued) {
        let metrics = Arc::new(Metrics::new());
        metrics.read(12);
        metrics.done(Outcome::Embedded, 9);
        metrics.done(Outcome::DeadLetter, 1);
        metrics.rejected("bad_json", 2);
        metrics.rejected("not_utf8", 1);
        metrics.rebalanced(RebalanceKind::Lost);
        metrics.published(1 << 20, Duration::from_millis(300));
        metrics.published(1 << 10, Duration::from_secs(3600));
        metrics.conflict(Conflict::Foreign);
        metrics.retried();
        metrics.dead_letter_refused();
        metrics.transaction(TransactionEnd::Aborted);
        metrics.memory(5, 7);
        drop(metrics.submitted(5));
        let queued = metrics.submitted(3);
        metrics.computed(&Work {
            tokens: 70,
            padded_tokens: 100,
            cache_hits: 60,
            device_time: Duration::from_millis(1500),
            queue_time: Duration::from_millis(250),
            oom_splits: 4,
        });
        let partition = metrics.partition(TopicPartition::new("reviews", 3));
        partition.set_high_watermark(100);
        partition.set_position(40);
        partition.set_chain_end(10);
        partition.opened();
        partition.set_open_bytes(77, 0);
        partition.set_paused(true);
        (metrics, partition, queued)
    }

    /// The format of OpenMetrics, written down by hand.
    #[test]
    fn everything_is_shown() {
        let (metrics, _partition, _queued) = busy();
        let shown = metrics.encode();
        for line in [
            "# HELP elmo_stream_messages Messages read from the broker, again after a rebalance.",
            "# TYPE elmo_stream_messages counter",
            "elmo_stream_messages_total 12",
            "elmo_stream_rows_total{outcome=\"embedded\"} 9",
            "elmo_stream_rows_total{outcome=\"null\"} 0",
            "elmo_stream_rows_total{outcome=\"skipped\"} 0",
            "elmo_stream_rows_total{outcome=\"dead_letter\"} 1",
            "elmo_stream_rejected_total{reason=\"bad_json\"} 2",
            "elmo_stream_rejected_total{reason=\"not_utf8\"} 1",
            "elmo_stream_dead_letters_refused_total 1",
            "elmo_stream_rebalances_total{kind=\"lost\"} 1",
            "elmo_stream_rebalances_total{kind=\"assign\"} 0",
            "elmo_stream_objects_total 2",
            "elmo_stream_object_bytes_total 1049600",
            "elmo_stream_publish_duration_seconds_bucket{le=\"0.25\"} 0",
            "elmo_stream_publish_duration_seconds_bucket{le=\"0.5\"} 1",
            "elmo_stream_publish_duration_seconds_bucket{le=\"600.0\"} 1",
            "elmo_stream_publish_duration_seconds_bucket{le=\"+Inf\"} 2",
            "elmo_stream_publish_duration_seconds_count 2",
            "elmo_stream_publish_conflicts_total{kind=\"own\"} 0",
            "elmo_stream_publish_conflicts_total{kind=\"foreign\"} 1",
            "elmo_stream_publish_retries_total 1",
            "elmo_stream_transactions_total{end=\"committed\"} 0",
            "elmo_stream_transactions_total{end=\"aborted\"} 1",
            "elmo_stream_memory_used_bytes 5",
            "elmo_stream_memory_limit_bytes 7",
            "elmo_stream_queue_rows 3",
            "elmo_stream_tokens_total 70",
            "elmo_stream_padded_tokens_total 100",
            "elmo_stream_cache_hits_total 60",
            "elmo_stream_device_seconds_total 1.5",
            "elmo_stream_queue_seconds_total 0.25",
            "elmo_stream_oom_splits_total 4",
            "elmo_stream_partitions 1",
            "elmo_stream_paused_partitions 1",
            "elmo_stream_kafka_lag{topic=\"reviews\",partition=\"3\"} 60",
            "elmo_stream_chain_lag{topic=\"reviews\",partition=\"3\"} 90",
            "elmo_stream_open_file_bytes{topic=\"reviews\",partition=\"3\"} 77",
        ] {
            assert!(shown.lines().any(|shown| shown == line), "no {line} in\n{shown}");
        }
        assert!(shown.ends_with("# EOF\n"));
    }

    #[test]
    fn the_table_lists_what_is_shown() {
        let (metrics, _partition, _queued) = busy();
        let shown = metrics.encode();
        let lines: BTreeSet<_> = shown.lines().filter(|line| line.starts_with("# TYPE ")).map(str::to_owned).collect();
        let table: BTreeSet<_> = METRICS.iter().map(|m| format!("# TYPE {} {}", m.base(), m.kind)).collect();
        assert_eq!(lines, table);
        for metric in METRICS {
            assert!(shown.contains(&format!("# HELP {} {}.\n", metric.base(), metric.help)), "{}", metric.name);
            assert_eq!(metric.name.ends_with("_total"), metric.kind == MetricType::Counter, "{}", metric.name);
            let labels = |line: &str| {
                let inside = line.split_once('{').map_or("", |(_, rest)| rest.split_once('}').unwrap().0).to_owned();
                let names = inside.split(',').filter(|pair| !pair.is_empty() && !pair.starts_with("le="));
                names.map(|pair| pair.split('=').next().unwrap().to_owned()).collect::<Vec<_>>()
            };
            for series in metric.series() {
                let mut of_series = shown
                    .lines()
                    .filter(|line| line.starts_with(&format!("{series}{{")) || line.starts_with(&format!("{series} ")));
                let first = of_series.next().unwrap_or_else(|| panic!("no {series}"));
                assert_eq!(labels(first), metric.labels, "{series}");
            }
        }
    }

    fn repository() -> PathBuf {
        // Read at run time: several clones may share a target folder.
        PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("..")
    }

    /// The table of docs/stream.md, between its two marks.
    #[test]
    fn the_documentation_lists_them() {
        const MARKS: (&str, &str) = ("<!-- metrics -->\n", "<!-- end of metrics -->\n");
        let row = |metric: &Metric| {
            let labels = metric.labels.iter().map(|label| format!("`{label}`")).collect::<Vec<_>>().join(", ");
            format!("| `{}` | {} | {labels} | {} |\n", metric.name, metric.kind, metric.help)
        };
        let rows = METRICS.iter().map(row).collect::<String>();
        let table = format!("{}| name | type | labels | value |\n|---|---|---|---|\n{rows}{}", MARKS.0, MARKS.1);
        let path = repository().join("docs/stream.md");
        let page = fs::read_to_string(&path).unwrap();
        let (before, rest) = page.split_once(MARKS.0).unwrap();
        let (_, after) = rest.split_once(MARKS.1).unwrap();
        let current = format!("{before}{table}{after}");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            return fs::write(&path, &current).unwrap();
        }
        assert!(current == page, "docs/stream.md is not up to date: run with UPDATE_DOCS=1");
    }

    /// Every metric that the examples name exists.
    #[test]
    fn the_dashboard_shows_what_exists() {
        let known: BTreeSet<_> = METRICS.iter().flat_map(Metric::series).collect();
        for file in ["dashboard.json", "alerts.yml"] {
            let text = fs::read_to_string(repository().join("examples/stream").join(file)).unwrap();
            let named: BTreeSet<_> = names_in(&text).into_iter().collect();
            assert!(!named.is_empty(), "{file}");
            assert!(named.is_subset(&known), "{file}: {:?}", named.difference(&known));
        }
        assert_eq!(names_in("rate(elmo_stream_a_total[5m]) / elmo_stream_b"), ["elmo_stream_a_total", "elmo_stream_b"]);
    }

    fn names_in(text: &str) -> Vec<String> {
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        words.filter(|word| word.starts_with("elmo_stream_")).map(str::to_owned).collect()
    }
}
