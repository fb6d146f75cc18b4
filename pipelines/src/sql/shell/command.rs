//! Commands that start with a backslash.

use std::path::Path;

use super::super::nearest::did_you_mean;
use crate::error::{Error, Result};

/// A command.
#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    /// Lists the commands.
    Help,
    /// Leaves the shell.
    Quit,
    /// Lists the tables and views.
    Tables,
    /// Lists the functions whose names contain a text, or explains one of them; `None` for those of elmo.
    Functions(Option<String>),
    /// Runs the statements of a file.
    File(String),
    /// Lists the settings.
    Settings,
    /// Changes a setting; without a value, toggles it.
    Set {
        /// The name of the setting.
        name: String,
        /// The new value.
        value: Option<String>,
    },
    /// A shorthand for this statement.
    Sql(String),
}

/// What follows a command, for completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Argument {
    None,
    Table,
    Function,
    File,
    /// One of these words.
    Words(&'static [&'static str]),
    /// A setting and its value.
    Setting,
}

/// The commands: name, arguments as help shows them, meaning, and arguments for completion.
pub(super) const COMMANDS: &[(&str, &str, &str, Argument)] = &[
    ("\\?", "", "this list; so does help", Argument::None),
    ("\\d", "[NAME]", "the tables and views, or the columns of a table or of 'FILE'", Argument::Table),
    ("\\df", "[NAME]", "the functions of elmo, or one function with its options", Argument::Function),
    ("\\f", "FORMAT", "the format of results: table, csv, json, ndjson", Argument::Words(FORMATS)),
    ("\\i", "FILE", "run the statements of a file", Argument::File),
    ("\\m", "", "the models", Argument::None),
    ("\\q", "", "leave; so do quit, exit and Ctrl-D", Argument::None),
    ("\\set", "[NAME VALUE]", "the settings, or change one: \\set max_rows 1000", Argument::Setting),
    ("\\timing", "[on|off]", "print the duration of statements", Argument::Words(&["on", "off"])),
    ("\\x", "[on|off|auto]", "a line per value instead of a row per record", Argument::Words(EXPANDED)),
];

const FORMATS: &[&str] = &["table", "csv", "json", "ndjson"];
const EXPANDED: &[&str] = &["on", "off", "auto"];

/// Commands of duckdb's shell, and those in their place.
const DOT_COMMANDS: &[(&str, &str)] = &[
    (".exit", "\\q"),
    (".help", "\\?"),
    (".maxrows", "\\set max_rows N"),
    (".mode", "\\f FORMAT"),
    (".quit", "\\q"),
    (".read", "\\i FILE"),
    (".schema", "\\d NAME"),
    (".tables", "\\d"),
    (".timer", "\\timing"),
];

/// The text of `\?`.
pub fn help() -> String {
    let line = |(name, arguments, meaning, _): &(&str, &str, &str, Argument)| {
        let command = format!("{name} {arguments}");
        format!("  {command:20}{meaning}\n")
    };
    let commands: String = COMMANDS.iter().map(line).collect();
    format!(
        "\
Commands
{commands}
Statements
  A statement ends with a semicolon and may have several lines. Files are tables:
    SELECT * FROM 'reviews.parquet' LIMIT 3;

Keys
  Tab       complete tables, columns, functions and their options, settings, files in quotes
  Up, Down  earlier statements, which are kept between sessions unless they hold a secret
  Ctrl-C    discard the statement at the prompt, or stop the running one
"
    )
}

impl Command {
    /// Parses a line that starts with a backslash.
    ///
    /// # Errors
    /// [`Error::Usage`] for an unknown command or a missing argument.
    pub(super) fn parse(line: &str) -> Result<Self> {
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim().trim_end_matches(';').trim_end();
        let given = (!rest.is_empty()).then(|| rest.to_owned());
        let set = |name: &str, value| Self::Set { name: name.to_owned(), value };
        Ok(match (word.trim_end_matches(';'), given) {
            ("\\?" | "\\h", _) => Self::Help,
            ("\\q", _) => Self::Quit,
            ("\\d" | "\\dt", None) => Self::Tables,
            ("\\d" | "\\dt", Some(name)) => Self::Sql(format!("DESCRIBE {}", table(&name))),
            ("\\df", name) => Self::Functions(name),
            ("\\m", _) => Self::Sql("SELECT * FROM elmo_models()".to_owned()),
            ("\\f", value) => set("format", Some(value.unwrap_or_default())),
            ("\\x", value) => set("expanded", value),
            ("\\timing", value) => set("timing", value),
            ("\\set", None) => Self::Settings,
            ("\\set", Some(rest)) => match rest.split_once(char::is_whitespace) {
                Some((name, value)) => set(name, Some(value.trim_start().trim_start_matches("= ").to_owned())),
                None => set(&rest, None),
            },
            ("\\i", Some(file)) => Self::File(file.trim_matches('\'').to_owned()),
            ("\\i", None) => return Err(Error::usage("\\i needs a file", "give one: \\i statements.sql")),
            (word, _) => {
                let known = did_you_mean(word, COMMANDS.iter().map(|(name, ..)| *name));
                return Err(Error::usage(format!("{word}: unknown command{known}"), "\\? lists the commands"));
            }
        })
    }

    /// The error for a line that starts with a dot.
    pub(super) fn dot(line: &str) -> Error {
        let word = line.split_whitespace().next().unwrap_or_default();
        let known = DOT_COMMANDS.iter().find(|(name, _)| *name == word);
        let known = known.map(|(_, ours)| format!("; did you mean {ours}?")).unwrap_or_default();
        Error::usage(format!("{word}: unknown command{known}"), "commands start with a backslash; \\? lists them")
    }
}

/// A table for SQL: the path of a file without quotes gets them.
fn table(name: &str) -> String {
    match !name.starts_with(['\'', '"']) && name.contains(['.', '/']) && Path::new(name).exists() {
        true => format!("'{}'", name.replace('\'', "''")),
        false => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(name: &str, value: Option<&str>) -> Command {
        Command::Set { name: name.into(), value: value.map(str::to_owned) }
    }

    #[test]
    fn commands() {
        for (line, expected) in [
            ("\\d", Command::Tables),
            ("\\dt;", Command::Tables),
            ("\\d 'a b.parquet';", Command::Sql("DESCRIBE 'a b.parquet'".into())),
            ("\\d Cargo.toml", Command::Sql("DESCRIBE 'Cargo.toml'".into())),
            ("\\d s.t", Command::Sql("DESCRIBE s.t".into())),
            ("\\df elmo_embed", Command::Functions(Some("elmo_embed".into()))),
            ("\\f csv", set("format", Some("csv"))),
            ("\\x", set("expanded", None)),
            ("\\timing off", set("timing", Some("off"))),
            ("\\set", Command::Settings),
            ("\\set max_rows 7", set("max_rows", Some("7"))),
            ("\\set max_rows = 7;", set("max_rows", Some("7"))),
            ("\\set pager", set("pager", None)),
            ("\\i 'a b.sql'", Command::File("a b.sql".into())),
            ("\\q", Command::Quit),
        ] {
            assert_eq!(Command::parse(line).unwrap(), expected, "{line}");
        }
    }

    #[test]
    fn an_unknown_command_names_the_nearest() {
        let error = |line: &str| Command::parse(line).unwrap_err().to_string();
        assert_eq!(error("\\pset pager off"), "\\pset: unknown command; did you mean \\set?");
        assert_eq!(error("\\tming"), "\\tming: unknown command; did you mean \\timing?");
        assert_eq!(error("\\connect hunter2"), "\\connect: unknown command");
        assert_eq!(error("\\i"), "\\i needs a file");
        assert_eq!(Command::dot(".tables").to_string(), ".tables: unknown command; did you mean \\d?");
        assert_eq!(Command::dot(".open x").to_string(), ".open: unknown command");
    }

    #[test]
    fn help_lists_every_command() {
        for (name, arguments, meaning, _) in COMMANDS {
            assert!(help().contains(&format!("  {name} {arguments}")) && help().contains(meaning), "{name}");
            // It is a command.
            let line = format!("{name} {}", if *name == "\\i" { "file" } else { "" });
            assert!(Command::parse(&line).is_ok(), "{name}");
        }
    }
}
