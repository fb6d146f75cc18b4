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
    collections::BTreeSet,
    ffi::{OsStr, OsString},
};

use clap::{Arg, ArgAction, Command, builder::BoolishValueParser};

pub(super) use self::keys::variable;
use self::keys::{join, nearest, setting_name, walk};
pub(super) use self::{error::ConfigError, file::ConfigFile};

/// Variables that are not options of a command.
const OTHER_VARIABLES: [&str; 3] = ["ELMO_CACHE", "ELMO_CONFIG", "ELMO_LOG"];

/// Lets clap read `ELMO_*` variables, and makes the values of the file the defaults.
///
/// An empty variable counts as unset, because container configurations often set variables to nothing.
pub(super) fn apply(root: Command, file: Option<&ConfigFile>, env: &dyn Fn(&str) -> Option<OsString>) -> Command {
    apply_to(root, "", file, env)
}

fn apply_to(
    command: Command,
    section: &str,
    file: Option<&ConfigFile>,
    env: &dyn Fn(&str) -> Option<OsString>,
) -> Command {
    let command = command.mut_args(|arg| match setting_name(&arg) {
        Some(name) => apply_to_arg(arg, &name, section, file, env),
        None => arg,
    });
    let names: Vec<String> = command.get_subcommands().map(|c| c.get_name().to_owned()).collect();
    names.into_iter().fold(command, |command, name| {
        let section = join(section, &name);
        command.mut_subcommand(name, |sub| apply_to(sub, &section, file, env))
    })
}

fn apply_to_arg(
    arg: Arg,
    name: &str,
    section: &str,
    file: Option<&ConfigFile>,
    env: &dyn Fn(&str) -> Option<OsString>,
) -> Arg {
    let variable = variable(name);
    let is_set = env(&variable).is_some_and(|value| !value.is_empty());
    let flag = matches!(arg.get_action(), ArgAction::SetTrue);
    let arg = if flag { arg.value_parser(BoolishValueParser::new()) } else { arg };
    let arg = if is_set { arg.env(variable).hide_env(true).required(false) } else { arg };
    match file.and_then(|file| file.get(section, name)) {
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
        let command = apply(root(), Some(&parse(file).unwrap()), &|_| None);
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

    #[test]
    fn lists_flags_and_required_options_may_come_from_the_file() {
        let embed = "[embed]\nkeep = ['a', 'b']\ninput = ['x', 'y']";
        let file = parse(&format!("quiet = true\n{embed}\n[model-convert]\nto = 'hdf5'")).unwrap();
        let command = apply(root(), Some(&file), &|_| None);
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
        let command = apply(root(), Some(&parse("[stream]\npartitions = 3").unwrap()), &|_| None);
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
