//! Messages on stderr, as text for people or JSON for log collectors, both without secrets.

use std::{
    env,
    ffi::OsString,
    fmt,
    io::{self, IsTerminal, Write},
    str::FromStr,
    sync::OnceLock,
};

use clap::CommandFactory;
use elmo::spec::SpecError;
use tracing_subscriber::{EnvFilter, fmt::MakeWriter};

use super::{Cli, CommonArgs, advice::without_options_of_others};
use crate::{
    error::Error,
    redact::{redact, redact_json},
    report::{self, Bar, Lines, Progress, Silent},
    source::SourceError,
};

/// The target of notes, which are logged even with `--quiet`.
const NOTES: &str = "elmo::note";

/// The format after [`start`].
static FORMAT: OnceLock<LogFormat> = OnceLock::new();

/// The format of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LogFormat {
    /// Lines of text.
    Text,
    /// Lines of JSON objects.
    Json,
}

impl LogFormat {
    /// The legal values.
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
    /// How this user wants to see progress.
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
    let disabled = env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
    !no_color && !disabled && io::stderr().is_terminal()
}

/// Starts logging. Must be called once.
pub(super) fn start(common: &CommonArgs) {
    let (filter, invalid) = filter(common);
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(Stderr { json: common.log_format == LogFormat::Json })
        // It would report errors of stderr on stderr, and panic when that fails too.
        .log_internal_errors(false)
        .with_ansi(common.color())
        .with_target(common.verbose > 0);
    // A subscriber can already exist in tests only.
    let _ = match (common.log_format, io::stderr().is_terminal()) {
        (LogFormat::Json, _) => builder.json().flatten_event(true).try_init(),
        // On a terminal timestamps are not needed.
        (LogFormat::Text, true) => builder.without_time().try_init(),
        (LogFormat::Text, false) => builder.try_init(),
    };
    let _ = FORMAT.set(common.log_format);
    if let Some(reason) = invalid {
        tracing::warn!(reason, "ELMO_LOG is ignored because it is not a filter such as elmo_pipelines=debug");
    }
}

/// The filter of log messages: by default warnings and progress. `ELMO_LOG`, in the syntax of `RUST_LOG`, overrides the
/// flags. The second value is the reason why it is invalid.
fn filter(common: &CommonArgs) -> (EnvFilter, Option<String>) {
    let progress = report::TARGET;
    let by_flags = match (common.quiet, common.verbose) {
        (true, _) => "error".to_owned(),
        (false, 0) => format!("warn,{progress}=info"),
        (false, 1) => format!("warn,elmo=info,elmo_udfs=info,elmo_pipelines=info,{progress}=info"),
        (false, 2) => format!("info,elmo=debug,elmo_udfs=debug,elmo_pipelines=debug,{progress}=debug"),
        (false, _) => "debug".to_owned(),
    };
    // The wrapper of librdkafka reports consumers that are closed already. Errors of brokers come through events.
    let rdkafka = if common.verbose < 2 { "off" } else { "debug" };
    let by_flags = format!("{by_flags},rdkafka={rdkafka},{NOTES}=info");
    let variable = env::var("ELMO_LOG").ok().filter(|value| !value.is_empty());
    match variable.map(|value| value.parse::<EnvFilter>()) {
        Some(Ok(filter)) => (filter, None),
        Some(Err(error)) => (EnvFilter::new(by_flags), Some(error.to_string())),
        None => (EnvFilter::new(by_flags), None),
    }
}

/// Reports the error of a command.
pub(super) fn report(error: &Error, common: &CommonArgs) {
    match common.log_format {
        LogFormat::Json => tracing::error!(code = error.exit() as u8, help = advice(error), "{}", error.report()),
        LogFormat::Text => write_error(error, common.color()),
    }
}

/// Reports an error before the command line is parsed.
pub(super) fn report_early(error: &Error, no_color: bool) {
    write_error(error, colors(no_color));
}

/// Prints help, the version or an error of clap, without secrets: clap repeats the value of a wrong argument.
pub(super) fn report_clap(error: &clap::Error) {
    let text = error.to_string();
    match redact(&text) {
        // Without its colours, which could separate the parts of a secret.
        redacted if error.use_stderr() && redacted != text => write_stderr(&redacted),
        // A closed pipe after `elmo --help | head` is not a failure.
        _ => drop(error.print()),
    }
}

/// What to do. All commands that read files share their errors, but not all options that these name.
fn advice(error: &Error) -> Option<String> {
    let help = error.help()?;
    if error.module::<SourceError>().is_none() {
        return Some(help);
    }
    let args: Vec<OsString> = env::args_os().collect();
    without_options_of_others(&help, &Cli::command(), &args)
}

fn write_error(error: &Error, color: bool) {
    let (red, plain) = if color { ("\x1b[1;31m", "\x1b[0m") } else { ("", "") };
    let mut text = format!("{red}error:{plain} {}\n", error.report());
    if let Some(help) = advice(error) {
        text.push_str(&format!("  help: {}\n", redact(&help)));
    }
    write_stderr(&text);
}

/// Prints a note without secrets: a line for people, a log message for collectors.
pub(super) fn note(text: &str) {
    match FORMAT.get() {
        Some(LogFormat::Json) => tracing::info!(target: NOTES, "{text}"),
        Some(LogFormat::Text) | None => write_stderr(&(redact(text) + "\n")),
    }
}

/// Writes to stderr, above the progress bar. Errors are ignored, because a job must not end when stderr is closed or
/// full; `eprintln!` would panic.
pub(super) fn write_stderr(text: &str) {
    let _ = report::above_bar(|| io::stderr().write_all(text.as_bytes()));
}

/// A writer to stderr that redacts secrets. Each event is a single write.
#[derive(Debug, Clone, Copy)]
struct Stderr {
    /// The lines are JSON.
    json: bool,
}

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        let clean = if self.json { redact_json(&text) } else { redact(&text) };
        write_stderr(&clean);
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
