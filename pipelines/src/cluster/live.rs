//! What a worker is doing.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use super::service::Greeting;

/// Counts tasks under way, and knows whether the worker is about to end.
#[derive(Debug)]
pub(super) struct Live {
    /// What does not change.
    greeting: Greeting,
    tasks: AtomicUsize,
    stopping: AtomicBool,
    models: Mutex<Vec<String>>,
}

impl Live {
    pub(super) fn new(greeting: Greeting) -> Self {
        Self { greeting, tasks: AtomicUsize::new(0), stopping: AtomicBool::new(false), models: Mutex::default() }
    }

    pub(super) fn greeting(&self) -> Greeting {
        let models = self.models.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Greeting { tasks: self.tasks(), stopping: self.is_stopping(), models, ..self.greeting.clone() }
    }

    /// Notes that a model was opened.
    pub(super) fn opened(&self, address: &str) {
        let mut models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        if !models.iter().any(|model| model == address) {
            models.push(address.to_owned());
        }
    }

    pub(super) fn tasks(&self) -> usize {
        self.tasks.load(Ordering::SeqCst)
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// From now on, new tasks are refused.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
    }

    /// A task, which is under way until the guard is dropped.
    pub(super) fn task(self: &Arc<Self>) -> Task {
        self.tasks.fetch_add(1, Ordering::SeqCst);
        Task(Arc::clone(self))
    }
}

/// A task that is under way.
#[derive(Debug)]
pub(super) struct Task(Arc<Live>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.tasks.fetch_sub(1, Ordering::SeqCst);
    }
}
