//! The thread that polls Kafka. It waits for nobody but librdkafka, except in a rebalance for an answer of the job.

use std::{
    collections::HashSet,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering::Relaxed, mpsc::Receiver},
    time::{Duration, Instant},
};

use rdkafka::{
    Offset, TopicPartitionList,
    consumer::{Consumer as _, RebalanceProtocol},
    error::{KafkaError, KafkaResult},
};

use super::{
    context::{Context, Shared},
    deleted,
    event::{Event, Start, Starts},
    offsets,
    ownership::{Consumer, Epoch},
    slots::Slot,
};
use crate::stream::{StreamError, TopicPartition};

/// How long a poll waits for a message. Commands of the job wait as long.
const POLL: Duration = Duration::from_millis(50);
/// The same while a pause for memory may end at any time.
const SHORT_POLL: Duration = Duration::from_millis(5);
/// Messages after which commands and pauses are looked at again.
const ROUND: usize = 20_000;
/// How long a consumer that was dropped tries to leave the group.
const LEAVE: Duration = Duration::from_secs(10);
/// How long the brokers are asked for the range of a partition. A consumer that stops waits as long.
const RANGE: Duration = Duration::from_secs(2);
/// The pause before brokers that did not answer are asked again.
const AGAIN: Duration = Duration::from_secs(1);
/// Answers in a row without a topic after which it counts as deleted: a broker may be behind the others.
const ANSWERS: u8 = 2;

/// What the job asks of the thread.
#[derive(Debug)]
pub(super) enum Command {
    /// Reads a partition from elsewhere.
    Seek(TopicPartition, Epoch, Start),
    /// Pauses a partition, or resumes it.
    Pause(TopicPartition, bool),
    /// Pauses all partitions, or resumes them.
    PauseAll(bool),
    /// Polls no more for some time.
    #[cfg(test)]
    Stall(Duration),
}

/// Polls until the job stops it, then leaves the group.
pub(super) fn run(context: &Context, consumer: Arc<Consumer>, commands: &Receiver<Command>) {
    let shared = &context.0;
    let thread = Thread { shared, context, consumer: &consumer, commands };
    if catch_unwind(AssertUnwindSafe(|| thread.poll_until_stopped())).is_err() {
        let error = StreamError::Broker {
            what: format!("brokers {}", shared.brokers),
            reason: "the consumer panicked; that is a bug of elmo".into(),
            help: None,
        };
        shared.send(Event::Error { error, fatal: true });
    }
    shared.stopping.store(true, Relaxed);
    leave(shared, consumer);
}

/// Leaves the group; a static member stays in it until its session ends.
///
/// It waits for questions of the job that are being answered, because the last owner of a consumer closes it. When the time
/// is over it gives up and leaks the consumer: closing it would wait for ever, and the process is about to end.
fn leave(shared: &Shared, mut consumer: Arc<Consumer>) {
    shared.ownership.close();
    let end = shared.leave_by.lock().unwrap_or_else(|| Instant::now() + LEAVE);
    let is_late = || Instant::now() > end;
    let consumer = loop {
        match Arc::try_unwrap(consumer) {
            Ok(consumer) => break consumer,
            Err(shared) if is_late() => return std::mem::forget(shared),
            Err(shared) => consumer = shared,
        }
        std::thread::sleep(SHORT_POLL);
    };
    let closing = catch_unwind(AssertUnwindSafe(|| {
        consumer.close_queue()?;
        while !consumer.closed() && !is_late() {
            let _ = consumer.poll(POLL);
        }
        Ok::<_, KafkaError>(consumer.closed())
    }));
    if !matches!(closing, Ok(Ok(true))) {
        tracing::debug!("the consumer could not leave its group in time");
        std::mem::forget(consumer);
    }
}

struct Thread<'t> {
    shared: &'t Shared,
    context: &'t Context,
    consumer: &'t Consumer,
    commands: &'t Receiver<Command>,
}

impl Thread<'_> {
    fn poll_until_stopped(&self) {
        while !self.shared.is_stopping() {
            self.obey();
            self.start_late();
            self.seek();
            self.fetch_again();
            self.find_out_of_range();
            self.find_deleted();
            self.shared.slots.lock().check_memory();
            self.context.apply_pauses(self.consumer);
            self.poll_round();
        }
    }

    /// Polls until nothing more has been fetched, and sends what there was.
    fn poll_round(&self) {
        let mut wait = if self.shared.slots.lock().is_waiting() { SHORT_POLL } else { POLL };
        let (mut messages, mut bytes) = (0, 0);
        while messages < ROUND && !self.shared.is_stopping() {
            let polled = self.consumer.poll(wait);
            self.shared.ownership.note_poll();
            wait = Duration::ZERO;
            match polled {
                Some(Ok(message)) => {
                    messages += 1;
                    bytes += message.payload_len() + message.key_len();
                    let mut slots = self.shared.slots.lock();
                    let batch = slots.push(&message);
                    let full = slots.is_full();
                    drop(slots);
                    if let Some(batch) = batch {
                        self.shared.send(Event::Messages(batch));
                        break;
                    }
                    if full {
                        break;
                    }
                }
                Some(Err(KafkaError::MessageConsumptionFatal(_))) => {
                    self.report_fatal();
                    break;
                }
                // The error callback of the context has handled it.
                Some(Err(_)) => {}
                None => break,
            }
        }
        let batches = self.shared.slots.lock().take_all();
        for batch in batches {
            self.shared.send(Event::Messages(batch));
        }
        if messages > 0 {
            self.shared.counts.messages.fetch_add(messages as u64, Relaxed);
            self.shared.counts.bytes.fetch_add(bytes as u64, Relaxed);
            self.shared.up();
        }
    }

    fn report_fatal(&self) {
        if let Some((code, reason)) = self.consumer.client().fatal_error() {
            let what = format!("group {}", self.shared.group);
            let error = super::faults::broker(what, Some(code), &reason, &self.shared.scrub);
            self.shared.send(Event::Error { error, fatal: true });
        }
        self.shared.stopping.store(true, Relaxed);
    }

    fn obey(&self) {
        while let Ok(command) = self.commands.try_recv() {
            let mut slots = self.shared.slots.lock();
            match command {
                Command::Seek(partition, epoch, start) => {
                    if let Some(slot) = slots.find(&partition, epoch) {
                        slot.seek = Some(start);
                    }
                }
                Command::Pause(partition, pause) => {
                    for slot in slots.iter_mut().filter(|slot| slot.partition == partition) {
                        slot.pauses.requested = pause;
                    }
                }
                Command::PauseAll(pause) => slots.pause_all = pause,
                #[cfg(test)]
                Command::Stall(time) => {
                    drop(slots);
                    std::thread::sleep(time);
                }
            }
        }
    }

    /// Takes answers to [`Event::Assign`] that came after the assignment.
    fn start_late(&self) {
        let mut slots = self.shared.slots.lock();
        let waiting = std::mem::take(&mut slots.unanswered);
        for (answer, epoch) in waiting {
            match answer.take() {
                Ok(None) if slots.iter().any(|slot| slot.epoch == epoch) => slots.unanswered.push((answer, epoch)),
                Ok(Some(starts)) => set_starts(starts, |partition, start| {
                    if let Some(slot) = slots.find(partition, epoch) {
                        slot.seek = Some(start);
                    }
                }),
                // Revoked meanwhile, or the job has dropped the reply: `Source::seek` starts the partitions.
                _ => {}
            }
        }
    }

    /// Moves partitions to where they shall be read from.
    fn seek(&self) {
        let wanted: Vec<(TopicPartition, Epoch, Start)> = {
            let slots = self.shared.slots.lock();
            slots.iter().filter_map(|slot| Some((slot.partition.clone(), slot.epoch, slot.seek?))).collect()
        };
        for (partition, epoch, start) in wanted {
            let Some(offset) = self.context.resolve(self.consumer, &partition, start) else { continue };
            let mut slots = self.shared.slots.lock();
            slots.discard(&partition);
            if let Some(slot) = slots.find(&partition, epoch) {
                slot.next = offset;
            }
            drop(slots);
            if let Err(error) = self.go_to(&partition, offset) {
                // It is tried again in the next round.
                tracing::debug!(%error, %partition, "a seek failed");
                continue;
            }
            let mut slots = self.shared.slots.lock();
            if let Some(slot) = slots.find(&partition, epoch) {
                slot.seek = None;
                slot.fetch_again = false;
                slot.pauses.no_start = false;
            }
            drop(slots);
            self.shared.send(Event::Sought { partition, epoch, start });
        }
    }

    fn go_to(&self, partition: &TopicPartition, offset: Offset) -> KafkaResult<()> {
        const TIMEOUT: Duration = Duration::from_secs(5);
        let mut list = TopicPartitionList::with_capacity(1);
        list.add_partition_offset(&partition.topic, partition.partition, offset)?;
        let sought = self.consumer.seek_partitions(list.clone(), TIMEOUT);
        if sought.is_ok_and(|list| list.elements().iter().all(|element| element.error().is_ok())) {
            return Ok(());
        }
        // librdkafka no longer fetches a partition whose offset was out of range, and seeks only what it fetches.
        self.restart(partition, &list)
    }

    /// Assigns a partition again.
    fn restart(&self, partition: &TopicPartition, list: &TopicPartitionList) -> KafkaResult<()> {
        if matches!(self.consumer.rebalance_protocol(), RebalanceProtocol::Cooperative) {
            self.consumer.incremental_unassign(&offsets::list(std::slice::from_ref(partition)))?;
            self.consumer.incremental_assign(list)?;
            self.shared.slots.lock().forget_pauses(|slot| slot.partition == *partition);
        } else {
            let mut all = TopicPartitionList::new();
            let mut slots = self.shared.slots.lock();
            for slot in slots.iter() {
                all.add_partition_offset(&slot.partition.topic, slot.partition.partition, slot.next)?;
            }
            self.consumer.assign(&all)?;
            slots.forget_pauses(|_| true);
        }
        self.context.apply_pauses(self.consumer);
        Ok(())
    }

    /// Has librdkafka fetch partitions again that it gave up although the broker has their next message.
    fn fetch_again(&self) {
        let wanted: Vec<(TopicPartition, Epoch, Offset)> = {
            let slots = self.shared.slots.lock();
            let wanted = slots.iter().filter(|slot| slot.fetch_again && slot.seek.is_none());
            wanted.map(|slot| (slot.partition.clone(), slot.epoch, slot.next)).collect()
        };
        for (partition, epoch, next) in wanted {
            if let Err(error) = self.go_to(&partition, next) {
                // It is tried again in the next round.
                tracing::debug!(%error, %partition, "a partition is not fetched again");
                continue;
            }
            if let Some(slot) = self.shared.slots.lock().find(&partition, epoch) {
                slot.fetch_again = false;
            }
        }
    }

    /// Has another thread ask whether topics still exist, if that is in doubt.
    fn find_deleted(&self) {
        let Some((topics, asking)) = self.shared.doubts.take() else { return };
        let context = self.context.clone();
        let ask = move || {
            find_deleted(&context.0, topics);
            drop(asking);
        };
        if let Err(error) = std::thread::Builder::new().name("kafka topics".into()).spawn(ask) {
            tracing::debug!(%error, "nobody asks whether topics were deleted");
        }
    }

    /// librdkafka says that an offset is out of range, but not of which partition. Another thread asks for the ranges of
    /// all, because that may take seconds.
    fn find_out_of_range(&self) {
        let shared = self.shared;
        if shared.asks_for_ranges.load(Relaxed) || !shared.out_of_range.swap(false, Relaxed) {
            return;
        }
        let positions: Vec<(TopicPartition, Epoch, i64)> = {
            let slots = shared.slots.lock();
            let position = |slot: &Slot| match slot.next {
                Offset::Offset(next) => Some((slot.partition.clone(), slot.epoch, next)),
                _ => None,
            };
            slots.iter().filter_map(position).collect()
        };
        let context = self.context.clone();
        shared.asks_for_ranges.store(true, Relaxed);
        let ask = move || {
            let shared = &context.0;
            if !find_ranges(shared, positions) {
                std::thread::sleep(AGAIN);
                shared.out_of_range.store(true, Relaxed);
            }
            shared.asks_for_ranges.store(false, Relaxed);
        };
        if std::thread::Builder::new().name("kafka ranges".into()).spawn(ask).is_err() {
            shared.asks_for_ranges.store(false, Relaxed);
            shared.out_of_range.store(true, Relaxed);
        }
    }
}

/// Asks until the brokers say which topics they no longer have, and tells the job.
fn find_deleted(shared: &Shared, topics: HashSet<Arc<str>>) {
    let (mut missing, mut answers) = (topics, 0);
    while answers < ANSWERS && !missing.is_empty() && !shared.is_stopping() {
        let Some(consumer) = shared.ownership.consumer() else { return };
        match consumer.fetch_metadata(None, RANGE) {
            Ok(metadata) => {
                answers += 1;
                missing.retain(|topic| deleted::is_missing(&metadata, topic));
            }
            Err(error) => tracing::debug!(%error, "the topics of the brokers are not known; asking again"),
        }
        // A consumer that stops waits until nobody has it.
        drop(consumer);
        if answers < ANSWERS && !missing.is_empty() {
            std::thread::sleep(AGAIN);
        }
    }
    for (error, fatal) in shared.doubts.confirm(missing, &shared.scrub) {
        shared.send(Event::Error { error, fatal });
    }
}

/// Asks for the ranges of partitions, and judges their positions. Returns whether all were answered.
fn find_ranges(shared: &Shared, positions: Vec<(TopicPartition, Epoch, i64)>) -> bool {
    let Some(consumer) = shared.ownership.consumer() else { return true };
    let mut answered = true;
    for (partition, epoch, position) in positions {
        if shared.is_stopping() {
            return true;
        }
        match consumer.fetch_watermarks(&partition.topic, partition.partition, RANGE) {
            Ok(range) => judge(shared, partition, epoch, position, range),
            Err(error) => {
                tracing::debug!(%error, %partition, "the range of a partition is not known; asking again");
                answered = false;
            }
        }
    }
    answered
}

/// Tells the job about a position that the broker does not have. One that it has is fetched again, because librdkafka has
/// given the partition up: the broker that answered before may have been behind the others.
fn judge(shared: &Shared, partition: TopicPartition, epoch: Epoch, position: i64, range: (i64, i64)) {
    let mut slots = shared.slots.lock();
    let Some(slot) = slots.find(&partition, epoch) else { return };
    // It is being read, or the job is about to say from where.
    if slot.next != Offset::Offset(position) || slot.seek.is_some() || slot.pauses.no_start {
        return;
    }
    if (range.0..=range.1).contains(&position) {
        slot.fetch_again = true;
        return;
    }
    slot.pauses.no_start = true;
    drop(slots);
    shared.send(Event::OutOfRange { partition, epoch, position, range });
}

fn set_starts(starts: Starts, mut set: impl FnMut(&TopicPartition, Start)) {
    for (partition, start) in starts {
        set(&partition, start);
    }
}
