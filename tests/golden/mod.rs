//! Golden tests: the reference against the files that `reference/golden.py` made, and an engine against both.
//!
//! Two programs wrote the same model down independently (plain loops in Rust, padded batches in numpy), so a
//! wrong expected value would need the same mistake twice. Settings and notes of each case (share of clipped
//! values, error of plain float32) are in `fixtures/golden/cases.json`.
//!
//! To test an engine, implement [`Engine`] for it and call [`check_engine`]; [`check_engine_on`] tests other sentences.

#![allow(clippy::unwrap_used)] // a fixture that cannot be read is a failed test

mod claims;
pub(crate) mod files;

use elmo::{options::ModelOptions, weights::Weights};

use crate::reference::{
    Layers, Reference, Round, StartState, as_codes, char_ids,
    seeded::{seeded_state, seeded_weights},
    vectors, weights_as_codes,
};
use files::{Case, Expected, Values};

/// The two float64 programs differ by rounding only (at most 4e-14 measured, see fixtures/golden/README.md).
const AGREEMENT: f64 = 1e-12;

/// A biLM that computes in float32, under test.
pub(crate) trait Engine {
    /// Batches in order, the first from a fresh start: `[batch][sentence][layer][token * 2P + dimension]`.
    fn run(&self, batches: &[Vec<Vec<String>>], start: &StartState, boundaries: bool) -> Vec<Vec<Vec<Vec<f32>>>>;
}

/// Every case of the files: the engine against the expected values and, value by value, against the reference.
pub(crate) fn check_engine<E: Engine>(new: impl Fn(&ModelOptions, &Weights) -> E) {
    let values = Values::read();
    for case in files::cases() {
        let weights = case.weights();
        let found = new(&case.options, &weights).run(&case.batches, &case.start(), case.boundaries);
        let found = widened(found);
        let reference = Reference::new(&case.options, &weights).run(&case.batches, &case.start(), case.boundaries);
        assert_near(&case, "reference", worst(&found, &reference), case.tolerance);
        assert_near(&case, "golden file", distance_to_file(&case, &found, &values), case.tolerance);
    }
}

/// The engine against the reference in the shape of a case, on sentences and from states that no file has.
pub(crate) fn check_engine_on<E: Engine>(
    new: impl Fn(&ModelOptions, &Weights) -> E,
    shape: &str,
    batches: &[Vec<Vec<String>>],
    states: &[&str],
) {
    let mut case = files::cases().into_iter().find(|case| case.name == shape).unwrap();
    let weights = case.weights();
    let engine = new(&case.options, &weights);
    for state in states {
        case.state = (*state).to_owned();
        let found = widened(engine.run(batches, &case.start(), false));
        let reference = Reference::new(&case.options, &weights).run(batches, &case.start(), false);
        assert_near(&case, &format!("reference, state {state}"), worst(&found, &reference), case.tolerance);
    }
}

/// Every case of the files, in 8-bit integers: the engine against the reference with the same rounding.
///
/// Most agree to rounding of float32. Where a number lies between two codes, as nearly as float32 can tell, it may get the other one.
/// What depends on it then moves by a part of a code, and so other numbers get other codes too: what is left is nearer to the rounded
/// reference than that is to the exact one. This happens where rows have thousands of numbers, and rarely where they have few.
pub(crate) fn check_engine_in_codes<E: Engine>(new: impl Fn(&ModelOptions, &Weights) -> E) {
    let (mut equal, mut all) = (0, 0);
    for case in files::cases() {
        let weights = case.weights();
        let found = widened(new(&case.options, &weights).run(&case.batches, &case.start(), case.boundaries));
        let of = |weights: &Weights, round: Round| {
            let reference = Reference::with_rounding(&case.options, weights, round);
            reference.run(&case.batches, &case.start(), case.boundaries)
        };
        let rounded = of(&weights_as_codes(&weights), as_codes);
        let (gap, drift) = (relative_rms(&found, &rounded), relative_rms(&rounded, &of(&weights, <[f64]>::to_vec)));
        println!("{}: {gap:.1e} from the rounded reference, which is {drift:.1e} from the exact one", case.name);
        assert!(gap < 0.6 * drift, "{}: {gap:e}, not below 0.6 of {drift:e}", case.name);
        (equal, all) = (equal + u32::from(gap < 1e-6), all + 1);
    }
    assert!(4 * equal >= 3 * all, "only {equal} of {all} cases agree to rounding of float32");
}

/// Root mean square of the differences over that of the expected numbers.
fn relative_rms(found: &[Vec<Layers>], expected: &[Vec<Layers>]) -> f64 {
    let numbers = |all: &[Vec<Layers>]| -> Vec<f64> { all.iter().flatten().flatten().flatten().copied().collect() };
    let (found, expected) = (numbers(found), numbers(expected));
    assert_eq!(found.len(), expected.len());
    let squares: f64 = expected.iter().map(|x| x * x).sum();
    (found.iter().zip(&expected).map(|(a, b)| (a - b).powi(2)).sum::<f64>() / squares).sqrt()
}

#[test]
fn reference_agrees_with_the_golden_files() {
    let values = Values::read();
    for case in files::cases() {
        let weights = case.weights();
        let found = Reference::new(&case.options, &weights).run(&case.batches, &case.start(), case.boundaries);
        let distance = distance_to_file(&case, &found, &values);
        println!("{}: {distance:.1e}", case.name);
        assert_near(&case, "golden file", distance, AGREEMENT);
    }
}

#[test]
fn reference_agrees_on_character_ids() {
    for (word, ids) in files::char_ids() {
        assert_eq!(char_ids(&word, 50), ids, "{word:?}");
    }
}

#[test]
fn reference_agrees_on_mixes_and_poolings() {
    let fixture = files::vectors();
    let weights = seeded_weights(&fixture.options, fixture.seed, fixture.scale);
    let layers = Reference::new(&fixture.options, &weights).layers(&fixture.sentence);
    let half = fixture.options.lstm.projection_dim;
    for wanted in fixture.vectors {
        let tokens = wanted.choose(&layers, 2 * half);
        let width = tokens.len() / fixture.sentence.len();
        let vector = vectors::pool(&tokens, width, half, wanted.pooling()).unwrap();
        let what = wanted.describe();
        assert!(largest_gap(&vector, &wanted.vector) <= AGREEMENT, "{what}");
        assert!(largest_gap(&vectors::l2(&vector), &wanted.l2) <= AGREEMENT, "{what}, length 1");
    }
}

/// Cases are there to catch faults: a model with another setting must not pass for the right one.
#[test]
fn golden_files_notice_a_changed_setting() {
    let values = Values::read();
    type Change = fn(&mut ModelOptions);
    let changes: [(&str, &str, Change); 5] = [
        ("relu_2_highways_2_layers", "no highway", |o| o.char_cnn.n_highway = 1),
        ("no_skip_connections", "skip", |o| o.lstm.use_skip_connections = true),
        ("both_clips_bite", "no cell clip", |o| o.lstm.cell_clip = None),
        ("both_clips_bite", "no projection clip", |o| o.lstm.proj_clip = None),
        ("12_characters_per_word", "longer words", |o| o.char_cnn.max_characters_per_token = 50),
    ];
    for (name, change, apply) in changes {
        let mut case = files::cases().into_iter().find(|case| case.name == name).unwrap();
        let weights = case.weights();
        apply(&mut case.options);
        let found = Reference::new(&case.options, &weights).run(&case.batches, &case.start(), case.boundaries);
        let distance = distance_to_file(&case, &found, &values);
        assert!(distance > 100.0 * case.tolerance, "{name} does not notice {change}: {distance:e}");
    }
}

fn assert_near(case: &Case, reference: &str, distance: f64, tolerance: f64) {
    assert!(distance <= tolerance, "{}: {distance:e} from the {reference}, {tolerance:e} allowed", case.name);
}

/// Largest distance of all batches of a case from its file.
fn distance_to_file(case: &Case, found: &[Vec<Layers>], values: &Values) -> f64 {
    assert_eq!(found.len(), case.batches.len(), "{}: batches", case.name);
    let distance = |(i, batch): (usize, &Vec<Layers>)| {
        let found = concatenated(batch);
        match values.expected(case, i) {
            Expected::All(layers) => gap_of_layers(&found, &layers),
            Expected::Probes { places, layers } => gap_of_layers(&probed(&found, &places), &layers),
        }
    };
    found.iter().enumerate().map(distance).fold(0.0, larger)
}

/// The sentences of a batch one after the other: `[layer][all tokens * 2P]`, as the files keep them.
fn concatenated(batch: &[Layers]) -> Layers {
    (0..batch[0].len()).map(|k| batch.iter().flat_map(|sentence| sentence[k].iter().copied()).collect()).collect()
}

/// What the files keep of a large model: some values, then the mean and the mean magnitude of the layer.
fn probed(layers: &Layers, places: &[usize]) -> Layers {
    let probe = |layer: &Vec<f64>| {
        let n = layer.len() as f64;
        let means = [layer.iter().sum::<f64>() / n, layer.iter().map(|x| x.abs()).sum::<f64>() / n];
        places.iter().map(|&place| layer[place]).chain(means).collect()
    };
    layers.iter().map(probe).collect()
}

/// Largest distance of equally shaped outputs.
fn worst(found: &[Vec<Layers>], expected: &[Vec<Layers>]) -> f64 {
    assert_eq!(found.len(), expected.len(), "batches");
    let mut worst = 0.0;
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.len(), expected.len(), "sentences of a batch");
        for (found, expected) in found.iter().zip(expected) {
            worst = larger(worst, gap_of_layers(found, expected));
        }
    }
    worst
}

fn gap_of_layers(found: &Layers, expected: &Layers) -> f64 {
    assert_eq!(found.len(), expected.len(), "layers");
    found.iter().zip(expected).map(|(found, expected)| largest_gap(found, expected)).fold(0.0, larger)
}

pub(crate) fn largest_gap(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len(), "values of a layer");
    found.iter().zip(expected).map(|(found, expected)| (found - expected).abs()).fold(0.0, larger)
}

/// The larger of two, and NaN when there is one: `f64::max` would pass over it.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

fn widened(found: Vec<Vec<Vec<Vec<f32>>>>) -> Vec<Vec<Layers>> {
    let layer = |layer: Vec<f32>| layer.into_iter().map(f64::from).collect();
    let sentence = |layers: Vec<Vec<f32>>| layers.into_iter().map(layer).collect();
    found.into_iter().map(|batch| batch.into_iter().map(sentence).collect()).collect()
}

impl Case {
    fn weights(&self) -> Weights {
        seeded_weights(&self.options, self.seed, self.scale)
    }

    fn start(&self) -> StartState {
        match self.state.as_str() {
            "zero" => StartState::Zero,
            "given" => StartState::Given(seeded_state(&self.options, self.seed)),
            "carry" => StartState::Carry,
            other => panic!("{}: no state {other}", self.name),
        }
    }
}
