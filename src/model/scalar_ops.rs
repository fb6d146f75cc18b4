//! Operations of libtorch that take numbers and allocate their result, with errors as values.
//!
//! tch 0.24 panics when such an operation fails: it drops the number before it reads the error of the call, and dropping a
//! number panics on an unread error. Out of memory on a GPU must be a value, as the engine then splits the batch.

use std::ptr;

use tch::{TchError, Tensor};
use torch_sys::{C_scalar, C_tensor};

use super::DeviceError;

/// `t + a b` per batch: `[n, r, c] + [n, r, k] [n, k, c]`
///
/// # Errors
/// [`DeviceError`] when the device has no room or libtorch fails.
pub(crate) fn baddbmm(t: &Tensor, a: &Tensor, b: &Tensor) -> Result<Tensor, DeviceError> {
    let one = Number::new(1.0)?;
    // SAFETY: `call` says what holds for `out`; the tensors and the number live until the call returns.
    call(|out| unsafe { torch_sys::c_generated::atg_baddbmm(out, raw(t), raw(a), raw(b), one.0, one.0) })
}

/// Every value bounded by `low..=high`.
///
/// # Errors
/// As [`baddbmm`].
pub(crate) fn clamp(t: &Tensor, low: f64, high: f64) -> Result<Tensor, DeviceError> {
    let (low, high) = (Number::new(low)?, Number::new(high)?);
    // SAFETY: as in `baddbmm`.
    call(|out| unsafe { torch_sys::c_generated::atg_clamp(out, raw(t), low.0, high.0) })
}

/// Every value plus `number`.
///
/// # Errors
/// As [`baddbmm`].
pub(crate) fn add(t: &Tensor, number: f64) -> Result<Tensor, DeviceError> {
    let number = Number::new(number)?;
    // SAFETY: as in `baddbmm`.
    call(|out| unsafe { torch_sys::c_generated::atg_add_scalar(out, raw(t), number.0) })
}

/// Every value times `number`.
///
/// # Errors
/// As [`baddbmm`].
pub(crate) fn mul(t: &Tensor, number: f64) -> Result<Tensor, DeviceError> {
    let number = Number::new(number)?;
    // SAFETY: as in `baddbmm`.
    call(|out| unsafe { torch_sys::c_generated::atg_mul_scalar(out, raw(t), number.0) })
}

/// `reduction` (`sum` or `max`) of consecutive rows, of which each result has so many (`lengths`, `[S]`): `[N, W] -> [S, W]`. `initial`
/// is the result of no rows. Lengths are not checked: on a GPU that would wait for it.
///
/// # Errors
/// As [`baddbmm`].
pub(crate) fn segment_reduce(
    rows: &Tensor,
    reduction: &str,
    lengths: &Tensor,
    initial: f64,
) -> Result<Tensor, DeviceError> {
    let (initial, none) = (Number::new(initial)?, ptr::null_mut());
    let (name, length) = (reduction.as_ptr().cast_mut(), reduction.len() as i32);
    // SAFETY: as in `baddbmm`; the name lives until the call returns, which copies it.
    call(|out| unsafe {
        torch_sys::c_generated::atg_segment_reduce(
            out,
            raw(rows),
            name.cast(),
            length,
            raw(lengths),
            none,
            none,
            0,
            1,
            initial.0,
        )
    })
}

/// A number as libtorch takes it. Dropping it reads no error.
struct Number(*mut C_scalar);

impl Number {
    fn new(number: f64) -> Result<Self, DeviceError> {
        // SAFETY: the function has no preconditions.
        let scalar = unsafe { torch_sys::ats_float(number) };
        last_error()?;
        Ok(Self(scalar))
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `ats_float` and is freed once.
        unsafe { torch_sys::ats_free(self.0) }
    }
}

/// The C interface takes mutable pointers also to tensors that it only reads.
fn raw(t: &Tensor) -> *mut C_tensor {
    t.as_ptr().cast_mut()
}

/// The tensor that `operation` stores at the pointer it is given, unless it fails.
fn call(operation: impl FnOnce(*mut *mut C_tensor)) -> Result<Tensor, DeviceError> {
    let mut out: *mut C_tensor = ptr::null_mut();
    operation(&mut out);
    last_error()?;
    if out.is_null() {
        return Err(DeviceError::internal("libtorch returned neither a tensor nor an error"));
    }
    // SAFETY: the operation succeeded, so the pointer is a new tensor without another owner.
    Ok(unsafe { Tensor::from_ptr(out) })
}

/// The error of the last call of this thread, if it failed.
fn last_error() -> Result<(), DeviceError> {
    // SAFETY: the function has no preconditions; its result is null or a string that the caller frees.
    let message = unsafe { torch_sys::get_and_reset_last_err() };
    if message.is_null() {
        return Ok(());
    }
    // SAFETY: not null, so it is a string that ends with a zero byte and was allocated by `strdup`.
    let text = unsafe { std::ffi::CStr::from_ptr(message) }.to_string_lossy().into_owned();
    // SAFETY: allocated by `strdup`, freed once.
    unsafe { libc::free(message.cast()) };
    Err(TchError::Torch(text).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(t: &Tensor) -> Vec<f64> {
        Vec::try_from(t.reshape([-1])).unwrap()
    }

    /// Calculated by hand.
    #[test]
    fn results() {
        let t = Tensor::from_slice(&[-2.0, 0.5, 3.0, 1.0]).reshape([1, 2, 2]);
        let a = Tensor::from_slice(&[1.0, 2.0, 3.0, 4.0]).reshape([1, 2, 2]);
        assert_eq!(values(&baddbmm(&t, &a, &a).unwrap()), [5.0, 10.5, 18.0, 23.0]);
        assert_eq!(values(&clamp(&t, -1.0, 1.0).unwrap()), [-1.0, 0.5, 1.0, 1.0]);
        assert_eq!(values(&add(&t, 1.0).unwrap()), [-1.0, 1.5, 4.0, 2.0]);
        assert_eq!(values(&mul(&t, 2.0).unwrap()), [-4.0, 1.0, 6.0, 2.0]);
    }

    /// The result would have 2^52 numbers, more than any address space. tch's own operation panics here.
    #[test]
    fn an_allocation_that_fails_is_an_error() {
        let one = Tensor::from_slice(&[1.0f32]);
        let large = one.expand([1 << 26, 1 << 26], false);
        for result in [clamp(&large, -1.0, 1.0), add(&large, 1.0), mul(&large, 2.0)] {
            assert!(result.is_err_and(|error| error.is_out_of_memory()));
        }
        assert_eq!(values(&add(&one, 1.0).unwrap()), [2.0], "the error of one call is not that of the next");
    }
}
