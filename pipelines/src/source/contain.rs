//! Catches panics of readers.
//!
//! Arrow's and Parquet's readers have no undefined behaviour on damaged bytes, but they may panic. Such a panic becomes an
//! error about the file, and prints nothing.

use std::{
    cell::Cell,
    panic::{self, AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::Once,
    task::Poll,
};

thread_local! {
    static CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f`; `None` when it panicked.
pub(crate) fn contain<T>(f: impl FnOnce() -> T) -> Option<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !CONTAINED.get() {
                usual(info);
            }
        }));
    });
    let before = CONTAINED.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(f));
    CONTAINED.set(before);
    outcome.ok()
}

/// The same for a future.
pub(crate) async fn contain_async<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    std::future::poll_fn(|context| match contain(|| future.as_mut().poll(context)) {
        Some(poll) => poll.map(Some),
        None => Poll::Ready(None),
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_a_value() {
        assert_eq!(contain(|| 7), Some(7));
        assert_eq!(contain(|| [0; 3].get(5).map_or_else(|| panic!("quiet"), |n: &i32| *n)), None);
        assert_eq!(contain_async(async { 7 }).await, Some(7));
        let later = async {
            tokio::task::yield_now().await;
            panic!("quiet")
        };
        assert_eq!(contain_async::<()>(later).await, None);
    }
}
