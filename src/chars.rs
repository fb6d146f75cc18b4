//! Token to character ids; the only module that knows the alphabet.
//!
//! An id is a byte of the token plus one, or one of the special ids below. Id 0 is for positions without a token. The
//! `+1` is added here and nowhere else, so ids index the table of [`N_CHARACTERS`] rows, whose first row is zeros.

/// All ids of a position without a token.
pub const PADDING: u16 = 0;
/// The token `<S>`, between begin and end of word.
pub const BEGIN_SENTENCE: u16 = 257;
/// The token `</S>`, between begin and end of word.
pub const END_SENTENCE: u16 = 258;
/// First id of every token.
pub const BEGIN_WORD: u16 = 259;
/// Follows the last byte of every token.
pub const END_WORD: u16 = 260;
/// Pads a token to its number of ids.
pub const WORD_PADDING: u16 = 261;
/// Rows of the character table, including the padding row: ids are `0..N_CHARACTERS`.
pub const N_CHARACTERS: usize = 262;

/// The token before the first token of a sentence. It is also recognised in a text.
pub const BEGIN_SENTENCE_TOKEN: &str = "<S>";
/// The token after the last token of a sentence. It is also recognised in a text.
pub const END_SENTENCE_TOKEN: &str = "</S>";

/// Writes the `max` ids of `token` to `out[..max]`: begin of word, at most `max - 2` bytes of UTF-8,
/// end of word, padding.
///
/// A longer token is truncated by bytes, even within a character, as in the training of the published models. `<S>` and
/// `</S>` have one special id each instead of their bytes, wherever they occur.
///
/// Returns the number of ids before the padding.
///
/// # Panics
/// When `out` is shorter than `max` or `max` is below 3; [`ModelOptions`](crate::options::ModelOptions) are checked for
/// that when they are parsed.
pub fn char_ids(token: &str, max: usize, out: &mut [i32]) -> usize {
    let out = &mut out[..max];
    out.fill(i32::from(WORD_PADDING));
    out[0] = i32::from(BEGIN_WORD);
    let length = match token {
        BEGIN_SENTENCE_TOKEN => special(BEGIN_SENTENCE, out),
        END_SENTENCE_TOKEN => special(END_SENTENCE, out),
        word => bytes(word.as_bytes(), max - 2, out),
    };
    out[1 + length] = i32::from(END_WORD);
    length + 2
}

/// Whether [`char_ids`] truncates `token`.
pub fn is_cut(token: &str, max: usize) -> bool {
    token != BEGIN_SENTENCE_TOKEN && token != END_SENTENCE_TOKEN && token.len() + 2 > max
}

fn special(id: u16, out: &mut [i32]) -> usize {
    out[1] = i32::from(id);
    1
}

fn bytes(word: &[u8], max: usize, out: &mut [i32]) -> usize {
    let kept = &word[..word.len().min(max)];
    for (slot, &byte) in out[1..].iter_mut().zip(kept) {
        *slot = i32::from(byte) + 1;
    }
    kept.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The given ids, padded to 50.
    fn row(ids: &[i32]) -> Vec<i32> {
        let mut row = ids.to_vec();
        row.resize(50, 261);
        row
    }

    fn ids(token: &str) -> Vec<i32> {
        let mut out = vec![-1; 50];
        char_ids(token, 50, &mut out);
        out
    }

    // The rows of AllenNLP's test of its character indexer (version 0.9, elmo_indexer_test): U+0100 is
    // the bytes C4 80, so 197 129 after the shift.
    #[test]
    fn rows_of_allennlp() {
        assert_eq!(ids("<S>"), row(&[259, 257, 260]));
        assert_eq!(ids("</S>"), row(&[259, 258, 260]));
        assert_eq!(ids("\u{100}t"), row(&[259, 197, 129, 117, 260]));
        assert_eq!(ids("Second"), row(&[259, 84, 102, 100, 112, 111, 101, 260]));
        assert_eq!(ids("."), row(&[259, 47, 260]));
    }

    // By hand from the rule: the first 48 bytes are kept.
    #[test]
    fn long_words_are_cut_by_bytes() {
        let at_limit = "x".repeat(48);
        assert_eq!(ids(&at_limit), row(&[&[259][..], &[121; 48], &[260]].concat()));
        assert!(!is_cut(&at_limit, 50));
        let long = "x".repeat(60);
        assert_eq!(ids(&long), ids(&at_limit));
        assert!(is_cut(&long, 50));
        // 47 letters and one of two bytes: its first byte (C3, 196 after the shift) stays.
        let inside = format!("{}\u{e9}tail-of-the-word", "x".repeat(47));
        assert_eq!(ids(&inside), row(&[&[259][..], &[121; 47], &[196, 260]].concat()));
        // Twenty characters of three bytes (E2 82 AC): sixteen fit.
        let euros = ids(&"\u{20ac}".repeat(20));
        assert_eq!(euros[1..49], [227, 131, 173].repeat(16));
        assert_eq!(euros[49], 260);
    }

    #[test]
    fn odd_tokens() {
        assert_eq!(ids(""), row(&[259, 260]));
        assert_eq!(ids("<s>"), row(&[259, 61, 116, 63, 260]));
        assert_eq!(ids("\u{0}"), row(&[259, 1, 260]));
        assert_eq!(ids("<UNK>").iter().filter(|&&i| i < 257).count(), 5);
    }

    #[test]
    fn other_lengths() {
        let mut out = [7; 5];
        char_ids("abcdef", 4, &mut out);
        assert_eq!(out, [259, 98, 99, 260, 7]);
        char_ids("</S>", 3, &mut out);
        assert_eq!(out[..3], [259, 258, 260]);
        assert!(!is_cut("</S>", 3));
    }
}
