//! Progress as log lines, for pipes, files and log collectors.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use super::{Pace, Progress, Snapshot, duration};

/// The target of progress lines, which are logged without `-v`.
pub(crate) const TARGET: &str = "elmo::progress";

/// Logs progress every ten seconds.
#[derive(Debug)]
pub struct Lines {
    interval: Duration,
    started: Instant,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    first: Option<Snapshot>,
    last: Instant,
}

impl Lines {
    /// A progress interval of ten seconds.
    pub fn new() -> Self {
        Self::with_interval(Duration::from_secs(10))
    }

    /// Another progress interval.
    fn with_interval(interval: Duration) -> Self {
        let started = Instant::now();
        Self { interval, started, state: Mutex::new(State { first: None, last: started }) }
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
        if state.last.elapsed() < self.interval {
            return;
        }
        state.last = Instant::now();
        log(now, &Pace::of(&first, now, self.started.elapsed()));
    }

    fn finish(&self) {}
}

fn log(now: &Snapshot, pace: &Pace) {
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

    /// The output of a subscriber.
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

    /// The lines logged for three snapshots.
    fn logged(lines: &Lines) -> Vec<String> {
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
    fn a_line_per_interval() {
        let lines = logged(&Lines::with_interval(Duration::ZERO));
        assert_eq!(lines.len(), 3, "{lines:?}");
        // By hand: 100 of 200 rows, one place in ten is padding.
        for part in ["INFO elmo::progress: progress rows=100 rows_total=200 percent=50.0", "padding_percent=10.0 left="]
        {
            assert!(lines[2].contains(part), "{lines:?}");
        }
        assert!(!lines[0].contains("left="), "the speed is not known yet: {lines:?}");
    }

    #[test]
    fn no_line_before_the_interval() {
        assert_eq!(logged(&Lines::new()), [""; 0]);
    }
}
