//! A topic with texts, and streams of it. The check is always the same: every offset in the output once, files whole, rows
//! equal to those of an undisturbed run to the bit.

use std::collections::BTreeMap;

use super::{
    broker::{self, Broker, Record, Topic},
    dataset::Dataset,
    streaming::Stream,
};

const ELMO: &str = env!("CARGO_BIN_EXE_elmo");

/// The broker forgets members that were killed after a second.
pub(super) const SHORT_SESSION: &str = "-X session.timeout.ms=1000 -X heartbeat.interval.ms=300";

/// Enriched messages by the partition and the offset that they came from.
pub(super) type Enriched = BTreeMap<(i32, i64), Vec<u8>>;

pub(super) fn offsets(written: &[Record]) -> Vec<(i32, i64)> {
    written.iter().map(|record| (record.partition, record.offset)).collect()
}

/// A topic with texts, and a folder for the output.
pub(super) struct Case {
    pub(super) broker: Broker,
    pub(super) topic: Topic,
    pub(super) written: Vec<Record>,
    pub(super) folder: tempfile::TempDir,
}

impl Case {
    /// On the broker of all tests.
    pub(super) fn new(name: &str, partitions: i32, count: usize) -> Self {
        Self::on(Broker::shared(), name, partitions, count)
    }

    pub(super) fn on(broker: Broker, name: &str, partitions: i32, count: usize) -> Self {
        let topic = broker.topic(name, partitions);
        let written = broker.produce(&topic, broker::texts(count, partitions));
        Self { broker, topic, written, folder: tempfile::tempdir().unwrap() }
    }

    /// Writes more texts, which follow those before.
    pub(super) fn produce(&mut self, count: usize) {
        let texts = broker::texts(self.written.len() + count, self.topic.partitions).split_off(self.written.len());
        self.written.extend(self.broker.produce(&self.topic, texts));
    }

    pub(super) fn output(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    /// A stream of the topic; its group has the name of the output.
    pub(super) fn stream(&self, name: &str) -> Stream {
        self.stream_of(name, name)
    }

    /// A stream of a group.
    pub(super) fn stream_of(&self, group: &str, name: &str) -> Stream {
        self.patient_stream(group, name).with(SHORT_SESSION)
    }

    /// A stream of a group with the timeouts of a user.
    pub(super) fn patient_stream(&self, group: &str, name: &str) -> Stream {
        Stream::new(ELMO, &self.broker, &self.topic, &self.group(group), &self.output(name))
    }

    /// A stream into another topic.
    pub(super) fn stream_to(&self, group: &str, target: &Topic) -> Stream {
        self.patient_stream_to(group, target).with(SHORT_SESSION)
    }

    /// The same with the timeouts of a user, but that the broker aborts the transaction of a process that was killed after
    /// three seconds.
    pub(super) fn patient_stream_to(&self, group: &str, target: &Topic) -> Stream {
        let stream = Stream::to_topic(ELMO, &self.broker, &self.topic, &self.group(group), &target.name);
        stream.with("--max-wait 50ms -X transaction.timeout.ms=3000")
    }

    pub(super) fn group(&self, name: &str) -> String {
        format!("{}-{name}", self.topic.name)
    }

    pub(super) fn check(&self, dataset: &Dataset) {
        dataset.check_offsets(&self.topic.name, offsets(&self.written));
    }

    /// Checks what a stream wrote against what a run that nothing disturbed has written.
    pub(super) fn check_same(&self, dataset: &Dataset, undisturbed: &Dataset) {
        self.check(dataset);
        dataset.assert_same_rows(undisturbed);
    }

    /// What a run that nothing disturbs writes.
    pub(super) fn undisturbed(&self) -> Dataset {
        let stream = self.stream("undisturbed");
        stream.drain();
        self.check(&stream.dataset());
        stream.dataset()
    }

    /// The messages that readers of a topic see, each of which must be there once.
    pub(super) fn enriched(&self, target: &Topic) -> Enriched {
        self.broker.wait_for_transactions(target);
        let mut all = Enriched::new();
        for record in self.broker.read(target) {
            let value = record.value.unwrap();
            let json: serde_json::Value = serde_json::from_slice(&value).unwrap();
            let number = |name: &str| json[name].as_i64().unwrap();
            let source = (i32::try_from(number("_partition")).unwrap(), number("_offset"));
            assert!(all.insert(source, value).is_none(), "{source:?} is there twice");
        }
        all
    }

    /// Checks that the messages of a topic are those that a run which nothing disturbed has written.
    pub(super) fn check_enriched(&self, found: &Enriched, undisturbed: &Enriched) {
        let mut wanted = offsets(&self.written);
        wanted.sort_unstable();
        let seen: Vec<_> = found.keys().copied().collect();
        let differs = wanted.iter().zip(&seen).find(|(a, b)| a != b);
        assert!(seen == wanted, "{} messages, not {}; first difference: {differs:?}", seen.len(), wanted.len());
        let differs = found.iter().find(|(source, value)| undisturbed.get(source) != Some(value));
        assert!(differs.is_none(), "another value: {:?}", differs.map(|(source, _)| source));
    }

    /// The messages that a run which nothing disturbs writes.
    pub(super) fn undisturbed_messages(&self) -> Enriched {
        let target = self.broker.topic("undisturbed", self.topic.partitions);
        self.stream_to("undisturbed-messages", &target).drain();
        let messages = self.enriched(&target);
        self.check_enriched(&messages, &messages);
        messages
    }
}
