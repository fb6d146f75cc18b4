//! Opens weights files, and makes errors that name them.

use std::{fmt, fs::File, path::Path};

use super::error::WeightsError;
use crate::{file_kind::FileKind, messages::printable};

pub(super) fn open(path: &Path) -> Result<File, WeightsError> {
    File::open(path).map_err(|e| io(path, e))
}

pub(super) fn io(path: &Path, source: std::io::Error) -> WeightsError {
    WeightsError::Io { path: path.to_owned(), source }
}

pub(super) fn broken(path: &Path, kind: FileKind, reason: impl fmt::Display) -> WeightsError {
    WeightsError::Broken { path: path.to_owned(), kind, reason: printable(&reason.to_string()) }
}
