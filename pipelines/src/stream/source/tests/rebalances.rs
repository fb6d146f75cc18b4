//! Members come and go: no message is lost, and none is read under a wrong epoch.

use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

use super::*;

/// Every partition's messages were seen once, by one of the members or the other, each time in order.
fn check_once(members: &[&Member], topic: &str, partitions: i32, messages: i64) {
    for number in 0..partitions {
        let of = |member: &&Member| member.seen.get(&partition(topic, number)).cloned().unwrap_or_default();
        let mut all: Vec<i64> = members.iter().flat_map(of).collect();
        all.sort_unstable();
        assert_eq!(all, (0..messages).collect::<Vec<_>>(), "partition {number}");
    }
}

async fn share_and_leave(protocol: &[&str]) {
    let cluster = Cluster::new(&[("t", 6)]);
    let produce =
        |numbers: std::ops::Range<i64>| (0..6).for_each(|number| cluster.produce("t", number, numbers.clone()));
    produce(0..100);
    let mut a = cluster.join(&["t"], protocol).await;
    a.until("all partitions", |m| m.owned.len() == 6 && m.count() > 0).await;
    let mut b = cluster.join(&["t"], protocol).await;
    b.store = Arc::clone(&a.store);
    until_all(&mut [&mut a, &mut b], "sharing", |m| m.iter().all(|m| m.owned.len() == 3)).await;
    produce(100..200);
    until_all(&mut [&mut a, &mut b], "1200 messages", |m| m.iter().map(|m| m.count()).sum::<usize>() >= 1200).await;
    check_once(&[&a, &b], "t", 6, 200);
    let owned = b.source.ownership();
    assert_eq!(owned.partitions().len(), 3);

    // As a job does before it stops.
    for (partition, (epoch, next)) in &b.owned {
        let next = next.expect("all partitions have messages");
        owned.commit(partition, *epoch, next, "").unwrap();
        b.store.lock().insert(partition.clone(), next);
    }
    let Member { source, seen, .. } = b;
    source.stop(LIMIT).await;
    assert!(owned.partitions().is_empty());
    produce(200..250);
    let before: usize = seen.values().map(Vec::len).sum();
    a.until("the rest", |m| m.owned.len() == 6 && m.count() + before >= 1500).await;
    for number in 0..6 {
        let mut all = a.seen.get(&partition("t", number)).cloned().unwrap_or_default();
        all.extend(seen.get(&partition("t", number)).into_iter().flatten());
        all.sort_unstable();
        assert_eq!(all, (0..250).collect::<Vec<_>>(), "partition {number}");
    }
    assert!(a.source.counters().rebalances >= 3);
    a.source.stop(LIMIT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn consumer_protocol() {
    share_and_leave(&[NEW]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn classic_eager() {
    share_and_leave(&["partition.assignment.strategy=range", "session.timeout.ms=6000", "heartbeat.interval.ms=200"])
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn classic_cooperative() {
    share_and_leave(&["session.timeout.ms=6000", "heartbeat.interval.ms=200"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_does_not_answer_is_not_waited_for_long() {
    let cluster = Cluster::new(&[("t", 2)]);
    let slow = [NEW, "max.poll.interval.ms=3000"];
    let mut a = cluster.join(&["t"], &slow).await;
    a.until("all partitions", |m| m.owned.len() == 2).await;
    let mut b = cluster.join(&["t"], &[NEW]).await;
    let revoked = loop {
        match a.events.recv().await.unwrap() {
            // Its reply is kept, and never sent.
            event @ Event::Revoke { .. } => break event,
            other => a.handle(other),
        }
    };
    b.until("a partition", |m| m.owned.len() == 1).await;
    let Event::Revoke { partitions, lost, .. } = &revoked else { unreachable!() };
    assert!(!lost);
    // From then on nothing is committed for it.
    let (gone, epoch) = &partitions[0];
    assert_eq!(a.source.ownership().commit(gone, *epoch, 1, ""), Err(NotCommitted::NotOwned));
    a.source.stop(LIMIT).await;
    b.source.stop(LIMIT).await;
}

/// A job that begins a partition with a transaction has no answer for a process that is no member of the group, and the
/// process is none again before the callback has returned. The limit is half of the time for which the callback waits.
#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_is_removed_while_it_waits_for_the_job_joins_again() {
    let cluster = Cluster::new(&[("t", 1)]);
    cluster.produce("t", 0, 0..10);
    let mut member = cluster.join(&["t"], &["session.timeout.ms=6000", "heartbeat.interval.ms=200"]).await;
    let first = member.events.recv().await.unwrap();
    let Event::Assign { reply: unanswered, .. } = first else { panic!("an assignment, not {first:?}") };
    let unknown = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID];
    cluster.mock.request_errors(RDKafkaApiKey::Heartbeat, &unknown);
    let lost = timeout(Duration::from_secs(15), member.events.recv()).await.expect("the callback returns").unwrap();
    assert!(matches!(lost, Event::Revoke { lost: true, .. }), "{lost:?}");
    // Nothing was to be read while its start was not known. That must not last.
    member.until("10 messages", |m| m.count() == 10).await;
    drop(unanswered);
    member.source.stop(LIMIT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_is_quick_whatever_the_job_does() {
    let cluster = Cluster::new(&[("t", 1)]);
    cluster.produce("t", 0, 0..10);
    // The job does not answer at all.
    let silent = cluster.join(&["t"], &[NEW]).await;
    tokio::time::sleep(Duration::from_millis(800)).await;
    timeout(LIMIT, silent.source.stop(LIMIT)).await.unwrap();
    // The job is gone, with its messages and permits.
    let Member { source, events, .. } = cluster.join(&["t"], &[NEW]).await;
    drop(events);
    let ownership = source.ownership();
    tokio::time::sleep(Duration::from_millis(800)).await;
    timeout(LIMIT, source.stop(LIMIT)).await.unwrap();
    assert!(!ownership.is_alive());
    // It is dropped without a stop.
    let mut member = cluster.join(&["t"], &[NEW]).await;
    member.until("messages", |m| m.count() == 10).await;
    let Member { source, mut events, .. } = member;
    assert!(source.ownership().is_alive());
    drop(source);
    let end = async { while events.recv().await.is_some() {} };
    timeout(LIMIT, end).await.unwrap();
}
