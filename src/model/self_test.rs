//! What this machine does: whether vectors are independent of their batch, and how fast products can be.

use std::{sync::Barrier, thread, time::Instant};

use tch::{Device, Kind, Tensor};

use super::{BiLm, DeviceError, device, packing::MIN_WIDTH, tensors};
use crate::options::ModelOptions;

/// What [`self_test`] found.
#[derive(Debug, Clone, PartialEq)]
pub struct SelfTest {
    /// Largest absolute difference between a sentence's vectors in different batches; 0 is bit-equal.
    pub largest_difference: f32,
    /// Batches compared.
    pub batches: usize,
    /// Height from which a product's rows have the same bits as in a taller one; at most the 16 rows that
    /// the model keeps to when all is well. `None`: not even then.
    pub smallest_height: Option<usize>,
}

impl SelfTest {
    /// Whether every batch gave the same bits.
    pub fn bit_equal(&self) -> bool {
        self.largest_difference == 0.0
    }
}

/// Runs sentences alone, together, reversed and in odd groups, and compares every vector.
pub fn self_test(model: &BiLm) -> Result<SelfTest, DeviceError> {
    let words: Vec<String> =
        (0..97).map(|i| format!("w{}", "abcdefghijkl".repeat(1 + i % 4).split_at(i % 12).0)).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let sentences: Vec<Vec<i64>> =
        (0..40_i64).map(|s| (0..1 + (s * 7) % 23).map(|t| (s * 31 + t * 17) % words.len() as i64).collect()).collect();
    let expected = run_in_batches(model, &words, &sentences, sentences.len())?;
    let mut largest = 0.0_f32;
    let sizes = [1, 2, 7, 15, 16, 17, 33];
    for size in sizes {
        let other = run_in_batches(model, &words, &sentences, size)?;
        for (a, b) in expected.iter().zip(&other) {
            for (x, y) in a.iter().zip(b) {
                largest =
                    largest.max(if x.to_bits() == y.to_bits() { 0.0 } else { (x - y).abs().max(f32::MIN_POSITIVE) });
            }
        }
    }
    let smallest_height = smallest_height(model)?;
    Ok(SelfTest { largest_difference: largest, batches: sizes.len(), smallest_height })
}

/// All layers of every sentence; batches take the sentences from the back, words are computed per batch.
fn run_in_batches(
    model: &BiLm,
    words: &[&str],
    sentences: &[Vec<i64>],
    size: usize,
) -> Result<Vec<Vec<f32>>, DeviceError> {
    let start = model.after_boundaries(&model.zero_state()?)?;
    let mut results = vec![Vec::new(); sentences.len()];
    let order: Vec<usize> = (0..sentences.len()).rev().collect();
    for batch in order.chunks(size) {
        let mut used: Vec<i64> = batch.iter().flat_map(|&s| sentences[s].iter().copied()).collect();
        used.sort_unstable();
        used.dedup();
        let own: Vec<&str> = used.iter().map(|&w| words[w as usize]).collect();
        let table = model.token_vectors(&own)?;
        let place = |w: &i64| used.binary_search(w).unwrap_or_default() as i64;
        let ids: Vec<Vec<i64>> = batch.iter().map(|&s| sentences[s].iter().map(place).collect()).collect();
        // Several sentences in a row, as the engine packs them.
        let rows = (0..ids.len()).collect::<Vec<_>>().chunks(1 + size % 4).map(<[usize]>::to_vec).collect();
        let activations = model.run_in_rows(&table, &ids, rows, &start)?;
        for layer in 0..activations.n_layers() {
            let values = activations.combine(&[(layer, 1.0)])?;
            let mut token = vec![0.0; values.width()];
            for (i, &sentence) in batch.iter().enumerate() {
                for t in 0..sentences[sentence].len() {
                    values.token(&activations, i, t, &mut token);
                    results[sentence].extend_from_slice(&token);
                }
            }
        }
    }
    Ok(results)
}

/// From which height on the rows of a product keep their bits, for the narrowest products and for usual ones.
fn smallest_height(model: &BiLm) -> Result<Option<usize>, DeviceError> {
    let mut smallest = 1;
    for columns in [tensors::MIN_COLUMNS, 256] {
        match smallest_height_of(model, columns)? {
            Some(height) => smallest = smallest.max(height),
            None => return Ok(None),
        }
    }
    Ok(Some(smallest))
}

/// The same for products of `n` columns.
fn smallest_height_of(model: &BiLm, n: i64) -> Result<Option<usize>, DeviceError> {
    let _no_gradients = tch::no_grad_guard();
    let device = model.device().torch();
    let k = model.projection_dim() as i64;
    let options = (Kind::Float, device);
    let a = (Tensor::f_arange(257 * k, options)?.f_mul_scalar(0.37)?.f_sin()?).f_view([257, k])?;
    let b = (Tensor::f_arange(k * n, options)?.f_mul_scalar(0.73)?.f_cos()?).f_view([k, n])?;
    let full = a.f_matmul(&b)?;
    let same = |height: i64| -> Result<bool, DeviceError> {
        Ok(a.f_narrow(0, 0, height)?.f_matmul(&b)?.f_equal(&full.f_narrow(0, 0, height)?)?)
    };
    let heights: Vec<i64> = (1..=64).chain([100, 127, 128, 129, 200, 255, 256]).collect();
    let mut smallest = None;
    for &height in heights.iter().rev() {
        if !same(height)? {
            break;
        }
        smallest = Some(height as usize);
    }
    Ok(smallest.filter(|&height| height <= MIN_WIDTH))
}

/// Rate of libtorch's own matrix product on the shapes of a model, in GFLOP/s.
///
/// `threads` OS threads run products of 256 rows side by side for `seconds`, each on one core, as the engine
/// does; the rates of the shapes are weighted by their share of the work of a token.
pub fn matmul_ceiling(options: &ModelOptions, threads: usize, seconds: f64) -> Result<f64, DeviceError> {
    device::set_up_cpu();
    let (d, p) = (options.lstm.dim as i64, options.lstm.projection_dim as i64);
    let mut shapes = vec![(2 * p, 4 * d)];
    if options.has_projection() {
        shapes.push((d, p));
    }
    let work: f64 = shapes.iter().map(|(k, n)| (k * n) as f64).sum();
    let mut time_per_flop = 0.0;
    for &(k, n) in &shapes {
        let rate = product_rate(k, n, threads, seconds / shapes.len() as f64)?;
        time_per_flop += (k * n) as f64 / work / rate;
    }
    Ok(1.0 / time_per_flop)
}

/// GFLOP/s of `[256, k] x [k, n]`, summed over threads that run at the same time; the median of each.
fn product_rate(k: i64, n: i64, threads: usize, seconds: f64) -> Result<f64, DeviceError> {
    const ROWS: i64 = 256;
    let barrier = Barrier::new(threads);
    let one = || -> Result<f64, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        let options = (Kind::Float, Device::Cpu);
        let a = Tensor::f_rand([ROWS, k], options)?;
        let b = Tensor::f_rand([k, n], options)?;
        let out = Tensor::f_empty([ROWS, n], options)?;
        let _ = a.f_mm_out(&out, &b)?;
        barrier.wait();
        let started = Instant::now();
        let mut laps = Vec::new();
        while laps.is_empty() || started.elapsed().as_secs_f64() < seconds {
            let lap = Instant::now();
            let _ = a.f_mm_out(&out, &b)?;
            laps.push(lap.elapsed().as_secs_f64());
        }
        laps.sort_by(f64::total_cmp);
        Ok(2.0 * (ROWS * k * n) as f64 / laps[laps.len() / 2] / 1e9)
    };
    thread::scope(|scope| {
        let handles: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        let died = || DeviceError::Torch { message: "a measuring thread died".to_owned() };
        handles.into_iter().map(|handle| handle.join().map_err(|_| died())?).sum()
    })
}
