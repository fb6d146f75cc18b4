//! The folder of a run as a model directory.
//!
//! `MODEL.md` is removed first and written last: where it exists, the other files belong together.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
};

use elmo::{
    ModelData, ModelOptions,
    lm_head::{LmHeadData, SOFTMAX, VOCAB},
    model_dir::WeightsFormat,
    train::{LanguageModel, Trainer},
    weights::safetensors::Numbers,
};

use super::{error::TrainFault, words::Words};
use crate::{
    crash::train as crash,
    error::{Error, Result},
    stores::sync::sync,
};

/// Folder of what an export writes before it replaces anything.
const STAGED: &str = ".export";
pub(super) const DESCRIPTION: &str = "MODEL.md";

/// Writes the model of a run as it is now.
///
/// # Errors
/// [`Error::Io`] when the disk fails, [`TrainFault::Step`] when the device fails.
pub(super) fn export(
    folder: &Path,
    trainer: &Trainer,
    options: &ModelOptions,
    words: &Words,
    description: &str,
) -> Result<()> {
    let path = folder.join(DESCRIPTION);
    let failed = |source| Error::Io { path: path.clone(), source };
    let LanguageModel { weights, softmax_weight, softmax_bias } = trainer.model().map_err(TrainFault::Step)?;
    let model = ModelData::new(options.clone(), weights, &folder.display().to_string())?;
    let head = LmHeadData::new(words.list().to_vec(), softmax_weight, softmax_bias)?;
    // All that takes long comes first, so that weights and softmax are replaced at almost the same time.
    let staged = folder.join(STAGED);
    remove_staged(&staged).and_then(|()| fs::create_dir(&staged)).map_err(failed)?;
    head.save_for(&model.fingerprint, &staged, Numbers::F32)?;
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    model.save(folder, WeightsFormat::Safetensors)?;
    crash::in_export();
    for name in [VOCAB, SOFTMAX] {
        fs::rename(staged.join(name), folder.join(name)).map_err(failed)?;
    }
    remove_staged(&staged).map_err(failed)?;
    let description = format!("{description}\nFingerprint: `{}`\n", model.fingerprint);
    write_file(&path, description.as_bytes()).and_then(|()| sync(folder)).map_err(failed)
}

fn remove_staged(staged: &Path) -> io::Result<()> {
    match fs::remove_dir_all(staged) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Whether the folder holds a complete model.
pub(super) fn is_complete(folder: &Path) -> bool {
    folder.join(DESCRIPTION).is_file()
}

/// Replaces a file at once.
///
/// # Errors
/// Those of the disk.
pub(super) fn write_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let mut file = File::create(&partial)?;
    file.write_all(bytes).and_then(|()| file.sync_all())?;
    fs::rename(&partial, path)
}
