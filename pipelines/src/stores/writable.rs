//! Whether results can be written, found out before the work that they take.

use std::path::Path;

use super::Location;
use crate::error::{Error, Result};

/// Checks that a file can be written, if it is a local one: stores tell when they are written to.
///
/// # Errors
/// [`Error::Usage`] for a folder, [`Error::Io`] when its folder cannot hold files.
pub(crate) fn check_file(location: &Location) -> Result<()> {
    let Some(path) = location.local_path() else { return Ok(()) };
    if path.is_dir() {
        return Err(Error::usage(
            format!("{}: is a folder", path.display()),
            "name a file, in this folder or elsewhere",
        ));
    }
    path.parent().map_or(Ok(()), check_folder)
}

/// Checks that a local folder, or the one that it would be created in, can hold files.
///
/// # Errors
/// [`Error::Io`] when it cannot.
pub(crate) fn check_folder(path: &Path) -> Result<()> {
    let existing = path.ancestors().find(|above| above.as_os_str().is_empty() || above.exists());
    let existing = existing.filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
    tempfile::NamedTempFile::new_in(existing).map(drop).map_err(|error| Error::io(existing, error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stores::Stores;

    #[test]
    fn a_folder_that_takes_no_files_is_found_before() {
        let folder = tempfile::tempdir().unwrap();
        let at =
            |name: &str| Stores::with_settings([]).locate(&folder.path().join(name).display().to_string()).unwrap();
        std::fs::write(folder.path().join("file"), "").unwrap();
        for name in ["file", "new", "new/deep/file"] {
            check_file(&at(name)).unwrap();
        }
        assert!(check_file(&at("")).unwrap_err().to_string().contains("is a folder"));
        assert!(check_file(&at("file/below")).is_err(), "below a file");
        check_folder(Path::new("nowhere/yet")).unwrap();
        // The folder of processes takes no files, whoever asks.
        #[cfg(target_os = "linux")]
        assert!(check_folder(Path::new("/proc/results")).is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing stays");
    }
}
