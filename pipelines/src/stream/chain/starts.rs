//! Where partitions begin that have no chain yet.
//!
//! A stream whose `--start` is not the first message says so for all partitions at once, before it reads any of them: what
//! arrives between a process that is killed early and the next one is not skipped. A record is one object, so that a crash
//! leaves all of it or nothing; it has a number and is created once, so that of processes that start at the same moment one
//! decides. There is another record for topics that a stream is given later.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::{ChainError, layout::Layout};
use crate::{
    stores::{
        Location,
        create_once::{Created, create},
    },
    stream::TopicPartition,
};

/// Offsets by topic and partition.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Record {
    topics: BTreeMap<String, BTreeMap<i32, i64>>,
}

impl Record {
    fn new(starts: &BTreeMap<TopicPartition, i64>) -> Self {
        let mut record = Self::default();
        for (partition, start) in starts {
            record.topics.entry(partition.topic.to_string()).or_default().insert(partition.partition, *start);
        }
        record
    }

    fn parse(location: &Location, bytes: &[u8]) -> Result<Self, ChainError> {
        elmo::json::from_slice(bytes).map_err(|reason| ChainError::Damaged { file: location.to_string(), reason })
    }
}

/// All records of a dataset.
#[derive(Debug, Clone, Default)]
pub(super) struct Starts {
    /// How many there are.
    records: usize,
    offsets: BTreeMap<TopicPartition, i64>,
}

impl Starts {
    /// Reads the records of a dataset.
    ///
    /// # Errors
    /// [`ChainError::Store`] when the store fails, [`ChainError::Damaged`] when one cannot be parsed.
    pub(super) async fn read(layout: &Layout) -> Result<Self, ChainError> {
        let mut starts = Self::default();
        loop {
            let location = layout.start_record(starts.records + 1);
            let Some(bytes) = location.get().await? else { return Ok(starts) };
            starts.add(&Record::parse(&location, &bytes)?);
        }
    }

    /// Where a partition begins, if that is recorded.
    pub(super) fn of(&self, partition: &TopicPartition) -> Option<i64> {
        self.offsets.get(partition).copied()
    }

    pub(super) fn topics(&self) -> HashSet<Arc<str>> {
        self.offsets.keys().map(|partition| Arc::clone(&partition.topic)).collect()
    }

    /// Records where partitions begin. If another process makes a record first, it is asked with the topics of that one
    /// which partitions are still to be recorded.
    ///
    /// # Errors
    /// As [`Starts::read`].
    pub(super) async fn record(
        &mut self,
        layout: &Layout,
        mut new: BTreeMap<TopicPartition, i64>,
        mut is_new: impl FnMut(&HashSet<Arc<str>>, &TopicPartition) -> bool,
    ) -> Result<(), ChainError> {
        while !new.is_empty() {
            let (location, record) = (layout.start_record(self.records + 1), Record::new(&new));
            // Numbers and strings are always serialised.
            let bytes = serde_json::to_vec(&record).unwrap_or_default();
            match create(&location, bytes.into()).await? {
                Created::Ours => {
                    self.add(&record);
                    return Ok(());
                }
                Created::Existed(found) => self.add(&Record::parse(&location, &found)?),
            }
            let begun = self.topics();
            new.retain(|partition, _| self.of(partition).is_none() && is_new(&begun, partition));
        }
        Ok(())
    }

    /// Adds the next record. What an earlier one says stays.
    fn add(&mut self, record: &Record) {
        self.records += 1;
        for (topic, partitions) in &record.topics {
            for (partition, start) in partitions {
                let partition = TopicPartition::new(topic.as_str(), *partition);
                self.offsets.entry(partition).or_insert(*start);
            }
        }
    }
}
