//! The HTTP clients of the stores: how long they wait, how often they try again, and what they say meanwhile.
//!
//! A limit for a whole request, which is what the stores offer, cuts off every download that is longer than it. What
//! counts here is whether bytes still come.

use std::{
    error::Error,
    io,
    pin::{Pin, pin},
    sync::atomic::{AtomicBool, Ordering},
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use object_store::{
    ClientOptions, RetryConfig,
    client::{
        HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody, HttpService,
        ReqwestConnector,
    },
};
use tokio::time::{Sleep, sleep, timeout};

/// A machine that is there takes a connection sooner.
const CONNECT: Duration = Duration::from_secs(10);
/// Without a single byte for so long a request has failed.
const SILENCE: Duration = Duration::from_secs(60);
/// A request that failed is tried again until so long after the first try. Two tries of a silent store fit in.
const RETRY_FOR: Duration = Duration::from_secs(120);
/// Pauses between tries of a request that got no answer: the first, doubled each time, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));
/// Bytes a second of the slowest line on which a request with a long body has the time to be sent.
const SLOWEST_UPLOAD: usize = 64 << 10;

/// What the builders of the stores are given; settings of the environment such as `AWS_TIMEOUT` come on top.
pub(super) fn options() -> ClientOptions {
    ClientOptions::new().with_connect_timeout(CONNECT).with_timeout_disabled()
}

pub(super) fn retries() -> RetryConfig {
    RetryConfig { retry_timeout: RETRY_FOR, ..RetryConfig::default() }
}

/// Sends a request again for as long as none of the tries is answered: the stores' clients leave that to the caller for
/// requests that change something. Whether a try was applied, nobody knows then; the caller finds out by what the next
/// one finds.
pub(super) async fn until_answered<T, F: Future<Output = object_store::Result<T>>>(
    request: impl Fn() -> F,
) -> object_store::Result<T> {
    let (began, (mut pause, longest)) = (Instant::now(), PAUSES);
    loop {
        match request().await {
            Err(error) if is_unanswered(&error) && began.elapsed() + pause < RETRY_FOR => sleep(pause).await,
            answer => return answer,
        }
        pause = longest.min(2 * pause);
    }
}

/// Whether the connection broke or was silent before there was an answer. After other failures of a connection the
/// request was not sent, and the stores' clients have tried again themselves.
fn is_unanswered(error: &object_store::Error) -> bool {
    let unanswered = |kind| matches!(kind, HttpErrorKind::Timeout | HttpErrorKind::Interrupted);
    let mut reasons = std::iter::successors(Some(error as &dyn Error), |&reason| reason.source());
    reasons.any(|reason| reason.downcast_ref::<HttpError>().is_some_and(|error| unanswered(error.kind())))
}

/// Makes clients that notice when nothing comes any more.
#[derive(Debug)]
pub(super) struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Watched { client, silence: SILENCE, failing: AtomicBool::new(false) }))
    }
}

/// A client whose requests end when the other side is silent.
#[derive(Debug)]
struct Watched {
    client: HttpClient,
    silence: Duration,
    /// The last request failed, and it was said: there may be many tries.
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
        self.tell(&host, answered.as_ref().err());
        let silence = self.silence;
        answered.map(|answer| answer.map(|body| HttpResponseBody::new(WatchedBody { body, silence, pause: None })))
    }
}

impl Watched {
    /// Says that a store does not answer: once, and again only when it had answered in between.
    fn tell(&self, host: &str, error: Option<&HttpError>) {
        let failing = self.failing.swap(error.is_some(), Ordering::Relaxed);
        let Some(error) = error.filter(|_| !failing) else { return };
        let reason = innermost(error);
        match error.kind() {
            HttpErrorKind::Unknown | HttpErrorKind::Decode => {
                tracing::warn!(host, reason, "a request to the store failed");
            }
            _ => tracing::warn!(host, reason, "no answer from the store, trying again for up to two minutes"),
        }
    }
}

/// The reasons above it say no more than that a request failed.
fn innermost(error: &HttpError) -> String {
    let mut reason: &dyn Error = error;
    while let Some(inner) = reason.source() {
        reason = inner;
    }
    reason.to_string()
}

fn silent(waited: Duration) -> HttpError {
    let reason = format!("no byte came for {} s", waited.as_secs());
    HttpError::new(HttpErrorKind::Timeout, io::Error::new(io::ErrorKind::TimedOut, reason))
}

/// A body that fails when nothing comes for too long. Time in which nobody asks for the next bytes does not count.
struct WatchedBody {
    body: HttpResponseBody,
    silence: Duration,
    /// Since the reader waits.
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
        std::sync::{Arc, Mutex},
    };

    use super::*;

    /// A store that answers as it is told to.
    #[derive(Debug, Clone, Copy)]
    enum Store {
        Answers,
        Stalls,
        SaysNothing,
    }

    /// A byte, and perhaps nothing after it.
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
        let watched = Watched { client, silence: Duration::from_millis(60), failing: AtomicBool::new(false) };
        let answer = watched.call(HttpRequest::new(HttpRequestBody::empty())).await?;
        answer.into_body().bytes().await
    }

    #[tokio::test]
    async fn a_silent_store_ends_a_request() {
        assert_eq!(get(Store::Answers).await.unwrap(), "x");
        for store in [Store::Stalls, Store::SaysNothing] {
            let error = get(store).await.unwrap_err();
            assert_eq!(error.kind(), HttpErrorKind::Timeout, "{store:?}");
            assert!(error.to_string().contains("no byte came"), "{error}");
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
            match until_answered(create).await {
                Ok(_) => assert!(!applied),
                // What is there may be ours; the caller compares.
                Err(object_store::Error::AlreadyExists { .. }) => assert!(applied),
                Err(error) => panic!("{error}"),
            }
            assert!(*resets.object.lock().unwrap());
            resets.reset.store(true, Ordering::SeqCst);
            until_answered(|| store.delete(&path)).await.unwrap();
            assert!(!*resets.object.lock().unwrap());
        }
    }
}
