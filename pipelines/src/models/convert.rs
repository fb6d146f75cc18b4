//! Writes a model in another layout, for `elmo model convert`. Only float16 changes its numbers.

use std::{
    fmt,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    str::FromStr,
};

use elmo::{
    ModelData,
    lm_head::{LmHeadData, SOFTMAX, VOCAB},
    model_dir::{DESCRIPTION, WeightsFormat},
    spec::{SpecError, StateMode},
    weights::safetensors::Numbers,
};
use serde::Serialize;

use super::{error::ModelsError, files::ModelFiles};

/// The files of a written model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(into = "&'static str")]
pub enum Layout {
    /// `options.json`, `weights.safetensors` and the optional files of the model.
    Safetensors,
    /// As [`Layout::Safetensors`], with every number rounded to float16: half the size, and another model.
    SafetensorsF16,
    /// `options.json`, `weights.hdf5` and the optional files of the model.
    Hdf5,
    /// `NAME_options.json` and `NAME_weights.hdf5`, nothing else.
    AllenNlp,
}

impl Layout {
    /// The legal words.
    pub const WORDS: &'static [&'static str] = &["safetensors", "safetensors-f16", "hdf5", "allennlp"];
}

impl From<Layout> for &'static str {
    fn from(layout: Layout) -> Self {
        Layout::WORDS[layout as usize]
    }
}

impl FromStr for Layout {
    type Err = SpecError;

    fn from_str(word: &str) -> Result<Self, SpecError> {
        match word {
            "safetensors" => Ok(Self::Safetensors),
            "safetensors-f16" => Ok(Self::SafetensorsF16),
            "hdf5" => Ok(Self::Hdf5),
            "allennlp" => Ok(Self::AllenNlp),
            _ => Err(SpecError::Value { option: "to", value: word.to_owned(), legal: Self::WORDS.to_vec() }),
        }
    }
}

/// The result of a conversion.
#[derive(Debug, Serialize)]
#[must_use]
pub struct Converted {
    /// The directory.
    pub output: PathBuf,
    /// Its layout.
    pub layout: Layout,
    /// Number of tensors.
    pub tensors: usize,
    /// Fingerprint of the model that was read.
    pub fingerprint_before: String,
    /// Fingerprint of the model that was written, computed from the written files.
    pub fingerprint_after: String,
    /// What changes for jobs with this model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<&'static str>,
}

/// A warm state is stored that every process computed before.
pub const WARM_STATE_STORED: &str = "the warm state is stored, and identified by its numbers instead of its recipe: a job that was \
    begun with --state warm and the other copy is refused when it goes on with this one";

/// The start state of a model has no place in its pair.
pub const WARM_STATE_LEFT_OUT: &str = "the pair has no place for the start state of this model, so it does not record --state warm: \
    its default is zero, as AllenNLP computes. --state warm with the pair starts from a state that is computed from English text; \
    to keep that of the model, keep its directory, or convert it with --to safetensors";

impl fmt::Display for Converted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = vec![
            ("output", self.output.display().to_string()),
            ("tensors", self.tensors.to_string()),
            ("fingerprint before", self.fingerprint_before.clone()),
            ("fingerprint after", self.fingerprint_after.clone()),
        ];
        rows.extend(self.note.map(|note| ("note", note.to_owned())));
        f.write_str(&crate::report::table(&rows))
    }
}

/// Writes `data` to the new directory `out` and reads it back.
///
/// The directory appears under its name only when it is complete and has been checked.
///
/// # Errors
/// [`ModelsError::Exists`] when `out` exists and is not empty, [`ModelsError::Write`] when the directory or a
/// file in it cannot be written, [`ModelsError::Io`] when a companion file cannot be read, [`ModelsError::Bad`] when
/// the LM head is broken or the written model cannot be opened, [`ModelsError::Internal`] when it differs.
pub fn convert(data: &ModelData, files: &ModelFiles, layout: Layout, out: &Path) -> Result<Converted, ModelsError> {
    refuse_existing(out)?;
    let head = lm_head(data, files, layout)?;
    let parent = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(|e| ModelsError::write(parent, e))?;
    let draft = tempfile::Builder::new().prefix(".elmo-convert-").tempdir_in(parent);
    let draft = draft.map_err(|e| ModelsError::write(parent, e))?;
    let rounded = (layout == Layout::SafetensorsF16).then(|| data.to_half()).transpose();
    let written = rounded.map_err(|source| not_written(out, source))?;
    let written = written.as_ref().unwrap_or(data);
    write(written, layout, draft.path()).map_err(|source| not_written(out, source))?;
    match layout {
        Layout::AllenNlp => {}
        Layout::SafetensorsF16 => {
            copy_companions(files, &[DESCRIPTION], draft.path())?;
            rename_in_description(data, written, draft.path())?;
            write_half_head(head.as_ref(), written, draft.path()).map_err(|source| not_written(out, source))?;
        }
        Layout::Safetensors | Layout::Hdf5 => copy_companions(files, &[VOCAB, SOFTMAX, DESCRIPTION], draft.path())?,
    }
    let converted = read_back(written, layout, draft.path(), out)?;
    let note = (layout == Layout::AllenNlp && starts_from_its_own_state(data)).then_some(WARM_STATE_LEFT_OUT);
    let converted = Converted { fingerprint_before: data.fingerprint.to_string(), note, ..converted };
    fs::rename(draft.path(), out).map_err(|e| ModelsError::write(out, e))?;
    // Temporary directories are private; a model must be readable for every user who can read its parent.
    make_readable(out)?;
    Ok(converted)
}

/// Whether the default state of a model is one that is stored beside its weights.
fn starts_from_its_own_state(data: &ModelData) -> bool {
    data.warm_state.is_some() && data.options.text.state == Some(StateMode::Warm)
}

/// An empty directory is allowed, because rename replaces it.
fn refuse_existing(out: &Path) -> Result<(), ModelsError> {
    let empty = fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_none());
    match out.exists() && !empty {
        true => Err(ModelsError::Exists(out.to_path_buf())),
        false => Ok(()),
    }
}

fn write(data: &ModelData, layout: Layout, dir: &Path) -> elmo::Result<()> {
    match layout {
        Layout::Safetensors => data.save(dir, WeightsFormat::Safetensors),
        Layout::SafetensorsF16 => data.save(dir, WeightsFormat::HalfSafetensors),
        Layout::Hdf5 => data.save(dir, WeightsFormat::Hdf5),
        Layout::AllenNlp => write_pair(data, dir),
    }
}

/// Without its state, the pair does not record `warm` either: that would be the state that is computed from English text.
fn write_pair(data: &ModelData, dir: &Path) -> elmo::Result<()> {
    let (path, _) = data.save_pair(dir, &data.name)?;
    if !starts_from_its_own_state(data) {
        return Ok(());
    }
    let mut options = data.options.clone();
    options.text.state = None;
    fs::write(&path, options.to_json_pretty()).map_err(|source| elmo::Error::Io { path, source })
}

/// Copies files unchanged. (`mix.json` and `warm_state.safetensors` are written from the model.)
fn copy_companions(files: &ModelFiles, names: &[&str], dir: &Path) -> Result<(), ModelsError> {
    for name in names {
        let Some((path, mut from)) = files.open(name)? else { continue };
        let target = dir.join(name);
        let mut to = File::create(&target).map_err(|e| ModelsError::write(&target, e))?;
        io::copy(&mut from, &mut to).map_err(|e| ModelsError::io(&path, e))?;
        to.sync_all().map_err(|e| ModelsError::write(&target, e))?;
    }
    Ok(())
}

/// The description names the fingerprint of the rounded model.
fn rename_in_description(data: &ModelData, written: &ModelData, dir: &Path) -> Result<(), ModelsError> {
    let path = dir.join(DESCRIPTION);
    let Ok(text) = fs::read_to_string(&path) else { return Ok(()) };
    let text = text.replace(data.fingerprint.as_str(), written.fingerprint.as_str());
    fs::write(&path, text).map_err(|e| ModelsError::write(&path, e))
}

/// The LM head of the model, if it has one and the layout has a place for it: one that is broken must not be copied.
fn lm_head(data: &ModelData, files: &ModelFiles, layout: Layout) -> Result<Option<LmHeadData>, ModelsError> {
    match layout {
        Layout::AllenNlp => Ok(None),
        Layout::Safetensors | Layout::SafetensorsF16 | Layout::Hdf5 => {
            files.read_lm_head(data).map_err(|source| ModelsError::Bad { model: data.name.clone(), source })
        }
    }
}

/// Writes the LM head of the model, if it has one.
fn write_half_head(head: Option<&LmHeadData>, written: &ModelData, dir: &Path) -> elmo::Result<()> {
    head.map_or(Ok(()), |head| head.save_for(&written.fingerprint, dir, Numbers::F16))
}

fn read_back(data: &ModelData, layout: Layout, draft: &Path, out: &Path) -> Result<Converted, ModelsError> {
    let again = ModelData::open(draft).map_err(|source| bad(out, source))?;
    if again.fingerprint != data.fingerprint || again.weights != data.weights {
        let (before, after) = (&data.fingerprint, &again.fingerprint);
        return Err(ModelsError::Internal(format!(
            "the written model differs: fingerprint {before} before, {after} after"
        )));
    }
    Ok(Converted {
        output: out.to_path_buf(),
        layout,
        tensors: again.weights.iter().count(),
        fingerprint_before: data.fingerprint.to_string(),
        fingerprint_after: again.fingerprint.to_string(),
        note: None,
    })
}

fn not_written(out: &Path, source: elmo::Error) -> ModelsError {
    match source {
        elmo::Error::Io { path, source } => ModelsError::Write { path, source },
        source => bad(out, source),
    }
}

fn bad(out: &Path, source: elmo::Error) -> ModelsError {
    ModelsError::Bad { model: out.display().to_string(), source }
}

fn make_readable(dir: &Path) -> Result<(), ModelsError> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).map_err(|e| ModelsError::write(dir, e))
}
