//! `--overwrite`: which files may be removed. Also removes incomplete files that a killed job left.

use std::path::Path;

use futures::{StreamExt, TryStreamExt, stream};
use object_store::ObjectMeta;
use parquet::arrow::async_reader::AsyncFileReader;

use super::{
    DONE, FOLDER, JOB, ManifestError, PARTIAL,
    existing::{Existing, REQUESTS, foreign, has_fingerprint},
    job::Job,
    lock::{Lock, RETRY_FOR},
    members::{Members, parts_after},
    names::{entry_name, parse_entry, parse_part},
};
use crate::stores::{
    Location, StoreError,
    file::{StoreFile, cause},
    local::name_of_staged,
};

/// Key of the model's fingerprint in the footer of every part.
const MODEL_KEY: &str = "elmo.fingerprint";

/// The parts of an earlier job, or of `now` without a manifest. Nothing may be removed when there is any other file.
///
/// # Errors
/// [`ManifestError::Foreign`] when there is, [`ManifestError::Store`] when the store fails.
pub(super) async fn own_parts<'e>(
    output: &Location,
    existing: &'e Existing,
    now: &Job,
) -> Result<Vec<&'e ObjectMeta>, ManifestError> {
    let mut own = Vec::new();
    for file in &existing.files {
        let is_own = existing.names(file) || (existing.job.is_none() && is_recognised(output, file, now).await?);
        if !is_own {
            return Err(foreign(output, file, existing.has_manifest()));
        }
        own.push(file);
    }
    Ok(own)
}

impl Existing {
    /// Whether the manifest names this file, or would name it next: a job may have been killed after it wrote a part
    /// and before it appended the entry.
    fn names(&self, file: &ObjectMeta) -> bool {
        let torn = self.entries.iter().rev().take_while(|(_, entry)| entry.is_none()).map(|(number, _)| *number).max();
        let last = self.entries.values().rev().flatten().next();
        let parts = torn.map_or_else(|| parts_after(last), |torn| torn.saturating_add(2));
        let fingerprint = self.job.as_ref().map(Job::fingerprint);
        let members = Members::new(self.entries.values().flatten(), parts, fingerprint);
        file.location.filename().is_some_and(|name| members.has(name))
    }
}

/// Without a recorded job: whether a file is a part of `now`, or of another job of elmo by its name and its footer.
async fn is_recognised(output: &Location, file: &ObjectMeta, now: &Job) -> Result<bool, ManifestError> {
    if has_fingerprint(file, now.fingerprint().as_deref()) {
        return Ok(true);
    }
    if file.location.filename().and_then(parse_part).is_none() {
        return Ok(false);
    }
    let location = output.at(file.location.clone());
    let path = location.path.clone();
    let mut reader = StoreFile { store: std::sync::Arc::clone(&location.store), path, size: file.size };
    match reader.get_metadata(None).await {
        Ok(metadata) => {
            let pairs = metadata.file_metadata().key_value_metadata();
            Ok(pairs.is_some_and(|pairs| pairs.iter().any(|pair| pair.key == MODEL_KEY)))
        }
        // A file that is not Parquet is not ours; a failing store proves nothing about the file.
        Err(error) => match cause(error) {
            Ok(source) => Err(StoreError::request("read", &location, *source).into()),
            Err(_) => Ok(false),
        },
    }
}

/// Removes the parts and the manifest of an earlier job, `job.json` last: after a crash in between, what is left can be
/// overwritten again.
pub(super) async fn remove(
    (output, folder): (&Location, &Location),
    existing: &Existing,
    parts: &[&ObjectMeta],
    lock: &Lock,
) -> Result<(), ManifestError> {
    // What was listed may be a successor's by now.
    lock.ask().await?;
    delete(parts.iter().map(|part| output.at(part.location.clone())), lock).await?;
    let totals = [DONE, PARTIAL].map(|name| folder.child(name));
    delete(totals.into_iter().chain(existing.entries.keys().map(|part| folder.child(&entry_name(*part)))), lock)
        .await?;
    delete(std::iter::once(folder.child(JOB)), lock).await
}

/// Deletes files while the lock is held. Stores do not delete conditionally, so no request is retried for longer than the
/// lease lasts.
async fn delete(files: impl Iterator<Item = Location>, lock: &Lock) -> Result<(), ManifestError> {
    let delete = |file: Location| async move {
        lock.verify().await?;
        Ok::<_, ManifestError>(file.retrying_for(RETRY_FOR).delete().await?)
    };
    let deletes: Vec<_> = files.map(delete).collect();
    stream::iter(deletes).buffer_unordered(REQUESTS).try_collect().await
}

/// Removes incomplete files of a killed job: the local store writes `.NAME#1` beside `NAME` and renames it. In the
/// folder of the parts only where there was a manifest before: otherwise such a file may belong to another program.
pub(super) async fn remove_staged(output: &Location, had_manifest: bool) -> Result<(), ManifestError> {
    let Some(output) = output.local_path() else { return Ok(()) };
    let removed = tokio::task::spawn_blocking(move || {
        remove_staged_in(&output.join(FOLDER), is_record)?;
        if had_manifest { remove_staged_in(&output, |name| parse_part(name).is_some()) } else { Ok(()) }
    });
    removed.await.map_err(|e| StoreError::local("remove", Path::new(FOLDER), std::io::Error::other(e)))?
}

fn remove_staged_in(folder: &Path, is_ours: fn(&str) -> bool) -> Result<(), ManifestError> {
    let failed = |path: &Path, e| ManifestError::from(StoreError::local("remove", path, e));
    let is_staged = |name: &str| name_of_staged(name).is_some_and(is_ours);
    for entry in std::fs::read_dir(folder).map_err(|e| failed(folder, e))? {
        let path = entry.map_err(|e| failed(folder, e))?.path();
        if path.file_name().and_then(|name| name.to_str()).is_some_and(is_staged) {
            std::fs::remove_file(&path).map_err(|e| failed(&path, e))?;
        }
    }
    Ok(())
}

/// Whether a name is one of a file of the manifest.
fn is_record(name: &str) -> bool {
    matches!(name, JOB | DONE | PARTIAL) || parse_entry(name).is_some()
}
