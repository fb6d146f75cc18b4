//! Small reads and atomic writes of local files.

use std::{
    fs,
    io::{BufWriter, Read, Write},
    path::{Path, PathBuf},
};

use crate::{
    error::{Error, Result},
    weights::WeightsError,
};

/// Reads a file, but at most one byte more than `max`: a longer result is too large.
pub(crate) fn read_up_to(path: &Path, max: usize) -> Result<Vec<u8>> {
    let file = fs::File::open(path).map_err(|e| Error::io(path, e))?;
    let mut bytes = Vec::new();
    file.take(max as u64 + 1).read_to_end(&mut bytes).map_err(|e| Error::io(path, e))?;
    Ok(bytes)
}

/// Writes a temporary file beside `path` and renames it, so that `path` never names an incomplete file.
pub(crate) fn write_file(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<fs::File>) -> Result<(), WeightsError>,
) -> Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let file = fs::File::create(&partial).map_err(|e| Error::io(path, e))?;
    let mut out = BufWriter::new(file);
    write(&mut out).map_err(|e| match e {
        // A full disk is not an error of the model.
        WeightsError::Io { path, source } => Error::Io { path, source },
        e => e.into(),
    })?;
    let file = out.into_inner().map_err(|e| Error::io(path, e.into_error()))?;
    file.sync_all().and_then(|()| fs::rename(&partial, path)).map_err(|e| Error::io(path, e))
}

pub(crate) fn write_all(out: &mut BufWriter<fs::File>, path: &Path, bytes: &[u8]) -> Result<(), WeightsError> {
    out.write_all(bytes).map_err(|source| WeightsError::Io { path: path.to_owned(), source })
}
