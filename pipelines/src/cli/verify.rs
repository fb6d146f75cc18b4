//! `elmo verify`: the words; the comparison is in [`crate::output::verify`].

use clap::{Args, ValueHint};
use elmo::{mix::ScalarMix, spec::Layers};

use super::{EngineArgs, ModelArgs, args::block_on, embed::layers_of, print, print_json};
use crate::{
    error::{Error, Exit, Result},
    output::verify::{Verify, verify},
    stores::Stores,
};

/// Recompute rows of an output with a model and compare: is the file what this model makes of these texts?
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo verify vectors --model tiny --sample 100
  elmo verify vectors --model tiny --json

The settings come from the files. Exit code 1 when a number differs by more than --tolerance, when
anything else of a row differs, or when the files are not those of the manifest beside them.")]
pub(super) struct VerifyArgs {
    /// A Parquet file, or the folder of a job; path or URL
    #[arg(value_name = "OUTPUT", value_hint = ValueHint::AnyPath)]
    output: String,

    #[command(flatten)]
    model: ModelArgs,

    /// Rows to recompute
    #[arg(long, value_name = "N", default_value = "1000", value_parser = super::args::positive, help_heading = "Comparison")]
    sample: usize,

    /// Which rows are picked; the same seed picks the same rows
    #[arg(long, value_name = "N", default_value = "0", help_heading = "Comparison")]
    seed: u64,

    /// Column with the texts; when the output does not hold it, they are read again from the inputs of the job
    /// [default: the column that the job embedded; text where there is no manifest]
    #[arg(long, value_name = "NAME", help_heading = "Comparison")]
    column: Option<String>,

    /// The scalar mix that the job used, if it used one
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Comparison")]
    layers: Option<String>,

    /// Largest difference of a number that passes; 0 asks for equal bits, which the same kind of CPU gives
    #[arg(long, value_name = "X", default_value = "0.00001", value_parser = not_negative, help_heading = "Comparison")]
    tolerance: f32,

    /// Print the report as JSON
    #[arg(long, help_heading = "Comparison")]
    json: bool,

    #[command(flatten)]
    engine: EngineArgs,
}

/// A number from 0. No NaN: every difference would pass.
fn not_negative(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if number >= 0.0 => Ok(number),
        _ => Err("it must be a number from 0".to_owned()),
    }
}

/// The scalar mix in a file.
fn mix_of(file: &str) -> Result<ScalarMix> {
    match layers_of(file)? {
        Layers::Mix(mix) => Ok(mix),
        _ => Err(Error::usage("--layers takes the file of a scalar mix here", "other layers come from the output")),
    }
}

pub(super) fn run(args: &VerifyArgs) -> Result<Exit> {
    let report = block_on(async {
        let stores = Stores::from_env();
        let mix = args.layers.as_deref().map(mix_of).transpose()?;
        let elmo = args.engine.load(args.model.open(&stores).await?).await?;
        let job = Verify {
            output: args.output.clone(),
            sample: args.sample,
            seed: args.seed,
            column: args.column.clone(),
            mix,
        };
        verify(&job, &elmo, &stores).await
    })?;
    match args.json {
        true => print_json(&report)?,
        false => print(&report.to_string())?,
    }
    report.error(args.tolerance).map_or(Ok(Exit::Done), Err)
}
