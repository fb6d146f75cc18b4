//! Measures everything that a stream does beside the model: Kafka, decoding, tokenising, Arrow, Parquet, the store.
//!
//! A topic of its own is filled with JSON messages and streamed to files, with the model replaced by a constant vector.
//! Then rows of the same kind are encoded as Parquet by as many threads as the machine has cores, and nothing else is done:
//! the bound that a stream with vectors of this width can reach.

use std::{
    fmt,
    future::{pending, ready},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use arrow::{
    array::RecordBatch,
    datatypes::{Schema, SchemaRef},
};
use rdkafka::{
    admin::{AdminClient, AdminOptions, NewTopic, TopicReplication},
    client::DefaultClientContext,
    error::{KafkaError, RDKafkaErrorCode as Code},
    producer::{BaseRecord, Producer, ThreadedProducer},
};
use serde::Serialize;

use super::{
    constant::Constant,
    encoder::{self, FILE_BYTES, ROW_GROUP_BYTES, cpu_seconds},
};
use crate::{
    error::{Error, Result},
    report::{count, table},
    sink::Codec,
    stage::Stage,
    stores::Location,
    stream::{
        self, Message, Messages, OnError, OnGap, Start, StreamError, StreamJob, Target, TopicPartition,
        chain::Spill,
        decode::{Columns, DecodeSettings, Decoder, Format, Pointer},
        rotation::Limits,
        source::Settings,
    },
};

/// How long the brokers may take for a request.
const PATIENCE: Duration = Duration::from_secs(30);
/// Messages that are decoded at once for the encoder's measurement: about what one poll of the consumer returns.
const BATCH: usize = 4096;
/// Memory of the stream.
const MEMORY: usize = 1 << 30;

/// What to measure.
#[derive(Debug)]
pub struct StreamBench {
    /// The brokers. The topic, which does not exist yet, is the only one of the settings.
    pub kafka: Settings,
    /// Where the output goes; nothing is deleted there.
    pub output: Location,
    /// Messages.
    pub rows: usize,
    /// Partitions of the topic.
    pub partitions: i32,
    /// Numbers of a vector.
    pub width: u16,
}

/// The result of a measurement.
#[derive(Debug, Clone, Serialize)]
pub struct StreamBenchReport {
    /// Messages that were streamed, all of them into rows.
    pub rows: u64,
    /// Numbers of a vector.
    pub width: u16,
    /// Partitions of the topic.
    pub partitions: i32,
    /// Bytes of a message, on average.
    pub message_bytes: f64,
    /// Duration in seconds, from before the group is joined until after it is left.
    pub seconds: f64,
    /// Rows per second.
    pub rows_per_second: f64,
    /// Seconds of CPU time of this process; the broker has its own.
    pub cpu_seconds: f64,
    /// Files that were published.
    pub files: u64,
    /// Their size in bytes.
    pub file_bytes: u64,
    /// Rows per second that the Parquet encoder alone takes, on all cores.
    pub encoder_rows_per_second: f64,
    /// `rows_per_second / encoder_rows_per_second`.
    pub share_of_encoder: f64,
}

/// Runs a measurement, and deletes the topic.
///
/// # Errors
/// [`StreamError::Broker`] when the brokers refuse the topic or a message; as [`stream::run`].
pub async fn run(bench: StreamBench) -> Result<StreamBenchReport> {
    let topic = bench.kafka.topics().first().cloned().unwrap_or_default();
    let admin: AdminClient<DefaultClientContext> =
        bench.kafka.producer().create().map_err(|e| bench.failed("an administrator", &e))?;
    let options = AdminOptions::new().operation_timeout(Some(PATIENCE)).request_timeout(Some(PATIENCE));
    // Nothing of a benchmark is worth more than one copy.
    let new = NewTopic::new(&topic, bench.partitions, TopicReplication::Fixed(1));
    let created = admin.create_topics([&new], &options).await.map_err(|e| bench.failed(&topic, &e))?;
    if let Some(Err((_, code))) = created.into_iter().next() {
        return Err(bench.refused(&topic, code).into());
    }
    let measured = measure(bench, &topic).await;
    if admin.delete_topics(&[&topic], &options).await.is_err() {
        tracing::warn!(%topic, "the topic of the measurement was not deleted");
    }
    measured
}

async fn measure(bench: StreamBench, topic: &str) -> Result<StreamBenchReport> {
    let (rows, partitions, width) = (bench.rows, bench.partitions, bench.width);
    let filled = tokio::task::spawn_blocking(move || fill(&bench).map(|bytes| (bench, bytes)));
    let (bench, bytes) = filled.await.map_err(|e| Error::Failed(format!("a thread died: {e}")))??;
    let stage = Arc::new(Constant::new(width));
    let (cpu, started) = (cpu_seconds(), Instant::now());
    let load = ready(Ok(Arc::clone(&stage) as Arc<dyn Stage>));
    let streamed = stream::run(bench.job(), load, pending()).await?;
    let (seconds, cpu_seconds) = (started.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    if streamed.report.rows != rows as u64 {
        let what = format!("{} of {rows} messages were streamed from {topic}", streamed.report.rows);
        return Err(Error::Failed(what));
    }
    let encoder_rows_per_second = encoder_alone(&stage, rows).await?;
    let rows_per_second = rows as f64 / seconds;
    Ok(StreamBenchReport {
        rows: rows as u64,
        width,
        partitions,
        message_bytes: bytes as f64 / rows as f64,
        seconds,
        rows_per_second,
        cpu_seconds,
        files: streamed.report.files,
        file_bytes: streamed.report.bytes,
        encoder_rows_per_second,
        share_of_encoder: rows_per_second / encoder_rows_per_second,
    })
}

impl StreamBench {
    fn job(&self) -> StreamJob {
        StreamJob {
            kafka: self.kafka.clone(),
            decode: decode_settings(),
            on_error: OnError::Null,
            dead_letter_topic: None,
            start: Start::Beginning,
            on_gap: OnGap::Fail,
            target: Target::Files {
                output: self.output.clone(),
                generation: 1,
                limits: Limits { rows: u64::MAX, bytes: FILE_BYTES, max_age: Duration::from_secs(300), idle: None },
                row_group_bytes: ROW_GROUP_BYTES,
                codec: Codec::default(),
                spill: Spill { folder: None, above: usize::MAX },
            },
            once: true,
            metrics: None,
            memory_limit: MEMORY,
            grace: PATIENCE,
        }
    }

    fn failed(&self, what: &str, error: &KafkaError) -> StreamError {
        self.kafka.broker_error(what, error.rdkafka_error_code(), &error.to_string())
    }

    fn refused(&self, what: &str, code: Code) -> StreamError {
        self.kafka.broker_error(what, Some(code), &code.to_string())
    }
}

fn decode_settings() -> DecodeSettings {
    DecodeSettings {
        format: Format::Json,
        text_path: Pointer::parse("/body").ok(),
        columns: "id=/id:int64".parse::<Columns>().unwrap_or_default(),
        ..DecodeSettings::default()
    }
}

/// Message `number`.
fn message(number: usize, texts: &[String]) -> String {
    let body = serde_json::Value::from(texts[number % texts.len()].as_str());
    format!("{{\"id\": {number}, \"body\": {body}}}")
}

/// Fills the topic. Returns the bytes of all messages.
fn fill(bench: &StreamBench) -> Result<usize, StreamError> {
    let topic = bench.kafka.topics().first().cloned().unwrap_or_default();
    let mut config = bench.kafka.producer();
    config.set("linger.ms", "50").set("batch.size", "1000000").set("queue.buffering.max.kbytes", "65536");
    let producer: ThreadedProducer<_> = config.create().map_err(|e| bench.failed("a producer", &e))?;
    let texts = crate::demo::texts();
    let mut bytes = 0;
    for number in 0..bench.rows {
        let value = message(number, &texts);
        let partition = i32::try_from(number / 100 % bench.partitions.unsigned_abs() as usize).unwrap_or_default();
        let mut record = BaseRecord::<(), str>::to(&topic).partition(partition).payload(&value);
        while let Err((error, returned)) = producer.send(record) {
            if error.rdkafka_error_code() != Some(Code::QueueFull) {
                return Err(bench.failed(&topic, &error));
            }
            thread::sleep(Duration::from_millis(5));
            record = returned;
        }
        bytes += value.len();
    }
    producer.flush(10 * PATIENCE).map_err(|e| bench.failed(&topic, &e))?;
    Ok(bytes)
}

/// Rows per second of the Parquet encoder with the rows of the stream, one file per core.
async fn encoder_alone(stage: &Constant, rows: usize) -> Result<f64> {
    let decoder = Decoder::new(decode_settings())?;
    let fields: Vec<_> = decoder.fields().iter().cloned().chain(stage.fields()).collect();
    let schema: SchemaRef = Arc::new(Schema::new(fields));
    let mut batches = Vec::new();
    for first in (0..rows.min(16 * BATCH)).step_by(BATCH) {
        batches.push(batch(stage, &decoder, &schema, first).await?);
    }
    encoder::rows_per_second(&batches, &schema, rows)
}

/// [`BATCH`] rows as the stream writes them.
async fn batch(stage: &Constant, decoder: &Decoder, schema: &SchemaRef, first: usize) -> Result<RecordBatch> {
    let texts = crate::demo::texts();
    let mut messages = Messages::new(TopicPartition::new("bench", 0), first as i64);
    for number in first..first + BATCH {
        let value = message(number, &texts);
        let timestamp = Some(1_700_000_000_000 + number as i64 / 100);
        messages.push(Message {
            offset: number as i64,
            timestamp,
            key: None,
            value: Some(value.as_bytes()),
            headers: &[],
        });
    }
    let decoded = decoder.decode(&messages).await?;
    let embedded = stage.embed(&decoded.texts)?;
    let mut columns = decoded.columns;
    columns.extend([embedded.vectors, Arc::new(embedded.truncated), Arc::new(embedded.error)]);
    Ok(RecordBatch::try_new(Arc::clone(schema), columns).map_err(elmo::Error::from)?)
}

impl fmt::Display for StreamBenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&table(&[
            ("rows", format!("{} in {:.1} s, from {} partitions", count(self.rows), self.seconds, self.partitions)),
            ("message", format!("{:.0} bytes", self.message_bytes)),
            ("vector", format!("{} numbers, constant", self.width)),
            ("rows/s", count(self.rows_per_second as u64)),
            ("CPU time", format!("{:.1} s", self.cpu_seconds)),
            ("files", format!("{}, {:.0} MB", self.files, self.file_bytes as f64 / 1e6)),
            ("encoder alone", format!("{} rows/s", count(self.encoder_rows_per_second as u64))),
            ("share of encoder", format!("{:.1} %", 100.0 * self.share_of_encoder)),
        ]))
    }
}
