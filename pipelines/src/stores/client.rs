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
    time::Duration,
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
/// Bytes a second of the slowest line on which a request with a long body has the time to be sent.
const SLOWEST_UPLOAD: usize = 64 << 10;

/// What the builders of the stores are given; settings of the environment such as `AWS_TIMEOUT` come on top.
pub(super) fn options() -> ClientOptions {
    ClientOptions::new().with_connect_timeout(CONNECT).with_timeout_disabled()
}

pub(super) fn retries() -> RetryConfig {
    RetryConfig { retry_timeout: RETRY_FOR, ..RetryConfig::default() }
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
}
