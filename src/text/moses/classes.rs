//! Character classes of the Moses rules, as bits.
//!
//! The rules were written for the character tables of Perl with Unicode 7. Rust's newer tables are used instead, except
//! for characters that those tables lack: everything outside the Basic Multilingual Plane, Han and Hangul. Each of
//! these characters is a token of its own.

/// A letter, or a mark that belongs to one.
pub(super) const ALPHA: u8 = 1;
/// A number of any kind, such as `7`, `½` or `Ⅷ`.
pub(super) const NUMBER: u8 = 1 << 1;
/// A decimal digit of any script.
pub(super) const DIGIT: u8 = 1 << 2;
/// A lower case letter.
pub(super) const LOWER: u8 = 1 << 3;
/// A token of its own: any character but letters, digits, full stop, apostrophe, comma, hyphen and backtick.
pub(super) const APART: u8 = 1 << 4;

/// The class bits of a character that is not white space.
#[inline]
pub(super) fn class(c: char) -> u8 {
    match ASCII.get(c as usize) {
        Some(&class) => class,
        None => beyond_ascii(c),
    }
}

/// The class bits of ASCII.
pub(super) const ASCII: [u8; 128] = ascii();

const fn ascii() -> [u8; 128] {
    let mut classes = [APART; 128];
    let mut b = 0;
    while b < 128 {
        match b as u8 {
            b'a'..=b'z' => classes[b] = ALPHA | LOWER,
            b'A'..=b'Z' => classes[b] = ALPHA,
            b'0'..=b'9' => classes[b] = NUMBER | DIGIT,
            b'.' | b'\'' | b'`' | b',' | b'-' => classes[b] = 0,
            _ => {}
        }
        b += 1;
    }
    classes
}

fn beyond_ascii(c: char) -> u8 {
    let mut class = if c.is_lowercase() && !is_georgian(c) { LOWER } else { 0 };
    if c > '\u{ffff}' || is_ideograph_or_hangul(c) {
        return class | APART;
    }
    if c.is_numeric() {
        class |= NUMBER;
        if is_digit(c) {
            class |= DIGIT;
        }
    }
    if c.is_alphabetic() || INDIC_SIGNS.binary_search(&c).is_ok() {
        class |= ALPHA;
    }
    if class & (ALPHA | DIGIT) == 0 { class | APART } else { class }
}

fn is_ideograph_or_hangul(c: char) -> bool {
    matches!(c, '\u{3005}' | '\u{3007}' | '\u{3021}'..='\u{3029}' | '\u{3038}'..='\u{303b}'
        | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}' | '\u{ac00}'..='\u{d7a3}' | '\u{f900}'..='\u{faff}')
}

/// Mkhedruli had no case until Unicode 11.
fn is_georgian(c: char) -> bool {
    matches!(c, '\u{10d0}'..='\u{10ff}')
}

/// Decimal digits (general category Nd) come in tens.
fn is_digit(c: char) -> bool {
    let tens = ZEROS.partition_point(|&zero| zero <= c);
    tens > 0 && c as u32 - (ZEROS[tens - 1] as u32) < 10
}

/// The zeros of the scripts of the Basic Multilingual Plane without ASCII.
const ZEROS: [char; 36] = [
    '\u{660}', '\u{6f0}', '\u{7c0}', '\u{966}', '\u{9e6}', '\u{a66}', '\u{ae6}', '\u{b66}', '\u{be6}', '\u{c66}',
    '\u{ce6}', '\u{d66}', '\u{de6}', '\u{e50}', '\u{ed0}', '\u{f20}', '\u{1040}', '\u{1090}', '\u{17e0}', '\u{1810}',
    '\u{1946}', '\u{19d0}', '\u{1a80}', '\u{1a90}', '\u{1b50}', '\u{1bb0}', '\u{1c40}', '\u{1c50}', '\u{a620}',
    '\u{a8d0}', '\u{a900}', '\u{a9d0}', '\u{a9f0}', '\u{aa50}', '\u{abf0}', '\u{ff10}',
];

/// Viramas, nuktas and similar signs of Indic scripts: not alphabetic in Unicode, but parts of words.
const INDIC_SIGNS: [char; 31] = [
    '\u{93c}', '\u{94d}', '\u{9bc}', '\u{9cd}', '\u{a3c}', '\u{a4d}', '\u{abc}', '\u{acd}', '\u{afd}', '\u{afe}',
    '\u{aff}', '\u{b3c}', '\u{b4d}', '\u{bcd}', '\u{c4d}', '\u{cbc}', '\u{ccd}', '\u{d3b}', '\u{d3c}', '\u{d4d}',
    '\u{dca}', '\u{eba}', '\u{1039}', '\u{1714}', '\u{1bab}', '\u{1c37}', '\u{a8c4}', '\u{a8f3}', '\u{a8f4}',
    '\u{a953}', '\u{aaf6}',
];
