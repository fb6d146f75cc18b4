//! What a real broker refuses: permissions, found before the group is joined, and messages, which take the path for errors.

use std::collections::BTreeMap;

use super::{
    broker::{self, Broker, Record, Topic},
    streaming::Stream,
};

const ELMO: &str = env!("CARGO_BIN_EXE_elmo");

/// Texts of `topic` into `target`; vectors as numbers.
fn stream(broker: &Broker, topic: &Topic, target: &Topic, name: &str) -> Stream {
    let group = format!("{}-{name}", topic.name);
    Stream::to_topic(ELMO, broker, topic, &group, &target.name).with("--encoding raw")
}

fn header(record: &Record, name: &str) -> Option<String> {
    let found = record.headers.iter().rfind(|(key, _)| key == name)?;
    // A header without a value stands for NULL.
    Some(String::from_utf8(found.1.clone()?).unwrap())
}

/// The offsets that messages stand for, with their reasons and whether they have vectors.
fn seen(broker: &Broker, target: &Topic) -> BTreeMap<i64, (Option<String>, bool)> {
    let row = |record: &Record| {
        let offset = header(record, "elmo.source.offset").unwrap().parse().unwrap();
        (offset, (header(record, "elmo.error"), record.value.as_ref().is_some_and(|value| value.len() == 256)))
    };
    let read = broker.read(target);
    let seen: BTreeMap<_, _> = read.iter().map(row).collect();
    assert_eq!(seen.len(), read.len(), "a message is there twice");
    seen
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn permissions_that_are_missing_are_named_before_the_group_is_joined() {
    let (shared, secured) = (Broker::shared(), Broker::secured(&[]));
    let [topic, target, letters] = ["allowed", "denied-out", "denied-letters"].map(|name| shared.topic(name, 1));
    shared.produce(&topic, broker::texts(3, 1));
    [&target, &letters].into_iter().for_each(|topic| shared.deny(topic, "Write"));
    let folder = tempfile::tempdir().unwrap();
    let secrets = folder.path().join("secrets.properties");
    let lines: String = broker::secured_settings().into_iter().map(|(key, value)| format!("{key}={value}\n")).collect();
    std::fs::write(&secrets, lines).unwrap();
    let secrets = format!("--kafka-secrets {}", secrets.display());
    let refused = |stream: Stream, words: [&str; 2]| {
        for dry in ["--dry-run", "--once"] {
            let done = stream.command().args([dry, "--json"]).output().unwrap();
            let message = String::from_utf8_lossy(&done.stderr).into_owned();
            assert_eq!(done.status.code(), Some(5), "{message}");
            words.into_iter().for_each(|word| assert!(message.contains(word), "{word}: {message}"));
        }
    };
    let output = folder.path().join("out");
    let files = |group: &str| Stream::new(ELMO, &secured, &topic, group, output.to_str().unwrap()).with(&secrets);
    let own = format!("{}-files", topic.name);
    refused(stream(&secured, &topic, &target, "topic").with(&secrets), [&target.name, "grant WRITE"]);
    let to_letters = format!("--on-error dead-letter --dead-letter-topic {}", letters.name);
    refused(files(&own).with(&to_letters), [&letters.name, "grant WRITE"]);
    refused(
        files(&own).with("--on-error dead-letter --dead-letter-topic no-such-letters"),
        ["no-such-letters", "create"],
    );
    let denied = format!("{}-denied", topic.name);
    shared.deny_group(&denied, "Read");
    refused(files(&denied), [&denied, "group"]);
    assert!(!output.exists(), "nothing was begun");
    files(&own).drain();
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_stream_that_reads_what_it_writes_is_refused() {
    let broker = Broker::shared();
    let topic = broker.topic("circle", 1);
    let refused = |stream: Stream| {
        let done = stream.once();
        let message = String::from_utf8_lossy(&done.stderr).into_owned();
        assert_eq!(done.status.code(), Some(2), "{message}");
        assert!(message.contains("is read and written"), "{message}");
    };
    refused(stream(&broker, &topic, &topic, "itself"));
    let other = Topic { name: "^circle-.*".to_owned(), ..topic.clone() };
    refused(stream(&broker, &other, &topic, "pattern"));
}

/// A broker takes no message of a compacted topic without a key, and none whose time is an hour ahead. It names them, so that
/// the others of their batches are written as they are.
#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn messages_that_the_broker_refuses_are_handled_as_errors() {
    let broker = Broker::shared();
    let topic = broker.topic_with("odd", 1, &[("message.timestamp.after.max.ms", "9223372036854775807")]);
    let mut records = broker::texts(60, 1);
    for (row, record) in records.iter_mut().enumerate() {
        record.key = (row % 20 != 7).then(|| row.to_string().into_bytes());
    }
    let in_a_year =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() + 31_536_000_000;
    records[50].timestamp = Some(i64::try_from(in_a_year).unwrap());
    broker.produce(&topic, records);
    let without_key = [7, 27, 47];
    let all = |without: &[i64]| (0..60).filter(|offset| !without.contains(offset)).collect::<Vec<i64>>();

    // The time may be left out.
    let target = broker.topic("odd-times", 1);
    stream(&broker, &topic, &target, "times").drain();
    let found = seen(&broker, &target);
    assert_eq!(found.keys().copied().collect::<Vec<_>>(), all(&[]));
    let odd: Vec<i64> = found.iter().filter(|(_, (_, vector))| !vector).map(|(offset, _)| *offset).collect();
    assert_eq!(odd, [50]);
    assert!(found[&50].0.as_ref().is_some_and(|reason| reason.contains("Invalid")), "{:?}", found[&50]);

    // The key may not.
    let compacted = || broker.topic_with("odd-keys", 1, &[("cleanup.policy", "compact")]);
    let target = compacted();
    stream(&broker, &topic, &target, "skip").with("--on-error skip").drain();
    let mut left_out = without_key.to_vec();
    left_out.push(50);
    assert_eq!(seen(&broker, &target).into_keys().collect::<Vec<_>>(), all(&left_out));

    let letters = broker.topic("odd-letters", 1);
    let to_letters = format!("--on-error dead-letter --dead-letter-topic {}", letters.name);
    let target = compacted();
    stream(&broker, &topic, &target, "letters").with(&to_letters).drain();
    assert_eq!(seen(&broker, &target).into_keys().collect::<Vec<_>>(), all(&left_out));
    let offset = |record: &Record| header(record, "elmo.source.offset").unwrap().parse::<i64>().unwrap();
    let mut dead: Vec<i64> = broker.read(&letters).iter().map(offset).collect();
    dead.sort_unstable();
    assert_eq!(dead, left_out);

    let target = compacted();
    let fail = stream(&broker, &topic, &target, "fail").with("--on-error fail").once();
    let message = String::from_utf8_lossy(&fail.stderr).into_owned();
    assert_eq!(fail.status.code(), Some(3), "{message}");
    assert!(message.contains(&format!("{}[0] at offset 7", topic.name)), "{message}");
    assert_eq!(seen(&broker, &target).into_keys().collect::<Vec<_>>(), (0..7).collect::<Vec<_>>());

    // A row without its vector has no key either.
    let null = stream(&broker, &topic, &compacted(), "null").once();
    let message = String::from_utf8_lossy(&null.stderr).into_owned();
    assert_eq!(null.status.code(), Some(5), "{message}");
    assert!(message.contains("at offset 7") && message.contains("compacted"), "{message}");
}

/// The limit of a topic is one of batches. 200 messages of some hundred bytes are far above it together.
#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn batches_that_are_too_large_lose_no_vector() {
    let broker = Broker::shared();
    let topic = broker.topic("many", 1);
    broker.produce(&topic, broker::texts(200, 1));
    let target = broker.topic_with("many-small", 1, &[("max.message.bytes", "2500")]);
    stream(&broker, &topic, &target, "small").drain();
    let found = seen(&broker, &target);
    assert_eq!(found.len(), 200);
    let without: Vec<_> = found.iter().filter(|(_, (_, vector))| !vector).collect();
    assert!(without.is_empty(), "{without:?}");
}
