//! A stream that runs: what its metrics say, and what memory it takes.

use std::{
    env,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use super::{
    dataset::Dataset,
    node::Node,
    streaming::{self, Stream},
};

/// Whether tests may take minutes: `ELMO_TEST_LONG=1`.
pub(crate) fn is_long() -> bool {
    env::var_os("ELMO_TEST_LONG").is_some()
}

/// A stream that runs.
pub(crate) struct Running {
    pub(crate) node: Node,
    /// The address of its metrics.
    pub(crate) metrics: String,
}

impl Running {
    /// Starts a stream that has `--metrics 127.0.0.1:0` and `-v`.
    pub(crate) fn start(stream: &Stream) -> Self {
        Self::of(stream.command())
    }

    pub(crate) fn of(command: Command) -> Self {
        let mut node = Node::spawn(command, "");
        node.wait_for("address=");
        let line = node.stderr();
        let metrics = line.split("address=").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
        Self { node, metrics }
    }

    /// A metric, summed over its labels.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        streaming::metric(&self.metrics, name, "")
    }

    /// Waits, for as long as `patience`, while the process lives.
    pub(crate) fn wait(&mut self, what: &str, patience: Duration, mut holds: impl FnMut(&Self) -> bool) {
        let began = Instant::now();
        while !holds(self) {
            assert!(began.elapsed() < patience, "never came true: {what}: {}", self.node.stderr());
            assert_eq!(self.node.child.try_wait().unwrap(), None, "the stream has ended: {}", self.node.stderr());
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Waits until `count` messages are in the output, whose partitions begin at offset 0. What the group has committed does not
    /// tell: a member that loses a partition after it has published commits nothing.
    pub(crate) fn wait_for(&mut self, output: &str, count: usize, patience: Duration) {
        let count = i64::try_from(count).unwrap();
        self.wait(&format!("{count} messages are published"), patience, |_| {
            thread::sleep(Duration::from_millis(200));
            Dataset::end(output) == count
        });
    }

    /// Resident memory, in bytes.
    pub(crate) fn memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.node.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }
}
