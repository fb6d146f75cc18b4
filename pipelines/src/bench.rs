//! Tokens per second and the share of what the matrix products of this machine reach.

use crate::{
    cli::BenchArgs,
    error::{Error, Result},
};

/// Measures and prints the report.
pub fn run(_args: &BenchArgs) -> Result<()> {
    Err(Error::Failed("elmo bench is not there yet".into()))
}
