//! Surprisal and perplexity against the plain reference: the layers of `tests/reference`, and a softmax written out.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use arrow::{
    array::{Array, ArrayRef, AsArray, ListArray, ListBuilder, StringArray, StringBuilder, StructArray},
    datatypes::{Float32Type, Float64Type, UInt32Type},
};
use elmo::{
    ColumnEmbedder, Elmo, EmbedSpec, EmbedderSettings, ModelData,
    lm_head::{LmHeadData, LmHeadFiles, parse_vocab},
    model::{DeviceName, Softmax},
    model_dir::WeightsFormat,
    spec::{OnError, SentenceMode, TokenizerKind},
    surprisal::Scorer,
    weights::{Tensor, Weights, safetensors, safetensors::Numbers},
};

use crate::reference::{Layers, Reference};

const WORDS: [&str; 9] = ["</S>", "<S>", "<UNK>", "the", "bank", "was", "closed", "'s", "."];
/// Width of the built-in model's projection.
const P: usize = 32;

/// Made-up numbers of a softmax: `W [V, P]`, `b [V]`.
fn softmax(words: usize) -> (Tensor, Tensor) {
    let number = |i: usize| ((i * 7919 + 13) % 1009) as f32 / 504.5 - 1.0;
    let weight = (0..words * P).map(number).collect();
    let bias = (0..words).map(|i| number(i + 77)).collect();
    (Tensor { shape: vec![words, P], data: weight }, Tensor { shape: vec![words], data: bias })
}

/// The built-in model with a head, in a folder.
fn with_head(words: &[String]) -> (tempfile::TempDir, Elmo) {
    let folder = tempfile::tempdir().unwrap();
    ModelData::tiny().save(folder.path(), WeightsFormat::Safetensors).unwrap();
    let (weight, bias) = softmax(words.len());
    LmHeadData::new(words.to_vec(), weight, bias).unwrap().save(folder.path()).unwrap();
    let elmo = open(folder.path());
    (folder, elmo)
}

fn open(folder: &Path) -> Elmo {
    Elmo::from_data(ModelData::open(folder).unwrap(), &EmbedderSettings::default()).unwrap()
}

fn words() -> Vec<String> {
    WORDS.map(str::to_owned).to_vec()
}

fn spec() -> EmbedSpec {
    EmbedSpec { tokenizer: TokenizerKind::Whitespace, sentences: SentenceMode::Off, ..EmbedSpec::default() }
}

/// Two models, as two steps of a run: their weights differ in one number. A softmax that names the other weights is refused,
/// when the model is opened and when the softmax is read later; one that names none is accepted.
#[test]
fn weights_and_softmax_of_different_steps_are_refused() {
    let (folder, dir) = (tempfile::tempdir().unwrap(), |folder: &tempfile::TempDir| folder.path().to_owned());
    let first = ModelData::tiny();
    let mut weights = first.weights.clone();
    let mut bias = weights.remove("CNN_proj/b_proj").unwrap();
    bias.data[0] += 1.0;
    weights.insert("CNN_proj/b_proj".to_owned(), bias);
    let second = ModelData::new(first.options.clone(), weights, "second").unwrap();
    let (weight, bias) = softmax(WORDS.len());
    let head = LmHeadData::new(words(), weight, bias).unwrap();
    first.save(&dir(&folder), WeightsFormat::Safetensors).unwrap();
    head.save_for(&first.fingerprint, &dir(&folder), Numbers::F32).unwrap();
    assert_eq!(ModelData::open(&dir(&folder)).unwrap().fingerprint, first.fingerprint);
    // Weights were read; then both files are replaced.
    let elmo = open(&dir(&folder));
    second.save(&dir(&folder), WeightsFormat::Safetensors).unwrap();
    let mixed = ModelData::open(&dir(&folder)).unwrap_err().to_string();
    assert!(mixed.contains("softmax.safetensors") && mixed.contains("belongs to the weights"), "{mixed}");
    head.save_for(&second.fingerprint, &dir(&folder), Numbers::F32).unwrap();
    let late = elmo.lm_head().unwrap_err().to_string();
    assert!(late.contains("belongs to the weights"), "{late}");
    assert!(open(&dir(&folder)).lm_head().is_ok());
    // A run replaces the softmax soon after the weights: whoever opens the model waits.
    first.save(&dir(&folder), WeightsFormat::Safetensors).unwrap();
    let (path, name) = (dir(&folder), first.fingerprint.clone());
    let exporter = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(200));
        head.save_for(&name, &path, Numbers::F32).unwrap();
        head.save(&path).unwrap();
    });
    assert_eq!(ModelData::open(&dir(&folder)).unwrap().fingerprint, first.fingerprint);
    exporter.join().unwrap();
    // Files of before have no name.
    assert!(open(&dir(&folder)).lm_head().is_ok());
}

/// Words in another order have the rows of others, which no size tells. Line ends and the byte-order mark of an editor are no other words.
#[test]
fn a_softmax_beside_other_words_is_refused() {
    let (folder, _) = with_head(&words());
    let vocab = folder.path().join("vocab.txt");
    let read = || LmHeadFiles::find(folder.path()).unwrap().read(P);
    std::fs::write(&vocab, format!("\u{feff}{}", WORDS.map(|word| format!("{word}\r\n")).concat())).unwrap();
    assert_eq!(read().unwrap().words(), words());
    let mut swapped = WORDS;
    swapped.swap(3, 4);
    std::fs::write(&vocab, swapped.join("\n")).unwrap();
    let error = read().unwrap_err().to_string();
    let (before, after) =
        ("vocab.txt: these are not the words, in the order, that", "was written for; copy vocab.txt and");
    assert!(error.contains(before) && error.contains(after), "{error}");
    // That of another program names none.
    let (weight, bias) = softmax(WORDS.len());
    let mut tensors = Weights::default();
    tensors.insert("softmax/W".to_owned(), weight);
    tensors.insert("softmax/b".to_owned(), bias);
    let bytes = safetensors::write(&tensors, &BTreeMap::new()).unwrap();
    std::fs::write(folder.path().join("softmax.safetensors"), bytes).unwrap();
    assert_eq!(read().unwrap().words()[3], "bank");
}

/// `-log2 p` of a word's number after a state, by the definition.
fn bits(words: usize, state: &[f64], target: usize) -> f64 {
    let (weight, bias) = softmax(words);
    let logit = |word: usize| -> f64 {
        let row = &weight.data[word * P..(word + 1) * P];
        row.iter().zip(state).map(|(w, s)| f64::from(*w) * s).sum::<f64>() + f64::from(bias.data[word])
    };
    let sum: f64 = (0..words).map(|word| logit(word).exp()).sum();
    -(logit(target).exp() / sum).log2()
}

/// Forward and backward surprisals of `<S> words.. </S>`, NaN where there is none.
fn expected(vocabulary: &[String], sentence: &[&str]) -> (Vec<f64>, Vec<f64>) {
    let tiny = ModelData::tiny();
    let reference = Reference::new(&tiny.options, &tiny.weights);
    let layers: Layers = reference.sentence(sentence, &reference.zero_state(), true).layers;
    let top = &layers[layers.len() - 1];
    let n = sentence.len() + 2;
    let number = |word: &str| vocabulary.iter().position(|there| there == word).unwrap_or(2);
    let ids: Vec<usize> = ["<S>"].iter().chain(sentence).chain(&["</S>"]).map(|word| number(word)).collect();
    let half = |at: usize, side: usize| &top[(2 * at + side) * P..(2 * at + side + 1) * P];
    let size = vocabulary.len();
    let forward = (0..n).map(|at| if at == 0 { f64::NAN } else { bits(size, half(at - 1, 0), ids[at]) });
    let backward = (0..n).map(|at| if at == n - 1 { f64::NAN } else { bits(size, half(at + 1, 1), ids[at]) });
    (forward.collect(), backward.collect())
}

struct Scored {
    surprisals: ListArray,
    perplexities: StructArray,
}

fn score(elmo: &Elmo, spec: &EmbedSpec, texts: &ArrayRef) -> Scored {
    let spec = Scorer::spec(spec);
    let embedded = ColumnEmbedder::new(elmo, spec.clone()).unwrap().embed(texts).unwrap();
    let scored = Scorer::new(elmo, &spec).unwrap().score(texts, &embedded).unwrap();
    Scored {
        surprisals: scored.surprisals().unwrap().as_list().clone(),
        perplexities: scored.perplexities().unwrap().as_struct().clone(),
    }
}

fn floats(list: &ListArray, row: usize, column: usize) -> Vec<f32> {
    list.value(row).as_struct().column(column).as_primitive::<Float32Type>().values().to_vec()
}

fn texts(texts: &[Option<&str>]) -> ArrayRef {
    Arc::new(StringArray::from(texts.to_vec()))
}

/// float32 logits of 32 products, and logarithms of their sums.
const TOLERANCE: f64 = 2e-5;

#[test]
fn scores_are_those_of_the_definition() {
    // The last vocabulary is cut into several pieces, of which the last is narrow.
    let many = (0..65_540).map(|n| WORDS.get(n).map_or_else(|| format!("w{n}"), |word| (*word).to_owned())).collect();
    for vocabulary in [words(), many] {
        let (_folder, elmo) = with_head(&vocabulary);
        let rows = ["the bank was closed .", "unheard the", "w65539 . w17"];
        let scored = score(&elmo, &spec(), &texts(&rows.map(Some)));
        for (row, text) in rows.iter().enumerate() {
            let sentence: Vec<&str> = text.split(' ').collect();
            let (forward, backward) = expected(&vocabulary, &sentence);
            let near = |found: &[f32], expected: &[f64]| {
                assert_eq!(found.len(), expected.len(), "{text}");
                for (found, expected) in found.iter().zip(expected) {
                    assert!(
                        (f64::from(*found) - expected).abs() < TOLERANCE * expected.max(1.0),
                        "{text}: {found} {expected}"
                    );
                }
            };
            let n = sentence.len();
            near(&floats(&scored.surprisals, row, 4), &forward[1..=n]);
            near(&floats(&scored.surprisals, row, 5), &backward[1..=n]);
            let mean = |bits: &[f64]| bits.iter().sum::<f64>() / bits.len() as f64;
            let (f, b) = (mean(&forward[1..]), mean(&backward[..=n]));
            for (column, expected) in [(0, ((f + b) / 2.0).exp2()), (1, f.exp2()), (2, b.exp2())] {
                let found = scored.perplexities.column(column).as_primitive::<Float64Type>().value(row);
                assert!((found / expected - 1.0).abs() < TOLERANCE, "{text}: {found} {expected}");
            }
            let counts = |column: usize| scored.perplexities.column(column).as_primitive::<UInt32Type>().value(row);
            let unknown = sentence.iter().filter(|word| !vocabulary.iter().any(|there| there == *word)).count();
            assert_eq!((counts(3), counts(4)), (n as u32, unknown as u32), "{text}");
        }
    }
}

/// Alone, among others, in any order: the same bits.
#[test]
fn scores_do_not_depend_on_neighbours() {
    let (_folder, elmo) = with_head(&words());
    let rows: Vec<String> = (0..70).map(|n| "the bank was closed . ".repeat(n % 5 + 1) + WORDS[3 + n % 6]).collect();
    let column = |rows: &[&str]| texts(&rows.iter().copied().map(Some).collect::<Vec<_>>());
    let all: Vec<&str> = rows.iter().map(String::as_str).collect();
    let together = score(&elmo, &spec(), &column(&all));
    let bits = |scored: &Scored, row: usize| -> Vec<u32> {
        let of = |column| floats(&scored.surprisals, row, column).into_iter().map(f32::to_bits).collect::<Vec<_>>();
        [of(4), of(5)].concat()
    };
    let reversed: Vec<&str> = all.iter().rev().copied().collect();
    let reversed = score(&elmo, &spec(), &column(&reversed));
    for row in 0..all.len() {
        let alone = score(&elmo, &spec(), &column(&all[row..=row]));
        assert_eq!(bits(&alone, 0), bits(&together, row), "row {row}");
        assert_eq!(bits(&reversed, all.len() - 1 - row), bits(&together, row), "row {row}");
    }
}

/// A word is looked up as the model reads it: Moses reads `’s` as `'s`. Sentences are scored each by itself.
#[test]
fn words_are_looked_up_as_they_are_read() {
    let (_folder, elmo) = with_head(&words());
    let moses = EmbedSpec { on_error: OnError::Null, ..EmbedSpec::default() };
    let rows = [Some("the bank’s closed. the bank was."), None, Some(" "), Some("bank")];
    let scored = score(&elmo, &moses, &texts(&rows));
    let tokens = scored.surprisals.value(0);
    let tokens = tokens.as_struct();
    let written: Vec<&str> = tokens.column(0).as_string::<i32>().iter().flatten().collect();
    assert_eq!(written, ["the", "bank", "’s", "closed", ".", "the", "bank", "was", "."]);
    assert_eq!(tokens.column(6).as_boolean().true_count(), 9);
    let sentences: Vec<u32> = tokens.column(3).as_primitive::<UInt32Type>().values().to_vec();
    assert_eq!(sentences, [0, 0, 0, 0, 0, 1, 1, 1, 1]);
    let apart = score(&elmo, &spec(), &texts(&[Some("the bank 's closed ."), Some("the bank was .")]));
    for column in [4, 5] {
        let both = [floats(&apart.surprisals, 0, column), floats(&apart.surprisals, 1, column)].concat();
        assert_eq!(floats(&scored.surprisals, 0, column), both);
    }
    // NULL is NULL, a blank text has no token and no perplexity.
    let valid = |array: &dyn Array| (0..4).map(|row| array.is_valid(row)).collect::<Vec<_>>();
    assert_eq!(valid(&scored.surprisals), [true, false, true, true]);
    assert_eq!(scored.surprisals.value_length(2), 0);
    assert_eq!(valid(&scored.perplexities), [true, false, false, true]);
}

#[test]
fn lists_of_tokens_are_sentences() {
    let (_folder, elmo) = with_head(&words());
    let mut lists = ListBuilder::new(StringBuilder::new());
    lists.append_value(["the", "bank", "", "."].map(Some));
    lists.append_value([Some("closed")]);
    let lists: ArrayRef = Arc::new(lists.finish());
    let scored = score(&elmo, &spec(), &lists);
    let (forward, backward) = expected(&words(), &["the", "bank", "", "."]);
    for (column, expected) in [(4, forward), (5, backward)] {
        for (found, expected) in floats(&scored.surprisals, 0, column).iter().zip(&expected[1..5]) {
            assert!((f64::from(*found) - expected).abs() < TOLERANCE * expected.max(1.0), "{found} {expected}");
        }
    }
    assert_eq!(scored.surprisals.value_length(0), 4);
}

#[test]
fn heads_are_told_apart_by_their_files() {
    let (folder, elmo) = with_head(&words());
    let (other, copy) = with_head(&words());
    let mark = |elmo: &Elmo| elmo.lm_head_digest().unwrap().unwrap();
    assert_eq!(mark(&elmo), mark(&copy));
    assert_eq!(elmo.lm_head().unwrap().digest(), Some(mark(&elmo).as_str()));
    // A head that was read does not change.
    let (before, path) = (mark(&elmo), folder.path().join("softmax.safetensors"));
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    assert_eq!(mark(&elmo), before);
    assert_ne!(mark(&open(folder.path())), before);
    // One word for another, as long.
    let path = other.path().join("vocab.txt");
    let text = std::fs::read_to_string(&path).unwrap().replace("bank", "tank");
    std::fs::write(&path, text).unwrap();
    assert_ne!(mark(&copy), before);
    assert!(Elmo::tiny().unwrap().lm_head_digest().unwrap().is_none());
}

#[test]
fn the_mark_of_a_large_softmax_sees_its_ends_its_size_and_blocks_between() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("vocab.txt"), "a\n").unwrap();
    // 16 MiB: a block of 64 KiB every 259 KiB.
    let size = 16 << 20;
    let mark = |changed: Option<usize>, size: usize| {
        let mut bytes = vec![0; size];
        if let Some(at) = changed {
            bytes[at] = 1;
        }
        std::fs::write(folder.path().join("softmax.safetensors"), bytes).unwrap();
        LmHeadFiles::find(folder.path()).unwrap().digest().unwrap()
    };
    let plain = mark(None, size);
    assert_eq!(mark(None, size), plain);
    let step = (size - (64 << 10)) / 63;
    for seen in [0, (64 << 10) - 1, step + 1, 30 * step + 99, size - (64 << 10), size - 1] {
        assert_ne!(mark(Some(seen), size), plain, "{seen}");
    }
    assert_ne!(mark(None, size + 1), plain);
}

/// What training resumes from.
#[test]
fn a_head_that_is_read_has_the_words_and_numbers_that_were_written() {
    let (folder, _) = with_head(&words());
    let read = LmHeadFiles::find(folder.path()).unwrap().read(P).unwrap();
    let (weight, bias) = softmax(WORDS.len());
    assert_eq!((read.words(), read.weight(), read.bias()), (words().as_slice(), &weight, &bias));
}

#[test]
fn a_target_that_is_no_word_is_an_error() {
    let (weight, bias) = softmax(WORDS.len());
    let softmax = Softmax::new(&weight, &bias, DeviceName::Cpu).unwrap();
    let log = |target: i64| softmax.log_probabilities(&[0.5; P], &[target]);
    let total: f32 = (0..9).map(|target| log(target).unwrap()[0].exp()).sum();
    assert!((total - 1.0).abs() < 1e-6, "{total}");
    let hand_made = |shape: [usize; 2]| Tensor { shape: shape.to_vec(), data: vec![0.0; shape[0] * shape[1]] };
    for empty in [[9, 0], [0, P]] {
        let bias = Tensor { shape: vec![empty[0]], data: vec![0.0; empty[0]] };
        assert!(Softmax::new(&hand_made(empty), &bias, DeviceName::Cpu).is_err(), "{empty:?}");
    }
    for target in [-1, 9, 15, 16] {
        let error = log(target).unwrap_err().to_string();
        assert!(error.contains("a target is not in the vocabulary"), "{target}: {error}");
    }
}

#[test]
fn heads_that_are_none() {
    let elmo = Elmo::tiny().unwrap();
    assert!(!elmo.has_lm_head());
    let error = Scorer::new(&elmo, &spec()).unwrap_err().to_string();
    assert!(error.contains("the model tiny has no LM head") && error.contains("softmax.safetensors"), "{error}");
    let (weight, bias) = softmax(9);
    let made = |words: &[&str]| {
        let words = words.iter().map(|word| (*word).to_owned()).collect();
        LmHeadData::new(words, weight.clone(), bias.clone()).map(|_| ()).unwrap_err().to_string()
    };
    let mut twice = WORDS;
    twice[8] = "bank";
    assert!(made(&twice).contains("line 9 occurs twice"), "{}", made(&twice));
    let given = parse_vocab(b"</S>\n<S>\n<UNK>\nthe\n\nbank\n", Path::new("given.txt")).unwrap_err().to_string();
    assert_eq!(given, "given.txt: line 5 is empty");
    let mut without = WORDS;
    without[1] = "<s>";
    assert!(made(&without).contains("<S> is missing"), "{}", made(&without));
    assert!(made(&WORDS[..8]).contains("softmax/W"), "{}", made(&WORDS[..8]));
    // Files that were changed after they were written.
    let (folder, _) = with_head(&words());
    let vocab = folder.path().join("vocab.txt");
    let asked = || Scorer::new(&open(folder.path()), &spec()).unwrap_err().to_string();
    let marked = ["\u{feff}".as_bytes(), &std::fs::read(&vocab).unwrap()].concat();
    std::fs::write(&vocab, marked).unwrap();
    Scorer::new(&open(folder.path()), &spec()).unwrap();
    std::fs::write(&vocab, b"</S>\n<S>\n<UNK>\n").unwrap();
    let says = "vocab.txt: has 3 words, but softmax.safetensors has rows for 9; copy";
    assert!(asked().contains(says), "{}", asked());
    std::fs::write(&vocab, b"</S>\n<S>\n<UNK>\n\xff\n").unwrap();
    assert!(asked().contains("line 4 is not UTF-8"), "{}", asked());
    std::fs::write(&vocab, "a".repeat(100_000)).unwrap();
    assert!(asked().contains("line 1 is longer than"), "{}", asked());
    std::fs::remove_file(&vocab).unwrap();
    assert!(!open(folder.path()).has_lm_head());
}
