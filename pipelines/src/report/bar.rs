//! The progress bar on a terminal.

use std::{
    sync::{Mutex, PoisonError},
    time::Instant,
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, WeakProgressBar};

use super::{Pace, Progress, Snapshot, count, duration};

/// Length of the bar. Positions are fractions of the job, because the unit may change from bytes to rows.
const STEPS: u64 = 10_000;

/// The template before the first update, and the one after.
const TEMPLATES: [&str; 2] = ["{spinner} {wide_msg}", "{bar:24} {percent:>3}% {wide_msg}"];

/// The latest bar, for messages of other threads.
static LATEST: Mutex<Option<WeakProgressBar>> = Mutex::new(None);

/// The latest bar, if it still exists.
fn latest() -> Option<ProgressBar> {
    LATEST.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.upgrade()
}

/// Runs `write`, which writes to the terminal, without the bar in its way: the bar is drawn again below.
pub(crate) fn above_bar<T>(write: impl FnOnce() -> T) -> T {
    match latest() {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

/// Removes the bar from the terminal, for a process that ends without running destructors.
pub(crate) fn clear_bar() {
    if let Some(bar) = latest() {
        bar.finish_and_clear();
    }
}

/// A progress bar on stderr with rows/s, tokens/s, padding and the time left.
#[derive(Debug)]
pub struct Bar {
    bar: ProgressBar,
    started: Instant,
    first: Mutex<Option<Snapshot>>,
}

impl Bar {
    /// Starts drawing on stderr, ten times a second.
    pub fn new() -> Self {
        let bar = ProgressBar::with_draw_target(Some(STEPS), ProgressDrawTarget::stderr_with_hz(10));
        bar.set_style(style(TEMPLATES[0]));
        bar.set_message("starting");
        bar.enable_steady_tick(std::time::Duration::from_millis(100));
        *LATEST.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar.downgrade());
        Self { bar, started: Instant::now(), first: Mutex::new(None) }
    }
}

impl Default for Bar {
    fn default() -> Self {
        Self::new()
    }
}

/// An error may end a command before its job could.
impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

impl Progress for Bar {
    fn update(&self, now: &Snapshot) {
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        let first = first.get_or_insert_with(|| {
            self.bar.set_style(style(TEMPLATES[1]));
            *now
        });
        let pace = Pace::of(first, now, self.started.elapsed());
        if let Some(fraction) = now.fraction() {
            self.bar.set_position((fraction * STEPS as f64) as u64);
        }
        self.bar.set_message(message(now, &pace));
    }

    fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// An invalid template would be a bug; the default bar is better than ending the job.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> ")
}

fn message(now: &Snapshot, pace: &Pace) -> String {
    let mut text = format!(
        "{} rows  {:.0} rows/s  {:.0} tokens/s  {:.1}% padding",
        count(now.rows),
        pace.rows_per_second,
        pace.tokens_per_second,
        100.0 * now.padding()
    );
    if let Some(left) = pace.left {
        text.push_str(&format!("  ETA {}", duration(left)));
    }
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    // By hand: half of the rows and 2,000 more than at the start, a tenth of the places in batches are padding.
    fn half() -> Snapshot {
        Snapshot { rows: 2500, rows_total: Some(5000), tokens: 45_000, padded_tokens: 50_000, ..Snapshot::default() }
    }

    #[test]
    fn the_bar_has_the_fraction_of_the_job() {
        let bar = Bar::new();
        bar.update(&Snapshot { rows: 500, ..half() });
        bar.update(&half());
        assert_eq!(bar.bar.position(), STEPS / 2);
        assert!(bar.bar.message().starts_with("2,500 rows  "), "{}", bar.bar.message());
        bar.finish();
        assert!(bar.bar.is_finished());
    }

    #[test]
    fn the_message_has_speeds_and_the_time_left() {
        let pace = Pace { rows_per_second: 199.6, tokens_per_second: 4000.2, left: Some(Duration::from_secs(61)) };
        let known = "2,500 rows  200 rows/s  4000 tokens/s  10.0% padding";
        assert_eq!(message(&half(), &pace), format!("{known}  ETA 1m01s"));
        assert_eq!(message(&half(), &Pace { left: None, ..pace }), known);
    }

    #[test]
    fn the_templates_are_valid() {
        for template in TEMPLATES {
            assert!(ProgressStyle::with_template(template).is_ok(), "{template}");
        }
    }
}
