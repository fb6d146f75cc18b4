//! The callers' handle to the engine, and the tickets for their requests.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    thread::{self, JoinHandle},
};

use super::{
    error::EngineError,
    job::{Answer, Answers, lock},
    lane::Lane,
    metrics::EmbedderMetrics,
    sentence::{Recipe, Sentence},
    settings::EmbedderSettings,
    shared::{Shared, StartStates},
};
use crate::model::BiLm;

/// A cloneable handle to the engine. When the last handle is dropped, the engine finishes what is waiting and stops.
#[derive(Debug, Clone)]
pub struct Embedder {
    owner: Arc<Owner>,
}

/// Joins the lanes when the last handle is dropped.
#[derive(Debug)]
struct Owner {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// A submitted request; await it for the results. Dropping it cancels the request.
#[derive(Debug)]
#[must_use]
pub(crate) struct Ticket {
    answer: Arc<Answer>,
    /// Keeps the engine alive while the results are awaited.
    _owner: Arc<Owner>,
}

impl Future for Ticket {
    type Output = Answers;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.answer.poll(context)
    }
}

impl Embedder {
    /// Starts one lane per model.
    pub(crate) fn start(
        models: Vec<BiLm>,
        settings: &EmbedderSettings,
        starts: Box<dyn StartStates>,
    ) -> Result<Self, EngineError> {
        let shared = Shared::new(&models, settings, starts);
        Self::run(shared, models)
    }

    pub(super) fn run(shared: Shared, models: Vec<BiLm>) -> Result<Self, EngineError> {
        let shared = Arc::new(shared);
        // Dropping the owner ends the lanes that have started, if a later one does not.
        let owner = Arc::new(Owner { shared: Arc::clone(&shared), threads: Mutex::default() });
        for (n, model) in models.into_iter().enumerate() {
            let (shared, device) = (Arc::clone(&shared), model.device());
            let thread = thread::Builder::new()
                .name(format!("elmo {device} {n}"))
                .spawn(move || Lane::new(n, model, shared).serve())
                .map_err(|e| EngineError::NoThread { device, reason: e.to_string() })?;
            lock(&owner.threads).push(thread);
        }
        Ok(Self { owner })
    }

    /// Queues sentences; waits while the queue is full.
    pub(crate) async fn submit(&self, sentences: Vec<Sentence>, recipe: &Arc<Recipe>) -> Result<Ticket, EngineError> {
        let mut sentences = sentences;
        let answer = poll_fn(|context| self.owner.shared.queue.poll_push(&mut sentences, recipe, context)).await?;
        Ok(Ticket { answer, _owner: Arc::clone(&self.owner) })
    }

    /// Counters since the start.
    pub fn metrics(&self) -> EmbedderMetrics {
        *lock(&self.owner.shared.metrics)
    }

    /// Padded tokens of a batch, summed over the lanes that were started.
    pub fn tokens_at_once(&self) -> usize {
        self.owner.shared.tokens_at_once
    }

    /// Refuses new requests, finishes what is waiting, and returns when every lane has ended.
    pub fn close(&self) {
        self.owner.close();
    }
}

impl Owner {
    fn close(&self) {
        self.shared.queue.close();
        // Held until the lanes have ended, so that a second caller waits as well.
        let mut threads = lock(&self.threads);
        for thread in threads.drain(..) {
            // A lane that wakes a caller may drop the last handle. It does not wait for itself.
            if thread.thread().id() != thread::current().id() {
                // A lane that panicked has already returned errors to its callers.
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
