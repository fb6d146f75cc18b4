//! Turns an array of JSON objects into one object per line. Other JSON stays as it is.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use super::mapped::Rewrite;

/// Whether a text of JSON is an array, which is known once its first bytes were read. Clones are about the same text.
#[derive(Debug, Clone, Default)]
pub(crate) struct Shape(Arc<AtomicBool>);

impl Shape {
    fn set_array(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_array(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// The number of the file's line in which a row begins, from 1: the row after `rows` others and `line_ends` in what
    /// [`Items`] returned.
    pub(crate) fn line(&self, rows: u64, line_ends: u64) -> u64 {
        // Each element has a line end that is not in the file.
        1 + if self.is_array() { line_ends.saturating_sub(rows) } else { line_ends }
    }

    /// The place of that row, for messages.
    pub(crate) fn place(&self, rows: u64, line_ends: u64) -> String {
        let line = self.line(rows, line_ends);
        match self.is_array() {
            true => format!("element {} of the array, in line {line} of the file", rows + 1),
            false => format!("line {line} of the file"),
        }
    }

    /// What a row is, in messages about its bytes.
    pub(crate) fn unit(&self) -> &'static str {
        if self.is_array() { "element" } else { "line" }
    }
}

const COMMAS: &str = "the objects of the array are not separated by single commas";
const CUT_OFF: &str = "the array does not end: the file is cut off";
const FOLLOWED: &str = "something follows the end of the array";

/// Stands for a line end in a string, so that it is refused as JSON. Decoders take control characters, but no such escape.
const LINE_END: &[u8] = b"\\\x0b";

/// Whether a reason is that the brackets and commas are not those of an array.
pub(super) fn is_broken(reason: &str) -> bool {
    [COMMAS, CUT_OFF, FOLLOWED].iter().any(|what| reason.ends_with(what))
}

/// Where the next byte is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Place {
    /// Before the first byte that is no white space.
    #[default]
    Start,
    /// In a file that does not begin with a bracket.
    Lines,
    /// After the opening bracket.
    Opened,
    /// After a comma between items.
    Comma,
    /// In an item.
    Item,
    /// After an item.
    After,
    /// After the closing bracket.
    Closed,
}

/// Removes the brackets of an array and the commas between its items, and ends each item with a line end. Line ends in an
/// item become spaces, in strings, where JSON has none, an invalid escape. They follow it as empty lines, so that the lines of
/// the file can be counted.
#[derive(Debug, Default)]
pub(crate) struct Items {
    shape: Shape,
    place: Place,
    /// Brackets and braces that are open in the item.
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// Line ends in the item.
    inside: usize,
    /// Items so far, with the open one.
    items: u64,
    /// Line ends of the file so far.
    lines: u64,
}

impl Items {
    /// Notes in `shape` whether the text is an array.
    pub(crate) fn new(shape: Shape) -> Self {
        Self { shape, ..Self::default() }
    }

    fn item_byte(&mut self, byte: u8, out: &mut Vec<u8>) {
        if self.in_string && byte == b'\n' {
            out.extend_from_slice(if self.escaped { &LINE_END[1..] } else { LINE_END });
            (self.escaped, self.inside) = (false, self.inside + 1);
            return;
        }
        if self.in_string {
            out.push(byte);
            self.in_string = self.escaped || byte != b'"';
            self.escaped = !self.escaped && byte == b'\\';
            return;
        }
        match byte {
            b'"' => self.in_string = true,
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => self.depth = self.depth.saturating_sub(1),
            b'\n' => self.inside += 1,
            _ => {}
        }
        out.push(if matches!(byte, b'\n' | b'\r') { b' ' } else { byte });
        if self.depth == 0 && matches!(byte, b'}' | b']') {
            self.end_item(out);
        }
    }

    fn begin_item(&mut self, byte: u8, out: &mut Vec<u8>) {
        self.place = Place::Item;
        self.items += 1;
        self.item_byte(byte, out);
    }

    fn end_item(&mut self, out: &mut Vec<u8>) {
        out.extend(std::iter::repeat_n(b'\n', 1 + std::mem::take(&mut self.inside)));
        self.place = Place::After;
    }

    fn byte(&mut self, byte: u8, out: &mut Vec<u8>) -> Result<(), String> {
        let is_space = byte.is_ascii_whitespace();
        match (self.place, byte) {
            (Place::Item, b',' | b']') if self.depth == 0 && !self.in_string => {
                // A number or a word ends here; that it is no object is said where lines are parsed.
                self.end_item(out);
                return self.byte(byte, out);
            }
            (Place::Item, _) => self.item_byte(byte, out),
            (Place::Start, b'[') => {
                self.shape.set_array();
                self.place = Place::Opened;
            }
            (Place::Start | Place::Opened | Place::Comma | Place::After | Place::Closed, b'\n') => out.push(b'\n'),
            (Place::Start | Place::Opened | Place::Comma | Place::After | Place::Closed, _) if is_space => {}
            (Place::Opened | Place::After, b']') => self.place = Place::Closed,
            (Place::After, b',') => self.place = Place::Comma,
            (Place::Opened | Place::Comma, first) if !b",]".contains(&first) => self.begin_item(byte, out),
            (Place::Closed, _) => return Err(self.wrong(FOLLOWED)),
            _ => return Err(self.wrong(COMMAS)),
        }
        self.lines += u64::from(byte == b'\n');
        Ok(())
    }

    /// Why the array is none, and where.
    fn wrong(&self, what: &str) -> String {
        let element = match (self.place, self.items) {
            (_, 0) => String::new(),
            (Place::Item, items) => format!(", in element {items} of the array"),
            (_, items) => format!(", after element {items} of the array"),
        };
        format!("Json error: line {} of the file{element}: {what}", self.lines + 1)
    }
}

impl Rewrite for Items {
    fn push(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), String> {
        if self.place == Place::Start
            && let Some(first) = bytes.iter().find(|byte| !byte.is_ascii_whitespace())
            && *first != b'['
        {
            self.place = Place::Lines;
        }
        if self.place == Place::Lines {
            out.extend_from_slice(bytes);
            return Ok(());
        }
        bytes.iter().try_for_each(|&byte| self.byte(byte, out))
    }

    fn finish(&mut self, _: &mut Vec<u8>) -> Result<(), String> {
        match self.place {
            Place::Start | Place::Lines | Place::Closed => Ok(()),
            _ => Err(self.wrong(CUT_OFF)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(pieces: &[&str]) -> Result<String, String> {
        let (mut items, mut out) = (Items::default(), Vec::new());
        pieces.iter().try_for_each(|piece| items.push(piece.as_bytes(), &mut out))?;
        items.finish(&mut out)?;
        Ok(String::from_utf8(out).unwrap())
    }

    #[test]
    fn items_become_lines_however_they_are_cut() {
        let text = "\n [ {\"a\": \"],\\\"[{\", \"b\": [1, {\"c\": 2}]},\n  {\n \"a\": null\r\n}, 7, [1], \"x,]\"]\n";
        // Each item in a line, then an empty line for each line end in the item and after it.
        let expected = "{\"a\": \"],\\\"[{\", \"b\": [1, {\"c\": 2}]}\n\n{  \"a\": null  }\n\n\n7\n[1]\n\"x,]\"\n\n";
        let by_byte: Vec<String> = text.chars().map(String::from).collect();
        let by_byte: Vec<&str> = by_byte.iter().map(String::as_str).collect();
        for pieces in [vec![text], by_byte] {
            let found = lines(&pieces).unwrap();
            assert_eq!(found.trim_start(), expected);
            // Lines are counted: one for each of the five items, and those of the text.
            assert_eq!(found.matches('\n').count(), 5 + text.matches('\n').count());
        }
        assert_eq!(lines(&["[]"]).unwrap(), "");
        // What was escaped is none any more.
        assert_eq!(lines(&["[\"a\nb\\\nc\"]"]).unwrap(), "\"a\\\u{b}b\\\u{b}c\"\n\n\n");
        assert_eq!(lines(&["{\"a\": 1}\n[", "2]\n"]).unwrap(), "{\"a\": 1}\n[2]\n");
    }

    #[test]
    fn what_is_no_array() {
        for (text, place, what) in [
            ("[{}\n", "2 of the file, after element 1 of the array", CUT_OFF),
            ("[{},\n\n]", "3 of the file, after element 1 of the array", COMMAS),
            ("[,{}]", "1 of the file", COMMAS),
            ("[{}\n{}]", "2 of the file, after element 1 of the array", COMMAS),
            ("[{},\n{},,{}]", "2 of the file, after element 2 of the array", COMMAS),
            ("\n[{}]\n\n{}", "4 of the file, after element 1 of the array", FOLLOWED),
            ("\n[", "2 of the file", CUT_OFF),
            ("[{\"a\": 1}, {\"a", "1 of the file, in element 2 of the array", CUT_OFF),
            ("[1", "1 of the file, in element 1 of the array", CUT_OFF),
        ] {
            assert_eq!(lines(&[text]).unwrap_err(), format!("Json error: line {place}: {what}"), "{text}");
        }
    }
}
