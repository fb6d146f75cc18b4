//! Why a row has no vector.

use thiserror::Error;

/// Why a row cannot be embedded: a stable [label](RowError::label) for metrics, and a message for people.
///
/// The message never contains text of the row.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RowError {
    /// The bytes are not UTF-8.
    #[error("not UTF-8: invalid at byte {valid_up_to} of {bytes}")]
    NotUtf8 {
        /// Bytes before the first that is invalid.
        valid_up_to: usize,
        /// Bytes of the row.
        bytes: usize,
    },
    /// A list of tokens has a NULL among its items.
    #[error("token {index} of the list is NULL")]
    NullToken {
        /// Index of the first NULL in the list.
        index: usize,
    },
    /// The text is too long for byte offsets of 32 bits.
    #[error("a text of {bytes} bytes; the maximum is 4 GiB")]
    TextTooLarge {
        /// Bytes of the text.
        bytes: usize,
    },
    /// The text is one sentence, because sentences are off, and too long to be tokenised in one piece.
    #[error("one sentence of {bytes} bytes; the maximum is {max_mib} MiB; use sentences split")]
    SentenceTooLarge {
        /// Bytes of the text.
        bytes: usize,
        /// Limit in MiB.
        max_mib: usize,
    },
    /// A list of tokens, which is one sentence, is too long.
    #[error("a list of tokens, which is one sentence, of more than {max_mib} MiB")]
    TokenListTooLarge {
        /// Limit in MiB.
        max_mib: usize,
    },
    /// A sentence is longer than `max_tokens`, with on-long `error`.
    #[error("a sentence of {tokens} tokens; max-tokens is {max_tokens}")]
    TooManyTokens {
        /// Tokens of the sentence.
        tokens: usize,
        /// The setting.
        max_tokens: usize,
    },
    /// The token vectors of the row need too much memory.
    #[error("the vectors of its tokens take more than {max_mib} MiB, the limit for one row; split the text")]
    VectorsTooLarge {
        /// Limit in MiB.
        max_mib: usize,
    },
    /// A sentence exceeds the memory of the device even in a batch of its own.
    #[error("a single sentence exceeds the memory of the device ({message}); lower max-tokens")]
    OutOfMemory {
        /// Error of the device.
        message: String,
    },
    /// An error that is known by its label and message only: another process reported it, or a caller made it.
    #[error("{message}")]
    Reported {
        /// One of [`RowError::LABELS`].
        label: &'static str,
        /// The message.
        message: String,
    },
}

impl RowError {
    /// Every label. Labels are stable: a release may add one, and changes none.
    pub const LABELS: &'static [&'static str] = &[
        "not_utf8",
        "null_token",
        "text_too_large",
        "sentence_too_large",
        "token_list_too_large",
        "too_many_tokens",
        "vectors_too_large",
        "out_of_memory",
        "other",
    ];

    /// Name of the kind of error, for metrics and for programs.
    pub fn label(&self) -> &'static str {
        match self {
            Self::NotUtf8 { .. } => "not_utf8",
            Self::NullToken { .. } => "null_token",
            Self::TextTooLarge { .. } => "text_too_large",
            Self::SentenceTooLarge { .. } => "sentence_too_large",
            Self::TokenListTooLarge { .. } => "token_list_too_large",
            Self::TooManyTokens { .. } => "too_many_tokens",
            Self::VectorsTooLarge { .. } => "vectors_too_large",
            Self::OutOfMemory { .. } => "out_of_memory",
            Self::Reported { label, .. } => label,
        }
    }

    /// An error that another process reported; a label that this version does not know becomes `other`.
    pub fn reported(label: &str, message: impl Into<String>) -> Self {
        let label = Self::LABELS.iter().copied().find(|known| *known == label).unwrap_or("other");
        Self::Reported { label, message: message.into() }
    }
}

/// An error of the kind `other`.
impl From<String> for RowError {
    fn from(message: String) -> Self {
        Self::reported("other", message)
    }
}

/// An error of the kind `other`.
impl From<&str> for RowError {
    fn from(message: &str) -> Self {
        Self::reported("other", message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Labels are an interface: they are written out here a second time.
    #[test]
    fn labels_are_stable_and_survive_a_report() {
        let message = String::new();
        let errors = [
            (RowError::NotUtf8 { valid_up_to: 3, bytes: 9 }, "not_utf8"),
            (RowError::NullToken { index: 0 }, "null_token"),
            (RowError::TextTooLarge { bytes: 1 << 33 }, "text_too_large"),
            (RowError::SentenceTooLarge { bytes: 9 << 20, max_mib: 8 }, "sentence_too_large"),
            (RowError::TokenListTooLarge { max_mib: 8 }, "token_list_too_large"),
            (RowError::TooManyTokens { tokens: 3, max_tokens: 2 }, "too_many_tokens"),
            (RowError::VectorsTooLarge { max_mib: 256 }, "vectors_too_large"),
            (RowError::OutOfMemory { message }, "out_of_memory"),
            (RowError::from("anything"), "other"),
        ];
        assert_eq!(errors.each_ref().map(|(_, label)| *label), RowError::LABELS);
        for (error, label) in errors {
            assert_eq!(error.label(), label);
            let reported = RowError::reported(label, error.to_string());
            assert_eq!((reported.label(), reported.to_string()), (label, error.to_string()));
        }
        assert_eq!(RowError::reported("a label of a later version", "x").label(), "other");
    }
}
