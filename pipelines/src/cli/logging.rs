//! Messages on stderr: text for people, JSON for log collectors, secrets left out of both.

use std::{
    env, fmt,
    io::{self, IsTerminal, Write},
    str::FromStr,
    sync::OnceLock,
};

use elmo::spec::SpecError;
use tracing_subscriber::{EnvFilter, fmt::MakeWriter};

use super::CommonArgs;
use crate::{
    error::Error,
    redact::{redact, redact_json},
    report::{self, Bar, Lines, Progress, Silent},
};

/// The target of notes, which are said however quiet a job is.
const NOTES: &str = "elmo::note";

/// What [`start`] was told; nothing before that.
static STARTED: OnceLock<LogFormat> = OnceLock::new();

/// How messages are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LogFormat {
    /// A line of text.
    Text,
    /// A line of JSON.
    Json,
}

impl LogFormat {
    /// The legal words.
    pub(super) const WORDS: &'static [&'static str] = &["text", "json"];
}

impl FromStr for LogFormat {
    type Err = SpecError;

    fn from_str(word: &str) -> Result<Self, SpecError> {
        match word {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err(SpecError::Value { option: "log-format", value: word.to_owned(), legal: Self::WORDS.to_vec() }),
        }
    }
}

impl fmt::Display for LogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::Json { "json" } else { "text" })
    }
}

impl CommonArgs {
    /// How far a job is, as this user wants to be told.
    pub(super) fn progress(&self) -> Box<dyn Progress> {
        match (self.quiet, self.log_format, io::stderr().is_terminal()) {
            (true, _, _) => Box::new(Silent),
            (false, LogFormat::Text, true) => Box::new(Bar::new()),
            (false, _, _) => Box::new(Lines::new()),
        }
    }

    fn color(&self) -> bool {
        colors(self.no_color)
    }
}

fn colors(no_color: bool) -> bool {
    let asked_not_to = env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
    !no_color && !asked_not_to && io::stderr().is_terminal()
}

/// Starts logging. Called once.
pub(super) fn start(common: &CommonArgs) {
    let (filter, refused) = filter(common);
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(Stderr { json: common.log_format == LogFormat::Json })
        // It would tell about a stderr that cannot be written to on stderr, and panic when that fails.
        .log_internal_errors(false)
        .with_ansi(common.color())
        .with_target(common.verbose > 0);
    // A second subscriber can exist only in tests, where the first one is as good.
    let _ = match (common.log_format, io::stderr().is_terminal()) {
        (LogFormat::Json, _) => builder.json().flatten_event(true).try_init(),
        // Who reads along has a clock.
        (LogFormat::Text, true) => builder.without_time().try_init(),
        (LogFormat::Text, false) => builder.try_init(),
    };
    let _ = STARTED.set(common.log_format);
    if let Some(reason) = refused {
        tracing::warn!(reason, "ELMO_LOG is no filter and is left aside; an example is elmo_pipelines=debug");
    }
}

/// What is said: warnings and progress by default. ELMO_LOG, in the syntax of `RUST_LOG`, has the last word; the
/// second value is why it could not be read.
fn filter(common: &CommonArgs) -> (EnvFilter, Option<String>) {
    let progress = report::TARGET;
    let by_flags = match (common.quiet, common.verbose) {
        (true, _) => "error".to_owned(),
        (false, 0) => format!("warn,{progress}=info"),
        (false, 1) => format!("warn,elmo=info,elmo_udfs=info,elmo_pipelines=info,{progress}=info"),
        (false, 2) => format!("info,elmo=debug,elmo_udfs=debug,elmo_pipelines=debug,{progress}=debug"),
        (false, _) => "debug".to_owned(),
    };
    // Ballista calls ordinary events errors, and shows plans, in which texts of queries stand, at level info.
    let ballista = if common.verbose < 3 { ["off", "warn", "info"][usize::from(common.verbose)] } else { "debug" };
    let ballista = ["core", "executor", "scheduler"].map(|part| format!("ballista_{part}={ballista}")).join(",");
    let by_flags = format!("{by_flags},{ballista},{NOTES}=info");
    let asked = env::var("ELMO_LOG").ok().filter(|asked| !asked.is_empty());
    match asked.map(|asked| asked.parse::<EnvFilter>()) {
        Some(Ok(filter)) => (filter, None),
        Some(Err(error)) => (EnvFilter::new(by_flags), Some(error.to_string())),
        None => (EnvFilter::new(by_flags), None),
    }
}

/// The last words of a command that failed.
pub(super) fn report(error: &Error, common: &CommonArgs) {
    match common.log_format {
        LogFormat::Json => tracing::error!(code = error.exit() as u8, help = error.help(), "{}", error.report()),
        LogFormat::Text => write_error(error, common.color()),
    }
}

/// The same, before the command line is understood.
pub(super) fn report_early(error: &Error, no_color: bool) {
    write_error(error, colors(no_color));
}

/// Prints help, the version or an error of clap, without secrets: clap repeats the value of a wrong argument.
pub(super) fn report_clap(error: &clap::Error) {
    let text = error.to_string();
    match redact(&text) {
        // Without its colours, which could separate the parts of a secret.
        redacted if error.use_stderr() && redacted != text => say(&redacted),
        // A closed pipe after `elmo --help | head` is not a failure.
        _ => drop(error.print()),
    }
}

fn write_error(error: &Error, color: bool) {
    let (red, plain) = if color { ("\x1b[1;31m", "\x1b[0m") } else { ("", "") };
    let mut text = format!("{red}error:{plain} {}\n", error.report());
    if let Some(help) = error.help() {
        text.push_str(&format!("  help: {}\n", redact(&help)));
    }
    say(&text);
}

/// What helps beside an error: a line for people, and a message like the others for log collectors; secrets left out.
pub(super) fn note(text: &str) {
    match STARTED.get() {
        Some(LogFormat::Json) => tracing::info!(target: NOTES, "{text}"),
        Some(LogFormat::Text) | None => say(&(redact(text) + "\n")),
    }
}

/// Nobody is left to tell when stderr is closed or full, and that is no reason for a job to end: `eprintln!` panics.
fn say(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

/// stderr without secrets. One event arrives as one write.
#[derive(Debug, Clone, Copy)]
struct Stderr {
    /// Lines are JSON and must stay so.
    json: bool,
}

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        let clean = if self.json { redact_json(&text) } else { redact(&text) };
        say(&clean);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Stderr {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        *self
    }
}
