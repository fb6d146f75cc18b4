//! Where partitions start.

use rdkafka::{
    message::{Header as KafkaHeader, OwnedHeaders},
    types::{RDKafkaApiKey, RDKafkaRespErr},
};

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn the_first_message_is_that_of_the_start_offset() {
    let cluster = Cluster::new(&[("t", 2)]);
    for number in 0..2 {
        cluster.produce("t", number, 0..100);
    }
    let mut member = cluster.join(&["t"], &[NEW]).await;
    member.start = Some(Start::At(50));
    member.until("100 messages", |m| m.count() >= 100).await;
    for number in 0..2 {
        assert_eq!(member.seen[&partition("t", number)], (50..100).collect::<Vec<_>>());
    }
    let positions = member.source.client().positions().await.unwrap();
    assert_eq!(positions, [(partition("t", 0), 100), (partition("t", 1), 100)].into());
    member.source.stop(LIMIT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_group_may_start_at_the_end_or_at_a_time() {
    let cluster = Cluster::new(&[("t", 1)]);
    cluster.produce("t", 0, 0..10);
    let mut member = cluster.join(&["t"], &[NEW]).await;
    member.start = Some(Start::End);
    member.until("the partition", |m| m.owned.len() == 1).await;
    // It is read from the end as it was when the broker was asked for it.
    member.during(Duration::from_millis(1500)).await;
    cluster.produce("t", 0, 10..20);
    member.until("new messages", |m| m.count() >= 10).await;
    assert_eq!(member.seen[&partition("t", 0)], (10..20).collect::<Vec<_>>());
    member.source.stop(LIMIT).await;

    // No message is as new as the year 2100.
    let mut member = cluster.join(&["t"], &[NEW, "group.instance.id=i"]).await;
    member.start = Some(Start::Timestamp(4_102_444_800_000));
    member.until("the partition", |m| m.owned.len() == 1).await;
    let client = member.source.client();
    assert_eq!(client.watermarks(&partition("t", 0)).await.unwrap(), (0, 20));
    assert_eq!(client.partitions("t").await.unwrap(), 1);
    member.source.stop(LIMIT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn first_offsets_are_known_before_the_group_is_joined() {
    let cluster = Cluster::new(&[("t", 2)]);
    cluster.produce("t", 0, 0..10);
    let settings = cluster.settings(&["t"], &[NEW]);
    let plan = describe(&settings, &[]).await.unwrap();
    let partitions: Vec<_> = plan.partitions().collect();
    assert_eq!(partitions, [partition("t", 0), partition("t", 1)]);
    for (start, expected) in [(Start::End, [10, 0]), (Start::Beginning, [0, 0]), (Start::At(3), [3, 3])] {
        assert_eq!(first_offsets(&settings, &partitions, start).await.unwrap(), expected, "{start:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_without_an_answer_is_paused_until_one_comes() {
    let cluster = Cluster::new(&[("t", 1)]);
    cluster.produce("t", 0, 0..20);
    // A rebalance waits a third of the interval.
    let mut member = cluster.join(&["t"], &[NEW, "max.poll.interval.ms=1500"]).await;
    let Event::Assign { partitions, epoch, reply } = member.events.recv().await.unwrap() else {
        panic!("an assignment")
    };
    member.owned.insert(partitions[0].partition.clone(), (epoch, None));
    member.during(Duration::from_secs(2)).await;
    assert_eq!((member.count(), member.source.counters().paused), (0, 1));
    reply.send([(partition("t", 0), Start::At(5))].into());
    member.until("15 messages", |m| m.count() >= 15).await;
    assert_eq!(member.seen[&partition("t", 0)], (5..20).collect::<Vec<_>>());
    assert_eq!(member.other, [sought(&partition("t", 0), epoch, Start::At(5))]);
    member.source.stop(LIMIT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partition_whose_reply_was_dropped_starts_by_a_seek() {
    let cluster = Cluster::new(&[("t", 1)]);
    cluster.produce("t", 0, 0..20);
    let mut member = cluster.join(&["t"], &[NEW]).await;
    let Event::Assign { epoch, reply, .. } = member.events.recv().await.unwrap() else { panic!("an assignment") };
    drop(reply);
    let t = partition("t", 0);
    member.owned.insert(t.clone(), (epoch, None));
    member.during(Duration::from_millis(500)).await;
    assert_eq!(member.count(), 0);
    // A seek of an earlier assignment does nothing.
    member.source.seek(&t, Epoch(0), Start::Beginning);
    member.source.seek(&t, epoch, Start::At(7));
    member.until("13 messages", |m| m.count() >= 13).await;
    assert_eq!(member.seen[&t], (7..20).collect::<Vec<_>>());

    member.seen.clear();
    member.source.seek(&t, epoch, Start::Beginning);
    member.until("all again", |m| m.count() >= 20).await;
    assert_eq!(member.seen[&t], (0..20).collect::<Vec<_>>());
    assert_eq!(member.other, [sought(&t, epoch, Start::At(7)), sought(&t, epoch, Start::Beginning)]);
    member.source.stop(LIMIT).await;
}

fn sought(partition: &TopicPartition, epoch: Epoch, start: Start) -> String {
    format!("{:?}", Event::Sought { partition: partition.clone(), epoch, start })
}

#[tokio::test(flavor = "multi_thread")]
async fn an_offset_that_the_broker_does_not_have_is_reported_and_nothing_is_skipped() {
    for protocol in [NEW, "partition.assignment.strategy=range"] {
        let cluster = Cluster::new(&[("t", 2)]);
        cluster.produce("t", 0, 0..10);
        cluster.produce("t", 1, 0..100);
        let mut member = cluster.join(&["t"], &[protocol]).await;
        member.start = Some(Start::At(60));
        member.until("the report", |m| !m.other.is_empty() && m.count() == 40).await;
        let t = partition("t", 0);
        let epoch = member.epoch(&t);
        let report = Event::OutOfRange { partition: t.clone(), epoch, position: 60, range: (0, 10) };
        assert_eq!(member.other, [format!("{report:?}")]);
        member.source.seek(&t, epoch, Start::At(4));
        member.until("what there is", |m| m.count() >= 46).await;
        assert_eq!(member.seen[&t], (4..10).collect::<Vec<_>>());
        // The other partition goes on where it was.
        cluster.produce("t", 1, 100..110);
        member.until("the other partition", |m| m.count() >= 56).await;
        assert_eq!(member.seen[&partition("t", 1)], (60..110).collect::<Vec<_>>());
        member.source.stop(LIMIT).await;
    }
}

/// librdkafka gives a partition up whose offset a broker calls out of range, as a replica does that is behind.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_that_is_in_range_after_all_is_read_on() {
    for protocol in [NEW, "partition.assignment.strategy=range"] {
        let cluster = Cluster::new(&[("t", 2)]);
        (0..2).for_each(|number| cluster.produce("t", number, 0..10));
        let mut member = cluster.join(&["t"], &[protocol]).await;
        member.until("20 messages", |m| m.count() == 20).await;
        let refused = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_OFFSET_OUT_OF_RANGE];
        cluster.mock.request_errors(RDKafkaApiKey::Fetch, &refused);
        member.during(Duration::from_millis(300)).await;
        (0..2).for_each(|number| cluster.produce("t", number, 10..20));
        member.until("20 more", |m| m.count() >= 40).await;
        for number in 0..2 {
            assert_eq!(member.seen[&partition("t", number)], (0..20).collect::<Vec<_>>());
        }
        // The job was not bothered.
        assert_eq!(member.other, [""; 0]);
        member.source.stop(LIMIT).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_headers_and_tombstones_arrive() {
    let cluster = Cluster::new(&[("t", 1)]);
    let headers = OwnedHeaders::new()
        .insert(KafkaHeader { key: "a", value: Some("1") })
        .insert(KafkaHeader::<&str> { key: "b", value: None })
        .insert(KafkaHeader { key: "a", value: Some("") });
    let record: BaseRecord<'_, str, str> = BaseRecord::to("t").partition(0).key("k").headers(headers).timestamp(1234);
    cluster.producer.send(record).map_err(|(error, _)| error).unwrap();
    cluster.producer.flush(LIMIT).unwrap();
    let mut member = cluster.join(&["t"], &[NEW]).await;
    let batch = loop {
        match member.events.recv().await.unwrap() {
            Event::Messages(batch) => break batch,
            other => member.handle(other),
        }
    };
    let message = batch.messages.get(0);
    let expected = [("a", Some(&b"1"[..])), ("b", None), ("a", Some(&b""[..]))];
    let found: Vec<_> = message.headers.iter().map(|(name, value)| (name.as_str(), value.as_deref())).collect();
    assert_eq!(found, expected);
    assert_eq!((message.offset, message.timestamp, message.key, message.value), (0, Some(1234), Some(&b"k"[..]), None));
    assert_eq!(batch.permit.bytes(), batch.messages.size());
    member.source.stop(LIMIT).await;
}
