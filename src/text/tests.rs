//! Properties of every tokenizer for every string, and the Moses rules compared with `sacremoses`.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use proptest::{prelude::*, test_runner::FileFailurePersistence};
use serde_json::Value;

use super::*;

const KINDS: [TokenizerKind; 3] = [TokenizerKind::Moses, TokenizerKind::Words, TokenizerKind::Whitespace];
const MODES: [SentenceMode; 2] = [SentenceMode::Split, SentenceMode::Off];

/// Checks the properties that the documentation of the module lists.
fn check(text: &str, kind: TokenizerKind, mode: SentenceMode) -> Vec<Vec<Token>> {
    let sentences = tokenize(text, kind, mode);
    let mut end = 0;
    for sentence in &sentences {
        assert!(!sentence.is_empty());
        for token in sentence {
            assert!(end <= token.start && token.start < token.end && token.end <= text.len(), "{token:?} after {end}");
            assert!(text.is_char_boundary(token.start) && text.is_char_boundary(token.end), "{token:?}");
            assert!(!token.read(text).is_empty());
            assert!(!token.read(text).contains(whitespace::is_space), "{token:?}");
            assert_ne!(token.word.as_deref(), Some(token.written(text)), "a word as written need not be kept");
            end = token.end;
        }
    }
    sentences
}

fn check_all(text: &str) {
    let mut end = 0;
    for range in ranges(text, SentenceMode::Split) {
        assert_eq!(range.start, end);
        end = range.end;
    }
    assert_eq!(end, text.len(), "sentences are the whole text");
    for kind in KINDS {
        for mode in MODES {
            let sentences = check(text, kind, mode);
            // Buffers that another text has used.
            let mut cutter = Cutter::new(kind, mode);
            cutter.cut("Another text (“with” marks). It’s here.", |_| ());
            let mut cut = Vec::new();
            cutter.cut(text, |tokens| cut.push(tokens.to_vec()));
            assert_eq!(cut, sentences, "{kind:?}, {mode:?}");
        }
    }
}

/// The words that the model reads in a text that is one sentence.
fn read(text: &str, kind: TokenizerKind) -> Vec<String> {
    let sentences = check(text, kind, SentenceMode::Off);
    sentences.iter().flatten().map(|token| token.read(text).to_owned()).collect()
}

fn moses(text: &str) -> Vec<String> {
    read(text, TokenizerKind::Moses)
}

/// Expected: `sacremoses` 0.2.0, see `tests/fixtures/moses_gold.md`.
#[test]
fn gold() {
    let lines = include_str!("../../tests/fixtures/moses_gold.jsonl");
    assert!(lines.lines().count() >= 600);
    let differences = lines.lines().filter_map(|line| {
        let row: Value = serde_json::from_str(line).unwrap();
        let expected: Vec<&str> = row["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
        let text = row["text"].as_str().unwrap();
        let found = moses(text);
        (found != expected).then(|| format!("{text:?}:\n  expected {expected:?}\n  found    {found:?}"))
    });
    let differences: Vec<String> = differences.collect();
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

/// Differences from `sacremoses`; the reasons are in `docs/tokenizer.md`.
#[test]
fn known_differences() {
    // It replaces two full stops by this word, and replaces the word by full stops later, wherever it occurs.
    assert_eq!(moses("DOTDOTMULTI"), ["DOTDOTMULTI"]);
    assert_eq!(moses("DOTMULTI DOTDOT 5DOTMULTI"), ["DOTMULTI", "DOTDOT", "5DOTMULTI"]); // [".", "DOTDOT", "5."]
    // Letters that are newer than its tables, of which each is a token.
    assert_eq!(moses("ꭰꭱ"), ["ꭰꭱ"]);
    // It takes the dotted circle for a lower case letter.
    assert_eq!(moses("a\u{25cc}b"), ["a", "\u{25cc}", "b"]);
    // It removes a no-break space after a guillemet, and then swaps the guillemet with the comma.
    assert_eq!(moses("«\u{a0},"), ["\"", ","]);
    // It replaces a no-break space between digits of any script by a full stop.
    assert_eq!(moses("𝟏\u{a0}𝟐"), ["𝟏", "𝟐"]);
}

#[test]
fn normalisation_leaves_the_text_alone() {
    let text = "“Well…” he’s—so— １２";
    let sentences = check(text, TokenizerKind::Moses, SentenceMode::Off);
    let pairs: Vec<(&str, &str)> = sentences[0].iter().map(|t| (t.written(text), t.read(text))).collect();
    let expected = [
        ("“", "\""),
        ("Well", "Well"),
        ("…", "..."),
        ("”", "\""),
        ("he", "he"),
        ("’s", "'s"),
        ("—", "-"),
        ("so", "so"),
        ("—", "-"),
        ("１２", "１２"),
    ];
    assert_eq!(pairs, expected);
}

/// A quote and the stops after it swap places in what is read, but not in the text.
#[test]
fn a_quote_moves_behind_stops() {
    let text = "an “end”, or “end”…";
    let sentences = check(text, TokenizerKind::Moses, SentenceMode::Off);
    let pairs: Vec<(&str, &str)> = sentences[0].iter().map(|t| (t.written(text), t.read(text))).collect();
    assert_eq!(pairs[3..5], [("”", ","), (",", "\"")]);
    assert_eq!(pairs[8..], [("”", "..."), ("…", "\"")]);
}

/// Expected: `"\t a\u{1c}b\u{1d}c\u{1e}d\u{1f}e\u{85}f\u{a0}g\u{3000}h\u{200b}i\u{feff} ".split()` in Python 3.11.
#[test]
fn whitespace_as_python() {
    let text = "\t a\u{1c}b\u{1d}c\u{1e}d\u{1f}e\u{85}f\u{a0}g\u{3000}h\u{200b}i\u{feff} ";
    let expected = ["a", "b", "c", "d", "e", "f", "g", "h\u{200b}i\u{feff}"];
    assert_eq!(read(text, TokenizerKind::Whitespace), expected);
}

/// By hand from the rules of UAX 29: WB6/7 (can't), WB11/12 (3.14), WB13 (katakana), WB15/16 (flags), WB3c (family).
#[test]
fn words_as_uax_29() {
    let text = "I can't pay £3.14, カタカナ! 🇫🇷🇩🇪 👩‍👧 \u{301}";
    let expected = ["I", "can't", "pay", "£", "3.14", ",", "カタカナ", "!", "🇫🇷", "🇩🇪", "👩‍👧", "\u{301}"];
    assert_eq!(read(text, TokenizerKind::Words), expected);
}

#[test]
fn blank_text_has_no_sentence() {
    for text in ["", " ", "\n\n \t\u{a0}\u{3000}\r\n", "\u{1c}\u{1f}"] {
        for kind in KINDS {
            for mode in MODES {
                assert!(tokenize(text, kind, mode).is_empty(), "{text:?}");
            }
        }
    }
    // The Moses rules remove control characters, so nothing is left.
    assert!(tokenize("\0 \u{7}", TokenizerKind::Moses, SentenceMode::Split).is_empty());
}

#[test]
fn sentences_are_kept_apart() {
    let text = "Dr. Hale slept. She didn’t!\n\nA new day";
    let sentences = tokenize(text, TokenizerKind::Moses, SentenceMode::Split);
    let starts: Vec<&str> = sentences.iter().map(|s| s[0].read(text)).collect();
    assert_eq!(starts, ["Dr.", "She", "A"]);
    assert_eq!(tokenize(text, TokenizerKind::Moses, SentenceMode::Off).len(), 1);
}

/// A text of several windows has the sentences of each window; here all of them are alike.
#[test]
fn a_long_paragraph_keeps_its_sentences() {
    let text = "Anna went to the market and bought some of the small green apples. ".repeat(2000);
    let sentences = check(&text, TokenizerKind::Moses, SentenceMode::Split);
    assert_eq!(sentences.len(), 2000);
    assert!(sentences.iter().all(|sentence| sentence.len() == 14));
}

#[test]
fn a_long_word_stays_whole() {
    let word = "é".repeat(500_000);
    let text = format!("Here: {word} ends. More.");
    for mode in MODES {
        for kind in KINDS {
            let sentences = check(&text, kind, mode);
            assert!(sentences.iter().flatten().any(|token| token.written(&text) == word), "{kind} {mode}");
        }
    }
}

/// Texts that make tokenizers and sentence splitters fail, hang or return wrong offsets.
fn hostile() -> Vec<String> {
    #[rustfmt::skip]
    let units = [
        "\0", "\u{feff}", "\u{200d}", "👩\u{200d}", "🇫", "🇫🇷", "\u{301}", "e\u{301}", "\u{202e}", "א", "ع", "\u{1b}[0m",
        "\r", "\n", "\r\n", "\n\n", " ", "\u{a0}", "\u{3000}", "\t", "\u{7f}", "\u{80}", "\u{ffff}", "\u{10ffff}",
        "\u{fffd}", ".", ". ", "...", "…", "!", "?! ", ",", ",,", "1,", "'", "''", "' '", "\"", "\".", "”,", "“", "“a. ",
        "«", "«a. ", "`", "(", "(a. ", ")", "[", "<", "-", "—", "--", "a", "a.", "a. ", "A.", "A. ", "a.b.c.", "a'b'", "Mr. ",
        "No. 5 ", "漢", "漢。", "「漢。", "カ", "한", "ก", "क्", "ß", "İ", "ﬁ", "𝐀", "\u{1F3FD}", "1. a\n", "* a\n", "a) b. ",
        "1\u{a0}", "&amp;", "http://a.b/c?d=e ", "a@b.c ", "@-@ ", "DOTMULTI", "''' ", "\u{1}'", "’", "’’'", "x\0y ",
    ];
    let mut rows: Vec<String> = Vec::new();
    for unit in units {
        rows.extend([1, 2, 3, 50, 5000].map(|times| unit.repeat(times)));
        rows.extend([format!("a{unit}b"), format!("{unit}a."), format!("It is{unit} {unit}so.{unit} No{unit}")]);
    }
    rows
}

#[test]
fn hostile_rows() {
    hostile().iter().for_each(|row| check_all(row));
}

#[test]
fn hostile_pairs() {
    let short: Vec<String> = hostile().into_iter().filter(|row| row.len() <= 4).collect();
    for first in &short {
        for second in &short {
            let text = format!("{first}{second}");
            KINDS.iter().for_each(|&kind| drop(check(&text, kind, SentenceMode::Split)));
        }
    }
}

/// Expected: by hand. The rest of a text of several windows is one sentence.
#[test]
fn the_rest_of_a_long_text_is_one_sentence() {
    let (sentences, rest) = ("Anna went. ".repeat(800), "b ".repeat(1000));
    let text = format!("{sentences}{rest}");
    check_all(&text);
    let ranges: Vec<_> = ranges(&text, SentenceMode::Split).collect();
    assert_eq!((ranges.len(), ranges.last()), (801, Some(&(sentences.len()..text.len()))));
}

/// Time is linear: with a quadratic step each of these would take minutes.
#[test]
fn huge_rows() {
    for unit in [" ", ".", "a", "' ", ",", "\"", "“", "漢。", "\n", "\u{301}", "🇫🇷", "a. ", "1\u{a0}"] {
        let text = unit.repeat(1_000_000 / unit.len());
        for kind in KINDS {
            check(&text, kind, SentenceMode::Off);
        }
    }
    for unit in [" ", ".", "a", "\u{301}", "a. "] {
        check(&unit.repeat(1_000_000 / unit.len()), TokenizerKind::Moses, SentenceMode::Split);
    }
    // The start of a match, and then many characters that may belong to it.
    for start in ["x\",a", "''", "\",", "1\u{a0}", "a\u{301}", "(", "http://"] {
        for unit in [".", ",", "'", "\"", " ", "a", "-"] {
            check(&format!("{start}{}", unit.repeat(300_000)), TokenizerKind::Moses, SentenceMode::Off);
        }
    }
}

/// Characters that occur in rules, and any other.
fn character() -> impl Strategy<Value = char> {
    prop_oneof![
        4 => proptest::sample::select("abNsSt.,'’‘`\"“”«»….-–—!?()17½ \u{a0}\u{3000}\n\r\0\u{1f}é漢カ한🇫\u{200d}\u{301}א".chars().collect::<Vec<_>>()),
        1 => any::<char>(),
    ]
}

fn text() -> impl Strategy<Value = String> {
    proptest::collection::vec(character(), 0..30).prop_map(String::from_iter)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 50_000,
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        ..ProptestConfig::default()
    })]

    // 100,000 strings in two tests, which run in parallel.
    #[test]
    fn offsets(text in text()) {
        check_all(&text);
    }

    #[test]
    fn offsets_of_other_strings(text in text()) {
        check_all(&text);
    }
}
