//! Finds the end of a partition's chain.
//!
//! 1. The hint of the consumer group, if the object that it names exists and ends there.
//! 2. Or else `head.json`, under the same condition.
//! 3. The objects after it are listed, or all of them without a hint: the last one ends where the chain does.
//! 4. Without objects, the chain ends where it begins: at the offset of `genesis.json`.
//!
//! A hint never lies beyond the end, because it is written after the object. An old one costs a longer list.

use serde::{Deserialize, Serialize};

use super::{ChainError, layout::Layout, objects, span::Span};
use crate::stream::TopicPartition;

/// What the consumer group has committed for a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hint {
    /// The committed offset.
    pub end: i64,
    /// The object that ends there: the metadata of the commit.
    pub object: String,
}

/// Whether the hint of the consumer group was right.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum HintCheck {
    /// There is none.
    Absent,
    /// The object that it names ends at its offset. There may be newer objects.
    Agrees,
    /// It is not used, for this reason.
    Disagrees(String),
}

/// The newest object of a partition, as its writer knew it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Head {
    pub(super) end: i64,
    pub(super) object: String,
}

/// The end of a chain.
#[derive(Debug)]
pub(super) struct End {
    pub(super) offset: i64,
    /// Start of the newest object.
    pub(super) newest: Option<i64>,
    pub(super) hint: HintCheck,
}

/// Finds the end of the chain that begins at `genesis`.
pub(super) async fn find(
    layout: &Layout,
    partition: &TopicPartition,
    genesis: i64,
    hint: Option<&Hint>,
) -> Result<End, ChainError> {
    let (hint, mut known) = checked(layout, partition, hint).await?;
    let mut lost = None;
    if known.is_none()
        && let Some(head) = read_head(layout, partition).await?
    {
        match check(layout, partition, head.end, &head.object).await? {
            Checked::Agrees(object) => known = Some(*object),
            Checked::Missing => lost = Some(head.end),
            Checked::Disagrees(_) => {
                tracing::warn!(%partition, "head.json does not agree with the object that it names, and is not used");
            }
        }
    }
    let newest = newest(layout, partition, known).await?;
    let end = newest.as_ref().map_or(genesis, |object| object.end);
    // A rule of the bucket deletes old objects. The head was written after the object that it names.
    if let Some(lost) = lost.filter(|lost| *lost > end) {
        tracing::warn!(%partition, end = lost, "the newest object of the partition was deleted; continuing after it");
        return Ok(End { offset: lost, newest: None, hint });
    }
    Ok(End { offset: end, newest: newest.map(|object| object.start), hint })
}

/// Whether a hint is right.
pub(super) async fn check_hint(
    layout: &Layout,
    partition: &TopicPartition,
    hint: Option<&Hint>,
) -> Result<HintCheck, ChainError> {
    Ok(checked(layout, partition, hint).await?.0)
}

/// Whether a hint is right, and the object that it names.
async fn checked(
    layout: &Layout,
    partition: &TopicPartition,
    hint: Option<&Hint>,
) -> Result<(HintCheck, Option<Span>), ChainError> {
    let Some(hint) = hint else { return Ok((HintCheck::Absent, None)) };
    Ok(match check(layout, partition, hint.end, &hint.object).await? {
        Checked::Agrees(object) => (HintCheck::Agrees, Some(*object)),
        Checked::Missing => (HintCheck::Disagrees("the object that it names does not exist".to_owned()), None),
        Checked::Disagrees(reason) => (HintCheck::Disagrees(reason), None),
    })
}

/// What became of a hint.
enum Checked {
    Agrees(Box<Span>),
    Missing,
    Disagrees(String),
}

async fn check(layout: &Layout, partition: &TopicPartition, end: i64, object: &str) -> Result<Checked, ChainError> {
    let disagrees = |reason: &str| Ok(Checked::Disagrees(reason.to_owned()));
    let start = object.rsplit('/').next().and_then(super::layout::start_of);
    let Some(start) = start.filter(|start| layout.key(partition, *start) == object) else {
        return disagrees(match object {
            "" => "it names no object",
            _ => "the object that it names is not one of this partition in this output",
        });
    };
    match objects::read(&layout.object(partition, start), partition).await {
        Ok(Some(found)) if found.end == end => Ok(Checked::Agrees(Box::new(found))),
        Ok(Some(found)) => Ok(Checked::Disagrees(format!("its offset is {end}, but the object ends at {}", found.end))),
        Ok(None) => Ok(Checked::Missing),
        Err(error) => Err(error),
    }
}

/// The head of a partition; `None` where there is none, or none that can be parsed.
pub(super) async fn read_head(layout: &Layout, partition: &TopicPartition) -> Result<Option<Head>, ChainError> {
    let Some(bytes) = layout.head(partition).get().await? else { return Ok(None) };
    Ok(serde_json::from_slice(&bytes).ok())
}

/// The last object: one after `known`, or `known` itself.
async fn newest(layout: &Layout, partition: &TopicPartition, known: Option<Span>) -> Result<Option<Span>, ChainError> {
    let folder = layout.folder(partition);
    let mut listed = objects::list(&folder, known.as_ref().map(|object| object.start)).await?;
    while let Some((_, meta)) = listed.pop_last() {
        // One that was deleted since is not the last one.
        let location = folder.at(meta.location.clone());
        if let Some(found) = objects::read_listed(&location, meta, partition).await? {
            return Ok(Some(found));
        }
    }
    Ok(known)
}
