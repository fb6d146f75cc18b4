//! Tests that need a GPU. `make gpu` runs them; elsewhere they are counted as skipped. The logic that
//! GPUs share with the CPU (lanes, splitting of batches, precision) is tested without one.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, StringArray};
use elmo::{
    Elmo, EmbedderSettings, ModelData,
    engine::{DeviceChoice, Precision},
    model::{BiLm, DeviceName, self_test},
    options::ModelOptions,
    weights::Weights,
};

use crate::{
    Model,
    golden::check_engine,
    properties::{columns, gap, one_sentence, sentences, tiny},
};

/// Between float32 on a CPU and on a GPU, on the tiny model: rounding, with TF32 off.
const ROUNDING: f64 = 1e-5;

fn on_gpus(settings: EmbedderSettings) -> EmbedderSettings {
    EmbedderSettings { devices: vec![DeviceChoice::Cuda(None)], ..settings }
}

fn on_cuda(options: &ModelOptions, weights: &Weights) -> Model {
    let bilm = BiLm::new(options, weights, DeviceName::Cuda(0), Precision::F32).unwrap();
    Model { bilm, in_row: 1 }
}

#[test]
#[ignore = "needs a GPU; make gpu runs it"]
fn golden_on_cuda() {
    assert_eq!(DeviceName::Cuda(0).kernels(Precision::F32), Some(Ok(())));
    check_engine(on_cuda);
    check_engine(|options, weights| Model { in_row: 3, ..on_cuda(options, weights) });
}

/// Vectors of all GPUs together, in batches of many sizes, against those of the CPU.
#[test]
#[ignore = "needs a GPU; make gpu runs it"]
fn batches_on_cuda_differ_by_rounding() {
    let texts: ArrayRef = Arc::new(StringArray::from(sentences(2_000, 7)));
    let expected = columns(&tiny(), one_sentence()).embed(&texts).unwrap().vectors;
    let expected: Vec<f64> = values(&expected).iter().map(|value| f64::from(*value)).collect();
    for batch_tokens in [256, 4096, 65_536] {
        let settings = EmbedderSettings { batch_tokens: Some(batch_tokens), ..EmbedderSettings::default() };
        let elmo = Elmo::from_data(ModelData::tiny(), &on_gpus(settings)).unwrap();
        let found = columns(&elmo, one_sentence()).embed(&texts).unwrap();
        assert_eq!(found.stats.errors, 0);
        let far = gap(found.vectors.as_fixed_size_list().values(), &expected);
        assert!(far <= ROUNDING, "batches of {batch_tokens} tokens: {far:e}");
    }
    let ModelData { options, weights, .. } = ModelData::tiny();
    let alone = self_test(&on_cuda(&options, &weights).bilm).unwrap();
    assert!(f64::from(alone.largest_difference) <= ROUNDING, "{alone:?}");
}

fn values(vectors: &ArrayRef) -> Vec<f32> {
    vectors.as_fixed_size_list().values().as_primitive::<arrow::datatypes::Float32Type>().values().to_vec()
}

/// A batch that exceeds the memory of the device is split until it fits: the driver's real message is recognised. Vectors of words,
/// outputs of the first layer, and inputs and outputs of the second one for so many tokens, 2 x 6 x 128 numbers each, are 206 GB.
#[test]
#[ignore = "needs a GPU; make gpu runs it"]
fn out_of_memory_splits_the_batch() {
    const TOKENS: usize = 32 << 20;
    let options = crate::independence::published_small();
    let weights = crate::reference::seeded::seeded_weights(&options, 5, 1.0);
    let data = ModelData::new(options, weights, "small").unwrap();
    let settings = EmbedderSettings {
        batch_tokens: Some(TOKENS),
        queue_tokens: TOKENS,
        devices: vec![DeviceChoice::Cuda(Some(0))],
        ..EmbedderSettings::default()
    };
    let elmo = Elmo::from_data(data, &settings).unwrap();
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["a b ".repeat(200); TOKENS / 400]));
    let found = columns(&elmo, one_sentence()).embed(&texts).unwrap();
    assert_eq!((found.stats.errors, found.vectors.null_count()), (0, 0));
    assert!(elmo.embedder().metrics().oom_splits > 0, "the device had room for the whole batch");
    let width = elmo.options().width();
    let all = values(&found.vectors);
    let first = &all[..width];
    let far = all.chunks(width).flat_map(|row| row.iter().zip(first)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(far <= 1e-4, "equal texts differ by {far:e}");
}
