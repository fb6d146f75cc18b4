//! The softmax over the vocabulary, which makes the biLM a language model.

use tch::{Device, Kind, Tensor};

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
    /// `V`; the tensors may have more rows.
    words: i64,
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
        let &[words @ (1..), width @ (1..)] = weight.shape.as_slice() else {
            return Err(DeviceError::internal(format!("softmax weights of shape {:?}", weight.shape)));
        };
        let words = words as i64;
        let mut weight = tensors::upload(&weight.data, &[words, width as i64], Kind::Float, torch)?;
        let mut bias = tensors::upload(&bias.data, &[words], Kind::Float, torch)?;
        // Narrow products have other kernels, where the bits of a row depend on its neighbours.
        let missing = tensors::MIN_COLUMNS - words;
        if missing > 0 {
            weight = weight.f_constant_pad_nd([0, 0, 0, missing])?;
            // The words of the padding have probability 0.
            let nothing = vec![f32::NEG_INFINITY; missing as usize];
            bias = Tensor::f_cat(&[bias, tensors::upload(&nothing, &[missing], Kind::Float, torch)?], 0)?;
        }
        let rows = if device == DeviceName::Cpu { ROWS.0 } else { ROWS.1 };
        Ok(Self { weight, bias, words, rows, width })
    }

    /// Another handle on the same tensors, for another thread.
    pub fn share(&self) -> Self {
        Self { weight: self.weight.shallow_clone(), bias: self.bias.shallow_clone(), ..*self }
    }

    /// Natural logarithms of the probabilities of `targets [N]` after `states [N, P]`, one after the other.
    ///
    /// # Errors
    /// [`DeviceError::InvalidBatch`] when a target is no word, [`DeviceError`] when the device has no room or libtorch
    /// fails.
    ///
    /// # Panics
    /// When there are not `P` numbers for each target.
    pub fn log_probabilities(&self, states: &[f32], targets: &[i64]) -> Result<Vec<f32>, DeviceError> {
        assert_eq!(states.len(), self.width * targets.len(), "a state for every target");
        if !targets.iter().all(|target| (0..self.words).contains(target)) {
            return Err(DeviceError::InvalidBatch { reason: "a target is not in the vocabulary" });
        }
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
        let words = self.weight.size()[0];
        let places = Places::new(targets, words, device)?;
        let mut chosen = Tensor::f_zeros([self.rows as i64], (Kind::Float, device))?; // [R]
        let mut sums = Vec::new(); // of [R]
        for (k, first) in (0..words).step_by(COLUMNS as usize).enumerate() {
            let n = COLUMNS.min(words - first);
            let logits = self.logits(&states, first, n)?; // [R, n]
            sums.push(logits.f_logsumexp(&[1][..], false)?);
            let (column, inside) = places.in_product(k as i64)?;
            let value = logits.f_gather(1, &column.f_unsqueeze(1)?, false)?.f_squeeze_dim(1)?;
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

/// Where targets are in each of the products over [`COLUMNS`] words. Computed on the host: an operation of tch that takes
/// a number panics where it should return an error (`scalar_ops.rs`).
struct Places {
    columns: Tensor, // [products, R], any column of a product without the target
    inside: Tensor,  // [products, R]
}

impl Places {
    fn new(targets: &[i64], words: i64, device: Device) -> Result<Self, DeviceError> {
        let firsts = || (0..words).step_by(COLUMNS as usize);
        let of_all = |first: i64| targets.iter().map(move |target| target - first);
        let last = |first: i64| COLUMNS.min(words - first) - 1;
        let columns: Vec<i64> =
            firsts().flat_map(|first| of_all(first).map(move |at| at.clamp(0, last(first)))).collect();
        let inside: Vec<bool> =
            firsts().flat_map(|first| of_all(first).map(move |at| (0..=last(first)).contains(&at))).collect();
        let shape = [-1, targets.len() as i64];
        Ok(Self {
            columns: tensors::index(&columns, device)?.f_view(shape)?,
            inside: Tensor::f_from_slice(&inside)?.f_to_device(device)?.f_view(shape)?,
        })
    }

    /// Of product `k`: `[R]`, `[R]`.
    fn in_product(&self, k: i64) -> Result<(Tensor, Tensor), DeviceError> {
        Ok((self.columns.f_select(0, k)?, self.inside.f_select(0, k)?))
    }
}
