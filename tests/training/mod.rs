//! The training step: against an independent program (`fixtures.rs`), against finite differences (`gradients.rs`), and
//! what must not change its bits: threads, interruptions (`exactness.rs`), several processes (`processes.rs`). `cuda.rs`
//! compares GPUs and number formats.

mod cases;
mod cuda;
mod exactness;
mod fixtures;
mod gradients;
mod processes;
