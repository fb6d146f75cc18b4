//! Regular expressions over names of topics.

use std::fmt;

use super::chars::Chars;

/// A set of texts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Expression {
    /// One character of a set.
    One(Chars),
    /// One after the other; the empty text if there are none.
    Sequence(Vec<Self>),
    /// Any of them; nothing if there are none.
    Choice(Vec<Self>),
    /// So often at least, and at most.
    Repeat(Box<Self>, u32, Option<u32>),
}

impl Expression {
    pub(super) fn character(c: char) -> Self {
        Self::One(Chars::of([c]))
    }

    /// Any text.
    pub(super) fn anything() -> Self {
        Self::Repeat(Box::new(Self::One(Chars::all())), 0, None)
    }

    pub(super) fn sequence(parts: impl IntoIterator<Item = Self>) -> Self {
        let mut flat = Vec::new();
        for part in parts {
            match part {
                nothing if nothing.is_nothing() => return Self::Choice(Vec::new()),
                Self::Sequence(inner) => flat.extend(inner),
                part => flat.push(part),
            }
        }
        match flat.len() {
            1 => flat.remove(0),
            _ => Self::Sequence(flat),
        }
    }

    pub(super) fn choice(options: impl IntoIterator<Item = Self>) -> Self {
        let mut flat = Vec::new();
        for option in options.into_iter().filter(|option| !option.is_nothing()) {
            match option {
                Self::Choice(inner) => flat.extend(inner),
                option => flat.push(option),
            }
        }
        match flat.len() {
            1 => flat.remove(0),
            _ => Self::Choice(flat),
        }
    }

    fn repeat(self, least: u32, most: Option<u32>) -> Self {
        match (least, most) {
            (_, Some(0)) => Self::Sequence(Vec::new()),
            (1, Some(1)) => self,
            _ => Self::Repeat(Box::new(self), least, most),
        }
    }

    /// Whether no text matches.
    pub(super) fn is_nothing(&self) -> bool {
        match self {
            Self::One(set) => set.is_empty(),
            Self::Choice(options) => options.is_empty(),
            Self::Sequence(_) | Self::Repeat(..) => false,
        }
    }

    /// Whether the empty text matches.
    fn may_be_empty(&self) -> bool {
        match self {
            Self::One(_) => false,
            Self::Sequence(parts) => parts.iter().all(Self::may_be_empty),
            Self::Choice(options) => options.iter().any(Self::may_be_empty),
            Self::Repeat(inner, least, _) => *least == 0 || inner.may_be_empty(),
        }
    }

    /// How often numbers within numbers repeat a part: 6 for `(a{2}){3}`.
    pub(super) fn copies(&self) -> u32 {
        match self {
            Self::One(_) => 1,
            Self::Sequence(parts) | Self::Choice(parts) => parts.iter().map(Self::copies).max().unwrap_or(1),
            Self::Repeat(inner, least, most) => inner.copies().saturating_mul(most.unwrap_or(*least).max(1)),
        }
    }

    /// All texts but the empty one, with what `of` puts in the place of the set of their first character.
    fn with_first(&self, of: &dyn Fn(Chars) -> Self) -> Self {
        match self {
            Self::One(set) => of(*set),
            Self::Choice(options) => Self::choice(options.iter().map(|option| option.with_first(of))),
            Self::Sequence(parts) => {
                // The first character is in a part before which all may be empty.
                let empty = parts.iter().take_while(|part| part.may_be_empty()).count();
                let begins = parts.iter().take(empty + 1).enumerate().map(|(at, part)| {
                    Self::sequence([part.with_first(of)].into_iter().chain(parts[at + 1..].iter().cloned()))
                });
                Self::choice(begins)
            }
            Self::Repeat(inner, least, most) => {
                let rest = inner.as_ref().clone().repeat(least.saturating_sub(1), most.map(|most| most - 1));
                Self::sequence([inner.with_first(of), rest])
            }
        }
    }

    /// The texts whose first character is in a set.
    fn beginning_with(&self, set: Chars) -> Self {
        self.with_first(&|first| Self::One(first.and(set)))
    }

    /// What follows a character in the texts that begin with it.
    fn after(&self, c: char) -> Self {
        self.with_first(&|first| if first.has(c) { Self::Sequence(Vec::new()) } else { Self::Choice(Vec::new()) })
    }

    /// Without names that begin with `__`: topics of Kafka itself, such as `__consumer_offsets`.
    pub(super) fn without_internal(self) -> Self {
        let behind = self.after('_');
        if behind.after('_').is_nothing() {
            return self;
        }
        let (dash, others) = (Self::character('_'), Chars::of(['_']).others());
        let alone = if behind.may_be_empty() { dash.clone() } else { Self::Choice(Vec::new()) };
        Self::choice([self.beginning_with(others), Self::sequence([dash, behind.beginning_with(others)]), alone])
    }
}

impl fmt::Display for Expression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(set) => write!(f, "{set}"),
            Self::Sequence(parts) => parts.iter().try_for_each(|part| match part {
                Self::Choice(_) => write!(f, "({part})"),
                _ => write!(f, "{part}"),
            }),
            Self::Choice(options) => options.iter().enumerate().try_for_each(|(at, option)| {
                let bar = if at == 0 { "" } else { "|" };
                write!(f, "{bar}{option}")
            }),
            Self::Repeat(inner, least, most) => {
                match inner.as_ref() {
                    Self::One(set) => write!(f, "{set}")?,
                    inner => write!(f, "({inner})")?,
                }
                match (least, most) {
                    (0, None) => f.write_str("*"),
                    (1, None) => f.write_str("+"),
                    (0, Some(1)) => f.write_str("?"),
                    (least, None) => write!(f, "{{{least},}}"),
                    (least, Some(most)) if least == most => write!(f, "{{{least}}}"),
                    (least, Some(most)) => write!(f, "{{{least},{most}}}"),
                }
            }
        }
    }
}
