//! Gradients of the whole step, by name, against finite differences of the loss that the step reports.

use std::collections::BTreeMap;

use elmo::{
    model::Precision,
    train::{Optimizer, Recipe, Resources, Schedule, Snapshot, Trainer, Values},
};

use super::cases::{self, Case};

/// Step of central differences.
const STEP: f64 = 1e-6;
/// As in `tests/gradients.rs`.
const TOLERANCE: f64 = 1e-7;
/// Numbers of each tensor that are moved one by one, beside directions that move all of them.
const SINGLE: usize = 1;

fn values<'s>(snapshot: &'s mut Snapshot, name: &str) -> &'s mut Vec<f64> {
    match &mut snapshot.tensors.get_mut(name).unwrap().values {
        Values::F64(values) => values,
        Values::F32(_) => panic!("{name} is float32"),
    }
}

/// A recipe whose step moves each number by its gradient: the accumulator is so large that it does not change.
fn plain(case: &Case) -> Recipe {
    Recipe {
        optimizer: Optimizer::Adagrad { initial_accumulator: 1e30 },
        learning_rate: 1e15,
        schedule: Schedule::Constant,
        clip_norm: None,
        ..case.recipe(Precision::F64, 2)
    }
}

/// The state after two steps: the windows that follow begin with a state other than zero.
fn begun(case: &Case, windows: &[elmo::train::Window]) -> Snapshot {
    let mut trainer = case.trainer(Precision::F64, 2, 1);
    for (step, window) in windows[..2].iter().enumerate() {
        trainer.step_with(window, &case.draws(step)).unwrap();
    }
    let mut snapshot = trainer.snapshot().unwrap();
    // The accumulators of `plain`.
    let names: Vec<String> = snapshot.tensors.keys().filter(|name| name.starts_with("weights/")).cloned().collect();
    for name in names {
        let name = name.trim_start_matches("weights/");
        let saved = snapshot.tensors[&format!("weights/{name}")].clone();
        let ones = elmo::train::Saved { values: Values::F64(vec![1e30; saved.shape.iter().product()]), ..saved };
        snapshot.tensors.insert(format!("optimizer/accumulator/{name}"), ones);
    }
    snapshot
}

fn gradients(before: &Snapshot, after: &mut Snapshot) -> BTreeMap<String, Vec<f64>> {
    let names = before.tensors.keys().filter(|name| name.starts_with("weights/")).cloned().collect::<Vec<_>>();
    let of = |name: String| {
        let Values::F64(before) = &before.tensors[&name].values else { panic!("{name}") };
        let moved = values(after, &name).iter().zip(before).map(|(after, before)| before - after).collect();
        (name, moved)
    };
    names.into_iter().map(of).collect()
}

/// Numbers in `-1..1` without a pattern.
fn wave(n: usize, seed: f64) -> Vec<f64> {
    (0..n).map(|i| (i as f64 * 12.9898 + seed).sin() * 0.999).collect()
}

/// The gradient of every named parameter, the softmax included, in variants that reach every part of the graph. A part
/// that is cut (a layer, a direction, the skip connection, the state within the window, a gate, a clip, the words of
/// one chunk, one lane, one direction's loss) makes the gradient of some parameter another one.
#[test]
fn gradients_of_the_whole_step_agree_with_finite_differences() {
    let windows = cases::windows();
    let all = cases::cases();
    for name in ["everything", "no_lstm_projection", "three_layers_one_highway"] {
        let case = all.iter().find(|case| case.name == name).unwrap();
        check(case, &windows);
    }
}

fn check(case: &Case, windows: &[elmo::train::Window]) {
    let (start, window, draws) = (begun(case, windows), &windows[2], case.draws(2));
    let restored = |snapshot: &Snapshot| {
        Trainer::restore(&case.options, plain(case), Resources { threads: 1, ..Resources::default() }, snapshot)
            .unwrap()
    };
    // The loss of which the step takes gradients.
    let scale = plain(case).gradient_scale;
    let loss = |snapshot: &Snapshot| scale * restored(snapshot).step_with(window, &draws).unwrap().loss;
    let mut trainer = restored(&start);
    let report = trainer.step_with(window, &draws).unwrap();
    let gradients = gradients(&start, &mut trainer.snapshot().unwrap());
    let norm: f64 = gradients.values().flatten().map(|g| g * g).sum::<f64>().sqrt();
    assert!((norm / report.grad_norm - 1.0).abs() < 1e-9, "{}: norm {norm}, not {}", case.name, report.grad_norm);
    assert_eq!(gradients.len(), case.json["tensors"].as_array().unwrap().len());
    for (name, gradient) in &gradients {
        let n = gradient.len();
        assert!(gradient.iter().any(|g| g.abs() > 1e-6), "{}: nothing depends on {name}", case.name);
        let largest = (0..n).max_by(|&a, &b| gradient[a].abs().total_cmp(&gradient[b].abs())).unwrap();
        let places = (0..SINGLE).map(|k| k * 7919 % n).chain([largest]);
        let single = places.map(|place| (0..n).map(|i| f64::from(i == place)).collect::<Vec<f64>>());
        for direction in single.chain([wave(n, 0.1)]) {
            let moved = |by: f64| {
                let mut snapshot = start.clone();
                values(&mut snapshot, name).iter_mut().zip(&direction).for_each(|(w, d)| *w += by * d);
                loss(&snapshot)
            };
            let difference = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
            let derivative: f64 = gradient.iter().zip(&direction).map(|(g, d)| g * d).sum();
            let gap = (difference - derivative).abs() / (1.0 + derivative.abs());
            assert!(gap <= TOLERANCE, "{}: {name}: {difference} by differences, {derivative} by the step", case.name);
        }
    }
}
