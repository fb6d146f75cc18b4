//! Labelled data: what the model reads, the labels, and where each example is.

use std::collections::HashMap;

use arrow::{
    array::{Array, ArrayRef, AsArray, StringArray},
    datatypes::DataType,
};
use sha2::{Digest, Sha256};

use crate::error::Error;

/// Bytes of text that are embedded together: a few thousand tokens, whose layers are some tens of megabytes.
pub(super) const PART_BYTES: usize = 32 << 10;

/// Numbers of labels, in the order in which they are first seen.
#[derive(Debug, Default)]
pub(super) struct Labels {
    names: Vec<String>,
    numbers: HashMap<String, u32>,
}

impl Labels {
    pub(super) fn number(&mut self, name: &str) -> u32 {
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        let number = self.names.len() as u32;
        self.names.push(name.to_owned());
        self.numbers.insert(name.to_owned(), number);
        number
    }

    /// The labels by their numbers.
    pub(super) fn names(&self) -> &[String] {
        &self.names
    }
}

/// Where an example is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// The first line of a sentence, from 1.
    Line { file: usize, line: u64 },
    /// A row, from 0.
    Row { file: usize, row: u64 },
}

/// Labelled examples.
#[derive(Debug, Default)]
pub(super) struct Dataset {
    /// The files, for messages.
    pub(super) files: Vec<String>,
    /// Texts (`Utf8`), or lists of tokens (`List<Utf8>`), in parts that are embedded together.
    pub(super) parts: Vec<ArrayRef>,
    /// Of each example: a label for each of its tokens, or one for the text.
    pub(super) labels: Vec<Vec<u32>>,
    pub(super) places: Vec<Place>,
}

impl Dataset {
    /// Number of examples.
    pub(super) fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether every token has a label.
    pub(super) fn is_tagged(&self) -> bool {
        matches!(self.places.first(), Some(Place::Line { .. }))
    }

    /// The error of an example.
    pub(super) fn error(&self, example: usize, reason: &str) -> Error {
        match self.places.get(example) {
            Some(place) => at(&self.files, *place, reason),
            None => Error::Failed(reason.to_owned()),
        }
    }

    /// The error of data without an example.
    pub(super) fn empty(&self, what: &str) -> Error {
        let help = Some("check the file, and the options that say how it is read".to_owned());
        Error::Input { file: self.files.join(", "), row: None, reason: format!("contains no {what}"), help }
    }

    /// SHA-256 of the texts, whatever files and parts they are in.
    pub(super) fn digest(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        for part in &self.parts {
            match part.data_type() {
                DataType::List(_) => {
                    for tokens in part.as_list::<i32>().iter().flatten() {
                        let tokens = tokens.as_string::<i32>();
                        hash.update((tokens.len() as u64).to_le_bytes());
                        hash_strings(&mut hash, tokens);
                    }
                }
                _ => hash_strings(&mut hash, part.as_string::<i32>()),
            }
        }
        hash.finalize().into()
    }
}

fn hash_strings(hash: &mut Sha256, texts: &StringArray) {
    for text in texts.iter() {
        let text = text.unwrap_or_default();
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    }
}

/// The error of a place.
pub(super) fn at(files: &[String], place: Place, reason: &str) -> Error {
    let name = |file: usize| files.get(file).cloned().unwrap_or_default();
    let help = None;
    match place {
        Place::Line { file, line } => {
            Error::Input { file: name(file), row: None, reason: format!("line {line}: {reason}"), help }
        }
        Place::Row { file, row } => Error::Input { file: name(file), row: Some(row), reason: reason.to_owned(), help },
    }
}
