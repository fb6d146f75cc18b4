//! The pointwise parts of the biLM as single passes over memory, for float32 on CPU.
//!
//! libtorch would need ten passes for the gates of one LSTM step. Every element goes through the same
//! sequence of operations wherever it lies, so a row's bits never depend on its place in a batch
//! (libtorch's own loops treat the last few elements of a range differently).
//!
//! `exp` is range reduction and a degree-6 polynomial (Cephes `expf`), relative error below 2e-7;
//! `tanh` follows Cephes `tanhf`: an odd polynomial near zero, `1 - 2 / (exp(2x) + 1)` elsewhere.

#[inline(always)]
fn fma<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
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

#[inline(always)]
fn relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

#[inline(always)]
fn cell_row<const FUSED: bool>(gates: &[f32], cell: &mut [f32], out: &mut [f32], clip: f32) {
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

#[inline(always)]
fn tanh_row<const FUSED: bool>(x: &mut [f32]) {
    for v in x {
        *v = tanh::<FUSED>(*v);
    }
}

/// Compiles a row kernel for several instruction sets and selects one at run time.
macro_rules! dispatch {
    ($name:ident, $avx2:ident, $avx512:ident, $row:ident, ($($arg:ident: $type:ty),*)) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn $avx2($($arg: $type),*) {
            $row::<true>($($arg),*);
        }

        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx2,fma")]
        fn $avx512($($arg: $type),*) {
            $row::<true>($($arg),*);
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
            $row::<{ cfg!(target_arch = "aarch64") }>($($arg),*);
        }
    };
}

dispatch!(cell_any, cell_avx2, cell_avx512, cell_row, (gates: &[f32], cell: &mut [f32], out: &mut [f32], clip: f32));
dispatch!(highway_any, highway_avx2, highway_avx512, highway_row, (product: &[f32], x: &mut [f32]));
dispatch!(tanh_any, tanh_avx2, tanh_avx512, tanh_row, (x: &mut [f32]));

/// One LSTM step for every row: `gates` `[W, 4D]` in file order i, j, f, o (the +1 of the forget gate is in
/// its bias already), `cell` `[W, D]` is updated and clipped (never where `clip` is infinite), `out` `[W, D]` becomes
/// `sigmoid(o) * tanh(c)`.
pub(crate) fn lstm_cell(gates: &[f32], cell: &mut [f32], out: &mut [f32], d: usize, clip: f32) {
    let rows = gates.chunks_exact(4 * d).zip(cell.chunks_exact_mut(d)).zip(out.chunks_exact_mut(d));
    for ((gates, cell), out) in rows {
        cell_any(gates, cell, out, clip);
    }
}

/// One highway layer for every row: `product` `[U, 2F]` holds the transformed part and the gate before their
/// non-linearities, `x` `[U, F]` becomes `g * relu(transformed) + (1 - g) * x`.
pub(crate) fn highway(product: &[f32], x: &mut [f32], f: usize) {
    for (product, x) in product.chunks_exact(2 * f).zip(x.chunks_exact_mut(f)) {
        highway_any(product, x);
    }
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

    #[test]
    fn a_value_does_not_depend_on_its_place_in_a_row() {
        let d = 37; // no multiple of any vector width
        let gates: Vec<f32> = (0..4 * d).map(|i| ((i * 7919) % 1000) as f32 / 200.0 - 2.5).collect();
        let (mut cell, mut out) = (vec![0.3; d], vec![0.0; d]);
        lstm_cell(&gates, &mut cell, &mut out, d, 3.0);
        for k in 0..d {
            let one = [gates[k], gates[d + k], gates[2 * d + k], gates[3 * d + k]];
            let (mut c, mut o) = ([0.3], [0.0]);
            lstm_cell(&one, &mut c, &mut o, 1, 3.0);
            assert_eq!((c[0].to_bits(), o[0].to_bits()), (cell[k].to_bits(), out[k].to_bits()));
        }
    }
}
