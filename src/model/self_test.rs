//! Checks of this machine: whether vectors are independent of their batch, and how fast products can be.

use std::{sync::Barrier, thread, time::Instant};

use tch::{Kind, Tensor};

use super::{
    BiLm, DeviceError, DeviceName, Precision,
    codes::Buffer,
    device,
    products::{self, Weights},
    tensors::{self, FLOAT_ON_HOST},
};
use crate::options::ModelOptions;

/// Result of [`self_test`].
#[derive(Debug, Clone, PartialEq)]
pub struct SelfTest {
    /// Largest absolute difference between a sentence's vectors in different batches; 0 is bit-equal.
    pub largest_difference: f32,
    /// Number of batch sizes that were compared.
    pub batches: usize,
}

impl SelfTest {
    /// Whether every batch gave the same bits.
    pub fn bit_equal(&self) -> bool {
        self.largest_difference == 0.0
    }
}

/// Input of the self-test: words, and sentences as indices into them.
struct Probe {
    words: Vec<String>,
    sentences: Vec<Vec<i64>>,
}

fn probe() -> Probe {
    let words: Vec<String> =
        (0..97).map(|i| format!("w{}", "abcdefghijkl".repeat(1 + i % 4).split_at(i % 12).0)).collect();
    let sentences =
        (0..40_i64).map(|s| (0..1 + (s * 7) % 23).map(|t| (s * 31 + t * 17) % words.len() as i64).collect()).collect();
    Probe { words, sentences }
}

/// Runs sentences alone, together, reversed and in groups of different sizes, and compares every vector.
///
/// # Errors
/// [`DeviceError`] when the device has no room or libtorch fails; vectors that differ are no error.
pub fn self_test(model: &BiLm) -> Result<SelfTest, DeviceError> {
    let probe = probe();
    let expected = run_in_batches(model, &probe, probe.sentences.len())?;
    let mut largest = 0.0;
    let sizes = [1, 2, 7, 15, 16, 17, 33];
    for size in sizes {
        largest = larger(largest, difference(&expected, &run_in_batches(model, &probe, size)?));
    }
    Ok(SelfTest { largest_difference: largest, batches: sizes.len() })
}

/// Largest absolute difference between the vectors of the same sentences from two models, such as one set of weights on
/// two devices.
///
/// # Errors
/// [`DeviceError`] when a device has no room or libtorch fails.
pub fn compare(one: &BiLm, other: &BiLm) -> Result<f32, DeviceError> {
    let probe = probe();
    Ok(difference(&run_in_batches(one, &probe, 7)?, &run_in_batches(other, &probe, 7)?))
}

/// Largest absolute difference; 0 when all bits are equal, NaN when a NaN has other bits on the other side.
fn difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    let unlike = pairs.filter(|(x, y)| x.to_bits() != y.to_bits());
    let gap = |(x, y): (&f32, &f32)| if (x - y).abs() == 0.0 { f32::MIN_POSITIVE } else { (x - y).abs() };
    unlike.map(gap).fold(0.0, larger)
}

/// The larger of two numbers, or NaN if one is NaN: `f32::max` would return the other one.
fn larger(a: f32, b: f32) -> f32 {
    if a.is_nan() || a > b { a } else { b }
}

/// All layers of every sentence. Batches take the sentences in reverse order, and each computes its own words.
fn run_in_batches(model: &BiLm, Probe { words, sentences }: &Probe, size: usize) -> Result<Vec<Vec<f32>>, DeviceError> {
    let start = model.after_boundaries(&model.zero_state()?)?;
    let mut results = vec![Vec::new(); sentences.len()];
    let order: Vec<usize> = (0..sentences.len()).rev().collect();
    for batch in order.chunks(size) {
        let mut used: Vec<i64> = batch.iter().flat_map(|&s| sentences[s].iter().copied()).collect();
        used.sort_unstable();
        used.dedup();
        let own: Vec<&str> = used.iter().map(|&w| words[w as usize].as_str()).collect();
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

/// Rate of the matrix products of inference on the shapes of a model's LSTMs, in GFLOP/s: our own in float32 and in 8-bit integers on a
/// CPU (including the quantisation of the left side), and libtorch's otherwise.
///
/// Every lane (a CPU core, or a GPU) runs products for `seconds`, all lanes at the same time, as the engine does. The
/// rates of the shapes are weighted by their share of the work of a token.
///
/// # Errors
/// [`DeviceError`] when a device does not have the precision, has no room, or libtorch fails.
pub fn matmul_ceiling(
    options: &ModelOptions,
    lanes: &[DeviceName],
    precision: Precision,
    seconds: f64,
) -> Result<f64, DeviceError> {
    let has_own = matches!(precision, Precision::F32 | Precision::Int8);
    ceiling(options, lanes, precision, seconds, has_own)
}

/// As [`matmul_ceiling`], of libtorch's products everywhere: those of training.
///
/// # Errors
/// As [`matmul_ceiling`].
pub fn libtorch_ceiling(
    options: &ModelOptions,
    lanes: &[DeviceName],
    precision: Precision,
    seconds: f64,
) -> Result<f64, DeviceError> {
    ceiling(options, lanes, precision, seconds, false)
}

/// `is_own` says whether products on a CPU are our own.
fn ceiling(
    options: &ModelOptions,
    lanes: &[DeviceName],
    precision: Precision,
    seconds: f64,
    is_own: bool,
) -> Result<f64, DeviceError> {
    device::set_up_cpu();
    lanes.iter().for_each(|&lane| precision.choose(lane));
    let (d, p) = (options.lstm.dim as i64, options.lstm.projection_dim as i64);
    let mut shapes = vec![(2 * p, 4 * d)];
    if options.has_projection() {
        shapes.push((d, p));
    }
    let work: f64 = shapes.iter().map(|(k, n)| (k * n) as f64).sum();
    let mut time_per_flop = 0.0;
    for &(k, n) in &shapes {
        let factors = |rows, device: DeviceName| match is_own && device == DeviceName::Cpu {
            true => Factors::own(rows, k, n, precision),
            false => Factors::of_libtorch(rows, k, n, device, precision),
        };
        let rate = product_rate((k * n) as f64, &factors, lanes, seconds / shapes.len() as f64)?;
        time_per_flop += (k * n) as f64 / work / rate;
    }
    Ok(1.0 / time_per_flop)
}

/// Random matrices with so many rows, for a device.
type MakeFactors<'f> = &'f (dyn Fn(i64, DeviceName) -> Result<Factors, DeviceError> + Sync);

/// GFLOP/s of products with `numbers` weights, summed over lanes that run at the same time; the median of each.
fn product_rate(
    numbers: f64,
    factors: MakeFactors<'_>,
    lanes: &[DeviceName],
    seconds: f64,
) -> Result<f64, DeviceError> {
    let barrier = Barrier::new(lanes.len());
    let one = |device: DeviceName| -> Result<f64, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        // As in a lane of the engine: otherwise MKL splits the products of one lane between all cores.
        device::set_up_cpu();
        // More rows would not be faster.
        let rows = if device == DeviceName::Cpu { 256 } else { 8192 };
        let prepared = factors(rows, device);
        barrier.wait(); // before the `?`: the other lanes wait for this one even if it failed
        let mut factors = prepared?;
        device.synchronize()?;
        let started = Instant::now();
        let mut laps = Vec::new();
        while laps.is_empty() || started.elapsed().as_secs_f64() < seconds {
            let lap = Instant::now();
            factors.multiply()?;
            device.synchronize()?;
            laps.push(lap.elapsed().as_secs_f64());
        }
        laps.sort_by(f64::total_cmp);
        Ok(2.0 * rows as f64 * numbers / laps[laps.len() / 2] / 1e9)
    };
    thread::scope(|scope| {
        let handles: Vec<_> = lanes.iter().map(|&lane| scope.spawn(move || one(lane))).collect();
        let panicked = || DeviceError::internal("a measuring thread panicked");
        handles.into_iter().map(|handle| handle.join().map_err(|_| panicked())?).sum()
    })
}

/// Random matrices of a precision, and where their product goes.
enum Factors {
    Own { a: Vec<f32>, k: usize, b: Weights, buffer: Buffer, out: Vec<f32> },
    OfLibtorch { a: Tensor, b: Tensor, out: Tensor },
}

impl Factors {
    /// They have been multiplied once.
    fn own(rows: i64, k: i64, n: i64, precision: Precision) -> Result<Self, DeviceError> {
        let random = |rows: i64, columns: i64| Tensor::f_rand([rows, columns], FLOAT_ON_HOST);
        let mut factors = Self::Own {
            a: tensors::download(&random(rows, k)?)?,
            k: k as usize,
            b: Weights::new(&random(k, n)?, precision)?,
            buffer: Buffer::default(),
            out: vec![0.0; (rows * n) as usize],
        };
        factors.multiply()?;
        Ok(factors)
    }

    /// They have been multiplied once.
    fn of_libtorch(rows: i64, k: i64, n: i64, device: DeviceName, precision: Precision) -> Result<Self, DeviceError> {
        if precision == Precision::Int8 {
            let reason = "libtorch's products of integers are not used";
            return Err(DeviceError::Precision { precision, device, reason });
        }
        let device = device.torch();
        let random = |rows: i64, columns: i64| -> Result<Tensor, DeviceError> {
            Ok(Tensor::f_rand([rows, columns], (Kind::Float, device))?.f_to_kind(precision.kind())?)
        };
        let out = Tensor::f_empty([rows, n], (precision.kind(), device))?;
        let mut factors = Self::OfLibtorch { a: random(rows, k)?, b: random(k, n)?, out };
        factors.multiply()?;
        Ok(factors)
    }

    fn multiply(&mut self) -> Result<(), DeviceError> {
        match self {
            Self::Own { a, k, b, buffer, out } => products::multiply(b.left(a, *k, buffer), b.panels(), None, out),
            Self::OfLibtorch { a, b, out } => {
                let _ = a.f_mm_out(out, b)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nan_is_a_difference() {
        let nan = f32::NAN;
        let difference = |a: &[f32], b: &[f32]| difference(&[a.to_vec()], &[b.to_vec()]);
        assert_eq!(difference(&[1.0, nan], &[1.0, nan]), 0.0);
        assert_eq!(difference(&[1.0, 2.0, 3.0], &[1.0, 2.5, 3.25]), 0.5);
        assert_eq!(difference(&[0.0], &[-0.0]), f32::MIN_POSITIVE);
        assert!(difference(&[1.0, nan, 2.0], &[1.0, 0.0, 3.0]).is_nan());
        assert!(larger(0.0, nan).is_nan() && larger(nan, 0.0).is_nan());
    }
}
