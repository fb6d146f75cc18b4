//! The passes without a graph against libtorch's graph in float64: outputs, states and every gradient.

use tch::{Device, Kind, Tensor};

use super::*;
use crate::{
    model::{DeviceName, Parameters, Precision},
    options::ModelOptions,
    tiny,
};

const POSITIONS: usize = 4;
const WORDS: i64 = 9;

/// Clips that some values reach, and others that none does: near a clip, rounding decides whether a derivative is 0.
const CLIPS: [(f64, f64); 2] = [(0.4, 0.05), (3.0, 3.0)];

/// Layers with skip connections; without a projection where it is as wide as the cells.
fn options([dim, projection, n_layers]: [usize; 3], (cell_clip, projection_clip): (f64, f64)) -> ModelOptions {
    let json = serde_json::json!({
        "lstm": {"use_skip_connections": true, "projection_dim": projection, "dim": dim, "n_layers": n_layers,
            "cell_clip": cell_clip, "proj_clip": projection_clip},
        "char_cnn": {"activation": "relu", "n_highway": 1, "filters": [[1, 4], [2, 3]], "embedding": {"dim": 3},
            "n_characters": 262, "max_characters_per_token": 12},
    });
    ModelOptions::from_json(json.to_string().as_bytes(), "case").unwrap()
}

/// Numbers in `-1..1` without a pattern.
fn wave(shape: &[i64], seed: f64) -> Tensor {
    (Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu)) * 12.9898 + seed).sin().reshape(shape)
}

/// Drops a third of the values of each layer.
struct Fixed;

impl Dropout for Fixed {
    fn apply(&self, layer: usize, x: Tensor) -> Result<Tensor, DeviceError> {
        let factors = (wave(&x.size(), layer as f64).ge(-0.5)).to_kind(x.kind()) * 1.5;
        Ok(x.f_mul(&factors)?)
    }
}

/// What a loss gives: the top outputs of all tokens, the last states, and the derivatives by the table and the layers.
struct Found {
    values: Vec<Tensor>,
    gradients: Vec<Tensor>,
}

/// A batch of rows of one length, its start state, and the table of token vectors.
fn case(model: &BiLm, rows: usize) -> (PackedBatch, StartState, Tensor) {
    let ids = |seed: usize| -> Vec<Vec<i64>> {
        let row = |row: usize| (0..POSITIONS).map(|i| ((row * 5 + i * i + seed) as i64) % WORDS).collect();
        (0..rows).map(row).collect()
    };
    let batch = PackedBatch::of_directions([&ids(0), &ids(4)]).unwrap();
    let shape = model.state_shape();
    let state = |dim: usize, seed: f64| (wave(&[2, rows as i64, dim as i64], seed) * 0.4).to_kind(shape.kind);
    let layer = |k: usize| crate::model::start_state::LayerState {
        h: state(shape.projection_dim, k as f64),
        c: state(shape.cells, k as f64 + 0.5),
    };
    let start = StartState::per_sentence((0..shape.layers).map(layer).collect());
    (batch, start, wave(&[WORDS, shape.projection_dim as i64], 0.2).to_kind(shape.kind))
}

/// Factors of the outputs of a direction in the loss, `[N, P]`.
fn factors(batch: &PackedBatch, width: usize, direction: usize) -> Tensor {
    wave(&[batch.rows(direction).len() as i64, width as i64], 3.0 + direction as f64)
}

fn values(state: &StartState) -> impl Iterator<Item = Tensor> {
    state.layers().iter().flat_map(|layer| [layer.h.shallow_clone(), layer.c.shallow_clone()])
}

fn by_graph(options: &ModelOptions, parameters: &Parameters, rows: usize) -> Found {
    let cut = BiLm::from_parameters(options, parameters, Precision::F64).unwrap().cut().unwrap();
    let (batch, start, table) = case(&cut.model, rows);
    let table = table.set_requires_grad(true);
    let found = cut.model.forward(&table, &batch, &start, &Fixed, true).unwrap();
    let outputs = [0, 1].map(|direction| found.tokens(found.n_layers() - 1, direction).unwrap());
    let width = options.lstm.projection_dim;
    let ends = [0, 1].map(|direction| (&outputs[direction] * factors(&batch, width, direction)).sum(Kind::Double));
    let leaves: Vec<&Tensor> = std::iter::once(&table).chain(&cut.leaves[cut.of_token_layer..]).collect();
    let gradients = Tensor::run_backward(&ends, &leaves, true, false);
    let last = found.into_last().unwrap().unwrap();
    Found { values: outputs.into_iter().chain(values(&last)).collect(), gradients }
}

fn by_passes(options: &ModelOptions, model: &BiLm, rows: usize) -> Found {
    let (batch, start, table) = case(model, rows);
    assert!(model.can_trace(&batch));
    let trace = model.trace(&table, &batch, &start, &Fixed).unwrap();
    let top = trace.top.zeros_like();
    let of_direction = |direction: usize| {
        let rows = Tensor::from_slice(&batch.rows(direction));
        let _ = top.select(0, direction as i64).index_copy_(
            0,
            &rows,
            &factors(&batch, options.lstm.projection_dim, direction).to_kind(top.kind()),
        );
        trace.top.select(0, direction as i64).index_select(0, &rows)
    };
    let values = [0, 1].map(of_direction).into_iter().chain(values(&trace.last)).collect();
    let gradients = model.backward(trace, top, &Fixed).unwrap();
    Found { values, gradients: std::iter::once(gradients.table).chain(gradients.layers).collect() }
}

/// Largest difference of two lists of tensors, relative to the largest number of each tensor.
fn distance(found: &[Tensor], expected: &[Tensor]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let of = |(found, expected): (&Tensor, &Tensor)| {
        assert_eq!(found.size(), expected.size());
        let largest = |t: &Tensor| f64::try_from(t.abs().max()).unwrap();
        let difference = largest(&(found.to_kind(Kind::Double) - expected));
        if difference == 0.0 { 0.0 } else { difference / largest(expected) }
    };
    found.iter().zip(expected).map(of).fold(0.0, f64::max)
}

/// Fewer rows than a step computes, and more; with and without a projection, of few columns and of many.
#[test]
fn passes_without_a_graph_are_those_of_the_graph() {
    for (sizes, rows) in [([24, 20, 2], 19), ([7, 5, 2], 3), ([6, 6, 3], 17)] {
        for (clips, kernels, precision, near) in [
            (CLIPS[0], false, Precision::F32, 4e-6),
            (CLIPS[0], true, Precision::F32, 4e-6),
            (CLIPS[1], true, Precision::F32, 4e-6),
            (CLIPS[1], true, Precision::Bf16, 3e-2),
        ] {
            let options = options(sizes, clips);
            let weights = tiny::weights(&options);
            let parameters = |precision| {
                Parameters::new(&options, &weights, DeviceName::Cpu, precision).unwrap().require_gradients().unwrap()
            };
            let expected = by_graph(&options, &parameters(Precision::F64), rows);
            // The states come after the outputs of both directions.
            let reached = |first: usize, clip: f64| {
                expected.values[first..].iter().step_by(2).any(|t| f64::try_from(t.abs().max()).unwrap() == clip)
            };
            let (is_small, is_projected) = (clips == CLIPS[0], sizes[0] != sizes[1]);
            assert_eq!((reached(2, clips.1), reached(3, clips.0)), (is_small && is_projected, is_small), "{sizes:?}");
            let model = BiLm::from_parameters(&options, &parameters(Precision::F32), precision).unwrap();
            let model = if kernels { model.with_training_kernels_on_host() } else { model };
            let found = by_passes(&options, &model, rows);
            let (values, gradients) =
                (distance(&found.values, &expected.values), distance(&found.gradients, &expected.gradients));
            let what = format!("{sizes:?}, {rows} rows, kernels: {kernels}, {precision}");
            assert!(values <= near && gradients <= near, "{what}: values {values:e}, gradients {gradients:e}");
        }
    }
}
