//! Tokens separated by white space, as by Python's `str.split()` and in the published training data.

use std::ops::Range;

use super::Token;

/// White space as in Python: Unicode's `White_Space` and the four separators U+001C to U+001F.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

/// Appends the tokens of `text[range]`.
pub(super) fn tokenize(text: &str, range: Range<usize>, out: &mut Vec<Token>) {
    let base = range.start;
    let mut start = None;
    for (at, c) in text[range.clone()].char_indices() {
        match (is_space(c), start) {
            (false, None) => start = Some(base + at),
            (true, Some(from)) => {
                out.push(Token::as_written(from..base + at));
                start = None;
            }
            _ => {}
        }
    }
    if let Some(from) = start {
        out.push(Token::as_written(from..range.end));
    }
}
