//! Whether inputs that were copied or moved still hold the rows that the finished parts were made of.

use std::sync::Arc;

use super::{
    BulkJob,
    chunks::Chunker,
    digest::RowDigest,
    manifest::{Part, PartEntry},
};
use crate::{
    error::Result,
    source::{Plan, Position},
    stage::Stage,
};

/// Reads the rows of the parts that have rows of a `changed` input, and compares their digests with the recorded ones;
/// false when one differs or was not recorded. Parts without rows of these inputs are not read.
pub(super) async fn rows_are_unchanged(
    job: &BulkJob,
    stage: &dyn Stage,
    plan: &Arc<Plan>,
    parts: &[Part],
    changed: &[usize],
) -> Result<bool> {
    let mut chunker: Option<Chunker> = None;
    for entry in parts.iter().filter_map(Part::entry).filter(|entry| reads_any(entry, changed)) {
        if entry.rows_digest.is_none() {
            return Ok(false);
        }
        // One reader for consecutive parts: to skip rows of a compressed file, a reader has to decompress them.
        let reader = match chunker.take() {
            Some(reader) if is_at(&reader, entry.start) => reader,
            _ => Chunker::new(job, stage, Arc::clone(plan), entry.start),
        };
        let reader = chunker.insert(reader);
        if digest_of(reader, entry.counts.rows_in).await? != entry.rows_digest {
            return Ok(false);
        }
        // As when the part was written: proceeds to the file that has the next row.
        reader.is_at_end().await?;
    }
    Ok(true)
}

fn reads_any(entry: &PartEntry, files: &[usize]) -> bool {
    entry.counts.rows_in > 0 && files.iter().any(|file| (entry.start.file..=entry.end.file).contains(file))
}

fn is_at(reader: &Chunker, start: Position) -> bool {
    reader.position() == start
}

/// Digest of the next `rows` rows; of fewer at the end of the input.
async fn digest_of(reader: &mut Chunker, mut rows: u64) -> Result<Option<String>> {
    let mut digest = RowDigest::new();
    while rows > 0 {
        let slices = reader.next(rows).await?;
        if slices.is_empty() {
            break;
        }
        for slice in &slices {
            digest.update(slice).map_err(elmo::Error::from)?;
            rows -= slice.len() as u64;
        }
        reader.advance();
    }
    Ok(digest.value())
}
