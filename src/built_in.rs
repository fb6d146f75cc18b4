//! The models that are built into the program.

use std::fmt;

/// A model that is built into the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BuiltIn {
    /// A small biLM with its LM head, trained on English novels. `src/books/MODEL.md` describes it.
    Books,
    /// A model with the architecture of the published ones and seeded, untrained weights, for tests.
    Tiny,
}

/// A file of a built-in model.
#[derive(Debug, Clone, Copy)]
pub struct BuiltInFile {
    /// Its name in a model directory.
    pub name: &'static str,
    /// Its content.
    pub bytes: &'static [u8],
}

/// The model directory `books`.
const BOOKS: [BuiltInFile; 6] = [
    BuiltInFile { name: "options.json", bytes: include_bytes!("books/options.json") },
    BuiltInFile { name: "weights.safetensors", bytes: include_bytes!("books/weights.safetensors") },
    BuiltInFile { name: "warm_state.safetensors", bytes: include_bytes!("books/warm_state.safetensors") },
    BuiltInFile { name: "vocab.txt", bytes: include_bytes!("books/vocab.txt") },
    BuiltInFile { name: "softmax.safetensors", bytes: include_bytes!("books/softmax.safetensors") },
    BuiltInFile { name: "MODEL.md", bytes: include_bytes!("books/MODEL.md") },
];

impl BuiltIn {
    /// All of them, the default first.
    pub const ALL: [Self; 2] = [Self::Books, Self::Tiny];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Books => "books",
            Self::Tiny => "tiny",
        }
    }

    /// The model with this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|model| model.name() == name)
    }

    /// Its files. `tiny` is computed, so it has none.
    pub fn files(self) -> &'static [BuiltInFile] {
        match self {
            Self::Books => &BOOKS,
            Self::Tiny => &[],
        }
    }

    /// The content of its file of this name in a model directory.
    pub fn file(self, name: &str) -> Option<&'static [u8]> {
        self.files().iter().find(|file| file.name == name).map(|file| file.bytes)
    }
}

impl fmt::Display for BuiltIn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The limit that keeps a clone and the program small.
    #[test]
    fn books_takes_eight_megabytes_at_most() {
        let bytes: usize = BuiltIn::Books.files().iter().map(|file| file.bytes.len()).sum();
        assert!(bytes <= 8_000_000, "{bytes}");
    }
}
