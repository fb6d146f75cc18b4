//! Runs a stream: assigns tasks to partitions, and ends them.
//!
//! The loop owns no rows. It routes the messages of the consumer to the tasks of their partitions, begins a task when a
//! partition is assigned or has to begin again, and asks tasks to publish what they have when a partition is revoked, when
//! memory is short, or when the stream stops.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use futures::future::join_all;
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
};

use super::{
    TopicPartition,
    chain::ChainError,
    clock::{now, sleep_until, until},
    opening::Opener,
    output::Owned,
    partition::{Ended, Inbox, Order, Parts},
    rotation::CloseReason,
    source::{Assigned, Batch, Budget, Epoch, Event, Hint, Reply, Start, Starts, Statistics, Upstream},
};
use crate::{
    crash::stream as crash,
    error::{Error, Result},
    stream::metrics::{Health, PartitionMetrics, RebalanceKind},
};

/// Fraction of the grace period in which rows are published; the rest is for leaving the group.
const PUBLISH: f32 = 0.8;
/// Fraction of the time that the consumer waits for an answer, after which it gets one.
const ANSWER: f32 = 2.0 / 3.0;
/// Statistics of librdkafka in a row that must say that nothing is left to read.
const QUIET_STATISTICS: u8 = 3;
/// Ticks in a row without news of the group after which this process counts as a member without partitions: a few heartbeats.
const IDLE_LOOKS: u8 = 30;
/// Ticks after a rebalance within which revoked partitions may return, or a new member gets its first ones.
const SETTLED_LOOKS: u8 = 12;
/// An open file below this part of the memory is not closed for want of memory.
const SMALL: usize = 32;
/// Ticks between questions to the brokers whether topics are still the same: half a minute.
const ASK_LOOKS: u8 = 60;
/// Interval of the checks of memory and metrics.
const TICK: Duration = Duration::from_millis(500);

/// A partition that has, or had, a task.
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
    /// Statistics in a row by which librdkafka had nothing left before `target`.
    quiet: u8,
    metrics: Arc<PartitionMetrics>,
    /// The task was told that there is no more.
    ended: bool,
    /// The task has ended, having read all there was.
    gone: bool,
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
    /// The id of the topic, if the output knows it and the brokers say it.
    pub(super) topic_id: Option<String>,
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

/// Deadlines of a shutdown.
#[derive(Debug, Clone, Copy)]
struct Deadlines {
    /// Tasks that have not published their rows are cut.
    publish: Instant,
    /// The consumer has left its group, or gives up.
    leave: Instant,
}

/// Everything that the loop works with.
pub(super) struct Job {
    pub(super) source: Arc<dyn Upstream>,
    pub(super) events: mpsc::UnboundedReceiver<Event>,
    /// From the tasks.
    pub(super) started: mpsc::UnboundedReceiver<Started>,
    pub(super) opener: Arc<Opener>,
    pub(super) parts: Arc<Parts>,
    pub(super) budget: Budget,
    pub(super) health: Arc<Health>,
    pub(super) once: bool,
    /// The partitions of all topics at the start.
    pub(super) planned: HashSet<TopicPartition>,
    /// Time limit of a shutdown, including leaving the group.
    pub(super) grace: Duration,
}

/// What changes while the loop runs.
#[derive(Default)]
struct State {
    running: HashMap<TopicPartition, Running>,
    tasks: JoinSet<Done>,
    revoking: Vec<Revoking>,
    /// The group has said which partitions are ours, perhaps none, and no rebalance is under way as far as is known.
    assigned: bool,
    /// Looks in a row at which the group had accepted this process without giving it a partition.
    idle: u8,
    /// Looks since the last rebalance.
    settled: u8,
    /// The newest statistics that were looked at for ends.
    counted: Option<Arc<Statistics>>,
    /// Partitions that were not given to this process yet, or were given away before they were read to their ends.
    unread: HashSet<TopicPartition>,
    /// Ids of the topics whose partitions were begun, where the brokers say them.
    topics: HashMap<Arc<str>, String>,
    /// Looks since the brokers were asked for the ids again.
    unasked: u8,
    /// Asks whether a topic is still the one that it was.
    asking: JoinSet<Option<Error>>,
    /// `None` while the stream runs.
    stopping: Option<Deadlines>,
    /// Tasks were cut before everything that they had taken was published.
    cut: bool,
    failed: Option<Error>,
    /// The consumer has ended.
    closed: bool,
    flushes: u64,
}

impl Job {
    /// Runs until `stop`, or until everything is read. Returns whether all rows that were read are published.
    ///
    /// # Errors
    /// The first error of a partition or of the consumer that ends the stream; other partitions publish what they have.
    pub(super) async fn run(mut self, stop: impl Future<Output = ()>) -> Result<bool> {
        // The broker may give out the topics of a name before those of a pattern.
        let mut state = State { unread: std::mem::take(&mut self.planned), ..State::default() };
        let mut look_at = now();
        let mut stop = std::pin::pin!(stop);
        let leave = loop {
            if state.stopping.is_none() && (state.failed.is_some() || (self.once && state.is_read())) {
                self.stop(&mut state);
            }
            if let Some(deadlines) = state.stopping.filter(|_| state.tasks.is_empty()) {
                break deadlines.leave;
            }
            tokio::select! {
                biased;
                () = &mut stop, if state.stopping.is_none() => self.stop(&mut state),
                () = sleep_until(look_at) => {
                    self.look(&mut state);
                    look_at = now() + TICK;
                }
                Some(done) = state.tasks.join_next() => match done {
                    Ok(done) => self.ended(&mut state, done),
                    Err(died) => state.fail(Error::Failed(format!("the task of a partition died: {died}"))),
                },
                Some(started) = self.started.recv() => self.end_if_read(state.started(&started)),
                Some(Ok(Some(error))) = state.asking.join_next() => state.fail(error),
                event = self.events.recv(), if !state.closed => match event {
                    Some(event) => self.handle(&mut state, event),
                    None => {
                        state.closed = true;
                        // It ends after a fatal error, which was heard before.
                        if state.failed.is_none() {
                            state.fail(Error::Failed("the consumer has ended".to_owned()));
                        }
                    }
                },
            }
        };
        self.source.stop(leave.saturating_duration_since(now())).await;
        match state.failed {
            Some(error) => Err(error),
            None => Ok(!state.cut),
        }
    }

    /// Asks all tasks to publish what they have.
    fn stop(&self, state: &mut State) {
        let now = now();
        let deadlines = Deadlines { publish: now + self.grace.mul_f32(PUBLISH), leave: now + self.grace };
        state.stopping = Some(deadlines);
        self.health.stopping();
        for running in state.running.values() {
            running.drain(CloseReason::Shutdown, deadlines.publish);
        }
    }

    fn handle(&self, state: &mut State, event: Event) {
        match event {
            Event::Messages(batch) => {
                self.parts.totals.metrics.read(batch.messages.len() as u64);
                self.end_if_read(state.route(batch));
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

    /// Ends a partition that was read to the end that it had, in a stream that reads no further.
    fn end_if_read(&self, running: Option<&mut Running>) {
        if let Some(running) = running.filter(|running| self.once && running.is_read()) {
            running.end();
        }
    }

    /// How long an answer to the consumer may take, so that it does not wait in vain.
    fn answer(&self) -> Duration {
        self.source.patience().mul_f32(ANSWER)
    }

    /// Begins a task for each partition. The consumer gets the offsets at which they start.
    fn assign(&self, state: &mut State, partitions: Vec<Assigned>, epoch: Epoch, reply: Reply<Starts>) {
        crash::at_start();
        self.parts.totals.metrics.rebalanced(RebalanceKind::Assign);
        (state.assigned, state.settled) = (true, 0);
        self.health.assigned();
        let mut starts = Vec::with_capacity(partitions.len());
        for assigned in partitions {
            let (sender, start) = oneshot::channel();
            let partition = assigned.partition.clone();
            state.unread.remove(&partition);
            self.begin(state, assigned, epoch, sender);
            starts.push((partition, start));
        }
        let until = now() + self.answer();
        tokio::spawn(async move {
            let starts = starts.into_iter().map(|(partition, start)| async move {
                let start = by(until, start).await?;
                Some((partition, Start::At(start)))
            });
            reply.send(join_all(starts).await.into_iter().flatten().collect());
        });
    }

    /// Begins the task of a partition; it says where it starts through `start`, or by a seek if nobody waits any more.
    fn begin(&self, state: &mut State, assigned: Assigned, epoch: Epoch, start: oneshot::Sender<i64>) {
        let order = match state.stopping {
            Some(deadlines) => Order::Drain { reason: CloseReason::Shutdown, until: deadlines.publish },
            None => Order::Run(0),
        };
        let ((orders, ordered), (inbox, incoming)) = (watch::channel(order), mpsc::unbounded_channel());
        let seeking = start.is_closed();
        let metrics = Arc::new(self.parts.totals.metrics.partition(assigned.partition.clone()));
        let owned = Owned {
            source: assigned.partition.clone(),
            epoch,
            budget: self.budget.clone(),
            metrics: Arc::clone(&metrics),
        };
        let (target, next, quiet, ended, gone) = (None, 0, 0, false, false);
        let running = Running { epoch, inbox, orders, seeking, target, next, quiet, metrics, ended, gone };
        state.running.insert(assigned.partition.clone(), running);
        self.share(state);
        let (opener, parts, source) = (Arc::clone(&self.opener), Arc::clone(&self.parts), Arc::clone(&self.source));
        let cut = cut(ordered.clone());
        state.tasks.spawn(async move {
            // A task may wait for a store, a registry or a broker that does not answer.
            let ended = tokio::select! {
                biased;
                ended = opener.run(&parts, source.as_ref(), &owned, &assigned, start, (incoming, ordered)) => ended,
                () = cut => Ok(Ended::Cut),
            };
            Done { owned, assigned, ended }
        });
    }

    /// Tells the tasks how many they are.
    fn share(&self, state: &State) {
        let running = state.running.values().filter(|running| !running.gone).count();
        self.parts.owned.store(running, Relaxed);
    }

    fn revoke(&self, state: &mut State, partitions: Vec<(TopicPartition, Epoch)>, lost: bool, reply: Reply<()>) {
        crash::in_revoke();
        self.parts.totals.metrics.rebalanced(if lost { RebalanceKind::Lost } else { RebalanceKind::Revoke });
        // The group says next which partitions remain, or return.
        (state.assigned, state.settled) = (false, 0);
        let until = now() + self.answer();
        let mut waits = HashSet::new();
        for (partition, epoch) in partitions {
            let Some(running) = state.running.get(&partition).filter(|running| running.epoch == epoch) else {
                continue;
            };
            if !running.gone {
                state.unread.insert(partition.clone());
            }
            if lost || running.gone {
                // Dropping the sender of orders ends the task.
                state.running.remove(&partition);
                continue;
            }
            running.drain(CloseReason::Revoke, until);
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
        let is_stopping = state.stopping.is_some();
        let again = match ended {
            Ok(Ended::Drained(end)) => {
                tracing::debug!(partition = %owned.source, end, "drained");
                false
            }
            Ok(Ended::Cut) => {
                state.cut |= is_current && is_stopping;
                false
            }
            Ok(Ended::NotBegun) => false,
            Ok(Ended::Overtaken) => {
                // The other process may not have written all that this one had read.
                state.cut |= is_current && is_stopping;
                is_current && !is_revoked && !is_stopping
            }
            Ok(Ended::OutOfRange(end)) => {
                // What the group had committed when the partition was assigned is old by now.
                if self.opener.ends_by_group() {
                    assigned.committed = Hint::At { offset: end, metadata: String::new() };
                }
                is_current && !is_revoked && !is_stopping
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
            let done = self.once && !is_stopping && !is_revoked;
            match state.running.get_mut(&owned.source) {
                // Kept, so that the loop knows that everything is read.
                Some(running) if done => (running.ended, running.gone) = (true, true),
                _ => drop(state.running.remove(&owned.source)),
            }
        }
        self.share(state);
    }

    /// Asks now and then whether the topics of this process are still those that they were when their partitions were begun:
    /// the consumer would go on in a topic that was deleted and created again, at the offset that it had in the old one.
    fn ask_for_topics(&self, state: &mut State) {
        state.unasked = state.unasked.saturating_add(1);
        if state.unasked < ASK_LOOKS || state.stopping.is_some() || !state.asking.is_empty() {
            return;
        }
        state.unasked = 0;
        let of_topics: HashMap<_, _> = state.running.keys().map(|partition| (&partition.topic, partition)).collect();
        for (topic, partition) in of_topics {
            let Some(was) = state.topics.get(topic).cloned() else { continue };
            let (source, partition) = (Arc::clone(&self.source), partition.clone());
            state.asking.spawn(async move {
                match source.topic_id(&partition.topic).await {
                    Ok(Some(now)) if now != was => Some(ChainError::OtherTopic { partition, was, now }.into()),
                    _ => None,
                }
            });
        }
    }

    /// Publishes open files when memory is short, and updates the metrics.
    fn look(&self, state: &mut State) {
        let statistics = self.source.statistics();
        if self.source.is_alive() {
            self.health.polled();
        }
        self.parts.totals.metrics.memory(self.budget.used(), self.budget.limit());
        self.parts.totals.look(self.parts.stage.as_ref());
        let paused = self.source.paused();
        for (partition, running) in &state.running {
            running.metrics.set_paused(paused.contains(partition));
            if let Some(end) = statistics.partitions.get(partition).and_then(|partition| partition.end) {
                running.metrics.set_high_watermark(end);
            }
        }
        state.settled = state.settled.saturating_add(1);
        self.ask_for_topics(state);
        self.look_for_membership(state);
        if self.once {
            state.find_ends(&statistics, &paused);
        }
        self.flush(state, &paused);
    }

    /// Counts an empty assignment of which the group says nothing.
    fn look_for_membership(&self, state: &mut State) {
        let is_idle = !state.assigned && state.running.is_empty() && self.source.joined_silently();
        state.idle = if is_idle { state.idle.saturating_add(1) } else { 0 };
        if state.idle > IDLE_LOOKS {
            state.assigned = true;
            self.health.assigned();
        }
    }

    /// Publishes open files for which memory is short.
    fn flush(&self, state: &mut State, paused: &HashSet<TopicPartition>) {
        let (used, limit) = (self.budget.used(), self.budget.limit());
        // A partition that is paused because its open file takes its share would wait until the file is old.
        let flushes = &mut state.flushes;
        for (partition, running) in state.running.iter().filter(|(partition, _)| paused.contains(*partition)) {
            let open = running.metrics.open_memory();
            if open >= limit / SMALL && 2 * open >= self.budget.used_by(partition) {
                *flushes += 1;
                running.flush(*flushes);
            }
        }
        if used < limit / 4 * 3 {
            return;
        }
        // If open files take half of the memory, the largest one has its part of that. Messages that wait for the model, or
        // for the store, take no less when a file is closed.
        let least = limit / SMALL.max(2 * state.running.len());
        let largest = state.running.iter().max_by_key(|(_, running)| running.metrics.open_memory());
        if let Some((partition, running)) = largest.filter(|(_, running)| running.metrics.open_memory() > least) {
            state.flushes += 1;
            tracing::debug!(%partition, used, limit, "memory is short: closing the largest file");
            running.flush(state.flushes);
        }
    }
}

/// What a task sends until a time. What it sends later it is told of.
async fn by<T>(time: Instant, mut sent: oneshot::Receiver<T>) -> Option<T> {
    match until(time, &mut sent).await {
        Some(sent) => sent.ok(),
        None => {
            // It may have been sent at this moment.
            sent.close();
            sent.try_recv().ok()
        }
    }
}

/// Waits until a task must end, whatever it is doing: its time to drain is over, or its partition is lost.
async fn cut(mut orders: watch::Receiver<Order>) {
    loop {
        let order = *orders.borrow_and_update();
        let changed = match order {
            Order::Run(_) => orders.changed().await,
            Order::Drain { until: time, .. } => match until(time, orders.changed()).await {
                Some(changed) => changed,
                None => return,
            },
        };
        if changed.is_err() {
            return;
        }
    }
}

impl Running {
    /// Whether the task has got all messages that the partition held when it was opened.
    fn is_read(&self) -> bool {
        self.target.is_some_and(|target| self.next >= target)
    }

    /// Tells the task that there is no more.
    fn end(&mut self) {
        if !self.ended && !self.seeking {
            self.ended = true;
            let _ = self.inbox.send(Inbox::End);
        }
    }

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

    /// Asks the task to publish what it has taken, and to end. An earlier deadline stays.
    fn drain(&self, reason: CloseReason, until: Instant) {
        self.orders.send_modify(|order| {
            let until = match order {
                Order::Drain { until: earlier, .. } => until.min(*earlier),
                Order::Run(_) => until,
            };
            *order = Order::Drain { reason, until };
        });
    }
}

impl State {
    /// Passes messages to the task of their partition, unless they are of an older assignment.
    fn route(&mut self, batch: Batch) -> Option<&mut Running> {
        let source = &batch.messages.source;
        let running =
            self.running.get_mut(source).filter(|running| running.epoch == batch.epoch && !running.seeking)?;
        running.next = batch.messages.end;
        running.metrics.set_position(running.next);
        // A task that has ended needs no messages.
        let _ = running.inbox.send(Inbox::Messages(batch));
        Some(running)
    }

    fn started(&mut self, started: &Started) -> Option<&mut Running> {
        let running = self.running.get_mut(&started.source).filter(|running| running.epoch == started.epoch)?;
        if let Some(id) = &started.topic_id {
            self.topics.insert(Arc::clone(&started.source.topic), id.clone());
        }
        running.next = running.next.max(started.at);
        running.metrics.set_position(running.next);
        running.metrics.set_high_watermark(started.high);
        running.target.get_or_insert(started.high);
        Some(running)
    }

    /// Tells tasks that have got all messages that their partitions held when they were opened, which nobody saw in the
    /// messages. The last offsets may hold no message, but the marks of transactions; then librdkafka has gone on behind them
    /// and has nothing left, which several statistics must say, since messages may be on their way between it and the task. A
    /// consumer that waits in a rebalance makes none, and may hold messages. A pause drops what was fetched.
    fn find_ends(&mut self, statistics: &Arc<Statistics>, paused: &HashSet<TopicPartition>) {
        let is_new = self.counted.replace(Arc::clone(statistics)).is_none_or(|last| !Arc::ptr_eq(&last, statistics));
        for (partition, running) in self.running.iter_mut().filter(|(_, running)| !running.ended && !running.seeking) {
            let Some(target) = running.target else { continue };
            let of_partition = statistics.partitions.get(partition).filter(|_| !paused.contains(partition));
            let is_quiet =
                of_partition.is_some_and(|p| p.queued_messages == 0 && p.fetched.is_some_and(|at| at >= target));
            running.quiet = if is_quiet { running.quiet.saturating_add(u8::from(is_new)) } else { 0 };
            if running.is_read() || running.quiet >= QUIET_STATISTICS {
                running.end();
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

    /// Whether all partitions were read to the end that they had. A process that was to share the work of another one may
    /// leave at once, and the group then gives its partitions back.
    fn is_read(&self) -> bool {
        let may_get_more = self.running.is_empty() || !self.unread.is_empty();
        let is_settled = self.assigned && (!may_get_more || self.settled > SETTLED_LOOKS);
        is_settled && self.tasks.is_empty() && self.running.values().all(|running| running.gone)
    }

    fn fail(&mut self, error: Error) {
        match &self.failed {
            None => self.failed = Some(error),
            Some(_) => tracing::error!(%error, "another error while the stream stops"),
        }
    }
}
