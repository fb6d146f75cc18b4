//! Optimisers on plain tensors. Their state is named tensors, so that a run can be resumed exactly.

use tch::Tensor;

use crate::model::DeviceError;

/// How gradients change parameters. Gradients are clipped before.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Optimizer {
    /// `a += g^2; w -= rate * g / sqrt(a)`, without epsilon or decay, as TensorFlow's.
    Adagrad {
        /// The accumulator `a` before the first step.
        initial_accumulator: f64,
    },
    /// Adam with decoupled weight decay of tensors of two axes or more (Loshchilov and Hutter 2019).
    ///
    /// With a sampled softmax, rows without a gradient keep their moments and their values.
    AdamW {
        /// Decay of the mean of gradients.
        beta1: f64,
        /// Decay of the mean of squared gradients.
        beta2: f64,
        /// Added to the root of the latter.
        epsilon: f64,
        /// Share of a weight that a step with rate 1 removes.
        weight_decay: f64,
    },
}

impl Optimizer {
    /// Adagrad of the published models.
    pub const BILM: Self = Self::Adagrad { initial_accumulator: 1.0 };
    /// AdamW with the usual constants.
    pub const ADAMW: Self = Self::AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.01 };

    /// Names of the tensors of state that each parameter has.
    pub(super) fn slots(self) -> &'static [&'static str] {
        match self {
            Self::Adagrad { .. } => &["accumulator"],
            Self::AdamW { .. } => &["mean", "square"],
        }
    }

    /// The state of a parameter before the first step.
    pub(super) fn initial(self, parameter: &Tensor) -> Result<Vec<Tensor>, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        let constant = |value: f64| -> Result<Tensor, DeviceError> {
            let mut slot = parameter.f_zeros_like()?;
            let _ = slot.f_fill_(value)?;
            Ok(slot)
        };
        match self {
            Self::Adagrad { initial_accumulator } => Ok(vec![constant(initial_accumulator)?]),
            Self::AdamW { .. } => Ok(vec![constant(0.0)?, constant(0.0)?]),
        }
    }
}

/// One step of the optimiser.
#[derive(Debug, Clone, Copy)]
pub(super) struct Update {
    pub(super) optimizer: Optimizer,
    /// Learning rate of this step.
    pub(super) rate: f64,
    /// Factor of all gradients.
    pub(super) clip: f64,
    /// Number of the step, from 1.
    pub(super) step: u64,
}

impl Update {
    /// Changes a parameter and its state in place; `gradient` is used up.
    pub(super) fn dense(self, mut weight: Tensor, slots: &[Tensor], mut gradient: Tensor) -> Result<(), DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        if self.clip != 1.0 {
            let _ = gradient.f_mul_scalar_(self.clip)?;
        }
        match (self.optimizer, slots) {
            (Optimizer::Adagrad { .. }, [sum]) => {
                let _ = sum.shallow_clone().f_addcmul_(&gradient, &gradient)?;
                let _ = gradient.f_div_(&sum.f_sqrt()?)?;
                let _ = gradient.f_mul_scalar_(self.rate)?;
            }
            (Optimizer::AdamW { beta1, beta2, epsilon, weight_decay }, [mean, square]) => {
                if weight.dim() > 1 {
                    let _ = weight.f_mul_scalar_(1.0 - self.rate * weight_decay)?;
                }
                let (mut mean, mut square) = (mean.shallow_clone(), square.shallow_clone());
                let _ = square.f_mul_scalar_(beta2)?;
                let _ = square.f_add_(&(gradient.f_square()?.f_mul_scalar_(1.0 - beta2)?))?;
                let _ = gradient.f_mul_scalar_(1.0 - beta1)?;
                let _ = mean.f_mul_scalar_(beta1)?;
                let _ = mean.f_add_(&gradient)?;
                let unbiased = |beta: f64| 1.0 - beta.powi(i32::try_from(self.step).unwrap_or(i32::MAX));
                let mut divisor = square.f_sqrt()?;
                let _ = divisor.f_mul_scalar_(1.0 / unbiased(beta2).sqrt())?;
                let _ = divisor.f_add_scalar_(epsilon)?;
                gradient = mean.f_div(&divisor)?;
                let _ = gradient.f_mul_scalar_(self.rate / unbiased(beta1))?;
            }
            _ => return Err(DeviceError::internal("the state of another optimiser")),
        }
        let _ = weight.f_sub_(&gradient)?;
        Ok(())
    }

    /// The same for some rows of a parameter: `gradient [K, ..]` for the distinct `rows [K]`.
    pub(super) fn rows(
        self,
        weight: &Tensor,
        slots: &[Tensor],
        rows: &Tensor,
        gradient: Tensor,
    ) -> Result<(), DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        let all: Vec<&Tensor> = std::iter::once(weight).chain(slots).collect();
        let mut parts = Vec::with_capacity(all.len());
        for tensor in &all {
            parts.push(tensor.f_index_select(0, rows)?);
        }
        self.dense(parts[0].shallow_clone(), &parts[1..], gradient)?;
        for (tensor, part) in all.iter().zip(&parts) {
            let _ = tensor.shallow_clone().f_index_copy_(0, rows, part)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;

    fn numbers(t: &Tensor) -> Vec<f64> {
        Vec::try_from(t.reshape([-1])).unwrap()
    }

    fn close(found: &Tensor, expected: &[f64]) {
        let found = numbers(found);
        assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-14), "{found:?}, not {expected:?}");
    }

    /// By hand: gradients 3 and 4 times the clip 0.5, so 1.5 and 2 on an accumulator of 1.
    #[test]
    fn adagrad() {
        let update = Update { optimizer: Optimizer::BILM, rate: 0.2, clip: 0.5, step: 1 };
        let (weight, gradient) = (Tensor::from_slice(&[1.0, -1.0]), Tensor::from_slice(&[3.0, 4.0]));
        let slots = Optimizer::BILM.initial(&weight).unwrap();
        update.dense(weight.shallow_clone(), &slots, gradient).unwrap();
        close(&slots[0], &[3.25, 5.0]);
        close(&weight, &[1.0 - 0.3 / 3.25_f64.sqrt(), -1.0 - 0.4 / 5.0_f64.sqrt()]);
    }

    /// By hand: after one step the unbiased moments are the gradient and its square, so that a step has length `rate`.
    #[test]
    fn adamw() {
        let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, epsilon: 0.0, weight_decay: 0.5 };
        let update = Update { optimizer, rate: 0.1, clip: 1.0, step: 1 };
        for (shape, kept) in [(vec![2], 1.0), (vec![1, 2], 0.95)] {
            let weight = Tensor::from_slice(&[1.0, -1.0]).reshape(&shape);
            let gradient = Tensor::from_slice(&[3.0, -4.0]).reshape(&shape);
            let slots = optimizer.initial(&weight).unwrap();
            update.dense(weight.shallow_clone(), &slots, gradient).unwrap();
            close(&slots[0], &[0.3, -0.4]);
            close(&slots[1], &[0.09, 0.16]);
            close(&weight, &[kept - 0.1, 0.1 - kept]);
        }
    }

    /// Rows that are given end as in a dense update with zeros elsewhere, and the others do not change at all.
    #[test]
    fn rows_are_updated_alone() {
        for optimizer in [Optimizer::BILM, Optimizer::ADAMW] {
            let start = Tensor::arange(8, (Kind::Double, tch::Device::Cpu)).reshape([4, 2]);
            let gradient = Tensor::from_slice(&[1.0, 2.0, 3.0, 4.0]).reshape([2, 2]);
            let update = Update { optimizer, rate: 0.1, clip: 0.7, step: 3 };
            let (sparse, dense) = (start.copy(), start.copy());
            let (kept, moved) = (optimizer.initial(&sparse).unwrap(), optimizer.initial(&dense).unwrap());
            let rows = Tensor::from_slice(&[3_i64, 1]);
            update.rows(&sparse, &kept, &rows, gradient.copy()).unwrap();
            let all = Tensor::zeros([4, 2], (Kind::Double, tch::Device::Cpu)).index_copy(0, &rows, &gradient);
            update.dense(dense.shallow_clone(), &moved, all).unwrap();
            let of = |t: &Tensor, row: i64| numbers(&t.get(row));
            for row in [1, 3] {
                assert_eq!(of(&sparse, row), of(&dense, row));
                assert_eq!(of(&kept[0], row), of(&moved[0], row));
            }
            for row in [0, 2] {
                assert_eq!(of(&sparse, row), of(&start, row));
            }
        }
    }
}
