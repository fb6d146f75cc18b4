//! Sets of the characters that names of topics have.

use std::{fmt, ops::RangeInclusive};

/// A set of ASCII characters: bit `c` for the character `c`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chars(u128);

impl Chars {
    pub(super) const NONE: Self = Self(0);

    /// All that a name may have.
    pub(super) fn all() -> Self {
        let is_of_names = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        Self::of(('\0'..='\x7f').filter(is_of_names))
    }

    pub(super) fn of(chars: impl IntoIterator<Item = char>) -> Self {
        Self(chars.into_iter().filter(char::is_ascii).fold(0, |set, c| set | 1 << u32::from(c)))
    }

    /// The characters from one to another, which are digits, capital or small letters.
    pub(super) fn range(from: char, to: char) -> Option<Self> {
        let kinds: [RangeInclusive<char>; 3] = ['0'..='9', 'A'..='Z', 'a'..='z'];
        let is_range = from <= to && kinds.iter().any(|kind| kind.contains(&from) && kind.contains(&to));
        is_range.then(|| Self::of(from..=to))
    }

    /// The class `[:NAME:]`.
    pub(super) fn class(name: &str) -> Option<Self> {
        let is_of: fn(&char) -> bool = match name {
            "alnum" => char::is_ascii_alphanumeric,
            "alpha" => char::is_ascii_alphabetic,
            "digit" => char::is_ascii_digit,
            "lower" => char::is_ascii_lowercase,
            "upper" => char::is_ascii_uppercase,
            _ => return None,
        };
        Some(Self::of(('\0'..='\x7f').filter(is_of)))
    }

    pub(super) fn has(self, c: char) -> bool {
        c.is_ascii() && self.0 & 1 << u32::from(c) != 0
    }

    pub(super) fn is_empty(self) -> bool {
        self == Self::NONE
    }

    pub(super) fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub(super) fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The other characters of names.
    pub(super) fn others(self) -> Self {
        Self(Self::all().0 & !self.0)
    }

    fn chars(self) -> impl Iterator<Item = char> {
        ('\0'..='\x7f').filter(move |c| self.has(*c))
    }

    /// As within brackets. A dash is last, where it is no range in any dialect.
    fn listed(self) -> String {
        let dash = if self.has('-') { "-" } else { "" };
        self.chars().filter(|c| *c != '-').chain(dash.chars()).collect()
    }
}

impl fmt::Display for Chars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let others = self.others();
        match self.listed().as_str() {
            "." => f.write_str("\\."),
            single if single.len() == 1 => f.write_str(single),
            _ if others.is_empty() => f.write_str("."),
            list if list.len() <= others.listed().len() => write!(f, "[{list}]"),
            _ => write!(f, "[^{}]", others.listed()),
        }
    }
}
