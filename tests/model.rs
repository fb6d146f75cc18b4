//! The model and the engine against independent references: the plain float64 model, the golden files,
//! hand calculation, and properties that must hold for every input.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "cuda.rs"]
mod cuda;
#[path = "golden/mod.rs"]
mod golden;
#[path = "gradients.rs"]
mod gradients;
#[path = "hand_made_weights.rs"]
mod hand_made_weights;
#[path = "hostile_weights.rs"]
mod hostile_weights;
#[path = "independence.rs"]
mod independence;
#[path = "lm_head.rs"]
mod lm_head;
#[path = "properties.rs"]
mod properties;
#[path = "reference/mod.rs"]
mod reference;
#[path = "training/mod.rs"]
mod training;

use elmo::{
    chars::{BEGIN_SENTENCE_TOKEN, END_SENTENCE_TOKEN},
    model::{BiLm, DeviceName, Precision},
    options::ModelOptions,
    weights::Weights,
};
use golden::{Engine, check_engine, check_engine_in_codes, check_engine_on};
use reference::{LstmState, StartState};

/// The clone that is tested. Asked for at run time: a target folder may serve several clones, and then a test binary
/// that is fresh for cargo may have been built in another one.
fn repository() -> std::path::PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").map(Into::into).expect("cargo test sets CARGO_MANIFEST_DIR")
}

/// The model as the engine's device threads drive it.
struct Model {
    bilm: BiLm,
    /// Sentences that share a row of a batch, one after the other.
    in_row: usize,
}

impl Model {
    fn fused(options: &ModelOptions, weights: &Weights) -> Self {
        Self { bilm: BiLm::new(options, weights, DeviceName::Cpu, Precision::F32).unwrap(), in_row: 1 }
    }

    fn int8(options: &ModelOptions, weights: &Weights) -> Self {
        Self { bilm: BiLm::new(options, weights, DeviceName::Cpu, Precision::Int8).unwrap(), in_row: 1 }
    }

    fn in_torch(options: &ModelOptions, weights: &Weights) -> Self {
        let bilm = BiLm::with_torch_operations(options, weights, DeviceName::Cpu, Precision::F32).unwrap();
        Self { bilm, in_row: 1 }
    }

    /// The time loop and the kernels of GPUs.
    fn with_kernels(options: &ModelOptions, weights: &Weights) -> Self {
        Self { bilm: BiLm::with_kernels_on_host(options, weights, Precision::F32).unwrap(), in_row: 1 }
    }

    /// One state for every sentence, as the flat numbers that the model takes: layer by layer, `h` then `c`,
    /// forward before backward.
    fn given(&self, state: &LstmState) -> elmo::model::StartState {
        let mut numbers = Vec::new();
        for layer in 0..state.0[0].len() {
            for direction in &state.0 {
                numbers.extend(direction[layer].h.iter().map(|&v| v as f32));
            }
            for direction in &state.0 {
                numbers.extend(direction[layer].c.iter().map(|&v| v as f32));
            }
        }
        self.bilm.state_from_numbers(&numbers).unwrap()
    }
}

impl Engine for Model {
    fn run(&self, batches: &[Vec<Vec<String>>], start: &StartState, boundaries: bool) -> Vec<Vec<Vec<Vec<f32>>>> {
        let mut state = match start {
            StartState::Zero | StartState::Carry => self.bilm.zero_state().unwrap(),
            StartState::Given(given) => self.given(given),
        };
        let mut results = Vec::new();
        for batch in batches {
            let sentences: Vec<Vec<&str>> = batch
                .iter()
                .map(|s| {
                    let words = s.iter().map(String::as_str);
                    [BEGIN_SENTENCE_TOKEN].into_iter().chain(words).chain([END_SENTENCE_TOKEN]).collect()
                })
                .collect();
            let mut words: Vec<&str> = sentences.concat();
            words.sort_unstable();
            words.dedup();
            let table = self.bilm.token_vectors(&words).unwrap();
            let ids: Vec<Vec<i64>> =
                sentences.iter().map(|s| s.iter().map(|w| words.binary_search(w).unwrap() as i64).collect()).collect();
            // A state per sentence needs a row per sentence.
            let run = match (start, self.in_row) {
                (StartState::Carry, _) | (_, 1) => self.bilm.run(&table, &ids, &state, true).unwrap(),
                (_, several) => {
                    let places: Vec<usize> = (0..ids.len()).collect();
                    let rows = places.chunks(several).map(<[usize]>::to_vec).collect();
                    self.bilm.run_in_rows(&table, &ids, rows, &state).unwrap()
                }
            };
            let kept = |n: usize| if boundaries { 0..n } else { 1..n - 1 };
            let layers: Vec<_> = (0..run.n_layers()).map(|k| run.combine(&[(k, 1.0)]).unwrap()).collect();
            let sentence = |s: usize| -> Vec<Vec<f32>> {
                let of_layer = |layer: &elmo::model::LayerValues| {
                    let mut all = Vec::new();
                    let mut token = vec![0.0; layer.width()];
                    for i in kept(ids[s].len()) {
                        layer.token(&run, s, i, &mut token);
                        all.extend_from_slice(&token);
                    }
                    all
                };
                layers.iter().map(of_layer).collect()
            };
            results.push((0..batch.len()).map(sentence).collect());
            if matches!(start, StartState::Carry) {
                state = state.replaced_by(&run.into_last().unwrap().unwrap()).unwrap();
            }
        }
        results
    }
}

#[test]
fn golden_with_our_own_passes() {
    check_engine(Model::fused);
}

#[test]
fn golden_with_torch_operations() {
    check_engine(Model::in_torch);
}

/// Kernels of GPUs, here on the CPU: the same text, compiled by another compiler.
#[test]
fn golden_with_the_kernels_of_gpus() {
    check_engine(Model::with_kernels);
}

/// Directions that read different sentences, as in training, and the state in which they end. Expected: libtorch's operations.
#[test]
fn directions_with_the_kernels_of_gpus() {
    let elmo::ModelData { options, weights, .. } = elmo::ModelData::tiny();
    let words = ["it", "rained", "so", "we", "stayed"];
    let sequences = [vec![vec![0, 1], vec![2, 3, 4, 1, 0], vec![3]], vec![vec![4, 4, 2], vec![1], vec![0, 2, 3, 1]]];
    let batch = elmo::model::PackedBatch::of_directions([&sequences[0], &sequences[1]]).unwrap();
    let run = |model: BiLm| -> (Vec<Vec<f32>>, Vec<f32>) {
        let _no_gradients = tch::no_grad_guard();
        let (table, start) = (model.token_table(&words).unwrap(), model.zero_state().unwrap());
        let mut found = model.forward(&table, &batch, &start, &elmo::model::NoDropout, true).unwrap();
        let mut layers = Vec::new();
        for layer in 0..found.n_layers() {
            for direction in 0..2 {
                layers.push(Vec::try_from(found.tokens(layer, direction).unwrap().reshape([-1])).unwrap());
            }
        }
        let last = found.into_last().unwrap().unwrap();
        // From there on, another batch, as evaluation goes on.
        found = model.forward(&table, &batch, &last, &elmo::model::NoDropout, false).unwrap();
        layers.push(Vec::try_from(found.tokens(2, 1).unwrap().reshape([-1])).unwrap());
        (layers, last.numbers().unwrap())
    };
    let expected = run(Model::in_torch(&options, &weights).bilm);
    let found = run(Model::with_kernels(&options, &weights).bilm);
    let gap = |a: &[f32], b: &[f32]| {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    };
    for (found, expected) in found.0.iter().zip(&expected.0) {
        assert!(gap(found, expected) <= 1e-5, "{:e}", gap(found, expected));
    }
    assert!(gap(&found.1, &expected.1) <= 1e-5, "{:e}", gap(&found.1, &expected.1));
}

#[test]
fn golden_with_several_sentences_in_a_row() {
    check_engine(|options, weights| Model { in_row: 3, ..Model::with_kernels(options, weights) });
    check_engine(|options, weights| Model { in_row: 3, ..Model::fused(options, weights) });
    check_engine(|options, weights| Model { in_row: 2, ..Model::in_torch(options, weights) });
}

/// All shapes and start states, as in float32.
#[test]
fn golden_in_8_bit_integers() {
    check_engine_in_codes(Model::int8);
    check_engine_in_codes(|options, weights| Model { in_row: 3, ..Model::int8(options, weights) });
}

/// The files have these shapes from zeros only. The number of rows differs between batches. There are few words,
/// because the reference is slow.
#[test]
fn large_shapes_from_a_given_and_from_a_carried_state() {
    let batch = |rows: &[&str]| -> Vec<Vec<String>> {
        rows.iter().map(|row| row.split_whitespace().map(str::to_owned).collect()).collect()
    };
    let batches = [batch(&["It rained", "So"]), batch(&["It"]), batch(&["", "rained It"])];
    for shape in ["medium", "original"] {
        check_engine_on(Model::fused, shape, &batches, &["given", "carry"]);
    }
}
