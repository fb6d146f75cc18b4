//! The assigned partitions as the consumer's thread sees them: messages that are being collected, positions, pauses.

use std::{mem, sync::Arc};

use rdkafka::{
    Offset, TopicPartitionList,
    bindings::{rd_kafka_header_cnt, rd_kafka_header_get_all},
    message::{BorrowedHeaders, BorrowedMessage, Message as _},
};

use super::{
    budget::{Account, Budget},
    event::{Answer, Batch, Start, Starts},
    ownership::Epoch,
};
use crate::stream::{Header, Message, Messages, TopicPartition};

/// A batch is sent when it has so many messages or bytes, or when nothing more has been fetched.
const MAX_ROWS: usize = 4096;
const MAX_BYTES: usize = 1 << 20;
/// All batches together may hold this part of the budget before they are sent.
const PART_OF_BUDGET: usize = 8;

/// The assigned partitions.
pub(super) struct Slots {
    slots: Vec<Slot>,
    /// The partition of the message before. Consecutive messages are mostly of one partition.
    last: usize,
    pending_bytes: usize,
    /// The job asked for a pause of all partitions.
    pub(super) pause_all: bool,
    /// Assignments without an answer so far.
    pub(super) unanswered: Vec<(Answer<Starts>, Epoch)>,
    budget: Budget,
}

/// A partition that is assigned.
pub(super) struct Slot {
    pub(super) partition: TopicPartition,
    pub(super) epoch: Epoch,
    account: Arc<Account>,
    pending: Messages,
    /// The next message to read.
    pub(super) next: Offset,
    /// Why it is paused.
    pub(super) pauses: Pauses,
    /// What librdkafka has been told; `None` when it was assigned anew, since a pause survives that: it ends when librdkafka
    /// is told to resume, also if another assignment came in between.
    is_paused: Option<bool>,
    /// Where to go, not done yet.
    pub(super) seek: Option<Start>,
    /// librdkafka has given it up, and is to fetch it again.
    pub(super) fetch_again: bool,
}

/// Reasons of a pause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Pauses {
    /// Its start is not known.
    pub(super) no_start: bool,
    /// Too many bytes in use.
    pub(super) memory: bool,
    /// The job asked for it.
    pub(super) requested: bool,
}

/// Partitions to pause and to resume.
pub(super) struct Changes {
    pub(super) pause: TopicPartitionList,
    pub(super) resume: TopicPartitionList,
}

impl Slots {
    pub(super) fn new(budget: Budget) -> Self {
        Self { slots: Vec::new(), last: 0, pending_bytes: 0, pause_all: false, unanswered: Vec::new(), budget }
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Slot> {
        self.slots.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Slot> {
        self.slots.iter_mut()
    }

    pub(super) fn add(&mut self, partition: TopicPartition, epoch: Epoch, start: Option<Offset>) {
        self.remove(&[&partition]);
        let account = self.budget.account(&partition);
        let pending = Messages::new(partition.clone(), 0);
        let pauses = Pauses { no_start: start.is_none(), ..Pauses::default() };
        let next = start.unwrap_or(Offset::End);
        let (is_paused, seek, fetch_again) = (None, None, false);
        self.slots.push(Slot { partition, epoch, account, pending, next, pauses, is_paused, seek, fetch_again });
    }

    /// Removes partitions with the messages that were collected for them. Returns the epochs of those that were there.
    pub(super) fn remove(&mut self, partitions: &[&TopicPartition]) -> Vec<(TopicPartition, Epoch)> {
        let (gone, kept) =
            mem::take(&mut self.slots).into_iter().partition(|slot| partitions.contains(&&slot.partition));
        self.slots = kept;
        self.last = 0;
        self.pending_bytes = self.slots.iter().map(|slot| slot.pending.size()).sum();
        let gone: Vec<Slot> = gone;
        gone.into_iter().map(|slot| (slot.partition, slot.epoch)).collect()
    }

    pub(super) fn find(&mut self, partition: &TopicPartition, epoch: Epoch) -> Option<&mut Slot> {
        self.slots.iter_mut().find(|slot| slot.partition == *partition && slot.epoch == epoch)
    }

    /// Collects a message. Returns a batch if that completes one.
    pub(super) fn push(&mut self, message: &BorrowedMessage<'_>) -> Option<Batch> {
        let (topic, partition) = (message.topic(), message.partition());
        let is_of = |slot: &Slot| slot.partition.partition == partition && *slot.partition.topic == *topic;
        if !self.slots.get(self.last).is_some_and(is_of) {
            // A message of a partition that was just revoked has no slot.
            self.last = self.slots.iter().position(is_of)?;
        }
        let slot = &mut self.slots[self.last];
        let before = slot.pending.size();
        if slot.pending.is_empty() {
            slot.pending = Messages::new(slot.partition.clone(), message.offset());
        }
        let headers = message.headers().map(copy_headers).unwrap_or_default();
        slot.pending.push(Message {
            offset: message.offset(),
            timestamp: message.timestamp().to_millis(),
            key: message.key(),
            value: message.payload(),
            headers: &headers,
        });
        slot.next = Offset::Offset(slot.pending.end);
        let (rows, size) = (slot.pending.len(), slot.pending.size());
        self.pending_bytes += size - before.min(size);
        let full = rows >= MAX_ROWS || size >= MAX_BYTES;
        if full { self.take(self.last) } else { None }
    }

    /// Whether so much has been collected that it must be sent now.
    pub(super) fn is_full(&self) -> bool {
        self.pending_bytes > self.budget.limit() / PART_OF_BUDGET
    }

    /// Everything that has been collected, a batch for each partition.
    pub(super) fn take_all(&mut self) -> Vec<Batch> {
        (0..self.slots.len()).filter_map(|at| self.take(at)).collect()
    }

    fn take(&mut self, at: usize) -> Option<Batch> {
        let slot = &mut self.slots[at];
        if slot.pending.is_empty() {
            return None;
        }
        let empty = Messages::new(slot.partition.clone(), slot.pending.end);
        let messages = mem::replace(&mut slot.pending, empty);
        self.pending_bytes = self.pending_bytes.saturating_sub(messages.size());
        let permit = self.budget.charge(Arc::clone(&slot.account), messages.size());
        Some(Batch { messages, epoch: slot.epoch, permit })
    }

    /// Drops what has been collected for a partition.
    pub(super) fn discard(&mut self, partition: &TopicPartition) {
        for slot in self.slots.iter_mut().filter(|slot| slot.partition == *partition) {
            let dropped = mem::replace(&mut slot.pending, Messages::new(slot.partition.clone(), 0));
            self.pending_bytes = self.pending_bytes.saturating_sub(dropped.size());
        }
    }

    /// Decides which partitions are paused for memory.
    pub(super) fn check_memory(&mut self) {
        let partitions = self.slots.len();
        for slot in &mut self.slots {
            slot.pauses.memory = self.budget.exceeded(&slot.account, partitions, slot.pauses.memory);
        }
    }

    /// What librdkafka must be told about pauses. It counts as told.
    pub(super) fn changes(&mut self) -> Option<Changes> {
        let mut changes = Changes { pause: TopicPartitionList::new(), resume: TopicPartitionList::new() };
        for slot in &mut self.slots {
            let wanted = slot.pauses != Pauses::default() || self.pause_all;
            if slot.is_paused != Some(wanted) {
                let list = if wanted { &mut changes.pause } else { &mut changes.resume };
                list.add_partition(&slot.partition.topic, slot.partition.partition);
                slot.is_paused = Some(wanted);
            }
        }
        (changes.pause.count() + changes.resume.count() > 0).then_some(changes)
    }

    /// Partitions that are paused.
    pub(super) fn paused_partitions(&self) -> impl Iterator<Item = &TopicPartition> {
        self.slots.iter().filter(|slot| slot.is_paused == Some(true)).map(|slot| &slot.partition)
    }

    /// Number of paused partitions.
    pub(super) fn paused(&self) -> usize {
        self.slots.iter().filter(|slot| slot.is_paused == Some(true)).count()
    }

    /// These partitions were assigned anew.
    pub(super) fn forget_pauses(&mut self, is_of: impl Fn(&Slot) -> bool) {
        for slot in self.slots.iter_mut().filter(|slot| is_of(slot)) {
            slot.is_paused = None;
        }
    }

    /// Whether something may change without a message: a pause for memory ends, a late answer comes.
    pub(super) fn is_waiting(&self) -> bool {
        let waits = |slot: &Slot| slot.pauses.memory || slot.seek.is_some() || slot.fetch_again;
        !self.unanswered.is_empty() || self.slots.iter().any(waits)
    }
}

/// Copies headers. rdkafka's own way panics when a name is not UTF-8, which any producer can send.
fn copy_headers(headers: &BorrowedHeaders) -> Vec<Header> {
    let native = std::ptr::from_ref(headers).cast();
    // SAFETY: a `BorrowedHeaders` is librdkafka's list of headers behind a reference of the same lifetime.
    let count = unsafe { rd_kafka_header_cnt(native) };
    let header = |index: usize| {
        let (mut name, mut value, mut size) = (std::ptr::null(), std::ptr::null(), 0);
        // SAFETY: as above; the three results live as long as the list.
        unsafe {
            rd_kafka_header_get_all(native, index, &mut name, &mut value, &mut size);
            if name.is_null() {
                return (String::new(), None);
            }
            let name = std::ffi::CStr::from_ptr(name).to_string_lossy().into_owned();
            let value = (!value.is_null()).then(|| match size {
                0 => Vec::new(),
                _ => std::slice::from_raw_parts(value.cast::<u8>(), size).to_vec(),
            });
            (name, value)
        }
    };
    (0..count).map(header).collect()
}
