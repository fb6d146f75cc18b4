//! `elmo doctor`: the words; what it looks at is in [`crate::diagnose::doctor`].

use clap::Args;

use super::{print, print_json};
use crate::{
    diagnose::doctor::Diagnosis,
    error::{Error, Exit, Result},
};

/// Say what this installation can do and test it for some seconds; prints nothing secret
///
/// The self-test embeds the same sentences alone, together and in another order and compares bits: on CPU a vector must
/// not depend on its neighbours.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo doctor
  elmo doctor --json

Paste the output into a bug report. Exit code 1 when the self-test fails.")]
pub(super) struct DoctorArgs {
    /// Print the report as JSON
    #[arg(long)]
    json: bool,

    /// Leave the self-test out
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
