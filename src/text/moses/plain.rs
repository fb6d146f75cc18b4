//! A shortcut for sentences of ordinary ASCII: tokens straight from the bytes, without cells.
//!
//! It knows words of letters, digits and hyphens; symbols that are tokens of their own; commas after a letter or a symbol; contractions;
//! and full stops after a letter or a digit. The tokens of these are those of the rules. Anything else, such as quotes, other white space
//! or characters beyond ASCII, is left to the rules.

use std::ops::Range;

use super::{
    super::Token,
    classes::{self, ALPHA, APART, NUMBER},
    prefixes::{keeps_period, keeps_period_before_number},
};

/// What a byte is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Letter,
    Digit,
    Hyphen,
    Space,
    /// A token of its own.
    Symbol,
    Comma,
    Apostrophe,
    Stop,
    /// Left to the rules.
    Other,
}

const KINDS: [Kind; 256] = {
    let mut kinds = [Kind::Other; 256];
    let mut byte = 0;
    while byte < 128 {
        let class = classes::ASCII[byte];
        kinds[byte] = match byte as u8 {
            b' ' => Kind::Space,
            b'-' => Kind::Hyphen,
            b',' => Kind::Comma,
            b'\'' => Kind::Apostrophe,
            b'.' => Kind::Stop,
            0..b' ' | b'"' => Kind::Other,
            _ if class & ALPHA != 0 => Kind::Letter,
            _ if class & NUMBER != 0 => Kind::Digit,
            _ if class & APART != 0 => Kind::Symbol,
            _ => Kind::Other,
        };
        byte += 1;
    }
    kinds
};

/// Appends the tokens of a block that begins at byte `base` of the text. Returns `false`, and appends none, if it is left to the rules.
pub(super) fn tokenize(block: &str, base: usize, out: &mut Vec<Token>) -> bool {
    let tokens = out.len();
    let is_plain = Reader { block, base, out, start: 0, has_letter: false, has_stop: false }.read();
    if !is_plain {
        out.truncate(tokens);
    }
    is_plain
}

struct Reader<'a> {
    block: &'a str,
    base: usize,
    out: &'a mut Vec<Token>,
    /// First byte of the word that is read, or of the next one.
    start: usize,
    /// Whether the word has a letter.
    has_letter: bool,
    /// Whether the word has a full stop.
    has_stop: bool,
}

impl Reader<'_> {
    fn read(mut self) -> bool {
        for at in 0..self.block.len() {
            let is_known = match self.kind(at) {
                Kind::Letter => {
                    self.has_letter = true;
                    true
                }
                Kind::Digit | Kind::Hyphen => true,
                Kind::Space => self.end_word(at, at + 1),
                Kind::Symbol => self.symbol(at),
                Kind::Comma => self.comma(at),
                Kind::Apostrophe => self.apostrophe(at),
                Kind::Stop => self.stop(at),
                Kind::Other => false,
            };
            if !is_known {
                return false;
            }
        }
        self.end_word(self.block.len(), self.block.len())
    }

    /// The kind of a byte. Beyond the end, that of white space.
    fn kind(&self, at: usize) -> Kind {
        self.block.as_bytes().get(at).map_or(Kind::Space, |&byte| KINDS[usize::from(byte)])
    }

    fn kind_before(&self, at: usize) -> Kind {
        at.checked_sub(1).map_or(Kind::Space, |last| self.kind(last))
    }

    fn push(&mut self, range: Range<usize>) {
        self.out.push(Token::as_written(self.base + range.start..self.base + range.end));
    }

    /// Ends the word before a byte, and begins the next one.
    fn end_word(&mut self, end: usize, next: usize) -> bool {
        if self.start < end {
            self.push(self.start..end);
        }
        (self.start, self.has_letter, self.has_stop) = (next, false, false);
        true
    }

    /// A byte that is a token of its own.
    fn symbol(&mut self, at: usize) -> bool {
        self.end_word(at, at + 1);
        self.push(at..at + 1);
        true
    }

    /// Left to the rules after a digit, where it may be part of a number, and before another comma, which has a rule of its own.
    fn comma(&mut self, at: usize) -> bool {
        let pairs = matches!(self.kind_before(at), Kind::Letter | Kind::Symbol);
        pairs && self.kind(at + 1) != Kind::Comma && self.symbol(at)
    }

    /// The beginning of a contraction or possessive. Left to the rules where another apostrophe follows after one letter: the matches of
    /// both would need that letter, and the rules match it once.
    fn apostrophe(&mut self, at: usize) -> bool {
        self.kind_before(at) == Kind::Letter
            && self.kind(at + 1) == Kind::Letter
            && self.kind(at + 2) != Kind::Apostrophe
            && self.end_word(at, at)
    }

    /// A full stop within a word is part of it; one at its end is a token of its own unless the word is an abbreviation.
    fn stop(&mut self, at: usize) -> bool {
        if !matches!(self.kind_before(at), Kind::Letter | Kind::Digit) {
            return false;
        }
        match self.kind(at + 1) {
            Kind::Letter | Kind::Digit => {
                self.has_stop = true;
                true
            }
            Kind::Space | Kind::Symbol if self.is_abbreviation(at) => self.end_word(at + 1, at + 1),
            Kind::Space | Kind::Symbol => self.symbol(at),
            _ => false,
        }
    }

    /// As [`super::is_abbreviation`], for the word before a full stop.
    fn is_abbreviation(&self, at: usize) -> bool {
        let stem = self.block[self.start..at].chars();
        let next = self.block.as_bytes()[at + 1..].iter().find(|byte| **byte != b' ');
        next.is_some_and(u8::is_ascii_lowercase)
            || keeps_period(stem.clone())
            || next.is_some_and(u8::is_ascii_digit) && keeps_period_before_number(stem)
            || self.has_letter && self.has_stop
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{
        super::{Moses, emit},
        *,
    };

    const PIECES: [&str; 14] =
        ["Dr.", "No.", "e.g.", "U.S.", "n't", "'s", "...", ". ", ", ", "``", "\"", "\t", "’", "é"];

    /// The tokens by the rules.
    fn by_rules(text: &str) -> Vec<Token> {
        let (mut moses, mut tokens) = (Moses::default(), Vec::new());
        moses.read(text);
        emit(&moses.cells, text, 3, &mut tokens);
        tokens
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(5_000))]

        /// Expected: the rules, which are compared with the original in `tests.rs`.
        #[test]
        fn tokens_are_those_of_the_rules(
            pieces in prop::collection::vec(
                prop_oneof![
                    8 => "[A-Za-z]{1,4}", 4 => " {1,2}", 2 => "[0-9]{1,3}", 3 => r"[.,'\-]", 1 => r"[!?;:()%/&@#]",
                    1 => prop::sample::select(PIECES.to_vec()).prop_map(str::to_owned),
                ], 0..14),
        ) {
            let text = pieces.concat();
            let before = Token::as_written(0..1);
            let mut tokens = vec![before.clone()];
            if tokenize(&text, 3, &mut tokens) {
                prop_assert_eq!(&tokens[1..], by_rules(&text));
            } else {
                prop_assert_eq!(tokens, [before]);
            }
        }
    }

    /// Whether a text is plain, after a check of its tokens.
    fn is_plain(text: &str) -> bool {
        let mut tokens = Vec::new();
        let is_plain = tokenize(text, 3, &mut tokens);
        assert_eq!(tokens, if is_plain { by_rules(text) } else { Vec::new() }, "{text:?}");
        is_plain
    }

    /// All strings of five of the bytes to which most rules apply.
    #[test]
    fn short_strings_are_read_as_by_the_rules() {
        let alphabet = b"aZ7-. ,'!\"\t";
        let n = alphabet.len();
        let string = |code: usize| (0..5).map(|i| char::from(alphabet[code / n.pow(i) % n])).collect::<String>();
        let plain = (0..n.pow(5)).filter(|&code| is_plain(&string(code))).count();
        assert!(plain > 10_000, "only {plain} strings are plain");
    }

    /// Every byte of ASCII, beside and between what rules look at.
    #[test]
    fn every_byte_is_read_as_by_the_rules() {
        let mut plain = 0;
        for byte in 0..128_u8 {
            for template in
                ["_", "a_b", "a _ b", "a._", "a_.", "a_,b", "a,_", "a'_", "_'s", "7_8", "a__b", "No. _", "e.g._"]
            {
                plain += usize::from(is_plain(&template.replace('_', char::from(byte).encode_utf8(&mut [0; 4]))));
            }
        }
        assert!(plain > 500, "only {plain} strings are plain");
    }

    #[test]
    fn ordinary_sentences_are_plain() {
        for text in [
            "The food was great, and the staff friendly.",
            "It doesn't cost $4.50 (or does it?), Dr. Smith said; he'd know.",
            " No. 7 in the U.S. rating: 3 stars ",
            "",
        ] {
            assert!(is_plain(text), "{text}");
        }
    }
}
