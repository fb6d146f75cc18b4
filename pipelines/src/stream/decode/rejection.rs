//! Why a message has no vector.

use std::sync::Arc;

use elmo::RowError;
use thiserror::Error;

/// Why a message cannot be decoded, or its text not embedded: a stable [label](Rejection::label) for metrics, and a message
/// for people, which never contains text of the message.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rejection {
    /// No value: in a compacted topic this deletes the key.
    #[error("a tombstone: the message has no value")]
    Tombstone,
    /// The value is not UTF-8.
    #[error("not UTF-8: invalid at byte {valid_up_to} of {bytes}")]
    NotUtf8 {
        /// Bytes before the first that is invalid.
        valid_up_to: usize,
        /// Bytes of the value.
        bytes: usize,
    },
    /// The value is not JSON.
    #[error("not valid JSON: {reason}")]
    BadJson {
        /// What the parser expected, and where.
        reason: String,
    },
    /// The text is not where the pointer says. (A JSON `null` or an Avro null there is a NULL text, and no error.)
    #[error("no text: the message has no {path}")]
    NoText {
        /// The pointer to the text.
        path: Arc<str>,
    },
    /// A value is of another type than its column, or the type would not hold it as it is written.
    #[error("column {column:?}: {expected} would not hold the value as it is written")]
    WrongType {
        /// Name of the column.
        column: Arc<str>,
        /// The column's type.
        expected: &'static str,
    },
    /// The text is longer than the setting allows.
    #[error("a text of {bytes} bytes; the maximum is {max}")]
    TextTooLarge {
        /// Bytes of the text.
        bytes: usize,
        /// The setting.
        max: usize,
    },
    /// The value is not what its Avro schema describes.
    #[error("not valid Avro: {reason}")]
    BadAvro {
        /// What is wrong.
        reason: &'static str,
    },
    /// There is no usable schema for the value.
    #[error("schema {id}: {reason}")]
    UnknownSchema {
        /// Its id in the registry, or its fingerprint.
        id: String,
        /// Why it cannot be used.
        reason: Arc<str>,
    },
    /// The message with the row is larger than the producer or the broker takes.
    #[error("a message of {bytes} bytes; the limit of the producer or of the broker is lower")]
    TooLarge {
        /// Bytes of the message, alone in a batch.
        bytes: usize,
    },
    /// The broker refuses the message with the row.
    #[error("the broker refuses the message: {reason}")]
    Refused {
        /// What the broker says.
        reason: String,
    },
    /// The model refused the text.
    #[error(transparent)]
    Model(#[from] RowError),
}

impl Rejection {
    /// Every label. Labels are stable: a release may add one, and changes none. Those of the model follow all others;
    /// `not_utf8` and `text_too_large` belong to both.
    pub const LABELS: &'static [&'static str] = &[
        "tombstone",
        "not_utf8",
        "bad_json",
        "no_text",
        "wrong_type",
        "text_too_large",
        "bad_avro",
        "unknown_schema",
        "too_large",
        "refused",
        "null_token",
        "sentence_too_large",
        "token_list_too_large",
        "too_many_tokens",
        "vectors_too_large",
        "out_of_memory",
        "other",
    ];

    /// Name of the kind of rejection, for metrics and for programs.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Tombstone => "tombstone",
            Self::NotUtf8 { .. } => "not_utf8",
            Self::BadJson { .. } => "bad_json",
            Self::NoText { .. } => "no_text",
            Self::WrongType { .. } => "wrong_type",
            Self::TextTooLarge { .. } => "text_too_large",
            Self::BadAvro { .. } => "bad_avro",
            Self::UnknownSchema { .. } => "unknown_schema",
            Self::TooLarge { .. } => "too_large",
            Self::Refused { .. } => "refused",
            Self::Model(error) => error.label(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Labels are an interface: those of decoding are written out here a second time, and each of the model is among them.
    #[test]
    fn labels_are_stable_and_complete() {
        let name: Arc<str> = "x".into();
        let own = [
            (Rejection::Tombstone, "tombstone"),
            (Rejection::NotUtf8 { valid_up_to: 3, bytes: 9 }, "not_utf8"),
            (Rejection::BadJson { reason: String::new() }, "bad_json"),
            (Rejection::NoText { path: Arc::clone(&name) }, "no_text"),
            (Rejection::WrongType { column: Arc::clone(&name), expected: "int64" }, "wrong_type"),
            (Rejection::TextTooLarge { bytes: 9, max: 3 }, "text_too_large"),
            (Rejection::BadAvro { reason: "" }, "bad_avro"),
            (Rejection::UnknownSchema { id: "7".to_owned(), reason: name }, "unknown_schema"),
            (Rejection::TooLarge { bytes: 9 }, "too_large"),
            (Rejection::Refused { reason: String::new() }, "refused"),
        ];
        for (index, (rejection, label)) in own.iter().enumerate() {
            assert_eq!((rejection.label(), Rejection::LABELS[index]), (*label, *label));
        }
        let of_model = |label: &&&str| !own.iter().any(|(_, known)| known == *label);
        let expected: Vec<_> = RowError::LABELS.iter().filter(of_model).collect();
        assert_eq!(Rejection::LABELS[own.len()..].iter().collect::<Vec<_>>(), expected);
        let refused = Rejection::from(RowError::TooManyTokens { tokens: 3, max_tokens: 2 });
        assert_eq!(refused.label(), "too_many_tokens");
    }
}
