//! Divides CSV and JSON into rows before they are decoded, and leaves out rows that are not valid.
//!
//! A malformed row is replaced by one in which every value is NULL, and noted. So rows keep their numbers, whatever a job
//! does with such rows, and resumes at the same ones. Decoders see complete rows only: what was read of standard input can
//! be decoded at any time.

use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;
use serde::de::IgnoredAny;

use super::{csv::Quotes, decode::MAX_ROW_BYTES, json_array::Shape, mapped::Rewrite, reading::Cells};

/// A row that was left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Malformed {
    /// The row within its file, from 0.
    pub row: u64,
    /// The line of the file where it begins, from 1.
    pub line: u64,
    /// What is wrong, without its text.
    pub reason: String,
}

/// Malformed rows that were read and not passed on yet.
pub(super) type Noted = Arc<Mutex<VecDeque<Malformed>>>;

/// How rows are told from each other.
#[derive(Debug)]
enum Grammar {
    /// A row is a record of RFC 4180.
    Cells { cells: Cells, quotes: Quotes, count: usize, expected: Option<usize> },
    /// A row is a line with an object, or an element of an array.
    Objects(Shape),
}

/// Passes complete rows on.
#[derive(Debug)]
pub(super) struct Sieve {
    grammar: Grammar,
    /// Where malformed rows are noted; `None`: they are passed on, and the decoder reports the first one.
    noted: Option<Noted>,
    /// The row that is being read.
    open: Vec<u8>,
    /// Complete rows so far.
    rows: u64,
    /// Line ends before the open row.
    lines: u64,
}

impl Sieve {
    pub(super) fn of_cells(cells: Cells, noted: Option<Noted>) -> Self {
        Self::new(Grammar::Cells { cells, quotes: Quotes::default(), count: 1, expected: None }, noted)
    }

    pub(super) fn of_objects(shape: Shape, noted: Option<Noted>) -> Self {
        Self::new(Grammar::Objects(shape), noted)
    }

    fn new(grammar: Grammar, noted: Option<Noted>) -> Self {
        Self { grammar, noted, open: Vec::new(), rows: 0, lines: 0 }
    }

    /// Length of `bytes` up to and with the first end of a row; `None` when no row ends.
    fn row_end(&mut self, bytes: &[u8]) -> Option<usize> {
        let Grammar::Cells { cells, quotes, count, .. } = &mut self.grammar else {
            return bytes.iter().position(|&byte| byte == b'\n').map(|at| at + 1);
        };
        let end = bytes.iter().position(|&byte| {
            *quotes = quotes.after(byte, cells.delimiter);
            let is_delimiter = *quotes == Quotes::Start && byte == cells.delimiter;
            *count += usize::from(is_delimiter);
            *quotes == Quotes::Start && !is_delimiter
        });
        end.map(|at| at + 1)
    }

    /// Passes the open row on.
    fn close(&mut self, out: &mut Vec<u8>) {
        let before = self.lines;
        self.lines += self.open.iter().filter(|&&byte| byte == b'\n').count() as u64;
        let found = self.grammar.check(&self.open);
        let reason = match (found, &self.noted) {
            (Row::None, _) => None,
            (Row::Malformed(reason), Some(_)) => Some(reason),
            _ => {
                self.rows += 1;
                None
            }
        };
        match (reason, &self.noted) {
            (Some(reason), Some(noted)) => {
                let (line, reason) = self.grammar.place(self.rows, before, reason);
                noted.lock().push_back(Malformed { row: self.rows, line, reason });
                self.rows += 1;
                self.grammar.placeholder(out);
            }
            _ => out.extend_from_slice(&self.open),
        }
        self.open.clear();
    }
}

/// What lies between two ends of rows.
enum Row {
    /// No row: an empty line, or the names of the columns.
    None,
    Valid,
    Malformed(String),
}

impl Grammar {
    fn check(&mut self, row: &[u8]) -> Row {
        match self {
            Self::Cells { cells, count, expected, .. } => {
                let found = std::mem::replace(count, 1);
                if row.iter().all(|byte| matches!(byte, b'\n' | b'\r')) {
                    return Row::None;
                }
                let Some(expected) = *expected else {
                    *expected = Some(found);
                    return if cells.header { Row::None } else { Row::Valid };
                };
                match () {
                    () if found != expected => Row::Malformed(format!("{found} cells instead of {expected}")),
                    () if std::str::from_utf8(row).is_err() => Row::Malformed("not UTF-8".to_owned()),
                    () => Row::Valid,
                }
            }
            Self::Objects(shape) => match row.trim_ascii() {
                [] => Row::None,
                row => object_or_why(row, shape.unit()).map_or_else(Row::Malformed, |()| Row::Valid),
            },
        }
    }

    /// The line of the file in which a row begins, and what is wrong with it. The element of an array is named, too.
    fn place(&self, rows: u64, line_ends: u64, reason: String) -> (u64, String) {
        match self {
            Self::Objects(shape) if shape.is_array() => {
                (shape.line(rows, line_ends), format!("element {} of the array: {reason}", rows + 1))
            }
            _ => (line_ends + 1, reason),
        }
    }

    /// A row of NULLs.
    fn placeholder(&self, out: &mut Vec<u8>) {
        match self {
            Self::Objects(_) => out.extend_from_slice(b"{}\n"),
            // An empty line would be no row.
            Self::Cells { expected: None | Some(0 | 1), .. } => out.extend_from_slice(b"\"\"\n"),
            Self::Cells { cells, expected: Some(expected), .. } => {
                out.extend(std::iter::repeat_n(cells.delimiter, expected - 1));
                out.push(b'\n');
            }
        }
    }
}

fn object_or_why(row: &[u8], unit: &str) -> Result<(), String> {
    let row = std::str::from_utf8(row).map_err(|_| "not UTF-8".to_owned())?;
    match serde_json::from_str::<IgnoredAny>(row) {
        Ok(_) if row.starts_with('{') => Ok(()),
        Ok(_) => Err("not a JSON object".to_owned()),
        Err(error) => Err(format!("not valid JSON at byte {} of the {unit}", error.column())),
    }
}

impl Rewrite for Sieve {
    fn push(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), String> {
        let mut rest = bytes;
        while let Some(end) = self.row_end(rest) {
            self.open.extend_from_slice(&rest[..end]);
            self.close(out);
            rest = &rest[end..];
        }
        self.open.extend_from_slice(rest);
        match self.open.len() > MAX_ROW_BYTES {
            true => Err("the next row has more than 256 MiB; is a quote or bracket not closed?".to_owned()),
            false => Ok(()),
        }
    }

    fn finish(&mut self, out: &mut Vec<u8>) -> Result<(), String> {
        let is_inside = matches!(&self.grammar, Grammar::Cells { quotes: Quotes::Inside, .. });
        match self.open.is_empty() {
            true => {}
            // The rest of the file would be one malformed row; the decoder says what is wrong.
            false if is_inside => out.append(&mut self.open),
            false => self.close(out),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CSV: Cells = Cells { delimiter: b',', header: true };

    fn sifted(mut sieve: Sieve, pieces: &[&[u8]]) -> String {
        let mut out = Vec::new();
        for piece in pieces {
            sieve.push(piece, &mut out).unwrap();
        }
        sieve.finish(&mut out).unwrap();
        String::from_utf8_lossy(&out).into_owned()
    }

    fn check(sieve: impl Fn(Noted) -> Sieve, text: &[u8], expected: &str, noted: &[(u64, u64, &str)]) {
        let pieces: Vec<&[u8]> = text.chunks(1).collect();
        for pieces in [vec![text], pieces] {
            let found = Noted::default();
            assert_eq!(sifted(sieve(Arc::clone(&found)), &pieces), expected);
            let found: Vec<_> = found.lock().iter().map(|m| (m.row, m.line, m.reason.clone())).collect();
            let noted: Vec<_> = noted.iter().map(|(row, line, reason)| (*row, *line, (*reason).to_owned())).collect();
            assert_eq!(found, noted);
        }
    }

    /// Rows and lines counted by hand.
    #[test]
    fn rows_of_cells() {
        check(
            |noted| Sieve::of_cells(CSV, Some(noted)),
            b"id,text\n1,\"a, \"\"b\"\"\nc\"\n\n2\n3,x\r\n4,x,y\n\xff,x\n5,z",
            "id,text\n1,\"a, \"\"b\"\"\nc\"\n\n,\n3,x\r\n,\n,\n5,z",
            &[(1, 5, "1 cells instead of 2"), (3, 7, "3 cells instead of 2"), (4, 8, "not UTF-8")],
        );
        let plain = Cells { delimiter: b';', header: false };
        let expected = "a;b,c\n;\nd;e\n";
        check(
            |noted| Sieve::of_cells(plain, Some(noted)),
            b"a;b,c\nx,y\nd;e\n",
            expected,
            &[(1, 2, "1 cells instead of 2")],
        );
        let one = "text\n\"\"\nx\n";
        check(|noted| Sieve::of_cells(CSV, Some(noted)), b"text\na,b\nx\n", one, &[(0, 2, "2 cells instead of 1")]);
        // The decoder says that the quotation does not end.
        check(|noted| Sieve::of_cells(CSV, Some(noted)), b"a,b\n1,\"x\n2,y\n", "a,b\n1,\"x\n2,y\n", &[]);
    }

    #[test]
    fn rows_of_objects() {
        check(
            |noted| Sieve::of_objects(Shape::default(), Some(noted)),
            b"{\"a\": \"\\ud800\"}\n\n{\"a\":\n[1]\n {\"a\": 1e400}\n\xff\n{} {}\n{\"a\": 2}",
            "{\"a\": \"\\ud800\"}\n\n{}\n{}\n {\"a\": 1e400}\n{}\n{}\n{\"a\": 2}",
            &[
                (1, 3, "not valid JSON at byte 5 of the line"),
                (2, 4, "not a JSON object"),
                (4, 6, "not UTF-8"),
                (5, 7, "not valid JSON at byte 4 of the line"),
            ],
        );
    }

    /// What a pipe never ends is not collected for ever.
    #[test]
    fn a_row_has_a_limit() {
        let block = vec![b'a'; 64 << 20];
        for mut sieve in [Sieve::of_objects(Shape::default(), None), Sieve::of_cells(CSV, None)] {
            let mut out = Vec::new();
            let pushed: Vec<bool> = (0..5).map(|_| sieve.push(&block, &mut out).is_ok()).collect();
            assert_eq!((pushed, out.len()), (vec![true, true, true, true, false], 0));
        }
    }

    #[test]
    fn without_a_place_to_note_them_rows_pass() {
        let text: &[u8] = b"a,b\n1\n2,3";
        assert_eq!(sifted(Sieve::of_cells(CSV, None), &[text]).as_bytes(), text);
        assert_eq!(sifted(Sieve::of_objects(Shape::default(), None), &[b"{\n", b"[1]"]), "{\n[1]");
        // Only complete rows are passed on.
        let (mut sieve, mut out) = (Sieve::of_objects(Shape::default(), None), Vec::new());
        sieve.push(b"{\"a\": 1}\n{\"a\"", &mut out).unwrap();
        assert_eq!(out, b"{\"a\": 1}\n");
    }
}
