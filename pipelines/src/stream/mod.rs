//! The stream: messages of Kafka in, Parquet in object storage or enriched messages out, each message exactly once.
//!
//! ```text
//! source/      a thread that polls Kafka: groups, assignments, pauses, offsets
//! decode/      messages to texts and columns; messages that cannot be decoded get a reason
//! partition    one task per assigned partition: decode, embed in order (`crate::in_order`), write
//! chain/       the offset chain: one Parquet object per start offset, created conditionally
//! transaction/ enriched messages to another topic, in transactions
//! metrics/     Prometheus metrics, and whether the process is alive and ready
//! ```
//!
//! The objects of a partition tile its offsets without a gap or an overlap, whoever writes them: an object that begins at
//! offset `s` is created only by a writer that has read that the object before it ends at `s`, and a store lets one
//! creation per name succeed. The offsets that the consumer group commits are only hints.

pub mod chain;
mod dead_letters;
pub mod decode;
mod error;
mod files;
mod finished;
mod job;
mod message;
pub mod metrics;
mod opening;
mod output;
mod partition;
pub mod rotation;
mod run;
mod settings;
pub mod source;
mod status;
mod totals;
mod transaction;

pub use self::{
    chain::OnGap,
    decode::{Format, OnError},
    error::StreamError,
    message::{Header, Message, Messages, TopicPartition},
    run::{DryRun, DryTopic, Streamed, dry_run, run},
    settings::{StreamJob, Target},
    source::Start,
    status::{PartitionLine, StreamStatus, status},
    totals::StreamReport,
    transaction::ValueEncoding,
};
