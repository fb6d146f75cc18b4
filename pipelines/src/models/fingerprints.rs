//! Fingerprints of models that were read before: as long as their files have not changed, a query can be planned without
//! reading the weights again, which takes seconds for the larger ones.
//!
//! Nothing rests on them: who opens a model compares.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use elmo::{Fingerprint, ModelOptions};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{Cache, ModelFiles};

/// A file that changed so lately may change again within the same tick of its clock.
const SETTLED: Duration = Duration::from_secs(2);

/// The notes, one file per model.
#[derive(Debug)]
pub struct Fingerprints {
    dir: PathBuf,
}

#[derive(Debug, Serialize, Deserialize)]
struct Note {
    files: Vec<State>,
    options: String,
    fingerprint: String,
}

/// What tells that a file is still the same one with the same bytes. The time of the last change of its inode cannot be
/// set by hand.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct State {
    path: PathBuf,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
    inode: u64,
}

impl Fingerprints {
    /// Beside the models of a cache.
    pub fn new(cache: &Cache) -> Self {
        Self { dir: cache.dir().join("fingerprints") }
    }

    /// Shape and identity of a model whose files are those of the last time.
    pub fn known(&self, files: &ModelFiles) -> Option<(ModelOptions, Fingerprint)> {
        let states = states(files).ok()?;
        let note: Note = serde_json::from_slice(&fs::read(self.path(&states)).ok()?).ok()?;
        let options = ModelOptions::from_json(note.options.as_bytes(), "cache").ok()?;
        (note.files == states).then_some((options, note.fingerprint.parse().ok()?))
    }

    /// Notes what a model is, unless its files are still being written. A note that cannot be kept is done without.
    pub fn remember(&self, files: &ModelFiles, options: &ModelOptions, fingerprint: &Fingerprint) {
        let Ok(states) = states(files) else { return };
        if states.is_empty() || states.iter().any(|state| !state.is_settled()) {
            return;
        }
        let path = self.path(&states);
        let note = Note { files: states, options: options.canonical_json(), fingerprint: fingerprint.to_string() };
        if let Err(error) = self.write(&path, &note) {
            tracing::debug!(%error, "the fingerprint of the model was not noted");
        }
    }

    fn write(&self, path: &Path, note: &Note) -> io::Result<()> {
        fs::create_dir_all(&self.dir)?;
        let file = tempfile::NamedTempFile::new_in(&self.dir)?;
        serde_json::to_writer(&file, note)?;
        file.persist(path)?;
        Ok(())
    }

    fn path(&self, states: &[State]) -> PathBuf {
        let mut hash = Sha256::new();
        for state in states {
            hash.update(state.path.as_os_str().as_encoded_bytes());
            hash.update([0]);
        }
        let name: String = hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        self.dir.join(name + ".json")
    }
}

fn states(files: &ModelFiles) -> io::Result<Vec<State>> {
    files.list().iter().map(|path| State::of(path)).collect()
}

impl State {
    fn of(path: &Path) -> io::Result<Self> {
        let path = path.canonicalize()?;
        let meta = path.metadata()?;
        Ok(Self {
            bytes: meta.len(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
            inode: meta.ino(),
            path,
        })
    }

    fn is_settled(&self) -> bool {
        let changed = SystemTime::UNIX_EPOCH + Duration::from_secs(self.changed.0.max(self.modified.0).max(0) as u64);
        SystemTime::now().duration_since(changed).is_ok_and(|age| age > SETTLED)
    }
}

#[cfg(test)]
mod tests {
    use elmo::ModelData;

    use super::*;

    fn model() -> (tempfile::TempDir, ModelFiles, ModelData) {
        let folder = tempfile::tempdir().unwrap();
        let data = ModelData::tiny();
        data.save(folder.path(), elmo::model_dir::WeightsFormat::Safetensors).unwrap();
        let files = ModelFiles::Directory(folder.path().to_path_buf());
        (folder, files, data)
    }

    #[test]
    fn a_model_is_known_until_a_file_changes() {
        let (folder, files, data) = model();
        let cache = tempfile::tempdir().unwrap();
        let known = Fingerprints::new(&Cache::new(cache.path()));
        assert!(known.known(&files).is_none());
        known.remember(&files, &data.options, &data.fingerprint);
        assert!(known.known(&files).is_none(), "files that were written just now are not trusted");
        std::thread::sleep(SETTLED + Duration::from_millis(1100));
        known.remember(&files, &data.options, &data.fingerprint);
        let (options, fingerprint) = known.known(&files).unwrap();
        assert_eq!((options.canonical_json(), fingerprint), (data.options.canonical_json(), data.fingerprint));
        // The same bytes written again are no longer vouched for.
        let options = folder.path().join("options.json");
        fs::write(&options, fs::read(&options).unwrap()).unwrap();
        assert!(known.known(&files).is_none());
    }

    #[test]
    fn a_torn_note_is_none() {
        let (_folder, files, _) = model();
        let cache = tempfile::tempdir().unwrap();
        let known = Fingerprints::new(&Cache::new(cache.path()));
        fs::create_dir_all(&known.dir).unwrap();
        fs::write(known.path(&states(&files).unwrap()), b"{\"files\": [").unwrap();
        assert!(known.known(&files).is_none());
    }
}
