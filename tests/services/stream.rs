//! `elmo stream` against a real broker: crashes at every point, kills, two streams by mistake, transactions, bad messages,
//! TLS, metrics. The check is always the same: every offset in the output once, files whole, rows equal to those of an
//! undisturbed run.

use std::{collections::BTreeMap, fs, thread, time::Duration};

use super::{
    broker::{self, Broker, Record, Topic},
    dataset::Dataset,
    streaming::{self, Stream, kill},
};

const ELMO: &str = env!("CARGO_BIN_EXE_elmo");

fn offsets(written: &[Record]) -> Vec<(i32, i64)> {
    written.iter().map(|record| (record.partition, record.offset)).collect()
}

/// A topic with `count` texts, and a folder for the output.
struct Case {
    broker: Broker,
    topic: Topic,
    written: Vec<Record>,
    folder: tempfile::TempDir,
}

impl Case {
    fn new(name: &str, partitions: i32, count: usize) -> Self {
        let broker = Broker::shared();
        let topic = broker.topic(name, partitions);
        let written = broker.produce(&topic, broker::texts(count, partitions));
        Self { broker, topic, written, folder: tempfile::tempdir().unwrap() }
    }

    fn output(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    /// A stream of the topic; its group has the name of the output.
    fn stream(&self, name: &str) -> Stream {
        self.stream_of(name, name)
    }

    /// A stream of a group. The broker forgets members that were killed after a second.
    fn stream_of(&self, group: &str, name: &str) -> Stream {
        let group = format!("{}-{group}", self.topic.name);
        let stream = Stream::new(ELMO, &self.broker, &self.topic, &group, &self.output(name));
        stream.with("-X session.timeout.ms=1000 -X heartbeat.interval.ms=300")
    }

    fn check(&self, dataset: &Dataset) {
        dataset.check_offsets(&self.topic.name, offsets(&self.written));
    }

    /// What a run that nothing disturbs writes.
    fn undisturbed(&self) -> Dataset {
        let stream = self.stream("undisturbed");
        stream.drain();
        stream.dataset()
    }
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_stream_continues_where_its_output_ends() {
    let mut case = Case::new("continues", 3, 200);
    let stream = case.stream("out").with("--rows-per-file 40");
    stream.drain();
    case.check(&stream.dataset());
    let files = stream.dataset().objects.len();
    // Nothing new: nothing is written.
    stream.drain();
    assert_eq!(stream.dataset().objects.len(), files);
    let more = case.broker.produce(&case.topic, broker::texts(50, 3));
    case.written.extend(more);
    stream.drain();
    case.check(&stream.dataset());
    // The group's offsets are lost: the output alone tells where it ends.
    let other = case.stream_of("another", "out").with("--rows-per-file 40");
    other.drain();
    case.check(&stream.dataset());
    // Partitions that are added later begin at their first message, also if new streams begin at the end.
    let mut topic = case.topic.clone();
    case.broker.grow(&mut topic, 4);
    let record = Record::new(3, "A message of a new partition.");
    case.written.extend(case.broker.produce(&topic, vec![record]));
    let stream = case.stream("out").with("--start latest");
    broker::eventually("the new partition is read", || {
        stream.drain();
        stream.dataset().chains().len() == 4
    });
    case.check(&stream.dataset());
}

/// Every named point, with SIGABRT, after some passes. Then the same command reads to the end.
#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_crash_at_any_point_loses_and_doubles_nothing() {
    let case = Case::new("crashes", 2, 120);
    let undisturbed = case.undisturbed();
    let points = [
        ("at_start", 0),
        ("after_poll", 1),
        ("after_decode", 1),
        ("in_embed", 1),
        ("before_write", 1),
        ("before_put", 1),
        ("after_put", 1),
        ("before_hint", 1),
        ("after_hint", 1),
        ("in_drain", 0),
    ];
    let run = |(point, passes): (&str, usize)| {
        // Small files and few messages at a time, so that each point is passed several times.
        let small = "--rows-per-file 10 -X max.partition.fetch.bytes=2000 -X fetch.message.max.bytes=2000";
        let stream = case.stream(point).with(small);
        let mut command = stream.command();
        command.arg("--once").env("FAILPOINTS", format!("stream.{point}={passes}*off->return"));
        let crashed = command.output().unwrap();
        assert_eq!(crashed.status.code(), None, "{point}: {}", String::from_utf8_lossy(&crashed.stderr));
        stream.drain();
        case.check(&stream.dataset());
        stream.dataset().assert_same_rows(&undisturbed);
    };
    thread::scope(|scope| {
        for half in points.chunks(points.len() / 2) {
            scope.spawn(move || half.iter().copied().for_each(run));
        }
    });
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn kills_and_a_second_stream_by_mistake_lose_and_double_nothing() {
    let case = Case::new("killed", 4, 2000);
    let undisturbed = case.undisturbed();
    let stream = |group: &str| case.stream_of(group, "out").with("--rows-per-file 50 --max-age 1s");
    // Two groups write one output: each believes that all partitions are its own.
    let (ours, mistake) = (stream("ours"), stream("mistake"));
    for millis in [900, 1400, 2100] {
        let (first, second) = (ours.start(), mistake.start());
        thread::sleep(Duration::from_millis(millis));
        kill(first);
        thread::sleep(Duration::from_millis(300));
        kill(second);
    }
    ours.drain();
    case.check(&ours.dataset());
    ours.dataset().assert_same_rows(&undisturbed);
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn members_of_a_group_share_partitions_and_a_signal_ends_them_in_order() {
    let case = Case::new("shared", 6, 600);
    let stream = case.stream("out").with("--rows-per-file 20 --max-age 1s");
    let mut members: Vec<_> = (0..3).map(|_| stream.start()).collect();
    broker::eventually("everything is written", || stream.dataset().table_rows() == 600);
    for member in &mut members {
        // SAFETY: the process is a child of this one, and not yet waited for.
        unsafe { libc::kill(i32::try_from(member.child.id()).unwrap(), libc::SIGTERM) };
    }
    for member in &mut members {
        assert_eq!(member.wait(), Some(0), "{}", member.stderr());
    }
    case.check(&stream.dataset());
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_member_without_partitions_is_ready_and_ends() {
    let case = Case::new("idle", 1, 20);
    let stream = case.stream("out");
    let ended: Vec<_> = thread::scope(|scope| {
        let members: Vec<_> = (0..2).map(|_| scope.spawn(|| stream.once())).collect();
        members.into_iter().map(|member| member.join().unwrap()).collect()
    });
    for done in ended {
        assert!(done.status.success(), "{:?}: {}", done.status, String::from_utf8_lossy(&done.stderr));
    }
    case.check(&stream.dataset());
}

/// By hand: of 60 messages, 6 are bad in 6 ways.
#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn bad_messages_are_counted_and_never_stop_a_stream_unless_asked() {
    let broker = Broker::shared();
    let topic = broker.topic("poison", 1);
    let letters = broker.topic("poison-letters", 1);
    let mut records = broker::json_texts(60, 1);
    let bad: [(usize, Option<&[u8]>, &str); 6] = [
        (3, None, "tombstone"),
        (9, Some(b"{\"body\": \"\xff\"}"), "not_utf8"),
        (20, Some(b"{\"body\": "), "bad_json"),
        (21, Some(b"{\"title\": \"none\"}"), "no_text"),
        (40, Some(b"{\"body\": 7, \"id\": {}}"), "wrong_type"),
        (59, Some(b"[]"), "no_text"),
    ];
    for (row, value, _) in &bad {
        records[*row].value = value.map(<[u8]>::to_vec);
    }
    let written = broker.produce(&topic, records);
    let folder = tempfile::tempdir().unwrap();
    let stream = |policy: &str| {
        let output = folder.path().join(policy);
        let group = format!("poison-{policy}-{}", topic.name);
        let json = "--model tiny --threads 1 --format json --text-path /body --columns id=/id:int64 --json";
        Stream::bare(ELMO, &broker, &topic, &group, output.to_str().unwrap()).with(json)
    };
    let counts = |output: &std::process::Output| -> BTreeMap<String, u64> {
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        serde_json::from_value(report["rejected"].clone()).unwrap()
    };
    let null = stream("null");
    let done = null.once();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let mut expected = BTreeMap::<String, u64>::new();
    bad.iter().for_each(|(_, _, label)| *expected.entry((*label).to_owned()).or_default() += 1);
    assert_eq!(counts(&done), expected);
    null.dataset().check_offsets(&topic.name, offsets(&written));
    let errors = null.dataset().strings("error");
    let rows: Vec<usize> = errors.iter().enumerate().filter(|(_, e)| e.is_some()).map(|(row, _)| row).collect();
    assert_eq!(rows, bad.map(|(row, ..)| row));

    let good: Vec<_> =
        offsets(&written).into_iter().filter(|(_, o)| !bad.iter().any(|(row, ..)| *row as i64 == *o)).collect();
    let skip = stream("skip").with("--on-error skip");
    assert_eq!(counts(&skip.once()), expected);
    skip.dataset().check_rows(&topic.name, &good);

    let dead = stream("dead").with(&format!("--on-error dead-letter --dead-letter-topic {}", letters.name));
    assert_eq!(counts(&dead.once()), expected);
    dead.dataset().check_rows(&topic.name, &good);
    let read = broker.read(&letters);
    let header = |record: &Record, name: &str| {
        let found = record.headers.iter().find(|(key, _)| key == name).unwrap();
        String::from_utf8(found.1.clone().unwrap()).unwrap()
    };
    let seen: Vec<_> = read
        .iter()
        .map(|r| (header(r, "elmo.source.offset"), r.value.clone(), header(r, "elmo.error.label")))
        .collect();
    let wanted: Vec<_> = bad
        .iter()
        .map(|(row, value, label)| (row.to_string(), value.map(<[u8]>::to_vec), (*label).to_owned()))
        .collect();
    assert_eq!(seen, wanted);

    let fail = stream("fail").with("--on-error fail").once();
    assert_eq!(fail.status.code(), Some(3));
    let message = String::from_utf8_lossy(&fail.stderr).into_owned();
    assert!(message.contains(&format!("{}[0] at offset 3", topic.name)) && message.contains("tombstone"), "{message}");
    let before: Vec<_> = offsets(&written).into_iter().take(3).collect();
    stream("fail").dataset().check_rows(&topic.name, &before);
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn enriched_messages_are_seen_once_whatever_is_killed() {
    let case = Case::new("enriched", 2, 800);
    let target = case.broker.topic("enriched-out", 2);
    let group = format!("{}-transactions", case.topic.name);
    let stream = Stream::to_topic(ELMO, &case.broker, &case.topic, &group, &target.name)
        .with("--max-wait 50ms -X transaction.timeout.ms=3000 -X session.timeout.ms=1000 -X heartbeat.interval.ms=300");
    for millis in [800, 1300, 1900] {
        let node = stream.start();
        thread::sleep(Duration::from_millis(millis));
        kill(node);
    }
    stream.drain();
    let mut seen: Vec<(i32, i64)> = case
        .broker
        .read(&target)
        .iter()
        .map(|record| {
            let value: serde_json::Value = serde_json::from_slice(record.value.as_deref().unwrap()).unwrap();
            assert_eq!(value["embedding"].as_array().map(Vec::len), Some(64), "{value}");
            assert!(value["text"].is_string());
            let number = |name: &str| value[name].as_i64().unwrap();
            (i32::try_from(number("_partition")).unwrap(), number("_offset"))
        })
        .collect();
    seen.sort_unstable();
    let mut wanted = offsets(&case.written);
    wanted.sort_unstable();
    assert_eq!(seen, wanted);
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn tls_and_passwords_work_and_what_is_wrong_is_named() {
    let case = Case::new("tls", 1, 30);
    let secured = Broker::secured(&[]);
    let stream = |changed: &[(&str, &str)]| {
        let settings: BTreeMap<_, _> = broker::secured_settings()
            .into_iter()
            .chain(changed.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())))
            .collect();
        let file = case.folder.path().join("secrets.properties");
        let lines: String = settings.iter().map(|(key, value)| format!("{key}={value}\n")).collect();
        fs::write(&file, lines).unwrap();
        let group = format!("{}-tls", case.topic.name);
        let stream = Stream::new(ELMO, &secured, &case.topic, &group, &case.output("out"));
        stream.with(&format!("--kafka-secrets {}", file.display()))
    };
    let wrong = [("sasl.password", "a wrong one"), ("ssl.ca.location", &broker::wrong_ca())];
    for (key, value) in wrong {
        let refused = stream(&[(key, value)]).once();
        let message = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(5), "{message}");
        assert!(message.contains(key) && !message.contains("a wrong one"), "{message}");
    }
    let right = stream(&[]);
    right.drain();
    case.check(&right.dataset());
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn metrics_and_health_are_served() {
    let case = Case::new("metrics", 2, 100);
    let mut node = case.stream("out").with("--metrics 127.0.0.1:0 --max-age 500ms -v").start();
    node.wait_for("metrics");
    let line = node.stderr();
    let address = line.split("address=").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
    broker::eventually("all rows are counted", || {
        streaming::metric(&address, "elmo_stream_rows_total", "outcome=\"embedded\"") == 100.0
    });
    assert_eq!(streaming::get(&address, "/livez").0, 200);
    assert_eq!(streaming::get(&address, "/readyz").0, 200);
    kill(node);
}

#[test]
#[ignore = "needs the servers that scripts/services starts, so Java 17 and Maven"]
fn a_stream_into_a_store_is_found_by_status() {
    let case = Case::new("stored", 2, 100);
    let output = format!("s3://elmo-test/{}", case.topic.name);
    let group = format!("{}-s3", case.topic.name);
    let stream = Stream::new(ELMO, &case.broker, &case.topic, &group, &output).with("--rows-per-file 20");
    stream.drain();
    case.check(&stream.dataset());
    let status = std::process::Command::new(ELMO)
        .args(["stream", "status", "--json", "--output", &output, "--brokers", &case.broker.address, "--group", &group])
        .output()
        .unwrap();
    assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
    let found: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    for partition in found["partitions"].as_array().unwrap() {
        assert_eq!((&partition["end"], &partition["lag"]), (&50.into(), &0.into()), "{partition}");
        assert_eq!(partition["hint"], "agrees", "{partition}");
    }
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn what_cannot_work_is_refused_at_the_start() {
    let case = Case::new("refused", 1, 10);
    case.stream("out").drain();
    let refused = |stream: Stream, code: i32, words: &[&str]| {
        let done = stream.once();
        let message = String::from_utf8_lossy(&done.stderr).into_owned();
        assert_eq!(done.status.code(), Some(code), "{message}");
        words.iter().for_each(|word| assert!(message.contains(word), "{word}: {message}"));
    };
    refused(case.stream("out").with("--pooling max"), 2, &["pooling"]);
    refused(case.stream("other").with("--topic no-such-topic"), 5, &["no-such-topic"]);
    refused(case.stream("other").with("-X enable.auto.commit=true"), 2, &["enable.auto.commit"]);
    refused(case.stream("other").with("-X no.such.setting=1"), 2, &["no.such.setting"]);
    refused(case.stream("other").with("--on-error dead-letter"), 2, &["--dead-letter-topic"]);
    refused(case.stream("other").with("--state carry --batch-rows 4"), 2, &["carry"]);
    let group = format!("{}-missing", case.topic.name);
    let missing = Stream::to_topic(ELMO, &case.broker, &case.topic, &group, "no-such-output");
    refused(missing, 5, &["no-such-output"]);
    let plan = case.stream("other").with("--dry-run").once();
    assert!(plan.status.success() && String::from_utf8_lossy(&plan.stdout).contains("10 messages"));
    assert!(!case.folder.path().join("other/topic=refused").exists());
}
