//! The Moses tokenizer for English, as the published weights were trained with it.
//!
//! `normalize` turns the sentence into [`Cell`]s: characters with their place in the text and the white space before
//! them. All further rules only insert spaces between cells. A run of cells between two spaces is a token, but a full
//! stop at its end may be a token of its own. The rules are those of the Moses scripts as implemented by the Python
//! package `sacremoses`, including their quirks: `docs/tokenizer.md`.
//!
//! Every step is one pass over the cells, so time is linear. Sentences of ordinary ASCII need no cells: `plain`.

mod classes;
mod normalize;
mod plain;
mod prefixes;

use std::ops::Range;

use self::{
    classes::{ALPHA, APART, LOWER, NUMBER, class},
    normalize::normalize,
    prefixes::{keeps_period, keeps_period_before_number},
};
use super::{MAX_WORD_BYTES, Token, cut_off};

/// A character that the model may read.
#[derive(Clone, Copy, Debug)]
struct Cell {
    c: char,
    /// Its place in the block of text. Several cells share a place if they were made from one character.
    start: u32,
    end: u32,
    /// Number of spaces before it. Only [`apostrophes`] distinguishes one from several.
    gap: u8,
    /// Bits of [`classes`].
    class: u8,
}

impl Cell {
    /// `end` is at most the length of a block, which fits 32 bits.
    fn new(c: char, start: usize, end: usize) -> Self {
        Self { c, start: start as u32, end: end as u32, gap: 0, class: class(c) }
    }

    fn place(&self) -> (u32, u32) {
        (self.start, self.end)
    }

    fn is(&self, bits: u8) -> bool {
        self.class & bits != 0
    }
}

/// The tokenizer, with a buffer that it reuses.
#[derive(Debug, Default)]
pub(super) struct Moses {
    cells: Vec<Cell>,
}

impl Moses {
    /// Appends the tokens of the sentence `text[range]`.
    ///
    /// A sentence longer than [`MAX_WORD_BYTES`] is read in blocks of that size, cut at white space if possible.
    pub(super) fn tokenize(&mut self, text: &str, range: Range<usize>, out: &mut Vec<Token>) {
        let mut from = range.start;
        while from < range.end {
            let block = &text[from..range.end];
            let block = &block[..cut_off(block, MAX_WORD_BYTES).at];
            if !plain::tokenize(block, from, out) {
                self.read(block);
                emit(&self.cells, block, from, out);
            }
            from += block.len();
        }
    }

    fn read(&mut self, block: &str) {
        self.cells.clear();
        self.cells.reserve(block.len());
        normalize(block, &mut self.cells);
        set_apart(&mut self.cells);
        commas(&mut self.cells);
        apostrophes(&mut self.cells);
    }
}

/// Inserts spaces around every symbol that is a token of its own, and around two or more full stops in a row.
fn set_apart(cells: &mut [Cell]) {
    let mut space_after = 0;
    let mut i = 0;
    while i < cells.len() {
        cells[i].gap += space_after;
        space_after = 0;
        let dots = if cells[i].c == '.' { dots_at(cells, i) } else { 0 };
        if dots > 1 || cells[i].is(APART) {
            cells[i].gap += 1;
            space_after = 1;
        }
        i += dots.max(1);
    }
}

/// Number of full stops in a row from cell `i` on, which is one.
fn dots_at(cells: &[Cell], i: usize) -> usize {
    1 + cells[i + 1..].iter().take_while(|cell| cell.c == '.' && cell.gap == 0).count()
}

/// Inserts spaces around a comma unless it is between two numbers.
///
/// The original matches a comma together with the character before it. It does not match a comma at the very beginning,
/// nor the second one of two commas in a row; for these only the character after them counts.
fn commas(cells: &mut [Cell]) {
    let mut matched = None;
    for i in 0..cells.len() {
        if cells[i].c != ',' {
            continue;
        }
        let after_number = i > 0 && cells[i].gap == 0 && cells[i - 1].is(NUMBER);
        let pairs = i > 0 && !after_number && matched != Some(i);
        let ends = match cells.get(i + 1) {
            Some(next) => next.gap > 0 || !next.is(NUMBER),
            None => after_number,
        };
        if pairs && cells.get(i + 1).is_some_and(|next| next.gap == 0) {
            matched = Some(i + 1);
        }
        if pairs || ends {
            space_before(cells, i);
            space_before(cells, i + 1);
        }
    }
}

fn space_before(cells: &mut [Cell], i: usize) {
    if let Some(cell) = cells.get_mut(i) {
        cell.gap += 1;
    }
}

/// A position that a rule for apostrophes matches: that of cell `i` is `2 i + 1`, that of the white space before it `2
/// i`.
type Position = usize;

/// Inserts a space before an apostrophe, and one after it unless a contraction or possessive begins there: `it 's`,
/// `' tis`.
///
/// There are five rules, each of which is applied to all apostrophes before the next one. A rule matches an apostrophe
/// with the character before it and the one after it, and matches do not overlap: `rock'n'roll` becomes `rock 'n'roll`.
/// An apostrophe at the beginning or end of the sentence does not match.
fn apostrophes(cells: &mut [Cell]) {
    let found: Vec<usize> = (0..cells.len()).filter(|&i| cells[i].c == '\'').collect();
    for rule in RULES {
        let mut free = 0;
        for &i in &found {
            let (Some((before, position)), Some(after)) = (before(cells, i), after(cells, i)) else { continue };
            if position < free || !(rule.applies)(before, after) {
                continue;
            }
            free = free_after(cells, i + 1);
            space_before(cells, i);
            if rule.space_after {
                space_before(cells, i + 1);
            }
        }
    }
}

struct Rule {
    applies: fn(Neighbour, Neighbour) -> bool,
    space_after: bool,
}

const RULES: [Rule; 5] = [
    Rule { applies: |before, after| !before.is(ALPHA) && !after.is(ALPHA), space_after: true },
    Rule { applies: |before, after| !before.is(ALPHA | NUMBER) && after.is(ALPHA), space_after: true },
    Rule { applies: |before, after| before.is(ALPHA) && !after.is(ALPHA), space_after: true },
    Rule { applies: |before, after| before.is(ALPHA) && after.is(ALPHA), space_after: false },
    Rule { applies: |before, after| before.is(NUMBER) && after.c == 's', space_after: false },
];

/// A character beside an apostrophe. White space is a space without class bits.
#[derive(Clone, Copy)]
struct Neighbour {
    c: char,
    class: u8,
}

impl Neighbour {
    const SPACE: Self = Self { c: ' ', class: 0 };

    fn of(cell: &Cell) -> Self {
        Self { c: cell.c, class: cell.class }
    }

    fn is(self, bits: u8) -> bool {
        self.class & bits != 0
    }
}

/// The character before cell `i`, and its position.
fn before(cells: &[Cell], i: usize) -> Option<(Neighbour, Position)> {
    if cells[i].gap > 0 {
        return Some((Neighbour::SPACE, 2 * i));
    }
    let last = i.checked_sub(1)?;
    Some((Neighbour::of(&cells[last]), 2 * last + 1))
}

/// The character after cell `i`.
fn after(cells: &[Cell], i: usize) -> Option<Neighbour> {
    let next = cells.get(i + 1)?;
    Some(if next.gap > 0 { Neighbour::SPACE } else { Neighbour::of(next) })
}

/// The first position after a match that ends with cell `i`, or with the first space before it. Of two spaces the
/// second one can be matched again.
fn free_after(cells: &[Cell], i: usize) -> Position {
    match cells[i].gap {
        0 => 2 * i + 2,
        1 => 2 * i + 1,
        _ => 2 * i,
    }
}

/// Appends the tokens of a block that begins at byte `base` of the text.
fn emit(cells: &[Cell], block: &str, base: usize, out: &mut Vec<Token>) {
    let mut start = 0;
    while start < cells.len() {
        let end = start + 1 + cells[start + 1..].iter().take_while(|cell| cell.gap == 0).count();
        let body = end - detached(cells, start..end);
        if start < body {
            out.push(token(&cells[start..body], block, base));
        }
        for cell in body..end {
            out.push(token(&cells[cell..=cell], block, base));
        }
        start = end;
    }
}

/// Number of characters at the end of a word that are tokens of their own: a full stop, or `.'` at the end of a
/// sentence.
fn detached(cells: &[Cell], word: Range<usize>) -> usize {
    let is_last = word.end == cells.len();
    match cells[word.clone()] {
        [.., Cell { c: '.', .. }, Cell { c: '\'', .. }] if is_last => 2,
        // Several full stops, which `set_apart` has made a word of their own.
        [.., Cell { c: '.', .. }, Cell { c: '.', .. }] => 0,
        [ref stem @ .., Cell { c: '.', .. }] if !stem.is_empty() => {
            usize::from(!is_abbreviation(stem, cells.get(word.end)))
        }
        _ => 0,
    }
}

/// Whether the full stop after `stem` stays with it; `next` is the first character of the word that follows.
fn is_abbreviation(stem: &[Cell], next: Option<&Cell>) -> bool {
    let chars = stem.iter().map(|cell| cell.c);
    next.is_some_and(|next| next.is(LOWER))
        || keeps_period(chars.clone())
        || next.is_some_and(|next| next.c.is_ascii_digit()) && keeps_period_before_number(chars.clone())
        || stem.iter().any(|cell| cell.is(ALPHA)) && chars.clone().any(|c| c == '.')
}

/// One token of `cells`, which are not empty.
fn token(cells: &[Cell], block: &str, base: usize) -> Token {
    let (start, end) = (cells[0].start as usize, cells[cells.len() - 1].end as usize);
    let read = cells.iter().map(|cell| cell.c);
    // Comparing bytes is faster, where each character is one.
    let as_written = match end - start == cells.len() {
        true => block.as_bytes()[start..end].iter().zip(read.clone()).all(|(byte, c)| u32::from(*byte) == u32::from(c)),
        false => block[start..end].chars().eq(read.clone()),
    };
    Token {
        start: base + start,
        end: base + end,
        word: (!as_written).then(|| read.collect::<String>().into_boxed_str()),
    }
}
