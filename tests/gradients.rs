//! The forward pass as training uses it: float64 against the plain reference, gradients against finite differences.
//!
//! Two windows of two independent streams, one per direction, with the state carried from the first to the second. Rows
//! have different lengths, also between the directions, and there are fewer of them than the model computes.

use elmo::{
    model::{
        Activations, BiLm, DeviceError, DeviceName, Dropout, NoDropout, PackedBatch, Parameters, Precision, StartState,
    },
    options::ModelOptions,
    weights::Weights,
};
use tch::{Kind, Tensor};

use crate::reference::{BACKWARD, CellState, FORWARD, Reference, seeded::seeded_weights};

/// The two float64 programs differ by rounding.
const AGREEMENT: f64 = 1e-12;
/// Step of central differences along a direction of numbers in `-1..=1`.
const STEP: f64 = 1e-6;
/// Between a central difference and the gradient, relative where numbers are large. The difference carries the rounding
/// of the loss, divided by the step: 1.2e-8 at the most.
const TOLERANCE: f64 = 1e-7;

const WORDS: [&str; 9] =
    ["a", "bank", "<S>", "</S>", "", "über", "incomprehensibilities", "aaaaaaaaaaaaaaaaaaaaaaaaaaa", "3,000.50"];

/// `[window][direction][row]`, indices into [`WORDS`] in reading order. In the first window the second row of the
/// backward direction is longer than any of the forward direction.
fn windows() -> [[Vec<Vec<i64>>; 2]; 2] {
    [
        [vec![vec![2, 0, 1], vec![5, 6, 7, 8], vec![4]], vec![vec![3, 8], vec![1, 1, 0, 5, 2, 7], vec![6, 4, 3]]],
        [vec![vec![8, 3], vec![0, 2], vec![1, 5]], vec![vec![7, 0], vec![4, 3], vec![2, 6]]],
    ]
}

/// Options of two layers as published, unless a case says otherwise. Widths are odd: products are padded to 16 columns.
fn base() -> serde_json::Value {
    serde_json::json!({
        "lstm": {"use_skip_connections": true, "projection_dim": 5, "dim": 7, "n_layers": 2,
            "cell_clip": 3, "proj_clip": 3},
        "char_cnn": {"activation": "relu", "n_highway": 2, "filters": [[1, 4], [2, 3], [3, 6]],
            "embedding": {"dim": 3}, "n_characters": 262, "max_characters_per_token": 12},
    })
}

/// Name and options of every case.
fn cases() -> Vec<(&'static str, ModelOptions)> {
    let with = |changes: &[(&str, serde_json::Value)]| {
        let mut options = base();
        for (pointer, value) in changes {
            *options.pointer_mut(pointer).unwrap() = value.clone();
        }
        ModelOptions::from_json(options.to_string().as_bytes(), "case").unwrap()
    };
    let n = |n: usize| serde_json::json!(n);
    let clip = |clip: f64| serde_json::json!(clip);
    let wide = serde_json::json!([[1, 17], [4, 20]]);
    vec![
        ("as published", with(&[])),
        ("tanh", with(&[("/char_cnn/activation", "tanh".into())])),
        ("no highway", with(&[("/char_cnn/n_highway", n(0))])),
        ("one highway, 261 characters", with(&[("/char_cnn/n_highway", n(1)), ("/char_cnn/n_characters", n(261))])),
        ("no skip connections", with(&[("/lstm/use_skip_connections", false.into())])),
        ("both clips reached", with(&[("/lstm/cell_clip", clip(0.6)), ("/lstm/proj_clip", clip(0.4))])),
        ("no clips", with(&[("/lstm/cell_clip", ().into()), ("/lstm/proj_clip", ().into())])),
        ("no cell projection", with(&[("/lstm/dim", n(5))])),
        ("no token projection", with(&[("/lstm/projection_dim", n(13)), ("/lstm/dim", n(14))])),
        ("no projection at all", with(&[("/lstm/projection_dim", n(13)), ("/lstm/dim", n(13))])),
        ("three layers", with(&[("/lstm/n_layers", n(3))])),
        ("one layer", with(&[("/lstm/n_layers", n(1))])),
        (
            "wide enough for products without padding",
            with(&[("/lstm/projection_dim", n(18)), ("/lstm/dim", n(19)), ("/char_cnn/filters", wide)]),
        ),
    ]
}

/// Numbers in `-1..1` without a pattern.
fn wave(n: i64, seed: f64) -> Tensor {
    (Tensor::arange(n, (Kind::Double, tch::Device::Cpu)) * 12.9898 + seed).sin() * 0.999
}

/// Fixed masks: 0 or 1.25 for a value of a token, by layer, direction, row, position and place. Rows that nothing reads
/// are multiplied by 7.
struct Masks {
    batch: PackedBatch,
    lengths: [Vec<usize>; 2],
}

/// Inverted dropout of about a fifth of the values.
fn mask(layer: usize, direction: usize, row: usize, position: usize, k: usize) -> f64 {
    let hash = (layer * 7919 + direction * 104_729 + row * 1_299_709 + position * 15_485_863 + k * 611_953) % 10_007;
    if hash.is_multiple_of(5) { 0.0 } else { 1.25 }
}

impl Dropout for Masks {
    fn apply(&self, layer: usize, x: Tensor) -> Result<Tensor, DeviceError> {
        let width = x.size()[2] as usize;
        let mut factors = vec![7.0; x.numel()];
        for direction in 0..2 {
            let tokens = self.lengths[direction].iter().enumerate();
            let tokens = tokens.flat_map(|(row, &n)| (0..n).map(move |position| (row, position)));
            for ((row, position), packed) in tokens.zip(self.batch.rows(direction)) {
                let first = (direction * self.batch.packed_rows() + packed as usize) * width;
                for k in 0..width {
                    factors[first + k] = mask(layer, direction, row, position, k);
                }
            }
        }
        Ok(x.f_mul(&Tensor::from_slice(&factors).f_view(x.size().as_slice())?)?)
    }
}

fn batch(window: &[Vec<Vec<i64>>; 2]) -> PackedBatch {
    PackedBatch::of_directions([&window[0], &window[1]]).unwrap()
}

fn dropout(window: &[Vec<Vec<i64>>; 2], dropped: bool) -> Box<dyn Dropout> {
    let lengths = |direction: usize| window[direction].iter().map(Vec::len).collect();
    match dropped {
        true => Box::new(Masks { batch: batch(window), lengths: [lengths(0), lengths(1)] }),
        false => Box::new(NoDropout),
    }
}

/// One window from a state.
fn run(model: &BiLm, window: &[Vec<Vec<i64>>; 2], start: &StartState, dropped: bool) -> Activations {
    let table = model.token_table(&WORDS).unwrap();
    model.forward(&table, &batch(window), start, dropout(window, dropped).as_ref(), true).unwrap()
}

/// A number that depends on every output of a window.
fn loss(activations: &Activations) -> Tensor {
    let mut sum = Tensor::from(0.0);
    for layer in 0..activations.n_layers() {
        for direction in 0..2 {
            let tokens = activations.tokens(layer, direction).unwrap();
            let factors = wave(tokens.numel() as i64, (2 * layer + direction) as f64);
            sum += (&tokens * factors.view(tokens.size().as_slice())).sum(Kind::Double);
        }
    }
    sum
}

fn leaves(options: &ModelOptions, weights: &Weights) -> Parameters {
    let parameters = Parameters::new(options, weights, DeviceName::Cpu, Precision::F64).unwrap();
    parameters.require_gradients().unwrap()
}

fn model_of(options: &ModelOptions, parameters: &Parameters) -> BiLm {
    BiLm::from_parameters(options, parameters, Precision::F64).unwrap()
}

/// Loss of both windows; gradients also flow through the state between them.
fn loss_of_both(options: &ModelOptions, parameters: &Parameters, dropped: bool) -> Tensor {
    let model = model_of(options, parameters);
    let [first, second] = &windows();
    let run_first = run(&model, first, &model.zero_state().unwrap(), dropped);
    let loss_of_first = loss(&run_first);
    let state = run_first.into_last().unwrap().unwrap();
    loss_of_first + loss(&run(&model, second, &state, dropped))
}

/// Compares the gradient of `loss` with respect to every parameter with central differences: along three directions
/// that change all its numbers, and for the numbers with the largest and the smallest derivative.
fn check_gradients(case: &str, parameters: &Parameters, loss: impl Fn() -> Tensor) {
    let names: Vec<&str> = parameters.iter().map(|(name, _)| name).collect();
    let tensors: Vec<&Tensor> = parameters.iter().map(|(_, tensor)| tensor).collect();
    let gradients = Tensor::run_backward(&[loss()], &tensors, false, false);
    for ((name, tensor), gradient) in names.iter().zip(&tensors).zip(&gradients) {
        assert_eq!(gradient.size(), tensor.size(), "{case}: {name}");
        assert!(f64::try_from(gradient.abs().max()).unwrap() > 1e-6, "{case}: nothing depends on {name}");
        let n = tensor.numel() as i64;
        let single = |at: i64| {
            let one = Tensor::zeros([n], (Kind::Double, tch::Device::Cpu));
            let _ = one.get(at).fill_(1.0);
            one
        };
        let at = |place: Tensor| single(i64::try_from(place).unwrap());
        let magnitude = gradient.abs().view([-1]);
        let mut directions: Vec<Tensor> = (0..3).map(|k| wave(n, 0.7 * f64::from(k) + 0.1)).collect();
        directions.extend([at(magnitude.argmax(0, false)), at(magnitude.argmin(0, false))]);
        for direction in directions {
            let direction = direction.view(tensor.size().as_slice());
            let moved = |by: f64| -> f64 {
                let _no_gradients = tch::no_grad_guard();
                let _ = tensor.shallow_clone().g_add_(&(&direction * by));
                let loss = f64::try_from(loss()).unwrap();
                let _ = tensor.shallow_clone().g_sub_(&(&direction * by));
                loss
            };
            let difference = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
            let derivative = f64::try_from((gradient * &direction).sum(Kind::Double)).unwrap();
            let gap = (difference - derivative).abs() / (1.0 + derivative.abs());
            assert!(gap <= TOLERANCE, "{case}: {name}: {difference} by differences, {derivative} by the gradient");
        }
    }
}

#[test]
fn gradients_of_every_parameter_agree_with_finite_differences() {
    for (case, options) in cases() {
        let parameters = leaves(&options, &seeded_weights(&options, 11, 1.2));
        check_gradients(case, &parameters, || loss_of_both(&options, &parameters, false));
    }
}

#[test]
fn gradients_with_dropout_agree_with_finite_differences() {
    for (case, options) in cases() {
        let parameters = leaves(&options, &seeded_weights(&options, 12, 1.2));
        check_gradients(case, &parameters, || loss_of_both(&options, &parameters, true));
    }
}

/// The gradient of the second window alone, where the state is a constant.
#[test]
fn no_gradient_flows_through_a_detached_state() {
    for (case, options) in cases() {
        let parameters = leaves(&options, &seeded_weights(&options, 13, 1.2));
        let [first, second] = &windows();
        let model = model_of(&options, &parameters);
        let last = run(&model, first, &model.zero_state().unwrap(), false).into_last().unwrap().unwrap();
        let state = last.detach().unwrap();
        check_gradients(case, &parameters, || loss(&run(&model_of(&options, &parameters), second, &state, false)));
    }
}

/// Both windows in plain loops: `[window][layer][direction]`, tokens row by row in reading order.
fn expected(options: &ModelOptions, weights: &Weights, dropped: bool) -> Vec<Vec<[Vec<f64>; 2]>> {
    let reference = Reference::new(options, weights);
    let zero = reference.zero_state();
    let mut states: [Vec<Vec<CellState>>; 2] = [FORWARD, BACKWARD].map(|d| vec![zero.0[d].clone(); 3]);
    let mut found = Vec::new();
    for window in windows() {
        let mut layers = vec![[Vec::new(), Vec::new()]; options.lstm.n_layers + 1];
        for direction in [FORWARD, BACKWARD] {
            for (row, ids) in window[direction].iter().enumerate() {
                let words: Vec<&str> = ids.iter().map(|&id| WORDS[id as usize]).collect();
                let drop = |layer: usize, position: usize, x: &mut [f64]| {
                    if dropped {
                        let factors = (0..x.len()).map(|k| mask(layer, direction, row, position, k));
                        x.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
                    }
                };
                let run = reference.window(direction, &words, &states[direction][row], &drop);
                layers[0][direction].extend(run.input.concat());
                for (layer, outputs) in layers[1..].iter_mut().zip(&run.outputs) {
                    layer[direction].extend(outputs.concat());
                }
                states[direction][row] = run.end;
            }
        }
        found.push(layers);
    }
    found
}

/// Both windows by the model, in the same order.
fn found(model: &BiLm, dropped: bool) -> Vec<Vec<[Vec<f64>; 2]>> {
    let _no_gradients = tch::no_grad_guard();
    let mut state = model.zero_state().unwrap();
    let mut all = Vec::new();
    for window in &windows() {
        let activations = run(model, window, &state, dropped);
        let values = |layer, direction| {
            let tokens = activations.tokens(layer, direction).unwrap().to_kind(Kind::Double);
            Vec::try_from(tokens.view([-1])).unwrap()
        };
        all.push((0..activations.n_layers()).map(|layer| [values(layer, 0), values(layer, 1)]).collect());
        state = activations.into_last().unwrap().unwrap().detach().unwrap();
    }
    all
}

fn largest_gap(found: &[Vec<[Vec<f64>; 2]>], expected: &[Vec<[Vec<f64>; 2]>]) -> f64 {
    let flat = |all: &[Vec<[Vec<f64>; 2]>]| all.concat().concat().concat();
    crate::golden::largest_gap(&flat(found), &flat(expected))
}

#[test]
fn windows_of_two_streams_in_float64_agree_with_the_reference() {
    for (case, options) in cases() {
        let weights = seeded_weights(&options, 11, 1.2);
        let model = model_of(&options, &leaves(&options, &weights));
        for dropped in [false, true] {
            let gap = largest_gap(&found(&model, dropped), &expected(&options, &weights, dropped));
            assert!(gap <= AGREEMENT, "{case}, dropout {dropped}: {gap:e}");
        }
    }
}

/// The other time loop, which computes rows of its own kind in place.
#[test]
fn windows_of_two_streams_with_our_own_passes_agree_with_the_reference() {
    for (case, options) in cases() {
        let weights = seeded_weights(&options, 11, 1.2);
        let model = BiLm::new(&options, &weights, DeviceName::Cpu, Precision::F32).unwrap();
        let gap = largest_gap(&found(&model, false), &expected(&options, &weights, false));
        assert!(gap <= 5e-6, "{case}: {gap:e}");
    }
}

/// Without clipped values the clips would not be tested, and their derivatives are 0.
#[test]
fn the_case_of_the_clips_reaches_both() {
    let (_, options) = cases().into_iter().find(|(name, _)| *name == "both clips reached").unwrap();
    let weights = seeded_weights(&options, 11, 1.2);
    let outputs = |options: &ModelOptions| found(&model_of(options, &leaves(options, &weights)), false);
    let first_layer = outputs(&options)[0][1].concat();
    let clipped = first_layer.iter().filter(|x| x.abs() == 0.4).count();
    let quarter = first_layer.len() / 4;
    assert!((quarter..3 * quarter).contains(&clipped), "{clipped} of {}", first_layer.len());
    let mut no_cell_clip = options.clone();
    no_cell_clip.lstm.cell_clip = None;
    assert!(largest_gap(&outputs(&options), &outputs(&no_cell_clip)) > 1e-3);
}

/// Inference and training are one model: the same bits in float32, from weights and from parameters.
#[test]
fn a_model_of_parameters_has_the_bits_of_a_model_of_weights() {
    for (case, options) in cases() {
        let weights = seeded_weights(&options, 11, 1.2);
        let parameters = Parameters::new(&options, &weights, DeviceName::Cpu, Precision::F32).unwrap();
        assert_eq!(parameters.to_weights().unwrap(), weights, "{case}");
        for precision in [Precision::F32, Precision::Bf16] {
            let trained = BiLm::from_parameters(&options, &parameters, precision).unwrap();
            let inferred = BiLm::with_torch_operations(&options, &weights, DeviceName::Cpu, precision).unwrap();
            assert_eq!(largest_gap(&found(&trained, false), &found(&inferred, false)), 0.0, "{case}, {precision}");
        }
    }
}

/// Products in bfloat16 have two or three digits; the parameters and their gradients stay in float32.
#[test]
fn gradients_of_a_computation_in_bfloat16_are_float32() {
    let (_, options) = cases().swap_remove(0);
    let weights = seeded_weights(&options, 11, 0.8);
    let gradients = |kept: Precision, computed: Precision| -> Vec<Tensor> {
        let parameters =
            Parameters::new(&options, &weights, DeviceName::Cpu, kept).unwrap().require_gradients().unwrap();
        let model = BiLm::from_parameters(&options, &parameters, computed).unwrap();
        let loss = loss(&run(&model, &windows()[0], &model.zero_state().unwrap(), false));
        let tensors: Vec<&Tensor> = parameters.iter().map(|(_, tensor)| tensor).collect();
        Tensor::run_backward(&[loss], &tensors, false, false)
    };
    let exact = gradients(Precision::F64, Precision::F64);
    for (kept, computed, nearness) in
        [(Precision::F32, Precision::F32, 1.0 - 1e-8), (Precision::F32, Precision::Bf16, 0.97)]
    {
        for (found, exact) in gradients(kept, computed).iter().zip(&exact) {
            assert_eq!(found.kind(), Kind::Float);
            let found = found.to_kind(Kind::Double);
            let cosine = (&found * exact).sum(Kind::Double) / (found.norm() * exact.norm());
            assert!(f64::try_from(cosine).unwrap() >= nearness, "{computed}");
        }
    }
}

/// Three steps of gradient descent. The judge is a model of the parameters' new numbers as a file would hold them.
#[test]
fn a_model_derived_after_a_step_is_that_of_the_new_parameters() {
    for (case, options) in cases() {
        let weights = seeded_weights(&options, 11, 1.2);
        let parameters = Parameters::new(&options, &weights, DeviceName::Cpu, Precision::F32).unwrap();
        let parameters = parameters.require_gradients().unwrap();
        let tensors: Vec<&Tensor> = parameters.iter().map(|(_, tensor)| tensor).collect();
        let mut losses = Vec::new();
        for _ in 0..3 {
            let model = BiLm::from_parameters(&options, &parameters, Precision::F32).unwrap();
            let numbers = parameters.to_weights().unwrap();
            let judge = BiLm::with_torch_operations(&options, &numbers, DeviceName::Cpu, Precision::F32).unwrap();
            assert_eq!(largest_gap(&found(&model, false), &found(&judge, false)), 0.0, "{case}");
            let loss = loss(&run(&model, &windows()[0], &model.zero_state().unwrap(), false));
            losses.push(f64::try_from(&loss).unwrap());
            let gradients = Tensor::run_backward(&[loss], &tensors, false, false);
            let _no_gradients = tch::no_grad_guard();
            for (tensor, gradient) in tensors.iter().zip(gradients) {
                let _ = tensor.shallow_clone().g_sub_(&(gradient * 1e-5));
            }
        }
        assert!(losses.is_sorted_by(|before, after| before > after), "{case}: {losses:?}");
    }
}

/// What a checkpoint between two windows keeps: the second window has the bits that it has without a stop.
#[test]
fn a_state_per_sentence_comes_back_from_its_numbers() {
    for (case, options) in cases() {
        let weights = seeded_weights(&options, 11, 1.2);
        let parameters = Parameters::new(&options, &weights, DeviceName::Cpu, Precision::F32).unwrap();
        for precision in [Precision::F32, Precision::Bf16] {
            let model = BiLm::from_parameters(&options, &parameters, precision).unwrap();
            let [first, second] = &windows();
            let state = run(&model, first, &model.zero_state().unwrap(), false).into_last().unwrap().unwrap();
            let numbers = state.numbers().unwrap();
            let (layers, p, d) = (options.lstm.n_layers, options.lstm.projection_dim, options.lstm.dim);
            assert_eq!(numbers.len(), 3 * 2 * layers * (p + d), "{case}");
            let back = model.states_from_numbers(&numbers).unwrap();
            let outputs = |state: &StartState| -> Vec<Tensor> {
                let run = run(&model, second, state, false);
                let all = (0..=layers).flat_map(|layer| [0, 1].map(|direction| run.tokens(layer, direction).unwrap()));
                all.collect()
            };
            assert!(outputs(&back).iter().zip(outputs(&state)).all(|(a, b)| a.equal(&b)), "{case}, {precision}");
            for wrong in [&[], &numbers[1..]] {
                let error = model.states_from_numbers(wrong).unwrap_err().to_string();
                assert!(error.contains("a model of another shape"), "{error}");
            }
            assert!(model.state_from_numbers(&numbers).is_err(), "a constant has one row");
        }
    }
}

#[test]
fn batches_that_cannot_run_are_errors() {
    let one = [vec![0]];
    for (wrong, words) in [
        (PackedBatch::of_directions([&one, &[]]), "same number of rows"),
        (PackedBatch::of_directions([&[], &[]]), "needs a sentence"),
        (PackedBatch::of_sentences(&[vec![]]), "each sentence a token"),
        (PackedBatch::of_rows(&[vec![0], vec![0]], vec![vec![0], vec![0]]), "in one row"),
        (PackedBatch::of_rows(&[vec![0], vec![0]], vec![vec![0, 1], vec![]]), "every row must have a sentence"),
    ] {
        let error = wrong.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    let (_, options) = cases().swap_remove(0);
    let model = BiLm::new(&options, &seeded_weights(&options, 1, 1.0), DeviceName::Cpu, Precision::F32).unwrap();
    let table = model.token_table(&WORDS).unwrap();
    let zero = model.zero_state().unwrap();
    let chained = PackedBatch::of_rows(&[vec![0], vec![1]], vec![vec![0, 1]]).unwrap();
    assert!(model.forward(&table, &chained, &zero, &NoDropout, false).is_ok());
    let error = model.forward(&table, &chained, &zero, &NoDropout, true).unwrap_err().to_string();
    assert!(error.contains("a row per sentence"), "{error}");
    assert!(model.run(&[0.0; 7], &[vec![0]], &zero, false).unwrap_err().to_string().contains("whole token vectors"));
    for ids in [[9, 0], [0, -1], [i64::MAX, 0]] {
        let batch = PackedBatch::of_sentences(&[ids.to_vec()]).unwrap();
        let error = model.forward(&table, &batch, &zero, &NoDropout, false).unwrap_err().to_string();
        assert!(error.contains("not in the token table"), "{error}");
    }
    assert!(model.run(&[], &[vec![0]], &zero, false).unwrap_err().to_string().contains("not in the token table"));
}

/// A state with fewer layers would give fewer layers, and one of other widths a mixture of its rows.
#[test]
fn a_state_of_another_model_is_an_error() {
    let model_of = |(_, options): &(&str, ModelOptions), precision: Precision| {
        BiLm::new(options, &seeded_weights(options, 1, 1.0), DeviceName::Cpu, precision).unwrap()
    };
    let cases = cases();
    let model = model_of(&cases[0], Precision::F32);
    let table = model.token_table(&WORDS).unwrap();
    let batch = PackedBatch::of_sentences(&[vec![0, 1]]).unwrap();
    let other = |name: &str| cases.iter().find(|(other, _)| *other == name).unwrap();
    for (name, precision) in [
        ("one layer", Precision::F32),
        ("three layers", Precision::F32),
        ("no cell projection", Precision::F32),
        ("no token projection", Precision::F32),
        ("as published", Precision::F64),
    ] {
        let state = model_of(other(name), precision).zero_state().unwrap();
        let error = model.forward(&table, &batch, &state, &NoDropout, false).unwrap_err().to_string();
        assert!(error.contains("that of a model of another shape"), "{name}, {precision}: {error}");
    }
    let alike = model_of(other("no skip connections"), Precision::F32).zero_state().unwrap();
    assert!(model.forward(&table, &batch, &alike, &NoDropout, false).is_ok());
}
