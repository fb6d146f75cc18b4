//! Everything that moves rows through ELMo, and the `elmo` binary.
//!
//! A command line becomes checked settings ([`cli`], [`config`]), a model is found and fetched ([`models`]), and a job
//! runs. What a person is told on the way is in [`report`]; how it ends, in [`error`].

pub mod bench;
pub mod cli;
pub mod config;
pub mod demo;
pub mod doctor;
pub mod error;
pub mod models;
pub mod redact;
pub mod report;
pub mod stores;

pub use error::{Error, Exit, Result};
