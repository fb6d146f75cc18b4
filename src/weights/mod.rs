//! Named tensors of a model, read from and written to HDF5 (the bilm-tf layout) and safetensors.
//!
//! The options of a model determine what is read: [`read`] takes a plan of names and shapes
//! ([`ModelOptions::weight_plan`](crate::options::ModelOptions::weight_plan)), compares every dataset with it, and only
//! then allocates memory.

mod bounded_source;
mod error;
mod file;
pub mod hdf5;
mod links;
pub mod safetensors;
mod tensors;

use std::{io::Read, path::Path};

use self::file::{io, open};
pub use self::{
    error::{Problem, WeightsError, What},
    tensors::{Loaded, Tensor, Weights},
};
pub use crate::file_kind::{FileKind, file_kind};
use crate::options::TensorSpec;

/// Reads the tensors of `plan` from an HDF5 or safetensors file. The format is recognised by the first bytes of the
/// file, not by its name.
///
/// # Errors
/// One error names every tensor that is missing or differs from the plan. No other file is opened, whatever links the
/// file contains.
pub fn read(path: &Path, plan: &[TensorSpec]) -> Result<Weights, WeightsError> {
    Ok(load(path, plan)?.weights)
}

/// As [`read`], with remarks on the file.
///
/// # Errors
/// As [`read`].
pub fn load(path: &Path, plan: &[TensorSpec]) -> Result<Loaded, WeightsError> {
    match file_kind(&head(path)?) {
        FileKind::Hdf5 => hdf5::read_file(path, plan),
        FileKind::Safetensors => safetensors::read_file(path, plan),
        kind => Err(WeightsError::NotWeights { path: path.to_owned(), kind }),
    }
}

fn head(path: &Path) -> Result<Vec<u8>, WeightsError> {
    let mut head = Vec::new();
    open(path)?.take(64).read_to_end(&mut head).map_err(|e| io(path, e))?;
    Ok(head)
}
