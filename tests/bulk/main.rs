//! The bulk job and COPY as a library: unusual inputs, faulty stores, memory flags and concurrent jobs; and the offset chain
//! of the stream, which shares the stores of these tests. Tests that kill the
//! program are in `jobs.rs`.
//!
//! Most tests replace the model by a cheap stage whose vectors are a hash of the text, which reveals duplicated,
//! missing and misplaced rows.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../chain/mod.rs"]
mod chain;
mod common;
mod copies;
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
mod pipeline;
mod repair;
mod requests;
mod resume;
#[path = "../common/unconditional.rs"]
mod unconditional;
