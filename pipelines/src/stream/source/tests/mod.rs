//! The consumer against librdkafka's mock cluster, in this process. Each test has its own.
//!
//! Most use `group.protocol=consumer`, which joins in a third of a second there; the classic protocol needs three. The
//! mock says nothing about transactions, ACLs and logins.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod commits;
mod memory;
mod outages;
mod rebalances;
mod secrets;
mod settings;
mod starts;
mod topics;

use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rdkafka::{
    ClientConfig,
    mocking::MockCluster,
    producer::{BaseProducer, BaseRecord, DefaultProducerContext, Producer as _},
};
use tokio::{sync::mpsc::UnboundedReceiver, time::timeout};

use super::*;

/// How long anything may take on a loaded machine.
const LIMIT: Duration = Duration::from_secs(60);

/// A mock cluster with one broker.
pub(super) struct Cluster {
    mock: MockCluster<'static, DefaultProducerContext>,
    producer: BaseProducer,
}

impl Cluster {
    pub(super) fn new(topics: &[(&str, i32)]) -> Self {
        let mock = MockCluster::new(1).unwrap();
        for (topic, partitions) in topics {
            mock.create_topic(topic, *partitions, 1).unwrap();
        }
        let mut config = ClientConfig::new();
        let producer =
            config.set("bootstrap.servers", mock.bootstrap_servers()).set("linger.ms", "0").create().unwrap();
        Self { mock, producer }
    }

    /// Writes messages `from..to`: the value of each is its number.
    pub(super) fn produce(&self, topic: &str, partition: i32, numbers: std::ops::Range<i64>) {
        self.produce_padded(topic, partition, numbers, 0);
    }

    /// As [`Cluster::produce`], with values of at least `len` bytes.
    fn produce_padded(&self, topic: &str, partition: i32, numbers: std::ops::Range<i64>, len: usize) {
        for number in numbers {
            let value = format!("{number:>len$}");
            let record: BaseRecord<'_, str, str> = BaseRecord::to(topic).partition(partition).payload(&value);
            let mut record = Some(record);
            while let Some(next) = record.take() {
                if let Err((_, back)) = self.producer.send(next) {
                    self.producer.poll(Duration::from_millis(10));
                    record = Some(back);
                }
            }
        }
        self.producer.flush(LIMIT).unwrap();
    }

    fn given(&self, topics: &[&str], kafka: &[&str]) -> Given {
        Given {
            brokers: self.mock.bootstrap_servers(),
            topics: topics.iter().map(ToString::to_string).collect(),
            group: "g".into(),
            kafka: kafka.iter().map(ToString::to_string).collect(),
            ..Given::default()
        }
    }

    fn settings(&self, topics: &[&str], kafka: &[&str]) -> Settings {
        Settings::new(self.given(topics, kafka)).unwrap()
    }

    async fn join(&self, topics: &[&str], kafka: &[&str]) -> Member {
        self.join_with(topics, kafka, Budget::new(64 << 20)).await
    }

    async fn join_with(&self, topics: &[&str], kafka: &[&str], budget: Budget) -> Member {
        let settings = self.settings(topics, kafka);
        describe(&settings, &[]).await.unwrap();
        let (source, events) = Source::start(&settings, budget).unwrap();
        Member {
            source,
            events,
            store: Store::default(),
            start: None,
            owned: HashMap::new(),
            seen: BTreeMap::new(),
            other: Vec::new(),
            hold: None,
        }
    }
}

/// KIP-848.
const NEW: &str = "group.protocol=consumer";

fn partition(topic: &str, number: i32) -> TopicPartition {
    TopicPartition::new(topic, number)
}

/// Where each partition's rows end in a store that all members share, as the offset chain is one. The group's offsets
/// would not do: the mock, unlike a broker, refuses commits while a classic group rebalances.
type Store = Arc<Mutex<HashMap<TopicPartition, i64>>>;

/// A job that starts partitions where the store ends, and stores what it has read when they are revoked.
struct Member {
    store: Store,
    source: Source,
    events: UnboundedReceiver<Event>,
    /// Where to start instead.
    start: Option<Start>,
    /// What is assigned, and the next offset of it.
    owned: HashMap<TopicPartition, (Epoch, Option<i64>)>,
    /// Numbers of the messages of each partition, in the order in which they came.
    seen: BTreeMap<TopicPartition, Vec<i64>>,
    /// Other events: errors, seeks.
    other: Vec<String>,
    /// Permits are kept here, if they are kept.
    hold: Option<Vec<Permit>>,
}

impl Member {
    /// Handles an event, if there is one within `wait`.
    async fn step(&mut self, wait: Duration) {
        if let Ok(event) = timeout(wait, self.events.recv()).await {
            let event = event.expect("the consumer is alive");
            self.handle(event);
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Assign { partitions, epoch, reply } => {
                let store = self.store.lock();
                let start = |assigned: &Assigned| match (self.start, store.get(&assigned.partition)) {
                    (Some(start), _) => start,
                    (None, Some(end)) => Start::At(*end),
                    (None, None) => Start::Beginning,
                };
                let starts = partitions.iter().map(|assigned| (assigned.partition.clone(), start(assigned))).collect();
                for Assigned { partition, .. } in partitions {
                    assert!(
                        self.owned.insert(partition.clone(), (epoch, None)).is_none(),
                        "{partition} assigned twice"
                    );
                }
                reply.send(starts);
            }
            Event::Revoke { partitions, lost, reply } => {
                for (partition, epoch) in partitions {
                    let (owned, next) = self.owned.remove(&partition).expect("it was assigned");
                    assert_eq!(owned, epoch);
                    if let (false, Some(next)) = (lost, next) {
                        self.source.ownership().commit(&partition, epoch, next, "").unwrap();
                        self.store.lock().insert(partition, next);
                    }
                }
                reply.send(());
            }
            Event::Messages(batch) => self.read(batch),
            other => self.other.push(format!("{other:?}")),
        }
    }

    fn read(&mut self, batch: Batch) {
        let Batch { messages, epoch, permit } = batch;
        let (owned, next) = self.owned.get_mut(&messages.source).expect("messages of an assigned partition only");
        assert_eq!(*owned, epoch, "messages of an earlier assignment");
        *next = Some(messages.end);
        let seen = self.seen.entry(messages.source.clone()).or_default();
        for message in messages.iter() {
            let number: i64 = std::str::from_utf8(message.value.unwrap()).unwrap().trim().parse().unwrap();
            seen.push(number);
        }
        if let Some(held) = &mut self.hold {
            held.push(permit);
        }
    }

    /// Handles events until `done`.
    async fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let end = Instant::now() + LIMIT;
        while !done(self) {
            assert!(Instant::now() < end, "waiting for {what}: {:?}, {:?}", self.counts(), self.other);
            self.step(Duration::from_millis(20)).await;
        }
    }

    /// Handles events for some time.
    async fn during(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.step(Duration::from_millis(20)).await;
        }
    }

    fn count(&self) -> usize {
        self.seen.values().map(Vec::len).sum()
    }

    fn counts(&self) -> BTreeMap<String, usize> {
        self.seen.iter().map(|(partition, seen)| (partition.to_string(), seen.len())).collect()
    }

    fn epoch(&self, partition: &TopicPartition) -> Epoch {
        self.owned[partition].0
    }

    /// Waits until the group has this hint.
    async fn until_committed(&mut self, partition: &TopicPartition, hint: &Hint) {
        let end = Instant::now() + LIMIT;
        while self.committed(partition).await != *hint {
            assert!(Instant::now() < end, "waiting for the commit");
            self.step(Duration::from_millis(20)).await;
        }
    }

    /// What the group has committed.
    async fn committed(&self, partition: &TopicPartition) -> Hint {
        self.source.client().committed(std::slice::from_ref(partition)).await.unwrap().remove(0)
    }
}

/// Handles the events of several members until `done`.
async fn until_all(members: &mut [&mut Member], what: &str, done: impl Fn(&[&mut Member]) -> bool) {
    let end = Instant::now() + LIMIT;
    while !done(members) {
        assert!(
            Instant::now() < end,
            "waiting for {what}: {:?}",
            members.iter().map(|m| m.counts()).collect::<Vec<_>>()
        );
        for member in members.iter_mut() {
            member.step(Duration::from_millis(5)).await;
        }
    }
}
