//! The softmax over the vocabulary, which makes the biLM a language model.

use tch::{Kind, Tensor};

use super::{DeviceError, DeviceName, tensors};
use crate::weights;

/// Rows of one product, on a CPU and on a GPU. Fewer states are padded with zeros, so that the bits of a row do not
/// depend on the number of states.
const ROWS: (usize, usize) = (64, 1024);
/// Columns of one product, in words of the vocabulary: 8 MiB of logits on a CPU.
const COLUMNS: i64 = 32_768;

/// `W [V, P]` and `b [V]`, shared by both directions, in float32.
#[derive(Debug)]
pub struct Softmax {
    weight: Tensor,
    bias: Tensor,
    rows: usize,
    width: usize,
}

impl Softmax {
    /// Puts `weight [V, P]` and `bias [V]` on a device.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the device has no room, [`DeviceError::Internal`] when the shapes are others,
    /// [`DeviceError::Torch`] when libtorch fails.
    pub fn new(weight: &weights::Tensor, bias: &weights::Tensor, device: DeviceName) -> Result<Self, DeviceError> {
        device.set_up()?;
        let _no_gradients = tch::no_grad_guard();
        let torch = device.torch();
        let &[words, width] = weight.shape.as_slice() else {
            return Err(DeviceError::internal(format!("softmax weights of shape {:?}", weight.shape)));
        };
        // Narrow products have other kernels, where the bits of a row depend on its neighbours.
        let missing = (tensors::MIN_COLUMNS - words as i64).max(0);
        let weight = tensors::upload(&weight.data, &[words as i64, width as i64], Kind::Float, torch)?;
        // Padding by nothing would copy the weights.
        let weight = if missing > 0 { weight.f_constant_pad_nd([0, 0, 0, missing])? } else { weight };
        let bias = tensors::upload(&bias.data, &[words as i64], Kind::Float, torch)?;
        // The words of the padding have probability 0.
        let nothing = Tensor::f_full([missing], f64::NEG_INFINITY, (Kind::Float, torch))?;
        let bias = Tensor::f_cat(&[bias, nothing], 0)?;
        let rows = if device == DeviceName::Cpu { ROWS.0 } else { ROWS.1 };
        Ok(Self { weight, bias, rows, width })
    }

    /// Another handle on the same tensors, for another thread.
    pub fn share(&self) -> Self {
        Self { weight: self.weight.shallow_clone(), bias: self.bias.shallow_clone(), ..*self }
    }

    /// Natural logarithms of the probabilities of `targets [N]` after `states [N, P]`, one after the other.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has no room or libtorch fails.
    ///
    /// # Panics
    /// When there are not `P` numbers for each target.
    pub fn log_probabilities(&self, states: &[f32], targets: &[i64]) -> Result<Vec<f32>, DeviceError> {
        assert_eq!(states.len(), self.width * targets.len(), "a state for every target");
        super::device::set_up_cpu();
        let _no_gradients = tch::no_grad_guard();
        let mut all = Vec::with_capacity(targets.len());
        for (states, targets) in states.chunks(self.rows * self.width).zip(targets.chunks(self.rows)) {
            let mut padded = states.to_vec();
            padded.resize(self.rows * self.width, 0.0);
            let mut ids = targets.to_vec();
            ids.resize(self.rows, 0);
            all.extend_from_slice(&self.block(&padded, &ids)?[..targets.len()]);
        }
        Ok(all)
    }

    /// The same for exactly `rows` states.
    fn block(&self, states: &[f32], targets: &[i64]) -> Result<Vec<f32>, DeviceError> {
        let device = self.weight.device();
        let states = tensors::upload(states, &[self.rows as i64, self.width as i64], Kind::Float, device)?; // [R, P]
        let targets = tensors::index(targets, device)?; // [R]
        let words = self.weight.size()[0];
        let mut chosen = Tensor::f_zeros([self.rows as i64], (Kind::Float, device))?; // [R]
        let mut sums = Vec::new(); // of [R]
        for first in (0..words).step_by(COLUMNS as usize) {
            let n = COLUMNS.min(words - first);
            let logits = self.logits(&states, first, n)?; // [R, n]
            sums.push(logits.f_logsumexp(&[1][..], false)?);
            let here = targets.f_sub_scalar(first)?;
            let inside = here.f_ge(0)?.f_logical_and(&here.f_lt(n)?)?;
            let value = logits.f_gather(1, &here.f_clamp(0, n - 1)?.f_unsqueeze(1)?, false)?.f_squeeze_dim(1)?;
            chosen = value.f_where_self(&inside, &chosen)?;
        }
        let total = Tensor::f_stack(&sums, 1)?.f_logsumexp(&[1][..], false)?; // [R]
        tensors::download(&chosen.f_sub(&total)?)
    }

    /// `states · W[first..first + n]^T + b[first..first + n]`
    fn logits(&self, states: &Tensor, first: i64, n: i64) -> Result<Tensor, DeviceError> {
        // The last product may be narrow: it includes columns of the previous one, which are removed again.
        let extra = (tensors::MIN_COLUMNS - n).max(0).min(first);
        let weight = self.weight.f_narrow(0, first - extra, n + extra)?;
        let bias = self.bias.f_narrow(0, first - extra, n + extra)?;
        let logits = bias.f_addmm(states, &weight.f_tr()?)?;
        if extra == 0 { Ok(logits) } else { Ok(logits.f_narrow(1, extra, n)?.f_contiguous()?) }
    }
}
