//! Overlapping windows over a sentence that is too long for the biLM.

use std::ops::Range;

/// A part of a sentence that the biLM reads as a sentence of its own. Both ranges count tokens of the sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    /// The tokens that are read.
    pub range: Range<usize>,
    /// The tokens whose vectors are kept; part of `range`.
    pub keep: Range<usize>,
}

/// Windows over `n` tokens, each of at most `max` tokens (a `max` of 0 counts as 1).
///
/// Up to `max` tokens need one window. A longer sentence is covered by the minimum number of windows of exactly `max`
/// tokens that overlap by at least a quarter, spread evenly. The `keep` ranges tile `0..n` in order. Each token is kept
/// from the window in which the smaller of its left and right context is largest; of two equal ones, from the earlier
/// one. So a token away from the ends of the sentence has at least about `max / 8` tokens on either side.
pub fn windows(n: usize, max: usize) -> Vec<Window> {
    let max = max.max(1);
    if n <= max {
        return vec![Window { range: 0..n, keep: 0..n }];
    }
    let starts = starts(n, max);
    let mut kept = 0;
    let mut all = Vec::with_capacity(starts.len());
    for (i, &start) in starts.iter().enumerate() {
        let until = starts.get(i + 1).map_or(n, |&next| handover(start + max, next));
        all.push(Window { range: start..start + max, keep: kept..until });
        kept = until;
    }
    all
}

/// First tokens of the windows, for `n > max`.
fn starts(n: usize, max: usize) -> Vec<usize> {
    let step = max - max / 4;
    let steps = (n - max).div_ceil(step);
    // The first `rest` steps are one token longer. Quotient and remainder are separate so that no product overflows.
    let (whole, rest) = ((n - max) / steps, (n - max) % steps);
    (0..=steps).map(|i| i * whole + i.min(rest)).collect()
}

/// The first token that has more context in the window starting at `next` than in the one ending at `end`.
///
/// In their overlap the earlier window has less context on the right, `end - 1 - t`, and the later one on the left,
/// `t - next`; the later one wins when `t - next > end - 1 - t`.
fn handover(end: usize, next: usize) -> usize {
    (end - 1 + next) / 2 + 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_short_sentence_is_one_window() {
        for n in 0..=5 {
            assert_eq!(windows(n, 5), [Window { range: 0..n, keep: 0..n }]);
        }
    }

    #[test]
    fn windows_of_one_token() {
        let expected: Vec<Window> = (0..4).map(|i| Window { range: i..i + 1, keep: i..i + 1 }).collect();
        assert_eq!(windows(4, 1), expected);
        assert_eq!(windows(4, 0), expected);
    }

    /// By hand: tokens 4 to 7 are in both windows. Token 6 has 1 token after it in the left one and 2 before it in the
    /// right one.
    #[test]
    fn two_windows() {
        assert_eq!(windows(12, 8), [Window { range: 0..8, keep: 0..6 }, Window { range: 4..12, keep: 6..12 }]);
    }

    /// Distance of token `t` from the nearer edge of a window; `None` if it is not in the window.
    fn context(window: &Window, t: usize) -> Option<usize> {
        window.range.contains(&t).then(|| (t - window.range.start).min(window.range.end - 1 - t))
    }

    proptest! {
        #[test]
        fn windows_fit_tile_and_give_the_best_context(n in 0usize..3000, max in 1usize..600) {
            let all = windows(n, max);
            let mut next = 0;
            for window in &all {
                prop_assert!(window.range.len() <= max);
                prop_assert!(window.range.start <= window.keep.start && window.keep.end <= window.range.end);
                prop_assert_eq!(window.keep.start, next);
                prop_assert!(n == 0 || !window.keep.is_empty());
                next = window.keep.end;
                for t in window.keep.clone() {
                    let best = all.iter().filter_map(|w| context(w, t)).max();
                    prop_assert_eq!(context(window, t), best);
                }
            }
            prop_assert_eq!(next, n);
        }

        #[test]
        fn few_tokens_are_read_twice(n in 2000usize..20_000, max in 8usize..600) {
            let read: usize = windows(n, max).iter().map(|w| w.range.len()).sum();
            prop_assert!(read <= n * 4 / 3 + 2 * max);
        }
    }
}
