//! The folder that a COPY writes to. Its files get new names, so a second COPY would mix its rows with those of the first:
//! the folder must be empty unless the statement says what happens to the files in it.

use std::{collections::BTreeSet, path::PathBuf};

use futures::{StreamExt, stream};
use object_store::{ObjectMeta, path::Path};

use super::{copy_place, error::SqlError};
use crate::{
    error::{Error, Exit, Result},
    source::{MANIFEST, of_name},
    stores::Location,
};

/// Files that are deleted concurrently.
const CONCURRENT_FILES: usize = 16;

/// What COPY does with the files that lie in its folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Existing {
    /// The statement fails.
    #[default]
    Refuse,
    /// They stay.
    Append,
    /// They are deleted when the new files are complete.
    Overwrite,
}

impl Existing {
    pub(super) const ALL: [Self; 3] = [Self::Refuse, Self::Append, Self::Overwrite];

    /// The option of COPY that names it.
    pub(super) fn option(self) -> Option<&'static str> {
        match self {
            Self::Refuse => None,
            Self::Append => Some("append"),
            Self::Overwrite => Some("overwrite"),
        }
    }
}

/// The folder of a COPY.
#[derive(Debug, Clone)]
pub(super) struct OutputFolder {
    location: Location,
    pub(super) existing: Existing,
}

impl OutputFolder {
    pub(super) fn new(location: Location, existing: Existing) -> Self {
        Self { location, existing }
    }

    /// The files that the new ones replace.
    ///
    /// # Errors
    /// If the statement must not write to the folder, or if the folder cannot be listed.
    pub(super) async fn replaced(&self) -> Result<Vec<Location>> {
        // Web servers do not list files, and COPY cannot write to them.
        if self.location.is_http() {
            return Ok(Vec::new());
        }
        check_outside_outputs(&self.location).await?;
        let listed = self.location.below(&self.location.path, usize::MAX, |name| !name.starts_with('.')).await?;
        if self.existing != Existing::Refuse {
            self.check_no_job(&listed)?;
        }
        if self.existing == Existing::Append {
            return Ok(Vec::new());
        }
        if self.existing == Existing::Overwrite {
            self.check_no_links(&listed)?;
            let replaced = listed.into_iter().filter(|file| self.is_visible(file) && is_data(file));
            return Ok(replaced.map(|file| self.location.at(file.location)).collect());
        }
        match listed.iter().filter(|file| self.is_visible(file)).count() {
            0 => Ok(Vec::new()),
            count => Err(self.not_empty(count)),
        }
    }

    /// Whether a COPY without rows needs a file there: `FROM 'folder/'` finds none.
    ///
    /// # Errors
    /// If the folder cannot be listed.
    pub(super) async fn needs_file(&self) -> Result<bool> {
        if self.existing != Existing::Append {
            return Ok(true);
        }
        let listed = self.location.below(&self.location.path, usize::MAX, |name| !name.starts_with('.')).await?;
        Ok(!listed.iter().any(|file| self.is_visible(file) && is_data(file)))
    }

    /// The name of the folder in messages.
    fn name(&self) -> String {
        format!("{}/", self.location.to_string().trim_end_matches('/'))
    }

    fn not_empty(&self, count: usize) -> Error {
        let files = if count == 1 { "1 file lies".to_owned() } else { format!("{count} files lie") };
        Error::usage(
            format!("{}: COPY writes to an empty folder, and {files} in this one", self.name()),
            "OPTIONS (overwrite true) replaces the files, OPTIONS (append true) adds to them; or name another folder",
        )
    }

    /// Rejects links to other folders, whose files belong to somebody else.
    fn check_no_links(&self, listed: &[ObjectMeta]) -> Result<()> {
        let Some(root) = self.location.local_path() else { return Ok(()) };
        let files = listed.iter().filter_map(|file| self.location.at(file.location.clone()).local_path());
        let above = |file: PathBuf| file.ancestors().skip(1).map(PathBuf::from).collect::<Vec<_>>();
        let folders: BTreeSet<PathBuf> =
            files.flat_map(above).filter(|folder| folder.starts_with(&root) && *folder != root).collect();
        match folders.iter().find(|folder| folder.is_symlink()) {
            Some(link) => Err(Error::usage(
                format!("{}: is a link to another folder, whose files COPY does not delete", link.display()),
                "remove the link, or name another folder",
            )),
            None => Ok(()),
        }
    }

    /// Rejects the output of `elmo embed` and `elmo stream`, whose records would not describe the files any more.
    fn check_no_job(&self, listed: &[ObjectMeta]) -> Result<()> {
        let is_job = |file: &ObjectMeta| self.names(file).iter().any(|name| name == MANIFEST);
        match listed.iter().any(is_job) {
            true => Err(Error::usage(
                format!(
                    "{}: holds the output of elmo embed or elmo stream, which neither COPY nor INSERT changes",
                    self.name()
                ),
                "name another folder, or delete this one",
            )),
            false => Ok(()),
        }
    }

    /// The names of the folders of a file below this one, and its own.
    fn names(&self, file: &ObjectMeta) -> Vec<String> {
        let depth = self.location.path.parts_count();
        file.location.parts().skip(depth).map(|part| part.as_ref().to_owned()).collect()
    }

    /// Whether a file counts. As for `FROM 'folder/'`, hidden files and those with `_` do not.
    fn is_visible(&self, file: &ObjectMeta) -> bool {
        let names = self.names(file);
        // A store may have an object with the name of the folder itself.
        !names.is_empty() && names.iter().all(|name| !name.starts_with(['.', '_']))
    }

    /// Writes new files through to a local disk, before the files that they replace are deleted.
    ///
    /// # Errors
    /// If the disk fails.
    pub(super) async fn sync(&self, files: &[Path]) -> Result<()> {
        if self.existing != Existing::Overwrite {
            return Ok(());
        }
        let files: Vec<_> = files.iter().map(|path| self.location.at(path.clone())).collect();
        let synced = tokio::task::spawn_blocking(move || files.iter().try_for_each(Location::sync)).await;
        Ok(synced.map_err(|error| Error::Failed(error.to_string()))??)
    }

    /// Deletes replaced files, and the local folders that they leave empty.
    ///
    /// # Errors
    /// If some files cannot be deleted. The others are deleted all the same.
    pub(super) async fn delete(&self, replaced: &[Location]) -> Result<()> {
        let deletions: Vec<_> = replaced.iter().map(Location::delete).collect();
        let results = stream::iter(deletions).buffer_unordered(CONCURRENT_FILES).collect::<Vec<_>>().await;
        let failed: Vec<_> = results.into_iter().filter_map(std::result::Result::err).collect();
        self.delete_empty_folders(replaced.iter().filter_map(Location::local_path), false);
        let Some(first) = failed.first() else { return Ok(()) };
        let message = format!(
            "{}: the new files are complete, but {} of the {} files that they replace could not be deleted: {first}",
            self.name(),
            failed.len(),
            replaced.len()
        );
        let help = "delete the old files, or run the statement again".to_owned();
        Err(SqlError { message, exit: Exit::Storage, help: Some(help) }.into())
    }

    /// Whether it is a local folder that does not exist.
    pub(super) fn is_new(&self) -> bool {
        self.location.local_path().is_some_and(|path| !path.exists())
    }

    /// Deletes the empty local folders above some files, and the folder itself if `with_root`.
    pub(super) fn delete_empty_folders(&self, files: impl IntoIterator<Item = PathBuf>, with_root: bool) {
        let Some(root) = self.location.local_path() else { return };
        remove_empty_folders(&root, with_root, files);
    }
}

/// Rejects a file or folder in the output of `elmo embed` or `elmo stream`, and the output itself: its records would not
/// describe the files any more.
///
/// # Errors
/// [`Error::Usage`] if it is there.
pub(super) async fn check_outside_outputs(target: &Location) -> Result<()> {
    let Some(output) = output_around(target).await else { return Ok(()) };
    Err(Error::usage(
        format!(
            "{target}: {0}/ holds the output of elmo embed or elmo stream, as it has a folder {0}/{MANIFEST}, and neither COPY nor \
             INSERT changes it",
            output.trim_end_matches('/')
        ),
        "name a file or folder outside of it, or delete the output with that folder",
    ))
}

/// The innermost folder at or above `target` that holds the records of a job.
async fn output_around(target: &Location) -> Option<String> {
    if let Some(path) = target.local_path() {
        let real = real(&path);
        let mut folders = path.ancestors().chain(real.ancestors());
        let output = folders.find(|folder| has_files(&folder.join(MANIFEST)));
        return output.map(|folder| folder.display().to_string());
    }
    let parts: Vec<_> = target.path.parts().collect();
    let folders = (0..=parts.len()).rev().map(|depth| target.at(parts[..depth].iter().cloned().collect()));
    let folders: Vec<Location> = folders.collect();
    let has_records = futures::future::join_all(folders.iter().map(has_records)).await;
    let output = folders.iter().zip(has_records).find(|(_, has_records)| *has_records);
    output.map(|(folder, _)| folder.to_string())
}

/// A path without links, as far as it exists.
fn real(path: &std::path::Path) -> PathBuf {
    let linked = copy_place::linked(path);
    let existing = path.ancestors().find_map(|above| above.canonicalize().ok().map(|real| (above, real)));
    let rest = existing.and_then(|(above, real)| path.strip_prefix(above).ok().map(|rest| real.join(rest)));
    linked.or(rest).unwrap_or_else(|| path.to_path_buf())
}

fn has_files(folder: &std::path::Path) -> bool {
    std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some())
}

/// Whether a folder of an object store holds the records of a job. One that cannot be listed does not count: a user may have
/// rights to a part of a bucket only, and a store that does not answer will not take the file either.
async fn has_records(folder: &Location) -> bool {
    folder.child(MANIFEST).has_objects().await.unwrap_or(false)
}

/// Deletes the empty local folders above some files, and the folder `root` itself if `with_root`.
pub(super) fn remove_empty_folders(root: &std::path::Path, with_root: bool, files: impl IntoIterator<Item = PathBuf>) {
    let above = |file: PathBuf| file.ancestors().skip(1).map(PathBuf::from).collect::<Vec<_>>();
    let folders: BTreeSet<PathBuf> = files.into_iter().flat_map(above).collect();
    // The deepest first. Folders that still hold something cannot be removed.
    for folder in folders.iter().rev().filter(|folder| folder.starts_with(root) && (with_root || *folder != root)) {
        let _ = std::fs::remove_dir(folder);
    }
}

/// Whether `FROM 'folder/'` reads a file of this name, or COPY may have written it.
fn is_data(file: &ObjectMeta) -> bool {
    let name = file.location.as_ref();
    // Compressions that COPY writes if its OPTIONS say so.
    let plain = [".bz2", ".xz"].iter().find_map(|extension| name.strip_suffix(extension));
    of_name(plain.unwrap_or(name)).is_some()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::{ObjectStoreExt, memory::InMemory};

    use super::*;
    use crate::stores::Stores;

    /// An output has records in its folder `_elmo`; what is beside and above the output is not in it.
    #[tokio::test]
    async fn targets_in_an_output_of_a_store_are_found() {
        let store = Arc::new(InMemory::new());
        store.put(&Path::from("data/out/_elmo/job.json"), "{}".into()).await.unwrap();
        let stores = Stores::with_settings([]);
        stores.insert("memory://x", store);
        for (target, is_inside) in [
            ("data/out", true),
            ("data/out/x.parquet", true),
            ("data/out/a/b/", true),
            ("data/out/_elmo/done.json", true),
            ("data/out2/x.parquet", false),
            ("data/x.parquet", false),
            ("data", false),
            ("x.parquet", false),
        ] {
            let location = stores.locate(&format!("memory://x/{target}")).unwrap();
            let checked = check_outside_outputs(&location).await;
            assert_eq!(checked.is_err(), is_inside, "{target}: {checked:?}");
            if let Err(error) = checked {
                let said = "memory://x/data/out/ holds the output of elmo embed or elmo stream";
                assert!(error.to_string().contains(said), "{error}");
            }
        }
    }
}
