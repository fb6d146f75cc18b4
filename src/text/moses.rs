//! The Moses tokenizer for English, as the published weights were trained with it.
//!
//! `normalize` turns the sentence into [`Cell`]s, characters with their place in the text and the white space before
//! them. All further rules only put spaces between cells; what then lies between two spaces is a token, save that a
//! full stop at its end may come off. The rules are those of the Moses scripts in the form of the Python package
//! `sacremoses`, and so are their quirks: `docs/tokenizer.md`.
//!
//! Every step is one pass over the cells, so time is linear, whatever the text.

mod classes;
mod normalize;
mod prefixes;

use std::ops::Range;

use self::{
    classes::{ALPHA, APART, LOWER, NUMBER, class},
    normalize::normalize,
    prefixes::{keeps_period, keeps_period_before_number},
};
use super::{LONGEST_WORD, Token, cut_off};

/// A character as the model may read it.
#[derive(Clone, Copy, Debug)]
struct Cell {
    c: char,
    /// Its place in the block of text that is read; several cells have the same one if one character became several.
    start: u32,
    end: u32,
    /// Spaces before it. Whether there is one or more matters to one rule, [`apostrophes`].
    gap: u8,
    /// Bits of [`classes`].
    class: u8,
}

impl Cell {
    /// `end` is at most a block's length, hence fits.
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

/// The tokenizer; only its buffer lives from one sentence to the next.
#[derive(Debug, Default)]
pub(super) struct Moses {
    cells: Vec<Cell>,
}

impl Moses {
    /// Appends the tokens of the sentence `text[range]`.
    ///
    /// A sentence longer than [`LONGEST_WORD`] is read in blocks of that size, cut at white space where there is any.
    pub(super) fn tokenize(&mut self, text: &str, range: Range<usize>, out: &mut Vec<Token>) {
        let mut from = range.start;
        while from < range.end {
            let block = &text[from..range.end];
            let block = &block[..cut_off(block, LONGEST_WORD).at];
            self.read(block);
            emit(&self.cells, block, from, out);
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

/// Space around every symbol that is a token of its own, and around two or more full stops in a row.
fn set_apart(cells: &mut [Cell]) {
    let mut owed = 0;
    let mut i = 0;
    while i < cells.len() {
        cells[i].gap += owed;
        owed = 0;
        let dots = if cells[i].c == '.' { dots_at(cells, i) } else { 0 };
        if dots > 1 || cells[i].is(APART) {
            cells[i].gap += 1;
            owed = 1;
        }
        i += dots.max(1);
    }
}

/// How many full stops in a row begin at cell `i`, which is one.
fn dots_at(cells: &[Cell], i: usize) -> usize {
    1 + cells[i + 1..].iter().take_while(|cell| cell.c == '.' && cell.gap == 0).count()
}

/// Space around a comma unless numbers touch it on both sides.
///
/// The original pairs a comma with the character before it, so that of two commas in a row the second one pairs with
/// nothing, and neither does a comma at the very beginning; those are set apart only by what follows.
fn commas(cells: &mut [Cell]) {
    let mut taken = None;
    for i in 0..cells.len() {
        if cells[i].c != ',' {
            continue;
        }
        let after_number = i > 0 && cells[i].gap == 0 && cells[i - 1].is(NUMBER);
        let pairs = i > 0 && !after_number && taken != Some(i);
        let ends = match cells.get(i + 1) {
            Some(next) => next.gap > 0 || !next.is(NUMBER),
            None => after_number,
        };
        if pairs && cells.get(i + 1).is_some_and(|next| next.gap == 0) {
            taken = Some(i + 1);
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

/// A place that a rule for apostrophes reads: a cell's own is odd, that of the white space before it is one less.
type Place = usize;

/// Space before an apostrophe, and after it unless a contraction or possessive begins there: `it 's`, `' tis`.
///
/// Five rules, each over all apostrophes before the next. A rule reads the character before and the one after, and what
/// was read as the one after cannot be read again as the one before: `rock'n'roll` is `rock 'n'roll`. An apostrophe
/// that begins or ends the sentence has no such neighbour and stays where it is.
fn apostrophes(cells: &mut [Cell]) {
    let found: Vec<usize> = (0..cells.len()).filter(|&i| cells[i].c == '\'').collect();
    for rule in RULES {
        let mut free = 0;
        for &i in &found {
            let (Some((before, place)), Some(after)) = (before(cells, i), after(cells, i)) else { continue };
            if place < free || !(rule.applies)(before, after) {
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

/// A character beside an apostrophe; white space is a space of no class.
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

/// The character before cell `i`, and its place.
fn before(cells: &[Cell], i: usize) -> Option<(Neighbour, Place)> {
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

/// The first place that is free once the first character from the gap before cell `i` on has been read. Of two spaces
/// the second one is still free.
fn free_after(cells: &[Cell], i: usize) -> Place {
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

/// How many characters at the end of a word are tokens of their own: a full stop, or at the end of a sentence `.'`.
fn detached(cells: &[Cell], word: Range<usize>) -> usize {
    let is_last = word.end == cells.len();
    match cells[word.clone()] {
        [.., Cell { c: '.', .. }, Cell { c: '\'', .. }] if is_last => 2,
        // Full stops in a row, which are a word of their own since `set_apart`.
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
    let as_written = block[start..end].chars().eq(read.clone());
    Token {
        start: base + start,
        end: base + end,
        word: (!as_written).then(|| read.collect::<String>().into_boxed_str()),
    }
}
