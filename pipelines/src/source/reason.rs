//! Why a row cannot be read, without the row's data: user text belongs in no message.
//!
//! Readers quote what they cannot read, in many ways. So a reader's message is shown only if it matches one of the
//! [`KNOWN`] patterns, whose quotations are replaced; anything else is reduced to the kind of the error.

use std::fmt;

use arrow::error::ArrowError;
use parquet::errors::ParquetError;

/// Maximum number of characters of a reason.
const MAX_CHARS: usize = 300;
/// Longer messages quote long cells; matching them takes time, so only the beginning is matched.
const MAX_MATCHED_BYTES: usize = 16 << 10;

/// Why a file or a row cannot be read, without data.
#[derive(Debug)]
pub(crate) struct Reason(String);

impl From<&str> for Reason {
    /// A message of this crate, without data.
    fn from(own: &str) -> Self {
        Self(own.to_owned())
    }
}

impl From<String> for Reason {
    /// A message of this crate, without data.
    fn from(own: String) -> Self {
        Self(own)
    }
}

impl From<ArrowError> for Reason {
    fn from(error: ArrowError) -> Self {
        Self::from(&error)
    }
}

impl From<&ArrowError> for Reason {
    fn from(error: &ArrowError) -> Self {
        match error {
            ArrowError::ExternalError(own) if own.is::<Own>() => Self(own.to_string()),
            // An error of the operating system, which contains no data; I/O errors of libraries may contain some.
            ArrowError::IoError(_, source) if source.get_ref().is_none() => Self(one_line(&error.to_string())),
            other => Self(without_data(&other.to_string())),
        }
    }
}

impl From<ParquetError> for Reason {
    fn from(error: ParquetError) -> Self {
        Self(without_data(&error.to_string()))
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A reason from this crate inside an [`ArrowError`], the error type of all decoders.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Own(String);

/// An error of one of this crate's decoders; `reason` contains no data.
pub(super) fn own(reason: impl Into<String>) -> ArrowError {
    ArrowError::ExternalError(Box::new(Own(reason.into())))
}

/// The same as an error of a stream.
pub(crate) fn own_io(reason: String) -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidData, Own(reason))
}

/// The reason of [`own_io`].
pub(crate) fn of_own_io(error: &std::io::Error) -> Option<ArrowError> {
    error.get_ref().filter(|inner| inner.is::<Own>()).map(|reason| own(reason.to_string()))
}

/// The same error, with the column that it is about.
pub(super) fn in_column(column: &str, error: &ArrowError) -> ArrowError {
    own(format!("column \"{}\": {}", name(column), Reason::from(error)))
}

/// A row that cannot be decoded.
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) row: u64,
    pub(crate) reason: ArrowError,
}

impl From<ArrowError> for Broken {
    fn from(reason: ArrowError) -> Self {
        Self { row: csv_row(&reason).unwrap_or(0), reason }
    }
}

/// The row that arrow-csv means: it counts records, the header as the first, and calls them lines.
pub(super) fn csv_row(error: &ArrowError) -> Option<u64> {
    let ArrowError::CsvError(reason) = error else { return None };
    let (_, digits, _) = around_line(reason)?;
    digits.parse::<u64>().ok()?.checked_sub(2)
}

/// A message before, in and after its line number.
fn around_line(reason: &str) -> Option<(&str, &str, &str)> {
    let (before, rest) = reason.split_once(" for line ")?;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    Some((before, &rest[..end], &rest[end..]))
}

/// The prefixes of the messages of Arrow and Parquet by kind of error, and what is shown for a message that matches no
/// pattern.
const KINDS: [(&str, &str); 22] = [
    ("Arithmetic overflow: ", "a result does not fit its type"),
    ("Arrow: ", UNREADABLE),
    ("Avro error: ", UNREADABLE),
    ("C Data interface error: ", UNREADABLE),
    ("Cast error: ", "a value cannot be cast"),
    ("Compute error: ", "an expression failed"),
    ("Csv error: ", "a row is not valid CSV"),
    ("EOF: ", UNREADABLE),
    ("External error: ", UNREADABLE),
    ("External: ", UNREADABLE),
    ("Invalid argument error: ", "an expression failed"),
    ("Io error: ", "reading or writing failed"),
    ("Ipc error: ", UNREADABLE),
    ("Json error: ", "a row is not valid JSON, or a value is not of its column's type"),
    ("Memory error: ", "an allocation failed"),
    ("NYI: ", UNREADABLE),
    ("Not yet implemented: ", "not supported"),
    ("Offset overflow error: ", "too many bytes in one batch"),
    ("Parquet argument error: ", UNREADABLE),
    ("Parquet error: ", UNREADABLE),
    ("Parser error: ", "a value is not of its column's type"),
    ("Schema error: ", "the schema does not fit"),
];
const UNREADABLE: &str = "damaged, or of a kind that the reader does not support";

/// Messages of arrow-csv, arrow-json, arrow-cast, arrow-ipc and parquet 59.3, and of the decompressors. Holes:
/// `{}` data, shown as `…`; `{n}` an integer; `{t}` an Arrow type; `{w}` words of the library, never data. What follows
/// `|` is matched and not shown.
const KNOWN: &[&str] = &[
    "incorrect number of fields, expected {n} got {n}",
    "incorrect number of fields, expected {n} got more than {n}",
    "Encountered invalid UTF-8 data in field {n}",
    "Encountered UTF-8 error while reading CSV file|: {}",
    "Encountered unequal lengths between records on CSV file. Expected {n} records, found {n} records at line {n}",
    "Error while parsing value '{}' as type '{t}' for column {n} at line {n}.| Row data: '{}'",
    "Encountered unexpected '{}' whilst {w}",
    "Encountered non-UTF-8 data",
    "Encountered truncated UTF-8 sequence",
    "Encountered more than {n} bytes of string data|, consider using a smaller batch size",
    "Truncated record whilst reading {w}",
    "failed to parse \"{}\" as {t}",
    "failed to parse {} as {t}",
    "Expected JSON record to be an object|, found {}",
    "Expected array json type|, found: {}",
    "Expected object json type|, found: {}",
    "Expected scalar or scalar array JSON type|, found: {}",
    "Expected scalar value for scalar array|, got: {}",
    "Expected struct value for struct array|, got: {}",
    "Got non array element in nested array|: {}",
    "Incompatible type found during schema inference|: {}",
    "Not valid JSON: {w} at line {n} column {n}",
    "Cannot cast string '{}' to value of {t} type",
    "Cannot cast value '{}' to value of {t} type",
    "Cannot cast to {t}. Overflowing on| {}",
    "Cannot cast to {t}. Value overflows for output scale",
    "Cannot cast Date64 value {} to Date32 without overflow",
    "Can't cast value {} to type {t}",
    "value of {} is out of range {t}",
    "Casting from {t} to {t} not supported",
    "Failed to parse \"{}\" as {t}",
    "Failed to convert {} to datetime for {t}",
    "Failed to convert {} to temporal for {t}",
    "Error parsing timestamp from '{}': {w}",
    "can't parse the string value {} to decimal",
    "parse decimal overflow| ({})",
    "Overflow converting {} to {t}",
    "Overflow converting {} to Nanosecond.| {}",
    "The dates that can be represented as nanoseconds have to be between| {}",
    "Overflow happened on|: {}",
    "Divide by zero error",
    "Dictionary key bigger than the key type",
    "Run end encoded array index overflow error",
    "Invalid Parquet file. Corrupt footer",
    "Invalid Parquet file. Size is smaller than footer",
    "Could not parse metadata|: {}",
    "file size of {n} is less than footer",
    "file size of {n} is less than footer + metadata {n}",
    "footer metadata requires {n} bytes, but could only read {n}",
    "metadata requires {n} bytes, but could only read {n}",
    "expected to read {n} bytes, got {n}",
    "Required field {w} is missing",
    "Page CRC checksum mismatch",
    "Unexpected EOF",
    "Invalid page header",
    "encountered non UTF-8 data",
    "encountered non UTF-8 data|: {}",
    "damaged: the reader cannot make sense of it",
    "Unknown frame descriptor",
    "corrupt deflate stream",
    "invalid gzip header",
    "unexpected end of file",
    "incomplete frame",
    "expected {w}| got {}",
];

/// The prefix of errors of arrow-json, once for each field on the path to the value.
const FIELD: (&str, &str) = ("whilst decoding field '", "': ");

/// A reader's message without quoted data, in one line of limited length.
pub(crate) fn without_data(message: &str) -> String {
    let mut end = message.len().min(MAX_MATCHED_BYTES);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    let (mut shown, mut rest) = (String::new(), &message[..end]);
    let mut reduced = "cannot be read";
    while let Some((kind, meaning)) = KINDS.iter().find(|(kind, _)| rest.starts_with(kind)) {
        (rest, reduced) = (&rest[kind.len()..], meaning);
        shown.push_str(kind);
    }
    while let Some((field, after)) = rest.strip_prefix(FIELD.0).and_then(|rest| rest.split_once(FIELD.1)) {
        shown.push_str(&format!("{}{}{}", FIELD.0, name(field), FIELD.1));
        rest = after;
    }
    // Here a line is a record; `csv_row` returns its row.
    let rest = match around_line(rest) {
        Some((before, _, after)) if shown == "Csv error: " => {
            format!("{before}{}", after.replacen(" and field", " in field", 1))
        }
        _ => rest.to_owned(),
    };
    let known = KNOWN.iter().find_map(|pattern| fill(pattern, &rest));
    shown.push_str(known.as_deref().unwrap_or(reduced));
    one_line(&shown)
}

/// Maximum number of characters of a name of a column.
const MAX_NAME_CHARS: usize = 40;
/// Maximum number of names of columns in a message.
const MAX_NAMES: usize = 20;

/// The name of a column for messages, escaped and cut off: damage to a header turns cells into names.
pub(crate) fn name(name: &str) -> String {
    let cut: String = name.chars().take(MAX_NAME_CHARS).collect();
    let escaped = format!("{cut:?}");
    let more = if cut.len() < name.len() { "\u{2026}" } else { "" };
    format!("{}{more}", &escaped[1..escaped.len() - 1])
}

/// The first of these names of columns.
pub(super) fn names(all: &[String]) -> String {
    let shown: Vec<String> = all.iter().take(MAX_NAMES).map(|one| name(one)).collect();
    let more = all.len().saturating_sub(MAX_NAMES);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", shown.join(", "))
}

/// A message in one line of at most [`MAX_CHARS`] characters.
pub(crate) fn one_line(message: &str) -> String {
    let mut line: String = message.chars().take(MAX_CHARS).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if message.chars().nth(MAX_CHARS).is_some() {
        line.push('\u{2026}');
    }
    line
}

/// `text` as `pattern` shows it; `None` when it does not match.
fn fill(pattern: &str, text: &str) -> Option<String> {
    let Some(at) = pattern.find(['{', '|']) else { return (pattern == text).then(|| text.to_owned()) };
    let (literal, pattern) = pattern.split_at(at);
    let text = text.strip_prefix(literal)?;
    if let Some(hidden) = pattern.strip_prefix('|') {
        return fill(hidden, text).map(|_| literal.to_owned());
    }
    let (hole, pattern) = pattern.split_once('}')?;
    let follows = pattern.strip_prefix('|').unwrap_or(pattern);
    let follows = &follows[..follows.find(['{', '|']).unwrap_or(follows.len())];
    let filled = |end: usize| {
        let (held, rest) = text.split_at(end);
        Some(format!("{literal}{}{}", shown(hole, held)?, fill(pattern, rest)?))
    };
    match hole {
        _ if follows.is_empty() => filled(text.len()),
        // Data may contain the text that follows in the pattern; the library's own text is the last occurrence.
        "{" => text.rmatch_indices(follows).find_map(|(end, _)| filled(end)),
        _ => filled(text.find(follows)?),
    }
}

/// What is shown for the text in a hole; `None` when it is not what the hole takes.
fn shown<'a>(hole: &str, held: &'a str) -> Option<&'a str> {
    let fits = match hole {
        "{" => return Some("\u{2026}"),
        "{n" => !held.is_empty() && held.bytes().all(|byte| byte.is_ascii_digit()),
        "{t" => is_type(held),
        _ => is_words(held),
    };
    fits.then_some(held)
}

/// Words of a library: `timestamp must contain at least 10 characters`, `[`, "expected `,` or `]`".
fn is_words(text: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || " `,:[]{}_".contains(c);
    !text.is_empty() && text.len() <= 80 && text.chars().all(is_plain)
}

/// Whether every word of `text` is one of the names of Arrow's types.
fn is_type(text: &str) -> bool {
    const NAMES: &[&str] = &[
        "Binary",
        "BinaryView",
        "Boolean",
        "Date32",
        "Date64",
        "DayTime",
        "Decimal",
        "Decimal128",
        "Decimal256",
        "Decimal32",
        "Decimal64",
        "Dictionary",
        "Duration",
        "Float16",
        "Float32",
        "Float64",
        "Int16",
        "Int32",
        "Int64",
        "Int8",
        "Interval",
        "LargeBinary",
        "LargeList",
        "LargeUtf8",
        "List",
        "Microsecond",
        "Millisecond",
        "MonthDayNano",
        "Nanosecond",
        "None",
        "Null",
        "Second",
        "Some",
        "Struct",
        "Time32",
        "Time64",
        "Timestamp",
        "UInt16",
        "UInt32",
        "UInt64",
        "UInt8",
        "UTC",
        "Utf8",
        "Utf8View",
        "YearMonth",
        "i128",
        "i256",
        "item",
        "ms",
        "ns",
        "s",
        "us",
        "µs",
        "FixedSizeBinary",
    ];
    let words = || text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty());
    let is_name = |word: &str| NAMES.contains(&word);
    let is_number = |word: &str| word.bytes().all(|byte| byte.is_ascii_digit());
    text.len() <= 200 && words().any(is_name) && words().all(|word| is_name(word) || is_number(word))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::{
        array::{ArrayRef, StringArray},
        compute::{CastOptions, cast_with_options},
        datatypes::{DataType, TimeUnit},
    };
    use proptest::prelude::*;

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
                "Parser error: Error while parsing value 'it's' as type 'Utf8' for column 0 at line 2. Row data: '[it's' as type]'",
                "Parser error: Error while parsing value '\u{2026}' as type 'Utf8' for column 0 at line 2.",
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
                "Json error: whilst decoding field 'id': expected string got \"my secret\"",
                "Json error: whilst decoding field 'id': expected string",
            ),
            (
                "Json error: whilst decoding field 'id': failed to parse \"my \" as x\" as Int64",
                "Json error: whilst decoding field 'id': failed to parse \"\u{2026}\" as Int64",
            ),
            (
                "Json error: whilst decoding field 'a': expected [ got 1 got 2",
                "Json error: whilst decoding field 'a': expected [",
            ),
            (
                "Cast error: Cannot cast value 'my secret' to value of Boolean type",
                "Cast error: Cannot cast value '\u{2026}' to value of Boolean type",
            ),
            (
                "Json error: Expected JSON record to be an object, found Array [Object {\"text\": String(\"secret\")}]",
                "Json error: Expected JSON record to be an object",
            ),
            (
                "Json error: Not valid JSON: expected `,` or `}` at line 1 column 8",
                "Json error: Not valid JSON: expected `,` or `}` at line 1 column 8",
            ),
            // Unknown messages of a known kind, and of an unknown kind.
            ("Cast error: Can never be seen: my secret", "Cast error: a value cannot be cast"),
            (
                "Parquet error: Arrow: my secret",
                "Parquet error: Arrow: damaged, or of a kind that the reader does not support",
            ),
            ("my secret", "cannot be read"),
            // Data that imitates the end of a message.
            (
                "Cast error: Cannot cast string 'x' to value of my secret type' to value of Int64 type",
                "Cast error: Cannot cast string '\u{2026}' to value of Int64 type",
            ),
            (
                "Parser error: Error parsing timestamp from 'x': my secret': invalid timestamp separator",
                "Parser error: Error parsing timestamp from '\u{2026}': invalid timestamp separator",
            ),
        ];
        for (reason, expected) in cases {
            assert_eq!(without_data(reason), expected);
        }
        assert_eq!(one_line("two\nlines"), "two lines");
        assert_eq!(name("a \"b\"\n\u{1b}"), r#"a \"b\"\n\u{1b}"#);
        assert_eq!(name(&"ä".repeat(41)), format!("{}\u{2026}", "ä".repeat(40)));
        let all: Vec<String> = (0..22).map(|i| i.to_string()).collect();
        assert!(names(&all[..20]).ends_with("18, 19") && names(&all).ends_with("18, 19 and 2 more"));
        assert_eq!(one_line(&"x".repeat(1000)).chars().count(), MAX_CHARS + 1);
        assert_eq!(Reason::from(own("the line is longer")).to_string(), "the line is longer");
    }

    /// Types that CSV and JSON cells are cast to, by us or by a query.
    fn types() -> Vec<DataType> {
        use DataType::*;
        let zone = || Some("+00:00".into());
        vec![
            Boolean,
            Int8,
            Int64,
            UInt64,
            Float32,
            Float64,
            Date32,
            Date64,
            Time32(TimeUnit::Millisecond),
            Time64(TimeUnit::Nanosecond),
            Timestamp(TimeUnit::Second, None),
            Timestamp(TimeUnit::Nanosecond, None),
            Timestamp(TimeUnit::Millisecond, zone()),
            Duration(TimeUnit::Second),
            Decimal128(10, 2),
            Decimal256(40, 3),
            Interval(arrow::datatypes::IntervalUnit::MonthDayNano),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]
        /// No message of Arrow contains `Zq`, so it can only come from data.
        #[test]
        fn no_cast_shows_data(before in "[-0-9:.' TZa-z]{0,12}", after in "[-0-9:.' TZa-z\"\n]{0,12}") {
            let cell = format!("{before}Zq{after}");
            for kind in types() {
                let column: ArrayRef = Arc::new(StringArray::from(vec![cell.as_str()]));
                let options = CastOptions { safe: false, ..CastOptions::default() };
                if let Err(error) = cast_with_options(&column, &kind, &options) {
                    let shown = Reason::from(&error).to_string();
                    prop_assert!(!shown.contains("Zq"), "{} of {}: {}", kind, cell, shown);
                }
            }
        }

        #[test]
        fn no_imitated_message_shows_data(
            pattern in prop::sample::select(KNOWN),
            other in prop::sample::select(KNOWN),
            kind in prop::sample::select(&KINDS[..]),
        ) {
            let data = other.replace('|', "").replace("{t}", "Int64").replace("{n}", "7").replace("{w}", "Zq").replace("{}", "Zq");
            let message = pattern.replace('|', "").replace("{t}", "Int64").replace("{n}", "7").replace("{w}", "null").replace("{}", &data);
            let shown = without_data(&format!("{}{message}", kind.0));
            prop_assert!(!shown.contains("Zq"), "{}: {}", message, shown);
        }
    }
}
