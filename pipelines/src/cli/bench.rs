//! `elmo bench`: its arguments; the measurement is in [`crate::diagnose::bench`].

use clap::{Args, ValueHint};

use super::{
    EngineArgs, ModelArgs,
    args::{block_on, positive, words},
    print, print_json,
};
use crate::{
    diagnose::{
        bench::{self, Bench},
        sizes::Size,
    },
    error::{Exit, Result},
    stores::Stores,
};

/// Measure tokens/s, padding, cache hits and GFLOP/s, and the share of what this machine's matrix products reach
///
/// The ceiling is measured in the same run with the same libtorch, on the shapes of the model, so that the share can be
/// compared between machines. Speed does not depend on the weights: --size makes random ones of a published size.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo bench --size tiny --seconds 2
  elmo bench --model tiny --text reviews.jsonl --seconds 2 --json")]
pub(super) struct BenchArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// Seeded random weights of a published size instead of a model [default: small, when no model is given]
    #[arg(long, value_name = "SIZE", value_parser = words::<Size>(Size::WORDS), help_heading = "Model", conflicts_with_all = ["model", "options", "weights"])]
    size: Option<Size>,

    /// Text to embed: the column text of a file or URL that elmo embed reads [default: built-in English text]
    #[arg(long, value_name = "URL", value_hint = ValueHint::FilePath, help_heading = "Measurement")]
    text: Option<String>,

    /// Seconds to measure after warming up; longer is steadier
    #[arg(long, value_name = "N", default_value = "10", value_parser = positive, help_heading = "Measurement")]
    seconds: usize,

    /// Also measure what each saving of the engine is worth: one batch with it and without it, on the CPU
    #[arg(long, help_heading = "Measurement")]
    savings: bool,

    /// Print the report as JSON
    #[arg(long, help_heading = "Measurement")]
    json: bool,

    #[command(flatten)]
    engine: EngineArgs,
}

pub(super) fn run(args: &BenchArgs) -> Result<Exit> {
    let report = block_on(async {
        let data = match (args.size, args.model.spec_if_given()) {
            (Some(size), _) => size.model()?,
            (None, Some(_)) => args.model.open(&Stores::from_env()).await?,
            (None, None) => Size::Small.model()?,
        };
        let settings = args.engine.settings();
        bench::run(Bench { data, settings, text: args.text.clone(), seconds: args.seconds, savings: args.savings })
            .await
    })?;
    match args.json {
        true => print_json(&report)?,
        false => print(&report.to_string())?,
    }
    Ok(Exit::Done)
}
