//! Long-running processes, with their standard error.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

/// A process that reports when it is ready.
pub(crate) struct Node {
    pub(crate) child: Child,
    stderr: Arc<Mutex<String>>,
    pub(crate) address: String,
}

impl Node {
    /// Starts a process of a cluster and waits until it is ready.
    pub(crate) fn start(elmo: Command, words: &str) -> Self {
        let mut node = Self::spawn(elmo, words);
        node.wait_for("ready");
        let stderr = node.stderr();
        let at = stderr.lines().find(|line| line.contains(": ready")).unwrap().to_owned();
        node.address = at.split(" at ").nth(1).unwrap().split(": ready").next().unwrap().to_owned();
        node
    }

    pub(crate) fn spawn(mut elmo: Command, words: &str) -> Self {
        elmo.args(words.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = elmo.spawn().unwrap();
        let (stderr, pipe) = (Arc::<Mutex<String>>::default(), BufReader::new(child.stderr.take().unwrap()));
        let all = Arc::clone(&stderr);
        thread::spawn(move || {
            for line in pipe.lines().map_while(Result::ok) {
                all.lock().unwrap().push_str(&(line + "\n"));
            }
        });
        Self { child, stderr, address: String::new() }
    }

    pub(crate) fn stderr(&self) -> String {
        self.stderr.lock().unwrap().clone()
    }

    pub(crate) fn wait_for(&mut self, words: &str) {
        let began = Instant::now();
        while !self.stderr().contains(words) {
            assert!(began.elapsed() < Duration::from_secs(60), "{words} did not appear: {}", self.stderr());
            assert_eq!(self.child.try_wait().unwrap(), None, "{}", self.stderr());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the process ends; returns its exit code.
    pub(crate) fn wait(&mut self) -> Option<i32> {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(began.elapsed() < Duration::from_secs(60), "the process did not end: {}", self.stderr());
            thread::sleep(Duration::from_millis(20));
        }
    }

    pub(crate) fn signal(&self, signal: &str) {
        Command::new("kill").args([signal, &self.child.id().to_string()]).stderr(Stdio::null()).status().unwrap();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
