//! Makes the matrix products of Intel's MKL, which libtorch has inside on x86-64, the same at every height.
//!
//! On Intel processors MKL cuts a product with an inner dimension of 2,048 and more into parts that it adds up
//! afterwards, but only as long as there are fewer than some 200 rows: the bits of a row then depend on how many others
//! there are (measured on Sapphire Rapids: 2048x256, 2048x4096 and 4096x512 at 16 to 128 rows). Its strict
//! reproducible mode (Intel oneMKL Developer Guide, "Obtaining Numerically Reproducible Results") does no such thing:
//! there every height from one row on gives the bits of a tall product. On other processors MKL has no such mode, and
//! no such need.

use std::ffi::c_int;

/// `MKL_CBWR_AVX512` and `MKL_CBWR_AVX2` with `MKL_CBWR_STRICT`, of `mkl_types.h`; the first that the processor has.
const STRICT_MODES: [c_int; 2] = [0x1_0000 | 12, 0x1_0000 | 10];

/// Sets the mode, once, before the first product: MKL refuses to change it later. A user's own `MKL_CBWR` stays.
///
/// That it is of use is not believed but checked: `steady_height` compares products at every start.
pub(super) fn be_strict() {
    if !is_intel() || std::env::var_os("MKL_CBWR").is_some() {
        return;
    }
    // SAFETY: a NUL-terminated name, looked up in the libraries that are loaded anyway.
    let function = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"mkl_serv_cbwr_set".as_ptr()) };
    if function.is_null() {
        return; // a libtorch with other products
    }
    // SAFETY: what `mkl_cbwr_set` is a macro for; `mkl_service.h` declares it as `int mkl_cbwr_set(int)`.
    let set: extern "C" fn(c_int) -> c_int = unsafe { std::mem::transmute(function) };
    // The modes are tried in turn: 0 is success.
    let _known = STRICT_MODES.into_iter().any(|mode| set(mode) == 0);
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
