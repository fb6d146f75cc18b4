//! When the open file of a partition is closed and published. A state machine without a clock.
//!
//! Limits depend on the clock and on how rows arrive, which is safe: a file that is published begins where the one before
//! it ends, wherever that is.

use std::{
    fmt,
    time::{Duration, Instant},
};

/// Limits of a file. It is closed at the first that it reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Rows.
    pub rows: u64,
    /// Size, in bytes; the part that is not yet encoded is estimated.
    pub bytes: u64,
    /// Time since its first message: the longest time that a row waits for its file.
    pub max_age: Duration,
    /// Time without a new message; `None` for no such limit.
    pub idle: Option<Duration>,
}

/// Why a file is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CloseReason {
    /// It has [`Limits::rows`].
    Rows,
    /// It has [`Limits::bytes`].
    Bytes,
    /// Its first message is older than [`Limits::max_age`].
    Age,
    /// No message arrived for [`Limits::idle`].
    Idle,
    /// The stream stops.
    Shutdown,
    /// The partition goes to another member of the group.
    Revoke,
}

impl CloseReason {
    /// All reasons.
    pub const ALL: [Self; 6] = [Self::Rows, Self::Bytes, Self::Age, Self::Idle, Self::Shutdown, Self::Revoke];

    /// The label of metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Rows => "rows",
            Self::Bytes => "bytes",
            Self::Age => "age",
            Self::Idle => "idle",
            Self::Shutdown => "shutdown",
            Self::Revoke => "revoke",
        }
    }
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The state of one file.
#[derive(Debug, Clone)]
pub struct Rotation {
    limits: Limits,
    rows: u64,
    bytes: u64,
    /// When its first and its last message were written, with a row or without.
    first: Option<Instant>,
    last: Option<Instant>,
}

impl Rotation {
    /// A file without messages.
    pub fn new(limits: Limits) -> Self {
        Self { limits, rows: 0, bytes: 0, first: None, last: None }
    }

    /// Messages were written: `rows` more rows, after which the file has `bytes`. Messages that were skipped give no rows.
    pub fn on_rows(&mut self, now: Instant, rows: u64, bytes: u64) {
        self.rows += rows;
        self.bytes = bytes;
        self.first = self.first.or(Some(now));
        self.last = Some(now);
    }

    /// Why the file has to be closed now; `None` while it may stay open. A file with nothing but skipped messages is closed
    /// by its age only: it makes the chain advance, and needs no more files than that.
    pub fn should_close(&self, now: Instant) -> Option<CloseReason> {
        let reached = |deadline: Option<Instant>| deadline.is_some_and(|deadline| deadline <= now);
        if self.rows >= self.limits.rows.max(1) {
            Some(CloseReason::Rows)
        } else if self.rows > 0 && self.bytes >= self.limits.bytes {
            Some(CloseReason::Bytes)
        } else if reached(self.oldest()) {
            Some(CloseReason::Age)
        } else if reached(self.quiet()) {
            Some(CloseReason::Idle)
        } else {
            None
        }
    }

    /// When [`should_close`](Self::should_close) has to be asked again if no message arrives; `None` for a file without
    /// messages.
    pub fn next_deadline(&self) -> Option<Instant> {
        [self.oldest(), self.quiet()].into_iter().flatten().min()
    }

    /// Age of the first message.
    pub fn age(&self, now: Instant) -> Duration {
        self.first.map_or(Duration::ZERO, |first| now.saturating_duration_since(first))
    }

    /// Time since the last message; `None` without messages.
    pub fn quiet_for(&self, now: Instant) -> Option<Duration> {
        self.last.map(|last| now.saturating_duration_since(last))
    }

    /// Whether it has messages, with rows or without.
    pub fn has_messages(&self) -> bool {
        self.first.is_some()
    }

    fn oldest(&self) -> Option<Instant> {
        // An age that no clock reaches is no limit.
        self.first?.checked_add(self.limits.max_age)
    }

    fn quiet(&self) -> Option<Instant> {
        self.last.filter(|_| self.rows > 0)?.checked_add(self.limits.idle?)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn limits() -> Limits {
        Limits { rows: 10, bytes: 1000, max_age: 60 * SECOND, idle: Some(5 * SECOND) }
    }

    #[test]
    fn each_limit_closes_a_file() {
        let t = Instant::now();
        let file = |rows, bytes| {
            let mut file = Rotation::new(limits());
            file.on_rows(t, rows, bytes);
            file
        };
        assert_eq!(file(9, 999).should_close(t), None);
        assert_eq!(file(10, 5).should_close(t), Some(CloseReason::Rows));
        assert_eq!(file(9, 1000).should_close(t), Some(CloseReason::Bytes));
        assert_eq!(file(9, 5).should_close(t + 5 * SECOND), Some(CloseReason::Idle));
        let mut busy = file(1, 5);
        (1..60).for_each(|second| busy.on_rows(t + second * SECOND, 0, 5));
        assert_eq!(busy.should_close(t + 59 * SECOND), None);
        assert_eq!(busy.should_close(t + 60 * SECOND), Some(CloseReason::Age));
        assert_eq!(busy.age(t + 60 * SECOND), 60 * SECOND);
    }

    #[test]
    fn skipped_messages_are_published_at_the_maximum_age() {
        let t = Instant::now();
        let mut file = Rotation::new(limits());
        assert_eq!((file.next_deadline(), file.should_close(t + 999 * SECOND)), (None, None));
        // The four bytes of a Parquet file without rows are no reason.
        file.on_rows(t, 0, 4000);
        assert_eq!((file.next_deadline(), file.should_close(t + 59 * SECOND)), (Some(t + 60 * SECOND), None));
        assert_eq!(file.should_close(t + 60 * SECOND), Some(CloseReason::Age));
    }

    #[test]
    fn an_endless_age_is_no_limit() {
        let mut file = Rotation::new(Limits { max_age: Duration::MAX, idle: None, ..limits() });
        file.on_rows(Instant::now(), 1, 1);
        assert_eq!(file.next_deadline(), None);
    }

    proptest! {
        /// Between two messages nothing changes before the deadline, and at the deadline the file is closed.
        #[test]
        fn the_deadline_is_the_first_moment_at_which_a_file_closes(
            messages in prop::collection::vec((0_u64..20_000, 0_u64..4), 0..20), probe in 0_u64..200_000,
        ) {
            let t = Instant::now();
            let (mut file, mut now) = (Rotation::new(Limits { rows: u64::MAX, bytes: u64::MAX, ..limits() }), t);
            for (pause, rows) in messages {
                now += Duration::from_millis(pause);
                file.on_rows(now, rows, 0);
            }
            let probe = now + Duration::from_millis(probe);
            let closes = file.next_deadline().is_some_and(|deadline| deadline <= probe);
            prop_assert_eq!(file.should_close(probe).is_some(), closes);
        }

        /// File after file, as the stream closes them: asked after each message and at each deadline. The expected reason is looked up
        /// in the list of all messages of the file.
        #[test]
        fn files_close_at_the_first_limit_that_they_reach(
            messages in prop::collection::vec((0_u64..20_000, 0_u64..4, 0_u64..400), 1..60),
            rows in 0_u64..12, bytes in 1_u64..2_000, age in 1_u64..60_000, idle in prop::option::of(1_u64..30_000),
        ) {
            let ms = Duration::from_millis;
            let limits = Limits { rows, bytes, max_age: ms(age), idle: idle.map(ms) };
            let start = Instant::now();
            // The messages of the open file: when, rows, and size of the file after it.
            let (mut file, mut model) = (Rotation::new(limits), Vec::<(Instant, u64, u64)>::new());
            let expected = |model: &[(Instant, u64, u64)], now: Instant| {
                let (first, last) = (model.first()?, model.last()?);
                let all: u64 = model.iter().map(|message| message.1).sum();
                [
                    (all >= rows.max(1), CloseReason::Rows),
                    (all > 0 && last.2 >= bytes, CloseReason::Bytes),
                    (now - first.0 >= ms(age), CloseReason::Age),
                    (all > 0 && idle.is_some_and(|idle| now - last.0 >= ms(idle)), CloseReason::Idle),
                ].into_iter().find_map(|(is_reached, reason)| is_reached.then_some(reason))
            };
            let (mut now, mut written, mut published) = (start, 0, 0);
            for (pause, rows, size) in messages {
                let arrives = now + ms(pause);
                while let Some(deadline) = file.next_deadline().filter(|deadline| *deadline <= arrives) {
                    // Not before it, and at it.
                    prop_assert_eq!(expected(&model, deadline - ms(1).min(deadline - now)), None);
                    let reason = file.should_close(deadline);
                    prop_assert!(reason.is_some());
                    prop_assert_eq!(reason, expected(&model, deadline));
                    published += model.drain(..).map(|message| message.1).sum::<u64>();
                    (file, now) = (Rotation::new(limits), deadline);
                }
                now = arrives;
                let size = model.last().map_or(0, |message| message.2) + size;
                file.on_rows(now, rows, size);
                model.push((now, rows, size));
                written += rows;
                let reason = file.should_close(now);
                prop_assert_eq!(reason, expected(&model, now));
                if reason.is_some() {
                    published += model.drain(..).map(|message| message.1).sum::<u64>();
                    file = Rotation::new(limits);
                }
                prop_assert_eq!(file.has_messages(), !model.is_empty());
                prop_assert_eq!(written - published, model.iter().map(|message| message.1).sum::<u64>());
            }
        }
    }
}
