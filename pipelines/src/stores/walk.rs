//! Files of a local folder to any depth. The local store's own listing ends at the first name that it has no path for,
//! be it the name of a file that nobody asked for.

use std::{
    fs::{self, DirEntry, Metadata},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use object_store::ObjectMeta;

use super::StoreError;

/// Files below `root`, at most `deepest` levels down; nothing where there is no such folder.
pub(super) async fn files(
    root: PathBuf,
    deepest: usize,
    enters: fn(&str) -> bool,
) -> Result<Vec<ObjectMeta>, StoreError> {
    let shown = root.clone();
    let walked = tokio::task::spawn_blocking(move || {
        let mut walk = Walk { deepest, enters, above: Vec::new(), found: Vec::new() };
        walk.folder(&root).map(|()| walk.found)
    });
    walked.await.map_err(|e| StoreError::local("list", &shown, io::Error::other(e)))?
}

struct Walk {
    deepest: usize,
    enters: fn(&str) -> bool,
    /// Device and inode of the folders that are open, to notice a link that leads back to one.
    above: Vec<(u64, u64)>,
    found: Vec<ObjectMeta>,
}

impl Walk {
    fn folder(&mut self, folder: &Path) -> Result<(), StoreError> {
        let failed = |e| StoreError::local("list", folder, e);
        let entries = match fs::metadata(folder).and_then(|found| Ok((found, fs::read_dir(folder)?))) {
            Ok((found, entries)) => {
                self.above.push((found.dev(), found.ino()));
                entries
            }
            Err(e) if is_gone(&e) => return Ok(()),
            Err(e) => return Err(failed(e)),
        };
        let mut left_out = 0_u64;
        for entry in entries {
            left_out += u64::from(!self.entry(&entry.map_err(failed)?)?);
        }
        if left_out > 0 {
            let folder = folder.display();
            let what = "left out: names that are not UTF-8 or hold control characters, links to nowhere or in a circle";
            tracing::warn!(%folder, entries = left_out, what);
        }
        self.above.pop();
        Ok(())
    }

    /// Takes a file or the files of a folder; false where it has no name that we could give it.
    fn entry(&mut self, entry: &DirEntry) -> Result<bool, StoreError> {
        let path = entry.path();
        let found = match fs::metadata(&path) {
            Ok(found) => found,
            // A link that leads nowhere: what it should lead to may be missing for now.
            Err(_) if path.is_symlink() => return Ok(false),
            // A file that was removed a moment ago.
            Err(e) if is_gone(&e) => return Ok(true),
            Err(e) => return Err(StoreError::local("list", &path, e)),
        };
        let (Ok(location), Some(name)) =
            (object_store::path::Path::from_absolute_path(&path), path.file_name().and_then(|name| name.to_str()))
        else {
            return Ok(false);
        };
        if found.is_dir() && self.above.len() < self.deepest && (self.enters)(name) {
            if self.above.contains(&(found.dev(), found.ino())) {
                return Ok(false);
            }
            self.folder(&path)?;
        }
        if found.is_file() && !is_staged(name) {
            self.found.push(meta(location, &found).map_err(|e| StoreError::local("list", &path, e))?);
        }
        Ok(true)
    }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// The local store's name for a file that is being written, which it will not open.
fn is_staged(name: &str) -> bool {
    let number = name.split_once('#').map(|(_, number)| number);
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// What the local store says of a file, but for the etag, which holds the inode.
fn meta(location: object_store::path::Path, found: &Metadata) -> io::Result<ObjectMeta> {
    let last_modified = found.modified()?.into();
    Ok(ObjectMeta { location, last_modified, size: found.len(), e_tag: None, version: None })
}
