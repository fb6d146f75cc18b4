//! The memory pool of a session with a limit.
//!
//! DataFusion's pools leave memory to whoever asks first. An operator that spills may fill them, although it needs memory of
//! another consumer to merge what it has spilled, and one merge opens as many of its files as fit, although the operators
//! above it need memory, too. Here both kinds have a part of the limit, which the consumers of that kind share evenly:
//!
//! | kind | part |
//! |---|---|
//! | operators that spill: sorts, groups, rows that wait between partitions | two fifths |
//! | the merges of sorts | two fifths |
//! | everything else, which cannot spill: joins, writers, embedding | whatever is free |

use std::fmt;

use datafusion::{
    common::{Result, human_readable_size, resources_datafusion_err},
    execution::memory_pool::{MemoryConsumer, MemoryLimit, MemoryPool, MemoryReservation},
};
use parking_lot::Mutex;

/// The name of the consumers that merge the runs of a sort.
const MERGE: &str = "ExternalSorterMerge";

/// A memory pool in which each kind of operator has its part; see the documentation of the module.
#[derive(Debug)]
pub(crate) struct SharedPool {
    limit: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    spilling: Kind,
    merging: Kind,
    others: Kind,
}

/// The consumers of a kind.
#[derive(Debug, Default)]
struct Kind {
    consumers: usize,
    bytes: usize,
}

impl State {
    fn kind(&mut self, consumer: &MemoryConsumer) -> &mut Kind {
        match (consumer.can_spill(), consumer.name().starts_with(MERGE)) {
            (true, _) => &mut self.spilling,
            (false, true) => &mut self.merging,
            (false, false) => &mut self.others,
        }
    }

    fn bytes(&self) -> usize {
        self.spilling.bytes + self.merging.bytes + self.others.bytes
    }
}

impl SharedPool {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, state: Mutex::default() }
    }

    /// The bytes by which a reservation can grow.
    fn available(&self, state: &mut State, reservation: &MemoryReservation) -> usize {
        let free = self.limit.saturating_sub(state.bytes());
        let consumer = reservation.consumer();
        if !consumer.can_spill() && !consumer.name().starts_with(MERGE) {
            return free;
        }
        let part = (self.limit / 5 * 2).min(self.limit.saturating_sub(state.others.bytes));
        let share = part / state.kind(consumer).consumers.max(1);
        free.min(share.saturating_sub(reservation.size()))
    }
}

impl fmt::Display for SharedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", self.name(), human_readable_size(self.limit))
    }
}

impl MemoryPool for SharedPool {
    fn name(&self) -> &str {
        "shared"
    }

    fn register(&self, consumer: &MemoryConsumer) {
        self.state.lock().kind(consumer).consumers += 1;
    }

    fn unregister(&self, consumer: &MemoryConsumer) {
        let mut state = self.state.lock();
        let kind = state.kind(consumer);
        kind.consumers = kind.consumers.saturating_sub(1);
    }

    fn grow(&self, reservation: &MemoryReservation, additional: usize) {
        self.state.lock().kind(reservation.consumer()).bytes += additional;
    }

    fn shrink(&self, reservation: &MemoryReservation, shrink: usize) {
        let mut state = self.state.lock();
        let kind = state.kind(reservation.consumer());
        kind.bytes = kind.bytes.saturating_sub(shrink);
    }

    fn try_grow(&self, reservation: &MemoryReservation, additional: usize) -> Result<()> {
        let mut state = self.state.lock();
        let available = self.available(&mut state, reservation);
        if additional > available {
            return Err(resources_datafusion_err!(
                "{} needs {} more than the {} that it has, and of {} it can get {}",
                reservation.consumer().name(),
                human_readable_size(additional),
                human_readable_size(reservation.size()),
                human_readable_size(self.limit),
                human_readable_size(available)
            ));
        }
        state.kind(reservation.consumer()).bytes += additional;
        Ok(())
    }

    fn reserved(&self) -> usize {
        self.state.lock().bytes()
    }

    fn memory_limit(&self) -> MemoryLimit {
        MemoryLimit::Finite(self.limit)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// By hand, of 100 bytes: 40 for the operators that spill, 40 for merges, and the rest for others.
    #[test]
    fn every_kind_has_a_part() {
        let pool: Arc<dyn MemoryPool> = Arc::new(SharedPool::new(100));
        let sorts = ["ExternalSorter[0]", "ExternalSorter[1]"]
            .map(|name| MemoryConsumer::new(name).with_can_spill(true).register(&pool));
        let merge = MemoryConsumer::new("ExternalSorterMerge[0]").register(&pool);
        let writer = MemoryConsumer::new("ParquetSink").register(&pool);
        assert!(sorts[0].try_grow(21).is_err());
        sorts.iter().for_each(|sort| sort.try_grow(20).unwrap());
        assert!(merge.try_grow(41).is_err());
        merge.try_grow(40).unwrap();
        let error = writer.try_grow(21).unwrap_err().strip_backtrace();
        let said = "Resources exhausted: ParquetSink needs 21.0 B more than the 0.0 B that it has, and of 100.0 B it can get 20.0 B";
        assert_eq!(error, said);
        writer.try_grow(20).unwrap();
        assert_eq!(pool.reserved(), 100);
        drop(merge);
        writer.try_grow(40).unwrap();
        // What cannot spill may take more than the rest. Then less is left to the others.
        sorts[0].free();
        sorts[1].free();
        writer.try_grow(20).unwrap();
        assert!(sorts[0].try_grow(11).is_err());
        sorts[0].try_grow(10).unwrap();
        drop((sorts, writer));
        assert_eq!(pool.reserved(), 0);
    }
}
