//! The job with a consumer, a store and a stage that tests make up, by a clock that jumps over all waiting.
//!
//! ```text
//! world      topics, the group's offsets, the output; what must hold at every instant
//! consumer   the thread that polls: assignments, revocations, messages, seeks, pauses
//! process    a job with its parts
//! histories  random histories of one process at a time
//! members    random histories of several processes that share partitions
//! cases      single histories
//! refusals   rows that a broker refuses
//! letters    dead letters that it refuses
//! commits    rows on their way to a transaction
//! stops      a stop before the group is joined
//! ```

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod cases;
mod commits;
mod consumer;
mod histories;
mod letters;
mod members;
mod process;
mod refusals;
mod stops;
mod world;
