//! Crash points: a test that sets `FAILPOINTS="bulk.mid_part=return"` aborts the process there. With `return(freeze)` the
//! process stops there as by SIGSTOP, after a line on standard error, until the test kills it or lets it go on. With
//! `return(pause)` only the thread stops, for three seconds.
//!
//! They exist in builds with debug assertions only. Each job has a module here, with one function per point.

/// A fail point needs a function to return from, so each point is one.
macro_rules! points {
    ($($function:ident = $name:literal),+ $(,)?) => {
        $(
            pub(crate) fn $function() {
                #[cfg(debug_assertions)]
                fail::fail_point!($name, |how: Option<String>| super::reached($name, how.as_deref()));
            }
        )+
    };
}

#[cfg(debug_assertions)]
fn reached(point: &str, how: Option<&str>) {
    let is_pause = how == Some("pause");
    if how != Some("freeze") && !is_pause {
        std::process::abort();
    }
    eprintln!("reached {point}");
    if is_pause {
        return std::thread::sleep(std::time::Duration::from_secs(3));
    }
    // `raise` signals this thread, which stops here, and the stop applies to the whole process. A signal sent to the process may be
    // delivered to another thread first, and this one would keep running for a while.
    // SAFETY: no pointers are passed.
    unsafe { libc::raise(libc::SIGSTOP) };
}

/// Crash points of the bulk job.
pub(crate) mod bulk {
    points! {
        after_list = "bulk.after_list",
        before_part = "bulk.before_part",
        mid_part = "bulk.mid_part",
        after_upload_before_manifest = "bulk.after_upload_before_manifest",
        after_manifest = "bulk.after_manifest",
        before_done = "bulk.before_done",
    }
}

/// Crash points of the stream.
#[cfg_attr(not(feature = "kafka"), allow(dead_code))] // those around Kafka are reached in builds with it only
pub(crate) mod stream {
    points! {
        before_begin = "stream.before_begin",
        in_begin = "stream.in_begin",
        after_begin = "stream.after_begin",
        at_start = "stream.at_start",
        after_poll = "stream.after_poll",
        after_decode = "stream.after_decode",
        in_embed = "stream.in_embed",
        before_write = "stream.before_write",
        before_put = "stream.before_put",
        after_put = "stream.after_put",
        before_hint = "stream.before_hint",
        after_hint = "stream.after_hint",
        in_revoke = "stream.in_revoke",
        in_drain = "stream.in_drain",
        before_transaction = "stream.before_transaction",
        in_transaction = "stream.in_transaction",
        before_commit = "stream.before_commit",
        after_commit = "stream.after_commit",
    }
}

/// Failures of local files.
pub(crate) mod stores {
    /// An error if a test wants syncing to fail.
    pub(crate) fn sync() -> std::io::Result<()> {
        #[cfg(debug_assertions)]
        fail::fail_point!("stores.sync", |_| Err(std::io::Error::other("the disk fails, as a test wants")));
        Ok(())
    }
}

/// Crash points of training.
pub(crate) mod train {
    points! {
        after_step = "train.after_step",
        in_checkpoint = "train.in_checkpoint",
        before_rename = "train.before_rename",
        after_rename = "train.after_rename",
        in_export = "train.in_export",
        in_replacement = "train.in_replacement",
        in_measurement = "train.in_measurement",
        before_lock = "train.before_lock",
        in_upload = "train.in_upload",
    }

    /// Bytes of memory that are free, if a test says so: `train.free_memory=return(1000000)`.
    pub(crate) fn free_memory() -> Option<u64> {
        #[cfg(debug_assertions)]
        fail::fail_point!("train.free_memory", |bytes: Option<String>| bytes?.parse().ok());
        None
    }

    /// Whether a test wants the loss of this step not to be finite.
    pub(crate) fn spike() -> bool {
        #[cfg(debug_assertions)]
        fail::fail_point!("train.spike", |_| true);
        false
    }
}
