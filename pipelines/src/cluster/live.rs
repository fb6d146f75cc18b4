//! What a worker is doing.

use std::{
    collections::HashMap,
    ops::AddAssign,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use datafusion::physical_plan::ExecutionPlan;
use serde::{Deserialize, Serialize};

use super::service::Greeting;
use crate::{
    report::Snapshot,
    sql::{Tasks, embedding_progress},
};

/// Counts tasks under way, and knows whether the worker is about to end.
#[derive(Debug)]
pub(super) struct Live {
    /// What does not change.
    greeting: Greeting,
    tasks: AtomicUsize,
    stopping: AtomicBool,
    models: Mutex<Vec<String>>,
    queries: Mutex<HashMap<QueryId, Query>>,
}

/// Identifies one execution of a query.
pub(super) type QueryId = u64;

/// The stages of a query.
#[derive(Debug, Default)]
struct Query {
    running: Vec<Weak<dyn ExecutionPlan>>,
    /// Counts of stages that have been dropped.
    ended: Embedded,
    /// When the last stage was dropped.
    ended_at: Option<Instant>,
}

/// How long the counts of a finished query are kept.
const REMEMBERED: Duration = Duration::from_secs(60);

/// What the stages of a query have embedded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Embedded {
    pub(super) rows: u64,
    pub(super) tokens: u64,
    pub(super) padded_tokens: u64,
}

impl Embedded {
    fn of(plan: &Arc<dyn ExecutionPlan>) -> Self {
        let Snapshot { rows, tokens, padded_tokens, .. } = embedding_progress(plan).unwrap_or_default();
        Self { rows, tokens, padded_tokens }
    }
}

impl AddAssign for Embedded {
    fn add_assign(&mut self, other: Self) {
        self.rows += other.rows;
        self.tokens += other.tokens;
        self.padded_tokens += other.padded_tokens;
    }
}

/// Registration of a stage; ends when it is dropped.
#[derive(Debug)]
pub(super) struct Running {
    live: Arc<Live>,
    query: QueryId,
    plan: Arc<dyn ExecutionPlan>,
}

impl Live {
    pub(super) fn new(greeting: Greeting) -> Self {
        Self {
            greeting,
            tasks: AtomicUsize::new(0),
            stopping: AtomicBool::new(false),
            models: Mutex::default(),
            queries: Mutex::default(),
        }
    }

    pub(super) fn greeting(&self) -> Greeting {
        let models = self.models.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Greeting { tasks: self.tasks(), stopping: self.is_stopping(), models, ..self.greeting.clone() }
    }

    /// The number of this process.
    pub(super) fn id(&self) -> &str {
        &self.greeting.id
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

    fn queries(&self) -> MutexGuard<'_, HashMap<QueryId, Query>> {
        self.queries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a stage until the guard is dropped.
    pub(super) fn run(self: &Arc<Self>, query: QueryId, plan: &Arc<dyn ExecutionPlan>) -> Running {
        let mut queries = self.queries();
        queries.retain(|_, query| query.ended_at.is_none_or(|at| at.elapsed() < REMEMBERED));
        let stages = queries.entry(query).or_default();
        stages.running.push(Arc::downgrade(plan));
        stages.ended_at = None;
        drop(queries);
        Running { live: Arc::clone(self), query, plan: Arc::clone(plan) }
    }

    /// What the stages of a query have embedded.
    pub(super) fn embedded(&self, query: QueryId) -> Embedded {
        let (running, mut embedded) = match self.queries().get(&query) {
            Some(query) => (query.running.clone(), query.ended),
            None => return Embedded::default(),
        };
        running.iter().filter_map(Weak::upgrade).for_each(|plan| embedded += Embedded::of(&plan));
        embedded
    }

    /// A task, which is under way until the guard is dropped.
    pub(super) fn task(self: &Arc<Self>) -> Task {
        self.tasks.fetch_add(1, Ordering::SeqCst);
        Task(Arc::clone(self))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let embedded = Embedded::of(&self.plan);
        let mut queries = self.live.queries();
        let Some(query) = queries.get_mut(&self.query) else { return };
        let is_this = |plan: &Weak<dyn ExecutionPlan>| std::ptr::addr_eq(plan.as_ptr(), Arc::as_ptr(&self.plan));
        query.running.retain(|plan| !is_this(plan));
        query.ended += embedded;
        query.ended_at = query.running.is_empty().then(Instant::now);
    }
}

impl Tasks for Arc<Live> {
    fn begin(&self) -> Box<dyn Send + Sync> {
        Box::new(self.task())
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
