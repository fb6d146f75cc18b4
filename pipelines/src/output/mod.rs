//! Outputs of bulk jobs and streams: what they contain, and whether it is what their model computes.
//!
//! Both jobs start alike. `opened` lists the Parquet files of a folder (`parquet` reads them), compares their
//! footers (`footer`) and checks them against the manifest beside them (`manifest`), or, of a
//! stream, against each other (`chain`). Then [`inspect`] counts rows
//! and `vectors`, and [`verify`] recomputes a sample of the rows and compares the vectors. Neither writes anything.

mod chain;
mod footer;
pub mod inspect;
mod manifest;
mod opened;
pub(crate) mod parquet;
pub(crate) mod vectors;
pub mod verify;

pub use self::manifest::{ManifestCheck, Problem};
