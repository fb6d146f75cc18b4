//! NCCL, opened at run time: one program serves machines with and without it. Tensors stay on the device.
//!
//! libtorch computes on the default stream of the device, and so do these calls: what libtorch queues next sees their
//! results. The host waits for each of them, because a call whose partner has ended would occupy the device for ever. NCCL 2.14
//! or later is needed: its calls do not wait for the other processes, so that the wait has a limit.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    mem::transmute,
    ptr::{self, NonNull},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use tch::{Device, Kind, Tensor};

use super::{Collective, CollectiveError, Meeting, Patience, c10d::Store, failed};

/// Names of the library: that of NVIDIA's packages, and that of development packages.
const NAMES: [&CStr; 2] = [c"libnccl.so.2", c"libnccl.so"];
/// Names another file.
const VARIABLE: &str = "NCCL_LIBRARY";
/// Where process 0 puts the identity of the group.
const KEY: &str = "nccl";
/// `NCCL_UNIQUE_ID_BYTES`
const ID_BYTES: usize = 128;
/// `ncclSum`
const SUM: c_int = 0;
/// `ncclInProgress`
const IN_PROGRESS: c_int = 7;
/// `cudaErrorNotReady`
const NOT_READY: c_int = 600;
/// How often the host looks whether a call has ended, at first and at most.
const PAUSE: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));
/// Most time for the end of connections that nothing is under way on.
const END: Duration = Duration::from_secs(10);

#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; ID_BYTES]);

type Comm = *mut c_void;
type Stream = *mut c_void;

type GetUniqueId = unsafe extern "C" fn(*mut UniqueId) -> c_int;
type InitRank = unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int, *const Config) -> c_int;
/// `ncclAllReduce` with an operation, and `ncclBroadcast` with the process that sends.
type Exchange = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
type AllGather = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, Stream) -> c_int;
type AsyncError = unsafe extern "C" fn(Comm, *mut c_int) -> c_int;
/// `ncclCommFinalize`, `ncclCommDestroy` and `ncclCommAbort`.
type End = unsafe extern "C" fn(Comm) -> c_int;
type ErrorText = unsafe extern "C" fn(c_int) -> *const c_char;
type SetDevice = unsafe extern "C" fn(c_int) -> c_int;
type StreamQuery = unsafe extern "C" fn(Stream) -> c_int;

/// Functions of libnccl, and two of the CUDA runtime that libtorch has loaded.
#[derive(Debug, Clone, Copy)]
struct Functions {
    get_unique_id: GetUniqueId,
    comm_init_rank: InitRank,
    all_reduce: Exchange,
    all_gather: AllGather,
    broadcast: Exchange,
    async_error: AsyncError,
    finalize: End,
    destroy: End,
    abort: End,
    error_text: ErrorText,
    set_device: SetDevice,
    stream_query: StreamQuery,
}

impl Functions {
    /// Opens the library of this machine, or the one that [`VARIABLE`] names.
    fn of_machine() -> Result<Self, String> {
        Self::open(std::env::var(VARIABLE).ok().filter(|name| !name.is_empty()).as_deref())
    }

    fn open(named: Option<&str>) -> Result<Self, String> {
        let named = named.map(|name| CString::new(name).map_err(|_| "its name has a NUL".to_owned())).transpose()?;
        let names: Vec<&CStr> = named.as_deref().map_or(NAMES.to_vec(), |name| vec![name]);
        let mut problems = Vec::new();
        for name in names {
            // SAFETY: a NUL-terminated name; the initialisers of libnccl only set up the library.
            let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
            match NonNull::new(library) {
                Some(library) => return Self::find(library),
                None => problems.push(last_error()),
            }
        }
        Err(format!(
            "NCCL cannot be opened ({}): install it (PyTorch's package nvidia-nccl, or that of the system), add its folder to \
             LD_LIBRARY_PATH, or give its path in {VARIABLE}",
            problems.join("; ")
        ))
    }

    fn find(library: NonNull<c_void>) -> Result<Self, String> {
        let of = |library: *mut c_void, name: &CStr| -> Result<*mut c_void, String> {
            // SAFETY: an open library, or all that are loaded, and a NUL-terminated name.
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            let missing = || format!("{} is missing: {}", name.to_string_lossy(), last_error());
            NonNull::new(found).map(NonNull::as_ptr).ok_or_else(missing)
        };
        let nccl = |name: &CStr| of(library.as_ptr(), name);
        let cuda = |name: &CStr| of(libc::RTLD_DEFAULT, name);
        // SAFETY: the types are those that nccl.h 2 and cuda_runtime_api.h declare.
        unsafe {
            Ok(Self {
                get_unique_id: transmute::<*mut c_void, GetUniqueId>(nccl(c"ncclGetUniqueId")?),
                comm_init_rank: transmute::<*mut c_void, InitRank>(nccl(c"ncclCommInitRankConfig")?),
                all_reduce: transmute::<*mut c_void, Exchange>(nccl(c"ncclAllReduce")?),
                all_gather: transmute::<*mut c_void, AllGather>(nccl(c"ncclAllGather")?),
                broadcast: transmute::<*mut c_void, Exchange>(nccl(c"ncclBroadcast")?),
                async_error: transmute::<*mut c_void, AsyncError>(nccl(c"ncclCommGetAsyncError")?),
                finalize: transmute::<*mut c_void, End>(nccl(c"ncclCommFinalize")?),
                destroy: transmute::<*mut c_void, End>(nccl(c"ncclCommDestroy")?),
                abort: transmute::<*mut c_void, End>(nccl(c"ncclCommAbort")?),
                error_text: transmute::<*mut c_void, ErrorText>(nccl(c"ncclGetErrorString")?),
                set_device: transmute::<*mut c_void, SetDevice>(cuda(c"cudaSetDevice")?),
                stream_query: transmute::<*mut c_void, StreamQuery>(cuda(c"cudaStreamQuery")?),
            })
        }
    }

    /// The identity of a new group.
    fn new_id(&self) -> Result<UniqueId, String> {
        let mut id = UniqueId([0; ID_BYTES]);
        // SAFETY: writes 128 bytes.
        self.check(unsafe { (self.get_unique_id)(&mut id) }).map(|()| id)
    }

    /// Makes a GPU the current one of this thread.
    fn choose(&self, device: usize) -> Result<(), String> {
        // SAFETY: any number may be given.
        match unsafe { (self.set_device)(device as c_int) } {
            0 => Ok(()),
            code => Err(format!("GPU {device} cannot be used: CUDA error {code}")),
        }
    }

    fn check(&self, code: c_int) -> Result<(), String> {
        if code == 0 || code == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: returns a NUL-terminated text that is never freed, for any number.
        let text = unsafe { CStr::from_ptr((self.error_text)(code)) };
        Err(format!("NCCL: {}", text.to_string_lossy()))
    }
}

fn last_error() -> String {
    // SAFETY: dlerror returns NULL or a NUL-terminated text that lives until the next call on this thread.
    unsafe {
        let text = libc::dlerror();
        match text.is_null() {
            true => "no reason was given".to_owned(),
            false => CStr::from_ptr(text).to_string_lossy().into_owned(),
        }
    }
}

/// The number of a format in `ncclDataType_t`.
fn format_of(kind: Kind) -> Option<c_int> {
    Some(match kind {
        Kind::Int8 => 0,
        Kind::Uint8 => 1,
        Kind::Int => 2,
        Kind::Int64 => 4,
        Kind::Half => 6,
        Kind::Float => 7,
        Kind::Double => 8,
        Kind::BFloat16 => 9,
        _ => return None,
    })
}

/// `ncclConfig_t` of NCCL 2.14, which later versions accept: what it lacks has its default.
#[repr(C)]
struct Config {
    size: usize,
    /// `NCCL_API_MAGIC`
    magic: u32,
    /// `NCCL_VERSION(2, 14, 0)`
    version: u32,
    blocking: c_int,
}

impl Config {
    /// Calls return at once, also while they connect to the other processes, so that a limit of time can end them.
    fn without_waiting() -> Self {
        Self { size: size_of::<Self>(), magic: 0xcafe_beef, version: 21_400, blocking: 0 }
    }
}

/// A communicator of NCCL, on one GPU.
#[derive(Debug)]
struct Communicator {
    functions: Functions,
    /// `None` after its end, or an error: it cannot be used again.
    comm: Mutex<Option<NonNull<c_void>>>,
    device: usize,
    patience: Patience,
}

// SAFETY: every use of the communicator holds the lock.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    fn open(
        functions: Functions,
        id: UniqueId,
        (rank, size): (usize, usize),
        device: usize,
        patience: Patience,
    ) -> Result<Self, String> {
        let (mut comm, config) = (ptr::null_mut(), Config::without_waiting());
        functions.choose(device)?;
        // SAFETY: `comm` is written; the configuration is read during the call.
        let code = unsafe { (functions.comm_init_rank)(&mut comm, size as c_int, id, rank as c_int, &config) };
        functions.check(code)?;
        let comm = NonNull::new(comm).ok_or_else(|| "NCCL opened nothing".to_owned())?;
        let opened = Self { functions, comm: Mutex::new(Some(comm)), device, patience };
        // Dropped, and so aborted, when the others do not come.
        opened.connected(comm.as_ptr())?;
        Ok(opened)
    }

    /// Queues a call and waits until the device has made it.
    fn run(&self, call: impl FnOnce(Comm) -> c_int) -> Result<(), String> {
        let mut comm = self.comm.lock().unwrap_or_else(PoisonError::into_inner);
        let open = comm.ok_or_else(|| "the connections have ended before".to_owned())?.as_ptr();
        let made = || -> Result<(), String> {
            // The current device is one of each thread.
            self.functions.choose(self.device)?;
            self.functions.check(call(open))?;
            self.connected(open)?;
            self.wait(open)
        };
        made().inspect_err(|_| self.abort(&mut comm))
    }

    /// Waits until NCCL has queued the last call: the first ones connect to the other processes.
    fn connected(&self, comm: Comm) -> Result<(), String> {
        self.until(&self.patience, || self.state(comm).map(|state| state != IN_PROGRESS))
    }

    /// Waits until the device has made what is queued.
    fn wait(&self, comm: Comm) -> Result<(), String> {
        self.until(&self.patience, || {
            self.state(comm)?;
            // SAFETY: the default stream of the current device.
            match unsafe { (self.functions.stream_query)(ptr::null_mut()) } {
                0 => Ok(true),
                NOT_READY => Ok(false),
                code => Err(format!("CUDA error {code}")),
            }
        })
    }

    /// The state of a communicator, unless it is an error.
    fn state(&self, comm: Comm) -> Result<c_int, String> {
        let mut code = 0;
        // SAFETY: the communicator is open, and `code` is written.
        self.functions.check(unsafe { (self.functions.async_error)(comm, &mut code) })?;
        self.functions.check(code).map(|()| code)
    }

    fn until(&self, patience: &Patience, is_so: impl Fn() -> Result<bool, String>) -> Result<(), String> {
        let (started, mut pause) = (Instant::now(), PAUSE.0);
        while !is_so()? {
            patience.check(started)?;
            thread::sleep(pause);
            pause = (2 * pause).min(PAUSE.1);
        }
        Ok(())
    }

    /// Ends the connections when all processes do so: nothing that another one still waits for is cut off.
    fn finish(&self) {
        let mut comm = self.comm.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(open) = *comm else { return };
        let finished = || -> Result<(), String> {
            self.functions.choose(self.device)?;
            // SAFETY: open; nothing is queued on it.
            self.functions.check(unsafe { (self.functions.finalize)(open.as_ptr()) })?;
            let patience = Patience { limit: self.patience.limit.min(END), ..self.patience.clone() };
            self.until(&patience, || self.state(open.as_ptr()).map(|state| state != IN_PROGRESS))
        };
        match finished() {
            Ok(()) => {
                *comm = None;
                // SAFETY: finalised, and not used again. What the destruction returns changes nothing.
                unsafe { (self.functions.destroy)(open.as_ptr()) };
            }
            Err(_) => self.abort(&mut comm),
        }
    }

    /// Ends the connections when another process has failed.
    fn cut(&self) {
        let mut comm = self.comm.lock().unwrap_or_else(PoisonError::into_inner);
        self.abort(&mut comm);
    }

    /// Frees the device of calls that will never end.
    fn abort(&self, comm: &mut MutexGuard<'_, Option<NonNull<c_void>>>) {
        if let Some(open) = comm.take() {
            // SAFETY: open, and not used again.
            unsafe { (self.functions.abort)(open.as_ptr()) };
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.cut();
    }
}

/// NCCL, on tensors of one GPU.
#[derive(Debug)]
pub(super) struct Nccl {
    communicator: Communicator,
    device: usize,
    rank: usize,
    size: usize,
}

impl Nccl {
    pub(super) fn open(
        store: &Arc<Store>,
        meeting: &Meeting,
        device: usize,
        patience: Patience,
    ) -> Result<Self, CollectiveError> {
        let Meeting { rank, size, .. } = *meeting;
        let wrong = |reason: String| failed(rank, size, "connecting the GPUs", reason);
        let functions = Functions::of_machine().map_err(wrong)?;
        let id = match rank {
            0 => {
                let id = functions.new_id().map_err(wrong)?;
                store.set(KEY, &id.0)?;
                id
            }
            _ => {
                let bytes = store.get(KEY)?;
                let wrong_length = |_| wrong(format!("the identity of the group has {} bytes", bytes.len()));
                UniqueId(bytes.as_slice().try_into().map_err(wrong_length)?)
            }
        };
        let communicator = Communicator::open(functions, id, (rank, size), device, patience).map_err(wrong)?;
        Ok(Self { communicator, device, rank, size })
    }

    fn failed(&self, doing: &'static str, reason: impl std::fmt::Display) -> CollectiveError {
        failed(self.rank, self.size, doing, reason)
    }

    fn run(&self, doing: &'static str, call: impl FnOnce(Comm) -> c_int) -> Result<(), CollectiveError> {
        self.communicator.run(call).map_err(|reason| self.failed(doing, reason))
    }

    /// The tensor on the device in one piece, and its format.
    fn placed(&self, doing: &'static str, tensor: &Tensor) -> Result<(Tensor, c_int), CollectiveError> {
        let placed = tensor.f_to_device(Device::Cuda(self.device)).and_then(|t| t.f_contiguous());
        let placed = placed.map_err(|e| self.failed(doing, e))?;
        let format = format_of(placed.kind()).ok_or_else(|| self.failed(doing, "NCCL has no such number format"))?;
        Ok((placed, format))
    }

    fn in_place(
        &self,
        doing: &'static str,
        tensor: &mut Tensor,
        call: impl FnOnce(*mut c_void, usize, c_int, Comm) -> c_int,
    ) -> Result<(), CollectiveError> {
        let _no_gradients = tch::no_grad_guard();
        let (placed, format) = self.placed(doing, tensor)?;
        let (data, n) = (placed.data_ptr(), placed.numel());
        self.run(doing, |comm| call(data, n, format, comm))?;
        if data != tensor.data_ptr() {
            tensor.f_copy_(&placed).map_err(|e| self.failed(doing, e))?;
        }
        Ok(())
    }
}

impl Collective for Nccl {
    fn all_reduce(&self, tensor: &mut Tensor) -> Result<(), CollectiveError> {
        // SAFETY: `data` has `n` numbers of the format on the device, and lives until the call has ended.
        self.in_place("summing over all GPUs", tensor, |data, n, format, comm| unsafe {
            (self.communicator.functions.all_reduce)(data, data, n, format, SUM, comm, ptr::null_mut())
        })
    }

    fn all_gather(&self, tensor: &Tensor) -> Result<Tensor, CollectiveError> {
        let _no_gradients = tch::no_grad_guard();
        let doing = "collecting from all GPUs";
        let (own, format) = self.placed(doing, tensor)?;
        let shape: Vec<i64> = std::iter::once(self.size as i64).chain(own.size()).collect();
        let all = Tensor::f_zeros(shape.as_slice(), (own.kind(), own.device())).map_err(|e| self.failed(doing, e))?;
        // SAFETY: `all` has room for the numbers of all processes; both live until the call has ended.
        self.run(doing, |comm| unsafe {
            (self.communicator.functions.all_gather)(
                own.data_ptr(),
                all.data_ptr(),
                own.numel(),
                format,
                comm,
                ptr::null_mut(),
            )
        })?;
        all.f_to_device(tensor.device()).map_err(|e| self.failed(doing, e))
    }

    fn broadcast(&self, tensor: &mut Tensor) -> Result<(), CollectiveError> {
        // SAFETY: as in `all_reduce`; process 0 sends.
        self.in_place("copying from process 0", tensor, |data, n, format, comm| unsafe {
            (self.communicator.functions.broadcast)(data, data, n, format, 0, comm, ptr::null_mut())
        })
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        let mut one = Tensor::f_zeros([1], (Kind::Float, Device::Cuda(self.device)))
            .map_err(|e| self.failed("waiting for all GPUs", e))?;
        self.all_reduce(&mut one)
    }

    /// A GPU or its network may fail here, and the others would only wait.
    fn may_be_the_cause(&self) -> bool {
        true
    }

    fn close(&self, in_order: bool) {
        if in_order { self.communicator.finish() } else { self.communicator.cut() }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::train::collective::board::{Board, Memory};

    #[test]
    fn a_machine_without_nccl_is_told_what_to_do() {
        let error = Functions::open(Some("/nowhere/libnccl.so.2")).unwrap_err();
        for part in ["NCCL cannot be opened", "/nowhere/libnccl.so.2", "LD_LIBRARY_PATH", "NCCL_LIBRARY"] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }

    thread_local! {
        /// Questions for the state of the communicator until a call is no longer in progress; below zero: never.
        static IN_PROGRESS_FOR: Cell<i32> = const { Cell::new(0) };
        static ABORTED: Cell<u32> = const { Cell::new(0) };
        static FINALIZED: Cell<u32> = const { Cell::new(0) };
        static DESTROYED: Cell<u32> = const { Cell::new(0) };
        /// The state of the communicator when it is not in progress.
        static STATE: Cell<c_int> = const { Cell::new(0) };
    }

    /// A library whose calls take as long as [`IN_PROGRESS_FOR`] says, and whose device has nothing to do until they are queued.
    fn slow_library() -> Functions {
        unsafe extern "C" fn id(_: *mut UniqueId) -> c_int {
            0
        }
        unsafe extern "C" fn init(comm: *mut Comm, _: c_int, _: UniqueId, _: c_int, config: *const Config) -> c_int {
            // SAFETY: pointers to a communicator and a configuration.
            unsafe {
                *comm = NonNull::<u8>::dangling().as_ptr().cast();
                assert_eq!(((*config).size, (*config).blocking), (24, 0));
            }
            IN_PROGRESS
        }
        unsafe extern "C" fn reduce(
            _: *const c_void,
            _: *mut c_void,
            _: usize,
            _: c_int,
            _: c_int,
            _: Comm,
            _: Stream,
        ) -> c_int {
            IN_PROGRESS
        }
        unsafe extern "C" fn gather(_: *const c_void, _: *mut c_void, _: usize, _: c_int, _: Comm, _: Stream) -> c_int {
            IN_PROGRESS
        }
        unsafe extern "C" fn state(_: Comm, code: *mut c_int) -> c_int {
            let left = IN_PROGRESS_FOR.get();
            IN_PROGRESS_FOR.set(if left > 0 { left - 1 } else { left });
            // SAFETY: a pointer to a number.
            unsafe { *code = if left == 0 { STATE.get() } else { IN_PROGRESS } };
            0
        }
        unsafe extern "C" fn finalize(_: Comm) -> c_int {
            FINALIZED.set(FINALIZED.get() + 1);
            IN_PROGRESS
        }
        unsafe extern "C" fn destroy(_: Comm) -> c_int {
            DESTROYED.set(DESTROYED.get() + 1);
            0
        }
        unsafe extern "C" fn abort(_: Comm) -> c_int {
            ABORTED.set(ABORTED.get() + 1);
            0
        }
        unsafe extern "C" fn text(_: c_int) -> *const c_char {
            c"an error".as_ptr()
        }
        unsafe extern "C" fn set_device(_: c_int) -> c_int {
            0
        }
        unsafe extern "C" fn query(_: Stream) -> c_int {
            0
        }
        Functions {
            get_unique_id: id,
            comm_init_rank: init,
            all_reduce: reduce,
            all_gather: gather,
            broadcast: reduce,
            async_error: state,
            finalize,
            destroy,
            abort,
            error_text: text,
            set_device,
            stream_query: query,
        }
    }

    fn open(in_progress: i32) -> Result<Communicator, String> {
        open_with(in_progress, Patience { board: None, limit: Duration::from_millis(50) })
    }

    fn open_with(in_progress: i32, patience: Patience) -> Result<Communicator, String> {
        IN_PROGRESS_FOR.set(in_progress);
        for count in [&ABORTED, &FINALIZED, &DESTROYED] {
            count.set(0);
        }
        STATE.set(0);
        Communicator::open(slow_library(), UniqueId([0; ID_BYTES]), (0, 2), 0, patience)
    }

    fn ends() -> [u32; 3] {
        [FINALIZED.get(), DESTROYED.get(), ABORTED.get()]
    }

    /// The order that nccl.h asks for: finalised, waited for, destroyed.
    #[test]
    fn a_run_that_ends_well_is_not_aborted() {
        let communicator = open(0).unwrap();
        IN_PROGRESS_FOR.set(3);
        communicator.finish();
        assert_eq!((ends(), IN_PROGRESS_FOR.get()), ([1, 1, 0], 0));
        communicator.finish();
        assert!(communicator.run(|_| 0).unwrap_err().contains("have ended before"));
        drop(communicator);
        assert_eq!(ends(), [1, 1, 0]);
    }

    #[test]
    fn connections_that_cannot_be_ended_in_order_are_aborted() {
        let communicator = open(0).unwrap();
        IN_PROGRESS_FOR.set(-1);
        communicator.finish();
        assert_eq!(ends(), [1, 0, 1]);
        let communicator = open(0).unwrap();
        // `ncclRemoteError`
        STATE.set(6);
        assert_eq!(communicator.run(|_| 0).unwrap_err(), "NCCL: an error");
        communicator.finish();
        assert_eq!(ends(), [0, 0, 1]);
    }

    /// While NCCL connects, the stream of the device is empty, as if the call had been made already.
    #[test]
    fn a_call_is_made_when_it_is_no_longer_in_progress() {
        let communicator = open(3).unwrap();
        assert_eq!((IN_PROGRESS_FOR.get(), ABORTED.get()), (0, 0));
        IN_PROGRESS_FOR.set(5);
        communicator.run(|_| IN_PROGRESS).unwrap();
        assert_eq!(IN_PROGRESS_FOR.get(), 0);
        drop(communicator);
        assert_eq!(ABORTED.get(), 1);
    }

    #[test]
    fn a_process_that_does_not_come_is_not_waited_for_without_end() {
        assert!(open(-1).unwrap_err().contains("another process has not answered"));
        assert_eq!(ABORTED.get(), 1);
        let communicator = open(0).unwrap();
        IN_PROGRESS_FOR.set(-1);
        assert!(communicator.run(|_| 0).unwrap_err().contains("another process has not answered"));
        assert!(communicator.run(|_| 0).unwrap_err().contains("have ended before"));
        assert_eq!(ABORTED.get(), 1);
    }

    /// Long before the time limit.
    #[test]
    fn the_failure_of_another_process_ends_a_wait() {
        let notes = Memory::default();
        let limit = Duration::from_secs(600);
        let board = |rank| Arc::new(Board::start(notes.clone(), (rank, 2), true, limit).unwrap());
        let boards = [board(0), board(1)];
        let communicator = open_with(0, Patience { board: Some(Arc::clone(&boards[0])), limit }).unwrap();
        IN_PROGRESS_FOR.set(-1);
        boards[1].fail("GPU 1 has an uncorrectable error");
        let error = communicator.run(|_| 0).unwrap_err();
        assert_eq!((error.as_str(), ends()), ("process 1 has failed: GPU 1 has an uncorrectable error", [0, 0, 1]));
    }

    /// A group of one process on a GPU. Sums and copies of one change nothing, so this shows that each function of the real
    /// library takes its arguments, ends and leaves the numbers whole; not that several GPUs exchange anything.
    #[test]
    #[ignore = "needs a GPU; make gpu runs it"]
    fn every_call_of_nccl_is_made_on_cuda() {
        use crate::model::cuda_devices;

        const ANSWERS: Duration = Duration::from_secs(60);
        assert!(cuda_devices() > 0, "this needs a GPU and the libtorch for CUDA");
        let functions = Functions::of_machine().unwrap();
        let patience = Patience { board: None, limit: ANSWERS };
        let communicator = Communicator::open(functions, functions.new_id().unwrap(), (0, 1), 0, patience).unwrap();
        let nccl = Nccl { communicator, device: 0, rank: 0, size: 1 };
        // What the run exchanges: gradients, weights and their bits, losses, numbers and bytes.
        for kind in [Kind::Float, Kind::BFloat16, Kind::Double, Kind::Int64, Kind::Int, Kind::Uint8] {
            for device in [Device::Cuda(0), Device::Cpu] {
                // Not in a single piece, as a transposed weight.
                let expected = Tensor::arange(12, (kind, device)).view([3, 4]).tr();
                let mut found = expected.copy();
                nccl.all_reduce(&mut found).unwrap();
                assert_eq!((&found, found.device()), (&expected, device), "a sum, {kind:?}");
                nccl.broadcast(&mut found).unwrap();
                assert_eq!((&found, found.device()), (&expected, device), "a copy, {kind:?}");
                let all = nccl.all_gather(&found).unwrap();
                assert_eq!((&all, all.device()), (&expected.unsqueeze(0), device), "all of {kind:?}");
            }
        }
        let mut large = Tensor::full([3 << 24], 0.5, (Kind::Float, Device::Cuda(0)));
        nccl.all_reduce(&mut large).unwrap();
        assert_eq!(f64::try_from(large.sum(Kind::Double)).unwrap(), f64::from(3 << 23));
        nccl.barrier().unwrap();
        assert!(nccl.all_reduce(&mut Tensor::zeros([1], (Kind::Bool, Device::Cuda(0)))).is_err(), "NCCL has no bool");
        nccl.close(true);
        let reason = nccl.barrier().unwrap_err().reason;
        assert!(reason.contains("the connections have ended before"), "{reason}");
    }

    /// A library of another name that is there: the C library.
    #[test]
    fn a_library_without_the_functions_is_named() {
        let error = Functions::open(Some("libc.so.6")).unwrap_err();
        assert!(error.contains("ncclGetUniqueId is missing"), "{error}");
    }
}
