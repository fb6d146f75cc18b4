//! What the brokers say before the group is joined: a process that cannot work must not take partitions.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rdkafka::{
    ClientContext, Offset, TopicPartitionList,
    config::RDKafkaLogLevel,
    consumer::{BaseConsumer, Consumer as _, ConsumerContext},
    error::{KafkaError, KafkaResult, RDKafkaErrorCode as Code},
    metadata::Metadata,
};

use super::{
    event::Hint,
    faults,
    observer::Observer,
    offsets,
    permissions::{self, Operation},
    scrub::Scrubber,
    settings::Settings,
};
use crate::stream::{StreamError, TopicPartition};

/// How long the brokers may take to answer at all.
pub(super) const TIMEOUT: Duration = Duration::from_secs(20);
/// How long one message of each topic is waited for. Reading may be slow; it is refused at once.
const READABLE: Duration = Duration::from_secs(3);

/// What [`describe()`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The brokers, as they call themselves.
    pub brokers: Vec<String>,
    /// The topics that exist and are to be read, by name. Those of a pattern may be none.
    pub topics: Vec<Topic>,
    /// Those of them of which the group has committed an offset.
    pub begun: HashSet<Arc<str>>,
}

impl Plan {
    /// The partitions of all topics that are to be read.
    pub(in crate::stream) fn partitions(&self) -> impl Iterator<Item = TopicPartition> {
        self.topics.iter().flat_map(partitions_of)
    }
}

/// A topic that is to be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topic {
    /// Its name.
    pub name: String,
    /// Number of its partitions.
    pub partitions: usize,
    /// Whether it could be read from. `None` when the answer took too long.
    pub readable: Option<bool>,
    /// Messages that are in it now.
    pub messages: u64,
}

/// Connects, and checks the topics and the group, without joining the group, and the topics that are `written`. It takes up
/// to 30 s.
///
/// # Errors
/// [`StreamError::Broker`] when nobody answers, for a wrong password or certificate, a topic that does not exist, and
/// for a topic or group that this user may not read or write. [`StreamError::Settings`] when librdkafka refuses the settings.
pub async fn describe(settings: &Settings, written: &[&str]) -> Result<Plan, StreamError> {
    let (settings, written) = (settings.clone(), written.iter().map(ToString::to_string).collect::<Vec<_>>());
    let asked = tokio::task::spawn_blocking(move || ask(&settings, &written)).await;
    asked.map_err(|_| StreamError::Broker {
        what: "the brokers".into(),
        reason: "the check was interrupted".into(),
        help: None,
    })?
}

fn ask(settings: &Settings, written: &[String]) -> Result<Plan, StreamError> {
    let listener = Listener { scrub: settings.scrubber(), errors: Arc::default() };
    let mut config = settings.consumer(0);
    // The end of a partition is an answer: whoever hears of it may read.
    config.set("enable.partition.eof", "true").set("statistics.interval.ms", "0").set("fetch.wait.max.ms", "20");
    let consumer: BaseConsumer<Listener> =
        config.create_with_context(listener.clone()).map_err(|error| settings.refused(&error))?;
    let metadata = metadata(&consumer, &listener, settings)?;
    let mut topics = wanted(&metadata, settings)?;
    check_written(&consumer, &metadata, written, settings)?;
    let partitions: Vec<TopicPartition> = topics.iter().flat_map(partitions_of).collect();
    let hints = Observer::new(settings)?.hints(&partitions)?;
    // Offsets show that the group may be described; joining it takes more.
    if permissions::of_group(&consumer, settings.group(), Operation::Read) == Some(false) {
        return Err(denied(format!("group {}", settings.group()), Code::GroupAuthorizationFailed, settings));
    }
    check_readable(&consumer, &listener, &mut topics, settings)?;
    count_messages(&consumer, &mut topics);
    Ok(Plan {
        brokers: metadata.brokers().iter().map(|broker| format!("{}:{}", broker.host(), broker.port())).collect(),
        begun: partitions.iter().zip(&hints).filter_map(begun).collect(),
        topics,
    })
}

/// The topic of a partition for which the group has an offset.
fn begun((partition, hint): (&TopicPartition, &Hint)) -> Option<Arc<str>> {
    matches!(hint, Hint::At { .. }).then(|| Arc::clone(&partition.topic))
}

/// What the group has committed. A broker that has just started does not know yet that it coordinates the group.
pub(super) fn committed<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    partitions: &[TopicPartition],
) -> KafkaResult<Vec<Hint>> {
    const PAUSE: Duration = Duration::from_millis(200);
    let end = Instant::now() + TIMEOUT;
    loop {
        match offsets::committed(consumer, partitions, TIMEOUT) {
            Ok(hints) => return Ok(hints),
            Err(error) if Instant::now() < end && is_passing(&error) => std::thread::sleep(PAUSE),
            Err(error) => return Err(error),
        }
    }
}

/// Whether a group's coordinator is about to be found.
fn is_passing(error: &KafkaError) -> bool {
    matches!(
        error.rdkafka_error_code(),
        Some(Code::NotCoordinator | Code::CoordinatorNotAvailable | Code::CoordinatorLoadInProgress)
    )
}

/// What the brokers know of a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offsets {
    /// What the group has committed.
    pub committed: Hint,
    /// The first offset, and that behind the last message; `None` where nobody could say.
    pub range: Option<(i64, i64)>,
}

/// Asks for the offsets of partitions without joining the group.
///
/// # Errors
/// As [`describe()`].
pub async fn offsets(
    settings: &Settings,
    partitions: &[TopicPartition],
) -> Result<BTreeMap<TopicPartition, Offsets>, StreamError> {
    let (settings, partitions) = (settings.clone(), partitions.to_vec());
    let asked = tokio::task::spawn_blocking(move || ask_offsets(&settings, &partitions)).await;
    asked.map_err(|_| StreamError::Broker {
        what: "the brokers".into(),
        reason: "the question was interrupted".into(),
        help: None,
    })?
}

fn ask_offsets(
    settings: &Settings,
    partitions: &[TopicPartition],
) -> Result<BTreeMap<TopicPartition, Offsets>, StreamError> {
    let listener = Listener { scrub: settings.scrubber(), errors: Arc::default() };
    let mut config = settings.consumer(0);
    config.set("statistics.interval.ms", "0");
    let consumer: BaseConsumer<Listener> =
        config.create_with_context(listener.clone()).map_err(|error| settings.refused(&error))?;
    let metadata = metadata(&consumer, &listener, settings)?;
    let known: HashSet<TopicPartition> = metadata.topics().iter().flat_map(all_partitions).collect();
    let hints = committed(&consumer, partitions)
        .map_err(|error| faults::offsets(format!("group {}", settings.group()), &error, &settings.scrubber()))?;
    let range = |partition: &TopicPartition| {
        let ask = || consumer.fetch_watermarks(&partition.topic, partition.partition, READABLE).ok();
        known.contains(partition).then(ask).flatten()
    };
    let all = partitions.iter().zip(hints);
    Ok(all.map(|(p, committed)| (p.clone(), Offsets { committed, range: range(p) })).collect())
}

fn partitions_of(topic: &Topic) -> impl Iterator<Item = TopicPartition> {
    let name: Arc<str> = topic.name.as_str().into();
    (0..topic.partitions)
        .filter_map(move |number| Some(TopicPartition::new(Arc::clone(&name), i32::try_from(number).ok()?)))
}

fn all_partitions(topic: &rdkafka::metadata::MetadataTopic) -> impl Iterator<Item = TopicPartition> {
    topic.partitions().iter().map(|partition| TopicPartition::new(topic.name(), partition.id()))
}

/// The metadata of the cluster. librdkafka tries for as long as it may, whatever the reason; a wrong password ends that.
fn metadata(
    consumer: &BaseConsumer<Listener>,
    listener: &Listener,
    settings: &Settings,
) -> Result<Metadata, StreamError> {
    const STEP: Duration = Duration::from_millis(500);
    /// A poll without a limit serves one event, which may be a message of the log.
    const SERVE: Duration = Duration::from_millis(20);
    let end = Instant::now() + TIMEOUT;
    loop {
        let result = consumer.fetch_metadata(None, STEP);
        // Serves the errors of connections.
        while consumer.poll(SERVE).is_some() {}
        let error = match result {
            Ok(metadata) => return Ok(metadata),
            Err(error) => error,
        };
        let heard = listener.errors.lock().clone();
        let decisive = heard.iter().find(|(code, _)| is_decisive(*code));
        if decisive.is_none() && Instant::now() < end {
            continue;
        }
        let what = format!("brokers {}", settings.brokers());
        return Err(match decisive.or(best(&heard)) {
            Some((code, reason)) => faults::broker(what, Some(*code), reason, &listener.scrub),
            None => faults::kafka(what, &error, &listener.scrub),
        });
    }
}

/// Whether trying again cannot help.
fn is_decisive(code: Code) -> bool {
    matches!(code, Code::Authentication | Code::SaslAuthenticationFailed | Code::SSL | Code::UnsupportedSASLMechanism)
}

/// "All brokers are down" says less than any other reason.
fn best(heard: &[(Code, String)]) -> Option<&(Code, String)> {
    heard.iter().rev().find(|(code, _)| *code != Code::AllBrokersDown).or(heard.last())
}

/// The topics that were asked for.
fn wanted(metadata: &Metadata, settings: &Settings) -> Result<Vec<Topic>, StreamError> {
    let all = metadata.topics().iter().map(|topic| topic.name());
    let mut names: BTreeSet<&str> = all.filter(|name| settings.is_of_pattern(name)).collect();
    for topic in settings.names() {
        let found = metadata.topics().iter().find(|found| found.name() == topic);
        let error = found.map_or(Some(Code::UnknownTopicOrPartition), |found| found.error().map(Code::from));
        if let Some(code) = error {
            return Err(denied(format!("topic {topic}"), code, settings));
        }
        names.insert(topic);
    }
    let topic = |found: &rdkafka::metadata::MetadataTopic| Topic {
        name: found.name().to_owned(),
        partitions: found.partitions().len(),
        readable: None,
        messages: 0,
    };
    let mut topics: Vec<Topic> =
        metadata.topics().iter().filter(|found| names.contains(found.name())).map(topic).collect();
    topics.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(topics)
}

/// Checks that the topics that are written exist, and that this user may write to them, as far as the brokers say.
fn check_written(
    consumer: &BaseConsumer<Listener>,
    metadata: &Metadata,
    written: &[String],
    settings: &Settings,
) -> Result<(), StreamError> {
    for topic in written {
        let refused = |code: Code, help: &str| {
            let (reason, help) = (settings.scrub(&code.to_string()), Some(help.to_owned()));
            Err(StreamError::Broker { what: format!("write to topic {topic}"), reason, help })
        };
        let found = metadata.topics().iter().find(|found| found.name() == topic);
        if let Some(code) = found.map_or(Some(Code::UnknownTopicOrPartition), |found| found.error().map(Code::from)) {
            return refused(
                code,
                "create the topic, or correct its name; brokers give the same answer when DESCRIBE on it is not granted",
            );
        }
        if permissions::of_topic(consumer, topic, Operation::Write) == Some(false) {
            return refused(Code::TopicAuthorizationFailed, "grant WRITE and DESCRIBE on the topic to this user");
        }
    }
    Ok(())
}

fn denied(what: String, code: Code, settings: &Settings) -> StreamError {
    faults::broker(what, Some(code), &code.to_string(), &settings.scrubber())
}

/// Reads from one partition of each topic until there is an answer.
fn check_readable(
    consumer: &BaseConsumer<Listener>,
    listener: &Listener,
    topics: &mut [Topic],
    settings: &Settings,
) -> Result<(), StreamError> {
    for topic in topics.iter_mut().filter(|topic| topic.partitions > 0) {
        listener.errors.lock().clear();
        let mut list = TopicPartitionList::new();
        let assigned = list.add_partition_offset(&topic.name, 0, Offset::End).and_then(|()| consumer.assign(&list));
        let end = Instant::now() + READABLE;
        while assigned.is_ok() && topic.readable.is_none() && Instant::now() < end {
            match consumer.poll(Duration::from_millis(50)) {
                Some(Ok(_) | Err(KafkaError::PartitionEOF(_))) => topic.readable = Some(true),
                Some(Err(error)) => refuse(&error, topic, settings)?,
                None => {}
            }
        }
        let _ = consumer.unassign();
    }
    Ok(())
}

fn refuse(error: &KafkaError, topic: &Topic, settings: &Settings) -> Result<(), StreamError> {
    match error.rdkafka_error_code() {
        Some(Code::TopicAuthorizationFailed | Code::UnknownTopicOrPartition) => {
            Err(faults::kafka(format!("topic {}", topic.name), error, &settings.scrubber()))
        }
        _ => Ok(()),
    }
}

/// How many messages there are, as far as the brokers answer: only for the plan that is shown.
fn count_messages(consumer: &BaseConsumer<Listener>, topics: &mut [Topic]) {
    const SECOND: Duration = Duration::from_secs(1);
    let end = Instant::now() + READABLE;
    for topic in topics {
        let partitions = partitions_of(topic).take_while(|_| Instant::now() < end);
        let count = |partition: TopicPartition| -> KafkaResult<u64> {
            let (low, high) = consumer.fetch_watermarks(&partition.topic, partition.partition, SECOND)?;
            Ok(u64::try_from(high - low).unwrap_or(0))
        };
        topic.messages = partitions.filter_map(|partition| count(partition).ok()).sum();
    }
}

/// Collects the errors of connections.
#[derive(Clone)]
struct Listener {
    scrub: Scrubber,
    errors: Arc<Mutex<Vec<(Code, String)>>>,
}

impl ClientContext for Listener {
    fn log(&self, _: RDKafkaLogLevel, facility: &str, message: &str) {
        tracing::debug!(target: "librdkafka", facility, "{}", self.scrub.scrub(message));
    }

    fn error(&self, error: KafkaError, reason: &str) {
        let code = error.rdkafka_error_code().unwrap_or(Code::Unknown);
        self.errors.lock().push((code, reason.to_owned()));
    }
}

impl ConsumerContext for Listener {}
