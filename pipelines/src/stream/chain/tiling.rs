//! Whether objects tile the offsets of their partitions: `elmo inspect` and `elmo verify` of a dataset.

use std::{collections::BTreeMap, fmt};

use serde::{Serialize, Serializer};

use super::{
    Rejected, Span,
    layout::{Layout, partition_of, start_of},
};
use crate::{error::Result, report::count, stores::Location, stream::TopicPartition};

/// Problems that one sentence lists.
const MAX_LISTED: usize = 3;

/// The result of checking the objects of a dataset.
#[derive(Debug, Clone, Default, Serialize)]
pub struct ChainCheck {
    /// The partitions in the order of their names.
    pub partitions: Vec<PartitionCheck>,
    /// What is wrong.
    pub problems: Vec<ChainProblem>,
}

/// The objects of one partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PartitionCheck {
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: i32,
    /// The first offset.
    pub start: i64,
    /// The offset after the last message.
    pub end: i64,
    /// Number of objects.
    pub objects: usize,
    /// Rows of all objects.
    pub rows: u64,
    /// Messages that were rejected, by the label of the reason.
    pub rejected: Rejected,
    /// Offsets whose messages the broker had deleted before they were read.
    pub lost: i64,
}

/// A fault of a dataset. In JSON it is the message.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChainProblem {
    /// A Parquet file that no stream wrote.
    Unnamed {
        /// The file.
        file: String,
    },
    /// An object whose footer is not as a stream writes it.
    Footer {
        /// The object.
        file: String,
        /// What is wrong.
        reason: String,
    },
    /// Another number of rows than the footer says.
    Rows {
        /// The object.
        file: String,
        /// Rows of the file.
        found: u64,
        /// Rows by the footer.
        expected: u64,
    },
    /// Rows whose offsets do not go up, or are not those of the object.
    Offsets {
        /// The object.
        file: String,
        /// The first such offset.
        offset: i64,
    },
    /// Offsets that no object has.
    Hole {
        /// The partition.
        partition: TopicPartition,
        /// The first of them.
        start: i64,
        /// The offset after them.
        end: i64,
    },
    /// Offsets that two objects have.
    Overlap {
        /// The partition.
        partition: TopicPartition,
        /// The first of them.
        start: i64,
        /// The offset after them.
        end: i64,
    },
    /// A partition without the record of its first offset.
    NoGenesis {
        /// The partition.
        partition: TopicPartition,
    },
}

impl fmt::Display for ChainProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unnamed { file } => write!(f, "{file} is no object of the stream"),
            Self::Footer { file, reason } => write!(f, "{file}: {reason}"),
            Self::Rows { file, found, expected } => {
                write!(f, "{file} has {found} rows, but its footer says {expected}")
            }
            Self::Offsets { file, offset } => {
                write!(f, "{file}: offset {offset} does not follow the one before it, or is not in the object's range")
            }
            Self::Hole { partition, start, end } => write!(f, "{partition}: no object has offsets {start} to {end}"),
            Self::Overlap { partition, start, end } => {
                write!(f, "{partition}: two objects have offsets {start} to {end}")
            }
            Self::NoGenesis { partition } => write!(f, "{partition}: the record of its first offset is missing"),
        }
    }
}

impl Serialize for ChainProblem {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl ChainCheck {
    /// Checks that the objects of a partition tile its offsets. `genesis` and `head` are what the chain's own files say.
    pub fn add(&mut self, partition: &TopicPartition, mut spans: Vec<Span>, genesis: Option<i64>, head: Option<i64>) {
        spans.sort_by_key(|span| span.start);
        let start = genesis.or_else(|| Some(spans.first()?.start)).unwrap_or(0);
        let mut end = start;
        for span in &spans {
            let partition = partition.clone();
            if span.start > end {
                self.problems.push(ChainProblem::Hole { partition, start: end, end: span.start });
            } else if span.start < end {
                let (start, end) = (span.start, end.min(span.end));
                self.problems.push(ChainProblem::Overlap { partition, start, end });
            }
            end = end.max(span.end);
        }
        if let Some(head) = head.filter(|head| *head > end) {
            self.problems.push(ChainProblem::Hole { partition: partition.clone(), start: end, end: head });
        }
        let mut rejected = Rejected::new();
        for (label, count) in spans.iter().flat_map(|span| &span.rejected) {
            *rejected.entry(label.clone()).or_default() += count;
        }
        self.partitions.push(PartitionCheck {
            topic: partition.topic.to_string(),
            partition: partition.partition,
            start,
            end,
            objects: spans.len(),
            rows: spans.iter().map(|span| span.rows).sum(),
            rejected,
            lost: spans.iter().flat_map(|span| &span.gaps).map(|gap| gap.end - gap.start).sum(),
        });
    }

    /// The problems in one sentence; `None` when there are none.
    pub fn failure(&self) -> Option<String> {
        let first: Vec<String> = self.problems.iter().take(MAX_LISTED).map(ToString::to_string).collect();
        let more = match self.problems.len().saturating_sub(MAX_LISTED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        (!first.is_empty())
            .then(|| format!("the objects do not tile the offsets of the topic: {}{more}", first.join(", ")))
    }

    /// What to do about the problems; `None` when there are none.
    pub fn help(&self) -> Option<String> {
        let unnamed = self.problems.iter().any(|problem| matches!(problem, ChainProblem::Unnamed { .. }));
        let help = if unnamed {
            "delete or move the files that no stream wrote, because readers of the folder read them too; restore the others \
             from a backup, or start over with a new --generation"
        } else {
            "restore the objects from a backup, or start over with a new --generation"
        };
        (!self.problems.is_empty()).then(|| help.to_owned())
    }

    /// Lines of a report.
    pub(crate) fn lines(&self) -> Vec<(String, String)> {
        let partitions = self.partitions.iter().map(|found| {
            let rejected: u64 = found.rejected.values().sum();
            let mut line = format!(
                "offsets {} to {} in {} objects, {} rows",
                found.start,
                found.end,
                count(found.objects as u64),
                count(found.rows)
            );
            if rejected > 0 {
                line.push_str(&format!(", {} rejected", count(rejected)));
            }
            if found.lost > 0 {
                line.push_str(&format!(", {} lost before they were read", count(found.lost.unsigned_abs())));
            }
            (format!("{}[{}]", found.topic, found.partition), line)
        });
        let problems = self.problems.iter().map(|problem| ("problem".to_owned(), problem.to_string()));
        partitions.chain(problems).collect()
    }
}

/// The dataset of a stream in a folder, for readers.
#[derive(Debug)]
pub(crate) struct StreamFolder(Layout);

impl StreamFolder {
    /// The dataset in `folder`; `None` when there is none.
    pub(crate) async fn find(folder: &Location) -> Result<Option<Self>> {
        // Web servers answer in many ways that a file does not exist.
        if folder.is_http() {
            return Ok(None);
        }
        let layout = Layout::new(folder, 1);
        // Nothing is below a file.
        if layout.root.local_path().is_some_and(|path| path.is_file()) {
            return Ok(None);
        }
        Ok(layout.record().head().await?.map(|_| Self(layout)))
    }

    /// The Parquet files in it with their sizes: objects of the stream in the order of their names, and names of others.
    pub(crate) async fn files(&self) -> Result<(Vec<(Location, u64)>, Vec<String>)> {
        let root = &self.0.root;
        let mut listed = root.below(&root.path, 3, is_data).await?;
        listed.sort_by(|a, b| a.location.cmp(&b.location));
        let (mut objects, mut others) = (Vec::new(), Vec::new());
        for meta in listed {
            let parts: Vec<String> = meta
                .location
                .prefix_match(&root.path)
                .map(|parts| parts.map(|part| part.as_ref().to_owned()).collect())
                .unwrap_or_default();
            let name = meta.location.filename().unwrap_or_default();
            if !name.ends_with(".parquet") || !parts.iter().all(|part| is_data(part)) {
                continue;
            }
            match parts.len() == 3 && partition_of(&meta.location).is_some() && start_of(name).is_some() {
                true => objects.push((root.at(meta.location), meta.size)),
                false => others.push(parts.join("/")),
            }
        }
        Ok((objects, others))
    }

    /// Where the chain of a partition begins, and where its newest object ends, by the chain's own files.
    pub(crate) async fn ends(&self, partition: &TopicPartition) -> Result<(Option<i64>, Option<i64>)> {
        let location = self.0.genesis(partition);
        let genesis = match location.get().await? {
            Some(bytes) => Some(super::parse_genesis(&location, &bytes)?.start),
            None => None,
        };
        let head = super::end::read_head(&self.0, partition).await?;
        // A stream that runs publishes objects after the others were listed.
        let Some(head) = head else { return Ok((genesis, None)) };
        let start = head.object.rsplit('/').next().and_then(start_of);
        let exists = match start {
            Some(start) => self.0.object(partition, start).head().await?.is_some(),
            None => true,
        };
        Ok((genesis, (!exists).then_some(head.end)))
    }
}

/// Whether a folder or file below a dataset is data: not the chain's own files, and not another generation.
fn is_data(name: &str) -> bool {
    !name.starts_with(['_', '.']) && !name.starts_with("generation=")
}

/// The partitions of spans.
pub(crate) fn by_partition(spans: impl IntoIterator<Item = Span>) -> BTreeMap<TopicPartition, Vec<Span>> {
    let mut found = BTreeMap::<TopicPartition, Vec<Span>>::new();
    for span in spans {
        found.entry(span.partition.clone()).or_default().push(span);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(ends: &[(i64, i64)], genesis: Option<i64>, head: Option<i64>) -> ChainCheck {
        let partition = TopicPartition::new("t", 0);
        let span = |(start, end): &(i64, i64)| Span {
            partition: partition.clone(),
            start: *start,
            end: *end,
            rows: 1,
            rejected: [("x".to_owned(), 2)].into(),
            gaps: std::iter::once(*start..*start + 1).collect(),
            generation: 1,
            writer: "w".into(),
            attempt: 0,
        };
        let mut found = ChainCheck::default();
        found.add(&partition, ends.iter().map(span).collect(), genesis, head);
        found
    }

    #[test]
    fn objects_that_tile_have_no_problem() {
        let found = check(&[(9, 12), (5, 9)], Some(5), Some(12));
        assert_eq!((found.failure(), found.help()), (None, None));
        let line = "offsets 5 to 12 in 2 objects, 2 rows, 4 rejected, 2 lost before they were read";
        assert_eq!(found.lines(), [("t[0]".to_owned(), line.to_owned())]);
    }

    #[test]
    fn holes_and_overlaps_are_named() {
        let partition = || TopicPartition::new("t", 0);
        let hole = |start, end| ChainProblem::Hole { partition: partition(), start, end };
        let overlap = |start, end| ChainProblem::Overlap { partition: partition(), start, end };
        assert_eq!(check(&[(5, 9), (10, 12)], Some(3), None).problems, [hole(3, 5), hole(9, 10)]);
        assert_eq!(check(&[(5, 9), (7, 12)], None, None).problems, [overlap(7, 9)]);
        assert_eq!(check(&[(5, 20), (7, 12)], None, None).problems, [overlap(7, 12)]);
        // Its newest object is gone.
        assert_eq!(check(&[(5, 9)], Some(5), Some(12)).problems, [hole(9, 12)]);
        assert_eq!(check(&[], Some(5), Some(12)).problems, [hole(5, 12)]);
        let found = check(&[(5, 9), (5, 9), (10, 11), (12, 13), (14, 15)], Some(5), None).failure();
        assert!(found.is_some_and(|found| found.ends_with("t[0]: no object has offsets 11 to 12 and 1 more")));
    }
}
