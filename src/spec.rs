//! The settings that determine the numbers of an output, each with a type of its own.
//!
//! Every enum implements [`FromStr`] and [`fmt::Display`] with the values of the command line and of SQL, so that both
//! accept the same values and an error lists them.

use std::{fmt, str::FromStr};

use thiserror::Error;

use crate::mix::{MODEL_MIX, MixError, ScalarMix};

/// A setting has an invalid value, or two settings exclude each other.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SpecError {
    /// Not one of the legal values.
    #[error("{option}: unknown value {value:?}; legal values are {}", legal.join(", "))]
    Value {
        /// The setting.
        option: &'static str,
        /// The invalid value.
        value: String,
        /// The legal values.
        legal: Vec<&'static str>,
    },
    /// Two settings that exclude each other, or a number out of range.
    #[error("{0}")]
    Conflict(String),
    /// The name of a scalar mix is empty.
    #[error("the name of a scalar mix is empty")]
    EmptyMixName,
    /// The name of a scalar mix has another meaning.
    #[error("a scalar mix cannot be named {0:?}, which is a built-in value of layers")]
    ReservedMixName(String),
    /// A file that `layers` names is not a scalar mix.
    #[error(transparent)]
    Mix(#[from] MixError),
}

macro_rules! words {
    ($(#[$doc:meta])* $name:ident, $option:literal, { $($(#[$vdoc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name { $($(#[$vdoc])* $variant),+ }

        impl $name {
            /// Every legal value, in the order of the documentation.
            pub const WORDS: &'static [&'static str] = &[$($word),+];

            /// The value on the command line and in SQL.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word),+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl FromStr for $name {
            type Err = SpecError;

            fn from_str(s: &str) -> Result<Self, SpecError> {
                match s {
                    $($word => Ok(Self::$variant),)+
                    _ => Err(SpecError::Value { option: $option, value: s.to_owned(), legal: Self::WORDS.to_vec() }),
                }
            }
        }
    };
}

words! {
    /// One vector per text, or one per token.
    Level, "level", {
        /// One pooled vector per text.
        Sentence = "sentence",
        /// A list of token vectors with byte offsets.
        Token = "token",
    }
}

words! {
    /// How the token vectors of a text are reduced to one vector.
    Pooling, "pooling", {
        /// Arithmetic mean over the real tokens.
        Mean = "mean",
        /// Largest value of each dimension.
        Max = "max",
        /// The first token.
        First = "first",
        /// The last token.
        Last = "last",
        /// Forward half of the last token and backward half of the first: the final states of both directions.
        Ends = "ends",
    }
}

words! {
    /// How a sentence is cut into tokens.
    TokenizerKind, "tokenizer", {
        /// Moses punctuation normalisation and English tokenizer, entities not escaped.
        Moses = "moses",
        /// Words of Unicode Standard Annex 29.
        Words = "words",
        /// At white space only, as Python's `str.split`.
        Whitespace = "whitespace",
    }
}

words! {
    /// Whether a text is cut into sentences first.
    SentenceMode, "sentences", {
        /// Cut into sentences.
        Split = "split",
        /// The whole text is one sentence.
        Off = "off",
    }
}

words! {
    /// The state that a sentence starts from.
    StateMode, "state", {
        /// Zeros, as in AllenNLP directly after `reset_states()`.
        Zero = "zero",
        /// One constant per model, computed from a fixed text.
        Warm = "warm",
        /// The final state of the same row of the previous batch, as in AllenNLP; depends on the order of the rows.
        Carry = "carry",
    }
}

words! {
    /// What to do with a sentence of more than `max_tokens` tokens.
    OnLong, "on-long", {
        /// Read it in overlapping windows; each token gets its vector from the window with the most context.
        Window = "window",
        /// Keep its first `max_tokens` tokens and set `truncated`.
        Truncate = "truncate",
        /// Treat the row as one that cannot be embedded.
        Error = "error",
    }
}

words! {
    /// What to do with a row that cannot be embedded.
    OnError, "on-error", {
        /// Fail with the number of the row.
        Fail = "fail",
        /// NULL vector; the reason is in the column `error`.
        Null = "null",
        /// Leave the row out, and count and report it.
        Skip = "skip",
    }
}

words! {
    /// Scaling of the pooled vector (or of each token vector).
    Normalize, "normalize", {
        /// As computed.
        Off = "off",
        /// Euclidean length 1; a zero vector stays zero.
        L2 = "l2",
    }
}

words! {
    /// Rounding of the stored float32 values.
    FloatRounding, "float", {
        /// None.
        F32 = "f32",
        /// To the nearest half-precision value; compresses better.
        F16Rounded = "f16-rounded",
        /// To the nearest bfloat16 value; compresses best.
        Bf16Rounded = "bf16-rounded",
    }
}

words! {
    /// Arrow type of a vector.
    ListType, "list-type", {
        /// `FixedSizeList`.
        Fixed = "fixed",
        /// `List`, for readers that do not support `FixedSizeList`.
        List = "list",
    }
}

/// Which layers are returned, and how they are combined.
#[derive(Debug, Clone, PartialEq)]
pub enum Layers {
    /// Mean of all layers: a scalar mix with equal weights.
    Average,
    /// The highest layer.
    Top,
    /// Layer `k`; 0 is the token layer.
    One(usize),
    /// Every layer, one after the other, layer 0 first.
    All,
    /// A fitted scalar mix.
    Mix(ScalarMix),
}

impl Layers {
    /// The legal values besides other numbers of layers and a mix file.
    pub const WORDS: &'static [&'static str] = &["average", "top", "token", "0", "1", "2", "all"];

    /// Checks that a scalar mix can be selected by this name.
    ///
    /// # Errors
    /// [`SpecError`] when the name is empty or a built-in value of `layers`.
    pub fn check_mix_name(name: &str) -> Result<(), SpecError> {
        match name {
            "" => Err(SpecError::EmptyMixName),
            name if name == MODEL_MIX || name.parse::<Self>().is_ok() => {
                Err(SpecError::ReservedMixName(name.to_owned()))
            }
            _ => Ok(()),
        }
    }
}

impl FromStr for Layers {
    type Err = SpecError;

    /// Accepts the legal values and the number of a layer. A mix file is read by the caller, who knows how to open
    /// files.
    fn from_str(s: &str) -> Result<Self, SpecError> {
        match s {
            "average" => Ok(Self::Average),
            "top" => Ok(Self::Top),
            "token" => Ok(Self::One(0)),
            "all" => Ok(Self::All),
            _ => s.parse().map(Self::One).map_err(|_| SpecError::Value {
                option: "layers",
                value: s.to_owned(),
                legal: Self::WORDS.to_vec(),
            }),
        }
    }
}

impl fmt::Display for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Average => f.write_str("average"),
            Self::Top => f.write_str("top"),
            Self::One(k) => write!(f, "{k}"),
            Self::All => f.write_str("all"),
            Self::Mix(mix) => write!(f, "mix:{}", mix.digest()),
        }
    }
}

/// Everything besides the model that determines the numbers of an output.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbedSpec {
    /// One vector per text or per token.
    pub level: Level,
    /// Layers and their combination.
    pub layers: Layers,
    /// How tokens are reduced to one vector; ignored at level `token`.
    pub pooling: Pooling,
    /// How sentences are cut into tokens; ignored for columns of lists of tokens.
    pub tokenizer: TokenizerKind,
    /// How texts are cut into sentences; ignored for columns of lists of tokens.
    pub sentences: SentenceMode,
    /// Also return the vectors of `<S>` and `</S>`.
    pub boundaries: bool,
    /// Scaling of the vectors.
    pub normalize: Normalize,
    /// Start state of a sentence.
    pub state: StateMode,
    /// Rows of one batch in state `carry`, where the result depends on the batches.
    pub batch_rows: Option<usize>,
    /// What to do with sentences longer than `max_tokens`.
    pub on_long: OnLong,
    /// Maximum number of tokens, boundaries not counted, that the biLM reads as one sentence.
    pub max_tokens: usize,
    /// What to do with rows that cannot be embedded.
    pub on_error: OnError,
    /// Rounding of the stored values.
    pub float: FloatRounding,
    /// Arrow type of the vectors.
    pub list_type: ListType,
}

/// Default of [`EmbedSpec::max_tokens`].
pub const DEFAULT_MAX_TOKENS: usize = 512;

/// Those of a model without a record of its tokenizer; [`ModelOptions::spec`](crate::ModelOptions::spec) reads the record.
impl Default for EmbedSpec {
    fn default() -> Self {
        Self {
            level: Level::Sentence,
            layers: Layers::Average,
            pooling: Pooling::Mean,
            tokenizer: TokenizerKind::Moses,
            sentences: SentenceMode::Split,
            boundaries: false,
            normalize: Normalize::Off,
            state: StateMode::Zero,
            batch_rows: None,
            on_long: OnLong::Window,
            max_tokens: DEFAULT_MAX_TOKENS,
            on_error: OnError::Fail,
            float: FloatRounding::F32,
            list_type: ListType::Fixed,
        }
    }
}

impl EmbedSpec {
    /// Rejects settings that exclude each other, before any model is loaded.
    ///
    /// # Errors
    /// [`SpecError::Conflict`] when `max_tokens` or `batch_rows` is 0, `boundaries` is set at level `sentence`,
    /// `batch_rows` is missing in state `carry` or given in another, or state `carry` meets sentences `split` or
    /// on-long `window`.
    pub fn check(&self) -> Result<(), SpecError> {
        let conflict = |what: &str| Err(SpecError::Conflict(what.to_owned()));
        if self.max_tokens == 0 {
            return conflict("max-tokens is 0; a sentence has at least 1 token");
        }
        if self.boundaries && self.level == Level::Sentence {
            return conflict("boundaries needs level token: a sentence vector is pooled over real tokens only");
        }
        match (self.state, self.batch_rows) {
            (StateMode::Carry, None) => {
                return conflict("state carry needs batch-rows: the result depends on the batch size");
            }
            (StateMode::Carry, Some(0)) => return conflict("batch-rows is 0; a batch has at least 1 row"),
            (StateMode::Zero | StateMode::Warm, Some(_)) => {
                return conflict("batch-rows is for state carry; otherwise batches never change a result");
            }
            _ => {}
        }
        if self.state == StateMode::Carry && self.sentences == SentenceMode::Split {
            return conflict("state carry needs sentences off: a row of the batch is a row of the input");
        }
        if self.state == StateMode::Carry && self.on_long == OnLong::Window {
            return conflict("state carry needs on-long truncate or error: windows are sentences of their own");
        }
        Ok(())
    }

    /// Pairs of key and value for the metadata of every output, sorted by key; keys are without their prefix `elmo.`.
    pub fn identity(&self) -> Vec<(&'static str, String)> {
        let state = match (self.state, self.batch_rows) {
            (StateMode::Carry, Some(rows)) => format!("carry:{rows}"),
            (state, _) => state.to_string(),
        };
        let pooling = match self.level {
            Level::Sentence => self.pooling.to_string(),
            Level::Token => "none".to_owned(),
        };
        vec![
            ("boundaries", self.boundaries.to_string()),
            ("float", self.float.to_string()),
            ("layers", self.layers.to_string()),
            ("level", self.level.to_string()),
            ("max_tokens", self.max_tokens.to_string()),
            ("normalize", self.normalize.to_string()),
            ("on_long", self.on_long.to_string()),
            ("pooling", pooling),
            ("sentences", self.sentences.to_string()),
            ("state", state),
            ("tokenizer", self.tokenizer.to_string()),
        ]
    }
}
