//! What must not change the bits of a run: the number of threads, and interruptions.

use elmo::{
    model::Precision,
    options::PublishedSize,
    train::{Classes, LanguageModel, Recipe, Resources, Snapshot, StepReport, TrainError, Trainer, Values},
};

use super::cases;

/// Reports without what is expected to differ, and the snapshot at the end.
fn run(trainer: &mut Trainer, windows: &[elmo::train::Window]) -> Vec<StepReport> {
    windows.iter().map(|window| trainer.step(window).unwrap()).collect()
}

fn bits(snapshot: &Snapshot) -> Vec<(String, Vec<u64>)> {
    let of = |values: &Values| match values {
        Values::F32(values) => values.iter().map(|v| u64::from(v.to_bits())).collect(),
        Values::F64(values) => values.iter().map(|v| v.to_bits()).collect(),
    };
    snapshot.tensors.iter().map(|(name, saved)| (name.clone(), of(&saved.values))).collect()
}

/// A recipe with everything that is random or sparse.
fn recipe(case: &cases::Case, precision: Precision, lanes: usize) -> Recipe {
    Recipe { seed: 3, dropout: 0.2, classes: Classes::Sampled(9), ..case.recipe(precision, lanes) }
}

fn trainer(case: &cases::Case, precision: Precision, threads: usize) -> Trainer {
    let resources = Resources { threads, ..Resources::default() };
    Trainer::new(&case.options, recipe(case, precision, 4), resources, &case.model()).unwrap()
}

fn case(name: &str) -> cases::Case {
    cases::cases().into_iter().find(|case| case.name == name).unwrap()
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    let windows = &cases::windows()[..6];
    for name in ["base", "adamw_cosine"] {
        let case = case(name);
        for precision in [Precision::F32, Precision::F64, Precision::Bf16] {
            let mut alone = trainer(&case, precision, 1);
            let expected = run(&mut alone, windows);
            let expected_bits = bits(&alone.snapshot().unwrap());
            for threads in [2, 3, 8] {
                let mut several = trainer(&case, precision, threads);
                assert_eq!(run(&mut several, windows), expected, "{name}, {precision}, {threads} threads");
                assert!(bits(&several.snapshot().unwrap()) == expected_bits, "{name}, {precision}, {threads} threads");
            }
        }
    }
}

#[test]
fn ten_steps_are_five_and_five_after_a_snapshot() {
    let windows = &cases::windows()[..10];
    for name in ["base", "no_lstm_projection", "adamw_cosine"] {
        let case = case(name);
        for precision in [Precision::F32, Precision::F64, Precision::Bf16] {
            let mut whole = trainer(&case, precision, 2);
            let expected = run(&mut whole, windows);
            for stop in [0, 1, 5, 9] {
                let mut first = trainer(&case, precision, 2);
                let mut found = run(&mut first, &windows[..stop]);
                let snapshot = first.snapshot().unwrap();
                drop(first);
                let resources = Resources { threads: 1, ..Resources::default() };
                let restored = Trainer::restore(&case.options, recipe(&case, precision, 4), resources, &snapshot);
                let mut second = restored.unwrap();
                assert_eq!(second.snapshot().unwrap(), snapshot, "{name}, {precision}: stopped after {stop}");
                found.extend(run(&mut second, &windows[stop..]));
                assert_eq!(found, expected, "{name}, {precision}: stopped after {stop}");
                let (one, other) = (second.snapshot().unwrap(), whole.snapshot().unwrap());
                assert_eq!(one.counters, other.counters);
                assert!(bits(&one) == bits(&other), "{name}, {precision}: stopped after {stop}");
            }
        }
    }
}

#[test]
fn a_run_that_goes_back_has_the_bits_of_a_restored_one() {
    let windows = &cases::windows()[..8];
    for name in ["base", "adamw_cosine"] {
        let case = case(name);
        for precision in [Precision::F32, Precision::F64, Precision::Bf16] {
            let mut run_of_eight = trainer(&case, precision, 2);
            run(&mut run_of_eight, &windows[..3]);
            let snapshot = run_of_eight.snapshot().unwrap();
            let expected = run(&mut run_of_eight, &windows[3..]);
            run_of_eight.reset(&snapshot).unwrap();
            assert_eq!(run_of_eight.snapshot().unwrap(), snapshot, "{name}, {precision}");
            assert_eq!(run(&mut run_of_eight, &windows[3..]), expected, "{name}, {precision}");
        }
    }
    let mut other = trainer(&case("base"), Precision::F32, 1);
    let mut lacking = other.snapshot().unwrap();
    lacking.tensors.remove("weights/softmax/b");
    assert!(other.reset(&lacking).unwrap_err().to_string().contains("weights/softmax/b"));
}

/// Another number of lanes gives the same numbers up to rounding, also of a run that is resumed.
#[test]
fn a_run_goes_on_with_another_number_of_lanes() {
    let (windows, case) = (cases::windows(), case("base"));
    let mut whole = trainer(&case, Precision::F64, 1);
    let expected = run(&mut whole, &windows[..8]);
    let mut first = trainer(&case, Precision::F64, 1);
    run(&mut first, &windows[..4]);
    let (recipe, snapshot) = (recipe(&case, Precision::F64, 1), first.snapshot().unwrap());
    let mut second = Trainer::restore(&case.options, recipe, Resources::default(), &snapshot).unwrap();
    for (found, expected) in run(&mut second, &windows[4..8]).iter().zip(&expected[4..]) {
        assert!((found.loss - expected.loss).abs() < 1e-13 && (found.grad_norm - expected.grad_norm).abs() < 1e-12);
    }
}

/// Parameters in float32, products in bfloat16: losses agree to two digits, and fall as they do in float32.
#[test]
fn losses_in_bfloat16_are_near_those_in_float32() {
    let (windows, case) = (cases::windows(), case("base"));
    let losses = |precision| -> Vec<f64> {
        run(&mut trainer(&case, precision, 1), &windows).iter().map(|report| report.loss).collect()
    };
    let (exact, near) = (losses(Precision::F32), losses(Precision::Bf16));
    let gap = exact.iter().zip(&near).map(|(a, b)| (a - b).abs() / a).fold(0.0, f64::max);
    assert!(gap > 1e-6 && gap < 0.02, "{gap}");
    let mut trained = trainer(&case, Precision::Bf16, 1);
    trained.step(&windows[0]).unwrap();
    let snapshot = trained.snapshot().unwrap();
    assert!(snapshot.tensors.values().all(|saved| matches!(saved.values, Values::F32(_))));
}

#[test]
fn a_step_that_is_not_finite_changes_nothing() {
    let (windows, case) = (cases::windows(), case("base"));
    let mut broken = trainer(&case, Precision::F32, 2);
    run(&mut broken, &windows[..2]);
    let mut snapshot = broken.snapshot().unwrap();
    let Some(Values::F32(bias)) = snapshot.tensors.get_mut("weights/softmax/b").map(|saved| &mut saved.values) else {
        panic!("float32")
    };
    bias[3] = f32::NAN;
    let resources = Resources { threads: 2, ..Resources::default() };
    let mut broken = Trainer::restore(&case.options, case.recipe(Precision::F32, 4), resources, &snapshot).unwrap();
    let before = broken.snapshot().unwrap();
    let error = broken.step(&windows[2]).unwrap_err();
    assert!(matches!(error, TrainError::NotFinite { step: 3, .. }), "{error}");
    let after = broken.snapshot().unwrap();
    assert!(bits(&after) == bits(&before) && after.counters == before.counters);
}

#[test]
fn what_does_not_fit_is_refused() {
    let (windows, case) = (cases::windows(), case("base"));
    let good = trainer(&case, Precision::F32, 1).snapshot().unwrap();
    let restore = |snapshot: &Snapshot, recipe: Recipe| {
        Trainer::restore(&case.options, recipe, Resources::default(), snapshot).map(drop).unwrap_err().to_string()
    };
    let recipe = recipe(&case, Precision::F32, 4);
    for name in ["weights/char_embed", "weights/softmax/b", "optimizer/accumulator/softmax/W", "lstm/1/c"] {
        let mut lacking = good.clone();
        lacking.tensors.remove(name);
        assert!(restore(&lacking, recipe.clone()).contains(name), "{name}");
        let mut other = good.clone();
        other.tensors.insert(name.to_owned(), good.tensors["weights/CNN/b_cnn_0"].clone());
        restore(&other, recipe.clone());
    }
    for (wrong, words) in [
        (Recipe { rows: 5, ..recipe.clone() }, "lstm/0/h"),
        (Recipe { lanes: 0, ..recipe.clone() }, "lanes"),
        (Recipe { lanes: 5, ..recipe.clone() }, "lanes"),
        (Recipe { dropout: 1.0, ..recipe.clone() }, "dropout"),
        (Recipe { learning_rate: f64::NAN, ..recipe.clone() }, "learning_rate"),
        (Recipe { clip_norm: Some(0.0), ..recipe.clone() }, "clip_norm"),
        (Recipe { classes: Classes::Sampled(32), ..recipe.clone() }, "fewer negatives"),
        (Recipe { classes: Classes::Sampled(0), ..recipe.clone() }, "0 negatives"),
    ] {
        let error = restore(&good, wrong);
        assert!(error.contains(words), "{words}: {error}");
    }
    let mut trainer = trainer(&case, Precision::F32, 1);
    let error = trainer.step(&windows[0].of_rows(1..3)).unwrap_err().to_string();
    assert!(error.contains("2 rows, not the 4"), "{error}");
}

/// Parts of a window, which need less memory, give the same numbers up to rounding: dropout and negatives are those of the
/// whole window.
#[test]
fn a_window_is_computed_in_parts() {
    let (windows, case) = (cases::windows(), case("base"));
    let expected = run(&mut trainer(&case, Precision::F64, 1), &windows[..8]);
    for part_rows in [1, 3] {
        let resources = Resources { part_rows, ..Resources::default() };
        let recipe = recipe(&case, Precision::F64, 2);
        let mut parts = Trainer::new(&case.options, recipe, resources, &case.model()).unwrap();
        for (found, expected) in run(&mut parts, &windows[..8]).iter().zip(&expected) {
            assert!((found.loss - expected.loss).abs() < 1e-13 && (found.grad_norm - expected.grad_norm).abs() < 1e-12);
        }
    }
}

/// The vocabulary decides: sampling most of it would save little.
#[test]
fn the_full_softmax_is_chosen_for_small_vocabularies() {
    let mut options = PublishedSize::Small.options();
    (options.lstm.dim, options.lstm.projection_dim) = (4, 2);
    options.char_cnn.filters.truncate(1);
    for (words, expected) in [(8191, None), (16_383, None), (16_384, Some(8192))] {
        let model = LanguageModel::initial(&options, words, 0);
        let trainer = Trainer::new(&options, Recipe::bilm(), Resources::default(), &model).unwrap();
        assert_eq!(trainer.samples(), expected, "{words} words");
    }
}
