//! `elmo eval`: its arguments. The work is in [`crate::train::eval()`].

use clap::Args;
use elmo::EmbedSpec;

use super::{
    CommonArgs, EngineArgs, ModelArgs, args::block_on, inputs::Files, print, print_json, reading::ReadingArgs,
};
use crate::{
    error::{Error, Exit, Result},
    stores::Stores,
    train::{EvalJob, eval},
};

/// Measure the perplexity of a text under a model with an LM head
///
/// Two figures, both over all words of the vocabulary: with states carried from sentence to sentence, as training measures
/// held-out text, and sentence by sentence, as elmo_perplexity scores in SQL. The text is read several times, so it cannot be
/// standard input.
#[derive(Debug, Args)]
#[command(
    override_usage = "elmo eval [OPTIONS] [INPUT]...",
    after_help = "\
Examples:
  elmo eval heldout.txt
  elmo eval --model books reviews.jsonl --tokenizer moses --json

Perplexities of different vocabularies are not comparable. The exit code is 6 if rows were left
out, and 4 if the model has no LM head: published weights lack it."
)]
pub(super) struct EvalArgs {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    files: Files,

    /// Column of texts, or of lists of tokens
    #[arg(long, value_name = "NAME", default_value = "text", help_heading = "Input")]
    column: String,

    /// Rows that are not text: fail ends the command, skip leaves them out and counts them
    #[arg(long, value_name = "WHAT", default_value = "fail", value_parser = ["fail", "skip"], help_heading = "Input")]
    on_error: String,

    #[command(flatten)]
    reading: ReadingArgs,

    /// Print the report as JSON
    #[arg(long, help_heading = "Output")]
    json: bool,

    #[command(flatten)]
    engine: EngineArgs,
}

pub(super) fn run(args: &EvalArgs, _: &CommonArgs) -> Result<Exit> {
    if args.files.0.is_empty() {
        return Err(Error::usage("no input was given", "for example: elmo eval --model trained heldout.txt"));
    }
    let report = block_on(async {
        let stores = Stores::from_env();
        let model = args.model.open(&stores).await?;
        let spec = args.reading.spec(&model.options, EmbedSpec::default())?;
        let job = EvalJob {
            inputs: args.files.0.clone(),
            column: args.column.clone(),
            skip_bad_rows: args.on_error == "skip",
            model,
            spec,
            engine: args.engine.settings(),
        };
        eval(job, &stores).await
    })?;
    match args.json {
        true => print_json(&report)?,
        false => print(&report.to_string())?,
    }
    Ok(if report.bad_rows > 0 { Exit::Rejected } else { Exit::Done })
}
