//! What the processes of one run exchange: sums, copies of a tensor, the values of all.
//!
//! ```text
//! Group --Single---> nothing: one process
//!       --C10d-----> Gloo of libtorch, tensors on the host      \  both meet at the
//!       --Nccl-----> libnccl, opened at run time, on the device /  key-value store of process 0
//! ```
//!
//! All processes must make the same calls in the same order. A process that ends closes its connections, so that the others
//! get an error at once; one that hangs is noticed after the time limit.

#[cfg(elmo_c10d)]
mod c10d;
#[cfg(elmo_c10d)]
mod nccl;
mod rendezvous;

use std::{fmt, sync::Arc, time::Duration};

use tch::{Device, Kind, Tensor};
use thiserror::Error;

pub use self::rendezvous::{Meeting, MeetingError, RUN};
use crate::model::{DeviceError, DeviceName};

/// Tensors of fewer numbers are sent together.
const SMALL: usize = 1 << 20;

/// An exchange with the other processes failed.
#[derive(Debug, Error, Clone)]
#[error("process {rank} of {size}: {doing}: {reason}")]
pub struct CollectiveError {
    /// The process that reports the error.
    pub rank: usize,
    /// Processes of the run.
    pub size: usize,
    /// What it did.
    pub doing: &'static str,
    /// What the library said.
    pub reason: String,
}

/// The exchanges that training needs. All processes make the same calls with tensors of one shape and kind.
pub trait Collective: fmt::Debug + Send + Sync {
    /// Replaces a tensor by the sum over all processes, which has the same bits in each of them.
    ///
    /// # Errors
    /// When another process has ended or does not answer.
    fn all_reduce(&self, tensor: &mut Tensor) -> Result<(), CollectiveError>;

    /// The tensors of all processes, one after the other along a new first axis.
    ///
    /// # Errors
    /// As [`Collective::all_reduce`].
    fn all_gather(&self, tensor: &Tensor) -> Result<Tensor, CollectiveError>;

    /// Replaces a tensor by that of process 0.
    ///
    /// # Errors
    /// As [`Collective::all_reduce`].
    fn broadcast(&self, tensor: &mut Tensor) -> Result<(), CollectiveError>;

    /// Waits for all processes.
    ///
    /// # Errors
    /// As [`Collective::all_reduce`].
    fn barrier(&self) -> Result<(), CollectiveError>;
}

/// One process: there is nobody to exchange anything with.
#[derive(Debug, Clone, Copy)]
struct Single;

impl Collective for Single {
    fn all_reduce(&self, _: &mut Tensor) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn all_gather(&self, tensor: &Tensor) -> Result<Tensor, CollectiveError> {
        tensor.f_unsqueeze(0).map_err(|e| failed(0, 1, "copying a tensor", e))
    }

    fn broadcast(&self, _: &mut Tensor) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        Ok(())
    }
}

fn failed(rank: usize, size: usize, doing: &'static str, reason: impl fmt::Display) -> CollectiveError {
    CollectiveError { rank, size, doing, reason: reason.to_string() }
}

/// The processes of a run, as one of them sees them.
#[derive(Debug, Clone)]
pub struct Group {
    rank: usize,
    size: usize,
    collective: Arc<dyn Collective>,
}

impl Default for Group {
    fn default() -> Self {
        Self { rank: 0, size: 1, collective: Arc::new(Single) }
    }
}

impl Group {
    /// Meets the other processes: Gloo on a CPU, NCCL on a GPU.
    ///
    /// # Errors
    /// [`CollectiveError`] when the others do not come within the time limit, or a library is missing.
    pub fn meet(meeting: &Meeting, device: DeviceName, limit: Duration) -> Result<Self, CollectiveError> {
        let Meeting { rank, size, .. } = *meeting;
        if size == 1 {
            return Ok(Self::default());
        }
        let collective = collective(meeting, device, limit)?;
        collective.barrier()?;
        Ok(Self { rank, size, collective })
    }

    /// The number of this process, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Processes of the run.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Whether this process writes the files of the run.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }

    /// Whether this is the only process.
    pub fn is_single(&self) -> bool {
        self.size == 1
    }

    /// The rows of a window that this process takes.
    pub fn share(&self, rows: usize) -> std::ops::Range<usize> {
        self.rank * rows / self.size..(self.rank + 1) * rows / self.size
    }

    /// Waits for all processes.
    ///
    /// # Errors
    /// As [`Collective::all_reduce`].
    pub fn barrier(&self) -> Result<(), CollectiveError> {
        self.collective.barrier()
    }

    /// Sums over all processes, number by number.
    ///
    /// # Errors
    /// As [`Collective::all_reduce`].
    pub fn sum_numbers(&self, numbers: &mut [f64]) -> Result<(), CollectiveError> {
        if self.is_single() {
            return Ok(());
        }
        let mut tensor = Tensor::from_slice(numbers);
        self.collective.all_reduce(&mut tensor)?;
        tensor.f_copy_data(numbers, numbers.len()).map_err(|e| self.failed("reading sums", e))
    }

    /// The numbers of all processes, by rank.
    ///
    /// # Errors
    /// As [`Collective::all_reduce`].
    pub fn gather(&self, numbers: &[i64]) -> Result<Vec<Vec<i64>>, CollectiveError> {
        if self.is_single() {
            return Ok(vec![numbers.to_vec()]);
        }
        let all = self.collective.all_gather(&Tensor::from_slice(numbers))?;
        let flat = all.f_reshape([-1]).and_then(Vec::<i64>::try_from);
        let flat = flat.map_err(|e| self.failed("reading numbers", e))?;
        Ok(flat.chunks(numbers.len().max(1)).map(<[i64]>::to_vec).collect())
    }

    /// The bytes of process 0; those of the others are ignored.
    ///
    /// # Errors
    /// As [`Collective::all_reduce`].
    pub fn broadcast_bytes(&self, bytes: Vec<u8>) -> Result<Vec<u8>, CollectiveError> {
        if self.is_single() {
            return Ok(bytes);
        }
        let mut length = Tensor::from_slice(&[bytes.len() as i64]);
        self.collective.broadcast(&mut length)?;
        let wrong = |e| self.failed("reading bytes of process 0", e);
        let n = usize::try_from(length.f_int64_value(&[0]).map_err(wrong)?).unwrap_or_default();
        if n == 0 {
            return Ok(Vec::new());
        }
        let mut tensor = match self.is_first() {
            true => Tensor::from_slice(&bytes),
            false => Tensor::f_zeros([n as i64], (Kind::Uint8, Device::Cpu)).map_err(wrong)?,
        };
        self.collective.broadcast(&mut tensor)?;
        let mut bytes = vec![0; n];
        tensor.f_copy_data(&mut bytes, n).map_err(wrong)?;
        Ok(bytes)
    }

    /// Replaces a tensor by that of process 0.
    pub(super) fn broadcast(&self, tensor: &mut Tensor) -> Result<(), CollectiveError> {
        self.collective.broadcast(tensor)
    }

    /// The tensors of all processes along a new first axis.
    pub(super) fn all_gather(&self, tensor: &Tensor) -> Result<Tensor, CollectiveError> {
        self.collective.all_gather(tensor)
    }

    /// Sums tensors over all processes: small ones together, large ones in place.
    pub(super) fn sum(&self, tensors: &mut [Tensor]) -> Result<(), CollectiveError> {
        if self.is_single() {
            return Ok(());
        }
        let _no_gradients = tch::no_grad_guard();
        let wrong = |e: DeviceError| self.failed("putting gradients together", e);
        let (small, large): (Vec<_>, Vec<_>) = tensors.iter_mut().partition(|tensor| tensor.numel() < SMALL);
        for tensor in large {
            *tensor = tensor.f_contiguous().map_err(|e| wrong(e.into()))?;
            self.collective.all_reduce(tensor)?;
        }
        if small.is_empty() {
            return Ok(());
        }
        let mut bucket = joined(&small).map_err(wrong)?;
        self.collective.all_reduce(&mut bucket)?;
        let mut first = 0;
        for tensor in small {
            let n = tensor.numel() as i64;
            let part = bucket.f_narrow(0, first, n).and_then(|part| part.f_view(tensor.size().as_slice()));
            *tensor = part.map_err(|e| wrong(e.into()))?;
            first += n;
        }
        Ok(())
    }

    fn failed(&self, doing: &'static str, reason: impl fmt::Display) -> CollectiveError {
        failed(self.rank, self.size, doing, reason)
    }
}

#[cfg(elmo_c10d)]
fn collective(meeting: &Meeting, device: DeviceName, limit: Duration) -> Result<Arc<dyn Collective>, CollectiveError> {
    let store = c10d::Store::open(meeting, limit)?;
    let kind = [u8::from(matches!(device, DeviceName::Cuda(_)))];
    let mut first = kind;
    if meeting.rank == 0 {
        store.set("device", &kind)?;
    } else {
        store.get("device", &mut first)?;
    }
    if first != kind {
        let named = |kind: [u8; 1]| if kind == [0] { "the CPU" } else { "a GPU" };
        let reason = format!("this process would use {}, and process 0 {}: give --device", named(kind), named(first));
        return Err(failed(meeting.rank, meeting.size, "meeting the other processes", reason));
    }
    Ok(match device {
        DeviceName::Cpu => Arc::new(c10d::Gloo::open(store, meeting, limit)?),
        DeviceName::Cuda(number) => Arc::new(nccl::Nccl::open(store, meeting, number, limit)?),
    })
}

/// The libtorch of this program has no c10d: that of macOS.
#[cfg(not(elmo_c10d))]
fn collective(meeting: &Meeting, _: DeviceName, _: Duration) -> Result<Arc<dyn Collective>, CollectiveError> {
    let reason = "the libtorch that this program was built with has no collectives (that of Linux has)";
    Err(failed(meeting.rank, meeting.size, "meeting the other processes", reason))
}

fn joined(tensors: &[&mut Tensor]) -> Result<Tensor, DeviceError> {
    let flat = tensors.iter().map(|tensor| tensor.f_reshape([-1])).collect::<Result<Vec<_>, _>>()?;
    Ok(Tensor::f_cat(&flat, 0)?)
}

#[cfg(test)]
mod tests;
