//! The manifest of an output, read without the lock: for `elmo inspect` and `elmo verify`.

use super::{
    Counts, DONE, FOLDER, JOB, Job, ManifestError, Members, PartEntry,
    entry::Part,
    existing::{chain, read_entries, without_others},
    members::parts_after,
    records,
};
use crate::stores::Location;

/// The job of an output and its entries.
#[derive(Debug)]
pub(crate) struct Recorded {
    pub(crate) job: Job,
    pub(crate) entries: Vec<PartEntry>,
}

impl Recorded {
    /// Which files are parts of the job.
    pub(crate) fn members(&self) -> Members<'_> {
        Members::new(&self.entries, parts_after(self.entries.last()), Some(self.job.fingerprint()))
    }
}

/// Reads the job and the entries of an output without the lock; `None` when there is no manifest. Entries that cannot be
/// parsed count as missing, as for a job that resumes.
///
/// # Errors
/// [`ManifestError::Store`] when the store fails, [`ManifestError::Damaged`] when the job is missing or cannot be parsed,
/// [`ManifestError::Broken`] when an entry does not follow from the one before it.
pub(crate) async fn read(output: &Location) -> Result<Option<Recorded>, ManifestError> {
    let folder = output.child(FOLDER);
    let damaged = || ManifestError::Damaged { file: folder.child(JOB).to_string() };
    let job = match records::read::<Job>(&folder.child(JOB)).await {
        Err(ManifestError::Broken { .. }) => return Err(damaged()),
        job => job?,
    };
    let mut entries = read_entries(&folder, &folder.children().await?).await?;
    let Some(job) = job else { return if entries.is_empty() { Ok(None) } else { Err(damaged()) } };
    let job = job.normalized();
    without_others(&mut entries, &job);
    let (parts, _) = chain(&folder, &entries)?;
    let entries = parts.into_iter().filter_map(|part| match part {
        Part::Durable(entry) | Part::Damaged(entry) => Some(entry),
        Part::Lost => None,
    });
    Ok(Some(Recorded { job, entries: entries.collect() }))
}

/// Reads the totals of a finished job; `None` when it is not finished.
///
/// # Errors
/// [`ManifestError::Store`] when the store fails, [`ManifestError::Damaged`] when the totals cannot be parsed.
pub(crate) async fn read_totals(output: &Location) -> Result<Option<Counts>, ManifestError> {
    let file = output.child(FOLDER).child(DONE);
    match records::read(&file).await {
        // Emptied by a job that repairs a part.
        Err(ManifestError::Broken { .. }) if file.head().await?.is_some_and(|meta| meta.size == 0) => Ok(None),
        Err(ManifestError::Broken { .. }) => Err(ManifestError::Damaged { file: file.to_string() }),
        totals => totals,
    }
}
