//! A process: a job with its parts, and the consumer that feeds it.

use std::{
    sync::{Arc, atomic::AtomicUsize},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};

use super::{
    consumer::{Consumer, Feed},
    world::{Constant, Member, TOPIC, World},
};
use crate::{
    error::{Error, Result},
    sink::{Codec, Encoding},
    stage::Stage,
    stream::{
        OnError, OnGap, TopicPartition,
        beginning::Selection,
        chain::{Dataset, FileFormat, Identity, Spill},
        clock,
        decode::{DecodeSettings, Decoder, Format},
        files::Files,
        finished::Finisher,
        job::Job,
        metrics::{Health, Metrics},
        opening::{Open, Opener},
        partition::Parts,
        rotation::Limits,
        source::{Budget, Start, Upstream},
        totals::Totals,
        transaction::{Committer, Manual, Records, ValueEncoding},
    },
};

/// In which a process stops.
pub(super) const GRACE: Duration = Duration::from_secs(25);

/// How a process runs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Settings {
    /// Into a topic, and not into files.
    pub(super) to_topic: bool,
    pub(super) once: bool,
    /// Messages that cannot be decoded have no row.
    pub(super) skips: bool,
    pub(super) memory: usize,
    pub(super) rows_per_file: u64,
    pub(super) max_age: Duration,
    pub(super) start: Start,
    pub(super) on_gap: OnGap,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            to_topic: false,
            once: false,
            skips: false,
            memory: 64 << 20,
            rows_per_file: 5,
            max_age: Duration::from_secs(60),
            start: Start::Beginning,
            on_gap: OnGap::Skip,
        }
    }
}

impl Settings {
    pub(super) fn on_error(&self) -> OnError {
        if self.skips { OnError::Skip } else { OnError::Null }
    }
}

pub(super) fn identity() -> Identity {
    Identity::new([("elmo.fingerprint".to_owned(), "f".to_owned())].into())
}

pub(super) fn finisher(on_error: OnError, stage: &dyn Stage) -> Finisher {
    let decoder = Decoder::new(DecodeSettings { format: Format::Text, ..DecodeSettings::default() }).unwrap();
    Finisher::new(decoder, on_error, stage).unwrap()
}

pub(super) fn file_format(settings: &Settings, finisher: &Finisher) -> FileFormat {
    let (rows, max_age) = (settings.rows_per_file, settings.max_age);
    FileFormat {
        schema: Arc::clone(finisher.schema()),
        encoding: Encoding { vectors: "embedding".into(), codec: Codec::None, row_group_bytes: 1 << 20 },
        footer: vec![("elmo.fingerprint".to_owned(), "f".to_owned())],
        spill: Spill::default(),
        limits: Limits { rows, bytes: 1 << 20, max_age, idle: None },
    }
}

pub(super) fn records(settings: &Settings) -> Records {
    Records {
        topic: "out".into(),
        dead_letters: None,
        encoding: ValueEncoding::Raw,
        format: Format::Text,
        on_error: settings.on_error(),
        added: 3,
        max_bytes: 1_000_000,
    }
}

/// A process that runs.
pub(super) struct Process {
    pub(super) consumer: Consumer,
    pub(super) budget: Budget,
    pub(super) metrics: Arc<Metrics>,
    pub(super) health: Arc<Health>,
    stop: Option<oneshot::Sender<()>>,
    job: Option<JoinHandle<Result<bool>>>,
    committer: Option<JoinHandle<()>>,
}

impl Process {
    pub(super) async fn start(world: &World, settings: &Settings) -> Self {
        let (events, received) = mpsc::unbounded_channel();
        let budget = Budget::new(settings.memory);
        let consumer = Consumer::new(world, events, budget.clone());
        let (metrics, health) = (Arc::new(Metrics::new()), Arc::new(Health::new(Duration::from_secs(60))));
        health.model_loaded();
        health.store_probed();
        let totals = Totals::new(Arc::clone(&metrics), settings.on_error());
        let stage = Constant::new(world);
        let finisher = finisher(settings.on_error(), stage.as_ref());
        let source: Arc<dyn Upstream> = Arc::<Feed>::clone(&consumer.feed);
        let mut committer = None;
        let recorded = world.expect_starts(settings.start);
        let selection = Selection::new([TOPIC.into()].into());
        let target = if settings.to_topic {
            let (sender, manual) = Committer::manual();
            committer = Some(tokio::spawn(commit(world.clone(), consumer.member, Arc::clone(&consumer.feed), manual)));
            world.with(|outside| {
                let begun = outside.committed.keys().map(|source| Arc::clone(&source.topic)).collect();
                let new = recorded.into_iter().filter(|(source, _)| selection.takes(&begun, source));
                outside.committed.extend(new.map(|(source, start)| (source, (start, String::new()))));
            });
            // There are no raw vectors of tokens.
            let of_tokens = world.with(|outside| outside.words.is_some());
            let encoding = if of_tokens { ValueEncoding::Json } else { ValueEncoding::Raw };
            Open::Topic(Records { encoding, ..records(settings) }, sender)
        } else {
            // A process that cannot check the store does not start.
            let faults = world.with(|outside| std::mem::take(&mut outside.faults));
            let mut dataset = Dataset::open(&world.output(consumer.member), &identity(), 1).await.unwrap();
            let begun = dataset.begun().clone();
            let new = recorded.into_iter().filter(|(source, _)| selection.takes(&begun, source));
            dataset.record_starts(new, |begun, source| selection.takes(begun, source)).await.unwrap();
            world.with(|outside| outside.faults = faults);
            let format = Arc::new(file_format(settings, &finisher));
            let files = Files { format, source: Arc::clone(&source), dead_letters: None, totals: totals.clone() };
            Open::Files(Box::new((dataset, files)))
        };
        let (starting, started) = mpsc::unbounded_channel();
        let opener = Opener { target, on_gap: settings.on_gap, started: starting };
        let job = Job {
            source,
            events: received,
            started,
            opener: Arc::new(opener),
            parts: Arc::new(Parts {
                stage,
                finisher,
                totals,
                bytes_in_flight: (settings.memory / 4) as u64,
                owned: AtomicUsize::default(),
            }),
            budget: budget.clone(),
            health: Arc::clone(&health),
            once: settings.once,
            planned: Default::default(),
            grace: GRACE,
        };
        let (stop, stopped) = oneshot::channel::<()>();
        let job = tokio::spawn(job.run(async move {
            if stopped.await.is_err() {
                std::future::pending().await
            }
        }));
        Self { consumer, budget, metrics, health, stop: Some(stop), job: Some(job), committer }
    }

    /// Asks it to stop, as a signal does.
    pub(super) fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.job.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Polls for some time, while the job runs.
    pub(super) async fn poll_for(&mut self, time: Duration) {
        let end = clock::now() + time;
        while clock::now() < end && !self.has_ended() {
            self.consumer.round(10);
            clock::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Polls until something holds; `false` when it does not within `limit`.
    pub(super) async fn poll_until(&mut self, limit: Duration, holds: impl Fn(&Self) -> bool) -> bool {
        let end = clock::now() + limit;
        while !holds(self) {
            if clock::now() >= end {
                return false;
            }
            self.consumer.round(10);
            clock::sleep(Duration::from_millis(200)).await;
        }
        true
    }

    /// Polls until the job has ended; `None` when it does not within `limit`.
    pub(super) async fn end(&mut self, limit: Duration) -> Option<Result<bool>> {
        if !self.poll_until(limit, Self::has_ended).await {
            return None;
        }
        let ended = self.job.take()?.await;
        Some(ended.unwrap_or_else(|died| Err(Error::Failed(died.to_string()))))
    }

    /// Ends it as SIGKILL does, and checks that nothing holds memory.
    pub(super) async fn kill(self, world: &World) {
        let Self { consumer, budget, job, committer, .. } = self;
        for task in [job.map(|job| job.abort_handle()), committer.map(|task| task.abort_handle())].into_iter().flatten()
        {
            task.abort();
        }
        let member = consumer.member;
        drop(consumer);
        // Tasks are dropped when they would run next. One that runs at this very time may still publish, before it dies.
        clock::sleep(Duration::from_millis(1)).await;
        world.with(|outside| outside.writable.retain(|(of, _)| *of != member));
        if budget.used() != 0 {
            world.wrong(format!("{} bytes are never returned", budget.used()));
        }
    }
}

/// The thread of transactions, by its promises: rows are committed in order, with their offsets, and only while the process
/// owns their partition.
async fn commit(world: World, member: Member, feed: Arc<Feed>, manual: Manual) {
    let manual = Mutex::new(manual);
    loop {
        clock::sleep(Duration::from_millis(100)).await;
        if world.with(|outside| outside.commits_hang) {
            continue;
        }
        let taken = manual.lock().take();
        let Some(taken) = taken else { return };
        for rows in taken {
            world.pause().await;
            if feed.owns(&rows.source, rows.epoch) {
                publish(&world, member, &rows.source, &rows.offsets, rows.end);
            }
            let _ = rows.done.send(Ok(()));
        }
    }
}

fn publish(world: &World, member: Member, source: &TopicPartition, offsets: &[i64], end: i64) {
    world.with(|outside| {
        if !outside.writable.contains(&(member, source.clone())) {
            outside.wrong.push(format!("{source}: rows are committed after the partition was given away"));
        }
        outside.published.entry(source.clone()).or_default().extend_from_slice(offsets);
        if let Some((before, _)) = outside.committed.insert(source.clone(), (end, String::new()))
            && before > end
        {
            outside.wrong.push(format!("{source}: the group's offset goes back from {before} to {end}"));
        }
    });
}
