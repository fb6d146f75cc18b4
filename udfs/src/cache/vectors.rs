//! Results for the texts of columns: each distinct text is embedded once, as long as the cache has room.
//!
//! A *submission* is the set of texts that one chunk of rows sends to the model. The cache maps each text to a
//! submission and a row of its result. When the cache exceeds its capacity, or its share of the memory pool of the query
//! that made it, the oldest completed submission is evicted.
//!
//! A chunk that needs a text of another chunk's submission waits for that submission, but only after it has completed
//! its own. So two chunks never wait for each other.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    sync::{Arc, Mutex},
};

use datafusion::{
    arrow::array::{Array, ArrayRef, UInt64Array},
    error::Result,
    execution::memory_pool::MemoryReservation,
};
use tokio::{runtime::Handle, sync::watch};

use super::key::{ENTRY_BYTES, TextKey, call_key, text_keys};
use crate::sync::lock;

/// Results by call and text.
#[derive(Debug, Default)]
pub(crate) struct VectorCache {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By call, then by text.
    locations: HashMap<Arc<str>, HashMap<TextKey, Location>>,
    /// Completed submissions, the oldest first.
    completed: VecDeque<Cached>,
    /// Bytes of all completed submissions.
    bytes: usize,
}

/// A completed submission, and its share of a memory pool.
#[derive(Debug)]
struct Cached {
    submission: Arc<Submission>,
    memory: MemoryReservation,
}

/// Where the result for a text is.
#[derive(Debug, Clone)]
struct Location {
    submission: Arc<Submission>,
    row: u32,
}

/// The texts that one chunk sends to the model, and their results.
#[derive(Debug)]
pub(crate) struct Submission {
    call: Arc<str>,
    texts: Vec<TextKey>,
    /// `None` until the results are published. One row per text.
    results: watch::Receiver<Option<ArrayRef>>,
}

impl Submission {
    /// Waits for the results. `None` when the submission was cancelled or failed.
    pub(crate) async fn completed(&self) -> Option<ArrayRef> {
        let mut results = self.results.clone();
        let completed = results.wait_for(Option::is_some).await.ok()?;
        completed.clone()
    }

    /// Bytes of the submission with its results.
    fn bytes(&self, results: &ArrayRef) -> usize {
        let texts: usize = self.texts.iter().map(|text| text.len() + ENTRY_BYTES).sum();
        texts + results.get_array_memory_size()
    }
}

/// A submission whose results its owner has to publish. Dropping it unpublished cancels it: the chunks that wait for it
/// compute its texts themselves.
#[derive(Debug)]
pub(crate) struct PendingSubmission {
    cache: Arc<VectorCache>,
    submission: Arc<Submission>,
    results: watch::Sender<Option<ArrayRef>>,
    capacity: usize,
    published: bool,
}

/// Where the results for the rows of a chunk come from.
#[derive(Debug)]
pub(crate) struct Lookup {
    /// Per row, an index into `submissions` and a row of that submission's results. `None` for a NULL text.
    pub(crate) locations: Vec<Option<(u32, u32)>>,
    /// The first is the chunk's own submission.
    pub(crate) submissions: Vec<Arc<Submission>>,
    /// The chunk's own submission, to be published.
    pub(crate) own: PendingSubmission,
    /// Per text of the chunk's own submission, the row of the chunk that has it.
    pub(crate) own_rows: UInt64Array,
    /// Rows whose text occurs earlier in the chunk.
    pub(crate) duplicates: usize,
    /// Rows whose text is in the cache or in another chunk's submission.
    pub(crate) hits: usize,
}

impl VectorCache {
    /// Looks up the texts of a chunk. Those that are not in the cache form the chunk's own submission. With a capacity
    /// of 0 bytes nothing is cached, and only duplicates within the chunk are found.
    ///
    /// # Errors
    /// When Arrow's row format does not support the type of the texts.
    pub(crate) fn look_up(self: &Arc<Self>, call: &str, texts: &ArrayRef, capacity: usize) -> Result<Lookup> {
        // A submission makes progress only while its runtime runs, so runtimes do not share submissions.
        let runtime = Handle::try_current().map_or_else(|_| String::new(), |handle| handle.id().to_string());
        let call: Arc<str> = format!("{} {runtime}", call_key(call, texts.data_type())).into();
        let keys = text_keys(texts)?;
        let nulls = texts.logical_nulls();
        let (sender, results) = watch::channel(None);
        let mut own_rows: Vec<u64> = Vec::new();
        let mut own_texts: Vec<TextKey> = Vec::new();
        let mut in_chunk: HashMap<&[u8], (u32, u32)> = HashMap::new();
        let mut others: Vec<Arc<Submission>> = Vec::new();
        let mut locations = Vec::with_capacity(texts.len());
        let (mut duplicates, mut hits) = (0, 0);
        let mut state = lock(&self.state);
        let mut empty = HashMap::new();
        let cached = match capacity {
            0 => &mut empty,
            _ => state.locations.entry(Arc::clone(&call)).or_default(),
        };
        for (row, key) in keys.iter().enumerate() {
            if nulls.as_ref().is_some_and(|nulls| nulls.is_null(row)) {
                locations.push(None);
                continue;
            }
            let location = match in_chunk.entry(key) {
                Entry::Occupied(location) => {
                    duplicates += 1;
                    *location.get()
                }
                Entry::Vacant(vacant) => *vacant.insert(match cached.get(key.as_ref()) {
                    Some(location) => {
                        hits += 1;
                        let index = others.iter().position(|other| Arc::ptr_eq(other, &location.submission));
                        let index = index.unwrap_or_else(|| {
                            others.push(Arc::clone(&location.submission));
                            others.len() - 1
                        });
                        (index as u32 + 1, location.row)
                    }
                    None => {
                        own_rows.push(row as u64);
                        own_texts.push(Arc::clone(key));
                        (0, own_rows.len() as u32 - 1)
                    }
                }),
            };
            locations.push(Some(location));
        }
        let submission = Arc::new(Submission { call, texts: own_texts, results });
        if capacity > 0 {
            for (row, text) in submission.texts.iter().enumerate() {
                let location = Location { submission: Arc::clone(&submission), row: row as u32 };
                cached.insert(Arc::clone(text), location);
            }
        }
        drop(state);
        let submissions = [Arc::clone(&submission)].into_iter().chain(others).collect();
        let own =
            PendingSubmission { cache: Arc::clone(self), submission, results: sender, capacity, published: false };
        Ok(Lookup { locations, submissions, own, own_rows: own_rows.into(), duplicates, hits })
    }

    /// Evicts the oldest completed submission. Returns `false` if there is none.
    pub(crate) fn evict_oldest(&self) -> bool {
        lock(&self.state).evict_oldest()
    }
}

impl State {
    fn evict_oldest(&mut self) -> bool {
        let Some(oldest) = self.completed.pop_front() else { return false };
        self.bytes -= oldest.memory.size();
        self.remove(&oldest.submission);
        true
    }

    /// Evicts submissions until there is room for another one, and reserves its memory. Returns `false` if other
    /// consumers have exhausted the memory pool.
    fn make_room(&mut self, bytes: usize, capacity: usize, memory: &MemoryReservation) -> bool {
        while self.bytes + bytes > capacity && self.evict_oldest() {}
        while memory.try_grow(bytes).is_err() {
            if !self.evict_oldest() {
                return false;
            }
        }
        true
    }

    /// Removes the texts of a submission.
    fn remove(&mut self, submission: &Arc<Submission>) {
        let Some(cached) = self.locations.get_mut(&submission.call) else { return };
        for text in &submission.texts {
            if cached.get(text).is_some_and(|location| Arc::ptr_eq(&location.submission, submission)) {
                cached.remove(text);
            }
        }
        if cached.is_empty() {
            self.locations.remove(&submission.call);
        }
    }
}

impl PendingSubmission {
    /// Sends the results to every chunk that waits for them, and caches them while there is room. `memory` is a consumer
    /// of the query's memory pool.
    pub(crate) fn publish(mut self, results: ArrayRef, memory: &MemoryReservation) {
        self.published = true;
        let (bytes, memory) = (self.submission.bytes(&results), memory.new_empty());
        self.results.send_replace(Some(results));
        let mut state = lock(&self.cache.state);
        let is_cacheable = bytes <= self.capacity && !self.submission.texts.is_empty();
        if !is_cacheable || !state.make_room(bytes, self.capacity, &memory) {
            return state.remove(&self.submission);
        }
        state.bytes += bytes;
        state.completed.push_back(Cached { submission: Arc::clone(&self.submission), memory });
    }
}

impl Drop for PendingSubmission {
    fn drop(&mut self) {
        if !self.published {
            lock(&self.cache.state).remove(&self.submission);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use datafusion::{
        arrow::array::{Int32Array, StringArray, StringViewArray},
        execution::memory_pool::{MemoryConsumer, MemoryPool, UnboundedMemoryPool},
    };

    fn unbounded() -> MemoryReservation {
        let pool: Arc<dyn MemoryPool> = Arc::new(UnboundedMemoryPool::default());
        MemoryConsumer::new("cache").register(&pool)
    }

    fn texts(texts: &[Option<&str>]) -> ArrayRef {
        Arc::new(StringArray::from(texts.to_vec()))
    }

    fn own_rows(lookup: &Lookup) -> &[u64] {
        lookup.own_rows.values()
    }

    #[tokio::test]
    async fn equal_texts_are_computed_once() {
        let cache = Arc::new(VectorCache::default());
        let first = cache.look_up("f", &texts(&[Some("a"), None, Some("b"), Some("a")]), 1 << 20).unwrap();
        assert_eq!((own_rows(&first), first.duplicates, first.hits), ([0, 2].as_slice(), 1, 0));
        assert_eq!(first.locations, [Some((0, 0)), None, Some((0, 1)), Some((0, 0))]);
        // While the first is computed, a chunk in another encoding finds its texts; a chunk of another call does not.
        let views: ArrayRef = Arc::new(StringViewArray::from(vec!["b", "c"]));
        let second = cache.look_up("f", &views, 1 << 20).unwrap();
        assert_eq!((own_rows(&second), second.hits), ([1].as_slice(), 1));
        assert_eq!(second.locations, [Some((1, 1)), Some((0, 0))]);
        assert_eq!(own_rows(&cache.look_up("g", &views, 1 << 20).unwrap()).len(), 2);
        first.own.publish(Arc::new(Int32Array::from(vec![10, 20])), &unbounded());
        assert_eq!(second.submissions[1].completed().await.unwrap().len(), 2);
        // A cancelled submission is no longer found, and chunks that wait for it are told.
        let submission = Arc::clone(&second.submissions[0]);
        drop(second);
        assert!(submission.completed().await.is_none());
        assert_eq!(own_rows(&cache.look_up("f", &views, 1 << 20).unwrap()), [1]);
    }

    #[test]
    fn the_oldest_is_evicted_first_and_nothing_is_cached_without_capacity() {
        let cache = Arc::new(VectorCache::default());
        let computes = |text: &str, capacity: usize| {
            let lookup = cache.look_up("f", &texts(&[Some(text)]), capacity).unwrap();
            let computes = !lookup.own_rows.is_empty();
            if computes {
                lookup.own.publish(Arc::new(Int32Array::from(vec![1; 1000])), &unbounded());
            }
            computes
        };
        // Each takes a little more than 4,000 bytes.
        assert!(computes("a", 9000) && computes("b", 9000) && !computes("a", 9000));
        assert!(computes("c", 9000) && !computes("b", 9000) && computes("a", 9000));
        assert!(computes("z", 0) && computes("z", 0));
        assert!(lock(&cache.state).bytes <= 9000);
    }
}
