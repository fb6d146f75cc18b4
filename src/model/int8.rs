//! Products of 8-bit integers on the CPU, for [`Precision::Int8`](super::Precision::Int8).
//!
//! `x W` becomes `(X V) * s * t`: `X` are the rows of `x` as codes -127..=127 with one scale `s` per row, so that a row does not
//! depend on its neighbours, and `V` are the columns of `W` as codes with one scale `t` per column (dynamic quantisation, as in
//! PyTorch's `quantize_dynamic`, but per row). Sums are 32-bit integers. They are exact, so the bits of a row are the same in every
//! batch, whatever order the processor adds in. Products of one row or two are our own, which read weights at the full bandwidth of memory.
//!
//! Processors with VNNI instructions multiply and add exactly. On others oneDNN adds pairs of products in 16 bits, with saturation:
//! `(x + 128) * v`, twice, at most 32,767. Codes of weights up to 64 never exceed that. [`weight_codes`] finds by trial what holds here.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, PoisonError},
};

use tch::{Device, Kind, Tensor};

use super::{DeviceError, device, kernels, tensors};
use crate::options::ModelOptions;

/// Largest code of an activation.
const LARGEST: i64 = 127;
/// Largest codes of weights to try: of 8 bits, and of 7.
const WEIGHT_CODES: [i64; 2] = [LARGEST, 64];
/// Products of at most so many rows are our own: `_int_mm` reads a matrix at half the bandwidth of memory.
const NARROW_ROWS: i64 = 2;
/// Row counts to try: libtorch may use other kernels for few rows.
const HEIGHTS: [i64; 5] = [3, 7, 15, 16, 256];

/// A matrix for the right side of a product, or one per direction: codes `[.., k, n]` and the scale of each column, `[.., n]`.
#[derive(Debug)]
pub(super) struct Codes {
    pub(super) codes: Tensor,
    pub(super) scales: Tensor,
}

impl Codes {
    /// Rounds float32 weights `[.., k, n]` to codes up to `largest`.
    pub(super) fn new(weights: &Tensor, largest: i64) -> Result<Self, DeviceError> {
        let highest = weights.f_abs()?.f_amax([-2_i64].as_slice(), true)?; // [.., 1, n]
        let scales = highest.f_div_scalar(largest)?;
        // A column of zeros has codes 0.
        let codes = weights.f_div(&scales.f_clamp_min(f64::from(f32::MIN_POSITIVE))?)?;
        let codes = codes.f_round()?.f_to_kind(Kind::Int8)?.f_contiguous()?;
        Ok(Self { codes, scales: scales.f_squeeze_dim(-2)?.f_contiguous()? })
    }

    /// The matrix of one direction.
    pub(super) fn of(&self, direction: i64) -> Result<Self, DeviceError> {
        Ok(Self { codes: self.codes.f_select(0, direction)?, scales: self.scales.f_select(0, direction)? })
    }

    /// Columns of the result.
    fn columns(&self) -> i64 {
        self.codes.size().last().copied().unwrap_or(0)
    }

    pub(super) fn map<E>(&self, change: &mut tensors::Change<'_, E>) -> Result<Self, E> {
        Ok(Self { codes: change(&self.codes)?, scales: change(&self.scales)? })
    }
}

/// Rows as codes, `[W, k]`, and their scales.
pub(super) struct Rows {
    codes: Tensor,
    scales: Vec<f32>,
}

impl Rows {
    pub(super) fn new(rows: i64, columns: i64) -> Result<Self, DeviceError> {
        let codes = Tensor::f_zeros([rows, columns], (Kind::Int8, Device::Cpu))?;
        Ok(Self { codes, scales: vec![0.0; rows as usize] })
    }

    /// Rounds the rows of `x` `[w, k]` into the first rows.
    pub(super) fn quantise(&mut self, x: &Tensor) {
        // SAFETY: `x` is read only; nothing else refers to the codes.
        let (x, codes) = unsafe { (tensors::values(x), tensors::values_mut(&mut self.codes)) };
        kernels::quantise(x, codes, &mut self.scales);
    }

    /// Copies the first row of `from` into some rows.
    pub(super) fn set(&mut self, rows: &[i64], from: &Self) {
        let width = from.codes.size()[1] as usize;
        // SAFETY: different tensors, which only this thread accesses.
        let (codes, row) =
            unsafe { (tensors::values_mut::<i8>(&mut self.codes), &tensors::values::<i8>(&from.codes)[..width]) };
        for at in rows.iter().map(|&at| at as usize) {
            codes[at * width..][..width].copy_from_slice(row);
            self.scales[at] = from.scales[0];
        }
    }

    /// `X V` of the first rows with the codes `V` `[k, n]`, as many rows as `sums` `[w, n]` has: 32-bit integers.
    pub(super) fn multiply(&self, codes: &Tensor, sums: &Tensor) -> Result<(), DeviceError> {
        let rows = self.codes.f_narrow(0, 0, sums.size()[0])?;
        if sums.size()[0] <= NARROW_ROWS {
            let mut sums = sums.shallow_clone();
            // SAFETY: only this thread accesses the tensors, and only the sums are written to.
            unsafe {
                let (rows, codes) = (tensors::values(&rows), tensors::values(codes));
                kernels::narrow_codes(rows, codes, tensors::values_mut(&mut sums), self.codes.size()[1] as usize);
            }
            return Ok(());
        }
        let _ = rows.f_internal_int_mm_out(sums, codes)?;
        Ok(())
    }

    pub(super) fn scales(&self) -> &[f32] {
        &self.scales
    }
}

/// A buffer for the sums of a product.
pub(super) fn sums(rows: i64, columns: i64) -> Result<Tensor, DeviceError> {
    Ok(Tensor::f_empty([rows, columns], (Kind::Int, Device::Cpu))?)
}

/// `X V` of rows `x` `[w, k]` in float32, with the scales of the rows.
pub(super) fn product(x: &Tensor, weights: &Codes) -> Result<(Tensor, Vec<f32>), DeviceError> {
    let (w, k) = x.size2()?;
    let mut rows = Rows::new(w, k)?;
    rows.quantise(x);
    let sums = sums(w, weights.columns())?;
    rows.multiply(&weights.codes, &sums)?;
    Ok((sums, rows.scales))
}

/// The largest code of weights for which all products of a model in 8 bits are exact on this machine: 127 with VNNI or AMX
/// instructions, and 64 without. `None` if there is none.
///
/// Tries it once per process for each shape of model.
///
/// # Errors
/// [`DeviceError::Torch`] when libtorch fails.
pub fn weight_codes(options: &ModelOptions) -> Result<Option<i64>, DeviceError> {
    static FOUND: Mutex<BTreeMap<Products, Option<i64>>> = Mutex::new(BTreeMap::new());
    let products = products(options);
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(largest) = found.get(&products) {
        return Ok(*largest);
    }
    let largest = exact_codes(&products)?;
    found.insert(products, largest);
    Ok(largest)
}

/// The first of [`WEIGHT_CODES`] for which all products are exact.
fn exact_codes(products: &Products) -> Result<Option<i64>, DeviceError> {
    let _no_gradients = tch::no_grad_guard();
    device::set_up_cpu();
    'codes: for largest in WEIGHT_CODES {
        for &(k, n) in products {
            if !is_exact(k, n, largest)? {
                continue 'codes;
            }
        }
        return Ok(Some(largest));
    }
    Ok(None)
}

/// `(k, n)` of products `[.., k] x [k, n]`.
type Products = BTreeSet<(i64, i64)>;

/// The distinct products of a model in 8 bits.
fn products(options: &ModelOptions) -> Products {
    let (d, p) = (options.lstm.dim as i64, options.lstm.projection_dim as i64);
    let cnn = &options.char_cnn;
    let filters: i64 = cnn.filters.iter().map(|filter| filter.n as i64).sum();
    let mut all = BTreeSet::from([(p, 4 * d)]);
    if options.has_projection() {
        all.insert((d, p));
    }
    if options.has_char_projection() {
        all.insert((filters, p));
    }
    if cnn.n_highway > 0 {
        all.insert((filters, 2 * filters));
    }
    all
}

/// The code at an index, given the index and the largest code.
type Pattern = fn(i64, i64) -> i64;

/// Whether products of rows of codes and columns of codes up to `largest` have the sums that 64-bit integers give.
fn is_exact(k: i64, n: i64, largest: i64) -> Result<bool, DeviceError> {
    // The largest sums, and pseudo-random numbers.
    let extreme: Pattern = |_, bound| bound;
    let negative: Pattern = |_, bound| -bound;
    let varied: Pattern = |i, bound| (i * 7919 + 104_729 * (i % 13)) % (2 * bound + 1) - bound;
    for (activation, weight) in [(extreme, extreme), (extreme, negative), (varied, varied), (extreme, varied)] {
        let row: Vec<i8> = (0..k).map(|i| activation(i, LARGEST) as i8).collect();
        let column: Vec<i8> = (0..k).map(|i| weight(i + 5, largest) as i8).collect();
        let expected: i64 = row.iter().zip(&column).map(|(a, b)| i64::from(*a) * i64::from(*b)).sum();
        let weights = Tensor::f_from_slice(&column)?.f_view([k, 1])?.f_expand([k, n], false)?.f_contiguous()?;
        let row = Tensor::f_from_slice(&row)?.f_view([1, k])?;
        for height in HEIGHTS {
            let rows = row.f_expand([height, k], false)?.f_contiguous()?;
            let found = rows.f_internal_int_mm(&weights)?;
            if !found.f_eq(expected)?.f_all()?.f_int64_value(&[]).map(|all| all == 1)? {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected: by hand. Scales are the largest magnitude by 127, and 127 / 2 rounds to the even 64.
    #[test]
    fn codes_of_rows_and_columns() {
        let x = Tensor::from_slice(&[1.0_f32, -2.0, 0.0, 0.0, 0.0, 0.0]).view([2, 3]);
        let mut rows = Rows::new(2, 3).unwrap();
        rows.quantise(&x);
        assert_eq!(Vec::<i8>::try_from(rows.codes.view(-1)).unwrap(), [64, -127, 0, 0, 0, 0]);
        assert_eq!(rows.scales, [2.0 / 127.0, 0.0]);
        let weights = Tensor::from_slice(&[3.0_f32, 0.0, -6.0, 0.0]).view([2, 2]);
        let Codes { codes, scales } = Codes::new(&weights, 64).unwrap();
        assert_eq!(Vec::<i8>::try_from(codes.view(-1)).unwrap(), [32, 0, -64, 0]);
        assert_eq!(Vec::<f32>::try_from(scales).unwrap(), [6.0 / 64.0, 0.0]);
    }

    /// Expected: float64 products of the codes.
    #[test]
    fn sums_are_exact_whatever_the_number_of_rows() {
        let Some(largest) = weight_codes(&crate::tiny::options()).unwrap() else {
            panic!("products of 8-bit integers are not exact on this machine");
        };
        tch::manual_seed(7);
        for (k, n) in [(1, 1), (3, 17), (7, 5), (6, 9000), (64, 256), (2048, 512)] {
            let x = Tensor::randn([33, k], (Kind::Float, Device::Cpu));
            let weights = Codes::new(&Tensor::randn([k, n], (Kind::Float, Device::Cpu)), largest).unwrap();
            let (sums, _) = product(&x, &weights).unwrap();
            let mut rows = Rows::new(33, k).unwrap();
            rows.quantise(&x);
            let exact = rows.codes.to_kind(Kind::Double).mm(&weights.codes.to_kind(Kind::Double));
            assert_eq!(sums.to_kind(Kind::Double), exact, "{k} x {n}");
            for (first, height) in [(0, 1), (32, 1), (11, NARROW_ROWS), (3, NARROW_ROWS + 1)] {
                let (few, _) = product(&x.narrow(0, first, height), &weights).unwrap();
                assert_eq!(few, sums.narrow(0, first, height), "{height} rows, {k} x {n}");
            }
            // The largest sums.
            let extreme = Tensor::full([2, k], 127, (Kind::Int8, Device::Cpu));
            let rows = Rows { codes: extreme, scales: vec![1.0; 2] };
            for code in [127, -127] {
                let sums = super::sums(2, n).unwrap();
                rows.multiply(&Tensor::full([k, n], code, (Kind::Int8, Device::Cpu)), &sums).unwrap();
                assert_eq!(sums, Tensor::full([2, n], 127 * code * k, (Kind::Int, Device::Cpu)), "{k} x {n}");
            }
        }
    }
}
