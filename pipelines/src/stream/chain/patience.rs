//! Requests that are repeated for as long as a store is out of order.

use std::time::{Duration, Instant};

use super::ChainError;
use crate::{
    reply::summary,
    stores::{Location, StoreError},
    stream::clock::{now, sleep},
};

/// How often a failed request is repeated. It is given up never: the caller drops the future.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// The first pause, which is doubled each time.
    pub first: Duration,
    /// The longest pause.
    pub longest: Duration,
    /// For how long the store's client retries one request before it counts as failed.
    pub request: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { first: Duration::from_millis(200), longest: Duration::from_secs(10), request: Duration::from_secs(30) }
    }
}

/// A warning is repeated after this time, then after twice as long, …
const WARN_AGAIN: Duration = Duration::from_secs(60);

/// Failures of one operation in a row.
pub(super) struct Outage {
    patience: Patience,
    began: Instant,
    failures: u64,
    pause: Duration,
    warn_at: Duration,
}

impl Outage {
    pub(super) fn new(patience: Patience) -> Self {
        Self { patience, began: now(), failures: 0, pause: patience.first, warn_at: Duration::ZERO }
    }

    /// Waits after a failure of `what`, if the error may go away.
    ///
    /// # Errors
    /// The error, if it cannot.
    pub(super) async fn wait(&mut self, what: &Location, error: ChainError) -> Result<(), ChainError> {
        if !may_heal(&error) {
            return Err(error);
        }
        if self.failures == 0 {
            (self.began, self.warn_at) = (now(), Duration::ZERO);
        }
        self.failures += 1;
        let elapsed = self.elapsed();
        if elapsed >= self.warn_at {
            let (seconds, error) = (elapsed.as_secs(), summary(&error));
            tracing::warn!(%what, error, seconds, failures = self.failures, "the store fails; trying until it answers");
            self.warn_at = WARN_AGAIN.max(2 * elapsed);
        }
        sleep(jittered(self.pause)).await;
        self.pause = self.patience.longest.min(2 * self.pause);
        Ok(())
    }

    fn elapsed(&self) -> Duration {
        now().saturating_duration_since(self.began)
    }

    /// The operation has succeeded.
    pub(super) fn over(self, what: &Location) -> u64 {
        // Only what was warned of for long is worth a message.
        if self.failures > 0 && self.elapsed() >= WARN_AGAIN {
            tracing::info!(%what, seconds = self.elapsed().as_secs(), "the store answers again");
        }
        self.failures
    }
}

/// Whether an error may go away by itself or by the work of an operator. Missing permissions and buckets do: a stream runs
/// for days, keys are replaced while it runs, and policies are repaired. When a stream starts they are errors at once,
/// because the probe does not wait. Excepted are requests that the store does not know, damaged objects, and a disk
/// that cannot be synced: what it has then is not known.
fn may_heal(error: &ChainError) -> bool {
    use object_store::Error::{InvalidPath, NotImplemented, NotSupported, UnknownConfigurationKey};
    match error {
        ChainError::Store(StoreError::Request { source, .. }) => !matches!(
            **source,
            InvalidPath { .. } | NotImplemented { .. } | NotSupported { .. } | UnknownConfigurationKey { .. }
        ),
        ChainError::Store(StoreError::Local { operation, .. }) => *operation != SYNC,
        _ => false,
    }
}

/// The operation of [`Location::sync`](crate::stores::Location::sync) in errors.
const SYNC: &str = "sync";

/// Half of a pause to one and a half: members that lost the store at the same moment do not return at the same moment.
pub(crate) fn jittered(pause: Duration) -> Duration {
    let random = uuid::Uuid::new_v4().as_u64_pair().0;
    // 2^64: the quotient is in 0..1.
    pause.mul_f64(0.5 + random as f64 / 18_446_744_073_709_551_616.0)
}

/// Repeats `attempt` until it succeeds or fails for good.
pub(super) async fn outlast<T, F: Future<Output = Result<T, ChainError>>>(
    patience: Patience,
    what: &Location,
    attempt: impl Fn() -> F,
) -> Result<T, ChainError> {
    let mut outage = Outage::new(patience);
    loop {
        match attempt().await {
            Ok(done) => {
                outage.over(what);
                return Ok(done);
            }
            Err(error) => outage.wait(what, error).await?,
        }
    }
}
