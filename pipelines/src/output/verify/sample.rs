//! Which rows are recomputed.

use std::collections::BTreeSet;

/// `sample` distinct rows of `rows` in ascending order, drawn by a linear congruential generator from `seed`.
pub(super) fn pick(rows: u64, sample: usize, seed: u64) -> Vec<u64> {
    if rows <= sample as u64 {
        return (0..rows).collect();
    }
    let mut picked = BTreeSet::new();
    let mut state = seed;
    while picked.len() < sample {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        picked.insert((state >> 16) % rows);
    }
    picked.into_iter().collect()
}

/// The elements of `rows` in `first..first + count`, relative to `first`.
pub(super) fn within(rows: &[u64], first: u64, count: u64) -> Vec<u64> {
    rows.iter().filter(|row| (first..first + count).contains(*row)).map(|row| row - first).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_rows() {
        assert_eq!(pick(3, 5, 0), [0, 1, 2]);
        let picked = pick(1000, 999, 7);
        assert_eq!(picked.len(), 999);
        assert!(picked.is_sorted() && picked.iter().all(|row| *row < 1000));
        assert_eq!(within(&picked, 1000, 10), [0_u64; 0]);
        assert_eq!(within(&[3, 5, 9], 4, 5), [1]);
    }
}
