//! The command line: what a user typed, as types; one file per command.
//!
//! [`main`] reads words into [`Cli`], lets the command run, and turns the end into an exit code. Nothing heavy happens
//! before the words are understood.

mod args;
mod bench;
#[cfg(feature = "cluster")]
mod cluster;
mod config;
mod demo;
mod doctor;
mod embed;
mod generate;
mod inspect;
mod logging;
mod model;
mod output;
mod shutdown;
mod sql;
mod verify;

use std::{
    env,
    ffi::{OsStr, OsString},
    io::{self, Write},
    path::PathBuf,
};

use clap::{
    ArgAction, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueHint,
    error::{ContextKind, ContextValue, ErrorKind},
};

use self::{
    args::{EngineArgs, ModelArgs},
    config::ConfigFile,
    logging::LogFormat,
    output::{print, print_json},
};
use crate::error::{Error, Exit, Result};

/// ELMo sentence and token vectors for files of text and in SQL: exact, deterministic, resumable.
///
/// Every option can also be set in the environment (ELMO_BATCH_TOKENS is --batch-tokens) or in elmo.toml; the command
/// line wins over the environment, and that over the file.
#[derive(Debug, Parser)]
#[command(name = "elmo", version, max_term_width = 100, subcommand_required = true, arg_required_else_help = true)]
#[command(disable_help_subcommand = true, infer_subcommands = false, after_help = EXAMPLES)]
pub struct Cli {
    #[command(flatten)]
    common: CommonArgs,
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  elmo demo
  elmo embed --model tiny --input reviews.jsonl --output vectors
  elmo sql -c \"SELECT id, elmo_embed(text) FROM 'reviews.jsonl' LIMIT 3\"
  elmo inspect vectors

Exit codes:
  0 done    1 failed    2 usage    3 input data    4 model    5 storage
  6 done, but rows were rejected    130 interrupted, the same command continues";

/// What every command takes.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Messages and settings")]
pub struct CommonArgs {
    /// Say nothing but errors: no progress, no warnings
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,

    /// Say more on stderr; twice for debug messages. ELMO_LOG filters by module
    #[arg(short, long, global = true, action = ArgAction::Count)]
    verbose: u8,

    /// How messages on stderr are written: text for people, json for log collectors
    #[arg(long, global = true, value_name = "FORMAT", default_value = "text", value_parser = args::words::<LogFormat>(LogFormat::WORDS))]
    log_format: LogFormat,

    /// No colours; NO_COLOR does the same
    #[arg(long, global = true)]
    no_color: bool,

    /// Settings file to read instead of elmo.toml in the current directory
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Embed(Box<embed::EmbedArgs>),
    Sql(Box<sql::SqlArgs>),
    #[cfg(feature = "cluster")]
    Cluster(cluster::ClusterCommand),
    Model(model::ModelCommand),
    Inspect(inspect::InspectArgs),
    Verify(verify::VerifyArgs),
    Bench(bench::BenchArgs),
    Doctor(doctor::DoctorArgs),
    Demo(demo::DemoArgs),
    Completions(generate::CompletionsArgs),
    Man(generate::ManArgs),
}

/// The whole program.
///
/// It ends without the destructors of libtorch, which take its operators off their tables one at a time, for as long as
/// most commands take altogether.
pub fn main() -> ! {
    #[cfg(feature = "cluster")]
    args::give_stacks();
    let exit = run();
    // What is printed reports its own errors; nothing of it is left here.
    let _ = io::stdout().flush();
    shutdown::leave(exit)
}

/// The exit code.
fn run() -> u8 {
    let words: Vec<OsString> = env::args_os().collect();
    let cli = match parse(&words) {
        Ok(cli) => cli,
        Err(stop) => return stop.report(&words),
    };
    logging::start(&cli.common);
    let exit = match cli.command.run(&cli.common) {
        Ok(exit) => exit,
        Err(Error::BrokenPipe) => Exit::Done,
        Err(error) => {
            logging::report(&error, &cli.common);
            error.exit()
        }
    };
    exit as u8
}

impl Command {
    fn run(self, common: &CommonArgs) -> Result<Exit> {
        match self {
            Self::Embed(args) => embed::run(&args, common),
            Self::Sql(args) => sql::run(&args, common),
            #[cfg(feature = "cluster")]
            Self::Cluster(command) => cluster::run(command, common),
            Self::Model(command) => model::run(&command),
            Self::Inspect(args) => inspect::run(&args),
            Self::Verify(args) => verify::run(&args),
            Self::Bench(args) => bench::run(&args),
            Self::Doctor(args) => doctor::run(&args),
            Self::Demo(args) => demo::run(&args, common),
            Self::Completions(args) => generate::completions(&args).map(|()| Exit::Done),
            Self::Man(args) => generate::man(&args).map(|()| Exit::Done),
        }
    }

    /// Neither reads settings: they must work beside a broken `elmo.toml`.
    fn needs_settings(&self) -> bool {
        !matches!(self, Self::Completions(_) | Self::Man(_))
    }
}

/// Why no command is run.
#[derive(Debug)]
enum Stop {
    /// Help, version or wrong words, as clap says it, and where a wrong value comes from.
    Words { error: Box<clap::Error>, origin: Option<String> },
    /// Wrong settings.
    Settings(Error),
}

impl Stop {
    /// The exit code.
    fn report(self, words: &[OsString]) -> u8 {
        match self {
            Self::Words { error, origin } => {
                logging::report_clap(&error);
                if let Some(origin) = origin {
                    logging::note(&format!("note: the value comes from {origin}"));
                }
                error.exit_code() as u8
            }
            Self::Settings(error) => {
                logging::report_early(&error, has_flag(words, "--no-color"));
                error.exit() as u8
            }
        }
    }
}

fn parse(words: &[OsString]) -> Result<Cli, Stop> {
    let words_error = |error| Stop::Words { error: Box::new(error), origin: None };
    let command = colored(Cli::command(), words);
    // Without settings first: help and version must neither wait for them nor show them as defaults.
    match command.clone().try_get_matches_from(words).and_then(|m| Cli::from_arg_matches(&m)) {
        Ok(cli) if !cli.command.needs_settings() => return Ok(cli),
        Err(error) if !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            return Err(words_error(error));
        }
        _ => {}
    }
    let names: Vec<OsString> = env::vars_os().map(|(name, _)| name).collect();
    let settings = |error: config::ConfigError| Stop::Settings(error.into());
    config::check_environment(names.iter().map(OsString::as_os_str), &command).map_err(settings)?;
    let file = ConfigFile::find(config_path(words).as_deref(), &command).map_err(settings)?;
    let command = config::apply(command, file.as_ref(), &|name| env::var_os(name));
    let matches = command.try_get_matches_from(words).and_then(|m| Cli::from_arg_matches(&m));
    matches.map_err(|error| Stop::Words { origin: origin(&error, words, file.as_ref()), error: Box::new(error) })
}

/// clap looks at NO_COLOR and at the terminal itself, but cannot know our flag before it has parsed.
fn colored(command: clap::Command, words: &[OsString]) -> clap::Command {
    match has_flag(words, "--no-color") {
        true => command.color(clap::ColorChoice::Never),
        false => command,
    }
}

fn has_flag(words: &[OsString], flag: &str) -> bool {
    words.iter().take_while(|word| *word != "--").any(|word| word == flag)
}

/// The file must be known before the words are parsed with its values, so it is looked for by hand.
fn config_path(words: &[OsString]) -> Option<PathBuf> {
    let mut words = words.iter().take_while(|word| *word != "--");
    while let Some(word) = words.next() {
        if word == "--config" {
            return words.next().map(PathBuf::from);
        }
        if let Some(path) = word.to_str().and_then(|word| word.strip_prefix("--config=")) {
            return Some(PathBuf::from(path));
        }
    }
    env::var_os("ELMO_CONFIG").filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Where a value that clap refused was given, when it was not on the command line.
fn origin(error: &clap::Error, words: &[OsString], file: Option<&ConfigFile>) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let arg = text(ContextKind::InvalidArg)?.split(' ').next()?;
    let value = text(ContextKind::InvalidValue)?;
    let typed = |word: &OsStr| word == arg || word.to_str().is_some_and(|w| w.starts_with(&format!("{arg}=")));
    if words.iter().any(|word| typed(word)) {
        return None;
    }
    let key = arg.trim_start_matches('-');
    let variable = config::variable(key);
    if env::var_os(&variable).is_some_and(|v| v == value) {
        return Some(format!("the environment variable {variable}"));
    }
    file?.origin(key, value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
