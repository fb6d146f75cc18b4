//! The queue between callers and lanes.

use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, PoisonError},
    task::{Context, Poll, Waker},
    time::Instant,
};

use super::{
    error::EngineError,
    job::{Answer, Job, lock},
    sentence::{Recipe, Sentence},
};
use crate::planner::Planner;

/// A job is not run again after the lanes of so many devices retired while they computed it: the job itself may cause the failure.
const MAX_FAILED_DEVICES: usize = 2;

/// The waiting sentences of all callers, bounded by tokens.
#[derive(Debug)]
pub(super) struct Queue {
    state: Mutex<State>,
    /// Lanes wait here for work.
    work: Condvar,
    /// Maximum waiting tokens; beyond it callers wait.
    capacity: usize,
    #[cfg(test)]
    pub(super) faults: super::faults::Faults,
}

#[derive(Debug)]
struct State {
    planner: Planner,
    /// The waiting jobs by id.
    jobs: HashMap<u64, Job>,
    next_id: u64,
    /// Callers that wait for room.
    wakers: Vec<Waker>,
    closed: bool,
    /// Lanes that have not ended.
    lanes: usize,
    /// Lanes that take turns on one device.
    lanes_per_device: usize,
    /// Set when the last lane has ended.
    failure: Option<EngineError>,
}

impl Queue {
    pub(super) fn new(planner: Planner, capacity: usize, (lanes, lanes_per_device): (usize, usize)) -> Self {
        let state = State {
            planner,
            jobs: HashMap::new(),
            next_id: 0,
            wakers: Vec::new(),
            closed: false,
            lanes,
            lanes_per_device,
            failure: None,
        };
        Self {
            state: Mutex::new(state),
            work: Condvar::new(),
            capacity: capacity.max(1),
            #[cfg(test)]
            faults: super::faults::Faults::default(),
        }
    }

    /// Adds the sentences of a request as soon as there is room; takes `sentences` when it is ready.
    pub(super) fn poll_push(
        &self,
        sentences: &mut Vec<Sentence>,
        recipe: &Arc<Recipe>,
        context: &Context<'_>,
    ) -> Poll<Result<Arc<Answer>, EngineError>> {
        let mut state = lock(&self.state);
        if state.closed {
            return Poll::Ready(Err(EngineError::Closed));
        }
        if let Some(failure) = &state.failure {
            return Poll::Ready(Err(failure.clone()));
        }
        if state.planner.tokens() >= self.capacity {
            // A caller that is polled several times registers once.
            if !state.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                state.wakers.push(context.waker().clone());
            }
            return Poll::Pending;
        }
        let answer = Answer::new(sentences.len());
        for (place, sentence) in std::mem::take(sentences).into_iter().enumerate() {
            let id = state.next_id;
            state.next_id += 1;
            state.insert(Job::new(id, sentence, Arc::clone(recipe), &answer, place));
        }
        drop(state);
        self.work.notify_all();
        Poll::Ready(Ok(answer))
    }

    /// Takes the jobs of the next batch; waits while there are none. `None` when the queue is closed and empty.
    pub(super) fn next_jobs(&self) -> Option<Vec<Job>> {
        let mut state = lock(&self.state);
        loop {
            if let Some(batch) = state.planner.next_batch() {
                #[cfg(test)]
                self.faults.on_take();
                let mut jobs = Vec::new();
                for (row, ids) in batch.iter().enumerate() {
                    for id in ids {
                        if let Some(mut job) = state.jobs.remove(id) {
                            job.row = row;
                            jobs.push(job);
                        }
                    }
                }
                let wakers = std::mem::take(&mut state.wakers);
                // A waker may poll at once.
                drop(state);
                wakers.into_iter().for_each(Waker::wake);
                return Some(jobs);
            }
            if state.closed {
                return None;
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Refuses new requests from now on. Lanes finish what is waiting.
    pub(super) fn close(&self) {
        let wakers = {
            let mut state = lock(&self.state);
            state.closed = true;
            std::mem::take(&mut state.wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
        self.work.notify_all();
    }

    /// A lane has ended for `reason` and gives back the jobs that it has not answered. The other lanes take them over;
    /// if this was the last lane, every waiting caller gets an error.
    pub(super) fn lane_ended(&self, returned: Vec<Job>, reason: &EngineError) {
        let mut unanswered = Vec::new();
        let mut wakers = Vec::new();
        {
            let mut state = lock(&self.state);
            state.lanes -= 1;
            for mut job in returned {
                job.failed_lanes += 1;
                job.queued = Instant::now();
                if job.failed_lanes < MAX_FAILED_DEVICES * state.lanes_per_device {
                    state.jobs.insert(job.id, job);
                } else {
                    unanswered.push((job, reason.clone()));
                }
            }
            if state.lanes == 0 {
                let failure = EngineError::NoDeviceLeft { reason: reason.to_string() };
                unanswered.extend(state.jobs.drain().map(|(_, job)| (job, failure.clone())));
                state.failure = Some(failure);
                wakers = std::mem::take(&mut state.wakers);
            }
            state.plan_again();
        }
        for (job, error) in unanswered {
            job.answer(Err(error));
        }
        wakers.into_iter().for_each(Waker::wake);
        self.work.notify_all();
    }
}

impl State {
    fn insert(&mut self, job: Job) {
        self.planner.push(job.recipe.group(), job.tokens().max(1), job.id);
        self.jobs.insert(job.id, job);
    }

    /// Plans the waiting jobs anew, the oldest first. A lane that panicked may have left a batch half taken.
    fn plan_again(&mut self) {
        let mut jobs: Vec<&Job> = self.jobs.values().collect();
        jobs.sort_unstable_by_key(|job| job.id);
        self.planner.restart(self.lanes.div_ceil(self.lanes_per_device));
        for job in jobs {
            self.planner.push(job.recipe.group(), job.tokens().max(1), job.id);
        }
    }
}
