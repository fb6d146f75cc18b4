//! Whether this process is a member of its group.

use std::ffi::CStr;

use rdkafka::{
    bindings::{
        rd_kafka_consumer_group_metadata, rd_kafka_consumer_group_metadata_destroy,
        rd_kafka_consumer_group_metadata_generation_id, rd_kafka_consumer_group_metadata_member_id,
    },
    consumer::{BaseConsumer, Consumer as _, ConsumerContext},
};

/// The generation of the group in which this process is a member, and its id there; `None` before it has joined, and after
/// the group has removed it.
///
/// librdkafka gives such a process metadata without an id, and a broker takes those for a client without a group: it would
/// commit the offsets of whoever sends them.
pub(super) fn membership<C: ConsumerContext>(consumer: &BaseConsumer<C>) -> Option<(i32, String)> {
    let client = consumer.client().native_ptr();
    // SAFETY: the client lives as long as `consumer`. What it returns is ours until it is destroyed, and holds a string that
    // ends with NUL.
    let (generation, member) = unsafe {
        let metadata = rd_kafka_consumer_group_metadata(client);
        if metadata.is_null() {
            return None;
        }
        let generation = rd_kafka_consumer_group_metadata_generation_id(metadata);
        let member = rd_kafka_consumer_group_metadata_member_id(metadata);
        let member =
            if member.is_null() { String::new() } else { CStr::from_ptr(member).to_string_lossy().into_owned() };
        rd_kafka_consumer_group_metadata_destroy(metadata);
        (generation, member)
    };
    is_member(generation, &member).then_some((generation, member))
}

/// Brokers count generations and epochs of members from 1.
fn is_member(generation: i32, id: &str) -> bool {
    generation > 0 && !id.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// -1 and "" are what librdkafka has for a process without a group, and 0 is the epoch in which a member joins (KIP-848).
    #[test]
    fn a_process_that_was_removed_is_no_member() {
        assert!(is_member(1, "elmo-7c1"));
        for (generation, id) in [(-1, ""), (-1, "elmo-7c1"), (0, "elmo-7c1"), (3, "")] {
            assert!(!is_member(generation, id), "{generation} {id}");
        }
    }
}
