//! Everything that moves rows through ELMo, and the `elmo` binary.
//!
//! [`cli`] parses the command line into settings and runs a job. Jobs share [`stores`] (addresses and clients of object
//! stores), [`source`] (rows in), [`stage`] (embedding), [`scores`] (the same step for scores) and [`in_order`] (ordered
//! submission to it), [`sink`] (Parquet out) and [`models`] (directories, URLs, zips, the cache). No other module imports [`cli`], and no two modules import each other.
//!
//! | job | module |
//! |---|---|
//! | files in, Parquet out, resumable | [`bulk`] |
//! | queries | [`sql`] |
//! | queries and bulk jobs on a cluster | `cluster` |
//! | messages of Kafka in, Parquet or enriched messages out | `stream` |
//! | training: vocabularies, runs and their curves, perplexity | [`train`] |
//! | a scalar mix for labelled data | [`fit_mix`] |
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
pub mod fit_mix;
pub mod in_order;
mod large_pages;
pub mod memory;
pub mod models;
mod operator;
pub mod output;
mod picture;
mod recorded;
pub mod redact;
mod reply;
pub mod report;
pub mod scores;
pub mod sink;
pub mod source;
pub mod sql;
pub mod stage;
pub mod stores;
pub mod stream;
pub mod train;

pub use error::{Error, Exit, Result};
pub use large_pages::LargePages;
