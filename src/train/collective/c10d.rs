//! Gloo and the key-value store of libtorch, through the C interface in `shim/c10d.cpp`.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    ptr::{self, NonNull},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tch::{Device, Tensor};

use super::{Collective, CollectiveError, Meeting, failed};

/// Names the network interface of Gloo, as PyTorch does.
const INTERFACE: &str = "GLOO_SOCKET_IFNAME";

unsafe extern "C" {
    fn elmo_c10d_free(text: *mut c_char);
    fn elmo_c10d_store(
        host: *const c_char,
        port: u16,
        is_server: bool,
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
        n: usize,
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
    fn elmo_c10d_all_reduce(group: *mut c_void, tensor: *mut c_void, error: *mut *mut c_char) -> bool;
    fn elmo_c10d_all_gather(group: *mut c_void, own: *mut c_void, all: *mut c_void, error: *mut *mut c_char) -> bool;
    fn elmo_c10d_broadcast(group: *mut c_void, tensor: *mut c_void, error: *mut *mut c_char) -> bool;
    fn elmo_c10d_barrier(group: *mut c_void, error: *mut *mut c_char) -> bool;
}

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
        let is_server = meeting.rank == 0 && !meeting.has_store;
        let store = who.open("meeting the other processes", |error| {
            // SAFETY: NUL-terminated texts that outlive the call.
            unsafe {
                let (host, prefix) = (host.as_ptr(), prefix.as_ptr());
                elmo_c10d_store(host, meeting.port, is_server, prefix, milliseconds(limit), error)
            }
        });
        let with_place = |mut error: CollectiveError| {
            error.reason = format!("{}:{}: {}", meeting.host, meeting.port, error.reason);
            error
        };
        Ok(Self { store: store.map_err(with_place)?, who })
    }

    pub(super) fn set(&self, key: &str, value: &[u8]) -> Result<(), CollectiveError> {
        let key = self.who.text(key)?;
        // SAFETY: the store lives; the pointers are valid during the call.
        self.who.call("telling the other processes", |error| unsafe {
            elmo_c10d_store_set(self.store.as_ptr(), key.as_ptr(), value.as_ptr(), value.len(), error)
        })
    }

    /// Waits for a value of the length of `value`.
    pub(super) fn get(&self, key: &str, value: &mut [u8]) -> Result<(), CollectiveError> {
        let key = self.who.text(key)?;
        // SAFETY: as above.
        self.who.call("asking the other processes", |error| unsafe {
            elmo_c10d_store_get(self.store.as_ptr(), key.as_ptr(), value.as_mut_ptr(), value.len(), error)
        })
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
    /// One call at a time: calls are matched between processes by their order.
    group: Mutex<NonNull<c_void>>,
    who: Who,
    /// Dropped after the group.
    _store: Store,
}

// SAFETY: every use holds the lock.
unsafe impl Send for Gloo {}
// SAFETY: as above.
unsafe impl Sync for Gloo {}

impl Gloo {
    pub(super) fn open(store: Store, meeting: &Meeting, limit: Duration) -> Result<Self, CollectiveError> {
        let who = store.who;
        let interface = who.text(&std::env::var(INTERFACE).unwrap_or_default())?;
        let address = match interface.is_empty() {
            true => meeting.own_address().map_err(|e| {
                let reason = format!("{e}; give the network interface in {INTERFACE}");
                failed(who.rank, who.size, "connecting to the other processes", reason)
            })?,
            false => String::new(),
        };
        let address = who.text(&address)?;
        let group = who.open("connecting to the other processes", |error| {
            let (rank, size) = (meeting.rank as c_int, meeting.size as c_int);
            // SAFETY: the store lives, and outlives the group.
            unsafe {
                let (interface, address) = (interface.as_ptr(), address.as_ptr());
                elmo_c10d_gloo(store.store.as_ptr(), rank, size, interface, address, milliseconds(limit), error)
            }
        })?;
        Ok(Self { group: Mutex::new(group), who, _store: store })
    }

    fn call(
        &self,
        doing: &'static str,
        call: impl FnOnce(*mut c_void, *mut *mut c_char) -> bool,
    ) -> Result<(), CollectiveError> {
        let group = self.group.lock().unwrap_or_else(PoisonError::into_inner);
        self.who.call(doing, |error| call(group.as_ptr(), error))
    }

    /// Makes an exchange in place on the host.
    fn in_place(
        &self,
        doing: &'static str,
        tensor: &mut Tensor,
        call: unsafe extern "C" fn(*mut c_void, *mut c_void, *mut *mut c_char) -> bool,
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
}

impl Drop for Gloo {
    fn drop(&mut self) {
        let group = self.group.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: opened by the shim, dropped once.
        unsafe { elmo_c10d_gloo_drop(group.as_ptr()) };
    }
}
