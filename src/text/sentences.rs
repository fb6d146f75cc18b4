//! Cuts texts into sentences by the rules of the crate `sentencex` for English.
//!
//! On some texts (unclosed quotes, lists, CJK full stops) `sentencex` takes time quadratic in the length of a
//! paragraph: 10 ms for 8 KiB, 2 s for 128 KiB. It is therefore given at most [`WINDOW`] bytes. A longer text is read
//! in windows. A window ends at white space, and the next one begins with its last sentence, which may be incomplete.
//! Up to [`WINDOW`] bytes the result is that of `sentencex`. In longer texts a sentence of more than half a window may
//! be cut at white space, and a quote or bracket that was opened in an earlier window is ignored.

use std::{iter, ops::Range, vec};

use sentencex::languages::{English, Language};

use super::{Cut, MAX_WORD_BYTES, cut_off, whitespace::is_space};

/// Maximum number of bytes given to `sentencex` at once. Paragraphs of books are rarely longer.
const WINDOW: usize = 8 << 10;

/// Byte ranges of the sentences of a text, including the white space after them. They tile the text.
pub(super) struct Sentences<'a> {
    text: &'a str,
    /// Start of the next window.
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
        if self.window.as_slice().is_empty() && is_one_sentence(&self.text[self.rest..]) {
            let from = std::mem::replace(&mut self.rest, self.text.len());
            return Some(from..self.rest);
        }
        while self.window.as_slice().is_empty() && self.rest < self.text.len() {
            let sentences = next_window(self.text, self.rest);
            self.rest = sentences.last().map_or(self.text.len(), |last| last.end);
            self.window = sentences.into_iter();
        }
        self.window.next()
    }
}

/// The complete sentences of the window that begins at `from`: at least one. The last window has all of its sentences.
fn next_window(text: &str, from: usize) -> Vec<Range<usize>> {
    let rest = &text[from..];
    let cut = cut_off(rest, WINDOW);
    let mut sentences = segment(&rest[..cut.at], from);
    if cut.at < rest.len() {
        settle_last(text, from, &cut, &mut sentences);
    }
    sentences
}

/// Leaves the last sentence of a window, which may be incomplete, to the next window. A sentence of more than half a
/// window is cut instead, at the end of the window or of its last word, so that every window makes progress.
fn settle_last(text: &str, from: usize, cut: &Cut, sentences: &mut Vec<Range<usize>>) {
    let Some(last) = sentences.last_mut() else { return };
    if last.start - from >= WINDOW / 2 {
        sentences.pop();
    } else if cut.in_word {
        last.end = end_of_word(text, last.start, last.end);
    }
}

/// The first white space from `at` on, within [`MAX_WORD_BYTES`] from `start`.
fn end_of_word(text: &str, start: usize, at: usize) -> usize {
    let limit = text.floor_char_boundary(start.saturating_add(MAX_WORD_BYTES)).max(at);
    text[at..limit].find(is_space).map_or(limit, |more| at + more)
}

/// Whether a text of at most one window is one sentence by the rules of `sentencex`, as most short texts are: it is ASCII, sentence
/// terminators occur only at its end, and it has no line break and no `)`, which may end the label of a list item. Far faster than
/// those rules, which begin with regular expressions.
fn is_one_sentence(text: &str) -> bool {
    if text.len() > WINDOW {
        return false;
    }
    let is_end = |byte: u8| matches!(byte, b'.' | b'!' | b'?');
    let bytes = text.as_bytes();
    let ends = bytes.iter().rev().take_while(|byte| is_end(**byte)).count();
    let stem = &bytes[..bytes.len() - ends];
    // Reading all bytes without a branch is faster than stopping at the first one.
    let may_split = |byte: u8| !byte.is_ascii() | is_end(byte) | matches!(byte, b'\n' | b'\r' | b')');
    !stem.is_empty() && !stem.iter().fold(false, |found, &byte| found | may_split(byte))
}

/// Runs `sentencex` on one window; returns ranges of the whole text.
fn segment(window: &str, base: usize) -> Vec<Range<usize>> {
    if is_one_sentence(window) {
        return iter::once(base..base + window.len()).collect();
    }
    let pieces = English {}.segment(window);
    // The pieces tile the window. Otherwise offsets would be wrong, and the whole window is taken as one sentence.
    if pieces.iter().map(|piece| piece.len()).sum::<usize>() != window.len() {
        return iter::once(base..base + window.len()).collect();
    }
    let mut end = base;
    pieces.iter().map(|piece| advance(&mut end, piece.len())).collect()
}

/// The next `len` bytes after `end`; advances `end`.
fn advance(end: &mut usize, len: usize) -> Range<usize> {
    let start = *end;
    *end += len;
    start..*end
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// Expected: the crate's own rules.
        #[test]
        fn what_is_taken_for_one_sentence_is_one(
            words in prop::collection::vec(
                prop_oneof!["[A-Za-z]{1,8}", "[0-9]{1,4}", "[-,;:'\"`(\\[{<>}\\]@#*&/]{1,3}", "Dr", "etc", "e", "I"], 0..12),
            spaces in prop::collection::vec("[ \t]{0,3}", 12),
            end in "[.!?]{0,4}",
        ) {
            let text: String = words.iter().zip(&spaces).flat_map(|(word, space)| [space.as_str(), word]).collect();
            let text = text + &end;
            if is_one_sentence(&text) {
                prop_assert_eq!(English {}.segment(&text), [text.as_str()]);
            }
        }
    }
}
