//! A cache of token vectors.
//!
//! The vector of a word depends on its characters only, so a cached vector has the same bits as a computed one. The
//! cache needs no vocabulary and cannot change a result.

use std::sync::Arc;

use quick_cache::{Weighter, sync::Cache};

/// Overhead of an entry in bytes.
const OVERHEAD: u64 = 96;

#[derive(Debug, Clone)]
struct ByBytes;

impl Weighter<Box<str>, Arc<[f32]>> for ByBytes {
    fn weight(&self, word: &Box<str>, vector: &Arc<[f32]>) -> u64 {
        word.len() as u64 + 4 * vector.len() as u64 + OVERHEAD
    }
}

/// Word -> token vector (`P` values), bounded by bytes, shared by all lanes of the CPU.
#[derive(Debug)]
pub(crate) struct WordCache {
    /// `None` when disabled.
    cache: Option<Cache<Box<str>, Arc<[f32]>, ByBytes>>,
}

impl WordCache {
    /// A cache of at most `bytes` for vectors of `width` values; 0 disables it.
    pub(crate) fn new(bytes: usize, width: usize) -> Self {
        let entry = 4 * width as u64 + OVERHEAD + 8;
        let cache = (bytes > 0).then(|| {
            let items = (bytes as u64 / entry).max(16) as usize;
            Cache::with_weighter(items, bytes as u64, ByBytes)
        });
        Self { cache }
    }

    pub(crate) fn get(&self, word: &str) -> Option<Arc<[f32]>> {
        self.cache.as_ref()?.get(word)
    }

    pub(crate) fn insert(&self, word: &str, vector: &[f32]) {
        if let Some(cache) = &self.cache {
            cache.insert(word.into(), vector.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stays_within_its_bytes() {
        let cache = WordCache::new(64 << 10, 16);
        for i in 0..10_000 {
            cache.insert(&format!("word{i}"), &[0.5; 16]);
        }
        let inner = cache.cache.as_ref().unwrap();
        assert!(inner.weight() <= 64 << 10);
        assert!(inner.len() > 100);
    }

    #[test]
    fn zero_bytes_switch_it_off() {
        let cache = WordCache::new(0, 16);
        cache.insert("a", &[1.0; 16]);
        assert!(cache.get("a").is_none());
    }
}
