//! The broker that `scripts/services` starts, and the stream. All tests that need the broker are below this module, since
//! `scripts/services` leaves it out, and counts its tests as skipped, where there is none.

#[allow(dead_code)]
#[path = "../common/broker.rs"]
mod broker;
#[path = "case.rs"]
mod case;
#[path = "clouds.rs"]
mod clouds;
#[path = "crashes.rs"]
mod crashes;
#[allow(dead_code)]
#[path = "../common/dataset.rs"]
mod dataset;
#[path = "../common/dice.rs"]
mod dice;
#[path = "faults.rs"]
mod faults;
#[path = "../common/google.rs"]
mod google;
#[path = "outage.rs"]
mod outage;
#[path = "overload.rs"]
mod overload;
#[path = "poison.rs"]
mod poison;
#[path = "../common/proxy.rs"]
mod proxy;
#[path = "refusals.rs"]
mod refusals;
#[path = "registry.rs"]
mod registry;
#[path = "../common/running.rs"]
mod running;
#[path = "secrets.rs"]
mod secrets;
#[path = "starts.rs"]
mod starts;
#[path = "storm.rs"]
mod storm;
#[path = "stream.rs"]
mod stream;
#[allow(dead_code)]
#[path = "../common/streaming.rs"]
mod streaming;
#[path = "torture.rs"]
mod torture;

use super::node;

use std::{fmt::Write, sync::Mutex, time::Duration};

use rdkafka::{
    ClientContext,
    consumer::{BaseConsumer, Consumer, ConsumerContext},
    error::{KafkaError, RDKafkaErrorCode as Code},
    producer::{BaseProducer, BaseRecord, Producer},
};

use broker::{Broker, Record};

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_topic_holds_what_was_written() {
    let broker = Broker::shared();
    let topic = broker.topic("written", 3);
    let mut records = broker::texts(100, topic.partitions);
    records[7].headers = vec![("trace".into(), Some(b"a".to_vec())), ("empty".into(), None)];
    records[8].value = None;
    records[9].key = Some(b"key".to_vec());
    records[10].timestamp = Some(1_700_000_000_000);
    let written = broker.produce(&topic, records);
    assert_eq!(
        written.iter().filter(|r| r.partition == 0).map(|r| r.offset).collect::<Vec<_>>(),
        (0..34).collect::<Vec<_>>()
    );
    let mut read = broker.read(&topic);
    assert_eq!(read.iter().find(|r| r.key.is_some()).unwrap().timestamp.map(|t| t > 1_700_000_000_000), Some(true));
    let mut expected = written;
    expected.sort_by_key(|record| (record.partition, record.offset));
    // The broker's client gives each message a time.
    for (read, expected) in read.iter_mut().zip(&expected) {
        read.timestamp = expected.timestamp.and(read.timestamp);
    }
    assert_eq!(read, expected);
    broker.delete_below(&topic, 1, 5);
    assert_eq!((broker.watermarks(&topic, 1), broker.read(&topic).len()), ((5, 33), 95));
    broker.commit("nobody", &topic, &[(1, 7)]);
    assert_eq!(broker.committed("nobody", &topic).into_iter().collect::<Vec<_>>(), [(1, (7, String::new()))]);
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_reader_sees_committed_messages_only() {
    let broker = Broker::shared();
    let topic = broker.topic("transactions", 1);
    let producer: BaseProducer = broker.client().set("transactional.id", &topic.name).create().unwrap();
    let patience = Duration::from_secs(60);
    producer.init_transactions(patience).unwrap();
    for commits in [false, true] {
        producer.begin_transaction().unwrap();
        for n in 0..10 {
            let text = format!("{commits} {n}");
            producer.send(BaseRecord::<(), str>::to(&topic.name).payload(&text)).unwrap();
        }
        producer.flush(patience).unwrap();
        if commits { producer.commit_transaction(patience) } else { producer.abort_transaction(patience) }.unwrap();
    }
    let read = broker.read(&topic);
    assert_eq!(
        read.iter().map(Record::text).collect::<Vec<_>>(),
        (0..10).map(|n| format!("true {n}")).collect::<Vec<_>>()
    );
    // Two transactions, each with a marker at its end.
    assert_eq!((read[0].offset, broker.watermarks(&topic, 0)), (11, (0, 22)));
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn tls_and_password() {
    let open = Broker::shared();
    let topic = open.topic("secured", 1);
    open.produce(&topic, broker::texts(3, 1));
    let broker = Broker::secured(&[]);
    assert_eq!(broker.read(&topic).len(), 3);
    open.deny(&topic, "Read");
    broker::eventually("the user is denied", || {
        matches!(broker.try_read(&topic), Err(KafkaError::MessageConsumption(Code::TopicAuthorizationFailed)))
    });
    assert_eq!(open.read(&topic).len(), 3, "others are not");

    let wrong_ca = broker::wrong_ca();
    for (setting, reason) in [
        (("sasl.password", "another"), "SASL authentication error: Authentication failed during authentication"),
        (("ssl.ca.location", wrong_ca.as_str()), "certificate verify failed"),
    ] {
        let seen = refusal(&Broker::secured(&[setting]));
        assert!(seen.contains(reason), "{setting:?}: {seen}");
    }
}

/// What librdkafka reports when a broker refuses a client.
fn refusal(broker: &Broker) -> String {
    #[derive(Default)]
    struct Seen(Mutex<String>);
    impl ClientContext for Seen {
        fn error(&self, _: KafkaError, reason: &str) {
            writeln!(self.0.lock().unwrap(), "{reason}").unwrap();
        }
    }
    impl ConsumerContext for Seen {}
    let consumer: BaseConsumer<Seen> = broker.client().create_with_context(Seen::default()).unwrap();
    assert!(consumer.fetch_metadata(None, Duration::from_secs(1)).is_err());
    // Its reports come when it is polled.
    broker::eventually("the client is refused", || {
        consumer.poll(Duration::from_millis(100)).is_some_and(|e| e.is_err())
    });
    let seen = consumer.context().0.lock().unwrap();
    seen.clone()
}

#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_broker_that_was_killed_keeps_what_it_acknowledged() {
    let broker = Broker::own();
    let topic = broker.topic("survives", 2);
    broker.produce(&topic, broker::texts(50, 2));
    broker.kill();
    broker.start_again();
    broker.produce(&topic, broker::texts(10, 2));
    assert_eq!(broker.read(&topic).len(), 60);
}
