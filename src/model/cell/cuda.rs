//! CUDA's driver and its run-time compiler (NVRTC), which tch does not have: their functions are looked up in the shared libraries of the
//! driver and of libtorch.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::{CStr, CString, c_char, c_int, c_uint, c_void},
    ptr,
    sync::{Mutex, OnceLock, PoisonError},
};

use tch::{Kind, Tensor};

use super::super::{DeviceError, device};

const SOURCE: &str = include_str!("kernels.cu");
/// What `kernels.cu` includes.
const HEADERS: [(&CStr, &str); 3] = [
    (c"cell.h", include_str!("cell.h")),
    (c"reduction.h", include_str!("reduction.h")),
    (c"training.h", include_str!("training.h")),
];

/// Threads of a block.
const BLOCK: i64 = 128;
/// Most blocks of a grid in the dimension of rows; the kernels loop over the rest.
const GRID_ROWS: i64 = 65_535;

/// An object of the driver or of NVRTC, behind a pointer.
type Handle = *mut c_void;
type Status = c_int;

/// Declares a table of functions, and finds them in libraries that are loaded.
macro_rules! functions {
    ($table:ident { $($field:ident = $name:literal: fn($($argument:ty),*);)* }) => {
        #[derive(Debug)]
        struct $table {
            $($field: unsafe extern "C" fn($($argument),*) -> Status,)*
        }

        impl $table {
            fn find(library: Handle) -> Result<Self, String> {
                Ok(Self {
                    $($field: {
                        // SAFETY: a library that stays open, and a name that ends with NUL.
                        let found = unsafe { libc::dlsym(library, $name.as_ptr()) };
                        if found.is_null() {
                            return Err(format!("{:?} is missing", $name));
                        }
                        // SAFETY: the type is that of cuda.h or nvrtc.h.
                        unsafe { std::mem::transmute::<Handle, unsafe extern "C" fn($($argument),*) -> Status>(found) }
                    },)*
                })
            }
        }
    };
}

functions!(Driver {
    device_get = c"cuDeviceGet": fn(*mut c_int, c_int);
    attribute = c"cuDeviceGetAttribute": fn(*mut c_int, c_int, c_int);
    retain_context = c"cuDevicePrimaryCtxRetain": fn(*mut Handle, c_int);
    push_context = c"cuCtxPushCurrent_v2": fn(Handle);
    pop_context = c"cuCtxPopCurrent_v2": fn(*mut Handle);
    load_module = c"cuModuleLoadData": fn(*mut Handle, *const c_void);
    get_function = c"cuModuleGetFunction": fn(*mut Handle, Handle, *const c_char);
    launch = c"cuLaunchKernel": fn(
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
    );
    create_event = c"cuEventCreate": fn(*mut Handle, c_uint);
    record_event = c"cuEventRecord": fn(Handle, Handle);
    await_event = c"cuEventSynchronize": fn(Handle);
    destroy_event = c"cuEventDestroy_v2": fn(Handle);
    query_stream = c"cuStreamQuery": fn(Handle);
});

functions!(Nvrtc {
    create = c"nvrtcCreateProgram": fn(
        *mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
    );
    compile = c"nvrtcCompileProgram": fn(Handle, c_int, *const *const c_char);
    log_size = c"nvrtcGetProgramLogSize": fn(Handle, *mut usize);
    log = c"nvrtcGetProgramLog": fn(Handle, *mut c_char);
    cubin_size = c"nvrtcGetCUBINSize": fn(Handle, *mut usize);
    cubin = c"nvrtcGetCUBIN": fn(Handle, *mut c_char);
    destroy = c"nvrtcDestroyProgram": fn(*mut Handle);
});

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `_MINOR` of cuda.h.
const CAPABILITY: [c_int; 2] = [75, 76];
/// `CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING`: who waits sleeps.
const EVENT_FLAGS: c_uint = 1 | 2;
/// `CUDA_ERROR_OUT_OF_MEMORY` and `CUDA_ERROR_NOT_READY` of cuda.h.
const OUT_OF_MEMORY: Status = 2;
const NOT_READY: Status = 600;
/// libtorch queues its work on the default stream; tch cannot choose another one.
const DEFAULT_STREAM: Handle = ptr::null_mut();

/// A GPU, as CUDA's driver knows it.
#[derive(Debug)]
pub(in crate::model) struct Context {
    driver: &'static Driver,
    handle: Handle,
    device: c_int,
}

// SAFETY: handles of the driver may be used from any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// What kernels are for. Those of one use are compiled together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::model) enum Usage {
    Inference,
    Training,
}

/// The kernels of one use on one GPU, for one number format.
#[derive(Debug)]
pub(in crate::model) struct Module {
    context: &'static Context,
    kind: Kind,
    /// Never unloaded.
    functions: HashMap<Name, Kernel>,
}

/// Pass, and numbers in one access to memory.
type Name = (&'static str, i64);

#[derive(Debug)]
struct Kernel(Handle);

// SAFETY: as above.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// Values of GPUs, or why there are none.
type PerGpu<K, T> = Mutex<BTreeMap<K, Result<&'static T, String>>>;

/// A value of a GPU, made once per process. Out of memory is not remembered: there may be room the next time.
fn once<K: Ord, T>(
    all: &PerGpu<K, T>,
    key: K,
    new: impl FnOnce() -> Result<T, DeviceError>,
) -> Result<Result<&'static T, String>, DeviceError> {
    let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = all.get(&key) {
        return Ok(known.clone());
    }
    let made = match new() {
        Ok(value) => Ok(&*Box::leak(Box::new(value))),
        Err(error) if error.is_out_of_memory() => return Err(error),
        Err(error) => Err(error.to_string()),
    };
    Ok(all.entry(key).or_insert(made).clone())
}

/// The context of a GPU, or why the driver cannot be called. libtorch must have loaded its CUDA part.
///
/// # Errors
/// [`DeviceError::OutOfMemory`] when the GPU has no room for it.
pub(in crate::model) fn context(number: usize) -> Result<Result<&'static Context, String>, DeviceError> {
    static CONTEXTS: PerGpu<usize, Context> = Mutex::new(BTreeMap::new());
    once(&CONTEXTS, number, || Context::new(number))
}

/// The kernels for a GPU and a number format, compiled once per process; or why there are none, which is logged once: the GPU then computes with
/// libtorch's operations.
///
/// # Errors
/// [`DeviceError::OutOfMemory`] when the GPU has no room for them.
pub(in crate::model) fn module(
    number: usize,
    usage: Usage,
    kind: Kind,
) -> Result<Result<&'static Module, String>, DeviceError> {
    static MODULES: PerGpu<(usize, Usage, &str), Module> = Mutex::new(BTreeMap::new());
    let Some(type_name) = type_name(kind) else { return Ok(Err(format!("there are none for {kind:?}"))) };
    once(&MODULES, (number, usage, type_name), || {
        let made = Module::new(number, usage, kind, type_name);
        if let Err(error) = &made
            && !error.is_out_of_memory()
        {
            tracing::warn!(device = number, %error, "no kernels of our own on this GPU; inference and training will be slower");
        }
        made
    })
}

impl Context {
    fn new(number: usize) -> Result<Self, DeviceError> {
        let driver = driver().map_err(failed)?;
        // libtorch makes a context on the GPU with its first tensor there.
        let _first = Tensor::f_zeros([1], (Kind::Float, tch::Device::Cuda(number)))?;
        let (mut device, mut handle) = (0, ptr::null_mut());
        let number = c_int::try_from(number).map_err(|error| failed(error.to_string()))?;
        // SAFETY: pointers to variables of this function.
        unsafe {
            checked("cuDeviceGet", (driver.device_get)(&raw mut device, number))?;
            checked("cuDevicePrimaryCtxRetain", (driver.retain_context)(&raw mut handle, device))?;
        }
        Ok(Self { driver, handle, device })
    }

    /// Such as `sm_90`.
    fn architecture(&self) -> Result<String, DeviceError> {
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: a pointer to a variable of this function.
            let status = unsafe { (self.driver.attribute)(&raw mut value, which, self.device) };
            checked("cuDeviceGetAttribute", status).map(|()| value)
        };
        Ok(format!("sm_{}{}", attribute(CAPABILITY[0])?, attribute(CAPABILITY[1])?))
    }

    fn make_current(&self) -> Result<Current, DeviceError> {
        // SAFETY: a context that this process retains for ever.
        checked("cuCtxPushCurrent", unsafe { (self.driver.push_context)(self.handle) })?;
        Ok(Current(self.driver))
    }

    /// Waits for all work that is in libtorch's stream, but not for what other threads add to it meanwhile.
    pub(in crate::model) fn wait(&self) -> Result<(), DeviceError> {
        let _current = self.make_current()?;
        let mut event = ptr::null_mut();
        // SAFETY: an event of this context, destroyed once.
        unsafe {
            checked("cuEventCreate", (self.driver.create_event)(&raw mut event, EVENT_FLAGS))?;
            let recorded = checked("cuEventRecord", (self.driver.record_event)(event, DEFAULT_STREAM));
            let awaited = recorded.and_then(|()| checked("cuEventSynchronize", (self.driver.await_event)(event)));
            (self.driver.destroy_event)(event);
            awaited
        }
    }

    /// Whether the GPU still takes work: after a failed kernel every call fails until the process ends.
    pub(in crate::model) fn is_alive(&self) -> bool {
        let Ok(_current) = self.make_current() else { return false };
        // SAFETY: the default stream of this context.
        matches!(unsafe { (self.driver.query_stream)(DEFAULT_STREAM) }, 0 | NOT_READY)
    }
}

impl Module {
    fn new(number: usize, usage: Usage, kind: Kind, type_name: &str) -> Result<Self, DeviceError> {
        let context = context(number)?.map_err(failed)?;
        let binary = compile(nvrtc().map_err(failed)?, &context.architecture()?, usage, type_name).map_err(failed)?;
        let _current = context.make_current()?;
        let driver = context.driver;
        let mut module = ptr::null_mut();
        // SAFETY: a binary of NVRTC, and a pointer to a variable of this function.
        checked("cuModuleLoadData", unsafe { (driver.load_module)(&raw mut module, binary.as_ptr().cast()) })?;
        let function = |name: Name| {
            let (pass, together) = name;
            let text = CString::new(format!("{pass}_{together}")).map_err(|error| failed(error.to_string()))?;
            let mut function = ptr::null_mut();
            // SAFETY: a module of this context, a name that ends with NUL, and a pointer to a variable of this function.
            let status = unsafe { (driver.get_function)(&raw mut function, module, text.as_ptr()) };
            checked("cuModuleGetFunction", status).map(|()| (name, Kernel(function)))
        };
        Ok(Self { context, kind, functions: usage.names().map(function).collect::<Result<_, DeviceError>>()? })
    }

    /// Starts a pass; it runs after all work that was given to the GPU before.
    ///
    /// # Safety
    /// `arguments` are those of the pass, and their pointers are to memory of this GPU that stays allocated until it has run.
    pub(super) unsafe fn launch(
        &self,
        pass: &'static str,
        kind: Kind,
        together: i64,
        [rows, columns]: [i64; 2],
        arguments: *const c_void,
    ) -> Result<(), DeviceError> {
        let kernel = self.functions.get(&(pass, together)).filter(|_| kind == self.kind);
        let kernel = kernel.ok_or_else(|| DeviceError::internal(format!("no kernel {pass} for {kind:?}")))?;
        let _current = self.context.make_current()?;
        let blocks = (columns / together + BLOCK - 1) / BLOCK;
        let mut parameters = [arguments.cast_mut()];
        // SAFETY: the kernel takes one structure, which the driver copies before it returns.
        let status = unsafe {
            (self.context.driver.launch)(
                kernel.0,
                blocks as c_uint,
                rows.min(GRID_ROWS) as c_uint,
                2,
                BLOCK as c_uint,
                1,
                1,
                0,
                DEFAULT_STREAM,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        checked("cuLaunchKernel", status)
    }
}

/// The context of a GPU is that of this thread until this is dropped.
struct Current(&'static Driver);

impl Drop for Current {
    fn drop(&mut self) {
        let mut former = ptr::null_mut();
        // SAFETY: a pointer to a variable of this function.
        unsafe { (self.0.pop_context)(&raw mut former) };
    }
}

impl Usage {
    /// Names of its kernels in `kernels.cu`.
    fn names(self) -> impl Iterator<Item = Name> {
        let passes = match self {
            Self::Inference => ["lstm_cell", "lstm_output", "mix", "mix_sum", "mix_max"],
            Self::Training => {
                ["lstm_cell_kept", "lstm_output", "lstm_cell_backward", "lstm_output_backward", "dropout"]
            }
        };
        passes.into_iter().flat_map(|pass| [1, 4].map(|together| (pass, together)))
    }
}

/// The type of `cell.h` for a number format.
fn type_name(kind: Kind) -> Option<&'static str> {
    match kind {
        Kind::Float => Some("float"),
        Kind::BFloat16 => Some("BFloat16"),
        Kind::Half => Some("Float16"),
        _ => None,
    }
}

/// As libtorch's own errors, of which some are about memory.
fn failed(reason: String) -> DeviceError {
    tch::TchError::Torch(format!("CUDA: {reason}")).into()
}

/// The result of a call of the driver.
fn checked(call: &str, status: Status) -> Result<(), DeviceError> {
    match status {
        0 => Ok(()),
        OUT_OF_MEMORY => Err(failed(format!("{call}: out of memory"))),
        code => Err(failed(format!("{call}: error {code}"))),
    }
}

/// The result of a call of NVRTC.
fn compiled(call: &str, status: Status) -> Result<(), String> {
    if status == 0 { Ok(()) } else { Err(format!("{call}: error {status}")) }
}

fn driver() -> Result<&'static Driver, String> {
    static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
    DRIVER.get_or_init(|| Driver::find(open(c"libcuda.so.1")?)).as_ref().map_err(String::clone)
}

/// `libcaffe2_nvrtc.so` links NVRTC, wherever the wheel of it lies; libtorch opens the same library for its own fuser.
fn nvrtc() -> Result<&'static Nvrtc, String> {
    static NVRTC: OnceLock<Result<Nvrtc, String>> = OnceLock::new();
    let find = || {
        let folder = device::libtorch_folder().ok_or("the folder of libtorch is not known")?;
        let path = folder.join("libcaffe2_nvrtc.so");
        let path = CString::new(path.as_os_str().as_encoded_bytes()).map_err(|error| error.to_string())?;
        Nvrtc::find(open(&path)?)
    };
    NVRTC.get_or_init(find).as_ref().map_err(String::clone)
}

fn open(name: &CStr) -> Result<Handle, String> {
    // SAFETY: a name that ends with NUL; libraries of NVIDIA and libtorch, which this process loads anyway.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() { Err(device::dl_error()) } else { Ok(library) }
}

/// The kernels as machine code of an architecture, such as `sm_90`.
fn compile(nvrtc: &Nvrtc, architecture: &str, usage: Usage, type_name: &str) -> Result<Vec<u8>, String> {
    let text = |text: &str| CString::new(text).map_err(|error| error.to_string());
    let source = text(SOURCE)?;
    let texts = HEADERS.iter().map(|(_, header)| text(header)).collect::<Result<Vec<_>, _>>()?;
    let headers: Vec<_> = texts.iter().map(|header| header.as_ptr()).collect();
    let mut words = vec![
        text(&format!("--gpu-architecture={architecture}"))?,
        text("--std=c++17")?,
        text(&format!("--define-macro=ELMO_TYPE={type_name}"))?,
    ];
    if let Usage::Training = usage {
        words.push(text("--define-macro=ELMO_TRAINING")?);
    }
    let options: Vec<_> = words.iter().map(|word| word.as_ptr()).collect();
    let mut program = ptr::null_mut();
    // SAFETY: texts that end with NUL and live until the end of this function.
    let created = unsafe {
        let names = HEADERS.map(|(name, _)| name.as_ptr());
        let (n, name) = (HEADERS.len() as c_int, c"kernels.cu".as_ptr());
        (nvrtc.create)(&raw mut program, source.as_ptr(), name, n, headers.as_ptr(), names.as_ptr())
    };
    compiled("nvrtcCreateProgram", created)?;
    // SAFETY: a program that was created, with texts that live until the end of this function.
    let status = unsafe { (nvrtc.compile)(program, options.len() as c_int, options.as_ptr()) };
    let part = |size: unsafe extern "C" fn(Handle, *mut usize) -> Status,
                get: unsafe extern "C" fn(Handle, *mut c_char) -> Status| {
        let mut length = 0;
        // SAFETY: the program, and a pointer to a variable of this function.
        compiled("the size of a result of NVRTC", unsafe { size(program, &raw mut length) })?;
        let mut bytes = vec![0_u8; length];
        // SAFETY: the program, and room for as many bytes as it wants to write.
        compiled("a result of NVRTC", unsafe { get(program, bytes.as_mut_ptr().cast()) })?;
        Ok::<_, String>(bytes)
    };
    let result = match status {
        0 => part(nvrtc.cubin_size, nvrtc.cubin),
        code => {
            let log = part(nvrtc.log_size, nvrtc.log).unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            Err(format!("NVRTC, for {architecture}: error {code} {}", log.trim_end_matches('\0')))
        }
    };
    // SAFETY: destroyed once.
    unsafe { (nvrtc.destroy)(&raw mut program) };
    result
}
