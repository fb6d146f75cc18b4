//! Settings of the consumer, and of producers for the same brokers: what the user gave, checked, over what we choose.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    ffi::OsString,
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use rdkafka::{
    ClientConfig,
    config::RDKafkaLogLevel,
    error::{KafkaError, RDKafkaErrorCode as Code},
};

use super::{faults, logs::Logs, names, pattern::Pattern, properties, scrub::Scrubber};
use crate::{redact::is_secret_key, stream::StreamError};

/// Settings that a stream needs as they are, and why nobody else may set them.
const OURS: [(&str, &str, &str); 6] = [
    (
        "topic.blacklist",
        "",
        "leave topics out by --topic: a pattern matches from the first character of a name, and may list names",
    ),
    ("enable.auto.commit", "false", COMMITS),
    ("auto.commit.enable", "", COMMITS),
    ("enable.auto.offset.store", "false", COMMITS),
    ("auto.commit.interval.ms", "", COMMITS),
    // A reset would skip messages or read them again, and nobody would know.
    (
        "auto.offset.reset",
        "error",
        "use --start for a new stream, and --on-gap for messages that the broker has deleted",
    ),
];
const COMMITS: &str = "a stream commits an offset when the rows before it are stored, not before";

/// Settings that are options of the command.
const OPTIONS: [(&str, &str); 3] =
    [("bootstrap.servers", "--brokers"), ("metadata.broker.list", "--brokers"), ("group.id", "--group")];

/// What we choose where the user does not.
const DEFAULTS: [(&str, &str); 5] = [
    ("client.id", "elmo"),
    // The default of librdkafka too, stated because a stream relies on it: messages of aborted transactions are not rows.
    ("isolation.level", "read_committed"),
    (STATISTICS, "1000"),
    // New partitions and topics are found after half a minute instead of five.
    ("topic.metadata.refresh.interval.ms", "30000"),
    ("socket.keepalive.enable", "true"),
];

/// How often librdkafka reports its state. It must not be never: the lag, and the end of `--once`, are seen in the reports.
const STATISTICS: &str = "statistics.interval.ms";

/// The environment variables of settings: `ELMO_KAFKA_SASL_PASSWORD` is `sasl.password`.
const PREFIX: &str = "ELMO_KAFKA_";
/// The variable of `--kafka-secrets`, which has the same prefix.
const OF_OPTION: &str = "ELMO_KAFKA_SECRETS";

/// Where a setting was given.
#[derive(Debug, Clone)]
enum Place {
    /// In the file of secrets, at this line.
    File(PathBuf, usize),
    Environment,
    /// By the option `-X` of this number.
    Option(usize),
}

impl Place {
    /// The error for a name that librdkafka does not have and that may be a secret: of a line that holds nothing else, or of
    /// a value in Base64 that ends in `=`.
    fn unnamed(&self, name: &str, error: &KafkaError) -> Option<StreamError> {
        let KafkaError::ClientConfig(_, reason, ..) = error else { return None };
        let is_meant = match self {
            Self::File(..) => false,
            Self::Environment => true,
            Self::Option(_) => names::looks_like_a_name(name),
        };
        if is_meant || !reason.starts_with("No such") || names::instead_of(name).is_some() {
            return None;
        }
        let message = format!("{self}: librdkafka has no such setting; it is not shown, as it may be a secret");
        Some(settings_error(message, "give KEY=VALUE, such as sasl.password=…".to_owned()))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path, line) => write!(f, "{}, line {line}", path.display()),
            Self::Environment => f.write_str("the environment"),
            Self::Option(number) => write!(f, "-X number {number}"),
        }
    }
}

/// Where a setting was given, its name, and its value.
type Setting = (Place, String, String);

/// What the user gave. Later sources override earlier ones: our defaults, the file of secrets, the environment, the
/// command line.
#[derive(Clone, Default)]
pub struct Given {
    /// `--brokers`.
    pub brokers: String,
    /// Every `--topic`: a name, or a pattern that begins with `^`.
    pub topics: Vec<String>,
    /// `--group`.
    pub group: String,
    /// `--kafka-secrets`.
    pub secrets: Option<PathBuf>,
    /// The environment; other variables than `ELMO_KAFKA_…` are ignored.
    pub environment: Vec<(OsString, OsString)>,
    /// Every `-X KEY=VALUE`, or `--kafka KEY=VALUE`.
    pub kafka: Vec<String>,
}

/// Checked settings. Neither `Debug` nor an error shows a secret.
#[derive(Clone)]
pub struct Settings {
    brokers: String,
    topics: Vec<String>,
    /// Those of the topics that are patterns.
    patterns: Vec<Pattern>,
    group: String,
    properties: BTreeMap<String, String>,
    registry: BTreeMap<String, String>,
    scrub: Scrubber,
}

impl Settings {
    /// Checks what the user gave, without a connection.
    ///
    /// # Errors
    /// [`StreamError::Settings`] for a name that librdkafka does not know, a value that it refuses, a setting that is
    /// ours, and for a file that cannot be read.
    pub fn new(given: Given) -> Result<Self, StreamError> {
        check_brokers(&given.brokers)?;
        check_option("--group", &given.group)?;
        let patterns = check_topics(&given.topics)?;
        let mut all = match &given.secrets {
            Some(path) => read_file(path)?,
            None => Vec::new(),
        };
        all.extend(read_environment(&given.environment)?);
        all.extend(read_pairs(&given.kafka)?);
        let places: BTreeMap<String, Place> =
            all.iter().map(|(place, name, _)| (name.clone(), place.clone())).collect();
        let (registry, properties): (BTreeMap<_, _>, BTreeMap<_, _>) =
            all.into_iter().map(|(_, name, value)| (name, value)).partition(|(name, _)| is_of_registry(name));
        let secrets = registry.iter().chain(&properties).filter(|(name, _)| is_secret_key(name));
        let scrub = Scrubber::new(secrets.map(|(_, value)| value.as_str()));
        let Given { brokers, topics, group, .. } = given;
        let settings = Self { brokers, topics, patterns, group, properties, registry, scrub };
        for (name, value) in &settings.properties {
            settings.check(name, value, places.get(name))?;
        }
        Ok(settings)
    }

    fn check(&self, name: &str, value: &str, place: Option<&Place>) -> Result<(), StreamError> {
        if let Some((_, option)) = OPTIONS.iter().find(|(ours, _)| *ours == name) {
            return Err(settings_error(format!("{name} is not a setting of -X"), format!("use {option}")));
        }
        if let Some((_, _, reason)) = OURS.iter().find(|(ours, ..)| *ours == name) {
            return Err(settings_error(format!("{name} cannot be set: {reason}"), None));
        }
        if name == STATISTICS && value.trim().parse() == Ok(0_u64) {
            let message = format!("{name} cannot be 0: the lag, and the end of --once, are seen in the statistics");
            return Err(settings_error(message, None));
        }
        match ClientConfig::new().set(name, value).create_native_config() {
            Ok(_) => Ok(()),
            Err(error) => {
                Err(place.and_then(|place| place.unnamed(name, &error)).unwrap_or_else(|| self.refused(&error)))
            }
        }
    }

    /// The error for settings that librdkafka refuses.
    pub(super) fn refused(&self, error: &KafkaError) -> StreamError {
        match error {
            KafkaError::ClientConfig(_, reason, name, _) if reason.starts_with("No such") => {
                settings_error(format!("librdkafka has no setting {name}"), names::instead_of(name))
            }
            KafkaError::ClientConfig(_, reason, name, value) if is_secret_key(name) && reason.contains(value) => {
                settings_error(format!("librdkafka refuses the value of {name}"), names::of_java(name))
            }
            KafkaError::ClientConfig(_, reason, name, _) => {
                let message = format!("librdkafka refuses {name}: {}", self.scrub.scrub(reason));
                settings_error(message, names::of_java(name))
            }
            // The files of certificates and keys are opened when a client is created.
            error => {
                let message = format!("librdkafka refuses the settings: {}", self.scrub.scrub(&error.to_string()));
                settings_error(message, "check the settings of -X, --kafka-secrets and ELMO_KAFKA_…".to_owned())
            }
        }
    }

    /// `--brokers`.
    pub fn brokers(&self) -> &str {
        &self.brokers
    }

    /// Topics and patterns.
    pub fn topics(&self) -> &[String] {
        &self.topics
    }

    /// Whether messages of this topic are read.
    pub fn reads(&self, topic: &str) -> bool {
        self.names().any(|name| name == topic) || self.is_of_pattern(topic)
    }

    /// Whether a pattern matches this topic.
    pub(super) fn is_of_pattern(&self, topic: &str) -> bool {
        self.patterns.iter().any(|pattern| pattern.matches(topic))
    }

    /// Those of the topics that are names, and not patterns.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.topics.iter().map(String::as_str).filter(|topic| !Pattern::is_pattern(topic))
    }

    /// What librdkafka, and the broker with `group.protocol=consumer`, are asked for: names and expressions, each once.
    pub(super) fn subscription(&self) -> Vec<&str> {
        let all: BTreeSet<&str> = self.names().chain(self.patterns.iter().map(Pattern::expression)).collect();
        all.into_iter().collect()
    }

    /// The topics that are read by their names.
    pub fn named_topics(&self) -> HashSet<Arc<str>> {
        self.names().map(Arc::from).collect()
    }

    /// The consumer group.
    pub fn group(&self) -> &str {
        &self.group
    }

    /// `group.instance.id`, if this process is a static member of the group.
    pub fn instance(&self) -> Option<&str> {
        self.get("group.instance.id")
    }

    /// A setting for librdkafka that the user gave.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.properties.get(name).map(String::as_str)
    }

    /// Settings for a schema registry, such as `basic.auth.user.info`; librdkafka does not have them.
    pub fn registry(&self) -> &BTreeMap<String, String> {
        &self.registry
    }

    /// `text` without the values of secret settings and without what looks like a secret.
    pub fn scrub(&self, text: &str) -> String {
        self.scrub.scrub(text)
    }

    pub(super) fn scrubber(&self) -> Scrubber {
        self.scrub.clone()
    }

    /// How long the group waits for a poll before it gives partitions away.
    pub(super) fn max_poll_interval(&self) -> Duration {
        const DEFAULT: u64 = 300_000;
        let given = self.get("max.poll.interval.ms").and_then(|value| value.parse().ok());
        Duration::from_millis(given.unwrap_or(DEFAULT))
    }

    pub(super) fn uses_consumer_protocol(&self) -> bool {
        self.get("group.protocol").is_some_and(|protocol| protocol.eq_ignore_ascii_case("consumer"))
    }

    /// The configuration of a consumer whose messages may take `memory` bytes.
    ///
    /// The group protocol is `classic` with `cooperative-sticky`, which all brokers since 2.4 have, and under which a
    /// partition that stays with its owner is not interrupted. `-X group.protocol=consumer` takes that of KIP-848, for
    /// brokers since 4.0: the broker assigns, and joins are faster.
    pub(super) fn consumer(&self, memory: usize) -> ClientConfig {
        let mut config = ClientConfig::new();
        set_all(&mut config, DEFAULTS);
        // Refused commits are warnings. Which messages are shown, the filter of the logs decides.
        if matches!(config.log_level, RDKafkaLogLevel::Error) {
            config.set_log_level(RDKafkaLogLevel::Warning);
        }
        if !self.uses_consumer_protocol() {
            config.set("partition.assignment.strategy", "cooperative-sticky");
        }
        fit_to_memory(&mut config, memory);
        set_all(&mut config, self.properties.iter().filter(|(name, _)| !names::is_of_producers(name)));
        set_all(
            &mut config,
            OURS.iter().filter(|(_, value, _)| !value.is_empty()).map(|(name, value, _)| (name, value)),
        );
        config.set("bootstrap.servers", &self.brokers).set("group.id", &self.group);
        config
    }

    /// The configuration of a producer for the same brokers.
    pub fn producer(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        set_all(&mut config, DEFAULTS.into_iter().filter(|(name, _)| !names::is_of_consumers(name)));
        set_all(&mut config, self.properties.iter().filter(|(name, _)| !names::is_of_consumers(name)));
        config.set("bootstrap.servers", &self.brokers);
        config
    }

    /// The context of a client with these settings that has no other.
    pub fn logs(&self) -> Logs {
        Logs::new(self.scrubber())
    }

    /// The error of a request of a producer with these settings.
    pub fn broker_error(&self, what: impl Into<String>, code: Option<Code>, reason: &str) -> StreamError {
        faults::broker(what, code, reason, &self.scrub)
    }
}

/// librdkafka fetches ahead of the thread. That may take a quarter of the memory again, and at least what one fetch
/// needs.
fn fit_to_memory(config: &mut ClientConfig, memory: usize) {
    const KIB: usize = 1024;
    /// librdkafka's own limit of what it fetches ahead.
    const MAX_KIB: usize = 64 * KIB;
    /// Its own size of a fetch.
    const MAX_FETCH_KIB: usize = 50 * KIB;
    let quarter = memory / KIB / 4;
    config.set("queued.max.messages.kbytes", quarter.clamp(KIB, MAX_KIB).to_string());
    config.set("fetch.max.bytes", (quarter.clamp(KIB, MAX_FETCH_KIB) * KIB).to_string());
    // A partition that is that far ahead is not fetched for a second by default, in which small messages run out.
    config.set("fetch.queue.backoff.ms", "10");
}

fn set_all(config: &mut ClientConfig, pairs: impl IntoIterator<Item = (impl ToString, impl ToString)>) {
    for (name, value) in pairs {
        config.set(name.to_string(), value.to_string());
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Settings");
        out.field("brokers", &self.scrub(&self.brokers)).field("topics", &self.topics).field("group", &self.group);
        out.field("properties", &self.shown(&self.properties)).field("registry", &self.shown(&self.registry)).finish()
    }
}

impl Settings {
    fn shown(&self, pairs: &BTreeMap<String, String>) -> BTreeMap<String, String> {
        let shown = |name: &str, value: &str| if is_secret_key(name) { "***".to_owned() } else { self.scrub(value) };
        pairs.iter().map(|(name, value)| (name.clone(), shown(name, value))).collect()
    }
}

impl fmt::Debug for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Given");
        out.field("topics", &self.topics).field("group", &self.group).finish_non_exhaustive()
    }
}

fn settings_error(message: String, help: impl Into<Option<String>>) -> StreamError {
    StreamError::Settings { message, help: help.into() }
}

fn check_option(option: &str, value: &str) -> Result<(), StreamError> {
    if value.trim().is_empty() {
        return Err(settings_error(format!("{option} is empty"), None));
    }
    if value.contains('\0') {
        return Err(settings_error(format!("{option} contains a NUL character"), None));
    }
    Ok(())
}

fn check_brokers(brokers: &str) -> Result<(), StreamError> {
    check_option("--brokers", brokers)?;
    // What librdkafka says of a broker would show it.
    if brokers.contains('@') {
        let help = "give sasl.username and sasl.password, in --kafka-secrets FILE or as ELMO_KAFKA_SASL_PASSWORD";
        let message = "--brokers has an @: an address of Kafka is HOST:PORT, without a user and a password";
        return Err(settings_error(message.to_owned(), help.to_owned()));
    }
    Ok(())
}

/// Returns the patterns among the topics.
fn check_topics(topics: &[String]) -> Result<Vec<Pattern>, StreamError> {
    if topics.is_empty() {
        return Err(settings_error("no topic to read".into(), "name one with --topic".to_owned()));
    }
    topics.iter().try_for_each(|topic| check_option("--topic", topic))?;
    topics.iter().filter(|topic| Pattern::is_pattern(topic)).map(|topic| Pattern::parse(topic)).collect()
}

/// A registry's settings have these beginnings in the files that vendors hand out.
fn is_of_registry(name: &str) -> bool {
    ["schema.registry.", "basic.auth.", "bearer.auth."].iter().any(|prefix| name.starts_with(prefix))
}

fn read_file(path: &Path) -> Result<Vec<Setting>, StreamError> {
    let bytes = std::fs::read(path)
        .map_err(|error| settings_error(format!("cannot read {}: {error}", path.display()), None))?;
    let text =
        String::from_utf8(bytes).map_err(|_| settings_error(format!("{} is not UTF-8", path.display()), None))?;
    let pairs = properties::parse(&text).map_err(|invalid| {
        let message = format!("{}, line {}: {}", path.display(), invalid.line, invalid.reason);
        settings_error(message, "the file holds KEY=VALUE lines, as Java's .properties files do".to_owned())
    })?;
    let place = |line| Place::File(path.to_path_buf(), line);
    Ok(pairs.into_iter().map(|(line, name, value)| (place(line), name, value)).collect())
}

fn read_environment(variables: &[(OsString, OsString)]) -> Result<Vec<Setting>, StreamError> {
    let mut pairs = Vec::new();
    for (variable, value) in variables {
        let Some((variable, rest)) = variable.to_str().and_then(|name| Some((name, name.strip_prefix(PREFIX)?))) else {
            continue;
        };
        // An empty variable counts as unset, as everywhere.
        if variable == OF_OPTION || value.is_empty() || is_of_service(rest) {
            continue;
        }
        let value = value.to_str().ok_or_else(|| settings_error(format!("{variable} is not UTF-8"), None))?;
        pairs.push((Place::Environment, rest.to_ascii_lowercase().replace('_', "."), value.to_owned()));
    }
    Ok(pairs)
}

/// Kubernetes sets such variables for a service called `elmo-kafka`.
fn is_of_service(rest: &str) -> bool {
    rest == "PORT" || ["SERVICE_HOST", "SERVICE_PORT", "PORT_"].iter().any(|prefix| rest.starts_with(prefix))
}

fn read_pairs(pairs: &[String]) -> Result<Vec<Setting>, StreamError> {
    let split = |(at, pair): (usize, &String)| match pair.split_once('=') {
        Some((name, value)) if !name.trim().is_empty() => {
            Ok((Place::Option(at + 1), name.trim().to_owned(), value.to_owned()))
        }
        // It may be a secret whose name was forgotten.
        _ => Err(settings_error(format!("-X number {} is not KEY=VALUE", at + 1), None)),
    };
    pairs.iter().enumerate().map(split).collect()
}
