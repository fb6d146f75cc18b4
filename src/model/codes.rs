//! Products of 8-bit integers with weights that are cut into panels of 64 columns, on a CPU, for [`Precision::Int8`].
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
//! | with VNNI, in vectors of 512 or 256 bits | `vpdpbusd` |
//! | with AVX2 | `vpmaddubsw`, `vpmaddwd` and an addition |
//! | others | what the compiler makes of the sum |
//!
//! The left side of `vpdpbusd` is unsigned. So rows are codes plus 128 there, and sums start at -128 times the sum of the column.
//!
//! `vpmaddubsw` adds two products of unsigned by signed numbers in 16 bits, with saturation. It gets the magnitudes of the row's codes (at
//! most 128, which NaN may give), and the column's codes with the signs of the row's: two products are at most 32,512, which 16 bits hold.

use std::sync::LazyLock;

use tch::{Device, Kind, Tensor};

use super::{
    DeviceError, DeviceName, Precision,
    kernels::{self, fma},
    panels::{COLUMNS, GROUP, LANES, TileRow, VECTORS, groups},
    tensors::{self, Change, FLOAT_ON_HOST},
};

/// Codes that are multiplied and added up at once.
const QUAD: usize = 4;
/// Largest code.
const LARGEST: i16 = 127;

/// Four codes of each column of a panel.
type Line = [[[i8; QUAD]; LANES]; VECTORS];
/// The integer sums of a row.
type Sums = [[i32; LANES]; VECTORS];

/// Largest inner dimension: sums of more products, or the starts of sums, may not fit 32 bits.
const LONGEST: usize = i32::MAX as usize / (128 * LARGEST as usize);

/// Weights as panels of codes for this processor, of one matrix or of several (`..`).
#[derive(Debug)]
pub(crate) struct Codes {
    codes: Tensor,  // i8 [.., N, k / 4, 64, 4], filled up with zeros
    starts: Tensor, // i32 [.., N, 64], where sums start: at -offset times the sum of the column's codes
    scales: Tensor, // f32 [.., N, 64]
    k: usize,
}

/// Quantised weights `[k, n]`, before they are cut into panels.
pub(crate) struct Rounded {
    codes: Tensor,  // i8 [k, n]
    scales: Tensor, // f32 [n]
}

impl Rounded {
    /// Quantises the columns of float32 weights `[k, n]`.
    ///
    /// # Errors
    /// [`DeviceError`] when libtorch fails.
    pub(crate) fn new(weights: &Tensor) -> Result<Self, DeviceError> {
        let highest = weights.f_abs()?.f_amax([0_i64].as_slice(), false)?;
        let scales = highest.f_div(&Tensor::f_from_slice(&[f32::from(LARGEST)])?)?;
        // A column of zeros has codes 0.
        let codes = weights.f_div(&scales.f_maximum(&Tensor::f_from_slice(&[f32::MIN_POSITIVE])?)?)?;
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
    /// Quantises a matrix `[k, n]`, or several, `[m, k, n]`, and cuts it into panels.
    ///
    /// # Errors
    /// As [`Codes::empty`].
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

    /// Memory for `N` panels of `k` rows, for each index of the dimensions `outer`.
    ///
    /// # Errors
    /// [`DeviceError::Precision`] when `k` is so large that sums may not fit 32 bits, [`DeviceError::Torch`] when libtorch fails.
    pub(crate) fn empty(outer: &[i64], panels: usize, k: usize) -> Result<Self, DeviceError> {
        if k > LONGEST {
            let reason = "the model has products of more than 132,104 numbers, whose sums may not fit 32 bits; use f32";
            return Err(DeviceError::Precision { precision: Precision::Int8, device: DeviceName::Cpu, reason });
        }
        let with = |inner: &[usize]| -> Vec<i64> {
            outer.iter().copied().chain(inner.iter().map(|&dimension| dimension as i64)).collect()
        };
        let per_column = with(&[panels, COLUMNS]);
        Ok(Self {
            codes: Tensor::f_empty(with(&[panels, k.div_ceil(QUAD), COLUMNS, QUAD]), (Kind::Int8, Device::Cpu))?,
            starts: Tensor::f_empty(&per_column, (Kind::Int, Device::Cpu))?,
            scales: Tensor::f_empty(&per_column, FLOAT_ON_HOST)?,
            k,
        })
    }

    /// Copies weights to these panels. The columns of `weights` are `groups` groups of the same size, such as the gates, and a panel has
    /// `64 / groups` columns of each.
    ///
    /// # Errors
    /// [`DeviceError`] when libtorch fails.
    pub(crate) fn fill(&self, weights: &Rounded, groups: i64) -> Result<(), DeviceError> {
        self.fill_for(weights, groups, kernel().offset)
    }

    fn fill_for(&self, weights: &Rounded, groups: i64, offset: u8) -> Result<(), DeviceError> {
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
        let sums = weights.codes.f_sum_dim_intlist([0_i64].as_slice(), false, Kind::Int)?;
        per_column(&sums.f_mul(&Tensor::f_from_slice(&[-i32::from(offset)])?)?, &self.starts)?;
        per_column(&weights.scales, &self.scales)
    }

    /// One of several matrices.
    ///
    /// # Errors
    /// [`DeviceError`] when libtorch fails.
    pub(crate) fn of(&self, index: i64) -> Result<Self, DeviceError> {
        self.map(&mut |tensor| Ok(tensor.f_select(0, index)?))
    }

    /// The same with every tensor changed.
    pub(crate) fn map<E>(&self, change: &mut Change<'_, E>) -> Result<Self, E> {
        Ok(Self {
            codes: change(&self.codes)?,
            starts: change(&self.starts)?,
            scales: change(&self.scales)?,
            k: self.k,
        })
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
            k: self.k,
        }
    }
}

/// Some panels of the same height.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Panels<'a> {
    lines: &'a [Line],
    starts: &'a [Sums],
    scales: &'a [TileRow],
    k: usize,
}

impl<'a> Panels<'a> {
    pub(crate) fn count(&self) -> usize {
        self.scales.len()
    }

    /// Whether these rows can be multiplied with them.
    pub(crate) fn fit(&self, rows: &Rows<'_>) -> bool {
        let lines = self.count() * self.k.div_ceil(QUAD);
        self.k == rows.k && self.starts.len() == self.count() && self.lines.len() == lines
    }

    /// One of them.
    pub(crate) fn one(&self, index: usize) -> Self {
        let height = self.lines.len() / self.count().max(1);
        Self {
            lines: &self.lines[index * height..][..height],
            starts: &self.starts[index..=index],
            scales: &self.scales[index..=index],
            k: self.k,
        }
    }
}

/// Quantised rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows<'a> {
    codes: &'a [[u8; QUAD]], // [w, k / 4], each code plus the offset of the kernel
    scales: &'a [f32],       // [w]
    k: usize,
}

impl<'a> Rows<'a> {
    pub(crate) fn count(&self) -> usize {
        self.scales.len()
    }

    /// The codes of a row.
    #[inline(always)]
    fn row(&self, index: usize) -> &'a [[u8; QUAD]] {
        let quads = self.k.div_ceil(QUAD);
        &self.codes[index * quads..][..quads]
    }
}

/// Memory for quantised rows, which is used again.
#[derive(Debug, Default)]
pub(crate) struct Buffer {
    codes: Vec<u8>,
    scales: Vec<f32>,
}

impl Buffer {
    /// Quantises rows of `k` numbers.
    ///
    /// # Panics
    /// When `k` is 0.
    pub(crate) fn quantise(&mut self, x: &[f32], k: usize) -> Rows<'_> {
        let (count, width) = (x.len() / k, k.next_multiple_of(QUAD));
        self.codes.resize(self.codes.len().max(count * width), 0);
        self.scales.resize(self.scales.len().max(count), 0.0);
        // Codes between `k` and `width` are multiplied by zeros.
        let (codes, scales) = (&mut self.codes[..count * width], &mut self.scales[..count]);
        for ((x, codes), scale) in x.chunks_exact(k).zip(codes.chunks_exact_mut(width)).zip(&mut *scales) {
            kernels::quantise(x, &mut codes[..k], scale, kernel().offset);
        }
        Rows { codes: codes.as_chunks().0, scales, k }
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
            add_product(z, a, rows.start, &panel);
            for (z, row) in z.iter().zip(rows) {
                c[row * n + first..][..width].copy_from_slice(&z.as_flattened()[..width]);
            }
        }
    }
}

/// `z += a[first..first + z.len()] * panel`, rescaled: its arguments are `z`, `a`, `first` and `panel`.
type AddProduct = fn(&mut [TileRow], &Rows<'_>, usize, &Panels<'_>);

/// How a processor multiplies codes.
#[derive(Debug, Clone, Copy)]
struct Kernel {
    /// What is added to the codes of rows.
    offset: u8,
    add: AddProduct,
}

/// The kernels that this processor has, the fastest first.
fn available() -> Vec<Kernel> {
    let mut all = Vec::new();
    #[cfg(target_arch = "x86_64")]
    all.extend(x86::available());
    all.push(Kernel { offset: 0, add: add_any::<{ cfg!(target_arch = "aarch64") }> });
    all
}

/// The kernel of this processor.
fn kernel() -> Kernel {
    static FASTEST: LazyLock<Kernel> = LazyLock::new(|| available()[0]);
    *FASTEST
}

/// `z += a[first..first + z.len()] * panel`, rescaled.
pub(crate) fn add_product(z: &mut [TileRow], a: &Rows<'_>, first: usize, panel: &Panels<'_>) {
    (kernel().add)(z, a, first, panel);
}

/// Adds the integer sums of one row, times their scales, to `z`.
#[inline(always)]
fn add_sums<const FUSED: bool>(z: &mut TileRow, sums: &Sums, scale: f32, panel: &Panels<'_>) {
    let scales = &panel.scales[0];
    for v in 0..VECTORS {
        for lane in 0..LANES {
            z[v][lane] = fma::<FUSED>(sums[v][lane] as f32, scale * scales[v][lane], z[v][lane]);
        }
    }
}

/// The kernel in portable Rust. Codes of rows have no offset.
fn add_any<const FUSED: bool>(z: &mut [TileRow], a: &Rows<'_>, first: usize, panel: &Panels<'_>) {
    for (z, row) in z.iter_mut().zip(first..) {
        let mut sums = [[0_i32; LANES]; VECTORS];
        for (a, line) in a.row(row).iter().zip(panel.lines) {
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

    use super::{Kernel, LANES, Panels, QUAD, Rows, Sums, TileRow, VECTORS, add_sums};
    use crate::model::panels::GROUP;

    /// Numbers of a vector of 256 bits.
    const HALF: usize = LANES / 2;

    /// The kernels of x86 that this processor has, the fastest first.
    pub(super) fn available() -> impl Iterator<Item = Kernel> {
        let fused = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let has_512 = fused && is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni");
        let has_256 = fused && is_x86_feature_detected!("avxvnni");
        // SAFETY of all: a kernel is kept only where this CPU has its features.
        let all = [
            (has_512, Kernel { offset: 128, add: |z, a, first, panel| unsafe { add_512(z, a, first, panel) } }),
            (has_256, Kernel { offset: 128, add: |z, a, first, panel| unsafe { add_256(z, a, first, panel) } }),
            (fused, Kernel { offset: 0, add: |z, a, first, panel| unsafe { add_avx2(z, a, first, panel) } }),
        ];
        all.into_iter().filter_map(|(exists, kernel)| exists.then_some(kernel))
    }

    /// The codes of `M` rows, as many quads as a panel has lines.
    #[inline(always)]
    fn left<'a, const M: usize>(a: &Rows<'a>, first: usize, lines: usize) -> [&'a [[u8; QUAD]]; M] {
        let mut rows: [&[_]; M] = [&[]; M];
        for (row, index) in rows.iter_mut().zip(first..) {
            *row = &a.row(index)[..lines];
        }
        rows
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load<T>(numbers: &[T; LANES]) -> __m512i {
        const { assert!(size_of::<T>() == 4) }
        // SAFETY: 64 bytes of integers.
        unsafe { _mm512_loadu_si512(numbers.as_ptr().cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn load_half<T>(numbers: &[T; LANES], half: usize) -> __m256i {
        const { assert!(size_of::<T>() == 4) }
        // SAFETY: one half of 64 bytes of integers.
        unsafe { _mm256_loadu_si256(numbers[half * HALF..][..HALF].as_ptr().cast()) }
    }

    /// The kernel of VNNI in vectors of 512 bits. Codes of rows have an offset of 128.
    #[target_feature(enable = "avx512f,avx512vnni,avx2,fma")]
    fn add_512(z: &mut [TileRow], a: &Rows<'_>, first: usize, panel: &Panels<'_>) {
        for (z, first) in z.chunks_mut(GROUP).zip((first..).step_by(GROUP)) {
            match z.len() {
                1 => add_512_rows::<1>(z, a, first, panel),
                2 => add_512_rows::<2>(z, a, first, panel),
                3 => add_512_rows::<3>(z, a, first, panel),
                4 => add_512_rows::<4>(z, a, first, panel),
                5 => add_512_rows::<5>(z, a, first, panel),
                _ => add_512_rows::<GROUP>(z, a, first, panel),
            }
        }
    }

    /// Loops over indices and arrays of the loops' own length, as in `panels.rs`, and for the same reason.
    #[target_feature(enable = "avx512f,avx512vnni,avx2,fma")]
    fn add_512_rows<const M: usize>(z: &mut [TileRow], a: &Rows<'_>, first: usize, panel: &Panels<'_>) {
        let lines = panel.lines;
        let left = left::<M>(a, first, lines.len());
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

    /// `sums + a b` of the codes of a row and of eight columns, as `vpdpbusd` would add them, with signed codes of the row.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn dot(sums: __m256i, a: __m256i, b: __m256i) -> __m256i {
        let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(b, a));
        _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
    }

    /// A kernel in vectors of 256 bits, 16 columns and at most three or six rows at a time, so that sums stay in the 16 registers.
    macro_rules! kernel_in_halves {
        ($name:ident, $rows:ident, $features:literal, $dot:path, $most:literal) => {
            #[target_feature(enable = $features)]
            fn $name(z: &mut [TileRow], a: &Rows<'_>, first: usize, panel: &Panels<'_>) {
                for (z, first) in z.chunks_mut($most).zip((first..).step_by($most)) {
                    match z.len() {
                        1 => $rows::<1>(z, a, first, panel),
                        2 => $rows::<2>(z, a, first, panel),
                        3 => $rows::<3>(z, a, first, panel),
                        4 => $rows::<4>(z, a, first, panel),
                        5 => $rows::<5>(z, a, first, panel),
                        _ => $rows::<6>(z, a, first, panel),
                    }
                }
            }

            #[target_feature(enable = $features)]
            fn $rows<const M: usize>(z: &mut [TileRow], a: &Rows<'_>, first: usize, panel: &Panels<'_>) {
                let lines = panel.lines;
                let left = left::<M>(a, first, lines.len());
                let mut all = [[[0; LANES]; VECTORS]; M];
                for v in 0..VECTORS {
                    let start = &panel.starts[0][v];
                    let mut sums = [[load_half(start, 0), load_half(start, 1)]; M];
                    for q in 0..lines.len() {
                        let b = [load_half(&lines[q][v], 0), load_half(&lines[q][v], 1)];
                        for m in 0..M {
                            let a = _mm256_set1_epi32(i32::from_ne_bytes(left[m][q]));
                            for half in 0..2 {
                                sums[m][half] = $dot(sums[m][half], a, b[half]);
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
        };
    }

    kernel_in_halves!(add_avx2, add_avx2_rows, "avx2,fma", dot, 3);
    kernel_in_halves!(add_256, add_256_rows, "avx2,fma,avxvnni", _mm256_dpbusd_avx_epi32, 6);

    /// As `add_256`, in the encoding of AVX-512: what a processor without the other one can test.
    #[cfg(test)]
    pub(super) fn kernel_256() -> Option<Kernel> {
        kernel_in_halves!(add, add_rows, "avx2,fma,avx512vl,avx512vnni", _mm256_dpbusd_epi32, 6);
        let exists = is_x86_feature_detected!("avx512vl") && is_x86_feature_detected!("avx512vnni");
        // SAFETY: this CPU has the features.
        exists.then_some(Kernel { offset: 128, add: |z, a, first, panel| unsafe { add(z, a, first, panel) } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tensors::samples::{matrix, numbers};

    /// Expected: by hand. Scales are the largest magnitude by 127, and 127 / 2 rounds to the even 64.
    #[test]
    fn codes_of_rows_and_columns() {
        let mut buffer = Buffer::default();
        let rows = buffer.quantise(&[1.0, -2.0, 0.0, 0.0, 0.0, 0.0], 3);
        assert_eq!(rows.scales, [2.0 / 127.0, 0.0]);
        let codes = |row: usize| [0, 1, 2].map(|i| rows.codes[row][i].wrapping_sub(kernel().offset).cast_signed());
        assert_eq!([codes(0), codes(1)], [[64, -127, 0], [0, 0, 0]]);
        let rounded = Rounded::new(&matrix(&[3.0, 0.0, -6.0, 0.0], 2)).unwrap();
        assert_eq!(Vec::<i8>::try_from(rounded.codes.view(-1)).unwrap(), [64, 0, -127, 0]);
        assert_eq!(Vec::<f32>::try_from(&rounded.scales).unwrap(), [6.0 / 127.0, 0.0]);
    }

    /// Codes `[k, n]`, of which the first of each column is 127, so that rounding finds them again: columns have the scale 2^(column % 5).
    fn weights(k: usize, n: usize, code: fn(usize) -> i8) -> (Rounded, Vec<i8>) {
        let codes: Vec<i8> = (0..k * n).map(|i| if i < n { 127 } else { code(i) }).collect();
        let values: Vec<f32> = (0..).zip(&codes).map(|(i, &code)| f32::from(code) * scale_of(i % n)).collect();
        (Rounded::new(&matrix(&values, k)).unwrap(), codes)
    }

    fn scale_of(column: usize) -> f32 {
        [1.0, 2.0, 4.0, 8.0, 16.0][column % 5]
    }

    /// Integer sums, all exact.
    fn sums(a: &[i8], b: &[i8], k: usize, n: usize) -> Vec<f32> {
        let of = |row: usize, column: usize| -> i64 {
            (0..k).map(|q| i64::from(a[row * k + q]) * i64::from(b[q * n + column])).sum()
        };
        (0..a.len() / k * n).map(|i| of(i / n, i % n) as f32).collect()
    }

    const CODES: [fn(usize) -> i8; 5] =
        [|_| 127, |_| -127, |i| (((i * 7919) % 255) as i16 - 127) as i8, |i| (i % 3) as i8 - 1, |_| 0];

    /// Expected: sums in 64-bit integers, rescaled by powers of two. All kernels of this processor; the largest sums of either sign, rows
    /// with the code -128, as NaN may give; sizes that leave rests of groups, panels and quads; sums that float32 rounds.
    #[test]
    fn every_kernel_adds_exact_sums_of_any_number_of_rows() {
        let mut all = available();
        #[cfg(target_arch = "x86_64")]
        all.extend(x86::kernel_256());
        println!("offsets of the kernels: {:?}", all.iter().map(|kernel| kernel.offset).collect::<Vec<_>>());
        let lowest: fn(usize) -> i8 = |i| if i.is_multiple_of(3) { -128 } else { 127 };
        for (w, k, n) in [(1, 1, 1), (7, 3, 17), (13, 7, 64), (6, 128, 130), (5, 509, 64), (2, 4096, 70)] {
            for (row_code, weight_code) in CODES.iter().chain([&lowest]).flat_map(|a| CODES.iter().map(move |b| (a, b)))
            {
                let (rounded, b) = weights(k, n, *weight_code);
                let a: Vec<i8> = (0..w * k).map(row_code).collect();
                let expected = sums(&a, &b, k, n);
                for kernel in &all {
                    let weights = Codes::empty(&[], n.div_ceil(COLUMNS), k).unwrap();
                    weights.fill_for(&rounded, 1, kernel.offset).unwrap();
                    for height in 1..=w.min(GROUP) {
                        check_kernel(
                            *kernel,
                            &weights.panels(),
                            &a[(w - height) * k..],
                            &expected[(w - height) * n..],
                            n,
                        );
                    }
                }
            }
        }
    }

    /// One group of rows, whose scale is 2^row; they come after another one.
    fn check_kernel(kernel: Kernel, weights: &Panels<'_>, a: &[i8], expected: &[f32], n: usize) {
        let k = weights.k;
        let padded = |row: &[i8]| -> Vec<u8> {
            let mut codes = vec![77; k.next_multiple_of(QUAD)]; // what follows a row is multiplied by zeros
            codes.iter_mut().zip(row).for_each(|(to, code)| *to = code.cast_unsigned().wrapping_add(kernel.offset));
            codes
        };
        let codes: Vec<u8> = std::iter::once(&a[..k]).chain(a.chunks(k)).flat_map(padded).collect();
        let scales: Vec<f32> = [3.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0][..=a.len() / k].to_vec();
        let rows = Rows { codes: codes.as_chunks().0, scales: &scales, k };
        let before = |column: usize| column as f32 - 20.0;
        for panel in 0..weights.count() {
            let mut z = vec![[[0.0; LANES]; VECTORS]; a.len() / k];
            z.iter_mut().for_each(|z| z.as_flattened_mut().iter_mut().enumerate().for_each(|(c, z)| *z = before(c)));
            (kernel.add)(&mut z, &rows, 1, &weights.one(panel));
            for (row, z) in z.iter().enumerate() {
                for column in 0..COLUMNS.min(n - panel * COLUMNS) {
                    let place = panel * COLUMNS + column;
                    let expected = f64::from(expected[row * n + place]) * f64::from(scales[row + 1] * scale_of(place));
                    let expected = (expected + f64::from(before(column))) as f32;
                    assert_eq!(z.as_flattened()[column], expected, "offset {}, {row} {place} of {k}", kernel.offset);
                }
            }
        }
    }

    /// Expected: the sums of the columns by hand, negative, times the offset.
    #[test]
    fn sums_start_at_what_the_offset_of_rows_adds() {
        let (rounded, _) = weights(3, 2, |i| [0, 0, 5, -127, -2, -1][i]); // columns 127, 5, -2 and 127, -127, -1
        for (offset, expected) in [(128, [-130 * 128, 128]), (0, [0, 0])] {
            let codes = Codes::empty(&[], 1, 3).unwrap();
            codes.fill_for(&rounded, 1, offset).unwrap();
            assert_eq!(codes.panels().starts[0].as_flattened()[..3], [expected[0], expected[1], 0]);
        }
    }

    /// Expected: columns by hand. The groups of a panel have the same places of each group of columns.
    #[test]
    fn a_panel_has_16_cells_of_each_gate() {
        let (k, d) = (5, 20);
        let values: Vec<f32> = (0..k * 4 * d).map(|i| ((i * 37) % 201) as f32 - 100.0).collect();
        let rounded = Rounded::new(&matrix(&values, k)).unwrap();
        let codes = Codes::empty(&[], 2, k).unwrap();
        codes.fill(&rounded, 4).unwrap();
        let (scales, plain) =
            (Vec::<f32>::try_from(&rounded.scales).unwrap(), Vec::<i8>::try_from(rounded.codes.view(-1)).unwrap());
        for (panel, gate, cell) in
            (0..2).flat_map(|panel| (0..4).flat_map(move |gate| (0..16).map(move |cell| (panel, gate, cell))))
        {
            let column = (panel * 16 + cell < d).then_some(gate * d + panel * 16 + cell);
            let one = codes.panels().one(panel);
            assert_eq!(one.scales[0].as_flattened()[gate * 16 + cell], column.map_or(0.0, |column| scales[column]));
            for q in 0..8 {
                let code = column.filter(|_| q < k).map_or(0, |column| plain[q * 4 * d + column]);
                assert_eq!(one.lines[q / 4].as_flattened()[gate * 16 + cell][q % 4], code, "{panel} {gate} {cell} {q}");
            }
        }
    }

    /// Expected: `bias + sum * scale of the row * scale of the column` by hand.
    #[test]
    fn sums_are_rescaled_and_added_to_the_bias() {
        let weights = Codes::new(&matrix(&[254.0, 127.0, -2.0, 127.0], 2)).unwrap(); // 127, -1 and 127, 127; scales 2 and 1
        let (mut buffer, mut c) = (Buffer::default(), [0.0; 2]);
        let rows = buffer.quantise(&[63.5, -1.0], 2); // 127, -2; scale 0.5
        multiply(&rows, &weights.panels(), Some(&[0.5, 1.0]), &mut c, 2);
        assert_eq!(c, [0.5 + (127.0 * 127.0 + 2.0) * 1.0, 1.0 + (127.0 * 127.0 - 2.0 * 127.0) * 0.5]);
    }

    /// Expected: sums of codes in 64-bit integers, for several groups of rows and several panels.
    #[test]
    fn products_of_several_panels() {
        let (w, k, n) = (13, 7, 150);
        let (rounded, b) = weights(k, n, CODES[2]);
        let codes = Codes::empty(&[], n.div_ceil(COLUMNS), k).unwrap();
        codes.fill(&rounded, 1).unwrap();
        let a: Vec<i8> = (0..w * k).map(|i| if i % k == 0 { 127 } else { CODES[2](i) }).collect(); // rows have scale 1
        let x: Vec<f32> = a.iter().map(|&code| f32::from(code)).collect();
        let (mut buffer, mut c) = (Buffer::default(), vec![0.0; w * n]);
        multiply(&buffer.quantise(&x, k), &codes.panels(), None, &mut c, n);
        let expected: Vec<f32> = (0..).zip(sums(&a, &b, k, n)).map(|(i, sum)| sum * scale_of(i % n)).collect();
        assert_eq!(c, expected);
    }

    /// Several groups and panels, in a buffer that had rows of other lengths before. Expected: each row alone, in a new buffer.
    #[test]
    fn a_buffer_is_used_again() {
        let mut buffer = Buffer::default();
        for (w, k, n) in [(2, 9, 70), (13, 3, 64), (40, 1, 5), (1, 509, 200), (9, 9, 70)] {
            let weights = Codes::new(&matrix(&numbers(k * n, 0.73), k)).unwrap();
            let (x, bias, mut c) = (numbers(w * k, 0.37), numbers(n, 0.11), vec![0.0; w * n]);
            multiply(&buffer.quantise(&x, k), &weights.panels(), Some(&bias), &mut c, n);
            for (x, c) in x.chunks(k).zip(c.chunks(n)) {
                let mut alone = vec![0.0; n];
                multiply(&Buffer::default().quantise(x, k), &weights.panels(), Some(&bias), &mut alone, n);
                assert_eq!(c, alone);
            }
        }
    }

    #[test]
    fn several_matrices_are_cut_as_each_alone() {
        let values = [numbers(5 * 130, 0.37), numbers(5 * 130, 0.73)];
        let all = Codes::new(&matrix(&values.concat(), 10).view([2, 5, 130])).unwrap();
        for (index, values) in (0..).zip(&values) {
            let (found, one) = (all.of(index).unwrap(), Codes::new(&matrix(values, 5)).unwrap());
            assert_eq!((found.codes, found.starts, found.scales), (one.codes, one.starts, one.scales));
        }
    }

    #[test]
    fn rows_fit_weights_of_their_own_length() {
        let weights = Codes::new(&matrix(&numbers(8 * 64, 0.73), 8)).unwrap();
        let fit = |k: usize| weights.panels().fit(&Buffer::default().quantise(&vec![1.0; k], k));
        assert_eq!([5, 8, 9].map(fit), [false, true, false]);
    }

    /// Expected: 2^31 / (128 * 127), rounded down.
    #[test]
    fn sums_that_may_not_fit_are_refused() {
        assert!(Codes::empty(&[], 1, 132_104).is_ok());
        let refused = Codes::empty(&[], 1, 132_105).unwrap_err().to_string();
        assert!(refused.contains("--precision int8") && refused.contains("use f32"), "{refused}");
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
