//! Everything that moves rows through ELMo, and the `elmo` binary.
//!
//! A command line becomes checked settings ([`cli`], [`config`]), a model is found and fetched ([`models`]), and a job
//! runs. A bulk job ([`bulk`]) reads rows ([`source`]), adds columns ([`stage`]), writes files ([`sink`]) and keeps a
//! manifest of what is durable ([`manifest`]); all of them know files through [`stores`] only. Queries are in [`sql`]. What a person is told on
//! the way is in [`report`]; how it ends, in [`error`].

pub mod bench;
pub mod bulk;
pub mod cli;
#[cfg(feature = "cluster")]
pub mod cluster;
pub mod config;
mod contain;
pub mod demo;
pub mod doctor;
pub mod dry_run;
pub mod error;
pub mod inspect;
pub mod manifest;
pub mod models;
pub mod redact;
pub mod report;
pub mod sink;
pub mod sizes;
pub mod source;
pub mod sql;
pub mod stage;
mod store_file;
pub mod stores;
pub mod verify;

pub use error::{Error, Exit, Result};
