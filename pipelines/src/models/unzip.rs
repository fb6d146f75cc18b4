//! Extracts a model from an untrusted zip.
//!
//! Only files of a model are extracted, under their standard names, so no entry can escape the directory. Sizes are
//! counted while decompressing, because the sizes in the zip are untrusted too.

use std::{
    fs::File,
    io::{self, Read, Write},
    path::{Component, Path},
};

use zip::ZipArchive;

use super::{
    error::ModelsError,
    files::{HDF5, OPTIONS, SAFETENSORS, role_name},
};

/// Maximum number of entries.
const MAX_ENTRIES: usize = 10_000;
/// Maximum size of a file. The original ELMo has 0.4 GB.
const MAX_FILE_BYTES: u64 = 8 << 30;
/// Maximum size of `options.json`.
const MAX_OPTIONS_BYTES: u64 = 1 << 20;
/// Maximum compression ratio. Trained weights have 1.1 and text about 5; deflate can reach 1032.
const MAX_RATIO: u64 = 100;
/// Files up to this size may have any ratio.
const MAX_BYTES_OF_ANY_RATIO: u64 = 1 << 20;

/// An entry that belongs to a model.
struct Entry {
    index: usize,
    /// The folder in the zip. The model is in the folder of its options.
    folder: String,
    /// Its standard name.
    name: &'static str,
    compressed: u64,
}

/// Extracts the model in `zip` into the empty directory `dir`; errors name the zip `name`.
pub(super) fn unzip(zip: &Path, dir: &Path, name: &str) -> Result<(), ModelsError> {
    let rejected = |reason: String| ModelsError::Zip { file: name.to_owned(), reason };
    let file = File::open(zip).map_err(|e| ModelsError::io(zip, e))?;
    let mut archive = ZipArchive::new(io::BufReader::new(file)).map_err(|e| rejected(e.to_string()))?;
    let entries = model_entries(&mut archive).map_err(rejected)?;
    for entry in &entries {
        unpack(&mut archive, entry, dir).map_err(|e| rejected(format!("{}: {e}", entry.name)))?;
    }
    let has = |name: &str| entries.iter().any(|entry| entry.name == name);
    match has(SAFETENSORS) || has(HDF5) {
        true => Ok(()),
        false => Err(ModelsError::Incomplete {
            model: name.to_owned(),
            missing: "weights.safetensors or weights.hdf5 beside its options.json",
        }),
    }
}

/// The files of the model in the archive; an error unless there is exactly one model.
fn model_entries<R: Read + io::Seek>(archive: &mut ZipArchive<R>) -> Result<Vec<Entry>, String> {
    if archive.len() > MAX_ENTRIES {
        return Err(format!("it has {} entries, more than {MAX_ENTRIES}", archive.len()));
    }
    let mut entries = Vec::new();
    for index in 0..archive.len() {
        let file = archive.by_index_raw(index).map_err(|e| e.to_string())?;
        let path = std::str::from_utf8(file.name_raw()).map_err(|_| "an entry's name is not UTF-8".to_owned())?;
        check_path(path)?;
        if file.is_symlink() {
            return Err(format!("the entry {path:?} is a link"));
        }
        if let Some((folder, name)) = model_file(path) {
            entries.push(Entry { index, folder, name, compressed: file.compressed_size() });
        }
    }
    let mut folders: Vec<String> = entries.iter().filter(|e| e.name == OPTIONS).map(|e| e.folder.clone()).collect();
    folders.dedup();
    let [folder] = folders.as_slice() else {
        return Err(match folders.is_empty() {
            true => format!("it has no {OPTIONS}"),
            false => format!("it contains more than one model: {}", folders.join(", ")),
        });
    };
    entries.retain(|entry| entry.folder == *folder);
    entries.sort_by_key(|entry| entry.name);
    match entries.windows(2).find(|pair| pair[0].name == pair[1].name) {
        Some(pair) => Err(format!("it contains two files that could be {}", pair[0].name)),
        None => Ok(entries),
    }
}

/// Rejects a path outside of the folder. One such path rejects the whole archive, because it was made with intent.
fn check_path(path: &str) -> Result<(), String> {
    let leaves = path.contains(['\\', '\0', ':'])
        || Path::new(path).components().any(|c| !matches!(c, Component::Normal(_) | Component::CurDir));
    match leaves {
        true => Err(format!("the entry {path:?} leaves the archive's folder")),
        false => Ok(()),
    }
}

/// The folder and the standard name of a file of a model.
fn model_file(path: &str) -> Option<(String, &'static str)> {
    let (folder, file) = path.rsplit_once('/').unwrap_or(("", path));
    Some((folder.to_owned(), role_name(file)?))
}

fn unpack<R: Read + io::Seek>(archive: &mut ZipArchive<R>, entry: &Entry, dir: &Path) -> io::Result<()> {
    let mut reader = archive.by_index(entry.index).map_err(io::Error::other)?;
    let mut out = File::create_new(dir.join(entry.name))?;
    let max = if entry.name == OPTIONS { MAX_OPTIONS_BYTES } else { MAX_FILE_BYTES };
    let max_by_ratio = entry.compressed.saturating_mul(MAX_RATIO).max(MAX_BYTES_OF_ANY_RATIO);
    copy_at_most(&mut reader, &mut out, max.min(max_by_ratio))?;
    out.sync_all()
}

fn copy_at_most(reader: &mut impl Read, out: &mut impl Write, max: u64) -> io::Result<()> {
    let copied = io::copy(&mut reader.take(max + 1), out)?;
    match copied > max {
        true => {
            Err(io::Error::other(format!("it decompresses to more than {max} bytes, which no file of a model does")))
        }
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used)]
    use zip::{ZipWriter, write::SimpleFileOptions};

    use super::*;

    fn zip_of(files: &[(&str, &[u8])]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut zip = ZipWriter::new(file.reopen().unwrap());
        for (name, content) in files {
            zip.start_file(*name, SimpleFileOptions::default()).unwrap();
            zip.write_all(content).unwrap();
        }
        zip.finish().unwrap();
        file
    }

    fn unzip_all(files: &[(&str, &[u8])]) -> Result<Vec<String>, String> {
        let dir = tempfile::tempdir().unwrap();
        unzip(zip_of(files).path(), dir.path(), "m.zip").map_err(|e| e.to_string())?;
        let mut names: Vec<String> =
            dir.path().read_dir().unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        Ok(names)
    }

    #[test]
    fn takes_the_model_wherever_it_lies() {
        let expected = ["options.json", "weights.hdf5"].map(str::to_owned).to_vec();
        for files in [
            [("options.json", &b"{}"[..]), ("weights.hdf5", b"x"), ("README", b"y")],
            [("elmo/options.json", b"{}"), ("elmo/weights.hdf5", b"x"), ("__MACOSX/elmo/._options.json", b"y")],
            [("a/e_2x1024_options.json", b"{}"), ("a/e_2x1024_weights.hdf5", b"x"), ("b/weights.hdf5", b"y")],
        ] {
            assert_eq!(unzip_all(&files), Ok(expected.clone()));
        }
    }

    #[test]
    fn refuses_what_no_honest_zip_has() {
        for (name, reason) in [
            ("../options.json", "the entry \"../options.json\" leaves the archive's folder"),
            ("/etc/options.json", "the entry \"/etc/options.json\" leaves the archive's folder"),
            ("a\\..\\b", "the entry \"a\\\\..\\\\b\" leaves the archive's folder"),
        ] {
            let files = [("options.json", &b"{}"[..]), ("weights.hdf5", b"x"), (name, b"y")];
            assert_eq!(unzip_all(&files), Err(format!("the zip m.zip is rejected: {reason}")));
        }
    }

    #[test]
    fn refuses_bombs() {
        let zeros = vec![0; 32 << 20];
        let error = unzip_all(&[("options.json", b"{}"), ("weights.hdf5", &zeros)]).unwrap_err();
        assert!(error.contains("weights.hdf5: it decompresses to more than"), "{error}");
        let error = unzip_all(&[("options.json", &zeros[..2 << 20]), ("weights.hdf5", b"x")]).unwrap_err();
        assert!(error.contains("options.json: it decompresses to more than 1048576 bytes"), "{error}");
    }

    #[test]
    fn says_what_is_missing_or_double() {
        assert_eq!(unzip_all(&[("a.txt", b"")]), Err("the zip m.zip is rejected: it has no options.json".into()));
        assert_eq!(
            unzip_all(&[("options.json", b"{}")]),
            Err("the model m.zip has no weights.safetensors or weights.hdf5 beside its options.json".into())
        );
        let two = [("a/options.json", &b"{}"[..]), ("b/options.json", b"{}")];
        assert_eq!(unzip_all(&two), Err("the zip m.zip is rejected: it contains more than one model: a, b".into()));
        let both = [("a_options.json", &b"{}"[..]), ("b_options.json", b"{}")];
        assert_eq!(
            unzip_all(&both),
            Err("the zip m.zip is rejected: it contains two files that could be options.json".into())
        );
    }
}
