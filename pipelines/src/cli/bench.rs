//! `elmo bench`: its arguments. The measurement is in [`crate::diagnose::bench`].

use clap::{Args, ValueHint};

use super::{
    EngineArgs, ModelArgs,
    args::{block_on, one_of, positive},
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

/// Measure tokens/s, padding, cache hits and GFLOP/s, relative to the matrix products of this machine
///
/// The ceiling is the speed of libtorch's matrix products with the shapes of the model, measured in the same run. The
/// share of the ceiling can be compared between machines. Speed does not depend on the weights, so random weights
/// suffice (--size).
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo bench --size tiny --seconds 2
  elmo bench --model tiny --text reviews.jsonl --seconds 2 --json")]
pub(super) struct BenchArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// Use random weights of a published size instead of a model [default: small, without --model]
    #[arg(long, value_name = "SIZE", value_parser = one_of::<Size>(Size::WORDS), help_heading = "Model", conflicts_with_all = ["model", "options", "weights"])]
    size: Option<Size>,

    /// Embed the column text of this file or URL [default: built-in English text]
    #[arg(long, value_name = "URL", value_hint = ValueHint::FilePath, help_heading = "Measurement")]
    text: Option<String>,

    /// Duration of the measurement in seconds, after warming up
    #[arg(long, value_name = "N", default_value = "10", value_parser = positive, help_heading = "Measurement")]
    seconds: usize,

    /// Also measure the speed-up of each optimisation of the engine on the CPU
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
