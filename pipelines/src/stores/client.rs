//! The HTTP clients of the stores: timeouts, the retry policy, and warnings while a store does not answer.
//!
//! The stores' own timeout covers a whole request, so it would cut off every long download. Here a request fails when no
//! byte arrives for a while.

use std::{
    error::Error,
    io,
    pin::{Pin, pin},
    sync::atomic::{AtomicBool, Ordering},
    task::{Context, Poll, ready},
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use object_store::{
    BackoffConfig, ClientOptions, RetryConfig,
    client::{
        HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody, HttpService,
        ReqwestConnector,
    },
};
use tokio::time::{Sleep, sleep, timeout};

use super::retry::pauses;

/// Timeout of a connection.
const CONNECT: Duration = Duration::from_secs(10);
/// A request fails when no byte arrives for this long, or for the retry budget if that is shorter. Two attempts with a
/// silent store fit into the default budget.
const SILENCE: Duration = Duration::from_secs(60);
/// The slowest upload, in bytes per second, for which a request with a long body has enough time.
const SLOWEST_UPLOAD: usize = 64 << 10;

/// Options of every store's client; settings of the environment such as `AWS_TIMEOUT` override them.
pub(super) fn options() -> ClientOptions {
    ClientOptions::new().with_connect_timeout(CONNECT).with_timeout_disabled()
}

/// Retries for `budget`, whatever the failure and however many retries that takes.
pub(super) fn retries(budget: Duration) -> RetryConfig {
    let (first, longest) = pauses(budget);
    let backoff = BackoffConfig { init_backoff: first, max_backoff: longest, base: 2.0 };
    RetryConfig { backoff, max_retries: usize::MAX, retry_timeout: budget }
}

/// Whether the connection broke or timed out before there was an answer. After other failures of a connection the request
/// was not sent, and the stores' clients have retried it themselves.
pub(super) fn is_unanswered(error: &object_store::Error) -> bool {
    let unanswered = |kind| matches!(kind, HttpErrorKind::Timeout | HttpErrorKind::Interrupted);
    let mut reasons = std::iter::successors(Some(error as &dyn Error), |&reason| reason.source());
    reasons.any(|reason| reason.downcast_ref::<HttpError>().is_some_and(|error| unanswered(error.kind())))
}

/// Whether the connection failed, before the answer or within it.
pub(super) fn is_broken(error: &object_store::Error) -> bool {
    let mut reasons = std::iter::successors(Some(error as &dyn Error), |&reason| reason.source());
    reasons.any(|reason| reason.is::<HttpError>())
}

/// Creates clients whose requests time out when no byte arrives.
#[derive(Debug)]
pub(super) struct Connector {
    retry_for: Duration,
}

impl Connector {
    pub(super) fn new(retry_for: Duration) -> Self {
        Self { retry_for }
    }
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        let retry_for = self.retry_for;
        Ok(HttpClient::new(Watched {
            client,
            silence: SILENCE.min(retry_for),
            retry_for,
            failing: AtomicBool::new(false),
        }))
    }
}

/// A client whose requests time out when no byte arrives.
#[derive(Debug)]
struct Watched {
    client: HttpClient,
    silence: Duration,
    /// For the warning.
    retry_for: Duration,
    /// The last request failed, which was logged: there may be many retries.
    failing: AtomicBool,
}

#[async_trait]
impl HttpService for Watched {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let host = request.uri().host().unwrap_or_default().to_owned();
        let sending = Duration::from_secs((request.body().content_length() / SLOWEST_UPLOAD) as u64);
        let soon = self.silence / 6;
        let mut answer = pin!(self.client.execute(request));
        let answered = match timeout(sending + soon, answer.as_mut()).await {
            Ok(answered) => answered,
            Err(_) => {
                tracing::warn!(host, "no answer from the store yet, still waiting");
                let answered = timeout(self.silence - soon, answer).await;
                answered.unwrap_or_else(|_| Err(silent(self.silence)))
            }
        };
        self.warn(&host, failure(&answered));
        let silence = self.silence;
        answered.map(|answer| answer.map(|body| HttpResponseBody::new(WatchedBody { body, silence, pause: None })))
    }
}

impl Watched {
    /// Warns once that a store fails, and again only after it has answered a request.
    fn warn(&self, host: &str, failure: Option<Failure>) {
        let failing = self.failing.swap(failure.is_some(), Ordering::Relaxed);
        let Some(Failure { reason, retried }) = failure.filter(|_| !failing) else { return };
        if retried {
            let seconds = self.retry_for.as_secs();
            tracing::warn!(host, reason, "a request to the store failed, retrying for up to {seconds} s");
        } else {
            tracing::warn!(host, reason, "a request to the store failed");
        }
    }
}

/// Why a request failed that the store's client may retry.
struct Failure {
    reason: String,
    retried: bool,
}

fn failure(answered: &Result<HttpResponse, HttpError>) -> Option<Failure> {
    match answered {
        Ok(answer) => {
            let status = answer.status();
            let retried = status.is_server_error() || matches!(status.as_u16(), 408 | 429);
            retried.then(|| Failure { reason: status.to_string(), retried })
        }
        Err(error) => {
            let retried = !matches!(error.kind(), HttpErrorKind::Unknown | HttpErrorKind::Decode);
            Some(Failure { reason: innermost(error), retried })
        }
    }
}

/// The root cause; the errors around it only say that a request failed.
fn innermost(error: &HttpError) -> String {
    let mut reason: &dyn Error = error;
    while let Some(inner) = reason.source() {
        reason = inner;
    }
    reason.to_string()
}

fn silent(waited: Duration) -> HttpError {
    let reason = format!("no byte arrived for {} s", waited.as_secs());
    HttpError::new(HttpErrorKind::Timeout, io::Error::new(io::ErrorKind::TimedOut, reason))
}

/// A body that fails when no byte arrives for too long while a reader waits.
struct WatchedBody {
    body: HttpResponseBody,
    silence: Duration,
    /// Since the reader began to wait.
    pause: Option<Pin<Box<Sleep>>>,
}

impl Body for WatchedBody {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            self.pause = None;
            return Poll::Ready(frame);
        }
        let silence = self.silence;
        let pause = self.pause.get_or_insert_with(|| Box::pin(sleep(silence)));
        ready!(pause.as_mut().poll(cx));
        Poll::Ready(Some(Err(silent(silence))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use object_store::client::HttpRequestBody;
    #[cfg(feature = "aws")]
    use {
        object_store::{ObjectStoreExt, PutMode, aws::AmazonS3Builder, path::Path},
        std::sync::{Arc, Mutex, atomic::AtomicUsize},
    };

    use super::*;
    #[cfg(feature = "aws")]
    use crate::stores::{RETRY_FOR, retry::until_answered};

    /// A store with a fixed behaviour.
    #[derive(Debug, Clone, Copy)]
    enum Store {
        Answers,
        Stalls,
        SaysNothing,
    }

    /// One byte, after which the body ends or stalls.
    struct OneByte {
        sent: bool,
        stalls: bool,
    }

    impl Body for OneByte {
        type Data = Bytes;
        type Error = HttpError;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
            match (std::mem::replace(&mut self.sent, true), self.stalls) {
                (false, _) => Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"x"))))),
                (true, true) => Poll::Pending,
                (true, false) => Poll::Ready(None),
            }
        }
    }

    #[async_trait]
    impl HttpService for Store {
        async fn call(&self, _: HttpRequest) -> Result<HttpResponse, HttpError> {
            let stalls = match self {
                Self::Answers => false,
                Self::Stalls => true,
                Self::SaysNothing => std::future::pending().await,
            };
            Ok(HttpResponse::new(HttpResponseBody::new(OneByte { sent: false, stalls })))
        }
    }

    async fn get(store: Store) -> Result<Bytes, HttpError> {
        let client = HttpClient::new(store);
        let silence = Duration::from_millis(60);
        let watched = Watched { client, silence, retry_for: silence, failing: AtomicBool::new(false) };
        let answer = watched.call(HttpRequest::new(HttpRequestBody::empty())).await?;
        answer.into_body().bytes().await
    }

    #[tokio::test]
    async fn a_silent_store_ends_a_request() {
        assert_eq!(get(Store::Answers).await.unwrap(), "x");
        for store in [Store::Stalls, Store::SaysNothing] {
            let error = get(store).await.unwrap_err();
            assert_eq!(error.kind(), HttpErrorKind::Timeout, "{store:?}");
            assert!(error.to_string().contains("no byte arrived"), "{error}");
        }
    }

    /// S3 with room for one object, whose connection is reset once.
    #[cfg(feature = "aws")]
    #[derive(Debug, Clone)]
    struct Resets {
        /// After the request was applied, not before.
        applied: bool,
        reset: Arc<AtomicBool>,
        object: Arc<Mutex<bool>>,
    }

    #[cfg(feature = "aws")]
    impl HttpConnector for Resets {
        fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
            Ok(HttpClient::new(self.clone()))
        }
    }

    #[cfg(feature = "aws")]
    #[async_trait]
    impl HttpService for Resets {
        async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
            let reset = self.reset.swap(false, Ordering::SeqCst);
            let failed = || HttpError::new(HttpErrorKind::Interrupted, io::Error::from(io::ErrorKind::ConnectionReset));
            if reset && !self.applied {
                return Err(failed());
            }
            let creates = request.method().as_str() == "PUT";
            let there = std::mem::replace(&mut *self.object.lock().unwrap(), creates);
            if reset {
                return Err(failed());
            }
            let mut answer =
                HttpResponse::new("<DeleteResult><Deleted><Key>x</Key></Deleted></DeleteResult>".to_owned().into());
            if creates && there {
                *answer.status_mut() = 412.try_into().unwrap();
            }
            answer.headers_mut().insert("etag", "e".parse().unwrap());
            Ok(answer)
        }
    }

    #[cfg(feature = "aws")]
    #[tokio::test]
    async fn requests_that_change_something_are_sent_again_when_the_connection_breaks() {
        for applied in [false, true] {
            let reset = || Arc::new(AtomicBool::new(true));
            let resets = Resets { applied, reset: reset(), object: Arc::default() };
            let builder = AmazonS3Builder::new().with_bucket_name("b").with_region("r").with_skip_signature(true);
            let store = builder.with_http_connector(resets.clone()).build().unwrap();
            let path = Path::from("x");
            let create = || async {
                let options = object_store::PutOptions::from(PutMode::Create);
                object_store::ObjectStore::put_opts(&store, &path, "x".into(), options).await
            };
            // By itself, the store ends with the reset.
            assert!(is_unanswered(&create().await.unwrap_err()));
            *resets.object.lock().unwrap() = false;
            resets.reset.store(true, Ordering::SeqCst);
            match until_answered(RETRY_FOR, create).await {
                Ok(_) => assert!(!applied),
                // The existing object may be ours; the caller compares.
                Err(object_store::Error::AlreadyExists { .. }) => assert!(applied),
                Err(error) => panic!("{error}"),
            }
            assert!(*resets.object.lock().unwrap());
            resets.reset.store(true, Ordering::SeqCst);
            until_answered(RETRY_FOR, || store.delete(&path)).await.unwrap();
            assert!(!*resets.object.lock().unwrap());
        }
    }

    /// S3 that answers the first requests with an error.
    #[cfg(feature = "aws")]
    #[derive(Debug, Clone)]
    struct Overloaded {
        status: u16,
        /// How many requests it rejects.
        rejects: usize,
        requests: Arc<AtomicUsize>,
    }

    #[cfg(feature = "aws")]
    impl HttpConnector for Overloaded {
        fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
            Ok(HttpClient::new(self.clone()))
        }
    }

    #[cfg(feature = "aws")]
    #[async_trait]
    impl HttpService for Overloaded {
        async fn call(&self, _: HttpRequest) -> Result<HttpResponse, HttpError> {
            let before = self.requests.fetch_add(1, Ordering::SeqCst);
            let mut answer = HttpResponse::new("x".to_owned().into());
            if before < self.rejects {
                *answer.status_mut() = self.status.try_into().unwrap();
            }
            answer.headers_mut().insert("etag", "e".parse().unwrap());
            Ok(answer)
        }
    }

    /// Twelve rejected requests are more than the stores' clients retry by default. All pauses between thirteen requests
    /// come to less than two thirds of the budget.
    #[cfg(feature = "aws")]
    #[tokio::test]
    async fn a_burst_of_errors_is_retried_for_a_time_and_not_a_number_of_times() {
        let put = async |status, rejects, budget| {
            let server = Overloaded { status, rejects, requests: Arc::default() };
            let builder = AmazonS3Builder::new().with_bucket_name("b").with_region("r").with_skip_signature(true);
            let builder = builder.with_retry(retries(budget)).with_http_connector(server.clone());
            let put = builder.build().unwrap().put(&Path::from("x"), "x".into()).await;
            (put, server.requests.load(Ordering::SeqCst))
        };
        for status in [500, 503] {
            let (put, requests) = put(status, 12, Duration::from_secs(6)).await;
            put.unwrap();
            assert_eq!(requests, 13);
        }
        let (put, requests) = put(503, usize::MAX, Duration::from_millis(1)).await;
        assert!(put.unwrap_err().to_string().contains("503"), "{requests} requests");
    }
}
