//! `elmo inspect`: its arguments. The work is in [`crate::output::inspect`].

use clap::{Args, ValueHint};

use super::{args::block_on, print, print_json};
use crate::{
    error::{Exit, Result},
    output::inspect,
    stores::Stores,
};

/// Print the schema, row counts, model and vector statistics of an output
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo inspect vectors
  elmo inspect vectors/part-00000*.parquet --json

The exit code is 1 if a vector contains a NaN or an infinite number, if the files were made with
different models or settings, or if they do not match the manifest.")]
pub(super) struct InspectArgs {
    /// A Parquet file, or a folder of Parquet files; a path or URL
    #[arg(value_name = "FILE|DIR", value_hint = ValueHint::AnyPath)]
    output: String,

    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &InspectArgs) -> Result<Exit> {
    let report = block_on(inspect::inspect(&args.output, &Stores::from_env()))?;
    match args.json {
        true => print_json(&report)?,
        false => print(&report.to_string())?,
    }
    report.error().map_or(Ok(Exit::Done), Err)
}
