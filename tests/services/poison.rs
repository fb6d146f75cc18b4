//! Bad messages of every kind among good ones: each is counted once and put where it belongs, and the good ones are as if
//! there were no others.
//!
//! With `ELMO_TEST_LONG=1` there are 100,000 messages.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{Read, Write},
    net::TcpListener,
    process::Output,
    thread,
    time::Duration,
};

use arrow::{
    array::{Array, AsArray},
    datatypes::Int64Type,
};
use rdkafka::producer::{BaseRecord, Producer, ThreadedProducer};

use super::{
    broker::{Broker, Record, Topic},
    dataset::Dataset,
    running::{Running, is_long},
    streaming::{self, Stream},
};

const ELMO: &str = env!("CARGO_BIN_EXE_elmo");

/// A kind of bad message.
struct Kind {
    /// The reason, as metrics and footers have it: those of the table in docs/stream.md.
    label: &'static str,
    /// How the sentence in the column `error` begins.
    reason: &'static str,
    value: fn(usize) -> Option<Vec<u8>>,
}

/// The values of `max.message.bytes` of the topic of dead letters, and of a text that is longer than that.
const MAX_LETTER: usize = 4000;
const LONG_TEXT: usize = 5000;

/// For `--max-text 1KB --max-tokens 40 --on-long error --text-path /body --columns id=/id:int64`.
const KINDS: [Kind; 10] = [
    Kind { label: "tombstone", reason: "a tombstone", value: |_| None },
    Kind {
        label: "not_utf8",
        reason: "not UTF-8: invalid at byte 9 of 12",
        value: |_| Some(b"{\"body\":\"\xff\"}".into()),
    },
    Kind { label: "bad_json", reason: "not valid JSON", value: |n| json(format!("{{\"id\": {n}, \"body\": \"cut")) },
    Kind { label: "bad_json", reason: "not valid JSON", value: |_| json(String::new()) },
    Kind {
        label: "bad_json",
        reason: "not valid JSON",
        value: |n| json(format!("{{\"id\": {n}, \"body\": \"first\"}} {{\"body\": \"second\"}}")),
    },
    Kind {
        label: "no_text",
        reason: "no text: the message has no /body",
        value: |n| json(format!("{{\"id\": {n}, \"title\": \"no body\"}}")),
    },
    Kind {
        label: "wrong_type",
        reason: "column \"text\": string",
        value: |n| json(format!("{{\"id\": {n}, \"body\": {{\"text\": \"below\"}}}}")),
    },
    Kind {
        label: "wrong_type",
        reason: "column \"id\": int64",
        value: |n| json(format!("{{\"id\": \"number {n}\", \"body\": \"a text\"}}")),
    },
    Kind {
        label: "text_too_large",
        reason: "a text of 5000 bytes; the maximum is 1024",
        value: |n| json(format!("{{\"id\": {n}, \"body\": \"{}\"}}", "x".repeat(LONG_TEXT))),
    },
    Kind {
        label: "too_many_tokens",
        reason: "a sentence of 100 tokens; max-tokens is 40",
        value: |n| json(format!("{{\"id\": {n}, \"body\": \"{}\"}}", "word ".repeat(100))),
    },
];

/// How long a stream may take for all messages.
const PATIENCE: Duration = Duration::from_secs(300);
/// One message in so many is of one kind.
const EACH: usize = 1000;

fn json(text: String) -> Option<Vec<u8>> {
    Some(text.into_bytes())
}

/// The kind of message `n`, if it is bad: 37, 137, … of each thousand.
fn kind(n: usize) -> Option<&'static Kind> {
    let (kind, rest) = (n % EACH / 100, n % 100);
    (rest == 37).then(|| &KINDS[kind])
}

/// Message `n` has no text, which is no error: `null`, or blank.
fn is_empty(n: usize) -> bool {
    n % EACH == 500 || n % EACH == 600
}

fn record(n: usize, partitions: i32) -> Record {
    let good = || match n % EACH {
        500 => json(format!("{{\"id\": {n}, \"body\": null}}")),
        600 => json(format!("{{\"id\": {n}, \"body\": \" \\n\"}}")),
        // What is not read may be as deep as it likes.
        700 => json(format!("{{\"id\": {n}, \"x\": {}{}, \"body\": \"Deep.\"}}", "[".repeat(200), "]".repeat(200))),
        _ => json(format!("{{\"id\": {n}, \"body\": \"Message {n} is short.\"}}")),
    };
    Record {
        partition: i32::try_from(n).unwrap() % partitions,
        key: (!n.is_multiple_of(3)).then(|| format!("key {n}").into_bytes()),
        value: kind(n).map_or_else(good, |kind| (kind.value)(n)),
        headers: vec![("trace".into(), Some(n.to_string().into_bytes())), ("empty".into(), None)],
        ..Record::default()
    }
}

/// A topic with messages, and their numbers by partition and offset.
struct Case {
    broker: Broker,
    topic: Topic,
    numbers: BTreeMap<(i32, i64), usize>,
    folder: tempfile::TempDir,
}

impl Case {
    fn new(count: usize) -> Self {
        let broker = Broker::shared();
        let topic = broker.topic("poison", 4);
        let written = broker.produce(&topic, (0..count).map(|n| record(n, topic.partitions)).collect());
        let numbers = written.iter().enumerate().map(|(n, record)| ((record.partition, record.offset), n)).collect();
        Self { broker, topic, numbers, folder: tempfile::tempdir().unwrap() }
    }

    fn stream(&self, policy: &str) -> Stream {
        let output = self.folder.path().join(policy);
        let group = format!("{}-{policy}", self.topic.name);
        let stream = Stream::bare(ELMO, &self.broker, &self.topic, &group, output.to_str().unwrap());
        stream
            .with("--model tiny --threads 1 --format json --text-path /body --columns id=/id:int64")
            .with("--max-text 1KB --max-tokens 40 --on-long error --json --rows-per-file 4000")
            .with(&format!("--on-error {policy}"))
    }

    /// How many messages there are of each label.
    fn expected(&self) -> BTreeMap<String, u64> {
        let mut expected = BTreeMap::new();
        for kind in self.numbers.values().filter_map(|n| kind(*n)) {
            *expected.entry(kind.label.to_owned()).or_default() += 1;
        }
        expected
    }

    /// Every bad message is a row without a vector, with its reason; the others are as they were.
    fn check_null(&self) {
        let mut stream = Running::start(&self.stream("null").with("--metrics 127.0.0.1:0 -v --max-age 1s"));
        let expected = self.expected();
        let bad = expected.values().sum::<u64>();
        let count = self.numbers.len() as f64;
        stream.wait("everything is read", PATIENCE, |stream| stream.metric("elmo_stream_rows_total") == count);
        let metric = |name: &str, labels: &str| streaming::metric(&stream.metrics, name, labels);
        assert_eq!(metric("elmo_stream_rows_total", "outcome=\"null\""), bad as f64);
        for (label, count) in &expected {
            let counted = metric("elmo_stream_rejected_total", &format!("reason=\"{label}\""));
            assert_eq!(counted, *count as f64, "{label}");
        }
        assert_eq!(metric("elmo_stream_rejected_total", ""), bad as f64);
        stream.node.signal("-TERM");
        assert_eq!(stream.node.wait(), Some(0), "{}", stream.node.stderr());

        let dataset = self.stream("null").dataset();
        dataset.check_offsets(&self.topic.name, self.numbers.keys().copied());
        assert_eq!(rejected(&dataset), expected);
        self.check_rows(&dataset);
    }

    fn check_rows(&self, dataset: &Dataset) {
        let (table, errors) = (dataset.table(), dataset.strings("error"));
        let (vectors, ids) = (table.column_by_name("embedding").unwrap(), table.column_by_name("id").unwrap());
        let ids = ids.as_primitive::<Int64Type>();
        // Rows and numbers are in the order of partitions and offsets.
        for (row, n) in self.numbers.values().enumerate() {
            let kind = kind(*n);
            let error = errors[row].as_deref();
            let begins = |kind: &Kind| error.is_some_and(|error| error.starts_with(kind.reason));
            assert!(kind.map_or(error.is_none(), begins), "{n}: {error:?}");
            assert_eq!(vectors.is_null(row), kind.is_some() || is_empty(*n), "{n}");
            if kind.is_none() {
                assert_eq!(ids.value(row), i64::try_from(*n).unwrap());
            }
        }
    }

    /// Every bad message is a dead letter and no row. Those that the topic of dead letters does not take lose their value.
    fn check_letters(&self) {
        let max = [("max.message.bytes", MAX_LETTER.to_string())];
        let letters =
            self.broker.topic_with("poison-letters", 1, &max.each_ref().map(|(key, value)| (*key, value.as_str())));
        let stream = self.stream("dead-letter").with(&format!("--dead-letter-topic {}", letters.name));
        assert_eq!(reported(&stream.once()), self.expected());
        let good: Vec<_> = self.numbers.iter().filter(|(_, n)| kind(**n).is_none()).map(|(at, _)| *at).collect();
        stream.dataset().check_rows(&self.topic.name, &good);
        assert_eq!(rejected(&stream.dataset()), self.expected());

        let mut found: Vec<_> = self.broker.read(&letters).into_iter().map(letter).collect();
        found.sort_unstable();
        let sources = self.broker.read(&self.topic);
        let number = |record: &Record| self.numbers[&(record.partition, record.offset)];
        let bad = sources.into_iter().filter_map(|record| Some((kind(number(&record))?, record)));
        let expected: Vec<_> = bad.map(|(kind, record)| self.expected_letter(kind, record)).collect();
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(found, expected);
        }
    }

    fn expected_letter(&self, kind: &Kind, record: Record) -> Letter {
        let large = record.value.as_ref().is_some_and(|value| value.len() > MAX_LETTER);
        let value = if large { Some(Vec::new()) } else { record.value };
        let source = (self.topic.name.clone(), record.partition, record.offset);
        let reason = (kind.label.to_owned(), kind.reason.to_owned());
        (source, record.timestamp, record.key, value, record.headers, reason, large)
    }
}

/// Topic, partition and offset of the message; its time, key, value and headers; label and reason; whether its value was
/// left out.
type Letter = (
    (String, i32, i64),
    Option<i64>,
    Option<Vec<u8>>,
    Option<Vec<u8>>,
    Vec<(String, Option<Vec<u8>>)>,
    (String, String),
    bool,
);

fn letter(mut record: Record) -> Letter {
    let ours = record.headers.split_off(2);
    let names: BTreeSet<_> = ours.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names.len(), ours.len(), "{names:?}");
    let header = |name: &str| {
        let found = ours.iter().find(|(key, _)| key == name)?;
        Some(String::from_utf8(found.1.clone().unwrap()).unwrap())
    };
    let number = |name: &str| header(name).unwrap().parse::<i64>().unwrap();
    let partition = i32::try_from(number("elmo.source.partition")).unwrap();
    let label = header("elmo.error.label").unwrap();
    let error = header("elmo.error").unwrap();
    let reason = KINDS.iter().find(|kind| error.starts_with(kind.reason)).unwrap_or_else(|| panic!("{error}")).reason;
    (
        (header("elmo.source.topic").unwrap(), partition, number("elmo.source.offset")),
        Some(number("elmo.source.timestamp")),
        record.key,
        record.value,
        record.headers,
        (label, reason.to_owned()),
        header("elmo.dropped").is_some(),
    )
}

/// What the footers count.
fn rejected(dataset: &Dataset) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::new();
    for (key, value) in dataset.objects.iter().flat_map(|object| &object.footer) {
        if let Some(label) = key.strip_prefix("stream.rejected.") {
            *sums.entry(label.to_owned()).or_default() += value.parse::<u64>().unwrap();
        }
    }
    sums
}

/// What the report counts.
fn reported(done: &Output) -> BTreeMap<String, u64> {
    assert!(done.status.success(), "{:?}: {}", done.status, String::from_utf8_lossy(&done.stderr));
    let report: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    serde_json::from_value(report["rejected"].clone()).unwrap()
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn one_bad_message_in_a_hundred_is_where_it_belongs() {
    let case = Case::new(if is_long() { 100_000 } else { 20_000 });
    thread::scope(|scope| {
        scope.spawn(|| case.check_null());
        scope.spawn(|| case.check_letters());
    });
}

/// Messages for a topic that takes 4,000 bytes. One with a text of 3,000 bytes and a vector of 64 numbers is too large, and
/// fits without the vector; one with a text of 3,900 bytes does not fit at all, because its other columns take more than 100.
struct Large {
    broker: Broker,
    source: Topic,
    target: Topic,
    letters: Topic,
}

impl Large {
    const COUNT: usize = 1000;

    fn new() -> Self {
        let broker = Broker::shared();
        let (source, letters) = (broker.topic("large", 1), broker.topic("large-letters", 1));
        let target = broker.topic_with("large-out", 1, &[("max.message.bytes", "4000")]);
        broker.produce(&source, (0..Self::COUNT).map(|n| Record::new(0, Self::text(n))).collect());
        Self { broker, source, target, letters }
    }

    /// One message in a hundred is too large, in one of two ways.
    fn length(n: usize) -> Option<usize> {
        match n % 200 {
            50 => Some(3000),
            150 => Some(3900),
            _ => None,
        }
    }

    fn text(n: usize) -> String {
        Self::length(n).map_or_else(|| format!("Message {n}."), |length| "y".repeat(length))
    }

    /// Runs the stream, which must report ten messages that are too large. Returns what it wrote.
    fn run(&self, policy: &str, words: &str) -> Vec<Record> {
        let group = format!("{}-{policy}", self.source.name);
        let stream = Stream::to_topic(ELMO, &self.broker, &self.source, &group, &self.target.name).with(words);
        let done = stream.with(&format!("--json --on-error {policy}")).once();
        assert_eq!(reported(&done), BTreeMap::from([("too_large".to_owned(), 10)]));
        let report: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
        let rows = if policy == "null" { Self::COUNT } else { Self::COUNT - 10 };
        assert_eq!((&report["messages"], &report["rows"]), (&Self::COUNT.into(), &rows.into()));
        self.broker.read(&self.target)
    }

    /// Messages without their vector, and with no value at all where that does not help.
    fn check_null(found: &[Record]) {
        assert_eq!(found.len(), Self::COUNT);
        for (n, record) in found.iter().enumerate() {
            let header =
                |name: &str| record.headers.iter().find(|(key, _)| key == name).and_then(|(_, v)| v.as_deref());
            assert_eq!(header("elmo.source.offset"), Some(n.to_string().as_bytes()));
            assert_eq!(header("elmo.error.label"), Self::length(n).map(|_| &b"too_large"[..]), "{n}");
            assert_eq!(header("elmo.dropped").is_some(), Self::length(n) == Some(3900), "{n}");
            if Self::length(n) == Some(3900) {
                assert_eq!(record.value.as_deref(), Some(&b""[..]));
                continue;
            }
            let value: serde_json::Value = serde_json::from_slice(record.value.as_deref().unwrap()).unwrap();
            assert_eq!(value["text"], Self::text(n));
            assert_eq!(value["embedding"].is_null(), Self::length(n).is_some(), "{n}");
            assert_eq!(value["error"].is_null(), Self::length(n).is_none(), "{n}");
        }
    }
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn messages_that_are_too_large_for_a_topic_are_handled_and_the_others_are_whole() {
    let null = || {
        let large = Large::new();
        Large::check_null(&large.run("null", ""));
    };
    let letters = || {
        let large = Large::new();
        let found = large.run("dead-letter", &format!("--dead-letter-topic {}", large.letters.name));
        assert_eq!(found.len(), Large::COUNT - 10);
        let letters: Vec<_> = large.broker.read(&large.letters).iter().map(|letter| letter.text().len()).collect();
        assert_eq!(letters, [3000, 3900].repeat(5));
    };
    thread::scope(|scope| {
        for run in [&null as &(dyn Fn() + Sync), &letters] {
            scope.spawn(run);
        }
    });
}

/// A schema registry that knows schema 1.
fn registry() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let fields = serde_json::json!([{ "name": "id", "type": "long" }, { "name": "text", "type": "string" }]);
    let schema = serde_json::json!({ "type": "record", "name": "Message", "fields": fields });
    let known = serde_json::json!({ "schema": schema.to_string() }).to_string();
    thread::spawn(move || {
        for mut client in listener.incoming().map_while(Result::ok) {
            let (mut bytes, mut part) = (Vec::new(), [0; 4096]);
            while !bytes.ends_with(b"\r\n\r\n") {
                match client.read(&mut part) {
                    Ok(n) if n > 0 => bytes.extend_from_slice(&part[..n]),
                    _ => break,
                }
            }
            let (status, body) = match bytes.starts_with(b"GET /schemas/ids/1 ") {
                true => ("200 OK", known.as_str()),
                false => ("404 Not Found", "{\"error_code\": 40403, \"message\": \"Schema not found\"}"),
            };
            let length = body.len();
            let head = format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n");
            let _ = client.write_all((head + body).as_bytes());
        }
    });
    url
}

/// A record of schema `id`: <https://avro.apache.org/docs/1.12.0/specification/#binary-encoding>, behind a zero byte and the
/// id. Numbers up to 63 take one byte, which is twice the number.
fn avro(id: u32, text: &str) -> Vec<u8> {
    let mut bytes = vec![0];
    bytes.extend(id.to_be_bytes());
    bytes.push(2 * 7);
    bytes.push(2 * u8::try_from(text.len()).unwrap());
    bytes.extend(text.as_bytes());
    bytes
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn bad_avro_is_where_it_belongs() {
    const COUNT: usize = 600;
    let broker = Broker::shared();
    let topic = broker.topic("avro", 1);
    let cut = |mut bytes: Vec<u8>| {
        bytes.pop();
        bytes
    };
    let bad: [(&str, Option<Vec<u8>>); 6] = [
        ("tombstone", None),
        ("unknown_schema", Some(avro(7, "of another schema"))),
        ("bad_avro", Some(cut(avro(1, "a text that is cut")))),
        ("bad_avro", Some(vec![0, 0, 0])),
        ("bad_avro", Some(b"not framed".to_vec())),
        // A string of Avro is UTF-8.
        ("bad_avro", Some([&avro(1, "")[..6], &[2 * 2, 0xff, 0xfe]].concat())),
    ];
    let kind = |n: usize| (n % 100 == 40).then(|| &bad[n / 100]);
    let value = |n: usize| kind(n).map_or_else(|| Some(avro(1, &format!("Message {n}."))), |(_, value)| value.clone());
    let written = broker.produce(&topic, (0..COUNT).map(|n| Record { value: value(n), ..Record::default() }).collect());
    let folder = tempfile::tempdir().unwrap();
    let stream = Stream::bare(ELMO, &broker, &topic, &topic.name, folder.path().to_str().unwrap());
    let registry = registry();
    let stream = stream.with("--model tiny --threads 1 --json --format avro --columns id=/id:int64");
    let stream = stream.with(&format!("--schema-registry {registry}"));
    let mut expected = BTreeMap::<String, u64>::new();
    bad.iter().for_each(|(label, _)| *expected.entry((*label).to_owned()).or_default() += 1);
    assert_eq!(reported(&stream.once()), expected);
    let dataset = stream.dataset();
    dataset.check_offsets(&topic.name, written.iter().map(|record| (record.partition, record.offset)));
    assert_eq!(rejected(&dataset), expected);
    let errors = dataset.strings("error");
    let table = dataset.table();
    let vectors = table.column_by_name("embedding").unwrap();
    for (n, error) in errors.iter().enumerate() {
        assert_eq!((error.is_some(), vectors.is_null(n)), (kind(n).is_some(), kind(n).is_some()), "{n}: {error:?}");
    }
}

/// Texts that the model refuses for their size, and one that is longer than `--max-text` by default.
#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn texts_that_cannot_be_embedded_are_where_they_belong() {
    let broker = Broker::shared();
    let topic = broker.topic_with("huge", 1, &[("max.message.bytes", "20000000")]);
    let producer: ThreadedProducer<_> = broker.client().set("message.max.bytes", "20000000").create().unwrap();
    // 9 MiB is above the 8 MiB of one sentence; 400,000 tokens of 3 layers of 64 numbers take 293 MiB, above 256 MiB.
    let texts = ["Before.".to_owned(), "a".repeat(9 << 20), "a ".repeat(400_000), "After.".to_owned()];
    for text in &texts {
        producer.send(BaseRecord::<(), str>::to(&topic.name).payload(text)).map_err(|(e, _)| e).unwrap();
    }
    producer.flush(Duration::from_secs(60)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, words: &str, expected: [(&str, u64); 2]| {
        let output = folder.path().join(name);
        let group = format!("{}-{name}", topic.name);
        let stream = Stream::new(ELMO, &broker, &topic, &group, output.to_str().unwrap());
        let stream = stream.with("--json --level token --layers all --sentences off --drop-text").with(words);
        assert_eq!(reported(&stream.once()), expected.map(|(label, count)| (label.to_owned(), count)).into());
        stream.dataset().check_offsets(&topic.name, (0..4).map(|offset| (0, offset)));
    };
    run("default", "", [("text_too_large", 1), ("vectors_too_large", 1)]);
    run("larger", "--max-text 16MB", [("sentence_too_large", 1), ("vectors_too_large", 1)]);
}
