//! Products in float32 with weights that are cut into panels of 64 columns, on a CPU.
//!
//! MKL packs the right side of a product at every call, and writes the result for another pass to read. Weights do not change, so
//! they are packed once here: a panel is `[k, 64]`, which a product reads from its first to its last number. Up to six rows of the left
//! side are multiplied at a time, and their sums stay in registers: with AVX-512 six rows of four vectors, which with four vectors
//! of the panel and one of the left side are 29 of the 32 registers; otherwise one quarter of the panel at a time. What follows
//! a product, such as the cell of an LSTM, runs while its rows are in the first-level cache. (Goto and van de Geijn 2008, "Anatomy of
//! High-Performance Matrix Multiplication", describes panels; left sides are not packed here, as they are read in order already.)
//!
//! A row is summed in the same order whatever the number of rows: the inner dimension is cut into [`blocks`], the products of a block
//! are added up from 0, one after the other, by fused multiply-add, and the sums of the blocks are added in turn. It is the
//! order of MKL on AMD processors (found by comparing bits, libtorch 2.11), and the same with AVX-512, AVX2 and NEON. Processors without
//! fused multiply-add round each product by itself.

use std::ops::Range;

use tch::{Device, Tensor};

use super::{
    DeviceError,
    kernels::{dispatch, fma, larger},
    tensors::FLOAT_ON_HOST,
};

/// Columns of a panel.
pub(crate) const COLUMNS: usize = 64;
/// Cells whose gates are the columns of a panel: `i` of all, then `j`, `f` and `o`.
pub(crate) const CELLS: usize = COLUMNS / 4;

/// Rows that are multiplied at a time.
pub(crate) const GROUP: usize = 6;
/// Numbers of a vector: one register with AVX-512, two with AVX2, four with NEON.
pub(crate) const LANES: usize = 16;
/// Longest block of the inner dimension.
const BLOCK: usize = 192;
/// Blocks that are multiplied by all rows before the next ones: 245 kB of a panel, which stay in the second-level cache.
const BLOCKS_IN_CACHE: usize = 5;

/// Vectors of a row of a panel.
pub(crate) const VECTORS: usize = COLUMNS / LANES;

/// Sums of a row.
pub(crate) type TileRow = [[f32; LANES]; VECTORS];
/// Sums of a group of rows.
type Tile = [TileRow; GROUP];

/// Rows of `V` vectors: a part of a panel.
type Lines<const V: usize> = [[[f32; LANES]; V]];

/// Rows of the left side of a product: `k` numbers each, which begin `stride` numbers after those of the row before, so that windows of
/// a longer row may overlap.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows<'a> {
    values: &'a [f32],
    stride: usize,
    k: usize,
    count: usize,
}

impl<'a> Rows<'a> {
    /// All rows of a matrix `[w, k]`.
    pub(crate) fn of(values: &'a [f32], k: usize) -> Self {
        Self { values, stride: k, k, count: values.len() / k.max(1) }
    }

    /// `count` windows of `k` neighbouring numbers, `stride` numbers apart.
    ///
    /// # Panics
    /// When there are fewer numbers.
    pub(crate) fn windows(values: &'a [f32], stride: usize, k: usize, count: usize) -> Self {
        assert!(count == 0 || (count - 1) * stride + k <= values.len(), "windows end before their numbers do");
        Self { values, stride, k, count }
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }
}

/// Some panels `[k, 64]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Panels<'a> {
    values: &'a [f32],
    k: usize,
}

impl<'a> Panels<'a> {
    /// Those of a matrix with `k` rows.
    pub(crate) fn new(values: &'a [f32], k: usize) -> Self {
        Self { values, k }
    }

    pub(crate) fn count(&self) -> usize {
        self.values.len() / (self.k * COLUMNS).max(1)
    }

    /// Whether these rows can be multiplied with them.
    pub(crate) fn fit(&self, rows: &Rows<'_>) -> bool {
        self.k > 0 && rows.k == self.k && self.values.len().is_multiple_of(self.k * COLUMNS)
    }

    /// One of them.
    pub(crate) fn one(&self, index: usize) -> Self {
        Self { values: &self.values[index * self.k * COLUMNS..][..self.k * COLUMNS], k: self.k }
    }
}

/// Groups of at most [`GROUP`] rows, whose heights differ by one at most: a single row left over would take as long as three.
pub(crate) fn groups(count: usize) -> impl Iterator<Item = Range<usize>> {
    let parts = count.div_ceil(GROUP);
    (0..parts).map(move |part| part * count / parts..(part + 1) * count / parts)
}

/// The blocks of an inner dimension of `k`; one below two blocks is cut in half.
fn blocks(k: usize) -> impl Iterator<Item = Range<usize>> {
    let block = if k > BLOCK && k < 2 * BLOCK { k.div_ceil(2) } else { BLOCK };
    (0..k).step_by(block).map(move |first| first..(first + block).min(k))
}

/// Adds the product of `M` rows with as many rows of a part of a panel to the sums of its columns.
///
/// Loops over indices and arrays of the loops' own length: with iterators, or bounds checks left, the compiler keeps the sums in memory,
/// and the product takes ten times as long.
#[inline(always)]
fn add_block<const FUSED: bool, const M: usize, const V: usize>(
    z: &mut Tile,
    part: usize,
    a: [&[f32]; M],
    b: &Lines<V>,
) {
    let a = a.map(|row| &row[..b.len()]);
    let mut sums = [[[0.0_f32; LANES]; V]; M];
    for q in 0..b.len() {
        let line = b[q];
        for m in 0..M {
            let left = a[m][q];
            for v in 0..V {
                for lane in 0..LANES {
                    sums[m][v][lane] = fma::<FUSED>(left, line[v][lane], sums[m][v][lane]);
                }
            }
        }
    }
    for m in 0..M {
        for v in 0..V {
            for lane in 0..LANES {
                z[m][part * V + v][lane] += sums[m][v][lane];
            }
        }
    }
}

/// Adds the product of columns `range` of a group of rows with the same rows of a panel to the sums.
#[inline(always)]
fn add_group<const FUSED: bool, const V: usize>(
    z: &mut Tile,
    a: &Rows<'_>,
    rows: Range<usize>,
    range: Range<usize>,
    panel: &Lines<V>,
) {
    let parts = VECTORS / V;
    for (part, b) in panel[range.start * parts..range.end * parts].chunks_exact(range.len()).enumerate() {
        macro_rules! add {
            ($m:literal) => {{
                let row = |m: usize| &a.values[(rows.start + m) * a.stride..][range.clone()];
                add_block::<FUSED, $m, V>(z, part, std::array::from_fn(row), b)
            }};
        }
        match rows.len() {
            1 => add!(1),
            2 => add!(2),
            3 => add!(3),
            4 => add!(4),
            5 => add!(5),
            _ => add!(6),
        }
    }
}

/// The panels of a matrix with `k` rows.
#[inline(always)]
fn panels_of<const V: usize>(weights: &[f32], k: usize) -> impl Iterator<Item = &Lines<V>> {
    let (vectors, _) = weights.as_chunks::<LANES>();
    let (lines, _) = vectors.as_chunks::<V>();
    lines.chunks_exact(k * VECTORS / V)
}

/// Adds the product of a group of rows with one panel to the sums.
#[inline(always)]
pub(crate) fn add_product<const FUSED: bool, const V: usize>(
    z: &mut Tile,
    a: &Rows<'_>,
    rows: Range<usize>,
    panel: &Panels<'_>,
) {
    for panel in panels_of::<V>(panel.values, a.k) {
        for block in blocks(a.k) {
            add_group::<FUSED, V>(z, a, rows.clone(), block, panel);
        }
    }
}

/// `c = bias + a b`: `[w, k] x [k, n] -> [w, n]`, with `b` as panels and one bias `[n]` for all rows, if any.
#[inline(always)]
fn multiply_rows<const FUSED: bool, const V: usize>(
    a: &Rows<'_>,
    b: &[f32],
    bias: Option<&[f32]>,
    c: &mut [f32],
    n: usize,
) {
    let mut z = [[[0.0; LANES]; VECTORS]; GROUP];
    for (panel, first) in panels_of::<V>(b, a.k).zip((0..n).step_by(COLUMNS)) {
        let width = COLUMNS.min(n - first);
        let mut done = 0;
        while done < a.k {
            let near = || blocks(a.k).skip_while(|block| block.start < done).take(BLOCKS_IN_CACHE);
            for rows in groups(a.count) {
                for (z, row) in z.iter_mut().zip(rows.clone()) {
                    let z = z.as_flattened_mut();
                    match bias {
                        _ if done > 0 => z[..width].copy_from_slice(&c[row * n + first..][..width]),
                        Some(bias) => z[..width].copy_from_slice(&bias[first..][..width]),
                        None => z.fill(0.0),
                    }
                }
                for block in near() {
                    add_group::<FUSED, V>(&mut z, a, rows.clone(), block, panel);
                }
                for (z, row) in z.iter().zip(rows) {
                    c[row * n + first..][..width].copy_from_slice(&z.as_flattened()[..width]);
                }
            }
            done = near().last().map_or(a.k, |block| block.end);
        }
    }
}

/// Asks for memory that is read or written soon: cells of neighbouring rows are far apart, so the processor does not expect them.
#[inline(always)]
pub(crate) fn prefetch(number: &f32) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a valid address, which is not even read.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(std::ptr::from_ref(number).cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = number;
}

/// `bias` and the largest product of each word's windows, for every column: the first `n` numbers of every `stride` of `out`.
#[inline(always)]
fn highest_rows<const FUSED: bool, const V: usize>(
    words: &[Rows<'_>],
    b: &[f32],
    bias: &[f32],
    out: &mut [f32],
    stride: usize,
) {
    let Some(k) = words.first().map(|windows| windows.k) else { return };
    let mut z = [[[0.0; LANES]; VECTORS]; GROUP];
    for (panel, first) in panels_of::<V>(b, k).zip((0..bias.len()).step_by(COLUMNS)) {
        let bias = &bias[first..(first + COLUMNS).min(bias.len())];
        for (windows, out) in words.iter().zip(out.chunks_mut(stride)) {
            let mut highest = [f32::NEG_INFINITY; COLUMNS];
            for rows in groups(windows.count) {
                z[..rows.len()].as_flattened_mut().fill([0.0; LANES]);
                for block in blocks(k) {
                    add_group::<FUSED, V>(&mut z, windows, rows.clone(), block, panel);
                }
                for z in &z[..rows.len()] {
                    highest.iter_mut().zip(z.as_flattened()).for_each(|(highest, z)| *highest = larger(*highest, *z));
                }
            }
            // Rounding is monotone: the largest sum is the sum of the largest product.
            let sums = highest.iter().zip(bias).map(|(highest, bias)| highest + bias);
            out[first..].iter_mut().zip(sums).for_each(|(out, sum)| *out = sum);
        }
    }
}

dispatch!(
    multiply_any,
    multiply_avx2,
    multiply_avx512,
    multiply_rows,
    (a: &Rows<'_>, b: &[f32], bias: Option<&[f32]>, c: &mut [f32], n: usize),
    vectors 1, 4
);
dispatch!(
    highest_any,
    highest_avx2,
    highest_avx512,
    highest_rows,
    (words: &[Rows<'_>], b: &[f32], bias: &[f32], out: &mut [f32], stride: usize),
    vectors 1, 4
);

/// `c = bias + a b`: `[w, k] x [k, n] -> [w, n]`, with one bias `[n]` for all rows, if any.
pub(crate) fn multiply(a: &Rows<'_>, b: &Panels<'_>, bias: Option<&[f32]>, c: &mut [f32], n: usize) {
    multiply_any(a, b.values, bias, c, n);
}

/// For each word the largest product of its windows with every column, plus a bias `[n]`: the first `n` numbers of every `stride` of
/// `out`. `b` is panels ([`cut`]).
///
/// # Panics
/// When the lengths do not belong together.
pub(crate) fn highest(words: &[Rows<'_>], b: &[f32], bias: &[f32], out: &mut [f32], stride: usize) {
    let k = words.first().map_or(0, |windows| windows.k);
    let panels = b.len() == k * bias.len().next_multiple_of(COLUMNS) && words.iter().all(|windows| windows.k == k);
    let rows = bias.len() <= stride && (words.len().max(1) - 1) * stride + bias.len() <= out.len();
    assert!(words.is_empty() || (panels && rows), "shapes of a convolution with panels");
    highest_any(words, b, bias, out, stride);
}

/// Vectors of columns that products of this processor read at once: panels have them in this order.
fn vectors() -> i64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("fma") {
        return 4;
    }
    1
}

/// Cuts a matrix `[k, n]`, or several `[m, k, n]`, into panels `[.., N, k, 64]`, which have their numbers in the order in which products
/// read them.
///
/// # Errors
/// [`DeviceError`] when libtorch fails.
pub(crate) fn cut(weights: &Tensor) -> Result<Tensor, DeviceError> {
    cut_for(weights, vectors())
}

fn cut_for(weights: &Tensor, vectors: i64) -> Result<Tensor, DeviceError> {
    let mut shape = weights.size();
    if let [.., k, n] = shape.as_mut_slice() {
        (*k, *n) = ((*n as usize).div_ceil(COLUMNS) as i64, *k);
    }
    shape.push(COLUMNS as i64);
    let panels = Tensor::f_empty(&shape, FLOAT_ON_HOST)?;
    match weights.dim() {
        2 => fill(&panels, &weights.f_unsqueeze(1)?, COLUMNS as i64, vectors)?,
        _ => {
            for (panels, weights) in panels.f_unbind(0)?.iter().zip(weights.f_unbind(0)?) {
                fill(panels, &weights.f_unsqueeze(1)?, COLUMNS as i64, vectors)?;
            }
        }
    }
    Ok(panels)
}

/// Cuts the weights of gates, `[k, 4D]` in the order `i, j, f, o` of the file, into panels `[N, k, 64]` of [`CELLS`] cells, which are `out`.
///
/// # Errors
/// [`DeviceError`] when libtorch fails.
pub(crate) fn cut_gates(weights: &Tensor, out: &Tensor) -> Result<(), DeviceError> {
    let (k, n) = weights.size2()?;
    fill(out, &weights.f_view([k, 4, n / 4])?, CELLS as i64, vectors())
}

/// Copies `groups` of columns, `[k, groups, n]`, to panels that have `width` columns of each group.
fn fill(panels: &Tensor, groups: &Tensor, width: i64, vectors: i64) -> Result<(), DeviceError> {
    let (k, count, n) = groups.size3()?;
    let whole = n / width;
    let columns = groups.f_narrow(2, 0, whole * width)?.f_view([k, count, whole, width])?;
    fill_whole(&panels.f_narrow(0, 0, whole)?, &columns.f_permute([0, 2, 1, 3])?, vectors)?;
    if whole * width < n {
        let last = Tensor::f_zeros([k, 1, count, width], (groups.kind(), Device::Cpu))?;
        let rest = n - whole * width;
        last.f_select(1, 0)?.f_narrow(2, 0, rest)?.f_copy_(&groups.f_narrow(2, whole * width, rest)?)?;
        fill_whole(&panels.f_narrow(0, whole, 1)?, &last, vectors)?;
    }
    Ok(())
}

/// Copies `[k, N, ..]`, with 64 columns in the last dimensions, to panels `[N, k, 64]`.
fn fill_whole(panels: &Tensor, columns: &Tensor, vectors: i64) -> Result<(), DeviceError> {
    let (k, panel_count) = (columns.size()[0], columns.size()[1]);
    let columns = columns.f_view([k, panel_count, VECTORS as i64 / vectors, vectors, LANES as i64])?;
    for block in blocks(k as usize) {
        let (first, len) = (block.start as i64, block.len() as i64);
        let part = columns.f_narrow(0, first, len)?.f_permute([1, 2, 0, 3, 4])?; // [N, parts, len, vectors, 16]
        panels.f_narrow(1, first, len)?.f_view(part.size().as_slice())?.f_copy_(&part)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tensors::samples::{matrix, numbers};

    fn panels(values: &[f32], k: usize, vectors: i64) -> Vec<f32> {
        Vec::try_from(cut_for(&matrix(values, k), vectors).unwrap().view(-1)).unwrap()
    }

    /// A product as the documentation of this module says, one number after the other.
    fn plain(a: &[f32], b: &[f32], k: usize, n: usize, start: f32, [row, column]: [usize; 2]) -> f32 {
        let ends: &[usize] = match k {
            203 => &[102, 203],
            400 => &[192, 384, 400],
            1100 => &[192, 384, 576, 768, 960, 1100],
            _ => &[k],
        };
        let (mut first, mut total) = (0, start);
        for &end in ends {
            total += (first..end).fold(0.0, |sum, q| a[row * k + q].mul_add(b[q * n + column], sum));
            first = end;
        }
        total
    }

    #[test]
    fn blocks_of_an_inner_dimension() {
        let ends = |k| blocks(k).map(|block| block.end).collect::<Vec<_>>();
        assert_eq!(ends(112), [112]);
        assert_eq!(ends(192), [192]);
        assert_eq!(ends(256), [128, 256]);
        assert_eq!(ends(400), [192, 384, 400]);
        assert_eq!(ends(512), [192, 384, 512]);
        assert_eq!(ends(576), [192, 384, 576]);
    }

    #[test]
    fn groups_of_rows_have_about_the_same_height() {
        let heights = |count| groups(count).map(|rows| rows.len()).collect::<Vec<_>>();
        assert_eq!(heights(0), Vec::<usize>::new());
        assert_eq!(heights(5), [5]);
        assert_eq!(heights(7), [3, 4]);
        assert_eq!(heights(6), [6]);
        assert_eq!(heights(16), [5, 5, 6]);
        assert_eq!(heights(31), [5, 5, 5, 5, 5, 6]);
    }

    /// Expected: the sums of `plain` to the bit; sizes that leave rests of groups, panels, blocks and what fits the cache.
    #[test]
    fn products_have_the_same_bits_at_every_height_and_in_every_layout() {
        for (m, k, n) in [(1, 1, 1), (2, 5, 3), (7, 203, 129), (13, 400, 64), (6, 1100, 200), (40, 9, 70)] {
            let (a, b, bias) = (numbers(m * k, 0.37), numbers(k * n, 0.73), numbers(n, 0.11));
            for bias in [None, Some(bias.as_slice())] {
                let start = |column: usize| bias.map_or(0.0, |bias| bias[column]);
                let expected: Vec<f32> =
                    (0..m * n).map(|i| plain(&a, &b, k, n, start(i % n), [i / n, i % n])).collect();
                let (mut wide, mut few) = (vec![0.0; m * n], vec![0.0; m * n]);
                multiply_rows::<true, 4>(&Rows::of(&a, k), &panels(&b, k, 4), bias, &mut wide, n);
                multiply_rows::<true, 1>(&Rows::of(&a, k), &panels(&b, k, 1), bias, &mut few, n);
                assert_eq!(wide, expected, "{m} {k} {n}");
                assert_eq!(few, expected, "{m} {k} {n}");
                let b = panels(&b, k, vectors());
                for height in 1..=m {
                    let mut found = vec![0.0; height * n];
                    multiply(&Rows::of(&a[..height * k], k), &Panels::new(&b, k), bias, &mut found, n);
                    let expected = &expected[..height * n];
                    match cfg!(target_arch = "aarch64") || is_fused() {
                        true => assert_eq!(found, expected, "{height} of {m} {k} {n}"),
                        false => assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-4)),
                    }
                }
            }
        }
    }

    /// Whether this processor has fused multiply-add.
    fn is_fused() -> bool {
        #[cfg(target_arch = "x86_64")]
        return is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Expected: products of windows that are written out, and their maximum.
    #[test]
    fn the_highest_product_of_windows() {
        let (n, stride) = (70, 75);
        for (c, width) in [(3, 2), (29, 7)] {
            let k = width * c;
            let (b, bias) = (numbers(k * n, 0.73), numbers(n, 0.11));
            let words: Vec<Vec<f32>> = (0..9).map(|w| numbers((w + width) * c, 0.2 + w as f32)).collect();
            let positions = |word: &[f32]| word.len() / c - width + 1;
            let windows: Vec<Rows<'_>> = words.iter().map(|word| Rows::windows(word, c, k, positions(word))).collect();
            let mut out = vec![7.0; words.len() * stride];
            highest(&windows, &panels(&b, k, vectors()), &bias, &mut out, stride);
            for (word, out) in words.iter().zip(out.chunks(stride)) {
                for column in 0..n {
                    let product = |at: usize| plain(&word[at * c..][..k], &b, k, n, 0.0, [0, column]);
                    let largest = (0..positions(word)).map(product).fold(f32::NEG_INFINITY, f32::max);
                    assert!((out[column] - (largest + bias[column])).abs() < 1e-4);
                }
                assert_eq!(out[n..], [7.0; 5], "numbers of other filters stay");
            }
        }
    }

    #[test]
    fn several_matrices_are_cut_as_each_alone() {
        let (one, other) = (matrix(&numbers(5 * 130, 0.37), 5), matrix(&numbers(5 * 130, 0.73), 5));
        for vectors in [1, 4] {
            let both = cut_for(&Tensor::stack(&[&one, &other], 0), vectors).unwrap();
            let each = [cut_for(&one, vectors).unwrap(), cut_for(&other, vectors).unwrap()];
            assert_eq!(both, Tensor::stack(&each, 0));
        }
    }

    #[test]
    fn a_nan_in_a_window_stays() {
        let (b, bias) = (numbers(2 * 64, 0.73), [0.0; 64]);
        let word = [1.0, f32::NAN, 2.0, 3.0, 4.0];
        let mut out = [0.0; 64];
        highest(&[Rows::windows(&word, 1, 2, 4)], &panels(&b, 2, vectors()), &bias, &mut out, 64);
        assert!(out.iter().all(|number| number.is_nan()));
    }

    /// Processors without fused multiply-add round products, but a row still has the bits that it has alone.
    #[test]
    fn rows_are_independent_without_fused_multiply_add() {
        let (m, k, n) = (8, 400, 70);
        let (a, b) = (numbers(m * k, 0.37), panels(&numbers(k * n, 0.73), k, 1));
        let mut together = vec![0.0; m * n];
        multiply_rows::<false, 1>(&Rows::of(&a, k), &b, None, &mut together, n);
        for (a, expected) in a.chunks(k).zip(together.chunks(n)) {
            let mut alone = vec![0.0; n];
            multiply_rows::<false, 1>(&Rows::of(a, k), &b, None, &mut alone, n);
            assert_eq!(alone, expected);
        }
    }
}
