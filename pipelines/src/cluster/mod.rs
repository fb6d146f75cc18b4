//! Queries and bulk jobs on a cluster: Ballista's scheduler and executors with the embedding functions registered, and
//! a client that sends them physical plans.
//!
//! ```text
//! client: SQL -> physical plan -> subplans, chunks of rows -> scheduler -> tasks -> executors -> vectors -> client
//! ```
//!
//! The client plans queries as a single process does, and runs all operators that need more than one partition at a
//! time; EXPLAIN shows what runs where. The scheduler needs neither models nor object stores. Executors read files by
//! URL and open models by the address in the plan. A plan contains the model's fingerprint at planning time, which the
//! executor checks.
//!
//! The client sends physical plans because the scheduler would plan logical ones again: it would need the in-memory
//! tables, the models of the functions and the fields of their results.

mod bulk_exec;
mod bulk_stage;
mod client;
mod cluster_exec;
mod cluster_rows_exec;
mod codec;
mod distributable;
mod engine;
mod envelope;
mod error;
mod executor;
mod job;
mod model_host;
mod planner;
mod results;
mod scans;
mod scheduler;

use std::{fmt, str::FromStr, time::Duration};

use ballista_core::extension::SessionConfigExt;
use datafusion::prelude::SessionConfig;
use elmo_udfs::plan::config::ElmoConfig;

pub(crate) use self::job::release_jobs;
pub use self::{
    bulk_stage::ClusterStage,
    client::Cluster,
    error::ClusterError,
    executor::{Executor, ExecutorSettings},
    scheduler::Scheduler,
};
use crate::sql::with_newlines_in_values;

/// Default port of a scheduler.
pub const SCHEDULER_PORT: u16 = 50050;

/// Maximum size of a gRPC message: a plan with the rows of a table, or a batch of vectors.
const MESSAGE_BYTES: u32 = 512 << 20;

/// Target partitions of a scan, and so its maximum number of tasks.
const TARGET_PARTITIONS: usize = 16;

/// Minimum size of a file to split. A batch of the engine is about 40 KB of text; smaller tasks cost more than they
/// gain.
const MIN_SPLIT_BYTES: usize = 512 << 10;

/// Seconds until executors delete a result that no client fetched.
const RESULT_TTL_SECONDS: u64 = 24 * 3600;

/// Heartbeat interval of executors, in seconds.
const HEARTBEAT_SECONDS: u64 = 3;

/// Seconds without a heartbeat after which the scheduler removes an executor and reschedules its tasks.
const EXECUTOR_TIMEOUT_SECONDS: u64 = 15;

/// Timeout of a request to the scheduler. It answers at once, but has to receive plans of up to [`MESSAGE_BYTES`].
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// The reason in errors about timeouts.
const NO_ANSWER: &str = "no answer within the timeout";

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
        let invalid = || "expected HOST or HOST:PORT, such as 10.0.0.7:50050".to_owned();
        let text = text.strip_prefix("df://").or_else(|| text.strip_prefix("http://")).unwrap_or(text);
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, port.parse().map_err(|_| invalid())?),
            _ => (text, SCHEDULER_PORT),
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

/// The session configuration of all processes of a cluster. Ballista silently drops settings whose extension is not
/// registered.
pub(crate) fn session_config() -> SessionConfig {
    with_newlines_in_values(SessionConfig::new())
        .with_option_extension(ElmoConfig::default())
        .upgrade_for_ballista()
        .with_ballista_grpc_client_max_message_size(MESSAGE_BYTES as usize)
        .with_information_schema(true)
        .with_target_partitions(TARGET_PARTITIONS)
        .with_repartition_file_min_size(MIN_SPLIT_BYTES)
        // Ballista prefers sort-merge joins, as they spill. In DataFusion 55 they return wrong rows: pushing a
        // projection below the join drops columns that only its filter uses.
        .set_bool("datafusion.optimizer.prefer_hash_join", true)
        // As `ElmoSession` does in a single process.
        .set_bool("datafusion.execution.skip_physical_aggregate_schema_check", true)
        // Keeps files in their partitions, so that concatenated partitions are in file order.
        .set_bool("datafusion.execution.enable_file_stream_work_stealing", false)
        // Ballista rewrites scalar subqueries to joins, which do not reject a subquery of several rows. The client runs
        // them.
        .set_bool("datafusion.optimizer.enable_physical_uncorrelated_scalar_subquery", true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let parsed = |text: &str| text.parse::<Address>().map(|address| address.to_string());
        assert_eq!(parsed("gpu-1"), Ok("gpu-1:50050".to_owned()));
        assert_eq!(parsed("10.0.0.7:4000"), Ok("10.0.0.7:4000".to_owned()));
        assert_eq!(parsed("df://host:1"), Ok("host:1".to_owned()));
        assert_eq!(parsed("[::1]:50050"), Ok("[::1]:50050".to_owned()));
        assert_eq!(parsed("[::1]"), Ok("[::1]:50050".to_owned()));
        for wrong in ["", ":1", "a:b", "a:70000", "a b:1", "::1", "s3://b", "a/b", "[]:5", "[:5", "[::1:5"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }
}
