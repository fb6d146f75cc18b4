//! The files of one partition: one is filled while the one before it is published.

use std::{
    collections::VecDeque,
    ops::{ControlFlow, Range},
    pin::Pin,
    sync::Arc,
    time::Instant,
};

use super::{
    TopicPartition,
    chain::{Chain, ChainError, ChainId, EncodedFile, FileFormat, OpenFile, Published, Rejected},
    clock::{self, now},
    dead_letters::DeadLetters,
    finished::Rows,
    metrics::{Conflict, PartitionMetrics},
    output::{Output, Owned, Preparing},
    rotation::CloseReason,
    source::{Budget, Epoch, Permit, Upstream},
    totals::Totals,
};
use crate::{crash::stream as crash, error::Result};

/// Complete files of one partition that wait for the one before them, so that a slow request does not stop the stage.
const WAITING: usize = 1;

/// What all partitions write with.
#[derive(Clone)]
pub(super) struct Files {
    pub(super) format: Arc<FileFormat>,
    /// Commits what is published.
    pub(super) source: Arc<dyn Upstream>,
    pub(super) dead_letters: Option<DeadLetters>,
    pub(super) totals: Totals,
}

type Task<T> = Pin<Box<dyn Future<Output = T> + Send>>;
/// A chain, the file by which it was to be extended, and what became of that.
type Attempt = (Chain, EncodedFile, Result<Published, ChainError>);

/// The output of one partition in files.
pub(super) struct FileOutput {
    files: Files,
    source: TopicPartition,
    epoch: Epoch,
    metrics: Arc<PartitionMetrics>,
    id: Arc<ChainId>,
    /// Absent while a file is published.
    chain: Option<Chain>,
    open: Option<OpenFile>,
    /// The rest of a file is encoded.
    finishing: Option<Task<Result<EncodedFile, ChainError>>>,
    /// What the file that is encoded takes of the memory.
    encoding: u64,
    /// Complete since then, behind the one that is published.
    waiting: VecDeque<(Instant, EncodedFile)>,
    publishing: Option<Task<Attempt>>,
    /// When the file that is published was complete, and what it takes of the memory.
    request: (Instant, u64),
    permit: Permit,
    budget: Budget,
    /// Messages that the broker deleted before they were read; they follow the end of the chain.
    gap: Option<Range<i64>>,
    /// The start of the next file.
    next: i64,
    end: i64,
}

impl FileOutput {
    /// Writes behind the end of `chain`. The messages in `gap`, which follow it, are gone.
    pub(super) fn new(files: &Files, owned: Owned, chain: Chain, gap: Option<Range<i64>>) -> Self {
        let end = chain.end();
        owned.metrics.set_chain_end(end);
        Self {
            files: files.clone(),
            metrics: owned.metrics,
            id: Arc::clone(chain.id()),
            chain: Some(chain),
            open: None,
            finishing: None,
            encoding: 0,
            waiting: VecDeque::new(),
            publishing: None,
            request: (now(), 0),
            permit: owned.budget.permit(&owned.source, 0),
            budget: owned.budget,
            source: owned.source,
            epoch: owned.epoch,
            gap,
            next: end,
            end,
        }
    }

    fn open(&mut self) -> Result<&mut OpenFile, ChainError> {
        let file = match self.open.take() {
            Some(file) => file,
            None => {
                let mut file = OpenFile::new(&self.id, self.next, &self.files.format)?;
                if let Some(gap) = self.gap.take() {
                    file.gap(gap);
                }
                self.metrics.opened();
                file
            }
        };
        Ok(self.open.insert(file))
    }

    /// Ends the open file, if it has messages.
    fn finish(&mut self, reason: CloseReason) {
        if let Some(file) = self.open.take_if(|file| file.end() > file.start()) {
            tracing::debug!(partition = %self.source, reason = reason.as_str(), rows = file.rows(), "closing a file");
            let end = file.end();
            self.metrics.closed();
            self.next = end;
            self.encoding = file.memory();
            self.finishing = Some(Box::pin(file.finish(end)));
        }
    }

    /// Begins to publish the oldest complete file, unless another one is under way.
    fn publish(&mut self) {
        if self.publishing.is_some() {
            return;
        }
        // The chain is here whenever nothing is published.
        if let Some((complete, file)) = self.waiting.pop_front()
            && let Some(mut chain) = self.chain.take()
        {
            self.request = (complete, file.memory());
            let (budget, source) = (self.budget.clone(), self.source.clone());
            let hold = move |bytes| budget.permit(&source, usize::try_from(bytes).unwrap_or(usize::MAX));
            let metrics = Arc::clone(&self.files.totals.metrics);
            self.publishing = Some(Box::pin(async move {
                let published = chain.publish_watched(&file, hold, || metrics.retried()).await;
                (chain, file, published)
            }));
        }
        self.account();
    }

    /// Declares the memory that the files take.
    fn account(&mut self) {
        let open = self.open.as_ref().map_or(0, OpenFile::memory);
        let waiting: u64 = self.waiting.iter().map(|(_, file)| file.memory()).sum();
        let finishing = self.finishing.as_ref().map_or(0, |_| self.encoding);
        let publishing = self.publishing.as_ref().map_or(0, |_| self.request.1);
        self.permit.resize(usize::try_from(open + finishing + waiting + publishing).unwrap_or(usize::MAX));
        let bytes = self.open.as_ref().map_or(0, OpenFile::bytes);
        self.metrics.set_open_bytes(bytes, open);
    }

    /// A file was published, or cannot be: [`ControlFlow::Break`] with the offset where the chain goes on.
    fn published(&mut self, chain: Chain, file: &EncodedFile, published: Published) -> ControlFlow<i64> {
        let (end, existed) = match published {
            Published::Foreign { end } => {
                self.files.totals.metrics.conflict(Conflict::Foreign);
                return ControlFlow::Break(end);
            }
            Published::Ours { end, existed, .. } => (end, existed),
        };
        if existed {
            self.files.totals.metrics.conflict(Conflict::Own);
        }
        self.files.totals.metrics.published(file.bytes(), now().saturating_duration_since(self.request.0));
        self.files.totals.published(file.bytes());
        self.metrics.set_chain_end(end);
        self.end = end;
        if let Some(hint) = chain.hint() {
            crash::before_hint();
            // Without it, the next owner lists more objects.
            if let Err(error) = self.files.source.commit(&self.source, self.epoch, hint.end, &hint.object) {
                tracing::debug!(partition = %self.source, reason = %error, "the offset was not committed");
            }
            crash::after_hint();
        }
        self.chain = Some(chain);
        self.publish();
        ControlFlow::Continue(())
    }
}

impl Output for FileOutput {
    fn has_room(&self) -> bool {
        self.finishing.is_none() && self.waiting.len() < WAITING
    }

    fn prepare(&self, rows: Rows) -> Preparing {
        let (letters, source) = (self.files.dead_letters.clone(), self.source.clone());
        Box::pin(async move {
            if let Some(letters) = letters {
                letters.send(&source, &rows).await?;
            }
            Ok(rows)
        })
    }

    async fn write(&mut self, rows: Rows) -> Result<()> {
        crash::before_write();
        let rejected: Rejected = rows.counts.iter().map(|(label, count)| ((*label).to_owned(), *count)).collect();
        let file = self.open()?;
        file.write(&rows.batch, rows.end, &rejected, now()).await?;
        let reason = file.rotation().should_close(now());
        drop(rows);
        match reason {
            Some(reason) => self.finish(reason),
            None => self.account(),
        }
        Ok(())
    }

    async fn step(&mut self) -> Result<ControlFlow<i64>> {
        let deadline = self.open.as_ref().and_then(|file| file.rotation().next_deadline());
        let deadline = deadline.filter(|_| self.finishing.is_none());
        tokio::select! {
            biased;
            (chain, file, published) = wait(&mut self.publishing) => {
                self.publishing = None;
                Ok(self.published(chain, &file, published?))
            }
            file = wait(&mut self.finishing) => {
                self.finishing = None;
                self.waiting.push_back((now(), file?));
                self.publish();
                Ok(ControlFlow::Continue(()))
            }
            () = sleep_until(deadline) => {
                if let Some(reason) = self.open.as_ref().and_then(|file| file.rotation().should_close(now())) {
                    self.finish(reason);
                }
                Ok(ControlFlow::Continue(()))
            }
        }
    }

    fn close(&mut self, reason: CloseReason) {
        if self.finishing.is_none() {
            self.finish(reason);
        }
    }

    fn is_published(&self) -> bool {
        let open = self.open.as_ref().is_some_and(|file| file.end() > file.start());
        !open && self.finishing.is_none() && self.waiting.is_empty() && self.publishing.is_none()
    }

    fn end(&self) -> i64 {
        self.end
    }
}

/// Waits for a task, for ever if there is none.
async fn wait<T>(task: &mut Option<Task<T>>) -> T {
    match task {
        Some(task) => task.await,
        None => std::future::pending().await,
    }
}

async fn sleep_until(time: Option<Instant>) {
    match time {
        Some(time) => clock::sleep_until(time).await,
        None => std::future::pending().await,
    }
}
