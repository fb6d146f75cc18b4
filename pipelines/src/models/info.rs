//! The description of a model, for `elmo model info`.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use elmo::{ModelData, options::TextOptions};
use serde::Serialize;

use super::spec::ModelSpec;
use crate::report::{bytes, count, table};

/// The description of a model.
#[derive(Debug, Serialize)]
pub struct Info {
    /// As the user named it.
    pub model: String,
    /// SHA-256 of options and weights.
    pub fingerprint: String,
    /// The weights were never trained.
    pub untrained: bool,
    /// Number of parameters.
    pub parameters: u64,
    /// Length of a vector, `2 x projection_dim`.
    pub dimension: usize,
    /// Number of layers, including the token layer.
    pub layers: usize,
    /// The options that affect the vectors.
    pub options: serde_json::Value,
    /// How its texts become tokens where the user does not say it.
    pub text: TextInfo,
    /// The files of the model.
    pub files: Vec<FileInfo>,
    /// All tensors.
    pub tensors: Vec<TensorInfo>,
    /// Facts that a user should know.
    pub notes: Vec<String>,
}

/// The defaults of `--tokenizer`, `--sentences` and `--state` for a model.
#[derive(Debug, Serialize)]
pub struct TextInfo {
    /// The tokenizer.
    pub tokenizer: &'static str,
    /// Whether texts are cut into sentences.
    pub sentences: &'static str,
    /// The state that a sentence starts from.
    pub state: &'static str,
    /// Those that the model records; the others are those of the program.
    pub recorded: Vec<&'static str>,
}

/// A file of a model.
#[derive(Debug, Serialize)]
pub struct FileInfo {
    /// Its path.
    pub path: String,
    /// Its size in bytes.
    pub bytes: u64,
}

/// A tensor of a model.
#[derive(Debug, Serialize)]
pub struct TensorInfo {
    /// Its name in the bilm-tf layout.
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
            // Our own JSON always parses; the fallback shows the string.
            options: serde_json::from_str(&data.options.canonical_json())
                .unwrap_or_else(|_| data.options.canonical_json().into()),
            text: TextInfo {
                tokenizer: data.options.spec().tokenizer.as_str(),
                sentences: data.options.spec().sentences.as_str(),
                state: data.options.spec().state.as_str(),
                recorded: recorded(&data.options.text),
            },
            files: files.iter().map(|file| file_info(file)).collect(),
            tensors,
            notes: notes(data),
        }
    }

    /// The report for people.
    pub fn text(&self, tensors: bool) -> String {
        let mut rows = vec![
            ("model", self.model.clone()),
            ("fingerprint", self.fingerprint.clone()),
            ("parameters", format!("{} ({} as float32)", count(self.parameters), bytes(4 * self.parameters))),
            ("vectors", format!("{} layers of {} dimensions", self.layers, self.dimension)),
            ("options", self.options.to_string()),
            ("text", self.text.to_string()),
        ];
        rows.extend(self.files.iter().map(|file| ("file", format!("{} ({})", file.path, bytes(file.bytes)))));
        rows.extend(self.notes.iter().map(|note| ("note", note.clone())));
        if tensors {
            rows.extend(self.tensors.iter().map(|t| ("tensor", format!("{} {:?}", t.name, t.shape))));
        }
        table(&rows)
    }
}

impl fmt::Display for TextInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let origin = match self.recorded.as_slice() {
            [] => "not recorded in the model".to_owned(),
            [_, _, _] => "recorded in the model".to_owned(),
            some => format!("of which the model records {}", some.join(" and ")),
        };
        write!(f, "--tokenizer {} --sentences {} --state {}, {origin}", self.tokenizer, self.sentences, self.state)
    }
}

/// The names of the options that a model records.
fn recorded(text: &TextOptions) -> Vec<&'static str> {
    let TextOptions { tokenizer, sentences, state } = text;
    [("tokenizer", tokenizer.is_some()), ("sentences", sentences.is_some()), ("state", state.is_some())]
        .into_iter()
        .filter_map(|(name, is_recorded)| is_recorded.then_some(name))
        .collect()
}

fn file_info(path: &Path) -> FileInfo {
    FileInfo { path: path.display().to_string(), bytes: path.metadata().map_or(0, |meta| meta.len()) }
}

/// Facts that a user should know about a usable model.
pub(super) fn notes(data: &ModelData) -> Vec<String> {
    let mut notes = data.notes.clone();
    let options = &data.options;
    let mut note = |applies: bool, text: &str| {
        if applies {
            notes.push(text.to_owned());
        }
    };
    note(data.untrained, "untrained: its vectors are for trying elmo out and have no meaning");
    note(
        options.char_cnn.n_characters == Some(261),
        "n_characters is 261, as bilm-tf writes it in training; read as 262",
    );
    note(options.char_cnn.n_highway == 0, "no highway layers");
    note(options.lstm.cell_clip.is_none(), "no cell clip");
    note(options.lstm.proj_clip.is_none(), "no projection clip");
    note(!options.lstm.use_skip_connections, "no skip connections between the LSTM layers");
    note(data.mix.is_some(), "mix.json: a fitted scalar mix; use it with --layers PATH");
    notes
}
