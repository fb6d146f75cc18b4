//! The engine: one handle, one OS thread per device (per core on a CPU), one queue.
//!
//! Callers of any kind (a bulk job, many SQL partitions, a Kafka consumer) hand in *sentences*; free
//! devices take batches that the planner (`planner.rs`) forms over all of them; each caller gets its
//! answers in the order it asked.
//!
//! * The queue is bounded by tokens. A full queue makes callers wait (`submit` blocks,
//!   `submit_async` yields); a request goes in as a whole while fewer tokens wait, so none waits for ever.
//! * A device never waits for more work than there is, so a caller that blocks on its answer, on any
//!   runtime, always gets it: device threads need nothing from callers to make progress.
//! * An answer that nobody waits for any more is dropped; its sentences that still wait are skipped.
//! * A batch that does not fit the device's memory is split and tried again; a sentence that does not fit
//!   alone is an error of that sentence only.

use std::{
    collections::HashMap,
    fmt,
    future::{Future, poll_fn},
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
    task::{Context, Poll, Waker},
    thread::JoinHandle,
    time::Instant,
};

use crate::{
    chars,
    error::{Error, Result},
    model::{Activations, BiLm, DeviceError, DeviceName, LayerValues, StartState},
    planner::{Group, Planner},
    pooling::{Partial, Reducer},
    spec::Pooling,
    word_cache::WordCache,
};

pub use crate::model::{DeviceChoice, Precision, parse_devices};

/// How the engine uses the machine. Nothing here changes a result on a given device and precision.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbedderSettings {
    /// Where to run.
    pub devices: Vec<DeviceChoice>,
    /// OS threads on the CPU, each with its own batch; `None`: one per core.
    pub threads: Option<usize>,
    /// Padded tokens of one batch: rows that run side by side x steps. Larger is faster up to a point and takes more
    /// memory. `None`: 8,192 for a CPU core, 65,536 for a GPU.
    pub batch_tokens: Option<usize>,
    /// Most bytes of the word cache that all devices share: words, their vectors (`4P` bytes each) and some 100 bytes
    /// for each entry. 0 switches it off.
    pub cache_bytes: usize,
    /// Tokens, padding not counted, that may wait before callers are made to. A request goes in as a whole while fewer
    /// wait, so there may be more by that one.
    pub queue_tokens: usize,
    /// Number format on the device.
    pub precision: Precision,
}

impl Default for EmbedderSettings {
    fn default() -> Self {
        Self {
            devices: vec![DeviceChoice::Auto],
            threads: None,
            batch_tokens: None,
            cache_bytes: 256 << 20,
            queue_tokens: 1 << 20,
            precision: Precision::F32,
        }
    }
}

/// Padded tokens of a batch, and the rows from which on more make its products no faster: with 256 rows the products of
/// the largest published model run as fast as with 512 (measured, Zen 3), and with 64 a quarter slower.
const CPU_BATCH: (usize, usize) = (8192, 256);
/// The same for a GPU, which hides the reading of the weights and the launches of a step behind more rows.
const GPU_BATCH: (usize, usize) = (65_536, 1024);

/// Counters since the start of an [`Embedder`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct EmbedderMetrics {
    /// Sentences (or windows of sentences) run.
    pub sentences: u64,
    /// Tokens run, boundaries counted where they were run.
    pub tokens: u64,
    /// Rows computed for them: tokens and what fills narrow steps up.
    pub padded_tokens: u64,
    /// Batches run.
    pub batches: u64,
    /// Distinct words of batches found in the cache, weighted by their tokens.
    pub cache_hits: u64,
    /// Tokens whose word had to be computed or was computed for an earlier token of the same batch.
    pub cache_misses: u64,
    /// Words given to the character CNN.
    pub words_computed: u64,
    /// Seconds that devices were busy, summed over devices.
    pub device_seconds: f64,
    /// Seconds that sentences waited before their batch ran, summed.
    pub queue_seconds: f64,
    /// Operations of the matrix products that real tokens need, in 1e9.
    pub gflop: f64,
    /// Batches split because a device ran out of memory.
    pub oom_splits: u64,
}

/// What one request cost. Of what a batch cost, each of its sentences bears its share of the tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cost {
    /// Tokens run, boundaries counted where they were run.
    pub tokens: f64,
    /// Rows computed for them: tokens and what fills narrow steps up.
    pub padded_tokens: f64,
    /// Tokens whose word was in the word cache.
    pub cache_hits: f64,
    /// Seconds of devices.
    pub device_seconds: f64,
    /// Seconds that sentences waited before their batch ran, summed.
    pub queue_seconds: f64,
}

impl Cost {
    fn times(self, share: f64) -> Self {
        Self {
            tokens: share * self.tokens,
            padded_tokens: share * self.padded_tokens,
            cache_hits: share * self.cache_hits,
            device_seconds: share * self.device_seconds,
            queue_seconds: share * self.queue_seconds,
        }
    }
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, more: Self) {
        self.tokens += more.tokens;
        self.padded_tokens += more.padded_tokens;
        self.cache_hits += more.cache_hits;
        self.device_seconds += more.device_seconds;
        self.queue_seconds += more.queue_seconds;
    }
}

/// Which vector comes out per token.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Output {
    /// `sum factor_k * layer_k`.
    Combined(Vec<(usize, f32)>),
    /// Each layer normalised over the sentence (mean and variance of all its values), then combined.
    Normalized(Vec<f32>),
    /// All layers, one after the other.
    All,
}

/// What to do with a sentence.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Recipe {
    pub(crate) warm: bool,
    pub(crate) boundaries: bool,
    pub(crate) output: Output,
    /// `None`: every token's vector.
    pub(crate) pooling: Option<Pooling>,
}

impl Recipe {
    fn group(&self) -> Group {
        Group::from(self.warm) * 2 + Group::from(self.boundaries)
    }
}

/// The words of one sentence (or window) in one allocation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Words {
    text: String,
    ends: Vec<u32>,
}

impl Words {
    pub(crate) fn push(&mut self, word: &str) {
        self.text.push_str(word);
        self.ends.push(self.text.len() as u32);
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &str> {
        let starts = std::iter::once(0).chain(self.ends.iter().map(|&e| e as usize));
        starts.zip(&self.ends).map(|(start, &end)| &self.text[start..end as usize])
    }
}

/// One unit of work.
#[derive(Debug, Clone)]
pub(crate) struct Sentence {
    pub(crate) words: Words,
    /// Tokens whose vectors are wanted: all, or the middle of a window.
    pub(crate) keep: Range<usize>,
}

/// The answer for one sentence: kept tokens one after the other, or their reduction.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Vectors {
    Tokens(Vec<f32>),
    Pooled(Partial),
}

/// A constant start state other than zero, as numbers that every device can take over.
pub(crate) trait StartStates: Send + Sync + fmt::Debug {
    /// The state before the boundary token is read.
    fn state(&self, model: &BiLm, warm: bool) -> std::result::Result<StartState, DeviceError>;
}

/// A cloneable handle on the engine. The engine drains and stops when the last handle is gone.
#[derive(Debug, Clone)]
pub struct Embedder {
    owner: Arc<Owner>,
}

/// Joins the device threads when the last handle goes.
#[derive(Debug)]
struct Owner {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    /// Device threads wait here for work.
    work: Condvar,
    /// Synchronous callers wait here for room.
    room: Condvar,
    cache: WordCache,
    starts: Box<dyn StartStates>,
    capacity: usize,
    tokens_at_once: usize,
    metrics: Mutex<EmbedderMetrics>,
}

#[derive(Debug)]
struct Queue {
    planner: Planner,
    jobs: HashMap<u64, Job>,
    next_id: u64,
    /// Asynchronous callers that wait for room.
    wakers: Vec<Waker>,
    closed: bool,
}

#[derive(Debug)]
struct Job {
    sentence: Sentence,
    recipe: Arc<Recipe>,
    /// Gone when the caller is.
    answer: Weak<Answer>,
    place: usize,
    queued: Instant,
    /// Row of its batch, once it is in one; jobs of a batch are in the order of rows.
    row: usize,
}

/// Where device threads put the answers of one request.
#[derive(Debug)]
struct Answer {
    slots: Mutex<Slots>,
    done: Condvar,
}

#[derive(Debug)]
struct Slots {
    vectors: Vec<Option<std::result::Result<Vectors, DeviceError>>>,
    missing: usize,
    waker: Option<Waker>,
    cost: Cost,
}

/// The answers to the sentences of a request, in their order, and what they cost.
pub(crate) type Answers = (Vec<std::result::Result<Vectors, DeviceError>>, Cost);

/// The answer to one request, in the order of its sentences: block on [`Ticket::wait`] or await it.
#[derive(Debug)]
#[must_use]
pub(crate) struct Ticket {
    answer: Arc<Answer>,
    /// Keeps the engine alive while an answer is awaited.
    _owner: Arc<Owner>,
}

/// A poisoned lock means that a thread died while it held plain data that is valid at any time.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Embedder {
    /// Starts one thread per model handle; `width` is `P`.
    pub(crate) fn start(models: Vec<BiLm>, settings: &EmbedderSettings, starts: Box<dyn StartStates>) -> Result<Self> {
        let width = models.first().map_or(1, BiLm::projection_dim);
        let on_gpu = models.iter().any(|model| model.device() != DeviceName::Cpu);
        let (usual, most_rows) = if on_gpu { GPU_BATCH } else { CPU_BATCH };
        let batch_tokens = settings.batch_tokens.unwrap_or(usual);
        let shared = Arc::new(Shared {
            queue: Mutex::new(Queue {
                planner: Planner::new(batch_tokens, most_rows, models.len()),
                jobs: HashMap::new(),
                next_id: 0,
                wakers: Vec::new(),
                closed: false,
            }),
            work: Condvar::new(),
            room: Condvar::new(),
            cache: WordCache::new(settings.cache_bytes, width),
            starts,
            capacity: settings.queue_tokens.max(1),
            tokens_at_once: batch_tokens.saturating_mul(models.len()),
            metrics: Mutex::default(),
        });
        // Made first, so that threads end with it should a later one not start.
        let owner = Arc::new(Owner { shared: Arc::clone(&shared), threads: Mutex::default() });
        for (n, model) in models.into_iter().enumerate() {
            let shared = Arc::clone(&shared);
            let name = format!("elmo {} {n}", model.device());
            let thread = std::thread::Builder::new()
                .name(name)
                .spawn(move || Lane::new(model, shared).serve())
                .map_err(|e| DeviceError::Torch { message: format!("no thread for a device: {e}") })?;
            lock(&owner.threads).push(thread);
        }
        Ok(Self { owner })
    }

    fn shared(&self) -> &Shared {
        &self.owner.shared
    }

    /// Queues sentences; blocks while the queue is full.
    pub(crate) fn submit(&self, sentences: Vec<Sentence>, recipe: &Arc<Recipe>) -> Result<Ticket> {
        let mut queue = lock(&self.shared().queue);
        while queue.planner.tokens() >= self.shared().capacity && !queue.closed {
            queue = self.shared().room.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        self.enqueue(queue, sentences, recipe)
    }

    /// Queues sentences; yields while the queue is full.
    pub(crate) async fn submit_async(&self, sentences: Vec<Sentence>, recipe: &Arc<Recipe>) -> Result<Ticket> {
        let mut sentences = Some(sentences);
        poll_fn(|context| {
            let mut queue = lock(&self.shared().queue);
            if queue.planner.tokens() >= self.shared().capacity && !queue.closed {
                // Once, however often the caller is polled.
                if !queue.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                    queue.wakers.push(context.waker().clone());
                }
                return Poll::Pending;
            }
            Poll::Ready(self.enqueue(queue, sentences.take().unwrap_or_default(), recipe))
        })
        .await
    }

    fn enqueue(
        &self,
        mut queue: MutexGuard<'_, Queue>,
        sentences: Vec<Sentence>,
        recipe: &Arc<Recipe>,
    ) -> Result<Ticket> {
        if queue.closed {
            return Err(Error::Closed);
        }
        let vectors = sentences.iter().map(|_| None).collect();
        let slots = Slots { vectors, missing: sentences.len(), waker: None, cost: Cost::default() };
        let answer = Arc::new(Answer { slots: Mutex::new(slots), done: Condvar::new() });
        let queued = Instant::now();
        for (place, sentence) in sentences.into_iter().enumerate() {
            let id = queue.next_id;
            queue.next_id += 1;
            let (recipe, answer) = (Arc::clone(recipe), Arc::downgrade(&answer));
            let job = Job { sentence, recipe, answer, place, queued, row: 0 };
            queue.planner.push(job.recipe.group(), job.tokens().max(1), id);
            queue.jobs.insert(id, job);
        }
        drop(queue);
        self.shared().work.notify_all();
        Ok(Ticket { answer, _owner: Arc::clone(&self.owner) })
    }

    /// Counters since the start.
    pub fn metrics(&self) -> EmbedderMetrics {
        *lock(&self.shared().metrics)
    }

    /// Padded tokens of a batch on every device.
    pub fn tokens_at_once(&self) -> usize {
        self.shared().tokens_at_once
    }

    /// Refuses new work, finishes what waits, and returns when every device thread has ended.
    pub fn close(&self) {
        self.owner.close();
    }
}

impl Owner {
    fn close(&self) {
        let wakers = {
            let mut queue = lock(&self.shared.queue);
            queue.closed = true;
            std::mem::take(&mut queue.wakers)
        };
        // Never under the lock: a waker may poll at once.
        wakers.into_iter().for_each(Waker::wake);
        self.shared.work.notify_all();
        self.shared.room.notify_all();
        // Held until they have ended, so that a second caller waits as well.
        let mut threads = lock(&self.threads);
        for thread in threads.drain(..) {
            // The last handle may go on a device thread, with an answer that nobody waits for; it ends by itself.
            if thread.thread().id() != std::thread::current().id() {
                // A thread that died has dropped its jobs, and each of them has told its caller.
                let _ = thread.join();
            }
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.close();
    }
}

impl Ticket {
    /// Blocks until every sentence has its answer.
    pub(crate) fn wait(self) -> Answers {
        let mut slots = lock(&self.answer.slots);
        while slots.missing > 0 {
            slots = self.answer.done.wait(slots).unwrap_or_else(PoisonError::into_inner);
        }
        slots.take()
    }
}

impl Future for Ticket {
    type Output = Answers;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut slots = lock(&self.answer.slots);
        if slots.missing > 0 {
            slots.waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(slots.take())
    }
}

impl Slots {
    fn take(&mut self) -> Answers {
        let lost = || Err(DeviceError::Torch { message: "the device thread gave no answer".to_owned() });
        (self.vectors.drain(..).map(|slot| slot.unwrap_or_else(lost)).collect(), self.cost)
    }
}

impl Job {
    fn answer(&self, vectors: std::result::Result<Vectors, DeviceError>) {
        let Some(answer) = self.answer.upgrade() else { return };
        let mut slots = lock(&answer.slots);
        // Once all are there they are taken, and the place is gone.
        match slots.vectors.get_mut(self.place) {
            Some(slot @ None) => *slot = Some(vectors),
            _ => return,
        }
        slots.missing -= 1;
        if slots.missing == 0 {
            let waker = slots.waker.take();
            drop(slots);
            answer.done.notify_all();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    fn bear(&self, cost: Cost) {
        if let Some(answer) = self.answer.upgrade() {
            lock(&answer.slots).cost += cost;
        }
    }

    /// Tokens that are run for it.
    fn tokens(&self) -> usize {
        self.sentence.words.len() + if self.recipe.boundaries { 2 } else { 0 }
    }

    fn is_wanted(&self) -> bool {
        self.answer.strong_count() > 0
    }
}

/// A job that goes without an answer, because its thread died or the engine stopped, says so: nobody waits for ever.
impl Drop for Job {
    fn drop(&mut self) {
        self.answer(Err(DeviceError::Torch { message: "the device thread ended without an answer".to_owned() }));
    }
}

/// One device thread.
struct Lane {
    model: BiLm,
    shared: Arc<Shared>,
    /// By [`Group`]: where a sentence of that group starts.
    starts: HashMap<Group, StartState>,
}

impl Lane {
    fn new(model: BiLm, shared: Arc<Shared>) -> Self {
        Self { model, shared, starts: HashMap::new() }
    }

    /// Takes batches until the engine is closed and the queue is empty.
    fn serve(mut self) {
        while let Some(jobs) = self.next_jobs() {
            let wanted: Vec<Job> = jobs.into_iter().filter(Job::is_wanted).collect();
            if !wanted.is_empty() {
                self.serve_batch(&wanted);
            }
        }
    }

    fn next_jobs(&self) -> Option<Vec<Job>> {
        let mut queue = lock(&self.shared.queue);
        loop {
            if let Some(batch) = queue.planner.next_batch() {
                let mut jobs = Vec::new();
                for (row, ids) in batch.iter().enumerate() {
                    for id in ids {
                        if let Some(mut job) = queue.jobs.remove(id) {
                            job.row = row;
                            jobs.push(job);
                        }
                    }
                }
                let wakers = std::mem::take(&mut queue.wakers);
                drop(queue);
                wakers.into_iter().for_each(Waker::wake);
                self.shared.room.notify_all();
                return Some(jobs);
            }
            if queue.closed {
                return None;
            }
            queue = self.shared.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Runs a batch and answers each of its sentences, whatever happens.
    fn serve_batch(&mut self, jobs: &[Job]) {
        let started = Instant::now();
        // libtorch reports errors as values; a panic here is a fault of ours, and callers must not hang on it.
        let outcome = catch_unwind(AssertUnwindSafe(|| self.run(jobs)));
        self.count_time(jobs, started);
        let error = match outcome {
            Ok(Ok(all)) => {
                return jobs.iter().zip(all).for_each(|(job, vectors)| job.answer(Ok(vectors)));
            }
            Ok(Err(error)) => error,
            Err(_) => DeviceError::Torch { message: "the device thread met a fault of its own".to_owned() },
        };
        if error.is_out_of_memory() && jobs.len() > 1 {
            lock(&self.shared.metrics).oom_splits += 1;
            let (first, second) = jobs.split_at(jobs.len() / 2);
            self.serve_batch(first);
            return self.serve_batch(second);
        }
        jobs.iter().for_each(|job| job.answer(Err(error.clone())));
    }

    fn run(&mut self, jobs: &[Job]) -> std::result::Result<Vec<Vectors>, DeviceError> {
        #[cfg(test)]
        tests::injected_failure(jobs)?;
        let boundaries = jobs[0].recipe.boundaries;
        let mut batch = self.token_table(jobs, boundaries)?;
        let group = jobs[0].recipe.group();
        if !self.starts.contains_key(&group) {
            let mut start = self.shared.starts.state(&self.model, jobs[0].recipe.warm)?;
            if !boundaries {
                start = self.model.after_boundaries(&start)?;
            }
            self.starts.insert(group, start);
        }
        let sentences = std::mem::take(&mut batch.sentences);
        let start = &self.starts[&group];
        let activations = self.model.run_in_rows(&batch.table, &sentences, rows(jobs), start)?;
        let answers = reduce(&activations, jobs)?;
        self.count_work(&batch, &activations, &sentences);
        let tokens: usize = jobs.iter().map(Job::tokens).sum();
        let cost = Cost {
            tokens: tokens as f64,
            padded_tokens: activations.packed_rows() as f64,
            cache_hits: batch.hits as f64,
            ..Cost::default()
        };
        bear(jobs, cost);
        Ok(answers)
    }

    /// Token vectors of the distinct words of a batch, and each sentence as indices into them.
    fn token_table<'j>(&self, jobs: &'j [Job], boundaries: bool) -> std::result::Result<Batch<'j>, DeviceError> {
        let mut batch = Batch::default();
        for job in jobs {
            let mut sentence = Vec::with_capacity(job.sentence.words.len() + 2);
            let bound = |word: &'static str| boundaries.then_some(word);
            let words = bound(chars::BEGIN_SENTENCE_TOKEN)
                .into_iter()
                .chain(job.sentence.words.iter())
                .chain(bound(chars::END_SENTENCE_TOKEN));
            for word in words {
                sentence.push(batch.index_of(word));
            }
            batch.sentences.push(sentence);
        }
        let width = self.model.projection_dim();
        batch.table = vec![0.0; batch.words.len() * width];
        let mut missing = Vec::new();
        for (i, word) in batch.words.iter().enumerate() {
            match self.shared.cache.get(word) {
                Some(vector) => batch.table[i * width..(i + 1) * width].copy_from_slice(&vector),
                None => missing.push(i),
            }
        }
        batch.hits = (0..batch.words.len()).map(|i| batch.uses[i]).sum::<u64>()
            - missing.iter().map(|&i| batch.uses[i]).sum::<u64>();
        let words: Vec<&str> = missing.iter().map(|&i| batch.words[i]).collect();
        let computed = self.model.token_vectors(&words)?;
        for ((&i, word), vector) in missing.iter().zip(&words).zip(computed.chunks_exact(width)) {
            batch.table[i * width..(i + 1) * width].copy_from_slice(vector);
            self.shared.cache.insert(word, vector);
        }
        batch.computed = words;
        Ok(batch)
    }

    fn count_work(&self, batch: &Batch<'_>, activations: &Activations, sentences: &[Vec<i64>]) {
        let tokens: usize = sentences.iter().map(Vec::len).sum();
        let flop =
            self.model.flop_per_token() * tokens as f64 + self.model.flop_of_words(batch.computed.iter().copied());
        let mut metrics = lock(&self.shared.metrics);
        metrics.batches += 1;
        metrics.sentences += sentences.len() as u64;
        metrics.tokens += tokens as u64;
        metrics.padded_tokens += activations.packed_rows() as u64;
        metrics.cache_hits += batch.hits;
        metrics.cache_misses += tokens as u64 - batch.hits;
        metrics.words_computed += batch.computed.len() as u64;
        metrics.gflop += flop / 1e9;
    }

    fn count_time(&self, jobs: &[Job], started: Instant) {
        let waited: f64 = jobs.iter().map(|job| started.duration_since(job.queued).as_secs_f64()).sum();
        let device_seconds = started.elapsed().as_secs_f64();
        bear(jobs, Cost { device_seconds, queue_seconds: waited, ..Cost::default() });
        let mut metrics = lock(&self.shared.metrics);
        metrics.queue_seconds += waited;
        metrics.device_seconds += device_seconds;
    }
}

/// Shares out what a batch cost, before its answers are given.
fn bear(jobs: &[Job], cost: Cost) {
    let tokens: usize = jobs.iter().map(Job::tokens).sum();
    jobs.iter().for_each(|job| job.bear(cost.times(job.tokens() as f64 / tokens.max(1) as f64)));
}

/// The jobs of each row, by their places in the batch.
fn rows(jobs: &[Job]) -> Vec<Vec<usize>> {
    let places: Vec<usize> = (0..jobs.len()).collect();
    places.chunk_by(|&a, &b| jobs[a].row == jobs[b].row).map(<[usize]>::to_vec).collect()
}

/// The distinct words of a batch.
#[derive(Debug, Default)]
struct Batch<'j> {
    index: HashMap<&'j str, i64>,
    words: Vec<&'j str>,
    /// Tokens per word.
    uses: Vec<u64>,
    /// `[U, P]`
    table: Vec<f32>,
    sentences: Vec<Vec<i64>>,
    /// Tokens whose word was in the cache.
    hits: u64,
    /// Words that were not.
    computed: Vec<&'j str>,
}

impl<'j> Batch<'j> {
    fn index_of(&mut self, word: &'j str) -> i64 {
        let next = self.words.len() as i64;
        let index = *self.index.entry(word).or_insert(next);
        if index == next {
            self.words.push(word);
            self.uses.push(0);
        }
        self.uses[index as usize] += 1;
        index
    }
}

/// Layers of a batch to the answers of its sentences. Each distinct combination is computed once.
fn reduce(activations: &Activations, jobs: &[Job]) -> std::result::Result<Vec<Vectors>, DeviceError> {
    let mut outputs: Vec<(&Output, Vec<LayerValues>)> = Vec::new();
    let mut answers = Vec::with_capacity(jobs.len());
    for (sentence, job) in jobs.iter().enumerate() {
        let output = &job.recipe.output;
        let known = outputs.iter().position(|(o, _)| *o == output);
        let place = match known {
            Some(place) => place,
            None => {
                outputs.push((output, layer_values(activations, output)?));
                outputs.len() - 1
            }
        };
        let first = usize::from(job.recipe.boundaries);
        let real = first..first + job.sentence.words.len();
        let source = TokenSource { activations, layers: &outputs[place].1, output, sentence, real };
        answers.push(source.reduce(&job.sentence.keep, job.recipe.pooling));
    }
    Ok(answers)
}

fn layer_values(activations: &Activations, output: &Output) -> std::result::Result<Vec<LayerValues>, DeviceError> {
    match output {
        Output::Combined(factors) => Ok(vec![activations.combine(factors)?]),
        Output::Normalized(_) | Output::All => {
            (0..activations.n_layers()).map(|layer| activations.combine(&[(layer, 1.0)])).collect()
        }
    }
}

/// Vectors of one sentence of a batch.
pub(crate) struct TokenSource<'a> {
    activations: &'a Activations,
    layers: &'a [LayerValues],
    output: &'a Output,
    sentence: usize,
    /// Its tokens, boundaries left out.
    real: Range<usize>,
}

impl TokenSource<'_> {
    fn reduce(&self, keep: &Range<usize>, pooling: Option<Pooling>) -> Vectors {
        let layer = self.layers[0].width();
        let stacked = layer * self.layers.len();
        let statistics = self.statistics();
        let mut one = vec![0.0; stacked];
        let mut reducer = pooling.map(|p| Reducer::new(p, self.width(), layer));
        let mut tokens = Vec::with_capacity(if pooling.is_none() { keep.len() * self.width() } else { 0 });
        for i in keep.clone() {
            self.read(i, &mut one);
            let vector = match &statistics {
                None => &one[..],
                Some(statistics) => self.normalized(&mut one, statistics),
            };
            match &mut reducer {
                Some(reducer) => reducer.push(vector),
                None => tokens.extend_from_slice(vector),
            }
        }
        match reducer {
            Some(reducer) => Vectors::Pooled(reducer.finish()),
            None => Vectors::Tokens(tokens),
        }
    }

    /// Values of an output vector.
    fn width(&self) -> usize {
        let layer = self.layers[0].width();
        if matches!(self.output, Output::All) { layer * self.layers.len() } else { layer }
    }

    fn read(&self, i: usize, out: &mut [f32]) {
        let width = self.layers[0].width();
        for (layer, out) in self.layers.iter().zip(out.chunks_exact_mut(width)) {
            layer.token(self.activations, self.sentence, i, out);
        }
    }

    /// Mean and inverse deviation of each layer over the real tokens of the sentence, where the mix asks for it.
    fn statistics(&self) -> Option<Vec<(f64, f64)>> {
        if !matches!(self.output, Output::Normalized(_)) {
            return None;
        }
        if self.real.is_empty() {
            // A blank row of state `carry` with its boundaries: nothing to normalise them by.
            return Some(vec![(0.0, 1.0); self.layers.len()]);
        }
        let width = self.layers[0].width();
        let mut token = vec![0.0; width];
        let statistics = self.layers.iter().map(|layer| {
            let (mut sum, mut squares) = (0.0_f64, 0.0_f64);
            for i in self.real.clone() {
                layer.token(self.activations, self.sentence, i, &mut token);
                sum += token.iter().map(|&v| f64::from(v)).sum::<f64>();
            }
            let n = (self.real.len() * width) as f64;
            let mean = sum / n;
            for i in self.real.clone() {
                layer.token(self.activations, self.sentence, i, &mut token);
                squares += token.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>();
            }
            (mean, 1.0 / (squares / n + LAYER_NORM_EPSILON).sqrt())
        });
        Some(statistics.collect())
    }

    /// Combines normalised layers into the first `2P` values of `stacked`.
    fn normalized<'v>(&self, stacked: &'v mut [f32], statistics: &[(f64, f64)]) -> &'v [f32] {
        let Output::Normalized(factors) = self.output else { return stacked };
        let width = self.layers[0].width();
        for k in 0..width {
            let mut sum = 0.0;
            for (layer, ((mean, scale), factor)) in statistics.iter().zip(factors).enumerate() {
                sum += f64::from(*factor) * (f64::from(stacked[layer * width + k]) - mean) * scale;
            }
            stacked[k] = sum as f32;
        }
        &stacked[..width]
    }
}

/// AllenNLP v0.9 `ScalarMix` and bilm-tf `weight_layers`.
const LAYER_NORM_EPSILON: f64 = 1e-12;

/// Reduces one batch that was run outside the engine, in order: state `carry`.
pub(crate) fn reduce_in_order(
    activations: &Activations,
    sentences: &[Sentence],
    recipe: &Recipe,
) -> std::result::Result<Vec<Vectors>, DeviceError> {
    let layers = layer_values(activations, &recipe.output)?;
    let answers = sentences.iter().enumerate().map(|(place, sentence)| {
        // Such a batch holds the boundaries always; `keep` is in its coordinates.
        let source = TokenSource {
            activations,
            layers: &layers,
            output: &recipe.output,
            sentence: place,
            real: 1..sentence.words.len() - 1,
        };
        source.reduce(&sentence.keep, recipe.pooling)
    });
    Ok(answers.collect())
}

/// The device of each thread of the engine: a CPU has `threads` of them (`None`: one per core), a GPU one.
pub fn lanes(devices: &[DeviceName], threads: Option<usize>) -> Vec<DeviceName> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let on_cpu = threads.unwrap_or(cores).max(1);
    devices
        .iter()
        .flat_map(|device| match device {
            DeviceName::Cpu => vec![DeviceName::Cpu; on_cpu],
            DeviceName::Cuda(_) => vec![*device],
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{Array, ArrayRef, AsArray, StringArray};

    use super::*;
    use crate::{ColumnEmbedder, Elmo, EmbedSpec, spec::OnError};

    /// A batch that holds the word `room-for-N` fails as if the device had no room for more than `N` sentences.
    pub(super) fn injected_failure(jobs: &[Job]) -> std::result::Result<(), DeviceError> {
        let words = jobs.iter().flat_map(|job| job.sentence.words.iter());
        let room = words.filter_map(|word| word.strip_prefix("room-for-")?.parse().ok()).min();
        if room.is_some_and(|room: usize| jobs.len() > room) {
            return Err(DeviceError::OutOfMemory { message: "injected".to_owned() });
        }
        Ok(())
    }

    fn rows_of(embedder: &ColumnEmbedder, texts: &[&str]) -> (Vec<Vec<f32>>, Vec<Option<String>>) {
        let column: ArrayRef = Arc::new(StringArray::from(texts.to_vec()));
        let done = embedder.embed(&column).unwrap();
        let vectors = done.vectors.as_fixed_size_list();
        let vector = |i: usize| match vectors.is_valid(i) {
            true => vectors.value(i).as_primitive::<arrow::datatypes::Float32Type>().values().to_vec(),
            false => Vec::new(),
        };
        let errors = done.error.iter().map(|reason| reason.map(str::to_owned)).collect();
        ((0..texts.len()).map(vector).collect(), errors)
    }

    #[test]
    fn a_batch_without_room_is_split_and_a_row_without_room_is_that_rows_error() {
        let elmo = Elmo::tiny().unwrap();
        let spec = EmbedSpec {
            on_error: OnError::Null,
            tokenizer: crate::spec::TokenizerKind::Whitespace,
            ..EmbedSpec::default()
        };
        let embedder = ColumnEmbedder::new(&elmo, spec).unwrap();
        let mut texts: Vec<String> = (0..40).map(|i| format!("row {i} {}", "of words ".repeat(i % 7))).collect();
        texts[11] += " room-for-3";
        texts[30] += " room-for-0";
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let (together, errors) = rows_of(&embedder, &texts);
        assert!(elmo.embedder().metrics().oom_splits > 0);
        for (i, text) in texts.iter().enumerate() {
            if i == 30 {
                assert!(errors[i].as_deref().is_some_and(|reason| reason.contains("max-tokens")), "{errors:?}");
                assert!(together[i].is_empty());
                continue;
            }
            assert_eq!(errors[i], None);
            assert!(rows_of(&embedder, &[text]).0[0] == together[i], "row {i} has other bits alone");
        }
    }

    #[test]
    fn words_come_back_as_they_went_in() {
        let mut words = Words::default();
        for word in ["a", "", "日本", "z"] {
            words.push(word);
        }
        assert_eq!(words.iter().collect::<Vec<_>>(), ["a", "", "日本", "z"]);
        assert_eq!(words.len(), 4);
    }
}
