//! Replaces surrogate pairs in JSON, such as `\uD840\uDC00`, by the characters that they encode.
//!
//! arrow-json 59.3 decodes surrogate pairs of every second plane to another character (`char_from_surrogate_pair` in
//! its `reader/tape.rs` uses `|` instead of `+`): U+20000 becomes U+10000. This affects Chinese characters of the second
//! plane and the tags of some flags.
//!
//! An unpaired surrogate becomes U+FFFD: Python writes such escapes, and both arrow-json and serde_json reject them.

use std::borrow::Cow;

/// Bytes of an escaped pair.
const PAIR: usize = 12;

/// Rewrites a stream of pieces; a pair may be split between pieces.
#[derive(Debug, Default)]
pub(crate) struct Escapes {
    /// The beginning of an escape whose end has not come.
    open: Vec<u8>,
    /// Bytes that were searched.
    #[cfg(test)]
    pub(super) searched: usize,
}

impl Escapes {
    /// Whether `piece` needs no rewriting.
    pub(super) fn is_plain(&mut self, piece: &[u8]) -> bool {
        #[cfg(test)]
        {
            self.searched += piece.len();
        }
        let escapes = || piece.last() == Some(&b'\\') || piece.windows(2).any(|two| two == b"\\u");
        // The search for one byte is fast, and most texts hold no escape.
        self.open.is_empty() && !(piece.contains(&b'\\') && escapes())
    }

    /// Rewrites all of `bytes`.
    pub(crate) fn rewritten(bytes: &[u8]) -> Cow<'_, [u8]> {
        let (mut escapes, mut out) = (Self::default(), Vec::new());
        if escapes.is_plain(bytes) {
            return Cow::Borrowed(bytes);
        }
        escapes.rewrite(bytes, &mut out);
        escapes.finish(&mut out);
        Cow::Owned(out)
    }

    /// Appends the rewritten `piece` to `out`.
    pub(super) fn rewrite(&mut self, piece: &[u8], out: &mut Vec<u8>) {
        let joined;
        let mut rest = piece;
        if !self.open.is_empty() {
            joined = [std::mem::take(&mut self.open).as_slice(), piece].concat();
            rest = &joined;
        }
        while let Some(at) = rest.iter().position(|&byte| byte == b'\\') {
            out.extend_from_slice(&rest[..at]);
            rest = &rest[at..];
            let Some(taken) = escape(rest, out) else {
                self.open = rest.to_vec();
                return;
            };
            rest = &rest[taken..];
        }
        out.extend_from_slice(rest);
    }

    /// The beginning of an escape whose end has not come.
    pub(super) fn open(&self) -> &[u8] {
        &self.open
    }

    /// Ends the stream: an incomplete escape is copied.
    pub(super) fn finish(&mut self, out: &mut Vec<u8>) {
        out.append(&mut self.open);
    }
}

/// Appends the escape at the start of `rest`, or its character, and returns its length; `None` when more bytes are needed.
fn escape(rest: &[u8], out: &mut Vec<u8>) -> Option<usize> {
    let mut copy = |n: usize| {
        out.extend_from_slice(&rest[..n]);
        Some(n)
    };
    match rest.get(1) {
        None => return None,
        Some(b'u') => {}
        Some(_) => return copy(2),
    }
    if rest.len() < 6 {
        return None;
    }
    if !matches!(unit(rest), Some(0xD800..0xE000)) {
        return copy(2); // the digits follow as plain bytes
    }
    let after = &rest[6..rest.len().min(PAIR)];
    let may_be_pair = unit(rest) < Some(0xDC00) && b"\\u".starts_with(&after[..after.len().min(2)]);
    if !may_be_pair {
        return half(out);
    }
    if after.len() < 6 {
        return None;
    }
    let pair = [unit(rest).unwrap_or_default(), unit(after).unwrap_or_default()];
    match char::decode_utf16(pair).next() {
        Some(Ok(character)) => {
            out.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
            Some(PAIR)
        }
        _ => half(out),
    }
}

/// Appends U+FFFD for an unpaired surrogate.
fn half(out: &mut Vec<u8>) -> Option<usize> {
    out.extend_from_slice("\u{fffd}".as_bytes());
    Some(6)
}

/// The number of `\uXXXX`.
fn unit(escape: &[u8]) -> Option<u16> {
    let digits = std::str::from_utf8(escape.get(2..6)?).ok()?;
    u16::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rewritten(pieces: &[&[u8]]) -> String {
        let (mut escapes, mut out) = (Escapes::default(), Vec::new());
        for piece in pieces {
            match escapes.is_plain(piece) {
                true => out.extend_from_slice(piece),
                false => escapes.rewrite(piece, &mut out),
            }
        }
        escapes.finish(&mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn pairs_become_characters_and_halves_are_replaced() {
        // By hand, from the definition of UTF-16: D840 DC00 is U+20000, D83D DE00 is U+1F600.
        for (json, expected) in [
            (r"a\ud840\uDC00b", "a\u{20000}b"),
            (r"\uD83D\uDE00", "\u{1f600}"),
            (r"\\ud840\\udc00", r"\\ud840\\udc00"),
            (r"\\\ud840\udc00", "\\\\\u{20000}"),
            (r"\u0041\n\ue000", r"\u0041\n\ue000"),
            (r"\ud840\u0041", "\u{fffd}\\u0041"),
            (r"\ud840\ud840\udc00", "\u{fffd}\u{20000}"),
            (r"\udc00\ud840\udc00\udfff.", "\u{fffd}\u{20000}\u{fffd}."),
            (r"\ud840x\uDBFF\n", "\u{fffd}x\u{fffd}\\n"),
            (r"\u00zz\", r"\u00zz\"),
        ] {
            assert_eq!(rewritten(&[json.as_bytes()]), expected, "{json}");
            for cut in 0..=json.len() {
                let (head, tail) = json.as_bytes().split_at(cut);
                assert_eq!(rewritten(&[head, tail]), expected, "{json} cut at {cut}");
            }
        }
    }

    proptest! {
        /// Expected: serde_json decodes the input and the output to the same value.
        #[test]
        fn a_string_stays_what_it_is(text in any::<String>(), cuts in prop::collection::vec(0..1000_usize, 0..6)) {
            let escaped: String = text.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect();
            let json = format!("\"{escaped}\"");
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut % (json.len() + 1)).chain([json.len()]).collect();
            cuts.sort_unstable();
            let mut from = 0;
            let pieces: Vec<&[u8]> =
                cuts.iter().map(|&to| &json.as_bytes()[std::mem::replace(&mut from, to)..to]).collect();
            let decoded: String = serde_json::from_str(&rewritten(&pieces)).unwrap();
            prop_assert_eq!(decoded, text);
        }
    }
}
