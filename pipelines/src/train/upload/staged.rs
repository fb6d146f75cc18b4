//! The files of a copy, as they were when its checkpoint was written.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::{JOURNALS, MODEL, MODEL_FILES, PREFIX};
use crate::train::checkpoint::FILES;

/// Links to files which the run removes, replaces or appends to in the meantime. Removed when dropped.
#[derive(Debug)]
pub(super) struct Staged {
    pub(super) step: u64,
    pub(super) folder: PathBuf,
    /// Names below the folder.
    pub(super) files: Vec<String>,
}

impl Staged {
    /// The checkpoint of a step, the journals, and the model if it is another one than that of the checkpoint.
    ///
    /// # Errors
    /// Those of the disk.
    pub(super) fn new(run: &Path, checkpoint: &Path, step: u64, number: u64, with_model: bool) -> io::Result<Self> {
        let folder = run.join(super::CHECKPOINTS).join(format!("{PREFIX}{number}"));
        fs::create_dir(&folder)?;
        let mut staged = Self { step, folder, files: Vec::new() };
        for name in FILES {
            staged.add(&checkpoint.join(name), name, link)?;
        }
        // Lines are added to them.
        for name in JOURNALS.iter().filter(|name| run.join(name).exists()) {
            staged.add(&run.join(name), name, copy)?;
        }
        if with_model {
            fs::create_dir(staged.folder.join(MODEL))?;
            for name in MODEL_FILES.iter().filter(|name| run.join(name).exists()) {
                staged.add(&run.join(name), &format!("{MODEL}/{name}"), link)?;
            }
        }
        Ok(staged)
    }

    fn add(&mut self, from: &Path, name: &str, put: fn(&Path, &Path) -> io::Result<()>) -> io::Result<()> {
        put(from, &self.folder.join(name))?;
        self.files.push(name.to_owned());
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // What stays is removed at the next start.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Removes what processes that were killed have left.
///
/// # Errors
/// Those of the disk.
pub(super) fn clear(run: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(run.join(super::CHECKPOINTS)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(PREFIX) {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

fn link(from: &Path, to: &Path) -> io::Result<()> {
    // Some file systems have no links.
    fs::hard_link(from, to).or_else(|_| copy(from, to))
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::copy(from, to).map(drop)
}
