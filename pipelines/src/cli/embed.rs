//! `elmo embed`: the words; the job is in [`crate::bulk`].

use std::{fmt, path::Path, str::FromStr, sync::Arc, time::Duration};

use clap::{ArgAction, Args, ValueHint, builder::BoolishValueParser};
use elmo::{
    ColumnEmbedder, EmbedSpec,
    mix::ScalarMix,
    spec::{
        FloatRounding, Layers, Level, ListType, Normalize, OnError, OnLong, Pooling, SentenceMode, SpecError,
        StateMode, TokenizerKind,
    },
};

use super::{
    CommonArgs, EngineArgs, ModelArgs,
    args::{block_on, positive, words},
    print, print_json, shutdown,
};
#[cfg(feature = "cluster")]
use crate::models::LazyModel;
use crate::{
    bulk::{self, BulkJob, BulkReport},
    error::{Error, Exit, Result},
    redact::redact,
    report::{bytes, count, table},
    sink::Codec,
    source::{Keep, KeptTypes, STDIN},
    stage::{EmbedStage, Stage},
    stores::Stores,
};

/// Embed a text column of files into Parquet files with vectors; run it again and it goes on where it stopped
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo embed --model tiny --input reviews.jsonl --output vectors
  elmo embed --model tiny --input 'logs/*.csv.gz' --column message --output tokens --level token
  printf 'It rained.\\nWe stayed in.\\n' | elmo embed --model tiny --input - --output lines

Rows in are rows out, in the same order. Kill it at any time: the same command finishes the job,
and the files are the same to the byte. Exit code 6: done, but rows were rejected; a row whose
text is NULL or blank is none of those.")]
pub(super) struct EmbedArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// Files, folders, glob patterns, URLs, or - for lines on stdin; several times or several values
    ///
    /// .txt (a row per line), .csv (with a header line), .jsonl, .ndjson, .parquet, .arrow and .arrows, each also .gz or
    /// .zst.
    #[arg(short, long, required = true, num_args = 1.., value_name = "INPUT", value_hint = ValueHint::AnyPath, help_heading = "Input")]
    input: Vec<String>,

    /// Column to embed: strings, binary (UTF-8 is checked) or lists of tokens
    ///
    /// A list is one sentence, tokenised already; its byte offsets count in the tokens joined by single spaces.
    #[arg(long, value_name = "NAME", default_value = "text", help_heading = "Input")]
    column: String,

    /// Column that comes first in the output, whatever --keep says
    #[arg(long, value_name = "NAME", help_heading = "Input")]
    id: Option<String>,

    /// Other columns that go on to the output: names, all or none
    ///
    /// Columns of JSON files, and keys inside kept objects, that first appear after the first 1,000 rows are left out.
    #[arg(long, value_name = "COL,…|all|none", default_value = "all", value_parser = clap::value_parser!(Keep), help_heading = "Input")]
    keep: Keep,

    /// Types of kept CSV and JSON columns: guess from the first 1,000 rows what loses nothing, or string (as written)
    #[arg(long, value_name = "TYPES", default_value = "guess", value_parser = words::<KeptTypes>(KeptTypes::WORDS), help_heading = "Input")]
    types: KeptTypes,

    #[command(flatten)]
    vectors: VectorArgs,

    /// Folder for the Parquet files, path or URL
    #[arg(short, long, value_name = "DIR", value_hint = ValueHint::DirPath, help_heading = "Output")]
    output: String,

    /// Input rows of one file: what a crash may cost at the most, as a file is durable as a whole [default: so many
    /// that their vectors have about 128 MiB]
    #[arg(long, value_name = "N", value_parser = positive, help_heading = "Output")]
    rows_per_file: Option<usize>,

    /// Size of a row group in MiB before packing: larger packs better, smaller needs less memory to read
    #[arg(long, value_name = "N", default_value = "64", value_parser = positive, help_heading = "Output")]
    row_group_mb: usize,

    /// Packing: zstd, snappy, lz4 or none
    #[arg(long, value_name = "CODEC", default_value = "zstd", value_parser = words::<Codec>(Codec::WORDS), help_heading = "Output")]
    compression: Codec,

    /// Begin anew: remove what an earlier job left in the output; --overwrite=false goes on whatever settings say
    #[arg(long, value_name = "BOOL", action = ArgAction::Set, hide_possible_values = true, num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true", hide_default_value = true, value_parser = BoolishValueParser::new(), help_heading = "Output")]
    overwrite: bool,

    /// Before resuming, compare the SHA-256 of every file with the manifest, and write damaged files again; without it, only
    /// sizes are compared
    #[arg(long, help_heading = "Output")]
    check: bool,

    /// Read the inputs and say what would be done: rows, tokens, size, time; writes nothing
    #[arg(short = 'n', long, help_heading = "Output")]
    dry_run: bool,

    /// Print the report as JSON
    #[arg(long, help_heading = "Output")]
    json: bool,

    #[command(flatten)]
    engine: EngineArgs,

    /// Embed on the cluster of this scheduler, HOST:PORT; reading, writing and resuming stay here, and of the flags for
    /// speed and devices only --precision counts [default: this process]
    #[cfg(feature = "cluster")]
    #[arg(long, value_name = "SCHEDULER", help_heading = "Speed and devices")]
    cluster: Option<crate::cluster::Address>,

    /// Rows that are read and tokenised ahead at the most; fewer needs less memory
    #[arg(long, value_name = "N", default_value = "8192", value_parser = positive, help_heading = "Speed and devices")]
    window_rows: usize,
}

/// What decides the numbers. Everything here is part of an output's identity.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Vectors")]
pub(super) struct VectorArgs {
    /// One vector per text (sentence) or one per token with its byte offsets (token)
    #[arg(long, value_name = "LEVEL", default_value = "sentence", value_parser = words::<Level>(Level::WORDS))]
    level: Level,

    /// Layers: average, top, token, a number, all (one after the other), or the file of a scalar mix (mix.json)
    ///
    /// A mix is JSON: {"scalars": [-0.5, 1.2, 0.3], "gamma": 0.9, "layer_norm": false}, one scalar per layer, the token
    /// layer first. The vector is gamma times the layers, weighted by the softmax of the scalars.
    #[arg(long, value_name = "LAYERS", default_value = "average")]
    layers: LayersWord,

    /// Tokens to one vector: mean, max, first, last, or ends (the biLM's own two ends of a text)
    #[arg(long, value_name = "POOLING", default_value = "mean", value_parser = words::<Pooling>(Pooling::WORDS))]
    pooling: Pooling,

    /// Sentence to tokens: moses is what the published English weights were trained on
    #[arg(long, value_name = "TOKENIZER", default_value = "moses", value_parser = words::<TokenizerKind>(TokenizerKind::WORDS))]
    tokenizer: TokenizerKind,

    /// Cut texts into sentences (split), or take a text as one sentence (off)
    #[arg(long, value_name = "MODE", default_value = "split", value_parser = words::<SentenceMode>(SentenceMode::WORDS))]
    sentences: SentenceMode,

    /// Keep the vectors of <S> and </S> at token level
    #[arg(long)]
    boundaries: bool,

    /// Scale vectors to length 1 (l2); with --layers all, the part of each layer
    #[arg(long, value_name = "NORM", default_value = "off", value_parser = words::<Normalize>(Normalize::WORDS))]
    normalize: Normalize,

    /// Start state of a sentence: zero, warm (a constant of the model), or carry (AllenNLP's, needs --batch-rows)
    #[arg(long, value_name = "STATE", default_value = "zero", value_parser = words::<StateMode>(StateMode::WORDS))]
    state: StateMode,

    /// Rows of a batch in state carry, where the batch decides the result
    #[arg(long, value_name = "N", value_parser = positive)]
    batch_rows: Option<usize>,

    /// Sentences above --max-tokens: overlapping windows, truncate (said in a column), or error
    #[arg(long, value_name = "WHAT", default_value = "window", value_parser = words::<OnLong>(OnLong::WORDS))]
    on_long: OnLong,

    /// Longest sentence in tokens that the biLM reads at once
    #[arg(long, value_name = "N", default_value = "512", value_parser = positive)]
    max_tokens: usize,

    /// Rows that cannot be embedded: fail, null (reason in the column error), or skip (counted)
    #[arg(long, value_name = "WHAT", default_value = "fail", value_parser = words::<OnError>(OnError::WORDS))]
    on_error: OnError,

    /// Rounding of stored numbers: f16-rounded and bf16-rounded stay float32 and pack 2 to 3 times better
    #[arg(long, value_name = "FLOAT", default_value = "f32", value_parser = words::<FloatRounding>(FloatRounding::WORDS))]
    float: FloatRounding,

    /// Arrow type of a vector: fixed, or list for readers that know no fixed-size lists
    #[arg(long, value_name = "TYPE", default_value = "fixed", value_parser = words::<ListType>(ListType::WORDS))]
    list_type: ListType,
}

impl VectorArgs {
    /// The settings of the embedder.
    fn spec(&self) -> Result<EmbedSpec> {
        let spec = EmbedSpec {
            level: self.level,
            layers: layers_of(&self.layers.0)?,
            pooling: self.pooling,
            tokenizer: self.tokenizer,
            sentences: self.sentences,
            boundaries: self.boundaries,
            normalize: self.normalize,
            state: self.state,
            batch_rows: self.batch_rows,
            on_long: self.on_long,
            max_tokens: self.max_tokens,
            on_error: self.on_error,
            float: self.float,
            list_type: self.list_type,
        };
        spec.check().map_err(elmo::Error::from)?;
        Ok(spec)
    }
}

/// A word for layers, or the path of a mix: which of the two is seen when it is read.
#[derive(Debug, Clone)]
struct LayersWord(String);

impl FromStr for LayersWord {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        if is_mix_file(text) {
            return Ok(Self(text.to_owned()));
        }
        text.parse::<Layers>().map(|_| Self(text.to_owned()))
    }
}

impl fmt::Display for LayersWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Layers by their word, or by the file of a scalar mix.
pub(super) fn layers_of(text: &str) -> Result<Layers> {
    if !is_mix_file(text) {
        return text.parse().map_err(|e: SpecError| elmo::Error::from(e).into());
    }
    let help = "give the file of a scalar mix; README.md, \"Your own weights\", shows one";
    if std::fs::metadata(text).is_ok_and(|found| !found.is_file()) {
        return Err(Error::usage(format!("--layers {text}: not a file"), help));
    }
    let bytes = std::fs::read(text).map_err(|e| Error::usage(format!("--layers {text}: {e}"), help))?;
    ScalarMix::from_json(&bytes, text).map(Layers::Mix).map_err(|e| elmo::Error::from(e).into())
}

/// Whether `--layers` names a file rather than a word.
fn is_mix_file(text: &str) -> bool {
    Path::new(text).extension().is_some_and(|e| e.eq_ignore_ascii_case("json"))
}

/// How long the first Ctrl-C waits for devices: about as long as the largest published model has for a batch on a few
/// cores. A second one does not wait.
const GRACE: Duration = Duration::from_secs(30);

pub(super) fn run(args: &EmbedArgs, common: &CommonArgs) -> Result<Exit> {
    let spec = args.vectors.spec()?;
    let job = args.job();
    if job.inputs.iter().any(|input| input == STDIN) && job.inputs.len() > 1 {
        return Err(Error::usage("- (stdin) cannot be mixed with other inputs", "embed them in two jobs"));
    }
    let progress = common.progress();
    let outcome = block_on(async {
        let stop = shutdown::requested()?;
        let stores = Stores::from_env();
        let stage = args.stage(spec, &stores).await?;
        if args.dry_run {
            let plan = crate::bulk::dry_run::dry_run(&job, stage.as_ref(), &stores).await?;
            match args.json {
                true => print_json(&plan)?,
                false => print(&plan.to_string())?,
            }
            return Ok(None);
        }
        bulk::run(&job, stage.as_ref(), &stores, stop, progress.as_ref()).await.map(Some)
    });
    match outcome {
        Ok(None) => Ok(Exit::Done),
        Ok(Some(report)) => {
            let printed = if args.json { print_json(&report) } else { print(&text(&report)) };
            let exit = if report.counts.errors > 0 { Exit::Rejected } else { Exit::Done };
            match printed {
                // Nobody reads the report; what became of the rows, the exit code says nevertheless.
                Err(Error::BrokenPipe) => Ok(exit),
                printed => printed.map(|()| exit),
            }
        }
        Err(error @ Error::Interrupted { again: true, begun, .. }) => {
            let words = std::env::args_os().map(|word| word.to_string_lossy().into_owned());
            let command = shutdown::resume_command(words, job.overwrite && begun);
            // A command without its secrets would be another one.
            if redact(&command) == command {
                super::logging::note(&format!("to go on: {command}"));
            }
            Err(error)
        }
        Err(error) => Err(error),
    }
}

impl EmbedArgs {
    /// Who embeds: a cluster, or the devices of this process.
    async fn stage(&self, spec: EmbedSpec, stores: &Stores) -> Result<Arc<dyn Stage>> {
        #[cfg(feature = "cluster")]
        if let Some(address) = &self.cluster {
            let model = LazyModel {
                spec: self.model.spec()?,
                offline: self.model.offline(),
                stores: stores.clone(),
                settings: self.engine.settings(),
                runtime: tokio::runtime::Handle::current(),
                elsewhere: true,
                read: std::sync::Mutex::default(),
            };
            let cluster = crate::cluster::Cluster::new(address.clone());
            return Ok(crate::cluster::ClusterStage::new(cluster, &model, spec).await?);
        }
        let elmo = self.engine.load(self.model.open(stores).await?).await?;
        let columns = ColumnEmbedder::new(&elmo, spec)?;
        let width = columns.width();
        Ok(EmbedStage::new(columns, width))
    }

    fn job(&self) -> BulkJob {
        BulkJob {
            inputs: self.input.clone(),
            output: self.output.clone(),
            column: self.column.clone(),
            id: self.id.clone(),
            keep: self.keep.clone(),
            types: self.types,
            rows_per_file: self.rows_per_file.map(|rows| rows as u64),
            row_group_bytes: (self.row_group_mb as u64).saturating_mul(1 << 20),
            codec: self.compression,
            window_rows: self.window_rows,
            overwrite: self.overwrite,
            check: self.check,
            grace: GRACE,
        }
    }
}

fn text(report: &BulkReport) -> String {
    let counts = &report.counts;
    let mut rows = vec![
        ("output", report.output.clone()),
        ("files", format!("{}, {}", count(report.parts as u64), bytes(report.bytes))),
        ("rows in", count(counts.rows_in)),
        ("rows out", count(counts.rows_out)),
        ("tokens", count(counts.tokens)),
    ];
    let more = [
        ("NULL texts", counts.nulls),
        ("empty texts", counts.empty),
        ("truncated rows", counts.truncated),
        ("rows with an error", counts.errors),
        ("rows skipped", counts.skipped),
        ("rows done before", report.resumed_rows),
    ];
    rows.extend(more.into_iter().filter(|(_, n)| *n > 0).map(|(name, n)| (name, count(n))));
    if report.resumed_rows < counts.rows_in {
        let pace = format!("{:.1} s, {} tokens/s", report.seconds, count(report.tokens_per_second as u64));
        rows.push(("time", pace));
    }
    table(&rows)
}
