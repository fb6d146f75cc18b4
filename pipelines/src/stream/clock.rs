//! The clock by which the stream waits. It is that of the runtime, but in tests that run hours in milliseconds.

use std::time::{Duration, Instant};

/// The present time.
pub(crate) fn now() -> Instant {
    #[cfg(test)]
    if let Some(now) = simulated::now() {
        return now;
    }
    Instant::now()
}

/// Waits until a time.
pub(crate) async fn sleep_until(at: Instant) {
    #[cfg(test)]
    if simulated::now().is_some() {
        return simulated::Sleep::until(at).await;
    }
    tokio::time::sleep_until(at.into()).await;
}

/// Waits for some time.
pub(crate) async fn sleep(time: Duration) {
    match now().checked_add(time) {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Waits for `future` until a time; `None` when it is not ready by then.
pub(crate) async fn until<T>(at: Instant, future: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        done = future => Some(done),
        () = sleep_until(at) => None,
    }
}

/// A clock that stands still while anything else can be done, and then jumps to the next time for which somebody waits.
#[cfg(test)]
pub(crate) mod simulated {
    use std::{
        cell::RefCell,
        collections::BTreeMap,
        mem,
        pin::Pin,
        task::{Context, Poll, Waker},
        time::Instant,
    };

    thread_local! {
        static CLOCK: RefCell<Option<Clock>> = const { RefCell::new(None) };
    }

    struct Clock {
        now: Instant,
        /// Who waits, by the time and the order in which they began to.
        sleeping: BTreeMap<(Instant, u64), Waker>,
        sleeps: u64,
    }

    /// Runs a future, and all tasks that it spawns, by a clock of this thread.
    pub(crate) fn run<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().on_thread_park(jump).build();
        let runtime = runtime.expect("a runtime without drivers");
        CLOCK.set(Some(Clock { now: Instant::now(), sleeping: BTreeMap::new(), sleeps: 0 }));
        let done = runtime.block_on(future);
        drop(runtime);
        CLOCK.set(None);
        done
    }

    pub(super) fn now() -> Option<Instant> {
        CLOCK.with_borrow(|clock| clock.as_ref().map(|clock| clock.now))
    }

    /// Nothing can be done before the next time for which somebody waits.
    fn jump() {
        let woken = CLOCK.with_borrow_mut(|clock| {
            let Some(clock) = clock else { return BTreeMap::new() };
            let Some(((next, _), _)) = clock.sleeping.first_key_value() else { return BTreeMap::new() };
            clock.now = clock.now.max(*next);
            let later = clock.sleeping.split_off(&(clock.now, u64::MAX));
            mem::replace(&mut clock.sleeping, later)
        });
        woken.into_values().for_each(Waker::wake);
    }

    pub(super) struct Sleep {
        at: Instant,
        number: Option<u64>,
    }

    impl Sleep {
        pub(super) fn until(at: Instant) -> Self {
            Self { at, number: None }
        }
    }

    impl Future for Sleep {
        type Output = ();

        fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
            CLOCK.with_borrow_mut(|clock| {
                let Some(clock) = clock.as_mut().filter(|clock| clock.now < self.at) else { return Poll::Ready(()) };
                let number = *self.number.get_or_insert_with(|| {
                    clock.sleeps += 1;
                    clock.sleeps
                });
                clock.sleeping.insert((self.at, number), context.waker().clone());
                Poll::Pending
            })
        }
    }

    impl Drop for Sleep {
        fn drop(&mut self) {
            let Some(number) = self.number else { return };
            // The waker may drop a task, which may have such a future.
            let _waker =
                CLOCK.with_borrow_mut(|clock| clock.as_mut().and_then(|c| c.sleeping.remove(&(self.at, number))));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hours_pass_at_once_and_in_order() {
        let hour = Duration::from_secs(3600);
        let (elapsed, order) = simulated::run(async {
            let began = now();
            let tasks = [3, 1, 2].map(|hours| {
                tokio::spawn(async move {
                    sleep(hours * hour).await;
                    (now().duration_since(began).as_secs() / 3600, hours)
                })
            });
            assert_eq!(until(began + hour / 2, sleep(hour)).await, None);
            let mut order = Vec::new();
            for task in tasks {
                order.push(task.await.unwrap());
            }
            (now().duration_since(began), order)
        });
        assert_eq!((elapsed, order), (3 * hour, vec![(3, 3), (1, 1), (2, 2)]));
        assert!(simulated::now().is_none());
    }
}
