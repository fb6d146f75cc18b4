//! Turns an array of JSON objects into one object per line. Other JSON stays as it is.

use super::mapped::Rewrite;

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

/// Removes the brackets of an array and the commas between its items, and ends each item with a line end. Line ends between
/// the tokens of an item become spaces.
#[derive(Debug, Default)]
pub(crate) struct Items {
    place: Place,
    /// Brackets and braces that are open in the item.
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl Items {
    fn item_byte(&mut self, byte: u8, out: &mut Vec<u8>) {
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
            _ => {}
        }
        out.push(if matches!(byte, b'\n' | b'\r') { b' ' } else { byte });
        if self.depth == 0 && matches!(byte, b'}' | b']') {
            self.end_item(out);
        }
    }

    fn end_item(&mut self, out: &mut Vec<u8>) {
        out.push(b'\n');
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
            (Place::Start, b'[') => self.place = Place::Opened,
            (Place::Start | Place::Opened | Place::Comma | Place::After | Place::Closed, _) if is_space => {}
            (Place::Opened | Place::After, b']') => self.place = Place::Closed,
            (Place::After, b',') => self.place = Place::Comma,
            (Place::Opened | Place::Comma, first) if !b",]".contains(&first) => {
                self.place = Place::Item;
                self.item_byte(byte, out);
            }
            (Place::Closed, _) => return Err("Json error: something follows the end of the array".to_owned()),
            _ => return Err("Json error: the objects of the array are not separated by single commas".to_owned()),
        }
        Ok(())
    }
}

impl Rewrite for Items {
    fn push(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), String> {
        let mut rest = bytes;
        if self.place == Place::Start {
            let blank = rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
            if rest.get(blank).is_some_and(|byte| *byte != b'[') {
                self.place = Place::Lines;
            } else if blank == rest.len() {
                // Lines are counted.
                out.extend_from_slice(rest);
                rest = &[];
            }
        }
        if self.place == Place::Lines {
            out.extend_from_slice(rest);
            return Ok(());
        }
        rest.iter().try_for_each(|&byte| self.byte(byte, out))
    }

    fn finish(&mut self, _: &mut Vec<u8>) -> Result<(), String> {
        match self.place {
            Place::Start | Place::Lines | Place::Closed => Ok(()),
            _ => Err("Json error: the array does not end: the file is cut off".to_owned()),
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
        let expected = "{\"a\": \"],\\\"[{\", \"b\": [1, {\"c\": 2}]}\n{  \"a\": null  }\n7\n[1]\n\"x,]\"\n";
        let by_byte: Vec<String> = text.chars().map(String::from).collect();
        let by_byte: Vec<&str> = by_byte.iter().map(String::as_str).collect();
        for pieces in [vec![text], by_byte] {
            let found = lines(&pieces).unwrap();
            // White space before the array is no row.
            assert_eq!(found.trim_start(), expected);
        }
        assert_eq!(lines(&["[]"]).unwrap(), "");
        assert_eq!(lines(&["{\"a\": 1}\n[", "2]\n"]).unwrap(), "{\"a\": 1}\n[2]\n");
    }

    #[test]
    fn what_is_no_array() {
        for text in ["[{}", "[{},]", "[,{}]", "[{} {}]", "[{},,{}]", "[{}] {}", "[", "[{\"a\": 1}, {\"a", "[1"] {
            lines(&[text]).unwrap_err();
        }
    }
}
