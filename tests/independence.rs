//! Vectors do not depend on the size and order of a call, on threads and cache, on unusual neighbours, or on callers
//! that start, wait and cancel. Then the forms in which vectors come out: layers, boundaries, roundings, types, precision.

use std::{
    cell::Cell,
    collections::BTreeSet,
    future::poll_fn,
    iter::once,
    ops::Range,
    pin::{Pin, pin},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
    time::Duration,
};

use arrow::{
    array::{Array, ArrayRef, AsArray, BinaryArray, StringArray, StructArray},
    datatypes::{DataType, Field, Float32Type, UInt32Type},
};
use elmo::{
    ColumnEmbedder, ColumnStats, Elmo, EmbedSpec, EmbeddedColumns, EmbedderMetrics, EmbedderSettings, Error, ModelData,
    engine::{Precision, lanes},
    model::{BiLm, DeviceName, Parameters},
    options::ModelOptions,
    spec::{
        FloatRounding, Layers, Level, ListType, Normalize, OnError, OnLong, SentenceMode, StateMode, TokenizerKind,
    },
};
use half::{bf16, f16};
use proptest::prelude::*;

use crate::{
    golden::largest_gap,
    properties::{POOLINGS, array, bits, columns, gap, one_sentence, sentences, settings, tiny, tiny_with},
    reference::{Reference, as_codes, seeded::seeded_weights, vectors, weights_as_codes},
};

// --- one row of an answer, as plain values -----------------------------------------------------------------------

#[derive(Debug, PartialEq)]
struct Answer {
    error: Option<String>,
    truncated: bool,
    /// Whether the vector, or the list of tokens, is NULL.
    null: bool,
    /// Level `token` only.
    tokens: Vec<Token>,
    /// Of all values, one vector after the other.
    bits: Vec<u32>,
}

#[derive(Debug, PartialEq)]
struct Token {
    word: String,
    bytes: Range<usize>,
    sentence: usize,
}

fn answers(found: &EmbeddedColumns) -> Vec<Answer> {
    (0..found.vectors.len()).map(|row| answer(found, row)).collect()
}

fn answer(found: &EmbeddedColumns, row: usize) -> Answer {
    let error = found.error.is_valid(row).then(|| found.error.value(row).to_owned());
    let (truncated, null) = (found.truncated.value(row), found.vectors.is_null(row));
    let mut answer = Answer { error, truncated, null, tokens: Vec::new(), bits: Vec::new() };
    if null {
        return answer;
    }
    let values = match found.vectors.as_fixed_size_list_opt() {
        Some(vectors) => vectors.value(row),
        None => {
            let list = found.vectors.as_list::<i32>().value(row);
            answer.tokens = tokens(list.as_struct());
            embeddings(&list)
        }
    };
    answer.bits = values.as_primitive::<Float32Type>().values().iter().map(|v| v.to_bits()).collect();
    answer
}

fn tokens(row: &StructArray) -> Vec<Token> {
    let numbers = |name: &str| row.column_by_name(name).unwrap().as_primitive::<UInt32Type>();
    let words = row.column_by_name("token").unwrap().as_string::<i32>();
    let (starts, ends, sentences) = (numbers("start"), numbers("end"), numbers("sentence"));
    let token = |k: usize| Token {
        word: words.value(k).to_owned(),
        bytes: starts.value(k) as usize..ends.value(k) as usize,
        sentence: sentences.value(k) as usize,
    };
    (0..row.len()).map(token).collect()
}

/// Values of the vectors of one row of level `token`, one vector after the other.
fn embeddings(row: &ArrayRef) -> ArrayRef {
    Arc::clone(row.as_struct().column_by_name("embedding").unwrap().as_fixed_size_list().values())
}

// --- size and order of calls, threads, cache ---------------------------------------------------------------------

/// Room for some words only, so that most are computed again and again.
const LITTLE: usize = 1 << 12;
/// Room for every word.
const PLENTY: usize = 256 << 20;

/// Made-up sentences of at most `most` words, to save time.
fn short(n: usize, seed: u64, most: usize) -> Vec<String> {
    let cut = |text: &String| text.split(' ').take(most).collect::<Vec<_>>().join(" ");
    sentences(n, seed).iter().map(cut).collect()
}

/// `0..n` in an order that depends on `seed`: Fisher and Yates, with a linear congruential generator.
fn shuffled(n: usize, seed: u64) -> Vec<usize> {
    let mut state = seed;
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        order.swap(i, (state >> 33) as usize % (i + 1));
    }
    order
}

/// Embeds shuffled `texts` in calls of exactly so many rows and holds every layer of every token to the bits of a first
/// run. `setups` are numbers of threads and bytes of word cache, one engine each, which take the shuffles in turn.
///
/// `calls` are numbers of rows, and shares: a share of 20 means that each shuffle takes another twentieth of the
/// sentences, because calls of few rows cost more per row. Every sentence is in calls of every size.
fn check_calls(
    data: &ModelData,
    texts: &[String],
    setups: &[(usize, usize)],
    shuffles: usize,
    calls: &[(usize, usize)],
    precision: Precision,
) -> Vec<EmbedderMetrics> {
    let spec = EmbedSpec { level: Level::Token, layers: Layers::All, ..one_sentence() };
    let start = |settings: EmbedderSettings| -> ColumnEmbedder {
        columns(&Elmo::from_data(data.clone(), &EmbedderSettings { precision, ..settings }).unwrap(), spec.clone())
    };
    let expected = answers(&start(settings()).embed(&array(texts)).unwrap());
    let engine = |&(threads, cache_bytes): &(usize, usize)| {
        start(EmbedderSettings { threads: Some(threads), cache_bytes, batch_tokens: Some(1 << 20), ..settings() })
    };
    let engines: Vec<ColumnEmbedder> = setups.iter().map(engine).collect();
    let mut compared = vec![vec![false; texts.len()]; calls.len()];
    for shuffle in 0..shuffles {
        let (threads, cache) = setups[shuffle % setups.len()];
        let engine = &engines[shuffle % setups.len()];
        let order = shuffled(texts.len(), shuffle as u64);
        for (&(rows, share), compared) in calls.iter().zip(&mut compared) {
            let chosen: Vec<usize> = order.iter().copied().filter(|i| i % share == shuffle % share).collect();
            // The last call is filled up with texts of the first one.
            let full = chosen.len().next_multiple_of(rows);
            let chosen: Vec<usize> = chosen.iter().copied().cycle().take(full).collect();
            for call in chosen.chunks(rows) {
                let part: Vec<String> = call.iter().map(|&i| texts[i].clone()).collect();
                let before = engine.metrics().batches;
                let found = answers(&engine.embed(&array(&part)).unwrap());
                assert_eq!(found.len(), rows);
                if threads == 1 {
                    assert_eq!(engine.metrics().batches - before, 1, "{rows} rows are one batch");
                }
                for (found, &i) in found.iter().zip(call) {
                    assert!(
                        *found == expected[i],
                        "sentence {i} in a call of {rows}, shuffle {shuffle}, {threads} threads, cache {cache}"
                    );
                    compared[i] = true;
                }
            }
        }
    }
    assert!(compared.iter().flatten().all(|&done| done), "a sentence is in no call of some size");
    engines.iter().map(ColumnEmbedder::metrics).collect()
}

#[test]
fn calls_of_any_size_and_order_give_the_same_bits() {
    let texts = short(1000, 17, 16);
    let words: BTreeSet<&str> = texts.iter().flat_map(|text| text.split(' ')).collect();
    let setups = [(1, 0), (2, 0), (1, LITTLE), (2, LITTLE), (1, PLENTY), (2, PLENTY)];
    let calls = [(1, 20), (2, 20), (7, 10), (64, 2), (256, 2)];
    let metrics = check_calls(&ModelData::tiny(), &texts, &setups, 20, &calls, Precision::F32);
    // The caches were what they should be. With room for all a thread computes a word once, but another thread may do
    // the same at the same time.
    for (&(threads, cache), metrics) in setups.iter().zip(metrics) {
        let each_once = (threads * words.len()) as u64;
        match cache {
            0 => assert_eq!(metrics.cache_hits, 0),
            PLENTY => assert!(metrics.words_computed <= each_once && metrics.cache_hits > 0, "{metrics:?}"),
            _ => assert!(metrics.words_computed > each_once, "{metrics:?}"),
        }
    }
}

/// The published shape `small`, as in `pipelines/src/diagnose/sizes.rs`.
pub(crate) fn published_small() -> ModelOptions {
    let json = r#"{"lstm": {"use_skip_connections": true, "projection_dim": 128, "cell_clip": 3, "proj_clip": 3,
        "dim": 1024, "n_layers": 2}, "char_cnn": {"activation": "relu", "n_highway": 1,
        "filters": [[1, 32], [2, 32], [3, 64], [4, 128], [5, 256], [6, 512], [7, 1024]],
        "embedding": {"dim": 16}, "n_characters": 262, "max_characters_per_token": 50}}"#;
    ModelOptions::from_json(json.as_bytes(), "small").unwrap()
}

/// Products of the sizes that people have: other kernels than those of the tiny model.
#[test]
fn calls_of_any_size_and_order_give_the_same_bits_in_a_published_shape() {
    let options = published_small();
    let weights = seeded_weights(&options, 5, 1.0);
    let data = ModelData::new(options, weights, "small").unwrap();
    let setups = [(1, 0), (2, LITTLE), (1, PLENTY)];
    check_calls(&data, &short(60, 19, 8), &setups, 3, &[(1, 3), (2, 3), (7, 1), (60, 1)], Precision::F32);
}

// --- hostile texts -----------------------------------------------------------------------------------------------

/// What makes tokenizers and sentence splitters fail, hang or lie about offsets; most are those of `src/text/tests.rs`.
#[rustfmt::skip]
const UNITS: &[&str] = &[
    "\0", "\u{feff}", "\u{200d}", "👩\u{200d}", "🇫", "🇫🇷", "\u{301}", "e\u{301}", "\u{202e}", "א", "ع", "\u{1b}[0m",
    "\r", "\n", "\r\n", "\n\n", " ", "\u{a0}", "\u{3000}", "\t", "\u{7f}", "\u{80}", "\u{ffff}", "\u{10ffff}",
    "\u{fffd}", ".", ". ", "...", "…", "!", "?! ", ",", ",,", "1,", "'", "''", "' '", "\"", "\".", "”,", "“", "“a. ",
    "«", "«a. ", "`", "(", "(a. ", ")", "[", "<", "-", "—", "--", "a", "a.", "a. ", "A.", "A. ", "a.b.c.", "a'b'", "Mr. ",
    "No. 5 ", "漢", "漢。", "「漢。", "カ", "한", "ก", "क्", "ß", "İ", "ﬁ", "𝐀", "\u{1F3FD}", "1. a\n", "* a\n", "a) b. ",
    "1\u{a0}", "&amp;", "http://a.b/c?d=e ", "a@b.c ", "@-@ ", "DOTMULTI", "''' ", "\u{1}'", "’", "’’'", "x\0y ",
    "<S>", "</S>", "<S> ", "</S> ", "\u{2028}", "\u{2029}", "\u{200b}", "\u{2066}", "\u{ad}", "👍🏽", "1️⃣",
];

/// Characters that are not seen, or should not be there.
#[rustfmt::skip]
const UNSEEN: &[char] = &[
    // White space of Unicode beyond the controls.
    '\u{20}', '\u{a0}', '\u{1680}', '\u{2000}', '\u{2001}', '\u{2002}', '\u{2003}', '\u{2004}', '\u{2005}', '\u{2006}',
    '\u{2007}', '\u{2008}', '\u{2009}', '\u{200a}', '\u{2028}', '\u{2029}', '\u{202f}', '\u{205f}', '\u{3000}',
    // Zero width, joiners, fillers.
    '\u{ad}', '\u{34f}', '\u{115f}', '\u{1160}', '\u{17b4}', '\u{180b}', '\u{180e}', '\u{200b}', '\u{200c}', '\u{200d}',
    '\u{2060}', '\u{2061}', '\u{2064}', '\u{2800}', '\u{3164}', '\u{fe00}', '\u{fe0f}', '\u{feff}', '\u{ffa0}',
    // Directions.
    '\u{61c}', '\u{200e}', '\u{200f}', '\u{202a}', '\u{202b}', '\u{202c}', '\u{202d}', '\u{202e}', '\u{2066}', '\u{2067}',
    '\u{2068}', '\u{2069}',
    // Tags, private use, no characters at all.
    '\u{fff9}', '\u{fffb}', '\u{fffc}', '\u{e0001}', '\u{e0041}', '\u{e007f}', '\u{e000}', '\u{f8ff}', '\u{f0000}',
    '\u{fdd0}', '\u{fffe}', '\u{ffff}', '\u{1ffff}', '\u{10fffe}', '\u{10ffff}',
    // The first and last of each length in UTF-8.
    '\u{7f}', '\u{80}', '\u{7ff}', '\u{800}', '\u{d7ff}', '\u{10000}',
];

/// Bytes that are no UTF-8, and the first of them that cannot be read: by hand, from table 3-7 of the Unicode Standard
/// (which bytes may follow which).
const BROKEN: &[(&[u8], usize)] = &[
    // Surrogates: alone and as a pair (CESU-8), between words, at the end.
    (b"\xed\xa0\x80", 0),
    (b"\xed\xbf\xbf", 0),
    (b"\xed\xa0\xbd\xed\xb8\x80", 0),
    (b"ok \xed\xa0\x80 ok", 3),
    (b"It rained. So \xed\xb0\x80", 14),
    // Bytes that are never in UTF-8.
    (b"\xff", 0),
    (&[0xff; 1000], 0),
    (b"a\xffb", 1),
    (b"\xfe\xff\0h\0i", 0),
    (b"\xff\xfeh\0i\0", 0),
    (b"\xc0\x80", 0),
    (b"a\xc1\xbf", 1),
    (b"\xf5\x80\x80\x80", 0),
    (b"\xf8\x88\x80\x80\x80", 0),
    // Too long a form, or beyond U+10FFFF.
    (b"\xe0\x80\x80", 0),
    (b"\xf0\x80\x80\x80", 0),
    (b"\xf4\x90\x80\x80", 0),
    // Continuation bytes without a beginning.
    (b"\x80", 0),
    (b"abc\x80", 3),
    (b"\xbf\xbf\xbf\xbf", 0),
    (b"\x1f\x8b\x08\0", 1),
    // Incomplete sequences: at the end of the text, or followed by another character.
    (b"\xc3", 0),
    (b"caf\xc3", 3),
    (b"na\xefve", 2),
    (b"\xe6\xbc", 0),
    (b"ok \xf0\x9f\x98", 3),
    (b"\xf0\x9f \x98\x80", 0),
];

fn controls() -> impl Iterator<Item = char> {
    ('\0'..='\u{1f}').chain('\u{7f}'..='\u{9f}')
}

/// Whole texts.
fn texts() -> Vec<String> {
    let mut texts: Vec<String> = [
        "",
        " ",
        "\u{a0}",
        "\u{feff}",
        "\u{feff}It rained.",
        "An is\u{feff}land.",
        "A line\u{2028}another\u{2029}and a paragraph.",
        "One\u{b}two\u{c}three\u{85}four\u{1c}five\u{1d}six\u{1e}seven\u{1f}eight",
        // What looks like the marks of the model.
        "<S>",
        "</S>",
        "<S> </S>",
        "</S> <S>",
        "<S></S>",
        "It <S> rained </S> . <S> So",
        "<s> </s> <UNK> [CLS] [PAD] <|endoftext|>",
        // Markup, addresses, code, what should never be run.
        "&lt;b&gt; &amp;amp; &#39; &nbsp; &#x0; &notanentity; &;",
        "<script>alert('1')</script><p>A <b>bold</b> word.</p><br/>",
        "See https://example.org/a/b.c?d=e&f=%20#g, or mail a.b+c@example.org.",
        "'; DROP TABLE texts; -- \" OR 1=1",
        "${jndi:ldap://a} {{7*7}} $(id) `id` %s%n%d %00 ..\\..\\..",
        "=1+1|' /C calc'!A0",
        r"\0 \x00 \u0000 \ud800 \n \\",
        "\u{1b}[2J\u{1b}[31mred\u{1b}[0m\u{7}\u{8}",
        // Nothing but signs.
        "!?.,;:'\"()[]{}<>-_/\\|@#$%^&*+=~`",
        "... !!! ??? --- ;;; ''' \"\"\" ``` ((( )))",
        "…—–’‘“”«»‹›¿¡§¶†‡•‰′″",
        "1e308 -0 NaN inf 0x1F 1,234.56 1.2.3.4 ½ ٣ ४",
        // Scripts without spaces, from right to left, of many marks.
        "日本語の文章です。次の文です！本当に？はい",
        "ภาษาไทยไม่มีการเว้นวรรค",
        "שלום עולם. מה שלומך? \u{202b}abc\u{202c}",
        "السلام عليكم ورحمة الله. ﷽",
        "नमस्ते दुनिया। क्षत्रिय",
        "\u{1112}\u{1161}\u{11ab}\u{1100}\u{1173}\u{11af} 한글",
        "İstanbul ıssız ẞ ß ǅ ﬃ ſ K Å",
        "𝕳𝖊𝖑𝖑𝖔 ｆｕｌｌ ｗｉｄｔｈ ⓒⓘⓡⓒⓛⓔ",
        // Emoji: families, skins, flags, keys, tags, and halves of them.
        "👩\u{200d}👩\u{200d}👧\u{200d}👦 👨🏽\u{200d}🚀 🏳\u{fe0f}\u{200d}🌈 🇩🇪🇫🇷🇪 1\u{fe0f}\u{20e3} \u{20e3} 🏽",
        "🏴\u{e0067}\u{e0062}\u{e0065}\u{e006e}\u{e0067}\u{e007f} \u{200d}\u{200d}\u{fe0f}",
    ]
    .map(str::to_owned)
    .into();
    texts.extend([
        "a".repeat(1_000_000),
        // Above the size from which a text is embedded piece by piece.
        format!("{}!!", "é".repeat(1 << 19)),
        " ".repeat(100_000),
        "\n".repeat(100_000),
        format!("{}end", " \t\r\n\u{a0}".repeat(5000)),
        "漢字".repeat(1500),
        "日本語の文章です。".repeat(200),
        "👩\u{200d}👧\u{200d}".repeat(500),
        "🇫🇷".repeat(500),
        format!("Z{} and on", "\u{315}\u{300}".repeat(1500)),
        "a ".repeat(1500),
        ". ".repeat(500),
        "(\"a. ".repeat(200),
        "</S> <S> ".repeat(150),
        "word\0word\u{1}".repeat(300),
        "x".repeat(50) + " " + &"é".repeat(24) + "x" + " " + &"漢".repeat(17),
    ]);
    texts
}

/// The corpus: NULL, texts, and at the end what is [`BROKEN`].
fn corpus() -> Vec<Option<Vec<u8>>> {
    let mut rows = texts();
    for unit in UNITS {
        rows.extend([(*unit).to_owned(), unit.repeat(20)]);
        rows.extend([format!("a{unit}b"), format!("{unit}a."), format!("It is{unit} {unit}so.{unit} No{unit}")]);
    }
    // Each beside others, near and far in the list.
    for (i, unit) in UNITS.iter().enumerate() {
        rows.extend([1, 7, 31].map(|far| format!("{unit}{}x{unit}", UNITS[(i + far) % UNITS.len()])));
    }
    rows.extend(controls().map(|c| format!("a{c}b {c} c.{c}{c}")));
    rows.extend(UNSEEN.iter().map(|c| format!("wo{c}rd {c}a.{c}{c} The{c} end{c}")));
    let texts = rows.into_iter().map(|text| Some(text.into_bytes()));
    once(None).chain(texts).chain(BROKEN.iter().map(|(bytes, _)| Some(bytes.to_vec()))).collect()
}

/// One engine for rows together, and one without a cache for each row alone.
fn engines() -> (Elmo, Elmo) {
    (tiny(), tiny_with(&EmbedderSettings { cache_bytes: 0, threads: Some(1), ..settings() }))
}

/// Embeds rows together and each alone, and checks the guarantees that hold for any bytes.
fn check_rows((together, alone): &(Elmo, Elmo), spec: &EmbedSpec, rows: &[Option<Vec<u8>>]) -> Vec<Answer> {
    let bytes: Vec<Option<&[u8]>> = rows.iter().map(|row| row.as_deref()).collect();
    let column: ArrayRef = Arc::new(BinaryArray::from(bytes));
    let found = columns(together, spec.clone()).embed(&column).unwrap();
    assert_eq!((found.vectors.len(), found.truncated.len(), found.error.len()), (rows.len(), rows.len(), rows.len()));
    assert!(found.keep.is_none(), "rows in are rows out");
    let answers = answers(&found);

    let alone = columns(alone, spec.clone());
    let mut sum = ColumnStats::default();
    for (i, (row, answered)) in rows.iter().zip(&answers).enumerate() {
        let row = row.as_deref();
        let beginning = row.map(|row| String::from_utf8_lossy(&row[..row.len().min(60)]));
        let what = format!("{} {} {}, row {i}, {beginning:?}", spec.level, spec.tokenizer, spec.sentences);
        check_row(row, answered, spec, together.options().width(), &what);
        let single = alone.embed(&column.slice(i, 1)).unwrap();
        assert!(*answered == answer(&single, 0), "{what}: alone it has another answer");
        sum = added(&sum, &single.stats);
    }

    assert_eq!(found.stats, sum, "the counts of all are those of each");
    let with_tokens = answers.iter().filter(|answer| !answer.bits.is_empty()).count();
    let stats = found.stats;
    assert_eq!(stats.rows, rows.len());
    assert_eq!(stats.nulls, rows.iter().filter(|row| row.is_none()).count());
    assert_eq!(stats.errors, answers.iter().filter(|answer| answer.error.is_some()).count());
    assert_eq!(stats.truncated, answers.iter().filter(|answer| answer.truncated).count());
    assert_eq!(stats.nulls + stats.errors + stats.empty + with_tokens, rows.len(), "a row is one of these: {stats:?}");
    assert!(stats.sentences >= with_tokens && stats.tokens >= stats.sentences, "{stats:?}");
    answers
}

fn added(a: &ColumnStats, b: &ColumnStats) -> ColumnStats {
    ColumnStats {
        rows: a.rows + b.rows,
        nulls: a.nulls + b.nulls,
        empty: a.empty + b.empty,
        sentences: a.sentences + b.sentences,
        tokens: a.tokens + b.tokens,
        truncated: a.truncated + b.truncated,
        errors: a.errors + b.errors,
    }
}

fn check_row(row: Option<&[u8]>, answer: &Answer, spec: &EmbedSpec, width: usize, what: &str) {
    let text = match row.map(std::str::from_utf8) {
        Some(Ok(text)) => text,
        missing => {
            assert!(answer.null && answer.bits.is_empty(), "{what}");
            assert_eq!(answer.error.is_some(), missing.is_some(), "{what}: {:?}", answer.error);
            return;
        }
    };
    assert_eq!(answer.error, None, "{what}");
    assert!(!answer.truncated, "{what}");
    assert!(answer.bits.iter().all(|&bits| f32::from_bits(bits).is_finite()), "{what}");
    if spec.level == Level::Sentence {
        assert_eq!(answer.bits.len(), if answer.null { 0 } else { width }, "{what}");
        return;
    }
    assert!(!answer.null, "{what}: without tokens it is an empty list");
    assert_eq!(answer.bits.len(), answer.tokens.len() * width, "{what}");
    let (mut end, mut sentence) = (0, 0);
    for token in &answer.tokens {
        assert_eq!(text.get(token.bytes.clone()), Some(token.word.as_str()), "{what}: {:?}", token.bytes);
        assert!(end <= token.bytes.start && token.bytes.start < token.bytes.end, "{what}: {:?}", token.bytes);
        assert!(token.sentence == sentence || token.sentence == sentence + 1, "{what}: sentence {}", token.sentence);
        (end, sentence) = (token.bytes.end, token.sentence);
    }
    if spec.sentences == SentenceMode::Off {
        assert_eq!(sentence, 0, "{what}");
        if spec.tokenizer == TokenizerKind::Whitespace {
            // The rule of Python's `str.split`: white space of Unicode and the four separators U+001C to U+001F.
            let space = |c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c);
            let words = text.split(space).filter(|word| !word.is_empty());
            assert!(answer.tokens.iter().map(|token| token.word.as_str()).eq(words), "{what}");
        }
    }
}

fn check_corpus(tokenizer: TokenizerKind) {
    let engines = engines();
    let rows = corpus();
    let distinct = rows.iter().collect::<BTreeSet<_>>().len();
    assert!(distinct >= 1000, "{distinct} distinct rows");
    for level in [Level::Sentence, Level::Token] {
        for sentences in [SentenceMode::Split, SentenceMode::Off] {
            let on_error = OnError::Null;
            let spec = EmbedSpec { level, tokenizer, sentences, on_error, max_tokens: 100, ..EmbedSpec::default() };
            let answers = check_rows(&engines, &spec, &rows);
            let (texts, broken) = answers.split_at(rows.len() - BROKEN.len());
            assert!(texts.iter().all(|answer| answer.error.is_none()));
            for (answer, (bytes, at)) in broken.iter().zip(BROKEN) {
                let reason = format!("not UTF-8: invalid at byte {at} of {}", bytes.len());
                assert_eq!(answer.error.as_deref(), Some(reason.as_str()), "{bytes:x?}");
            }
        }
    }
}

// A test for each tokenizer, so that they run concurrently.

#[test]
fn hostile_rows_with_the_moses_tokenizer() {
    check_corpus(TokenizerKind::Moses);
}

#[test]
fn hostile_rows_with_words() {
    check_corpus(TokenizerKind::Words);
}

#[test]
fn hostile_rows_with_whitespace() {
    check_corpus(TokenizerKind::Whitespace);
}

/// Any bytes: three in four are UTF-8, with control characters and what is in [`UNITS`].
fn any_bytes() -> impl Strategy<Value = Vec<u8>> {
    let character = || {
        prop_oneof![
            any::<char>().prop_map(|c| c.to_string().into_bytes()),
            (0_u8..0x80).prop_map(|byte| vec![byte]),
            prop::sample::select(UNITS).prop_map(|unit| unit.as_bytes().to_vec()),
        ]
    };
    let byte = any::<u8>().prop_map(|byte| vec![byte]);
    prop_oneof![
        3 => prop::collection::vec(character(), 0..25),
        1 => prop::collection::vec(prop_oneof![character(), byte], 0..25),
    ]
    .prop_map(|pieces: Vec<Vec<u8>>| pieces.concat())
}

/// One pair of engines for all cases of a property.
fn shared() -> &'static (Elmo, Elmo) {
    static ENGINES: OnceLock<(Elmo, Elmo)> = OnceLock::new();
    ENGINES.get_or_init(engines)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_a_row(
        rows in prop::collection::vec(prop::option::weighted(0.9, any_bytes()), 1..9),
        tokenizer in prop::sample::select(vec![TokenizerKind::Moses, TokenizerKind::Words, TokenizerKind::Whitespace]),
        level in prop::sample::select(vec![Level::Sentence, Level::Token]),
        split in any::<bool>(),
    ) {
        let sentences = if split { SentenceMode::Split } else { SentenceMode::Off };
        let on_error = OnError::Null;
        let spec = EmbedSpec { level, tokenizer, sentences, on_error, max_tokens: 9, ..EmbedSpec::default() };
        check_rows(shared(), &spec, &rows);
    }
}

// --- callers that start, wait and cancel -------------------------------------------------------------------------

/// Runs `work` on a thread of its own: if a caller waits forever, the test fails instead of hanging.
fn within(seconds: u64, work: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    let worker = thread::spawn(move || {
        work();
        let _ = done.send(());
    });
    let ended = ended.recv_timeout(Duration::from_secs(seconds));
    assert_ne!(ended, Err(mpsc::RecvTimeoutError::Timeout), "no end after {seconds} s: a caller waits forever");
    if let Err(panic) = worker.join() {
        std::panic::resume_unwind(panic);
    }
}

/// An engine of two threads that takes small batches, so that there are many.
fn busy(queue_tokens: usize) -> EmbedderSettings {
    EmbedderSettings { queue_tokens, batch_tokens: Some(64), threads: Some(2), ..settings() }
}

/// Bits of pooled vectors by an engine that the test has no other use for.
fn expected_bits(texts: &[String]) -> Vec<Option<Vec<u32>>> {
    bits(&columns(&tiny(), one_sentence()).embed(&array(texts)).unwrap().vectors)
}

#[test]
fn closing_answers_everything_that_was_queued() {
    within(60, || {
        let texts = sentences(400, 9);
        let expected = expected_bits(&texts);
        let elmo = tiny_with(&busy(1 << 20));
        let embedder = columns(&elmo, one_sentence());
        let pending: Vec<_> = texts.chunks(5).map(|part| embedder.submit(&array(part)).unwrap()).collect();
        thread::scope(|scope| {
            scope.spawn(|| elmo.embedder().close());
            for (pending, expected) in pending.into_iter().zip(expected.chunks(5)) {
                assert!(bits(&pending.wait().unwrap().vectors) == expected);
            }
        });
        assert!(matches!(embedder.submit(&array(&texts[..1])), Err(Error::Closed)));
    });
}

#[test]
fn a_caller_of_a_closing_engine_is_answered_or_refused() {
    within(120, || {
        let texts = sentences(200, 10);
        let expected = expected_bits(&texts);
        // So soon that most callers have not begun, and so late that some wait for room in the queue.
        for milliseconds in [0, 2, 10, 40] {
            let elmo = tiny_with(&busy(300));
            let embedder = columns(&elmo, one_sentence());
            thread::scope(|scope| {
                for caller in 0..3 {
                    let (embedder, texts, expected) = (&embedder, &texts, &expected);
                    scope.spawn(move || {
                        let mut pending = Vec::new();
                        let mut refused = false;
                        for call in 0..30 {
                            let from = (caller * 37 + call * 11) % 190;
                            match embedder.submit(&array(&texts[from..from + 10])) {
                                Ok(_) if refused => panic!("work is taken after it was refused"),
                                Ok(answer) => pending.push((from, answer)),
                                Err(Error::Closed) => refused = true,
                                Err(other) => panic!("{other}"),
                            }
                        }
                        for (from, answer) in pending {
                            assert!(bits(&answer.wait().unwrap().vectors) == expected[from..from + 10]);
                        }
                    });
                }
                scope.spawn(|| {
                    thread::sleep(Duration::from_millis(milliseconds));
                    elmo.embedder().close();
                });
            });
            assert!(matches!(embedder.submit(&array(&texts[..1])), Err(Error::Closed)));
        }
    });
}

#[test]
fn an_answer_outlives_every_handle() {
    within(60, || {
        let texts = sentences(100, 11);
        let pending = columns(&tiny_with(&busy(1 << 20)), one_sentence()).submit(&array(&texts)).unwrap();
        assert!(bits(&pending.wait().unwrap().vectors) == expected_bits(&texts));
    });
}

#[test]
fn answers_that_nobody_waits_for_harm_no_other() {
    within(60, || {
        let texts = sentences(200, 5);
        let expected = expected_bits(&texts);
        let mut nobody = Context::from_waker(Waker::noop());
        let elmo = tiny_with(&busy(1 << 20));
        let embedder = columns(&elmo, one_sentence());
        let mut kept = Vec::new();
        for (n, part) in texts.chunks(10).enumerate() {
            let mut pending = embedder.submit(&array(part)).unwrap();
            match n % 4 {
                0 => drop(pending),
                1 => {
                    let _ = Pin::new(&mut pending).poll(&mut nobody);
                    drop(pending);
                }
                _ => kept.push((10 * n, pending)),
            }
        }
        for (from, pending) in kept {
            assert!(bits(&pending.wait().unwrap().vectors) == expected[from..from + 10], "rows from {from}");
        }
        assert!(bits(&embedder.embed(&array(&texts)).unwrap().vectors) == expected, "the engine works on");

        // Callers that are cancelled while they wait for room in the queue.
        let elmo = tiny_with(&busy(1));
        let embedder = columns(&elmo, one_sentence());
        let (all, part) = (array(&texts), array(&texts[..10]));
        let pending = embedder.submit(&all).unwrap();
        for _ in 0..10 {
            let _ = pin!(embedder.submit_async(&part)).poll(&mut nobody);
        }
        assert!(bits(&pending.wait().unwrap().vectors) == expected);
        assert!(bits(&embedder.embed(&part).unwrap().vectors) == expected[..10]);
    });
}

type Running<'f, T> = Pin<Box<dyn Future<Output = T> + 'f>>;

/// Wakes one future of [`join`].
struct Task {
    ready: AtomicBool,
    caller: Thread,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.ready.store(true, Ordering::SeqCst);
        self.caller.unpark();
    }
}

/// A runtime of one thread: drives all futures to their ends, in the order given. A future is polled only when its own
/// waker was called, so one that is never called shows as a hang.
fn join<T>(futures: Vec<Running<'_, T>>) -> Vec<T> {
    let mut running = Vec::new();
    let mut results: Vec<Option<T>> = Vec::new();
    for future in futures {
        running.push((Arc::new(Task { ready: AtomicBool::new(true), caller: thread::current() }), future));
        results.push(None);
    }
    while results.iter().any(Option::is_none) {
        let mut idle = true;
        for ((task, future), result) in running.iter_mut().zip(&mut results) {
            if result.is_some() || !task.ready.swap(false, Ordering::SeqCst) {
                continue;
            }
            idle = false;
            let waker = Waker::from(Arc::clone(task));
            if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                *result = Some(value);
            }
        }
        if idle {
            thread::park();
        }
    }
    results.into_iter().flatten().collect()
}

/// Counts how often a future is polled in vain.
async fn counted<F: Future>(future: F, waits: &Cell<usize>) -> F::Output {
    let mut future = pin!(future);
    poll_fn(|context| {
        let polled = future.as_mut().poll(context);
        waits.set(waits.get() + usize::from(polled.is_pending()));
        polled
    })
    .await
}

/// The device threads need nothing of the callers' one thread, and a full queue makes callers yield, not block.
#[test]
fn callers_on_one_thread_take_turns_when_the_queue_is_full() {
    within(120, || {
        let texts = sentences(200, 3);
        let expected = expected_bits(&texts);
        let elmo = tiny_with(&busy(50));
        let embedder = columns(&elmo, one_sentence());
        let waits = Cell::new(0);
        let mut callers: Vec<Running<'_, ()>> = Vec::new();
        for caller in 0..8 {
            let (embedder, texts, expected, waits) = (&embedder, &texts, &expected, &waits);
            callers.push(Box::pin(async move {
                for call in 0..4 {
                    let from = (caller * 31 + call * 17) % 150;
                    let part = array(&texts[from..from + 50]);
                    let pending = counted(embedder.submit_async(&part), waits).await.unwrap();
                    let found = pending.await.unwrap();
                    assert!(bits(&found.vectors) == expected[from..from + 50], "caller {caller}, call {call}");
                }
            }));
        }
        join(callers);
        // 50 rows are some 1,000 tokens, and the queue is full from 50 on.
        assert!(waits.get() > 0, "no caller had to wait");

        // Closing wakes those who wait for room: each is refused, or was let in before.
        let all = array(&texts);
        let mut callers: Vec<Running<'_, bool>> = Vec::new();
        for _ in 0..8 {
            let (embedder, all, expected) = (&embedder, &all, &expected);
            callers.push(Box::pin(async move {
                match embedder.submit_async(all).await {
                    Ok(pending) => bits(&pending.await.unwrap().vectors) == *expected,
                    Err(error) => matches!(error, Error::Closed),
                }
            }));
        }
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(20));
                elmo.embedder().close();
            });
            assert_eq!(join(callers), [true; 8]);
        });
    });
}

// --- threads and devices -----------------------------------------------------------------------------------------

#[test]
fn a_cpu_has_its_threads_and_a_gpu_three_in_the_order_of_the_devices() {
    use DeviceName::{Cpu, Cuda};
    assert_eq!(lanes(&[Cpu], Some(3)), [Cpu, Cpu, Cpu]);
    assert_eq!(lanes(&[Cuda(0), Cuda(1)], Some(4)), [[Cuda(0); 3], [Cuda(1); 3]].concat());
    let mixed = [vec![Cuda(1); 3], vec![Cpu; 2], vec![Cuda(0); 3]].concat();
    assert_eq!(lanes(&[Cuda(1), Cpu, Cuda(0)], Some(2)), mixed);
    assert_eq!(lanes(&[Cpu], Some(0)), [Cpu], "there is one thread at the least");
    assert_eq!(lanes(&[Cpu], None).len(), thread::available_parallelism().unwrap().get());
    assert!(lanes(&[], Some(2)).is_empty());
    let elmo = tiny_with(&EmbedderSettings { threads: Some(3), batch_tokens: Some(100), ..settings() });
    assert_eq!(elmo.embedder().tokens_at_once(), 300);
}

// --- state `carry` -----------------------------------------------------------------------------------------------

#[test]
fn carried_state_goes_on_from_call_to_call() {
    let words = short(24, 27, 6);
    let text = |(i, text): (usize, &String)| match i % 6 {
        2 => None,
        4 => Some(" ".to_owned()),
        _ => Some(text.clone()),
    };
    let column: ArrayRef = Arc::new(words.iter().enumerate().map(text).collect::<StringArray>());
    let elmo = tiny();
    for (level, boundaries) in [(Level::Sentence, false), (Level::Token, false), (Level::Token, true)] {
        let in_calls = |calls: &[usize]| {
            let spec = EmbedSpec {
                state: StateMode::Carry,
                batch_rows: Some(4),
                on_long: OnLong::Truncate,
                level,
                boundaries,
                ..one_sentence()
            };
            // A clone is another handle on the same state.
            let one = columns(&elmo, spec);
            let two = one.clone();
            let (mut from, mut found) = (0, Vec::new());
            for (n, &rows) in calls.iter().enumerate() {
                let embedder = if n.is_multiple_of(2) { &one } else { &two };
                found.extend(answers(&embedder.embed(&column.slice(from, rows)).unwrap()));
                from += rows;
            }
            found
        };
        let expected = in_calls(&[24]);
        assert_eq!(expected.len(), 24);
        for calls in [vec![4; 6], vec![8, 16], vec![12, 4, 8]] {
            assert!(in_calls(&calls) == expected, "{level}, boundaries {boundaries}, calls of {calls:?} rows");
        }
        assert!(in_calls(&[3; 8]) != expected, "calls that are no multiple make other batches");
    }
}

// --- the forms of vectors ----------------------------------------------------------------------------------------

#[test]
fn all_layers_stand_one_after_the_other_and_are_pooled_each_by_itself() {
    let data = ModelData::tiny();
    let reference = Reference::new(&data.options, &data.weights);
    let width = data.options.width();
    let of = |sentence: &str| vectors::all(&reference.layers(&sentence.split(' ').collect::<Vec<_>>()), width);
    let expected = [of("The tide was out ."), of("Nobody had told her !")].concat();
    let texts = array(&["before", "The tide was out. Nobody had told her!", "after"].map(str::to_owned));
    let elmo = tiny();
    let all = |level| EmbedSpec { level, layers: Layers::All, ..EmbedSpec::default() };

    let embedder = columns(&elmo, all(Level::Token));
    assert_eq!(embedder.width(), 3 * width);
    let found = embeddings(&embedder.embed(&texts).unwrap().vectors.as_list::<i32>().value(1));
    let worst = gap(&found, &expected);
    assert!(worst < 5e-6, "tokens: {worst:e}");
    // Layer 0 first: as that layer alone, to the bit.
    let found = found.as_primitive::<Float32Type>().values();
    for layer in 0..3 {
        let spec = EmbedSpec { layers: Layers::One(layer), ..all(Level::Token) };
        let alone = answers(&columns(&elmo, spec).embed(&texts).unwrap()).remove(1);
        let values = found.chunks(width).skip(layer).step_by(3).flatten();
        assert!(values.map(|v| v.to_bits()).eq(alone.bits), "layer {layer}");
    }

    // `ends` takes forward halves of the last token and backward halves of the first, layer by layer; length 1 is
    // that of each layer too.
    for (pooling, expected_pooling) in POOLINGS {
        let pooled = vectors::pool(&expected, 3 * width, width / 2, expected_pooling).unwrap();
        let scaled: Vec<f64> = pooled.chunks(width).flat_map(vectors::l2).collect();
        for (normalize, expected) in [(Normalize::Off, pooled), (Normalize::L2, scaled)] {
            let spec = EmbedSpec { pooling, normalize, ..all(Level::Sentence) };
            let found = columns(&elmo, spec).embed(&texts).unwrap().vectors;
            let worst = gap(&found.as_fixed_size_list().value(1), &expected);
            assert!(worst < 5e-6, "{pooling} {normalize}: {worst:e}");
        }
    }
    let field = columns(&elmo, all(Level::Sentence)).fields().remove(0);
    let shape = format!(r#"{{"shape":[3,{width}],"dim_names":["layer","dim"]}}"#);
    assert_eq!(field.metadata()["ARROW:extension:metadata"], shape);
}

#[test]
fn boundaries_of_a_sentence_in_windows_are_those_of_its_first_and_last() {
    let data = ModelData::tiny();
    let reference = Reference::new(&data.options, &data.weights);
    let width = data.options.width();
    let words: Vec<String> = (0..50).map(|i| format!("w{i}")).collect();
    let texts = array(&[words.join(" ")]);
    let elmo = tiny();
    let read = |boundaries| {
        let spec = EmbedSpec { boundaries, level: Level::Token, max_tokens: 20, ..one_sentence() };
        answers(&columns(&elmo, EmbedSpec { on_long: OnLong::Window, ..spec }).embed(&texts).unwrap()).remove(0)
    };
    let (with, without) = (read(true), read(false));
    let bounded = once("<S>").chain(words.iter().map(String::as_str)).chain(once("</S>"));
    assert!(with.tokens.iter().map(|token| token.word.as_str()).eq(bounded), "{:?}", with.tokens);
    assert!(with.bits[width..51 * width] == without.bits[..], "the words between have other bits");
    let bytes = texts.as_string::<i32>().value(0).len();
    assert_eq!((&with.tokens[0].bytes, &with.tokens[51].bytes), (&(0..0), &(bytes..bytes)));
    // The reference reads the windows 0..20 and 30..50 (worked out by hand in `properties.rs`), each as a sentence.
    let read = |words: &[String]| vectors::average(&reference.sentence(words, &reference.zero_state(), true).layers);
    let (first, last) = (read(&words[..20]), read(&words[30..]));
    let ends = [(&with.bits[..width], &first[..width]), (&with.bits[51 * width..], &last[21 * width..])];
    for (found, expected) in ends {
        let found: Vec<f64> = found.iter().map(|&bits| f64::from(f32::from_bits(bits))).collect();
        assert!(largest_gap(&found, expected) < 5e-6);
    }
}

#[test]
fn every_token_and_boundary_says_in_which_sentence_it_stands() {
    let texts = array(&["The tide was out. Nobody had told her! She walked back, slowly, over wet stones.".to_owned()]);
    // By hand.
    let cut = ["The tide was out .", "Nobody had told her !", "She walked back , slowly , over wet stones ."];
    let expected = |boundaries: bool| -> Vec<(&'static str, usize)> {
        let bound = |word| boundaries.then_some(word).into_iter();
        let words = |k: usize| bound("<S>").chain(cut[k].split(' ')).chain(bound("</S>")).map(move |word| (word, k));
        (0..3).flat_map(words).collect()
    };
    let elmo = tiny();
    // With 4 every sentence is read in windows, which changes neither words nor numbers.
    for max_tokens in [512, 4] {
        for boundaries in [false, true] {
            let spec = EmbedSpec { level: Level::Token, boundaries, max_tokens, ..EmbedSpec::default() };
            let answer = answers(&columns(&elmo, spec).embed(&texts).unwrap()).remove(0);
            let found: Vec<(&str, usize)> = answer.tokens.iter().map(|t| (t.word.as_str(), t.sentence)).collect();
            assert_eq!(found, expected(boundaries), "max-tokens {max_tokens}");
        }
    }
}

#[test]
fn rounded_values_are_the_nearest_that_the_narrow_format_has() {
    type Round = fn(f32) -> f32;
    // The format's own rounding; bits of a float32 that it lacks; half a step beside the value. float16 keeps 10 bits
    // of 23 behind the first, bfloat16 keeps 7.
    let cases: [(FloatRounding, Round, u32, f32); 2] = [
        (FloatRounding::F16Rounded, |v| f16::from_f32(v).to_f32(), 13, 2.0_f32.powi(-11)),
        (FloatRounding::Bf16Rounded, |v| bf16::from_f32(v).to_f32(), 16, 2.0_f32.powi(-8)),
    ];
    let texts = array(&short(30, 21, 12));
    let elmo = tiny();
    for level in [Level::Sentence, Level::Token] {
        for normalize in [Normalize::Off, Normalize::L2] {
            let values = |float| -> Vec<f32> {
                let spec = EmbedSpec { level, normalize, float, ..one_sentence() };
                let answers = answers(&columns(&elmo, spec).embed(&texts).unwrap());
                answers.iter().flat_map(|answer| &answer.bits).map(|&bits| f32::from_bits(bits)).collect()
            };
            let full = values(FloatRounding::F32);
            for (float, round, lacks, half_step) in cases {
                let found = values(float);
                assert_eq!(found.len(), full.len());
                for (&found, &full) in found.iter().zip(&full) {
                    assert_eq!(found.to_bits(), round(full).to_bits(), "{full} as {float}");
                    // Below this float16 has steps of another size.
                    if full.abs() >= f16::MIN_POSITIVE.to_f32() {
                        assert_eq!(found.to_bits() & ((1 << lacks) - 1), 0, "{found} is no {float}");
                        assert!((found - full).abs() <= half_step * full.abs(), "{full} as {float}: {found}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_list_holds_the_values_of_a_fixed_size_list() {
    let texts: ArrayRef = Arc::new(StringArray::from(vec![Some("It rained. It stopped."), None, Some(""), Some("So")]));
    let elmo = tiny();
    let embed = |level, list_type| {
        let embedder = columns(&elmo, EmbedSpec { level, list_type, ..EmbedSpec::default() });
        let vectors = embedder.embed(&texts).unwrap().vectors;
        assert_eq!(vectors.data_type(), embedder.fields()[0].data_type());
        vectors
    };
    let list_of_floats = DataType::List(Arc::new(Field::new("item", DataType::Float32, false)));

    let (fixed, list) = (embed(Level::Sentence, ListType::Fixed), embed(Level::Sentence, ListType::List));
    assert_eq!(list.data_type(), &list_of_floats);
    let (fixed, list) = (fixed.as_fixed_size_list(), list.as_list::<i32>());
    assert_eq!(list.len(), 4);
    for row in 0..4 {
        assert_eq!(list.is_valid(row), matches!(row, 0 | 3), "row {row}");
        assert_eq!(list.is_valid(row), fixed.is_valid(row), "row {row}");
        if list.is_valid(row) {
            assert_eq!(&list.value(row), &fixed.value(row), "row {row}");
        }
    }

    let (fixed, list) = (embed(Level::Token, ListType::Fixed), embed(Level::Token, ListType::List));
    let (fixed, list) = (fixed.as_list::<i32>(), list.as_list::<i32>());
    assert_eq!((list.value_offsets(), list.nulls()), (fixed.value_offsets(), fixed.nulls()));
    let (fixed, list) = (fixed.values().as_struct(), list.values().as_struct());
    assert_eq!(tokens(list), tokens(fixed));
    let column = list.column_by_name("embedding").unwrap();
    assert_eq!(column.data_type(), &list_of_floats);
    let (list, fixed) = (column.as_list::<i32>(), fixed.column_by_name("embedding").unwrap().as_fixed_size_list());
    // It, rained, the stop, and so on: 3 + 3 tokens, and 1 of the last row.
    assert_eq!((list.len(), fixed.len()), (7, 7));
    for token in 0..7 {
        assert_eq!(&list.value(token), &fixed.value(token), "token {token}");
    }
}

#[test]
fn calls_of_any_size_and_order_give_the_same_bits_in_int8() {
    let calls = [(1, 20), (2, 20), (7, 10), (64, 2), (256, 2)];
    let setups = [(1, 0), (2, LITTLE), (1, PLENTY)];
    check_calls(&ModelData::tiny(), &short(500, 17, 16), &setups, 20, &calls, Precision::Int8);
    let options = published_small();
    let data = ModelData::new(options.clone(), seeded_weights(&options, 5, 1.0), "small").unwrap();
    check_calls(&data, &short(120, 17, 12), &setups, 10, &[(1, 10), (5, 5), (64, 1)], Precision::Int8);
}

#[test]
fn int8_needs_our_own_passes_on_a_cpu() {
    let ModelData { options, weights, .. } = ModelData::tiny();
    let refused = BiLm::with_torch_operations(&options, &weights, DeviceName::Cpu, Precision::Int8).unwrap_err();
    assert!(refused.to_string().starts_with("--precision int8 does not run on cpu: it has no gradients"), "{refused}");
    let parameters = Parameters::new(&options, &weights, DeviceName::Cpu, Precision::F32).unwrap();
    assert!(BiLm::from_parameters(&options, &parameters, Precision::Int8).is_err());
}

/// All layers of all tokens in the reference, one number after the other.
fn expected_layers(reference: &Reference<'_>, texts: &[String], width: usize) -> Vec<f64> {
    let of = |text: &String| vectors::all(&reference.layers(&text.split(' ').collect::<Vec<_>>()), width);
    texts.iter().flat_map(of).collect()
}

/// Expected: the plain reference with the same rounding, computed in float64. It may be as far away as
/// [`check_engine_in_codes`](crate::golden::check_engine_in_codes) says.
#[test]
fn int8_is_the_model_with_rounded_rows_and_columns() {
    for (data, texts) in
        [(ModelData::tiny(), short(40, 23, 24)), (ModelData::built_in(elmo::BuiltIn::Books).unwrap(), short(4, 29, 8))]
    {
        let (width, layers) = (data.options.width(), data.options.n_layers_out());
        let elmo =
            Elmo::from_data(data.clone(), &EmbedderSettings { precision: Precision::Int8, ..settings() }).unwrap();
        assert_eq!(elmo.precision().to_string(), "int8");
        let spec = EmbedSpec { level: Level::Token, layers: Layers::All, ..one_sentence() };
        let found = answers(&columns(&elmo, spec).embed(&array(&texts)).unwrap());
        let found: Vec<f32> = found.into_iter().flat_map(|a| a.bits).map(f32::from_bits).collect();
        let exact = expected_layers(&Reference::new(&data.options, &data.weights), &texts, width);
        let weights = weights_as_codes(&data.weights);
        let rounded = Reference::with_rounding(&data.options, &weights, as_codes);
        let gap = relative_rms(&found, &expected_layers(&rounded, &texts, width), width, layers);
        let drift = relative_rms(&found, &exact, width, layers);
        println!("of the rounded model: {gap:?}; of the exact one: {drift:?}");
        for layer in 0..layers {
            assert!(gap[layer] < 0.6 * drift[layer], "layer {layer}: {gap:?}, {drift:?}");
            assert!(drift[layer] < 0.06, "layer {layer}: {drift:?}");
        }
    }
}

/// Root mean square of the differences over that of the expected numbers, by layer.
fn relative_rms(found: &[f32], expected: &[f64], width: usize, layers: usize) -> Vec<f64> {
    assert_eq!(found.len(), expected.len());
    let mut sums = vec![(0.0, 0.0); layers];
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let (squares, differences) = &mut sums[i / width % layers];
        *squares += expected * expected;
        *differences += (f64::from(found) - expected).powi(2);
    }
    sums.into_iter().map(|(squares, differences): (f64, f64)| (differences / squares).sqrt()).collect()
}

/// bfloat16 keeps 8 bits, so every operation moves a number by up to 0.4 per cent of itself, and some tens of them lie
/// between a word and its vector. An emulation in numpy that computes these sentences in float64 and rounds to bfloat16
/// after every operation of the model ended at 0.6, 1.3 and 1.6 per cent of the root mean square of the three layers,
/// and the worst of 45,000 values at 2, 12 and 24 per cent. The bounds are twice the largest of each, for sums in
/// another order; float32 stays thousands of times below them.
#[test]
fn bf16_is_good_to_two_digits() {
    let data = ModelData::tiny();
    let reference = Reference::new(&data.options, &data.weights);
    let (width, layers) = (data.options.width(), data.options.n_layers_out());
    let texts = short(40, 23, 24);
    let of = |text: &String| vectors::all(&reference.layers(&text.split(' ').collect::<Vec<_>>()), width);
    let expected: Vec<f64> = texts.iter().flat_map(of).collect();

    let elmo = tiny_with(&EmbedderSettings { precision: Precision::Bf16, ..settings() });
    assert_eq!(elmo.precision(), Precision::Bf16);
    let spec = EmbedSpec { level: Level::Token, layers: Layers::All, ..one_sentence() };
    let found: Vec<u32> =
        answers(&columns(&elmo, spec).embed(&array(&texts)).unwrap()).into_iter().flat_map(|a| a.bits).collect();
    assert_eq!(found.len(), expected.len());
    assert!(found.iter().all(|bits| bits & 0xffff == 0), "layers are bfloat16 numbers, or another precision has run");

    // By layer: sum of squares, sum of squared differences, largest difference.
    let mut sums = vec![(0.0, 0.0, 0.0_f64); layers];
    for (i, (&bits, &expected)) in found.iter().zip(&expected).enumerate() {
        let difference = (f64::from(f32::from_bits(bits)) - expected).abs();
        let (squares, differences, largest) = &mut sums[i / width % layers];
        *squares += expected * expected;
        *differences += difference * difference;
        *largest = largest.max(difference);
    }
    let n = (expected.len() / layers) as f64;
    for (layer, (squares, differences, largest)) in sums.into_iter().enumerate() {
        let scale = (squares / n).sqrt();
        let (mean, largest) = ((differences / n).sqrt() / scale, largest / scale);
        println!("layer {layer}: {mean:.1e} of the root mean square, at the most {largest:.1e}");
        assert!(mean < 0.033 && largest < 0.5, "layer {layer}: {mean:e}, {largest:e}");
    }
}
