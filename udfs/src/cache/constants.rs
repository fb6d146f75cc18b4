//! A bounded cache of results for constant texts.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex},
};

use datafusion::{
    arrow::array::{Array, ArrayRef},
    error::Result,
};

use super::key::{ENTRY_BYTES, TextKey, call_key, text_keys};
use crate::sync::lock;

/// Maximum number of cached constants. A session has a few.
const MAX_CONSTANTS: usize = 256;
/// Maximum bytes of all cached constants. The tokens of a long text may take megabytes.
const MAX_CONSTANT_BYTES: usize = 16 << 20;

/// Results by call and constant text. The oldest entry is evicted first.
#[derive(Debug, Default)]
pub(crate) struct ConstantCache(Mutex<Entries>);

/// A result. Locked while it is computed: of several threads that need the same result, one computes it.
type Slot = Arc<Mutex<Option<ArrayRef>>>;

/// A call and its text.
type Key = Arc<(String, TextKey)>;

#[derive(Debug, Default)]
struct Entries {
    /// The result and its size in bytes, which is 0 until the result is computed.
    slots: HashMap<Key, (Slot, usize)>,
    /// Keys by age, the oldest first.
    order: VecDeque<Key>,
    bytes: usize,
}

impl Entries {
    fn get_or_insert(&mut self, key: &Key) -> Slot {
        if let Some((slot, _)) = self.slots.get(key) {
            return Arc::clone(slot);
        }
        let slot = Slot::default();
        self.slots.insert(Arc::clone(key), (Arc::clone(&slot), 0));
        self.order.push_back(Arc::clone(key));
        self.evict();
        slot
    }

    /// Records the size of a computed result. A result larger than the whole cache is removed, and evicts nothing.
    fn set_bytes(&mut self, key: &Key, slot: &Slot, bytes: usize) {
        if bytes > MAX_CONSTANT_BYTES {
            return self.forget(key, slot);
        }
        // The entry may have been evicted while the result was computed.
        if let Some((current, recorded)) = self.slots.get_mut(key)
            && Arc::ptr_eq(current, slot)
        {
            self.bytes = self.bytes - *recorded + bytes;
            *recorded = bytes;
            self.evict();
        }
    }

    fn forget(&mut self, key: &Key, slot: &Slot) {
        if self.slots.get(key).is_some_and(|(current, _)| Arc::ptr_eq(current, slot)) {
            self.order.retain(|other| other != key);
            self.remove(key);
        }
    }

    fn evict(&mut self) {
        while (self.slots.len() > MAX_CONSTANTS || self.bytes > MAX_CONSTANT_BYTES)
            && let Some(oldest) = self.order.pop_front()
        {
            self.remove(&oldest);
        }
    }

    fn remove(&mut self, key: &Key) {
        if let Some((_, bytes)) = self.slots.remove(key) {
            self.bytes -= bytes;
        }
    }
}

impl ConstantCache {
    /// Returns the cached result for a constant text, an array of one row, or computes it. Errors are not cached.
    ///
    /// # Errors
    /// Those of `compute`, and when Arrow's row format does not support the type of the text.
    pub(crate) fn get_or_compute(
        &self,
        call: &str,
        text: &ArrayRef,
        compute: impl FnOnce() -> Result<ArrayRef>,
    ) -> Result<ArrayRef> {
        let text_key = text_keys(text)?.into_iter().next().unwrap_or_else(|| Arc::from([]));
        let key: Key = Arc::new((call_key(call, text.data_type()), text_key));
        let slot = lock(&self.0).get_or_insert(&key);
        let mut value = lock(&slot);
        if let Some(value) = value.as_ref() {
            return Ok(Arc::clone(value));
        }
        let computed = match compute() {
            Ok(computed) => computed,
            Err(error) => {
                lock(&self.0).forget(&key, &slot);
                return Err(error);
            }
        };
        *value = Some(Arc::clone(&computed));
        let bytes = key.0.len() + key.1.len() + ENTRY_BYTES + computed.get_array_memory_size();
        lock(&self.0).set_bytes(&key, &slot, bytes);
        Ok(computed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use datafusion::arrow::array::{Int32Array, StringArray};

    fn text(text: &str) -> ArrayRef {
        Arc::new(StringArray::from(vec![text]))
    }

    /// Whether the result for a constant, which has this many bytes, had to be computed.
    fn computes(cache: &ConstantCache, constant: &str, bytes: usize) -> bool {
        let mut computed = false;
        let value = cache.get_or_compute("f", &text(constant), || {
            computed = true;
            Ok(Arc::new(Int32Array::from(vec![1; bytes / 4])) as ArrayRef)
        });
        assert_eq!(value.unwrap().len(), bytes / 4);
        computed
    }

    #[test]
    fn constants_are_bounded_in_bytes() {
        let cache = ConstantCache::default();
        // With its key, an entry takes a little more than a quarter of the cache.
        let large = MAX_CONSTANT_BYTES / 4;
        let counted = || lock(&cache.0).bytes;
        assert!(["a", "b", "c"].iter().all(|text| computes(&cache, text, large)));
        assert!(["a", "b", "c"].iter().all(|text| !computes(&cache, text, large)));
        assert!(counted() > 3 * large);
        // Only the oldest entry is evicted.
        assert!(computes(&cache, "d", large));
        assert!(["b", "c", "d"].iter().all(|text| !computes(&cache, text, large)));
        assert!(computes(&cache, "a", large) && counted() <= MAX_CONSTANT_BYTES);
        // A result larger than the cache and an error are not cached, and evict nothing.
        assert!(computes(&cache, "huge", 4 * large) && computes(&cache, "huge", 4 * large));
        assert!(cache.get_or_compute("f", &text("bad"), || datafusion::common::exec_err!("bad")).is_err());
        assert!(["c", "d", "a"].iter().all(|text| !computes(&cache, text, large)));
        assert_eq!(lock(&cache.0).order.len(), 3);
    }

    #[test]
    fn the_oldest_of_many_constants_is_evicted_first() {
        let cache = ConstantCache::default();
        let texts: Vec<String> = (0..=MAX_CONSTANTS).map(|n| n.to_string()).collect();
        assert!(texts.iter().all(|text| computes(&cache, text, 4)));
        assert!(texts[1..].iter().all(|text| !computes(&cache, text, 4)));
        assert!(computes(&cache, "0", 4) && !computes(&cache, "2", 4));
    }
}
