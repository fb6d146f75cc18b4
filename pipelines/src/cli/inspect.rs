//! `elmo inspect`: the words; the reading is in [`crate::output::inspect`].

use clap::{Args, ValueHint};

use super::{args::block_on, print, print_json};
use crate::{
    error::{Exit, Result},
    output::inspect,
    stores::Stores,
};

/// Say what is in an output: schema, rows, model, norms, and how many vectors are NULL, zero or not finite
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo inspect vectors
  elmo inspect vectors/part-00000.parquet --json

Exit code 1 when a number is NaN or infinite, or the files were not made alike or are not those
of the manifest beside them.")]
pub(super) struct InspectArgs {
    /// A Parquet file, or a folder of them; path or URL
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
