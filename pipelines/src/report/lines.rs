//! One log line every ten seconds, for pipes, files and cluster logs.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use super::{Pace, Progress, Snapshot, duration};

/// The filter that shows these lines without `-v` names this target.
pub(crate) const TARGET: &str = "elmo::progress";

/// A log line every ten seconds.
#[derive(Debug)]
pub struct Lines {
    every: Duration,
    started: Instant,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    first: Option<Snapshot>,
    said: Instant,
}

impl Lines {
    /// Ten seconds between lines.
    pub fn new() -> Self {
        Self::every(Duration::from_secs(10))
    }

    /// `every` between lines.
    pub fn every(every: Duration) -> Self {
        let started = Instant::now();
        Self { every, started, state: Mutex::new(State { first: None, said: started }) }
    }
}

impl Default for Lines {
    fn default() -> Self {
        Self::new()
    }
}

impl Progress for Lines {
    fn update(&self, now: &Snapshot) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let first = *state.first.get_or_insert(*now);
        if state.said.elapsed() < self.every {
            return;
        }
        state.said = Instant::now();
        say(now, &Pace::of(&first, now, self.started.elapsed()));
    }

    fn finish(&self) {}
}

fn say(now: &Snapshot, pace: &Pace) {
    tracing::info!(
        target: TARGET,
        rows = now.rows,
        rows_total = now.rows_total,
        percent = now.fraction().map(|f| (1000.0 * f).round() / 10.0),
        rows_per_second = pace.rows_per_second.round(),
        tokens_per_second = pace.tokens_per_second.round(),
        padding_percent = (1000.0 * now.padding()).round() / 10.0,
        left = pace.left.map(duration),
        "progress"
    );
}
