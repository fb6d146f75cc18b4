//! Tokens separated by white space, as by Python's `str.split()` and in the published training data.

use std::ops::Range;

use super::Token;

/// White space as in Python: Unicode's `White_Space` and the four separators U+001C to U+001F.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

/// Class of a character by its first byte.
#[derive(Clone, Copy, PartialEq, Eq)]
enum First {
    Other,
    Space,
    /// White space or not, depending on the bytes that follow.
    Either,
}

/// By byte. White space outside ASCII is U+0085 and U+00A0 (first byte C2), U+1680 (E1), U+2000 to U+205F (E2) and U+3000 (E3).
const FIRST: [First; 256] = {
    let mut table = [First::Other; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = match byte {
            0x09..=0x0d | 0x1c..=0x20 => First::Space,
            0xc2 | 0xe1..=0xe3 => First::Either,
            _ => First::Other,
        };
        byte += 1;
    }
    table
};

/// Appends the tokens of `text[range]`. Decodes only characters that may be white space outside ASCII: training spends a large part of
/// reading here.
pub(super) fn tokenize(text: &str, range: Range<usize>, out: &mut Vec<Token>) {
    let base = range.start;
    let text = &text[range];
    // `start` is the first byte of the token, or where it may begin.
    let (mut start, mut at) = (0, 0);
    while at < text.len() {
        let first = FIRST[usize::from(text.as_bytes()[at])];
        let space = match first {
            First::Other => 0,
            First::Space => 1,
            First::Either => text[at..].chars().next().filter(|c| is_space(*c)).map_or(0, char::len_utf8),
        };
        if space > 0 && start < at {
            out.push(Token::as_written(base + start..base + at));
        }
        if space > 0 {
            start = at + space;
        }
        at += space.max(1);
    }
    if start < text.len() {
        out.push(Token::as_written(base + start..base + text.len()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table against the definition, for every character.
    #[test]
    fn first_bytes_of_white_space() {
        for c in '\0'..=char::MAX {
            let text = format!("a{c}b");
            let mut tokens = Vec::new();
            tokenize(&text, 0..text.len(), &mut tokens);
            let whole = 0..text.len();
            let expected = if is_space(c) { vec![0..1, text.len() - 1..text.len()] } else { vec![whole] };
            let found: Vec<_> = tokens.iter().map(|token| token.start..token.end).collect();
            assert_eq!(found, expected, "{c:?}");
        }
    }
}
