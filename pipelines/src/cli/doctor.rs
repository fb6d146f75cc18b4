//! `elmo doctor`: its arguments. The checks are in [`crate::diagnose::doctor`].

use clap::Args;

use super::{print, print_json};
use crate::{
    diagnose::doctor::Diagnosis,
    error::{Error, Exit, Result},
};

/// Describe this installation and run a self-test of a few seconds
///
/// The self-test embeds the same sentences alone, in batches and in another order, and compares the vectors: on the CPU
/// a vector must not depend on its batch by a single bit.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo doctor
  elmo doctor --json

Paste the output into bug reports; it contains no secrets. The exit code is 1 if the self-test fails.")]
pub(super) struct DoctorArgs {
    /// Print the report as JSON
    #[arg(long)]
    json: bool,

    /// Skip the self-test
    #[arg(long)]
    no_self_test: bool,
}

pub(super) fn run(args: &DoctorArgs) -> Result<Exit> {
    let diagnosis = Diagnosis::make(!args.no_self_test)?;
    match args.json {
        true => print_json(&diagnosis)?,
        false => print(&diagnosis.to_string())?,
    }
    match diagnosis.is_healthy() {
        true => Ok(Exit::Done),
        false => Err(Error::check("the self-test failed on this machine; please report the output above")),
    }
}
