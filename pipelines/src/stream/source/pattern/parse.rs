//! The dialect of patterns: what POSIX, RE2 and the crate `regex` have in common, as far as names of topics need it.

use super::{chars::Chars, expression::Expression};

/// The longest name of a topic.
const LONGEST: u32 = 249;
/// Parentheses in one another: what parses and matches a pattern recurses.
const DEEPEST: usize = 50;
/// How names are written.
const NAMES: &str = "names have letters, digits, '.', '_' and '-'";

/// Why a pattern is refused.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// The number of the character, from 0.
    pub(super) at: usize,
    pub(super) reason: String,
    pub(super) help: String,
}

type Parsed<T> = Result<T, Refusal>;

/// Parses a pattern that begins with `^`: the names that it matches, from the first to the last character.
pub(super) fn parse(pattern: &str) -> Parsed<Expression> {
    let mut parser = Parser { chars: pattern.chars().collect(), at: 0, depth: 0 };
    let mut alternatives = vec![parser.alternative()?];
    while parser.takes('|') {
        alternatives.push(parser.alternative()?);
    }
    match parser.peek() {
        Some(')') => parser.refuse("no parenthesis is open here", "leave ) out"),
        Some(c) => parser.refuse(format!("{c} follows the $ that ends the name"), "leave $ out, or what follows it"),
        None => Ok(Expression::choice(alternatives)),
    }
}

struct Parser {
    chars: Vec<char>,
    at: usize,
    /// Parentheses that are open.
    depth: usize,
}

impl Parser {
    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    /// Whether this character is next, which is then taken.
    fn takes(&mut self, c: char) -> bool {
        let found = self.peek() == Some(c);
        self.at += usize::from(found);
        found
    }

    fn refuse<T>(&self, reason: impl Into<String>, help: impl Into<String>) -> Parsed<T> {
        Err(Refusal { at: self.at, reason: reason.into(), help: help.into() })
    }

    /// A `^`, what names begin with, and perhaps the `$` of names that end there.
    fn alternative(&mut self) -> Parsed<Expression> {
        if !self.takes('^') {
            return self.refuse(
                "what follows | outside of parentheses has no ^, and would be found anywhere in a name",
                "write ^(a|b), or ^a|^b, or give --topic twice",
            );
        }
        let mut parts = self.sequence()?;
        let is_whole = self.peek() == Some('$');
        if is_whole && parts.is_empty() {
            return self.refuse("^$ matches no topic", "leave $ out");
        }
        self.at += usize::from(is_whole);
        if !is_whole && parts.last() != Some(&Expression::anything()) {
            parts.push(Expression::anything());
        }
        Ok(Expression::sequence(parts))
    }

    /// Up to `|`, `)`, `$` or the end.
    fn sequence(&mut self) -> Parsed<Vec<Expression>> {
        let mut parts = Vec::new();
        while self.peek().is_some_and(|c| !matches!(c, '|' | ')' | '$')) {
            let part = self.one()?;
            parts.push(self.repeated(part)?);
        }
        Ok(parts)
    }

    /// A character, a set of characters, or a group.
    fn one(&mut self) -> Parsed<Expression> {
        match self.peek() {
            Some('(') => self.group(),
            Some('[') => Ok(Expression::One(self.set()?)),
            Some('.') => {
                self.at += 1;
                Ok(Expression::One(Chars::all()))
            }
            Some(c @ ('*' | '+' | '?' | '{')) => {
                self.refuse(format!("{c} has nothing to repeat"), "write .* for any characters")
            }
            Some('^') => self.refuse("^ is not at the beginning", "leave it out: a pattern begins with one ^"),
            _ => Ok(Expression::character(self.character()?)),
        }
    }

    /// A character of names, perhaps behind a backslash.
    fn character(&mut self) -> Parsed<char> {
        let escaped = self.peek() == Some('\\');
        match self.chars.get(self.at + usize::from(escaped)).copied() {
            Some(c) if Chars::all().has(c) && !(escaped && c.is_ascii_alphanumeric()) => {
                self.at += 1 + usize::from(escaped);
                Ok(c)
            }
            Some(c) if escaped && c.is_ascii_alphanumeric() => self.refuse(
                format!("\\{c} is not the same in librdkafka, brokers and elmo"),
                "write a set, such as [0-9] for \\d and [A-Za-z0-9_] for \\w",
            ),
            Some(c) => self.refuse(format!("no name of a topic has a {c:?}"), NAMES),
            None => self.refuse("a backslash is last", "write \\. for a dot"),
        }
    }

    fn group(&mut self) -> Parsed<Expression> {
        let begin = self.at;
        self.at += 1;
        if self.peek() == Some('?') {
            return self.refuse("groups with ? are not in all engines", "write (a|b) without ?");
        }
        if self.depth == DEEPEST {
            return self.refuse(format!("{DEEPEST} parentheses are open"), "write it with fewer in one another");
        }
        self.depth += 1;
        let mut options = vec![self.option()?];
        while self.takes('|') {
            options.push(self.option()?);
        }
        self.depth -= 1;
        match self.peek() {
            Some(')') => self.at += 1,
            Some(_) => return self.refuse("$ is in parentheses", "put it behind them: ^(a|b)$"),
            None => {
                self.at = begin;
                return self.refuse("this parenthesis is not closed", "add a )");
            }
        }
        Ok(Expression::choice(options))
    }

    /// An alternative of a group.
    fn option(&mut self) -> Parsed<Expression> {
        let parts = self.sequence()?;
        if parts.is_empty() && matches!(self.peek(), Some('|' | ')')) {
            return self.refuse("an alternative is empty", "write (a|b)? where it may be left out");
        }
        Ok(Expression::sequence(parts))
    }

    /// A part with the sign that says how often it is there.
    fn repeated(&mut self, part: Expression) -> Parsed<Expression> {
        let begin = self.at;
        let (least, most) = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => self.numbers()?,
            _ => return Ok(part),
        };
        self.at += 1;
        if let Some(c @ ('*' | '+' | '?' | '{')) = self.peek() {
            return self.refuse(
                format!("{c} follows another sign of repetition"),
                "leave one out: names are matched as a whole, so a lazy or possessive one changes nothing",
            );
        }
        let repeated = Expression::Repeat(Box::new(part), least, most);
        if repeated.copies() > LONGEST {
            self.at = begin;
            return self.refuse(format!("this repeats more than {LONGEST} times"), "no name of a topic is so long");
        }
        Ok(repeated)
    }

    /// `{2}`, `{2,}` or `{2,5}`, up to its brace.
    fn numbers(&mut self) -> Parsed<(u32, Option<u32>)> {
        let inner: String = self.chars[self.at + 1..].iter().take_while(|c| **c != '}').collect();
        let number = |text: &str| text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten();
        let numbers = match inner.split_once(',') {
            None => number(&inner).map(|n| (n, Some(n))),
            Some((least, "")) => number(least).map(|n| (n, None)),
            Some((least, most)) => number(least).zip(number(most).map(Some)),
        };
        let end = self.at + 1 + inner.len();
        match numbers.filter(|(least, most)| most.is_none_or(|most| most >= 1 && most >= *least)) {
            Some(numbers) if self.chars.get(end) == Some(&'}') => {
                self.at = end;
                Ok(numbers)
            }
            _ => self.refuse("this is no number of repetitions", "write {2}, {2,} or {2,5}"),
        }
    }

    /// A set in brackets.
    fn set(&mut self) -> Parsed<Chars> {
        let begin = self.at;
        self.at += 1;
        let negated = self.takes('^');
        let mut set = Chars::NONE;
        while self.peek().is_some_and(|c| c != ']') {
            set = set.or(self.member()?);
        }
        if !self.takes(']') {
            self.at = begin;
            return self.refuse("this bracket is not closed", "add a ]");
        }
        let names = if negated { set.others() } else { set };
        if set.is_empty() || names.is_empty() {
            self.at = begin;
            return self.refuse("this set has no character that a name may have", NAMES);
        }
        Ok(names)
    }

    /// A class, a range, or a character of a set.
    fn member(&mut self) -> Parsed<Chars> {
        if self.peek() == Some('[') {
            return self.class();
        }
        let begin = self.at;
        let from = self.character()?;
        let is_range = self.peek() == Some('-') && self.chars.get(self.at + 1).is_some_and(|c| *c != ']');
        if !is_range {
            return Ok(Chars::of([from]));
        }
        self.at += 1;
        let to = self.character()?;
        Chars::range(from, to).map_or_else(
            || {
                self.at = begin;
                self.refuse(
                    format!("{from}-{to} is not a range of digits, of capital or of small letters"),
                    "write ranges such as 0-9, A-Z and a-z, and a dash last: [a-z-]",
                )
            },
            Ok,
        )
    }

    /// `[:digit:]` and the like.
    fn class(&mut self) -> Parsed<Chars> {
        let inner: String = self.chars[self.at + 1..].iter().take_while(|c| **c != ']').collect();
        let class = inner.strip_prefix(':').and_then(|inner| inner.strip_suffix(':')).and_then(Chars::class);
        let end = self.at + 1 + inner.chars().count();
        match class.filter(|_| self.chars.get(end) == Some(&']')) {
            Some(class) => {
                self.at = end + 1;
                Ok(class)
            }
            None => self.refuse(
                "only the classes [:alnum:], [:alpha:], [:digit:], [:lower:] and [:upper:] are known",
                "write the characters, such as [0-9]",
            ),
        }
    }
}
