//! Cuts texts into sentences and tokens, with byte offsets into the text.
//!
//! A text is cut into sentences ([`SentenceMode`]), a sentence into tokens ([`TokenizerKind`]), and a sentence that is
//! too long for the biLM into overlapping [`windows`]. This module does not depend on models or columns. No function
//! fails, whatever the string.
//!
//! For every tokenizer and every string (see `tests.rs` in this folder):
//!
//! * `start..end` of a token is within the text, on character boundaries, and not empty;
//! * tokens are in the order of the text and do not overlap, and a sentence ends before the next one begins;
//! * no token and no sentence is empty: a blank text has no sentences;
//! * time and memory are linear in the length of the text, and [`sentences()`] holds the tokens of one sentence only.
//!
//! `docs/tokenizer.md` describes the rules and what they were compared with.

mod moses;
mod sentences;
#[cfg(test)]
mod tests;
mod whitespace;
pub mod windows;
mod words;

use std::{convert::Infallible, ops::Range};

use crate::spec::{SentenceMode, TokenizerKind};

use self::{moses::Moses, sentences::Sentences};

/// Maximum size in bytes of a word. Longer ones are cut, so that buffers are bounded; the biLM reads 50 bytes of a
/// token.
const MAX_WORD_BYTES: usize = 1 << 20;

/// A token: its place in the text, and the word that the model reads.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Token {
    /// First byte in the text.
    pub start: usize,
    /// Byte after the last one.
    pub end: usize,
    /// The word that the model reads, if normalisation made it differ from `text[start..end]`.
    pub word: Option<Box<str>>,
}

impl Token {
    /// The word that the model reads. `text` is the text that the token was cut from.
    pub fn read<'a>(&'a self, text: &'a str) -> &'a str {
        self.word.as_deref().unwrap_or_else(|| self.written(text))
    }

    /// The token as written: `text[start..end]`, or an empty string if that is not a part of `text`.
    pub fn written<'a>(&self, text: &'a str) -> &'a str {
        text.get(self.start..self.end).unwrap_or_default()
    }

    fn as_written(range: Range<usize>) -> Self {
        Self { start: range.start, end: range.end, word: None }
    }
}

/// Cuts a text into sentences of tokens; offsets are bytes of the whole text.
///
/// Sentences without a token are left out, so a blank text has none.
///
/// ```
/// use elmo::{spec::{SentenceMode, TokenizerKind}, text::tokenize};
///
/// let text = "It’s late. We didn’t go.";
/// let sentences = tokenize(text, TokenizerKind::Moses, SentenceMode::Split);
/// let words: Vec<Vec<&str>> = sentences.iter().map(|s| s.iter().map(|t| t.read(text)).collect()).collect();
/// assert_eq!(words, [vec!["It", "'s", "late", "."], vec!["We", "didn", "'t", "go", "."]]);
/// assert_eq!(sentences[0][1].written(text), "’s");
/// ```
pub fn tokenize(text: &str, kind: TokenizerKind, mode: SentenceMode) -> Vec<Vec<Token>> {
    sentences(text, kind, mode).collect()
}

/// As [`tokenize`], one sentence at a time, so that not all tokens are in memory at once.
pub fn sentences(text: &str, kind: TokenizerKind, mode: SentenceMode) -> impl Iterator<Item = Vec<Token>> + '_ {
    let mut tokenizer = Tokenizer::new(kind);
    let cut = move |range: Range<usize>| {
        let mut tokens = Vec::with_capacity(range.len().min(MAX_WORD_BYTES) / 4);
        tokenizer.tokenize(text, range, &mut tokens);
        tokens
    };
    ranges(text, mode).map(cut).filter(|tokens| !tokens.is_empty())
}

/// Like [`sentences()`], for many texts: reuses its buffers.
pub(crate) struct Cutter {
    tokenizer: Tokenizer,
    mode: SentenceMode,
    tokens: Vec<Token>,
}

impl Cutter {
    pub(crate) fn new(kind: TokenizerKind, mode: SentenceMode) -> Self {
        Self { tokenizer: Tokenizer::new(kind), mode, tokens: Vec::new() }
    }

    /// Calls `each` with the tokens of every sentence of a text.
    pub(crate) fn cut(&mut self, text: &str, mut each: impl FnMut(&[Token])) {
        let Ok(()) = self.try_cut(text, |tokens| {
            each(tokens);
            Ok::<_, Infallible>(())
        });
    }

    /// The same until `each` fails.
    pub(crate) fn try_cut<E>(&mut self, text: &str, mut each: impl FnMut(&[Token]) -> Result<(), E>) -> Result<(), E> {
        for range in ranges(text, self.mode) {
            self.tokens.clear();
            self.tokenizer.tokenize(text, range, &mut self.tokens);
            if !self.tokens.is_empty() {
                each(&self.tokens)?;
            }
        }
        Ok(())
    }
}

/// Byte ranges of the sentences, which tile the text.
fn ranges(text: &str, mode: SentenceMode) -> impl Iterator<Item = Range<usize>> + '_ {
    let (split, whole) = match mode {
        SentenceMode::Split => (Some(Sentences::new(text)), None),
        SentenceMode::Off => (None, Some(0..text.len())),
    };
    split.into_iter().flatten().chain(whole)
}

/// A tokenizer, with the buffers that it reuses.
enum Tokenizer {
    Moses(Moses),
    Words,
    Whitespace,
}

impl Tokenizer {
    fn new(kind: TokenizerKind) -> Self {
        match kind {
            TokenizerKind::Moses => Self::Moses(Moses::default()),
            TokenizerKind::Words => Self::Words,
            TokenizerKind::Whitespace => Self::Whitespace,
        }
    }

    /// Appends the tokens of the sentence `text[range]`.
    fn tokenize(&mut self, text: &str, range: Range<usize>, tokens: &mut Vec<Token>) {
        match self {
            Self::Moses(moses) => moses.tokenize(text, range, tokens),
            Self::Words => words::tokenize(text, range, tokens),
            Self::Whitespace => whitespace::tokenize(text, range, tokens),
        }
    }
}

/// The end of a piece, and whether it is within a word.
struct Cut {
    at: usize,
    in_word: bool,
}

/// Finds the end of a piece of at most `limit` bytes (but at least one character): after its last white space, or at a
/// character boundary if it has none.
fn cut_off(text: &str, limit: usize) -> Cut {
    if text.len() <= limit {
        return Cut { at: text.len(), in_word: false };
    }
    let first = text.chars().next().map_or(0, char::len_utf8);
    let end = text.floor_char_boundary(limit).max(first);
    match text[..end].char_indices().rfind(|&(_, c)| whitespace::is_space(c)) {
        Some((at, space)) => Cut { at: at + space.len_utf8(), in_word: false },
        None => Cut { at: end, in_word: true },
    }
}
