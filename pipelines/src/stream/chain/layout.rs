//! Names of the objects of a dataset.
//!
//! ```text
//! OUTPUT/topic=reviews/partition=3/00000000000000001500.parquet   messages from offset 1500 on
//! OUTPUT/_elmo/stream.json                                        identity: settings that all writers share
//! OUTPUT/_elmo/starts/00000000000000000001.json                  where partitions begin, created once, before their chains
//! OUTPUT/_elmo/chain/reviews/3/genesis.json                       the first offset of the partition, created once
//! OUTPUT/_elmo/chain/reviews/3/head.json                          the newest object, as a hint
//! OUTPUT/generation=2/…                                           the same again for --generation 2
//! ```
//!
//! The name of an object is a function of topic, partition and start offset alone: two writers that start at the same
//! offset compute the same name, and the store lets one of them create it. Offsets are padded, so names sort as offsets
//! do. Partition numbers are not: DuckDB would read padded ones as text.
//!
//! A generation above 1 is a dataset of its own in a folder of the output. Readers that are given `OUTPUT/generation=2`
//! see `topic` and `partition` as columns, exactly as those that are given an output with one generation. A reader that is
//! given the whole output with two generations must not take all rows of both for one dataset, in which messages may
//! occur twice: DuckDB and Spark refuse it because the files differ in their partition columns, and the others show
//! `generation` as a column, NULL for the first one. With a folder `generation=1` from the start all readers would
//! silently return both.

use std::time::Duration;

use chrono::Utc;

use crate::{
    source::hive::Partition,
    stores::{Location, StoreError, local::ABANDONED},
    stream::TopicPartition,
};

/// Folder of the control files.
pub(crate) const FOLDER: &str = "_elmo";
/// Identity of a dataset.
pub(crate) const RECORD: &str = "stream.json";
const GENESIS: &str = "genesis.json";
/// The beginning of the names of objects with which a process checks the store.
const PROBE: &str = "probe-";
const EXTENSION: &str = ".parquet";
/// Digits of an offset in a name.
const DIGITS: usize = 20;

/// The places of one dataset.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// The output, or the folder of the generation in it.
    pub(crate) root: Location,
    pub(crate) generation: u32,
}

impl Layout {
    pub(crate) fn new(output: &Location, generation: u32) -> Self {
        let root = match generation {
            0 | 1 => output.clone(),
            _ => output.child(&format!("generation={generation}")),
        };
        Self { root, generation: generation.max(1) }
    }

    /// The same places, with another retry budget.
    pub(crate) fn retrying_for(&self, budget: std::time::Duration) -> Self {
        Self { root: self.root.retrying_for(budget), ..self.clone() }
    }

    /// Deletes what killed processes have left: in a local output unfinished files, that nobody reads, and in a store the objects
    /// with which they checked it. What cannot be deleted stays.
    pub(super) async fn sweep(&self) {
        // The deepest files are those of `_elmo/chain/TOPIC/PARTITION`.
        const DEPTH: usize = 4;
        let is_ours = |name: &str| name.ends_with(EXTENSION) || name.ends_with(".json");
        if let Err(error) = self.root.sweep(DEPTH, ABANDONED, is_ours).await {
            tracing::warn!(%error, "unfinished files of killed processes stay where they are");
        }
        if let Err(error) = self.sweep_probes(ABANDONED).await {
            tracing::warn!(%error, "objects with which killed processes checked the store stay where they are");
        }
    }

    /// Deletes the probes that are at least this old.
    async fn sweep_probes(&self, age: Duration) -> Result<(), StoreError> {
        // A local file system is not probed.
        if self.root.local_path().is_some() {
            return Ok(());
        }
        let folder = self.root.child(FOLDER);
        for meta in folder.children().await? {
            let is_probe = meta.location.filename().is_some_and(|name| name.starts_with(PROBE));
            // One whose time is in the future is young.
            let is_old = (Utc::now() - meta.last_modified).to_std().is_ok_and(|passed| passed >= age);
            if is_probe && is_old {
                folder.at(meta.location).delete().await?;
            }
        }
        Ok(())
    }

    /// An object with which a process checks the store.
    pub(super) fn probe(&self, process: &str, number: usize) -> Location {
        self.root.child(FOLDER).child(&format!("{PROBE}{process}-{number}"))
    }

    /// The identity of the dataset.
    pub(crate) fn record(&self) -> Location {
        self.root.child(FOLDER).child(RECORD)
    }

    /// The folder with the records of where partitions begin.
    pub(super) fn starts(&self) -> Location {
        self.root.child(FOLDER).child("starts")
    }

    /// The record with this number, from 1 on.
    pub(super) fn start_record(&self, number: usize) -> Location {
        self.starts().child(&format!("{number:0DIGITS$}.json"))
    }

    /// The folder with the chain's own files of all partitions.
    pub(crate) fn chains(&self) -> Location {
        self.root.child(FOLDER).child("chain")
    }

    fn chain(&self, partition: &TopicPartition) -> Location {
        self.chains().child(&partition.topic).child(&partition.partition.to_string())
    }

    pub(crate) fn genesis(&self, partition: &TopicPartition) -> Location {
        self.chain(partition).child(GENESIS)
    }

    pub(crate) fn head(&self, partition: &TopicPartition) -> Location {
        self.chain(partition).child("head.json")
    }

    /// The folder with the rows of a partition.
    pub(crate) fn folder(&self, partition: &TopicPartition) -> Location {
        self.root.child(&format!("topic={}", partition.topic)).child(&format!("partition={}", partition.partition))
    }

    /// The object whose messages begin at `start`.
    pub(crate) fn object(&self, partition: &TopicPartition, start: i64) -> Location {
        self.folder(partition).child(&name(start))
    }

    /// The address of an object within the output, as the consumer group stores it.
    pub(crate) fn key(&self, partition: &TopicPartition, start: i64) -> String {
        let generation = if self.generation == 1 { String::new() } else { format!("generation={}/", self.generation) };
        format!("{generation}topic={}/partition={}/{}", partition.topic, partition.partition, name(start))
    }

    /// The partitions whose chains have begun.
    pub(super) async fn partitions(&self) -> Result<Vec<TopicPartition>, StoreError> {
        let chains = self.chains();
        let listed = chains.below(&chains.path, 3, |_| true).await?;
        Ok(listed.iter().filter_map(|meta| self.partition_of_genesis(&meta.location)).collect())
    }

    /// The partition whose first offset is in this object; `None` for another object.
    pub(crate) fn partition_of_genesis(&self, path: &object_store::path::Path) -> Option<TopicPartition> {
        let mut parts = path.prefix_match(&self.chains().path)?;
        let (topic, partition, name) = (parts.next()?, parts.next()?, parts.next()?);
        (name.as_ref() == GENESIS && parts.next().is_none()).then_some(())?;
        Some(TopicPartition::new(topic.as_ref(), partition.as_ref().parse().ok()?))
    }
}

/// The name of the object whose messages begin at `start`.
pub(crate) fn name(start: i64) -> String {
    format!("{start:0DIGITS$}{EXTENSION}")
}

/// The start of the object with this name; `None` for another file.
pub(crate) fn start_of(file: &str) -> Option<i64> {
    let start = file.strip_suffix(EXTENSION)?.parse().ok()?;
    (start >= 0 && name(start) == file).then_some(start)
}

/// The partition in whose folder an object is; `None` for an object elsewhere.
pub(crate) fn partition_of(path: &object_store::path::Path) -> Option<TopicPartition> {
    let parts: Vec<_> = path.parts().collect();
    let value = |back: usize, key: &str| {
        let folder = parts.len().checked_sub(back).map(|at| Partition::of_folder(parts[at].as_ref()));
        folder.flatten().filter(|found| found.key == key)?.value
    };
    Some(TopicPartition::new(value(3, "topic")?, value(2, "partition")?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures::TryStreamExt;
    use object_store::{ObjectStore, PutMode, memory::InMemory};

    use super::*;
    use crate::stores::Stores;

    /// The names are those of the design: other programs may rely on them.
    #[test]
    fn names() {
        let output = Stores::with_settings([]).locate("/data/out").unwrap();
        let partition = TopicPartition::new("re.views_2-b", 3);
        let layout = Layout::new(&output, 1);
        let object = layout.object(&partition, 1500);
        assert_eq!(object.to_string(), "/data/out/topic=re.views_2-b/partition=3/00000000000000001500.parquet");
        assert_eq!(layout.key(&partition, 1500), "topic=re.views_2-b/partition=3/00000000000000001500.parquet");
        assert_eq!(partition_of(&object.path), Some(partition.clone()));
        let genesis = layout.genesis(&partition);
        assert_eq!(genesis.to_string(), "/data/out/_elmo/chain/re.views_2-b/3/genesis.json");
        assert_eq!(layout.partition_of_genesis(&genesis.path), Some(partition.clone()));
        assert_eq!(layout.partition_of_genesis(&layout.head(&partition).path), None);
        assert_eq!(partition_of(&genesis.path), None);
        assert_eq!(layout.start_record(7).to_string(), "/data/out/_elmo/starts/00000000000000000007.json");

        let second = Layout::new(&output, 2);
        let key = "generation=2/topic=re.views_2-b/partition=3/00000000000000000000.parquet";
        assert_eq!(second.key(&partition, 0), key);
        assert_eq!(second.object(&partition, 0).to_string(), format!("/data/out/{key}"));
        assert_eq!(second.record().to_string(), "/data/out/generation=2/_elmo/stream.json");
    }

    /// A store whose objects are all of this moment.
    #[tokio::test]
    async fn old_probes_are_deleted_and_nothing_else() {
        let (store, stores) = (Arc::new(InMemory::new()), Stores::with_settings([]));
        stores.insert("memory://x", Arc::<InMemory>::clone(&store));
        let layout = Layout::new(&stores.locate("memory://x/out").unwrap(), 1);
        let partition = TopicPartition::new("probe-reviews", 3);
        let others = [layout.record(), layout.genesis(&partition), layout.object(&partition, 0)];
        let probes = [0, 1].map(|number| layout.probe("killed", number));
        for object in others.iter().chain(&probes) {
            object.put("x".into(), PutMode::Create).await.unwrap();
        }
        let left = || async { store.list(None).try_collect::<Vec<_>>().await.unwrap().len() };
        layout.sweep().await;
        assert_eq!(left().await, 5);
        layout.sweep_probes(Duration::ZERO).await.unwrap();
        assert_eq!(left().await, 3);
        for object in &others {
            assert!(object.head().await.unwrap().is_some(), "{object}");
        }
    }

    #[test]
    fn names_sort_as_offsets_do() {
        let offsets = [0, 9, 10, 999, i64::from(i32::MAX), i64::MAX];
        let names = offsets.map(name);
        assert!(names.is_sorted());
        assert_eq!(names.each_ref().map(|name| start_of(name)), offsets.map(Some));
        for other in ["5.parquet", "00000000000000001500.parquet.crc", "-0000000000000000001.parquet", "x", ""] {
            assert_eq!(start_of(other), None, "{other}");
        }
    }
}
