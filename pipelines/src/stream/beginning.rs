//! Decides where partitions begin that have no output, for all of them before the group is joined.
//!
//! Whichever process is killed afterwards, the next one starts there, and reads what arrived in between. A partition without a
//! record starts at its first message: with `--start earliest` all partitions, otherwise those that were added later, also while
//! no process ran.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use super::{
    StreamError, TopicPartition,
    chain::Dataset,
    source::{Plan, Settings, Start, first_offsets},
    transaction,
};
use crate::{
    crash::stream as crash,
    error::{Error, Result},
};

/// What decides where a stream begins.
pub(super) struct Beginning<'a> {
    pub(super) kafka: &'a Settings,
    pub(super) plan: &'a Plan,
    pub(super) start: Start,
}

/// Selects the partitions that `--start` is about.
#[derive(Debug, Clone)]
pub(super) struct Selection {
    /// Topics that are read by their names, and not by a pattern.
    named: HashSet<Arc<str>>,
}

impl Selection {
    pub(super) fn new(named: HashSet<Arc<str>>) -> Self {
        Self { named }
    }

    /// Whether a partition without output begins where the user says, given the topics that have output; otherwise it was
    /// added to what is read. A pattern is read as a whole.
    pub(super) fn takes(&self, begun: &HashSet<Arc<str>>, partition: &TopicPartition) -> bool {
        match self.named.contains(&partition.topic) {
            true => !begun.contains(&partition.topic),
            false => begun.is_empty(),
        }
    }
}

impl Beginning<'_> {
    /// Records where the chains of a dataset begin.
    ///
    /// # Errors
    /// Those of the brokers and the store.
    pub(super) async fn of_dataset(&self, dataset: &mut Dataset) -> Result<()> {
        let selection = Selection::new(self.kafka.named_topics());
        let starts = self.starts(&selection, dataset.begun()).await?;
        if !starts.is_empty() {
            crash::before_begin();
            dataset.record_starts(starts, |begun, partition| selection.takes(begun, partition)).await?;
            crash::after_begin();
        }
        Ok(())
    }

    /// Commits where the group of a stream into a topic begins.
    ///
    /// # Errors
    /// Those of the brokers.
    pub(super) async fn of_group(&self) -> Result<()> {
        let selection = Selection::new(self.kafka.named_topics());
        let starts: HashMap<_, _> = self.starts(&selection, &self.plan.begun).await?.into_iter().collect();
        if starts.is_empty() {
            return Ok(());
        }
        let (kafka, partitions) = (self.kafka.clone(), self.plan.partitions().collect::<Vec<_>>());
        let begin = move || {
            transaction::begin(&kafka, &partitions, |committed| {
                let known = || partitions.iter().zip(committed);
                let begun = known().filter(|(_, offset)| offset.is_some()).map(|(p, _)| Arc::clone(&p.topic)).collect();
                let new = known().filter(|(p, offset)| offset.is_none() && selection.takes(&begun, p));
                new.filter_map(|(p, _)| Some((p.clone(), *starts.get(p)?))).collect()
            })
        };
        let begun = tokio::task::spawn_blocking(begin).await;
        Ok(begun.map_err(|e| Error::Failed(format!("a thread died: {e}")))??)
    }

    async fn starts(
        &self,
        selection: &Selection,
        begun: &HashSet<Arc<str>>,
    ) -> Result<Vec<(TopicPartition, i64)>, StreamError> {
        let new: Vec<_> = self.plan.partitions().filter(|partition| selection.takes(begun, partition)).collect();
        if self.start == Start::Beginning || new.is_empty() {
            return Ok(Vec::new());
        }
        let starts = first_offsets(self.kafka, &new, self.start).await?;
        Ok(new.into_iter().zip(starts).collect())
    }
}
