//! Topics that are deleted while they are read.
//!
//! A topic of a name is needed. One that a pattern matched may go: its partitions end, and the others are read on. librdkafka does
//! not always say that a topic was deleted: its partitions are revoked, with or without an error before. So the brokers are
//! asked whenever partitions are revoked, and for every such error.

use std::{collections::HashSet, sync::Arc};

use parking_lot::Mutex;
use rdkafka::{error::RDKafkaErrorCode as Code, metadata::Metadata};

use super::{faults, scrub::Scrubber};
use crate::stream::{StreamError, TopicPartition};

/// Topics that may have been deleted.
#[derive(Debug)]
pub(super) struct Doubts {
    named: HashSet<Arc<str>>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// To be asked for.
    doubted: Option<HashSet<Arc<str>>>,
    /// A thread asks.
    asked: bool,
    /// Topics of patterns that were reported.
    reported: HashSet<Arc<str>>,
}

/// Somebody asks, until it is dropped.
pub(super) struct Asking(Arc<Mutex<State>>);

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.lock().asked = false;
    }
}

impl Doubts {
    pub(super) fn new(named: HashSet<Arc<str>>) -> Self {
        Self { named, state: Arc::default() }
    }

    /// The topics of these partitions, and those of names, may have been deleted.
    pub(super) fn add<'p>(&self, partitions: impl IntoIterator<Item = &'p TopicPartition>) {
        let topics = partitions.into_iter().map(|partition| Arc::clone(&partition.topic));
        self.state.lock().doubted.get_or_insert_default().extend(topics.chain(self.named.iter().cloned()));
    }

    /// The group has assigned these partitions, so their topics exist.
    pub(super) fn settle(&self, partitions: &[TopicPartition]) {
        let mut state = self.state.lock();
        for partition in partitions {
            state.reported.remove(&partition.topic);
        }
    }

    /// What to ask for, if nobody asks now.
    pub(super) fn take(&self) -> Option<(HashSet<Arc<str>>, Asking)> {
        let mut state = self.state.lock();
        if state.asked {
            return None;
        }
        let topics = state.doubted.take()?;
        state.asked = true;
        Some((topics, Asking(Arc::clone(&self.state))))
    }

    /// The errors for topics that do not exist, and whether they are fatal.
    pub(super) fn confirm(&self, missing: HashSet<Arc<str>>, scrub: &Scrubber) -> Vec<(StreamError, bool)> {
        let mut errors = Vec::new();
        for topic in missing {
            let code = Some(Code::UnknownTopicOrPartition);
            let what = format!("topic {topic}");
            if self.named.contains(&topic) {
                errors.push((faults::broker(what, code, "it no longer exists: it was deleted", scrub), true));
            } else if self.state.lock().reported.insert(topic) {
                errors.push((faults::broker(what, code, OF_PATTERN, scrub), false));
            }
        }
        errors
    }
}

const OF_PATTERN: &str = "it no longer exists: it was deleted; what was written of it stays, and the other topics of the pattern are read on";

/// Whether the brokers do not have a topic.
pub(super) fn is_missing(metadata: &Metadata, topic: &str) -> bool {
    let found = metadata.topics().iter().find(|found| found.name() == topic);
    found.is_none_or(|found| matches!(found.error().map(Code::from), Some(Code::UnknownTopicOrPartition)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(topics: &[&str]) -> HashSet<Arc<str>> {
        topics.iter().map(|topic| Arc::from(*topic)).collect()
    }

    #[test]
    fn a_topic_of_a_pattern_is_reported_once_until_it_is_assigned_again() {
        let doubts = Doubts::new(set(&["named"]));
        let partition = TopicPartition::new("matched", 3);
        assert!(doubts.take().is_none());
        doubts.add([&partition]);
        let (topics, asking) = doubts.take().unwrap();
        assert_eq!(topics, set(&["matched", "named"]));
        // One thread asks at a time.
        doubts.add([&partition]);
        assert!(doubts.take().is_none());
        drop(asking);
        assert!(doubts.take().is_some() && doubts.take().is_none());

        let reported = |missing: &[&str]| -> Vec<(String, bool)> {
            let errors = doubts.confirm(set(missing), &Scrubber::default());
            errors.into_iter().map(|(error, fatal)| (error.to_string(), fatal)).collect()
        };
        let warning = vec![(format!("topic matched: {OF_PATTERN}"), false)];
        assert_eq!(reported(&["matched"]), warning);
        assert_eq!(reported(&["matched"]), []);
        doubts.settle(&[partition]);
        assert_eq!(reported(&["matched"]), warning);
        assert_eq!(reported(&["named"]), [("topic named: it no longer exists: it was deleted".to_owned(), true)]);
    }
}
