//! Devices: parsing their names, resolving them, and configuring libtorch for them.

use std::{cell::OnceCell, fmt, path::PathBuf, sync::OnceLock};

use tch::{Cuda, Device, Kind, Tensor};

use super::{DeviceError, Precision, cell::cuda as kernels, mkl};
use crate::spec::SpecError;

/// A device as the user names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeviceChoice {
    /// Every CUDA device, or the CPU where there is none.
    Auto,
    /// The CPU.
    Cpu,
    /// `cuda:N`, or every CUDA device.
    Cuda(Option<usize>),
}

/// One device of this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeviceName {
    /// The CPU.
    Cpu,
    /// CUDA device `N`.
    Cuda(usize),
}

impl DeviceName {
    pub(crate) fn torch(self) -> Device {
        match self {
            Self::Cpu => Device::Cpu,
            Self::Cuda(n) => Device::Cuda(n),
        }
    }

    /// Configures libtorch for this device, before its first tensor.
    ///
    /// # Errors
    /// [`DeviceError::Missing`] when libtorch does not see the device.
    pub(crate) fn set_up(self) -> Result<(), DeviceError> {
        set_up_cpu();
        match self {
            Self::Cpu => Ok(()),
            Self::Cuda(n) => cuda(Some(n)).map(|_| ()),
        }
    }

    /// Bytes of a GPU's memory that are free; `None` for the CPU, and where the CUDA runtime does not tell.
    pub fn free_memory(self) -> Option<u64> {
        let Self::Cuda(number) = self else { return None };
        self.set_up().ok()?;
        memory_of(number).map(|[free, _]| free)
    }

    /// Bytes of a GPU's memory, as [`DeviceName::free_memory`].
    pub(crate) fn memory(self) -> Option<u64> {
        let Self::Cuda(number) = self else { return None };
        self.set_up().ok()?;
        memory_of(number).map(|[_, all]| all)
    }

    /// Whether a GPU runs kernels of our own in a precision, or why it computes with libtorch's operations, which takes longer; `None` for
    /// the CPU.
    pub fn kernels(self, precision: Precision) -> Option<Result<(), String>> {
        let Self::Cuda(number) = self else { return None };
        let kernels = || kernels::module(number, kernels::Usage::Inference, precision.kind());
        let found = self.set_up().and_then(|()| kernels());
        Some(found.map_err(|error| error.to_string()).and_then(|module| module.map(|_| ())))
    }

    /// Waits until the device has finished all work that libtorch has given it. A CPU has no queue.
    ///
    /// # Errors
    /// [`DeviceError`] when that work has failed, or there is no such device.
    pub fn synchronize(self) -> Result<(), DeviceError> {
        let Self::Cuda(number) = self else { return Ok(()) };
        self.set_up()?;
        match kernels::context(number)? {
            Ok(context) => context.wait(),
            // A copy to the host waits.
            Err(_) => {
                let zero = Tensor::f_zeros([1], (Kind::Float, self.torch()))?;
                Ok(zero.f_to_device(Device::Cpu).map(|_| ())?)
            }
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(n) => write!(f, "cuda:{n}"),
        }
    }
}

/// Parses `auto`, `cpu`, `cuda`, `cuda:0`, `cuda:0,1`, `cuda:0,cuda:1`.
///
/// # Errors
/// [`SpecError::Value`] for any other word, [`SpecError::Conflict`] when a device is named twice, or a GPU beside others.
pub fn parse_devices(text: &str) -> Result<Vec<DeviceChoice>, SpecError> {
    let wrong = || SpecError::Value {
        option: "device",
        value: text.to_owned(),
        legal: vec!["auto", "cpu", "cuda", "cuda:0", "cuda:0,1"],
    };
    match text {
        "auto" => return Ok(vec![DeviceChoice::Auto]),
        "cpu" => return Ok(vec![DeviceChoice::Cpu]),
        "cuda" => return Ok(vec![DeviceChoice::Cuda(None)]),
        _ => {}
    }
    let mut words = text.split(',').map(str::trim);
    if text.contains(',') && words.any(|word| matches!(word, "auto" | "cpu" | "cuda")) {
        let reason = "names several devices: they must be GPUs, each by its number, as in cuda:0,1";
        return Err(SpecError::Conflict(format!("device: {text:?} {reason}")));
    }
    let numbers = text.strip_prefix("cuda:").ok_or_else(wrong)?;
    let mut devices = Vec::new();
    for number in numbers.split(',').map(str::trim) {
        let number = number.strip_prefix("cuda:").unwrap_or(number);
        let device = DeviceChoice::Cuda(Some(number.parse().map_err(|_| wrong())?));
        if devices.contains(&device) {
            return Err(SpecError::Conflict(format!("device: {text:?} names cuda:{number} twice")));
        }
        devices.push(device);
    }
    Ok(devices)
}

/// Resolves choices to the devices of this machine, each once. An empty list resolves to the CPU.
///
/// # Errors
/// [`DeviceError::Missing`] when a CUDA device is requested that libtorch does not see; it names the available ones.
pub fn resolve_devices(choices: &[DeviceChoice]) -> Result<Vec<DeviceName>, DeviceError> {
    let mut names = Vec::new();
    for choice in choices {
        match choice {
            DeviceChoice::Cpu => names.push(DeviceName::Cpu),
            DeviceChoice::Auto => match cuda_devices() {
                0 => names.push(DeviceName::Cpu),
                n => names.extend((0..n).map(DeviceName::Cuda)),
            },
            DeviceChoice::Cuda(which) => names.extend(cuda(*which)?),
        }
    }
    if names.is_empty() {
        names.push(DeviceName::Cpu);
    }
    // `auto` and `cpu` may resolve to the same device.
    let mut seen = std::collections::HashSet::new();
    names.retain(|name| seen.insert(*name));
    Ok(names)
}

fn cuda(which: Option<usize>) -> Result<Vec<DeviceName>, DeviceError> {
    let there = cuda_devices();
    let asked = which.map_or_else(|| "cuda".to_owned(), |n| format!("cuda:{n}"));
    if there == 0 {
        let found = match cuda_library() {
            CudaLibrary::Absent => "this libtorch has no CUDA part (TORCH=cuda make libtorch fetches it)".to_owned(),
            CudaLibrary::Broken(why) => format!("the CUDA part of libtorch does not load: {why}"),
            CudaLibrary::Open => {
                "libtorch sees no CUDA device (driver missing, or CUDA_VISIBLE_DEVICES hides it)".to_owned()
            }
        };
        return Err(DeviceError::Missing { asked, found });
    }
    match which {
        None => Ok((0..there).map(DeviceName::Cuda).collect()),
        Some(n) if n < there => Ok(vec![DeviceName::Cuda(n)]),
        Some(_) => Err(DeviceError::Missing { asked, found: format!("{there} CUDA device(s), numbered from 0") }),
    }
}

/// CUDA devices that libtorch sees.
pub fn cuda_devices() -> usize {
    match cuda_library() {
        CudaLibrary::Open => usize::try_from(Cuda::device_count()).unwrap_or(0),
        CudaLibrary::Absent | CudaLibrary::Broken(_) => 0,
    }
}

/// Free and all memory, as the CUDA runtime reports it that libtorch has loaded: tch has no function for it.
fn memory_of(number: usize) -> Option<[u64; 2]> {
    type SetDevice = unsafe extern "C" fn(libc::c_int) -> libc::c_int;
    type MemGetInfo = unsafe extern "C" fn(*mut usize, *mut usize) -> libc::c_int;
    // SAFETY: NUL-terminated names, looked up in the libraries that are already loaded.
    let find = |name: &std::ffi::CStr| unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    let (set_device, mem_get_info) = (find(c"cudaSetDevice"), find(c"cudaMemGetInfo"));
    if set_device.is_null() || mem_get_info.is_null() {
        return None;
    }
    let number = libc::c_int::try_from(number).ok()?;
    let (mut free, mut all) = (0, 0);
    // SAFETY: the types are those that cuda_runtime_api.h declares, and both pointers are to numbers of this function.
    let codes = unsafe {
        let set_device = std::mem::transmute::<*mut libc::c_void, SetDevice>(set_device);
        let mem_get_info = std::mem::transmute::<*mut libc::c_void, MemGetInfo>(mem_get_info);
        (set_device(number), mem_get_info(&raw mut free, &raw mut all))
    };
    (codes == (0, 0)).then_some([free, all].map(|bytes| bytes as u64))
}

enum CudaLibrary {
    Open,
    Absent,
    Broken(String),
}

/// Loads `libtorch_cuda.so` if it is in the folder of `libtorch_cpu.so`.
///
/// The binary uses no symbol of that library, so the linker drops it, and libtorch would not see CUDA. Loaded at run
/// time the library registers itself, so one binary serves machines with and without CUDA.
fn cuda_library() -> &'static CudaLibrary {
    static LIBRARY: OnceLock<CudaLibrary> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let Some(path) = libtorch_folder().map(|dir| dir.join("libtorch_cuda.so")) else {
            return CudaLibrary::Absent;
        };
        if !path.exists() {
            return CudaLibrary::Absent;
        }
        let Ok(name) = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()) else {
            return CudaLibrary::Broken("its path holds a NUL".to_owned());
        };
        // SAFETY: a NUL-terminated path; libtorch's own library, whose initialisers only register kernels.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        if handle.is_null() { CudaLibrary::Broken(dl_error()) } else { CudaLibrary::Open }
    })
}

pub(super) fn dl_error() -> String {
    // SAFETY: dlerror returns NULL or a NUL-terminated string that lives until the next call on this thread.
    unsafe {
        let message = libc::dlerror();
        if message.is_null() {
            return "no reason given".to_owned();
        }
        std::ffi::CStr::from_ptr(message).to_string_lossy().into_owned()
    }
}

/// Folder of the libtorch that this process runs on.
pub(super) fn libtorch_folder() -> Option<PathBuf> {
    // The path of the loaded library, whether it was found by rpath, by LD_LIBRARY_PATH or as a system library.
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| line.contains("libtorch_cpu.so"))?;
    let start = line.find('/')?;
    PathBuf::from(&line[start..]).parent().map(PathBuf::from)
}

/// The libtorch version that this version of `tch` supports.
const BUILT_FOR: &str = "2.11.0";

/// Version of the loaded libtorch, and the folder that it was loaded from.
pub fn libtorch_version() -> String {
    let folder = libtorch_folder().map_or_else(|| "unknown folder".to_owned(), |dir| dir.display().to_string());
    let version = loaded_version().unwrap_or_else(|| format!("unknown version, built for {BUILT_FOR}"));
    format!("{version} ({folder})")
}

/// The ABI version that the library reports: major, minor and patch in the first three bytes
/// (`torch/headeronly/version.h`). `None` when the library does not have the function.
fn loaded_version() -> Option<String> {
    // SAFETY: a NUL-terminated name, looked up in the libraries that are already loaded.
    let function = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"aoti_torch_abi_version".as_ptr()) };
    if function.is_null() {
        return None;
    }
    // SAFETY: libtorch's C interface declares it as `uint64_t aoti_torch_abi_version()`.
    let function: extern "C" fn() -> u64 = unsafe { std::mem::transmute(function) };
    let [major, minor, patch, ..] = function().to_be_bytes();
    Some(format!("{major}.{minor}.{patch}"))
}

/// Configures libtorch's CPU backend for the calling thread, before its first product: no other threads help it, and rows
/// of a product do not depend on their number.
///
/// MKL keeps the number of its threads per thread, and libtorch passes the number on only at the first operation that it
/// splits itself. A product that came before would be split between all cores, and its sums would have other bits.
///
/// The embedder runs one OS thread per core, each with its own batch, instead of splitting one product over several
/// threads. Threads do not wait for each other after every product, the pointwise passes run in parallel too, and a
/// product has the same bits whatever the number of cores.
pub fn set_up_cpu() {
    static PROCESS: OnceLock<()> = OnceLock::new();
    thread_local! {
        static THREAD: OnceCell<()> = const { OnceCell::new() };
    }
    PROCESS.get_or_init(mkl::be_strict);
    THREAD.with(|thread| *thread.get_or_init(|| tch::set_num_threads(1)));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected: the file `build-version` of the wheel, or the version that `tch` supports where there is no such file.
    #[test]
    fn the_loaded_library_reports_its_version() {
        let version = loaded_version().unwrap();
        assert_eq!(libtorch_version().split(' ').next(), Some(version.as_str()));
        let file = libtorch_folder().unwrap().with_file_name("build-version");
        match std::fs::read_to_string(&file) {
            Ok(text) => assert_eq!(text.trim().split('+').next(), Some(version.as_str())),
            Err(error) => assert_eq!(version, BUILT_FOR, "{}: {error}", file.display()),
        }
    }

    /// No machine has so many GPUs, and most of those that run this have none.
    #[test]
    fn a_model_for_a_device_that_is_missing_says_so() {
        let found = DeviceName::Cuda(4096).set_up();
        assert!(matches!(&found, Err(DeviceError::Missing { asked, .. }) if asked == "cuda:4096"), "{found:?}");
        assert_eq!([DeviceName::Cuda(4096), DeviceName::Cpu].map(DeviceName::free_memory), [None, None]);
    }

    #[test]
    fn device_words() {
        assert_eq!(parse_devices("auto"), Ok(vec![DeviceChoice::Auto]));
        assert_eq!(parse_devices("cuda:0,3"), Ok(vec![DeviceChoice::Cuda(Some(0)), DeviceChoice::Cuda(Some(3))]));
        assert_eq!(parse_devices("cuda:0, cuda:3"), parse_devices("cuda:0,3"));
        for wrong in ["", "gpu", "cuda:", "cuda:x", "cuda:1,1", "cuda:-1", "cuda:0,gpu"] {
            assert!(parse_devices(wrong).is_err(), "{wrong}");
        }
        let text = |devices: &str| parse_devices(devices).unwrap_err().to_string();
        assert!(text("cuda:0,cuda:0").contains("names cuda:0 twice"), "{}", text("cuda:0,cuda:0"));
        for mixed in ["cpu,cuda", "cuda:0,cpu", "auto,cuda:1"] {
            assert!(text(mixed).contains("they must be GPUs, each by its number"), "{}", text(mixed));
        }
    }
}
