//! Caches the fingerprints of models on disk, so that a query can be planned without reading the weights again, which
//! takes seconds for large models.
//!
//! A record is valid while the files are unchanged. A wrong record is harmless: opening the model computes the
//! fingerprint and compares.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use elmo::{Fingerprint, ModelOptions};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{cache::Cache, files::ModelFiles};

/// A file that changed more recently may change again without a new timestamp.
const MIN_AGE: Duration = Duration::from_secs(2);

const VERSION: u32 = 2;

/// The records, one file per model.
#[derive(Debug)]
pub struct Fingerprints {
    dir: PathBuf,
}

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    /// The options as [`ModelOptions::to_json`] writes them; records without it lack the tokenizer of the model.
    version: u32,
    files: Vec<State>,
    options: String,
    fingerprint: String,
}

/// Metadata that changes when the bytes of a file do. Programs cannot set the time of the last inode change (`ctime`).
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct State {
    path: PathBuf,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
    inode: u64,
}

impl Fingerprints {
    /// The records in the directory of a cache.
    pub fn new(cache: &Cache) -> Self {
        Self { dir: cache.dir().join("fingerprints") }
    }

    /// The options and fingerprint of a model whose files are unchanged; `None` when it is unknown.
    pub fn known(&self, files: &ModelFiles) -> Option<(ModelOptions, Fingerprint)> {
        let states = states(files).ok()?;
        let record: Record = serde_json::from_slice(&fs::read(self.path(&states)).ok()?).ok()?;
        let options = ModelOptions::from_json(record.options.as_bytes(), "cache").ok()?;
        (record.version == VERSION && record.files == states).then_some((options, record.fingerprint.parse().ok()?))
    }

    /// Records a model, unless its files may still change. Errors are logged and ignored.
    pub fn remember(&self, files: &ModelFiles, options: &ModelOptions, fingerprint: &Fingerprint) {
        let Ok(states) = states(files) else { return };
        if states.is_empty() || states.iter().any(|state| !state.is_old_enough()) {
            return;
        }
        let path = self.path(&states);
        let record = Record {
            version: VERSION,
            files: states,
            options: options.to_json(),
            fingerprint: fingerprint.to_string(),
        };
        if let Err(error) = self.write(&path, &record) {
            tracing::debug!(%error, "the fingerprint of the model was not recorded");
        }
    }

    fn write(&self, path: &Path, record: &Record) -> io::Result<()> {
        fs::create_dir_all(&self.dir)?;
        let file = tempfile::NamedTempFile::new_in(&self.dir)?;
        serde_json::to_writer(&file, record)?;
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

    fn is_old_enough(&self) -> bool {
        let changed = SystemTime::UNIX_EPOCH + Duration::from_secs(self.changed.0.max(self.modified.0).max(0) as u64);
        SystemTime::now().duration_since(changed).is_ok_and(|age| age > MIN_AGE)
    }
}

#[cfg(test)]
mod tests {
    use elmo::{ModelData, spec::TokenizerKind};

    use super::*;

    fn model() -> (tempfile::TempDir, ModelFiles, ModelData) {
        let folder = tempfile::tempdir().unwrap();
        let mut data = ModelData::tiny();
        data.options.text.tokenizer = Some(TokenizerKind::Words);
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
        assert!(known.known(&files).is_none(), "files that were just written may still change");
        std::thread::sleep(MIN_AGE + Duration::from_millis(1100));
        known.remember(&files, &data.options, &data.fingerprint);
        let (options, fingerprint) = known.known(&files).unwrap();
        assert_eq!((&options, fingerprint), (&data.options, data.fingerprint));
        assert_eq!(options.text.tokenizer, Some(TokenizerKind::Words));
        // Rewriting the same bytes invalidates the record.
        let options = folder.path().join("options.json");
        fs::write(&options, fs::read(&options).unwrap()).unwrap();
        assert!(known.known(&files).is_none());
    }

    #[test]
    fn a_torn_record_is_ignored() {
        let (_folder, files, _) = model();
        let cache = tempfile::tempdir().unwrap();
        let known = Fingerprints::new(&Cache::new(cache.path()));
        fs::create_dir_all(&known.dir).unwrap();
        fs::write(known.path(&states(&files).unwrap()), b"{\"files\": [").unwrap();
        assert!(known.known(&files).is_none());
    }
}
