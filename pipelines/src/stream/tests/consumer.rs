//! A consumer without brokers. It keeps the promises of [`Source`](crate::stream::source::Source): the order of events, the
//! start offsets, the epochs, the pauses, and for how long it waits.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::mpsc::UnboundedSender;

use super::world::{Member, World};
use crate::stream::{
    StreamError, TopicPartition, clock,
    source::{
        Assigned, Batch, Budget, Epoch, Event, Hint, NotCommitted, PartitionStatistics, Start, Starts, Statistics,
        Upstream,
        testing::{Answer, epoch, reply},
    },
};

/// How long the thread waits for an answer of the job.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// What the job holds of the consumer.
pub(super) struct Feed {
    world: World,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    owned: HashMap<TopicPartition, Epoch>,
    seeks: Vec<(TopicPartition, Epoch, i64)>,
    paused: HashSet<TopicPartition>,
    statistics: Arc<Statistics>,
    stopped: bool,
    silent: bool,
}

impl Feed {
    /// Whether the process owns the partition since this epoch.
    pub(super) fn owns(&self, source: &TopicPartition, epoch: Epoch) -> bool {
        self.state.lock().owned.get(source) == Some(&epoch)
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.state.lock().stopped
    }

    async fn ask<T>(&self, answer: impl FnOnce() -> T) -> Result<T, StreamError> {
        self.world.pause().await;
        match self.world.with(|outside| outside.down) {
            true => Err(StreamError::Broker { what: "brokers".into(), reason: "down".into(), help: None }),
            false => Ok(answer()),
        }
    }

    fn hint(&self, source: &TopicPartition) -> Hint {
        let found = self.world.with(|outside| outside.committed.get(source).cloned());
        found.map_or(Hint::None, |(offset, metadata)| Hint::At { offset, metadata })
    }
}

#[async_trait]
impl Upstream for Feed {
    fn seek(&self, partition: &TopicPartition, epoch: Epoch, start: Start) {
        let Start::At(offset) = start else { panic!("the job knows the offset") };
        self.state.lock().seeks.push((partition.clone(), epoch, offset));
    }

    fn paused(&self) -> HashSet<TopicPartition> {
        self.state.lock().paused.clone()
    }

    fn statistics(&self) -> Arc<Statistics> {
        Arc::clone(&self.state.lock().statistics)
    }

    fn is_alive(&self) -> bool {
        !self.is_stopped()
    }

    fn joined_silently(&self) -> bool {
        self.state.lock().silent
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    fn commit(
        &self,
        partition: &TopicPartition,
        epoch: Epoch,
        offset: i64,
        metadata: &str,
    ) -> Result<(), NotCommitted> {
        if !self.owns(partition, epoch) {
            return Err(NotCommitted::NotOwned);
        }
        self.world.with(|outside| outside.committed.insert(partition.clone(), (offset, metadata.to_owned())));
        Ok(())
    }

    async fn watermarks(&self, partition: &TopicPartition) -> Result<(i64, i64), StreamError> {
        self.ask(|| {
            self.world.with(|outside| {
                let deletes = outside.deletes_below.take();
                let log = outside.log(partition);
                let answer = (log.low, log.high);
                log.low = deletes.unwrap_or(log.low);
                answer
            })
        })
        .await
    }

    async fn topic_id(&self, _: &str) -> Result<Option<String>, StreamError> {
        self.ask(|| self.world.with(|outside| outside.topic_id.clone())).await
    }

    async fn committed(&self, partition: &TopicPartition) -> Result<Hint, StreamError> {
        self.ask(|| self.hint(partition)).await
    }

    async fn stop(&self, _: Duration) {
        self.state.lock().stopped = true;
    }
}

struct Slot {
    epoch: Epoch,
    /// The next message to read; `None` while it is not known.
    next: Option<i64>,
    /// Behind what was fetched ahead.
    fetched: i64,
    paused: bool,
}

/// The thread that polls.
pub(super) struct Consumer {
    world: World,
    /// Of the process.
    pub(super) member: Member,
    pub(super) feed: Arc<Feed>,
    events: UnboundedSender<Event>,
    budget: Budget,
    slots: BTreeMap<TopicPartition, Slot>,
    unanswered: Vec<(Answer<Starts>, Epoch)>,
    epochs: u64,
    /// Rounds in which seeks are not obeyed.
    pub(super) slow_rounds: u64,
    /// Partitions that are not read.
    pub(super) held: HashSet<TopicPartition>,
    /// Where partitions ended when they were assigned.
    targets: HashMap<TopicPartition, i64>,
}

impl Consumer {
    pub(super) fn new(world: &World, events: UnboundedSender<Event>, budget: Budget) -> Self {
        let feed = Arc::new(Feed { world: world.clone(), state: Mutex::default() });
        let member = world.with(|outside| {
            outside.members += 1;
            outside.members
        });
        Self {
            world: world.clone(),
            member,
            feed,
            events,
            budget,
            slots: BTreeMap::new(),
            unanswered: Vec::new(),
            epochs: 0,
            slow_rounds: 0,
            held: HashSet::new(),
            targets: HashMap::new(),
        }
    }

    pub(super) fn send(&self, event: Event) {
        // The job may have ended.
        let _ = self.events.send(event);
    }

    /// The thread ends, and with it the events.
    pub(super) fn die(&mut self) {
        (self.events, _) = tokio::sync::mpsc::unbounded_channel();
    }

    pub(super) fn owned(&self) -> Vec<TopicPartition> {
        self.slots.keys().cloned().collect()
    }

    /// Where the next message of a partition is read; `None` before it is known.
    pub(super) fn next(&self, source: &TopicPartition) -> Option<i64> {
        self.slots.get(source)?.next
    }

    /// Where a partition ended when it was assigned.
    pub(super) fn target(&self, source: &TopicPartition) -> i64 {
        self.targets[source]
    }

    /// The group has accepted a member without partitions, and has nothing to say.
    pub(super) fn join_silently(&self) {
        self.feed.state.lock().silent = true;
    }

    /// Statistics in which nothing is left to read, before the thread waits in a rebalance with the messages that it has.
    pub(super) fn fetch_everything(&self) {
        let mut statistics = Statistics::default();
        for source in self.slots.keys() {
            let high = self.world.with(|outside| outside.log(source).high);
            let all = PartitionStatistics { end: Some(high), fetched: Some(high), ..PartitionStatistics::default() };
            statistics.partitions.insert(source.clone(), all);
        }
        self.feed.state.lock().statistics = Arc::new(statistics);
    }

    /// Assigns partitions, and waits for their starts.
    pub(super) async fn assign(&mut self, partitions: &[TopicPartition]) {
        let answer = self.begin_to_assign(partitions);
        let epoch = epoch(self.epochs);
        let answer = self.wait(answer, epoch).await;
        let starts = answer.unwrap_or_default();
        for source in partitions {
            let start = starts.get(source).map(|start| self.start(source, *start));
            self.slots.insert(source.clone(), Slot { epoch, next: start, fetched: 0, paused: false });
        }
    }

    /// Sends the event of an assignment. The partitions have no slots before the answer.
    pub(super) fn begin_to_assign(&mut self, partitions: &[TopicPartition]) -> Answer<Starts> {
        self.epochs += 1;
        let epoch = epoch(self.epochs);
        let assigned = |source: &TopicPartition| {
            let unknown = self.world.with(|outside| outside.down || outside.random().percent(10));
            let committed = if unknown { Hint::Unknown("no answer".into()) } else { self.feed.hint(source) };
            Assigned { partition: source.clone(), committed }
        };
        let assigned = partitions.iter().map(assigned).collect();
        for source in partitions {
            let high = self.world.with(|outside| outside.log(source).high);
            self.targets.insert(source.clone(), high);
        }
        self.feed.state.lock().owned.extend(partitions.iter().map(|source| (source.clone(), epoch)));
        let writable = partitions.iter().map(|source| (self.member, source.clone()));
        self.world.with(|outside| outside.writable.extend(writable));
        let (reply, answer) = reply();
        self.send(Event::Assign { partitions: assigned, epoch, reply });
        answer
    }

    async fn wait(&mut self, answer: Answer<Starts>, epoch: Epoch) -> Option<Starts> {
        let end = clock::now() + PATIENCE;
        loop {
            match answer.take() {
                Ok(Some(starts)) => return Some(starts),
                Err(_) => return None,
                Ok(None) if clock::now() >= end => {
                    self.unanswered.push((answer, epoch));
                    return None;
                }
                Ok(None) => clock::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    fn start(&self, source: &TopicPartition, start: Start) -> i64 {
        let Start::At(offset) = start else { panic!("the job knows the offset") };
        self.world.with(|outside| {
            let first = outside.first(source);
            if offset < first {
                outside.wrong.push(format!("{source} is read from {offset} on, and its output begins at {first}"));
            }
        });
        offset
    }

    /// Takes partitions away, and waits until the job is done with them.
    pub(super) async fn revoke(&mut self, partitions: &[TopicPartition], lost: bool) {
        if lost {
            self.disown(partitions);
        }
        let Some(answer) = self.begin_to_revoke(partitions, lost) else { return };
        // Of partitions that are lost already, nobody waits for the answer.
        let end = clock::now() + if lost { Duration::from_millis(100) } else { PATIENCE };
        loop {
            match answer.take() {
                Ok(None) if clock::now() >= end => {
                    self.world.wrong(format!("the revocation of {partitions:?} is not answered"));
                    break;
                }
                Ok(None) => clock::sleep(Duration::from_millis(100)).await,
                Ok(Some(())) | Err(_) => break,
            }
        }
        self.disown(partitions);
        let is_gone = |(member, source): &(Member, _)| *member == self.member && partitions.contains(source);
        self.world.with(|outside| outside.writable.retain(|writable| !is_gone(writable)));
    }

    /// From now on nothing is committed for these partitions.
    pub(super) fn disown(&self, partitions: &[TopicPartition]) {
        self.feed.state.lock().owned.retain(|source, _| !partitions.contains(source));
    }

    pub(super) fn begin_to_revoke(&mut self, partitions: &[TopicPartition], lost: bool) -> Option<Answer<()>> {
        let gone: Vec<_> =
            partitions.iter().filter_map(|source| Some((source.clone(), self.slots.remove(source)?.epoch))).collect();
        if gone.is_empty() {
            return None;
        }
        let (reply, answer) = reply();
        self.send(Event::Revoke { partitions: gone, lost, reply });
        Some(answer)
    }

    /// One round of polling: what the job asked for, then up to `most` messages of each partition.
    pub(super) fn round(&mut self, most: usize) {
        match self.slow_rounds {
            0 => self.obey(),
            _ => self.slow_rounds -= 1,
        }
        self.start_late();
        let sources: Vec<TopicPartition> = self.owned();
        for source in sources {
            self.check_range(&source);
            self.read(&source, most);
        }
        self.note();
    }

    fn obey(&mut self) {
        let seeks = std::mem::take(&mut self.feed.state.lock().seeks);
        for (source, epoch, offset) in seeks {
            self.go_to(&source, epoch, offset);
        }
    }

    fn go_to(&mut self, source: &TopicPartition, epoch: Epoch, offset: i64) {
        if self.slots.get(source).is_none_or(|slot| slot.epoch != epoch) {
            return;
        }
        let start = Start::At(offset);
        let next = Some(self.start(source, start));
        if let Some(slot) = self.slots.get_mut(source) {
            slot.next = next;
        }
        self.send(Event::Sought { partition: source.clone(), epoch, start });
    }

    fn start_late(&mut self) {
        for (answer, epoch) in std::mem::take(&mut self.unanswered) {
            match answer.take() {
                Ok(None) if self.slots.values().any(|slot| slot.epoch == epoch) => {
                    self.unanswered.push((answer, epoch));
                }
                Ok(Some(starts)) => {
                    for (source, start) in starts {
                        let offset = self.start(&source, start);
                        self.go_to(&source, epoch, offset);
                    }
                }
                _ => {}
            }
        }
    }

    /// The broker has deleted the next message.
    fn check_range(&mut self, source: &TopicPartition) {
        let Some(position) = self.next(source) else { return };
        let range = self.world.with(|outside| {
            let log = outside.log(source);
            (log.low, log.high)
        });
        if position < range.0 {
            self.out_of_range(source, position, range);
        }
    }

    /// Says that the broker does not have the next message of a partition.
    pub(super) fn out_of_range(&mut self, source: &TopicPartition, position: i64, range: (i64, i64)) {
        let Some(slot) = self.slots.get_mut(source) else { return };
        slot.next = None;
        let epoch = slot.epoch;
        self.send(Event::OutOfRange { partition: source.clone(), epoch, position, range });
    }

    fn read(&mut self, source: &TopicPartition, most: usize) {
        let used = (self.budget.used(), self.budget.used_by(source));
        let share = self.budget.limit() / self.slots.len().clamp(1, 8);
        let limit = self.budget.limit();
        let Some(slot) = self.slots.get_mut(source) else { return };
        slot.paused = match slot.paused {
            false => used.0 >= limit || used.1 >= share,
            true => used.0 > limit / 4 * 3 || used.1 > share / 2,
        };
        if slot.paused || self.held.contains(source) {
            return;
        }
        let Some(messages) = slot.next.and_then(|next| self.world.read(source, next, most)) else { return };
        slot.next = Some(messages.end);
        let (epoch, permit) = (slot.epoch, self.budget.permit(source, messages.size()));
        self.send(Event::Messages(Batch { messages, epoch, permit }));
    }

    /// Writes the statistics. librdkafka fetches ahead, and a pause drops what it has fetched.
    fn note(&mut self) {
        let mut statistics = Statistics::default();
        for (source, slot) in &mut self.slots {
            let high = self.world.with(|outside| outside.log(source).high);
            if !slot.paused && slot.next.is_some() {
                // It also fetches what the thread does not take.
                slot.fetched = high;
            }
            let queued = slot.next.filter(|_| !slot.paused).map_or(0, |next| {
                let messages = self.world.read(source, next, usize::MAX);
                messages.map_or(0, |messages| messages.len() as u64)
            });
            let of_partition = PartitionStatistics {
                end: Some(high),
                fetched: Some(slot.fetched),
                queued_messages: queued,
                ..PartitionStatistics::default()
            };
            statistics.partitions.insert(source.clone(), of_partition);
        }
        let mut state = self.feed.state.lock();
        state.statistics = Arc::new(statistics);
        state.paused =
            self.slots.iter().filter(|(_, slot)| slot.paused || slot.next.is_none()).map(|(s, _)| s.clone()).collect();
    }
}
