//! The named tensors that a model is made of, in the layout of the file.

use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor};

use super::{DeviceError, DeviceName, Precision, tensors};
use crate::{
    options::{ModelOptions, TensorSpec},
    weights::{self, Weights},
};

/// Where the tensors of a model come from: names and layout are those of the bilm-tf HDF5 file.
///
/// The parts of the biLM derive what they compute with (stacked, split, padded, with the forget bias added) from these.
/// When they are leaves of a graph, gradients flow back to them.
pub(crate) trait NamedTensors {
    /// # Errors
    /// [`DeviceError::MissingTensor`], [`DeviceError::TensorShape`], or when libtorch fails.
    fn tensor(&self, name: &str) -> Result<Tensor, DeviceError>;

    /// Calls `user` with a tensor, which may be a view of weights that live only as long as the call.
    ///
    /// # Errors
    /// As [`NamedTensors::tensor`], and as `user`.
    ///
    /// # Safety
    /// `user` copies what it needs: it keeps neither the tensor nor a view of it.
    unsafe fn read(
        &self,
        name: &str,
        user: &mut dyn FnMut(&Tensor) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        user(&self.tensor(name)?)
    }

    /// The tensors of both directions, each cut along its first dimension, and the parts of both stacked: `[2, size, ..]`. Weights are
    /// copied once.
    ///
    /// # Errors
    /// As [`NamedTensors::tensor`].
    fn stacked(&self, names: [&str; 2], sizes: &[i64]) -> Result<Vec<Tensor>, DeviceError> {
        stack_parts([self.tensor(names[0])?, self.tensor(names[1])?], sizes)
    }
}

fn stack_parts(directions: [Tensor; 2], sizes: &[i64]) -> Result<Vec<Tensor>, DeviceError> {
    let [forward, backward] = directions;
    let (forward, backward) = (forward.f_split_with_sizes(sizes, 0)?, backward.f_split_with_sizes(sizes, 0)?);
    forward.into_iter().zip(backward).map(|(forward, backward)| Ok(Tensor::f_stack(&[forward, backward], 0)?)).collect()
}

/// The tensors of a file on the host. Each is copied when it is asked for, or lent for copying a part, so that a model is never there
/// twice.
pub(crate) struct FileTensors<'w> {
    plan: Vec<TensorSpec>,
    weights: &'w Weights,
}

impl<'w> FileTensors<'w> {
    pub(crate) fn new(options: &ModelOptions, weights: &'w Weights) -> Self {
        Self { plan: options.weight_plan(), weights }
    }
}

impl FileTensors<'_> {
    /// Shape and values of a tensor, which are those of the plan.
    fn find(&self, name: &str) -> Result<(Vec<i64>, &[f32]), DeviceError> {
        let missing = || DeviceError::MissingTensor { name: name.to_owned() };
        let spec = self.plan.iter().find(|spec| spec.name == name).ok_or_else(missing)?;
        let weights::Tensor { shape, data } = self.weights.get(name).ok_or_else(missing)?;
        if *shape != spec.shape || data.len() != spec.len() {
            return Err(DeviceError::TensorShape {
                name: name.to_owned(),
                expected: spec.shape.clone(),
                found: shape.clone(),
                values: data.len(),
            });
        }
        Ok((shape.iter().map(|&dim| dim as i64).collect(), data))
    }

    /// A tensor on the memory of the weights.
    ///
    /// # Safety
    /// The tensor must be gone before the weights are, and nothing may write to it.
    unsafe fn view(&self, name: &str) -> Result<Tensor, DeviceError> {
        let (shape, data) = self.find(name)?;
        let strides: Vec<i64> = (1..=shape.len()).map(|d| shape[d..].iter().product()).collect();
        // SAFETY: the shape is that of the data (checked in `find`).
        Ok(unsafe { Tensor::f_from_blob(data.as_ptr().cast(), &shape, &strides, Kind::Float, Device::Cpu)? })
    }
}

impl NamedTensors for FileTensors<'_> {
    fn tensor(&self, name: &str) -> Result<Tensor, DeviceError> {
        let (shape, data) = self.find(name)?;
        tensors::upload(data, &shape, Kind::Float, Device::Cpu)
    }

    fn stacked(&self, names: [&str; 2], sizes: &[i64]) -> Result<Vec<Tensor>, DeviceError> {
        // SAFETY: the views are gone at the end of this function: stacking copies.
        let views = unsafe { [self.view(names[0])?, self.view(names[1])?] };
        stack_parts(views, sizes)
    }

    unsafe fn read(
        &self,
        name: &str,
        user: &mut dyn FnMut(&Tensor) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        // SAFETY: the view is gone at the end of this function, and the caller promises that no other is left.
        user(&unsafe { self.view(name)? })
    }
}

/// The parameters of a model as leaf tensors on a device: what an optimiser changes, a checkpoint holds, and
/// [`BiLm::from_parameters`](super::BiLm::from_parameters) derives a model from.
///
/// Names and shapes are those of [`ModelOptions::weight_plan`]: `char_embed`, `CNN/W_cnn_0`,
/// `RNN_0/RNN/MultiRNNCell/Cell0/LSTMCell/W_0` and so on. Neither the zero row of the character table nor the +1 of the
/// forget gate is a parameter.
#[derive(Debug)]
pub struct Parameters {
    tensors: BTreeMap<String, Tensor>,
    device: DeviceName,
}

impl Parameters {
    /// Copies weights to a device. Training in bfloat16 keeps its parameters in [`Precision::F32`].
    ///
    /// # Errors
    /// [`DeviceError::Missing`] when there is no such device, [`DeviceError::MissingTensor`] and
    /// [`DeviceError::TensorShape`] when `weights` do not match the options, [`DeviceError::OutOfMemory`] when the device
    /// has no room.
    pub fn new(
        options: &ModelOptions,
        weights: &Weights,
        device: DeviceName,
        precision: Precision,
    ) -> Result<Self, DeviceError> {
        let file = FileTensors::new(options, weights);
        Self::of_tensors(options, device, precision, |spec| file.tensor(&spec.name))
    }

    /// The parameters of a model from tensors by name; each is copied to the device.
    pub(crate) fn of_tensors(
        options: &ModelOptions,
        device: DeviceName,
        precision: Precision,
        mut tensor: impl FnMut(&TensorSpec) -> Result<Tensor, DeviceError>,
    ) -> Result<Self, DeviceError> {
        device.set_up()?;
        let mut place = |spec: TensorSpec| -> Result<(String, Tensor), DeviceError> {
            let tensor = tensor(&spec)?.f_to_device(device.torch())?.f_to_kind(precision.kind())?;
            Ok((spec.name, tensor))
        };
        let tensors = options.weight_plan().into_iter().map(&mut place).collect::<Result<_, _>>()?;
        Ok(Self { tensors, device })
    }

    /// Makes every parameter a leaf that collects gradients.
    ///
    /// # Errors
    /// [`DeviceError::Torch`] when libtorch fails.
    pub fn require_gradients(self) -> Result<Self, DeviceError> {
        for tensor in self.tensors.values() {
            let _ = tensor.f_set_requires_grad(true)?;
        }
        Ok(self)
    }

    /// Another handle on the same tensors, for another thread.
    pub fn share(&self) -> Self {
        let share = |(name, tensor): (&String, &Tensor)| (name.clone(), tensor.shallow_clone());
        Self { tensors: self.tensors.iter().map(share).collect(), device: self.device }
    }

    /// The device of the parameters.
    pub fn device(&self) -> DeviceName {
        self.device
    }

    /// The parameter of that name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// Names and parameters in byte order of the names: the same order in every process.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// The parameters on the host in float32, as the weights files hold them.
    ///
    /// # Errors
    /// [`DeviceError`] when libtorch fails.
    pub fn to_weights(&self) -> Result<Weights, DeviceError> {
        let mut weights = Weights::default();
        for (name, tensor) in &self.tensors {
            let shape = tensor.size().iter().map(|&dim| dim as usize).collect();
            weights.insert(name.clone(), weights::Tensor { shape, data: tensors::download(tensor)? });
        }
        Ok(weights)
    }
}

impl NamedTensors for Parameters {
    fn tensor(&self, name: &str) -> Result<Tensor, DeviceError> {
        let tensor = self.tensors.get(name).map(Tensor::shallow_clone);
        tensor.ok_or_else(|| DeviceError::MissingTensor { name: name.to_owned() })
    }
}
