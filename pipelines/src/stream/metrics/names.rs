//! The metrics by name. A name that was released keeps its meaning.

use std::fmt;

/// How a metric changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricType {
    /// It only grows. Its name ends in `_total`.
    Counter,
    /// It goes up and down.
    Gauge,
    /// Series `_bucket`, `_sum` and `_count`.
    Histogram,
}

impl fmt::Display for MetricType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        })
    }
}

/// A metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metric {
    /// Its name as Prometheus stores it.
    pub name: &'static str,
    /// Its type.
    pub kind: MetricType,
    /// Its labels.
    pub labels: &'static [&'static str],
    /// What it counts, without a full stop.
    pub help: &'static str,
}

impl Metric {
    /// The name without the suffix that the encoder appends.
    pub(super) fn base(&self) -> &'static str {
        self.name.strip_suffix("_total").unwrap_or(self.name)
    }

    /// The help as it is shown.
    pub(super) fn sentence(&self) -> String {
        format!("{}.", self.help)
    }

    /// The names of its series.
    pub fn series(&self) -> Vec<String> {
        match self.kind {
            MetricType::Histogram => ["_bucket", "_sum", "_count"].map(|end| format!("{}{end}", self.name)).to_vec(),
            MetricType::Counter | MetricType::Gauge => vec![self.name.to_owned()],
        }
    }
}

macro_rules! metrics {
    ($($id:ident = $name:literal $kind:ident [$($label:literal),*] $help:literal;)+) => {
        $(
            pub(super) const $id: Metric = Metric {
                name: concat!("elmo_stream_", $name),
                kind: MetricType::$kind,
                labels: &[$($label),*],
                help: $help,
            };
        )+

        /// All metrics, in the order of the documentation.
        pub const METRICS: &[Metric] = &[$($id),+];
    };
}

metrics! {
    MESSAGES = "messages_total" Counter [] "Messages read from the broker, again after a rebalance";
    ROWS = "rows_total" Counter ["outcome"] "Messages that are done, and their rows published: embedded, null, skipped or dead_letter";
    REJECTED = "rejected_total" Counter ["reason"] "Messages that could not be decoded or embedded, or that the output topic refused, by reason";
    LOST_LETTERS = "dead_letters_refused_total" Counter [] "Messages of which the dead-letter topic takes nothing";
    PARTITIONS = "partitions" Gauge [] "Partitions assigned to this process";
    PAUSED = "paused_partitions" Gauge [] "Assigned partitions that are not fetched, as memory or the store is short";
    REBALANCES = "rebalances_total" Counter ["kind"] "Changes of the assignment: assign, revoke or lost";
    KAFKA_LAG = "kafka_lag" Gauge ["topic", "partition"] "Messages after the last one that was read";
    CHAIN_LAG = "chain_lag" Gauge ["topic", "partition"] "Messages after the end of the output";
    OPEN_AGE = "open_file_age_seconds" Gauge ["topic", "partition"] "Time since the first row of the open file, 0 without one";
    OPEN_BYTES = "open_file_bytes" Gauge ["topic", "partition"] "Encoded size of the open file";
    OBJECTS = "objects_total" Counter [] "Objects published";
    OBJECT_BYTES = "object_bytes_total" Counter [] "Size of the objects published";
    PUBLISH = "publish_duration_seconds" Histogram [] "Time from a complete file to its object in the store, with retries";
    CONFLICTS = "publish_conflicts_total" Counter ["kind"] "Objects that existed: own (a reply was lost) or foreign (another process was faster)";
    RETRIES = "publish_retries_total" Counter [] "Requests to create an object that were repeated";
    TRANSACTIONS = "transactions_total" Counter ["end"] "Transactions to the output topic: committed or aborted";
    MEMORY = "memory_used_bytes" Gauge [] "Messages, vectors and files in memory";
    MEMORY_LIMIT = "memory_limit_bytes" Gauge [] "The limit of --memory-limit";
    QUEUE = "queue_rows" Gauge [] "Rows that wait for the model or are in it";
    TOKENS = "tokens_total" Counter [] "Tokens that the model computed";
    PADDED = "padded_tokens_total" Counter [] "Tokens that the model computed, with padding";
    CACHE_HITS = "cache_hits_total" Counter [] "Tokens whose word was in the word cache";
    DEVICE = "device_seconds_total" Counter [] "Time in which devices computed, over all devices";
    QUEUED = "queue_seconds_total" Counter [] "Time that sentences waited for a batch, over all sentences";
    OOM_SPLITS = "oom_splits_total" Counter [] "Batches that were split because a device had too little memory";
}
