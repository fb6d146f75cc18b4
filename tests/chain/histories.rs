//! Random histories of a partition: several writers, some of which do not know that the partition is no longer theirs, are
//! killed before and after their requests; answers are lost, requests arrive late, hints are lost or old, retention deletes
//! messages, the topic is created again. Whatever happened, each message stands in the dataset once.
//!
//! `ELMO_HISTORIES` is the number of histories, 10,000 unless it is set.

use std::{collections::BTreeSet, sync::Arc, time::Instant};

use elmo_pipelines::stream::chain::{
    Chain, ChainError, Dataset, EncodedFile, Hint, OnGap, OpenFile, Published, Rejected, position,
};
use object_store::{ObjectStoreExt, memory::InMemory};
use proptest::{prelude::*, test_runner::TestRunner};

use super::{
    IMPATIENT, format, identity, objects, output, reviews, rows, spans,
    store::{Fate, Scripted},
    tiling,
};

/// Writers that live at the same time.
const WRITERS: usize = 3;
const DEFAULT_HISTORIES: u32 = 10_000;

/// What happens next.
#[derive(Debug, Clone)]
enum Step {
    /// Messages arrive; `holes` offsets before each are left out, as by compaction and transactions.
    Produce { messages: u8, holes: u8 },
    /// A process starts in place of writer `writer`, which is killed, or the partition is assigned to the same process
    /// again. It is given a hint of the group.
    Assign { writer: usize, restart: bool, hint: Hinted },
    /// A writer reads messages into its open file.
    Poll { writer: usize, messages: u8 },
    /// A writer closes its file and publishes it.
    Publish { writer: usize, fates: Vec<Fate> },
    /// A writer commits its hint, and the broker accepts it, also from one that lost the partition.
    Commit { writer: usize },
    /// `head.json` is lost.
    LoseHead,
    /// Late requests arrive.
    Land,
    /// The broker deletes old messages.
    Retain { messages: u8 },
    /// The topic is deleted and created again; an operator begins a new generation.
    Recreate,
}

/// Which hint a process is given.
#[derive(Debug, Clone)]
enum Hinted {
    Committed,
    None,
    /// Any of those that were ever committed, also of an earlier generation.
    Old(u8),
    /// An offset that an operator set.
    Reset(i64),
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        3 => Just(Fate::Fine),
        2 => any::<bool>().prop_map(|applied| Fate::Lost { applied }),
        2 => any::<bool>().prop_map(|applied| Fate::Hangs { applied }),
        2 => Just(Fate::Late),
        1 => Just(Fate::Delayed),
        1 => Just(Fate::Forbidden),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let writer = || 0..WRITERS;
    let hinted = prop_oneof![
        4 => Just(Hinted::Committed),
        2 => Just(Hinted::None),
        2 => any::<u8>().prop_map(Hinted::Old),
        1 => (0_i64..60).prop_map(Hinted::Reset),
    ];
    prop_oneof![
        6 => (1_u8..8, 0_u8..3).prop_map(|(messages, holes)| Step::Produce { messages, holes }),
        4 => (writer(), any::<bool>(), hinted)
            .prop_map(|(writer, restart, hint)| Step::Assign { writer, restart, hint }),
        8 => (writer(), 1_u8..6).prop_map(|(writer, messages)| Step::Poll { writer, messages }),
        8 => (writer(), prop::collection::vec(fate(), 0..4))
            .prop_map(|(writer, fates)| Step::Publish { writer, fates }),
        3 => writer().prop_map(|writer| Step::Commit { writer }),
        1 => Just(Step::LoseHead),
        2 => Just(Step::Land),
        1 => (0_u8..20).prop_map(|messages| Step::Retain { messages }),
        1 => Just(Step::Recreate),
    ]
}

/// A topic with one partition, from its creation to its deletion.
#[derive(Debug, Default)]
struct Topic {
    /// All messages that it ever had.
    messages: BTreeSet<i64>,
    low: i64,
    high: i64,
}

/// Whether a message is skipped, such as one that cannot be decoded.
fn is_skipped(offset: i64) -> bool {
    offset % 5 == 0
}

/// A process with the partition.
struct Writer {
    /// Of the topic that it reads: its index, which is the generation less one.
    topic: usize,
    chain: Chain,
    open: OpenFile,
    /// The next offset that it reads.
    next: i64,
}

struct World {
    store: Arc<Scripted>,
    topics: Vec<Topic>,
    /// Processes that live, and the topics for which they have opened their dataset.
    processes: Vec<Option<(usize, Dataset)>>,
    writers: Vec<Option<Writer>>,
    committed: Option<Hint>,
    ever_committed: Vec<Hint>,
}

/// The root of a generation in the store.
fn root(topic: usize) -> String {
    match topic {
        0 => "out".to_owned(),
        _ => format!("out/generation={}", topic + 1),
    }
}

impl World {
    fn new() -> Self {
        Self {
            store: Scripted::new(),
            topics: vec![Topic::default()],
            processes: vec![None; WRITERS],
            writers: (0..WRITERS).map(|_| None).collect(),
            committed: None,
            ever_committed: Vec::new(),
        }
    }

    fn topic(&mut self) -> &mut Topic {
        self.topics.last_mut().unwrap()
    }

    async fn apply(&mut self, step: Step) {
        match step {
            Step::Produce { messages, holes } => {
                let topic = self.topic();
                for _ in 0..messages {
                    topic.high += i64::from(holes);
                    topic.messages.insert(topic.high);
                    topic.high += 1;
                }
            }
            Step::Assign { writer, restart, hint } => self.assign(writer, restart, hint).await,
            Step::Poll { writer, messages } => self.poll(writer, messages.into()).await,
            Step::Publish { writer, fates } => self.publish(writer, fates).await,
            Step::Commit { writer } => {
                if let Some(hint) = self.writers[writer].as_ref().and_then(|writer| writer.chain.hint()) {
                    self.committed = Some(hint.clone());
                    self.ever_committed.push(hint);
                }
            }
            Step::LoseHead => {
                let head = format!("{}/_elmo/chain/reviews/3/head.json", root(self.topics.len() - 1));
                let _ = self.store.inner.delete(&head.into()).await;
            }
            Step::Land => self.store.land().await,
            Step::Retain { messages } => {
                let topic = self.topic();
                topic.low = topic.high.min(topic.low + i64::from(messages));
            }
            Step::Recreate => {
                // At most three generations, or histories would be short ones.
                if self.topics.len() < 3 {
                    self.topics.push(Topic::default());
                    self.committed = None;
                }
            }
        }
    }

    async fn assign(&mut self, writer: usize, restart: bool, hint: Hinted) {
        let topic = self.topics.len() - 1;
        self.writers[writer] = None;
        let same = self.processes[writer].take().filter(|process| !restart && process.0 == topic);
        let process = match same {
            Some((_, process)) => process,
            None => {
                let output = output(Arc::<Scripted>::clone(&self.store));
                let generation = u32::try_from(topic).unwrap() + 1;
                Dataset::open(&output, &identity("m"), generation).await.unwrap().with_patience(IMPATIENT)
            }
        };
        let hint = match hint {
            Hinted::Committed => self.committed.clone(),
            Hinted::None => None,
            Hinted::Old(n) => match self.ever_committed.len() {
                0 => None,
                len => Some(self.ever_committed[usize::from(n) % len].clone()),
            },
            Hinted::Reset(end) => Some(Hint { end, object: String::new() }),
        };
        let Topic { low, high, .. } = self.topics[topic];
        let chain = process.chain(&reviews(), || async { Ok::<_, ChainError>(low) }, hint.as_ref()).await.unwrap();
        let position = position(&reviews(), chain.end(), (low, high), OnGap::Skip).unwrap();
        let open = open(&chain, position.gap);
        self.processes[writer] = Some((topic, process));
        self.writers[writer] = Some(Writer { topic, chain, open, next: position.start });
    }

    async fn poll(&mut self, writer: usize, messages: usize) {
        let current = self.topics.len() - 1;
        let Some(writer) = &mut self.writers[writer] else { return };
        // A topic that was deleted has no messages; what was read of it may still be published.
        if writer.topic != current {
            return;
        }
        let topic = &mut self.topics[current];
        let low = topic.low;
        if writer.next < low {
            // The broker has deleted them while they were read.
            writer.open.gap(writer.next..low);
            writer.next = low;
        }
        let read: Vec<i64> = topic.messages.range(writer.next..).take(messages).copied().collect();
        let Some(last) = read.last() else { return };
        let kept: Vec<i64> = read.iter().copied().filter(|offset| !is_skipped(*offset)).collect();
        let rejected: Rejected = [("skipped".to_owned(), (read.len() - kept.len()) as u64)].into();
        writer.open.write(&rows(&kept), last + 1, &rejected, Instant::now()).await.unwrap();
        writer.next = last + 1;
    }

    async fn publish(&mut self, index: usize, fates: Vec<Fate>) {
        let Some(mut writer) = self.writers[index].take() else { return };
        // The end of the file may lie beyond its last message.
        let (low, high) = (self.topics[writer.topic].low, self.topics[writer.topic].high);
        let is_drained = self.topics[writer.topic].messages.range(writer.next..).next().is_none();
        let end = if is_drained && writer.next >= low { high } else { writer.next };
        if end == writer.open.start() {
            // A file without offsets is not published.
            self.writers[index] = Some(writer);
            return;
        }
        let whole: EncodedFile = writer.open.finish(end).await.unwrap();
        self.store.then(fates);
        let published = tokio::select! {
            biased;
            published = writer.chain.publish(&whole) => Some(published.unwrap()),
            // The process is killed, or gives the partition up.
            () = self.store.hangs.notified() => None,
        };
        self.store.fates.lock().unwrap().clear();
        let (end, next) = match published {
            Some(Published::Ours { end, .. }) => (end, end),
            // It still owns the partition, or believes so: it reads on at the end of the other's object.
            Some(Published::Foreign { end }) => (end, end),
            None => return,
        };
        assert_eq!(writer.chain.end(), end);
        let open = open(&writer.chain, None);
        self.writers[index] = Some(Writer { open, next, ..writer });
    }

    /// Everything that is under way arrives, a last process reads to the end, and the datasets are checked.
    async fn check(mut self) {
        self.store.land().await;
        self.apply(Step::Assign { writer: 0, restart: true, hint: Hinted::Committed }).await;
        self.poll(0, usize::MAX).await;
        self.publish(0, vec![]).await;
        let end = self.writers[0].as_ref().unwrap().chain.end();
        assert_eq!(end, self.topic().high, "the last process reads to the end");
        for topic in 0..self.topics.len() {
            check_dataset(&self.store.inner, &root(topic), &self.topics[topic]).await;
        }
    }
}

fn open(chain: &Chain, gap: Option<std::ops::Range<i64>>) -> OpenFile {
    let mut open = OpenFile::new(chain.id(), chain.end(), &format()).unwrap();
    if let Some(gap) = gap {
        open.gap(gap);
    }
    open
}

/// Compares the rows of a dataset with the messages that its topic had.
async fn check_dataset(store: &InMemory, root: &str, topic: &Topic) {
    let found = objects(store, &format!("{root}/topic=reviews/partition=3")).await;
    let rows: Vec<i64> = found.into_iter().flat_map(|(_, offsets)| offsets).collect();
    assert!(rows.windows(2).all(|pair| pair[0] < pair[1]), "doubled or out of order: {rows:?}");
    let spans = spans(store, &format!("{root}/topic=reviews")).await;
    let Some((first, last)) = spans.first().zip(spans.last()) else { return };
    let (start, end) = (first.start, last.end);
    let lost: BTreeSet<i64> = spans.iter().flat_map(|span| span.gaps.iter().cloned().flatten()).collect();
    assert!(lost.iter().all(|offset| *offset < topic.low), "only what was deleted is a gap");
    let expected = topic.messages.range(start..end).filter(|offset| !lost.contains(offset));
    let expected: Vec<i64> = expected.copied().filter(|offset| !is_skipped(*offset)).collect();
    assert_eq!(rows, expected);
    assert_eq!(spans.iter().map(|span| span.rows).sum::<u64>(), rows.len() as u64);
    assert_eq!(tiling(spans, start).problems, []);
}

#[test]
fn whatever_happens_each_message_is_there_once() {
    let cases = std::env::var("ELMO_HISTORIES").ok().map_or(DEFAULT_HISTORIES, |cases| cases.parse().unwrap());
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let histories = prop::collection::vec(step(), 1..50);
    let mut runner = TestRunner::new(config);
    let outcome = runner.run(&histories, |steps| {
        runtime.block_on(async {
            let mut world = World::new();
            for step in steps {
                world.apply(step).await;
            }
            world.check().await;
        });
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}
