//! The stream: messages of Kafka in, Parquet in object storage or enriched messages out, each message exactly once.
//!
//! ```text
//! source/      a thread that polls Kafka: groups, assignments, pauses, offsets
//! beginning    where partitions begin, decided for all of them before the group is joined
//! decode/      messages to texts and columns; messages that cannot be decoded get a reason
//! partition    one task per assigned partition: decode, embed in order (`crate::in_order`), write
//! expected     the memory that vectors will take, by which batches are cut
//! chain/       the offset chain: one Parquet object per start offset, created conditionally
//! transaction/ enriched messages to another topic, in transactions
//! metrics/     Prometheus metrics, and whether the process is alive and ready
//! ```
//!
//! The objects of a partition tile its offsets without a gap or an overlap, whoever writes them: an object that begins at
//! offset `s` is created only by a writer that has read that the object before it ends at `s`, and a store lets one
//! creation per name succeed. The offsets that the consumer group commits are only hints.

#[cfg(feature = "kafka")]
mod beginning;
pub mod chain;
mod clock;
#[cfg(feature = "kafka")]
mod dead_letters;
#[cfg(feature = "kafka")]
pub mod decode;
mod error;
#[cfg(feature = "kafka")]
mod expected;
#[cfg(feature = "kafka")]
mod files;
#[cfg(feature = "kafka")]
mod finished;
#[cfg(feature = "kafka")]
mod job;
mod message;
#[cfg(feature = "kafka")]
pub mod metrics;
#[cfg(feature = "kafka")]
mod opening;
#[cfg(feature = "kafka")]
mod output;
#[cfg(feature = "kafka")]
mod partition;
pub mod rotation;
#[cfg(feature = "kafka")]
mod run;
#[cfg(feature = "kafka")]
mod settings;
#[cfg(feature = "kafka")]
pub mod source;
#[cfg(feature = "kafka")]
mod status;
#[cfg(all(test, feature = "kafka"))]
mod tests;
#[cfg(feature = "kafka")]
mod totals;
#[cfg(feature = "kafka")]
mod transaction;

pub use self::{
    chain::OnGap,
    error::StreamError,
    message::{Header, Message, Messages, TopicPartition},
};
#[cfg(feature = "kafka")]
pub use self::{
    decode::{Format, OnError},
    run::{DryRun, DryTopic, Streamed, dry_run, run},
    settings::{StreamJob, Target},
    source::Start,
    status::{PartitionLine, StreamStatus, status},
    totals::StreamReport,
    transaction::ValueEncoding,
};
