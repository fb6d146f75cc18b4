//! Text to sentences, by the rules of the crate `sentencex` for English.
//!
//! `sentencex` takes time quadratic in the length of a paragraph on hostile text (unclosed quotes, lists, CJK full
//! stops: 8 KiB in 10 ms, 128 KiB in 2 s), so it never sees more than [`WINDOW`] bytes. A longer text is read window by
//! window, each ending at white space and the next one starting with the last sentence, incomplete so far, of the one
//! before. Up to [`WINDOW`] bytes the result is that of `sentencex`; beyond, a sentence of more than half a window may
//! be cut at white space, and what opened more than a window ago (a quote, a bracket) is forgotten.

use std::{iter, ops::Range, vec};

use sentencex::languages::{English, Language};

use super::{Cut, LONGEST_WORD, cut_off, whitespace::is_space};

/// Most bytes given to `sentencex` at once. Paragraphs of books are seldom longer.
const WINDOW: usize = 8 << 10;

/// Byte ranges of the sentences of a text, with the white space after them; together they are the whole text.
pub(super) struct Sentences<'a> {
    text: &'a str,
    /// Start of what no window has covered yet.
    rest: usize,
    window: vec::IntoIter<Range<usize>>,
}

impl<'a> Sentences<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { text, rest: 0, window: Vec::new().into_iter() }
    }
}

impl Iterator for Sentences<'_> {
    type Item = Range<usize>;

    fn next(&mut self) -> Option<Range<usize>> {
        while self.window.as_slice().is_empty() && self.rest < self.text.len() {
            let sentences = next_window(self.text, self.rest);
            self.rest = sentences.last().map_or(self.text.len(), |last| last.end);
            self.window = sentences.into_iter();
        }
        self.window.next()
    }
}

/// The complete sentences of the window that begins at `from`: at least one, and all of them at the end of the text.
fn next_window(text: &str, from: usize) -> Vec<Range<usize>> {
    let rest = &text[from..];
    let cut = cut_off(rest, WINDOW);
    let mut sentences = segment(&rest[..cut.at], from);
    if cut.at < rest.len() {
        settle_last(text, from, &cut, &mut sentences);
    }
    sentences
}

/// Leaves the last, incomplete sentence of a window to the next one. If it fills half a window it stays instead, cut
/// where the window ends or, if that is in a word, after the word: otherwise the next windows might not get on.
fn settle_last(text: &str, from: usize, cut: &Cut, sentences: &mut Vec<Range<usize>>) {
    let Some(last) = sentences.last_mut() else { return };
    if last.start - from >= WINDOW / 2 {
        sentences.pop();
    } else if cut.in_word {
        last.end = end_of_word(text, last.start, last.end);
    }
}

/// The first white space from `at` on, but no further than the longest word from `start` on.
fn end_of_word(text: &str, start: usize, at: usize) -> usize {
    let limit = text.floor_char_boundary(start.saturating_add(LONGEST_WORD)).max(at);
    text[at..limit].find(is_space).map_or(limit, |more| at + more)
}

/// `sentencex` on one window, as ranges of the whole text.
fn segment(window: &str, base: usize) -> Vec<Range<usize>> {
    let pieces = English {}.segment(window);
    // Joined, the pieces are the window. Were that ever untrue, offsets would lie: then the window is one sentence.
    if pieces.iter().map(|piece| piece.len()).sum::<usize>() != window.len() {
        return iter::once(base..base + window.len()).collect();
    }
    let mut end = base;
    pieces.iter().map(|piece| advance(&mut end, piece.len())).collect()
}

/// The next `len` bytes after `end`, which moves on.
fn advance(end: &mut usize, len: usize) -> Range<usize> {
    let start = *end;
    *end += len;
    start..*end
}
