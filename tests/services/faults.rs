//! A store that fails at 1, 10 and 50 % of the requests, that is gone, or that says nothing: no message is lost or doubled,
//! the process never ends by itself, memory stays flat, and a stop ends in time.
//!
//! With `ELMO_TEST_LONG=1` the same tests take minutes.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::{
    broker::{self, Broker, Record, Topic, needed},
    case,
    dataset::Dataset,
    proxy::{Proxy, Weather},
    running::{Running, is_long},
    streaming::{self, Stream, kill},
};

const ELMO: &str = env!("CARGO_BIN_EXE_elmo");

const PAUSED: &str = "elmo_stream_paused_partitions";
/// `--memory-limit` of the streams here.
const LIMIT: u64 = 2 << 20;
/// What a process may take more after all partitions are paused: the limit again, and room for the allocator.
const ROOM: u64 = LIMIT + (8 << 20);

/// A topic that grows, and the store that a stream of it writes to.
struct Case {
    broker: Broker,
    topic: Topic,
    proxy: Proxy,
    written: Vec<Record>,
}

impl Case {
    fn new(name: &str) -> Self {
        let broker = Broker::shared();
        let topic = broker.topic(name, 2);
        let proxy = Proxy::before(&needed("ELMO_TEST_S3_ENDPOINT"));
        Self { broker, topic, proxy, written: Vec::new() }
    }

    /// Adds `count` messages.
    fn produce(&mut self, count: usize) {
        let (from, partitions) = (self.written.len(), self.topic.partitions);
        let record = |n: usize| Record::new(i32::try_from(n).unwrap() % partitions, broker::text(n));
        self.written.extend(self.broker.produce(&self.topic, (from..from + count).map(record).collect()));
    }

    fn output(&self) -> String {
        format!("s3://elmo-test/{}", self.topic.name)
    }

    fn stream(&self) -> Stream {
        let stream = Stream::new(ELMO, &self.broker, &self.topic, &self.topic.name, &self.output());
        // A request that is never answered fails after a second instead of half a minute.
        stream
            .with("--rows-per-file 50 --max-age 1s --metrics 127.0.0.1:0 -v")
            .with(&format!("--memory-limit {}MB", LIMIT >> 20))
            .with("-X session.timeout.ms=6000")
            .with_env("AWS_ENDPOINT_URL", &self.proxy.url())
            .with_env("AWS_TIMEOUT", "1s")
    }

    /// Waits until everything is published.
    fn wait(&self, stream: &mut Running, patience: Duration) {
        stream.wait_for(&self.output(), self.written.len(), patience);
    }

    fn check(&self, dataset: &Dataset) {
        let offsets = self.written.iter().map(|record| (record.partition, record.offset));
        dataset.check_offsets(&self.topic.name, offsets);
    }
}

/// How long everything takes.
struct Times {
    /// Messages that are written at once.
    messages: usize,
    /// At each rate of failures.
    failing: Duration,
    away: Duration,
    patience: Duration,
}

impl Times {
    fn new() -> Self {
        let seconds = Duration::from_secs;
        match is_long() {
            false => Self { messages: 400, failing: Duration::ZERO, away: seconds(10), patience: seconds(60) },
            true => Self { messages: 2000, failing: seconds(120), away: seconds(1800), patience: seconds(600) },
        }
    }
}

#[test]
#[ignore = "needs the servers that scripts/services starts, so Java 17 and Maven"]
fn a_store_that_fails_or_is_gone_costs_no_message() {
    let (mut case, times) = (Case::new("faults"), Times::new());
    case.proxy.set(Weather::Fails(10));
    let mut stream = Running::start(&case.stream());
    for percent in [1, 10, 50] {
        case.proxy.set(Weather::Fails(percent));
        let until = Instant::now() + times.failing;
        loop {
            case.produce(times.messages);
            case.wait(&mut stream, times.patience);
            if Instant::now() >= until {
                break;
            }
        }
        assert!(case.proxy.failed() > 0, "nothing failed at {percent} %");
    }
    // A reply that was lost is found out, and counted.
    let lost = case.proxy.lost();
    assert!(lost > 0, "every reply came");
    // The file is there before its writer knows.
    stream.wait(&format!("{lost} replies are found out"), times.patience, |stream| {
        streaming::metric(&stream.metrics, "elmo_stream_publish_conflicts_total", "kind=\"own\"") >= lost as f64
    });

    away(&mut case, &mut stream, times.away);
    case.proxy.set(Weather::Fails(0));
    case.wait(&mut stream, times.patience);
    stream.wait("no partition is paused", times.patience, |stream| stream.metric(PAUSED) == 0.0);
    stream.node.signal("-TERM");
    assert_eq!(stream.node.wait(), Some(0), "{}", stream.node.stderr());

    let written = case.stream().dataset();
    case.check(&written);
    let folder = tempfile::tempdir().unwrap();
    let group = format!("{}-undisturbed", case.topic.name);
    let undisturbed = Stream::new(ELMO, &case.broker, &case.topic, &group, folder.path().to_str().unwrap());
    undisturbed.drain();
    written.assert_same_rows(&undisturbed.dataset());
}

/// Waits until messages are read, and their files are complete.
fn wait_until_read(stream: &mut Running, messages: f64) {
    stream
        .wait("all is read", Duration::from_secs(60), |stream| stream.metric("elmo_stream_messages_total") == messages);
    stream.wait("files wait", Duration::from_secs(60), |stream| stream.metric("elmo_stream_open_file_bytes") == 0.0);
}

/// The store is gone. More comes than memory has room for: all partitions are paused, and memory stays flat.
fn away(case: &mut Case, stream: &mut Running, time: Duration) {
    let began = Instant::now();
    case.proxy.set(Weather::Gone);
    // About 250 bytes each in memory without their vectors, so twice the limit.
    case.produce(16_000);
    let partitions = f64::from(case.topic.partitions);
    // Until everything that was read is computed and waits, they are resumed now and then.
    let (mut since, mut before) = (Instant::now(), Vec::new());
    stream.wait("all partitions are paused, and stay so", Duration::from_secs(60), |stream| {
        let now: Vec<f64> =
            ["elmo_stream_rows_total", "elmo_stream_messages_total", PAUSED].map(|m| stream.metric(m)).to_vec();
        if now != before || now[2] != partitions {
            since = Instant::now();
        }
        before = now;
        since.elapsed() > Duration::from_secs(3)
    });
    let (paused, mut most) = (stream.memory(), 0);
    while began.elapsed() < time || most == 0 {
        thread::sleep(Duration::from_millis(200));
        most = most.max(stream.memory());
        assert_eq!(streaming::get(&stream.metrics, "/livez").0, 200);
        assert_eq!(stream.node.child.try_wait().unwrap(), None, "{}", stream.node.stderr());
    }
    eprintln!("memory: {} MiB when paused, then at most {} MiB", paused >> 20, most >> 20);
    assert!(most < paused + ROOM, "from {paused} to {most} bytes while the store was gone");
    // Rows that are computed late give memory back, which resumes a partition for a moment.
    stream.wait("all partitions are paused", Duration::from_secs(60), |stream| stream.metric(PAUSED) == partitions);
    assert!(stream.metric("elmo_stream_messages_total") < case.written.len() as f64, "everything found room");
}

/// A disk on which nothing can be synced from some moment on ends the stream, and the offsets of a file that was not synced are not
/// committed: after a power failure the file may be gone.
#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn what_is_not_synced_is_not_committed() {
    let case = case::Case::new("unsynced", 1, 40);
    let undisturbed = case.undisturbed();
    let (mut with_files, mut passes) = (0, 0);
    loop {
        let name = format!("out-{passes}");
        let stream = case.stream(&name).with("--rows-per-file 10");
        let points = format!("stores.sync={passes}*off->return");
        let failed = stream.command().arg("--once").env("FAILPOINTS", &points).output().unwrap();
        if failed.status.success() {
            break;
        }
        let said = String::from_utf8_lossy(&failed.stderr);
        assert!(failed.status.code() == Some(5) && said.contains("the disk fails"), "{passes}: {said}");
        if let Some(newest) = stream.dataset().objects.iter().map(|object| object.offsets.start).max() {
            with_files += 1;
            let committed = case.broker.committed(&case.group(&name), &case.topic);
            let offset = committed.get(&0).map_or(0, |(offset, _)| *offset);
            assert!(offset <= newest, "{passes}: {offset} is committed, and the file from {newest} on is not synced");
        }
        stream.drain();
        case.check_same(&stream.dataset(), &undisturbed);
        passes += 2;
    }
    assert!(with_files > 1, "only {with_files} of {passes} failed while there were files");
}

/// Kubernetes kills 30 s after SIGTERM. The documentation promises 25 s, which a loaded machine may exceed.
#[test]
#[ignore = "needs the servers that scripts/services starts, so Java 17 and Maven"]
fn a_stop_ends_in_time_whatever_the_store_does() {
    let stop = |weather: Weather| {
        let mut case = Case::new("stopped");
        case.produce(300);
        let mut stream = Running::start(&case.stream());
        case.wait(&mut stream, Duration::from_secs(60));
        case.proxy.set(weather);
        case.produce(300);
        wait_until_read(&mut stream, 600.0);
        stream.node.signal("-TERM");
        let began = Instant::now();
        assert_eq!(stream.node.wait(), Some(130), "{}", stream.node.stderr());
        let took = began.elapsed();
        eprintln!("{weather:?}: stopped after {:.1} s", took.as_secs_f64());
        assert!(took < Duration::from_secs(30), "{took:?}");
        // What was not published is read again.
        case.proxy.set(Weather::Fails(0));
        case.stream().drain();
        case.check(&case.stream().dataset());
    };
    thread::scope(|scope| {
        for weather in [Weather::Gone, Weather::Silent, Weather::Denies] {
            scope.spawn(move || stop(weather));
        }
    });
}

/// The store says nothing from the start: the stream has joined no group, and has read nothing.
#[test]
#[ignore = "needs the servers that scripts/services starts, so Java 17 and Maven"]
fn a_stop_at_the_start_ends_in_time() {
    let mut case = Case::new("silent");
    case.produce(10);
    case.proxy.set(Weather::Silent);
    let mut stream = Running::start(&case.stream());
    stream.wait("the store is asked", Duration::from_secs(60), |_| case.proxy.failed() > 0);
    assert_eq!(streaming::get(&stream.metrics, "/readyz"), (503, "the output is not probed yet\n".to_owned()));
    stream.node.signal("-TERM");
    let began = Instant::now();
    assert_eq!(stream.node.wait(), Some(0), "{}", stream.node.stderr());
    assert!(stream.node.stderr().contains("nothing was read"), "{}", stream.node.stderr());
    let took = began.elapsed();
    eprintln!("stopped after {:.1} s", took.as_secs_f64());
    assert!(took < Duration::from_secs(25), "{took:?}");
    assert_eq!(case.broker.members(&case.topic.name), 0);
    case.proxy.set(Weather::Fails(0));
    case.stream().drain();
    case.check(&case.stream().dataset());
}

/// Requests to create files break in the middle. What the store has of them must never become a file.
#[test]
#[ignore = "needs the servers that scripts/services starts, so Java 17 and Maven"]
fn a_store_that_gets_half_of_a_file_has_none() {
    let mut case = Case::new("halves");
    case.produce(100);
    let mut stream = Running::start(&case.stream());
    case.wait(&mut stream, Duration::from_secs(60));
    case.proxy.set(Weather::Halves);
    let before = case.stream().dataset().objects.len();
    case.produce(200);
    wait_until_read(&mut stream, 300.0);
    let retries = |stream: &Running| case.proxy.failed() >= 6 && stream.node.stderr().contains("the store fails");
    stream.wait("several requests have broken", Duration::from_secs(120), retries);
    assert_eq!(case.stream().dataset().objects.len(), before);
    case.proxy.set(Weather::Fails(0));
    case.wait(&mut stream, Duration::from_secs(120));
    stream.node.signal("-TERM");
    assert_eq!(stream.node.wait(), Some(0), "{}", stream.node.stderr());
    case.check(&case.stream().dataset());
}

/// The store has created a file, and its writer is killed before it hears of that.
#[test]
#[ignore = "needs the servers that scripts/services starts, so Java 17 and Maven"]
fn a_kill_between_a_file_and_the_answer_doubles_nothing() {
    let mut case = Case::new("swallows");
    case.produce(100);
    let mut stream = Running::start(&case.stream());
    case.wait(&mut stream, Duration::from_secs(60));
    case.proxy.set(Weather::Swallows);
    case.produce(100);
    let is_lost = |_: &Running| case.proxy.lost() > 0;
    stream.wait("a file is there that its writer does not know", Duration::from_secs(60), is_lost);
    kill(stream.node);
    case.proxy.set(Weather::Fails(0));
    case.produce(50);
    case.stream().drain();
    case.check(&case.stream().dataset());
}

/// A process that has lost the store is killed. The next one begins while the store still fails.
#[test]
#[ignore = "needs the servers that scripts/services starts, so Java 17 and Maven"]
fn a_start_at_a_failing_store_succeeds() {
    let mut case = Case::new("started");
    case.produce(400);
    let mut first = Running::start(&case.stream());
    case.wait(&mut first, Duration::from_secs(60));
    case.proxy.set(Weather::Gone);
    case.produce(100);
    wait_until_read(&mut first, 500.0);
    kill(first.node);
    case.proxy.set(Weather::Fails(50));
    let mut second = Running::start(&case.stream());
    case.wait(&mut second, Duration::from_secs(120));
    second.node.signal("-TERM");
    assert_eq!(second.node.wait(), Some(0), "{}", second.node.stderr());
    case.check(&case.stream().dataset());
}
