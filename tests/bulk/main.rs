//! The bulk job as a library: what it makes of odd inputs, faulty stores, memory flags and other jobs. How the program
//! behaves when it is killed is in `jobs.rs`.
//!
//! Most tests put a cheap stage in the place of the model: its vectors are a hash of the text, so that a row that came
//! out twice, not at all or in another place is seen.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;
mod encoding;
mod faults;
#[path = "../common/faulty.rs"]
mod faulty;
mod formats;
#[path = "../common/frozen.rs"]
mod frozen;
mod hostile;
mod http;
mod identity;
mod inputs;
mod repair;
mod requests;
mod resume;
#[path = "../common/unconditional.rs"]
mod unconditional;
