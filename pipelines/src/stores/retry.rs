//! How long requests to a store are retried.

use std::time::{Duration, Instant};

use tokio::time::sleep;

use super::client;

/// The retry budget of a store that is opened without another one: a failed request is retried for this long.
pub const RETRY_FOR: Duration = Duration::from_secs(120);
/// The budget where a person waits for the answer.
pub const INTERACTIVE_RETRY_FOR: Duration = Duration::from_secs(20);

/// Pauses between attempts within a retry budget: the first, which is doubled each time, and the longest.
pub(super) fn pauses(budget: Duration) -> (Duration, Duration) {
    let first = (budget / 600).max(Duration::from_millis(1));
    (first, (budget / 12).max(first))
}

/// Retries a request until one of its attempts is answered, within `budget`: the stores' clients do not retry requests
/// that change something once they were sent. Whether an unanswered attempt was applied is unknown; the caller has to
/// find out from the answer to the next one.
pub(super) async fn until_answered<T, F: Future<Output = object_store::Result<T>>>(
    budget: Duration,
    request: impl Fn() -> F,
) -> object_store::Result<T> {
    repeated(budget, client::is_unanswered, request).await
}

/// Retries a request that changes nothing until an answer was read to its end, within `budget`. The stores' clients do not
/// retry a listing whose answer breaks off.
pub(super) async fn until_read<T, F: Future<Output = object_store::Result<T>>>(
    budget: Duration,
    request: impl Fn() -> F,
) -> object_store::Result<T> {
    repeated(budget, client::is_broken, request).await
}

async fn repeated<T, F: Future<Output = object_store::Result<T>>>(
    budget: Duration,
    may_pass: fn(&object_store::Error) -> bool,
    request: impl Fn() -> F,
) -> object_store::Result<T> {
    let (began, (mut pause, longest)) = (Instant::now(), pauses(budget));
    loop {
        match request().await {
            Err(error) if may_pass(&error) && began.elapsed() + pause < budget => sleep(pause).await,
            answer => return answer,
        }
        pause = longest.min(2 * pause);
    }
}
