//! Text to sentences to tokens, with byte offsets back into the text.
//!
//! A text is cut into sentences ([`SentenceMode`]), a sentence into tokens ([`TokenizerKind`]), and a sentence that is
//! too long for the biLM into overlapping [`windows`]. Nothing here knows of models or columns, and nothing can fail:
//! every string, however odd, has tokens.
//!
//! What holds for every tokenizer and every string (`tests.rs` of this folder):
//!
//! * `start..end` of a token lies in the text, on character boundaries, and is never empty;
//! * tokens stand in the order of the text and never overlap, and a sentence ends before the next one begins;
//! * no token is empty, and neither is a sentence: blank text has none;
//! * time and memory grow linearly with the text, and [`sentences()`] holds the tokens of one sentence only.
//!
//! `docs/tokenizer.md` has the rules and what they were compared with.

mod moses;
mod sentences;
#[cfg(test)]
mod tests;
mod whitespace;
pub mod windows;
mod words;

use std::ops::Range;

use crate::spec::{SentenceMode, TokenizerKind};

use self::{moses::Moses, sentences::Sentences};

/// Longest stretch without white space that is kept together, in bytes. Longer ones are cut, so that no cell can make
/// buffers grow without bound; the biLM reads 50 bytes of a token.
const LONGEST_WORD: usize = 1 << 20;

/// A token: its place in the text, and what the model reads there.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Token {
    /// First byte in the text.
    pub start: usize,
    /// Byte after the last one.
    pub end: usize,
    /// What the model reads, where normalisation made it differ from `text[start..end]`.
    pub word: Option<Box<str>>,
}

impl Token {
    /// What the model reads: `word`, or else the token as written. `text` is the text that the token was cut from.
    pub fn read<'a>(&'a self, text: &'a str) -> &'a str {
        self.word.as_deref().unwrap_or_else(|| self.written(text))
    }

    /// The token as written: `text[start..end]`, or nothing if that is not a part of `text`.
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

/// The same as [`tokenize`], one sentence at a time: for texts whose tokens need not all be in memory at once.
pub fn sentences(text: &str, kind: TokenizerKind, mode: SentenceMode) -> impl Iterator<Item = Vec<Token>> + '_ {
    let mut tokenizer = Tokenizer::new(kind);
    ranges(text, mode).map(move |range| tokenizer.tokenize(text, range)).filter(|tokens| !tokens.is_empty())
}

/// Byte ranges of the sentences; one after the other they are the whole text.
fn ranges(text: &str, mode: SentenceMode) -> impl Iterator<Item = Range<usize>> + '_ {
    let (split, whole) = match mode {
        SentenceMode::Split => (Some(Sentences::new(text)), None),
        SentenceMode::Off => (None, Some(0..text.len())),
    };
    split.into_iter().flatten().chain(whole)
}

/// One of the tokenizers, with the buffers it keeps between sentences.
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

    /// The tokens of the sentence `text[range]`.
    fn tokenize(&mut self, text: &str, range: Range<usize>) -> Vec<Token> {
        let mut tokens = Vec::with_capacity(range.len().min(LONGEST_WORD) / 4);
        match self {
            Self::Moses(moses) => moses.tokenize(text, range, &mut tokens),
            Self::Words => words::tokenize(text, range, &mut tokens),
            Self::Whitespace => whitespace::tokenize(text, range, &mut tokens),
        }
        tokens
    }
}

/// Where a piece ends, and whether the cut goes through a word.
struct Cut {
    at: usize,
    in_word: bool,
}

/// Cuts off at most `limit` bytes of `text` (but at least a character): after the last white space among them, or at a
/// character boundary if there is none.
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
