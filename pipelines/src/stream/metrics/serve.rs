//! The HTTP server of `--metrics`: `/metrics`, `/livez` and `/readyz`.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use tokio::{net::TcpListener, sync::oneshot, task::JoinHandle};

use super::{Health, Metrics};
use crate::stream::StreamError;

/// The type of what [`Metrics::encode`] returns.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// How long a request may take once the server stops.
const STOP_FOR: Duration = Duration::from_secs(1);

/// A running server. Dropping it stops it at once.
#[derive(Debug)]
pub struct MetricsServer {
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    task: Task,
}

/// Ends with its owner.
#[derive(Debug)]
struct Task(JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[derive(Debug, Clone)]
struct Shown {
    metrics: Arc<Metrics>,
    health: Arc<Health>,
}

/// Serves metrics and health on an address. With port 0 the system selects a free one.
///
/// # Errors
/// [`StreamError::Settings`] when the address cannot be used.
pub async fn serve(
    address: SocketAddr,
    metrics: Arc<Metrics>,
    health: Arc<Health>,
) -> Result<MetricsServer, StreamError> {
    let unusable = |e: std::io::Error| StreamError::Settings {
        message: format!("cannot serve metrics on {address}: {e}"),
        help: Some("give --metrics another address, or port 0 for a free one".to_owned()),
    };
    let listener = TcpListener::bind(address).await.map_err(unusable)?;
    let address = listener.local_addr().map_err(unusable)?;
    let (stop, stopped) = oneshot::channel::<()>();
    let routes = Router::new()
        .route("/metrics", get(show_metrics))
        .route("/livez", get(|State(shown): State<Shown>| async move { answer(shown.health.live()) }))
        .route("/readyz", get(|State(shown): State<Shown>| async move { answer(shown.health.ready()) }))
        .with_state(Shown { metrics, health });
    let server = axum::serve(listener, routes).with_graceful_shutdown(async {
        let _ = stopped.await;
    });
    // Errors of single connections are handled by axum; the server itself ends when it is told to.
    let task = tokio::spawn(async move {
        let _ = server.await;
    });
    Ok(MetricsServer { address, stop, task: Task(task) })
}

impl MetricsServer {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers the requests that have arrived, and ends.
    pub async fn stop(mut self) {
        let _ = self.stop.send(());
        let _ = tokio::time::timeout(STOP_FOR, &mut self.task.0).await;
    }
}

async fn show_metrics(State(shown): State<Shown>) -> Response {
    ([(header::CONTENT_TYPE, OPEN_METRICS)], shown.metrics.encode()).into_response()
}

fn answer(health: Result<(), String>) -> Response {
    match health {
        Ok(()) => (StatusCode::OK, "ok\n".to_owned()),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason + "\n"),
    }
    .into_response()
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
    };

    use super::*;
    use crate::{error::Fault, stream::metrics::Outcome};

    async fn start() -> (MetricsServer, Arc<Metrics>, Arc<Health>) {
        let (metrics, health) = (Arc::new(Metrics::new()), Arc::new(Health::new(Duration::from_millis(10))));
        let free = SocketAddr::from(([127, 0, 0, 1], 0));
        let server = serve(free, Arc::clone(&metrics), Arc::clone(&health)).await.unwrap();
        (server, metrics, health)
    }

    /// The whole answer to a request, as it comes over the wire.
    async fn request(server: &MetricsServer, line: &str) -> String {
        let mut connection = TcpStream::connect(server.address()).await.unwrap();
        let request = format!("{line} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
        connection.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn metrics_over_http() {
        let (server, metrics, _) = start().await;
        assert_ne!(server.address().port(), 0);
        metrics.done(Outcome::Embedded, 7);
        let answer = request(&server, "GET /metrics").await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(answer.contains(&format!("content-type: {OPEN_METRICS}\r\n")), "{answer}");
        assert!(answer.contains("\nelmo_stream_rows_total{outcome=\"embedded\"} 7\n"), "{answer}");
        assert!(request(&server, "GET /").await.starts_with("HTTP/1.1 404 "));
        assert!(request(&server, "POST /metrics").await.starts_with("HTTP/1.1 405 "));
    }

    #[tokio::test]
    async fn health_over_http() {
        let (server, _, health) = start().await;
        assert!(request(&server, "GET /livez").await.ends_with("\r\n\r\nok\n"));
        let starting = request(&server, "GET /readyz").await;
        assert!(
            starting.starts_with("HTTP/1.1 503 ") && starting.contains("the model is not loaded yet"),
            "{starting}"
        );
        health.model_loaded();
        health.store_probed();
        health.assigned();
        assert!(request(&server, "GET /readyz").await.starts_with("HTTP/1.1 200 "));
        health.polled();
        tokio::time::sleep(Duration::from_millis(30)).await;
        for path in ["/livez", "/readyz"] {
            let stuck = request(&server, &format!("GET {path}")).await;
            assert!(stuck.starts_with("HTTP/1.1 503 ") && stuck.contains("last polled"), "{stuck}");
        }
    }

    #[tokio::test]
    async fn it_stops_with_a_connection_open() {
        let (server, _, _) = start().await;
        let address = server.address();
        let mut idle = TcpStream::connect(address).await.unwrap();
        idle.write_all(b"GET /livez HTTP/1.1\r\nHost: test\r\n\r\n").await.unwrap();
        assert_ne!(idle.read(&mut [0; 512]).await.unwrap(), 0);
        server.stop().await;
        assert!(TcpStream::connect(address).await.is_err(), "nobody listens");
        assert_eq!(idle.read(&mut [0; 512]).await.unwrap_or(0), 0, "the connection is closed");
    }

    #[tokio::test]
    async fn a_used_address_is_an_error() {
        let (server, metrics, health) = start().await;
        let error = serve(server.address(), metrics, health).await.unwrap_err();
        assert!(error.to_string().starts_with(&format!("cannot serve metrics on {}: ", server.address())), "{error}");
        assert!(error.help().unwrap().contains("--metrics"));
    }
}
