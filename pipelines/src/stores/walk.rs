//! Recursive listing of a local folder. The listing of `LocalFileSystem` fails at the first name that cannot be
//! represented as a path of a store, even if that file is not wanted.

use std::{
    fs::{self, DirEntry, Metadata},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use object_store::ObjectMeta;

use super::{StoreError, local::name_of_staged};

/// Files below `root`, at most `max_depth` levels down; none where the folder does not exist.
pub(super) async fn files(
    root: PathBuf,
    max_depth: usize,
    enters: fn(&str) -> bool,
) -> Result<Vec<ObjectMeta>, StoreError> {
    let shown = root.clone();
    let walked = tokio::task::spawn_blocking(move || {
        let mut walk = Walk { max_depth, enters, ancestors: Vec::new(), found: Vec::new() };
        walk.folder(&root).map(|()| walk.found)
    });
    walked.await.map_err(|e| StoreError::local("list", &shown, io::Error::other(e)))?
}

struct Walk {
    max_depth: usize,
    enters: fn(&str) -> bool,
    /// Device and inode of the folders that are being listed, to detect a link to one of them.
    ancestors: Vec<(u64, u64)>,
    found: Vec<ObjectMeta>,
}

impl Walk {
    fn folder(&mut self, folder: &Path) -> Result<(), StoreError> {
        let failed = |e| StoreError::local("list", folder, e);
        let entries = match fs::metadata(folder).and_then(|found| Ok((found, fs::read_dir(folder)?))) {
            Ok((found, entries)) => {
                self.ancestors.push((found.dev(), found.ino()));
                entries
            }
            Err(e) if is_gone(&e) => return Ok(()),
            Err(e) => return Err(failed(e)),
        };
        let mut skipped = 0_u64;
        for entry in entries {
            skipped += u64::from(!self.entry(&entry.map_err(failed)?)?);
        }
        if skipped > 0 {
            let folder = folder.display();
            let what = "skipped: names that are not UTF-8 or hold control characters, broken links and cyclic links";
            tracing::warn!(%folder, entries = skipped, what);
        }
        self.ancestors.pop();
        Ok(())
    }

    /// Adds a file, or the files of a folder; false where its name cannot be represented.
    fn entry(&mut self, entry: &DirEntry) -> Result<bool, StoreError> {
        let path = entry.path();
        let found = match fs::metadata(&path) {
            Ok(found) => found,
            // A broken link.
            Err(_) if path.is_symlink() => return Ok(false),
            // A file that was deleted while the folder was listed.
            Err(e) if is_gone(&e) => return Ok(true),
            Err(e) => return Err(StoreError::local("list", &path, e)),
        };
        let (Ok(location), Some(name)) =
            (object_store::path::Path::from_absolute_path(&path), path.file_name().and_then(|name| name.to_str()))
        else {
            return Ok(false);
        };
        if found.is_dir() && self.ancestors.len() < self.max_depth && (self.enters)(name) {
            if self.ancestors.contains(&(found.dev(), found.ino())) {
                return Ok(false);
            }
            self.folder(&path)?;
        }
        // The store does not open such files either.
        if found.is_file() && name_of_staged(name).is_none() {
            self.found.push(meta(location, &found).map_err(|e| StoreError::local("list", &path, e))?);
        }
        Ok(true)
    }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// The metadata that `LocalFileSystem` returns, except for the etag, which depends on the inode.
fn meta(location: object_store::path::Path, found: &Metadata) -> io::Result<ObjectMeta> {
    let last_modified = found.modified()?.into();
    Ok(ObjectMeta { location, last_modified, size: found.len(), e_tag: None, version: None })
}
