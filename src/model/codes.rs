//! Products of 8-bit integers with weights that are cut into panels of 64 columns, on a CPU, for
//! [`Precision::Int8`](super::Precision::Int8).
//!
//! `x W` becomes `(X V) * s * t`: `X` are the rows of `x` as codes -127..=127 with one scale `s` per row, so that a row does not
//! depend on its neighbours, and `V` are the columns of `W` as codes with one scale `t` per column (dynamic quantisation, as in
//! PyTorch's `quantize_dynamic`, but per row). Sums are 32-bit integers. They are exact, so the bits of a row are the same in every
//! batch and on every processor that has fused multiply-add, whatever order it adds in.
//!
//! A panel is `[k / 4, 64, 4]`, because processors multiply four neighbouring codes of a row with those of a column and add the products up
//! in one instruction or a few:
//!
//! | processor | instructions |
//! |---|---|
//! | AVX-512 with VNNI | `vpdpbusd`, which multiplies unsigned by signed numbers: rows are codes plus 128 there, and sums begin with what that adds, subtracted |
//! | AVX2 | `vpmaddubsw`, which adds two products of unsigned by signed numbers in 16 bits, with saturation. It gets the magnitudes of the row's codes, and the weights' codes with the signs of the row's: `2 * 128 * 127` is in range |
//! | others | what the compiler makes of the sum |

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::{
    DeviceError, kernels,
    kernels::fma,
    panels::{COLUMNS, GROUP, LANES, TileRow, VECTORS, groups},
    tensors::{self, Change, FLOAT_ON_HOST},
};

/// Codes that are multiplied and added up at once.
const QUAD: usize = 4;
/// Largest code.
const LARGEST: i64 = 127;

/// Four codes of each column of a panel.
type Line = [[[i8; QUAD]; LANES]; VECTORS];
/// The integer sums of a row.
type Sums = [[i32; LANES]; VECTORS];

/// Weights as panels of codes, with anything in front of the dimensions that are given here.
#[derive(Debug)]
pub(crate) struct Codes {
    codes: Tensor,  // i8 [.., N, k / 4, 64, 4], filled up with zeros
    starts: Tensor, // i32 [.., N, 64], what sums begin with
    scales: Tensor, // f32 [.., N, 64]
}

/// Weights `[k, n]` as codes, before they are cut into panels.
pub(crate) struct Rounded {
    codes: Tensor,  // i8 [k, n]
    scales: Tensor, // f32 [n]
}

impl Rounded {
    /// Rounds the columns of float32 weights `[k, n]`.
    ///
    /// # Errors
    /// [`DeviceError`] when libtorch fails.
    pub(crate) fn new(weights: &Tensor) -> Result<Self, DeviceError> {
        let scales = weights.f_abs()?.f_amax([0_i64].as_slice(), false)?.f_div_scalar(LARGEST)?;
        // A column of zeros has codes 0.
        let codes = weights.f_div(&scales.f_clamp_min(f64::from(f32::MIN_POSITIVE))?)?;
        Ok(Self { codes: codes.f_round()?.f_to_kind(Kind::Int8)?, scales })
    }

    /// Some rows, with the scales of the whole columns.
    ///
    /// # Errors
    /// [`DeviceError`] when libtorch fails.
    pub(crate) fn rows(&self, first: i64, count: i64) -> Result<Self, DeviceError> {
        Ok(Self { codes: self.codes.f_narrow(0, first, count)?, scales: self.scales.shallow_clone() })
    }
}

impl Codes {
    /// Rounds a matrix `[k, n]`, or several, `[m, k, n]`, and cuts it into panels.
    ///
    /// # Errors
    /// [`DeviceError`] when libtorch fails.
    pub(crate) fn new(weights: &Tensor) -> Result<Self, DeviceError> {
        let size = weights.size();
        let (outer, [k, n]) = match size.as_slice() {
            [outer @ .., k, n] => (outer, [*k, *n]),
            _ => return Err(DeviceError::internal("weights of a product are matrices")),
        };
        let all = Self::empty(outer, (n as usize).div_ceil(COLUMNS), k as usize)?;
        match outer {
            [] => all.fill(&Rounded::new(weights)?, 1)?,
            _ => {
                for (index, weights) in (0..).zip(weights.f_unbind(0)?) {
                    all.of(index)?.fill(&Rounded::new(&weights)?, 1)?;
                }
            }
        }
        Ok(all)
    }

    /// Memory for `N` panels of `k` rows, as many times as `outer` says.
    ///
    /// # Errors
    /// [`DeviceError`] when libtorch fails.
    pub(crate) fn empty(outer: &[i64], panels: usize, k: usize) -> Result<Self, DeviceError> {
        let with = |inner: &[usize]| -> Vec<i64> {
            outer.iter().copied().chain(inner.iter().map(|&dimension| dimension as i64)).collect()
        };
        let per_column = with(&[panels, COLUMNS]);
        Ok(Self {
            codes: Tensor::f_empty(with(&[panels, k.div_ceil(QUAD), COLUMNS, QUAD]), (Kind::Int8, Device::Cpu))?,
            starts: Tensor::f_empty(&per_column, (Kind::Int, Device::Cpu))?,
            scales: Tensor::f_empty(&per_column, FLOAT_ON_HOST)?,
        })
    }

    /// Copies weights to these panels, `width` columns of each of `groups` groups to a panel: 64 of one, or 16 of each gate.
    ///
    /// # Errors
    /// [`DeviceError`] when libtorch fails.
    pub(crate) fn fill(&self, weights: &Rounded, groups: i64) -> Result<(), DeviceError> {
        let (k, n) = weights.codes.size2()?;
        let (panels, width) = (self.scales.size()[0], COLUMNS as i64 / groups);
        let pad = panels * width - n / groups;
        // [.., n] -> [.., groups, N, width]
        let by_panel = |columns: &Tensor, rows: &[i64]| -> Result<Tensor, DeviceError> {
            let shape = |columns: &[i64]| [rows, columns].concat();
            let grouped = columns.f_view(shape(&[groups, n / groups]).as_slice())?.f_constant_pad_nd([0, pad])?;
            Ok(grouped.f_view(shape(&[groups, panels, width]).as_slice())?)
        };
        let per_column = |columns: &Tensor, to: &Tensor| -> Result<(), DeviceError> {
            let columns = by_panel(columns, &[])?.f_transpose(0, 1)?;
            to.f_view(columns.size().as_slice())?.f_copy_(&columns)?;
            Ok(())
        };
        let padding = (k as usize).next_multiple_of(QUAD) as i64 - k;
        let codes = weights.codes.f_constant_pad_nd([0, 0, 0, padding])?;
        let quads = by_panel(&codes, &[(k + padding) / QUAD as i64, QUAD as i64])?; // [k / 4, 4, groups, N, width]
        let quads = quads.f_permute([3, 0, 2, 4, 1])?;
        self.codes.f_view(quads.size().as_slice())?.f_copy_(&quads)?;
        let added = weights.codes.f_sum_dim_intlist([0_i64].as_slice(), false, Kind::Int)?;
        per_column(&added.f_mul_scalar(-i64::from(offset()))?, &self.starts)?;
        per_column(&weights.scales, &self.scales)
    }

    /// One of the outermost dimension.
    ///
    /// # Errors
    /// [`DeviceError`] when libtorch fails.
    pub(crate) fn of(&self, index: i64) -> Result<Self, DeviceError> {
        self.map(&mut |tensor| Ok(tensor.f_select(0, index)?))
    }

    /// The same with every tensor changed.
    pub(crate) fn map<E>(&self, change: &mut Change<'_, E>) -> Result<Self, E> {
        Ok(Self { codes: change(&self.codes)?, starts: change(&self.starts)?, scales: change(&self.scales)? })
    }

    /// Panels to be read.
    pub(crate) fn panels(&self) -> Panels<'_> {
        // SAFETY: nothing writes to the weights while a model computes.
        let (codes, starts, scales) = unsafe {
            (
                tensors::values::<i8>(&self.codes),
                tensors::values::<i32>(&self.starts),
                tensors::values::<f32>(&self.scales),
            )
        };
        let (vectors, _) = codes.as_chunks::<QUAD>().0.as_chunks::<LANES>();
        Panels {
            lines: vectors.as_chunks().0,
            starts: starts.as_chunks::<LANES>().0.as_chunks().0,
            scales: scales.as_chunks::<LANES>().0.as_chunks().0,
        }
    }
}

/// Some panels of the same height.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Panels<'a> {
    lines: &'a [Line],
    starts: &'a [Sums],
    scales: &'a [TileRow],
}

impl<'a> Panels<'a> {
    pub(crate) fn count(&self) -> usize {
        self.scales.len()
    }

    /// Whether rows of `k` numbers can be multiplied with them.
    pub(crate) fn fit(&self, rows: &Rows<'_>) -> bool {
        self.starts.len() == self.count() && self.lines.len() == self.count() * rows.quads
    }

    /// One of them.
    pub(crate) fn one(&self, index: usize) -> Self {
        let height = self.lines.len() / self.count().max(1);
        Self {
            lines: &self.lines[index * height..][..height],
            starts: &self.starts[index..=index],
            scales: &self.scales[index..=index],
        }
    }
}

/// Rows as codes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows<'a> {
    codes: &'a [[u8; QUAD]], // [w, quads], each plus `offset()`
    scales: &'a [f32],       // [w]
    quads: usize,
}

impl Rows<'_> {
    pub(crate) fn count(&self) -> usize {
        self.scales.len()
    }
}

/// Memory for rows as codes, which is used again.
#[derive(Debug, Default)]
pub(crate) struct Buffer {
    codes: Vec<u8>,
    scales: Vec<f32>,
}

impl Buffer {
    /// Rounds rows of `k` numbers.
    pub(crate) fn quantise(&mut self, x: &[f32], k: usize) -> Rows<'_> {
        let (count, quads) = (x.len() / k, k.div_ceil(QUAD));
        let width = quads * QUAD;
        if self.scales.len() < count || self.codes.len() < count * width {
            self.codes.resize(count * width, 0);
            self.scales.resize(count, 0.0);
        }
        // Codes between `k` and `width` are multiplied by zeros.
        let (codes, scales) = (&mut self.codes[..count * width], &mut self.scales[..count]);
        for ((x, codes), scale) in x.chunks_exact(k).zip(codes.chunks_exact_mut(width)).zip(&mut *scales) {
            kernels::quantise(x, &mut codes[..k], scale, offset());
        }
        Rows { codes: codes.as_chunks().0, scales, quads }
    }
}

/// `c = bias + a b`: `[w, k] x [k, n] -> [w, n]`, with one bias `[n]` for all rows, if any.
pub(crate) fn multiply(a: &Rows<'_>, b: &Panels<'_>, bias: Option<&[f32]>, c: &mut [f32], n: usize) {
    for (panel, first) in (0..b.count()).zip((0..n).step_by(COLUMNS)) {
        let (panel, width) = (b.one(panel), COLUMNS.min(n - first));
        let mut start = [[0.0; LANES]; VECTORS];
        if let Some(bias) = bias {
            start.as_flattened_mut()[..width].copy_from_slice(&bias[first..][..width]);
        }
        for rows in groups(a.count()) {
            let mut z = [start; GROUP];
            let z = &mut z[..rows.len()];
            add_product(z, a, rows.clone(), &panel);
            for (z, row) in z.iter().zip(rows) {
                c[row * n + first..][..width].copy_from_slice(&z.as_flattened()[..width]);
            }
        }
    }
}

/// Whether this processor has the dot products of VNNI in vectors of 512 bits.
fn has_vnni() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// What is added to the codes of rows on this processor.
fn offset() -> u8 {
    if has_vnni() { 128 } else { 0 }
}

/// Adds the product of a group of rows with one panel to `z`, which has a row for each of them.
pub(crate) fn add_product(z: &mut [TileRow], a: &Rows<'_>, rows: Range<usize>, panel: &Panels<'_>) {
    #[cfg(target_arch = "x86_64")]
    {
        if has_vnni() {
            // SAFETY: this CPU has the features.
            return unsafe { x86::add_vnni(z, a, rows.start, panel) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: this CPU has the features.
            return unsafe { x86::add_avx2(z, a, rows.start, panel) };
        }
    }
    add_any::<{ cfg!(target_arch = "aarch64") }>(z, a, rows.start, panel);
}

/// The sums of one row, rescaled.
#[inline(always)]
fn add_sums<const FUSED: bool>(z: &mut TileRow, sums: &Sums, scale: f32, panel: &Panels<'_>) {
    let scales = &panel.scales[0];
    for v in 0..VECTORS {
        for lane in 0..LANES {
            z[v][lane] = fma::<FUSED>(sums[v][lane] as f32, scale * scales[v][lane], z[v][lane]);
        }
    }
}

/// Rows from `first` on, in instructions of any processor. Codes of rows have no offset.
fn add_any<const FUSED: bool>(z: &mut [TileRow], a: &Rows<'_>, first: usize, panel: &Panels<'_>) {
    for (z, row) in z.iter_mut().zip(first..) {
        let mut sums = [[0_i32; LANES]; VECTORS];
        for (a, line) in a.codes[row * a.quads..].iter().zip(panel.lines) {
            let a = a.map(|code| i32::from(code.cast_signed()));
            for v in 0..VECTORS {
                for lane in 0..LANES {
                    let b = line[v][lane].map(i32::from);
                    sums[v][lane] += a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3];
                }
            }
        }
        add_sums::<FUSED>(z, &sums, a.scales[row], panel);
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{LANES, Panels, QUAD, Rows, Sums, TileRow, VECTORS, add_sums};

    /// Numbers of a vector of 256 bits.
    const HALF: usize = LANES / 2;
    /// Rows that are multiplied at a time with AVX2, so that sums stay in the 16 registers.
    const FEW: usize = 3;

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load<T>(numbers: &[T; LANES]) -> __m512i {
        const { assert!(size_of::<T>() == 4) }
        // SAFETY: 64 bytes of integers.
        unsafe { _mm512_loadu_si512(numbers.as_ptr().cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn load_half(codes: &[[i8; QUAD]; LANES], half: usize) -> __m256i {
        // SAFETY: one half of 64 bytes of integers.
        unsafe { _mm256_loadu_si256(codes[half * HALF..][..HALF].as_ptr().cast()) }
    }

    /// The codes of rows from `first` on.
    #[inline(always)]
    fn left_of<'a, const M: usize>(a: &Rows<'a>, first: usize) -> [&'a [[u8; QUAD]]; M] {
        std::array::from_fn(|m| &a.codes[(first + m) * a.quads..])
    }

    /// Rows from `first` on, as many as `z` has. Codes of rows have an offset of 128.
    #[target_feature(enable = "avx512f,avx512vnni,avx2,fma")]
    pub(super) fn add_vnni(z: &mut [TileRow], a: &Rows<'_>, first: usize, panel: &Panels<'_>) {
        match z.len() {
            1 => add_vnni_rows::<1>(z, a, first, panel),
            2 => add_vnni_rows::<2>(z, a, first, panel),
            3 => add_vnni_rows::<3>(z, a, first, panel),
            4 => add_vnni_rows::<4>(z, a, first, panel),
            5 => add_vnni_rows::<5>(z, a, first, panel),
            _ => add_vnni_rows::<6>(z, a, first, panel),
        }
    }

    /// Loops over indices and arrays of the loops' own length, as in `panels.rs`, and for the same reason.
    #[target_feature(enable = "avx512f,avx512vnni,avx2,fma")]
    fn add_vnni_rows<const M: usize>(z: &mut [TileRow], a: &Rows<'_>, first: usize, panel: &Panels<'_>) {
        let lines = panel.lines;
        let left = left_of::<M>(a, first).map(|row| &row[..lines.len()]);
        let mut start = [_mm512_setzero_si512(); VECTORS];
        for (vector, numbers) in start.iter_mut().zip(&panel.starts[0]) {
            *vector = load(numbers);
        }
        let mut sums = [start; M];
        for q in 0..lines.len() {
            let mut b = [_mm512_setzero_si512(); VECTORS];
            for v in 0..VECTORS {
                b[v] = load(&lines[q][v]);
            }
            for m in 0..M {
                let a = _mm512_set1_epi32(i32::from_ne_bytes(left[m][q]));
                for v in 0..VECTORS {
                    sums[m][v] = _mm512_dpbusd_epi32(sums[m][v], a, b[v]);
                }
            }
        }
        for m in 0..M {
            let mut row: Sums = [[0; LANES]; VECTORS];
            for v in 0..VECTORS {
                // SAFETY: 64 bytes of integers.
                unsafe { _mm512_storeu_si512(row[v].as_mut_ptr().cast(), sums[m][v]) }
            }
            add_sums::<true>(&mut z[m], &row, a.scales[first + m], panel);
        }
    }

    /// Rows from `first` on, as many as `z` has. Codes of rows have no offset.
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn add_avx2(z: &mut [TileRow], a: &Rows<'_>, first: usize, panel: &Panels<'_>) {
        for (z, first) in z.chunks_mut(FEW).zip((first..).step_by(FEW)) {
            match z.len() {
                1 => add_avx2_rows::<1>(z, a, first, panel),
                2 => add_avx2_rows::<2>(z, a, first, panel),
                _ => add_avx2_rows::<FEW>(z, a, first, panel),
            }
        }
    }

    #[target_feature(enable = "avx2,fma")]
    fn add_avx2_rows<const M: usize>(z: &mut [TileRow], a: &Rows<'_>, first: usize, panel: &Panels<'_>) {
        let lines = panel.lines;
        let left = left_of::<M>(a, first).map(|row| &row[..lines.len()]);
        let ones = _mm256_set1_epi16(1);
        let mut all = [[[0; LANES]; VECTORS]; M];
        for v in 0..VECTORS {
            let mut sums = [[_mm256_setzero_si256(); 2]; M];
            for q in 0..lines.len() {
                let b = [load_half(&lines[q][v], 0), load_half(&lines[q][v], 1)];
                for m in 0..M {
                    let a = _mm256_set1_epi32(i32::from_ne_bytes(left[m][q]));
                    let magnitudes = _mm256_abs_epi8(a);
                    for half in 0..2 {
                        let pairs = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(b[half], a));
                        sums[m][half] = _mm256_add_epi32(sums[m][half], _mm256_madd_epi16(pairs, ones));
                    }
                }
            }
            for m in 0..M {
                for half in 0..2 {
                    let sums_of_half = all[m][v][half * HALF..][..HALF].as_mut_ptr().cast();
                    // SAFETY: 32 bytes of integers.
                    unsafe { _mm256_storeu_si256(sums_of_half, sums[m][half]) }
                }
            }
        }
        for m in 0..M {
            add_sums::<true>(&mut z[m], &all[m], a.scales[first + m], panel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, step: f32) -> Vec<f32> {
        (0..count).map(|i| (i as f32 * step).sin()).collect()
    }

    fn matrix(values: &[f32], k: usize) -> Tensor {
        Tensor::from_slice(values).view([k as i64, -1])
    }

    /// Weights whose columns have scale 1, as panels: codes are given, of which the first of each column is 127.
    fn weights(k: usize, n: usize, code: impl Fn(usize) -> i8) -> (Codes, Vec<i8>) {
        let codes: Vec<i8> = (0..k * n).map(|i| if i < n { 127 } else { code(i) }).collect();
        let values: Vec<f32> = codes.iter().map(|&code| f32::from(code)).collect();
        (Codes::new(&matrix(&values, k)).unwrap(), codes)
    }

    /// Rows whose scale is 1.
    fn rows(w: usize, k: usize, code: impl Fn(usize) -> i8) -> Vec<i8> {
        (0..w * k).map(|i| if i % k == 0 { 127 } else { code(i) }).collect()
    }

    /// A way to add the product of a group of rows with a panel, and what it has added to codes of rows.
    type Kernel = (&'static str, u8, fn(&mut [TileRow], &Rows<'_>, usize, &Panels<'_>));

    /// Those of this processor.
    fn kernels() -> Vec<Kernel> {
        let mut all: Vec<Kernel> = vec![("any", 0, add_any::<false>)];
        #[cfg(target_arch = "x86_64")]
        {
            // SAFETY: this CPU has the features.
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                all.push(("AVX2", 0, |z, a, first, panel| unsafe { x86::add_avx2(z, a, first, panel) }));
            }
            // SAFETY: this CPU has the features.
            if has_vnni() {
                all.push(("VNNI", 128, |z, a, first, panel| unsafe { x86::add_vnni(z, a, first, panel) }));
            }
        }
        println!("kernels: {:?}", all.iter().map(|(name, ..)| name).collect::<Vec<_>>());
        all
    }

    /// Expected: by hand. Scales are the largest magnitude by 127, and 127 / 2 rounds to the even 64.
    #[test]
    fn codes_of_rows_and_columns() {
        let mut buffer = Buffer::default();
        let rows = buffer.quantise(&[1.0, -2.0, 0.0, 0.0, 0.0, 0.0], 3);
        assert_eq!(rows.scales, [2.0 / 127.0, 0.0]);
        let codes = |row: usize| [0, 1, 2].map(|i| rows.codes[row][i].wrapping_sub(offset()).cast_signed());
        assert_eq!([codes(0), codes(1)], [[64, -127, 0], [0, 0, 0]]);
        let rounded = Rounded::new(&matrix(&[3.0, 0.0, -6.0, 0.0], 2)).unwrap();
        assert_eq!(Vec::<i8>::try_from(rounded.codes.view(-1)).unwrap(), [64, 0, -127, 0]);
        assert_eq!(Vec::<f32>::try_from(&rounded.scales).unwrap(), [6.0 / 127.0, 0.0]);
    }

    /// Expected: the sums in 64-bit integers, which float32 holds here. Codes with the largest sums, of either sign, and varied ones; sizes that
    /// leave rests of groups, panels and quads.
    #[test]
    fn sums_are_exact_with_every_kernel_and_for_any_number_of_rows() {
        let codes: [fn(usize) -> i8; 4] =
            [|_| 127, |_| -127, |i| (((i * 7919) % 255) as i16 - 127) as i8, |i| (i % 3) as i8 - 1];
        for (w, k, n) in [(1, 1, 1), (7, 3, 17), (13, 7, 64), (6, 128, 130), (5, 509, 64)] {
            for (row_code, weight_code) in codes.iter().flat_map(|a| codes.iter().map(move |b| (a, b))) {
                let (weights, b) = weights(k, n, weight_code);
                let a = rows(w, k, row_code);
                let sum = |row: usize, column: usize| -> i64 {
                    (0..k).map(|q| i64::from(a[row * k + q]) * i64::from(b[q * n + column])).sum()
                };
                let expected: Vec<f32> = (0..w * n).map(|i| sum(i / n, i % n) as f32).collect();
                let x: Vec<f32> = a.iter().map(|&code| f32::from(code)).collect();
                let mut buffer = Buffer::default();
                for height in 1..=w {
                    let mut found = vec![0.0; height * n];
                    multiply(&buffer.quantise(&x[..height * k], k), &weights.panels(), None, &mut found, n);
                    assert_eq!(found, expected[..height * n], "{height} of {w} {k} {n}");
                }
                check_kernels(&weights, &a, k, n, &expected);
            }
        }
    }

    fn check_kernels(weights: &Codes, a: &[i8], k: usize, n: usize, expected: &[f32]) {
        let (w, quads) = (a.len() / k, k.div_ceil(QUAD));
        for (name, offset, add) in kernels() {
            let padded = |row: &[i8]| -> Vec<u8> {
                let mut codes = vec![77; quads * QUAD]; // what follows a row is multiplied by zeros
                codes.iter_mut().zip(row).for_each(|(to, code)| *to = code.cast_unsigned().wrapping_add(offset));
                codes
            };
            let codes: Vec<u8> = a.chunks(k).flat_map(padded).collect();
            let rows = Rows { codes: codes.as_chunks().0, scales: &vec![1.0; w], quads };
            let starts = match offset == super::offset() {
                true => weights.panels().starts.to_vec(),
                false => vec![[[0; LANES]; VECTORS]; n.div_ceil(COLUMNS)],
            };
            for panel in 0..n.div_ceil(COLUMNS) {
                let one = Panels { starts: &starts[panel..=panel], ..weights.panels().one(panel) };
                for group in groups(w) {
                    let mut z = vec![[[0.0; LANES]; VECTORS]; group.len()];
                    add(&mut z, &rows, group.start, &one);
                    for (row, z) in group.zip(&z) {
                        for column in 0..COLUMNS.min(n - panel * COLUMNS) {
                            let expected = expected[row * n + panel * COLUMNS + column];
                            assert_eq!(z.as_flattened()[column], expected, "{name}: {row} {column} of {w} {k} {n}");
                        }
                    }
                }
            }
        }
    }

    /// Expected: `bias + sum * (scale of the row * scale of the column)` by hand, rounded in the order of the documentation.
    #[test]
    fn sums_are_rescaled_and_added_to_the_bias() {
        let weights = Codes::new(&matrix(&[254.0, 127.0, -2.0, 127.0], 2)).unwrap(); // codes 127 and 127, -1 and 127, scales 2 and 1
        let (mut buffer, mut c) = (Buffer::default(), [0.0; 2]);
        multiply(&buffer.quantise(&[63.5, -1.0], 2), &weights.panels(), Some(&[0.5, 1.0]), &mut c, 2); // codes 127 and -2, scale 0.5
        assert_eq!(c, [0.5 + (127.0 * 127.0 + 2.0) * 1.0, 1.0 + (127.0 * 127.0 - 2.0 * 127.0) * 0.5]);
    }

    #[test]
    fn several_matrices_are_cut_as_each_alone() {
        let values = [numbers(5 * 130, 0.37), numbers(5 * 130, 0.73)];
        let all = Codes::new(&matrix(&values.concat(), 10).view([2, 5, 130])).unwrap();
        for (index, values) in (0..).zip(&values) {
            let (found, one) = (all.of(index).unwrap(), Codes::new(&matrix(values, 5)).unwrap());
            assert_eq!(found.codes, one.codes);
            assert_eq!(found.starts, one.starts);
            assert_eq!(found.scales, one.scales);
        }
    }

    #[test]
    fn a_row_with_nan_or_infinity_has_no_finite_result_and_leaves_others_alone() {
        let weights = Codes::new(&matrix(&numbers(8 * 64, 0.73), 8)).unwrap();
        let mut x = numbers(3 * 8, 0.37);
        let mut buffer = Buffer::default();
        let mut product = |x: &[f32]| {
            let mut c = vec![0.0; x.len() / 8 * 64];
            multiply(&buffer.quantise(x, 8), &weights.panels(), None, &mut c, 64);
            c
        };
        let others = [product(&x[..8]), product(&x[16..])];
        for wrong in [f32::NAN, f32::INFINITY] {
            x[9] = wrong;
            let found = product(&x);
            assert!(found[64..128].iter().all(|number| !number.is_finite()));
            assert_eq!([&found[..64], &found[128..]], [&others[0][..], &others[1][..]]);
        }
    }
}
