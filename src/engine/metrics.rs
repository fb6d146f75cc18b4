//! Counters of the engine, and what a single request cost.

use std::ops::AddAssign;

/// Counters since the start of an [`Embedder`](super::Embedder).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct EmbedderMetrics {
    /// Sentences (or windows of sentences) computed.
    pub sentences: u64,
    /// Tokens computed, boundaries included where they were read.
    pub tokens: u64,
    /// Rows computed for these tokens, including the padding of narrow steps.
    pub padded_tokens: u64,
    /// Batches computed.
    pub batches: u64,
    /// Tokens whose word was in the word cache.
    pub cache_hits: u64,
    /// Tokens whose word was computed in their batch.
    pub cache_misses: u64,
    /// Words given to the character CNN.
    pub words_computed: u64,
    /// Seconds in which devices were busy, summed over devices.
    pub device_seconds: f64,
    /// Seconds that sentences waited in the queue, summed over sentences.
    pub queue_seconds: f64,
    /// Floating point operations of the matrix products for these tokens, in 1e9. Padding is not counted, and neither are products that a
    /// token shares with another one, on a CPU.
    pub gflop: f64,
    /// Batches split because a device ran out of memory.
    pub oom_splits: u64,
    /// Lanes that retired because their device failed.
    pub lanes_retired: u64,
}

/// What one request cost. The cost of a batch is divided among its sentences in proportion to their tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cost {
    /// Tokens computed, boundaries included where they were read.
    pub tokens: f64,
    /// Rows computed for these tokens, including the padding of narrow steps.
    pub padded_tokens: f64,
    /// Tokens whose word was in the word cache.
    pub cache_hits: f64,
    /// Seconds of device time.
    pub device_seconds: f64,
    /// Seconds that the sentences waited in the queue, summed over sentences.
    pub queue_seconds: f64,
}

impl Cost {
    pub(super) fn times(self, share: f64) -> Self {
        Self {
            tokens: share * self.tokens,
            padded_tokens: share * self.padded_tokens,
            cache_hits: share * self.cache_hits,
            device_seconds: share * self.device_seconds,
            queue_seconds: share * self.queue_seconds,
        }
    }
}

impl AddAssign for Cost {
    fn add_assign(&mut self, more: Self) {
        self.tokens += more.tokens;
        self.padded_tokens += more.padded_tokens;
        self.cache_hits += more.cache_hits;
        self.device_seconds += more.device_seconds;
        self.queue_seconds += more.queue_seconds;
    }
}
