//! Everything that moves rows through ELMo, and the `elmo` binary.
//!
//! [`cli`] parses the command line into settings and runs a job. Jobs share [`stores`] (addresses and clients of object
//! stores), [`source`] (rows in), [`stage`] (embedding) and [`in_order`] (ordered submission to it), [`sink`] (Parquet out) and [`models`] (directories, URLs,
//! zips, the cache). No other module imports [`cli`], and no two modules import each other.
//!
//! | job | module |
//! |---|---|
//! | files in, Parquet out, resumable | [`bulk`] |
//! | queries | [`sql`] |
//! | queries and bulk jobs on a cluster | `cluster` |
//! | messages of Kafka in, Parquet or enriched messages out | `stream` |
//! | the vocabulary of a corpus | [`train`] |
//! | inspecting and verifying outputs | [`output`] |
//! | installation, speed | [`diagnose`] |
//! | a bulk job on built-in reviews | [`demo`] |

pub mod bulk;
pub mod cli;
#[cfg(feature = "cluster")]
pub mod cluster;
mod crash;
pub mod demo;
pub mod diagnose;
pub mod error;
pub mod in_order;
pub mod memory;
pub mod models;
mod operator;
pub mod output;
pub mod redact;
mod reply;
pub mod report;
pub mod sink;
pub mod source;
pub mod sql;
pub mod stage;
pub mod stores;
pub mod stream;
pub mod train;

pub use error::{Error, Exit, Result};
