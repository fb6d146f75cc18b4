//! Files that are listed under several names, through symbolic links.

use std::{
    collections::{HashMap, HashSet},
    fs,
    os::unix::fs::MetadataExt,
    path::PathBuf,
};

use super::InputFile;
use crate::stores::Location;

/// Leaves out links to a file that is also listed under its own name or under an earlier link, and warns of each.
/// Hard links stay: neither name is less the file's own than the other.
pub(super) fn without_links(files: Vec<InputFile>) -> Vec<InputFile> {
    let shared = shared(&files);
    if shared.is_empty() {
        return files;
    }
    let names: HashSet<PathBuf> = files.iter().filter_map(path).collect();
    let mut seen = HashSet::new();
    let is_first = |file: &InputFile| {
        let Some((name, target)) = path(file).and_then(|name| shared.get_key_value(&name)) else { return true };
        let is_first = (target == name || !names.contains(target)) && seen.insert(target.clone());
        if !is_first {
            tracing::warn!(file = %file, target = %target.display(), "a link to a file that is listed too, read once");
        }
        is_first
    };
    files.into_iter().filter(is_first).collect()
}

fn path(file: &InputFile) -> Option<PathBuf> {
    file.location.as_ref().and_then(Location::local_path)
}

/// The files that share device and inode with another, and the paths that their names resolve to.
fn shared(files: &[InputFile]) -> HashMap<PathBuf, PathBuf> {
    let mut places: HashMap<(u64, u64), Vec<PathBuf>> = HashMap::new();
    for path in files.iter().filter_map(path) {
        if let Ok(found) = fs::metadata(&path) {
            places.entry((found.dev(), found.ino())).or_default().push(path);
        }
    }
    let several = places.into_values().filter(|paths| paths.len() > 1).flatten();
    several.filter_map(|path| Some((path.clone(), path.canonicalize().ok()?))).collect()
}
