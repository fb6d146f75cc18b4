//! Gloo and the key-value store of libtorch, through the C interface in `shim/c10d.cpp`.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    ptr::{self, NonNull},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tch::{Device, Tensor};

use super::{
    Collective, CollectiveError, MEETING, Meeting, Patience,
    board::{LONGEST, Notes},
    failed,
};

/// Names the network interface of Gloo, as PyTorch does.
const INTERFACE: &str = "GLOO_SOCKET_IFNAME";
/// How long a wait for other processes lasts until it is decided whether to go on with it.
const SLICE_MS: i64 = 100;
/// Most bytes of a value in the store.
const MOST: usize = LONGEST;
/// What the system says of a port that is taken.
const TAKEN: &str = "EADDRINUSE";

type Begun = *mut c_void;

unsafe extern "C" {
    fn elmo_c10d_free(text: *mut c_char);
    fn elmo_c10d_store(
        host: *const c_char,
        port: u16,
        is_server: bool,
        listener: c_int,
        prefix: *const c_char,
        timeout_ms: i64,
        error: *mut *mut c_char,
    ) -> *mut c_void;
    fn elmo_c10d_store_drop(store: *mut c_void);
    fn elmo_c10d_store_set(
        store: *mut c_void,
        key: *const c_char,
        data: *const u8,
        n: usize,
        error: *mut *mut c_char,
    ) -> bool;
    fn elmo_c10d_store_get(
        store: *mut c_void,
        key: *const c_char,
        data: *mut u8,
        capacity: usize,
        n: *mut usize,
        error: *mut *mut c_char,
    ) -> bool;
    fn elmo_c10d_store_peek(
        store: *mut c_void,
        key: *const c_char,
        is_there: *mut bool,
        data: *mut u8,
        capacity: usize,
        n: *mut usize,
        error: *mut *mut c_char,
    ) -> bool;
    fn elmo_c10d_store_first(
        store: *mut c_void,
        key: *const c_char,
        data: *const u8,
        n: usize,
        error: *mut *mut c_char,
    ) -> bool;
    fn elmo_c10d_store_add(
        store: *mut c_void,
        key: *const c_char,
        number: i64,
        sum: *mut i64,
        error: *mut *mut c_char,
    ) -> bool;
    fn elmo_c10d_gloo(
        store: *mut c_void,
        rank: c_int,
        size: c_int,
        interface: *const c_char,
        address: *const c_char,
        timeout_ms: i64,
        error: *mut *mut c_char,
    ) -> *mut c_void;
    fn elmo_c10d_gloo_drop(group: *mut c_void);
    fn elmo_c10d_all_reduce(group: *mut c_void, tensor: *mut c_void, error: *mut *mut c_char) -> Begun;
    fn elmo_c10d_all_gather(group: *mut c_void, own: *mut c_void, all: *mut c_void, error: *mut *mut c_char) -> Begun;
    fn elmo_c10d_broadcast(group: *mut c_void, tensor: *mut c_void, error: *mut *mut c_char) -> Begun;
    fn elmo_c10d_barrier(group: *mut c_void, error: *mut *mut c_char) -> Begun;
    fn elmo_c10d_work_wait(work: Begun, timeout_ms: i64, has_ended: *mut bool, error: *mut *mut c_char) -> bool;
    fn elmo_c10d_work_drop(work: Begun);
}

const TELLING: &str = "telling the other processes";
const ASKING: &str = "asking the other processes";
const CONNECTING: &str = "connecting to the other processes";

/// Who reports an error.
#[derive(Debug, Clone, Copy)]
struct Who {
    rank: usize,
    size: usize,
}

impl Who {
    /// Makes a call that returns whether it succeeded, and sets a text if not.
    fn call(self, doing: &'static str, call: impl FnOnce(*mut *mut c_char) -> bool) -> Result<(), CollectiveError> {
        let mut error: *mut c_char = ptr::null_mut();
        if call(&mut error) {
            return Ok(());
        }
        let mut reason = "no reason was given".to_owned();
        if !error.is_null() {
            // SAFETY: a NUL-terminated text of the shim, which nothing else frees.
            unsafe {
                reason = CStr::from_ptr(error).to_string_lossy().into_owned();
                elmo_c10d_free(error);
            }
        }
        // The place in libtorch's sources and the backtrace are of no use.
        let reason = reason.lines().next().unwrap_or_default().to_owned();
        Err(failed(self.rank, self.size, doing, reason))
    }

    fn open(
        self,
        doing: &'static str,
        call: impl FnOnce(*mut *mut c_char) -> *mut c_void,
    ) -> Result<NonNull<c_void>, CollectiveError> {
        let mut opened = ptr::null_mut();
        self.call(doing, |error| {
            opened = call(error);
            !opened.is_null()
        })?;
        NonNull::new(opened).ok_or_else(|| failed(self.rank, self.size, doing, "nothing was opened"))
    }

    fn text(self, text: &str) -> Result<CString, CollectiveError> {
        CString::new(text).map_err(|_| failed(self.rank, self.size, "reading the environment", "a value has a NUL"))
    }
}

fn milliseconds(limit: Duration) -> i64 {
    i64::try_from(limit.as_millis()).unwrap_or(i64::MAX)
}

/// The key-value store at which the processes meet. It lives as long as the run: process 0 is its server.
#[derive(Debug)]
pub(super) struct Store {
    store: NonNull<c_void>,
    who: Who,
}

// SAFETY: `TCPStore` locks itself.
unsafe impl Send for Store {}
// SAFETY: as above.
unsafe impl Sync for Store {}

impl Store {
    pub(super) fn open(meeting: &Meeting, limit: Duration) -> Result<Self, CollectiveError> {
        let who = Who { rank: meeting.rank, size: meeting.size };
        let (host, prefix) = (who.text(&meeting.host)?, who.text(&meeting.run)?);
        let is_server = meeting.is_server();
        let listener = meeting.listener.filter(|_| is_server).unwrap_or(-1);
        let store = who.open(MEETING, |error| {
            // SAFETY: NUL-terminated texts that outlive the call.
            unsafe {
                let (host, prefix) = (host.as_ptr(), prefix.as_ptr());
                elmo_c10d_store(host, meeting.port, is_server, listener, prefix, milliseconds(limit), error)
            }
        });
        let with_place = |mut error: CollectiveError| {
            let todo = match is_server {
                true if error.reason.contains(TAKEN) => {
                    "; another program has this port: give a free one in MASTER_PORT to all processes".to_owned()
                }
                true => String::new(),
                false if meeting.has_store => format!("; torchrun does not answer there within {} s", limit.as_secs()),
                false => format!("; process 0, which listens there, has not joined within {} s", limit.as_secs()),
            };
            error.reason = format!("{}:{}: {}{todo}", meeting.host, meeting.port, error.reason);
            error
        };
        Ok(Self { store: store.map_err(with_place)?, who })
    }

    pub(super) fn set(&self, key: &str, value: &[u8]) -> Result<(), CollectiveError> {
        let key = self.who.text(key)?;
        // SAFETY: the store lives; the pointers are valid during the call.
        self.who.call(TELLING, |error| unsafe {
            elmo_c10d_store_set(self.store.as_ptr(), key.as_ptr(), value.as_ptr(), value.len(), error)
        })
    }

    /// Waits for a value.
    pub(super) fn get(&self, key: &str) -> Result<Vec<u8>, CollectiveError> {
        let (key, mut value, mut n) = (self.who.text(key)?, vec![0; MOST], 0);
        // SAFETY: as above; at most `MOST` bytes are written.
        self.who.call(ASKING, |error| unsafe {
            elmo_c10d_store_get(self.store.as_ptr(), key.as_ptr(), value.as_mut_ptr(), MOST, &mut n, error)
        })?;
        value.truncate(n);
        Ok(value)
    }
}

impl Notes for Arc<Store> {
    fn add(&self, key: &str, number: i64) -> Result<i64, CollectiveError> {
        let (key, mut sum) = (self.who.text(key)?, 0);
        // SAFETY: as in `set`.
        self.who.call(ASKING, |error| unsafe {
            elmo_c10d_store_add(self.store.as_ptr(), key.as_ptr(), number, &mut sum, error)
        })?;
        Ok(sum)
    }

    fn first(&self, key: &str, value: &[u8]) -> Result<(), CollectiveError> {
        let key = self.who.text(key)?;
        // SAFETY: as in `set`.
        self.who.call(TELLING, |error| unsafe {
            elmo_c10d_store_first(self.store.as_ptr(), key.as_ptr(), value.as_ptr(), value.len(), error)
        })
    }

    fn peek(&self, key: &str) -> Result<Option<Vec<u8>>, CollectiveError> {
        let (key, mut is_there, mut value, mut n) = (self.who.text(key)?, false, vec![0; MOST], 0);
        // SAFETY: as in `get`.
        self.who.call(ASKING, |error| unsafe {
            let value = value.as_mut_ptr();
            elmo_c10d_store_peek(self.store.as_ptr(), key.as_ptr(), &mut is_there, value, MOST, &mut n, error)
        })?;
        value.truncate(n);
        Ok(is_there.then_some(value))
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: opened by the shim, dropped once.
        unsafe { elmo_c10d_store_drop(self.store.as_ptr()) };
    }
}

/// Gloo, on tensors of the host.
#[derive(Debug)]
pub(super) struct Gloo {
    /// One call at a time: calls are matched between processes by their order. `None` when it has ended.
    group: Mutex<Option<NonNull<c_void>>>,
    who: Who,
    patience: Patience,
    /// Dropped after the group.
    _store: Arc<Store>,
}

// SAFETY: every use holds the lock.
unsafe impl Send for Gloo {}
// SAFETY: as above.
unsafe impl Sync for Gloo {}

/// A call that has begun.
struct Work(NonNull<c_void>);

impl Work {
    /// Whether it has ended after some time.
    fn wait(&self, who: Who, doing: &'static str) -> Result<bool, CollectiveError> {
        let mut has_ended = false;
        // SAFETY: begun by the shim, and not dropped yet.
        who.call(doing, |error| unsafe { elmo_c10d_work_wait(self.0.as_ptr(), SLICE_MS, &mut has_ended, error) })?;
        Ok(has_ended)
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // SAFETY: begun by the shim, dropped once.
        unsafe { elmo_c10d_work_drop(self.0.as_ptr()) };
    }
}

impl Gloo {
    pub(super) fn open(store: Arc<Store>, meeting: &Meeting, patience: Patience) -> Result<Self, CollectiveError> {
        let who = store.who;
        let interface = who.text(&std::env::var(INTERFACE).unwrap_or_default())?;
        let address = match interface.is_empty() {
            true => meeting.own_address().map_err(|e| {
                let reason = format!("{e}; give the network interface in {INTERFACE}");
                failed(who.rank, who.size, CONNECTING, reason)
            })?,
            false => String::new(),
        };
        let address = who.text(&address)?;
        let group = who.open(CONNECTING, |error| {
            let (rank, size) = (meeting.rank as c_int, meeting.size as c_int);
            let limit = milliseconds(patience.limit);
            // SAFETY: the store lives, and outlives the group.
            unsafe {
                let (interface, address) = (interface.as_ptr(), address.as_ptr());
                elmo_c10d_gloo(store.store.as_ptr(), rank, size, interface, address, limit, error)
            }
        })?;
        Ok(Self { group: Mutex::new(Some(group)), who, patience, _store: store })
    }

    /// Makes a call, and waits until all processes have made it.
    fn call(
        &self,
        doing: &'static str,
        call: impl FnOnce(*mut c_void, *mut *mut c_char) -> Begun,
    ) -> Result<(), CollectiveError> {
        let wrong = |reason: String| failed(self.who.rank, self.who.size, doing, reason);
        let mut group = self.group.lock().unwrap_or_else(PoisonError::into_inner);
        let open = group.ok_or_else(|| wrong("the connections have ended before".to_owned()))?;
        let work = Work(self.who.open(doing, |error| call(open.as_ptr(), error))?);
        let started = Instant::now();
        while !work.wait(self.who, doing)? {
            if let Err(reason) = self.patience.check(started) {
                // Gloo cannot give up a call, nor be closed during one. This process will end.
                std::mem::forget(work);
                *group = None;
                return Err(wrong(reason));
            }
        }
        Ok(())
    }

    /// Makes an exchange in place on the host.
    fn in_place(
        &self,
        doing: &'static str,
        tensor: &mut Tensor,
        call: unsafe extern "C" fn(*mut c_void, *mut c_void, *mut *mut c_char) -> Begun,
    ) -> Result<(), CollectiveError> {
        let _no_gradients = tch::no_grad_guard();
        let wrong = |e: tch::TchError| failed(self.who.rank, self.who.size, doing, e);
        let mut host = tensor.f_to_device(Device::Cpu).and_then(|t| t.f_contiguous()).map_err(wrong)?;
        // SAFETY: the group lives, and a handle of tch points to an `at::Tensor`.
        self.call(doing, |group, error| unsafe { call(group, host.as_mut_ptr().cast(), error) })?;
        if host.data_ptr() != tensor.data_ptr() {
            tensor.f_copy_(&host).map_err(wrong)?;
        }
        Ok(())
    }
}

impl Collective for Gloo {
    fn all_reduce(&self, tensor: &mut Tensor) -> Result<(), CollectiveError> {
        self.in_place("summing over all processes", tensor, elmo_c10d_all_reduce)
    }

    fn all_gather(&self, tensor: &Tensor) -> Result<Tensor, CollectiveError> {
        let _no_gradients = tch::no_grad_guard();
        let doing = "collecting from all processes";
        let wrong = |e: tch::TchError| failed(self.who.rank, self.who.size, doing, e);
        let own = tensor.f_to_device(Device::Cpu).and_then(|t| t.f_reshape([-1])).and_then(|t| t.f_contiguous());
        let mut own = own.map_err(wrong)?;
        // Gloo wants one axis.
        let numbers = (self.who.size * own.numel()) as i64;
        let mut all = Tensor::f_zeros([numbers], (own.kind(), Device::Cpu)).map_err(wrong)?;
        // SAFETY: as in `in_place`.
        self.call(doing, |group, error| unsafe {
            elmo_c10d_all_gather(group, own.as_mut_ptr().cast(), all.as_mut_ptr().cast(), error)
        })?;
        let shape: Vec<i64> = std::iter::once(self.who.size as i64).chain(tensor.size()).collect();
        all.f_view(shape.as_slice()).and_then(|all| all.f_to_device(tensor.device())).map_err(wrong)
    }

    fn broadcast(&self, tensor: &mut Tensor) -> Result<(), CollectiveError> {
        self.in_place("copying from process 0", tensor, elmo_c10d_broadcast)
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        // SAFETY: the group lives.
        self.call("waiting for all processes", |group, error| unsafe { elmo_c10d_barrier(group, error) })
    }

    fn close(&self, _in_order: bool) {
        let group = self.group.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(group) = group {
            // SAFETY: opened by the shim, dropped once; no call is under way.
            unsafe { elmo_c10d_gloo_drop(group.as_ptr()) };
        }
    }
}

impl Drop for Gloo {
    fn drop(&mut self) {
        self.close(false);
    }
}
