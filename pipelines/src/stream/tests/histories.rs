//! Random histories: partitions come and go, are lost and return, messages arrive and are deleted, brokers and the store
//! fail, seeks are slow, others write to the same output, processes stop and are killed. Whatever happened: each message is
//! in the output once and in order; nothing is published for a partition that was given away; each revocation is answered;
//! a process that is to stop does so in time; one that is to read what there is ends when it has; memory is returned.
//!
//! `ELMO_HISTORIES` is the number of histories. A failure prints the shortest one that fails: run it alone by
//! `simulated::run(run(seed, settings, steps))`.

use std::time::Duration;

use proptest::{prelude::*, test_runner::TestRunner};

use super::{
    process::{GRACE, Process, Settings, file_format, finisher, identity},
    world::{Constant, World, columns, messages, partition},
};
use crate::{
    error::Result,
    stream::{
        TopicPartition,
        chain::{ChainError, Dataset, OpenFile, Published, Rejected},
        clock::{self, simulated},
        source::{Batch, Budget, Event, Start, testing::epoch},
    },
};

const PARTITIONS: i32 = 3;
const DEFAULT_HISTORIES: u32 = 2000;
/// Longer than everything that a process waits for.
pub(super) const LONG: Duration = Duration::from_secs(600);

/// What happens next.
#[derive(Debug, Clone)]
enum Step {
    /// Messages arrive; `holes` offsets behind each are left out, as by compaction and transactions.
    Produce {
        partition: i32,
        messages: u64,
        holes: u64,
    },
    /// Partitions that the process does not have are assigned to it, by bits.
    Assign(u8),
    Revoke(u8),
    Lose(u8),
    /// The consumer polls for some time.
    Poll(u64),
    /// A consumer that polls reads so many messages at once.
    Burst(usize),
    /// The broker deletes old messages.
    Delete {
        partition: i32,
        messages: i64,
    },
    /// The broker says that it does not have an offset, and has it.
    OutOfRange(i32),
    /// The next seeks are slow.
    SlowSeeks(u64),
    /// Another process publishes a file.
    Others {
        partition: i32,
        messages: usize,
    },
    Brokers {
        down: bool,
    },
    /// So many of a hundred requests to the store fail.
    Faults(u64),
    /// Errors that pass, and events of assignments that are over.
    Noise(i32),
    StageFails,
    ConsumerFails,
    /// The process is told to stop; the next one starts.
    Stop,
    /// The process is killed; the next one starts.
    Kill,
}

fn step() -> impl Strategy<Value = Step> {
    let number = || 0..PARTITIONS;
    let bits = || 1_u8..8;
    prop_oneof![
        8 => (number(), 1_u64..12, 0_u64..3)
            .prop_map(|(partition, messages, holes)| Step::Produce { partition, messages, holes }),
        6 => bits().prop_map(Step::Assign),
        3 => bits().prop_map(Step::Revoke),
        2 => bits().prop_map(Step::Lose),
        8 => (100_u64..4000).prop_map(Step::Poll),
        2 => (1_usize..40).prop_map(Step::Burst),
        1 => (number(), 1_i64..20).prop_map(|(partition, messages)| Step::Delete { partition, messages }),
        2 => number().prop_map(Step::OutOfRange),
        2 => (1_u64..20).prop_map(Step::SlowSeeks),
        3 => (number(), 1_usize..8).prop_map(|(partition, messages)| Step::Others { partition, messages }),
        1 => any::<bool>().prop_map(|down| Step::Brokers { down }),
        2 => prop_oneof![Just(0), 10_u64..60].prop_map(Step::Faults),
        1 => number().prop_map(Step::Noise),
        1 => Just(Step::StageFails),
        1 => Just(Step::ConsumerFails),
        2 => Just(Step::Stop),
        1 => Just(Step::Kill),
    ]
}

fn settings() -> impl Strategy<Value = Settings> {
    let start = prop_oneof![3 => Just(Start::Beginning), 1 => Just(Start::End)];
    // The smaller memory is exceeded by a few messages.
    let memory = prop_oneof![3 => Just(64_usize << 20), 1 => Just(6 << 10)];
    (any::<bool>(), any::<bool>(), any::<bool>(), memory, 1_u64..12, start).prop_map(
        |(to_topic, once, skips, memory, rows_per_file, start)| Settings {
            to_topic,
            once,
            skips,
            memory,
            rows_per_file,
            start,
            ..Settings::default()
        },
    )
}

/// A history as it runs.
struct History {
    world: World,
    settings: Settings,
    process: Process,
    /// Messages that the consumer reads at once.
    most: usize,
    /// The group has taken partitions away, and not said yet what follows.
    rebalancing: bool,
    /// The process may fail.
    fails: bool,
}

impl History {
    async fn new(seed: u64, settings: Settings) -> Self {
        let world = World::inhabited(seed, PARTITIONS);
        let process = Process::start(&world, &settings).await;
        Self { world, settings, process, most: 10, rebalancing: true, fails: false }
    }

    fn some(&self, bits: u8, owned: bool) -> Vec<TopicPartition> {
        let mine = self.process.consumer.owned();
        let all = (0..PARTITIONS).filter(|number| bits >> number & 1 == 1).map(partition);
        all.filter(|source| self.world.has(source) && mine.contains(source) == owned).collect()
    }

    async fn apply(&mut self, step: &Step) {
        match step {
            Step::Produce { partition: number, messages, holes } => {
                self.world.with(|outside| outside.log(&partition(*number)).produce(*messages, *holes));
            }
            Step::Assign(bits) => {
                let partitions = self.some(*bits, false);
                self.process.consumer.assign(&partitions).await;
                self.rebalancing = false;
            }
            Step::Revoke(bits) => self.take_away(*bits, false).await,
            Step::Lose(bits) => self.take_away(*bits, true).await,
            Step::Poll(millis) => self.process.poll_for(Duration::from_millis(*millis)).await,
            Step::Burst(most) => self.most = *most,
            Step::Delete { partition: number, messages } => self.world.with(|outside| {
                let log = outside.log(&partition(*number));
                log.low = log.high.min(log.low + messages);
            }),
            Step::OutOfRange(number) => {
                let source = partition(*number);
                if let Some(position) = self.process.consumer.next(&source) {
                    self.process.consumer.out_of_range(&source, position, (position, position));
                }
            }
            Step::SlowSeeks(rounds) => self.process.consumer.slow_rounds = *rounds,
            Step::Others { partition: number, messages } if self.world.has(&partition(*number)) => {
                self.others(&partition(*number), *messages).await
            }
            Step::Others { .. } => {}
            Step::Brokers { down } => self.world.with(|outside| outside.down = *down),
            Step::Faults(percent) => self.world.with(|outside| outside.faults = *percent),
            Step::Noise(number) => self.noise(&partition(*number)),
            Step::StageFails => {
                self.world.with(|outside| outside.stage_fails = true);
                self.fails = true;
            }
            Step::ConsumerFails => {
                let error = crate::stream::StreamError::Broker { what: "g".into(), reason: "x".into(), help: None };
                self.process.consumer.send(Event::Error { error, fatal: true });
                self.fails = true;
            }
            Step::Stop => {
                self.stop().await;
                self.restart().await;
            }
            Step::Kill => self.restart().await,
        }
    }

    async fn take_away(&mut self, bits: u8, lost: bool) {
        let partitions = self.some(bits, true);
        if !partitions.is_empty() {
            self.process.consumer.revoke(&partitions, lost).await;
            // It may have decided to end before it heard of this, when everything was read.
            self.rebalancing |= !self.process.health.is_stopping();
        }
    }

    /// Events that change nothing: of an assignment that is over, and errors that pass.
    fn noise(&self, source: &TopicPartition) {
        let consumer = &self.process.consumer;
        let error = crate::stream::StreamError::Broker { what: "b".into(), reason: "x".into(), help: None };
        consumer.send(Event::Error { error, fatal: false });
        consumer.send(Event::Connected);
        let (old, start) = (epoch(0), Start::At(0));
        consumer.send(Event::Sought { partition: source.clone(), epoch: old, start });
        consumer.send(Event::OutOfRange { partition: source.clone(), epoch: old, position: 3, range: (0, 1) });
        let messages = messages(source, &[1_000_000]);
        let permit = self.process.budget.permit(source, 100);
        consumer.send(Event::Messages(Batch { messages, epoch: old, permit }));
    }

    async fn others(&self, source: &TopicPartition, most: usize) {
        if !self.settings.to_topic {
            publish(&self.world, &self.settings, source, most).await;
        }
    }

    /// The process must end in time after it is told to.
    async fn stop(&mut self) {
        let began = clock::now();
        self.process.stop();
        let ended = self.process.end(LONG).await;
        let took = clock::now() - began;
        if took > GRACE + Duration::from_millis(500) {
            self.world.wrong(format!("it took {took:?} to stop"));
        }
        self.check_end(ended);
    }

    fn check_end(&self, ended: Option<Result<bool>>) {
        match ended {
            None => self.world.wrong("the job hangs"),
            Some(Err(error)) if !self.fails => self.world.wrong(format!("it failed: {error}")),
            Some(_) => {}
        }
        if self.process.has_ended() && !self.process.consumer.feed.is_stopped() {
            self.world.wrong("it did not leave its group");
        }
    }

    async fn restart(&mut self) {
        let process = Process::start(&self.world, &self.settings).await;
        std::mem::replace(&mut self.process, process).kill(&self.world).await;
        self.world.with(|outside| outside.stage_fails = false);
        (self.rebalancing, self.fails) = (true, false);
    }

    /// Checks a process that ended by itself, and starts another one.
    async fn look_for_end(&mut self) {
        if !self.process.has_ended() {
            return;
        }
        let ended = self.process.end(LONG).await;
        let is_fine = matches!(ended, Some(Ok(_)));
        self.check_end(ended);
        if is_fine {
            if !self.settings.once || self.rebalancing {
                self.world.wrong("it ended although nobody told it to");
            }
            self.check_read().await;
        }
        self.restart().await;
    }

    /// The output has everything that was in the process's partitions when they were assigned.
    async fn check_read(&self) {
        for source in self.process.consumer.owned() {
            let end = match self.settings.to_topic {
                true => self.world.with(|outside| outside.committed.get(&source).map(|(end, _)| *end)),
                false => self.world.dataset(&source).await.1.last().map(|span| span.end),
            };
            let target = self.process.consumer.target(&source);
            // Without an output, the partition began at its end.
            let Some(rest) = end.and_then(|end| self.world.read(&source, end, 1)) else { continue };
            if rest.first_offset().is_some_and(|first| first < target) {
                self.world.wrong(format!("{source}: it ended at {end:?}, before {target}"));
            }
        }
    }

    /// A process that nothing disturbs reads the rest. Then the output is checked.
    async fn finish(self) -> Vec<String> {
        let Self { world, settings, process, .. } = self;
        process.kill(&world).await;
        read_rest(&world, &settings).await
    }
}

/// A process that nothing disturbs reads the rest, and ends by itself. Then the output is checked. Returns what was wrong since
/// the world began.
pub(super) async fn read_rest(world: &World, settings: &Settings) -> Vec<String> {
    world.with(|outside| {
        (outside.down, outside.faults, outside.stage_fails) = (false, 0, false);
    });
    let mut process = Process::start(world, &Settings { once: true, ..*settings }).await;
    let all: Vec<TopicPartition> = world.with(|outside| outside.logs.keys().cloned().collect());
    process.consumer.assign(&all).await;
    let ended = process.end(LONG).await;
    if !matches!(ended, Some(Ok(true))) {
        world.wrong(format!("the last process: {ended:?}"));
    }
    for source in &all {
        match settings.to_topic {
            true => check_topic(world, settings, source),
            false => {
                let end = world.check_dataset(source, settings.skips).await;
                let end = end.unwrap_or_else(|| world.with(|outside| outside.first(source)));
                if let Some(rest) = world.read(source, end, usize::MAX) {
                    world.wrong(format!("{source}: {} messages are not in the output", rest.len()));
                }
            }
        }
    }
    process.kill(world).await;
    world.with(|outside| std::mem::take(&mut outside.wrong))
}

/// By hand: all messages from where the output begins that have rows, except those that were deleted before they were read.
fn check_topic(world: &World, settings: &Settings, source: &TopicPartition) {
    let (published, first, log) = world.with(|outside| {
        let published = outside.published.remove(source).unwrap_or_default();
        (published, outside.first(source), outside.log(source).clone())
    });
    if let Some(early) = published.iter().find(|offset| **offset < first) {
        world.wrong(format!("{source}: {early} is there, and the output begins at {first}"));
    }
    if !published.windows(2).all(|pair| pair[0] < pair[1]) {
        world.wrong(format!("{source}: doubled, or not in order: {published:?}"));
    }
    let has_row = |offset: &i64| !(settings.skips && super::world::is_bad(*offset));
    let expected = log.messages.range(first.max(log.low)..).copied().filter(has_row);
    let missing: Vec<i64> = expected.filter(|offset| !published.contains(offset)).collect();
    if !missing.is_empty() {
        world.wrong(format!("{source}: from {first} on, {missing:?} are missing in {published:?}"));
    }
}

/// A process of the same output that is not of this group, or no longer, publishes the next messages.
pub(super) async fn publish(world: &World, settings: &Settings, source: &TopicPartition, most: usize) {
    let output = world.output_of_others();
    let dataset = Dataset::open(&output, &identity(), 1).await.unwrap();
    let low = world.with(|outside| outside.log(source).low);
    let mut chain = dataset.chain(source, || async { Ok::<_, ChainError>(low) }, None).await.unwrap();
    let Some(read) = world.read(source, chain.end(), most).filter(|_| chain.end() >= low) else { return };
    let end = read.end;
    let stage = Constant::new(world);
    let finisher = finisher(settings.on_error(), stage.as_ref());
    let permit = Budget::new(1 << 20).permit(source, 0);
    let (texts, waiting) = finisher.decode(Batch { messages: read, epoch: epoch(1), permit }, 0).await;
    let rows = finisher.finish(source, waiting, columns(&texts)).unwrap().rows;
    let mut file = OpenFile::new(chain.id(), chain.end(), &file_format(settings, &finisher)).unwrap();
    file.write(&rows.batch, end, &Rejected::new(), clock::now()).await.unwrap();
    let file = file.finish(end).await.unwrap();
    let _: Published = chain.publish(&file).await.unwrap();
}

async fn run(seed: u64, settings: Settings, steps: Vec<Step>) -> Vec<String> {
    let mut history = History::new(seed, settings).await;
    for step in &steps {
        history.apply(step).await;
        history.process.consumer.round(history.most);
        history.world.pause().await;
        history.look_for_end().await;
    }
    history.finish().await
}

/// A history that was drawn once: the process decides to end while the message that takes the partition away is on its way.
#[test]
fn a_process_that_has_read_everything_may_lose_its_partitions() {
    let settings = Settings {
        to_topic: false,
        once: true,
        skips: false,
        memory: 64 << 20,
        rows_per_file: 1,
        max_age: Duration::from_secs(60),
        ..Settings::default()
    };
    let steps = vec![
        Step::Produce { partition: 0, messages: 11, holes: 0 },
        Step::Revoke(1),
        Step::Assign(3),
        Step::Brokers { down: false },
        Step::Poll(601),
        Step::Revoke(1),
    ];
    let wrong = simulated::run(run(9_195_940_446_370_339_046, settings, steps));
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A batch is ready, and its file is complete, at the very time of a kill. The process dies after it has begun to publish.
#[test]
fn a_process_may_publish_at_the_time_of_its_kill() {
    let settings = Settings { rows_per_file: 1, ..Settings::default() };
    let takes = Duration::from_secs(1);
    let wrong = simulated::run(async {
        let world = World::new(0, 1);
        world.with(|outside| {
            outside.log(&partition(0)).produce(1, 0);
            (outside.slow, outside.stage_takes) = (0, 1000);
        });
        let mut process = Process::start(&world, &settings).await;
        process.consumer.assign(&[partition(0)]).await;
        process.consumer.round(1);
        clock::sleep(takes).await;
        process.kill(&world).await;
        read_rest(&world, &settings).await
    });
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn whatever_happens_each_message_is_in_the_output_once() {
    check(step(), |seed, settings, steps| simulated::run(run(seed, settings, steps)));
}

/// Runs random histories; `run` returns what was wrong.
pub(super) fn check<S: Strategy>(step: S, run: impl Fn(u64, Settings, Vec<S::Value>) -> Vec<String>) {
    let cases = std::env::var("ELMO_HISTORIES").ok().map_or(DEFAULT_HISTORIES, |cases| cases.parse().unwrap());
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let histories = (any::<u64>(), settings(), prop::collection::vec(step, 1..40));
    let outcome = TestRunner::new(config).run(&histories, |(seed, settings, steps)| {
        let wrong = run(seed, settings, steps);
        prop_assert!(wrong.is_empty(), "{wrong:#?}");
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}
