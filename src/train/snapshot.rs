//! The whole state of a run: what a checkpoint keeps.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::{Group, TrainError};
use crate::model::DeviceError;

/// Numbers of a tensor on the host.
#[derive(Debug, Clone, PartialEq)]
pub enum Values {
    /// float32
    F32(Vec<f32>),
    /// float64
    F64(Vec<f64>),
}

/// A tensor on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct Saved {
    /// Dimensions, the slowest first.
    pub shape: Vec<usize>,
    /// Values in row-major order.
    pub values: Values,
}

impl Saved {
    /// Copies a tensor to the host. Numbers of bfloat16 become float32, which holds them exactly.
    pub(super) fn of(tensor: &Tensor) -> Result<Self, DeviceError> {
        let _no_gradients = tch::no_grad_guard();
        let shape = tensor.size().iter().map(|&dim| dim as usize).collect();
        let host = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?;
        let n = host.numel();
        let values = match host.kind() {
            Kind::Double => {
                let mut values = vec![0.0; n];
                host.f_copy_data(&mut values, n)?;
                Values::F64(values)
            }
            _ => {
                let mut values = vec![0.0; n];
                host.f_to_kind(Kind::Float)?.f_copy_data(&mut values, n)?;
                Values::F32(values)
            }
        };
        Ok(Self { shape, values })
    }

    /// The tensor on the host, in float32 or float64.
    pub(super) fn tensor(&self) -> Result<Tensor, DeviceError> {
        let shape: Vec<i64> = self.shape.iter().map(|&dim| dim as i64).collect();
        let values = match &self.values {
            Values::F32(values) => Tensor::f_from_slice(values)?,
            Values::F64(values) => Tensor::f_from_slice(values)?,
        };
        Ok(values.f_view(shape.as_slice())?)
    }
}

/// Plain numbers of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Steps that were made.
    pub step: u64,
    /// Predictions of one direction in all of them.
    pub tokens: u64,
}

/// The whole state of a run between two steps. With the same recipe, and the windows that follow, a run that resumes from
/// it has the bits of one that was not interrupted.
///
/// | name | tensor |
/// |---|---|
/// | `weights/NAME` | a parameter, by its name in the weights file, or `softmax/W`, `softmax/b` |
/// | `optimizer/SLOT/NAME` | what the optimiser keeps for it: `accumulator`, or `mean` and `square` |
/// | `lstm/LAYER/h`, `lstm/LAYER/c` | states `[2, rows, P]`, `[2, rows, D]` after the last window; direction 0 is forward |
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Snapshot {
    /// By name.
    pub tensors: BTreeMap<String, Saved>,
    /// Plain numbers.
    pub counters: Counters,
}

impl Snapshot {
    /// Whether all numbers are finite. A run cannot go on from others.
    pub fn is_finite(&self) -> bool {
        self.tensors.values().all(|saved| match &saved.values {
            Values::F32(values) => values.iter().all(|value| value.is_finite()),
            Values::F64(values) => values.iter().all(|value| value.is_finite()),
        })
    }

    /// That of process 0 in all processes, which give `None`.
    ///
    /// # Errors
    /// [`TrainError::Collective`]; [`TrainError::Snapshot`] when process 0 gives `None` or libtorch fails.
    pub fn shared(own: Option<Self>, group: &Group) -> Result<Self, TrainError> {
        if group.is_single() {
            return own.ok_or_else(|| TrainError::Snapshot("there is none".to_owned()));
        }
        let wrong = |e: &dyn std::fmt::Display| TrainError::Snapshot(format!("cannot be sent: {e}"));
        let header: Option<Header> = own.as_ref().map(|snapshot| {
            let width = |values: &Values| if matches!(values, Values::F64(_)) { 8 } else { 4 };
            let of = |(name, saved): (&String, &Saved)| (name.clone(), saved.shape.clone(), width(&saved.values));
            (snapshot.counters, snapshot.tensors.iter().map(of).collect())
        });
        let text = serde_json::to_vec(&header).map_err(|e| wrong(&e))?;
        let header: Option<Header> = serde_json::from_slice(&group.broadcast_bytes(text)?).map_err(|e| wrong(&e))?;
        let (counters, plan) = header.ok_or_else(|| TrainError::Snapshot("there is none".to_owned()))?;
        let mut sent = own.map(|snapshot| snapshot.tensors).unwrap_or_default();
        let mut tensors = BTreeMap::new();
        for (name, shape, width) in plan {
            let saved = match sent.remove(&name) {
                Some(saved) => {
                    group.broadcast(&mut saved.tensor()?)?;
                    saved
                }
                None => received(group, &shape, if width == 8 { Kind::Double } else { Kind::Float })?,
            };
            tensors.insert(name, saved);
        }
        Ok(Self { tensors, counters })
    }

    /// A tensor, which has `shape` if it is given.
    pub(super) fn find(&self, name: &str, shape: Option<&[usize]>) -> Result<&Saved, TrainError> {
        let saved = self.tensors.get(name).ok_or_else(|| TrainError::Snapshot(format!("`{name}` is missing")))?;
        match shape {
            Some(shape) if shape != saved.shape => {
                Err(TrainError::Snapshot(format!("`{name}` has shape {:?}, not {shape:?}", saved.shape)))
            }
            _ => Ok(saved),
        }
    }
}

/// Counters, and name, shape and bytes of a number of each tensor.
type Header = (Counters, Vec<(String, Vec<usize>, u8)>);

/// A tensor of process 0.
fn received(group: &Group, shape: &[usize], kind: Kind) -> Result<Saved, TrainError> {
    let shape: Vec<i64> = shape.iter().map(|&dim| dim as i64).collect();
    let mut tensor = Tensor::f_zeros(shape.as_slice(), (kind, Device::Cpu))?;
    group.broadcast(&mut tensor)?;
    Ok(Saved::of(&tensor)?)
}
