//! Large pages of memory. The kernel clears and maps pages of 4 KiB one by one when they are touched first, which takes as long as
//! reading the weights of a large model; pages of 2 MiB also cost the processor fewer look-ups while it reads weights. Many
//! distributions give large pages only to programs that ask for them (`madvise` in
//! `/sys/kernel/mm/transparent_hugepage/enabled`).

use std::alloc::{GlobalAlloc, Layout, System};

/// The allocator of the system, asking for large pages where an allocation has room for several.
#[derive(Debug, Clone, Copy, Default)]
pub struct LargePages;

/// Size of a large page on x86-64, and the usual one on aarch64.
#[cfg(any(target_os = "linux", test))]
const PAGE: usize = 2 << 20;
/// Smaller allocations are left alone.
#[cfg(any(target_os = "linux", test))]
const SMALLEST: usize = 4 * PAGE;

/// Advises the kernel about the whole large pages in an allocation; where it refuses, nothing changes.
#[cfg(target_os = "linux")]
fn advise(start: *mut u8, bytes: usize) {
    if start.is_null() || bytes < SMALLEST {
        return;
    }
    let skipped = start.align_offset(PAGE);
    let length = bytes.saturating_sub(skipped) / PAGE * PAGE;
    // SAFETY: a part of one allocation. The advice changes no content.
    unsafe { libc::madvise(start.wrapping_add(skipped).cast(), length, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise(_: *mut u8, _: usize) {}

// SAFETY: every call is passed on to the allocator of the system.
unsafe impl GlobalAlloc for LargePages {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        let start = unsafe { System.alloc(layout) };
        advise(start, layout.size());
        start
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        let start = unsafe { System.alloc_zeroed(layout) };
        advise(start, layout.size());
        start
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        let start = unsafe { System.realloc(start, layout, size) };
        advise(start, size);
        start
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(start, layout) }
    }
}

/// Makes libtorch ask for large pages too, unless the user has decided (`c10/core/impl/alloc_cpu.cpp`). Must be called before the
/// first thread is started.
pub(crate) fn for_libtorch() {
    const VARIABLE: &str = "THP_MEM_ALLOC_ENABLE";
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: the process has one thread, so no other thread reads the environment at the same time.
        unsafe { std::env::set_var(VARIABLE, "1") };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes around those that get advice, also after they grow and shrink. The kernel gives zeros whatever its pages are.
    #[test]
    fn memory_holds_what_was_written() {
        for bytes in [1, 4096, SMALLEST - 1, SMALLEST, SMALLEST + 12_345] {
            let layout = Layout::from_size_align(bytes, 64).unwrap();
            // SAFETY: used within its size and freed once, with the layout of the last call.
            unsafe {
                let start = LargePages.alloc_zeroed(layout);
                assert!(std::slice::from_raw_parts(start, bytes).iter().all(|byte| *byte == 0));
                start.write_bytes(7, bytes);
                let start = LargePages.realloc(start, layout, 2 * bytes);
                assert!(std::slice::from_raw_parts(start, bytes).iter().all(|byte| *byte == 7));
                let twice = Layout::from_size_align(2 * bytes, 64).unwrap();
                let start = LargePages.realloc(start, twice, bytes);
                assert!(std::slice::from_raw_parts(start, bytes).iter().all(|byte| *byte == 7));
                LargePages.dealloc(start, layout);
            }
        }
    }
}
