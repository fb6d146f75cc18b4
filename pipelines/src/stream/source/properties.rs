//! Files of properties as Java has them, the format in which Kafka's tools and vendors hand out settings.
//!
//! ```text
//! # a comment, as is a line that begins with !
//! sasl.username=reader
//! sasl.password: two words \
//!     and a third
//! ```

/// What is wrong with a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Invalid {
    /// Line, from 1.
    pub(super) line: usize,
    /// What is wrong, without a word of the file.
    pub(super) reason: &'static str,
}

/// The pairs of `text`, in order, with the lines at which they begin.
///
/// # Errors
/// [`Invalid`] for a `\u` without four hexadecimal digits and for an empty key.
pub(super) fn parse(text: &str) -> Result<Vec<(usize, String, String)>, Invalid> {
    let mut pairs = Vec::new();
    let mut lines = text.trim_start_matches('\u{feff}').lines().enumerate();
    while let Some((index, line)) = lines.next() {
        let line = line.trim_start_matches(BLANKS);
        if line.is_empty() || line.starts_with(['#', '!']) {
            continue;
        }
        let mut logical = line.to_owned();
        while continues(&logical) {
            logical.pop();
            let Some((_, next)) = lines.next() else { break };
            logical.push_str(next.trim_start_matches(BLANKS));
        }
        let invalid = |reason| Invalid { line: index + 1, reason };
        let (key, value) = split(&logical);
        let key = unescape(key).map_err(invalid)?;
        if key.is_empty() {
            return Err(invalid("no key before the value"));
        }
        pairs.push((index + 1, key, unescape(value).map_err(invalid)?));
    }
    Ok(pairs)
}

const BLANKS: [char; 3] = [' ', '\t', '\u{c}'];

/// Whether a line ends in an odd number of backslashes.
fn continues(line: &str) -> bool {
    line.bytes().rev().take_while(|byte| *byte == b'\\').count() % 2 == 1
}

/// Key and value: the key ends at the first `=`, `:` or blank without a backslash before it.
fn split(line: &str) -> (&str, &str) {
    let mut escaped = false;
    let end = line.char_indices().find(|(_, c)| {
        let ends = !escaped && (matches!(c, '=' | ':') || BLANKS.contains(c));
        escaped = *c == '\\' && !escaped;
        ends
    });
    let Some((end, _)) = end else { return (line, "") };
    let value = line[end..].trim_start_matches(BLANKS);
    let value = value.strip_prefix(['=', ':']).unwrap_or(value);
    (&line[..end], value.trim_start_matches(BLANKS))
}

fn unescape(text: &str) -> Result<String, &'static str> {
    let mut units: Vec<u16> = Vec::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        let c = match c {
            '\\' => match chars.next() {
                Some('t') => '\t',
                Some('n') => '\n',
                Some('r') => '\r',
                Some('f') => '\u{c}',
                Some('u') => {
                    let rest = chars.as_str();
                    let digits = rest.get(..4).filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
                    let unit = digits.and_then(|digits| u16::from_str_radix(digits, 16).ok());
                    units.push(unit.ok_or("\\u needs four hexadecimal digits")?);
                    chars = rest[4..].chars();
                    continue;
                }
                Some(other) => other,
                None => break,
            },
            c => c,
        };
        units.extend_from_slice(c.encode_utf16(&mut [0; 2]));
    }
    String::from_utf16(&units).map_err(|_| "\\u has one half of a surrogate pair")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(text: &str) -> Vec<(String, String)> {
        parse(text).unwrap().into_iter().map(|(_, key, value)| (key, value)).collect()
    }

    /// The examples of the documentation of `java.util.Properties.load`.
    #[test]
    fn the_examples_of_java() {
        for text in ["Truth = Beauty", " Truth:Beauty", "Truth                    :Beauty"] {
            assert_eq!(pairs(text), [("Truth".into(), "Beauty".into())], "{text}");
        }
        let fruits = "fruits                           apple, banana, pear, \\\n             cantaloupe, watermelon, \\\n                                  kiwi, mango\n";
        assert_eq!(
            pairs(fruits),
            [("fruits".into(), "apple, banana, pear, cantaloupe, watermelon, kiwi, mango".into())]
        );
        assert_eq!(pairs("cheeses\n"), [("cheeses".into(), String::new())]);
        assert_eq!(pairs("\\:\\=x y"), [(":=x".into(), "y".into())]);
    }

    #[test]
    fn comments_escapes_and_blanks() {
        let text = "\u{feff}# sasl.password=no\r\n! nor this\r\n\r\n a.b=c=d:e \r\nkey\\ 1=\\tx\\u00e9\\ud83d\\ude00\\\\\nlast=\\";
        let expected = [("a.b", "c=d:e "), ("key 1", "\tx\u{e9}\u{1f600}\\"), ("last", "")];
        assert_eq!(pairs(text), expected.map(|(k, v)| (k.to_owned(), v.to_owned())));
        // A comment does not continue, and a continued line may look like one.
        assert_eq!(pairs("# a\\\nb=1\\\n# 2"), [("b".into(), "1# 2".into())]);
        let lines: Vec<_> = parse("a=1\\\n1\n\n# x\nb=2").unwrap().into_iter().map(|(line, ..)| line).collect();
        assert_eq!(lines, [1, 5]);
    }

    #[test]
    fn errors_name_the_line_and_nothing_else() {
        assert_eq!(
            parse("a=b\n\nc=hunter2\\u12"),
            Err(Invalid { line: 3, reason: "\\u needs four hexadecimal digits" })
        );
        assert_eq!(parse("c=\\ud83dx").unwrap_err().reason, "\\u has one half of a surrogate pair");
        assert_eq!(parse("=hunter2").unwrap_err().reason, "no key before the value");
        assert!(parse("c=\\u12é4").is_err());
    }
}
