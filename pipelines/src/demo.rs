//! placeholder
use std::{fmt, path::PathBuf};
use serde::Serialize;
use crate::{error::Result, report::Progress, stores::Stores};
/// x
#[derive(Debug)]
pub struct Demo { /// x
 pub output: Option<PathBuf>, /// x
 pub row: usize }
/// x
#[derive(Debug, Serialize)]
pub struct DemoReport {}
impl fmt::Display for DemoReport { fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result { Ok(()) } }
/// x
pub async fn run(_: &Demo, _: elmo::Elmo, _: Stores, _: impl Future<Output = ()>, _: &dyn Progress) -> Result<DemoReport> { todo!() }
