//! A broker that is killed and comes back under running streams.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    thread,
    time::{Duration, Instant},
};

use futures::executor::block_on;
use rdkafka::{
    admin::{AdminClient, AdminOptions, AlterConfig, ResourceSpecifier},
    client::DefaultClientContext,
};

use super::{
    broker::{Broker, eventually, needed},
    case::Case,
    crashes::{SMALL, end_in_order, wait_until},
    dice::Dice,
    node::Node,
    proxy::{Proxy, Weather},
    running::Running,
    streaming::{self, Stream},
};

const ELMO: &str = env!("CARGO_BIN_EXE_elmo");

/// What a process may take more after many outages than after the first one.
const GROWTH_KB: u64 = 64 << 10;

/// A short outage. The broker forgets neither members nor transactions.
pub(super) fn short(dice: &mut Dice) -> Duration {
    dice.millis(500..4000)
}

/// A stream into files and one into a topic outlast the death of their broker `outages` times, each of which lasts as long as
/// `gone` says. Returns the number of messages.
pub(super) fn outages(outages: usize, gone: impl Fn(&mut Dice) -> Duration, dice: &mut Dice) -> usize {
    let mut case = Case::on(Broker::own(), "outage", 3, 300);
    let target = case.broker.topic("outage-out", 3);
    let files = case.stream("out").with("-v --max-age 500ms --rows-per-file 50 --metrics 127.0.0.1:0");
    // Slow transactions, so that there is one whenever the broker dies. It has timed out when the broker is back.
    let messages = case.stream_to("messages", &target).with("-v --metrics 127.0.0.1:0").with(SMALL);
    let messages = messages.with_env("FAILPOINTS", "stream.in_transaction=sleep(200)");
    let mut nodes = [files.start(), messages.start()];
    let addresses = nodes.each_mut().map(streaming::metrics_address);
    // A stream that begins needs a broker.
    nodes.iter_mut().for_each(|node| node.wait_for("assigned"));
    let mut resident = [0; 2];
    for outage in 0..outages {
        // The broker dies in the middle of fetches and transactions.
        case.produce(300);
        thread::sleep(dice.millis(0..800));
        case.broker.kill();
        thread::sleep(gone(dice));
        case.broker.start_again();
        case.produce(150);
        let mut running: Vec<_> = nodes.iter_mut().collect();
        wait_until("everything is written to files and to the topic", &mut running, || {
            files.dataset().table_rows() >= case.written.len() && case.enriched(&target).len() >= case.written.len()
        });
        for ((node, address), first) in nodes.iter().zip(&addresses).zip(&mut resident) {
            let metric = |name: &str| streaming::metric(address, name, "");
            let (used, limit) = (metric("elmo_stream_memory_used_bytes"), metric("elmo_stream_memory_limit_bytes"));
            assert!(used < limit / 10.0, "after an outage {used} bytes of {limit} are in use");
            let now = resident_kb(node);
            match outage {
                0 => *first = now,
                _ => assert!(now < *first + GROWTH_KB, "resident memory grew from {first} to {now} kB"),
            }
        }
    }
    end_in_order(nodes.into());
    case.check_same(&files.dataset(), &case.undisturbed());
    case.check_enriched(&case.enriched(&target), &case.undisturbed_messages());
    case.written.len()
}

fn resident_kb(node: &Node) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", node.child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Kubernetes kills 30 s after SIGTERM. The documentation promises 25 s, which a loaded machine may exceed.
#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_stop_without_a_broker_and_a_store_ends_in_time() {
    let mut case = Case::on(Broker::own(), "nothing-left", 2, 100);
    let proxy = Proxy::before(&needed("ELMO_TEST_S3_ENDPOINT"));
    let output = format!("s3://elmo-test/{}", case.topic.name);
    let files = Stream::new(ELMO, &case.broker, &case.topic, &case.group("files"), &output)
        .with("--rows-per-file 20 --max-age 1s --metrics 127.0.0.1:0 -v")
        .with_env("AWS_ENDPOINT_URL", &proxy.url());
    let target = case.broker.topic("nothing-left-out", 2);
    // Kafka 4.3 may lose the abort marker of a transaction that is open when it is killed. The next process of this id writes one.
    let messages = case.stream_to("messages", &target).with("-v -X group.instance.id=one");
    let (mut to_store, mut to_topic) = (Running::start(&files), messages.start());
    to_store.wait_for(&output, 100, Duration::from_secs(60));
    wait_until("everything is written", &mut [&mut to_topic], || case.enriched(&target).len() >= 100);
    proxy.set(Weather::Gone);
    case.produce(200);
    let is_read = |stream: &Running| stream.metric("elmo_stream_messages_total") == 300.0;
    to_store.wait("all is read", Duration::from_secs(60), is_read);
    case.broker.kill();
    let began = Instant::now();
    for node in [&to_store.node, &to_topic] {
        node.signal("-TERM");
    }
    assert_eq!(to_store.node.wait(), Some(130), "{}", to_store.node.stderr());
    // What it had read may have been written before the broker died.
    let ended = to_topic.wait();
    assert!(matches!(ended, Some(0 | 130)), "{ended:?}: {}", to_topic.stderr());
    let took = began.elapsed();
    eprintln!("stopped after {:.1} s", took.as_secs_f64());
    assert!(took < Duration::from_secs(30), "{took:?}");
    // What was not published is read again.
    case.broker.start_again();
    proxy.set(Weather::Fails(0));
    files.drain();
    messages.drain();
    case.check(&files.dataset());
    case.check_enriched(&case.enriched(&target), &case.undisturbed_messages());
}

/// Adds an offset to a transaction of the producer `id` whose coordinator knows nothing of it, as if a broker had lost the end
/// of the transaction for the offsets of `group`. librdkafka cannot do that, and a broker that verifies transactions refuses it.
fn leave_offset(case: &Case, group: &str, id: &str, partition: i32, offset: i64) {
    let broker = ResourceSpecifier::Broker(1);
    let setting = AlterConfig::new(broker).set("transaction.partition.verification.enable", "false");
    let admin: AdminClient<DefaultClientContext> = case.broker.client().create().unwrap();
    let altered = block_on(admin.alter_configs([&setting], &AdminOptions::new())).unwrap();
    assert!(altered.iter().all(Result::is_ok), "{altered:?}");
    let number = |number: i32| number.to_be_bytes().to_vec();
    // InitProducerId: the time that a transaction may take. The answer has the time to wait, the error, and the producer.
    let begin = [string(id), number(20_000)].concat();
    let mut producer = Vec::new();
    eventually("the coordinator names the producer", || {
        let answer = request(&case.broker.address, 22, 0, &begin);
        producer = answer[6..16].to_vec();
        answer[4..6] == [0, 0]
    });
    // TxnOffsetCommit of one partition: its offset, no epoch of the leader, no metadata. The answer ends with the error.
    let names = [string(id), string(group), producer, number(1), string(&case.topic.name), number(1)].concat();
    let offset = [number(partition), offset.to_be_bytes().to_vec(), number(-1), string("")].concat();
    let commit = [names, offset].concat();
    // The setting takes effect a moment later.
    eventually("the group takes the offset", || request(&case.broker.address, 28, 2, &commit).ends_with(&[0, 0]));
}

/// A string of Kafka's protocol.
fn string(text: &str) -> Vec<u8> {
    [&u16::try_from(text.len()).unwrap().to_be_bytes()[..], text.as_bytes()].concat()
}

/// Sends a request of Kafka's protocol. Returns the answer without its header.
fn request(address: &str, api: i16, version: i16, body: &[u8]) -> Vec<u8> {
    // The number of the request is 0.
    let header = [&api.to_be_bytes()[..], &version.to_be_bytes(), &[0; 4], &string("test")].concat();
    let length = u32::try_from(header.len() + body.len()).unwrap();
    let mut connection = TcpStream::connect(address).unwrap();
    connection.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    connection.write_all(&[&length.to_be_bytes()[..], &header, body].concat()).unwrap();
    let mut length = [0; 4];
    connection.read_exact(&mut length).unwrap();
    let mut answer = vec![0; usize::try_from(u32::from_be_bytes(length)).unwrap()];
    connection.read_exact(&mut answer).unwrap();
    answer.split_off(4)
}

/// Without that, the process waits for the offset of partition 0 for ever; or its commit of partition 1 commits that offset,
/// too, and the messages before it are lost.
#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn offsets_of_a_transaction_whose_end_a_broker_lost_are_aborted() {
    let mut case = Case::on(Broker::own(), "lost-end", 2, 100);
    let target = case.broker.topic("lost-end-out", 2);
    let messages = case.stream_to("messages", &target).with("-v -X group.instance.id=one");
    messages.drain();
    case.produce(100);
    let group = case.group("messages");
    leave_offset(&case, &group, &format!("elmo-{group}-one"), 0, case.broker.watermarks(&case.topic, 0).1);
    let mut node = messages.start();
    wait_until("everything is written", &mut [&mut node], || case.enriched(&target).len() >= case.written.len());
    end_in_order(vec![node]);
    case.check_enriched(&case.enriched(&target), &case.undisturbed_messages());
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_broker_that_dies_and_returns_costs_no_message_and_ends_no_stream() {
    outages(1, short, &mut Dice::new(3));
}
