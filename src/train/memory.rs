//! Memory of a step is kept for the next one.

/// Makes the allocator of this process keep freed memory instead of returning it to the system. A step frees and
/// allocates some hundred MB again and again: with glibc's defaults a tenth of its time goes to the system for fresh
/// pages. For programs that train; it cannot be undone. Other allocators are left alone.
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the calls set numbers of glibc's allocator, which guards them by itself.
    unsafe {
        // One arena, which all threads share: those of threads cannot hold tensors of more than 64 MB.
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_MMAP_MAX, 0);
        libc::mallopt(libc::M_TRIM_THRESHOLD, libc::c_int::MAX);
        libc::mallopt(libc::M_TOP_PAD, 64 << 20);
    }
}
