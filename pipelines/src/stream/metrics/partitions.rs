//! The state of the assigned partitions. Differences such as the lag are computed when metrics are scraped, so that they
//! are right at that time and not at the last message.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

use parking_lot::Mutex;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeGaugeValue, EncodeMetric},
    metrics::{MetricType, gauge::ConstGauge},
};

use super::names::{self, Metric};
use crate::stream::TopicPartition;

/// The value of an offset that is not known yet.
const UNKNOWN: i64 = -1;

/// All partitions of a process.
#[derive(Debug)]
pub(super) struct Partitions {
    states: Mutex<BTreeMap<TopicPartition, Arc<State>>>,
    /// Times are milliseconds since this one.
    epoch: Instant,
}

#[derive(Debug)]
struct State {
    position: AtomicI64,
    high_watermark: AtomicI64,
    chain_end: AtomicI64,
    /// When the open file got its first row, plus 1; 0 without one.
    opened: AtomicU64,
    open_bytes: AtomicI64,
    open_memory: AtomicU64,
    paused: AtomicBool,
}

/// The state of one partition, for the task that works on it. Dropping it ends its series.
pub struct PartitionMetrics {
    source: TopicPartition,
    state: Arc<State>,
    all: Arc<Partitions>,
}

impl fmt::Debug for PartitionMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PartitionMetrics").field("source", &self.source).field("state", &self.state).finish()
    }
}

impl PartitionMetrics {
    /// The offset after the last message that was read.
    pub fn set_position(&self, offset: i64) {
        self.state.position.store(offset, Relaxed);
    }

    /// The offset that the next message of the topic will get.
    pub fn set_high_watermark(&self, offset: i64) {
        self.state.high_watermark.store(offset, Relaxed);
    }

    /// The offset after the last one in the output.
    pub fn set_chain_end(&self, offset: i64) {
        self.state.chain_end.store(offset, Relaxed);
    }

    /// The open file got its first row.
    pub fn opened(&self) {
        self.state.opened.store(self.all.now() + 1, Relaxed);
    }

    /// Encoded size of the open file, and what it takes of the memory.
    pub fn set_open_bytes(&self, bytes: u64, memory: u64) {
        self.state.open_bytes.store(i64::try_from(bytes).unwrap_or(i64::MAX), Relaxed);
        self.state.open_memory.store(memory, Relaxed);
    }

    /// What the open file takes of the memory.
    pub fn open_memory(&self) -> usize {
        usize::try_from(self.state.open_memory.load(Relaxed)).unwrap_or(usize::MAX)
    }

    /// There is no open file any more: it is complete, or was dropped.
    pub fn closed(&self) {
        self.state.opened.store(0, Relaxed);
        self.set_open_bytes(0, 0);
    }

    /// Whether its messages are not fetched at present.
    pub fn set_paused(&self, paused: bool) {
        self.state.paused.store(paused, Relaxed);
    }
}

impl Drop for PartitionMetrics {
    fn drop(&mut self) {
        let mut states = self.all.states.lock();
        // The partition may have been assigned again before its former task ended.
        if states.get(&self.source).is_some_and(|state| Arc::ptr_eq(state, &self.state)) {
            states.remove(&self.source);
        }
    }
}

impl Partitions {
    pub(super) fn new() -> Self {
        Self { states: Mutex::default(), epoch: Instant::now() }
    }

    pub(super) fn add(self: &Arc<Self>, source: TopicPartition) -> PartitionMetrics {
        let state = Arc::new(State {
            position: AtomicI64::new(UNKNOWN),
            high_watermark: AtomicI64::new(UNKNOWN),
            chain_end: AtomicI64::new(UNKNOWN),
            opened: AtomicU64::new(0),
            open_bytes: AtomicI64::new(0),
            open_memory: AtomicU64::new(0),
            paused: AtomicBool::new(false),
        });
        self.states.lock().insert(source.clone(), Arc::clone(&state));
        PartitionMetrics { source, state, all: Arc::clone(self) }
    }

    /// Milliseconds since the start.
    fn now(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn age(&self, state: &State) -> f64 {
        match state.opened.load(Relaxed) {
            0 => 0.0,
            #[expect(clippy::cast_precision_loss, reason = "milliseconds of a process are exact for 285,000 years")]
            opened => (self.now() + 1).saturating_sub(opened) as f64 / 1e3,
        }
    }
}

impl State {
    /// Messages from `offset` to the end of the topic, if both are known.
    fn lag(&self, offset: &AtomicI64) -> Option<i64> {
        let (offset, end) = (offset.load(Relaxed), self.high_watermark.load(Relaxed));
        (offset != UNKNOWN && end != UNKNOWN).then(|| (end - offset).max(0))
    }
}

impl Collector for Partitions {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let states: Vec<_> = self.states.lock().iter().map(|(tp, state)| (tp.clone(), Arc::clone(state))).collect();
        let paused = states.iter().filter(|(_, state)| state.paused.load(Relaxed)).count();
        for (metric, count) in [(names::PARTITIONS, states.len()), (names::PAUSED, paused)] {
            let value = ConstGauge::new(i64::try_from(count).unwrap_or(i64::MAX));
            let encoder = encoder.encode_descriptor(metric.base(), &metric.sentence(), None, MetricType::Gauge)?;
            value.encode(encoder)?;
        }
        each(&mut encoder, names::KAFKA_LAG, &states, |state| state.lag(&state.position))?;
        each(&mut encoder, names::CHAIN_LAG, &states, |state| state.lag(&state.chain_end))?;
        each(&mut encoder, names::OPEN_AGE, &states, |state| Some(self.age(state)))?;
        each(&mut encoder, names::OPEN_BYTES, &states, |state| Some(state.open_bytes.load(Relaxed)))
    }
}

/// One series per partition whose value is known. The encoder escapes nothing; names of topics have letters, digits, dots,
/// underscores and hyphens only.
fn each<N: EncodeGaugeValue>(
    encoder: &mut DescriptorEncoder<'_>,
    metric: Metric,
    states: &[(TopicPartition, Arc<State>)],
    value: impl Fn(&State) -> Option<N>,
) -> fmt::Result {
    let mut encoder = encoder.encode_descriptor(metric.base(), &metric.sentence(), None, MetricType::Gauge)?;
    for (source, state) in states {
        let Some(value) = value(state) else { continue };
        let partition = source.partition.to_string();
        let labels = [(metric.labels[0], &*source.topic), (metric.labels[1], partition.as_str())];
        ConstGauge::new(value).encode(encoder.encode_family(&labels)?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::metrics::Metrics;

    fn shown(metrics: &Metrics, name: &str) -> Vec<String> {
        let name = format!("elmo_stream_{name}");
        let lines = metrics.encode().lines().map(str::to_owned).collect::<Vec<_>>();
        lines.into_iter().filter_map(|line| line.strip_prefix(&name).map(str::to_owned)).collect()
    }

    #[test]
    fn lags_are_shown_once_both_ends_are_known() {
        let metrics = Metrics::new();
        let partition = metrics.partition(TopicPartition::new("t", 0));
        partition.set_position(5);
        assert!(shown(&metrics, "kafka_lag{").is_empty());
        partition.set_high_watermark(8);
        partition.set_chain_end(0);
        assert_eq!(shown(&metrics, "kafka_lag{"), ["topic=\"t\",partition=\"0\"} 3"]);
        assert_eq!(shown(&metrics, "chain_lag{"), ["topic=\"t\",partition=\"0\"} 8"]);
        // The high watermark is that of the last answer of the broker, the position may be newer.
        partition.set_position(9);
        assert_eq!(shown(&metrics, "kafka_lag{"), ["topic=\"t\",partition=\"0\"} 0"]);
    }

    #[test]
    fn a_file_has_an_age_while_it_is_open() {
        let metrics = Metrics::new();
        let partition = metrics.partition(TopicPartition::new("t", 0));
        let age = || shown(&metrics, "open_file_age_seconds{")[0].rsplit(' ').next().unwrap().parse::<f64>().unwrap();
        assert_eq!(age().to_bits(), 0.0_f64.to_bits());
        partition.opened();
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(age() >= 0.02, "{}", age());
        partition.closed();
        assert_eq!(age().to_bits(), 0.0_f64.to_bits());
    }

    #[test]
    fn a_partition_is_shown_while_it_is_assigned() {
        let metrics = Metrics::new();
        let first = metrics.partition(TopicPartition::new("t", 0));
        let other = metrics.partition(TopicPartition::new("t", 1));
        first.set_paused(true);
        assert_eq!(
            (shown(&metrics, "partitions "), shown(&metrics, "paused_partitions ")),
            (vec!["2".into()], vec!["1".into()])
        );
        // It came back before the task of its first assignment ended.
        let again = metrics.partition(TopicPartition::new("t", 0));
        again.set_open_bytes(9, 5);
        drop((first, other));
        assert_eq!(shown(&metrics, "open_file_bytes{"), ["topic=\"t\",partition=\"0\"} 9"]);
        assert_eq!(shown(&metrics, "paused_partitions "), ["0"]);
        drop(again);
        assert_eq!(shown(&metrics, "partitions "), ["0"]);
    }
}
