//! Commits, and who may not make them.

use rdkafka::{
    Offset, TopicPartitionList,
    consumer::{CommitMode, Consumer as _},
    types::{RDKafkaApiKey, RDKafkaRespErr},
};

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_carries_its_metadata_and_needs_the_epoch() {
    let cluster = Cluster::new(&[("t", 1)]);
    cluster.produce("t", 0, 0..10);
    let mut member = cluster.join(&["t"], &[NEW]).await;
    member.until("10 messages", |m| m.count() == 10).await;
    let t = partition("t", 0);
    let (ownership, epoch) = (member.source.ownership(), member.epoch(&t));
    assert_eq!(ownership.epoch(&t), Some(epoch));
    assert_eq!(member.committed(&t).await, Hint::None);
    ownership.commit(&t, epoch, 7, "topic=t/partition=0/0.parquet").unwrap();
    let hint = Hint::At { offset: 7, metadata: "topic=t/partition=0/0.parquet".into() };
    member.until_committed(&t, &hint).await;
    // A transaction may have several batches of one partition.
    let twice = member.source.client().committed(&[t.clone(), t.clone()]).await.unwrap();
    assert_eq!(twice, [hint.clone(), hint.clone()]);
    // Another epoch, a partition of somebody else.
    assert_eq!(ownership.commit(&t, Epoch(epoch.0 + 1), 8, ""), Err(NotCommitted::NotOwned));
    assert_eq!(ownership.commit(&partition("t", 1), epoch, 8, ""), Err(NotCommitted::NotOwned));
    let client = member.source.client();
    member.source.stop(LIMIT).await;
    assert_eq!(ownership.commit(&t, epoch, 8, ""), Err(NotCommitted::Stopped));
    assert!(client.committed(std::slice::from_ref(&t)).await.unwrap_err().to_string().contains("stopped"));

    // The next member is told what the group knows.
    let mut next = cluster.join(&["t"], &[NEW]).await;
    let Event::Assign { partitions, reply, .. } = next.events.recv().await.unwrap() else { panic!("an assignment") };
    assert_eq!(partitions, [Assigned { partition: t, committed: hint }]);
    drop(reply);
    next.source.stop(LIMIT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn commits_that_the_broker_refuses_are_counted_and_the_next_one_works() {
    let cluster = Cluster::new(&[("t", 1)]);
    cluster.produce("t", 0, 0..10);
    let mut member = cluster.join(&["t"], &[NEW]).await;
    member.until("10 messages", |m| m.count() == 10).await;
    let (t, ownership) = (partition("t", 0), member.source.ownership());
    let refusals = [
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_OFFSET_METADATA_TOO_LARGE,
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_INVALID_COMMIT_OFFSET_SIZE,
    ];
    cluster.mock.request_errors(RDKafkaApiKey::OffsetCommit, &refusals);
    for refused in 1..=2 {
        ownership.commit(&t, member.epoch(&t), 5, "").unwrap();
        member.until("the refusal", |m| m.source.counters().commits_refused == refused).await;
    }
    assert_eq!((member.committed(&t).await, member.source.counters().commits), (Hint::None, 2));
    ownership.commit(&t, member.epoch(&t), 6, "").unwrap();
    member.until_committed(&t, &Hint::At { offset: 6, metadata: String::new() }).await;
    member.source.stop(LIMIT).await;
}

/// The mock answers these as a broker does whose group has gone on without the member.
#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_the_group_has_forgotten_joins_again() {
    let cluster = Cluster::new(&[("t", 1)]);
    cluster.produce("t", 0, 0..10);
    let classic = ["session.timeout.ms=6000", "heartbeat.interval.ms=200"];
    let mut member = cluster.join(&["t"], &classic).await;
    member.until("10 messages", |m| m.count() == 10).await;
    let t = partition("t", 0);
    let first = member.epoch(&t);
    let forgotten = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID];
    cluster.mock.request_errors(RDKafkaApiKey::OffsetCommit, &forgotten);
    member.source.ownership().commit(&t, first, 5, "").unwrap();
    member.until("a new assignment", |m| m.owned.get(&t).is_some_and(|(epoch, _)| *epoch != first)).await;
    assert_eq!(member.source.ownership().commit(&t, first, 5, ""), Err(NotCommitted::NotOwned));
    let epoch = member.epoch(&t);
    member.source.ownership().commit(&t, epoch, 5, "").unwrap();
    member.until_committed(&t, &Hint::At { offset: 5, metadata: String::new() }).await;
    member.source.stop(LIMIT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_was_stuck_cannot_commit() {
    let cluster = Cluster::new(&[("t", 2)]);
    cluster.produce("t", 0, 0..10);
    let mut stuck = cluster.join(&["t"], &[NEW, "max.poll.interval.ms=1500"]).await;
    stuck.until("both partitions", |m| m.owned.len() == 2 && m.count() == 10).await;
    let t = partition("t", 0);
    let (ownership, epoch) = (stuck.source.ownership(), stuck.epoch(&t));
    let consumer = ownership.consumer().unwrap();
    stuck.source.stall(Duration::from_secs(6));
    let mut other = cluster.join(&["t"], &[NEW]).await;
    other.until("both partitions", |m| m.owned.len() == 2).await;

    // Nobody has told the stuck member. It refuses by its own clock...
    assert_eq!(ownership.epoch(&t), Some(epoch));
    assert!(matches!(ownership.commit(&t, epoch, 9, ""), Err(NotCommitted::Stalled(_))));
    // ...and the broker would refuse, too.
    let mut list = TopicPartitionList::new();
    list.add_partition_offset("t", 0, Offset::Offset(9)).unwrap();
    assert!(consumer.commit(&list, CommitMode::Sync).is_err());
    drop(consumer);
    assert_eq!(other.committed(&t).await, Hint::None);
    // When it polls again, its partitions are lost.
    stuck.until("the loss", |m| m.owned.is_empty() || m.epoch(&t) != epoch).await;
    assert_eq!(ownership.commit(&t, epoch, 9, ""), Err(NotCommitted::NotOwned));
    stuck.source.stop(LIMIT).await;
    other.source.stop(LIMIT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_member_has_metadata_for_a_transaction() {
    let cluster = Cluster::new(&[("t", 1)]);
    cluster.produce("t", 0, 0..10);
    let classic = ["session.timeout.ms=6000", "heartbeat.interval.ms=200"];
    let mut member = cluster.join(&["t"], &classic).await;
    let client = member.source.client();
    assert!(client.group_metadata().is_none(), "before it has joined");
    member.until("10 messages", |m| m.count() == 10).await;
    assert!(client.group_metadata().is_some());
    // The group forgets it, and it does not join again before it has heard of that and polls.
    let unknown = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID];
    member.source.stall(Duration::from_secs(2));
    cluster.mock.request_errors(RDKafkaApiKey::Heartbeat, &unknown);
    let end = Instant::now() + LIMIT;
    while client.group_metadata().is_some() {
        assert!(Instant::now() < end, "it is forgotten");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // Its own list of partitions does not know.
    assert_eq!(member.source.ownership().epoch(&partition("t", 0)), Some(member.epoch(&partition("t", 0))));
    member.until("it is a member again", |_| client.group_metadata().is_some()).await;
    member.source.stop(LIMIT).await;
    assert!(client.group_metadata().is_none(), "after it has stopped");
}
