//! Where the records of a CSV file end, and whether a quotation is open, for every dialect that DataFusion reads. Its
//! reader does not tell: it returns the rest of a file after an open quotation mark as one cell.

use datafusion::{common::config::CsvOptions, datasource::physical_plan::CsvSource};

/// A state machine over the bytes of a file, as that of the reader (csv-core).
#[derive(Debug, Clone)]
pub(super) struct Cells {
    delimiter: u8,
    quote: u8,
    escape: Option<u8>,
    comment: Option<u8>,
    /// Ends a record; `\n` and `\r` if it is `None`.
    terminator: Option<u8>,
    /// Records of the header.
    header: u64,
    state: State,
    /// Complete records.
    records: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    RecordStart,
    CellStart,
    /// In a cell that does not begin with a quotation mark: marks in it are ordinary characters.
    Plain,
    /// In a cell that begins with a quotation mark.
    Quoted,
    /// After the escape character in such a cell.
    Escaped,
    /// After a mark in such a cell: its end, or the first of two that stand for one.
    Closed,
    Comment,
}

impl Cells {
    pub(super) fn new(options: &CsvOptions, has_header: bool) -> Self {
        Self {
            delimiter: options.delimiter,
            quote: options.quote,
            escape: options.escape,
            comment: options.comment,
            terminator: options.terminator,
            header: has_header.into(),
            state: State::RecordStart,
            records: 0,
        }
    }

    /// The dialect of a scan.
    pub(super) fn of_source(source: &CsvSource) -> Self {
        let dialect = CsvOptions {
            delimiter: source.delimiter(),
            quote: source.quote(),
            escape: source.escape(),
            comment: source.comment(),
            terminator: source.terminator(),
            ..CsvOptions::default()
        };
        Self::new(&dialect, source.has_header())
    }

    /// Reads bytes until `records` records are complete; returns how many bytes it read.
    pub(super) fn read_until(&mut self, records: u64, bytes: &[u8]) -> usize {
        for (at, &byte) in bytes.iter().enumerate() {
            if self.records >= records {
                return at;
            }
            self.state = self.after(byte);
        }
        bytes.len()
    }

    pub(super) fn read(&mut self, bytes: &[u8]) {
        self.read_until(u64::MAX, bytes);
    }

    /// Complete records, with the header.
    pub(super) fn records(&self) -> u64 {
        self.records
    }

    /// Complete rows, if the bytes end inside a quotation.
    pub(super) fn rows_before_open_quotation(&self) -> Option<u64> {
        let is_open = matches!(self.state, State::Quoted | State::Escaped);
        is_open.then(|| self.records.saturating_sub(self.header))
    }

    fn ends_record(&self, byte: u8) -> bool {
        self.terminator.map_or(matches!(byte, b'\n' | b'\r'), |terminator| byte == terminator)
    }

    fn after(&mut self, byte: u8) -> State {
        match self.state {
            State::Quoted if byte == self.quote => State::Closed,
            State::Quoted if self.escape == Some(byte) => State::Escaped,
            State::Quoted | State::Escaped => State::Quoted,
            State::Comment if byte == b'\n' => State::RecordStart,
            State::Comment => State::Comment,
            // Empty lines are no records.
            State::RecordStart if self.ends_record(byte) => State::RecordStart,
            State::RecordStart if self.comment == Some(byte) => State::Comment,
            State::RecordStart | State::CellStart | State::Closed if byte == self.quote => State::Quoted,
            _ if byte == self.delimiter => State::CellStart,
            _ if self.ends_record(byte) => {
                self.records += 1;
                State::RecordStart
            }
            _ => State::Plain,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells(text: &str, change: impl Fn(CsvOptions) -> CsvOptions) -> Cells {
        let mut cells = Cells::new(&change(CsvOptions::default()), true);
        text.bytes().for_each(|byte| cells.read(&[byte]));
        cells
    }

    /// By RFC 4180: a mark inside a cell that does not begin with one is an ordinary character.
    #[test]
    fn quotations_that_are_closed_and_one_that_is_not() {
        for (text, records) in [
            ("a,b\n", 1),
            ("a\r\n\r\n\"b\nc\"\r\n", 2),
            ("\"a \"\" b\"\n", 1),
            ("5\" disk,x\n", 1),
            ("\"\"\n\"two\nlines\"", 1),
            ("", 0),
        ] {
            let cells = cells(text, |options| options);
            assert_eq!((cells.records(), cells.rows_before_open_quotation()), (records, None), "{text:?}");
        }
        for (text, rows) in [("\"", 0), ("a\n1,\"b\nc,d\n", 0), ("a\n1\n\"a\"\"\n", 1), ("\"\"\"y", 0)] {
            assert_eq!(cells(text, |options| options).rows_before_open_quotation(), Some(rows), "{text:?}");
        }
    }

    #[test]
    fn every_option_of_the_dialect_counts() {
        let semicolon = |options: CsvOptions| CsvOptions { delimiter: b';', ..options };
        assert_eq!(cells("a;\"b", semicolon).rows_before_open_quotation(), Some(0));
        assert_eq!(cells("a,\"b\n", semicolon).rows_before_open_quotation(), None);
        let apostrophe = |options: CsvOptions| CsvOptions { quote: b'\'', ..options };
        assert_eq!(cells("'a\n\"b", apostrophe).rows_before_open_quotation(), Some(0));
        let escape = |options: CsvOptions| CsvOptions { escape: Some(b'\\'), ..options };
        assert_eq!(cells(r#""a\"b""#, escape).rows_before_open_quotation(), None);
        assert_eq!(cells(r#""a\""#, escape).rows_before_open_quotation(), Some(0));
        let comment = |options: CsvOptions| CsvOptions { comment: Some(b'#'), ..options };
        assert_eq!(cells("# \"b\nc\n", comment).rows_before_open_quotation(), None);
        let terminator = |options: CsvOptions| CsvOptions { terminator: Some(b'|'), ..options };
        assert_eq!(cells("a\nb|c|", terminator).records(), 2);
    }

    #[test]
    fn a_prefix_ends_with_a_record() {
        let text = b"a,b\n1,\"x\ny\"\n2,z\n";
        let mut cells = Cells::new(&CsvOptions::default(), true);
        assert_eq!((cells.read_until(2, text), cells.records()), (12, 2));
    }
}
