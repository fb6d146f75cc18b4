//! The command line as a user meets it: help, errors, reports, settings, and where models come from.
//!
//! What is printed is compared with the files in `tests/snapshots`, which a person has read: they are the expected
//! values. After a change on purpose: `INSTA_UPDATE=always cargo test -p elmo-pipelines --test cli`, and read the diff.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "cli/node.rs"]
mod node;
#[path = "cli/place.rs"]
mod place;

#[path = "cli/cluster.rs"]
mod cluster;
#[path = "cli/errors.rs"]
mod errors;
#[path = "cli/help.rs"]
mod help;
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
#[path = "cli/signals.rs"]
mod signals;
#[path = "cli/sql.rs"]
mod sql;
#[path = "cli/sql_files.rs"]
mod sql_files;
#[path = "cli/verify.rs"]
mod verify;
