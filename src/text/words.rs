//! Words of Unicode Standard Annex 29, with punctuation and symbols as tokens of their own.

use std::ops::Range;

use unicode_segmentation::UnicodeSegmentation;

use super::{Token, whitespace::is_space};

/// Appends the tokens of `text[range]`: every piece between two word boundaries that is not white space.
///
/// The annex attaches a combining mark to the character before it, even to white space, so pieces are trimmed.
pub(super) fn tokenize(text: &str, range: Range<usize>, out: &mut Vec<Token>) {
    let base = range.start;
    for (at, piece) in text[range].split_word_bound_indices() {
        let word = piece.trim_start_matches(is_space);
        let start = base + at + piece.len() - word.len();
        let end = start + word.trim_end_matches(is_space).len();
        if start < end {
            out.push(Token::as_written(start..end));
        }
    }
}
