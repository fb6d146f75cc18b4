//! The command line as a user meets it: help, errors, reports, settings, and where models come from.
//!
//! Output is compared with the files in `tests/snapshots`, which were reviewed by hand. After an intended change, run
//! `INSTA_UPDATE=always cargo test -p elmo-pipelines --test cli` and review the diff.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "cli/markup.rs"]
mod markup;
#[path = "cli/node.rs"]
mod node;
#[path = "cli/place.rs"]
mod place;
#[path = "cli/terminal.rs"]
mod terminal;

#[path = "cli/cluster.rs"]
mod cluster;
#[path = "cli/cluster_copy.rs"]
mod cluster_copy;
#[path = "cli/cluster_slt.rs"]
mod cluster_slt;
#[path = "cli/cluster_torture.rs"]
mod cluster_torture;
#[path = "cli/errors.rs"]
mod errors;
#[path = "cli/fit_mix.rs"]
mod fit_mix;
#[path = "cli/help.rs"]
mod help;
#[path = "cli/inputs.rs"]
mod inputs;
#[path = "cli/messages.rs"]
mod messages;
#[path = "cli/models.rs"]
mod models;
#[path = "queries.rs"]
mod queries;
#[path = "cli/reports.rs"]
mod reports;
#[path = "cli/settings.rs"]
mod settings;
#[path = "cli/shell.rs"]
mod shell;
#[path = "cli/signals.rs"]
mod signals;
#[path = "cli/sql.rs"]
mod sql;
#[path = "cli/sql_copy.rs"]
mod sql_copy;
#[path = "cli/sql_files.rs"]
mod sql_files;
#[path = "cli/sql_memory.rs"]
mod sql_memory;
#[path = "common/statements.rs"]
mod statements;
#[path = "cli/train.rs"]
mod train;
#[path = "cli/verify.rs"]
mod verify;
#[path = "cli/vocab.rs"]
mod vocab;
