//! Settings from the environment and from `elmo.toml`.
//!
//! Every setting is an option of a command, so the clap types define names, values and help once. `--batch-tokens 8192`
//! on the command line is `ELMO_BATCH_TOKENS=8192` in the environment and `batch-tokens = 8192` in the file. The
//! command line overrides the environment, which overrides the file, which overrides the defaults.
//!
//! ```toml
//! model = "models/elmo-small"      # keys that several commands share are at the top
//! threads = 4
//!
//! [embed]                          # keys of one command, or with another value there
//! column = "review"
//! keep = ["id", "stars"]
//!
//! [model-convert]                  # `elmo model convert`
//! to = "safetensors"
//! ```
//!
//! Clap reads the environment itself. A value of the file becomes the *default* of its option.

mod error;
mod file;
mod keys;

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{OsStr, OsString},
};

use clap::{Arg, ArgAction, Command, Id, builder::BoolishValueParser, parser::ValueSource};

pub(super) use self::keys::variable;
use self::keys::{join, nearest, setting_name, walk};
pub(super) use self::{error::ConfigError, file::ConfigFile};

/// Variables that are not options of a command.
const OTHER_VARIABLES: [&str; 3] = ["ELMO_CACHE", "ELMO_CONFIG", "ELMO_LOG"];

/// Identifiers of options, by the section of their command.
pub(super) type Typed = BTreeMap<String, BTreeSet<Id>>;

/// The options on a command line. Other errors of it are found when it is parsed with its settings.
pub(super) fn typed(root: &Command, args: &[OsString]) -> Typed {
    let mut typed = Typed::new();
    let parsed = root.clone().ignore_errors(true).try_get_matches_from(args);
    let (mut section, mut level) = (String::new(), parsed.as_ref().ok());
    while let Some(matches) = level {
        let on_line = |id: &&Id| matches.value_source(id.as_str()) == Some(ValueSource::CommandLine);
        typed.insert(section.clone(), matches.ids().filter(on_line).cloned().collect());
        level = matches.subcommand().map(|(name, below)| {
            section = join(&section, name);
            below
        });
    }
    typed
}

/// Lets clap read `ELMO_*` variables, and makes the values of the file the defaults.
///
/// An empty variable counts as unset, because container configurations often set variables to nothing. A variable has no effect
/// beside an option of the command line that excludes its option, and a value of the file has none beside such an option or
/// variable: `--epochs` overrides `steps` of the file.
pub(super) fn apply(
    root: Command,
    typed: &Typed,
    file: Option<&ConfigFile>,
    env: &dyn Fn(&str) -> Option<OsString>,
) -> Command {
    apply_to(root, "", typed, file, env)
}

fn apply_to(
    command: Command,
    section: &str,
    typed: &Typed,
    file: Option<&ConfigFile>,
    env: &dyn Fn(&str) -> Option<OsString>,
) -> Command {
    let is_set = |name: &str| env(&variable(name)).is_some_and(|value| !value.is_empty());
    let mut given = typed.get(section).cloned().unwrap_or_default();
    let no_variable = excluded(&command, &given);
    let has_variable =
        |arg: &Arg| setting_name(arg).is_some_and(|name| is_set(&name)) && !no_variable.contains(arg.get_id());
    given.extend(command.get_arguments().filter(|arg| has_variable(arg)).map(|arg| arg.get_id().clone()));
    let no_value = excluded(&command, &given);
    let command = command.mut_args(|arg| {
        let Some(name) = setting_name(&arg) else { return arg };
        let variable = has_variable(&arg).then(|| variable(&name));
        let values = file.and_then(|file| file.get(section, &name)).filter(|_| !no_value.contains(arg.get_id()));
        with_settings(arg, variable, values)
    });
    let names: Vec<String> = command.get_subcommands().map(|c| c.get_name().to_owned()).collect();
    names.into_iter().fold(command, |command, name| {
        let section = join(section, &name);
        command.mut_subcommand(name, |sub| apply_to(sub, &section, typed, file, env))
    })
}

/// The options that conflict with one of `given`, whichever of the two declares it.
fn excluded(command: &Command, given: &BTreeSet<Id>) -> BTreeSet<Id> {
    let mut excluded = BTreeSet::new();
    for arg in command.get_arguments() {
        let conflicts = command.get_arg_conflicts_with(arg);
        if given.contains(arg.get_id()) {
            excluded.extend(conflicts.iter().map(|other| other.get_id().clone()));
        } else if conflicts.iter().any(|other| given.contains(other.get_id())) {
            excluded.insert(arg.get_id().clone());
        }
    }
    excluded
}

/// An option that reads `variable`, and has `values` of the file as its default.
fn with_settings(arg: Arg, variable: Option<String>, values: Option<&[String]>) -> Arg {
    let flag = matches!(arg.get_action(), ArgAction::SetTrue);
    let arg = if flag { arg.value_parser(BoolishValueParser::new()) } else { arg };
    let arg = match variable {
        Some(variable) => arg.env(variable).hide_env(true).required(false),
        None => arg,
    };
    match values {
        Some(values) => arg.required(false).default_values(values.to_vec()),
        None => arg,
    }
}

/// Rejects a misspelt variable such as `ELMO_MODLE`.
///
/// Variables that resemble no setting are ignored: container platforms set `ELMO_SERVICE_HOST` and others for a service
/// called `elmo`.
///
/// # Errors
/// [`ConfigError::UnknownVariable`] for the first such variable.
pub(super) fn check_environment<'a>(names: impl Iterator<Item = &'a OsStr>, root: &Command) -> Result<(), ConfigError> {
    let mut legal: BTreeSet<String> = OTHER_VARIABLES.iter().map(ToString::to_string).collect();
    legal.extend(root.get_arguments().filter_map(setting_name).map(|name| variable(&name)));
    walk(root, "", &mut |_, command| {
        legal.extend(command.get_arguments().filter_map(setting_name).map(|name| variable(&name)));
    });
    for name in names.filter_map(OsStr::to_str).filter(|name| name.starts_with("ELMO_")) {
        // Settings of librdkafka, which the stream checks.
        if legal.contains(name) || name.starts_with("ELMO_KAFKA_") {
            continue;
        }
        if let Some(nearest) = nearest(name, legal.iter()) {
            return Err(ConfigError::UnknownVariable { name: name.to_owned(), nearest: nearest.clone() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used)]
    use std::path::Path;

    use super::*;

    fn root() -> Command {
        let number = |name: &'static str| Arg::new(name).long(name).value_parser(clap::value_parser!(u32));
        let flag = Arg::new("quiet").long("quiet").action(ArgAction::SetTrue).global(true);
        let keep = Arg::new("keep").long("keep");
        let input = Arg::new("input").long("input").num_args(1..).action(ArgAction::Append);
        let convert = Command::new("convert").arg(Arg::new("to").long("to").required(true));
        Command::new("elmo")
            .arg(flag)
            .subcommand(Command::new("embed").arg(number("threads").default_value("1")).arg(keep).arg(input))
            .subcommand(Command::new("bench").arg(number("threads")))
            .subcommand(Command::new("model").subcommand_required(true).subcommand(convert))
            .subcommand(Command::new("stream").arg(number("partitions")).subcommand(Command::new("status")))
    }

    fn parse(text: &str) -> Result<ConfigFile, ConfigError> {
        ConfigFile::parse(text, Path::new("elmo.toml"), &root())
    }

    fn threads(args: &[&str], file: &str) -> u32 {
        let command = apply(root(), &Typed::new(), Some(&parse(file).unwrap()), &|_| None);
        let matches = command.try_get_matches_from(args).unwrap();
        *matches.subcommand().unwrap().1.get_one("threads").unwrap()
    }

    #[test]
    fn flag_beats_section_beats_common_beats_default() {
        assert_eq!(threads(&["elmo", "embed"], ""), 1);
        assert_eq!(threads(&["elmo", "embed"], "threads = 2"), 2);
        assert_eq!(threads(&["elmo", "embed"], "threads = 2\n[embed]\nthreads = 3"), 3);
        assert_eq!(threads(&["elmo", "embed", "--threads", "4"], "threads = 2\n[embed]\nthreads = 3"), 4);
        assert_eq!(threads(&["elmo", "bench"], "threads = 2\n[embed]\nthreads = 3"), 2);
    }

    /// What is given to `size` and to `steps`, which excludes it, by the command line, the variables and the file.
    fn size_and_steps(args: &str, variables: &[&str], file: &str) -> (Option<String>, Option<String>) {
        let option = |name: &'static str| Arg::new(name).long(name);
        let train = Command::new("train").arg(option("size")).arg(option("steps").conflicts_with("size"));
        let other = Command::new("other").arg(option("size")).arg(option("steps"));
        let root = Command::new("elmo").subcommand(train).subcommand(other);
        let args: Vec<OsString> = args.split(' ').map(OsString::from).collect();
        let file = ConfigFile::parse(file, Path::new("elmo.toml"), &root).unwrap();
        let env = |name: &str| variables.contains(&name).then(|| "variable".into());
        let command = apply(root.clone(), &typed(&root, &args), Some(&file), &env);
        let matches = command.try_get_matches_from(args).unwrap();
        let of = |name| matches.subcommand().unwrap().1.get_one::<String>(name).cloned();
        (of("size"), of("steps"))
    }

    #[test]
    fn an_option_overrides_those_that_it_excludes() {
        let file = "size = 'file'\n[train]\nsteps = 'file'";
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(size_and_steps("elmo train --size line", &[], file), (some("line"), None));
        assert_eq!(size_and_steps("elmo train --steps line", &[], file), (None, some("line")));
        assert_eq!(size_and_steps("elmo other --steps line", &[], file), (some("file"), some("line")));
        // Clap finds no such variable, so what is left is the value of the file.
        assert_eq!(size_and_steps("elmo train", &["ELMO_STEPS"], file), (None, some("file")));
    }

    #[test]
    fn lists_flags_and_required_options_may_come_from_the_file() {
        let embed = "[embed]\nkeep = ['a', 'b']\ninput = ['x', 'y']";
        let file = parse(&format!("quiet = true\n{embed}\n[model-convert]\nto = 'hdf5'")).unwrap();
        let command = apply(root(), &Typed::new(), Some(&file), &|_| None);
        let matches = command.clone().try_get_matches_from(["elmo", "embed"]).unwrap();
        assert!(matches.get_flag("quiet"));
        let embed = matches.subcommand().unwrap().1;
        assert_eq!(embed.get_one::<String>("keep").unwrap(), "a,b");
        let input: Vec<&String> = embed.get_many("input").unwrap().collect();
        assert_eq!(input, ["x", "y"]);
        assert!(command.try_get_matches_from(["elmo", "model", "convert"]).is_ok());
    }

    /// `elmo stream` and `elmo stream status` are two commands; `elmo model` is none.
    #[test]
    fn a_command_with_subcommands_has_a_section_if_it_can_be_given_alone() {
        let command = apply(root(), &Typed::new(), Some(&parse("[stream]\npartitions = 3").unwrap()), &|_| None);
        let matches = command.try_get_matches_from(["elmo", "stream"]).unwrap();
        assert_eq!(matches.subcommand().unwrap().1.get_one::<u32>("partitions"), Some(&3));
        assert!(parse("[stream-status]\nquiet = true").is_ok());
        assert!(parse("[model]\nquiet = true").unwrap_err().to_string().contains("unknown section [model]"));
    }

    #[test]
    fn a_list_needs_an_option_that_takes_several_values() {
        let message = |text: &str| parse(text).unwrap_err().to_string();
        assert_eq!(message("threads = [3, 4]"), "elmo.toml: key threads: expected one value, found a list of 2");
        assert_eq!(message("threads = []"), "elmo.toml: key threads: expected one value, found a list of 0");
        assert_eq!(message("quiet = [true]"), "elmo.toml: key quiet: expected one value, found a list of 1");
        let empty = "the list is empty; put a value into it, or leave the key out";
        assert_eq!(message("[embed]\nkeep = []"), format!("elmo.toml: key embed.keep: {empty}"));
        assert_eq!(message("[embed]\ninput = []"), format!("elmo.toml: key embed.input: {empty}"));
    }

    #[test]
    fn a_key_has_one_spelling_per_section() {
        let message = |text: &str| parse(text).unwrap_err().to_string();
        assert_eq!(
            message("batch-tokens = 1\nbatch_tokens = 2"),
            "elmo.toml: key batch_tokens: batch-tokens is the same key; keep one of the two"
        );
        assert_eq!(
            message("[embed]\nbatch-tokens = 2\nbatch_tokens = 1"),
            "elmo.toml: key embed.batch_tokens: embed.batch-tokens is the same key; keep one of the two"
        );
        assert!(parse("threads = 1\n[embed]\nthreads = 2").is_ok());
    }

    #[test]
    fn unknown_names_get_the_nearest() {
        let message = |text: &str| parse(text).unwrap_err().to_string();
        assert_eq!(message("thread = 1"), "elmo.toml: unknown key thread; did you mean threads?");
        assert_eq!(message("[embed]\nkep = 1"), "elmo.toml: unknown key embed.kep; did you mean keep?");
        assert_eq!(message("[embd]\nkeep = 1"), "elmo.toml: unknown section [embd]; did you mean embed?");
        assert_eq!(message("keep = 'a'"), "elmo.toml: unknown key keep; did you mean embed.keep?");
        assert_eq!(message("keeep = 'a'"), "elmo.toml: unknown key keeep; did you mean embed.keep?");
        assert_eq!(message("[bench]\nkep = 'a'"), "elmo.toml: unknown key bench.kep; did you mean embed.keep?");
        assert_eq!(message("[bench]\ntreads = 1"), "elmo.toml: unknown key bench.treads; did you mean threads?");
        assert_eq!(message("zzzzz = 1"), "elmo.toml: unknown key zzzzz");
    }

    #[test]
    fn wrong_values_name_their_key() {
        let message = |text: &str| parse(text).unwrap_err().to_string();
        let one = "expected a string, a number, true or false";
        assert_eq!(message("threads = 2026-01-01"), format!("elmo.toml: key threads: {one}, found datetime"));
        assert_eq!(message("threads = { cpu = 3 }"), format!("elmo.toml: key threads: {one}, found table"));
        let list = "expected a string, a number, true, false or a list of those";
        assert_eq!(message("[embed]\nkeep = [[1]]"), format!("elmo.toml: key embed.keep: {list}, found array"));
        assert!(message("threads =").starts_with("elmo.toml is not TOML: line 1, column 10: "));
        assert!(parse("\u{feff}threads = 2").is_ok());
        // The value may be a secret.
        let open = message("threads = 2\nX = \"sasl.password=hunter2\n");
        assert!(open.starts_with("elmo.toml is not TOML: line 2, column ") && !open.contains("hunter2"), "{open}");
    }

    #[test]
    fn misspelt_variables_are_rejected_and_foreign_ones_ignored() {
        let check = |name: &str| check_environment([OsStr::new(name)].into_iter(), &root());
        assert_eq!(
            check("ELMO_THREDS").unwrap_err().to_string(),
            "environment variable ELMO_THREDS is not a setting; did you mean ELMO_THREADS?"
        );
        for fine in ["ELMO_THREADS", "ELMO_SERVICE_HOST", "ELMO_PORT_8080_TCP_ADDR", "PATH", "ELMO_CACHE", "ELMO_TO"] {
            assert!(check(fine).is_ok(), "{fine}");
        }
    }
}
