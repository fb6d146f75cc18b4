//! What a caller wants: the settings that decide the numbers, each parsed once into a type.
//!
//! Every enum here has [`FromStr`] and [`fmt::Display`] with the words of the command line and of SQL,
//! so that both say the same and an error lists the legal values.

use std::{fmt, str::FromStr};

use thiserror::Error;

use crate::mix::{MixError, ScalarMix};

/// A setting has no such value, or two settings exclude each other.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SpecError {
    /// Not one of the legal words.
    #[error("{option}: no value {value:?}; legal values are {}", legal.join(", "))]
    Value {
        /// The setting.
        option: &'static str,
        /// What was given.
        value: String,
        /// What may be given.
        legal: Vec<&'static str>,
    },
    /// Two settings that exclude each other, or a number out of range.
    #[error("{0}")]
    Conflict(String),
    /// A file that `layers` names is no scalar mix.
    #[error(transparent)]
    Mix(#[from] MixError),
}

macro_rules! words {
    ($(#[$doc:meta])* $name:ident, $option:literal, { $($(#[$vdoc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name { $($(#[$vdoc])* $variant),+ }

        impl $name {
            /// Every legal word, in the order of the documentation.
            pub const WORDS: &'static [&'static str] = &[$($word),+];

            /// The word of the command line and of SQL.
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
    /// How the token vectors of a text become one vector.
    Pooling, "pooling", {
        /// Arithmetic mean over the real tokens.
        Mean = "mean",
        /// Largest value of each dimension.
        Max = "max",
        /// The first token.
        First = "first",
        /// The last token.
        Last = "last",
        /// Forward half of the last token and backward half of the first: the biLM's own ends of a text.
        Ends = "ends",
    }
}

words! {
    /// How a sentence becomes tokens.
    TokenizerKind, "tokenizer", {
        /// Moses punctuation normalisation and English tokeniser, entities not escaped.
        Moses = "moses",
        /// Words of Unicode Standard Annex 29.
        Words = "words",
        /// White space only, as Python's `str.split`.
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
    /// From which state a sentence starts.
    StateMode, "state", {
        /// Zeros: AllenNLP right after `reset_states()`.
        Zero = "zero",
        /// One constant per model, computed from a fixed text.
        Warm = "warm",
        /// The state that the row of the batch before left behind, as AllenNLP did: order-dependent.
        Carry = "carry",
    }
}

words! {
    /// What to do with a sentence of more than `max_tokens` tokens.
    OnLong, "on-long", {
        /// Overlapping windows; each token keeps the vector with the most context.
        Window = "window",
        /// Keep the first `max_tokens` tokens of a sentence and say so in `truncated`.
        Truncate = "truncate",
        /// The row is an error.
        Error = "error",
    }
}

words! {
    /// What to do with a row that cannot be embedded.
    OnError, "on-error", {
        /// Stop with the row's number.
        Fail = "fail",
        /// NULL vector, reason in the column `error`.
        Null = "null",
        /// Leave the row out, count and report it.
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
    /// Precision that the stored float32 values keep.
    FloatRounding, "float", {
        /// Full float32.
        F32 = "f32",
        /// Rounded to the nearest half precision value; compresses better.
        F16Rounded = "f16-rounded",
        /// Rounded to the nearest bfloat16 value; compresses best.
        Bf16Rounded = "bf16-rounded",
    }
}

words! {
    /// Arrow type of a vector.
    ListType, "list-type", {
        /// `FixedSizeList`.
        Fixed = "fixed",
        /// `List`, for readers that do not know `FixedSizeList`.
        List = "list",
    }
}

/// Which layers come out, and how they are combined.
#[derive(Debug, Clone, PartialEq)]
pub enum Layers {
    /// Plain mean of all layers: a scalar mix with equal weights.
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
    /// The words that are legal besides a layer's number and a mix file.
    pub const WORDS: &'static [&'static str] = &["average", "top", "token", "0", "1", "2", "all"];
}

impl FromStr for Layers {
    type Err = SpecError;

    /// Accepts the words and a layer's number. A mix file is read by the caller, who knows where files live.
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

/// Everything besides the model that decides the numbers of an output.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbedSpec {
    /// Text or token vectors.
    pub level: Level,
    /// Layers and their combination.
    pub layers: Layers,
    /// Tokens to one vector; ignored at token level.
    pub pooling: Pooling,
    /// Sentence to tokens; ignored for columns that are tokenised already.
    pub tokenizer: TokenizerKind,
    /// Text to sentences; ignored for columns that are tokenised already.
    pub sentences: SentenceMode,
    /// Also return the vectors of `<S>` and `</S>`.
    pub boundaries: bool,
    /// Scaling of the vectors.
    pub normalize: Normalize,
    /// Start state of a sentence.
    pub state: StateMode,
    /// Sentences of one batch in state `carry`, where batches decide the result.
    pub batch_rows: Option<usize>,
    /// Sentences longer than `max_tokens`.
    pub on_long: OnLong,
    /// Longest sentence, in tokens without boundaries, that the biLM reads at once.
    pub max_tokens: usize,
    /// Rows that cannot be embedded.
    pub on_error: OnError,
    /// Rounding of the stored values.
    pub float: FloatRounding,
    /// Arrow type of the vectors.
    pub list_type: ListType,
}

/// Longest sentence that the biLM reads at once unless told otherwise.
pub const DEFAULT_MAX_TOKENS: usize = 512;

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
    /// Refuses settings that exclude each other, before any model is loaded.
    ///
    /// # Errors
    /// [`SpecError::Conflict`] when `max_tokens` or `batch_rows` is 0, `boundaries` is asked for at level `sentence`,
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
                return conflict("state carry needs batch-rows: the size of a batch decides the result");
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

    /// `key = value` pairs that stand in every output, `elmo.` left out, sorted by key.
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
