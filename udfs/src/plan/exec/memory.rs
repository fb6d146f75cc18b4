//! The memory of one partition, as a reservation of the query's memory pool.
//!
//! DataFusion's spillable operators may fill a pool, and none of them spills because another operator needs memory. So
//! the reservation never becomes smaller than the largest chunk so far: the next chunk of that size always fits.

use std::sync::Arc;

use datafusion::{
    common::{DataFusionError, resources_datafusion_err},
    execution::memory_pool::{MemoryConsumer, MemoryPool, MemoryReservation},
};

use crate::cache::VectorCache;

/// What a partition holds: rows that were read ahead, chunks that are embedded, and those that are being returned.
/// Dropping it returns everything to the pool.
#[derive(Debug)]
pub(super) struct PartitionMemory {
    pool: Arc<dyn MemoryPool>,
    reservation: MemoryReservation,
    /// Caches that are evicted when the pool is exhausted.
    caches: Vec<Arc<VectorCache>>,
    /// Bytes in use. The reservation may be larger, never smaller.
    used: usize,
    /// Bytes that stay reserved.
    kept: usize,
}

impl PartitionMemory {
    pub(super) fn new(partition: usize, pool: &Arc<dyn MemoryPool>, caches: Vec<Arc<VectorCache>>) -> Self {
        let reservation = MemoryConsumer::new(format!("EmbedExec[{partition}]")).register(pool);
        Self { pool: Arc::clone(pool), reservation, caches, used: 0, kept: 0 }
    }

    /// Takes bytes that will be allocated, and evicts cached vectors if the pool is exhausted. Returns `false`, and takes
    /// nothing, if that does not suffice.
    pub(super) fn take(&mut self, bytes: usize) -> bool {
        let missing = self.missing(bytes);
        let fits = missing == 0
            || self.reservation.try_grow(missing).is_ok()
            || self.caches.iter().any(|cache| {
                std::iter::from_fn(|| cache.evict_oldest().then_some(()))
                    .any(|()| self.reservation.try_grow(missing).is_ok())
            });
        if fits {
            self.used += bytes;
        }
        fits
    }

    /// Counts bytes that are allocated already, even if they exceed the pool.
    pub(super) fn count(&mut self, bytes: usize) {
        if !self.take(bytes) {
            self.reservation.grow(self.missing(bytes));
            self.used += bytes;
        }
    }

    /// Returns bytes that were taken or counted.
    pub(super) fn release(&mut self, bytes: usize) {
        self.used = self.used.saturating_sub(bytes);
        let excess = self.reservation.size().saturating_sub(self.used.max(self.kept));
        self.reservation.shrink(excess);
    }

    /// Keeps at least these bytes reserved from now on, in use or not.
    pub(super) fn keep(&mut self, bytes: usize) {
        self.kept = self.kept.max(bytes);
    }

    /// Returns the bytes that were kept: there are no further chunks.
    pub(super) fn keep_nothing(&mut self) {
        self.kept = 0;
        self.release(0);
    }

    /// The error when not even one row fits.
    pub(super) fn exhausted(&self, bytes: usize) -> DataFusionError {
        let needed = (self.pool.reserved() + self.missing(bytes)).div_ceil(1 << 20);
        resources_datafusion_err!(
            "embedding the next row needs {bytes} bytes more than the memory limit of the query allows: raise --memory-limit \
             (datafusion.runtime.memory_limit) to at least {needed}MB"
        )
    }

    /// Bytes by which the reservation has to grow.
    fn missing(&self, bytes: usize) -> usize {
        (self.used + bytes).saturating_sub(self.reservation.size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use datafusion::{
        arrow::array::{ArrayRef, Int32Array, StringArray},
        execution::memory_pool::FairSpillPool,
    };

    fn pool(bytes: usize) -> Arc<dyn MemoryPool> {
        Arc::new(FairSpillPool::new(bytes))
    }

    /// Puts a result of a little more than 4,000 bytes into a cache.
    fn cache_result(cache: &Arc<VectorCache>, pool: &Arc<dyn MemoryPool>, text: &str) {
        let texts: ArrayRef = Arc::new(StringArray::from(vec![text]));
        let lookup = cache.look_up("f", &texts, 1 << 20).unwrap();
        let memory = MemoryConsumer::new("cache").register(pool);
        lookup.own.publish(Arc::new(Int32Array::from(vec![1; 1000])), &memory);
    }

    #[test]
    fn a_reservation_grows_and_shrinks_and_is_released_on_drop() {
        let pool = pool(100);
        let mut memory = PartitionMemory::new(0, &pool, Vec::new());
        assert!(memory.take(60) && pool.reserved() == 60);
        assert!(!memory.take(41) && pool.reserved() == 60);
        memory.release(20);
        assert_eq!(pool.reserved(), 40);
        // Bytes that exist are counted, even above the limit.
        memory.count(100);
        assert_eq!(pool.reserved(), 140);
        drop(memory);
        assert_eq!(pool.reserved(), 0);
    }

    /// A spillable consumer that takes all the rest of the pool does not take what the next chunk needs.
    #[test]
    fn the_largest_chunk_stays_reserved_until_there_are_no_more() {
        let pool = pool(100);
        let mut memory = PartitionMemory::new(0, &pool, Vec::new());
        assert!(memory.take(30));
        memory.keep(30);
        memory.release(30);
        assert_eq!(pool.reserved(), 30);
        let sort = MemoryConsumer::new("sort").with_can_spill(true).register(&pool);
        assert!(sort.try_grow(70).is_ok() && sort.try_grow(1).is_err());
        assert!(memory.take(30) && !memory.take(1));
        memory.release(30);
        memory.keep_nothing();
        assert_eq!(pool.reserved(), 70);
    }

    #[test]
    fn cached_vectors_are_evicted_when_the_pool_is_exhausted() {
        let (pool, cache) = (pool(12_000), Arc::new(VectorCache::default()));
        cache_result(&cache, &pool, "a");
        cache_result(&cache, &pool, "b");
        let cached = pool.reserved();
        assert!((8000..10_000).contains(&cached), "{cached}");
        let mut memory = PartitionMemory::new(0, &pool, vec![Arc::clone(&cache)]);
        // Only as much as necessary, the oldest first.
        assert!(memory.take(5000));
        assert_eq!(pool.reserved(), 5000 + cached / 2);
        assert!(memory.take(7000));
        assert_eq!(pool.reserved(), 12_000);
        // With nothing left to evict, vectors are not cached.
        cache_result(&cache, &pool, "c");
        assert_eq!(pool.reserved(), 12_000);
        assert!(!memory.take(1));
    }

    /// By hand: 3 MiB are reserved, and one more byte needs a fourth.
    #[test]
    fn the_error_names_a_limit_that_suffices() {
        let pool = pool(3 << 20);
        let mut memory = PartitionMemory::new(0, &pool, Vec::new());
        assert!(memory.take(3 << 20) && !memory.take(1));
        let error = memory.exhausted(1).strip_backtrace();
        assert!(error.contains("--memory-limit") && error.ends_with("at least 4MB"), "{error}");
    }
}
