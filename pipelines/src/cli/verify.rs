//! `elmo verify`: its arguments. The comparison is in [`crate::output::verify`].

use clap::{Args, ValueHint};
use elmo::{mix::ScalarMix, model::Precision, spec::Layers};

use super::{EngineArgs, ModelArgs, args::block_on, mixes::layers_of, print, print_json};
use crate::{
    error::{Error, Exit, Result},
    output::verify::{Verify, verify},
    stores::Stores,
};

/// Recompute rows of an output and compare them with the files
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo verify vectors --sample 100
  elmo verify vectors --json

The settings are read from the files, but the model and the precision must be those of the job:
give the same --model and --precision. The exit code is 1 if a number differs by more than the
tolerance, if anything else differs in a row, or if the files do not match the manifest.")]
pub(super) struct VerifyArgs {
    /// Folder of a job, or one Parquet file in it; a path or URL
    #[arg(value_name = "OUTPUT", value_hint = ValueHint::AnyPath)]
    output: String,

    #[command(flatten)]
    model: ModelArgs,

    /// Number of rows to recompute
    #[arg(long, value_name = "N", default_value = "1000", value_parser = super::args::positive, help_heading = "Comparison")]
    sample: usize,

    /// Seed of the sample; the same seed selects the same rows
    #[arg(long, value_name = "N", default_value = "0", help_heading = "Comparison")]
    seed: u64,

    /// Column with the texts [default: the column that the job embedded; text without a manifest]
    ///
    /// If the output does not have the column, the texts are read from the inputs of the job.
    #[arg(long, value_name = "NAME", help_heading = "Comparison")]
    column: Option<String>,

    /// File of the scalar mix that the job used, if any
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Comparison")]
    layers: Option<String>,

    /// Maximum difference of two numbers; 0 requires equal bits [default: 0.00001 in f32, 0.02 in tf32 and f16, 0.1 in bf16, 0.3 in int8]
    ///
    /// The same kind of CPU computes equal bits. Other devices round differently: float32 numbers in the sixth digit, those of tf32 and
    /// f16 in the third, those of bf16 and int8 in the second.
    #[arg(long, value_name = "X", value_parser = not_negative, help_heading = "Comparison")]
    tolerance: Option<f32>,

    /// Print the report as JSON
    #[arg(long, help_heading = "Comparison")]
    json: bool,

    #[command(flatten)]
    engine: EngineArgs,
}

/// Parses a number that is not negative. NaN is rejected: every difference would pass.
fn not_negative(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if number >= 0.0 => Ok(number),
        _ => Err("it must be a number of at least 0".to_owned()),
    }
}

/// Reads a scalar mix.
fn mix_of(file: &str) -> Result<ScalarMix> {
    match layers_of(file, &[])? {
        Layers::Mix(mix) => Ok(mix),
        _ => Err(Error::usage("--layers takes the file of a scalar mix here", "other layers are read from the output")),
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
    let tolerance = args.tolerance.unwrap_or(match args.engine.settings().precision {
        Precision::Tf32 | Precision::F16 => 0.02,
        Precision::Bf16 => 0.1,
        // Another processor may round a number just between two codes to the other one, which moves all that follows: less than twice the
        // distance from f32, which was 0.12 (benches/RESULTS.md).
        Precision::Int8 => 0.3,
        _ => 1e-5,
    });
    report.error(tolerance).map_or(Ok(Exit::Done), Err)
}
