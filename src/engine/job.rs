//! A queued sentence, and the place where its result is stored.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    task::{Context, Poll, Waker},
    time::Instant,
};

use super::{
    error::EngineError,
    metrics::Cost,
    sentence::{Recipe, Sentence, Vectors},
};

/// A poisoned lock means that a thread panicked while it held plain data that is valid at any time.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A queued sentence.
#[derive(Debug)]
pub(super) struct Job {
    /// Counts up in the order in which sentences were submitted.
    pub(super) id: u64,
    pub(super) sentence: Sentence,
    pub(super) recipe: Arc<Recipe>,
    /// Dangling once the caller has dropped its ticket.
    answer: Weak<Answer>,
    /// Index in the request.
    place: usize,
    /// Start of the time that it waits in the queue.
    pub(super) queued: Instant,
    /// Lanes that retired while they computed it.
    pub(super) failed_lanes: usize,
    /// Row of the batch that it is in. The jobs of a batch are in the order of their rows.
    pub(super) row: usize,
}

/// Results of one request, shared by its jobs and its ticket.
#[derive(Debug)]
pub(super) struct Answer {
    slots: Mutex<Slots>,
}

#[derive(Debug)]
struct Slots {
    vectors: Vec<Option<Result<Vectors, EngineError>>>,
    missing: usize,
    waker: Option<Waker>,
    cost: Cost,
}

/// The results of a request in the order of its sentences, and what they cost.
pub(crate) type Answers = (Vec<Result<Vectors, EngineError>>, Cost);

impl Answer {
    pub(super) fn new(sentences: usize) -> Arc<Self> {
        let vectors = (0..sentences).map(|_| None).collect();
        let slots = Slots { vectors, missing: sentences, waker: None, cost: Cost::default() };
        Arc::new(Self { slots: Mutex::new(slots) })
    }

    /// Ready once the last sentence of the request has its result.
    pub(super) fn poll(&self, context: &Context<'_>) -> Poll<Answers> {
        let mut slots = lock(&self.slots);
        if slots.missing > 0 {
            slots.waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        let vectors = slots.vectors.drain(..).map(|slot| slot.unwrap_or(Err(EngineError::Panicked))).collect();
        Poll::Ready((vectors, slots.cost))
    }
}

impl Job {
    pub(super) fn new(id: u64, sentence: Sentence, recipe: Arc<Recipe>, answer: &Arc<Answer>, place: usize) -> Self {
        let (answer, queued) = (Arc::downgrade(answer), Instant::now());
        Self { id, sentence, recipe, answer, place, queued, failed_lanes: 0, row: 0 }
    }

    /// Stores the result and wakes the caller if it was the last one of the request. Later results are ignored.
    pub(super) fn answer(&self, vectors: Result<Vectors, EngineError>) {
        let Some(answer) = self.answer.upgrade() else { return };
        let mut slots = lock(&answer.slots);
        // The slots are gone once the ticket has taken them.
        match slots.vectors.get_mut(self.place) {
            Some(slot @ None) => *slot = Some(vectors),
            _ => return,
        }
        slots.missing -= 1;
        if slots.missing == 0 {
            let waker = slots.waker.take();
            // A waker may poll at once.
            drop(slots);
            waker.into_iter().for_each(Waker::wake);
        }
    }

    /// Adds to the cost of the request.
    pub(super) fn charge(&self, cost: Cost) {
        if let Some(answer) = self.answer.upgrade() {
            lock(&answer.slots).cost += cost;
        }
    }

    /// Tokens that the model reads for it.
    pub(super) fn tokens(&self) -> usize {
        self.sentence.words.len() + if self.recipe.boundaries { 2 } else { 0 }
    }

    /// Whether the caller still holds its ticket.
    pub(super) fn is_wanted(&self) -> bool {
        self.answer.strong_count() > 0
    }
}

/// A job that is dropped without a result, because its lane panicked, reports that: no caller waits forever.
impl Drop for Job {
    fn drop(&mut self) {
        self.answer(Err(EngineError::Panicked));
    }
}
