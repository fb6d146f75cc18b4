//! The engine: one queue for the sentences of all callers, and threads that run them in batches on the devices.
//!
//! Callers of any kind (a bulk job, SQL partitions, a stream) submit *sentences* through an [`Embedder`]. The threads,
//! called *lanes* (three per GPU, one per core on a CPU), take batches that the planner (`planner.rs`) forms over all
//! callers. Each caller receives its answers in the order of its sentences.
//!
//! * The queue is bounded by tokens. While it is full, `submit` waits. A request is accepted as a whole as soon as
//!   fewer tokens than the bound are waiting, so no request waits forever.
//! * A lane never waits for a batch to fill up, and needs nothing from callers to make progress. A caller that blocks
//!   on its answer therefore always gets it.
//! * Dropping an answer cancels it: its sentences that are still waiting are skipped.
//! * A batch that exceeds the memory of the device is split and run again. A sentence that does not fit by itself is an
//!   error of that sentence only.
//! * After any other failure the lane checks its device. If that check fails too, the lane retires and its sentences
//!   return to the queue; when no lane is left, every caller gets [`EngineError::NoDeviceLeft`].

mod block_on;
mod device_words;
mod error;
#[cfg(test)]
mod faults;
mod handle;
mod job;
mod lane;
mod metrics;
mod queue;
mod reduce;
mod sentence;
mod settings;
mod shared;
#[cfg(test)]
mod tests;
mod word_table;

pub use crate::model::{DeviceChoice, Precision, parse_devices};
pub(crate) use block_on::block_on;
pub use error::EngineError;
pub use handle::Embedder;
pub(crate) use handle::Ticket;
pub use metrics::{Cost, EmbedderMetrics};
pub(crate) use reduce::reduce_in_order;
pub(crate) use sentence::{Output, Recipe, Sentence, Vectors, Words};
pub use settings::{EmbedderSettings, lanes};
pub(crate) use shared::StartStates;
