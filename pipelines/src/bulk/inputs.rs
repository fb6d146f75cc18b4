//! Whether inputs that were copied or moved still hold the rows that the finished parts were made of.

use std::sync::Arc;

use super::{digest::RowDigest, manifest::PartEntry};
use crate::{
    error::Result,
    source::{Plan, Position, Rows, Slice},
};

/// Reads the rows of the parts that have rows of a `changed` input, and compares their digests with the recorded ones;
/// false when one differs or was not recorded. Parts without rows of these inputs are not read.
pub(crate) async fn rows_are_unchanged(
    plan: &Arc<Plan>,
    entries: impl IntoIterator<Item = &PartEntry>,
    changed: &[usize],
) -> Result<bool> {
    let mut reader: Option<Reader> = None;
    for entry in entries.into_iter().filter(|entry| reads_any(entry, changed)) {
        if entry.rows_digest.is_none() {
            return Ok(false);
        }
        // One reader for consecutive parts: to skip rows of a compressed file, a reader has to decompress them.
        let same = reader.take().filter(|reader| reader.position() == entry.start);
        let reader = reader.insert(same.unwrap_or_else(|| Reader::new(plan, entry.start)));
        if reader.digest(entry.counts.rows_in).await? != entry.rows_digest {
            return Ok(false);
        }
        // As when the part was written: proceeds to the file that has the next row.
        reader.peek().await?;
    }
    Ok(true)
}

fn reads_any(entry: &PartEntry, files: &[usize]) -> bool {
    entry.counts.rows_in > 0 && files.iter().any(|file| (entry.start.file..=entry.end.file).contains(file))
}

/// Rows, of which any number can be taken.
struct Reader {
    rows: Rows,
    /// Rows that were read and not taken.
    rest: Option<Slice>,
}

impl Reader {
    fn new(plan: &Arc<Plan>, from: Position) -> Self {
        Self { rows: Rows::new(Arc::clone(plan), from), rest: None }
    }

    fn position(&self) -> Position {
        self.rest.as_ref().map_or_else(|| self.rows.position(), |rest| rest.start)
    }

    async fn peek(&mut self) -> Result<()> {
        if self.rest.is_none() {
            self.rest = self.rows.next().await?;
        }
        Ok(())
    }

    /// Digest of the next `rows` rows; of fewer at the end of the input.
    async fn digest(&mut self, mut rows: u64) -> Result<Option<String>> {
        let mut digest = RowDigest::new();
        while rows > 0 {
            self.peek().await?;
            let Some(slice) = self.rest.take() else { break };
            let taken = usize::try_from(rows).map_or(slice.len(), |rows| rows.min(slice.len()));
            digest.update(&slice.slice(0, taken)).map_err(elmo::Error::from)?;
            rows -= taken as u64;
            self.rest = (taken < slice.len()).then(|| slice.slice(taken, slice.len() - taken));
        }
        Ok(digest.value())
    }
}
