//! Moses punctuation normalisation: text to cells.
//!
//! Only the rules of the original that can change a token are implemented. The others change white space beside
//! characters that are tokens of their own.

use super::{super::whitespace::is_space, Cell, classes::DIGIT};

/// Appends the cells of `text`.
pub(super) fn normalize(text: &str, cells: &mut Vec<Cell>) {
    let mut reader = Reader { cells, gap: 0, lone_nbsp: None, joined: None, ascii_quote: None, todo: Todo::default() };
    let mut at = 0;
    while let Some(c) = text[at..].chars().next() {
        let letters = text.as_bytes()[at..].iter().take_while(|byte| byte.is_ascii_alphabetic()).count();
        if letters > 0 {
            reader.letters(&text.as_bytes()[at..at + letters], at);
            at += letters;
        } else {
            reader.read(c, at);
            at += c.len_utf8();
        }
    }
    let todo = reader.todo;
    if todo.join_quotes {
        join_quotes(cells);
    }
    if todo.move_quotes || todo.join_quotes {
        move_quotes(cells);
    }
    if todo.drop_controls {
        drop_controls(cells);
    }
    // The rules ignore white space at the beginning.
    if let Some(first) = cells.first_mut() {
        first.gap = 0;
    }
}

/// Steps that are rarely needed and run after all characters have been read.
#[derive(Clone, Copy, Default)]
struct Todo {
    join_quotes: bool,
    move_quotes: bool,
    drop_controls: bool,
}

/// Reads a text character by character.
struct Reader<'a> {
    cells: &'a mut Vec<Cell>,
    /// Number of spaces before the next cell.
    gap: u8,
    /// Place of a no-break space, if it is all that was read since the last cell.
    lone_nbsp: Option<usize>,
    /// The last cell that was joined by a full stop to a digit before it.
    joined: Option<usize>,
    /// The last ASCII apostrophe or backtick that is not part of a pair.
    ascii_quote: Option<usize>,
    todo: Todo,
}

impl Reader<'_> {
    /// ASCII letters, to which no rule applies but to the first.
    fn letters(&mut self, letters: &[u8], at: usize) {
        self.push(char::from(letters[0]), at, 1);
        let others = letters.iter().enumerate().skip(1);
        self.cells.extend(others.map(|(i, &letter)| Cell::new(char::from(letter), at + i, at + i + 1)));
    }

    fn read(&mut self, c: char, at: usize) {
        match c {
            'a'..='z' | 'A'..='Z' => self.push(c, at, 1),
            ' ' => self.space(c, at),
            ',' | '.' => self.stop(c, at, 1),
            '\'' | '`' => self.ascii_quote(at),
            '´' | '‘' | '‚' | '’' => self.apostrophe(at, c.len_utf8()),
            '„' | '“' | '”' | '«' | '»' => self.push('"', at, c.len_utf8()),
            '–' => self.push('-', at, 3),
            '—' => self.spaced_dash(at),
            '…' => (0..3).for_each(|_| self.stop('.', at, 3)),
            '\r' => {}
            _ if is_space(c) => self.space(c, at),
            _ => self.other(c, at),
        }
    }

    fn space(&mut self, c: char, at: usize) {
        self.lone_nbsp = (c == '\u{a0}' && self.gap == 0).then_some(at);
        self.gap = 1;
    }

    fn other(&mut self, c: char, at: usize) {
        self.todo.drop_controls |= c < ' ';
        self.push(c, at, c.len_utf8());
    }

    /// A comma or full stop, which swaps places with a quote before it.
    fn stop(&mut self, c: char, at: usize, len: usize) {
        self.todo.move_quotes |= self.touches('"');
        self.push(c, at, len);
    }

    /// `''` or two backticks are a double quote with spaces around it.
    fn ascii_quote(&mut self, at: usize) {
        let partner = self.ascii_quote.filter(|&quote| self.gap == 0 && quote + 1 == self.cells.len());
        let Some(first) = partner else {
            self.ascii_quote = Some(self.cells.len());
            return self.apostrophe(at, 1);
        };
        let start = self.cells[first].start as usize;
        self.cells[first] = Cell { gap: 1, ..Cell::new('"', start, at + 1) };
        self.ascii_quote = None;
        self.gap = 1;
    }

    /// Any apostrophe or single quote. Two in a row are a double quote, but pairs of [`Self::ascii_quote`] take
    /// precedence: in `’''` the last two are a pair.
    fn apostrophe(&mut self, at: usize, len: usize) {
        self.todo.join_quotes |= self.touches('\'');
        self.push('\'', at, len);
    }

    fn spaced_dash(&mut self, at: usize) {
        self.gap = 1;
        self.push('-', at, 3);
        self.gap = 1;
    }

    /// Whether the last cell is `c`, without white space after it.
    fn touches(&self, c: char) -> bool {
        self.gap == 0 && self.cells.last().is_some_and(|last| last.c == c)
    }

    /// Appends `c` for the `len` bytes from `at` on.
    fn push(&mut self, c: char, at: usize, len: usize) {
        let mut cell = Cell::new(c, at, at + len);
        if let Some(nbsp) = self.lone_nbsp.take() {
            self.join_digits(nbsp, cell.class);
        }
        cell.gap = self.gap;
        self.gap = 0;
        self.cells.push(cell);
    }

    /// Reads a no-break space between two digits as a full stop. A digit is joined on one side only.
    fn join_digits(&mut self, nbsp: usize, next: u8) {
        let last = self.cells.len().checked_sub(1);
        if self.cells.last().is_some_and(|last| last.is(DIGIT)) && next & DIGIT != 0 && self.joined != last {
            self.cells.push(Cell::new('.', nbsp, nbsp + '\u{a0}'.len_utf8()));
            self.gap = 0;
            self.joined = Some(self.cells.len());
        }
    }
}

/// Replaces two apostrophes in a row by one double quote.
fn join_quotes(cells: &mut Vec<Cell>) {
    cells.dedup_by(|next, last| {
        let joins = last.c == '\'' && next.c == '\'' && next.gap == 0;
        if joins {
            *last = Cell { gap: last.gap, ..Cell::new('"', last.start as usize, next.end as usize) };
        }
        joins
    });
}

/// Swaps a double quote with the commas and full stops directly after it: `",` is read as `,"`.
///
/// Only the characters are swapped. The places in the text, and so the tokens, stay in order.
fn move_quotes(cells: &mut [Cell]) {
    let mut from = 0;
    while from < cells.len() {
        if cells[from].c != '"' {
            from += 1;
            continue;
        }
        let run = 1 + cells[from + 1..].iter().take_while(|c| c.gap == 0 && matches!(c.c, ',' | '.')).count();
        if run > 1 {
            move_quote(&mut cells[from..from + run]);
        }
        from += run;
    }
}

/// Moves the first cell, a quote, to the end. Each other cell gets the place before its own; cells that were made from
/// one character, such as an ellipsis, keep a common place.
fn move_quote(cells: &mut [Cell]) {
    let (quote, gap) = (cells[0], cells[0].gap);
    let (mut place, mut own) = (quote.place(), cells[1].place());
    for i in 1..cells.len() {
        if cells[i].place() != own {
            (place, own) = (own, cells[i].place());
        }
        cells[i - 1] = Cell { start: place.0, end: place.1, ..cells[i] };
    }
    cells[0].gap = gap;
    cells[cells.len() - 1] = Cell { start: own.0, end: own.1, gap: 0, ..quote };
}

/// Removes ASCII control characters without leaving a space.
fn drop_controls(cells: &mut Vec<Cell>) {
    let mut gap = 0;
    cells.retain_mut(|cell| {
        cell.gap = 2.min(cell.gap + gap);
        gap = if cell.c < ' ' { cell.gap } else { 0 };
        cell.c >= ' '
    });
}
