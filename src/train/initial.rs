//! Initial values of all parameters (bilm-tf `bilm/training.py`), rounded to float32: those that a weights file holds.
//!
//! | tensor | values |
//! |---|---|
//! | `char_embed` | uniform in -1..1 |
//! | `CNN/W_cnn_i` | relu: uniform in -0.05..0.05; tanh: normal, variance 1 / (width * C) |
//! | `CNN_high_i/W_*`, `CNN_proj/W_proj` | normal, variance 1 / F |
//! | `CNN_high_i/b_carry` | -2, so that a layer begins as nearly the identity |
//! | `LSTMCell/W_0`, `LSTMCell/W_P_0` | uniform, bound sqrt(6 / (rows + columns)) (Glorot and Bengio 2010) |
//! | `softmax/W` | normal, variance 1 / P |
//! | all others | 0 |

use std::{
    sync::{Mutex, PoisonError},
    thread,
};

use super::random::{Purpose, Random};
use crate::{
    options::{Activation, ModelOptions, TensorSpec},
    weights::{Tensor, Weights},
};

/// Bound of filters before relu.
const FILTER_BOUND: f64 = 0.05;
/// Bias of the gates of highway layers.
const CARRY_BIAS: f32 = -2.0;
/// Number of the softmax among the tensors; a model has fewer.
const SOFTMAX: u32 = u32::MAX;

/// Distribution of the initial values of a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Values {
    Constant(f32),
    /// In `-bound..bound`.
    Uniform(f64),
    /// With this standard deviation.
    Normal(f64),
}

/// Initial weights of a biLM. Every tensor has numbers of its own, whatever the other ones are.
pub fn initial_weights(options: &ModelOptions, seed: u64) -> Weights {
    let mut weights = Weights::default();
    for (number, TensorSpec { name, shape }) in options.weight_plan().into_iter().enumerate() {
        let data = draw(distribution(options, &name, &shape), shape.iter().product(), seed, number as u32);
        weights.insert(name, Tensor { shape, data });
    }
    weights
}

/// Initial `softmax/W [V, P]` and `softmax/b [V]` of a softmax over `words` for vectors of `width` numbers.
pub fn initial_softmax(words: usize, width: usize, seed: u64) -> (Tensor, Tensor) {
    let data = draw(Values::Normal((1.0 / width as f64).sqrt()), words * width, seed, SOFTMAX);
    (Tensor { shape: vec![words, width], data }, Tensor { shape: vec![words], data: vec![0.0; words] })
}

fn distribution(options: &ModelOptions, name: &str, shape: &[usize]) -> Values {
    let wide = (1.0 / options.n_filters() as f64).sqrt();
    match name.rsplit('/').next().unwrap_or_default() {
        "char_embed" => Values::Uniform(1.0),
        "b_carry" => Values::Constant(CARRY_BIAS),
        "W_carry" | "W_transform" | "W_proj" => Values::Normal(wide),
        "W_0" | "W_P_0" => Values::Uniform((6.0 / (shape[0] + shape[1]) as f64).sqrt()),
        filter if filter.starts_with("W_cnn") => match options.char_cnn.activation {
            Activation::Relu => Values::Uniform(FILTER_BOUND),
            Activation::Tanh => Values::Normal((1.0 / (shape[1] * shape[2]) as f64).sqrt()),
        },
        _ => Values::Constant(0.0),
    }
}

/// Numbers that a thread draws together; each needs at most one block of random numbers.
const PIECE: usize = 1 << 16;

/// `n` values of a tensor. All cores draw them: the softmax of a large vocabulary has hundreds of millions.
fn draw(values: Values, n: usize, seed: u64, number: u32) -> Vec<f32> {
    let per_block = match values {
        Values::Constant(value) => return vec![value; n],
        Values::Uniform(_) => 2,
        Values::Normal(_) => 1,
    };
    let start = Random::new(seed, Purpose::InitialValues, 0, 0, number);
    let fill = |piece: usize, numbers: &mut [f32]| {
        let mut random = start.clone().after_blocks(piece * PIECE / per_block);
        for number in numbers {
            *number = match values {
                Values::Uniform(bound) => (2.0 * random.uniform() - 1.0) * bound,
                Values::Normal(deviation) => random.normal() * deviation,
                Values::Constant(value) => f64::from(value),
            } as f32;
        }
    };
    let mut all = vec![0.0; n];
    in_parallel(all.chunks_mut(PIECE).enumerate(), |(piece, numbers)| fill(piece, numbers));
    all
}

/// Does some work for every item, on all cores.
fn in_parallel<T: Send>(items: impl ExactSizeIterator<Item = T> + Send, work: impl Fn(T) + Sync) {
    let cores = thread::available_parallelism().map_or(1, usize::from).min(items.len());
    let items = Mutex::new(items);
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    let all = || {
        while let Some(item) = next() {
            work(item);
        }
    };
    thread::scope(|scope| {
        for _ in 1..cores {
            // The others do the work of a thread that the operating system refuses.
            let _ = thread::Builder::new().spawn_scoped(scope, all);
        }
        all();
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::PublishedSize;

    /// Mean, standard deviation and largest magnitude.
    fn statistics(tensor: &Tensor) -> (f64, f64, f64) {
        let n = tensor.data.len() as f64;
        let mean = tensor.data.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
        let square = tensor.data.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n;
        let largest = tensor.data.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
        (mean, (square - mean * mean).sqrt(), f64::from(largest))
    }

    /// Expected: `bilm/training.py` of bilm-tf with the sizes of the small model, and the moments of its distributions
    /// (a uniform one has deviation bound / sqrt(3)); bounds are five standard errors.
    #[test]
    fn the_small_model_begins_as_bilm_tf_does() {
        let options = PublishedSize::Small.options();
        let weights = initial_weights(&options, 1);
        let cell = "RNN_1/RNN/MultiRNNCell/Cell1/LSTMCell";
        let glorot = |a: f64, b: f64| (6.0 / (a + b)).sqrt();
        let root3 = 3.0_f64.sqrt();
        for (name, shape, deviation, bound) in [
            ("char_embed".to_owned(), vec![261, 16], 1.0 / root3, 1.0),
            ("CNN/W_cnn_6".to_owned(), vec![1, 7, 16, 1024], 0.05 / root3, 0.05),
            ("CNN_high_0/W_carry".to_owned(), vec![2048, 2048], (1.0_f64 / 2048.0).sqrt(), f64::INFINITY),
            ("CNN_high_0/W_transform".to_owned(), vec![2048, 2048], (1.0_f64 / 2048.0).sqrt(), f64::INFINITY),
            ("CNN_proj/W_proj".to_owned(), vec![2048, 128], (1.0_f64 / 2048.0).sqrt(), f64::INFINITY),
            (format!("{cell}/W_0"), vec![256, 4096], glorot(256.0, 4096.0) / root3, glorot(256.0, 4096.0)),
            (format!("{cell}/W_P_0"), vec![1024, 128], glorot(1024.0, 128.0) / root3, glorot(1024.0, 128.0)),
        ] {
            let tensor = weights.get(&name).unwrap();
            assert_eq!(tensor.shape, shape, "{name}");
            let (mean, found, largest) = statistics(tensor);
            let error = 5.0 / (tensor.data.len() as f64).sqrt();
            assert!(mean.abs() < error * deviation, "{name}: mean {mean}");
            assert!((found / deviation - 1.0).abs() < error, "{name}: deviation {found}, not {deviation}");
            assert!(largest <= bound * (1.0 + 1e-7), "{name}: {largest}");
            assert!(bound.is_infinite() || largest > 0.95 * bound, "{name}: {largest}");
        }
        for (name, value) in [
            ("CNN/b_cnn_3".to_owned(), 0.0),
            ("CNN_high_0/b_carry".to_owned(), -2.0),
            ("CNN_high_0/b_transform".to_owned(), 0.0),
            ("CNN_proj/b_proj".to_owned(), 0.0),
            (format!("{cell}/B"), 0.0),
        ] {
            assert!(weights.get(&name).unwrap().data.iter().all(|&v| v == value), "{name}");
        }
        assert_eq!(weights.len(), options.weight_plan().len());
        let (weight, bias) = initial_softmax(500, 128, 1);
        let (_, deviation, _) = statistics(&weight);
        assert!((deviation * 128.0_f64.sqrt() - 1.0).abs() < 5.0 / (500.0 * 128.0_f64).sqrt());
        assert_eq!((weight.shape, bias), (vec![500, 128], Tensor { shape: vec![500], data: vec![0.0; 500] }));
    }

    /// Expected: one sequence from the first number to the last, in several pieces and the beginning of another one.
    #[test]
    fn values_do_not_depend_on_threads() {
        let n = 3 * PIECE + 5;
        let mut random = Random::new(7, Purpose::InitialValues, 0, 0, 3);
        let expected: Vec<f32> = (0..n).map(|_| (random.normal() * 0.5) as f32).collect();
        assert!(draw(Values::Normal(0.5), n, 7, 3) == expected);
        let mut random = Random::new(7, Purpose::InitialValues, 0, 0, 4);
        let expected: Vec<f32> = (0..n).map(|_| ((2.0 * random.uniform() - 1.0) * 0.5) as f32).collect();
        assert!(draw(Values::Uniform(0.5), n, 7, 4) == expected);
    }

    /// Filters before tanh have variance 1 / (width * C).
    #[test]
    fn filters_before_tanh_are_normal() {
        let mut options = PublishedSize::Small.options();
        options.char_cnn.activation = Activation::Tanh;
        let deviation = (1.0 / (7.0 * 16.0_f64)).sqrt();
        assert_eq!(distribution(&options, "CNN/W_cnn_6", &[1, 7, 16, 1024]), Values::Normal(deviation));
    }

    #[test]
    fn seeds_and_tensors_differ_and_a_seed_gives_the_same_bits_again() {
        let options = crate::tiny::options();
        let (one, again, other) =
            (initial_weights(&options, 1), initial_weights(&options, 1), initial_weights(&options, 2));
        assert_eq!(one, again);
        assert_ne!(one.get("char_embed"), other.get("char_embed"));
        let cell = |direction: usize| format!("RNN_{direction}/RNN/MultiRNNCell/Cell0/LSTMCell/W_0");
        assert_ne!(one.get(&cell(0)), one.get(&cell(1)));
    }
}
