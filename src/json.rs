//! Small JSON files that people write or copy: read without a byte order mark, with errors that hold no text of the file.

use serde::de::DeserializeOwned;
use serde_json::{Error, Value, error::Category};

use crate::messages::printable;

/// U+FEFF in UTF-8, which editors on Windows write.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// The bytes without a byte order mark at their beginning.
pub fn without_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes)
}

/// Parses the content of a file.
///
/// # Errors
/// As [`reason`].
pub fn from_slice<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    serde_json::from_slice(without_mark(bytes)).map_err(|error| match bytes {
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => "it is UTF-16, and JSON is UTF-8".to_owned(),
        _ => reason(&error),
    })
}

/// What is wrong with JSON and where, without values of the file: it may be another file than the user meant, with secrets.
pub fn reason(error: &Error) -> String {
    let text = error.to_string();
    if error.classify() != Category::Data {
        // The parser's own words.
        return text;
    }
    let place = format!(" at line {} column {}", error.line(), error.column());
    let wrong = without_value(text.strip_suffix(&place).unwrap_or(&text));
    printable(&format!("{wrong}{place}"))
}

/// A message of serde without the value that it quotes. Names of keys stay.
fn without_value(message: &str) -> String {
    // What is expected is our own text, and follows the value.
    let expected = message.rsplit_once(", expected ").map_or("another value", |(_, expected)| expected);
    for kind in ["invalid type: ", "invalid value: "] {
        if let Some(found) = message.strip_prefix(kind) {
            let found = found.split(['"', '`', ',']).next().unwrap_or_default().trim_end();
            return format!("{kind}{found}, expected {expected}");
        }
    }
    let is_about_keys = ["missing field ", "unknown field ", "duplicate field ", "invalid length "];
    match is_about_keys.iter().any(|kind| message.starts_with(kind)) {
        true => message.to_owned(),
        false => format!("invalid value, expected {expected}"),
    }
}

/// A value for a message: numbers as they are, of strings and objects only their kind.
pub(crate) fn shown(value: &Value) -> String {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::String(_) => "a string".to_owned(),
        Value::Array(items) if items.len() <= 8 && items.iter().all(Value::is_number) => value.to_string(),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct Config {
        scale: f32,
        #[serde(default)]
        kind: Option<Kind>,
    }

    #[derive(Debug, Deserialize, PartialEq)]
    enum Kind {
        Plain,
    }

    #[test]
    fn errors_say_where_and_quote_no_value() {
        for (text, expected) in [
            (r#"{"scale": "hunter2"}"#, "invalid type: string, expected f32 at line 1 column 19"),
            (r#"{"scale": "a, expected `x`"}"#, "invalid type: string, expected f32 at line 1 column 27"),
            ("\n\"hunter2\"", "invalid type: string, expected struct Config at line 2 column 9"),
            ("{\"scale\": [7]}", "invalid type: sequence, expected f32 at line 1 column 10"),
            ("{\"scale\": 1, \"kind\": \"hunter2\"}", "invalid value, expected `Plain` at line 1 column 30"),
            ("{\"scale\": 1, \"scael\": 2}", "unknown field `scael`, expected `scale` or `kind` at line 1 column 20"),
            ("{}", "missing field `scale` at line 1 column 2"),
            ("{\"scale\": hunter2}", "expected value at line 1 column 11"),
        ] {
            assert_eq!(from_slice::<Config>(text.as_bytes()).unwrap_err(), expected, "{text}");
        }
        assert_eq!(from_slice::<Config>(b"\xff\xfe{\0}\0").unwrap_err(), "it is UTF-16, and JSON is UTF-8");
    }

    #[test]
    fn a_byte_order_mark_is_skipped() {
        assert_eq!(from_slice("\u{feff}{\"scale\": 1}".as_bytes()), Ok(Config { scale: 1.0, kind: None }));
        // One only: the second is no JSON.
        assert!(from_slice::<Config>("\u{feff}\u{feff}{\"scale\": 1}".as_bytes()).is_err());
    }
}
