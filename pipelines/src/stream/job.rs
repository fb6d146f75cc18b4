//! Runs a stream: assigns tasks to partitions, and ends them.
//!
//! The loop owns no rows. It routes the messages of the consumer to the tasks of their partitions, begins a task when a
//! partition is assigned or has to begin again, and asks tasks to publish what they have when a partition is revoked, when
//! memory is short, or when the stream stops.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use futures::future::join_all;
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, timeout_at},
};

use super::{
    TopicPartition,
    opening::Opener,
    output::Owned,
    partition::{Ended, Inbox, Order, Parts},
    rotation::CloseReason,
    source::{Assigned, Batch, Budget, Epoch, Event, Hint, Reply, Source, Start, Starts, Statistics},
};
use crate::{
    crash::stream as crash,
    error::{Error, Result},
    stream::metrics::{Health, PartitionMetrics, RebalanceKind},
};

/// How long partitions that are given away may publish; the consumer waits a little longer.
const REVOKE: Duration = Duration::from_secs(20);
/// How much later than the tasks the loop stops.
const MARGIN: Duration = Duration::from_secs(1);
/// How long the consumer waits for the offsets of new partitions. Later ones are set by a seek.
const ASSIGN: Duration = Duration::from_secs(20);
/// Looks during which nothing may come before a partition counts as read: more than two statistics of librdkafka.
const QUIET_LOOKS: u8 = 6;
/// An open file below this part of the memory is not closed for want of memory.
const SMALL: usize = 32;
/// Between two looks at memory and metrics.
const TICK: Duration = Duration::from_millis(500);

/// A partition that has a task.
struct Running {
    epoch: Epoch,
    inbox: mpsc::UnboundedSender<Inbox>,
    orders: watch::Sender<Order>,
    /// Messages before the seek that the task waits for are of an older task.
    seeking: bool,
    /// Where the partition ended when it was opened; `None` until it is.
    target: Option<i64>,
    /// Behind the last message that the task was given.
    next: i64,
    /// Looks in a row at which librdkafka had nothing left before `target`.
    quiet: u8,
    metrics: Arc<PartitionMetrics>,
    /// The task was told that there is no more, or has read all there was.
    ended: bool,
}

/// A task knows where its partition starts.
#[derive(Debug)]
pub(super) struct Started {
    pub(super) source: TopicPartition,
    pub(super) epoch: Epoch,
    /// The first offset to read.
    pub(super) at: i64,
    /// Behind the last message that the broker has.
    pub(super) high: i64,
}

/// The task of a partition has ended.
struct Done {
    owned: Owned,
    assigned: Assigned,
    ended: Result<Ended>,
}

/// Partitions that are given away when their tasks have ended.
struct Revoking {
    partitions: HashSet<(TopicPartition, Epoch)>,
    reply: Reply<()>,
}

/// Waits until the stream has to stop; a task that looks at the time has ended a moment before.
async fn sleep_until(stopping: Option<Instant>) {
    match stopping {
        Some(until) => tokio::time::sleep_until(until + MARGIN).await,
        None => std::future::pending().await,
    }
}

/// Everything that the loop works with.
pub(super) struct Job {
    pub(super) source: Arc<Source>,
    pub(super) events: mpsc::UnboundedReceiver<Event>,
    /// From the tasks.
    pub(super) started: mpsc::UnboundedReceiver<Started>,
    pub(super) opener: Arc<Opener>,
    pub(super) parts: Arc<Parts>,
    pub(super) budget: Budget,
    pub(super) health: Arc<Health>,
    pub(super) once: bool,
    pub(super) grace: Duration,
}

/// What changes while the loop runs.
#[derive(Default)]
struct State {
    running: HashMap<TopicPartition, Running>,
    tasks: JoinSet<Done>,
    revoking: Vec<Revoking>,
    /// Partitions were assigned, perhaps none.
    assigned: bool,
    /// When the stream stops at the latest; `None` while it runs.
    stopping: Option<Instant>,
    /// Tasks were cut before everything that they had taken was published.
    cut: bool,
    failed: Option<Error>,
    flushes: u64,
}

impl Job {
    /// Runs until `stop`, or until everything is read. Returns whether all rows that were read are published.
    ///
    /// # Errors
    /// The first error of a partition or of the consumer that ends the stream; other partitions publish what they have.
    pub(super) async fn run(mut self, stop: impl Future<Output = ()>) -> Result<bool> {
        let mut state = State::default();
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut stop = std::pin::pin!(stop);
        loop {
            if state.stopping.is_none() && (state.failed.is_some() || (self.once && state.is_read())) {
                self.stop(&mut state);
            }
            if state.stopping.is_some() && state.tasks.is_empty() {
                break;
            }
            tokio::select! {
                biased;
                () = &mut stop, if state.stopping.is_none() => self.stop(&mut state),
                // A task may wait for a broker or a registry, where it does not look at the time.
                () = sleep_until(state.stopping) => {
                    state.cut = true;
                    state.tasks.abort_all();
                    while state.tasks.join_next().await.is_some() {}
                }
                Some(done) = state.tasks.join_next() => match done {
                    Ok(done) => self.ended(&mut state, done),
                    Err(died) => state.fail(Error::Failed(format!("the task of a partition died: {died}"))),
                },
                event = self.events.recv() => match event {
                    Some(event) => self.handle(&mut state, event),
                    None => {
                        state.fail(Error::Failed("the consumer has ended".to_owned()));
                        // Nothing more comes, so do not ask again.
                        self.stop(&mut state);
                        self.drain(&mut state).await;
                        break;
                    }
                },
                Some(started) = self.started.recv() => state.started(&started),
                _ = tick.tick() => self.look(&mut state),
            }
        }
        // No task is left, so nobody else has it.
        if let Some(source) = Arc::into_inner(self.source) {
            source.stop().await;
        }
        match state.failed {
            Some(error) => Err(error),
            None => Ok(!state.cut),
        }
    }

    /// Waits for the tasks without the consumer.
    async fn drain(&self, state: &mut State) {
        while let Some(done) = state.tasks.join_next().await {
            if let Ok(done) = done {
                self.ended(state, done);
            }
        }
    }

    /// Asks all tasks to publish what they have.
    fn stop(&self, state: &mut State) {
        let until = Instant::now() + self.grace;
        state.stopping = Some(until);
        self.health.stopping();
        for running in state.running.values() {
            let _ = running.orders.send(Order::Drain { reason: CloseReason::Shutdown, until });
        }
    }

    fn handle(&self, state: &mut State, event: Event) {
        match event {
            Event::Messages(batch) => {
                self.parts.totals.metrics.read(batch.messages.len() as u64);
                state.route(batch);
            }
            Event::Assign { partitions, epoch, reply } => self.assign(state, partitions, epoch, reply),
            Event::Revoke { partitions, lost, reply } => self.revoke(state, partitions, lost, reply),
            Event::Sought { partition, epoch, .. } => {
                if let Some(running) = state.running.get_mut(&partition).filter(|running| running.epoch == epoch) {
                    running.seeking = false;
                }
            }
            Event::OutOfRange { partition, epoch, position, range } => {
                tracing::warn!(%partition, position, low = range.0, high = range.1, "the broker does not have this offset");
                state.cut_one(&partition, epoch);
            }
            Event::Error { error, fatal: true } => state.fail(error.into()),
            Event::Error { error, fatal: false } => tracing::warn!(%error, "Kafka"),
            Event::Connected => tracing::info!("the brokers answer again"),
        }
    }

    /// Begins a task for each partition. The consumer gets the offsets at which they start.
    fn assign(&self, state: &mut State, partitions: Vec<Assigned>, epoch: Epoch, reply: Reply<Starts>) {
        crash::at_start();
        self.parts.totals.metrics.rebalanced(RebalanceKind::Assign);
        state.assigned = true;
        self.health.assigned();
        let mut starts = Vec::with_capacity(partitions.len());
        for assigned in partitions {
            let (sender, start) = oneshot::channel();
            let partition = assigned.partition.clone();
            self.begin(state, assigned, epoch, sender);
            starts.push(async move { start.await.ok().map(|start| (partition, Start::At(start))) });
        }
        let until = Instant::now() + ASSIGN;
        tokio::spawn(async move {
            let starts = starts.into_iter().map(|start| async move { timeout_at(until, start).await.ok().flatten() });
            reply.send(join_all(starts).await.into_iter().flatten().collect());
        });
    }

    /// Begins the task of a partition; it says where it starts through `start`, or by a seek if nobody waits any more.
    fn begin(&self, state: &mut State, assigned: Assigned, epoch: Epoch, start: oneshot::Sender<i64>) {
        let order = match state.stopping {
            Some(until) => Order::Drain { reason: CloseReason::Shutdown, until },
            None => Order::Run(0),
        };
        let ((orders, ordered), (inbox, incoming)) = (watch::channel(order), mpsc::unbounded_channel());
        let seeking = start.is_closed();
        let metrics = Arc::new(self.parts.totals.metrics.partition(assigned.partition.clone()));
        let of_task = Arc::clone(&metrics);
        let running = Running { epoch, inbox, orders, seeking, target: None, next: 0, quiet: 0, metrics, ended: false };
        state.running.insert(assigned.partition.clone(), running);
        let owned = Owned { source: assigned.partition.clone(), epoch, budget: self.budget.clone(), metrics: of_task };
        let (opener, parts, source) = (Arc::clone(&self.opener), Arc::clone(&self.parts), Arc::clone(&self.source));
        state.tasks.spawn(async move {
            let ended = opener.run(&parts, &source, &owned, &assigned, start, (incoming, ordered)).await;
            Done { owned, assigned, ended }
        });
    }

    fn revoke(&self, state: &mut State, partitions: Vec<(TopicPartition, Epoch)>, lost: bool, reply: Reply<()>) {
        crash::in_revoke();
        self.parts.totals.metrics.rebalanced(if lost { RebalanceKind::Lost } else { RebalanceKind::Revoke });
        let until = Instant::now() + REVOKE;
        let mut waits = HashSet::new();
        for (partition, epoch) in partitions {
            let Some(running) = state.running.get(&partition).filter(|running| running.epoch == epoch) else {
                continue;
            };
            if lost {
                // Dropping the sender of orders ends the task.
                state.running.remove(&partition);
                continue;
            }
            let until = state.stopping.map_or(until, |stopping| stopping.min(until));
            let _ = running.orders.send(Order::Drain { reason: CloseReason::Revoke, until });
            waits.insert((partition, epoch));
        }
        match waits.is_empty() {
            true => reply.send(()),
            false => state.revoking.push(Revoking { partitions: waits, reply }),
        }
    }

    /// A task has ended: forget it, or begin again behind what another process wrote.
    fn ended(&self, state: &mut State, Done { owned, mut assigned, ended }: Done) {
        let is_current = state.running.get(&owned.source).is_some_and(|running| running.epoch == owned.epoch);
        let key = (owned.source.clone(), owned.epoch);
        let is_revoked = state.revoking.iter().any(|revoking| revoking.partitions.contains(&key));
        let again = match ended {
            Ok(Ended::Drained(end)) => {
                tracing::debug!(partition = %owned.source, end, "drained");
                false
            }
            Ok(Ended::Cut) => {
                state.cut |= is_current && state.stopping.is_some();
                false
            }
            Ok(Ended::NotBegun) => false,
            Ok(Ended::Overtaken) => is_current && !is_revoked && state.stopping.is_none(),
            Ok(Ended::OutOfRange(end)) => {
                // What the group had committed when the partition was assigned is old by now.
                if self.opener.ends_by_group() {
                    assigned.committed = Hint::At { offset: end, metadata: String::new() };
                }
                is_current && !is_revoked && state.stopping.is_none()
            }
            // What a partition cannot write after it was taken away is nobody's concern.
            Err(error) if is_current => {
                state.fail(error);
                false
            }
            Err(error) => {
                tracing::debug!(partition = %owned.source, %error, "failed after it was taken away");
                false
            }
        };
        for revoking in &mut state.revoking {
            revoking.partitions.remove(&key);
        }
        for done in state.revoking.extract_if(.., |revoking| revoking.partitions.is_empty()) {
            done.reply.send(());
        }
        if again {
            // Nobody waits for the start, so the task seeks.
            let (start, _) = oneshot::channel();
            self.begin(state, assigned, owned.epoch, start);
        } else if is_current {
            let done = self.once && state.stopping.is_none() && !is_revoked;
            match state.running.get_mut(&owned.source) {
                // Kept, so that the loop knows that everything is read.
                Some(running) if done => running.ended = true,
                _ => drop(state.running.remove(&owned.source)),
            }
        }
    }

    /// Publishes open files when memory is short, and updates the metrics.
    fn look(&self, state: &mut State) {
        let (used, limit) = (self.budget.used(), self.budget.limit());
        let statistics = Arc::clone(&self.source.statistics().borrow());
        self.parts.totals.metrics.memory(used, limit);
        if self.source.ownership().is_alive() {
            self.health.polled();
        }
        self.parts.totals.look(self.parts.stage.as_ref());
        let paused = self.source.paused();
        for (partition, running) in &state.running {
            running.metrics.set_paused(paused.contains(partition));
            if let Some(end) = statistics.partitions.get(partition).and_then(|partition| partition.end) {
                running.metrics.set_high_watermark(end);
            }
        }
        if self.once {
            state.find_ends(&statistics);
        }
        // A partition that is paused because its open file takes its share would wait until the file is old.
        let flushes = &mut state.flushes;
        for (partition, running) in state.running.iter().filter(|(partition, _)| paused.contains(*partition)) {
            let open = running.metrics.open_bytes();
            if open >= limit / SMALL && 2 * open >= self.budget.used_by(partition) {
                *flushes += 1;
                running.flush(*flushes);
            }
        }
        if used < limit / 4 * 3 {
            return;
        }
        let largest = state.running.iter().max_by_key(|(partition, _)| self.budget.used_by(partition));
        if let Some((partition, running)) = largest {
            state.flushes += 1;
            tracing::debug!(%partition, used, limit, "memory is short: closing the file of the largest partition");
            running.flush(state.flushes);
        }
    }
}

impl Running {
    /// Asks the task to publish what it has written.
    fn flush(&self, number: u64) {
        self.orders.send_if_modified(|order| match order {
            Order::Run(flushed) => {
                *flushed = number;
                true
            }
            Order::Drain { .. } => false,
        });
    }
}

impl State {
    /// Passes messages to the task of their partition, unless they are of an older assignment.
    fn route(&mut self, batch: Batch) {
        let source = &batch.messages.source;
        let running = self.running.get_mut(source).filter(|running| running.epoch == batch.epoch && !running.seeking);
        if let Some(running) = running {
            running.next = batch.messages.end;
            running.metrics.set_position(running.next);
            // A task that has ended needs no messages.
            let _ = running.inbox.send(Inbox::Messages(batch));
        }
    }

    fn started(&mut self, started: &Started) {
        let running = self.running.get_mut(&started.source).filter(|running| running.epoch == started.epoch);
        if let Some(running) = running {
            running.next = running.next.max(started.at);
            running.metrics.set_position(running.next);
            running.metrics.set_high_watermark(started.high);
            running.target.get_or_insert(started.high);
        }
    }

    /// Tells tasks that have got all messages that their partitions held when they were opened. The last offsets may hold
    /// no message, but the marks of transactions; then librdkafka has gone on behind them and has nothing left, which must
    /// hold at two looks, since messages may be on their way between it and the task.
    fn find_ends(&mut self, statistics: &Statistics) {
        for (partition, running) in self.running.iter_mut().filter(|(_, running)| !running.ended && !running.seeking) {
            let Some(target) = running.target else { continue };
            let of_partition = statistics.partitions.get(partition);
            let is_quiet =
                of_partition.is_some_and(|p| p.queued_messages == 0 && p.fetched.is_some_and(|at| at >= target));
            running.quiet = if is_quiet { running.quiet.saturating_add(1) } else { 0 };
            // Longer than the time between two statistics.
            if running.next >= target || running.quiet > QUIET_LOOKS {
                running.ended = true;
                let _ = running.inbox.send(Inbox::End);
            }
        }
    }

    /// Ends the task of a partition, which begins again.
    fn cut_one(&mut self, partition: &TopicPartition, epoch: Epoch) {
        // A task that is about to seek has not read from there.
        let running = self.running.get_mut(partition).filter(|running| running.epoch == epoch && !running.seeking);
        if let Some(running) = running {
            let _ = running.inbox.send(Inbox::OutOfRange);
        }
    }

    /// Whether all partitions were read to the end that they had.
    fn is_read(&self) -> bool {
        self.assigned && self.tasks.is_empty() && self.running.values().all(|running| running.ended)
    }

    fn fail(&mut self, error: Error) {
        match &self.failed {
            None => self.failed = Some(error),
            Some(_) => tracing::error!(%error, "another error while the stream stops"),
        }
    }
}
