//! The pointwise parts of the biLM as single passes over memory, on CPU.
//!
//! libtorch would need ten passes for the gates of one LSTM step. Every element goes through the same
//! sequence of operations wherever it lies, so a row's bits never depend on its place in a batch
//! (libtorch's own loops treat the last few elements of a range differently).
//!
//! `exp` is range reduction and a degree-6 polynomial (Cephes `expf`), relative error below 2e-7;
//! `tanh` follows Cephes `tanhf`: an odd polynomial near zero, `1 - 2 / (exp(2x) + 1)` elsewhere.

#[inline(always)]
pub(super) fn fma<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    // `mul_add` without the hardware instruction is a library call, so the portable version rounds twice.
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

#[inline(always)]
fn exp<const FUSED: bool>(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding and subtracting it rounds to an integer
    let x = x.clamp(-87.0, 88.0);
    let shifted = fma::<FUSED>(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    // ln 2 in two parts, so that n * ln 2 keeps its low bits.
    let r = fma::<FUSED>(n, -0.693_359_4, x);
    let r = fma::<FUSED>(n, 2.121_944_4e-4, r);
    let mut p = 1.987_569_1e-4;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = fma::<FUSED>(p, r, coefficient);
    }
    let y = fma::<FUSED>(p, r * r, r) + 1.0;
    // The low bits of the shifted number are the integer n: moved up they are the exponent of 2^n.
    y * f32::from_bits(shifted.to_bits().wrapping_add(127) << 23)
}

#[inline(always)]
fn sigmoid<const FUSED: bool>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<FUSED>(-x))
}

#[inline(always)]
fn tanh<const FUSED: bool>(x: f32) -> f32 {
    let a = x.abs();
    let far = 1.0 - 2.0 / (exp::<FUSED>(2.0 * a) + 1.0);
    let z = x * x;
    let mut p = -5.704_988_7e-3;
    for coefficient in [2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328_4e-1] {
        p = fma::<FUSED>(p, z, coefficient);
    }
    let near = fma::<FUSED>(p * z, x, x);
    if a < 0.625 { near } else { far.copysign(x) }
}

/// `clamp` without its check that the bounds are in order; NaN stays NaN.
#[inline(always)]
fn bounded(x: f32, bound: f32) -> f32 {
    if x > bound {
        bound
    } else if x < -bound {
        -bound
    } else {
        x
    }
}

/// The larger number. A NaN is never below another one, and stays.
#[inline(always)]
pub(super) fn larger(a: f32, b: f32) -> f32 {
    if a < b || b.is_nan() { b } else { a }
}

#[inline(always)]
fn relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

#[inline(always)]
pub(super) fn cell_row<const FUSED: bool>(gates: &[f32], cell: &mut [f32], out: &mut [f32], clip: f32) {
    let d = cell.len();
    let (i, rest) = gates.split_at(d);
    let (j, rest) = rest.split_at(d);
    let (f, rest) = rest.split_at(d);
    // Slices of the loop's own length: a bounds check or a panic left in the loop keeps it from being vectorised, and
    // then it takes ten times as long.
    let (o, out) = (&rest[..d], &mut out[..d]);
    for k in 0..d {
        let c = sigmoid::<FUSED>(f[k]) * cell[k] + sigmoid::<FUSED>(i[k]) * tanh::<FUSED>(j[k]);
        let c = bounded(c, clip);
        cell[k] = c;
        out[k] = sigmoid::<FUSED>(o[k]) * tanh::<FUSED>(c);
    }
}

/// As [`cell_row`], and keeps what the backward pass needs: `gates` become `i, j, f, o` after their non-linearities.
#[inline(always)]
fn kept_row<const FUSED: bool>(gates: &mut [f32], before: &[f32], cell: &mut [f32], out: &mut [f32], clip: f32) {
    let d = cell.len();
    let (i, rest) = gates.split_at_mut(d);
    let (j, rest) = rest.split_at_mut(d);
    let (f, rest) = rest.split_at_mut(d);
    let (o, before, out) = (&mut rest[..d], &before[..d], &mut out[..d]);
    for k in 0..d {
        i[k] = sigmoid::<FUSED>(i[k]);
        j[k] = tanh::<FUSED>(j[k]);
        f[k] = sigmoid::<FUSED>(f[k]);
        o[k] = sigmoid::<FUSED>(o[k]);
        let c = bounded(f[k] * before[k] + i[k] * j[k], clip);
        cell[k] = c;
        out[k] = o[k] * tanh::<FUSED>(c);
    }
}

/// Derivatives of a step. `gates` are those of [`kept_row`] and become derivatives before the non-linearities; `dm` are
/// those of the output; `dc` are those of the cell after the step, and become those of the cell before it.
#[inline(always)]
fn backward_row<const FUSED: bool>(
    gates: &mut [f32],
    before: &[f32],
    cell: &[f32],
    dm: &[f32],
    dc: &mut [f32],
    clip: f32,
) {
    let d = dc.len();
    let (i, rest) = gates.split_at_mut(d);
    let (j, rest) = rest.split_at_mut(d);
    let (f, rest) = rest.split_at_mut(d);
    let (o, before, cell, dm) = (&mut rest[..d], &before[..d], &cell[..d], &dm[..d]);
    for k in 0..d {
        let t = tanh::<FUSED>(cell[k]);
        let sum = f[k] * before[k] + i[k] * j[k]; // as in the forward pass, to the bit
        let inside = if sum.abs() > clip { 0.0 } else { 1.0 };
        let c = (dc[k] + dm[k] * o[k] * (1.0 - t * t)) * inside;
        dc[k] = c * f[k];
        let (ik, jk) = (i[k], j[k]);
        i[k] = c * jk * ik * (1.0 - ik);
        j[k] = c * ik * (1.0 - jk * jk);
        f[k] = c * before[k] * f[k] * (1.0 - f[k]);
        o[k] = dm[k] * t * o[k] * (1.0 - o[k]);
    }
}

#[inline(always)]
fn clip_row<const FUSED: bool>(values: &[f32], gradients: &mut [f32], clip: f32) {
    let values = &values[..gradients.len()];
    for k in 0..values.len() {
        gradients[k] = if values[k].abs() > clip { 0.0 } else { gradients[k] };
    }
}

/// Numbers that are added in parallel.
const LANES: usize = 16;

/// `logits` become their exponentials relative to the largest logit, `largest`. Adds them up.
#[inline(always)]
fn exponentials_row<const FUSED: bool>(logits: &mut [f32], largest: f32, sum: &mut f32) {
    let (whole, rest) = logits.as_chunks_mut::<LANES>();
    let mut sums = [0.0_f32; LANES];
    for block in whole {
        for k in 0..LANES {
            block[k] = exp::<FUSED>(block[k] - largest);
            sums[k] += block[k];
        }
    }
    for (k, logit) in rest.iter_mut().enumerate() {
        *logit = exp::<FUSED>(*logit - largest);
        sums[k] += *logit;
    }
    *sum = sums.iter().sum();
}

/// The largest number; NaN if there is one.
#[inline(always)]
fn largest_row<const FUSED: bool>(values: &[f32], largest: &mut f32) {
    let (whole, rest) = values.as_chunks::<LANES>();
    let mut all = [f32::NEG_INFINITY; LANES];
    for block in whole {
        for k in 0..LANES {
            all[k] = larger(all[k], block[k]);
        }
    }
    *largest = rest.iter().chain(&all).fold(f32::NEG_INFINITY, |a, &b| larger(a, b));
}

#[inline(always)]
fn scale_row<const FUSED: bool>(values: &mut [f32], factor: f32) {
    for value in values {
        *value *= factor;
    }
}

#[inline(always)]
fn highway_row<const FUSED: bool>(product: &[f32], x: &mut [f32]) {
    let f = x.len();
    let (transform, rest) = product.split_at(f);
    let carry = &rest[..f];
    for k in 0..f {
        let g = sigmoid::<FUSED>(carry[k]);
        x[k] = g * relu(transform[k]) + (1.0 - g) * x[k];
    }
}

/// The bits of a magnitude, which are in the order of magnitudes; those of NaN are above all.
#[inline(always)]
fn magnitude(x: f32) -> u32 {
    x.to_bits() & 0x7fff_ffff
}

/// Rounds a row to codes -127..=127 times a scale. A row with NaN or infinity has a scale that is not finite.
#[inline(always)]
fn quantise_row<const FUSED: bool>(x: &[f32], codes: &mut [u8], scale: &mut f32, offset: u8) {
    const ROUND: f32 = 12_582_912.0; // as in `exp`
    // A maximum of integers may be taken in any order, so the compiler does it in vectors.
    let mut largest = 0;
    for &x in x {
        largest = largest.max(magnitude(x));
    }
    let largest = f32::from_bits(largest);
    *scale = largest / 127.0;
    // A smaller row becomes zeros: the factor of one below 3.7e-37 would be infinite.
    let factor = if largest > 1e-36 { 127.0 / largest } else { 0.0 };
    let codes = &mut codes[..x.len()];
    for k in 0..x.len() {
        // The low byte of the shifted number is the integer.
        codes[k] = (fma::<FUSED>(x[k], factor, ROUND).to_bits() as u8).wrapping_add(offset);
    }
}

#[inline(always)]
fn bound_row<const FUSED: bool>(values: &mut [f32], bound: f32) {
    for value in values {
        *value = bounded(*value, bound);
    }
}

#[inline(always)]
fn tanh_row<const FUSED: bool>(x: &mut [f32]) {
    for v in x {
        *v = tanh::<FUSED>(*v);
    }
}

/// Compiles a row kernel for several instruction sets and selects one at run time. A kernel may take how many vectors of columns it adds up
/// at once: with few registers, and with many.
macro_rules! dispatch {
    (
        $name:ident, $avx2:ident, $avx512:ident, $row:ident, ($($arg:ident: $type:ty),*)
        $(, vectors $few:literal, $many:literal)?
    ) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn $avx2($($arg: $type),*) {
            $row::<true $(, $few)?>($($arg),*);
        }

        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx2,fma")]
        fn $avx512($($arg: $type),*) {
            $row::<true $(, $many)?>($($arg),*);
        }

        fn $name($($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("fma") {
                    // SAFETY: this CPU has the features.
                    return unsafe { $avx512($($arg),*) };
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: this CPU has the features.
                    return unsafe { $avx2($($arg),*) };
                }
            }
            $row::<{ cfg!(target_arch = "aarch64") } $(, $few)?>($($arg),*);
        }
    };
}

pub(super) use dispatch;

dispatch!(
    kept_any,
    kept_avx2,
    kept_avx512,
    kept_row,
    (gates: &mut [f32], before: &[f32], cell: &mut [f32], out: &mut [f32], clip: f32)
);
dispatch!(
    backward_any,
    backward_avx2,
    backward_avx512,
    backward_row,
    (gates: &mut [f32], before: &[f32], cell: &[f32], dm: &[f32], dc: &mut [f32], clip: f32)
);
dispatch!(
    exponentials_any,
    exponentials_avx2,
    exponentials_avx512,
    exponentials_row,
    (logits: &mut [f32], largest: f32, sum: &mut f32)
);
dispatch!(largest_any, largest_avx2, largest_avx512, largest_row, (values: &[f32], largest: &mut f32));
dispatch!(scale_any, scale_avx2, scale_avx512, scale_row, (values: &mut [f32], factor: f32));
dispatch!(clip_any, clip_avx2, clip_avx512, clip_row, (values: &[f32], gradients: &mut [f32], clip: f32));
dispatch!(highway_any, highway_avx2, highway_avx512, highway_row, (product: &[f32], x: &mut [f32]));
dispatch!(
    quantise_any,
    quantise_avx2,
    quantise_avx512,
    quantise_row,
    (x: &[f32], codes: &mut [u8], scale: &mut f32, offset: u8)
);
dispatch!(bound_any, bound_avx2, bound_avx512, bound_row, (values: &mut [f32], bound: f32));
dispatch!(tanh_any, tanh_avx2, tanh_avx512, tanh_row, (x: &mut [f32]));

/// Rounds a row to codes -127..=127, each plus `offset`, and finds their scale: a number is about its code times the scale. A row with NaN
/// or infinity has a scale that is not finite.
///
/// # Panics
/// When there are fewer codes than numbers.
pub(crate) fn quantise(x: &[f32], codes: &mut [u8], scale: &mut f32, offset: u8) {
    quantise_any(x, codes, scale, offset);
}

/// One LSTM step of every row, as training needs it. `gates` `[W, 4D]`, in the order `i, j, f, o` of the file and with the +1 of the
/// forget gate, become those after their non-linearities, as [`lstm_cell_backward`] takes them. `before` and `cell` are the cells
/// `[W, D]` before and after the step, clipped; `out` `[W, D]` becomes `sigmoid(o) * tanh(c)`.
pub(crate) fn lstm_cell_kept(
    gates: &mut [f32],
    before: &[f32],
    cell: &mut [f32],
    out: &mut [f32],
    d: usize,
    clip: f32,
) {
    let rows = gates.chunks_exact_mut(4 * d).zip(before.chunks_exact(d));
    for (((gates, before), cell), out) in rows.zip(cell.chunks_exact_mut(d)).zip(out.chunks_exact_mut(d)) {
        kept_any(gates, before, cell, out, clip);
    }
}

/// Derivatives of one LSTM step for every row, from those of its output `dm` `[W, D]` and of its cells `dc` `[W, D]`, which
/// become those of the cells before the step. `gates` `[W, 4D]` become derivatives before the non-linearities. `before`
/// and `cell` are the cells before and after the step. Cells beyond the clip pass nothing on.
pub(crate) fn lstm_cell_backward(
    gates: &mut [f32],
    before: &[f32],
    cell: &[f32],
    dm: &[f32],
    dc: &mut [f32],
    d: usize,
    clip: f32,
) {
    let rows = gates.chunks_exact_mut(4 * d).zip(before.chunks_exact(d)).zip(cell.chunks_exact(d));
    for ((((gates, before), cell), dm), dc) in rows.zip(dm.chunks_exact(d)).zip(dc.chunks_exact_mut(d)) {
        backward_any(gates, before, cell, dm, dc, clip);
    }
}

/// Sets derivatives to 0 where the value is beyond the clip.
pub(crate) fn clip_gradients(values: &[f32], gradients: &mut [f32], clip: f32) {
    clip_any(values, gradients, clip);
}

/// Logits of the classes of one row to their probabilities times `scale`, in place. `own` is the logit of another class,
/// if there is one. Returns the logarithm of the sum of all exponentials.
pub(crate) fn softmax(logits: &mut [f32], own: Option<f32>, scale: f32) -> f64 {
    let (mut largest, mut sum) = (0.0, 0.0);
    largest_any(logits, &mut largest);
    if let Some(own) = own
        && (largest < own || own.is_nan())
    {
        largest = own;
    }
    exponentials_any(logits, largest, &mut sum);
    let own = own.map_or(0.0, |own| f64::from(own - largest).exp());
    let total = f64::from(sum) + own;
    scale_any(logits, (f64::from(scale) / total) as f32);
    total.ln() + f64::from(largest)
}

/// One highway layer for every row: `product` `[U, 2F]` holds the transformed part and the gate before their
/// non-linearities, `x` `[U, F]` becomes `g * relu(transformed) + (1 - g) * x`.
pub(crate) fn highway(product: &[f32], x: &mut [f32], f: usize) {
    for (product, x) in product.chunks_exact(2 * f).zip(x.chunks_exact_mut(f)) {
        highway_any(product, x);
    }
}

/// Sets numbers beyond `-bound..=bound` to the bound, in place.
pub(crate) fn clip(values: &mut [f32], bound: f32) {
    if bound < f32::INFINITY {
        bound_any(values, bound);
    }
}

/// `max(x, 0)` in place.
pub(crate) fn relu_in_place(x: &mut [f32]) {
    x.iter_mut().for_each(|x| *x = relu(*x));
}

/// `tanh` in place.
pub(crate) fn tanh_in_place(x: &mut [f32]) {
    tanh_any(x);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worst(f: impl Fn(f32) -> f32, reference: impl Fn(f64) -> f64) -> f64 {
        (-40_000..=40_000)
            .map(|i| i as f32 * 5e-4)
            .map(|x| {
                let expected = reference(f64::from(x));
                (f64::from(f(x)) - expected).abs() / expected.abs().max(1e-30)
            })
            // Not `f64::max`, which passes over NaN.
            .fold(0.0, |worst, gap| if gap <= worst { worst } else { gap })
    }

    #[test]
    fn close_to_the_f64_functions_of_the_standard_library() {
        // Expected: f64::tanh and f64::exp of std. 4e-7 is seven half-ulps of float32.
        let logistic = |x: f64| 1.0 / (1.0 + (-x).exp());
        assert!(worst(tanh::<true>, f64::tanh) < 4e-7);
        assert!(worst(tanh::<false>, f64::tanh) < 4e-7);
        assert!(worst(sigmoid::<true>, logistic) < 4e-7);
        assert!(worst(sigmoid::<false>, logistic) < 4e-7);
    }

    /// Expected: the definition in float64, where the product of two float32 numbers is exact.
    #[test]
    fn codes_of_a_row() {
        for k in 1..=40 {
            for place in 0..k {
                let mut x: Vec<f32> = (0..k).map(|i| ((i * 7919 + place) % 1000) as f32 / 500.0 - 1.0).collect();
                x[place] = -1.5;
                let (mut codes, mut scale) = (vec![7; k + 1], 0.0);
                quantise_row::<true>(&x, &mut codes, &mut scale, 128);
                assert_eq!(scale, 1.5 / 127.0);
                let factor = f64::from(127.0_f32 / 1.5);
                for (x, code) in x.iter().zip(&codes) {
                    let expected = (f64::from(*x) * factor).round_ties_even();
                    assert_eq!(f64::from(*code) - 128.0, expected, "{x} of {k}");
                }
                assert_eq!(codes[k], 7, "codes of other rows stay");
            }
        }
        let quantised = |x: [f32; 3]| {
            let (mut codes, mut scale) = ([7; 3], 0.0);
            quantise(&x, &mut codes, &mut scale, 0);
            (codes, scale)
        };
        assert_eq!(quantised([0.0, -0.0, 0.0]), ([0; 3], 0.0));
        assert_eq!(quantised([1e-37, -1e-38, 1e-45]).0, [0; 3]);
        for number in [f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001), f32::INFINITY, f32::NEG_INFINITY] {
            assert!(!quantised([1.0, number, f32::MAX]).1.is_finite());
        }
    }

    #[test]
    fn extreme_values_saturate_and_nan_stays_nan() {
        for x in [200.0, f32::MAX, f32::INFINITY] {
            assert_eq!(tanh::<true>(x), 1.0);
            assert_eq!(tanh::<true>(-x), -1.0);
            assert_eq!(sigmoid::<true>(x), 1.0);
            assert!(sigmoid::<true>(-x) < 1e-30);
        }
        assert!(tanh::<true>(f32::NAN).is_nan());
        assert!(sigmoid::<true>(f32::NAN).is_nan());
    }

    /// Expected: the definition in float64.
    #[test]
    fn probabilities_of_a_row() {
        for n in [1, 15, 16, 17, 100] {
            let logits: Vec<f32> = (0..n).map(|i| ((i * 7919) % 1000) as f32 / 100.0 - 5.0).collect();
            for own in [None, Some(-2.0), Some(30.0)] {
                let exponentials = || logits.iter().chain(&own).map(|&l| f64::from(l).exp());
                let total: f64 = exponentials().sum();
                let mut found = logits.clone();
                let logarithm = softmax(&mut found, own, 0.5);
                assert!((logarithm - total.ln()).abs() < 1e-6, "{logarithm}, not {}", total.ln());
                for (p, e) in found.iter().zip(exponentials()) {
                    assert!((f64::from(*p) - 0.5 * e / total).abs() < 1e-6 * e / total + 1e-30);
                }
            }
        }
        let mut row = [1.0, f32::NEG_INFINITY, 1.0];
        assert!((softmax(&mut row, None, 1.0) - 1.0 - 2.0_f64.ln()).abs() < 1e-6);
        assert!((row[0] - 0.5).abs() < 1e-6 && row[1] < 1e-37);
        for nan in [[f32::NAN, 1.0], [1.0, f32::NAN]] {
            assert!(
                softmax(&mut nan.clone(), Some(2.0), 1.0).is_nan() && softmax(&mut nan.clone(), None, 1.0).is_nan()
            );
        }
        assert!(softmax(&mut [1.0], Some(f32::NAN), 1.0).is_nan());
    }

    /// Expected: central differences of the forward kernel in a sum with factors, in float32: two digits.
    #[test]
    fn derivatives_of_a_step() {
        let (d, clip) = (19, 0.5);
        let number = |i: usize| ((i * 7919) % 1000) as f32 / 400.0 - 1.2;
        let gates: Vec<f32> = (0..4 * d).map(number).collect();
        let before: Vec<f32> = (0..d).map(|k| number(k + 77)).collect();
        let factors: Vec<f32> = (0..2 * d).map(|k| number(k + 991)).collect();
        let forward = |gates: &[f32], before: &[f32]| {
            let (mut gates, mut cell, mut m) = (gates.to_vec(), vec![0.0; d], vec![0.0; d]);
            lstm_cell_kept(&mut gates, before, &mut cell, &mut m, d, clip);
            (gates, cell, m)
        };
        let sum = |gates: &[f32], before: &[f32]| -> f64 {
            let (_, cell, m) = forward(gates, before);
            m.iter().chain(&cell).zip(&factors).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
        };
        let (mut dz, cell, _) = forward(&gates, &before);
        let clipped = cell.iter().filter(|c| c.abs() == clip).count();
        assert!(clipped > 2 && clipped < d - 2, "{clipped}");
        let mut dc = factors[d..].to_vec();
        lstm_cell_backward(&mut dz, &before, &cell, &factors[..d], &mut dc, d, clip);
        let step = 1e-2_f32;
        let unclipped = |k: usize| {
            let logistic = |x: f32| 1.0 / (1.0 + (-x).exp());
            logistic(gates[2 * d + k]) * before[k] + logistic(gates[k]) * gates[d + k].tanh()
        };
        for k in 0..5 * d {
            let moved = |by: f32| {
                let (mut gates, mut before) = (gates.clone(), before.clone());
                if k < 4 * d {
                    gates[k] += by
                } else {
                    before[k - 4 * d] += by
                }
                sum(&gates, &before)
            };
            let expected = (moved(step) - moved(-step)) / f64::from(2.0 * step);
            let found = f64::from(if k < 4 * d { dz[k] } else { dc[k - 4 * d] });
            // Within the step, a cell near its clip is on both sides of it.
            let place = if k < 4 * d { k % d } else { k - 4 * d };
            assert!(
                (unclipped(place).abs() - clip).abs() < 0.03 || (found - expected).abs() < 0.02,
                "{k}: {found}, not {expected}"
            );
        }
    }

    #[test]
    fn a_value_does_not_depend_on_its_place_in_a_row() {
        let d = 37; // no multiple of any vector width
        let gates: Vec<f32> = (0..4 * d).map(|i| ((i * 7919) % 1000) as f32 / 200.0 - 2.5).collect();
        let (mut cell, mut out) = (vec![0.0; d], vec![0.0; d]);
        lstm_cell_kept(&mut gates.clone(), &vec![0.3; d], &mut cell, &mut out, d, 3.0);
        for k in 0..d {
            let mut one = [gates[k], gates[d + k], gates[2 * d + k], gates[3 * d + k]];
            let (mut c, mut o) = ([0.0_f32], [0.0_f32]);
            lstm_cell_kept(&mut one, &[0.3], &mut c, &mut o, 1, 3.0);
            assert_eq!((c[0].to_bits(), o[0].to_bits()), (cell[k].to_bits(), out[k].to_bits()));
        }
    }
}
