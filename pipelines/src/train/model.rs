//! The folder of a run as a model directory.
//!
//! An export is complete once its folder has its second name. Its files then replace those of the run one by one; an export
//! that was interrupted there is finished at the next start. `MODEL.md` is removed first and replaced last: where it exists, the
//! other files belong together.

use std::{
    fs::{self, File},
    io::{self, ErrorKind, Write},
    path::Path,
};

use elmo::{
    ModelData, ModelOptions,
    lm_head::LmHeadData,
    model_dir::WeightsFormat,
    train::{LanguageModel, Trainer},
    weights::safetensors::Numbers,
};

use super::{error::TrainFault, warm, words::Words};
use crate::{
    crash::train as crash,
    error::{Error, Result},
    stores::sync::sync,
};

/// Folder of an export that is being written.
const STAGED: &str = ".export";
/// Folder of an export that is complete.
pub(super) const EXPORTED: &str = ".exported";
pub(super) const DESCRIPTION: &str = "MODEL.md";
/// Files of the model of a run.
pub(super) const FILES: [&str; 6] =
    ["options.json", "weights.safetensors", "softmax.safetensors", "warm_state.safetensors", "vocab.txt", DESCRIPTION];

/// What a model directory is made of.
pub(super) struct Export<'r> {
    pub(super) trainer: &'r Trainer,
    pub(super) options: &'r ModelOptions,
    pub(super) words: &'r Words,
    /// Sentences of the corpus after which the start state `warm` is taken.
    pub(super) warm_text: &'r [Vec<String>],
    /// The text of `MODEL.md`, without the fingerprint.
    pub(super) description: String,
}

/// Writes the model of a run as it is now.
///
/// # Errors
/// [`Error::Io`] when the disk fails, [`TrainFault::Step`] when the device fails.
pub(super) fn export(folder: &Path, export: Export<'_>) -> Result<()> {
    let Export { trainer, options, words, warm_text, description, .. } = export;
    finish_export(folder)?;
    let LanguageModel { weights, softmax_weight, softmax_bias } = trainer.model().map_err(TrainFault::Step)?;
    let mut model = ModelData::new(options.clone(), weights, &folder.display().to_string())?;
    model.warm_state = Some(warm::state(&model, warm_text)?);
    let head =
        LmHeadData::new(words.list().iter().map(|word| word.to_string()).collect(), softmax_weight, softmax_bias)?;
    let (staged, exported) = (folder.join(STAGED), folder.join(EXPORTED));
    let failed = |source| Error::io(&staged, source);
    remove(&staged).and_then(|()| fs::create_dir(&staged)).map_err(failed)?;
    head.save_for(&model.fingerprint, &staged, Numbers::F32)?;
    crash::in_export();
    model.save(&staged, WeightsFormat::Safetensors)?;
    let description = format!("{description}\nFingerprint: `{}`\n", model.fingerprint);
    fs::write(staged.join(DESCRIPTION), description)
        .and_then(|()| files(&staged)?.iter().try_for_each(|name| sync(&staged.join(name))))
        .and_then(|()| sync(&staged))
        .and_then(|()| fs::rename(&staged, &exported))
        .and_then(|()| sync(folder))
        .map_err(failed)?;
    finish_export(folder)
}

/// Moves the files of a complete export, if there is one, to their places.
///
/// # Errors
/// [`Error::Io`] when the disk fails.
pub(super) fn finish_export(folder: &Path) -> Result<()> {
    let exported = folder.join(EXPORTED);
    let replace = |name: &String| fs::rename(exported.join(name), folder.join(name));
    let replace_all = || -> io::Result<()> {
        let mut names = files(&exported)?;
        names.retain(|name| name != DESCRIPTION);
        ignore_missing(fs::remove_file(folder.join(DESCRIPTION)))?;
        for name in &names {
            replace(name)?;
            crash::in_replacement();
        }
        sync(folder)?;
        replace(&DESCRIPTION.to_owned())
    };
    let finished = match exported.join(DESCRIPTION).is_file() {
        true => replace_all().and_then(|()| sync(folder)),
        // The last file was replaced already, or there is no export.
        false => Ok(()),
    };
    finished.and_then(|()| remove(&exported)).map_err(|source| Error::io(&exported, source))
}

/// Removes exports that are not finished.
///
/// # Errors
/// Those of the disk.
pub(super) fn clear_exports(folder: &Path) -> io::Result<()> {
    [STAGED, EXPORTED].iter().try_for_each(|name| remove(&folder.join(name)))
}

/// The names of the files of a folder.
fn files(folder: &Path) -> io::Result<Vec<String>> {
    let entries = fs::read_dir(folder)?.collect::<io::Result<Vec<_>>>()?;
    let mut names: Vec<String> = entries.iter().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    Ok(names)
}

fn remove(folder: &Path) -> io::Result<()> {
    ignore_missing(fs::remove_dir_all(folder))
}

/// What is not there needs not be removed.
pub(super) fn ignore_missing(outcome: io::Result<()>) -> io::Result<()> {
    outcome.or_else(|error| if error.kind() == ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

/// A file of the model that the folder lacks.
pub(super) fn missing(folder: &Path) -> Option<&'static str> {
    FILES.into_iter().find(|name| !folder.join(name).is_file())
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
