//! Queries on workers: processes of elmo that read, embed and reduce, each the part of a query that it is given.
//!
//! ```text
//! client: SQL -> physical plan -> stages -> workers: files -> vectors -> client
//! client: bulk job -> units -> workers: files -> parts without names -> client: publishes them
//! ```
//!
//! There is no scheduler: every client coordinates its own queries. The runtime is that of `datafusion-distributed`: a stage
//! is a subplan that several workers run, each on other files, and streams its rows over gRPC; dropping a stream ends the
//! work behind it. What may be a stage is decided in `cut.rs`.

mod cluster_exec;
mod codec;
mod copy;
mod cut;
mod distributable;
mod envelope;
mod error;
mod fleet;
mod gate;
mod jobs;
mod live;
mod members;
mod model_host;
mod peers;
mod planner;
mod publish_exec;
mod rows_exec;
mod scan_exec;
mod scans;
mod sent;
mod service;
mod stage;
mod stage_exec;
mod task;
mod watch;
mod worker;

use std::{fmt, str::FromStr};

pub use self::{
    error::ClusterError,
    members::Workers,
    peers::Credentials,
    planner::Cluster,
    service::Greeting,
    stage::WorkerStage,
    worker::{Worker, WorkerSettings},
};

/// Default port of workers.
pub const WORKER_PORT: u16 = 50051;

/// Target partitions of a scan for few workers.
const TARGET_PARTITIONS: usize = 16;

/// Minimum size of a file to split. A batch of the engine is about 40 KB of text; smaller tasks cost more than they gain.
const MIN_SPLIT_BYTES: usize = 512 << 10;

/// `HOST:PORT`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// A host name or an IP address; IPv6 addresses are in brackets.
    pub host: String,
    /// The port.
    pub port: u16,
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || "expected HOST or HOST:PORT, such as 10.0.0.7:50051".to_owned();
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, port.parse().map_err(|_| invalid())?),
            _ => (text, WORKER_PORT),
        };
        let ipv6 = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_host = match ipv6 {
            Some(ipv6) => ipv6.parse::<std::net::Ipv6Addr>().is_ok(),
            None => !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c)),
        };
        if is_host { Ok(Self { host: host.to_owned(), port }) } else { Err(invalid()) }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let parsed = |text: &str| text.parse::<Address>().map(|address| address.to_string());
        assert_eq!(parsed("gpu-1"), Ok("gpu-1:50051".to_owned()));
        assert_eq!(parsed("10.0.0.7:4000"), Ok("10.0.0.7:4000".to_owned()));
        assert_eq!(parsed("[::1]:50051"), Ok("[::1]:50051".to_owned()));
        assert_eq!(parsed("[::1]"), Ok("[::1]:50051".to_owned()));
        for wrong in ["", ":1", "a:b", "a:70000", "a b:1", "::1", "s3://b", "a/b", "[]:5", "[:5", "[::1:5"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }
}
