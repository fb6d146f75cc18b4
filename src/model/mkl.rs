//! Puts Intel MKL, which libtorch contains on x86-64, into its strict reproducible mode.
//!
//! On Intel processors MKL splits a product with an inner dimension of 2,048 or more into parts and adds them up, but
//! only below about 200 rows: the bits of a row then depend on the number of rows (measured on Sapphire Rapids:
//! 2048x256, 2048x4096 and 4096x512 at 16 to 128 rows). In the strict reproducible mode (Intel oneMKL Developer Guide,
//! "Obtaining Numerically Reproducible Results") a product of any number of rows has the bits of a tall one. On other
//! processors MKL has no such mode and does not need it.

use std::ffi::c_int;

/// `MKL_CBWR_AVX512` and `MKL_CBWR_AVX2`, each with `MKL_CBWR_STRICT` (`mkl_types.h`). The first supported one is used.
const STRICT_MODES: [c_int; 2] = [0x1_0000 | 12, 0x1_0000 | 10];

/// Sets the mode. Call it before the first product: MKL rejects later changes. The environment variable `MKL_CBWR`
/// takes precedence.
///
/// `tests/independence.rs` checks vectors; nothing checks these products at a start.
pub(super) fn be_strict() {
    if !is_intel() || std::env::var_os("MKL_CBWR").is_some() {
        return;
    }
    // SAFETY: a NUL-terminated name, looked up in the libraries that are already loaded.
    let function = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"mkl_serv_cbwr_set".as_ptr()) };
    if function.is_null() {
        return; // a libtorch without MKL
    }
    // SAFETY: the macro `mkl_cbwr_set` expands to this function; `mkl_service.h` declares `int mkl_cbwr_set(int)`.
    let set: extern "C" fn(c_int) -> c_int = unsafe { std::mem::transmute(function) };
    // 0 is success.
    let _supported = STRICT_MODES.into_iter().any(|mode| set(mode) == 0);
}

#[cfg(target_arch = "x86_64")]
fn is_intel() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
}

#[cfg(not(target_arch = "x86_64"))]
fn is_intel() -> bool {
    false
}
