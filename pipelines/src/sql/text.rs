//! Text on a terminal: its width, cuts, line breaks, and characters that would change the terminal.

use std::borrow::Cow;

use unicode_segmentation::UnicodeSegmentation;
use unicode_width::UnicodeWidthStr;

/// Number of columns that a text takes. East Asian characters and emoji take two, combining characters none.
pub(super) fn width(text: &str) -> usize {
    text.width()
}

/// The text, or its beginning and `…` if it is wider than `max` columns.
pub(super) fn cut(text: &str, max: usize) -> Cow<'_, str> {
    if width(text) <= max {
        return Cow::Borrowed(text);
    }
    let mut taken = 0;
    // A letter is not separated from its accents, nor an emoji from its parts.
    let fits = text.graphemes(true).take_while(|part| {
        taken += width(part);
        taken < max
    });
    Cow::Owned(fits.collect::<String>() + "…")
}

/// Replaces control characters by escapes such as `\t` and `\u{1b}`: a terminal would take them for commands.
pub(super) fn escaped(text: &str) -> Cow<'_, str> {
    if !text.contains(is_control) {
        return Cow::Borrowed(text);
    }
    let escape = |c: char| match is_control(c) {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    Cow::Owned(text.chars().map(escape).collect())
}

/// Control characters, and those that change the direction of the text after them.
fn is_control(c: char) -> bool {
    c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Breaks a paragraph into lines of up to `max` columns, between words.
pub(super) fn wrap(paragraph: &str, max: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in paragraph.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if width(line) + 1 + width(word) <= max => line.extend([" ", word]),
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    // Widths by hand, from Unicode's East Asian Width: 東 is wide, é may be two characters, a family is one emoji.
    #[test]
    fn a_cut_text_has_the_width() {
        for (text, max, expected) in [
            ("rain", 4, "rain"),
            ("rained", 4, "rai…"),
            ("東京都", 6, "東京都"),
            ("東京都", 5, "東京…"),
            ("東京都", 4, "東…"),
            ("re\u{301}sume\u{301}", 4, "re\u{301}s…"),
            ("👨\u{200d}👩\u{200d}👧 in", 3, "👨\u{200d}👩\u{200d}👧…"),
            ("rain", 1, "…"),
        ] {
            assert_eq!(cut(text, max), expected);
            assert!(width(&cut(text, max)) <= max, "{text}");
        }
    }

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(escaped("a\tb\x1b[2Jc\r"), "a\\tb\\u{1b}[2Jc\\r");
        assert_eq!(escaped("a\u{202e}b"), "a\\u{202e}b");
        assert_eq!(escaped("naïve 東京"), "naïve 東京");
    }

    #[test]
    fn lines_break_between_words() {
        assert_eq!(wrap("It rained  all\nday.", 9), ["It rained", "all day."]);
        assert_eq!(wrap("unbreakable a", 4), ["unbreakable", "a"]);
    }
}
