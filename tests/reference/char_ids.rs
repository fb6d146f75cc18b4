//! A word as numbers: its UTF-8 bytes between marks, every id shifted by one so that 0 is free for padding tokens.

/// Added to every raw id.
const SHIFT: u16 = 1;
// Raw ids; 0..=255 are bytes.
const SENTENCE_BEGIN: u16 = 256;
const SENTENCE_END: u16 = 257;
const WORD_BEGIN: u16 = 258;
const WORD_END: u16 = 259;
const WORD_PADDING: u16 = 260;

/// The `max` ids (`M`, 50 in every published model) of one word, shifted.
///
/// A word longer than `max - 2` *bytes* is cut there, even inside a character; the end mark stays.
/// `<S>` and `</S>` are one special character each, wherever they stand.
pub(crate) fn char_ids(word: &str, max: usize) -> Vec<u16> {
    let characters: Vec<u16> = match word {
        "<S>" => vec![SENTENCE_BEGIN],
        "</S>" => vec![SENTENCE_END],
        _ => word.bytes().take(max - 2).map(u16::from).collect(),
    };
    let mut ids = vec![WORD_BEGIN];
    ids.extend(characters);
    ids.push(WORD_END);
    ids.resize(max, WORD_PADDING);
    ids.iter().map(|raw| raw + SHIFT).collect()
}
