//! The command line, one file per command.
//!
//! [`main`] parses the arguments into [`Cli`], runs the command, and maps its result to an exit code. Nothing expensive
//! happens before the arguments are parsed.

mod advice;
mod args;
mod bench;
mod bulk;
#[cfg(feature = "cluster")]
mod cluster;
mod config;
mod demo;
mod doctor;
mod embed;
mod eval;
mod finetune;
mod fit_mix;
mod generate;
mod inputs;
mod inspect;
mod logging;
mod mixes;
mod model;
mod output;
mod plot;
mod processes;
mod reading;
mod score;
mod shutdown;
mod sql;
#[cfg(feature = "kafka")]
mod stream;
mod train;
mod verify;
mod vocab;

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

/// ELMo sentence and token vectors for files, SQL and streams: exact, deterministic, resumable
///
/// Every option can also be set in the environment (ELMO_BATCH_TOKENS for --batch-tokens) or in elmo.toml. The command
/// line overrides the environment, which overrides the file.
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
  elmo embed reviews.jsonl --output vectors
  elmo sql -c \"SELECT id, elmo_embed(text) FROM 'reviews.jsonl' LIMIT 3\"
  elmo inspect vectors

Exit codes:
  0 success    1 other failure    2 usage    3 input data    4 model    5 storage or broker
  6 success, but rows were rejected    130 interrupted; the same command resumes";

/// Options of every command.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Messages and settings")]
pub struct CommonArgs {
    /// Print no progress and no warnings, only errors
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,

    /// Print more messages; give it twice for debug messages
    ///
    /// ELMO_LOG sets filters by module instead, in the syntax of RUST_LOG.
    #[arg(short, long, global = true, action = ArgAction::Count)]
    verbose: u8,

    /// Format of messages on stderr: text for people, or json for log collectors
    #[arg(long, global = true, value_name = "FORMAT", default_value = "text", value_parser = args::one_of::<LogFormat>(LogFormat::WORDS))]
    log_format: LogFormat,

    /// Print without colours, as with NO_COLOR
    #[arg(long, global = true)]
    no_color: bool,

    /// Read settings from FILE instead of elmo.toml in the current directory
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Embed(Box<embed::EmbedArgs>),
    Sql(Box<sql::SqlArgs>),
    #[cfg(feature = "kafka")]
    Stream(Box<stream::StreamCommand>),
    #[cfg(feature = "cluster")]
    Cluster(cluster::ClusterCommand),
    Model(model::ModelCommand),
    Inspect(inspect::InspectArgs),
    Verify(verify::VerifyArgs),
    Vocab(vocab::VocabArgs),
    Train(Box<train::TrainArgs>),
    Plot(plot::PlotArgs),
    FitMix(Box<fit_mix::FitMixArgs>),
    Finetune(Box<finetune::FinetuneArgs>),
    Eval(Box<eval::EvalArgs>),
    Score(Box<score::ScoreArgs>),
    Bench(bench::BenchArgs),
    Doctor(doctor::DoctorArgs),
    Demo(demo::DemoArgs),
    Completions(generate::CompletionsArgs),
    Man(generate::ManArgs),
}

/// Runs the program and exits.
///
/// It exits without running the destructors of libtorch, which deregister operators one by one and take 0.2 s.
pub fn main() -> ! {
    #[cfg(feature = "cluster")]
    args::set_stack_size();
    crate::large_pages::ask();
    let exit = run();
    // Printing has reported its errors and flushed; this is for output of libraries.
    let _ = io::stdout().flush();
    shutdown::leave(exit)
}

/// The exit code.
fn run() -> u8 {
    let args: Vec<OsString> = env::args_os().collect();
    let cli = match parse(&args) {
        Ok(cli) => cli,
        Err(stop) => return stop.report(&args),
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
            #[cfg(feature = "kafka")]
            Self::Stream(command) => stream::run(&command, common),
            #[cfg(feature = "cluster")]
            Self::Cluster(command) => cluster::run(command),
            Self::Model(command) => model::run(&command),
            Self::Inspect(args) => inspect::run(&args),
            Self::Verify(args) => verify::run(&args),
            Self::Vocab(args) => vocab::run(&args, common),
            Self::Train(args) => train::run(&args, common),
            Self::Plot(args) => plot::run(&args),
            Self::FitMix(args) => fit_mix::run(&args, common),
            Self::Finetune(args) => finetune::run(&args),
            Self::Eval(args) => eval::run(&args, common),
            Self::Score(args) => score::run(&args, common),
            Self::Bench(args) => bench::run(&args),
            Self::Doctor(args) => doctor::run(&args),
            Self::Demo(args) => demo::run(&args, common),
            Self::Completions(args) => generate::completions(&args).map(|()| Exit::Done),
            Self::Man(args) => generate::man(&args).map(|()| Exit::Done),
        }
    }

    /// Completions and manual pages must work despite a broken `elmo.toml`.
    fn needs_settings(&self) -> bool {
        !matches!(self, Self::Completions(_) | Self::Man(_))
    }
}

/// A reason not to run a command.
#[derive(Debug)]
enum Stop {
    /// Help, version or invalid arguments, as clap prints them, and where an invalid value comes from.
    Clap { error: Box<clap::Error>, origin: Option<String> },
    /// Invalid settings.
    Settings(Error),
}

impl Stop {
    /// The exit code.
    fn report(self, args: &[OsString]) -> u8 {
        match self {
            Self::Clap { error, origin } => {
                logging::report_clap(&error);
                if let Some(origin) = origin {
                    logging::note(&format!("note: the value comes from {origin}"));
                }
                error.exit_code() as u8
            }
            Self::Settings(error) => {
                logging::report_early(&error, has_flag(args, "--no-color"));
                error.exit() as u8
            }
        }
    }
}

fn parse(args: &[OsString]) -> Result<Cli, Stop> {
    let clap_error = |error| Stop::Clap { error: Box::new(error), origin: None };
    let command = colored(Cli::command(), args);
    // Without settings first: help and version must not depend on them nor show them as defaults.
    match command.clone().try_get_matches_from(args).and_then(|m| Cli::from_arg_matches(&m)) {
        Ok(cli) if !cli.command.needs_settings() => return Ok(cli),
        Err(error) if !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            return Err(clap_error(error));
        }
        _ => {}
    }
    let names: Vec<OsString> = env::vars_os().map(|(name, _)| name).collect();
    let settings = |error: config::ConfigError| Stop::Settings(error.into());
    config::check_environment(names.iter().map(OsString::as_os_str), &command).map_err(settings)?;
    let file = ConfigFile::find(config_path(args).as_deref(), &command).map_err(settings)?;
    let command =
        config::apply(command.clone(), &config::typed(&command, args), file.as_ref(), &|name| env::var_os(name));
    let matches = command.try_get_matches_from(args).and_then(|m| Cli::from_arg_matches(&m));
    matches.map_err(|error| Stop::Clap { origin: origin(&error, args, file.as_ref()), error: Box::new(error) })
}

/// Clap checks NO_COLOR and the terminal itself, but knows our flag only after parsing.
fn colored(command: clap::Command, args: &[OsString]) -> clap::Command {
    match has_flag(args, "--no-color") {
        true => command.color(clap::ColorChoice::Never),
        false => command,
    }
}

fn has_flag(args: &[OsString], flag: &str) -> bool {
    args.iter().take_while(|arg| *arg != "--").any(|arg| arg == flag)
}

/// The settings file. Parsing needs its values, so `--config` is found by hand first.
fn config_path(args: &[OsString]) -> Option<PathBuf> {
    let mut args = args.iter().take_while(|arg| *arg != "--");
    while let Some(arg) = args.next() {
        if arg == "--config" {
            return args.next().map(PathBuf::from);
        }
        if let Some(path) = arg.to_str().and_then(|arg| arg.strip_prefix("--config=")) {
            return Some(PathBuf::from(path));
        }
    }
    env::var_os("ELMO_CONFIG").filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// The origin of an invalid value that was not on the command line.
fn origin(error: &clap::Error, args: &[OsString], file: Option<&ConfigFile>) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let arg = text(ContextKind::InvalidArg)?.split(' ').next()?;
    let value = text(ContextKind::InvalidValue)?;
    let is_option = |typed: &OsStr| typed == arg || typed.to_str().is_some_and(|t| t.starts_with(&format!("{arg}=")));
    if args.iter().any(|typed| is_option(typed)) {
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
