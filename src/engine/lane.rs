//! A lane: a thread of one device, which takes batches from the queue and answers their sentences.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Instant,
};

use super::{
    device_words::DeviceWords,
    error::EngineError,
    job::{Job, lock},
    metrics::Cost,
    reduce::reduce,
    sentence::Vectors,
    shared::Shared,
    word_table::WordTable,
};
use crate::{
    model::{Activations, BiLm, DeviceError, DeviceName, StartState},
    planner::Group,
};

/// A thread of one device.
#[derive(Debug)]
pub(super) struct Lane {
    /// Number of the lane, from 0.
    n: usize,
    model: BiLm,
    shared: Arc<Shared>,
    /// Start state of each [`Group`], computed for the first batch of the group.
    starts: HashMap<Group, StartState>,
    /// Token vectors on a GPU; `None`: they are in the cache of the host.
    words: Option<DeviceWords>,
    /// The device has run out of memory: no words are kept there.
    saves_memory: bool,
}

/// Notifies the queue that the lane has ended, also when it panics.
struct LaneEnd {
    shared: Arc<Shared>,
    reason: EngineError,
    /// Jobs without an answer.
    returned: Vec<Job>,
}

impl Drop for LaneEnd {
    fn drop(&mut self) {
        self.shared.queue.lane_ended(std::mem::take(&mut self.returned), &self.reason);
    }
}

/// The device has failed for good.
pub(super) struct Failed {
    error: EngineError,
    /// Jobs without an answer.
    jobs: Vec<Job>,
}

impl Lane {
    pub(super) fn new(n: usize, model: BiLm, shared: Arc<Shared>) -> Self {
        Self { n, model, shared, starts: HashMap::new(), words: None, saves_memory: false }
    }

    /// Takes batches until the engine is closed and the queue is empty, or the device has failed.
    pub(super) fn serve(mut self) {
        let mut end = LaneEnd { shared: Arc::clone(&self.shared), reason: EngineError::Panicked, returned: Vec::new() };
        while let Some(jobs) = self.shared.queue.next_jobs() {
            if let Err(Failed { error, jobs }) = self.serve_jobs(jobs) {
                let device = self.model.device();
                tracing::error!(%device, lane = self.n, %error, "the device has failed and is no longer used");
                lock(&self.shared.metrics).lanes_retired += 1;
                (end.reason, end.returned) = (error, jobs);
                return;
            }
        }
        end.reason = EngineError::Closed;
    }

    /// Answers the jobs of a batch; those that were cancelled are dropped.
    pub(super) fn serve_jobs(&mut self, mut jobs: Vec<Job>) -> Result<(), Failed> {
        jobs.retain(Job::is_wanted);
        self.count_waiting(&jobs);
        if jobs.is_empty() { Ok(()) } else { self.serve_batch(jobs) }
    }

    /// Runs a batch and answers each of its jobs. A batch that exceeds the memory of the device is split.
    ///
    /// # Errors
    /// When the batch fails and the device does not pass a check after it.
    fn serve_batch(&mut self, mut jobs: Vec<Job>) -> Result<(), Failed> {
        let started = Instant::now();
        // libtorch reports errors as values. A panic here is a bug in elmo, and must not make callers wait forever.
        let result = catch_unwind(AssertUnwindSafe(|| self.run(&jobs)));
        self.count_device_time(&jobs, started);
        let error = match result.unwrap_or(Err(EngineError::Panicked)) {
            Ok(all) => {
                jobs.iter().zip(all).for_each(|(job, vectors)| job.answer(Ok(vectors)));
                return Ok(());
            }
            Err(error) => error,
        };
        let freed = error.is_out_of_memory() && self.free_words();
        if freed && jobs.len() == 1 {
            return self.serve_batch(jobs);
        }
        if error.is_out_of_memory() && jobs.len() > 1 {
            lock(&self.shared.metrics).oom_splits += 1;
            let second = jobs.split_off(jobs.len() / 2);
            if let Err(mut failed) = self.serve_batch(jobs) {
                failed.jobs.extend(second);
                return Err(failed);
            }
            return self.serve_batch(second);
        }
        match self.check() {
            // Another lane of the device may have taken the memory.
            Err(error) if !error.is_out_of_memory() => return Err(Failed { error, jobs }),
            _ => {}
        }
        jobs.iter().for_each(|job| job.answer(Err(error.clone())));
        Ok(())
    }

    fn run(&mut self, jobs: &[Job]) -> Result<Vec<Vectors>, EngineError> {
        #[cfg(test)]
        self.shared.queue.faults.on_batch(self.n, jobs)?;
        let recipe = &jobs[0].recipe;
        self.prepare_words()?;
        let table = match &mut self.words {
            Some(words) => words.words_of(jobs, recipe.boundaries, &self.model)?,
            None => WordTable::new(jobs, recipe.boundaries, &self.model, &self.shared.cache)?,
        };
        self.prepare_start(recipe.group(), recipe.warm, recipe.boundaries)?;
        let start = &self.starts[&recipe.group()];
        let activations = match &self.words {
            Some(words) => self.model.run_on_table(words.table(), &table.rows, &table.sentences, rows(jobs), start)?,
            None => self.model.run_in_rows(&table.vectors, &table.sentences, rows(jobs), start)?,
        };
        let answers = reduce(&activations, jobs)?;
        self.count_work(&table, &activations);
        let tokens: usize = jobs.iter().map(Job::tokens).sum();
        let cost = Cost {
            tokens: tokens as f64,
            padded_tokens: activations.packed_rows() as f64,
            cache_hits: table.hits as f64,
            ..Cost::default()
        };
        charge(jobs, cost);
        Ok(answers)
    }

    /// Token vectors stay on a GPU, unless it has run out of memory.
    fn prepare_words(&mut self) -> Result<(), DeviceError> {
        let on_device = self.model.device() != DeviceName::Cpu || self.shared.all_on_device;
        if on_device && self.words.is_none() {
            let bytes = if self.saves_memory { 0 } else { self.shared.device_cache };
            self.words = Some(DeviceWords::new(&self.model, bytes)?);
        }
        Ok(())
    }

    /// Frees the words on the device after it has run out of memory, and keeps none from now on; false where it kept none before.
    fn free_words(&mut self) -> bool {
        let freed = self.words.take().is_some() && !self.saves_memory;
        self.saves_memory = true;
        freed
    }

    /// Where boundaries are not among the tokens of a sentence, the start state has read them.
    fn prepare_start(&mut self, group: Group, warm: bool, boundaries: bool) -> Result<(), DeviceError> {
        if self.starts.contains_key(&group) {
            return Ok(());
        }
        let mut start = self.shared.starts.state(&self.model, warm)?;
        if !boundaries {
            start = self.model.after_boundaries(&start)?;
        }
        self.starts.insert(group, start);
        Ok(())
    }

    /// Runs a sentence of two words, to tell a device that has failed from a batch that cannot be computed.
    fn check(&self) -> Result<(), EngineError> {
        let checked = catch_unwind(AssertUnwindSafe(|| {
            #[cfg(test)]
            self.shared.queue.faults.on_check(self.n)?;
            let table = self.model.token_vectors(&["two", "words"])?; // [2, P]
            let start = self.model.after_boundaries(&self.model.zero_state()?)?;
            let activations = self.model.run_in_rows(&table, &[vec![0, 1]], vec![vec![0]], &start)?;
            // Copying the result to the host waits for the device.
            activations.combine(&[(activations.n_layers() - 1, 1.0)])?;
            Ok(())
        }));
        checked.unwrap_or(Err(EngineError::Panicked))
    }

    fn count_waiting(&self, jobs: &[Job]) {
        let now = Instant::now();
        let mut sum = 0.0;
        for job in jobs {
            let queue_seconds = now.duration_since(job.queued).as_secs_f64();
            job.charge(Cost { queue_seconds, ..Cost::default() });
            sum += queue_seconds;
        }
        lock(&self.shared.metrics).queue_seconds += sum;
    }

    fn count_work(&self, table: &WordTable<'_>, activations: &Activations) {
        let tokens: usize = table.sentences.iter().map(Vec::len).sum();
        let words = table.computed.iter().copied();
        let of_tokens = self.model.flop_per_token() * tokens as f64 - activations.saved_flop();
        let flop = of_tokens + self.model.flop_of_words(words);
        let mut metrics = lock(&self.shared.metrics);
        metrics.batches += 1;
        metrics.sentences += table.sentences.len() as u64;
        metrics.tokens += tokens as u64;
        metrics.padded_tokens += activations.packed_rows() as u64;
        metrics.cache_hits += table.hits;
        metrics.cache_misses += tokens as u64 - table.hits;
        metrics.words_computed += table.computed.len() as u64;
        metrics.gflop += flop / 1e9;
    }

    fn count_device_time(&self, jobs: &[Job], started: Instant) {
        let device_seconds = started.elapsed().as_secs_f64();
        charge(jobs, Cost { device_seconds, ..Cost::default() });
        lock(&self.shared.metrics).device_seconds += device_seconds;
    }
}

/// Divides the cost of a batch among its jobs, before they are answered.
fn charge(jobs: &[Job], cost: Cost) {
    let tokens: usize = jobs.iter().map(Job::tokens).sum();
    jobs.iter().for_each(|job| job.charge(cost.times(job.tokens() as f64 / tokens.max(1) as f64)));
}

/// The jobs of each row, as indices into the batch.
fn rows(jobs: &[Job]) -> Vec<Vec<usize>> {
    let places: Vec<usize> = (0..jobs.len()).collect();
    places.chunk_by(|&a, &b| jobs[a].row == jobs[b].row).map(<[usize]>::to_vec).collect()
}
