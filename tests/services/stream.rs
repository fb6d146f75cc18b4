//! `elmo stream` against a real broker: kills, two streams by mistake, transactions, bad messages, TLS, metrics.

use std::{collections::BTreeMap, fs, net::TcpListener, process::Command, thread, time::Duration};

use elmo_pipelines::stream::metrics::METRICS;

use super::{
    broker::{self, Broker, Record},
    case::{Case, offsets},
    dataset::Dataset,
    streaming::{self, Stream, kill},
};
use crate::without_settings;

const ELMO: &str = env!("CARGO_BIN_EXE_elmo");

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
    // What a process leaves that is killed while it writes a file: no reader takes it for one.
    let left =
        case.folder.path().join(format!("out/topic={}/partition=0/.00000000000000009999.parquet#1", case.topic.name));
    fs::write(left, "PAR1 half").unwrap();
    assert_eq!(rows_by_pyarrow(&case.output("out")).unwrap_or(200), 200);
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

/// Rows of a folder as pyarrow reads it, which takes all files but those whose names begin with a dot or an underscore.
fn rows_by_pyarrow(folder: &str) -> Option<usize> {
    let python = std::env::var_os("ELMO_TEST_PYTHON")?;
    let script = "import sys, pyarrow.dataset as d; print(d.dataset(sys.argv[1], partitioning='hive').count_rows())";
    let read = Command::new(python).args(["-c", script, folder]).output().unwrap();
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    Some(String::from_utf8(read.stdout).unwrap().trim().parse().unwrap())
}

/// One message a second. A billion seconds after 1970 it was 2001-09-09T01:46:40Z.
#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_generation_begins_at_a_time_and_has_keys_and_headers() {
    let broker = Broker::shared();
    let topic = broker.topic_with("options", 1, &[("retention.ms", "-1")]);
    let record = |n: usize, text: Record| Record {
        timestamp: Some(1_000_000_000_000 + 1000 * n as i64),
        key: Some(format!("key {n}").into_bytes()),
        headers: vec![("trace".to_owned(), Some(n.to_string().into_bytes()))],
        ..text
    };
    let texts = broker::texts(40, 1);
    broker.produce(&topic, texts.into_iter().enumerate().map(|(n, text)| record(n, text)).collect());
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("out").to_str().unwrap().to_owned();
    let stream = |group: &str| Stream::new(ELMO, &broker, &topic, &format!("{}-{group}", topic.name), &output);
    stream("first").drain();
    // Only --idle publishes in time.
    let spill = folder.path().to_str().unwrap();
    let second = stream("second")
        .with("--generation 2 --start 2001-09-09T01:47:10Z --keep-key text --keep-headers")
        .with(&format!("--max-age 1h --idle 300ms --spill-dir {spill} --memory-limit 1MB"));
    let mut running = second.start();
    let generation = format!("{output}/generation=2");
    broker::eventually("the idle file is published", || Dataset::read(&generation).table_rows() == 10);
    running.signal("-TERM");
    assert_eq!(running.wait(), Some(0), "{}", running.stderr());
    let dataset = Dataset::read(&generation);
    dataset.check_rows(&topic.name, &(30..40).map(|offset| (0, offset)).collect::<Vec<_>>());
    let keys: Vec<_> = (30..40).map(|n| Some(format!("key {n}"))).collect();
    assert_eq!(dataset.strings("_key"), keys);
    assert!(dataset.table().column_by_name("_headers").is_some());
    assert_eq!(dataset.objects[0].footer["stream.generation"], "2");
    // The first one is as it was.
    assert_eq!(Dataset::read(&output).table_rows(), 40);
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn messages_that_are_gone_stop_a_stream_or_are_recorded() {
    let mut case = Case::new("gap", 1, 30);
    case.stream("out").drain();
    case.produce(30);
    case.broker.delete_below(&case.topic, 0, 40);
    let failed = |stream: Stream, words: [&str; 2]| {
        let done = stream.once();
        let message = String::from_utf8_lossy(&done.stderr).into_owned();
        assert_eq!(done.status.code(), Some(5), "{message}");
        words.into_iter().for_each(|word| assert!(message.contains(word), "{word}: {message}"));
    };
    failed(case.stream("out"), ["10 are lost", "--on-gap skip"]);
    case.stream("out").with("--on-gap skip").drain();
    let dataset = case.stream("out").dataset();
    case.check(&dataset);
    assert_eq!(dataset.objects.last().unwrap().footer["stream.gaps"], "30-40");
    // Deleted, and made again with fewer messages.
    case.broker.delete(&case.topic);
    case.broker.create(&case.topic, &[]);
    case.broker.produce(&case.topic, broker::texts(5, 1));
    failed(case.stream_of("again", "out"), ["it was created again", "--generation"]);
    // By now it is longer than the output.
    case.broker.produce(&case.topic, broker::texts(100, 1));
    failed(case.stream_of("again", "out"), ["it was created again", "--generation"]);
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
    let stream = case.stream_to("transactions", &target);
    for millis in [800, 1300, 1900] {
        let node = stream.start();
        thread::sleep(Duration::from_millis(millis));
        kill(node);
    }
    stream.drain();
    let seen = case.enriched(&target);
    for value in seen.values() {
        let value: serde_json::Value = serde_json::from_slice(value).unwrap();
        assert_eq!(value["embedding"].as_array().map(Vec::len), Some(64), "{value}");
        assert!(value["text"].is_string());
    }
    case.check_enriched(&seen, &case.undisturbed_messages());
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
    // A series with a reason appears with the first message that is rejected.
    case.broker.produce(&case.topic, vec![Record { value: None, ..Record::default() }]);
    let mut node = case.stream("out").with("--metrics 127.0.0.1:0 --max-age 500ms -v").start();
    let address = streaming::metrics_address(&mut node);
    let metric = |name: &str, labels: &str| streaming::metric(&address, &format!("elmo_stream_{name}"), labels);
    broker::eventually("all rows are counted", || {
        metric("rows_total", "outcome=\"embedded\"") == 100.0 && metric("rows_total", "outcome=\"null\"") == 1.0
    });
    assert_eq!(streaming::get(&address, "/livez").0, 200);
    assert_eq!(streaming::get(&address, "/readyz").0, 200);
    let shown = streaming::get(&address, "/metrics").1;
    for series in METRICS.iter().flat_map(|metric| metric.series()) {
        let is_shown = |line: &str| line.strip_prefix(&series).is_some_and(|rest| rest.starts_with(['{', ' ']));
        assert!(shown.lines().any(is_shown), "no {series} in\n{shown}");
    }
    // The work of the devices, and what the brokers have, are looked at now and then.
    broker::eventually("the work of the devices is counted", || metric("device_seconds_total", "") > 0.0);
    let (tokens, padded) = (metric("tokens_total", ""), metric("padded_tokens_total", ""));
    assert!(tokens > 0.0 && padded >= tokens, "{tokens} of {padded}");
    assert!(metric("objects_total", "") > 0.0);
    broker::eventually("nothing is left to read and to publish", || {
        metric("kafka_lag", "") == 0.0 && metric("chain_lag", "") == 0.0
    });
    kill(node);
}

/// A download that takes long must not make a supervisor restart the process, and not make it a member of the group.
#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_stream_that_loads_its_model_is_alive_and_not_ready() {
    let case = Case::new("loading", 1, 1);
    // Takes connections and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let model = format!("--model http://{}/model.zip --metrics 127.0.0.1:0 -v", silent.local_addr().unwrap());
    let group = format!("{}-loading", case.topic.name);
    let mut node = Stream::bare(ELMO, &case.broker, &case.topic, &group, &case.output("out")).with(&model).start();
    let address = streaming::metrics_address(&mut node);
    let (status, reason) = streaming::get(&address, "/readyz");
    assert_eq!((status, reason.trim()), (503, "the model is not loaded yet"));
    assert_eq!(streaming::get(&address, "/livez").0, 200);
    assert_eq!(case.broker.members(&group), 0);
    node.signal("-TERM");
    assert_eq!(node.child.wait().unwrap().code(), Some(0), "{}", node.stderr());
}

#[test]
#[ignore = "needs the servers that scripts/services starts, so Java 17 and Maven"]
fn a_stream_into_a_store_is_found_by_status() {
    let mut case = Case::new("stored", 2, 100);
    let output = format!("s3://elmo-test/{}", case.topic.name);
    let group = format!("{}-s3", case.topic.name);
    let stream = Stream::new(ELMO, &case.broker, &case.topic, &group, &output).with("--rows-per-file 20");
    stream.drain();
    case.check(&stream.dataset());
    let address = case.broker.address.clone();
    let words = ["stream", "status", "--json", "--output", &output, "--brokers", &address, "--group", &group];
    let run = || without_settings(Command::new(ELMO)).args(words).output().unwrap();
    let status = run();
    assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
    let found: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    for partition in found["partitions"].as_array().unwrap() {
        assert_eq!((&partition["end"], &partition["lag"]), (&50.into(), &0.into()), "{partition}");
        assert_eq!(partition["hint"], "agrees", "{partition}");
    }
    // The group's offsets are lost: another group has none.
    let lost = words.map(|word| if word == group { "nobody" } else { word });
    let status = without_settings(Command::new(ELMO)).args(lost).output().unwrap();
    assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
    let found: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    for partition in found["partitions"].as_array().unwrap() {
        assert_eq!((&partition["end"], &partition["hint"]), (&50.into(), &"absent".into()), "{partition}");
    }
    // What an operator sets names no file.
    case.broker.commit(&group, &case.topic, &[(0, 10), (1, 50)]);
    let status = run();
    assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
    let found: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    for partition in found["partitions"].as_array().unwrap() {
        assert_eq!((&partition["end"], &partition["hint"]["disagrees"]), (&50.into(), &"it names no object".into()));
    }
    // Five more in each partition.
    case.produce(10);
    let status = run();
    assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
    let found: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    for partition in found["partitions"].as_array().unwrap() {
        let ends = (&partition["end"], &partition["high_watermark"], &partition["lag"]);
        assert_eq!(ends, (&50.into(), &55.into(), &5.into()), "{partition}");
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
    refused(case.stream("other").with("-X statistics.interval.ms=0"), 2, &["statistics.interval.ms"]);
    refused(case.stream("other").with("--mb-per-file 4097"), 2, &["--mb-per-file"]);
    refused(case.stream("other").with("--spill-dir /no/such/folder"), 5, &["/no/such/folder", "--spill-dir"]);
    // More than the broker grants: it refuses each request to join.
    let long = "-X session.timeout.ms=3600000 -X max.poll.interval.ms=3600000";
    refused(case.stream("other").with(long), 5, &["session.timeout.ms", "group.max.session.timeout.ms"]);
    refused(case.stream("other").with("--on-error dead-letter"), 2, &["--dead-letter-topic"]);
    refused(case.stream("other").with("--state carry --batch-rows 4"), 2, &["carry"]);
    let carry = "--state carry --batch-rows 4 --sentences off --on-long truncate";
    refused(case.stream("other").with(carry), 2, &["depends on the messages before it", "--state zero"]);
    let group = format!("{}-missing", case.topic.name);
    let missing = Stream::to_topic(ELMO, &case.broker, &case.topic, &group, "no-such-output");
    refused(missing, 5, &["no-such-output"]);
    for words in [
        "--pooling max",
        "--format avro",
        "--start yesterday",
        "--columns a=/a:int64,a=/b:int64",
        "--on-error dead-letter",
    ] {
        let done = case.stream_of("wrong", "out").with(words).once();
        assert_eq!(done.status.code(), Some(2), "{words}: {}", String::from_utf8_lossy(&done.stderr));
    }
    let plan = case.stream("planned").with("--dry-run").once();
    let said = String::from_utf8_lossy(&plan.stdout);
    let group = format!("{}-planned", case.topic.name);
    let expected = ["10 messages", &group, "fingerprint: ", "precision: f32", "planned (begins)"];
    assert!(plan.status.success() && expected.iter().all(|word| said.contains(word)), "{said}");
    assert!(!case.folder.path().join("planned").exists());
    // Of these groups none was joined but the one whose broker refused that.
    for name in ["missing", "wrong", "planned"] {
        assert!(!case.broker.has_group(&format!("{}-{name}", case.topic.name)), "{name}");
    }
}
