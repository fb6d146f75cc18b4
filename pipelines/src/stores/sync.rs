//! Local files and folders that survive a power failure.
//!
//! A file is durable once its content and its entry in the folder are synced. For a new folder the same holds one level
//! up, so every folder up to the first one that existed before is synced.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

/// Creates `folder` and its missing parents, and syncs the folders that hold their entries.
pub(crate) fn create_folder(folder: &Path) -> io::Result<()> {
    let changed = parents_of_missing(folder, Path::exists);
    if changed.is_empty() {
        return Ok(());
    }
    fs::create_dir_all(folder)?;
    changed.iter().try_for_each(|folder| sync(folder))
}

/// Syncs a file, or the entries of a folder.
pub(crate) fn sync(path: &Path) -> io::Result<()> {
    crate::crash::stores::sync()?;
    File::open(path)?.sync_all()
}

/// The folders that gain an entry when `folder` and its missing parents are created, the deepest first. The last one
/// existed before.
fn parents_of_missing(folder: &Path, exists: impl Fn(&Path) -> bool) -> Vec<PathBuf> {
    let missing = folder.ancestors().take_while(|path| !path.as_os_str().is_empty() && !exists(path));
    missing
        .filter_map(Path::parent)
        .map(|parent| if parent.as_os_str().is_empty() { Path::new(".") } else { parent })
        .map(Path::to_path_buf)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_synced_up_to_the_first_that_existed() {
        let there = |path: &Path| ["/", "/data"].contains(&path.to_str().unwrap());
        let synced = |folder: &str| parents_of_missing(Path::new(folder), there);
        assert_eq!(synced("/data/a/b/_elmo"), ["/data/a/b", "/data/a", "/data"].map(PathBuf::from));
        assert_eq!(synced("/data/a"), [PathBuf::from("/data")]);
        assert!(synced("/data").is_empty());
        assert_eq!(synced("new"), [PathBuf::from(".")]);
    }

    #[test]
    fn missing_folders_are_created() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("a/b/c");
        create_folder(&folder).unwrap();
        assert!(folder.is_dir());
        create_folder(&folder).unwrap();
        fs::write(root.path().join("file"), "").unwrap();
        assert!(create_folder(&root.path().join("file/a")).is_err());
    }
}
