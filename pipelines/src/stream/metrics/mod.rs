//! What an operator sees of a running stream: Prometheus metrics, and whether the process is alive and ready.
//!
//! | file | content |
//! |---|---|
//! | `names` | [`METRICS`]: name, type, labels and help of every metric. The documentation and the dashboard are checked against it |
//! | `counts` | [`Metrics`]: counters and histograms that tasks update |
//! | `partitions` | [`PartitionMetrics`]: the state of one assigned partition, read when metrics are scraped |
//! | `health` | [`Health`]: alive and ready |
//! | `serve` | [`serve()`]: the HTTP server |
//!
//! Labels are names of topics and words of this program. Nothing else of a message or of the settings is in them.

mod counts;
mod health;
mod names;
mod partitions;
mod serve;

pub use self::{
    counts::{Conflict, Metrics, Outcome, Queued, RebalanceKind, TransactionEnd},
    health::Health,
    names::{METRICS, Metric, MetricType},
    partitions::PartitionMetrics,
    serve::{MetricsServer, serve},
};
