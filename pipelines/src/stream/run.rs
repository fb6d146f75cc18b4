//! Prepares a stream and runs it.
//!
//! Everything that can fail is tried before the group is joined: a member that cannot work must not take partitions.

use std::{
    collections::BTreeMap,
    fmt,
    pin::pin,
    sync::{Arc, atomic::AtomicUsize},
    time::Duration,
};

use elmo::{
    EmbedSpec,
    spec::{Level, StateMode},
};
use rdkafka::consumer::ConsumerGroupMetadata;
use serde::Serialize;
use tokio::sync::mpsc;

use super::{
    OnError, StreamError, TopicPartition,
    beginning::Beginning,
    chain::{Dataset, FileFormat, Identity},
    dead_letters::DeadLetters,
    decode::Decoder,
    files::Files,
    finished::Finisher,
    job::Job,
    metrics::{Health, Metrics, serve},
    opening::{Open, Opener},
    partition::Parts,
    settings::{StreamJob, Target},
    source::{Budget, Client, Epoch, Observer, Ownership, Settings, Source, Upstream, describe},
    totals::{StreamReport, Totals},
    transaction::{Committer, Group, Records, Transactions, ValueEncoding},
};
use crate::{
    error::{Error, Result},
    models::warn_untrained,
    report::{count, table},
    sink::Encoding,
    stage::Stage,
};

/// The poll thread counts as dead when it has not polled for this long.
const POLL_LIMIT: Duration = Duration::from_secs(60);
/// The part of the memory that may be on its way through the stage.
const IN_FLIGHT: usize = 4;

/// A stream that ended.
#[derive(Debug, Serialize)]
pub struct Streamed {
    /// What this process has done.
    #[serde(flatten)]
    pub report: StreamReport,
    /// All messages that it had begun to embed are published. If not, the same command reads the rest again.
    pub complete: bool,
}

/// Loads the stage and runs a stream until `stop`, or, with [`StreamJob::once`], until it has read what the topics held when their partitions
/// were assigned. Metrics and health are served while the stage is loaded, because a model may be downloaded for minutes.
///
/// A `stop` before the group is joined ends the call at once. Threads that wait for a broker then go on, so the process must exit
/// without waiting for them.
///
/// # Errors
/// Those of `load`; [`StreamError`] when the brokers refuse, a setting cannot work, or a message cannot be embedded and on-error is `fail`;
/// [`ChainError`](super::chain::ChainError) when the output belongs to something else or the store cannot be used;
/// [`elmo::Error`] when the devices fail.
pub async fn run(
    job: StreamJob,
    load: impl Future<Output = Result<Arc<dyn Stage>>>,
    stop: impl Future<Output = ()>,
) -> Result<Streamed> {
    let (metrics, health) = (Arc::new(Metrics::new()), Arc::new(Health::new(POLL_LIMIT)));
    let totals = Totals::new(Arc::clone(&metrics), job.on_error);
    job.check()?;
    let server = match job.metrics {
        Some(address) => Some(serve(address, Arc::clone(&metrics), Arc::clone(&health)).await?),
        None => None,
    };
    if let Some(server) = &server {
        tracing::info!(address = %server.address(), "metrics");
    }
    let mut stop = pin!(stop);
    let running = tokio::select! {
        running = begin(&job, load, &totals, health) => Some(running?),
        () = &mut stop => None,
    };
    let complete = match running {
        Some(running) => running.run(stop).await,
        None => {
            tracing::warn!("stopped before the group was joined: nothing was read");
            Ok(true)
        }
    };
    if let Some(server) = server {
        server.stop().await;
    }
    Ok(Streamed { report: totals.report(), complete: complete? })
}

/// Loads the stage, checks everything, and joins the group.
async fn begin(
    job: &StreamJob,
    load: impl Future<Output = Result<Arc<dyn Stage>>>,
    totals: &Totals,
    health: Arc<Health>,
) -> Result<Job> {
    let stage = load.await?;
    health.model_loaded();
    let decoder = Decoder::new(job.decode.clone())?;
    decoder.probe().await?;
    let finisher = Finisher::new(decoder, job.on_error, stage.as_ref())?;
    check_spec(&job.target, stage.spec())?;
    let plan = describe(&job.kafka, &job.written()).await?;
    let mut prepared = prepare(job, stage.as_ref(), &finisher, Arc::clone(&totals.metrics)).await?;
    health.store_probed();
    if stage.is_untrained() {
        warn_untrained();
    }
    let beginning = Beginning { kafka: &job.kafka, plan: &plan, start: job.start };
    match &mut prepared {
        Prepared::Files { dataset, .. } => beginning.of_dataset(dataset).await?,
        Prepared::Topic { .. } => beginning.of_group().await?,
    }
    let planned = plan.partitions().collect();
    Ok(Job { planned, ..join(job, prepared, stage, finisher, totals, health)? })
}

/// Joins the group.
fn join(
    job: &StreamJob,
    prepared: Prepared,
    stage: Arc<dyn Stage>,
    finisher: Finisher,
    totals: &Totals,
    health: Arc<Health>,
) -> Result<Job> {
    let budget = Budget::new(job.memory_limit);
    let (source, events) = Source::start(&job.kafka, budget.clone())?;
    let source = Arc::new(source);
    let target = match prepared {
        Prepared::Files { dataset, format, dead_letters } => {
            let source: Arc<dyn Upstream> = Arc::<Source>::clone(&source);
            Open::Files(Box::new((*dataset, Files { format, source, dead_letters, totals: totals.clone() })))
        }
        Prepared::Topic { records, max_wait, transactions } => {
            let group = Member { client: source.client(), ownership: source.ownership() };
            let committer =
                Committer::start(*transactions, records.clone(), max_wait, Box::new(group), totals.clone())?;
            Open::Topic(records, committer)
        }
    };
    let bytes_in_flight = (job.memory_limit / IN_FLIGHT) as u64;
    let parts = Parts { stage, finisher, totals: totals.clone(), bytes_in_flight, owned: AtomicUsize::default() };
    let (starting, started) = mpsc::unbounded_channel();
    Ok(Job {
        source,
        events,
        started,
        opener: Arc::new(Opener { target, on_gap: job.on_gap, started: starting }),
        parts: Arc::new(parts),
        budget,
        health,
        once: job.once,
        planned: Default::default(),
        grace: job.grace,
    })
}

/// What a stream would do.
#[derive(Debug, Serialize)]
pub struct DryRun {
    /// The brokers, as they call themselves.
    pub brokers: Vec<String>,
    /// The group that would be joined.
    pub group: String,
    /// The topics that would be read.
    pub topics: Vec<DryTopic>,
    /// What the vectors would be computed with, as in the footers of the files: fingerprint of the model, layers, state, and so on.
    pub model: BTreeMap<String, String>,
    /// The output.
    pub output: String,
    /// The output was begun by an earlier run, and would be continued.
    pub continues: bool,
    /// The columns of the output and their types.
    pub columns: Vec<(String, String)>,
}

/// A topic that would be read.
#[derive(Debug, Serialize)]
pub struct DryTopic {
    /// Its name.
    pub name: String,
    /// Number of its partitions.
    pub partitions: usize,
    /// Messages that are in it now.
    pub messages: u64,
}

impl fmt::Display for DryRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = vec![("brokers", self.brokers.join(", ")), ("group", self.group.clone())];
        for topic in &self.topics {
            let DryTopic { name, partitions, messages } = topic;
            rows.push((
                "topic",
                format!("{name}: {}, {}", counted(*partitions as u64, "partition"), counted(*messages, "message")),
            ));
        }
        // The options are all of options.json, too long for a line of a table.
        let model = self.model.iter().filter(|(key, _)| *key != "elmo.options");
        rows.extend(
            model.map(|(key, value)| ("model", format!("{}: {value}", key.strip_prefix("elmo.").unwrap_or(key)))),
        );
        let state = if self.continues { "continues" } else { "begins" };
        rows.push(("output", format!("{} ({state})", self.output)));
        rows.extend(self.columns.iter().map(|(name, kind)| ("column", format!("{name}: {kind}"))));
        f.write_str(&table(&rows))
    }
}

fn counted(number: u64, what: &str) -> String {
    format!("{} {what}{}", count(number), if number == 1 { "" } else { "s" })
}

/// Checks the brokers, the topics, the store and the settings as [`run`] does, and changes nothing.
///
/// # Errors
/// As [`run`].
pub async fn dry_run(job: &StreamJob, stage: &dyn Stage) -> Result<DryRun> {
    job.check()?;
    let decoder = Decoder::new(job.decode.clone())?;
    decoder.probe().await?;
    let finisher = Finisher::new(decoder, job.on_error, stage)?;
    check_spec(&job.target, stage.spec())?;
    let plan = describe(&job.kafka, &job.written()).await?;
    let (output, continues) = match &job.target {
        Target::Files { output, generation, spill, .. } => {
            spill.check()?;
            (output.to_string(), Dataset::check(output, &identity(job, stage, &finisher), *generation).await?)
        }
        Target::Topic { topic, .. } => (format!("topic {topic}"), !plan.begun.is_empty()),
    };
    let topics = plan.topics.into_iter();
    let columns = finisher.schema().fields().iter();
    Ok(DryRun {
        brokers: plan.brokers,
        group: job.kafka.group().to_owned(),
        model: stage.metadata().into_iter().collect(),
        topics: topics.map(|t| DryTopic { name: t.name, partitions: t.partitions, messages: t.messages }).collect(),
        output,
        continues,
        columns: columns.map(|field| (field.name().clone(), field.data_type().to_string())).collect(),
    })
}

/// Checks that a vector depends on its message alone, and that the values of messages can hold the vectors.
fn check_spec(target: &Target, spec: &EmbedSpec) -> Result<(), StreamError> {
    let refuse = |message: &str, help: &str| {
        Err(StreamError::Settings { message: message.to_owned(), help: Some(help.to_owned()) })
    };
    if spec.state == StateMode::Carry {
        return refuse(
            "with --state carry a vector depends on the messages before it, which are others after a restart",
            "use --state zero or --state warm",
        );
    }
    match (target, spec.level) {
        (Target::Topic { encoding: ValueEncoding::Raw, .. }, Level::Token) => refuse(
            "--encoding raw holds one vector, and --level token gives one for each token",
            "use --encoding json or --encoding arrow",
        ),
        _ => Ok(()),
    }
}

enum Prepared {
    Files { dataset: Box<Dataset>, format: Arc<FileFormat>, dead_letters: Option<DeadLetters> },
    Topic { records: Records, max_wait: Duration, transactions: Box<Transactions> },
}

/// Checks the store, and connects to the brokers for writing.
async fn prepare(job: &StreamJob, stage: &dyn Stage, finisher: &Finisher, metrics: Arc<Metrics>) -> Result<Prepared> {
    match &job.target {
        Target::Files { output, generation, limits, row_group_bytes, codec, spill } => {
            spill.check()?;
            let dataset = Dataset::open(output, &identity(job, stage, finisher), *generation).await?;
            let vectors = stage.fields().first().map(|field| field.name().clone()).unwrap_or_default();
            let format = FileFormat {
                schema: Arc::clone(finisher.schema()),
                encoding: Encoding { vectors, codec: *codec, row_group_bytes: *row_group_bytes },
                footer: stage.metadata(),
                spill: spill.clone(),
                limits: *limits,
            };
            let letters = job.dead_letter_topic.as_deref().filter(|_| job.on_error == OnError::DeadLetter);
            let dead_letters = letters.map(|topic| DeadLetters::new(&job.kafka, topic, metrics)).transpose()?;
            Ok(Prepared::Files { dataset: Box::new(dataset), format: Arc::new(format), dead_letters })
        }
        Target::Topic { topic, encoding, max_wait } => {
            let records = Records {
                topic: topic.as_str().into(),
                dead_letters: job.dead_letter_topic.as_deref().map(Into::into),
                encoding: *encoding,
                format: job.decode.format,
                on_error: job.on_error,
                added: stage.fields().len(),
                max_bytes: max_message_bytes(&job.kafka),
            };
            let kafka = job.kafka.clone();
            // Only a static member has the transactional id of its predecessor.
            let left = job.written().into_iter().filter(|_| kafka.instance().is_some()).map(Into::into).collect();
            let begin = move || {
                let (config, logs, id) = (kafka.producer(), kafka.logs(), transactional_id(&kafka));
                let group = Observer::new(&kafka)?.metadata();
                Transactions::new(&config, logs, &id, left, group, metrics)
            };
            let begun = tokio::task::spawn_blocking(begin).await;
            let transactions = Box::new(begun.map_err(|e| Error::Failed(format!("a thread died: {e}")))??);
            Ok(Prepared::Topic { records, max_wait: *max_wait, transactions })
        }
    }
}

/// The name under which a newer producer fences an older one: a static member replaces itself. Others are told apart by
/// their membership in the group.
fn transactional_id(kafka: &Settings) -> String {
    let instance = kafka.instance().map_or_else(|| uuid::Uuid::new_v4().to_string(), str::to_owned);
    format!("elmo-{}-{instance}", kafka.group())
}

/// The most bytes of a message that the producer takes.
fn max_message_bytes(kafka: &Settings) -> usize {
    const DEFAULT: usize = 1_000_000;
    kafka.get("message.max.bytes").and_then(|bytes| bytes.parse().ok()).unwrap_or(DEFAULT)
}

/// What all writers of an output must have in common.
fn identity(job: &StreamJob, stage: &dyn Stage, finisher: &Finisher) -> Identity {
    let mut settings: BTreeMap<String, String> = stage.metadata().into_iter().collect();
    for field in finisher.schema().fields() {
        let null = if field.is_nullable() { "" } else { " not null" };
        settings.insert(format!("column {}", field.name()), format!("{}{null}", field.data_type()));
    }
    settings.extend(job.decode.identity());
    Identity::new(settings)
}

impl StreamJob {
    /// The topics that it writes.
    fn written(&self) -> Vec<&str> {
        let output = match &self.target {
            Target::Topic { topic, .. } => Some(topic.as_str()),
            Target::Files { .. } => None,
        };
        output.into_iter().chain(self.dead_letter_topic.as_deref()).collect()
    }

    /// Checks settings that exclude each other.
    ///
    /// # Errors
    /// [`StreamError::Settings`].
    pub fn check(&self) -> Result<(), StreamError> {
        let wrong = |message: String, help: &str| Err(StreamError::Settings { message, help: Some(help.to_owned()) });
        match (self.on_error, &self.dead_letter_topic) {
            (OnError::DeadLetter, None) => {
                return wrong("--on-error dead-letter needs a topic".into(), "give --dead-letter-topic TOPIC");
            }
            (OnError::DeadLetter, Some(_)) | (_, None) => {}
            (_, Some(_)) => {
                return wrong("--dead-letter-topic has no effect here".into(), "give --on-error dead-letter as well");
            }
        }
        if let Some(topic) = self.written().into_iter().find(|topic| self.kafka.reads(topic)) {
            let message = format!("topic {topic} is read and written: the stream would never end");
            return wrong(message, "write to another topic, or narrow --topic");
        }
        let isolation = self.kafka.get("isolation.level");
        if matches!(self.target, Target::Topic { .. }) && isolation.is_some_and(|level| level != "read_committed") {
            let message = "isolation.level must be read_committed with --output-topic".to_owned();
            return wrong(message, "leave it out: without it, offsets of unfinished transactions count as committed");
        }
        Ok(())
    }
}

/// This process as the member of a group whose offsets are committed in transactions.
struct Member {
    client: Client,
    ownership: Ownership,
}

impl Group for Member {
    fn metadata(&self) -> Option<ConsumerGroupMetadata> {
        self.client.group_metadata()
    }

    fn owns(&self, source: &TopicPartition, epoch: Epoch) -> bool {
        self.ownership.epoch(source) == Some(epoch)
    }

    fn committed(&self, sources: &[TopicPartition]) -> Result<Vec<Option<i64>>, StreamError> {
        self.client.committed_now(sources)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_depend_on_their_messages_alone() {
        let target = Target::Topic { topic: "out".to_owned(), encoding: ValueEncoding::Json, max_wait: Duration::ZERO };
        let refused = |state| check_spec(&target, &EmbedSpec { state, ..EmbedSpec::default() }).is_err();
        assert_eq!([StateMode::Zero, StateMode::Warm, StateMode::Carry].map(refused), [false, false, true]);
    }

    #[test]
    fn raw_values_hold_no_vectors_of_tokens() {
        let refused = |encoding, level| {
            let target = Target::Topic { topic: "out".to_owned(), encoding, max_wait: Duration::ZERO };
            check_spec(&target, &EmbedSpec { level, ..EmbedSpec::default() }).is_err()
        };
        assert!(refused(ValueEncoding::Raw, Level::Token));
        assert!(!refused(ValueEncoding::Raw, Level::Sentence));
        assert!(!refused(ValueEncoding::Json, Level::Token) && !refused(ValueEncoding::Arrow, Level::Token));
    }
}
