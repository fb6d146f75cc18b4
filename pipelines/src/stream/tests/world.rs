//! What is outside of a process, and what must hold of it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use arrow::{
    array::{
        Array, ArrayRef, AsArray, BooleanArray, FixedSizeListArray, Float32Array, ListArray, StringArray, UInt32Array,
    },
    buffer::{Buffer, OffsetBuffer},
    datatypes::{DataType, Field, Int64Type},
};
use async_trait::async_trait;
use bytes::Bytes;
use elmo::{ColumnStats, EmbedSpec, EmbeddedColumns, spec::Level};
use futures::{TryStreamExt, stream::BoxStream};
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, memory::InMemory, path::Path,
};
use parking_lot::Mutex;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use crate::{
    stage::{Pending, Stage},
    stores::{Location, Stores},
    stream::{
        Message, Messages, TopicPartition,
        chain::{ChainCheck, Span},
        clock,
        source::Start,
    },
};

pub(super) const TOPIC: &str = "t";

pub(super) fn partition(number: i32) -> TopicPartition {
    TopicPartition::new(TOPIC, number)
}

/// The number of a process.
pub(super) type Member = u64;

/// A message that cannot be decoded: it has no value.
pub(super) fn is_bad(offset: i64) -> bool {
    offset % 5 == 4
}

/// Random numbers (splitmix64), so that a history can be repeated.
#[derive(Debug, Clone)]
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit.max(1)
    }

    pub(super) fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(super) fn millis(&mut self, limit: u64) -> Duration {
        Duration::from_millis(self.below(limit))
    }
}

/// A partition of a topic.
#[derive(Debug, Default, Clone)]
pub(super) struct Log {
    /// All messages that it ever had.
    pub(super) messages: BTreeSet<i64>,
    pub(super) low: i64,
    pub(super) high: i64,
}

impl Log {
    pub(super) fn produce(&mut self, messages: u64, holes: u64) {
        for _ in 0..messages {
            self.messages.insert(self.high);
            self.high += 1 + i64::try_from(holes).unwrap();
        }
    }
}

/// Everything outside of a process.
#[derive(Debug, Default)]
pub(super) struct Outside {
    pub(super) logs: BTreeMap<TopicPartition, Log>,
    pub(super) committed: HashMap<TopicPartition, (i64, String)>,
    /// Offsets of the messages in the output topic.
    pub(super) published: BTreeMap<TopicPartition, Vec<i64>>,
    /// Where the output of partitions begins, as it was when the first process that knew them began.
    pub(super) first: BTreeMap<TopicPartition, i64>,
    /// The partitions whose tasks may begin to publish, of each process.
    pub(super) writable: HashSet<(Member, TopicPartition)>,
    /// Processes so far.
    pub(super) members: Member,
    /// Brokers do not answer.
    pub(super) down: bool,
    /// Of a hundred requests to the store, so many fail, hang, or arrive late.
    pub(super) faults: u64,
    /// The longest pause of a request or of the stage, in milliseconds.
    pub(super) slow: u64,
    /// The stage fails.
    pub(super) stage_fails: bool,
    /// How long the stage takes for a batch, besides, in milliseconds.
    pub(super) stage_takes: u64,
    /// The stage takes no batch.
    pub(super) stage_hangs: bool,
    /// The store does not answer requests for objects.
    pub(super) gets_hang: bool,
    /// The store does not answer requests to create objects.
    pub(super) puts_hang: bool,
    /// The store refuses requests to create objects.
    pub(super) puts_fail: bool,
    /// The thread of transactions does nothing.
    pub(super) commits_hang: bool,
    /// Numbers in a vector.
    pub(super) width: usize,
    /// Vectors are those of tokens: a message has so many words, each of which is one.
    pub(super) words: Option<usize>,
    /// After the next answer about the range of a partition, the broker deletes the messages below this offset.
    pub(super) deletes_below: Option<i64>,
    /// The id of the topic, if the brokers say it.
    pub(super) topic_id: Option<String>,
    /// What should not have happened.
    pub(super) wrong: Vec<String>,
    pub(super) random: Option<Random>,
}

impl Outside {
    pub(super) fn random(&mut self) -> &mut Random {
        self.random.get_or_insert(Random(0))
    }

    /// Where the output of a partition begins: at the first message, if no process knew the partition when it began.
    pub(super) fn first(&self, partition: &TopicPartition) -> i64 {
        self.first.get(partition).copied().unwrap_or(0)
    }

    pub(super) fn log(&mut self, partition: &TopicPartition) -> &mut Log {
        self.logs.entry(partition.clone()).or_default()
    }
}

/// Shared by a process, its consumer and the test.
#[derive(Clone)]
pub(super) struct World {
    outside: Arc<Mutex<Outside>>,
    pub(super) store: Arc<InMemory>,
    /// Memory of the vectors, whoever has them.
    pub(super) vectors: Arc<Memory>,
}

/// Bytes that were allocated and not freed.
#[derive(Debug, Default)]
pub(super) struct Memory {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl Memory {
    /// The most at any time so far.
    pub(super) fn peak(&self) -> usize {
        self.peak.load(Relaxed)
    }
}

/// Allocated bytes, which are counted until nobody has them any more.
struct Counted(Buffer, Arc<Memory>);

impl Counted {
    fn buffer(bytes: Buffer, memory: &Arc<Memory>) -> Buffer {
        let now = memory.now.fetch_add(bytes.len(), Relaxed) + bytes.len();
        memory.peak.fetch_max(now, Relaxed);
        Bytes::from_owner(Self(bytes, Arc::clone(memory))).into()
    }
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.now.fetch_sub(self.0.len(), Relaxed);
    }
}

impl World {
    pub(super) fn new(seed: u64, partitions: i32) -> Self {
        let logs = (0..partitions).map(|number| (partition(number), Log::default())).collect();
        let outside = Outside { logs, random: Some(Random(seed)), slow: 1500, width: 2, ..Outside::default() };
        Self { outside: Arc::new(Mutex::new(outside)), store: Arc::default(), vectors: Arc::default() }
    }

    /// A world in which some partitions have messages, and the last one may be added later.
    pub(super) fn inhabited(seed: u64, partitions: i32) -> Self {
        let world = Self::new(seed, partitions);
        world.with(|outside| {
            if outside.random().percent(30) {
                outside.logs.pop_last();
            }
            for number in 0..i32::try_from(outside.logs.len()).unwrap() {
                let messages = outside.random().below(8);
                outside.log(&partition(number)).produce(messages, 0);
            }
        });
        world
    }

    /// Whether a partition exists.
    pub(super) fn has(&self, source: &TopicPartition) -> bool {
        self.with(|outside| outside.logs.contains_key(source))
    }

    /// A process begins, whose `--start` is this. Remembers where the output of the partitions that exist must begin, unless
    /// an earlier process knew that: those of the first one begin where it says, and those that were added later at their first
    /// message. Returns what there is to record.
    pub(super) fn expect_starts(&self, start: Start) -> Vec<(TopicPartition, i64)> {
        self.with(|outside| {
            let is_first = outside.first.is_empty();
            for (source, log) in &outside.logs {
                let offset = if is_first && start == Start::End { log.high } else { 0 };
                outside.first.entry(source.clone()).or_insert(offset);
            }
            let ends = outside.logs.iter().map(|(source, log)| (source.clone(), log.high));
            if start == Start::End { ends.collect() } else { Vec::new() }
        })
    }

    /// Looks at it, or changes it. Nothing may be awaited meanwhile.
    pub(super) fn with<T>(&self, action: impl FnOnce(&mut Outside) -> T) -> T {
        action(&mut self.outside.lock())
    }

    pub(super) fn wrong(&self, what: impl fmt::Display) {
        self.with(|outside| outside.wrong.push(what.to_string()));
    }

    pub(super) async fn pause(&self) {
        let time = self.with(|outside| {
            let slow = outside.slow;
            outside.random().millis(slow)
        });
        clock::sleep(time).await;
    }

    /// Up to `most` messages of a partition from `from` on.
    pub(super) fn read(&self, source: &TopicPartition, from: i64, most: usize) -> Option<Messages> {
        let offsets: Vec<i64> = self.with(|outside| {
            let log = outside.log(source);
            log.messages.range(from.max(log.low)..).take(most).copied().collect()
        });
        let words = self.with(|outside| outside.words.unwrap_or(2));
        (!offsets.is_empty()).then(|| messages_of(source, &offsets, words))
    }

    /// The output as a process of this world sees it.
    pub(super) fn output(&self, member: Member) -> Location {
        output(Arc::new(Flaky { world: self.clone(), member, inner: Arc::clone(&self.store) }))
    }

    /// The same without faults, for others.
    pub(super) fn output_of_others(&self) -> Location {
        output(Arc::<InMemory>::clone(&self.store))
    }

    /// The rows of a partition in the order of its files, and the ranges of these.
    pub(super) async fn dataset(&self, source: &TopicPartition) -> (Vec<i64>, Vec<Span>) {
        let folder = Path::from(format!("out/topic={}/partition={}", source.topic, source.partition));
        let mut listed: Vec<_> = self.store.list(Some(&folder)).try_collect().await.unwrap();
        listed.sort_by(|a, b| a.location.cmp(&b.location));
        let (mut rows, mut spans) = (Vec::new(), Vec::new());
        for meta in listed {
            let bytes = self.store.get(&meta.location).await.unwrap().bytes().await.unwrap();
            let reader = ParquetRecordBatchReaderBuilder::try_new(bytes).unwrap();
            let pairs = reader.metadata().file_metadata().key_value_metadata().unwrap();
            let pairs = pairs.iter().map(|pair| (pair.key.clone(), pair.value.clone().unwrap())).collect();
            spans.push(Span::parse(&pairs).unwrap().unwrap());
            for batch in reader.build().unwrap() {
                rows.extend_from_slice(batch.unwrap()["_offset"].as_primitive::<Int64Type>().values());
            }
        }
        (rows, spans)
    }

    /// Checks the dataset of a partition: whole, in order, and nothing twice. Returns where it ends.
    pub(super) async fn check_dataset(&self, source: &TopicPartition, skips: bool) -> Option<i64> {
        let (rows, spans) = self.dataset(source).await;
        let (start, end) = (spans.first()?.start, spans.last()?.end);
        let mut check = ChainCheck::default();
        let lost: BTreeSet<i64> = spans.iter().flat_map(|span| span.gaps.iter().cloned().flatten()).collect();
        check.add(source, spans, Some(start), None);
        let (log, first) = self.with(|outside| (outside.log(source).clone(), outside.first(source)));
        // The broker may have deleted the first messages before a process asked for them.
        if !(first..=first.max(log.low)).contains(&start) {
            self.wrong(format!("{source} begins at {start}, and not at {first}"));
        }
        if lost.iter().any(|offset| *offset >= log.low) {
            self.wrong(format!("{source}: gaps that the broker did not delete"));
        }
        let expected = log.messages.range(start..end).filter(|offset| !lost.contains(offset));
        let expected: Vec<i64> = expected.copied().filter(|offset| !(skips && is_bad(*offset))).collect();
        if rows != expected || !check.problems.is_empty() {
            self.wrong(format!("{source}: {:?}, rows {rows:?} instead of {expected:?}", check.problems));
        }
        Some(end)
    }
}

fn output(store: Arc<dyn ObjectStore>) -> Location {
    let stores = Stores::with_settings([]);
    stores.insert("memory://x", store);
    stores.locate("memory://x/out").unwrap()
}

pub(super) fn messages(source: &TopicPartition, offsets: &[i64]) -> Messages {
    messages_of(source, offsets, 2)
}

fn messages_of(source: &TopicPartition, offsets: &[i64], words: usize) -> Messages {
    let mut messages = Messages::new(source.clone(), offsets[0]);
    for offset in offsets {
        let text = format!("message {offset}") + &" word".repeat(words - 2);
        let value = (!is_bad(*offset)).then_some(text.as_bytes());
        messages.push(Message { offset: *offset, timestamp: Some(7), key: None, value, headers: &[] });
    }
    messages
}

/// The store as a process sees it.
struct Flaky {
    world: World,
    member: Member,
    inner: Arc<InMemory>,
}

impl fmt::Debug for Flaky {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Flaky")
    }
}

impl fmt::Display for Flaky {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Flaky")
    }
}

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Fine,
    /// It fails, and was applied or not.
    Fails {
        applied: bool,
    },
    /// It fails after a long time.
    Hangs,
    /// It fails, and is applied later, whatever became of the process.
    Late,
}

impl Flaky {
    fn fate(&self) -> Fate {
        self.world.with(|outside| {
            let faults = outside.faults;
            let random = outside.random();
            match random.percent(faults) {
                false => Fate::Fine,
                true => match random.below(4) {
                    0 => Fate::Fails { applied: false },
                    1 => Fate::Fails { applied: true },
                    2 => Fate::Hangs,
                    _ => Fate::Late,
                },
            }
        })
    }

    async fn ask(&self) -> Result<()> {
        if self.world.with(|outside| outside.gets_hang) {
            return std::future::pending().await;
        }
        self.world.pause().await;
        match self.fate() {
            Fate::Fine => Ok(()),
            _ => Err(failure()),
        }
    }
}

fn failure() -> object_store::Error {
    object_store::Error::Generic { store: "flaky", source: "503".into() }
}

/// The partition of a data object.
fn of_data(at: &Path) -> Option<TopicPartition> {
    let number = at.as_ref().strip_prefix("out/topic=t/partition=")?.split('/').next()?;
    Some(partition(number.parse().unwrap()))
}

#[async_trait]
impl ObjectStore for Flaky {
    async fn put_opts(&self, at: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        let Some(source) = of_data(at) else { return self.inner.put_opts(at, payload, options).await };
        if !self.world.with(|outside| outside.writable.contains(&(self.member, source.clone()))) {
            self.world.wrong(format!("{at} is published after the partition was given away"));
        }
        if self.world.with(|outside| outside.puts_hang) {
            return std::future::pending().await;
        }
        if self.world.with(|outside| outside.puts_fail) {
            return Err(failure());
        }
        self.world.pause().await;
        match self.fate() {
            Fate::Fine => self.inner.put_opts(at, payload, options).await,
            Fate::Fails { applied: false } => Err(failure()),
            Fate::Fails { applied: true } => {
                self.inner.put_opts(at, payload, options).await?;
                Err(failure())
            }
            Fate::Hangs => {
                clock::sleep(Duration::from_secs(30)).await;
                Err(failure())
            }
            Fate::Late => {
                let (inner, at, world) = (Arc::clone(&self.inner), at.clone(), self.world.clone());
                tokio::spawn(async move {
                    world.pause().await;
                    let _ = inner.put_opts(&at, payload, options).await;
                });
                Err(failure())
            }
        }
    }

    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        panic!("a chain is never extended by an upload in parts");
    }

    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        self.ask().await?;
        self.inner.get_opts(at, options).await
    }

    fn delete_stream(&self, at: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(at)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    fn list_with_offset(&self, prefix: Option<&Path>, offset: &Path) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.ask().await?;
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

/// Gives each text, or each of its words, the same vector.
pub(super) struct Constant {
    spec: EmbedSpec,
    world: World,
    width: usize,
}

impl Constant {
    pub(super) fn new(world: &World) -> Arc<Self> {
        let (width, of_tokens) = world.with(|outside| (outside.width, outside.words.is_some()));
        let level = if of_tokens { Level::Token } else { Level::Sentence };
        Arc::new(Self { spec: EmbedSpec { level, ..EmbedSpec::default() }, world: world.clone(), width })
    }

    fn vector(&self) -> DataType {
        DataType::FixedSizeList(item(), i32::try_from(self.width).unwrap())
    }

    /// A vector of each row, or of each token.
    fn vectors(&self, texts: &ArrayRef) -> ArrayRef {
        let words = |text: Option<&str>| text.map_or(0, |text| text.split(' ').count());
        let lengths: Vec<usize> = texts.as_string::<i32>().iter().map(words).collect();
        if self.spec.level == Level::Sentence {
            return Arc::new(self.vectors_of(lengths.len()));
        }
        let vectors = Arc::new(self.vectors_of(lengths.iter().sum()));
        let item = Arc::new(Field::new("item", self.vector(), false));
        Arc::new(ListArray::new(item, OffsetBuffer::from_lengths(lengths), vectors, texts.nulls().cloned()))
    }

    fn vectors_of(&self, count: usize) -> FixedSizeListArray {
        let numbers = Counted::buffer(Buffer::from_vec(vec![0.5_f32; self.width * count]), &self.world.vectors);
        let numbers = Float32Array::new(numbers.into(), None);
        FixedSizeListArray::new(item(), i32::try_from(self.width).unwrap(), Arc::new(numbers), None)
    }
}

fn item() -> Arc<Field> {
    Arc::new(Field::new("item", DataType::Float32, false))
}

/// Vectors of two numbers.
pub(super) fn columns(texts: &ArrayRef) -> EmbeddedColumns {
    let stage = Constant { spec: EmbedSpec::default(), world: World::new(1, 1), width: 2 };
    columns_of(texts, stage.vectors(texts))
}

fn columns_of(texts: &ArrayRef, vectors: ArrayRef) -> EmbeddedColumns {
    let rows = texts.len();
    EmbeddedColumns {
        vectors,
        truncated: BooleanArray::from(vec![false; rows]),
        error: StringArray::new_null(rows),
        row_errors: Vec::new(),
        tokens: UInt32Array::from(vec![1; rows]),
        keep: None,
        stats: ColumnStats { rows, ..ColumnStats::default() },
        cost: elmo::engine::Cost::default(),
    }
}

#[async_trait]
impl Stage for Constant {
    fn spec(&self) -> &EmbedSpec {
        &self.spec
    }

    fn fields(&self) -> Vec<Field> {
        let vector = match self.spec.level {
            Level::Sentence => self.vector(),
            Level::Token => DataType::List(Arc::new(Field::new("item", self.vector(), false))),
        };
        vec![
            Field::new("embedding", vector, true),
            Field::new("truncated", DataType::Boolean, false),
            Field::new("error", DataType::Utf8, true),
        ]
    }

    fn metadata(&self) -> Vec<(String, String)> {
        vec![("elmo.fingerprint".to_owned(), "f".to_owned())]
    }

    async fn submit(&self, texts: &ArrayRef) -> elmo::Result<Pending> {
        if self.world.with(|outside| outside.stage_hangs) {
            return std::future::pending().await;
        }
        let (columns, world) = (columns_of(texts, self.vectors(texts)), self.world.clone());
        let takes = self.world.with(|outside| Duration::from_millis(outside.stage_takes));
        Ok(Box::pin(async move {
            clock::sleep(takes).await;
            world.pause().await;
            match world.with(|outside| outside.stage_fails) {
                true => Err(elmo::Error::Closed),
                false => Ok(columns),
            }
        }))
    }
}
