//! Where the partitions of a stream into a topic begin: the first offsets of all of them, committed together before the group
//! is joined.
//!
//! The group's offsets are the record of what is done, and a process that is killed early must leave all of them or none. A
//! plain commit would be refused while the group has members, and could come late: after another process has begun, written
//! and left. So it is a transaction of one id for the whole group, by which each process fences those before it:
//!
//! > The offsets are committed only by a process that has read, after its id fenced all others, that there are none.

use std::time::Duration;

use rdkafka::{Offset, TopicPartitionList, error::KafkaError, producer::Producer as _};

use super::{
    producer::{BATCH, REQUEST, broken, connect, refused, retried},
    refusal::{Verdict, judge},
};
use crate::{
    crash::stream as crash,
    stream::{
        StreamError, TopicPartition,
        chain::jittered,
        source::{Observer, Settings},
    },
};

/// Between two attempts, half of it to one and a half: two processes that start at once shall not fence each other for ever.
const PAUSE: Duration = Duration::from_millis(300);
/// Attempts after errors of which it is not known whether they pass.
const REPEATS: u32 = 10;

/// Commits the first offsets of the partitions that `new` selects, given what the group has committed for each partition that
/// is read. Blocks the thread.
///
/// # Errors
/// [`StreamError::Broker`] when the brokers refuse or do not answer.
pub(in crate::stream) fn begin(
    settings: &Settings,
    partitions: &[TopicPartition],
    new: impl Fn(&[Option<i64>]) -> Vec<(TopicPartition, i64)>,
) -> Result<(), StreamError> {
    let observer = Observer::new(settings)?;
    let look = || Ok::<_, StreamError>(new(&observer.committed(partitions)?));
    let mut repeats = 0;
    while !look()?.is_empty() {
        match attempt(settings, &observer, look)? {
            Ok(()) => return Ok(()),
            Err(error) => match judge(&error, &[]) {
                Verdict::Final { place, error } => return Err(refused(&[], place, &error)),
                // It may also mean that another process has fenced this one.
                _ if repeats >= REPEATS => return Err(broken("commit where partitions begin", &error)),
                _ => {
                    tracing::debug!(reason = %settings.scrub(&error.to_string()), "looking again where partitions begin");
                    repeats += 1;
                }
            },
        }
        std::thread::sleep(jittered(PAUSE));
    }
    Ok(())
}

/// One attempt: the inner error is that of the transaction.
fn attempt(
    settings: &Settings,
    observer: &Observer,
    look: impl Fn() -> Result<Vec<(TopicPartition, i64)>, StreamError>,
) -> Result<Result<(), KafkaError>, StreamError> {
    let mut config = settings.producer();
    // No name of a static member has a colon.
    config.set("transactional.id", format!("elmo-{}-:begin", settings.group())).set("enable.idempotence", "true");
    let producer = connect(&config, &settings.logs(), BATCH)?;
    // Behind the fence, nobody else can commit them any more.
    let starts = look()?;
    if starts.is_empty() {
        return Ok(Ok(()));
    }
    let Some(metadata) = observer.metadata() else {
        let reason = "librdkafka has no metadata of the group".to_owned();
        return Err(StreamError::Broker { what: format!("group {}", settings.group()), reason, help: None });
    };
    let committed = || {
        crash::before_begin();
        producer.begin_transaction()?;
        let mut offsets = TopicPartitionList::with_capacity(starts.len());
        for (partition, start) in &starts {
            offsets.add_partition_offset(&partition.topic, partition.partition, Offset::Offset(*start))?;
        }
        retried(|| producer.send_offsets_to_transaction(&offsets, &metadata, REQUEST))?;
        crash::in_begin();
        retried(|| producer.commit_transaction(REQUEST))?;
        crash::after_begin();
        Ok(())
    };
    Ok(committed())
}
