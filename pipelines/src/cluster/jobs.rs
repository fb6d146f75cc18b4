//! What a worker does for bulk jobs.

use std::{
    any::Any,
    fmt,
    num::NonZeroUsize,
    panic::AssertUnwindSafe,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use datafusion::common::runtime::SpawnedTask;
use elmo::ColumnStats;
use elmo_udfs::codec::ModelHost;
use futures::{
    FutureExt, StreamExt,
    stream::{self, BoxStream, PollNext},
};
use serde::{Deserialize, Serialize};
use tokio::{sync::mpsc, task::JoinError, time::Interval};

use super::{
    live::Live,
    task::{Description, EmbedTask, columns_to_bytes, texts_from_bytes},
};
use crate::{
    bulk::{Unit, UnitDone},
    error::{Error, Result},
    report::{Progress, Snapshot},
    source::{Mark, SentPlan},
    stores::{Stores, UploadId},
};

/// Interval of the messages of a unit, which also say that its worker is alive.
const BEAT: Duration = Duration::from_secs(1);

/// Units that share the memory of a worker: twice those that one client gives it.
const UNITS_IN_MEMORY: u64 = 4;

/// The jobs of a worker.
pub(super) struct Jobs {
    pub(super) host: Arc<dyn ModelHost>,
    pub(super) stores: Stores,
    pub(super) live: Arc<Live>,
    /// The memory limit of the worker.
    pub(super) memory: Option<NonZeroUsize>,
}

impl fmt::Debug for Jobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Jobs")
    }
}

/// A part that a worker is to compute.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct UnitTask {
    pub(super) task: EmbedTask,
    pub(super) unit: Unit,
    /// Tells attempts at the same unit apart.
    pub(super) attempt: u32,
}

/// How a unit goes on.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum UnitEvent {
    /// An upload has begun, which the client aborts if the worker is lost.
    Begun(UploadId),
    /// So much is computed.
    Progress { rows: u64, tokens: u64 },
    /// It is written.
    Done(Box<UnitDone>),
}

/// A message of work that a worker does for a client.
pub(super) enum Beat<T> {
    /// It goes on.
    Alive,
    /// What it says on its way, or at its end.
    Said(T),
}

impl Jobs {
    pub(super) async fn describe(&self, task: EmbedTask) -> Result<Description> {
        Ok(Description::of(&task.open(Arc::clone(&self.host)).await?))
    }

    /// Computes the columns of a task for texts of the client.
    pub(super) async fn columns(&self, task: EmbedTask, texts: &[u8]) -> Result<(ColumnStats, Vec<u8>)> {
        let (embedder, texts) = (task.open(Arc::clone(&self.host)).await?, texts_from_bytes(texts)?);
        // Texts take long to tokenise, and a full queue blocks.
        let submitted = tokio::task::spawn_blocking(move || embedder.submit(&texts)).await;
        let columns = submitted.unwrap_or(Err(elmo::Error::Closed))?.await?;
        columns_to_bytes(columns)
    }

    /// The number of rows of the only file of a plan, and where some of them begin.
    pub(super) async fn count(&self, plan: SentPlan) -> Result<(u64, Vec<Mark>)> {
        Ok(plan.received(&self.stores)?.count_marked(0).await?)
    }

    /// Computes a part. When the stream is dropped, the work ends, and what it has written is deleted unless the client has
    /// published it.
    pub(super) fn unit(self: Arc<Self>, task: UnitTask) -> BoxStream<'static, Result<UnitEvent>> {
        let (progress, under_way) = (Arc::new(Counting::default()), self.live.task());
        let written = Arc::new(Written { stores: self.stores.clone(), task: task.clone(), upload: Mutex::default() });
        let (sender, uploads) = mpsc::unbounded_channel();
        let (jobs, counting, writing) = (Arc::clone(&self), Arc::clone(&progress), Arc::clone(&written));
        let work = async move {
            let begun = |id: UploadId| {
                *writing.upload.lock().unwrap_or_else(PoisonError::into_inner) = Some(id.clone());
                drop(sender.send(id));
            };
            jobs.compute(&task, &counting, begun).await
        };
        let begun = stream::unfold(uploads, |mut uploads| async { Some((uploads.recv().await?, uploads)) });
        let begun = begun.map(|id| Ok(UnitEvent::Begun(id)));
        let events = beating(&self.live, work).map(move |beat| {
            Ok(match beat {
                Beat::Alive => progress.event(),
                Beat::Said(done) => UnitEvent::Done(Box::new(done?)),
            })
        });
        // The id of an upload comes before the part, as it was sent before.
        let said = stream::select_with_strategy(begun, events, |(): &mut ()| PollNext::Left);
        // The client ends the call when the part is published; until then, it is kept.
        let said = said.chain(stream::pending());
        said.map(move |event| {
            let _kept = (&written, &under_way);
            event
        })
        .boxed()
    }

    async fn compute(&self, task: &UnitTask, progress: &Counting, begun: impl FnOnce(UploadId)) -> Result<UnitDone> {
        let stage = task.task.stage(Arc::clone(&self.host)).await?;
        let memory = self.memory.map_or(u64::MAX, |memory| memory.get() as u64 / UNITS_IN_MEMORY);
        task.unit.run(stage.as_ref(), &self.stores, (task.attempt, memory), progress, begun).await
    }
}

/// Does work in a task of its own, which ends when the stream is dropped. Says at once and then each second that it goes on, and
/// at the end what came of it. The worker does not end before the stream is dropped.
pub(super) fn beating<T: Send + 'static>(
    live: &Arc<Live>,
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> BoxStream<'static, Beat<Result<T>>> {
    let under_way = live.task();
    // Nothing of the work is used after a panic, which the panic hook has logged with its place.
    let work = SpawnedTask::spawn(AssertUnwindSafe(work).catch_unwind());
    let next = |(work, mut ticks): (Option<SpawnedTask<_>>, Interval)| async move {
        let mut work = work?;
        tokio::select! {
            biased;
            done = &mut work => Some((Beat::Said(ended(done)), (None, ticks))),
            _ = ticks.tick() => Some((Beat::Alive, (Some(work), ticks))),
        }
    };
    let beats = stream::unfold((Some(work), tokio::time::interval(BEAT)), next);
    beats
        .map(move |beat| {
            let _under_way = &under_way;
            beat
        })
        .boxed()
}

/// What came of a task: it may have panicked, and is aborted only when nobody waits for it.
fn ended<T>(done: Result<Result<Result<T>, Box<dyn Any + Send>>, JoinError>) -> Result<T> {
    let panicked = || Err(Error::Failed("the worker has a defect (panic)".to_owned()));
    match done {
        Ok(Ok(done)) => done,
        _ => panicked(),
    }
}

/// What a unit has written. Deletes it when it is dropped: the client has published it, has ended the call, or died.
struct Written {
    stores: Stores,
    task: UnitTask,
    upload: Mutex<Option<UploadId>>,
}

impl Drop for Written {
    fn drop(&mut self) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (stores, unit, attempt) = (self.stores.clone(), self.task.unit.clone(), self.task.attempt);
        let upload = self.upload.lock().unwrap_or_else(PoisonError::into_inner).take();
        runtime.spawn(async move { unit.discard(&stores, attempt, upload).await });
    }
}

/// Counts rows and tokens of a unit.
#[derive(Debug, Default)]
struct Counting {
    rows: AtomicU64,
    tokens: AtomicU64,
}

impl Counting {
    fn event(&self) -> UnitEvent {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        UnitEvent::Progress { rows: read(&self.rows), tokens: read(&self.tokens) }
    }
}

impl Progress for Counting {
    fn update(&self, snapshot: &Snapshot) {
        self.rows.store(snapshot.rows, Ordering::Relaxed);
        self.tokens.store(snapshot.tokens, Ordering::Relaxed);
    }

    fn finish(&self) {}
}
