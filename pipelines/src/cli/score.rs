//! `elmo score`: its arguments. The job is in [`crate::bulk`], with the stage of [`crate::scores`].

use std::sync::Arc;

use clap::Args;
use elmo::{
    EmbedSpec, ModelData,
    lm_head::LmHeadError,
    spec::{Level, OnError, OnLong},
};

use super::{
    CommonArgs, EngineArgs, ModelArgs,
    args::{self, one_of, positive},
    bulk::{self, OutputArgs},
    inputs::InputArgs,
    reading::ReadingArgs,
};
use crate::{
    error::{Error, Exit, Result},
    scores::ScoreStage,
    stage::Stage,
    stores::Stores,
};

/// Score a text column of files by a language model and write Parquet files; the same command resumes an interrupted job
///
/// The columns perplexity, of a text, and surprisal, of its tokens, are those of elmo_perplexity and elmo_surprisal in SQL. A row of
/// several sentences has one perplexity, over the tokens and boundaries of all of them.
#[derive(Debug, Args)]
#[command(
    override_usage = "elmo score [OPTIONS] --output <DIR> [INPUT]...",
    after_help = "\
Examples:
  elmo score reviews.jsonl --output scores
  elmo score reviews.jsonl --level sentence --keep id --output perplexities
  elmo sql -c \"SELECT id FROM 'scores/*.parquet' ORDER BY perplexity['average'] LIMIT 10\"

The output has one row per input row, in the same order. The exit code is 6 if rows were rejected
or malformed, and 4 if the model has no LM head: published weights lack it."
)]
pub(super) struct ScoreArgs {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    input: InputArgs,

    #[command(flatten)]
    reading: ReadingArgs,

    /// The perplexity of each text (sentence), or also the surprisal of each token (token)
    #[arg(long, value_name = "LEVEL", default_value = "token", value_parser = one_of::<Level>(Level::WORDS), help_heading = "Scores")]
    level: Level,

    /// How to score sentences longer than --max-tokens
    ///
    /// window reads overlapping windows, truncate drops the rest and sets the column truncated, error rejects the row.
    #[arg(long, value_name = "WHAT", default_value = "window", value_parser = one_of::<OnLong>(OnLong::WORDS), help_heading = "Scores")]
    on_long: OnLong,

    /// Maximum tokens of a sentence
    #[arg(long, value_name = "N", default_value = "512", value_parser = positive, help_heading = "Scores")]
    max_tokens: usize,

    /// How to handle rows that cannot be scored
    ///
    /// fail ends the job, null writes NULL and the reason into the column error, skip drops and counts the row.
    #[arg(long, value_name = "WHAT", default_value = "fail", value_parser = one_of::<OnError>(OnError::WORDS), help_heading = "Scores")]
    on_error: OnError,

    #[command(flatten)]
    output: OutputArgs,

    #[command(flatten)]
    engine: EngineArgs,

    /// Maximum number of input rows to read and tokenise together; fewer rows use less memory
    #[arg(long, value_name = "N", default_value = "8192", value_parser = positive, help_heading = "Speed and devices", hide_short_help = true)]
    window_rows: usize,
}

pub(super) fn run(args: &ScoreArgs, common: &CommonArgs) -> Result<Exit> {
    let job = args.output.job(&args.input, args.window_rows, "elmo score reviews.jsonl --output scores")?;
    bulk::run(&job, &args.output, common, async |stores| args.stage(stores).await.map(Into::into))
}

impl ScoreArgs {
    async fn stage(&self, stores: &Stores) -> Result<Arc<dyn Stage>> {
        let data = args::open(&self.model.spec_of_job(), self.model.offline(), stores).await?;
        check_head(&data)?;
        let (level, on_error) = (self.level, self.on_error);
        let spec =
            EmbedSpec { level, on_error, on_long: self.on_long, max_tokens: self.max_tokens, ..EmbedSpec::default() };
        let spec = self.reading.spec(&data.options, spec)?;
        let elmo = self.engine.load(data).await?;
        let stage = tokio::task::spawn_blocking(move || ScoreStage::new(&elmo, &spec));
        let stage = stage.await.map_err(|e| Error::Failed(format!("loading the LM head failed: {e}")))??;
        Ok(stage)
    }
}

/// Before the weights are loaded, which takes longer.
fn check_head(data: &ModelData) -> elmo::Result<()> {
    match data.lm_head {
        Some(_) => Ok(()),
        None => Err(LmHeadError::Missing(data.name.clone()).into()),
    }
}
