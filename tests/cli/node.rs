//! Processes that go on until they are told to end.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

/// A process that says when it is ready.
pub(crate) struct Node {
    pub(crate) child: Child,
    said: Arc<Mutex<String>>,
    pub(crate) address: String,
}

impl Node {
    /// A process of a cluster.
    pub(crate) fn start(elmo: Command, words: &str) -> Self {
        let mut node = Self::spawn(elmo, words);
        node.wait_for("ready");
        let said = node.said();
        let at = said.lines().find(|line| line.contains(": ready")).unwrap().to_owned();
        node.address = at.split(" at ").nth(1).unwrap().split(": ready").next().unwrap().to_owned();
        node
    }

    pub(crate) fn spawn(mut elmo: Command, words: &str) -> Self {
        elmo.args(words.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = elmo.spawn().unwrap();
        let (said, heard) = (Arc::<Mutex<String>>::default(), BufReader::new(child.stderr.take().unwrap()));
        let all = Arc::clone(&said);
        thread::spawn(move || {
            for line in heard.lines().map_while(Result::ok) {
                all.lock().unwrap().push_str(&(line + "\n"));
            }
        });
        Self { child, said, address: String::new() }
    }

    pub(crate) fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    pub(crate) fn wait_for(&mut self, words: &str) {
        let began = Instant::now();
        while !self.said().contains(words) {
            assert!(began.elapsed() < Duration::from_secs(60), "{words} was never said: {}", self.said());
            assert_eq!(self.child.try_wait().unwrap(), None, "{}", self.said());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Its exit code, when it ends by itself.
    pub(crate) fn ends(&mut self) -> Option<i32> {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(began.elapsed() < Duration::from_secs(60), "it goes on: {}", self.said());
            thread::sleep(Duration::from_millis(20));
        }
    }

    pub(crate) fn signal(&self, signal: &str) {
        Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
