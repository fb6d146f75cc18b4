//! What the processes of one run exchange: sums, copies of a tensor, the values of all.
//!
//! ```text
//! Group --Single---> nothing: one process
//!       --Gloo-----> Gloo of libtorch, tensors on the host      \  both meet at the
//!       --Nccl-----> libnccl, opened at run time, on the device /  key-value store of process 0
//!       --Board----> who has come, signs of life, and the first failure, in the same store
//! ```
//!
//! All processes must make the same calls in the same order. A process that fails says why on the board, and one that ends
//! closes its connections, so that the others get an error at once. One that hangs is noticed after the time limit, which
//! does not run while a process reads or writes files.

#[cfg_attr(not(elmo_c10d), allow(dead_code))] // without c10d there is nothing to write on
mod board;
#[cfg(elmo_c10d)]
mod c10d;
#[cfg(elmo_c10d)]
mod nccl;
mod rendezvous;

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use tch::{Device, Kind, Tensor};
use thiserror::Error;

use self::board::Board;
pub use self::{
    board::Busy,
    rendezvous::{LISTENER, Meeting, MeetingError, RUN},
};
use crate::model::{DeviceError, DeviceName};

/// What a process does at first.
const MEETING: &str = "meeting the other processes";
/// Tensors of fewer numbers are sent together.
const SMALL: usize = 1 << 20;

/// How long a process waits for the others.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Until all of them have joined.
    pub start: Duration,
    /// For one that has joined and does not answer.
    pub answer: Duration,
}

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
    /// What the library said, or the cause.
    pub reason: String,
    /// The failure of another process, if that is why.
    pub cause: Option<Cause>,
}

impl CollectiveError {
    /// Whether the processes have not met yet.
    pub fn is_start(&self) -> bool {
        self.doing == MEETING
    }
}

/// Why the first process of a run has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cause {
    /// The process.
    pub rank: usize,
    /// What it says.
    pub reason: String,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} has failed: {}", self.rank, self.reason)
    }
}

/// How long a call waits for the other processes.
#[cfg_attr(not(elmo_c10d), allow(dead_code))]
#[derive(Debug, Clone)]
struct Patience {
    board: Option<Arc<Board>>,
    limit: Duration,
}

#[cfg_attr(not(elmo_c10d), allow(dead_code))]
impl Patience {
    /// Refuses to go on with a wait that began at `since`: another process has failed, or has not been seen to work for too
    /// long.
    fn check(&self, since: Instant) -> Result<(), String> {
        if let Some(cause) = self.board.as_ref().and_then(|board| board.cause()) {
            return Err(cause.to_string());
        }
        let since = self.board.as_ref().map_or(since, |board| board.worked().max(since));
        match since.elapsed() > self.limit {
            true => Err(format!("another process has not answered for {} s", self.limit.as_secs())),
            false => Ok(()),
        }
    }
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

    /// Whether an error may be that of this process alone, so that the others should know of it.
    fn may_be_the_cause(&self) -> bool {
        false
    }

    /// Ends the connections: `in_order` when all processes do so, and nothing is under way.
    fn close(&self, _in_order: bool) {}
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
    CollectiveError { rank, size, doing, reason: reason.to_string(), cause: None }
}

/// The processes of a run, as one of them sees them.
#[derive(Debug, Clone)]
pub struct Group {
    rank: usize,
    size: usize,
    collective: Arc<dyn Collective>,
    board: Option<Arc<Board>>,
}

impl Default for Group {
    fn default() -> Self {
        Self { rank: 0, size: 1, collective: Arc::new(Single), board: None }
    }
}

impl Group {
    /// Meets the other processes: Gloo on a CPU, NCCL on a GPU.
    ///
    /// # Errors
    /// [`CollectiveError`] names those that do not come within the time limit; also when a library is missing.
    pub fn meet(meeting: &Meeting, device: DeviceName, limits: Limits) -> Result<Self, CollectiveError> {
        let Meeting { rank, size, .. } = *meeting;
        if size == 1 {
            return Ok(Self::default());
        }
        let group = |(board, collective)| Self { rank, size, collective, board: Some(board) };
        let group = met(meeting, device, limits).map(group)?;
        group.barrier()?;
        Ok(group)
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

    /// As long as the value lives, this process reads or writes files, and the time limit of the others does not run, unless it
    /// waits for others itself.
    pub fn busy(&self) -> Busy {
        self.board.as_ref().map_or_else(Busy::default, |board| board.busy())
    }

    /// Ends the connections when all processes do so.
    pub fn finish(&self) {
        let all_are_here = self.barrier().is_ok();
        self.close(all_are_here);
    }

    /// Tells the others why this process fails, and ends the connections. No call may be under way.
    pub fn fail(&self, reason: &str) {
        if let Some(board) = &self.board {
            board.fail(reason);
        }
        self.close(false);
    }

    /// Tells the others why this process is about to end in the middle of what it does.
    pub fn tell(&self, reason: &str) {
        if let Some(board) = &self.board {
            board.fail(reason);
            board.leave();
        }
    }

    /// What a process says that is known to have failed, if it says anything.
    pub fn cause(&self) -> Option<Cause> {
        self.board.as_ref().and_then(|board| board.expect())
    }

    /// Ends the connections after another process has failed.
    pub fn abandon(&self) {
        self.close(false);
    }

    fn close(&self, in_order: bool) {
        self.collective.close(in_order);
        if let Some(board) = &self.board {
            board.leave();
        }
    }

    /// Makes a call that waits for the others. An error names its cause if another process has said it.
    fn exchange<T>(
        &self,
        call: impl FnOnce(&dyn Collective) -> Result<T, CollectiveError>,
    ) -> Result<T, CollectiveError> {
        let _waiting = self.board.as_ref().map(|board| board.waiting());
        call(&*self.collective).map_err(|error| match &self.board {
            Some(board) => explained(board, error, self.collective.may_be_the_cause()),
            None => error,
        })
    }

    /// Waits for all processes.
    ///
    /// # Errors
    /// As [`Collective::all_reduce`].
    pub fn barrier(&self) -> Result<(), CollectiveError> {
        self.exchange(|collective| collective.barrier())
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
        self.exchange(|collective| collective.all_reduce(&mut tensor))?;
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
        let all = self.all_gather(&Tensor::from_slice(numbers))?;
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
        self.broadcast(&mut length)?;
        let wrong = |e| self.failed("reading bytes of process 0", e);
        let n = usize::try_from(length.f_int64_value(&[0]).map_err(wrong)?).unwrap_or_default();
        if n == 0 {
            return Ok(Vec::new());
        }
        let mut tensor = match self.is_first() {
            true => Tensor::from_slice(&bytes),
            false => Tensor::f_zeros([n as i64], (Kind::Uint8, Device::Cpu)).map_err(wrong)?,
        };
        self.broadcast(&mut tensor)?;
        let mut bytes = vec![0; n];
        tensor.f_copy_data(&mut bytes, n).map_err(wrong)?;
        Ok(bytes)
    }

    /// Replaces a tensor by that of process 0.
    pub(super) fn broadcast(&self, tensor: &mut Tensor) -> Result<(), CollectiveError> {
        self.exchange(|collective| collective.broadcast(tensor))
    }

    /// The tensors of all processes along a new first axis.
    pub(super) fn all_gather(&self, tensor: &Tensor) -> Result<Tensor, CollectiveError> {
        self.exchange(|collective| collective.all_gather(tensor))
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
            self.exchange(|collective| collective.all_reduce(tensor))?;
        }
        if small.is_empty() {
            return Ok(());
        }
        let mut bucket = joined(&small).map_err(wrong)?;
        self.exchange(|collective| collective.all_reduce(&mut bucket))?;
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

type Met = (Arc<Board>, Arc<dyn Collective>);

#[cfg(elmo_c10d)]
fn met(meeting: &Meeting, device: DeviceName, limits: Limits) -> Result<Met, CollectiveError> {
    let Meeting { rank, size, .. } = *meeting;
    let wrong = |reason: String| failed(rank, size, MEETING, reason);
    let began = Instant::now();
    let store = Arc::new(c10d::Store::open(meeting, limits.start)?);
    let board = Board::start(Arc::clone(&store), (rank, size), !meeting.has_store, limits.answer);
    let board = Arc::new(board.map_err(|e| wrong(e.to_string()))?);
    let patience = Patience { board: Some(Arc::clone(&board)), limit: limits.answer };
    let assemble = || -> Result<(), CollectiveError> {
        greet(&store, meeting, device)?;
        board.roll_call(&rendezvous::host_name(), began, limits.start).map_err(wrong)
    };
    let open = || -> Result<Arc<dyn Collective>, CollectiveError> {
        Ok(match device {
            DeviceName::Cpu => Arc::new(c10d::Gloo::open(Arc::clone(&store), meeting, patience)?),
            DeviceName::Cuda(number) => Arc::new(nccl::Nccl::open(&store, meeting, number, patience)?),
        })
    };
    let met = assemble()
        .map_err(|error| told(&board, error))
        .and_then(|()| open().map_err(|error| explained(&board, error, true)));
    if met.is_err() {
        board.leave();
    }
    met.map(|collective| (board, collective))
}

/// Refuses processes that cannot be those of one run, before they wait for each other.
#[cfg(elmo_c10d)]
fn greet(store: &Arc<c10d::Store>, meeting: &Meeting, device: DeviceName) -> Result<(), CollectiveError> {
    use board::Notes;

    let Meeting { rank, size, .. } = *meeting;
    let wrong = |reason: String| failed(rank, size, MEETING, reason);
    let device = if device == DeviceName::Cpu { "the CPU" } else { "a GPU" };
    let own = [size.to_string(), env!("CARGO_PKG_VERSION").to_owned(), device.to_owned()];
    if store.add(&format!("rank/{rank}"), 1)? > 1 {
        return Err(wrong(format!("another process has the number {rank}, too: give each one a RANK of its own")));
    }
    if rank == 0 {
        return store.set("hello", own.join("\n").as_bytes());
    }
    let hello = store.get("hello").map_err(|error| wrong(format!("process 0 has not joined: {}", error.reason)))?;
    let hello = String::from_utf8_lossy(&hello);
    let mut first = hello.split('\n');
    for (own, (what, todo)) in own.iter().zip([
        ("the number of processes is", "give the same WORLD_SIZE"),
        ("the version of elmo is", "start the same program"),
        ("the device is", "give the same --device"),
    ]) {
        let first = first.next().unwrap_or_default();
        if first != own {
            return Err(wrong(format!("{what} {own} here, and {first} in process 0: {todo}")));
        }
    }
    Ok(())
}

/// The libtorch of this program has no c10d: that of macOS.
#[cfg(not(elmo_c10d))]
fn met(meeting: &Meeting, _: DeviceName, _: Limits) -> Result<Met, CollectiveError> {
    let reason = "the libtorch that this program was built with has no collectives (that of Linux has)";
    Err(failed(meeting.rank, meeting.size, MEETING, reason))
}

/// The error with its cause, if another process has said it; otherwise with the processes that do not take part. If all do, this
/// process may be the cause, and says so.
fn explained(board: &Board, error: CollectiveError, may_be_the_cause: bool) -> CollectiveError {
    if let Some(cause) = board.look() {
        return caused(error, cause);
    }
    let missing = board.describe(&board.missing());
    // One that has failed may have said it meanwhile.
    match (board.cause(), missing) {
        (Some(cause), _) => caused(error, cause),
        (None, Some(missing)) => CollectiveError { reason: format!("{}; {missing}", error.reason), ..error },
        (None, None) if may_be_the_cause => told(board, error),
        (None, None) => error,
    }
}

/// The error with its cause, if another process has said it. Otherwise the others are told of it.
#[cfg_attr(not(elmo_c10d), allow(dead_code))]
fn told(board: &Board, error: CollectiveError) -> CollectiveError {
    if let Some(cause) = board.look() {
        return caused(error, cause);
    }
    board.fail(&format!("{}: {}", error.doing, error.reason));
    error
}

fn caused(error: CollectiveError, cause: Cause) -> CollectiveError {
    CollectiveError { reason: cause.to_string(), cause: Some(cause), ..error }
}

fn joined(tensors: &[&mut Tensor]) -> Result<Tensor, DeviceError> {
    let flat = tensors.iter().map(|tensor| tensor.f_reshape([-1])).collect::<Result<Vec<_>, _>>()?;
    Ok(Tensor::f_cat(&flat, 0)?)
}

#[cfg(test)]
mod tests;
