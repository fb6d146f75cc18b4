//! Settings from the environment and from `elmo.toml`, put below the command line.
//!
//! A setting is always an option of a command, so there is one list of names, one set of legal values and one help
//! text: the clap types. `--batch-tokens 8192` on the command line is `ELMO_BATCH_TOKENS=8192` in the environment and
//! `batch-tokens = 8192` in the file. The first of flag, environment, file and default that says something wins.
//!
//! ```toml
//! model = "models/elmo-small"      # a key that several commands share stands at the top ...
//! threads = 4
//!
//! [embed]                          # ... one that belongs to a command, or differs there, in its section
//! column = "review"
//! keep = ["id", "stars"]
//!
//! [model-convert]                  # `elmo model convert`
//! to = "safetensors"
//! ```
//!
//! How it works: clap itself reads the environment; a value of the file becomes the *default* of its option.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
};

use clap::{Arg, ArgAction, Command, builder::BoolishValueParser};
use thiserror::Error;

use crate::error::{Exit, Fault};
use toml::{Table, Value};

/// The file that is read from the current directory when `--config` names no other.
pub(super) const FILE_NAME: &str = "elmo.toml";

/// Variables that are no option of a command.
const OTHER_VARIABLES: [&str; 3] = ["ELMO_CACHE", "ELMO_CONFIG", "ELMO_LOG"];

/// Options that make no sense in a file: they ask for something else than the command.
const NOT_A_SETTING: [&str; 3] = ["help", "version", "config"];

/// Options whose one value is a list with commas in it; a list of the file is joined so.
const WITH_COMMAS: [&str; 1] = ["keep"];

/// Wrong words in the environment or in `elmo.toml`.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(super) enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the settings in {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{path} is not TOML: {reason}")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Line and reason.
        reason: String,
    },
    /// A key that no command has.
    #[error("{path}: unknown key {key}{}", did_you_mean(nearest))]
    UnknownKey {
        /// The file.
        path: PathBuf,
        /// `key` or `section.key`.
        key: String,
        /// The most similar legal key.
        nearest: Option<String>,
    },
    /// A section that is no command.
    #[error("{path}: unknown section [{section}]{}", did_you_mean(nearest))]
    UnknownSection {
        /// The file.
        path: PathBuf,
        /// The section.
        section: String,
        /// The most similar legal section.
        nearest: Option<String>,
    },
    /// A value that no option can have.
    #[error("{path}: key {key}: {reason}")]
    Value {
        /// The file.
        path: PathBuf,
        /// `key` or `section.key`.
        key: String,
        /// Why.
        reason: String,
    },
    /// A variable that looks like a misspelt setting.
    #[error("environment variable {name} is not a setting{}", did_you_mean(&Some(nearest.clone())))]
    UnknownVariable {
        /// The variable.
        name: String,
        /// The most similar setting.
        nearest: String,
    },
}

impl Fault for ConfigError {
    fn exit(&self) -> Exit {
        Exit::Usage
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::Read { .. } => Some("check the path given with --config".into()),
            Self::UnknownKey { .. } | Self::UnknownSection { .. } => {
                Some("keys are the long options of a command without the dashes; see elmo COMMAND --help".into())
            }
            _ => None,
        }
    }
}

fn did_you_mean(nearest: &Option<String>) -> String {
    nearest.as_ref().map(|name| format!("; did you mean {name}?")).unwrap_or_default()
}

/// The settings of one file, checked against the commands: every key exists, every value is a scalar or a list of them.
#[derive(Debug, Clone, Default)]
pub(super) struct ConfigFile {
    path: PathBuf,
    common: BTreeMap<String, Vec<String>>,
    sections: BTreeMap<String, BTreeMap<String, Vec<String>>>,
}

impl ConfigFile {
    /// Reads `explicit`, or [`FILE_NAME`] in the current directory where that exists.
    ///
    /// # Errors
    /// [`ConfigError::Read`] when the file cannot be read (that there is no [`FILE_NAME`] is fine), and as
    /// [`ConfigFile::parse`].
    pub(super) fn find(explicit: Option<&Path>, root: &Command) -> Result<Option<Self>, ConfigError> {
        let path = explicit.unwrap_or(Path::new(FILE_NAME));
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse(&text, path, root).map(Some),
            Err(e) if explicit.is_none() && e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(ConfigError::Read { path: path.to_path_buf(), source }),
        }
    }

    /// Parses `text`; `path` stands in the errors.
    ///
    /// # Errors
    /// [`ConfigError::Syntax`] when it is not TOML, [`ConfigError::UnknownSection`] or [`ConfigError::UnknownKey`] for
    /// names that no command has, [`ConfigError::Value`] for a value that is neither a scalar nor, where the option
    /// takes several, a list of them, and for a key that stands there twice.
    pub(super) fn parse(text: &str, path: &Path, root: &Command) -> Result<Self, ConfigError> {
        let table: Table = text.parse().map_err(|e: toml::de::Error| ConfigError::Syntax {
            path: path.to_path_buf(),
            reason: e.to_string().trim_end().to_owned(),
        })?;
        let legal = LegalKeys::of(root);
        let mut file = Self { path: path.to_path_buf(), ..Self::default() };
        file.refuse_two_spellings("", &table)?;
        for (name, value) in &table {
            match value {
                Value::Table(section) if !legal.common.contains(name) => file.add_section(name, section, &legal)?,
                value => {
                    let key = file.legal_key(name, "", &legal)?;
                    let values = file.values(name, &key, value, &legal)?;
                    file.common.insert(key, values);
                }
            }
        }
        Ok(file)
    }

    /// `max-tokens` and `max_tokens` are one key, so TOML does not notice that it stands there twice.
    fn refuse_two_spellings(&self, section: &str, table: &Table) -> Result<(), ConfigError> {
        let mut seen = BTreeMap::new();
        for key in table.keys() {
            if let Some(other) = seen.insert(key.replace('_', "-"), key) {
                let reason = format!("{} is the same key; keep one of the two", shown(section, other));
                return Err(ConfigError::Value { path: self.path.clone(), key: shown(section, key), reason });
            }
        }
        Ok(())
    }

    fn add_section(&mut self, name: &str, table: &Table, legal: &LegalKeys) -> Result<(), ConfigError> {
        if !legal.sections.contains_key(name) {
            return Err(ConfigError::UnknownSection {
                path: self.path.clone(),
                section: name.to_owned(),
                nearest: nearest(name, legal.sections.keys()).cloned(),
            });
        }
        self.refuse_two_spellings(name, table)?;
        let mut section = BTreeMap::new();
        for (key, value) in table {
            let option = self.legal_key(key, name, legal)?;
            let values = self.values(&shown(name, key), &option, value, legal)?;
            section.insert(option, values);
        }
        self.sections.insert(name.to_owned(), section);
        Ok(())
    }

    /// The key as the option spells it; `batch_tokens` is accepted for `batch-tokens`.
    fn legal_key(&self, key: &str, section: &str, legal: &LegalKeys) -> Result<String, ConfigError> {
        let kebab = key.replace('_', "-");
        if legal.of_section(section).is_some_and(|keys| keys.contains(&kebab)) {
            return Ok(kebab);
        }
        let places = legal.seen_from(section);
        let nearest = nearest(&kebab, places.keys()).map(|key| places[key].clone());
        Err(ConfigError::UnknownKey { path: self.path.clone(), key: shown(section, key), nearest })
    }

    /// The words of `value` for the option `--option`, as clap takes them; `key` is what stands in the file.
    fn values(&self, key: &str, option: &str, value: &Value, legal: &LegalKeys) -> Result<Vec<String>, ConfigError> {
        let wrong = |reason: String| ConfigError::Value { path: self.path.clone(), key: key.to_owned(), reason };
        let (several, with_commas) = (legal.several.contains(option), WITH_COMMAS.contains(&option));
        let or_list = if several || with_commas { ", true, false or a list of those" } else { ", true or false" };
        let word = |value: &Value| {
            let found = value.type_str();
            scalar(value).ok_or_else(|| wrong(format!("expected a string, a number{or_list}, found {found}")))
        };
        let Value::Array(items) = value else { return Ok(vec![word(value)?]) };
        if !several && !with_commas {
            return Err(wrong(format!("expected one value, found a list of {}", items.len())));
        }
        if items.is_empty() {
            return Err(wrong("the list is empty; put a value into it, or leave the key out".to_owned()));
        }
        let words = items.iter().map(word).collect::<Result<Vec<_>, _>>()?;
        // clap would take the first of several values of an option that has one, and say nothing.
        Ok(if with_commas { vec![words.join(",")] } else { words })
    }

    /// What the file says about an option of a command.
    fn get(&self, section: &str, key: &str) -> Option<&[String]> {
        let own = self.sections.get(section).and_then(|keys| keys.get(key));
        own.or_else(|| self.common.get(key)).map(Vec::as_slice)
    }

    /// Where `value` of the option `--key` stands in the file, for a message about a value that clap refused.
    pub(super) fn origin(&self, key: &str, value: &str) -> Option<String> {
        let has = |keys: &BTreeMap<String, Vec<String>>| keys.get(key).is_some_and(|v| v.iter().any(|v| v == value));
        let path = self.path.display();
        if let Some((section, _)) = self.sections.iter().find(|(_, keys)| has(keys)) {
            return Some(format!("{path}, key {section}.{key}"));
        }
        has(&self.common).then(|| format!("{path}, key {key}"))
    }
}

/// A key as messages name it.
fn shown(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") }
}

fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(s) => Some(s.clone()),
        Value::Integer(_) | Value::Float(_) | Value::Boolean(_) => Some(value.to_string()),
        _ => None,
    }
}

/// Which keys may stand where.
struct LegalKeys {
    common: BTreeSet<String>,
    sections: BTreeMap<String, BTreeSet<String>>,
    /// Keys of options that take several values.
    several: BTreeSet<String>,
}

impl LegalKeys {
    /// A key is common when at least two commands have it.
    fn of(root: &Command) -> Self {
        let (mut sections, mut several) = (BTreeMap::new(), BTreeSet::new());
        let global: BTreeSet<String> = root.get_arguments().filter_map(setting_name).collect();
        walk(root, "", &mut |name, command| {
            let own: BTreeSet<String> = command.get_arguments().filter_map(setting_name).collect();
            sections.insert(name.to_owned(), &own | &global);
            several.extend(command.get_arguments().filter(|arg| takes_several(arg)).filter_map(setting_name));
        });
        let mut common = global;
        for (name, keys) in &sections {
            let others: BTreeSet<&String> = sections.iter().filter(|(n, _)| *n != name).flat_map(|(_, k)| k).collect();
            common.extend(keys.iter().filter(|key| others.contains(key)).cloned());
        }
        Self { common, sections, several }
    }

    /// The keys of a section, or those at the top.
    fn of_section(&self, section: &str) -> Option<&BTreeSet<String>> {
        if section.is_empty() { Some(&self.common) } else { self.sections.get(section) }
    }

    /// Every key, and how it is to be written for somebody who looked for it in `section`: one of this section by
    /// itself, one of another with its section.
    fn seen_from(&self, section: &str) -> BTreeMap<String, String> {
        let mut places = BTreeMap::new();
        for key in self.of_section(section).into_iter().flatten() {
            places.insert(key.clone(), key.clone());
        }
        for (other, keys) in &self.sections {
            for key in keys {
                places.entry(key.clone()).or_insert_with(|| shown(other, key));
            }
        }
        places
    }
}

fn takes_several(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append) || arg.get_num_args().is_some_and(|n| n.max_values() > 1)
}

/// Calls `visit` for every command that does something, with its section name (`model convert` is `model-convert`).
fn walk(command: &Command, section: &str, visit: &mut impl FnMut(&str, &Command)) {
    for sub in command.get_subcommands().filter(|c| c.get_name() != "help") {
        let name = join(section, sub.get_name());
        if !sub.has_subcommands() {
            visit(&name, sub);
        }
        walk(sub, &name, visit);
    }
}

fn join(section: &str, name: &str) -> String {
    if section.is_empty() { name.to_owned() } else { format!("{section}-{name}") }
}

/// The long name of an option that may stand in the environment and in a file.
fn setting_name(arg: &Arg) -> Option<String> {
    arg.get_long().filter(|name| !NOT_A_SETTING.contains(name)).map(str::to_owned)
}

/// `batch-tokens` -> `ELMO_BATCH_TOKENS`.
pub(super) fn variable(long: &str) -> String {
    format!("ELMO_{}", long.replace('-', "_").to_ascii_uppercase())
}

/// Lets clap read `ELMO_*`, and puts the file's values below.
///
/// A variable that is set but empty counts as not set, as container settings often are.
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

/// Refuses a variable that is nearly a setting: `ELMO_MODLE`.
///
/// One that resembles nothing is left alone: container platforms set variables such as `ELMO_SERVICE_HOST` for every
/// service called `elmo`.
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
        if legal.contains(name) {
            continue;
        }
        if let Some(nearest) = nearest(name, legal.iter()) {
            return Err(ConfigError::UnknownVariable { name: name.to_owned(), nearest: nearest.clone() });
        }
    }
    Ok(())
}

/// The legal name that `name` most probably was meant to be.
fn nearest<'a>(name: &str, legal: impl Iterator<Item = &'a String>) -> Option<&'a String> {
    /// Below this two names have nothing to do with each other; `modle`/`model` has 0.8, `colum`/`column` 0.83.
    const SIMILAR: f64 = 0.6;
    // The common beginning would make every variable resemble every other.
    let bare = |name: &str| name.strip_prefix("ELMO_").unwrap_or(name).to_owned();
    legal
        .map(|other| (strsim::normalized_damerau_levenshtein(&bare(name), &bare(other)), other))
        .filter(|(similarity, _)| *similarity >= SIMILAR)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, other)| other)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used)]
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
            .subcommand(Command::new("model").subcommand(convert))
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
    fn a_key_stands_in_one_spelling_only() {
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
        assert!(message("threads =").starts_with("elmo.toml is not TOML: TOML parse error at line 1"));
    }

    #[test]
    fn misspelt_variables_are_refused_and_foreign_ones_left_alone() {
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
