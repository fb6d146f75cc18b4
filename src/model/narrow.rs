//! Products with fewer than [`MIN_WIDTH`] rows, with the bits that a taller product has.
//!
//! MKL packs the right side of every product, which for a few rows takes longer than to multiply it, and with few rows it sums in another
//! order. Our kernel reads the right side once, as it is, and sums in the order in which MKL sums taller products: the inner dimension is
//! cut into blocks ([`blocks`]), the products of a block are added up one after the other by fused multiply-add, and the sums of the
//! blocks are added to the result in turn. That order was found by comparing bits (MKL of libtorch 2.11, Zen 4), so it is tried on each
//! processor before it is used ([`is_exact`]).

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use tch::{Device, Kind, Tensor};

use super::{DeviceError, kernels, lstm, packing::MIN_WIDTH, tensors};
use crate::options::ModelOptions;

/// Length of a block; an inner dimension below two blocks is cut in half.
const BLOCK: usize = 192;

/// Ends of the blocks of an inner dimension of `k`.
fn blocks(k: usize) -> Vec<usize> {
    match k {
        ..=BLOCK => vec![k],
        _ if k < 2 * BLOCK => vec![k.div_ceil(2), k],
        _ => (1..=k / BLOCK).map(|n| n * BLOCK).chain((!k.is_multiple_of(BLOCK)).then_some(k)).collect(),
    }
}

/// `c += a b`, or `c = a b` unless it `adds`: `[m, k] x [k, n]`, of contiguous float32 tensors on the host, with `m` below
/// [`MIN_WIDTH`].
///
/// # Safety
/// As [`tensors::values_mut`] for `c`, and [`tensors::values`] for the others.
pub(crate) unsafe fn multiply(c: &mut Tensor, a: &Tensor, b: &Tensor, adds: bool) {
    // SAFETY: the caller's promise.
    unsafe { multiply_in(c, a, b, &blocks(b.size()[0] as usize), adds) };
}

/// The same with these ends of blocks.
unsafe fn multiply_in(c: &mut Tensor, a: &Tensor, b: &Tensor, blocks: &[usize], adds: bool) {
    // SAFETY: the caller's promise.
    let (a, b, c) = unsafe { (tensors::values(a), tensors::values(b), tensors::values_mut(c)) };
    kernels::narrow_product(a, b, c, blocks, adds);
}

/// Whether a model uses our own products of few rows: whether all products of a step of its LSTMs have the bits of MKL's.
///
/// # Errors
/// [`DeviceError`] when libtorch fails.
pub fn is_exact_for(options: &ModelOptions) -> Result<bool, DeviceError> {
    let (d, p) = (options.lstm.dim as i64, options.lstm.projection_dim as i64);
    let projected = || Ok::<_, DeviceError>(p >= tensors::MIN_COLUMNS && is_exact(d, p)?);
    Ok(is_exact(p, 4 * lstm::tile_cells(d))? && (!options.has_projection() || projected()?))
}

/// Whether products `[m, k] x [k, n]` with few rows have the bits of taller ones on this processor. Tried once per process and shape.
///
/// # Errors
/// [`DeviceError`] when libtorch fails.
fn is_exact(k: i64, n: i64) -> Result<bool, DeviceError> {
    static TRIED: Mutex<Option<HashMap<(i64, i64), bool>>> = Mutex::new(None);
    let mut tried = TRIED.lock().unwrap_or_else(PoisonError::into_inner);
    let tried = tried.get_or_insert_default();
    if let Some(exact) = tried.get(&(k, n)) {
        return Ok(*exact);
    }
    let exact = try_out(k, n, &blocks(k as usize))?;
    tried.insert((k, n), exact);
    Ok(exact)
}

/// Compares with the lowest product that the model leaves to MKL. That taller ones have its bits is checked at each start
/// ([`steady_height`](super::steady_height)).
fn try_out(k: i64, n: i64, blocks: &[usize]) -> Result<bool, DeviceError> {
    super::set_up_cpu();
    let _no_gradients = tch::no_grad_guard();
    let tall = MIN_WIDTH as i64;
    let (a, b, start) = (tensors::sines(tall, k, 0.37)?, tensors::sines(k, n, 0.73)?, tensors::sines(tall, n, 0.11)?);
    let (product, sum) = (a.f_mm(&b)?, start.f_addmm(&a, &b)?);
    for rows in [1, 7, tall - 1] {
        for (expected, adds) in [(&product, false), (&sum, true)] {
            let mut found = Tensor::f_empty([rows, n], (Kind::Float, Device::Cpu))?;
            found.f_copy_(&start.f_narrow(0, 0, rows)?)?;
            // SAFETY: tensors of this function, of which only `found` is changed.
            unsafe { multiply_in(&mut found, &a.f_narrow(0, 0, rows)?, &b, blocks, adds) };
            if !found.f_equal(&expected.f_narrow(0, 0, rows)?)? {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_an_inner_dimension() {
        assert_eq!(blocks(112), [112]);
        assert_eq!(blocks(192), [192]);
        assert_eq!(blocks(256), [128, 256]);
        assert_eq!(blocks(512), [192, 384, 512]);
        assert_eq!(blocks(400), [192, 384, 400]);
        assert_eq!(blocks(576), [192, 384, 576]);
    }

    /// By hand, in numbers whose products and sums are exact in any order; odd sizes, which leave rests of all loops.
    #[test]
    fn products() {
        for (m, k, n) in [(1, 1, 1), (2, 5, 3), (15, 203, 129), (3, 400, 4200), (7, 9, 600)] {
            let number = |i: usize| (i * 7 % 11) as f32 - 5.0;
            let matrix = |rows: usize, columns: usize| {
                Tensor::from_slice(&(0..rows * columns).map(number).collect::<Vec<_>>())
                    .view([rows as i64, columns as i64])
            };
            let (a, b, start) = (matrix(m, k), matrix(k, n), matrix(m, n));
            for adds in [false, true] {
                let mut c = start.copy();
                // SAFETY: tensors of this test, of which only `c` is changed.
                unsafe { multiply(&mut c, &a, &b, adds) };
                let at = |row: usize, column: usize| {
                    let sum: f32 = (0..k).map(|i| number(row * k + i) * number(i * n + column)).sum();
                    sum + if adds { number(row * n + column) } else { 0.0 }
                };
                for (row, column) in [(0, 0), (m - 1, n - 1), (m / 2, n / 2), (0, n - 1)] {
                    assert_eq!(c.double_value(&[row as i64, column as i64]) as f32, at(row, column), "{m} {k} {n}");
                }
            }
        }
    }

    /// The trial must not accept sums in another order: of two orders, at most one can have MKL's bits.
    #[test]
    fn another_order_of_sums_is_noticed() {
        for (k, n) in [(1024, 128), (256, 512), (2048, 256), (512, 512)] {
            let others = [vec![k as usize], vec![k as usize / 4, k as usize]];
            let orders = [vec![blocks(k as usize)], others.to_vec()].concat();
            let exact = orders.iter().filter(|blocks| try_out(k, n, blocks).unwrap()).count();
            assert!(exact <= 1, "{k} x {n}: {exact} orders of sums have the same bits");
        }
    }
}
