//! Steps after which a run should not simply go on.

use serde::{Deserialize, Serialize};

use super::checkpoint::exact;

/// Steps that are looked at before a loss is called a jump: the first ones fall quickly.
const FIRST: u64 = 20;
/// Weight of the last step, from the fiftieth step on; before, all steps count the same.
const SMOOTHING: f64 = 0.02;
/// A loss jumps if it is above the mean of the last ones by this much, in nats, ...
const JUMP: f64 = 2.0;
/// ... and by so many standard deviations more.
const DEVIATIONS: f64 = 6.0;

/// What is wrong with a step.
#[derive(Debug)]
pub(super) struct Spike {
    /// The step, and what is wrong.
    pub(super) reason: String,
    /// The loss is a number, so that the run could go on.
    pub(super) is_finite: bool,
}

/// Mean and variance of the losses of the last steps, exponentially weighted.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(super) struct Recent {
    steps: u64,
    #[serde(with = "exact")]
    mean: f64,
    #[serde(with = "exact")]
    variance: f64,
}

impl Recent {
    /// The spike that a loss is, compared with those before it.
    pub(super) fn spike(&self, step: u64, loss: f64) -> Option<Spike> {
        let limit = self.mean + JUMP + DEVIATIONS * self.variance.sqrt();
        (self.steps >= FIRST && loss > limit).then(|| Spike {
            reason: format!("step {step}: the loss jumped to {loss:.3}, from {:.3} in the steps before it", self.mean),
            is_finite: true,
        })
    }

    pub(super) fn add(&mut self, loss: f64) {
        self.steps += 1;
        let weight = SMOOTHING.max(1.0 / self.steps as f64);
        let difference = loss - self.mean;
        self.mean += weight * difference;
        self.variance = (1.0 - weight) * (self.variance + weight * difference * difference);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: 1 and 3 in turn have the mean 2 and the variance 1, so that a jump is above 2 + 2 + 6 x 1.
    #[test]
    fn a_jump_is_far_above_what_is_usual() {
        let mut recent = Recent::default();
        for step in 0..20 {
            assert!(recent.spike(step, 1000.0).is_none(), "{step}");
            recent.add(if step % 2 == 0 { 1.0 } else { 3.0 });
        }
        assert!((recent.mean - 2.0).abs() < 1e-12 && (recent.variance - 1.0).abs() < 1e-12, "{recent:?}");
        assert!(recent.spike(20, 9.999).is_none());
        let spike = recent.spike(20, 10.001).expect("a jump");
        assert_eq!(spike.reason, "step 20: the loss jumped to 10.001, from 2.000 in the steps before it");
    }

    /// A constant loss has no variance: 2 nats are left. The mean follows a loss that falls.
    #[test]
    fn what_is_usual_follows_the_run() {
        let mut recent = Recent::default();
        (0..100).for_each(|_| recent.add(9.0));
        assert!(recent.spike(100, 10.99).is_none() && recent.spike(100, 11.01).is_some());
        (0..1000).for_each(|_| recent.add(4.0));
        assert!(recent.spike(1100, 6.5).is_some());
    }
}
