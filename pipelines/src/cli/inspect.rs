//! placeholder
use clap::Args;
use super::*;
/// x
#[derive(Debug, Args)]
pub(super) struct InspectArgs {}
pub(super) fn run(_: &InspectArgs) -> Result<Exit> { todo!() }
