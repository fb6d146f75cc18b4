//! The results of the device's operations are those that are computed in host memory, which golden tests compare with AllenNLP.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::{
    engine::sentence::Output,
    model::{BiLm, DeviceName, Precision},
    spec::Pooling,
    tiny,
};

/// Models whose layers are reduced by libtorch's operations, and by the kernels of GPUs in 32 and in 16 bits: four numbers at once, and one
/// where a row has 30.
fn models() -> Vec<BiLm> {
    let mut options = tiny::options();
    let torch = BiLm::with_torch_operations(&options, &tiny::weights(&options), DeviceName::Cpu, Precision::F32);
    let mut models = vec![torch.unwrap()];
    for projection in [options.lstm.projection_dim, 30] {
        options.lstm.projection_dim = projection;
        let weights = tiny::weights(&options);
        let kernels = |precision| BiLm::with_kernels_on_host(&options, &weights, precision).unwrap();
        models.extend([Precision::F32, Precision::Bf16].map(kernels));
    }
    models
}

/// Layers of sentences of these lengths, several in a row.
fn activations(model: &BiLm, lengths: &[usize]) -> Activations {
    let words = ["these", "are", "a", "few", "words", "."];
    let table = model.token_vectors(&words).unwrap();
    let sentences: Vec<Vec<i64>> = lengths
        .iter()
        .enumerate()
        .map(|(s, &n)| (0..n).map(|i| ((s * 5 + i * 3) % words.len()) as i64).collect())
        .collect();
    let rows = (0..lengths.len()).collect::<Vec<_>>().chunks(3).map(<[usize]>::to_vec).collect();
    model.run_in_rows(&table, &sentences, rows, &model.zero_state().unwrap()).unwrap()
}

fn recipe(output: Output, pooling: Option<Pooling>) -> Recipe {
    Recipe { warm: false, boundaries: true, output, pooling }
}

fn outputs() -> Vec<Output> {
    vec![
        Output::Combined(vec![(2, 1.0)]),
        Output::Combined(vec![(0, 0.5), (1, -0.25), (2, 1.5)]),
        // More terms than the kernels take.
        Output::Combined((0..9).map(|term| (term % 3, term as f32 / 8.0)).collect()),
        Output::Normalized(vec![0.2, 0.3, 0.5]),
        Output::All,
    ]
}

const POOLINGS: [Option<Pooling>; 6] =
    [None, Some(Pooling::Mean), Some(Pooling::Max), Some(Pooling::First), Some(Pooling::Last), Some(Pooling::Ends)];

/// Largest difference of two results, which have the same shape.
fn difference(one: &Vectors, other: &Vectors) -> f64 {
    let values = |vectors: &Vectors| match vectors {
        Vectors::Tokens(values) => (values.iter().map(|&value| f64::from(value)).collect::<Vec<_>>(), None),
        Vectors::Pooled(partial) => (partial.values.clone(), Some(partial.tokens)),
    };
    let ((a, tokens), (b, others)) = (values(one), values(other));
    assert_eq!((a.len(), tokens), (b.len(), others));
    a.iter().zip(&b).map(|(a, b)| if a == b { 0.0 } else { (a - b).abs() }).fold(0.0, f64::max)
}

/// Sentences of every kind: whole, the middle of a window, without kept tokens, and boundaries alone.
#[test]
fn the_device_computes_what_the_host_computes() {
    models().iter().for_each(check_device);
}

fn check_device(model: &BiLm) {
    let lengths = [3, 9, 2, 4, 30, 5, 7];
    let activations = activations(model, &lengths);
    let keeps = [0..3, 2..6, 0..2, 1..3, 10..20, 3..3, 1..6];
    // Every combination by itself, and all of them in one batch.
    let recipes: Vec<Recipe> =
        outputs().into_iter().flat_map(|output| POOLINGS.map(|pooling| recipe(output.clone(), pooling))).collect();
    let wanted = |of: &dyn Fn(usize) -> usize| -> Vec<Wanted<'_>> {
        let each = lengths.iter().zip(&keeps).enumerate();
        each.map(|(s, (&n, keep))| Wanted { recipe: &recipes[of(s)], keep: keep.clone(), real: 1..n - 1 }).collect()
    };
    let mixed = (0..recipes.len()).map(|first| wanted(&|s| (first + s * 5) % recipes.len()));
    for wanted in (0..recipes.len()).map(|which| wanted(&|_| which)).chain(mixed) {
        let on_host = host::reduce(&activations, &wanted).unwrap();
        let on_device = device::reduce(&activations, &wanted).unwrap();
        assert_eq!(on_host.len(), on_device.len());
        for ((one, other), Wanted { recipe, .. }) in on_host.iter().zip(&on_device).zip(&wanted) {
            // Statistics are sums in another order; all else is the same float64 arithmetic.
            let tolerance = if matches!(recipe.output, Output::Normalized(_)) { 1e-5 } else { 0.0 };
            let difference = difference(one, other);
            assert!(difference <= tolerance, "{:?}, {:?}: {difference}", recipe.output, recipe.pooling);
        }
    }
}

/// As blank rows in state `carry`, which have neither kept nor real tokens.
#[test]
fn sentences_without_tokens() {
    models().iter().for_each(check_sentences_without_tokens);
}

fn check_sentences_without_tokens(model: &BiLm) {
    let activations = activations(model, &[2, 3]);
    for recipe in outputs().into_iter().flat_map(|output| POOLINGS.map(|pooling| recipe(output.clone(), pooling))) {
        let wanted = [2, 3].map(|_| Wanted { recipe: &recipe, keep: 1..1, real: 1..1 });
        let on_host = host::reduce(&activations, &wanted).unwrap();
        assert_eq!(
            device::reduce(&activations, &wanted).unwrap(),
            on_host,
            "{:?}, {:?}",
            recipe.output,
            recipe.pooling
        );
    }
}

/// By hand: the maximum of a sentence with a NaN is NaN, as it is on the host.
#[test]
fn nan_shows_in_maxima() {
    models().iter().for_each(check_nan);
}

fn check_nan(model: &BiLm) {
    let activations = activations(model, &[3, 4]).with_nan(0, 1);
    let recipe = recipe(Output::Combined(vec![(0, 1.0)]), Some(Pooling::Max));
    let wanted = [3, 4].map(|n| Wanted { recipe: &recipe, keep: 0..n, real: 0..n });
    let nan =
        |vectors: &Vectors| matches!(vectors, Vectors::Pooled(partial) if partial.values.iter().any(|v| v.is_nan()));
    for reduced in [host::reduce(&activations, &wanted).unwrap(), device::reduce(&activations, &wanted).unwrap()] {
        assert_eq!(reduced.iter().map(nan).collect::<Vec<_>>(), [true, false]);
    }
}
