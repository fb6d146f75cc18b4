//! Queries on a cluster: Ballista's scheduler and executors with our functions, and the client that sends them plans.
//!
//! ```text
//! client: SQL -> physical plan -> parts, portions of rows -> bytes -> scheduler: tasks -> executors: vectors -> client
//! ```
//!
//! The client plans, with the rules and the table lists of a single process, and does itself what does not go partition by
//! partition; EXPLAIN shows what goes where. The scheduler needs no model and no store. Executors read files by their URLs,
//! and find models by where the client says they are; what a model was when the query was planned travels along and is
//! compared.
//!
//! Ballista could send logical plans too. Then tables of rows, the models behind the functions and the fields of results
//! would have to be known to the scheduler, which plans once more.

mod client;
mod codec;
mod columns;
mod engine;
mod executor;
mod order;
mod part;
mod plan;
mod rows;
mod scans;
mod scheduler;
mod stage;
mod travel;

use std::{fmt, str::FromStr};

use ballista_core::extension::SessionConfigExt;
use datafusion::prelude::SessionConfig;
use elmo_udfs::plan::config::ElmoConfig;

pub(crate) use self::client::settled;
pub use self::{
    client::{Cluster, ClusterError},
    executor::{Executor, ExecutorSettings},
    scheduler::Scheduler,
    stage::ClusterStage,
};
use crate::sql::whole_cells;

/// Where a scheduler listens unless told otherwise.
pub const SCHEDULER_PORT: u16 = 50050;

/// Largest message between processes: a plan with the rows of a table, or a batch of vectors.
const MESSAGE_BYTES: u32 = 512 << 20;

/// Parts that the rows of a file are cut into, for so many tasks at most.
const PARTITIONS: usize = 16;

/// Bytes from which on a file is cut: a part of less than a batch of the engine, some 40 KB, costs more than it brings.
const SPLIT_BYTES: usize = 512 << 10;

/// Seconds that a result is kept for a client that does not come.
const RESULT_SECONDS: u64 = 24 * 3600;

/// Seconds between two signs of life of an executor.
const HEARTBEAT: u64 = 3;

/// Seconds without a sign of life after which an executor is taken for dead, and its tasks are given to others.
const EXECUTOR_TIMEOUT: u64 = 15;

/// `HOST:PORT`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// A name or a number; of IPv6 in brackets.
    pub host: String,
    /// A port.
    pub port: u16,
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "it must be HOST or HOST:PORT, such as 10.0.0.7:50050".to_owned();
        let text = text.strip_prefix("df://").or_else(|| text.strip_prefix("http://")).unwrap_or(text);
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, port.parse().map_err(|_| wrong())?),
            _ => (text, SCHEDULER_PORT),
        };
        let number = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_host = match number {
            Some(number) => number.parse::<std::net::Ipv6Addr>().is_ok(),
            None => !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c)),
        };
        if is_host { Ok(Self { host: host.to_owned(), port }) } else { Err(wrong()) }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// The settings of a session on a cluster. The same in all processes: Ballista drops those that one does not know without
/// a word.
pub(crate) fn session_config() -> SessionConfig {
    whole_cells(SessionConfig::new())
        .with_option_extension(ElmoConfig::default())
        .upgrade_for_ballista()
        .with_ballista_grpc_client_max_message_size(MESSAGE_BYTES as usize)
        .with_information_schema(true)
        .with_target_partitions(PARTITIONS)
        .with_repartition_file_min_size(SPLIT_BYTES)
        // Ballista prefers merge joins, which spill. Those of DataFusion 55 lose columns that only their filter reads when a
        // projection moves below them, and give wrong rows.
        .set_bool("datafusion.optimizer.prefer_hash_join", true)
        // As in one process; see `ElmoSession`.
        .set_bool("datafusion.execution.skip_physical_aggregate_schema_check", true)
        // A partition has the rows of its own files, so that partitions one after the other are in the order of the files.
        .set_bool("datafusion.execution.enable_file_stream_work_stealing", false)
        // Ballista makes joins of them, in which a subquery with several rows is no error. They run where it is asked.
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
