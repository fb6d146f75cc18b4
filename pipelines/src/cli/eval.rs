//! `elmo eval`: its arguments. The work is in [`crate::train::eval()`].

use std::{fs::File, io, sync::Arc};

use clap::Args;
use elmo::EmbedSpec;

use super::{
    CommonArgs, EngineArgs, ModelArgs, args::block_on, inputs::Files, print, print_json, processes,
    reading::ReadingArgs,
};
use crate::{
    error::{Error, Exit, Result},
    report::Progress,
    source::STDIN,
    stores::Stores,
    train::{EvalJob, eval},
};

/// Measure the perplexity of a text under a model with an LM head
///
/// Two figures, both over all words of the vocabulary: with states carried from sentence to sentence, as training measures
/// held-out text, and sentence by sentence, as elmo_perplexity scores in SQL. The text is read several times: standard input, whose
/// lines are texts, is copied to a temporary file first.
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

pub(super) fn run(args: &EvalArgs, common: &CommonArgs) -> Result<Exit> {
    if args.files.0.is_empty() {
        return Err(Error::usage("no input was given", "for example: elmo eval --model trained heldout.txt"));
    }
    processes::refuse("eval")?;
    let (inputs, _folder) = spooled(&args.files.0)?;
    let progress: Arc<dyn Progress> = common.progress().into();
    let report = block_on(async {
        let stores = Stores::from_env();
        let model = args.model.open(&stores).await?;
        let spec = args.reading.spec(&model.options, EmbedSpec::default())?;
        let job = EvalJob {
            inputs,
            column: args.column.clone(),
            skip_bad_rows: args.on_error == "skip",
            model,
            spec,
            engine: args.engine.settings(),
        };
        eval(job, &stores, Arc::clone(&progress)).await
    });
    progress.finish();
    let report = report?;
    match args.json {
        true => print_json(&report)?,
        false => print(&report.to_string())?,
    }
    Ok(if report.bad_rows > 0 { Exit::Rejected } else { Exit::Done })
}

/// The inputs with standard input as a file, and the folder in which it is.
fn spooled(inputs: &[String]) -> Result<(Vec<String>, Option<tempfile::TempDir>)> {
    if !inputs.iter().any(|input| input == STDIN) {
        return Ok((inputs.to_vec(), None));
    }
    let failed = |e: io::Error| Error::Failed(format!("standard input cannot be copied to a temporary file: {e}"));
    let folder = tempfile::tempdir().map_err(failed)?;
    let path = folder.path().join("standard-input.txt");
    File::create(&path).and_then(|mut file| io::copy(&mut io::stdin().lock(), &mut file)).map_err(failed)?;
    let path = path.to_string_lossy();
    let inputs = inputs.iter().map(|input| if input == STDIN { path.to_string() } else { input.clone() });
    Ok((inputs.collect(), Some(folder)))
}
