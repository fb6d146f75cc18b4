//! `options.json`: the sizes and switches of a model, parsed into [`ModelOptions`] with every field checked.
//!
//! The file is not trusted. Every size and the number of parameters have limits, so that all memory that is allocated
//! later is bounded.

use std::str::FromStr;

use serde::Serialize;
use serde_json::{Map, Value};
use thiserror::Error;

use crate::{
    file_kind::{FileKind, file_kind},
    json,
    spec::{EmbedSpec, SentenceMode, StateMode, TokenizerKind},
};

/// Maximum size in bytes of an `options.json`. Published ones have a few hundred bytes.
pub const MAX_OPTIONS_BYTES: usize = 1 << 20;
/// Maximum number of parameters of a model: 4 GiB of float32, eleven times the largest published model.
pub const MAX_PARAMETERS: u64 = 1 << 30;

const MAX_DIM: u64 = 1 << 16;
const MAX_LAYERS: u64 = 64;
const MAX_FILTER_ROWS: usize = 64;
const MAX_HIGHWAY: u64 = 16;
const MAX_EMBEDDING_DIM: u64 = 4096;
const MAX_CHARACTERS: u64 = 1024;

/// Maximum number of values in the convolution windows of one word. Published models have 5,600.
const MAX_WORD_NUMBERS: usize = 1 << 20;

/// Rows of the character table in the file: 256 bytes and five special ids, without the padding row.
pub(crate) const FILE_CHARACTERS: usize = 261;

/// An `options.json` does not describe a model that can be run.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum OptionsError {
    /// Larger than any `options.json`.
    #[error("{origin}: {bytes} bytes, but an options.json has at most {MAX_OPTIONS_BYTES}; is this the weights file?")]
    TooLarge {
        /// The file or URL.
        origin: String,
        /// Size of the file.
        bytes: usize,
    },
    /// Another kind of file: an error page, an archive, a Git LFS pointer, the options of another type of model.
    #[error("{origin}: this is {what}, not the options.json of an ELMo biLSTM; {remedy}")]
    Foreign {
        /// The file or URL.
        origin: String,
        /// Kind of the file.
        what: String,
        /// What the user can do.
        remedy: &'static str,
    },
    /// Not JSON.
    #[error("{origin}: not JSON: {reason}; an options.json is one JSON object with `lstm` and `char_cnn`")]
    Json {
        /// The file or URL.
        origin: String,
        /// Error of the parser, with line and column.
        reason: String,
    },
    /// A field is missing, has the wrong type or is out of range.
    #[error("{origin}: `{path}`: expected {expected}, found {found}; {remedy}")]
    Field {
        /// The file or URL.
        origin: String,
        /// Path in the JSON, such as `lstm.cell_clip`.
        path: String,
        /// The legal values.
        expected: String,
        /// The number in the file, or the kind of another value.
        found: String,
        /// What the user can do.
        remedy: String,
    },
    /// Each size is legal, but together they make too many parameters.
    #[error(
        "{origin}: these sizes make {parameters} parameters, more than the {MAX_PARAMETERS} that are allowed; check `lstm.dim`, `lstm.n_layers` and `char_cnn.filters`"
    )]
    TooManyParameters {
        /// The file or URL.
        origin: String,
        /// Number of parameters.
        parameters: u64,
    },
}

/// The part of an `options.json` that inference needs. Keys for training are ignored.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelOptions {
    /// How the texts of the model become tokens, where the user does not say it.
    pub text: TextOptions,
    /// The two LSTM stacks.
    pub lstm: LstmOptions,
    /// The token layer.
    pub char_cnn: CharCnnOptions,
}

/// The key `text`, which `elmo train` writes: how texts become the tokens that the model was trained on, and how a sentence
/// starts.
///
/// Defaults for whoever reads text with the model. Not part of its identity: the fingerprint does not depend on them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct TextOptions {
    /// The tokenizer; `None`: not recorded.
    pub tokenizer: Option<TokenizerKind>,
    /// Whether texts are cut into sentences; `None`: not recorded.
    pub sentences: Option<SentenceMode>,
    /// The state that a sentence starts from, never `carry`; `None`: not recorded.
    pub state: Option<StateMode>,
}

impl TextOptions {
    /// Whether nothing is recorded.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Sizes and switches of the LSTM stacks.
#[derive(Debug, Clone, PartialEq)]
pub struct LstmOptions {
    /// `D`: cells of one layer and direction.
    pub dim: usize,
    /// `P`: width of a token vector and of each half of every layer. At most `dim`; if equal, the cells have no
    /// projection.
    pub projection_dim: usize,
    /// `L`: layers of each stack.
    pub n_layers: usize,
    /// The cell state is clamped to `-clip..=clip`; `None`: no clipping.
    pub cell_clip: Option<f64>,
    /// The same for the projected output. Always `None` without a projection, where the key has no effect in bilm-tf.
    pub proj_clip: Option<f64>,
    /// Layers after the first add their input to their output.
    pub use_skip_connections: bool,
}

/// Sizes of the char CNN.
#[derive(Debug, Clone, PartialEq)]
pub struct CharCnnOptions {
    /// Non-linearity after the convolutions. Highway layers always use relu.
    pub activation: Activation,
    /// The convolutions, in file order.
    pub filters: Vec<Filter>,
    /// Highway layers; 0 for none.
    pub n_highway: usize,
    /// `C`: width of a character vector.
    pub embedding_dim: usize,
    /// 262, 261 (as written by bilm-tf's training) or absent. The model is the same in each case.
    pub n_characters: Option<usize>,
    /// `M`: character ids per token, including begin and end of word.
    pub max_characters_per_token: usize,
}

/// Non-linearity of the char CNN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `max(x, 0)`, in all published models.
    Relu,
    /// Hyperbolic tangent.
    Tanh,
}

/// One convolution of the char CNN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Filter {
    /// Number of characters.
    pub width: usize,
    /// Output channels.
    pub n: usize,
}

/// The sizes in which bilm-tf models were published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PublishedSize {
    /// 1,024 cells, projection 128, one highway layer: 13.6 million parameters.
    Small,
    /// 2,048 cells, projection 256, one highway layer: 28.0 million parameters.
    Medium,
    /// 4,096 cells, projection 512, two highway layers: 93.6 million parameters.
    Original,
}

impl PublishedSize {
    /// The options of this size: all have the same convolutions, two LSTM layers in each direction, and clips of 3.
    pub fn options(self) -> ModelOptions {
        let (dim, projection_dim, n_highway) = match self {
            Self::Small => (1024, 128, 1),
            Self::Medium => (2048, 256, 1),
            Self::Original => (4096, 512, 2),
        };
        let filters = [(1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024)];
        let (cell_clip, proj_clip) = (Some(3.0), Some(3.0));
        ModelOptions {
            text: TextOptions::default(),
            lstm: LstmOptions { dim, projection_dim, n_layers: 2, cell_clip, proj_clip, use_skip_connections: true },
            char_cnn: CharCnnOptions {
                activation: Activation::Relu,
                filters: filters.map(|(width, n)| Filter { width, n }).to_vec(),
                n_highway,
                embedding_dim: 16,
                n_characters: Some(FILE_CHARACTERS + 1),
                max_characters_per_token: 50,
            },
        }
    }
}

/// Name and shape of a tensor that the options require.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Path in the HDF5 file, `CNN/W_cnn_0`.
    pub name: String,
    /// Row-major shape.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the tensor has no values; false for every tensor of a checked model.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl ModelOptions {
    /// Parses and checks an `options.json`; `origin` names it in errors.
    ///
    /// # Errors
    /// [`OptionsError`] with the JSON path of the invalid field, its value and the legal values, or with the kind of
    /// the file if it is something else (an error page, Transformer ELMo, ELMoForManyLangs).
    pub fn from_json(bytes: &[u8], origin: &str) -> Result<Self, OptionsError> {
        let root = parse_object(bytes, origin)?;
        refuse_other_models(&root, origin)?;
        let root = Fields { origin, prefix: String::new(), map: &root };
        refuse_unidirectional(&root)?;
        let lstm = lstm_options(&root.object("lstm", "an object with dim, projection_dim, n_layers and clips")?)?;
        let char_cnn = char_cnn_options(&root.object("char_cnn", "an object with filters, embedding and activation")?)?;
        refuse_huge_words(&char_cnn, origin)?;
        let options = Self { text: text_options(&root)?, lstm, char_cnn };
        match options.parameters() {
            0..=MAX_PARAMETERS => Ok(options),
            parameters => Err(OptionsError::TooManyParameters { origin: origin.to_owned(), parameters }),
        }
    }

    /// The settings of an embedder for this model: the defaults, and what the model records.
    pub fn spec(&self) -> EmbedSpec {
        let defaults = EmbedSpec::default();
        EmbedSpec {
            tokenizer: self.text.tokenizer.unwrap_or(defaults.tokenizer),
            sentences: self.text.sentences.unwrap_or(defaults.sentences),
            state: self.text.state.unwrap_or(defaults.state),
            ..defaults
        }
    }

    /// The keys that determine the numbers of the model, sorted and on one line; `n_characters` is always 262. Equal
    /// models have equal text.
    pub fn canonical_json(&self) -> String {
        // Serialising plain numbers and strings into memory does not fail.
        serde_json::to_string(&Document { text: None, ..self.document() }).unwrap_or_default()
    }

    /// All options on one line, as [`ModelOptions::from_json`] reads them.
    pub fn to_json(&self) -> String {
        serde_json::to_string(&self.document()).unwrap_or_default()
    }

    /// The options as an `options.json` that AllenNLP, bilm-tf and this crate accept. The first two ignore `text`.
    pub fn to_json_pretty(&self) -> String {
        serde_json::to_string_pretty(&self.document()).unwrap_or_default() + "\n"
    }

    /// `F`: output channels of all convolutions together.
    pub fn n_filters(&self) -> usize {
        self.char_cnn.filters.iter().map(|f| f.n).sum()
    }

    /// `2P`: width of a token vector of any layer.
    pub fn width(&self) -> usize {
        2 * self.lstm.projection_dim
    }

    /// `L + 1`: the token layer and one per LSTM layer.
    pub fn n_layers_out(&self) -> usize {
        self.lstm.n_layers + 1
    }

    /// Whether the LSTM cells have a projection (`P < D`).
    pub fn has_projection(&self) -> bool {
        self.lstm.projection_dim < self.lstm.dim
    }

    /// Whether the char CNN has a projection from `F` to `P` (`F != P`).
    pub fn has_char_projection(&self) -> bool {
        self.n_filters() != self.lstm.projection_dim
    }

    /// Number of parameters.
    pub fn parameters(&self) -> u64 {
        let size = |t: &TensorSpec| t.shape.iter().fold(1u64, |n, &d| n.saturating_mul(d as u64));
        self.weight_plan().iter().fold(0u64, |n, t| n.saturating_add(size(t)))
    }

    /// Name and shape of every tensor of the model, in the order of computation.
    pub fn weight_plan(&self) -> Vec<TensorSpec> {
        let mut plan = vec![spec("char_embed", [FILE_CHARACTERS, self.char_cnn.embedding_dim])];
        self.plan_token_layer(&mut plan);
        for direction in 0..2 {
            for layer in 0..self.lstm.n_layers {
                self.plan_cell(&format!("RNN_{direction}/RNN/MultiRNNCell/Cell{layer}/LSTMCell"), &mut plan);
            }
        }
        plan
    }

    fn plan_token_layer(&self, plan: &mut Vec<TensorSpec>) {
        let (c, f, p) = (self.char_cnn.embedding_dim, self.n_filters(), self.lstm.projection_dim);
        for (i, filter) in self.char_cnn.filters.iter().enumerate() {
            plan.push(spec(format!("CNN/W_cnn_{i}"), [1, filter.width, c, filter.n]));
            plan.push(spec(format!("CNN/b_cnn_{i}"), [filter.n]));
        }
        for i in 0..self.char_cnn.n_highway {
            for gate in ["carry", "transform"] {
                plan.push(spec(format!("CNN_high_{i}/W_{gate}"), [f, f]));
                plan.push(spec(format!("CNN_high_{i}/b_{gate}"), [f]));
            }
        }
        if self.has_char_projection() {
            plan.push(spec("CNN_proj/W_proj", [f, p]));
            plan.push(spec("CNN_proj/b_proj", [p]));
        }
    }

    fn plan_cell(&self, prefix: &str, plan: &mut Vec<TensorSpec>) {
        let (d, p) = (self.lstm.dim, self.lstm.projection_dim);
        plan.push(spec(format!("{prefix}/W_0"), [2 * p, 4 * d]));
        plan.push(spec(format!("{prefix}/B"), [4 * d]));
        if self.has_projection() {
            plan.push(spec(format!("{prefix}/W_P_0"), [d, p]));
        }
    }

    fn document(&self) -> Document<'_> {
        let (lstm, cnn) = (&self.lstm, &self.char_cnn);
        Document {
            char_cnn: CharCnnDocument {
                activation: cnn.activation.as_str(),
                embedding: EmbeddingDocument { dim: cnn.embedding_dim },
                filters: cnn.filters.iter().map(|f| (f.width, f.n)).collect(),
                max_characters_per_token: cnn.max_characters_per_token,
                n_characters: FILE_CHARACTERS + 1,
                n_highway: cnn.n_highway,
            },
            lstm: LstmDocument {
                cell_clip: lstm.cell_clip,
                dim: lstm.dim,
                n_layers: lstm.n_layers,
                proj_clip: lstm.proj_clip,
                projection_dim: lstm.projection_dim,
                use_skip_connections: lstm.use_skip_connections,
            },
            text: (!self.text.is_empty()).then(|| TextDocument {
                sentences: self.text.sentences.map(SentenceMode::as_str),
                state: self.text.state.map(StateMode::as_str),
                tokenizer: self.text.tokenizer.map(TokenizerKind::as_str),
            }),
        }
    }
}

impl Activation {
    /// The word in `options.json`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Relu => "relu",
            Self::Tanh => "tanh",
        }
    }
}

fn spec<const N: usize>(name: impl Into<String>, shape: [usize; N]) -> TensorSpec {
    TensorSpec { name: name.into(), shape: shape.to_vec() }
}

// Writing. Fields are in alphabetical order, which `serde` keeps, so that the text does not depend on the features of
// `serde_json::Map`. `None` is written as `null`, because AllenNLP requires the keys.

#[derive(Serialize)]
struct Document<'a> {
    char_cnn: CharCnnDocument<'a>,
    lstm: LstmDocument,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<TextDocument>,
}

#[derive(Serialize)]
struct TextDocument {
    #[serde(skip_serializing_if = "Option::is_none")]
    sentences: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tokenizer: Option<&'static str>,
}

#[derive(Serialize)]
struct CharCnnDocument<'a> {
    activation: &'a str,
    embedding: EmbeddingDocument,
    filters: Vec<(usize, usize)>,
    max_characters_per_token: usize,
    n_characters: usize,
    n_highway: usize,
}

#[derive(Serialize)]
struct EmbeddingDocument {
    dim: usize,
}

#[derive(Serialize)]
struct LstmDocument {
    cell_clip: Option<f64>,
    dim: usize,
    n_layers: usize,
    proj_clip: Option<f64>,
    projection_dim: usize,
    use_skip_connections: bool,
}

// Reading.

fn parse_object(bytes: &[u8], origin: &str) -> Result<Map<String, Value>, OptionsError> {
    if bytes.len() > MAX_OPTIONS_BYTES {
        return Err(OptionsError::TooLarge { origin: origin.to_owned(), bytes: bytes.len() });
    }
    if let Some((what, remedy)) = foreign_bytes(bytes) {
        return Err(OptionsError::Foreign { origin: origin.to_owned(), what, remedy });
    }
    let wrong = |reason: String| OptionsError::Json { origin: origin.to_owned(), reason };
    match json::from_slice(bytes).map_err(wrong)? {
        Value::Object(map) => Ok(map),
        other => Err(wrong(format!("found {}", json::shown(&other)))),
    }
}

/// Recognises other kinds of files by their first bytes.
fn foreign_bytes(bytes: &[u8]) -> Option<(String, &'static str)> {
    match file_kind(bytes) {
        FileKind::Json | FileKind::Unknown => None,
        kind @ (FileKind::Hdf5 | FileKind::Safetensors) => {
            Some((kind.to_string(), "the options and the weights were exchanged"))
        }
        kind => Some((kind.to_string(), kind.remedy())),
    }
}

/// Rejects the JSON settings of other types of models.
fn refuse_other_models(root: &Map<String, Value>, origin: &str) -> Result<(), OptionsError> {
    let has = |key: &str| root.contains_key(key);
    let found = if has("lstm") || has("char_cnn") {
        return Ok(());
    } else if has("dataset_reader") || root.get("model").is_some_and(Value::is_object) {
        ("the config.json of an AllenNLP archive, such as Transformer ELMo", "only the biLSTM ELMo models can be run")
    } else if has("token_embedder") && has("encoder") || has("config_path") {
        ("a config of ELMoForManyLangs", "its models read another alphabet and are not supported")
    } else if ["error", "message", "code", "Message", "Code"].into_iter().any(has) {
        ("an error answer saved as JSON", "download the file again and look at it before use")
    } else {
        return Ok(());
    };
    Err(OptionsError::Foreign { origin: origin.to_owned(), what: found.0.to_owned(), remedy: found.1 })
}

fn refuse_unidirectional(root: &Fields<'_>) -> Result<(), OptionsError> {
    match root.get("bidirectional") {
        Some(Value::Bool(false)) => {
            Err(root.wrong("bidirectional", "true or nothing", "a forward-only language model has no backward vectors"))
        }
        _ => Ok(()),
    }
}

fn lstm_options(lstm: &Fields<'_>) -> Result<LstmOptions, OptionsError> {
    let dim = lstm.size("dim", 1..=MAX_DIM)?;
    let projection_dim = lstm.size("projection_dim", 1..=MAX_DIM)?;
    if projection_dim > dim {
        let remedy = "a projection wider than the cells does not exist in bilm-tf; are the two exchanged?";
        return Err(lstm.wrong("projection_dim", format!("at most `lstm.dim` ({dim})"), remedy));
    }
    // Checked even where it has no effect: an invalid value indicates a wrong file.
    let proj_clip = clip(lstm, "proj_clip")?;
    Ok(LstmOptions {
        dim,
        projection_dim,
        n_layers: lstm.size_or("n_layers", 1..=MAX_LAYERS, 1)?,
        cell_clip: clip(lstm, "cell_clip")?,
        proj_clip: proj_clip.filter(|_| projection_dim < dim),
        use_skip_connections: lstm.boolean(
            "use_skip_connections",
            "say whether layers add their input; it is true in all published models",
        )?,
    })
}

fn text_options(root: &Fields<'_>) -> Result<TextOptions, OptionsError> {
    if root.get("text").is_none() {
        return Ok(TextOptions::default());
    }
    let text = root.object("text", "an object with tokenizer, sentences and state")?;
    Ok(TextOptions {
        state: text.word("state", &[StateMode::Zero.as_str(), StateMode::Warm.as_str()])?,
        tokenizer: text.word("tokenizer", TokenizerKind::WORDS)?,
        sentences: text.word("sentences", SentenceMode::WORDS)?,
    })
}

/// Absent, `null`, or a positive number.
fn clip(lstm: &Fields<'_>, key: &'static str) -> Result<Option<f64>, OptionsError> {
    let Some(value) = lstm.get(key) else { return Ok(None) };
    // Values that round to 0 or to infinity in float32, in which the model clamps, are rejected.
    match value.as_f64() {
        Some(clip) if clip as f32 > 0.0 && (clip as f32).is_finite() => Ok(Some(clip)),
        _ => Err(lstm.wrong(
            key,
            "a positive finite number or null",
            "0 means `no clipping` to AllenNLP and `clip to 0` to TensorFlow: write null for none, 3 as in the published models",
        )),
    }
}

fn char_cnn_options(cnn: &Fields<'_>) -> Result<CharCnnOptions, OptionsError> {
    let max_characters_per_token = cnn.size("max_characters_per_token", 3..=MAX_CHARACTERS)?;
    Ok(CharCnnOptions {
        activation: activation(cnn)?,
        filters: filters(cnn, max_characters_per_token)?,
        n_highway: cnn.size_or("n_highway", 0..=MAX_HIGHWAY, 0)?,
        embedding_dim: cnn.object("embedding", "an object with dim")?.size("dim", 1..=MAX_EMBEDDING_DIM)?,
        n_characters: n_characters(cnn)?,
        max_characters_per_token,
    })
}

fn activation(cnn: &Fields<'_>) -> Result<Activation, OptionsError> {
    match cnn.get("activation").and_then(Value::as_str) {
        Some("relu") => Ok(Activation::Relu),
        Some("tanh") => Ok(Activation::Tanh),
        _ => Err(cnn.wrong("activation", "\"relu\" or \"tanh\"", "it is \"relu\" in all published models")),
    }
}

fn n_characters(cnn: &Fields<'_>) -> Result<Option<usize>, OptionsError> {
    match cnn.get("n_characters").map(Value::as_u64) {
        None => Ok(None),
        Some(Some(261)) => Ok(Some(261)),
        Some(Some(262)) => Ok(Some(262)),
        Some(_) => Err(cnn.wrong(
            "n_characters",
            "262, 261 or nothing",
            "the alphabet of ELMo is 256 bytes, five marks and padding; other alphabets cannot be run",
        )),
    }
}

/// Rejects sizes for which the convolution windows of one word would need too much memory.
fn refuse_huge_words(cnn: &CharCnnOptions, origin: &str) -> Result<(), OptionsError> {
    let widest = cnn.filters.iter().map(|filter| filter.width).max().unwrap_or(0);
    let numbers = cnn.max_characters_per_token.saturating_mul(widest).saturating_mul(cnn.embedding_dim);
    if numbers <= MAX_WORD_NUMBERS {
        return Ok(());
    }
    Err(OptionsError::Field {
        origin: origin.to_owned(),
        path: "char_cnn".to_owned(),
        expected: format!("max_characters_per_token x widest filter x embedding.dim of at most {MAX_WORD_NUMBERS}"),
        found: numbers.to_string(),
        remedy: "published models have 50 x 7 x 16; copy the numbers from the model's training settings".to_owned(),
    })
}

fn filters(cnn: &Fields<'_>, max_characters: usize) -> Result<Vec<Filter>, OptionsError> {
    let remedy = "write [[width, channels], ...], as in [[1, 32], [2, 32], [3, 64]]";
    let rows = match cnn.get("filters").and_then(Value::as_array) {
        Some(rows) if (1..=MAX_FILTER_ROWS).contains(&rows.len()) => rows,
        _ => return Err(cnn.wrong("filters", format!("a list of 1 to {MAX_FILTER_ROWS} pairs"), remedy)),
    };
    rows.iter().enumerate().map(|(i, row)| filter(cnn, i, row, max_characters)).collect()
}

fn filter(cnn: &Fields<'_>, i: usize, row: &Value, max_characters: usize) -> Result<Filter, OptionsError> {
    let pair = row.as_array().filter(|r| r.len() == 2);
    let number = |k: usize, max: u64| {
        pair.and_then(|r| r.get(k)).and_then(Value::as_u64).filter(|n| (1..=max).contains(n)).map(|n| n as usize)
    };
    match (number(0, max_characters as u64), number(1, MAX_DIM)) {
        (Some(width), Some(n)) => Ok(Filter { width, n }),
        _ => Err(OptionsError::Field {
            origin: cnn.origin.to_owned(),
            path: format!("{}filters[{i}]", cnn.prefix),
            expected: format!(
                "[width, channels] with 1 <= width <= max_characters_per_token ({max_characters}) and 1 <= channels <= {MAX_DIM}"
            ),
            found: json::shown(row),
            remedy: "copy the table from the model's training settings".to_owned(),
        }),
    }
}

/// An object of the file and its path.
struct Fields<'a> {
    origin: &'a str,
    /// Path with a trailing dot; empty at the root.
    prefix: String,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// `None` if the key is absent or `null`, which are the same in bilm-tf.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn object(&self, key: &str, expected: &str) -> Result<Self, OptionsError> {
        match self.get(key) {
            Some(Value::Object(map)) => Ok(Self { origin: self.origin, prefix: format!("{}{key}.", self.prefix), map }),
            _ if key == "char_cnn" => Err(self.wrong(
                key,
                expected,
                "a model over whole words (without char_cnn) needs its vocabulary and cannot be run",
            )),
            _ => Err(self.wrong(key, expected, "is this the options.json of an ELMo model?")),
        }
    }

    fn size(&self, key: &str, range: std::ops::RangeInclusive<u64>) -> Result<usize, OptionsError> {
        match self.get(key).and_then(Value::as_u64) {
            Some(n) if range.contains(&n) => Ok(n as usize),
            _ => Err(self.wrong(
                key,
                format!("a whole number from {} to {}", range.start(), range.end()),
                "copy the value from the model's training settings",
            )),
        }
    }

    fn size_or(&self, key: &str, range: std::ops::RangeInclusive<u64>, default: usize) -> Result<usize, OptionsError> {
        if self.get(key).is_none() { Ok(default) } else { self.size(key, range) }
    }

    fn boolean(&self, key: &str, remedy: &str) -> Result<bool, OptionsError> {
        self.get(key).and_then(Value::as_bool).ok_or_else(|| self.wrong(key, "true or false", remedy))
    }

    /// `None` if the key is absent. An unknown word is an error: the model must not be read with another tokenizer.
    fn word<T: FromStr>(&self, key: &str, legal: &[&str]) -> Result<Option<T>, OptionsError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let word = value.as_str().filter(|word| legal.contains(word)).and_then(|word| word.parse().ok());
        let remedy = "correct it or remove the key; a newer elmo may know more words";
        word.map(Some).ok_or_else(|| self.wrong(key, format!("one of {}", legal.join(", ")), remedy))
    }

    fn wrong(&self, key: &str, expected: impl Into<String>, remedy: impl Into<String>) -> OptionsError {
        OptionsError::Field {
            origin: self.origin.to_owned(),
            path: format!("{}{key}", self.prefix),
            expected: expected.into(),
            found: self.map.get(key).map_or_else(|| "nothing".to_owned(), json::shown),
            remedy: remedy.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used)]
    use serde_json::json;

    use super::*;

    /// The options of the published original model with `projection_dim`, `dim` and `n_highway` put in.
    fn published(p: u64, d: u64, n_highway: u64) -> Value {
        json!({
            "lstm": {"use_skip_connections": true, "projection_dim": p, "cell_clip": 3, "proj_clip": 3, "dim": d, "n_layers": 2},
            "char_cnn": {"activation": "relu",
                "filters": [[1, 32], [2, 32], [3, 64], [4, 128], [5, 256], [6, 512], [7, 1024]],
                "n_highway": n_highway, "embedding": {"dim": 16}, "n_characters": 262, "max_characters_per_token": 50}
        })
    }

    /// Expected: the options as published, and the parameters that the publication counts in millions.
    #[test]
    fn published_sizes() {
        for (size, options, parameters) in [
            (PublishedSize::Small, published(128, 1024, 1), 13_593_296),
            (PublishedSize::Medium, published(256, 2048, 1), 28_027_728),
            (PublishedSize::Original, published(512, 4096, 2), 93_600_848),
        ] {
            assert_eq!(size.options(), parse(&options).unwrap());
            assert_eq!(size.options().parameters(), parameters);
        }
    }

    fn parse(value: &Value) -> Result<ModelOptions, OptionsError> {
        ModelOptions::from_json(value.to_string().as_bytes(), "options.json")
    }

    /// The small model with the value at `path` replaced, or removed with `None`.
    fn with(path: &str, value: Option<Value>) -> Value {
        let mut root = published(128, 1024, 1);
        let (parent, key) = path.rsplit_once('/').unwrap();
        let object = root.pointer_mut(parent).unwrap().as_object_mut().unwrap();
        match value {
            Some(value) => object.insert(key.to_owned(), value),
            None => object.remove(key),
        };
        root
    }

    fn names(options: &ModelOptions) -> Vec<String> {
        options.weight_plan().into_iter().map(|t| t.name).collect()
    }

    // Sums over the published table of shapes; they round to the published 13.6, 28.0 and 93.6 million.
    #[test]
    fn published_models_have_the_published_number_of_parameters() {
        for (p, d, n_highway, tensors, parameters) in
            [(128, 1024, 1, 33, 13_593_296), (256, 2048, 1, 33, 28_027_728), (512, 4096, 2, 37, 93_600_848)]
        {
            let options = parse(&published(p, d, n_highway)).unwrap();
            assert_eq!(options.weight_plan().len(), tensors);
            assert_eq!(options.parameters(), parameters);
            assert_eq!(options.width() as u64, 2 * p);
            assert_eq!((options.n_filters(), options.n_layers_out()), (2048, 3));
        }
    }

    #[test]
    fn training_options_of_bilm_tf_describe_the_same_model() {
        let mut training = published(512, 4096, 2);
        training["char_cnn"]["n_characters"] = json!(261);
        let extra = json!({"bidirectional": true, "dropout": 0.1, "all_clip_norm_val": 10.0, "n_epochs": 10,
            "n_train_tokens": 768_648_884, "batch_size": 128, "n_tokens_vocab": 793_471, "unroll_steps": 20,
            "n_negative_samples_batch": 8192, "sample_softmax": true});
        training.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let training = parse(&training).unwrap();
        assert_eq!(training.char_cnn.n_characters, Some(261));
        assert_eq!(training.canonical_json(), parse(&published(512, 4096, 2)).unwrap().canonical_json());
    }

    #[test]
    fn canonical_text_is_this_text() {
        // By hand: keys sorted, no spaces, clips as floats.
        let expected = r#"{"char_cnn":{"activation":"relu","embedding":{"dim":16},"filters":[[1,32],[2,32],[3,64],[4,128],[5,256],[6,512],[7,1024]],"max_characters_per_token":50,"n_characters":262,"n_highway":1},"lstm":{"cell_clip":3.0,"dim":1024,"n_layers":2,"proj_clip":null,"projection_dim":128,"use_skip_connections":true}}"#;
        let options = parse(&with("/lstm/proj_clip", Some(Value::Null))).unwrap();
        assert_eq!(options.canonical_json(), expected);
        let back = ModelOptions::from_json(options.to_json_pretty().as_bytes(), "x").unwrap();
        assert_eq!(back, options);
    }

    /// What the key `text` says is a default and is kept; the fingerprint is taken over the canonical text without it.
    #[test]
    fn the_tokenizer_of_a_model_is_recorded_outside_of_its_identity() {
        let plain = parse(&published(128, 1024, 1)).unwrap();
        assert_eq!((plain.text, plain.spec()), (TextOptions::default(), EmbedSpec::default()));
        let mut recorded = published(128, 1024, 1);
        recorded["text"] = json!({"tokenizer": "whitespace", "sentences": "off", "state": "warm"});
        let options = parse(&recorded).unwrap();
        assert_eq!(options.canonical_json(), plain.canonical_json());
        for text in [options.to_json(), options.to_json_pretty()] {
            let again = ModelOptions::from_json(text.as_bytes(), "again").unwrap();
            assert_eq!(again, options);
            let (tokenizer, sentences, state) = (TokenizerKind::Whitespace, SentenceMode::Off, StateMode::Warm);
            assert_eq!(again.spec(), EmbedSpec { tokenizer, sentences, state, ..EmbedSpec::default() });
        }
        recorded["text"] = json!({"tokenizer": "words"});
        let half = parse(&recorded).unwrap().spec();
        assert_eq!((half.tokenizer, half.sentences), (TokenizerKind::Words, SentenceMode::Split));
        for (wrong, words) in [
            (
                json!({"tokenizer": "spacy"}),
                "`text.tokenizer`: expected one of moses, words, whitespace, found a string",
            ),
            (json!({"sentences": 1}), "`text.sentences`: expected one of split, off, found 1"),
            (json!({"state": "carry"}), "`text.state`: expected one of zero, warm, found a string"),
            (json!("moses"), "`text`: expected an object"),
        ] {
            recorded["text"] = wrong;
            let error = parse(&recorded).unwrap_err().to_string();
            assert!(error.contains(words), "no {words:?} in {error}");
        }
    }

    #[test]
    fn what_may_be_left_out() {
        for (path, check) in [
            ("/lstm/cell_clip", (|o| o.lstm.cell_clip.is_none()) as fn(&ModelOptions) -> bool),
            ("/lstm/proj_clip", |o| o.lstm.proj_clip.is_none()),
            ("/lstm/n_layers", |o| o.lstm.n_layers == 1),
            ("/char_cnn/n_highway", |o| o.char_cnn.n_highway == 0),
            ("/char_cnn/n_characters", |o| o.char_cnn.n_characters.is_none()),
        ] {
            assert!(check(&parse(&with(path, None)).unwrap()), "{path}");
            assert!(check(&parse(&with(path, Some(Value::Null))).unwrap()), "{path}: null");
        }
    }

    #[test]
    fn parts_that_a_model_does_not_have_are_not_in_its_plan() {
        let none = parse(&with("/char_cnn/n_highway", Some(json!(0)))).unwrap();
        assert!(names(&none).iter().all(|n| !n.starts_with("CNN_high")));
        let mut plain = published(1024, 1024, 1);
        plain["lstm"]["n_layers"] = json!(4);
        let plain = parse(&plain).unwrap();
        assert!(!plain.has_projection() && plain.lstm.proj_clip.is_none());
        assert!(names(&plain).iter().all(|n| !n.ends_with("W_P_0")));
        assert!(names(&plain).contains(&"RNN_1/RNN/MultiRNNCell/Cell3/LSTMCell/W_0".to_owned()));
        let same = parse(&published(2048, 4096, 1)).unwrap();
        assert!(names(&same).iter().all(|n| !n.starts_with("CNN_proj")));
        assert!(names(&parse(&published(128, 1024, 1)).unwrap()).contains(&"CNN_proj/W_proj".to_owned()));
    }

    #[test]
    fn tanh_and_no_residual() {
        let tanh = parse(&with("/char_cnn/activation", Some(json!("tanh")))).unwrap();
        assert_eq!(tanh.char_cnn.activation, Activation::Tanh);
        assert!(!parse(&with("/lstm/use_skip_connections", Some(json!(false)))).unwrap().lstm.use_skip_connections);
    }

    #[test]
    fn wrong_fields_are_named_with_what_stands_there() {
        let huge = json!(18_446_744_073_709_551_615_u64);
        for (path, value, words) in [
            (
                "/lstm/cell_clip",
                json!(0),
                "`lstm.cell_clip`: expected a positive finite number or null, found 0; 0 means",
            ),
            ("/lstm/cell_clip", json!(-3.5), "found -3.5"),
            ("/lstm/proj_clip", json!(1e300), "found 1e+300"),
            ("/lstm/proj_clip", json!("3"), "found a string; "),
            ("/lstm/dim", json!(0), "`lstm.dim`: expected a whole number from 1 to 65536, found 0"),
            ("/lstm/dim", huge.clone(), "found 18446744073709551615"),
            ("/lstm/dim", json!(1024.5), "found 1024.5"),
            ("/lstm/dim", json!(64), "`lstm.projection_dim`: expected at most `lstm.dim` (64), found 128"),
            ("/lstm/projection_dim", json!(null), "`lstm.projection_dim`: expected a whole number"),
            ("/lstm/n_layers", json!(65), "`lstm.n_layers`"),
            ("/lstm/use_skip_connections", json!(1), "`lstm.use_skip_connections`: expected true or false, found 1"),
            (
                "/char_cnn/activation",
                json!("gelu"),
                "`char_cnn.activation`: expected \"relu\" or \"tanh\", found a string",
            ),
            ("/char_cnn/n_highway", json!(-1), "`char_cnn.n_highway`"),
            ("/char_cnn/n_characters", json!(256), "`char_cnn.n_characters`: expected 262, 261 or nothing, found 256"),
            ("/char_cnn/max_characters_per_token", json!(2), "`char_cnn.max_characters_per_token`"),
            ("/char_cnn/embedding", json!({}), "`char_cnn.embedding.dim`"),
            ("/char_cnn/embedding", json!(16), "`char_cnn.embedding`: expected an object with dim, found 16"),
            ("/char_cnn/filters", json!([]), "`char_cnn.filters`: expected a list of 1 to 64 pairs, found []"),
            ("/char_cnn/filters", json!([[1, 32], [51, 8]]), "`char_cnn.filters[1]`"),
            ("/char_cnn/filters", json!([[1, 32, 3]]), "found [1,32,3]"),
            ("/char_cnn/filters", json!([[1, huge]]), "`char_cnn.filters[0]`"),
        ] {
            let error = parse(&with(path, Some(value))).unwrap_err().to_string();
            assert!(error.starts_with("options.json: ") && error.contains(words), "no {words:?} in {error}");
        }
        for path in ["/lstm/use_skip_connections", "/lstm/dim", "/char_cnn/activation", "/char_cnn/filters"] {
            let error = parse(&with(path, None)).unwrap_err().to_string();
            assert!(error.contains(&path[1..].replace('/', ".")) && error.contains("found nothing"), "{error}");
        }
    }

    #[test]
    fn sizes_that_are_legal_alone_and_too_large_together() {
        let mut large = published(65_536, 65_536, 16);
        large["char_cnn"]["filters"] = json!(vec![[1, 65_536]; 64]);
        large["lstm"]["n_layers"] = json!(64);
        // 16 highway layers of (64 * 65536)^2 alone are 5.6e14.
        let error = parse(&large).unwrap_err();
        assert!(
            matches!(error, OptionsError::TooManyParameters { parameters, .. } if parameters > 500_000_000_000_000)
        );
    }

    #[test]
    fn other_files_are_named() {
        for (text, words) in [
            ("", "an empty file"),
            ("<html><body>404</body></html>", "an HTML or XML page"),
            ("  <?xml version='1.0'?><Error/>", "an HTML or XML page"),
            ("version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
            ("\u{89}HDF", "not JSON"),
            ("PK\u{3}\u{4}", "a zip archive"),
            ("{\"message\": \"Not Found\"}", "an error answer saved as JSON"),
            ("{}", "`lstm`: expected an object"),
            ("[1, 2]", "not JSON: found [1,2]"),
            ("\u{feff}\"hunter2\"", "not JSON: found a string;"),
            ("{\"lstm\": ", "not JSON"),
            ("{\"lstm\": {\"dim\": NaN}}", "not JSON"),
            ("{\"dataset_reader\": {}, \"model\": {\"type\": \"language_model\"}}", "Transformer ELMo"),
            ("{\"encoder\": {\"name\": \"elmo\"}, \"token_embedder\": {\"name\": \"cnn\"}}", "ELMoForManyLangs"),
            ("{\"seed\": 1, \"config_path\": \"/x/cnn_50_100_512_4096_sample.json\"}", "ELMoForManyLangs"),
        ] {
            let error = ModelOptions::from_json(text.as_bytes(), "o").unwrap_err().to_string();
            assert!(error.contains(words), "no {words:?} in {error}");
        }
        let words = with("/char_cnn", None);
        assert!(parse(&words).unwrap_err().to_string().contains("needs its vocabulary"));
        assert!(
            parse(&with("/bidirectional", Some(json!(false)))).unwrap_err().to_string().contains("`bidirectional`")
        );
        let long = vec![b' '; MAX_OPTIONS_BYTES + 1];
        assert!(matches!(ModelOptions::from_json(&long, "o"), Err(OptionsError::TooLarge { .. })));
        let deep = "[".repeat(100_000);
        assert!(matches!(ModelOptions::from_json(deep.as_bytes(), "o"), Err(OptionsError::Json { .. })));
        let marked = format!("\u{feff}{}", published(128, 1024, 1));
        assert!(ModelOptions::from_json(marked.as_bytes(), "o").is_ok());
    }
}
