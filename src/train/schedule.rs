//! Learning rate by step.

use std::f64::consts::PI;

/// How the learning rate changes. Steps count from 1; during a warm-up of `W` steps the factor is `t / W`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Schedule {
    /// The factor is 1.
    #[default]
    Constant,
    /// After the warm-up, half a cosine from 1 to `final_ratio`, which is reached at step `total` and kept.
    Cosine {
        /// Steps of the warm-up.
        warm_up: u64,
        /// Steps of the run.
        total: u64,
        /// The last factor.
        final_ratio: f64,
    },
    /// After the warm-up, `sqrt(W / t)`.
    InverseSquareRoot {
        /// Steps of the warm-up; at least 1.
        warm_up: u64,
    },
}

impl Schedule {
    /// The factor of the learning rate at a step.
    pub fn factor(self, step: u64) -> f64 {
        let t = step as f64;
        match self {
            Self::Constant => 1.0,
            Self::Cosine { warm_up, .. } if step <= warm_up => t / warm_up as f64,
            Self::Cosine { warm_up, total, final_ratio } => {
                let length = total.saturating_sub(warm_up).max(1) as f64;
                let done = ((step - warm_up) as f64 / length).min(1.0);
                final_ratio + (1.0 - final_ratio) * f64::midpoint(1.0, (PI * done).cos())
            }
            Self::InverseSquareRoot { warm_up } if step <= warm_up => t / warm_up as f64,
            Self::InverseSquareRoot { warm_up } => (warm_up.max(1) as f64 / t).sqrt(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand.
    #[test]
    fn factors() {
        let rates =
            |schedule: Schedule, steps: &[u64]| -> Vec<f64> { steps.iter().map(|&t| schedule.factor(t)).collect() };
        assert_eq!(rates(Schedule::Constant, &[1, 1_000_000]), [1.0, 1.0]);
        let cosine = Schedule::Cosine { warm_up: 4, total: 12, final_ratio: 0.5 };
        let expected = [0.25, 1.0, 0.75, 0.5, 0.5];
        for (found, expected) in rates(cosine, &[1, 4, 8, 12, 99]).iter().zip(expected) {
            assert!((found - expected).abs() < 1e-15, "{found}, not {expected}");
        }
        let root = Schedule::InverseSquareRoot { warm_up: 4 };
        assert_eq!(rates(root, &[1, 2, 4, 16, 100]), [0.25, 0.5, 1.0, 0.5, 0.2]);
        assert_eq!(rates(Schedule::InverseSquareRoot { warm_up: 0 }, &[4]), [0.5]);
        assert_eq!(Schedule::Cosine { warm_up: 0, total: 0, final_ratio: 0.1 }.factor(1), 0.1);
    }
}
