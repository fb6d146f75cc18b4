//! Text for error messages: shortened, and without control characters.

use std::fmt;

/// Prepares text from a file for a message: shortens it, and replaces control characters, which could rewrite a
/// terminal.
pub(crate) fn printable(text: &str) -> String {
    const SHOWN: usize = 300;
    let mut out: String = text.chars().take(SHOWN).map(|c| if c.is_control() { '?' } else { c }).collect();
    if text.chars().nth(SHOWN).is_some() {
        out += "...";
    }
    out
}

/// The first items, and the number of the others.
pub(crate) fn list<T: fmt::Display>(items: &[T]) -> String {
    const SHOWN: usize = 12;
    let mut text = items.iter().take(SHOWN).map(T::to_string).collect::<Vec<_>>().join(", ");
    if items.len() > SHOWN {
        text += &format!(" and {} more", items.len() - SHOWN);
    }
    text
}
