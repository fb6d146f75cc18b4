//! Reports for people: progress (a bar on a terminal, a log line every ten seconds otherwise), tables and numbers.

mod bar;
mod lines;
mod numbers;
mod table;

use std::time::Duration;

pub use numbers::{bytes, count, duration};

pub use self::{bar::Bar, lines::Lines};
pub(crate) use self::{
    bar::{above_bar, clear_bar},
    lines::TARGET,
    table::{grid, table},
};

/// The progress of a job. All counts start at 0 and never decrease.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Rows embedded, durable or not.
    pub rows: u64,
    /// Rows of the whole job, once known.
    pub rows_total: Option<u64>,
    /// Bytes of input read, to estimate the time left while the total number of rows is unknown.
    pub bytes: u64,
    /// Bytes of the whole input.
    pub bytes_total: Option<u64>,
    /// Tokens given to the biLM, without padding.
    pub tokens: u64,
    /// Tokens given to the biLM, including padding.
    pub padded_tokens: u64,
}

impl Snapshot {
    /// Share of the job that is done, 0 to 1: of the rows if their total is known, else of the bytes.
    pub fn fraction(&self) -> Option<f64> {
        let of = |part: u64, whole: u64| (whole > 0).then(|| (part as f64 / whole as f64).min(1.0));
        match (self.rows_total, self.bytes_total) {
            (Some(rows), _) => of(self.rows, rows),
            (None, Some(bytes)) => of(self.bytes, bytes),
            (None, None) => None,
        }
    }

    /// Share of the padded tokens that are padding, 0 to 1.
    pub fn padding(&self) -> f64 {
        match self.padded_tokens {
            0 => 0.0,
            padded => 1.0 - self.tokens as f64 / padded as f64,
        }
    }
}

/// An observer of the progress of a job.
pub trait Progress: Send + Sync {
    /// Reports progress. It is called often and must be cheap.
    fn update(&self, snapshot: &Snapshot);

    /// Reports the end of the job, whether it succeeded or failed.
    fn finish(&self);
}

/// Reports nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn update(&self, _: &Snapshot) {}

    fn finish(&self) {}
}

/// Speeds and the time left, derived from a snapshot.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Pace {
    pub(crate) rows_per_second: f64,
    pub(crate) tokens_per_second: f64,
    pub(crate) left: Option<Duration>,
}

impl Pace {
    /// The mean speed of this run. `first` is the snapshot at its start, which is not zero in a resumed job.
    pub(crate) fn of(first: &Snapshot, now: &Snapshot, elapsed: Duration) -> Self {
        let seconds = elapsed.as_secs_f64().max(1e-3);
        let rows = now.rows.saturating_sub(first.rows) as f64;
        let tokens = now.tokens.saturating_sub(first.tokens) as f64;
        Self { rows_per_second: rows / seconds, tokens_per_second: tokens / seconds, left: left(first, now, seconds) }
    }
}

/// The time left at the mean speed of this run.
fn left(first: &Snapshot, now: &Snapshot, seconds: f64) -> Option<Duration> {
    let done = now.fraction()?;
    // The fraction at the start of this run, of the totals known now.
    let start = Snapshot { rows_total: now.rows_total, bytes_total: now.bytes_total, ..*first }.fraction()?;
    let speed = (done - start) / seconds;
    (speed > 0.0).then(|| Duration::from_secs_f64(((1.0 - done) / speed).min(1e9)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pace_of_a_resumed_job_counts_only_this_run() {
        let first = Snapshot { rows: 500, rows_total: Some(1000), tokens: 5000, ..Snapshot::default() };
        let now = Snapshot { rows: 750, tokens: 7500, ..first };
        let pace = Pace::of(&first, &now, Duration::from_secs(10));
        // By hand: 250 rows and 2500 tokens in 10 s; the other 250 rows take another 10 s.
        assert_eq!(pace.rows_per_second, 25.0);
        assert_eq!(pace.tokens_per_second, 250.0);
        assert_eq!(pace.left.map(|left| left.as_secs_f64().round()), Some(10.0));
    }

    #[test]
    fn nothing_is_known_about_the_end_of_a_pipe() {
        let now = Snapshot { rows: 10, ..Snapshot::default() };
        assert_eq!(now.fraction(), None);
        assert_eq!(Pace::of(&Snapshot::default(), &now, Duration::from_secs(1)).left, None);
    }

    #[test]
    fn padding_is_a_share_of_the_padded_tokens() {
        assert_eq!(Snapshot { tokens: 90, padded_tokens: 100, ..Snapshot::default() }.padding(), 1.0 - 0.9);
        assert_eq!(Snapshot::default().padding(), 0.0);
    }
}
