//! What keeps a local path from being a folder. The errors of the system name neither the entry nor the reason.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
};

/// The entry of the file system that is in the way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obstacle {
    /// A file, a pipe or a device.
    File(PathBuf),
    /// A symbolic link to what does not exist.
    Dangling {
        /// The link.
        link: PathBuf,
        /// What it names.
        target: PathBuf,
    },
    /// A symbolic link that leads to itself.
    Loop(PathBuf),
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{} is a file", path.display()),
            Self::Dangling { link, target } => {
                write!(f, "{} is a link to {}, which does not exist", link.display(), target.display())
            }
            Self::Loop(link) => write!(f, "{} is a link that leads to itself", link.display()),
        }
    }
}

impl Obstacle {
    /// What keeps `folder` from being a folder, or from being created.
    pub(crate) fn to_folder(folder: &Path) -> Option<Self> {
        let entries = folder.ancestors().filter(|path| !path.as_os_str().is_empty());
        let nearest = entries.into_iter().find(|path| fs::symlink_metadata(path).is_ok())?;
        match fs::metadata(nearest) {
            Ok(found) if found.is_dir() => None,
            Ok(_) => Some(Self::File(nearest.to_path_buf())),
            Err(_) => Self::of_link(nearest),
        }
    }

    /// The fault of a symbolic link that cannot be followed.
    pub(crate) fn of_link(path: &Path) -> Option<Self> {
        let target = fs::read_link(path).ok()?;
        match fs::metadata(path).err()?.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                Some(Self::Dangling { link: path.to_path_buf(), target })
            }
            // The kind for loops is unstable.
            io::ErrorKind::PermissionDenied => None,
            _ => Some(Self::Loop(path.to_path_buf())),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn the_entry_in_the_way_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("file"), "").unwrap();
        fs::create_dir(path("folder")).unwrap();
        symlink("folder", path("to-folder")).unwrap();
        symlink("file", path("to-file")).unwrap();
        symlink("none/at/all", path("dangling")).unwrap();
        symlink("loop", path("loop")).unwrap();
        for free in ["folder", "folder/new/one", "to-folder", "to-folder/new", "new"] {
            assert_eq!(Obstacle::to_folder(&path(free)), None, "{free}");
        }
        for (name, entry) in [("file", "file"), ("file/a/b", "file"), ("to-file", "to-file"), ("to-file/a", "to-file")]
        {
            assert_eq!(Obstacle::to_folder(&path(name)), Some(Obstacle::File(path(entry))), "{name}");
        }
        let dangling = Obstacle::Dangling { link: path("dangling"), target: "none/at/all".into() };
        assert_eq!(Obstacle::to_folder(&path("dangling/a")), Some(dangling));
        assert_eq!(Obstacle::to_folder(&path("loop")), Some(Obstacle::Loop(path("loop"))));
    }
}
