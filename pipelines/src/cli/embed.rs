//! `elmo embed`: its arguments. The job is in [`crate::bulk`].

use std::{sync::Arc, time::Duration};

use clap::{ArgAction, Args, ValueHint, builder::BoolishValueParser};
use elmo::{
    ColumnEmbedder, EmbedSpec,
    spec::{
        FloatRounding, Level, ListType, Normalize, OnError, OnLong, Pooling, SentenceMode, StateMode, TokenizerKind,
    },
};

use super::{
    CommonArgs, EngineArgs, ModelArgs,
    args::{self, block_on, one_of, positive},
    inputs::InputArgs,
    mixes::{NamedMix, layers_of, read_mixes},
    print, print_json, shutdown,
};
#[cfg(feature = "cluster")]
use crate::models::{LazyModel, Warn};
use crate::{
    bulk::{self, BulkJob, BulkReport},
    error::{Error, Exit, Result},
    redact::redact,
    report::{bytes, count, table},
    sink::Codec,
    stage::{EmbedStage, Stage},
    stores::Stores,
};

/// Embed a text column of files and write Parquet files; the same command resumes an interrupted job
#[derive(Debug, Args)]
#[command(
    override_usage = "elmo embed [OPTIONS] --output <DIR> [INPUT]...",
    after_help = "\
Examples:
  elmo embed reviews.jsonl --output vectors
  elmo embed 'logs/*.csv.gz' --column message --limit 1000 --output trial
  elmo embed reviews.jsonl --level token --output tokens
  printf 'It rained.\\nWe stayed in.\\n' | elmo embed - --output lines

The output has one row per input row, in the same order. A job can be killed at any time: the same
command resumes it, and the resulting files are byte-identical. The exit code is 6 if rows
were rejected or malformed; rows whose text is NULL or blank are not rejected."
)]
pub(super) struct EmbedArgs {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    input: InputArgs,

    #[command(flatten)]
    vectors: VectorArgs,

    /// How to handle rows that cannot be embedded
    ///
    /// fail ends the job, null writes NULL and the reason into the column error, skip drops and counts the row.
    #[arg(long, value_name = "WHAT", default_value = "fail", value_parser = one_of::<OnError>(OnError::WORDS), help_heading = "Vectors")]
    on_error: OnError,

    /// Folder for the Parquet files, a path or URL
    #[arg(short, long, value_name = "DIR", value_hint = ValueHint::DirPath, help_heading = "Output")]
    output: Option<String>,

    /// Input rows per file [default: about 128 MiB of vectors]
    ///
    /// Files are durable as a whole, so this is the most work that a crash can lose.
    #[arg(long, value_name = "N", value_parser = positive, help_heading = "Output")]
    rows_per_file: Option<usize>,

    /// Size of a row group in MiB before compression
    ///
    /// Larger row groups compress better, smaller ones need less memory to read.
    #[arg(long, value_name = "N", default_value = "64", value_parser = positive, help_heading = "Output", hide_short_help = true)]
    row_group_mb: usize,

    /// Compression codec
    #[arg(long, value_name = "CODEC", default_value = "zstd", value_parser = one_of::<Codec>(Codec::WORDS), help_heading = "Output")]
    compression: Codec,

    /// Delete the output of an earlier job and start again
    ///
    /// --overwrite=false resumes, overriding the environment and elmo.toml.
    #[arg(long, value_name = "BOOL", action = ArgAction::Set, hide_possible_values = true, num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true", hide_default_value = true, value_parser = BoolishValueParser::new(), help_heading = "Output")]
    overwrite: bool,

    /// Before resuming, compare the SHA-256 of every file with the manifest, and rewrite damaged files
    ///
    /// Without it, only the sizes are compared.
    #[arg(long, help_heading = "Output")]
    check: bool,

    /// Read the inputs and print an estimate of rows, tokens, size and time; write nothing
    #[arg(short = 'n', long, help_heading = "Output")]
    dry_run: bool,

    /// Print the report as JSON
    #[arg(long, help_heading = "Output")]
    json: bool,

    #[command(flatten)]
    engine: EngineArgs,

    /// Embed on the cluster whose scheduler is at HOST or HOST:PORT [default: embed in this process]
    ///
    /// This process still reads the inputs and writes the output. Of the options for speed and devices, only
    /// --precision has an effect.
    #[cfg(feature = "cluster")]
    #[arg(long, value_name = "SCHEDULER", help_heading = "Speed and devices")]
    cluster: Option<crate::cluster::Address>,

    /// Maximum number of input rows to read and tokenise together; fewer rows use less memory
    ///
    /// It has no effect on the vectors. The windows of --on-long are parts of long sentences.
    #[arg(long, value_name = "N", default_value = "8192", value_parser = positive, help_heading = "Speed and devices", hide_short_help = true)]
    window_rows: usize,
}

/// Options that affect the vectors. All of them are part of the identity of an output.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Vectors")]
pub(super) struct VectorArgs {
    /// One vector per text (sentence), or one per token with byte offsets (token)
    #[arg(long, value_name = "LEVEL", default_value = "sentence", value_parser = one_of::<Level>(Level::WORDS))]
    level: Level,

    /// Layers: average, top, token, a number, all (concatenated), or a scalar mix, by its JSON file or its name
    ///
    /// A scalar mix looks like {"scalars": [-0.5, 1.2, 0.3], "gamma": 0.9, "layer_norm": false}, with one scalar per
    /// layer, the token layer first. The vector is gamma times the mean of the layers, weighted by the softmax of the
    /// scalars.
    #[arg(long, value_name = "LAYERS", default_value = "average")]
    layers: String,

    /// Name a scalar mix, for --layers NAME; may be repeated
    ///
    /// FILE is a JSON file as for --layers. elmo sql has the same option, so elmo.toml can name mixes for both.
    #[arg(long, value_name = "NAME=FILE")]
    add_mix: Vec<NamedMix>,

    /// How to combine the tokens of a text; ends concatenates the last forward and the first backward state
    #[arg(long, value_name = "POOLING", default_value = "mean", value_parser = one_of::<Pooling>(Pooling::WORDS))]
    pooling: Pooling,

    /// Tokenizer [default: the one that the model records, else moses]
    ///
    /// elmo train records the tokenizer of its text in options.json. The published English weights record none; they were
    /// trained with moses.
    #[arg(long, value_name = "TOKENIZER", value_parser = one_of::<TokenizerKind>(TokenizerKind::WORDS))]
    tokenizer: Option<TokenizerKind>,

    /// Split texts into sentences (split), or treat each text as one sentence (off) [default: as the model records, else split]
    #[arg(long, value_name = "MODE", value_parser = one_of::<SentenceMode>(SentenceMode::WORDS))]
    sentences: Option<SentenceMode>,

    /// Include the vectors of <S> and </S> at token level
    #[arg(long, hide_short_help = true)]
    boundaries: bool,

    /// Scale vectors to unit length (l2); with --layers all, each layer separately
    #[arg(long, value_name = "NORM", default_value = "off", value_parser = one_of::<Normalize>(Normalize::WORDS))]
    normalize: Normalize,

    /// LSTM state at the start of a sentence: zero, warm (a constant of the model) or carry (requires --batch-rows)
    /// [default: the one that the model records, else zero]
    ///
    /// elmo train records warm, with which the first words of a sentence have nearly the vectors that they have in running
    /// text. carry continues from the previous batch, as AllenNLP does, so vectors depend on the order of the rows.
    #[arg(long, value_name = "STATE", value_parser = one_of::<StateMode>(StateMode::WORDS), hide_short_help = true)]
    state: Option<StateMode>,

    /// Rows per batch with --state carry, where batches affect the vectors
    #[arg(long, value_name = "N", value_parser = positive, hide_short_help = true)]
    batch_rows: Option<usize>,

    /// How to embed sentences longer than --max-tokens
    ///
    /// window embeds overlapping windows, truncate drops the rest and sets the column truncated, error rejects the row.
    #[arg(long, value_name = "WHAT", default_value = "window", value_parser = one_of::<OnLong>(OnLong::WORDS))]
    on_long: OnLong,

    /// Maximum tokens of a sentence
    #[arg(long, value_name = "N", default_value = "512", value_parser = positive)]
    max_tokens: usize,

    /// Rounding of stored numbers; f16-rounded and bf16-rounded stay float32 and compress 2-3 times better
    #[arg(long, value_name = "FLOAT", default_value = "f32", value_parser = one_of::<FloatRounding>(FloatRounding::WORDS))]
    float: FloatRounding,

    /// Arrow type of a vector: fixed, or list for readers without fixed-size lists
    #[arg(long, value_name = "TYPE", default_value = "fixed", value_parser = one_of::<ListType>(ListType::WORDS), hide_short_help = true)]
    list_type: ListType,
}

/// The settings that were asked for. A model that records its tokenizer completes them.
#[derive(Debug, Clone)]
pub(super) struct Asked {
    spec: EmbedSpec,
    tokenizer: Option<TokenizerKind>,
    sentences: Option<SentenceMode>,
    state: Option<StateMode>,
}

impl Asked {
    /// The settings for a model.
    pub(super) fn for_model(&self, model: &elmo::ModelOptions) -> Result<EmbedSpec> {
        let recorded = model.spec();
        let spec = EmbedSpec {
            tokenizer: self.tokenizer.unwrap_or(recorded.tokenizer),
            sentences: self.sentences.unwrap_or(recorded.sentences),
            state: self.state.unwrap_or(recorded.state),
            ..self.spec.clone()
        };
        spec.check().map_err(elmo::Error::from)?;
        Ok(spec)
    }
}

impl VectorArgs {
    /// The settings of the embedder, with what happens to rows that cannot be embedded. Those that no model can have are
    /// errors here, before one is read.
    pub(super) fn asked(&self, on_error: OnError) -> Result<Asked> {
        let (tokenizer, sentences, state) = (self.tokenizer, self.sentences, self.state);
        let defaults = EmbedSpec::default();
        // The model may record that its texts are not cut, which state carry needs.
        let mode = if state == Some(StateMode::Carry) { SentenceMode::Off } else { defaults.sentences };
        let spec = EmbedSpec {
            level: self.level,
            layers: layers_of(&self.layers, &read_mixes(&self.add_mix)?)?,
            pooling: self.pooling,
            tokenizer: tokenizer.unwrap_or(defaults.tokenizer),
            sentences: sentences.unwrap_or(mode),
            boundaries: self.boundaries,
            normalize: self.normalize,
            state: state.unwrap_or(defaults.state),
            batch_rows: self.batch_rows,
            on_long: self.on_long,
            max_tokens: self.max_tokens,
            on_error,
            float: self.float,
            list_type: self.list_type,
        };
        spec.check().map_err(elmo::Error::from)?;
        Ok(Asked { spec, tokenizer, sentences, state })
    }
}

/// How long an interrupted job waits for devices: about the time of the largest published model for a batch on a few
/// cores.
const GRACE_PERIOD: Duration = Duration::from_secs(30);

pub(super) fn run(args: &EmbedArgs, common: &CommonArgs) -> Result<Exit> {
    let asked = args.vectors.asked(args.on_error)?;
    let job = args.job()?;
    let progress = common.progress();
    let outcome = block_on(async {
        let stop = shutdown::requested("the current rows are durable")?;
        let stores = Stores::from_env();
        let stage = args.stage(&asked, &stores).await?;
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
    // The job did not begin if there was an error before, or for a dry run.
    progress.finish();
    match outcome {
        Ok(None) => Ok(Exit::Done),
        Ok(Some(report)) => {
            let printed = if args.json { print_json(&report) } else { print(&text(&report)) };
            let rejected = report.counts.errors + report.counts.malformed;
            let exit = if rejected > 0 { Exit::Rejected } else { Exit::Done };
            match printed {
                // The reader of the report is gone, but the exit code still tells whether rows were rejected.
                Err(Error::BrokenPipe) => Ok(exit),
                printed => printed.map(|()| exit),
            }
        }
        Err(error @ Error::Interrupted { again: true, begun, .. }) => {
            let args = std::env::args_os().map(|arg| arg.to_string_lossy().into_owned());
            let command = shutdown::resume_command(args, job.overwrite && begun);
            // A redacted command would not work.
            if redact(&command) == command {
                super::logging::note(&format!("to resume: {command}"));
            }
            Err(error)
        }
        Err(error) => Err(error),
    }
}

impl EmbedArgs {
    /// The stage that embeds: a cluster, or the devices of this process.
    async fn stage(&self, asked: &Asked, stores: &Stores) -> Result<Arc<dyn Stage>> {
        #[cfg(feature = "cluster")]
        if let Some(address) = &self.cluster {
            let model = LazyModel {
                spec: self.model.spec_of_job(),
                offline: self.model.offline(),
                stores: stores.clone(),
                settings: self.engine.settings(),
                runtime: tokio::runtime::Handle::current(),
                warn: Warn::Never,
                read: std::sync::Mutex::default(),
            };
            let cluster = crate::cluster::Cluster::new(address.clone());
            let spec = |options: &elmo::ModelOptions| asked.for_model(options);
            return Ok(crate::cluster::ClusterStage::new(cluster, &model, asked.spec.state, spec).await?);
        }
        let data = args::open(&self.model.spec_of_job(), self.model.offline(), stores).await?;
        let spec = asked.for_model(&data.options)?;
        let elmo = self.engine.load(data).await?;
        let columns = ColumnEmbedder::new(&elmo, spec)?;
        let width = columns.width();
        Ok(EmbedStage::new(columns, width))
    }

    fn job(&self) -> Result<BulkJob> {
        let inputs = self.input.inputs()?;
        let help = "for example: elmo embed reviews.jsonl --output vectors; or set ELMO_OUTPUT, or output in elmo.toml";
        let output = self.output.clone().ok_or_else(|| Error::usage("no output was given", help))?;
        Ok(BulkJob {
            inputs,
            reading: self.input.reading(),
            limit: self.input.limit(),
            output,
            column: self.input.column.clone(),
            id: self.input.id.clone(),
            keep: self.input.keep.clone(),
            types: self.input.types,
            infer_rows: self.input.infer_rows,
            rows_per_file: self.rows_per_file.map(|rows| rows as u64),
            row_group_bytes: (self.row_group_mb as u64).saturating_mul(1 << 20),
            codec: self.compression,
            window_rows: self.window_rows,
            overwrite: self.overwrite,
            check: self.check,
            grace: GRACE_PERIOD,
        })
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
        ("malformed rows", counts.malformed),
        ("rows resumed", report.resumed_rows),
        ("files left out", report.files_left_out),
    ];
    rows.extend(more.into_iter().filter(|(_, n)| *n > 0).map(|(name, n)| (name, count(n))));
    rows.extend(report.malformed_rows.iter().map(|place| ("  at", place.clone())));
    if report.resumed_rows < counts.rows_in {
        let time = format!("{:.1} s, {} tokens/s", report.seconds, count(report.tokens_per_second as u64));
        rows.push(("time", time));
    }
    table(&rows)
}
