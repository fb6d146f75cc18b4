//! Where a stream begins with `--start latest`, whatever becomes of its first processes: all partitions of all topics where they
//! ended when it began, and those that were added later at their first message. Which topics a pattern reads, and what
//! happens when they are added and deleted.

use std::{collections::BTreeSet, os::unix::process::ExitStatusExt, thread, time::Duration};

use super::{
    broker::{self, Broker, Record, Topic},
    crashes::end_in_order,
    node::Node,
    streaming::{self, Stream},
};

const ELMO: &str = env!("CARGO_BIN_EXE_elmo");

/// The broker forgets members that were killed after a second.
const CLASSIC: &str = "-X session.timeout.ms=1000 -X heartbeat.interval.ms=300";
/// The broker has the timeouts.
const CONSUMER: &str = "-X group.protocol=consumer";

/// librdkafka sees within half a second that topics are added and deleted. The broker of `group.protocol=consumer` needs some
/// ten seconds for patterns.
const QUICK: &str = "-X topic.metadata.refresh.interval.ms=500";

/// Topic, partition and offset.
type Place = (String, i32, i64);

/// Where the messages go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Into {
    Files,
    Topic,
}

const BOTH: [Into; 2] = [Into::Files, Into::Topic];

/// Topics whose names begin alike, and the output of their messages.
struct Case {
    broker: Broker,
    /// With a dash behind it.
    prefix: String,
    topics: Vec<Topic>,
    into: Into,
    target: Topic,
    folder: tempfile::TempDir,
}

impl Case {
    /// Two topics, each with messages.
    fn new(into: Into) -> Self {
        let broker = Broker::shared();
        let target = broker.topic("starts-out", 1);
        let prefix = format!("starts-{}-", uuid::Uuid::new_v4().simple());
        let folder = tempfile::tempdir().unwrap();
        let mut case = Self { broker, prefix, topics: Vec::new(), into, target, folder };
        case.add("a", 2);
        case.add("b", 1);
        case.produce();
        case
    }

    fn add(&mut self, name: &str, partitions: i32) {
        let topic = Topic { name: format!("{}{name}", self.prefix), partitions };
        self.broker.create(&topic, &[]);
        self.topics.push(topic);
    }

    /// Writes some messages to every partition. Returns where they are.
    fn produce(&self) -> Vec<Place> {
        let write = |topic: &Topic| {
            let count = 10 * usize::try_from(topic.partitions).unwrap();
            let written = self.broker.produce(topic, broker::texts(count, topic.partitions));
            let place = |record: Record| (topic.name.clone(), record.partition, record.offset);
            written.into_iter().map(place).collect::<Vec<_>>()
        };
        self.topics.iter().flat_map(write).collect()
    }

    /// A stream of what has this name, in which @ stands for the prefix.
    fn stream_of(&self, name: &str) -> Stream {
        let topic = Topic { name: name.replace('@', &self.prefix), partitions: 0 };
        let group = format!("{}group", self.prefix);
        let stream = match self.into {
            Into::Files => Stream::new(ELMO, &self.broker, &topic, &group, self.folder.path().to_str().unwrap())
                .with("--rows-per-file 7"),
            Into::Topic => Stream::to_topic(ELMO, &self.broker, &topic, &group, &self.target.name)
                .with("--max-wait 50ms -X transaction.timeout.ms=3000"),
        };
        stream.with("--start latest -v")
    }

    /// A stream of all topics, by a pattern.
    fn stream(&self) -> Stream {
        self.stream_of("^@.*").with(CLASSIC)
    }

    /// Runs a stream until it crashes at a point.
    fn crash(&self, point: &str) {
        let crashed = self.stream().with_env("FAILPOINTS", &format!("stream.{point}=return")).once();
        let said = String::from_utf8_lossy(&crashed.stderr).into_owned();
        assert_eq!(crashed.status.signal(), Some(libc::SIGABRT), "{point}: {said}");
    }

    /// Checks that the output has these messages, each once and in order.
    fn check(&self, what: &str, expected: &[Vec<Place>]) {
        let mut expected: Vec<Place> = expected.concat();
        expected.sort();
        let mut found = match self.into {
            Into::Files => self.in_files(),
            Into::Topic => self.in_topic(),
        };
        found.sort();
        assert_eq!(found, expected, "{what}, {:?}", self.into);
    }

    fn in_files(&self) -> Vec<Place> {
        let dataset = self.stream().dataset();
        dataset.check();
        let rows = |object: &super::dataset::Object| {
            let (topic, partition) = (object.topic.clone(), object.partition);
            object.row_offsets().into_iter().map(move |offset| (topic.clone(), partition, offset)).collect::<Vec<_>>()
        };
        dataset.objects.iter().flat_map(rows).collect()
    }

    fn in_topic(&self) -> Vec<Place> {
        self.broker.wait_for_transactions(&self.target);
        let place = |record: Record| {
            let json: serde_json::Value = serde_json::from_slice(&record.value.unwrap()).unwrap();
            let number = |name: &str| json[name].as_i64().unwrap();
            let topic = json["_topic"].as_str().unwrap().to_owned();
            (topic, i32::try_from(number("_partition")).unwrap(), number("_offset"))
        };
        self.broker.read(&self.target).into_iter().map(place).collect()
    }
}

/// A crash around the record of where partitions begin.
#[derive(Debug, Clone, Copy)]
pub(super) struct StartCrash {
    pub(super) into: Into,
    pub(super) point: &'static str,
    /// The next process finds the record.
    recorded: bool,
}

pub(super) fn crashes() -> Vec<StartCrash> {
    let points = [("before_begin", false), ("in_begin", false), ("after_begin", true), ("at_start", true)];
    let all = BOTH.into_iter().flat_map(|into| points.map(|(point, recorded)| StartCrash { into, point, recorded }));
    all.filter(|crash| crash.into == Into::Topic || crash.point != "in_begin").collect()
}

/// A process that crashes before it has recorded anything leaves all to the next one; a later crash changes nothing. Returns
/// the number of messages.
pub(super) fn crash_at_the_start(StartCrash { into, point, recorded }: StartCrash) -> usize {
    let mut case = Case::new(into);
    case.crash(point);
    let between = case.produce();
    case.stream().drain();
    // A topic that is added when all have begun.
    case.add("late", 1);
    let after = case.produce();
    case.stream().drain();
    let expected = if recorded { vec![between, after] } else { vec![after] };
    case.check(point, &expected);
    expected.concat().len()
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_crash_at_the_start_leaves_all_partitions_or_none() {
    for crash in crashes() {
        crash_at_the_start(crash);
    }
}

/// Topics that are named begin where the user says, also if others have begun before, and while the group has members.
#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_topic_that_a_running_group_is_given_begins_at_its_end() {
    for into in BOTH {
        for protocol in [CLASSIC, CONSUMER] {
            let case = Case::new(into);
            let both = || case.stream_of("@a").with(&format!("--topic {}b", case.prefix)).with(protocol);
            let mut older = case.stream_of("@a").with(protocol).start();
            older.wait_for("assigned");
            let first = case.produce();
            let mut newer = both().start();
            newer.wait_for("assigned");
            let second = case.produce();
            end_in_order(vec![older, newer]);
            both().drain();
            let of_a = first.into_iter().filter(|(topic, ..)| topic.ends_with("-a")).collect();
            case.check(protocol, &[of_a, second]);
        }
    }
}

/// A process stands still when it has seen that nothing is recorded, and goes on after another one has begun, read and left.
#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn of_two_processes_that_begin_at_once_one_decides() {
    for into in BOTH {
        let case = Case::new(into);
        let frozen = case.stream().with_env("FAILPOINTS", "stream.before_begin=1*return(freeze)->off");
        let mut late = Node::spawn(frozen.command(), "");
        late.wait_for("reached stream.before_begin");
        case.stream().drain();
        let first = case.produce();
        case.stream().drain();
        late.signal("-CONT");
        late.wait_for("assigned");
        let second = case.produce();
        end_in_order(vec![late]);
        case.stream().drain();
        case.check("one process was late", &[first, second]);
    }
}

/// By hand. The broker matches with RE2, librdkafka with the C library, and the plan with the crate `regex`.
#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_pattern_reads_the_same_topics_by_either_protocol() {
    let broker = Broker::shared();
    let id = format!("patterns-{}-", uuid::Uuid::new_v4().simple());
    for name in ["@1", "@12", "@a.b", "@axb", "@de", "@den", "_@1", "__@1", "old-@1"] {
        let topic = Topic { name: name.replace('@', &id), partitions: 1 };
        broker.create(&topic, &[]);
        broker.produce(&topic, broker::texts(1, 1));
    }
    for (number, (pattern, expected)) in [
        ("^@1", vec!["@1", "@12"]),
        ("^@[[:digit:]]{2,3}", vec!["@12"]),
        (r"^@a\.b|^@(de|en)$", vec!["@a.b", "@de"]),
        ("^_*@[^a-z]$", vec!["@1", "_@1"]),
    ]
    .into_iter()
    .enumerate()
    {
        let expected: BTreeSet<String> = expected.into_iter().map(|name| name.replace('@', &id)).collect();
        for protocol in [CLASSIC, CONSUMER] {
            let folder = tempfile::tempdir().unwrap();
            let topic = Topic { name: pattern.replace('@', &id), partitions: 0 };
            let group = format!("{id}{number}{}", protocol.len());
            let stream = Stream::new(ELMO, &broker, &topic, &group, folder.path().to_str().unwrap()).with(protocol);
            stream.drain();
            let read: BTreeSet<String> = stream.dataset().objects.iter().map(|object| object.topic.clone()).collect();
            assert_eq!(read, expected, "{pattern}, {protocol}");
        }
    }
    // The broker gives out the topic of a name first.
    for protocol in [CLASSIC, CONSUMER] {
        let folder = tempfile::tempdir().unwrap();
        let topic = Topic { name: format!("{id}de"), partitions: 0 };
        let group = format!("{id}both{}", protocol.len());
        let stream = Stream::new(ELMO, &broker, &topic, &group, folder.path().to_str().unwrap());
        let stream = stream.with(protocol).with(&format!("--topic ^{id}1"));
        stream.drain();
        let read: BTreeSet<String> = stream.dataset().objects.iter().map(|object| object.topic.clone()).collect();
        assert_eq!(read, ["de", "1", "12"].map(|name| format!("{id}{name}")).into(), "{protocol}");
    }
}

/// The consumer would go on in the new topic at the offset that it had in the old one.
#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_topic_that_is_made_again_ends_a_running_stream() {
    for protocol in [CLASSIC, CONSUMER] {
        let case = Case::new(Into::Files);
        let mut stream = case.stream_of("^@").with(protocol).with("--max-age 500ms").start();
        stream.wait_for("assigned");
        let written = case.produce();
        broker::eventually("all is written", || case.stream().dataset().table_rows() == written.len());
        case.broker.delete(&case.topics[0]);
        case.broker.create(&case.topics[0], &[]);
        case.broker.produce(&case.topics[0], broker::texts(300, case.topics[0].partitions));
        assert_eq!(stream.wait(), Some(5), "{protocol}: {}", stream.stderr());
        assert!(stream.stderr().contains("it was created again"), "{protocol}: {}", stream.stderr());
    }
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_running_stream_reads_what_is_added_by_either_protocol() {
    for protocol in [CLASSIC, CONSUMER] {
        let mut case = Case::new(Into::Files);
        let mut stream = case.stream_of("^@").with(protocol).with(QUICK).with("--max-age 500ms").start();
        stream.wait_for("assigned");
        let mut expected = case.produce();
        case.add("late", 1);
        case.broker.grow(&mut case.topics[0], 3);
        expected.extend(case.produce());
        broker::eventually("everything is read", || case.stream().dataset().table_rows() == expected.len());
        end_in_order(vec![stream]);
        case.check(protocol, &[expected]);
    }
}

/// What was read of a topic that is deleted is written, also what is in a file that is open: all files are.
#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_topic_of_a_pattern_may_be_deleted_but_not_one_of_a_name() {
    for protocol in [CLASSIC, CONSUMER] {
        let mut case = Case::new(Into::Files);
        let stream = |case: &Case, name: &str| {
            let topic = Topic { name: name.replace('@', &case.prefix), partitions: 0 };
            let group = format!("{}deleted", case.prefix);
            let stream = Stream::new(ELMO, &case.broker, &topic, &group, case.folder.path().to_str().unwrap());
            stream.with("--start latest -v --metrics 127.0.0.1:0").with(protocol).with(QUICK)
        };
        let mut matched = stream(&case, "^@").start();
        let address = streaming::metrics_address(&mut matched);
        matched.wait_for("assigned");
        let first = case.produce();
        let read = |rows: usize| streaming::metric(&address, "elmo_stream_messages_total", "") == rows as f64;
        broker::eventually("all is read", || read(first.len()));
        thread::sleep(Duration::from_secs(1));
        let deleted = case.topics.remove(1);
        case.broker.delete(&deleted);
        matched.wait_for(&format!("topic {}: it no longer exists", deleted.name));
        broker::eventually("its rows are written", || case.stream().dataset().table_rows() == 10);
        let second = case.produce();
        broker::eventually("the other topic", || read(first.len() + second.len()));
        end_in_order(vec![matched]);
        case.check(protocol, &[first, second]);

        let mut named = stream(&case, "@a").start();
        named.wait_for("assigned");
        case.broker.delete(&case.topics[0]);
        assert_eq!(named.wait(), Some(5), "{protocol}: {}", named.stderr());
        let reason = format!("topic {}: it no longer exists", case.topics[0].name);
        assert!(named.stderr().contains(&reason), "{protocol}: {}", named.stderr());
    }
}

/// A topic is deleted while its messages are on their way; the transactions of the other one go on.
#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_stream_into_a_topic_goes_on_when_a_topic_of_its_pattern_is_deleted() {
    for protocol in [CLASSIC, CONSUMER] {
        let mut case = Case::new(Into::Topic);
        let mut stream = case.stream_of("^@[ab]").with(protocol).with(QUICK).start();
        stream.wait_for("assigned");
        let first = case.produce();
        broker::eventually("all is written", || case.in_topic().len() == first.len());
        case.produce();
        let deleted = case.topics.remove(1);
        case.broker.delete(&deleted);
        stream.wait_for(&format!("topic {}: it no longer exists", deleted.name));
        case.produce();
        let of_other = || case.in_topic().iter().filter(|(topic, ..)| *topic != deleted.name).count();
        broker::eventually("the other topic", || of_other() == 60);
        end_in_order(vec![stream]);
    }
}
