//! What lies where a COPY writes to on a local disk.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use crate::{
    error::{Error, Result},
    stores::{Location, Obstacle},
};

/// Checks that a file or folder can be written at `target`, as far as that can be known before.
///
/// # Errors
/// [`Error::Usage`] if a folder of the target is a file, or the target is a broken link, a pipe or a device; [`Error::Io`] if
/// the folder cannot hold files.
pub(super) fn check(target: &Location, is_folder: bool) -> Result<()> {
    let Some(path) = target.local_path() else { return Ok(()) };
    match obstacle(&path, is_folder) {
        Some((message, help)) => Err(Error::usage(message, help)),
        None => check_writable(&linked(&path).unwrap_or(path)),
    }
}

/// What is in the way of a file or a folder, and what to do.
pub(super) fn obstacle(path: &Path, is_folder: bool) -> Option<(String, &'static str)> {
    let folder = if is_folder { path } else { path.parent()? };
    if let Some(obstacle) = Obstacle::to_folder(folder) {
        let message = format!("{}: {obstacle}, and COPY needs a folder there", path.display());
        return Some((message, "name another target, or move away what is in its place"));
    }
    if is_folder {
        return None;
    }
    if let Some(obstacle) = Obstacle::of_link(path) {
        let message = format!("{}: {obstacle}, and COPY writes to the file that a link names", path.display());
        return Some((message, "delete the link, or name the file itself"));
    }
    let is_special = fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir());
    is_special.then(|| {
        let message = format!("{}: is a pipe or device, and COPY replaces files", path.display());
        (message, "use --format to write a result to standard output, or name a file")
    })
}

/// The file that a link names; `None` if the path is no link to a file.
pub(super) fn linked(path: &Path) -> Option<PathBuf> {
    path.is_symlink().then(|| path.canonicalize().ok()).flatten().filter(|file| file.is_file())
}

/// Rejects folders such as `/proc`, which report a new file as not found. The local store would then create its folder
/// and retry without end.
fn check_writable(path: &Path) -> Result<()> {
    let Some(folder) = path.ancestors().skip(1).find(|folder| folder.is_dir()) else { return Ok(()) };
    match tempfile::tempfile_in(folder) {
        Err(e) if e.kind() == ErrorKind::NotFound => Err(Error::io(path, e)),
        // The writer reports other errors.
        _ => Ok(()),
    }
}
