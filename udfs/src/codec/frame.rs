//! Framing of messages: a prefix that distinguishes them from messages of other codecs, and a protobuf message.

use datafusion::common::{Result, exec_datafusion_err, plan_datafusion_err};
use prost::Message;

/// The prefix of our messages. No protobuf message of DataFusion begins with it: it would be field 12 with
/// wire type 5, and no such field exists.
pub(super) const MAGIC: &[u8] = b"elmo\0";

/// Writes a message with its prefix.
pub(super) fn write(buffer: &mut Vec<u8>, message: &impl Message) -> Result<()> {
    buffer.extend_from_slice(MAGIC);
    message.encode(buffer).map_err(|e| exec_datafusion_err!("a plan cannot be serialised: {e}"))
}

/// The message after the prefix. `None` when the bytes belong to another codec.
pub(super) fn strip(buffer: &[u8]) -> Option<&[u8]> {
    buffer.strip_prefix(MAGIC)
}

/// Parses a message without its prefix.
pub(super) fn read<T: Message + Default>(bytes: &[u8]) -> Result<T> {
    T::decode(bytes).map_err(|e| plan_datafusion_err!("a plan of elmo cannot be deserialised: {e}"))
}
