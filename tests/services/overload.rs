//! A topic that is always ahead of the model: memory stays flat, for as long as it lasts.
//!
//! `ELMO_TEST_SECONDS` says how long; with `ELMO_TEST_LONG=1` it is ten minutes.

use std::{
    env,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use super::{
    broker::{self, Broker, Record},
    dataset::Dataset,
    running::{Running, is_long},
    streaming::Stream,
};
use crate::without_settings;

const ELMO: &str = env!("CARGO_BIN_EXE_elmo");

/// `--memory-limit` in MiB.
const LIMIT: u64 = 8;
/// Messages that are always waiting: 60 MB of long texts, or twice that with the columns that are made of them.
const AHEAD: usize = 60_000;
/// Bytes of a text. Only its beginning is computed.
const TEXT: usize = 1000;

fn time() -> Duration {
    let given = env::var("ELMO_TEST_SECONDS").ok().map(|seconds| seconds.parse().unwrap());
    Duration::from_secs(given.unwrap_or(if is_long() { 600 } else { 12 }))
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn memory_is_flat_while_the_topic_is_ahead() {
    let (broker, time) = (Broker::shared(), time());
    // What was read is deleted, so that a long run does not fill the disk.
    let settings = [("segment.bytes", "16777216"), ("file.delete.delay.ms", "1000")];
    let topic = broker.topic_with("overload", 4, &settings);
    let mut written = 0;
    let mut produce = |count: usize| {
        let text = |n: usize| format!("{:.<TEXT$}", broker::text(n));
        let record = |n: usize| Record::new(i32::try_from(n % 4).unwrap(), text(n));
        broker.produce(&topic, (written..written + count).map(record).collect());
        written += count;
        written
    };
    // What memory may grow after a quarter of the time. A process needs a minute until libtorch and the allocator have what they
    // keep; without a limit, the messages that are waiting would take 120 MiB.
    let room = if time < Duration::from_secs(120) { 60 } else { LIMIT + 32 };
    let mut total = produce(AHEAD);
    let folder = tempfile::tempdir().unwrap();
    let stream = Stream::new(ELMO, &broker, &topic, &topic.name, folder.path().to_str().unwrap())
        .with(&format!("--memory-limit {LIMIT}MB --word-cache-mb 8 --metrics 127.0.0.1:0 -v"))
        .with("--sentences off --max-tokens 20 --on-long truncate --rows-per-file 20000 --max-age 10s");
    let mut running = Running::start(&stream);
    running.wait("rows come", Duration::from_secs(60), |stream| stream.metric("elmo_stream_rows_total") > 0.0);
    let began = Instant::now();
    let (mut settled, mut most, mut minute, mut paused) = (0, 0, 0, false);
    while began.elapsed() < time {
        let rows = running.metric("elmo_stream_rows_total");
        if (total as f64) < rows + AHEAD as f64 {
            total = produce(AHEAD / 10);
        }
        let memory = running.memory() >> 20;
        if began.elapsed() < time / 4 {
            settled = settled.max(memory);
        }
        most = most.max(memory);
        paused |= running.metric("elmo_stream_paused_partitions") > 0.0;
        if began.elapsed().as_secs() / 60 >= minute {
            eprintln!("minute {minute}: {memory} MiB, {rows} rows, {total} messages");
            minute += 1;
            for (partition, (end, _)) in broker.committed(&topic.name, &topic) {
                broker.delete_below(&topic, partition, end);
            }
        }
        assert_eq!(running.node.child.try_wait().unwrap(), None, "{}", running.node.stderr());
        thread::sleep(Duration::from_millis(100));
    }
    let rows = running.metric("elmo_stream_rows_total");
    eprintln!("{rows} of {total} messages; memory at most {settled} MiB in the first quarter and {most} MiB in all");
    assert!(most <= settled + room, "from {settled} to {most} MiB");
    assert!(paused && rows < total as f64, "the topic was not ahead");
    running.node.signal("-TERM");
    assert_eq!(running.node.wait(), Some(0), "{}", running.node.stderr());
    // The files tile the offsets; their rows are counted by their footers.
    let mut inspect = without_settings(Command::new(ELMO));
    for (name, _) in env::vars().filter(|(name, _)| name.starts_with("ELMO_")) {
        inspect.env_remove(name);
    }
    let inspected = inspect.args(["inspect", "--json"]).arg(folder.path()).output().unwrap();
    let found = String::from_utf8_lossy(&inspected.stdout);
    assert!(inspected.status.success(), "{found}{}", String::from_utf8_lossy(&inspected.stderr));
    let found: serde_json::Value = serde_json::from_str(&found).unwrap();
    let (rows, files) = (found["rows"].as_i64().unwrap(), found["files"].as_i64().unwrap());
    eprintln!("{rows} rows in {files} files");
    // Partitions begin at 0, and no message is bad.
    assert_eq!(rows, Dataset::end(folder.path().to_str().unwrap()));
    assert!(rows / files >= 100, "{rows} rows in {files} files");
}

/// MiB that a process may have: a debug build of `elmo stream` with `tiny` takes about 300 with vectors of texts.
const WITH_TOKENS: u64 = 500;

/// By hand: a text has about 35 tokens of 768 bytes (three layers of 64 numbers), so that the 4,000 messages of a mebibyte,
/// which are read at once in each partition, have vectors of 108 MB, and those of four partitions 430 MB.
#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn vectors_of_tokens_fit_the_memory() {
    let broker = Broker::shared();
    let topic = broker.topic("tokens", 4);
    broker.produce(&topic, broker::texts(40_000, 4));
    let folder = tempfile::tempdir().unwrap();
    let stream = Stream::new(ELMO, &broker, &topic, &topic.name, folder.path().to_str().unwrap())
        .with(&format!("--memory-limit {LIMIT}MB --word-cache-mb 8 --metrics 127.0.0.1:0 -v"))
        .with("--level token --layers all --rows-per-file 200 --max-age 10s");
    let mut running = Running::start(&stream);
    let mut most = 0;
    let came = |running: &Running| running.metric("elmo_stream_rows_total") >= 2000.0;
    running.wait("rows come", Duration::from_secs(60), |running| {
        most = most.max(running.memory() >> 20);
        came(running)
    });
    eprintln!("memory at most {most} MiB");
    assert!(most <= WITH_TOKENS, "{most} MiB");
    running.node.signal("-TERM");
    assert_eq!(running.node.wait(), Some(0), "{}", running.node.stderr());
}
