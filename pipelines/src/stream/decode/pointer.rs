//! JSON pointers (RFC 6901), which also name the fields of Avro records.

use std::fmt;

/// Deeper pointers are refused: each level is one more pass over the value below it.
const MAX_DEPTH: usize = 64;

/// A parsed pointer. The empty pointer is the whole message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pointer {
    written: String,
    tokens: Vec<String>,
}

impl Pointer {
    /// Parses `/a/b`.
    ///
    /// # Errors
    /// What is wrong with the syntax.
    pub fn parse(written: &str) -> Result<Self, String> {
        if written.is_empty() {
            return Ok(Self { written: String::new(), tokens: Vec::new() });
        }
        let Some(rest) = written.strip_prefix('/') else {
            return Err(format!(
                "the JSON pointer {written:?} does not begin with /; the field `a` is /a, `b` in it is /a/b"
            ));
        };
        let tokens: Vec<String> = rest.split('/').map(|token| unescaped(token, written)).collect::<Result<_, _>>()?;
        match tokens.len() {
            0..=MAX_DEPTH => Ok(Self { written: written.to_owned(), tokens }),
            n => Err(format!("a JSON pointer of {n} levels; the maximum is {MAX_DEPTH}")),
        }
    }

    /// The pointer of these keys and indices.
    pub(super) fn of(tokens: &[String]) -> Self {
        let written = tokens.iter().map(|token| format!("/{}", token.replace('~', "~0").replace('/', "~1"))).collect();
        Self { written, tokens: tokens.to_vec() }
    }

    /// Keys and indices from the top of the message down.
    pub fn tokens(&self) -> &[String] {
        &self.tokens
    }
}

/// `~1` is `/`, and `~0` is `~`.
fn unescaped(token: &str, pointer: &str) -> Result<String, String> {
    let mut pieces = token.split('~');
    let mut out = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let (character, rest) = match piece.as_bytes().first() {
            Some(b'0') => ('~', &piece[1..]),
            Some(b'1') => ('/', &piece[1..]),
            _ => return Err(format!("the JSON pointer {pointer:?}: after ~ comes 0 (for ~) or 1 (for /)")),
        };
        out.push(character);
        out.push_str(rest);
    }
    Ok(out)
}

impl fmt::Display for Pointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.written.is_empty() { "the whole message" } else { &self.written })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of RFC 6901, section 5.
    #[test]
    fn pointers_of_the_rfc() {
        for (written, tokens) in [
            ("", vec![]),
            ("/foo", vec!["foo"]),
            ("/foo/0", vec!["foo", "0"]),
            ("/", vec![""]),
            ("/a~1b", vec!["a/b"]),
            ("/m~0n", vec!["m~n"]),
            ("/~01", vec!["~1"]),
            ("/ ", vec![" "]),
        ] {
            assert_eq!(Pointer::parse(written).unwrap().tokens(), tokens, "{written}");
        }
        for written in ["foo", "#/foo", "/a~", "/a~2", "/a~x/b"] {
            let error = Pointer::parse(written).unwrap_err();
            assert!(error.contains(&format!("{written:?}")), "{error}");
        }
        assert!(Pointer::parse(&"/a".repeat(65)).unwrap_err().contains("65 levels"));
    }
}
