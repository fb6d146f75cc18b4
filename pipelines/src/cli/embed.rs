//! placeholder
use clap::Args;
use super::*;
/// x
#[derive(Debug, Args)]
pub(super) struct EmbedArgs { #[command(flatten)] model: ModelArgs, #[command(flatten)] engine: EngineArgs }
pub(super) fn run(args: &EmbedArgs, common: &CommonArgs) -> Result<Exit> {
    let _ = common.progress();
    args::block_on(async { args.engine.load(args.model.open(&crate::stores::Stores::from_env()).await?).await.map(|_| Exit::Done) })
}
