//! The bulk job on workers: each reads, embeds and writes whole parts. The client counts and publishes.

use std::{
    fmt,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use arrow::{array::ArrayRef, datatypes::Field};
use async_trait::async_trait;
use elmo::{
    ColumnLayout, ColumnStats, EmbedSpec, EmbeddedColumns, ModelOptions,
    spec::{OnError, StateMode},
};
use elmo_udfs::codec::SentModel;
use futures::StreamExt;
use serde::{Serialize, de::DeserializeOwned};

use super::{
    error::ClusterError,
    fleet::{Fleet, PATIENCE, Place},
    jobs::{UnitEvent, UnitTask},
    planner::Cluster,
    service::{COLUMNS, COUNT, DESCRIBE, Frame, SILENCE, UNIT, ask, give},
    task::{Description, EmbedTask, apply_on_error, columns_from_bytes, texts_to_bytes},
};
use crate::{
    bulk::{Computed, Unit, UnitProgress, Units},
    error::{Error, Exit, Result},
    models::LazyModel,
    source::{Mark, SentPlan},
    sql::sql_error,
    stage::{Pending, Stage},
    stores::{Stores, UploadId},
};

/// Workers that a unit may cost before it is taken for the reason.
const MAX_LOST: usize = 3;
/// A worker that is lost sooner had not begun what it was asked for.
const AT_ONCE: Duration = Duration::from_secs(1);

/// See the module.
pub struct WorkerStage {
    fleet: Arc<Fleet>,
    stores: Stores,
    /// For texts of the client: with [`OnError::Null`]; [`apply_on_error`] does the rest.
    columns: EmbedTask,
    units: EmbedTask,
    spec: EmbedSpec,
    fields: Vec<Field>,
    described: Description,
}

impl fmt::Debug for WorkerStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerStage").field("spec", &self.spec).finish_non_exhaustive()
    }
}

impl WorkerStage {
    /// A stage with the settings `spec` for the options of the model. A worker opens the model and describes the output.
    ///
    /// # Errors
    /// [`Error::Usage`] in state `carry`, which needs all rows in one process; [`elmo::Error`] for settings that the model does not
    /// support; [`ClusterError`] if no worker answers or one cannot open the model.
    pub(crate) async fn new(
        cluster: &Cluster,
        stores: &Stores,
        model: &LazyModel,
        state: StateMode,
        spec: impl FnOnce(&ModelOptions) -> Result<EmbedSpec>,
    ) -> Result<Arc<Self>> {
        if state == StateMode::Carry {
            let help = "leave out --cluster, or use --state zero or --state warm";
            return Err(Error::usage("--state carry needs all rows in one process", help));
        }
        let described = tokio::task::block_in_place(|| SentModel::of(&model.spec.name(), model));
        let mut model = described.map_err(sql_error)?;
        // Vectors do not depend on the LM head, and workers may have another one, or none.
        model.card.lm_head = None;
        let spec = spec(&model.card.options)?;
        let fields = ColumnLayout::new(&model.card.options, &model.card.fingerprint, &spec)?.fields();
        let fleet = cluster.fleet().await?;
        let columns = EmbedTask::new(&model, &EmbedSpec { on_error: OnError::Null, ..spec.clone() });
        let units = EmbedTask::new(&model, &spec);
        let (described, _) = call::<Description>(&fleet, DESCRIBE, &units, Vec::new()).await?;
        let [columns, units] = [columns, units].map(|task| task.expecting(described.clone()));
        Ok(Arc::new(Self { fleet, stores: stores.clone(), columns, units, spec, fields, described }))
    }

    /// Has a worker compute a unit. What it has begun is noted in `written`.
    async fn attempt(
        &self,
        place: &Place<'_>,
        written: &mut Attempt<'_>,
        progress: &UnitProgress,
    ) -> Result<Computed, ClusterError> {
        let lost =
            |reason: &str| ClusterError::Lost { worker: super::peers::name_of(&place.url), reason: reason.to_owned() };
        let task = UnitTask { task: self.units.clone(), unit: written.unit.clone(), attempt: written.number };
        let request = Frame::new(&task, Vec::new()).map_err(|status| lost(status.message()))?;
        let events =
            tokio::time::timeout(SILENCE, give::<UnitEvent>(&self.fleet.peers, &place.url, UNIT, request)).await;
        let events = events.unwrap_or_else(|_| Err(lost("no message for a minute")))?;
        let mut events = Box::pin(events);
        loop {
            let event = tokio::time::timeout(SILENCE, events.next()).await;
            written.has_begun |= matches!(event, Ok(Some(Ok(_))));
            match event {
                Err(_) => return Err(lost("no message for a minute")),
                Ok(None) => return Err(lost("it ended the unit without an answer")),
                Ok(Some(Err(error))) => return Err(error),
                Ok(Some(Ok(UnitEvent::Begun(id)))) => written.upload = Some(id),
                Ok(Some(Ok(UnitEvent::Progress { rows, tokens }))) => {
                    progress.rows.store(rows, Ordering::Relaxed);
                    progress.tokens.store(tokens, Ordering::Relaxed);
                }
                Ok(Some(Ok(UnitEvent::Done(done)))) => return Ok(Computed { done: *done, kept: Box::new(events) }),
            }
        }
    }
}

/// Asks one worker after the other until one is not lost.
async fn call<T: DeserializeOwned>(
    fleet: &Fleet,
    method: &'static str,
    request: &impl Serialize,
    body: Vec<u8>,
) -> Result<(T, Vec<u8>)> {
    let (mut lost, mut since) = (Vec::new(), Instant::now());
    loop {
        let place = fleet.place(&lost).await?;
        let request = Frame::new(request, body.clone()).map_err(|status| Error::Failed(status.message().to_owned()))?;
        let asked = Instant::now();
        match ask(&fleet.peers, &place.url, method, request).await {
            // One that was gone before says nothing of the request.
            Err(ClusterError::Lost { reason, .. }) if asked.elapsed() < AT_ONCE && since.elapsed() < PATIENCE => {
                fleet.lost(&place, &reason);
            }
            Err(ClusterError::Lost { reason, .. }) if asked.elapsed() >= AT_ONCE && lost.len() + 1 < MAX_LOST => {
                fleet.lost(&place, &reason);
                lost.push(place.id.clone());
                since = Instant::now();
            }
            answer => return Ok(answer?),
        }
    }
}

#[async_trait]
impl Units for WorkerStage {
    fn at_once(&self) -> usize {
        self.fleet.at_once()
    }

    async fn count(&self, plan: SentPlan) -> Result<(u64, Vec<Mark>)> {
        Ok(call(&self.fleet, COUNT, &plan, Vec::new()).await?.0)
    }

    async fn run(&self, unit: &Unit, progress: &UnitProgress) -> Result<Computed> {
        let (mut lost, mut since) = (Vec::new(), Instant::now());
        loop {
            let place = self.fleet.place(&lost).await?;
            let mut written = Attempt {
                stage: self,
                unit,
                number: self.fleet.attempt(),
                upload: None,
                has_begun: false,
                is_over: false,
            };
            match self.attempt(&place, &mut written, progress).await {
                Ok(computed) => {
                    written.is_over = true;
                    self.fleet.worked(&place);
                    return Ok(computed);
                }
                // One that was about to end, was gone before, or was restarted otherwise, says nothing of the unit.
                Err(ClusterError::Lost { reason, .. } | ClusterError::Refused { reason, .. })
                    if !written.has_begun && since.elapsed() < PATIENCE =>
                {
                    self.fleet.lost(&place, &reason);
                }
                Err(ClusterError::Lost { reason, .. }) if written.has_begun && lost.len() + 1 < MAX_LOST => {
                    self.fleet.lost(&place, &reason);
                    lost.push(place.id.clone());
                    since = Instant::now();
                    progress.rows.store(0, Ordering::Relaxed);
                    progress.tokens.store(0, Ordering::Relaxed);
                }
                Err(error @ ClusterError::Lost { .. }) if written.has_begun => {
                    let message = format!("part {} has cost {MAX_LOST} workers; the last one: {error}", unit.number);
                    let help = "see the logs of these workers; if their memory ran out, use a smaller --window-rows or \
                                --batch-tokens, or fewer workers per machine";
                    return Err(
                        ClusterError::Failed { message, exit: Exit::Failed, help: Some(help.to_owned()) }.into()
                    );
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// An attempt at a unit. Deletes what it may have written when it is dropped before it was successful.
struct Attempt<'s> {
    stage: &'s WorkerStage,
    unit: &'s Unit,
    number: u32,
    upload: Option<UploadId>,
    /// Whether the worker has said anything of the unit.
    has_begun: bool,
    is_over: bool,
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if self.is_over {
            return;
        }
        let (stores, unit, number) = (self.stage.stores.clone(), self.unit.clone(), self.number);
        let upload = self.upload.take();
        runtime.spawn(async move { unit.discard(&stores, number, upload).await });
    }
}

#[async_trait]
impl Stage for WorkerStage {
    fn spec(&self) -> &EmbedSpec {
        &self.spec
    }

    fn fields(&self) -> Vec<Field> {
        self.fields.clone()
    }

    fn metadata(&self) -> Vec<(String, String)> {
        self.described.metadata.clone()
    }

    /// For rows that only the client has: standard input.
    async fn submit(&self, texts: &ArrayRef) -> elmo::Result<Pending> {
        let remote = |error: Error| elmo::Error::Remote(Box::new(error));
        let body = texts_to_bytes(texts).map_err(remote)?;
        let (fleet, task, on_error) = (Arc::clone(&self.fleet), self.columns.clone(), self.spec.on_error);
        let rows = texts.len();
        // A task: it goes on while the caller does not wait yet.
        let embedded = tokio::spawn(async move {
            let (stats, bytes) = call::<ColumnStats>(&fleet, COLUMNS, &task, body).await.map_err(remote)?;
            let columns: EmbeddedColumns = columns_from_bytes(stats, &bytes).map_err(remote)?;
            if columns.vectors.len() != rows {
                let message = format!("a worker returned {} rows for {rows}", columns.vectors.len());
                return Err(elmo::Error::Remote(message.into()));
            }
            apply_on_error(columns, on_error)
        });
        Ok(Box::pin(AbortOnDrop(embedded)))
    }

    fn device(&self) -> String {
        self.described.device.clone()
    }

    fn tokens_at_once(&self) -> usize {
        self.described.tokens_at_once.saturating_mul(self.fleet.at_once())
    }
}

/// Aborts the task, and so ends the call, when it is dropped.
struct AbortOnDrop(tokio::task::JoinHandle<elmo::Result<EmbeddedColumns>>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Future for AbortOnDrop {
    type Output = elmo::Result<EmbeddedColumns>;

    fn poll(mut self: std::pin::Pin<&mut Self>, context: &mut std::task::Context<'_>) -> std::task::Poll<Self::Output> {
        // The task panicked, or the runtime is shutting down.
        std::pin::Pin::new(&mut self.0).poll(context).map(|done| done.unwrap_or(Err(elmo::Error::Closed)))
    }
}
