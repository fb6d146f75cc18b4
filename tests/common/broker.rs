//! A real broker: topics, messages, what a group has committed, and a broker that a test may kill.
//!
//! `scripts/services` starts the broker of all tests and says where it is; each test has topics of its own.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    process::Command,
    time::Duration,
};

use futures::executor::block_on;
use rdkafka::{
    ClientConfig, Message, Offset, TopicPartitionList,
    admin::{AdminClient, AdminOptions, NewTopic, TopicReplication},
    client::DefaultClientContext,
    consumer::{BaseConsumer, Consumer},
    error::KafkaError,
    message::{Header, Headers, OwnedHeaders},
    producer::{DeliveryFuture, FutureProducer, FutureRecord, Producer},
};
use tempfile::TempDir;

/// How long a broker may take for anything.
const PATIENCE: Duration = Duration::from_secs(60);

/// A broker, and how to reach it.
pub(crate) struct Broker {
    pub(crate) address: String,
    /// Settings of librdkafka for every client.
    settings: Vec<(String, String)>,
    /// Its folder, if it belongs to one test.
    own: Option<TempDir>,
}

/// A topic of a test's own.
#[derive(Debug, Clone)]
pub(crate) struct Topic {
    pub(crate) name: String,
    pub(crate) partitions: i32,
}

/// A message as it is written or read. Its offset is meaningless before it is written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    pub(crate) timestamp: Option<i64>,
    pub(crate) key: Option<Vec<u8>>,
    pub(crate) value: Option<Vec<u8>>,
    pub(crate) headers: Vec<(String, Option<Vec<u8>>)>,
}

impl Record {
    pub(crate) fn new(partition: i32, value: impl Into<Vec<u8>>) -> Self {
        Self { partition, value: Some(value.into()), ..Self::default() }
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(self.value.as_deref().unwrap()).unwrap()
    }
}

/// A text that depends on `n` alone, of one to nine sentences.
pub(crate) fn text(n: usize) -> String {
    let subjects = ["The ferry", "A neighbour", "The second violin", "Nobody", "The old bridge", "Her letter", "Rain"];
    let verbs = ["waited for", "crossed", "forgot", "painted", "heard", "followed", "counted"];
    let objects = ["the harbour", "a field of barley", "the last train", "seven lanterns", "the choir", "an open door"];
    let sentence = |k: usize| {
        let pick = |words: &[&'static str], step: usize| words[(n * step + k) % words.len()];
        format!("{} {} {}.", pick(&subjects, 1), pick(&verbs, 3), pick(&objects, 5))
    };
    let more: String = (0..n * n % 9).map(|k| format!(" {}", sentence(k + 1))).collect();
    format!("{} Message {n}.{more}", sentence(0))
}

/// `count` messages with [`text`], over the partitions in turn.
pub(crate) fn texts(count: usize, partitions: i32) -> Vec<Record> {
    let partition = |n: usize| i32::try_from(n).unwrap() % partitions;
    (0..count).map(|n| Record::new(partition(n), text(n))).collect()
}

/// As [`texts`], in JSON: `{"id": 7, "body": "…"}`.
pub(crate) fn json_texts(count: usize, partitions: i32) -> Vec<Record> {
    let json = |(n, record): (usize, Record)| {
        let value = serde_json::json!({ "id": n, "body": record.text() }).to_string().into_bytes();
        Record { value: Some(value), ..record }
    };
    texts(count, partitions).into_iter().enumerate().map(json).collect()
}

fn script() -> Command {
    Command::new(needed("ELMO_TEST_KAFKA_SCRIPT"))
}

pub(crate) fn needed(variable: &str) -> String {
    env::var(variable).unwrap_or_else(|_| panic!("{variable} is not set: run scripts/services"))
}

fn succeed(command: &mut Command) -> String {
    let done = command.output().unwrap();
    assert!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap().trim().to_owned()
}

impl Broker {
    /// The broker of all tests.
    pub(crate) fn shared() -> Self {
        Self { address: needed("ELMO_TEST_KAFKA"), settings: Vec::new(), own: None }
    }

    /// The same broker over TLS with user and password. What a test changes of them is in `settings`.
    pub(crate) fn secured(settings: &[(&str, &str)]) -> Self {
        let own = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        let all = secured_settings().into_iter().chain(settings.iter().map(own)).collect();
        Self { address: needed("ELMO_TEST_KAFKA_SASL_SSL"), settings: all, own: None }
    }

    /// A broker of this test's own, which it may kill. Takes ten seconds and 300 MB.
    pub(crate) fn own() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let address = succeed(script().arg("start").arg(folder.path()));
        Self { address, settings: Vec::new(), own: Some(folder) }
    }

    fn folder(&self) -> &TempDir {
        self.own.as_ref().expect("the broker of all tests is not killed")
    }

    /// SIGKILL. Its data stays.
    pub(crate) fn kill(&self) {
        succeed(script().arg("kill").arg(self.folder().path()));
    }

    /// Starts a broker that was killed, at the same address and with its data.
    pub(crate) fn start_again(&self) {
        assert_eq!(succeed(script().arg("start").arg(self.folder().path())), self.address);
    }

    /// Settings of a client.
    pub(crate) fn client(&self) -> ClientConfig {
        let mut client = ClientConfig::new();
        client.set("bootstrap.servers", &self.address);
        for (key, value) in &self.settings {
            client.set(key, value);
        }
        client
    }

    fn admin(&self) -> AdminClient<DefaultClientContext> {
        self.client().create().unwrap()
    }

    /// A new topic with a name of its own that begins with `name`.
    pub(crate) fn topic(&self, name: &str, partitions: i32) -> Topic {
        self.topic_with(name, partitions, &[])
    }

    /// As [`Broker::topic`], with settings of the topic, such as `cleanup.policy`.
    pub(crate) fn topic_with(&self, name: &str, partitions: i32, settings: &[(&str, &str)]) -> Topic {
        let topic = Topic { name: format!("{name}-{}", uuid::Uuid::new_v4().simple()), partitions };
        self.create(&topic, settings);
        topic
    }

    /// Creates a topic with a name that the test chose, or that was deleted.
    pub(crate) fn create(&self, topic: &Topic, settings: &[(&str, &str)]) {
        let mut new = NewTopic::new(&topic.name, topic.partitions, TopicReplication::Fixed(1));
        for (key, value) in settings {
            new = new.set(key, value);
        }
        let created = block_on(self.admin().create_topics([&new], &patient())).unwrap();
        assert!(created.iter().all(Result::is_ok), "{created:?}");
        // Its partitions have leaders a moment later.
        eventually("a new topic has leaders", || {
            let consumer: BaseConsumer = self.client().create().unwrap();
            let found = consumer.fetch_metadata(Some(&topic.name), PATIENCE).unwrap();
            let partitions = found.topics()[0].partitions();
            partitions.len() == topic.partitions.cast_unsigned() as usize && partitions.iter().all(|p| p.leader() >= 0)
        });
    }

    pub(crate) fn delete(&self, topic: &Topic) {
        let deleted = block_on(self.admin().delete_topics(&[&topic.name], &patient())).unwrap();
        assert!(deleted.iter().all(Result::is_ok), "{deleted:?}");
    }

    /// Adds partitions, so that the topic has `partitions`.
    pub(crate) fn grow(&self, topic: &mut Topic, partitions: i32) {
        let more = rdkafka::admin::NewPartitions::new(&topic.name, partitions.cast_unsigned() as usize);
        let grown = block_on(self.admin().create_partitions([&more], &patient())).unwrap();
        assert!(grown.iter().all(Result::is_ok), "{grown:?}");
        topic.partitions = partitions;
    }

    /// Deletes the messages of a partition below `offset`, as retention does.
    pub(crate) fn delete_below(&self, topic: &Topic, partition: i32, offset: i64) {
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(&topic.name, partition, Offset::Offset(offset)).unwrap();
        let deleted = block_on(self.admin().delete_records(&list, &patient())).unwrap();
        assert!(deleted.elements().iter().all(|e| e.error().is_ok()), "{deleted:?}");
    }

    /// Denies the user of the tests an operation, such as `Read`, on a topic. All others may do it still; what the operation
    /// implies, such as `Describe`, stays allowed to everybody.
    pub(crate) fn deny(&self, topic: &Topic, operation: &str) {
        self.deny_resource("--topic", &topic.name, operation);
    }

    /// The same of a group.
    pub(crate) fn deny_group(&self, group: &str, operation: &str) {
        self.deny_resource("--group", group, operation);
    }

    fn deny_resource(&self, kind: &str, name: &str, operation: &str) {
        let user = format!("User:{}", needed("ELMO_TEST_KAFKA_USER"));
        let words = ["tool", "org.apache.kafka.tools.AclCommand", "--bootstrap-server", &self.address, "--add"];
        let who = ["--deny-principal", &user, "--allow-principal", "User:*"];
        succeed(script().args(words).args(who).args(["--operation", operation, kind, name]));
    }

    /// Writes messages, each once, and waits until the broker has acknowledged them. Returns them with their offsets.
    pub(crate) fn produce(&self, topic: &Topic, records: Vec<Record>) -> Vec<Record> {
        let mut client = self.client();
        client.set("enable.idempotence", "true").set("linger.ms", "5").set("queue.buffering.max.messages", "1000000");
        let producer: FutureProducer = client.create().unwrap();
        let sent: Vec<_> = records.iter().map(|record| producer.send_result(message(topic, record)).unwrap()).collect();
        producer.flush(PATIENCE).unwrap();
        let written = |(record, sent): (Record, DeliveryFuture)| {
            let delivery = block_on(sent).unwrap().map_err(|(e, _)| e).unwrap();
            Record { offset: delivery.offset, ..record }
        };
        records.into_iter().zip(sent).map(written).collect()
    }

    /// All committed messages of a topic, sorted by partition and offset.
    pub(crate) fn read(&self, topic: &Topic) -> Vec<Record> {
        self.try_read(topic).unwrap()
    }

    pub(crate) fn try_read(&self, topic: &Topic) -> Result<Vec<Record>, KafkaError> {
        self.read_as(topic, "read_committed")
    }

    /// All messages of a topic, also those of transactions that were aborted.
    pub(crate) fn read_uncommitted(&self, topic: &Topic) -> Vec<Record> {
        self.read_as(topic, "read_uncommitted").unwrap()
    }

    fn read_as(&self, topic: &Topic, isolation: &str) -> Result<Vec<Record>, KafkaError> {
        let mut client = self.client();
        client.set("isolation.level", isolation).set("enable.partition.eof", "true");
        client.set("group.id", "unused").set("enable.auto.commit", "false");
        let consumer: BaseConsumer = client.create()?;
        let mut list = TopicPartitionList::new();
        for partition in 0..topic.partitions {
            list.add_partition_offset(&topic.name, partition, Offset::Beginning)?;
        }
        consumer.assign(&list)?;
        // A partition may come to its end twice: before and after the marker of a transaction.
        let (mut records, mut ended) = (Vec::new(), BTreeSet::new());
        while ended.len() < topic.partitions as usize {
            match consumer.poll(PATIENCE).expect("the broker stopped answering") {
                Ok(message) => records.push(record(&message)),
                Err(KafkaError::PartitionEOF(partition)) => {
                    ended.insert(partition);
                }
                Err(error) => return Err(error),
            }
        }
        records.sort_by_key(|record| (record.partition, record.offset));
        Ok(records)
    }

    /// Waits until no transaction is open in a topic. That of a process that was killed hides all messages after it from readers of
    /// committed ones, until the broker aborts it.
    pub(crate) fn wait_for_transactions(&self, topic: &Topic) {
        let end = |isolation: &str, partition: i32| {
            let consumer: BaseConsumer = self.client().set("isolation.level", isolation).create().unwrap();
            consumer.fetch_watermarks(&topic.name, partition, PATIENCE).unwrap().1
        };
        eventually("no transaction is open", || {
            (0..topic.partitions)
                .all(|partition| end("read_committed", partition) == end("read_uncommitted", partition))
        });
    }

    /// First and next offset of a partition.
    pub(crate) fn watermarks(&self, topic: &Topic, partition: i32) -> (i64, i64) {
        let consumer: BaseConsumer = self.client().create().unwrap();
        consumer.fetch_watermarks(&topic.name, partition, PATIENCE).unwrap()
    }

    /// Offset and metadata that a group has committed, by partition.
    pub(crate) fn committed(&self, group: &str, topic: &Topic) -> BTreeMap<i32, (i64, String)> {
        let consumer: BaseConsumer = self.client().set("group.id", group).create().unwrap();
        let mut list = TopicPartitionList::new();
        list.add_partition_range(&topic.name, 0, topic.partitions - 1);
        let found = consumer.committed_offsets(list, PATIENCE).unwrap();
        let offsets = found.elements().into_iter().filter_map(|element| match element.offset() {
            Offset::Offset(offset) => Some((element.partition(), (offset, element.metadata().to_owned()))),
            _ => None,
        });
        offsets.collect()
    }

    /// Whether anybody has ever joined a group, or committed an offset for it.
    pub(crate) fn has_group(&self, group: &str) -> bool {
        let consumer: BaseConsumer = self.client().create().unwrap();
        let found = consumer.fetch_group_list(None, PATIENCE).unwrap();
        found.groups().iter().any(|found| found.name() == group)
    }

    /// Number of processes that are members of a group.
    pub(crate) fn members(&self, group: &str) -> usize {
        let consumer: BaseConsumer = self.client().create().unwrap();
        let found = consumer.fetch_group_list(Some(group), PATIENCE).unwrap();
        found.groups().iter().map(|group| group.members().len()).sum()
    }

    /// Sets what a group has committed, as `kafka-consumer-groups --reset-offsets` does. The group must have no members.
    pub(crate) fn commit(&self, group: &str, topic: &Topic, offsets: &[(i32, i64)]) {
        let consumer: BaseConsumer = self.client().set("group.id", group).create().unwrap();
        let mut list = TopicPartitionList::new();
        for (partition, offset) in offsets {
            list.add_partition_offset(&topic.name, *partition, Offset::Offset(*offset)).unwrap();
        }
        consumer.commit(&list, rdkafka::consumer::CommitMode::Sync).unwrap();
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        if let Some(folder) = &self.own {
            let _ = script().arg("kill").arg(folder.path()).output();
        }
    }
}

/// Settings of librdkafka for the listener with TLS and SCRAM.
pub(crate) fn secured_settings() -> Vec<(String, String)> {
    let settings = [
        ("security.protocol", "SASL_SSL".to_owned()),
        ("sasl.mechanism", "SCRAM-SHA-256".to_owned()),
        ("sasl.username", needed("ELMO_TEST_KAFKA_USER")),
        ("sasl.password", needed("ELMO_TEST_KAFKA_PASSWORD")),
        ("ssl.ca.location", needed("ELMO_TEST_KAFKA_CA")),
    ];
    settings.map(|(key, value)| (key.to_owned(), value)).to_vec()
}

/// The certificate of an authority that did not sign the broker's.
pub(crate) fn wrong_ca() -> String {
    let path = needed("ELMO_TEST_KAFKA_WRONG_CA");
    assert!(fs::read_to_string(&path).unwrap().contains("BEGIN CERTIFICATE"));
    path
}

fn patient() -> AdminOptions {
    AdminOptions::new().request_timeout(Some(PATIENCE)).operation_timeout(Some(PATIENCE))
}

fn message<'r>(topic: &'r Topic, record: &'r Record) -> FutureRecord<'r, Vec<u8>, Vec<u8>> {
    let add =
        |all: OwnedHeaders, (key, value): &(String, Option<Vec<u8>>)| all.insert(Header { key, value: value.as_ref() });
    let headers = record.headers.iter().fold(OwnedHeaders::new(), add);
    FutureRecord {
        topic: &topic.name,
        partition: Some(record.partition),
        payload: record.value.as_ref(),
        key: record.key.as_ref(),
        timestamp: record.timestamp,
        headers: (!record.headers.is_empty()).then_some(headers),
    }
}

fn record(message: &impl Message) -> Record {
    let owned = |header: Header<'_, &[u8]>| (header.key.to_owned(), header.value.map(<[u8]>::to_vec));
    Record {
        partition: message.partition(),
        offset: message.offset(),
        timestamp: message.timestamp().to_millis(),
        key: message.key().map(<[u8]>::to_vec),
        value: message.payload().map(<[u8]>::to_vec),
        headers: message.headers().map(|all| all.iter().map(owned).collect()).unwrap_or_default(),
    }
}

/// Waits until something holds.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let began = std::time::Instant::now();
    while !holds() {
        assert!(began.elapsed() < PATIENCE, "never came true: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
