//! What a stream does.

use std::{net::SocketAddr, time::Duration};

use super::{
    Start, chain,
    decode::{DecodeSettings, OnError},
    rotation::Limits,
    source,
    transaction::ValueEncoding,
};
use crate::{sink::Codec, stores::Location};

/// A stream.
#[derive(Debug)]
pub struct StreamJob {
    /// The brokers, the topics and the group.
    pub kafka: source::Settings,
    /// How messages are decoded.
    pub decode: DecodeSettings,
    /// What becomes of messages that cannot be decoded or embedded.
    pub on_error: OnError,
    /// Where they go, with [`OnError::DeadLetter`].
    pub dead_letter_topic: Option<String>,
    /// Where a partition without output begins.
    pub start: Start,
    /// What to do when the broker has deleted messages that are not in the output.
    pub on_gap: chain::OnGap,
    /// Where the rows go.
    pub target: Target,
    /// Stop behind the messages that the partitions have when they are assigned.
    pub once: bool,
    /// Where metrics are served.
    pub metrics: Option<SocketAddr>,
    /// Bytes for messages, vectors and files on their way.
    pub memory_limit: usize,
    /// How long rows that were read are waited for when the stream is to stop.
    pub grace: Duration,
}

/// Where rows go.
#[derive(Debug)]
pub enum Target {
    /// Into Parquet files.
    Files {
        /// The output folder.
        output: Location,
        /// The generation of the output.
        generation: u32,
        /// When a file is complete.
        limits: Limits,
        /// Size of a row group before encoding, in bytes.
        row_group_bytes: u64,
        /// Compression codec.
        codec: Codec,
        /// Where large files wait.
        spill: chain::Spill,
    },
    /// Into another topic, in transactions.
    Topic {
        /// The topic.
        topic: String,
        /// How a row becomes a value.
        encoding: ValueEncoding,
        /// How long rows wait for others of their transaction.
        max_wait: Duration,
    },
}
