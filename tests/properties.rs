//! Properties of the columns that hold for every text, every batch and every encoding.

use std::sync::Arc;

use arrow::{
    array::{
        Array, ArrayRef, AsArray, BinaryArray, DictionaryArray, LargeBinaryArray, LargeStringArray, ListBuilder,
        StringArray, StringBuilder, StringViewArray,
    },
    compute::{cast, concat},
    datatypes::{DataType, Field, Float32Type, Int32Type},
};
use elmo::{
    ColumnEmbedder, Elmo, EmbedSpec, EmbedderSettings, ModelData,
    engine::{DeviceChoice, Precision},
    mix::ScalarMix,
    model::{BiLm, DeviceName},
    spec::{Layers, Level, Normalize, OnError, OnLong, Pooling, SentenceMode, StateMode, TokenizerKind},
};
use proptest::prelude::*;

use crate::reference::{self, Reference, vectors};

pub(crate) fn settings() -> EmbedderSettings {
    EmbedderSettings { devices: vec![DeviceChoice::Cpu], ..EmbedderSettings::default() }
}

pub(crate) fn tiny_with(settings: &EmbedderSettings) -> Elmo {
    Elmo::from_data(ModelData::tiny(), settings).unwrap()
}

pub(crate) fn tiny() -> Elmo {
    tiny_with(&settings())
}

pub(crate) fn columns(elmo: &Elmo, spec: EmbedSpec) -> ColumnEmbedder {
    ColumnEmbedder::new(elmo, spec).unwrap()
}

/// Sentences of 1 to 40 words over a Zipf-like vocabulary of made-up words, by a linear congruential generator.
pub(crate) fn sentences(n: usize, mut seed: u64) -> Vec<String> {
    let mut next = move |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % below
    };
    (0..n)
        .map(|_| {
            let words = 1 + next(40);
            let text: Vec<String> = (0..words)
                .map(|_| {
                    let most = next(4000);
                    let rank = next(1 + most);
                    format!("{}{}", ["ka", "lo", "mi", "tré", "ön"][rank % 5].repeat(1 + rank % 4), rank / 5)
                })
                .collect();
            text.join(" ")
        })
        .collect()
}

pub(crate) fn array(texts: &[String]) -> ArrayRef {
    Arc::new(StringArray::from_iter_values(texts))
}

/// The bits of every vector of a sentence-level column.
pub(crate) fn bits(vectors: &ArrayRef) -> Vec<Option<Vec<u32>>> {
    let list = vectors.as_fixed_size_list();
    (0..list.len())
        .map(|i| {
            let values = list.value(i);
            let values = values.as_primitive::<Float32Type>().values().to_vec();
            list.is_valid(i).then(|| values.iter().map(|v| v.to_bits()).collect())
        })
        .collect()
}

/// Largest difference from the expected numbers; NaN if there is one. The numbers of values must be equal.
pub(crate) fn gap(found: &ArrayRef, expected: &[f64]) -> f64 {
    let found: Vec<f64> = found.as_primitive::<Float32Type>().values().iter().map(|v| f64::from(*v)).collect();
    crate::golden::largest_gap(&found, expected)
}

pub(crate) fn one_sentence() -> EmbedSpec {
    EmbedSpec { sentences: SentenceMode::Off, tokenizer: TokenizerKind::Whitespace, ..EmbedSpec::default() }
}

#[test]
fn a_vector_has_the_same_bits_in_every_batch_order_and_cache_state() {
    let texts = sentences(1000, 7);
    let expected = bits(&columns(&tiny(), one_sentence()).embed(&array(&texts)).unwrap().vectors);
    // Budgets from less than one sentence to half of all; a cache of none, little and plenty. The planner makes batches
    // of mixed sizes of them; batches of exact sizes are in `independence.rs`.
    for (budget, cache, threads) in
        [(1, 256 << 20, 2), (60, 1 << 12, 2), (250, 256 << 20, 1), (2500, 0, 2), (10_000, 1 << 14, 1)]
    {
        let settings =
            EmbedderSettings { batch_tokens: Some(budget), cache_bytes: cache, threads: Some(threads), ..settings() };
        let elmo = tiny_with(&settings);
        let mut order: Vec<usize> = (0..texts.len()).collect();
        order.sort_by_key(|&i| (i * 7919 + budget) % 1009);
        let shuffled: Vec<String> = order.iter().map(|&i| texts[i].clone()).collect();
        let found = bits(&columns(&elmo, one_sentence()).embed(&array(&shuffled)).unwrap().vectors);
        for (place, &i) in order.iter().enumerate() {
            assert_eq!(found[place], expected[i], "sentence {i}, budget {budget}, cache {cache}");
        }
        // Again, now that the cache is warm, and in calls of a few rows.
        let mut again = Vec::new();
        for call in shuffled[..300].chunks(37) {
            again.extend(bits(&columns(&elmo, one_sentence()).embed(&array(call)).unwrap().vectors));
        }
        assert_eq!(again, found[..300], "budget {budget}, cache {cache}");
    }
}

/// Products of few columns are where a matrix library takes other kernels: widths of 1 to 11 everywhere.
#[test]
fn narrow_models_give_the_same_bits_in_every_batch_too() {
    let texts = sentences(120, 11);
    for (projection, filters, dim) in [
        (1, "[[1, 1], [2, 2]]", 3),
        (5, "[[1, 1], [2, 5], [3, 7]]", 5),
        (6, "[[1, 6], [4, 9]]", 7),
        (2, "[[2, 3]]", 2),
        (9, "[[1, 10], [5, 11]]", 9),
        (10, "[[7, 4]]", 10),
        (11, "[[1, 1], [50, 1]]", 11),
    ] {
        let json = format!(
            r#"{{"lstm": {{"use_skip_connections": true, "projection_dim": {projection}, "cell_clip": 3, "proj_clip": 3,
                "dim": {dim}, "n_layers": 2}}, "char_cnn": {{"activation": "relu", "n_highway": 1, "filters": {filters},
                "embedding": {{"dim": 5}}, "n_characters": 262, "max_characters_per_token": 50}}}}"#
        );
        let options = elmo::options::ModelOptions::from_json(json.as_bytes(), "narrow").unwrap();
        let weights = crate::reference::seeded::seeded_weights(&options, 3, 1.0);
        let data = ModelData::new(options, weights, "narrow").unwrap();
        let elmo = Elmo::from_data(data, &settings()).unwrap();
        let embedder = columns(&elmo, one_sentence());
        let together = bits(&embedder.embed(&array(&texts)).unwrap().vectors);
        for (i, text) in texts.iter().enumerate() {
            let alone = bits(&embedder.embed(&array(std::slice::from_ref(text))).unwrap().vectors);
            assert_eq!(alone[0], together[i], "projection {projection}, sentence {i}");
        }
    }
}

#[test]
fn layers_mixes_and_poolings_agree_with_the_reference() {
    let data = ModelData::tiny();
    let reference = Reference::new(&data.options, &data.weights);
    let half = data.options.lstm.projection_dim;
    let text = "The quick brøwn fox does n't jump .";
    let layers = reference.layers(&text.split(' ').collect::<Vec<_>>());
    let n = text.split(' ').count();
    let mix = ScalarMix { scalars: vec![0.3, -1.0, 0.7], gamma: 1.3, layer_norm: false };
    let factors = {
        // softmax by hand
        let e: Vec<f64> = [0.3_f64, -1.0, 0.7].iter().map(|s| s.exp()).collect();
        let sum: f64 = e.iter().sum();
        e.iter().map(|v| 1.3 * v / sum).collect::<Vec<_>>()
    };
    let combine = |factors: &[f64]| -> Vec<f64> {
        (0..n * 2 * half).map(|i| factors.iter().zip(&layers).map(|(f, l)| f * l[i]).sum()).collect()
    };
    let cases = [
        (Layers::Average, combine(&[1.0 / 3.0; 3])),
        (Layers::Top, layers[2].clone()),
        (Layers::One(0), layers[0].clone()),
        (Layers::One(1), layers[1].clone()),
        (Layers::Mix(mix), combine(&factors)),
    ];
    let elmo = tiny();
    for (choice, tokens) in cases {
        for (pooling, expected_pooling) in POOLINGS {
            for normalize in [Normalize::Off, Normalize::L2] {
                let spec = EmbedSpec { layers: choice.clone(), pooling, normalize, ..one_sentence() };
                let found = columns(&elmo, spec).embed(&array(&[text.to_owned()])).unwrap().vectors;
                let mut expected = vectors::pool(&tokens, 2 * half, half, expected_pooling).unwrap();
                if normalize == Normalize::L2 {
                    expected = vectors::l2(&expected);
                }
                let found = found.as_fixed_size_list().value(0);
                let worst = gap(&found, &expected);
                assert!(worst < 5e-6, "{choice} {pooling} {normalize}: {worst:e}");
            }
        }
    }
}

#[test]
fn layer_norm_is_per_sentence() {
    let data = ModelData::tiny();
    let reference = Reference::new(&data.options, &data.weights);
    let words = ["one", "small", "step"];
    let layers = reference.layers(&words);
    // Mean and biased variance of all values of a layer, by hand.
    let normed = layers.iter().map(|layer| {
        let n = layer.len() as f64;
        let mean = layer.iter().sum::<f64>() / n;
        let variance = layer.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
        layer.iter().map(|v| (v - mean) / (variance + 1e-12).sqrt() / 3.0).collect::<Vec<_>>()
    });
    let expected = normed.reduce(|a, b| a.iter().zip(&b).map(|(x, y)| x + y).collect()).unwrap();
    let mix = ScalarMix { scalars: vec![0.0; 3], gamma: 1.0, layer_norm: true };
    let texts = [words.join(" "), "another sentence altogether , much longer than the first".to_owned()];
    for boundaries in [false, true] {
        let spec = EmbedSpec { layers: Layers::Mix(mix.clone()), level: Level::Token, boundaries, ..one_sentence() };
        let found = columns(&tiny(), spec).embed(&array(&texts)).unwrap().vectors;
        let tokens = found.as_list::<i32>().value(0);
        let values = Arc::clone(tokens.as_struct().column_by_name("embedding").unwrap().as_fixed_size_list().values());
        // `values` spans the whole child array; the first row's tokens come first. Boundaries are normalised like the
        // others, but add nothing to mean and variance.
        let first = if boundaries { data.options.width() } else { 0 };
        let worst = gap(&values.slice(first, expected.len()), &expected);
        assert!(worst < 5e-6, "boundaries {boundaries}: {worst:e}");
    }
}

/// Expected: computed by numpy from the same seeded weights, see `fixtures/golden/README.md`.
#[test]
fn layers_mixes_and_poolings_agree_with_the_golden_file() {
    let fixture = crate::golden::files::vectors();
    let weights = crate::reference::seeded::seeded_weights(&fixture.options, fixture.seed, fixture.scale);
    let data = ModelData::new(fixture.options, weights, "golden").unwrap();
    let elmo = Elmo::from_data(data, &settings()).unwrap();
    let text = array(&[fixture.sentence.join(" ")]);
    for wanted in fixture.vectors {
        let layers = wanted.layers();
        let (pooling, _) =
            POOLINGS.into_iter().find(|(_, expected_pooling)| *expected_pooling == wanted.pooling()).unwrap();
        // With all layers the engine normalises each layer, and the fixture the whole vector; `independence.rs` tests
        // the former.
        let scaled = (layers != Layers::All).then_some((Normalize::L2, &wanted.l2));
        for (normalize, expected) in [(Normalize::Off, &wanted.vector)].into_iter().chain(scaled) {
            let spec = EmbedSpec { layers: layers.clone(), pooling, normalize, ..one_sentence() };
            let found = columns(&elmo, spec).embed(&text).unwrap().vectors;
            let worst = gap(&found.as_fixed_size_list().value(0), expected);
            assert!(worst < 5e-6, "{}, {normalize}: {worst:e}", wanted.describe());
        }
    }
}

#[test]
fn every_encoding_gives_the_same_column() {
    let texts = [Some("The bank was steep."), None, Some(""), Some("  \t "), Some("Élan vital — “naïve”."), Some("a")];
    let plain: ArrayRef = Arc::new(StringArray::from(texts.to_vec()));
    let bytes: Vec<Option<&[u8]>> = texts.iter().map(|t| t.map(str::as_bytes)).collect();
    let (before, after) = (StringArray::from(vec!["before"]), StringArray::from(vec!["after"]));
    let padded = concat(&[&before, plain.as_ref(), &after]).unwrap();
    let (ends, values) = (Field::new("run_ends", DataType::Int32, false), Field::new("values", DataType::Utf8, true));
    let runs_of_text = DataType::RunEndEncoded(ends.into(), values.into());
    let runs = |column: &ArrayRef| cast(column, &runs_of_text).unwrap();
    let dictionary: DictionaryArray<Int32Type> = texts.iter().copied().collect();
    let encodings: Vec<(&str, ArrayRef)> = vec![
        ("large", Arc::new(LargeStringArray::from(texts.to_vec()))),
        ("view", Arc::new(StringViewArray::from(texts.to_vec()))),
        ("binary", Arc::new(BinaryArray::from(bytes.clone()))),
        ("large binary", Arc::new(LargeBinaryArray::from(bytes))),
        ("dictionary", Arc::new(dictionary)),
        ("runs", runs(&plain)),
        ("sliced runs", runs(&padded).slice(1, texts.len())),
        ("sliced", padded.slice(1, texts.len())),
    ];
    for level in [Level::Sentence, Level::Token] {
        let columns = columns(&tiny(), EmbedSpec { level, ..EmbedSpec::default() });
        let expected = columns.embed(&plain).unwrap();
        assert_eq!(expected.vectors.len(), texts.len());
        assert_eq!((expected.stats.nulls, expected.stats.empty), (1, 2));
        assert_eq!(expected.vectors.data_type(), columns.fields()[0].data_type());
        for (name, encoding) in &encodings {
            let found = columns.embed(encoding).unwrap();
            assert_eq!(&found.vectors, &expected.vectors, "{name}");
        }
        let none = columns.embed(&plain.slice(0, 0)).unwrap();
        assert_eq!(none.vectors.len(), 0);
        let all_null: ArrayRef = Arc::new(StringArray::from(vec![None::<&str>; 5]));
        assert_eq!(columns.embed(&all_null).unwrap().vectors.null_count(), 5);
    }
}

#[test]
fn null_is_null_and_blank_is_an_empty_list() {
    let texts: ArrayRef = Arc::new(StringArray::from(vec![None, Some(" "), Some("x")]));
    let tokens = columns(&tiny(), EmbedSpec { level: Level::Token, ..EmbedSpec::default() }).embed(&texts).unwrap();
    let list = tokens.vectors.as_list::<i32>();
    assert!(list.is_null(0));
    assert!(list.is_valid(1) && list.value(1).is_empty());
    assert_eq!(list.value(2).len(), 1);
    let pooled = columns(&tiny(), EmbedSpec::default()).embed(&texts).unwrap();
    assert_eq!((0..3).map(|i| pooled.vectors.is_null(i)).collect::<Vec<_>>(), [true, true, false]);
}

#[test]
fn token_lists_are_taken_as_they_are() {
    let mut lists = ListBuilder::new(StringBuilder::new());
    for row in [vec![Some("New York"), Some(""), Some("<S>")], vec![], vec![Some("a"), None]] {
        row.into_iter().for_each(|token| lists.values().append_option(token));
        lists.append(true);
    }
    let lists: ArrayRef = Arc::new(lists.finish());
    let spec = EmbedSpec { level: Level::Token, on_error: OnError::Null, ..EmbedSpec::default() };
    let found = columns(&tiny(), spec).embed(&lists).unwrap();
    let list = found.vectors.as_list::<i32>();
    let first = list.value(0);
    let words = first.as_struct().column_by_name("token").unwrap().as_string::<i32>().clone();
    assert_eq!(words.iter().flatten().collect::<Vec<_>>(), ["New York", "", "<S>"]);
    assert!(list.value(1).is_empty());
    assert!(list.is_null(2));
    assert_eq!(found.error.value(2), "token 1 of the list is NULL");
}

#[test]
fn bad_rows_are_reported_and_their_neighbours_unharmed() {
    let rows: Vec<&[u8]> = vec![b"fine", b"\xff\xfe broken", b"fine"];
    let column: ArrayRef = Arc::new(BinaryArray::from_vec(rows));
    let elmo = tiny();
    let spec = |on_error| EmbedSpec { on_error, ..EmbedSpec::default() };
    let error = columns(&elmo, spec(OnError::Fail)).embed(&column).unwrap_err().to_string();
    assert!(error.contains("row 1") && error.contains("not UTF-8"), "{error}");
    let kept = columns(&elmo, spec(OnError::Null)).embed(&column).unwrap();
    assert_eq!((kept.vectors.null_count(), kept.stats.errors), (1, 1));
    let skipped = columns(&elmo, spec(OnError::Skip)).embed(&column).unwrap();
    assert_eq!(skipped.keep.unwrap().iter().flatten().collect::<Vec<_>>(), [true, false, true]);
    let alone = columns(&elmo, spec(OnError::Fail)).embed(&array(&["fine".to_owned()])).unwrap();
    assert_eq!(bits(&kept.vectors)[2], bits(&alone.vectors)[0]);
}

pub(crate) const POOLINGS: [(Pooling, vectors::Pooling); 5] = [
    (Pooling::Mean, vectors::Pooling::Mean),
    (Pooling::Max, vectors::Pooling::Max),
    (Pooling::First, vectors::Pooling::First),
    (Pooling::Last, vectors::Pooling::Last),
    (Pooling::Ends, vectors::Pooling::Ends),
];

/// Compares a text with the reference's vectors of its parts (sentences, or windows): the token vectors in order, and
/// every pooling over them.
fn check_text(elmo: &Elmo, text: &str, spec: &EmbedSpec, expected: &[f64]) {
    let width = elmo.options().width();
    let spec = EmbedSpec { layers: Layers::Average, ..spec.clone() };
    let texts = array(&["before".to_owned(), text.to_owned(), "after".to_owned()]);
    let tokens = EmbedSpec { level: Level::Token, ..spec.clone() };
    let found = columns(elmo, tokens).embed(&texts).unwrap().vectors;
    let row = found.as_list::<i32>().value(1);
    let vectors = row.as_struct().column_by_name("embedding").unwrap().as_fixed_size_list();
    let values = vectors.values().slice(vectors.value_offset(0) as usize, row.len() * width);
    let worst = gap(&values, expected);
    assert!(worst < 5e-6, "tokens: {worst:e}");
    for (pooling, expected_pooling) in POOLINGS {
        let found = columns(elmo, EmbedSpec { pooling, ..spec.clone() }).embed(&texts).unwrap().vectors;
        let worst = gap(
            &found.as_fixed_size_list().value(1),
            &vectors::pool(expected, width, width / 2, expected_pooling).unwrap(),
        );
        assert!(worst < 5e-6, "{pooling}: {worst:e}");
    }
}

#[test]
fn long_sentences_are_windowed_truncated_or_refused_never_silently() {
    let data = ModelData::tiny();
    let reference = Reference::new(&data.options, &data.weights);
    let width = data.options.width();
    let words: Vec<String> = (0..50).map(|i| format!("w{i}")).collect();
    let text = words.join(" ");
    let elmo = tiny();
    let spec = |on_long| EmbedSpec { on_long, max_tokens: 20, ..one_sentence() };
    // By hand: windows of 20 that overlap by a quarter begin at 0, 15 and 30. Of their common tokens 15 to 19, the
    // first three are nearer to the middle of the first window (17 has 2 after it there, and 2 before it in the other).
    let mut expected = Vec::new();
    for (window, keep) in [(0..20, 0..18), (15..35, 3..18), (30..50, 3..20)] {
        let average = vectors::average(&reference.layers(&words[window]));
        expected.extend_from_slice(&average[keep.start * width..keep.end * width]);
    }
    check_text(&elmo, &text, &spec(OnLong::Window), &expected);
    check_text(&elmo, &text, &spec(OnLong::Truncate), &vectors::average(&reference.layers(&words[..20])));
    let texts = array(&[text, "short".to_owned()]);
    let windowed = columns(&elmo, spec(OnLong::Window)).embed(&texts).unwrap();
    assert_eq!((windowed.truncated.value(0), windowed.truncated.value(1)), (false, false));
    let cut = columns(&elmo, spec(OnLong::Truncate)).embed(&texts).unwrap();
    assert_eq!((cut.truncated.value(0), cut.truncated.value(1)), (true, false));
    let refused = columns(&elmo, spec(OnLong::Error)).embed(&texts).unwrap_err().to_string();
    assert!(refused.contains("50 tokens") && refused.contains("max-tokens is 20"), "{refused}");
}

#[test]
fn the_sentences_of_a_text_are_read_apart_and_pooled_together() {
    let data = ModelData::tiny();
    let reference = Reference::new(&data.options, &data.weights);
    let sentences = ["The tide was out .", "Nobody had told her !", "She walked back , slowly , over wet stones ."];
    let of = |sentence: &&str| vectors::average(&reference.layers(&sentence.split(' ').collect::<Vec<_>>()));
    let expected: Vec<f64> = sentences.iter().flat_map(of).collect();
    let text = "The tide was out. Nobody had told her! She walked back, slowly, over wet stones.";
    check_text(&tiny(), text, &EmbedSpec::default(), &expected);
}

#[test]
fn carry_reproduces_the_order_dependent_batches_of_allennlp() {
    let data = ModelData::tiny();
    let reference = Reference::new(&data.options, &data.weights);
    let texts = ["a b c", "d e", "f g h i", "a b c", "", "x y"];
    let batches: Vec<Vec<Vec<&str>>> =
        texts.chunks(2).map(|batch| batch.iter().map(|t| t.split_whitespace().collect()).collect()).collect();
    let runs = reference.run(&batches, &crate::reference::StartState::Carry, false).concat();
    let spec = EmbedSpec {
        state: StateMode::Carry,
        batch_rows: Some(2),
        layers: Layers::Top,
        on_long: OnLong::Error,
        ..one_sentence()
    };
    let column: ArrayRef = Arc::new(StringArray::from(texts.to_vec()));
    let carried = columns(&tiny(), spec).embed(&column).unwrap().vectors;
    let half = data.options.lstm.projection_dim;
    for (i, layers) in runs.iter().enumerate() {
        let Some(expected) = vectors::pool(&layers[2], 2 * half, half, vectors::Pooling::Mean) else {
            assert!(carried.is_null(i));
            continue;
        };
        let found = carried.as_fixed_size_list().value(i);
        assert!(gap(&found, &expected) < 5e-6, "row {i}");
    }
}

#[test]
fn warm_is_a_constant_of_the_model_and_not_zero() {
    let texts = array(&["It rained.".to_owned()]);
    let spec = |state| EmbedSpec { state, ..EmbedSpec::default() };
    let (one, two) = (tiny(), tiny());
    let a = columns(&one, spec(StateMode::Warm));
    let b = columns(&two, spec(StateMode::Warm));
    assert_eq!(a.metadata(), b.metadata());
    assert!(a.metadata().iter().any(|(k, v)| k == "elmo.state" && v.starts_with("warm:")));
    let warm = bits(&a.embed(&texts).unwrap().vectors);
    assert_eq!(warm, bits(&b.embed(&texts).unwrap().vectors));
    assert_ne!(warm, bits(&columns(&one, spec(StateMode::Zero)).embed(&texts).unwrap().vectors));
}

/// The reference computes the warm state by the recipe of `docs/states.md`: the text is read again and again without
/// the boundary that closes a sentence, each direction in the order of the sentences.
#[test]
fn warm_agrees_with_the_reference() {
    let data = ModelData::tiny();
    let reference = Reference::new(&data.options, &data.weights);
    let warm_up = [
        "The ferry leaves the harbour at half past six , and the last bus to the village waits for it .",
        "Most of the passengers are on their way home from work ; a few have come to see the island .",
        "\" Is this seat taken ? \" asked a woman with two heavy bags .",
        "Nobody answered at first , because the engine was so loud .",
        "Then a boy moved his coat , smiled , and pointed at the empty place beside him .",
        "It had rained all day , but now the clouds were breaking over the hills in the west .",
    ];
    let mut state = reference.zero_state();
    for sentence in warm_up.repeat(20) {
        let tokens = reference.token_vectors(&sentence.split(' ').collect::<Vec<_>>());
        let forward = reference.read(reference::FORWARD, &tokens[..tokens.len() - 1], &state);
        let backward = reference.read(reference::BACKWARD, &tokens[1..], &state);
        state = reference::LstmState([forward.end, backward.end]);
    }
    let words = ["It", "rained", "for", "days", "."];
    let expected = vectors::average(&reference.sentence(&words, &state, false).layers);
    let spec = EmbedSpec { state: StateMode::Warm, ..one_sentence() };
    check_text(&tiny(), &words.join(" "), &spec, &expected);
}

#[test]
fn a_stored_warm_state_is_used_and_belongs_to_its_model() {
    let texts = array(&["It rained.".to_owned()]);
    let warm = |elmo: &Elmo| columns(elmo, EmbedSpec { state: StateMode::Warm, ..EmbedSpec::default() });
    let computed = tiny();
    let folder = tempfile::tempdir().unwrap();
    let mut data = ModelData::tiny();
    data.warm_state = Some(computed.warm_state().unwrap());
    data.save(folder.path(), elmo::model_dir::WeightsFormat::Safetensors).unwrap();
    let stored = Elmo::from_data(ModelData::open(folder.path()).unwrap(), &settings()).unwrap();
    let vectors = |elmo: &Elmo| bits(&warm(elmo).embed(&texts).unwrap().vectors);
    assert_eq!(vectors(&stored), vectors(&computed));
    // Other numbers are used as they are, and have another identity.
    data.warm_state.as_mut().unwrap()[0] += 0.5;
    data.save(folder.path(), elmo::model_dir::WeightsFormat::Safetensors).unwrap();
    let other = Elmo::from_data(ModelData::open(folder.path()).unwrap(), &settings()).unwrap();
    assert_ne!(vectors(&other), vectors(&computed));
    assert_ne!(warm(&other).metadata(), warm(&stored).metadata());
    // A state beside another model's weights is refused.
    data.options.lstm.use_skip_connections ^= true;
    std::fs::write(folder.path().join("options.json"), data.options.to_json_pretty()).unwrap();
    let refused = ModelData::open(folder.path()).unwrap_err().to_string();
    assert!(refused.contains("warm_state.safetensors") && refused.contains("--warm-state"), "{refused}");
}

/// Tensors that another model would compute with are no surplus to pass over.
#[test]
fn weights_of_a_larger_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut data = ModelData::tiny();
    data.save(folder.path(), elmo::model_dir::WeightsFormat::Safetensors).unwrap();
    let options = folder.path().join("options.json");
    let layers = data.options.lstm.n_layers;
    data.options.lstm.n_layers -= 1;
    std::fs::write(&options, data.options.to_json_pretty()).unwrap();
    let refused = ModelData::open(folder.path()).unwrap_err().to_string();
    assert!(refused.contains(&format!("RNN_1/RNN/MultiRNNCell/Cell{}/LSTMCell/W_0", layers - 1)), "{refused}");
}

#[test]
fn boundaries_change_nothing_but_their_own_presence() {
    let texts = array(&["It rained . We stayed in".to_owned()]);
    let elmo = tiny();
    let spec = |boundaries| EmbedSpec { level: Level::Token, boundaries, ..one_sentence() };
    let with = columns(&elmo, spec(true)).embed(&texts).unwrap().vectors;
    let without = columns(&elmo, spec(false)).embed(&texts).unwrap().vectors;
    let (with, without) = (with.as_list::<i32>().value(0), without.as_list::<i32>().value(0));
    assert_eq!(with.len(), without.len() + 2);
    // `n` steps from the state after the boundary and `n + 2` steps with it give the same bits.
    assert_eq!(&with.slice(1, without.len()), &without);
    let words = with.as_struct().column_by_name("token").unwrap().as_string::<i32>().clone();
    assert_eq!((words.value(0), words.value(with.len() - 1)), ("<S>", "</S>"));
}

#[test]
fn one_huge_cell_among_normal_ones() {
    let parts = ["The tide was out.", "Nobody had told her!", "She walked back, slowly, over wet stones."];
    // 1.3 MB: above the size from which a text is embedded piece by piece. Its first and last sentence are no others.
    let text = format!("Early one morning. {}It ended there.", (parts.join(" ") + " ").repeat(16_000));
    let elmo = tiny();
    let spec = |level, pooling| EmbedSpec { level, pooling, ..EmbedSpec::default() };
    let embed = |texts: &[&str], level, pooling| {
        columns(&elmo, spec(level, pooling)).embed(&(Arc::new(StringArray::from(texts.to_vec())) as ArrayRef)).unwrap()
    };

    let texts = ["First.", &text, "Last."];
    for (pooling, expected_pooling) in POOLINGS {
        let found = embed(&texts, Level::Sentence, pooling);
        assert_eq!(found.stats.sentences, 48_002 + 2);
        let alone = bits(&embed(&["First.", "Last."], Level::Sentence, pooling).vectors);
        let huge = bits(&found.vectors);
        assert_eq!((&huge[0], &huge[2]), (&alone[0], &alone[1]), "the neighbours");
        // The middle sentences repeat: for all poolings but the mean, one repetition has the same result.
        let round = ["Early one morning.", parts[0], parts[1], parts[2], "It ended there."];
        let short = embed(&round, Level::Token, pooling).vectors;
        let list = short.as_list::<i32>();
        let tokens = |i: usize| -> Vec<f64> {
            let row = list.value(i);
            let values = row.as_struct().column_by_name("embedding").unwrap().as_fixed_size_list().clone();
            (0..row.len())
                .flat_map(|k| values.value(k).as_primitive::<Float32Type>().values().to_vec())
                .map(f64::from)
                .collect()
        };
        let times = if pooling == Pooling::Mean { 16_000 } else { 1 };
        let middle = [tokens(1), tokens(2), tokens(3)].concat().repeat(times);
        let expected = [tokens(0), middle, tokens(4)].concat();
        let width = elmo.options().width();
        let worst = gap(
            &found.vectors.as_fixed_size_list().value(1),
            &vectors::pool(&expected, width, width / 2, expected_pooling).unwrap(),
        );
        assert!(worst < 1e-6, "{pooling}: {worst:e}");
    }

    // Token by token: as in the short text that ends where the first pieces do, and offsets into the long one.
    let found = embed(&texts, Level::Token, Pooling::Mean).vectors;
    let row = found.as_list::<i32>().value(1);
    let row = row.as_struct();
    let number = |name: &str, k: usize| {
        row.column_by_name(name).unwrap().as_primitive::<arrow::datatypes::UInt32Type>().value(k) as usize
    };
    let words = row.column_by_name("token").unwrap().as_string::<i32>();
    let (mut end, mut sentence) = (0, 0);
    for k in 0..row.len() {
        assert_eq!(&text[number("start", k)..number("end", k)], words.value(k));
        assert!(text[end..number("start", k)].trim().is_empty(), "token {k}: something is left out");
        assert!(number("sentence", k) == sentence || number("sentence", k) == sentence + 1, "token {k}");
        (end, sentence) = (number("end", k), number("sentence", k));
    }
    assert_eq!((end, sentence), (text.len(), 48_001));
    let short = embed(&[&text[..8000]], Level::Token, Pooling::Mean).vectors;
    let short = short.as_list::<i32>().value(0);
    // Without the last sentence, which is cut.
    assert_eq!(&found.as_list::<i32>().value(1).slice(0, short.len() - 20), &short.slice(0, short.len() - 20));
}

/// All tokens of a sentence are in memory at a time; with sentences off a cell of any size would be one.
#[test]
fn a_sentence_of_many_megabytes_is_that_rows_error() {
    let texts = array(&["fine".to_owned(), "long day ".repeat(1 << 20), "fine".to_owned()]);
    for level in [Level::Sentence, Level::Token] {
        let spec = EmbedSpec { on_error: OnError::Null, level, ..one_sentence() };
        let found = columns(&tiny(), spec).embed(&texts).unwrap();
        assert_eq!(found.error.value(1), "one sentence of 9437184 bytes; the maximum is 8 MiB; use sentences split");
        assert_eq!((found.error.null_count(), found.vectors.null_count(), found.stats.errors), (2, 1, 1));
    }
}

#[test]
fn the_self_test_passes_here() {
    let data = ModelData::tiny();
    let model = BiLm::new(&data.options, &data.weights, DeviceName::Cpu, Precision::F32).unwrap();
    let report = elmo::model::self_test(&model).unwrap();
    assert!(report.bit_equal(), "{report:?}");
    assert_eq!(elmo::model::compare(&model, &model.share()).unwrap(), 0.0);
}

#[test]
fn many_callers_at_once_get_their_own_answers_in_order() {
    let elmo = tiny_with(&EmbedderSettings { queue_tokens: 50, batch_tokens: Some(64), ..settings() });
    let columns = columns(&elmo, one_sentence());
    let texts = sentences(200, 3);
    let expected = bits(&columns.embed(&array(&texts)).unwrap().vectors);
    std::thread::scope(|scope| {
        for caller in 0..8 {
            let (columns, texts, expected) = (&columns, &texts, &expected);
            scope.spawn(move || {
                for call in 0..8 {
                    let from = (caller * 31 + call * 7) % 150;
                    let part = array(&texts[from..from + 50]);
                    assert_eq!(bits(&columns.embed(&part).unwrap().vectors), expected[from..from + 50]);
                }
            });
        }
    });
    let metrics = elmo.embedder().metrics();
    assert!(metrics.sentences >= 200 + 8 * 8 * 50);
    elmo.embedder().close();
    assert!(columns.embed(&array(&texts)).is_err(), "a closed engine refuses work instead of hanging");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn rows_in_are_rows_out_and_offsets_point_into_the_text(
        texts in prop::collection::vec(prop::option::of("\\PC{0,60}|(\\w{1,8}[ .,!?]{1,2}){0,12}"), 0..12),
        tokenizer in prop::sample::select(vec![TokenizerKind::Moses, TokenizerKind::Words, TokenizerKind::Whitespace]),
        split in any::<bool>(),
    ) {
        let elmo = shared();
        let sentences = if split { SentenceMode::Split } else { SentenceMode::Off };
        let spec = EmbedSpec { level: Level::Token, tokenizer, sentences, max_tokens: 9, ..EmbedSpec::default() };
        let column: ArrayRef = Arc::new(StringArray::from(texts.clone()));
        let found = columns(elmo, spec).embed(&column).unwrap();
        prop_assert_eq!(found.vectors.len(), texts.len());
        let list = found.vectors.as_list::<i32>();
        for (i, text) in texts.iter().enumerate() {
            prop_assert_eq!(list.is_null(i), text.is_none());
            let Some(text) = text else { continue };
            let row = list.value(i);
            let row = row.as_struct();
            let words = row.column_by_name("token").unwrap().as_string::<i32>().clone();
            let at = |name: &str, k: usize| {
                let column = row.column_by_name(name).unwrap();
                column.as_primitive::<arrow::datatypes::UInt32Type>().value(k) as usize
            };
            for k in 0..words.len() {
                prop_assert_eq!(&text[at("start", k)..at("end", k)], words.value(k));
                prop_assert!(k == 0 || at("start", k) >= at("end", k - 1));
            }
        }
    }
}

/// One engine for all cases of a property.
fn shared() -> &'static Elmo {
    static ELMO: std::sync::OnceLock<Elmo> = std::sync::OnceLock::new();
    ELMO.get_or_init(tiny)
}
