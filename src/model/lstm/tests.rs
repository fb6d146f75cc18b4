//! Time loops of inference, whose tokens share input products: a sentence has the same bits with other sentences and alone.

use std::collections::HashSet;

use tch::{Device, Kind, Tensor};

use super::fused::FEWEST_CODES;
use crate::{
    model::{BiLm, DeviceError, DeviceName, Dropout, NoDropout, PackedBatch, Precision},
    options::ModelOptions,
    tiny,
    weights::Weights,
};

/// Several panels, the last not full; steps of many rows, of few, and of one, with and without words that occur often; rows with several
/// sentences. Expected: the bits of each sentence alone; and the numbers of libtorch's float32 operations,
/// with 8-bit integers except for a relative rms of 6 %, as in the tests that compare them with the plain reference.
#[test]
fn a_sentence_has_the_same_bits_in_steps_of_any_width() {
    let on_cpu = |options: &ModelOptions, weights: &Weights, precision| {
        BiLm::new(options, weights, DeviceName::Cpu, precision).unwrap()
    };
    check_steps_of_any_width(|options, weights| on_cpu(options, weights, Precision::F32), (250, 30), is_equal_in_f32);
    check_steps_of_any_width(
        |options, weights| on_cpu(options, weights, Precision::Int8),
        (266, FEWEST_CODES),
        |found, expected| relative_rms(found, expected) <= 0.06,
    );
}

/// The same of the time loop of GPUs, whose words are in several parts. Expected: as above; with 16 bits except for a relative rms of 2 %.
#[test]
fn a_sentence_has_the_same_bits_with_the_kernels_of_gpus() {
    let kernels = |options: &ModelOptions, weights: &Weights, precision| {
        BiLm::with_kernels_on_host(options, weights, precision).unwrap()
    };
    check_steps_of_any_width(|options, weights| kernels(options, weights, Precision::F32), (52, 32), is_equal_in_f32);
    check_steps_of_any_width(
        |options, weights| kernels(options, weights, Precision::Bf16),
        (52, 32),
        |found, expected| relative_rms(found, expected) <= 0.02,
    );
}

fn is_equal_in_f32(found: &[f32], expected: &[f32]) -> bool {
    found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() <= 2e-6)
}

fn relative_rms(found: &[f32], expected: &[f32]) -> f32 {
    let squares: f32 = found.iter().zip(expected).map(|(found, expected)| (found - expected).powi(2)).sum();
    (squares / expected.iter().map(|number| number * number).sum::<f32>()).sqrt()
}

/// With the weights of gates times a factor: those of `tiny` are for sums of about 60 products, and gates of more saturate.
fn scaled(mut weights: Weights, factor: f32) -> Weights {
    let names: Vec<String> = weights.iter().map(|(name, _)| name.to_owned()).collect();
    for name in names.into_iter().filter(|name| name.ends_with("W_0")) {
        let mut tensor = weights.get(&name).unwrap().clone();
        tensor.data.iter_mut().for_each(|weight| *weight *= factor);
        weights.insert(name, tensor);
    }
    weights
}

#[track_caller]
fn check_steps_of_any_width(
    model: impl FnOnce(&ModelOptions, &Weights) -> BiLm,
    (dim, projection): (usize, usize),
    is_near: fn(&[f32], &[f32]) -> bool,
) {
    let mut options = tiny::options();
    (options.lstm.dim, options.lstm.projection_dim) = (dim, projection);
    let weights = scaled(tiny::weights(&options), (30.0 / projection as f32).sqrt());
    let model = model(&options, &weights);
    // 40 words that occur often, and 900, most of them once or not at all.
    let words: Vec<String> = (0..940).map(|word| format!("word{word}")).collect();
    let table = model.token_vectors(&words.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
    let word =
        |s: usize, t: usize| if (s + t).is_multiple_of(5) { 40 + (s * 7 + t) % 900 } else { (s * 3 + t * t) % 40 };
    let sentence = |s: usize| (0..1 + s * s % 5).map(|t| word(s, t) as i64).collect::<Vec<_>>();
    let sentences: Vec<Vec<i64>> = (0..700).map(sentence).collect();
    let places: Vec<usize> = (0..sentences.len()).collect();
    let vectors = |model: &BiLm, batch: &[Vec<i64>], in_row: usize| -> Vec<Vec<f32>> {
        let rows = places[..batch.len()].chunks(in_row).map(<[usize]>::to_vec).collect();
        let found = model.run_in_rows(&table, batch, rows, &model.zero_state().unwrap()).unwrap();
        if batch.len() == sentences.len() && model.min_width() == 1 {
            // By hand: two directions, and one product per distinct word in each.
            let tokens = batch.concat();
            let saved = 2 * (tokens.len() - HashSet::<i64>::from_iter(tokens).len());
            assert_eq!(found.saved_flop(), (saved * 2 * projection * 4 * dim) as f64);
        }
        let layer = found.combine(&[(found.n_layers() - 1, 1.0)]).unwrap();
        let of = |(s, sentence): (usize, &Vec<i64>)| {
            let mut all = vec![0.0; sentence.len() * layer.width()];
            all.chunks_mut(layer.width()).enumerate().for_each(|(i, out)| layer.token(&found, s, i, out));
            all
        };
        batch.iter().enumerate().map(of).collect()
    };
    let together = vectors(&model, &sentences, 2);
    for size in [1, 3, 20, 300] {
        let parts: Vec<Vec<f32>> = sentences.chunks(size).take(40).flat_map(|part| vectors(&model, part, 1)).collect();
        assert!(parts.iter().zip(&together).all(|(a, b)| a == b), "batches of {size}");
    }
    let torch = BiLm::with_torch_operations(&options, &weights, DeviceName::Cpu, Precision::F32).unwrap();
    let expected = vectors(&torch, &sentences, 1);
    assert!(is_near(&together.concat(), &expected.concat()));
}

/// Multiplies the vector of every second packed row by 2.
struct Uneven;

impl Dropout for Uneven {
    fn apply(&self, layer: usize, x: Tensor) -> Result<Tensor, DeviceError> {
        let factors = Tensor::arange(x.size()[1], (Kind::Float, Device::Cpu)).fmod(2.0) + 1.0;
        Ok(if layer == 0 { x * factors.view([1, -1, 1]) } else { x })
    }
}

/// Tokens of one word that have different vectors share no product. Expected: the bits of a batch in which no word occurs twice.
#[test]
fn words_with_different_vectors_share_no_product() {
    let options = tiny::options();
    let weights = tiny::weights(&options);
    check_words_with_different_vectors(&BiLm::new(&options, &weights, DeviceName::Cpu, Precision::F32).unwrap());
    check_words_with_different_vectors(&BiLm::with_kernels_on_host(&options, &weights, Precision::F32).unwrap());
}

fn check_words_with_different_vectors(model: &BiLm) {
    let _no_gradients = tch::no_grad_guard();
    let words: Vec<String> = (0..50).map(|word| format!("word{word}")).collect();
    let table = model.token_table(&words.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
    let repeated: Vec<Vec<i64>> = (0..80).map(|s| (0..5).map(|t| (s * 3 + t * t) % 50).collect()).collect();
    let distinct: Vec<Vec<i64>> = (0..80).map(|s| (0..5).map(|t| s * 5 + t).collect()).collect();
    let every = table.index_select(0, &Tensor::from_slice(&repeated.concat()));
    let start = model.zero_state().unwrap();
    let top = |table: &Tensor, sentences: &[Vec<i64>], dropout: &dyn Dropout| {
        let batch = PackedBatch::of_sentences(sentences).unwrap();
        let found = model.forward(table, &batch, &start, dropout, false).unwrap();
        (found.tokens(found.n_layers() - 1, 0).unwrap(), found.saved_flop())
    };
    let (expected, _) = top(&every, &distinct, &Uneven);
    assert_eq!(top(&table, &repeated, &Uneven), (expected, 0.0));
    assert!(top(&table, &repeated, &NoDropout).1 > 0.0);
}

/// The time loop of GPUs computes a product for each word of a part and each direction. Parts have at most 64 words, as there are 512 gates.
/// 20 sentences, so that a step reads up to 20 words. Expected: by hand, for both directions.
#[test]
fn operations_of_products_that_tokens_share_are_counted() {
    let options = tiny::options();
    let (dim, projection) = (options.lstm.dim, options.lstm.projection_dim);
    let model = BiLm::with_kernels_on_host(&options, &tiny::weights(&options), Precision::F32).unwrap();
    let words: Vec<String> = (0..60).map(|word| format!("word{word}")).collect();
    let table = model.token_vectors(&words.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
    let check = |word: &dyn Fn(i64, i64) -> i64, products: usize| {
        let sentences: Vec<Vec<i64>> = (0..20).map(|s| (0..5).map(|t| word(s, t)).collect()).collect();
        let found = model.run(&table, &sentences, &model.zero_state().unwrap(), false).unwrap();
        assert_eq!(found.saved_flop(), ((2 * 100 - products) * 2 * projection * 4 * dim) as f64);
    };
    // A step reads one word that the one before did not read: 24 words in one part.
    check(&|s, t| s + t, 2 * 24);
    // Three steps read 60 words, and are a part; the last two read 40 of these again.
    check(&|s, t| s + 20 * (t % 3), 2 * (60 + 40));
}
