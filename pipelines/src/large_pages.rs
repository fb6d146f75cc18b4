//! Large pages of memory. The kernel clears and maps pages of 4 KiB one by one when they are touched first, which takes as long as
//! reading the weights of a large model; pages of 2 MiB also cost the processor fewer look-ups while it reads weights. Many
//! distributions give large pages only to programs that ask for them (`madvise` in
//! `/sys/kernel/mm/transparent_hugepage/enabled`).

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicBool, Ordering},
};

/// The allocator of the system, asking for large pages for allocations of 33 MiB and more: the C library gives each of them a mapping of
/// its own.
#[derive(Debug, Clone, Copy, Default)]
pub struct LargePages;

/// Whether the program asks for large pages.
static ASKS: AtomicBool = AtomicBool::new(false);

/// glibc maps every allocation above `DEFAULT_MMAP_THRESHOLD_MAX`, 32 MiB, by itself. Smaller ones share mappings with others.
const SMALLEST: usize = 33 << 20;

/// The whole mapping of an allocation, which begins up to a page before it: if a part of it had another advice, the kernel would split
/// the mapping, and could not grow it in place.
fn mapping(start: usize, bytes: usize, page: usize) -> std::ops::Range<usize> {
    start / page * page..(start + bytes).div_ceil(page) * page
}

#[cfg(target_os = "linux")]
fn advise(start: *mut u8, bytes: usize) {
    if start.is_null() || bytes < SMALLEST || !ASKS.load(Ordering::Relaxed) {
        return;
    }
    // SAFETY: asks for a constant of the system.
    let Ok(page) = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }) else { return };
    let mapping = mapping(start.addr(), bytes, page);
    // SAFETY: the pages of an allocation. The advice changes no content, and where the kernel refuses, nothing.
    unsafe { libc::madvise(start.with_addr(mapping.start).cast(), mapping.len(), libc::MADV_HUGEPAGE) };
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

/// Asks for large pages from now on, in libtorch too (`c10/core/impl/alloc_cpu.cpp`), unless the environment variable
/// `THP_MEM_ALLOC_ENABLE` is 0 or the kernel has none. Must be called before the first thread is started.
pub(crate) fn ask() {
    const VARIABLE: &str = "THP_MEM_ALLOC_ENABLE";
    const KERNEL: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
    let kernel_has_them = std::fs::read_to_string(KERNEL).is_ok_and(|modes| !modes.contains("[never]"));
    let is_refused = std::env::var_os(VARIABLE).is_some_and(|value| value == "0");
    if !kernel_has_them || is_refused {
        return;
    }
    ASKS.store(true, Ordering::Relaxed);
    // SAFETY: the process has one thread, so no other thread reads the environment at the same time.
    unsafe { std::env::set_var(VARIABLE, "1") };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_covers_its_allocation_in_whole_pages() {
        assert_eq!(mapping(0x10_0010, 4096, 4096), 0x10_0000..0x10_2000);
        assert_eq!(mapping(0x10_0000, 4096, 4096), 0x10_0000..0x10_1000);
        assert_eq!(mapping(0x10_0fff, 2, 65_536), 0x10_0000..0x11_0000);
    }

    /// The kernel reports the advice of a mapping (`hg`), and that it is one mapping.
    #[cfg(target_os = "linux")]
    #[test]
    fn the_kernel_takes_the_advice_for_the_whole_mapping() {
        let modes = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
        if !modes.contains('[') {
            println!("skipped: this kernel has no large pages");
            return;
        }
        ASKS.store(true, Ordering::Relaxed);
        let layout = Layout::from_size_align(2 * SMALLEST, 1).unwrap();
        // SAFETY: freed once, with its layout.
        let start = unsafe { LargePages.alloc(layout) };
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        // SAFETY: as above.
        unsafe { LargePages.dealloc(start, layout) };
        let mut inside = false;
        let mut flags = None;
        for line in maps.lines() {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            if let Some((first, end)) = range
                && let (Ok(first), Ok(end)) = (usize::from_str_radix(first, 16), usize::from_str_radix(end, 16))
            {
                inside = first <= start.addr() && start.addr() + layout.size() <= end;
            } else if inside && line.starts_with("VmFlags:") {
                flags = Some(line.to_owned());
            }
        }
        assert!(flags.as_ref().is_some_and(|flags| flags.contains(" hg")), "{flags:?}");
    }

    /// Sizes around those that get advice, also after they grow and shrink. The kernel gives zeros whatever its pages are.
    #[test]
    fn memory_holds_what_was_written() {
        ASKS.store(true, Ordering::Relaxed);
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
