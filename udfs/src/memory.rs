//! What the memory limit of a query allows.

use datafusion::execution::memory_pool::{MemoryLimit, MemoryPool};

/// `most` bytes, or that part of the limit of a pool if it is less.
pub(crate) fn at_most(most: usize, part: usize, pool: &dyn MemoryPool) -> usize {
    match pool.memory_limit() {
        MemoryLimit::Finite(limit) => most.min(limit / part),
        MemoryLimit::Infinite | MemoryLimit::Unknown => most,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use datafusion::execution::memory_pool::{FairSpillPool, UnboundedMemoryPool};

    #[test]
    fn a_part_counts_only_with_a_limit() {
        assert_eq!(at_most(100, 4, &UnboundedMemoryPool::default()), 100);
        assert_eq!(at_most(100, 4, &FairSpillPool::new(80)), 20);
        assert_eq!(at_most(100, 4, &FairSpillPool::new(8000)), 100);
    }
}
