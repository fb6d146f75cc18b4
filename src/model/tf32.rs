//! TF32, a format of NVIDIA's tensor cores (from Ampere on): products of float32 matrices whose numbers are rounded to 10 bits
//! of mantissa, with the range and the sums of float32.
//!
//! libtorch has one switch for all products of the process, which is off at first, through a shim: tch does not have it.

use std::sync::{Mutex, PoisonError};

/// Chooses whether products on GPUs may be computed in TF32. GPUs and libraries that do not have it ignore the switch, and so do
/// CPUs.
pub(super) fn set(allow: bool) {
    // Other threads may be multiplying: the switch is touched only where it changes. It is off at first.
    static ALLOWED: Mutex<bool> = Mutex::new(false);
    let mut allowed = ALLOWED.lock().unwrap_or_else(PoisonError::into_inner);
    if std::mem::replace(&mut *allowed, allow) == allow {
        return;
    }
    #[cfg(elmo_tf32)]
    // SAFETY: sets a flag of libtorch that exists as long as the process.
    unsafe {
        elmo_set_tf32(allow);
    }
}

#[cfg(elmo_tf32)]
unsafe extern "C" {
    fn elmo_set_tf32(allow: bool);
    #[cfg(test)]
    fn elmo_tf32() -> bool;
}

#[cfg(all(test, elmo_tf32))]
mod tests {
    use super::*;

    /// As libtorch says. On a CPU the switch changes no bit of a product.
    #[test]
    fn the_switch_of_libtorch_is_set() {
        let product = || {
            let numbers = (tch::Tensor::arange(64 * 64, (tch::Kind::Float, tch::Device::Cpu)) * 0.7).sin();
            let square = numbers.view([64, 64]);
            Vec::<f32>::try_from(square.mm(&square).view([-1])).unwrap()
        };
        // SAFETY: reads a flag of libtorch.
        let is_set = || unsafe { elmo_tf32() };
        let before = product();
        set(true);
        assert!(is_set());
        assert_eq!(product(), before);
        set(false);
        assert!(!is_set());
    }
}
