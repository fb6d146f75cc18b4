//! `elmo demo`: its arguments. The demo is in [`crate::demo`].

use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::{CommonArgs, EngineArgs, ModelArgs, args, print, print_json, shutdown};
use crate::{
    demo::{self, Demo},
    error::{Exit, Result},
    stores::Stores,
};

/// Embed 200 built-in reviews, find neighbours of one, and show a word in two senses; works offline
///
/// Also shows the surprisal of the words of a sentence. With --output, demo.html is a picture of both. The files of an earlier demo
/// in the folder are replaced; files that no demo has written are an error, and are left as they are.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo demo
  elmo demo --output demo-out --row 17")]
pub(super) struct DemoArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// Write the files to the folder elmo-demo in DIR [default: a temporary folder, deleted at the end]
    #[arg(short, long, value_name = "DIR", value_hint = ValueHint::DirPath, help_heading = "Demo")]
    output: Option<PathBuf>,

    /// Row whose nearest neighbours to show
    #[arg(long, value_name = "N", default_value = "0", help_heading = "Demo")]
    row: usize,

    /// Print the report as JSON
    #[arg(long, help_heading = "Demo")]
    json: bool,

    #[command(flatten)]
    engine: EngineArgs,
}

pub(super) fn run(args: &DemoArgs, common: &CommonArgs) -> Result<Exit> {
    let progress = common.progress();
    let report = args::block_on(async {
        let stores = Stores::from_env();
        let data = args::open(&args.model.spec(), args.model.offline(), &stores).await?;
        let elmo = args.engine.load(data).await?;
        let demo = Demo { output: args.output.clone(), row: args.row };
        demo::run(&demo, elmo, stores, shutdown::requested("the current rows are durable")?, progress.as_ref()).await
    })?;
    match args.json {
        true => print_json(&report)?,
        false => print(&report.to_string())?,
    }
    Ok(Exit::Done)
}
