//! The cache of features: a file with the vectors of all layers of all tokens of a data set.
//!
//! ```text
//! values    f32 [vectors, layers * width], of consecutive examples
//! counts    u32 [examples]: vectors of each
//! trailer   magic, vectors, values of a vector, examples: u64 each; the key, 32 bytes
//! checksum  SHA-256 of all of it
//! ```
//!
//! Numbers are in the byte order of the machine, which the magic number tells. A file is written aside and renamed when it is
//! complete, and read only if its checksum is right.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Read, Write},
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
};

use arrow::buffer::MutableBuffer;
use elmo::train::LayerVectors;
use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use crate::error::{Error, Result};

const MAGIC: u64 = u64::from_be_bytes(*b"elmofea1");
const TRAILER: usize = 4 * 8 + 32;
const CHECKSUM: usize = 32;
/// Prefix of the names of files that are not complete.
const DRAFT: &str = ".draft-";
const FLOAT: u64 = size_of::<f32>() as u64;

/// What identifies features: the model, its settings and the texts.
pub(super) type Key = [u8; 32];

/// Features on disk.
#[derive(Debug)]
pub(super) struct Features {
    file: File,
    /// Values of a vector.
    stride: usize,
    /// Vectors of each example.
    counts: Vec<u32>,
}

impl LayerVectors for Features {
    fn read(&self, first: u64, count: usize, into: &mut Vec<f32>) -> io::Result<()> {
        let mut bytes = MutableBuffer::from_len_zeroed(count * self.stride * size_of::<f32>());
        self.file.read_exact_at(bytes.as_slice_mut(), first * self.stride as u64 * FLOAT)?;
        into.clear();
        into.extend_from_slice(bytes.typed_data::<f32>());
        Ok(())
    }
}

/// The file of features with this key.
pub(super) fn path(folder: &Path, key: &Key) -> PathBuf {
    let name: String = key.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    folder.join(format!("{name}.features"))
}

impl Features {
    /// Opens and checks a file; `None` when there is none, or it is another one or damaged.
    pub(super) fn open(path: &Path, key: &Key, stride: usize) -> Option<Self> {
        let file = File::open(path).ok()?;
        let found = Self::check(file, key, stride);
        if found.is_err() {
            tracing::warn!(file = %path.display(), "the cached features are damaged and are computed again");
        }
        found.ok()
    }

    fn check(mut file: File, key: &Key, stride: usize) -> io::Result<Self> {
        let damaged = || io::Error::from(io::ErrorKind::InvalidData);
        let length = file.metadata()?.len();
        let content = length.checked_sub(CHECKSUM as u64).ok_or_else(damaged)?;
        let end = content.checked_sub(TRAILER as u64).ok_or_else(damaged)?;
        let mut trailer = [0; TRAILER];
        file.read_exact_at(&mut trailer, end)?;
        let number = |at: usize| {
            let bytes = trailer[8 * at..].first_chunk();
            bytes.map(|bytes| u64::from_ne_bytes(*bytes)).ok_or_else(damaged)
        };
        let [magic, vectors, width, examples] = [number(0)?, number(1)?, number(2)?, number(3)?];
        let values = vectors.checked_mul(width).and_then(|n| n.checked_mul(FLOAT)).ok_or_else(damaged)?;
        let counts = examples.checked_mul(FLOAT).ok_or_else(damaged)?;
        let is_whole = values.checked_add(counts) == Some(end);
        if magic != MAGIC || width != stride as u64 || trailer[32..] != key[..] || !is_whole {
            return Err(damaged());
        }
        let mut hash = Sha256::new();
        io::copy(&mut (&mut file).take(content), &mut hash)?;
        let mut checksum = [0; CHECKSUM];
        file.read_exact_at(&mut checksum, content)?;
        if hash.finalize()[..] != checksum {
            return Err(damaged());
        }
        let mut bytes = MutableBuffer::from_len_zeroed(counts as usize);
        file.read_exact_at(bytes.as_slice_mut(), values)?;
        let counts = bytes.typed_data::<u32>().to_vec();
        match counts.iter().map(|count| u64::from(*count)).sum::<u64>() == vectors {
            true => Ok(Self { file, stride, counts }),
            false => Err(damaged()),
        }
    }

    /// Number of vectors of each example.
    pub(super) fn counts(&self) -> &[u32] {
        &self.counts
    }
}

/// Removes the drafts of processes that were killed. Those of others are locked.
pub(super) fn sweep(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        let is_draft = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(DRAFT));
        // Held until the file is removed: whoever has just created it waits for the lock.
        let locked = is_draft.then(|| File::open(&path).ok().filter(|file| file.try_lock().is_ok())).flatten();
        if locked.is_some() && fs::remove_file(&path).is_ok() {
            tracing::info!(file = %path.display(), "removed what a killed process has left");
        }
    }
}

/// A draft that no other process takes for one of a killed process.
fn locked_draft(folder: &Path) -> io::Result<NamedTempFile> {
    loop {
        let draft = tempfile::Builder::new().prefix(DRAFT).tempfile_in(folder)?;
        // A file system without locks has none that are held, and then nothing is swept.
        let _ = draft.as_file().lock();
        // It was swept before it was locked.
        if draft.as_file().metadata()?.nlink() > 0 {
            return Ok(draft);
        }
    }
}

/// Writes features aside.
pub(super) struct Draft {
    path: PathBuf,
    key: Key,
    stride: usize,
    out: BufWriter<NamedTempFile>,
    hash: Sha256,
    bytes: u64,
    counts: Vec<u32>,
}

impl Draft {
    /// # Errors
    /// [`Error::Io`] when the folder cannot be written.
    pub(super) fn create(path: &Path, key: Key, stride: usize) -> Result<Self> {
        let folder = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(|error| Error::io(folder, error))?;
        let draft = locked_draft(folder).map_err(|error| Error::io(folder, error))?;
        let out = BufWriter::with_capacity(1 << 20, draft);
        Ok(Self { path: path.to_owned(), key, stride, out, hash: Sha256::new(), bytes: 0, counts: Vec::new() })
    }

    /// Adds bytes of vectors.
    pub(super) fn values(&mut self, bytes: &[u8]) -> Result<()> {
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        self.out.write_all(bytes).map_err(|error| Error::io(&self.path, error))
    }

    /// Adds the number of vectors of an example.
    pub(super) fn count(&mut self, vectors: u32) {
        self.counts.push(vectors);
    }

    /// Completes the file and gives it its name.
    ///
    /// # Errors
    /// [`Error::Io`] when the disk fails.
    pub(super) fn finish(mut self) -> Result<Features> {
        let vectors: u64 = self.counts.iter().map(|count| u64::from(*count)).sum();
        if self.bytes != vectors * self.stride as u64 * FLOAT {
            return Err(Error::Failed(format!("{} bytes of features for {vectors} vectors", self.bytes)));
        }
        let mut rest: Vec<u8> = self.counts.iter().flat_map(|count| count.to_ne_bytes()).collect();
        for number in [MAGIC, vectors, self.stride as u64, self.counts.len() as u64] {
            rest.extend(number.to_ne_bytes());
        }
        rest.extend(self.key);
        self.values(&rest)?;
        let checksum = self.hash.finalize();
        let failed = |error| Error::io(&self.path, error);
        self.out.write_all(&checksum).map_err(failed)?;
        let draft = self.out.into_inner().map_err(|error| failed(error.into_error()))?;
        draft.as_file().sync_all().map_err(failed)?;
        let file = draft.persist(&self.path).map_err(|error| failed(error.error))?;
        Ok(Features { file, stride: self.stride, counts: self.counts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = [7; 32];

    fn written(path: &Path, values: &[f32], counts: &[u32]) -> Features {
        let mut draft = Draft::create(path, KEY, 2).unwrap();
        draft.values(&values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<u8>>()).unwrap();
        counts.iter().for_each(|count| draft.count(*count));
        draft.finish().unwrap()
    }

    fn all(features: &Features) -> Vec<f32> {
        let mut values = Vec::new();
        features.read(0, features.counts.iter().sum::<u32>() as usize, &mut values).unwrap();
        values
    }

    #[test]
    fn what_was_written_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = path(&folder.path().join("new"), &KEY);
        let values = [1.0, -0.0, f32::MIN_POSITIVE, 3.5, 1e-40, 6.0];
        let features = written(&path, &values, &[1, 0, 2]);
        let again = Features::open(&path, &KEY, 2).unwrap();
        for features in [features, again] {
            assert_eq!(features.counts(), [1, 0, 2]);
            assert_eq!(all(&features).map_bits(), values.to_vec().map_bits());
            let mut last = Vec::new();
            features.read(2, 1, &mut last).unwrap();
            assert_eq!(last, [1e-40, 6.0]);
        }
        let names: Vec<_> = fs::read_dir(folder.path().join("new")).unwrap().map(|f| f.unwrap().path()).collect();
        assert_eq!(names, [path], "no draft is left");
    }

    /// As after SIGKILL, which releases locks and runs no destructor.
    #[test]
    fn drafts_of_killed_processes_are_removed_and_those_of_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        let left = folder.path().join(".draft-of-a-killed-process");
        fs::write(&left, "x").unwrap();
        let path = path(folder.path(), &KEY);
        let features = folder.path().join("other.features");
        fs::write(&features, "x").unwrap();
        let mut live = Draft::create(&path, KEY, 2).unwrap();
        sweep(folder.path());
        sweep(&folder.path().join("missing"));
        assert!(!left.exists() && features.exists());
        live.values(&[0; 8]).unwrap();
        live.count(1);
        live.finish().unwrap();
        assert!(Features::open(&path, &KEY, 2).is_some());
    }

    trait Bits {
        fn map_bits(self) -> Vec<u32>;
    }

    impl Bits for Vec<f32> {
        fn map_bits(self) -> Vec<u32> {
            self.into_iter().map(f32::to_bits).collect()
        }
    }

    #[test]
    fn other_and_damaged_files_are_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = path(folder.path(), &KEY);
        assert!(Features::open(&path, &KEY, 2).is_none());
        drop(written(&path, &[1.0, 2.0, 3.0, 4.0], &[2]));
        let whole = fs::read(&path).unwrap();
        assert!(Features::open(&path, &[8; 32], 2).is_none());
        assert!(Features::open(&path, &KEY, 4).is_none());
        for byte in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[byte] ^= 1;
            fs::write(&path, damaged).unwrap();
            assert!(Features::open(&path, &KEY, 2).is_none(), "byte {byte}");
        }
        for length in [0, 1, CHECKSUM, CHECKSUM + TRAILER, whole.len() - 1] {
            fs::write(&path, &whole[..length]).unwrap();
            assert!(Features::open(&path, &KEY, 2).is_none(), "{length} bytes");
        }
        fs::write(&path, &whole).unwrap();
        assert!(Features::open(&path, &KEY, 2).is_some());
    }
}
