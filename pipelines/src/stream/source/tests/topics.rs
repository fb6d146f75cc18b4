//! Which topics are read.

use super::*;
use crate::error::{Exit, Fault as _};

#[tokio::test(flavor = "multi_thread")]
async fn the_plan_has_topics_and_partitions() {
    let cluster = Cluster::new(&[("reviews-de", 2), ("reviews-en", 1), ("orders", 3), ("__internal", 1)]);
    cluster.produce("reviews-de", 1, 0..5);
    let plan = describe(&cluster.settings(&["^reviews-.*", "orders"], &[]), &[]).await.unwrap();
    let topic =
        |name: &str, partitions, messages| Topic { name: name.into(), partitions, readable: Some(true), messages };
    assert_eq!(plan.topics, [topic("orders", 3, 0), topic("reviews-de", 2, 5), topic("reviews-en", 1, 0)]);
    assert!(plan.begun.is_empty() && plan.brokers == [cluster.mock.bootstrap_servers()]);
    let all = describe(&cluster.settings(&["^.*"], &[]), &[]).await.unwrap();
    assert_eq!(all.topics.len(), 3);
    // A pattern may match nothing yet.
    assert_eq!(describe(&cluster.settings(&["^later-.*"], &[]), &[]).await.unwrap().topics, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_topic_is_refused_before_joining() {
    let cluster = Cluster::new(&[("t", 1)]);
    let error = describe(&cluster.settings(&["t", "revews"], &[NEW]), &[]).await.unwrap_err();
    assert_eq!(error.exit(), Exit::Storage);
    assert_eq!(error.to_string(), "topic revews: UnknownTopicOrPartition (Broker: Unknown topic or partition)");
    assert!(error.help().unwrap().contains("create the topic"));
}

#[tokio::test(flavor = "multi_thread")]
async fn topics_that_appear_later_are_read_from_their_first_message() {
    let cluster = Cluster::new(&[("reviews-de", 1)]);
    cluster.produce("reviews-de", 0, 0..3);
    let quick = ["topic.metadata.refresh.interval.ms=300", "session.timeout.ms=6000", "heartbeat.interval.ms=200"];
    let mut member = cluster.join(&["^reviews-.*"], &quick).await;
    let Event::Assign { partitions, epoch, reply } = member.events.recv().await.unwrap() else {
        panic!("an assignment")
    };
    assert_eq!(partitions, [assigned("reviews-de")]);
    let de = partition("reviews-de", 0);
    member.owned.insert(de.clone(), (epoch, None));
    reply.send([(de.clone(), Start::At(2))].into());
    member.until("the message", |m| m.count() == 1).await;

    cluster.mock.create_topic("reviews-fr", 1, 1).unwrap();
    cluster.mock.create_topic("orders", 1, 1).unwrap();
    cluster.produce("reviews-fr", 0, 0..4);
    let (partitions, epoch, reply) = loop {
        match timeout(LIMIT, member.events.recv()).await.unwrap().unwrap() {
            Event::Assign { partitions, epoch, reply } => break (partitions, epoch, reply),
            other => member.handle(other),
        }
    };
    // The first topic stays: it is not assigned again.
    assert_eq!(partitions, [assigned("reviews-fr")]);
    member.owned.insert(partition("reviews-fr", 0), (epoch, None));
    reply.send([(partition("reviews-fr", 0), Start::Beginning)].into());
    member.until("four messages", |m| m.count() == 5).await;
    assert_eq!((&member.seen[&de], &member.seen[&partition("reviews-fr", 0)]), (&vec![2], &vec![0, 1, 2, 3]));
    assert_ne!(member.epoch(&de), epoch);
    member.source.stop(LIMIT).await;
}

fn assigned(topic: &str) -> Assigned {
    Assigned { partition: partition(topic, 0), committed: Hint::None }
}

/// The offsets of one topic say nothing about another one.
#[tokio::test(flavor = "multi_thread")]
async fn the_topics_of_which_a_group_has_offsets_are_known() {
    let cluster = Cluster::new(&[("t", 2), ("u", 1)]);
    cluster.produce("t", 0, 0..3);
    let mut member = cluster.join(&["t"], &[NEW]).await;
    member.until("three messages", |m| m.count() == 3).await;
    let t = partition("t", 0);
    member.source.ownership().commit(&t, member.epoch(&t), 3, "").unwrap();
    member.until_committed(&t, &Hint::At { offset: 3, metadata: String::new() }).await;
    member.source.stop(LIMIT).await;
    let plan = describe(&cluster.settings(&["t", "u"], &[NEW]), &[]).await.unwrap();
    assert_eq!(plan.begun, [Arc::from("t")].into());
    let mut member = cluster.join(&["t"], &[NEW]).await;
    let Event::Assign { mut partitions, .. } = member.events.recv().await.unwrap() else { panic!("an assignment") };
    partitions.sort_by(|a, b| a.partition.cmp(&b.partition));
    let committed = Hint::At { offset: 3, metadata: String::new() };
    let first = Assigned { partition: t, committed };
    let second = Assigned { partition: partition("t", 1), committed: Hint::None };
    assert_eq!(partitions, [first, second]);
    member.source.stop(LIMIT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn topics_that_are_written_must_exist_before_joining() {
    let cluster = Cluster::new(&[("t", 1), ("vectors", 1)]);
    let settings = cluster.settings(&["t"], &[NEW]);
    assert!(describe(&settings, &["vectors"]).await.is_ok());
    let error = describe(&settings, &["vectors", "letters"]).await.unwrap_err();
    assert_eq!(error.exit(), Exit::Storage);
    assert!(error.to_string().starts_with("write to topic letters: UnknownTopicOrPartition"), "{error}");
    assert!(error.help().unwrap().contains("create the topic"));
    // Asking does not create it, as a producer would.
    assert!(describe(&settings, &["letters"]).await.is_err());
}

/// A broker tells a member without partitions nothing, if the group has the protocol of KIP-848.
#[tokio::test(flavor = "multi_thread")]
async fn a_member_without_partitions_knows_that_it_is_one() {
    // The mock ends a rebalance when the session of the first member would end.
    let cooperative =
        ["partition.assignment.strategy=cooperative-sticky", "session.timeout.ms=6000", "heartbeat.interval.ms=200"];
    for (kafka, silent) in [(&[NEW][..], true), (&cooperative[..], false)] {
        let cluster = Cluster::new(&[("t", 1)]);
        cluster.produce("t", 0, 0..3);
        let mut first = cluster.join(&["t"], kafka).await;
        first.until("its partition", |m| m.owned.len() == 1).await;
        let mut second = cluster.join(&["t"], kafka).await;
        if !silent {
            let handled = async {
                // The group may wait for an answer of the first member.
                loop {
                    let event = timeout(Duration::from_millis(20), second.events.recv()).await;
                    if let Ok(Some(Event::Assign { partitions, .. })) = event {
                        return partitions;
                    }
                    first.step(Duration::from_millis(20)).await;
                }
            };
            assert_eq!(timeout(LIMIT, handled).await.unwrap(), []);
            assert!(!second.source.joined_silently());
        } else {
            let end = Instant::now() + LIMIT;
            while !second.source.joined_silently() {
                assert!(Instant::now() < end, "the second member joins");
                first.step(Duration::from_millis(20)).await;
            }
            assert!(second.events.try_recv().is_err(), "there would be an event after all");
        }
        first.source.stop(LIMIT).await;
        second.source.stop(LIMIT).await;
    }
}

/// `old-reviews-1` is there to be found by a search, and `__consumer_offsets` is a topic of Kafka itself.
#[tokio::test(flavor = "multi_thread")]
async fn a_member_gets_the_topics_of_the_plan_by_either_protocol() {
    let all = ["__consumer_offsets", "_a", "old-reviews-1", "reviews-12", "reviews-x"];
    for (pattern, expected) in
        [("^reviews-[0-9]", &all[3..4]), ("^(old-)?reviews-[0-9]$", &all[2..3]), ("^.*", &all[1..])]
    {
        for protocol in [NEW, "partition.assignment.strategy=cooperative-sticky"] {
            let cluster = Cluster::new(&all.map(|topic| (topic, 1)));
            let plan = describe(&cluster.settings(&[pattern], &[]), &[]).await.unwrap();
            assert_eq!(plan.topics.iter().map(|topic| topic.name.as_str()).collect::<Vec<_>>(), expected, "{pattern}");
            let mut member = cluster.join(&[pattern], &[protocol]).await;
            member.until("its topics", |m| m.owned.len() >= expected.len()).await;
            member.during(Duration::from_millis(200)).await;
            let owned: std::collections::BTreeSet<_> =
                member.owned.keys().map(|partition| partition.topic.to_string()).collect();
            assert!(owned.iter().eq(expected), "{pattern}, {protocol}: {owned:?}");
            member.source.stop(LIMIT).await;
        }
    }
}

/// librdkafka reports a pattern that matches nothing as a topic that does not exist.
#[tokio::test(flavor = "multi_thread")]
async fn a_pattern_without_topics_waits_for_them() {
    let cluster = Cluster::new(&[("t", 1)]);
    let quick = ["topic.metadata.refresh.interval.ms=300", "session.timeout.ms=6000", "heartbeat.interval.ms=200"];
    let mut member = cluster.join(&["^later-", "t"], &quick).await;
    member.until("the other topic", |m| m.owned.len() == 1).await;
    // As long as it takes to ask twice whether a topic is gone.
    member.during(Duration::from_secs(2)).await;
    assert_eq!(member.other, [""; 0]);
    cluster.mock.create_topic("later-1", 1, 1).unwrap();
    cluster.produce("later-1", 0, 0..3);
    member.until("the new topic", |m| m.count() == 3).await;
    member.source.stop(LIMIT).await;
}
