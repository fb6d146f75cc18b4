//! The manifest of an output, read without the lock: for `elmo inspect` and `elmo verify`.

use super::{
    FOLDER, JOB, Job, ManifestError, PartEntry,
    entry::Part,
    existing::{chain, read_entries},
    records,
};
use crate::stores::Location;

/// Reads the job and the entries of an output without the lock; `None` when there is no manifest. Entries that cannot be
/// parsed count as missing, as for a job that resumes.
///
/// # Errors
/// [`ManifestError::Store`] when the store fails, [`ManifestError::Broken`] when the job cannot be parsed or an entry does
/// not follow from the one before it.
pub async fn read(output: &Location) -> Result<Option<(Job, Vec<PartEntry>)>, ManifestError> {
    let folder = output.child(FOLDER);
    let Some(job) = records::read::<Job>(&folder.child(JOB)).await? else { return Ok(None) };
    let entries = read_entries(&folder, &folder.children().await?).await?;
    let (parts, _) = chain(&folder, &entries)?;
    let entries = parts.into_iter().filter_map(|part| match part {
        Part::Durable(entry) | Part::Damaged(entry) => Some(entry),
        Part::Lost => None,
    });
    Ok(Some((job.normalized(), entries.collect())))
}
