//! placeholder
use clap::Args;
use super::*;
/// x
#[derive(Debug, Args)]
pub(super) struct VerifyArgs {}
pub(super) fn run(_: &VerifyArgs) -> Result<Exit> { todo!() }
