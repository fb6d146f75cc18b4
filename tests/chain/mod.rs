//! The offset chain of the stream: every failure of its table, random histories, and readers of a dataset.
//!
//! The messages of these tests are their offsets, so a row that is lost or doubled shows.

mod histories;
mod readers;
mod store;
mod table;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use arrow::{
    array::{ArrayRef, AsArray, FixedSizeListArray, Float32Array, Int64Array, RecordBatch},
    datatypes::{DataType, Field, Int64Type, Schema, SchemaRef},
};
use elmo_pipelines::{
    sink::{Codec, Encoding},
    stores::{Location, Stores},
    stream::{
        TopicPartition,
        chain::{
            Chain, ChainCheck, ChainError, ChainId, Dataset, EncodedFile, FileFormat, Hint, Identity, OpenFile,
            Patience, Published, Rejected, Span, Spill,
        },
        rotation::Limits,
    },
};
use futures::TryStreamExt;
use object_store::{ObjectStore, ObjectStoreExt, path::Path};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

/// Numbers in a vector.
const WIDTH: i32 = 4;
/// Tests do not wait.
const IMPATIENT: Patience =
    Patience { first: Duration::ZERO, longest: Duration::ZERO, request: Duration::from_millis(100) };

fn reviews() -> TopicPartition {
    TopicPartition::new("reviews", 3)
}

fn schema() -> SchemaRef {
    let item = Arc::new(Field::new("item", DataType::Float32, false));
    Arc::new(Schema::new(vec![
        Field::new("_offset", DataType::Int64, false),
        Field::new("embedding", DataType::FixedSizeList(item, WIDTH), true),
    ]))
}

fn format() -> FileFormat {
    FileFormat {
        schema: schema(),
        encoding: Encoding { vectors: "embedding".into(), codec: Codec::Zstd, row_group_bytes: 32 << 20 },
        footer: vec![("elmo.fingerprint".into(), "f".into())],
        spill: Spill::default(),
        limits: Limits { rows: 1000, bytes: 1 << 20, max_age: Duration::from_secs(60), idle: None },
    }
}

/// The rows of messages with these offsets.
fn rows(offsets: &[i64]) -> RecordBatch {
    let numbers = offsets.iter().flat_map(|offset| (0..WIDTH).map(move |n| *offset as f32 + n as f32 / 8.0));
    let item = Arc::new(Field::new("item", DataType::Float32, false));
    let numbers: ArrayRef = Arc::new(numbers.collect::<Float32Array>());
    let vectors = FixedSizeListArray::new(item, WIDTH, numbers, None);
    RecordBatch::try_new(schema(), vec![Arc::new(Int64Array::from(offsets.to_vec())), Arc::new(vectors)]).unwrap()
}

fn identity(model: &str) -> Identity {
    Identity::new([("elmo.fingerprint".to_owned(), model.to_owned())].into())
}

/// The output in a store.
fn output(store: Arc<dyn ObjectStore>) -> Location {
    let stores = Stores::with_settings([]);
    stores.insert("memory://x", store);
    stores.locate("memory://x/out").unwrap()
}

/// A process that has opened the dataset.
async fn process(output: &Location) -> Dataset {
    Dataset::open(output, &identity("m"), 1).await.unwrap().with_patience(IMPATIENT)
}

/// The chain of the partition, which begins at 0 if it is new.
async fn chain(process: &Dataset, hint: Option<&Hint>) -> Chain {
    process.chain(&reviews(), || async { Ok::<_, ChainError>(0) }, hint).await.unwrap()
}

/// A file with the messages `offsets`, which reaches to `end`.
async fn encoded(id: &Arc<ChainId>, start: i64, offsets: &[i64], end: i64) -> EncodedFile {
    let mut file = OpenFile::new(id, start, &format()).unwrap();
    let written = offsets.last().map_or(start, |last| last + 1);
    file.write(&rows(offsets), written, &Rejected::new(), Instant::now()).await.unwrap();
    file.finish(end).await.unwrap()
}

/// A file with all messages from the end of the chain to `end`.
async fn next_file(chain: &Chain, end: i64) -> EncodedFile {
    let offsets: Vec<i64> = (chain.end()..end).collect();
    encoded(chain.id(), chain.end(), &offsets, end).await
}

/// Publishes the messages from the end of the chain to `end`.
async fn publish(chain: &mut Chain, end: i64) -> Published {
    let file = next_file(chain, end).await;
    chain.publish(&file).await.unwrap()
}

/// The objects of a partition: names, and the offsets in their rows.
async fn objects(store: &dyn ObjectStore, folder: &str) -> Vec<(String, Vec<i64>)> {
    let mut listed: Vec<_> = store.list(Some(&Path::from(folder))).try_collect().await.unwrap();
    listed.sort_by(|a, b| a.location.cmp(&b.location));
    let mut found = Vec::new();
    for meta in listed {
        let bytes = store.get(&meta.location).await.unwrap().bytes().await.unwrap();
        let reader = ParquetRecordBatchReaderBuilder::try_new(bytes).unwrap().build().unwrap();
        let offsets = |batch: RecordBatch| batch["_offset"].as_primitive::<Int64Type>().values().to_vec();
        let offsets = reader.flat_map(|batch| offsets(batch.unwrap())).collect();
        found.push((meta.location.filename().unwrap().to_owned(), offsets));
    }
    found
}

/// All offsets in the order in which a reader of the folder finds them.
async fn offsets(store: &dyn ObjectStore) -> Vec<i64> {
    objects(store, "out/topic=reviews/partition=3").await.into_iter().flat_map(|(_, offsets)| offsets).collect()
}

/// The spans of a partition by the footers.
async fn spans(store: &dyn ObjectStore, folder: &str) -> Vec<Span> {
    let listed: Vec<_> = store.list(Some(&Path::from(folder))).try_collect().await.unwrap();
    let mut found = Vec::new();
    for meta in listed {
        let bytes = store.get(&meta.location).await.unwrap().bytes().await.unwrap();
        let reader = ParquetRecordBatchReaderBuilder::try_new(bytes).unwrap();
        let pairs = reader.metadata().file_metadata().key_value_metadata().unwrap();
        let pairs = pairs.iter().map(|pair| (pair.key.clone(), pair.value.clone().unwrap())).collect();
        found.push(Span::parse(&pairs).unwrap().unwrap());
    }
    found.sort_by_key(|span| span.start);
    found
}

fn tiling(spans: Vec<Span>, genesis: i64) -> ChainCheck {
    let mut check = ChainCheck::default();
    check.add(&reviews(), spans, Some(genesis), None);
    check
}
