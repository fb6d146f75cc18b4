//! Checkpoints: the whole state of a run in a folder of its own, which appears complete or not at all.
//!
//! ```text
//! checkpoints/step-0000001250/
//!   tensors.safetensors   weights, state of the optimiser, LSTM states
//!   state.json            settings, corpus, counters, positions, unfinished sentences
//!   manifest.json         size and SHA-256 of both
//! ```
//!
//! It is written under another name, synced and renamed.

pub(super) mod exact;
mod tensors;

use std::{
    fs::{self, File},
    io::{self, BufReader, BufWriter, Read, Write},
    path::{Path, PathBuf},
};

use elmo::train::{Counters, Snapshot};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};

use super::{
    corpus::Shard, error::TrainFault, feed::StreamState, held_out::Measured, journal::Pending, settings::Settings,
    spike::Recent,
};
use crate::{
    crash::train as crash,
    stores::sync::{create_folder, sync},
};

/// Folder of the checkpoints of a run.
pub(super) const FOLDER: &str = "checkpoints";
const TENSORS: &str = "tensors.safetensors";
pub(super) const STATE: &str = "state.json";
pub(super) const MANIFEST: &str = "manifest.json";
/// The files of a checkpoint.
pub(super) const FILES: [&str; 3] = [TENSORS, STATE, MANIFEST];
/// Name of a folder that is not complete yet.
const PARTIAL: &str = "partial";
const PREFIX: &str = "step-";
/// Version of the form of a checkpoint.
const VERSION: u32 = 1;

/// The state of a run beside its tensors.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct RunState {
    pub(super) version: u32,
    pub(super) settings: Settings,
    pub(super) corpus: Vec<Shard>,
    pub(super) counters: Counters,
    pub(super) streams: [StreamState; 2],
    pub(super) pending: Pending,
    /// The measurement of the held-out text before the first step, the best one, and the last one.
    pub(super) first: Option<Measured>,
    pub(super) best: Option<Measured>,
    pub(super) last: Option<Measured>,
    /// Measurements since the best one.
    pub(super) stale: u64,
    /// Losses of the last steps.
    #[serde(default)]
    pub(super) recent: Recent,
    /// Rollbacks since the last checkpoint after the step that failed.
    #[serde(default)]
    pub(super) rollbacks: u32,
    /// The last step that failed, and the step of the checkpoint to which the run went back then.
    #[serde(default)]
    pub(super) spiked: Option<(u64, u64)>,
    /// Remarks on the texts, which are not read again when a run resumes; runs of earlier versions lack them.
    #[serde(default)]
    pub(super) remarks: Option<Vec<String>>,
    /// Seconds of all processes of this run.
    #[serde(with = "exact")]
    pub(super) seconds: f64,
}

impl RunState {
    /// A run that begins.
    pub(super) fn begin(
        settings: Settings,
        corpus: Vec<Shard>,
        streams: [StreamState; 2],
        remarks: Vec<String>,
    ) -> Self {
        Self {
            version: VERSION,
            settings,
            corpus,
            counters: Counters::default(),
            streams,
            pending: Pending::default(),
            first: None,
            best: None,
            last: None,
            stale: 0,
            recent: Recent::default(),
            rollbacks: 0,
            spiked: None,
            remarks: Some(remarks),
            seconds: 0.0,
        }
    }
}

/// The files of a checkpoint, or of a copy of one.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Manifest {
    version: u32,
    step: u64,
    pub(super) files: Vec<Digested>,
}

impl Manifest {
    pub(super) fn new(step: u64, files: Vec<Digested>) -> Self {
        Self { version: VERSION, step, files }
    }

    /// Reads one; the error says why this program cannot.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let manifest: Self = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        match manifest.version {
            VERSION => Ok(manifest),
            other => Err(format!("it has version {other}, and this program reads version {VERSION}")),
        }
    }
}

/// A file as it was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Digested {
    pub(super) file: String,
    pub(super) bytes: u64,
    pub(super) sha256: String,
}

/// The name of the folder of the checkpoint of a step.
pub(super) fn folder_name(step: u64) -> String {
    format!("{PREFIX}{step:010}")
}

/// The step of the checkpoint in a folder of this name.
pub(super) fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix(PREFIX)?.parse().ok()
}

/// A checkpoint that is complete.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Found {
    pub(super) path: PathBuf,
    pub(super) state: RunState,
}

impl Found {
    /// Reads the tensors.
    ///
    /// # Errors
    /// Those of the disk.
    pub(super) fn snapshot(&self) -> io::Result<Snapshot> {
        Ok(Snapshot { tensors: tensors::read(&self.path.join(TENSORS))?, counters: self.state.counters })
    }
}

/// The checkpoints of a run.
#[derive(Debug, Clone)]
pub(super) struct Checkpoints {
    folder: PathBuf,
    /// How many are kept.
    keep: usize,
}

impl Checkpoints {
    /// Those in the folder of a run.
    pub(super) fn new(run: &Path, keep: usize) -> Self {
        Self { folder: run.join(FOLDER), keep: keep.max(1) }
    }

    /// The newest one that is complete. Warns of newer ones that are damaged.
    ///
    /// # Errors
    /// [`TrainFault::Damaged`] when there are some, but none is complete; [`TrainFault::Write`] when the disk fails.
    pub(super) fn latest(&self) -> Result<Option<Found>, TrainFault> {
        self.latest_before(u64::MAX)
    }

    /// As [`Checkpoints::latest`], of those before a step.
    ///
    /// # Errors
    /// As [`Checkpoints::latest`].
    pub(super) fn latest_before(&self, end: u64) -> Result<Option<Found>, TrainFault> {
        let mut problems = Vec::new();
        let steps = self.steps().map_err(|source| self.failed(&self.folder, source, None))?;
        for step in steps.into_iter().rev().filter(|&step| step < end) {
            let path = self.path(step);
            match open(&path) {
                Ok(state) => {
                    for problem in &problems {
                        tracing::warn!("{problem}; resuming from {}", path.display());
                    }
                    return Ok(Some(Found { path, state }));
                }
                Err(error) => problems.push(format!("{}: damaged: {error}", path.display())),
            }
        }
        match problems.is_empty() {
            true => Ok(None),
            false => Err(TrainFault::Damaged { folder: self.folder.clone(), problems }),
        }
    }

    /// That of a step, if there is one and it is complete.
    pub(super) fn of_step(&self, step: u64) -> Option<Found> {
        let path = self.path(step);
        open(&path).ok().map(|state| Found { path, state })
    }

    /// Writes a checkpoint and removes the oldest ones. `last` is named in the error.
    ///
    /// # Errors
    /// [`TrainFault::Write`].
    pub(super) fn write(
        &self,
        state: &RunState,
        snapshot: &Snapshot,
        last: Option<&Path>,
    ) -> Result<PathBuf, TrainFault> {
        let step = state.counters.step;
        let written = self.begin_partial().and_then(|partial| {
            write_files(&partial, state, snapshot)?;
            self.finish_partial(&partial, step)
        });
        written.map_err(|source| {
            // What is incomplete only takes room.
            let _ = remove(&self.folder.join(PARTIAL));
            self.failed(&self.path(step), source, last)
        })
    }

    /// An empty folder for a checkpoint that is not complete yet.
    ///
    /// # Errors
    /// Those of the disk.
    pub(super) fn begin_partial(&self) -> io::Result<PathBuf> {
        let partial = self.folder.join(PARTIAL);
        create_folder(&self.folder)?;
        remove(&partial)?;
        fs::create_dir(&partial)?;
        Ok(partial)
    }

    /// Makes it the checkpoint of a step, whose folder it returns, and removes the oldest ones.
    ///
    /// # Errors
    /// Those of the disk.
    pub(super) fn finish_partial(&self, partial: &Path, step: u64) -> io::Result<PathBuf> {
        let path = self.path(step);
        sync(partial)?;
        crash::before_rename();
        // A damaged one of the same step, which this run has passed over.
        remove(&path)?;
        fs::rename(partial, &path)?;
        sync(&self.folder)?;
        crash::after_rename();
        self.rotate(step).map(|()| path)
    }

    /// Removes those that are older than the newest ones. One that cannot be read does not count, and the one that was
    /// just written stays.
    fn rotate(&self, written: u64) -> io::Result<()> {
        let steps = self.steps()?;
        let kept = steps.iter().rev().filter(|&&step| seems_complete(&self.path(step))).take(self.keep);
        let oldest = kept.min().copied().unwrap_or(written).min(written);
        steps.iter().filter(|&&step| step < oldest).try_for_each(|&step| remove(&self.path(step)))
    }

    /// Removes those after a step, to which a run has gone back.
    ///
    /// # Errors
    /// [`TrainFault::Write`].
    pub(super) fn remove_after(&self, step: u64) -> Result<(), TrainFault> {
        let steps = self.steps().map_err(|source| self.failed(&self.folder, source, None))?;
        let removed = steps.into_iter().filter(|&other| other > step).map(|other| self.path(other));
        removed.into_iter().try_for_each(|path| remove(&path).map_err(|source| self.failed(&path, source, None)))
    }

    /// Steps of which there are checkpoints, ascending.
    fn steps(&self) -> io::Result<Vec<u64>> {
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut steps = Vec::new();
        for entry in entries {
            steps.extend(entry?.file_name().to_str().and_then(step_of));
        }
        steps.sort_unstable();
        Ok(steps)
    }

    /// The folder of the checkpoint of a step.
    pub(super) fn path(&self, step: u64) -> PathBuf {
        self.folder.join(folder_name(step))
    }

    fn failed(&self, path: &Path, source: io::Error, last: Option<&Path>) -> TrainFault {
        TrainFault::Write { path: path.to_owned(), source, last: last.map(Path::to_path_buf) }
    }
}

fn write_files(folder: &Path, state: &RunState, snapshot: &Snapshot) -> io::Result<()> {
    let tensors = write_digested(folder, TENSORS, |out| tensors::write(out, &snapshot.tensors))?;
    crash::in_checkpoint();
    let text = serde_json::to_vec(state)?;
    let state_file = write_digested(folder, STATE, |out| out.write_all(&text))?;
    let manifest = Manifest::new(state.counters.step, vec![tensors, state_file]);
    let text = serde_json::to_vec_pretty(&manifest)?;
    write_digested(folder, MANIFEST, |out| out.write_all(&text)).map(drop)
}

fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Whether the files of a checkpoint have their sizes; digests take long.
fn seems_complete(path: &Path) -> bool {
    let Ok(manifest) = read_json::<Manifest>(&path.join(MANIFEST)) else { return false };
    let has_size = |file: &Digested| fs::metadata(path.join(&file.file)).is_ok_and(|meta| meta.len() == file.bytes);
    manifest.version == VERSION && manifest.files.iter().all(has_size)
}

/// Checks a checkpoint and reads its state.
fn open(path: &Path) -> io::Result<RunState> {
    let wrong = |reason: String| io::Error::new(io::ErrorKind::InvalidData, reason);
    let manifest = fs::read(path.join(MANIFEST)).map_err(|e| io::Error::new(e.kind(), format!("{MANIFEST}: {e}")))?;
    let manifest = Manifest::parse(&manifest).map_err(|reason| wrong(format!("{MANIFEST}: {reason}")))?;
    for name in [TENSORS, STATE] {
        let listed = manifest.files.iter().find(|file| file.file == name);
        let listed = listed.ok_or_else(|| wrong(format!("{MANIFEST} does not list {name}")))?;
        if digest(path, name)? != *listed {
            return Err(wrong(format!("{name} is not what was written: its size or SHA-256 differs")));
        }
    }
    let state: RunState = read_json(&path.join(STATE))?;
    match state.version == VERSION && state.counters.step == manifest.step {
        true => Ok(state),
        false => Err(wrong(format!("{STATE} is of another checkpoint"))),
    }
}

fn read_json<T: DeserializeOwned>(path: &Path) -> io::Result<T> {
    let name = path.file_name().unwrap_or_default().display();
    let bytes = fs::read(path).map_err(|e| io::Error::new(e.kind(), format!("{name}: {e}")))?;
    serde_json::from_slice(&bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, format!("{name}: {e}")))
}

/// Writes a file and syncs it.
fn write_digested(
    folder: &Path,
    name: &str,
    write: impl FnOnce(&mut Digesting<BufWriter<File>>) -> io::Result<()>,
) -> io::Result<Digested> {
    let out = BufWriter::new(File::create_new(folder.join(name))?);
    let mut out = Digesting { out, hash: Sha256::new(), bytes: 0 };
    write(&mut out)?;
    let Digesting { out, hash, bytes } = out;
    out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
    Ok(Digested { file: name.to_owned(), bytes, sha256: hex(hash) })
}

fn digest(folder: &Path, name: &str) -> io::Result<Digested> {
    let file = File::open(folder.join(name)).map_err(|e| io::Error::new(e.kind(), format!("{name}: {e}")))?;
    let mut file = BufReader::new(file);
    let (mut hash, mut bytes, mut buffer) = (Sha256::new(), 0, vec![0; 1 << 16]);
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok(Digested { file: name.to_owned(), bytes, sha256: hex(hash) });
        }
        hash.update(&buffer[..read]);
        bytes += read as u64;
    }
}

pub(super) fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A writer that digests what passes through it.
struct Digesting<W> {
    out: W,
    hash: Sha256,
    bytes: u64,
}

impl<W: Write> Write for Digesting<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.hash.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeMap;

    use elmo::train::{Boundaries, Saved, Values};

    use super::*;

    pub(in crate::train) fn state(step: u64) -> RunState {
        let streams = StreamState::begin(Boundaries { begin: 0, end: 1 }, 2, 3);
        let counters = Counters { step, tokens: 6 * step };
        RunState { counters, ..RunState::begin(Settings::default(), Vec::new(), streams, Vec::new()) }
    }

    pub(in crate::train) fn snapshot(step: u64) -> Snapshot {
        let values = Values::F32(vec![step as f32; 3]);
        let tensors = BTreeMap::from([("weights/a".to_owned(), Saved { shape: vec![3], values })]);
        Snapshot { tensors, counters: Counters { step, tokens: 6 * step } }
    }

    fn written(keep: usize, steps: &[u64]) -> (tempfile::TempDir, Checkpoints) {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(folder.path(), keep);
        assert!(checkpoints.latest().unwrap().is_none());
        for &step in steps {
            checkpoints.write(&state(step), &snapshot(step), None).unwrap();
        }
        (folder, checkpoints)
    }

    #[test]
    fn the_newest_checkpoints_are_kept_and_read_back() {
        let (_folder, checkpoints) = written(2, &[5, 10, 100]);
        assert_eq!(checkpoints.steps().unwrap(), [10, 100]);
        let found = checkpoints.latest().unwrap().unwrap();
        assert_eq!(found.state.counters, Counters { step: 100, tokens: 600 });
        assert_eq!(found.snapshot().unwrap(), snapshot(100));
    }

    /// Two that cannot be read, of later steps, do not take the place of good ones.
    #[test]
    fn unreadable_checkpoints_do_not_count() {
        let (_folder, checkpoints) = written(2, &[1, 2]);
        for step in [8, 9] {
            fs::create_dir(checkpoints.path(step)).unwrap();
        }
        checkpoints.write(&state(3), &snapshot(3), None).unwrap();
        assert_eq!(checkpoints.steps().unwrap(), [2, 3, 8, 9]);
        assert_eq!(checkpoints.latest().unwrap().unwrap().state.counters.step, 3);
        assert_eq!(checkpoints.latest_before(3).unwrap().unwrap().state.counters.step, 2);
        let steps = [2, 4, 8].map(|step| checkpoints.of_step(step).map(|found| found.state.counters.step));
        assert_eq!(steps, [Some(2), None, None], "there is none of step 4, and that of step 8 cannot be read");
        checkpoints.remove_after(2).unwrap();
        assert_eq!(checkpoints.steps().unwrap(), [2]);
    }

    /// Any byte of any file that is changed, lost or added is noticed, and the checkpoint before is used.
    #[test]
    fn a_damaged_checkpoint_is_passed_over() {
        for file in [TENSORS, STATE, MANIFEST] {
            for damage in ["change", "cut", "add", "delete"] {
                let (_folder, checkpoints) = written(3, &[1, 2]);
                let path = checkpoints.path(2).join(file);
                let mut bytes = fs::read(&path).unwrap();
                let middle = bytes.len() / 2;
                match damage {
                    "change" => bytes[middle] ^= 1,
                    "cut" => bytes.truncate(middle),
                    "add" => bytes.push(b'x'),
                    _ => bytes.clear(),
                }
                match damage {
                    "delete" => fs::remove_file(&path).unwrap(),
                    _ => fs::write(&path, bytes).unwrap(),
                }
                let found = checkpoints.latest().unwrap().unwrap();
                assert_eq!(found.state.counters.step, 1, "{damage} {file}");
                // The run comes to that step again.
                checkpoints.write(&state(2), &snapshot(2), None).unwrap();
                assert_eq!(checkpoints.latest().unwrap().unwrap().state.counters.step, 2);
            }
        }
    }

    #[test]
    fn without_a_good_checkpoint_there_is_an_error_that_names_them() {
        let (_folder, checkpoints) = written(3, &[1, 2]);
        for step in [1, 2] {
            fs::remove_file(checkpoints.path(step).join(STATE)).unwrap();
        }
        let error = checkpoints.latest().unwrap_err().to_string();
        assert!(error.contains("step-0000000001") && error.contains("step-0000000002"), "{error}");
    }
}
