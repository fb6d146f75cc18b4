//! Takes a model out of a zip that may be hostile.
//!
//! Only files of a model are written, under names that we choose, so no entry can leave the directory. Sizes are
//! counted while unpacking: what the zip says about itself is not believed.

use std::{
    fs::File,
    io::{self, Read, Write},
    path::{Component, Path},
};

use zip::ZipArchive;

use super::{HDF5, ModelsError, OPTIONS, SAFETENSORS, role_name};

/// More entries than any packaged model has.
const MOST_ENTRIES: usize = 10_000;
/// Largest file; the original ELMo has 0.4 GB.
const LARGEST_FILE: u64 = 8 << 30;
/// Largest `options.json`.
const LARGEST_OPTIONS: u64 = 1 << 20;
/// Trained weights hardly shrink (1.1), text shrinks to a fifth; deflate could go to 1 : 1032.
const MOST_SHRUNK: u64 = 100;
/// Small files may shrink as they like.
const SHRUNK_FROM: u64 = 1 << 20;

/// An entry that is a file of a model.
struct Entry {
    index: usize,
    /// Folders above it; the model lies where its options are.
    folder: String,
    /// The name it gets.
    name: &'static str,
    packed: u64,
}

/// Unpacks the model in `zip` into the empty directory `dir`; `name` stands in the errors.
pub(super) fn unzip(zip: &Path, dir: &Path, name: &str) -> Result<(), ModelsError> {
    let refused = |reason: String| ModelsError::Zip { file: name.to_owned(), reason };
    let file = File::open(zip).map_err(|e| ModelsError::io(zip, e))?;
    let mut archive = ZipArchive::new(io::BufReader::new(file)).map_err(|e| refused(e.to_string()))?;
    let entries = model_entries(&mut archive).map_err(refused)?;
    for entry in &entries {
        unpack(&mut archive, entry, dir).map_err(|e| refused(format!("{}: {e}", entry.name)))?;
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

/// The files of the one model in the archive, or why there is none.
fn model_entries<R: Read + io::Seek>(archive: &mut ZipArchive<R>) -> Result<Vec<Entry>, String> {
    if archive.len() > MOST_ENTRIES {
        return Err(format!("it has {} entries, more than {MOST_ENTRIES}", archive.len()));
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
            entries.push(Entry { index, folder, name, packed: file.compressed_size() });
        }
    }
    let mut folders: Vec<String> = entries.iter().filter(|e| e.name == OPTIONS).map(|e| e.folder.clone()).collect();
    folders.dedup();
    let [folder] = folders.as_slice() else {
        return Err(match folders.is_empty() {
            true => format!("it has no {OPTIONS}"),
            false => format!("it holds more than one model: {}", folders.join(", ")),
        });
    };
    entries.retain(|entry| entry.folder == *folder);
    entries.sort_by_key(|entry| entry.name);
    match entries.windows(2).find(|pair| pair[0].name == pair[1].name) {
        Some(pair) => Err(format!("it holds two files that could be {}", pair[0].name)),
        None => Ok(entries),
    }
}

/// Refuses a whole archive that tries to write elsewhere: whoever made it meant harm.
fn check_path(path: &str) -> Result<(), String> {
    let leaves = path.contains(['\\', '\0', ':'])
        || Path::new(path).components().any(|c| !matches!(c, Component::Normal(_) | Component::CurDir));
    match leaves {
        true => Err(format!("the entry {path:?} leaves the archive's folder")),
        false => Ok(()),
    }
}

/// Folder of a model's file, and the name it gets.
fn model_file(path: &str) -> Option<(String, &'static str)> {
    let (folder, file) = path.rsplit_once('/').unwrap_or(("", path));
    Some((folder.to_owned(), role_name(file)?))
}

fn unpack<R: Read + io::Seek>(archive: &mut ZipArchive<R>, entry: &Entry, dir: &Path) -> io::Result<()> {
    let mut reader = archive.by_index(entry.index).map_err(io::Error::other)?;
    let mut out = File::create_new(dir.join(entry.name))?;
    let most = if entry.name == OPTIONS { LARGEST_OPTIONS } else { LARGEST_FILE };
    let shrunk = entry.packed.saturating_mul(MOST_SHRUNK).max(SHRUNK_FROM);
    copy_at_most(&mut reader, &mut out, most.min(shrunk))?;
    out.sync_all()
}

fn copy_at_most(reader: &mut impl Read, out: &mut impl Write, most: u64) -> io::Result<()> {
    let copied = io::copy(&mut reader.take(most + 1), out)?;
    match copied > most {
        true => Err(io::Error::other(format!("it unpacks to more than {most} bytes, which no file of a model does"))),
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
            assert_eq!(unzip_all(&files), Err(format!("the zip m.zip is refused: {reason}")));
        }
    }

    #[test]
    fn refuses_bombs() {
        let zeros = vec![0; 32 << 20];
        let error = unzip_all(&[("options.json", b"{}"), ("weights.hdf5", &zeros)]).unwrap_err();
        assert!(error.contains("weights.hdf5: it unpacks to more than"), "{error}");
        let error = unzip_all(&[("options.json", &zeros[..2 << 20]), ("weights.hdf5", b"x")]).unwrap_err();
        assert!(error.contains("options.json: it unpacks to more than 1048576 bytes"), "{error}");
    }

    #[test]
    fn says_what_is_missing_or_double() {
        assert_eq!(unzip_all(&[("a.txt", b"")]), Err("the zip m.zip is refused: it has no options.json".into()));
        assert_eq!(
            unzip_all(&[("options.json", b"{}")]),
            Err("the model m.zip has no weights.safetensors or weights.hdf5 beside its options.json".into())
        );
        let two = [("a/options.json", &b"{}"[..]), ("b/options.json", b"{}")];
        assert_eq!(unzip_all(&two), Err("the zip m.zip is refused: it holds more than one model: a, b".into()));
        let both = [("a_options.json", &b"{}"[..]), ("b_options.json", b"{}")];
        assert_eq!(
            unzip_all(&both),
            Err("the zip m.zip is refused: it holds two files that could be options.json".into())
        );
    }
}
