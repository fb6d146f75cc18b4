//! `elmo stream` as a process: started, crashed at a point, killed, waited for.

use std::{
    io::{Read, Write},
    net::TcpStream,
    process::{Command, Output, Stdio},
    time::Duration,
};

use super::{
    broker::{Broker, Topic},
    dataset::Dataset,
    node::Node,
};
use crate::without_settings;

/// A stream of one topic into one folder, as several processes may run it.
pub(crate) struct Stream {
    program: &'static str,
    words: Vec<String>,
    output: String,
    env: Vec<(String, String)>,
}

impl Stream {
    /// Texts of `topic` into `output`, by the built-in model. `program` is `env!("CARGO_BIN_EXE_elmo")`.
    pub(crate) fn new(program: &'static str, broker: &Broker, topic: &Topic, group: &str, output: &str) -> Self {
        let stream = Self { program, words: Vec::new(), output: output.to_owned(), env: Vec::new() };
        let stream =
            stream.with("--model tiny --threads 1 --format text").with(&format!("--brokers {}", broker.address));
        stream.with(&format!("--topic {} --group {group} --output {output}", topic.name))
    }

    /// A stream without a model and a format.
    pub(crate) fn bare(program: &'static str, broker: &Broker, topic: &Topic, group: &str, output: &str) -> Self {
        let stream = Self { program, words: Vec::new(), output: output.to_owned(), env: Vec::new() };
        let words = format!("--brokers {} --topic {} --group {group} --output {output}", broker.address, topic.name);
        stream.with(&words)
    }

    /// Texts of `topic` into the topic `target`, by the built-in model.
    pub(crate) fn to_topic(program: &'static str, broker: &Broker, topic: &Topic, group: &str, target: &str) -> Self {
        let stream = Self { program, words: Vec::new(), output: String::new(), env: Vec::new() };
        let words =
            format!("--brokers {} --topic {} --group {group} --output-topic {target}", broker.address, topic.name);
        stream.with("--model tiny --threads 1 --format text").with(&words)
    }

    /// With more words on its command line, which hold no blanks.
    #[must_use]
    pub(crate) fn with(mut self, words: &str) -> Self {
        self.words.extend(words.split_whitespace().map(str::to_owned));
        self
    }

    /// With a variable in its environment.
    #[must_use]
    pub(crate) fn with_env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// The command. Of the tests' own environment it sees that of the stores.
    pub(crate) fn command(&self) -> Command {
        let mut command = without_settings(Command::new(self.program));
        command.arg("stream").args(&self.words).envs(self.env.iter().cloned()).stdin(Stdio::null());
        command
    }

    /// Starts it until it is killed or ends.
    pub(crate) fn start(&self) -> Node {
        Node::spawn(self.command(), "")
    }

    /// Runs it to the present end of the topic.
    pub(crate) fn once(&self) -> Output {
        self.command().arg("--once").output().unwrap()
    }

    /// As [`Stream::once`], which must succeed.
    pub(crate) fn drain(&self) {
        let done = self.once();
        assert!(done.status.success(), "{:?}: {}", done.status, String::from_utf8_lossy(&done.stderr));
    }

    /// What it has written so far.
    pub(crate) fn dataset(&self) -> Dataset {
        Dataset::read(&self.output)
    }
}

/// SIGKILL, and waits for the end.
pub(crate) fn kill(mut node: Node) {
    node.child.kill().unwrap();
    node.child.wait().unwrap();
}

/// The body of an HTTP answer, and its status.
pub(crate) fn get(address: &str, path: &str) -> (u16, String) {
    let mut connection = TcpStream::connect(address).unwrap();
    connection.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    write!(connection, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// Where a process with `-v` and `--metrics 127.0.0.1:0` serves its metrics.
pub(crate) fn metrics_address(node: &mut Node) -> String {
    node.wait_for("address=");
    let line = node.stderr();
    line.split("address=").nth(1).unwrap().split_whitespace().next().unwrap().to_owned()
}

/// The sum of a metric over the label sets that hold `labels`, such as `outcome="embedded"`.
pub(crate) fn metric(address: &str, name: &str, labels: &str) -> f64 {
    let (status, body) = get(address, "/metrics");
    assert_eq!(status, 200, "{body}");
    let of_metric = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
    let lines = body.lines().filter(of_metric).filter(|line| line.contains(labels));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}
