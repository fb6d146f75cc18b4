//! Rows on their way to a transaction: how long they wait for others, and which of them count.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use rdkafka::{
    ClientConfig,
    consumer::{BaseConsumer, Consumer as _, ConsumerGroupMetadata},
    mocking::MockCluster,
};

use super::{
    process::{Settings, finisher, records},
    world::{Constant, World, columns, messages, partition},
};
use crate::stream::{
    OnError, StreamError, TopicPartition,
    finished::Rows,
    metrics::Metrics,
    output::{Output as _, Owned},
    rotation::CloseReason,
    source::{Batch, Budget, Epoch, Logs, testing::epoch},
    totals::{StreamReport, Totals},
    transaction::{Committer, Group, TopicOutput, Transactions},
};

const HOUR: Duration = Duration::from_secs(3600);

async fn rows(offset: i64) -> Rows {
    let stage = Constant::new(&World::new(1, 1));
    let finisher = finisher(OnError::Null, stage.as_ref());
    let permit = Budget::new(1 << 20).permit(&partition(0), 0);
    let batch = Batch { messages: messages(&partition(0), &[offset]), epoch: epoch(1), permit };
    let (texts, waiting) = finisher.decode(batch, 0).await;
    finisher.finish(&partition(0), waiting, columns(&texts)).unwrap().rows
}

fn output(committer: Committer) -> TopicOutput {
    let metrics = Arc::new(Metrics::new().partition(partition(0)));
    let owned = Owned { source: partition(0), epoch: epoch(1), budget: Budget::new(1 << 20), metrics };
    TopicOutput::new(owned, 0, records(&Settings::default()), committer)
}

#[tokio::test]
async fn rows_wait_for_others_for_their_time_unless_somebody_waits_for_them() {
    const WAIT: Duration = Duration::from_millis(200);
    let (committer, manual) = Committer::manual();
    let mut output = output(committer);
    output.write(rows(0).await).await.unwrap();
    let began = Instant::now();
    assert_eq!(manual.gather(WAIT), Some(vec![0]));
    assert!(began.elapsed() >= WAIT);
    // All that came before the end of their time are together.
    for offset in [1, 2] {
        output.write(rows(offset).await).await.unwrap();
    }
    assert_eq!(manual.gather(WAIT), Some(vec![1, 2]));
    output.write(rows(3).await).await.unwrap();
    output.close(CloseReason::Revoke);
    assert_eq!(manual.gather(HOUR), Some(vec![3]));
    // There will be no others.
    output.write(rows(5).await).await.unwrap();
    drop(output);
    assert_eq!((manual.gather(HOUR), manual.gather(HOUR)), (Some(vec![5]), None));
}

/// The consumer of a group that takes its partitions away.
struct Member {
    consumer: BaseConsumer,
    owns: Arc<AtomicBool>,
}

impl Group for Member {
    fn metadata(&self) -> Option<ConsumerGroupMetadata> {
        self.consumer.group_metadata()
    }

    fn committed(&self, sources: &[TopicPartition]) -> Result<Vec<Option<i64>>, StreamError> {
        Ok(vec![None; sources.len()])
    }

    fn owns(&self, _: &TopicPartition, _: Epoch) -> bool {
        self.owns.load(Relaxed)
    }
}

/// Their next owner embeds them again, and counts them.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_partition_that_was_lost_are_not_counted() {
    let mock = MockCluster::new(1).unwrap();
    for topic in ["t", "out"] {
        mock.create_topic(topic, 1, 1).unwrap();
    }
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", mock.bootstrap_servers());
    let (metrics, owns) = (Arc::new(Metrics::new()), Arc::new(AtomicBool::new(true)));
    let logs = Logs::default();
    let transactions = Transactions::new(&config, logs, "id", BTreeSet::new(), None, Arc::clone(&metrics)).unwrap();
    let consumer = config.set("group.id", "g").create().unwrap();
    let group = Box::new(Member { consumer, owns: Arc::clone(&owns) });
    let totals = Totals::new(metrics, OnError::Null);
    let wait = Duration::from_millis(1);
    let committer = Committer::start(transactions, records(&Settings::default()), wait, group, totals.clone());
    let mut output = output(committer.unwrap());
    for is_owned in [true, false] {
        owns.store(is_owned, Relaxed);
        output.write(rows(0).await).await.unwrap();
        // Its task may not have heard of the loss, and must not fail.
        let _ = output.step().await.unwrap();
        assert_eq!(totals.report(), StreamReport { messages: 1, rows: 1, ..StreamReport::default() });
    }
}
