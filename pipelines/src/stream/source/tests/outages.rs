//! Brokers that do not answer.

use rdkafka::{
    consumer::BaseConsumer,
    error::RDKafkaErrorCode as Code,
    types::{RDKafkaApiKey, RDKafkaRespErr},
};

use super::*;
use crate::error::{Exit, Fault as _};

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_is_reported_once_and_the_stream_goes_on_after_it() {
    let cluster = Cluster::new(&[("t", 1)]);
    cluster.produce("t", 0, 0..10);
    let quick = [NEW, "reconnect.backoff.max.ms=200", "statistics.interval.ms=200"];
    let mut member = cluster.join(&["t"], &quick).await;
    member.until("10 messages", |m| m.count() == 10).await;
    cluster.mock.broker_down(-1).unwrap();
    member.until("the report", |m| !m.other.is_empty()).await;
    member.during(Duration::from_secs(2)).await;
    assert_eq!(member.other.len(), 1, "{:?}", member.other);
    assert!(
        member.other[0].contains("brokers are down") && member.other[0].contains("fatal: false"),
        "{:?}",
        member.other
    );
    cluster.mock.broker_up(-1).unwrap();
    member.until("the end of the outage", |m| m.other.len() == 2).await;
    assert_eq!(member.other[1], "Connected");
    cluster.produce("t", 0, 10..20);
    member.until("10 more", |m| m.count() == 20).await;
    assert_eq!(member.seen[&partition("t", 0)], (0..20).collect::<Vec<_>>());
    member.source.stop(LIMIT).await;
}

/// Each question for the range of a partition may take seconds while the brokers are away.
#[tokio::test(flavor = "multi_thread")]
async fn positions_are_judged_by_one_thread_which_asks_until_the_brokers_answer() {
    let cluster = Cluster::new(&[("t", 1)]);
    cluster.produce("t", 0, 0..10);
    let mut member = cluster.join(&["t"], &[NEW, "reconnect.backoff.max.ms=200"]).await;
    member.until("10 messages", |m| m.count() == 10).await;
    cluster.mock.broker_down(-1).unwrap();
    let shared = Arc::clone(&member.source.shared);
    shared.out_of_range.store(true, Relaxed);
    member.until("the question", |_| shared.asks_for_ranges.load(Relaxed)).await;
    // The next one waits for the end of this one.
    shared.out_of_range.store(true, Relaxed);
    member.during(Duration::from_millis(500)).await;
    assert!(shared.asks_for_ranges.load(Relaxed) && shared.out_of_range.load(Relaxed));
    cluster.mock.broker_up(-1).unwrap();
    let is_done = || !shared.asks_for_ranges.load(Relaxed) && !shared.out_of_range.load(Relaxed);
    member.until("the answer", |_| is_done()).await;
    cluster.produce("t", 0, 10..20);
    member.until("10 more", |m| m.count() == 20).await;
    assert_eq!(member.seen[&partition("t", 0)], (0..20).collect::<Vec<_>>());
    member.source.stop(LIMIT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_ends_in_time_whatever_the_brokers_and_the_thread_do() {
    let cluster = Cluster::new(&[("t", 1)]);
    cluster.produce("t", 0, 0..10);
    let mut member = cluster.join(&["t"], &[NEW]).await;
    member.until("10 messages", |m| m.count() == 10).await;
    cluster.mock.broker_down(-1).unwrap();
    let client = member.source.client();
    // It holds the consumer for up to 10 s.
    let question = tokio::spawn(async move { client.watermarks(&partition("t", 0)).await });
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(timeout(Duration::from_secs(5), member.source.stop(Duration::from_secs(1))).await.is_ok());
    question.abort();

    let cluster = Cluster::new(&[("t", 1)]);
    let mut member = cluster.join(&["t"], &[NEW]).await;
    member.until("the partition", |m| m.owned.len() == 1).await;
    member.source.stall(Duration::from_secs(30));
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(timeout(Duration::from_secs(5), member.source.stop(Duration::from_secs(1))).await.is_ok());
}

/// librdkafka asks again until the time is over, and does not say why.
#[test]
fn offsets_that_a_transaction_hides_are_a_time_out() {
    let cluster = Cluster::new(&[("t", 1)]);
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", cluster.mock.bootstrap_servers()).set("group.id", "g");
    let consumer: BaseConsumer = config.create().unwrap();
    let unstable = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNSTABLE_OFFSET_COMMIT; 100];
    cluster.mock.request_errors(RDKafkaApiKey::OffsetFetch, &unstable);
    let ask = |timeout| offsets::committed(&consumer, &[partition("t", 0)], timeout);
    let error = ask(Duration::from_secs(2)).unwrap_err();
    assert_eq!(error.rdkafka_error_code(), Some(Code::OperationTimedOut));
    cluster.mock.clear_request_errors(RDKafkaApiKey::OffsetFetch);
    assert_eq!(ask(LIMIT).unwrap(), [Hint::None]);
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_answers() {
    // A port that was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let given =
        Given { brokers: format!("127.0.0.1:{port}"), topics: vec!["t".into()], group: "g".into(), ..Given::default() };
    let error = describe(&Settings::new(given).unwrap(), &[]).await.unwrap_err();
    assert_eq!(error.exit(), Exit::Storage);
    let text = error.to_string();
    assert!(text.starts_with(&format!("brokers 127.0.0.1:{port}: ")) && text.contains("Connection refused"), "{text}");
    assert!(error.help().unwrap().contains("--brokers"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_speaks_no_tls() {
    let cluster = Cluster::new(&[("t", 1)]);
    let settings = cluster.settings(&["t"], &["security.protocol=ssl"]);
    let error = describe(&settings, &[]).await.unwrap_err();
    assert_eq!(error.exit(), Exit::Storage);
    assert!(error.help().unwrap().contains("security.protocol"), "{error}: {:?}", error.help());
}

#[tokio::test(flavor = "multi_thread")]
async fn statistics_have_the_lag() {
    let cluster = Cluster::new(&[("t", 1)]);
    cluster.produce("t", 0, 0..10);
    let mut member = cluster.join(&["t"], &[NEW, "statistics.interval.ms=100"]).await;
    let statistics = member.source.statistics();
    let t = partition("t", 0);
    let read = |statistics: &Statistics| statistics.partitions.get(&t).and_then(|p| p.position.zip(p.lag));
    member.until("position and lag", |_| read(&statistics.borrow()) == Some((10, 0))).await;
    member.source.pause_all(true);
    member.until("the pause", |m| m.source.counters().paused == 1).await;
    let now = statistics.borrow().partitions[&t].clone();
    assert_eq!((now.end, now.committed), (Some(10), None));
    assert_eq!(statistics.borrow().brokers_up, 1);
    member.source.stop(LIMIT).await;
}
