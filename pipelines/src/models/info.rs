//! What a model is, for `elmo model info`.

use std::path::{Path, PathBuf};

use elmo::ModelData;
use serde::Serialize;

use super::ModelSpec;
use crate::report::{bytes, count, table};

/// What a model is.
#[derive(Debug, Serialize)]
pub struct Info {
    /// As the user named it.
    pub model: String,
    /// SHA-256 over options and weights.
    pub fingerprint: String,
    /// Made up, not learned.
    pub untrained: bool,
    /// Numbers in the weights.
    pub parameters: u64,
    /// Length of a vector, `2 x projection_dim`.
    pub dimension: usize,
    /// Layers that come out, the token layer included.
    pub layers: usize,
    /// The options that decide the numbers.
    pub options: serde_json::Value,
    /// The files and their sizes.
    pub files: Vec<FileInfo>,
    /// Every tensor.
    pub tensors: Vec<TensorInfo>,
    /// What a user should know.
    pub notes: Vec<String>,
}

/// A file of a model.
#[derive(Debug, Serialize)]
pub struct FileInfo {
    /// Where it is.
    pub path: String,
    /// Its size.
    pub bytes: u64,
}

/// A tensor of a model.
#[derive(Debug, Serialize)]
pub struct TensorInfo {
    /// Name in the bilm-tf layout.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
}

impl Info {
    /// Describes an open model that came from `files`.
    pub fn of(spec: &ModelSpec, data: &ModelData, files: &[PathBuf]) -> Self {
        let tensors: Vec<TensorInfo> =
            data.weights.iter().map(|(name, t)| TensorInfo { name: name.to_owned(), shape: t.shape.clone() }).collect();
        Self {
            model: spec.to_string(),
            fingerprint: data.fingerprint.to_string(),
            untrained: data.untrained,
            parameters: tensors.iter().map(|t| t.shape.iter().product::<usize>() as u64).sum(),
            dimension: data.options.width(),
            layers: data.options.n_layers_out(),
            // Our own text; should it not parse, it is shown as it is.
            options: serde_json::from_str(&data.options.canonical_json())
                .unwrap_or_else(|_| data.options.canonical_json().into()),
            files: files.iter().map(|file| file_info(file)).collect(),
            tensors,
            notes: notes(data),
        }
    }

    /// For people.
    pub fn text(&self, tensors: bool) -> String {
        let mut rows = vec![
            ("model", self.model.clone()),
            ("fingerprint", self.fingerprint.clone()),
            ("parameters", format!("{} ({} as float32)", count(self.parameters), bytes(4 * self.parameters))),
            ("vectors", format!("{} layers of {} dimensions", self.layers, self.dimension)),
            ("options", self.options.to_string()),
        ];
        rows.extend(self.files.iter().map(|file| ("file", format!("{} ({})", file.path, bytes(file.bytes)))));
        rows.extend(self.notes.iter().map(|note| ("note", note.clone())));
        if tensors {
            rows.extend(self.tensors.iter().map(|t| ("tensor", format!("{} {:?}", t.name, t.shape))));
        }
        table(&rows)
    }
}

fn file_info(path: &Path) -> FileInfo {
    FileInfo { path: path.display().to_string(), bytes: path.metadata().map_or(0, |meta| meta.len()) }
}

/// What a user should know about a model that works.
pub(super) fn notes(data: &ModelData) -> Vec<String> {
    let mut notes = data.notes.clone();
    let options = &data.options;
    let mut note = |applies: bool, text: &str| {
        if applies {
            notes.push(text.to_owned());
        }
    };
    note(data.untrained, "untrained: its vectors show how elmo works, they mean nothing");
    note(options.char_cnn.n_characters == Some(261), "n_characters 261, as training writes it, is read as 262");
    note(options.char_cnn.n_highway == 0, "no highway layers");
    note(options.lstm.cell_clip.is_none(), "no cell clip");
    note(options.lstm.proj_clip.is_none(), "no projection clip");
    note(!options.lstm.use_skip_connections, "no skip connections between the LSTM layers");
    note(data.mix.is_some(), "mix.json: a fitted scalar mix, used with --layers and the file's path");
    notes
}
