//! Measures between two vectors.
//!
//! Sums are in double precision, in eight partial sums, so that the loops are vectorised.

/// Number of partial sums.
const LANES: usize = 8;

/// Adds `term` over the pairs of numbers of two vectors of the same length, for `N` terms at once.
#[inline(always)]
fn sums<const N: usize>(a: &[f32], b: &[f32], term: impl Fn(f64, f64) -> [f64; N]) -> [f64; N] {
    let mut partial = [[0.0; LANES]; N];
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..LANES {
            let terms = term(f64::from(a[lane]), f64::from(b[lane]));
            for n in 0..N {
                partial[n][lane] += terms[n];
            }
        }
    }
    for (lane, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        let terms = term(f64::from(*a), f64::from(*b));
        for n in 0..N {
            partial[n][lane] += terms[n];
        }
    }
    partial.map(|lanes| lanes.iter().sum())
}

/// The dot product `a · b`. Numbers of the longer vector without a partner are ignored.
#[must_use]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let [dot] = sums(a, b, |a, b| [a * b]);
    dot as f32
}

/// The Euclidean distance `|a - b|`. Numbers of the longer vector without a partner are ignored.
#[must_use]
pub fn l2(a: &[f32], b: &[f32]) -> f32 {
    let [squares] = sums(a, b, |a, b| [(a - b) * (a - b)]);
    squares.sqrt() as f32
}

/// The cosine similarity `a · b / (|a| |b|)`, from -1 to 1; `None` if a vector is zero. Numbers of the longer vector
/// without a partner are ignored.
#[must_use]
pub fn cosine(a: &[f32], b: &[f32]) -> Option<f32> {
    let [dot, aa, bb] = sums(a, b, |a, b| [a * b, a * a, b * b]);
    // Rounding may give a value outside of the range.
    (aa != 0.0 && bb != 0.0).then(|| (dot / (aa.sqrt() * bb.sqrt())).clamp(-1.0, 1.0) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: (3, 4) and (4, 3) have length 5, dot product 24 and distance sqrt(2).
    #[test]
    fn measures() {
        let (a, b, zero) = ([3.0, 4.0], [4.0, 3.0], [0.0, 0.0]);
        assert_eq!(dot(&a, &b), 24.0);
        assert_eq!(cosine(&a, &b), Some(0.96));
        assert_eq!(l2(&a, &b), 2.0_f32.sqrt());
        assert_eq!(cosine(&a, &zero), None);
        assert_eq!(l2(&a, &zero), 5.0);
        assert_eq!(cosine(&a, &a), Some(1.0));
    }

    /// Every number counts, whatever the length: sums of squares of integers, which are exact.
    #[test]
    fn any_length() {
        for n in 0..40_usize {
            let a: Vec<f32> = (1..=n).map(|i| i as f32).collect();
            let zero = vec![0.0; n];
            let squares = (n * (n + 1) * (2 * n + 1) / 6) as f32;
            assert_eq!((dot(&a, &a), l2(&a, &zero)), (squares, f64::from(squares).sqrt() as f32), "{n}");
            assert_eq!(cosine(&a, &a), (n > 0).then_some(1.0), "{n}");
        }
    }
}
