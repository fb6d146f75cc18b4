//! What a reader says about a broken row, without what stands in the row: texts of users belong in no message.

use arrow::error::ArrowError;

/// Most characters of a reason.
const LONGEST: usize = 300;

/// Phrases after which Arrow's readers quote data, and what the quotation ends with; nothing: the end of the message.
const QUOTES: [(&str, &str); 7] = [
    (" Row data: ", ""),
    ("while parsing value '", "' as type"),
    ("failed to parse \"", "\" as "),
    ("Failed to parse \"", "\" as "),
    ("Cannot cast string '", "' to value of"),
    ("Error parsing timestamp from '", "': "),
    (" got ", ""),
];

/// The row that arrow-csv means: it counts records, the header as the first, and calls them lines.
pub(super) fn csv_row(error: &ArrowError) -> Option<u64> {
    let ArrowError::CsvError(reason) = error else { return None };
    let (_, digits, _) = around_line(reason)?;
    digits.parse::<u64>().ok()?.checked_sub(2)
}

/// A message before, in and after its number of a line.
fn around_line(reason: &str) -> Option<(&str, &str, &str)> {
    let (before, rest) = reason.split_once(" for line ")?;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    Some((before, &rest[..end], &rest[end..]))
}

/// `reason` without quoted data, in one line, and not longer than people read.
pub(crate) fn without_data(reason: &str) -> String {
    // Such a line is a record; `csv_row` says which row that is.
    let mut text = match around_line(reason) {
        Some((before, _, after)) => format!("{before}{}", after.replacen(" and field", " in field", 1)),
        None => reason.to_owned(),
    };
    for (before, after) in QUOTES {
        let Some(at) = text.find(before) else { continue };
        let data = at + before.len();
        match (after, text[data..].rfind(after)) {
            ("", _) if is_count(&text[data..]) => {}
            ("", _) => text.truncate(at),
            (_, Some(end)) => text.replace_range(data..data + end, "\u{2026}"),
            // The message was cut before the quotation ended.
            (_, None) => text.truncate(at),
        }
    }
    let mut line: String = text.chars().take(LONGEST).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.chars().nth(LONGEST).is_some() {
        line.push('\u{2026}');
    }
    line
}

/// `expected 2 got 3` counts fields and quotes nothing.
fn is_count(rest: &str) -> bool {
    rest.starts_with(|c: char| c.is_ascii_digit()) || rest.starts_with("more than")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The messages are those of arrow-csv, arrow-json and arrow-cast 59.3.
    #[test]
    fn data_are_left_out_and_the_rest_stays() {
        let cases = [
            (
                "Parser error: Error while parsing value 'A17' as type 'Int64' for column 0 at line 1001. Row data: '[A17,my secret]'",
                "Parser error: Error while parsing value '\u{2026}' as type 'Int64' for column 0 at line 1001.",
            ),
            (
                "Parser error: Error while parsing value 'it's' as type 'x' for column 0 at line 2. Row data: '[it's' as type]'",
                "Parser error: Error while parsing value '\u{2026}' as type 'x' for column 0 at line 2.",
            ),
            (
                "Csv error: incorrect number of fields for line 3, expected 2 got more than 2",
                "Csv error: incorrect number of fields, expected 2 got more than 2",
            ),
            (
                "Csv error: Encountered invalid UTF-8 data for line 3 and field 2",
                "Csv error: Encountered invalid UTF-8 data in field 2",
            ),
            (
                "Parser error: Error parsing timestamp from 'my: secret': error parsing date",
                "Parser error: Error parsing timestamp from '\u{2026}': error parsing date",
            ),
            (
                "Json error: whilst decoding field 'id': expected i64 got \"my secret\"",
                "Json error: whilst decoding field 'id': expected i64",
            ),
            (
                "Json error: whilst decoding field 'id': failed to parse \"my \" as x\" as Int64",
                "Json error: whilst decoding field 'id': failed to parse \"\u{2026}\" as Int64",
            ),
            ("two\nlines", "two lines"),
        ];
        for (reason, expected) in cases {
            assert_eq!(without_data(reason), expected);
        }
        assert_eq!(without_data(&"x".repeat(1000)).chars().count(), LONGEST + 1);
    }
}
