//! `elmo embed`: its arguments. The job is in [`crate::bulk`].

use std::sync::Arc;

use clap::Args;
use elmo::{
    ColumnEmbedder, EmbedSpec,
    spec::{
        FloatRounding, Level, ListType, Normalize, OnError, OnLong, Pooling, SentenceMode, StateMode, TokenizerKind,
    },
};

#[cfg(feature = "cluster")]
use super::cluster::CredentialArgs;
use super::{
    CommonArgs, EngineArgs, ModelArgs,
    args::{self, one_of, positive},
    bulk::{self, Computing, OutputArgs},
    inputs::InputArgs,
    mixes::{NamedMix, layers_of, read_mixes},
};
use crate::{
    bulk::BulkJob,
    error::{Exit, Result},
    stage::{EmbedStage, Stage},
    stores::Stores,
};
#[cfg(feature = "cluster")]
use crate::{
    bulk::Units,
    cluster::{Cluster, WorkerStage, Workers},
    models::{LazyModel, Warn},
    source::STDIN,
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
command resumes it, and on a CPU the resulting files are byte-identical. The exit code is 6 if rows
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

    #[command(flatten)]
    output: OutputArgs,

    #[command(flatten)]
    engine: EngineArgs,

    /// Embed on workers: HOST:PORT,HOST:PORT, dns:NAME:PORT, or a file with a HOST:PORT per line [default: in this process]
    ///
    /// They read the inputs and write the output, which they must reach by the same paths and URLs; standard input is read here. Of
    /// the options for speed and devices, only --precision has an effect.
    #[cfg(feature = "cluster")]
    #[arg(long, value_name = "WORKERS", help_heading = "Speed and devices")]
    cluster: Option<Workers>,

    #[cfg(feature = "cluster")]
    #[command(flatten)]
    credentials: CredentialArgs,

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
    /// `spec`, whose tokenizer, sentence mode and state a model completes where they are `None`.
    pub(super) fn new(
        spec: EmbedSpec,
        tokenizer: Option<TokenizerKind>,
        sentences: Option<SentenceMode>,
        state: Option<StateMode>,
    ) -> Self {
        Self { spec, tokenizer, sentences, state }
    }

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

pub(super) fn run(args: &EmbedArgs, common: &CommonArgs) -> Result<Exit> {
    let asked = args.vectors.asked(args.on_error)?;
    let job = args.output.job(&args.input, args.window_rows, "elmo embed reviews.jsonl --output vectors")?;
    bulk::run(&job, &args.output, common, async |stores| args.computing(&asked, &job, stores).await)
}

impl EmbedArgs {
    /// Who embeds: workers, or the devices of this process.
    async fn computing(&self, asked: &Asked, job: &BulkJob, stores: &Stores) -> Result<Computing> {
        #[cfg(feature = "cluster")]
        if let Some(workers) = &self.cluster {
            let model = LazyModel {
                spec: self.model.spec_of_job(),
                offline: self.model.offline(),
                stores: stores.clone(),
                settings: self.engine.settings(),
                runtime: tokio::runtime::Handle::current(),
                warn: Warn::Never,
                read: std::sync::Mutex::default(),
            };
            let cluster = Cluster::new(workers.clone(), &self.credentials.read()?)?;
            let spec = |options: &elmo::ModelOptions| asked.for_model(options);
            let stage = WorkerStage::new(&cluster, stores, &model, asked.spec.state, spec).await?;
            // Only this process can read it.
            let is_piped = job.inputs.iter().any(|input| input == STDIN);
            let units = (!is_piped).then(|| Arc::clone(&stage) as Arc<dyn Units>);
            return Ok(Computing { stage, units });
        }
        #[cfg(not(feature = "cluster"))]
        let _ = job;
        self.stage(asked, stores).await.map(Into::into)
    }

    async fn stage(&self, asked: &Asked, stores: &Stores) -> Result<Arc<dyn Stage>> {
        let data = args::open(&self.model.spec_of_job(), self.model.offline(), stores).await?;
        let spec = asked.for_model(&data.options)?;
        let elmo = self.engine.load(data).await?;
        let columns = ColumnEmbedder::new(&elmo, spec)?;
        let width = columns.width();
        Ok(EmbedStage::new(columns, width))
    }
}
