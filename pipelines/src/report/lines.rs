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
    fn every(every: Duration) -> Self {
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

#[cfg(test)]
mod tests {
    use std::{
        io::{self, Write},
        sync::Arc,
    };

    use super::*;

    /// What a subscriber wrote.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The lines that are said about three snapshots.
    fn said(lines: &Lines) -> Vec<String> {
        let log = Log::default();
        let writer = log.clone();
        let subscriber =
            tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false).without_time().finish();
        tracing::subscriber::with_default(subscriber, || {
            for rows in [0, 50, 100] {
                lines.update(&Snapshot {
                    rows,
                    rows_total: Some(200),
                    tokens: 9 * rows,
                    padded_tokens: 10 * rows,
                    ..Snapshot::default()
                });
            }
        });
        let bytes = log.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        String::from_utf8_lossy(&bytes).lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_line_when_it_is_time() {
        let lines = said(&Lines::every(Duration::ZERO));
        assert_eq!(lines.len(), 3, "{lines:?}");
        // By hand: 100 of 200 rows, one place in ten is padding.
        for part in ["INFO elmo::progress: progress rows=100 rows_total=200 percent=50.0", "padding_percent=10.0 left="]
        {
            assert!(lines[2].contains(part), "{lines:?}");
        }
        assert!(!lines[0].contains("left="), "nothing is known yet: {lines:?}");
    }

    #[test]
    fn no_line_before() {
        assert_eq!(said(&Lines::new()), [""; 0]);
    }
}
