//! `elmo stream`: its arguments. The job is in [`crate::stream`].

use std::{env, fmt, net::SocketAddr, path::PathBuf, str::FromStr, sync::Arc, time::Duration};

use chrono::DateTime;
use clap::{
    Args, Subcommand, ValueHint,
    builder::{PossibleValuesParser, TypedValueParser},
    value_parser,
};
use elmo::{ColumnEmbedder, spec::OnError};

use super::{
    CommonArgs, EngineArgs, ModelArgs,
    args::{self, Bytes, block_on, one_of, positive},
    embed::{Asked, VectorArgs},
    print, print_json, shutdown,
};
use crate::{
    error::{Error, Exit, Result},
    report::{bytes, count, table},
    sink::Codec,
    stage::{EmbedStage, Stage},
    stores::Stores,
    stream::{
        self, Start, StreamJob, Streamed, Target, ValueEncoding,
        chain::Spill,
        decode::{AvroSchemas, Columns, DecodeSettings, Format, Keys, Pointer, RegistrySettings},
        rotation::Limits,
        source::{Given, Settings},
    },
};

/// How long a stream takes to stop: with the end of the process less than 25 s, and so less than the 30 s after which
/// Kubernetes kills a container.
const GRACE: Duration = Duration::from_secs(24);
/// Part of the memory up to which a complete file waits for the store in memory.
const SPILL_ABOVE: usize = 16;

/// Embed the messages of Kafka topics: each message once, into Parquet files or into another topic
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    after_help = "\
Examples:
  elmo stream --brokers kafka:9092 --topic reviews --group elmo --format json --text-path /body \\
      --output s3://bucket/reviews
  elmo stream --brokers kafka:9092 --topic '^reviews-.*' --group elmo --output reviews --once
  elmo stream --brokers kafka:9092 --topic reviews --group elmo --output-topic vectors
  elmo stream status --output s3://bucket/reviews --brokers kafka:9092

Each message is in the output once, in the order of the offsets, even if processes are killed or
started twice. The same command continues where the output ends. Start more processes with the same
command to share the partitions.",
    mut_arg("batch_rows", |rows| rows.hide_short_help(true).hide_long_help(true)),
    mut_arg("state", |state| state
        .help("LSTM state at the start of a sentence: zero or warm (a constant of the model) [default: the one that the model records, else zero]")
        .long_help("LSTM state at the start of a sentence: zero or warm (a constant of the model) [default: the one that the model records, else zero]

elmo train records warm, with which the first words of a sentence have nearly the vectors that they have in running text. carry, which elmo embed has too, would make a vector depend on the messages before it."))
)]
pub(super) struct StreamCommand {
    #[command(subcommand)]
    command: Option<Subcommands>,

    #[command(flatten)]
    stream: StreamArgs,
}

#[derive(Debug, Subcommand)]
enum Subcommands {
    Status(StatusArgs),
}

#[derive(Debug, Args)]
struct StreamArgs {
    #[command(flatten)]
    broker: BrokerArgs,

    #[command(flatten)]
    messages: MessageArgs,

    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    vectors: VectorArgs,

    #[command(flatten)]
    output: OutputArgs,

    #[command(flatten)]
    files: FileArgs,

    #[command(flatten)]
    operation: OperationArgs,

    #[command(flatten)]
    engine: EngineArgs,
}

/// Where the messages come from.
#[derive(Debug, Args)]
#[command(next_help_heading = "Kafka")]
struct BrokerArgs {
    /// Brokers to begin with, HOST:PORT separated by commas
    #[arg(long, value_name = "BROKERS", required = true)]
    brokers: Option<String>,

    /// Topics, or a pattern that begins with ^; repeat it for several
    ///
    /// A pattern matches the beginning of a name: ^reviews reads reviews and reviews-1, and ^reviews$ reads reviews alone. It
    /// may have . \. [a-z] [^0-9] (a|b) * + ? {2,5}, and matches no topic that begins with __. Quote it for the shell.
    ///
    /// Topics that match a pattern later, and partitions that are added later, are read from their first message.
    #[arg(long = "topic", value_name = "TOPIC", required = true)]
    topics: Vec<String>,

    /// Consumer group: processes of one group share the partitions
    #[arg(long, value_name = "GROUP", required = true)]
    group: Option<String>,

    /// Where a topic without output begins: earliest, latest, or a time such as 2026-11-22T08:00:00Z
    ///
    /// It has no effect on a partition that has output: the stream continues where the output ends.
    #[arg(long, value_name = "WHERE", default_value = "earliest", value_parser = start)]
    start: Start,

    /// What to do when the broker has deleted messages that are not in the output: fail, or skip them
    #[arg(long, value_name = "WHAT", default_value = "fail", value_parser = words::<stream::OnGap>(&["fail", "skip"]))]
    on_gap: stream::OnGap,

    /// A property of librdkafka, KEY=VALUE; repeat it for several
    ///
    /// For example -X group.protocol=consumer, or -X group.instance.id=a for restarts without a rebalance. Do not give
    /// passwords here, where other users of the machine see them: use --kafka-secrets or the environment, such as
    /// ELMO_KAFKA_SASL_PASSWORD.
    #[arg(short = 'X', long = "kafka", value_name = "KEY=VALUE")]
    kafka: Vec<String>,

    /// A file with properties of librdkafka, one KEY=VALUE per line, for passwords
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    kafka_secrets: Option<PathBuf>,
}

/// How messages are decoded.
#[derive(Debug, Args)]
#[command(next_help_heading = "Messages")]
struct MessageArgs {
    /// Format of the values: text, json or avro
    #[arg(long, value_name = "FORMAT", default_value = "text", value_parser = words::<Format>(&["text", "json", "avro"]))]
    format: Format,

    /// Where the text is in a JSON message or an Avro record, a JSON pointer [default: /text]
    #[arg(long, value_name = "POINTER", value_parser = Pointer::parse)]
    text_path: Option<Pointer>,

    /// Columns from other fields, NAME=/POINTER:TYPE separated by commas; or all, as one column of JSON
    ///
    /// Types: string, int64, int32, float64, float32, bool, timestamp, date, json. A comma in a pointer is written \, and
    /// a backslash before a comma \\.
    #[arg(long, value_name = "COLUMNS")]
    columns: Option<Columns>,

    /// Do not write the text into a column
    #[arg(long)]
    drop_text: bool,

    /// Write the key of each message into the column _key: none, binary or text
    #[arg(long, value_name = "TYPE", value_parser = words::<Keys>(&["none", "binary", "text"]), default_value = "none", hide_default_value = true)]
    keep_key: Keys,

    /// Write the headers of each message into the column _headers
    #[arg(long)]
    keep_headers: bool,

    /// URL of the schema registry, for Avro messages that begin with the id of their schema
    ///
    /// The setting basic.auth.user.info holds user:password, if it asks for them: in --kafka-secrets, or in the
    /// environment as ELMO_KAFKA_BASIC_AUTH_USER_INFO.
    #[arg(long, value_name = "URL", conflicts_with = "avro_schema")]
    schema_registry: Option<String>,

    /// File with the schema of all messages, for Avro messages without an id
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    avro_schema: Option<PathBuf>,

    /// With --avro-schema, messages begin with the fingerprint of the schema (Avro's single-object encoding)
    #[arg(long, requires = "avro_schema")]
    avro_single_object: bool,

    /// Longer texts are handled by --on-error
    #[arg(long, value_name = "SIZE", default_value = "8MB")]
    max_text: Bytes,

    /// What to do with a message that cannot be decoded or embedded: null, skip, fail or dead-letter
    ///
    /// null writes a row without a vector and the reason into the column error, skip leaves the message out and counts
    /// it, fail stops the stream before it, dead-letter sends it to --dead-letter-topic.
    #[arg(long, value_name = "WHAT", default_value = "null", value_parser = words::<stream::OnError>(&["null", "skip", "fail", "dead-letter"]))]
    on_error: stream::OnError,

    /// Topic for messages that cannot be decoded or embedded, with --on-error dead-letter
    #[arg(long, value_name = "TOPIC")]
    dead_letter_topic: Option<String>,
}

/// Where the vectors go.
#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
struct OutputArgs {
    /// Folder for the Parquet files, a path or URL
    #[arg(short, long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    output: Option<String>,

    /// Begin anew beside the output of earlier generations
    #[arg(long, value_name = "N", default_value = "1", value_parser = positive, conflicts_with = "output_topic")]
    generation: usize,

    /// Topic for the enriched messages, instead of files
    #[arg(long, value_name = "TOPIC", conflicts_with = "output")]
    output_topic: Option<String>,

    /// Values of enriched messages: json, raw (little-endian floats) or arrow (an IPC stream)
    #[arg(long, value_name = "ENCODING", default_value = "json", value_parser = words::<ValueEncoding>(ValueEncoding::WORDS), conflicts_with = "output")]
    encoding: ValueEncoding,

    /// How long rows may wait for others before a transaction is committed; files have --max-age and --idle
    #[arg(long, value_name = "TIME", default_value = "1s", conflicts_with = "output")]
    max_wait: Span,
}

/// When a file is complete. Each partition has one open file.
#[derive(Debug, Args)]
#[command(next_help_heading = "Files")]
struct FileArgs {
    /// Rows of a file [default: no limit]
    #[arg(long, value_name = "N", value_parser = positive, conflicts_with = "output_topic")]
    rows_per_file: Option<usize>,

    /// Size of a file in MiB, at most 4096: a file is sent in one request, and S3 takes 5 GiB
    #[arg(long, value_name = "N", default_value = "128", value_parser = value_parser!(u64).range(1..=4096), conflicts_with = "output_topic")]
    mb_per_file: u64,

    /// Time from the first row of a file until it is complete, at most; it is then published
    #[arg(long, value_name = "TIME", default_value = "5m", conflicts_with = "output_topic")]
    max_age: Span,

    /// Publish a file when no message has come for this time [default: --max-age]
    #[arg(long, value_name = "TIME", conflicts_with = "output_topic")]
    idle: Option<Span>,

    /// Size of a row group in MiB before compression
    #[arg(long, value_name = "N", default_value = "64", value_parser = positive, hide_short_help = true, conflicts_with = "output_topic")]
    row_group_mb: usize,

    /// Compression codec
    #[arg(long, value_name = "CODEC", default_value = "zstd", value_parser = one_of::<Codec>(Codec::WORDS), hide_short_help = true, conflicts_with = "output_topic")]
    compression: Codec,

    /// Folder for complete files that wait for the store, above a part of --memory-limit [default: the temporary folder]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, hide_short_help = true, conflicts_with = "output_topic")]
    spill_dir: Option<PathBuf>,
}

/// How the process runs.
#[derive(Debug, Args)]
#[command(next_help_heading = "Operation")]
struct OperationArgs {
    /// Stop when everything that was in the partitions when they were assigned is written
    #[arg(long)]
    once: bool,

    /// Check the brokers, the topics, the permissions, the store and the model, print the plan, and stop
    #[arg(short = 'n', long)]
    dry_run: bool,

    /// Serve /metrics (Prometheus), /livez and /readyz on this address, for example 0.0.0.0:9100
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<SocketAddr>,

    /// Memory for messages, vectors and files in flight; above it, partitions are paused
    #[arg(long, value_name = "SIZE", default_value = "1GB")]
    memory_limit: Bytes,

    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

/// Show for each partition where its output ends, and how far behind it is
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo stream status --output s3://bucket/reviews
  elmo stream status --output s3://bucket/reviews --brokers kafka:9092 --group elmo --json")]
struct StatusArgs {
    /// The output folder, a path or URL
    #[arg(short, long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    output: String,

    /// The generation to show
    #[arg(long, value_name = "N", default_value = "1", value_parser = positive)]
    generation: usize,

    /// Brokers, to compare with the topics
    #[arg(long, value_name = "BROKERS")]
    brokers: Option<String>,

    /// Consumer group, to compare with its offsets; requires --brokers
    #[arg(long, value_name = "GROUP", requires = "brokers")]
    group: Option<String>,

    /// A property of librdkafka, KEY=VALUE; repeat it for several
    #[arg(short = 'X', long = "kafka", value_name = "KEY=VALUE")]
    kafka: Vec<String>,

    /// A file with properties of librdkafka, one KEY=VALUE per line, for passwords
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    kafka_secrets: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A duration, parsed from a number and a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span(Duration);

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let unit = match &text[digits..] {
            "ms" => Duration::from_millis(1),
            "s" => Duration::from_secs(1),
            "m" => Duration::from_secs(60),
            "h" => Duration::from_secs(3600),
            _ => return Err("it must be a whole number and a unit: ms, s, m or h".to_owned()),
        };
        let span = text[..digits].parse::<u32>().ok().and_then(|number| unit.checked_mul(number));
        span.filter(|span| !span.is_zero()).map(Self).ok_or_else(|| "it must be from 1ms to some years".to_owned())
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

/// Parses the value of `--start`.
fn start(text: &str) -> Result<Start, String> {
    match text {
        "earliest" => Ok(Start::Beginning),
        "latest" => Ok(Start::End),
        time => {
            DateTime::parse_from_rfc3339(time).map(|time| Start::Timestamp(time.timestamp_millis())).map_err(|_| {
                "it must be earliest, latest or a time with its zone, such as 2026-11-22T08:00:00Z".to_owned()
            })
        }
    }
}

/// A parser for one of the values `legal`, which help, completions and errors list.
fn words<T>(legal: &'static [&'static str]) -> impl TypedValueParser<Value = T>
where
    T: FromStr + Clone + Send + Sync + 'static,
    T::Err: Into<Box<dyn std::error::Error + Send + Sync + 'static>>,
{
    PossibleValuesParser::new(legal).try_map(|value| value.parse::<T>())
}

pub(super) fn run(command: &StreamCommand, common: &CommonArgs) -> Result<Exit> {
    match &command.command {
        Some(Subcommands::Status(args)) => status(args),
        None => stream(&command.stream, common),
    }
}

fn stream(args: &StreamArgs, _: &CommonArgs) -> Result<Exit> {
    let asked = args.vectors.asked(OnError::Null)?;
    let streamed = block_on(async {
        let stop = shutdown::requested("the current rows are durable")?;
        let stores = Stores::from_env();
        let job = args.job(&stores)?;
        job.check()?;
        let stage = args.stage(asked, &stores);
        if args.operation.dry_run {
            let plan = stream::dry_run(&job, stage.await?.as_ref()).await?;
            match args.operation.json {
                true => print_json(&plan)?,
                false => print(&plan.to_string())?,
            }
            return Ok(None);
        }
        stream::run(job, stage, stop).await.map(Some)
    })?;
    let Some(streamed) = streamed else { return Ok(Exit::Done) };
    if args.operation.json {
        print_json(&streamed)?
    } else {
        print(&text(&streamed))?
    }
    Ok(if streamed.complete { Exit::Done } else { Exit::Interrupted })
}

fn status(args: &StatusArgs) -> Result<Exit> {
    let kafka = args.settings()?;
    let found = block_on(async {
        let output = Stores::from_env().locate(&args.output)?;
        let generation = u32::try_from(args.generation).unwrap_or(u32::MAX);
        stream::status(&output, generation, kafka.as_ref()).await
    })?;
    if args.json {
        print_json(&found)?
    } else {
        print(&found.to_string())?
    }
    Ok(Exit::Done)
}

impl StatusArgs {
    /// The settings for the brokers, if there are any.
    fn settings(&self) -> Result<Option<Settings>> {
        let Some(brokers) = self.brokers.clone() else { return Ok(None) };
        let given = Given {
            brokers,
            // The topics are those of the output.
            topics: vec!["^.*".to_owned()],
            group: self.group.clone().unwrap_or_else(|| "elmo-status".to_owned()),
            secrets: self.kafka_secrets.clone(),
            environment: env::vars_os().collect(),
            kafka: self.kafka.clone(),
        };
        Ok(Some(Settings::new(given)?))
    }
}

impl StreamArgs {
    /// Loads the model.
    async fn stage(&self, asked: Asked, stores: &Stores) -> Result<Arc<dyn Stage>> {
        let data = args::open(&self.model.spec_of_job(), self.model.offline(), stores).await?;
        let spec = asked.for_model(&data.options)?;
        let elmo = self.engine.load(data).await?;
        let columns = ColumnEmbedder::new(&elmo, spec)?;
        let width = columns.width();
        let stage: Arc<dyn Stage> = EmbedStage::new(columns, width);
        Ok(stage)
    }

    fn job(&self, stores: &Stores) -> Result<StreamJob> {
        let kafka = self.broker.settings()?;
        Ok(StreamJob {
            decode: self.messages.decode(&kafka)?,
            kafka,
            on_error: self.messages.on_error,
            dead_letter_topic: self.messages.dead_letter_topic.clone(),
            start: self.broker.start,
            on_gap: self.broker.on_gap,
            target: self.target(stores)?,
            once: self.operation.once,
            metrics: self.operation.metrics,
            memory_limit: self.operation.memory_limit.0.get(),
            grace: GRACE,
        })
    }

    fn target(&self, stores: &Stores) -> Result<Target> {
        match (&self.output.output, &self.output.output_topic) {
            (Some(output), None) => {
                let output = stores.locate(output)?;
                let spill = self.files.spill(self.operation.memory_limit.0.get() / SPILL_ABOVE);
                Ok(Target::Files {
                    output,
                    generation: u32::try_from(self.output.generation).unwrap_or(u32::MAX),
                    limits: self.files.limits(),
                    row_group_bytes: (self.files.row_group_mb as u64).saturating_mul(1 << 20),
                    codec: self.files.compression,
                    spill,
                })
            }
            (None, Some(topic)) => Ok(Target::Topic {
                topic: topic.clone(),
                encoding: self.output.encoding,
                max_wait: self.output.max_wait.0,
            }),
            (Some(_), Some(_)) => Err(Error::usage(
                "--output and --output-topic cannot be used together, since no transaction spans both",
                "run two streams with two groups",
            )),
            (None, None) => Err(Error::usage("no output was given", "give --output DIR or --output-topic TOPIC")),
        }
    }
}

impl BrokerArgs {
    fn settings(&self) -> Result<Settings> {
        Ok(Settings::new(Given {
            brokers: self.brokers.clone().unwrap_or_default(),
            topics: self.topics.clone(),
            group: self.group.clone().unwrap_or_default(),
            secrets: self.kafka_secrets.clone(),
            environment: env::vars_os().collect(),
            kafka: self.kafka.clone(),
        })?)
    }
}

impl MessageArgs {
    fn decode(&self, kafka: &Settings) -> Result<DecodeSettings> {
        let schemas = match (&self.schema_registry, &self.avro_schema) {
            (Some(url), _) => {
                let user_info = kafka.registry().get("basic.auth.user.info").cloned();
                Some(AvroSchemas::Registry(RegistrySettings { url: url.clone(), user_info }))
            }
            (None, Some(file)) if self.avro_single_object => Some(AvroSchemas::SingleObject(file.clone())),
            (None, Some(file)) => Some(AvroSchemas::Raw(file.clone())),
            (None, None) => None,
        };
        let settings = DecodeSettings {
            format: self.format,
            text_path: self.text_path.clone(),
            columns: self.columns.clone().unwrap_or_default(),
            keep_text: !self.drop_text,
            keys: self.keep_key,
            headers: self.keep_headers,
            max_text_bytes: self.max_text.0.get(),
            schemas,
        };
        settings.check()?;
        Ok(settings)
    }
}

impl FileArgs {
    /// Where large files wait. A container may have no temporary folder: then they wait in memory.
    fn spill(&self, above: usize) -> Spill {
        if let Some(folder) = &self.spill_dir {
            return Spill { folder: Some(folder.clone()), above };
        }
        let spill = Spill { folder: Some(env::temp_dir()), above };
        match spill.check() {
            Ok(()) => spill,
            Err(error) => {
                tracing::warn!(%error, "files that wait for the store stay in memory; --spill-dir names another folder");
                Spill { folder: None, above }
            }
        }
    }

    fn limits(&self) -> Limits {
        Limits {
            rows: self.rows_per_file.map_or(u64::MAX, |rows| rows as u64),
            bytes: self.mb_per_file << 20,
            max_age: self.max_age.0,
            idle: self.idle.map(|idle| idle.0),
        }
    }
}

fn text(streamed: &Streamed) -> String {
    let report = &streamed.report;
    let mut rows = vec![
        ("messages", count(report.messages)),
        ("rows", count(report.rows)),
        ("files", format!("{}, {}", count(report.files), bytes(report.bytes))),
    ];
    rows.extend(report.rejected.iter().map(|(label, number)| (*label, count(*number))));
    if !streamed.complete {
        rows.push(("incomplete", "some rows were not published in time; the same command reads them again".to_owned()));
    }
    table(&rows)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// 2026-11-22T08:00:00Z is 1,795,334,400 s after 1970 (`date -u -d … +%s`).
    #[test]
    fn a_start_is_a_word_or_a_time() {
        assert_eq!(start("earliest"), Ok(Start::Beginning));
        assert_eq!(start("latest"), Ok(Start::End));
        assert_eq!(start("2026-11-22T08:00:00Z"), Ok(Start::Timestamp(1_795_334_400_000)));
        assert_eq!(start("2026-11-22T09:00:00.5+01:00"), Ok(Start::Timestamp(1_795_334_400_500)));
        for wrong in ["", "first", "2026-11-22", "2026-11-22T08:00:00", "1795334400"] {
            assert!(start(wrong).is_err(), "{wrong}");
        }
    }

    /// What clap says about a command line; empty if it is accepted.
    fn refusal(line: &str) -> String {
        let command = crate::cli::Cli::command();
        command.try_get_matches_from(line.split_whitespace()).err().map(|e| e.to_string()).unwrap_or_default()
    }

    #[test]
    fn an_option_of_the_other_output_is_refused() {
        let files = ["--generation 2", "--rows-per-file 5", "--mb-per-file 5", "--max-age 1h", "--idle 1s"];
        let hidden = ["--row-group-mb 5", "--compression none", "--spill-dir a"];
        let topic = ["--encoding raw", "--max-wait 3s"];
        let begin = "elmo stream --brokers a --topic b --group c";
        for option in files.iter().chain(&hidden) {
            assert_eq!(refusal(&format!("{begin} --output d {option}")), "");
            assert!(refusal(&format!("{begin} --output-topic d {option}")).contains("cannot be used with"), "{option}");
        }
        for option in topic {
            assert_eq!(refusal(&format!("{begin} --output-topic d {option}")), "");
            assert!(refusal(&format!("{begin} --output d {option}")).contains("cannot be used with"), "{option}");
        }
    }

    /// The command of examples/stream/compose.yml, a folded block: lines that are indented more than its key.
    #[test]
    fn the_command_of_the_example_is_accepted() {
        let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("..");
        let text = std::fs::read_to_string(root.join("examples/stream/compose.yml")).unwrap();
        let (_, rest) = text.split_once("    command: >-\n      elmo stream").unwrap();
        let (first, more) = rest.split_once('\n').unwrap();
        let more: Vec<&str> = more.lines().take_while(|line| line.starts_with("      ")).collect();
        assert_eq!(refusal(&format!("elmo stream {first} {}", more.join(" "))), "");
    }

    #[test]
    fn times_have_units() {
        let time = |text: &str| text.parse::<Span>().map(|span| span.0).ok();
        assert_eq!(time("250ms"), Some(Duration::from_millis(250)));
        assert_eq!(time("5m"), Some(Duration::from_secs(300)));
        assert_eq!(time("2h"), Some(Duration::from_secs(7200)));
        for wrong in ["", "5", "0s", "-1s", "1d", "1.5s", "99999999999s"] {
            assert_eq!(time(wrong), None, "{wrong}");
        }
    }
}
