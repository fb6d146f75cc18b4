//! `elmo plot`: its arguments. The work is in [`crate::train::plot`].

use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::{args::fraction, print, print_json};
use crate::{
    error::{Exit, Result},
    train::plot::{self, Over, Plot},
};

/// Draw the curves of training runs as one file for a browser
///
/// Training loss, held-out perplexity, learning rate, norm of the gradients and speed, from steps.jsonl and valid.jsonl of each
/// run, also while it trains. The file needs no network.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo plot model
  elmo plot model --x epochs --smoothing 0 --output curves.svg")]
pub(super) struct PlotArgs {
    /// Folders of runs, the --output of elmo train
    #[arg(required = true, num_args = 1.., value_name = "DIR", value_hint = ValueHint::DirPath)]
    runs: Vec<PathBuf>,

    /// The plot, an .html or .svg file; an earlier plot is replaced
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath, default_value = "plot.html")]
    output: PathBuf,

    /// What the curves are drawn over: steps or epochs
    #[arg(long, value_name = "WHAT", default_value = "steps", value_parser = ["steps", "epochs"])]
    x: String,

    /// Weight of the earlier values in the smoothed curves, from 0 to below 1
    #[arg(long, value_name = "W", default_value = "0.9", value_parser = fraction)]
    smoothing: f64,

    /// Replace a file that is no plot
    #[arg(long)]
    overwrite: bool,

    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &PlotArgs) -> Result<Exit> {
    let report = plot::plot(&Plot {
        runs: args.runs.clone(),
        output: args.output.clone(),
        over: if args.x == "steps" { Over::Steps } else { Over::Epochs },
        smoothing: args.smoothing,
        overwrite: args.overwrite,
    })?;
    match args.json {
        true => print_json(&report)?,
        false => print(&report.to_string())?,
    }
    Ok(Exit::Done)
}
