//! Brokers that do not answer.

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
    member.source.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_answers() {
    // A port that was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let given =
        Given { brokers: format!("127.0.0.1:{port}"), topics: vec!["t".into()], group: "g".into(), ..Given::default() };
    let error = describe(&Settings::new(given).unwrap()).await.unwrap_err();
    assert_eq!(error.exit(), Exit::Storage);
    let text = error.to_string();
    assert!(text.starts_with(&format!("brokers 127.0.0.1:{port}: ")) && text.contains("Connection refused"), "{text}");
    assert!(error.help().unwrap().contains("--brokers"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_speaks_no_tls() {
    let cluster = Cluster::new(&[("t", 1)]);
    let settings = cluster.settings(&["t"], &["security.protocol=ssl"]);
    let error = describe(&settings).await.unwrap_err();
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
    member.source.stop().await;
}
