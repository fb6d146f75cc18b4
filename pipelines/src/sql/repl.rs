//! The interactive prompt: multi-line statements, history, completion, and commands that start with a backslash.

use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
};

use datafusion::sql::sqlparser::{
    dialect::GenericDialect,
    tokenizer::{Token, Tokenizer},
};
use rustyline::{
    CompletionType, Config, Context, Editor, Helper,
    completion::{Completer, FilenameCompleter, Pair},
    error::ReadlineError,
    highlight::Highlighter,
    hint::Hinter,
    history::FileHistory,
    validate::{ValidationContext, ValidationResult, Validator},
};

use super::Format;
use crate::{
    error::{Error, Result},
    redact::redact,
};

/// Maximum number of entries in the history.
const MAX_HISTORY: usize = 10_000;

/// An input of the user.
#[derive(Debug, PartialEq, Eq)]
pub enum Input {
    /// Statements, each terminated by a semicolon.
    Sql(String),
    /// A backslash command.
    Command(Command),
    /// An empty line, or one discarded with Ctrl-C.
    Empty,
    /// End of input, or a command to leave.
    Exit,
}

/// A backslash command.
#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    /// Lists the commands.
    Help,
    /// Sets the result format.
    Format(Format),
    /// Runs the statements of a file.
    File(String),
    /// A shorthand for this statement.
    Sql(String),
}

/// The output of [`Command::Help`].
pub const COMMANDS: &str = "\
\\d            the tables            \\d NAME    the columns of a table or of 'FILE'
\\df           the functions of elmo \\m         the models
\\f FORMAT     set the result format: table, csv, json, ndjson
\\i FILE       run the statements of a file
\\q            quit; so does Ctrl-D
A statement ends with a semicolon. Files are tables: SELECT * FROM 'reviews.parquet' LIMIT 3;
";

impl Command {
    /// Parses a command.
    ///
    /// # Errors
    /// [`Error::Usage`] for an unknown command or format.
    fn parse(line: &str) -> Result<Self> {
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim().trim_end_matches(';').trim_end();
        Ok(match (word.trim_end_matches(';'), rest) {
            ("\\?" | "\\h", _) => Self::Help,
            ("\\d", "") => Self::Sql("SHOW TABLES".to_owned()),
            ("\\d", name) => Self::Sql(format!("DESCRIBE {name}")),
            ("\\df", _) => Self::Sql("SELECT * FROM elmo_functions()".to_owned()),
            ("\\m", _) => Self::Sql("SELECT * FROM elmo_models()".to_owned()),
            ("\\f", word) => match word.parse::<Format>() {
                Ok(format) if !format.is_binary() => Self::Format(format),
                _ => {
                    return Err(Error::usage(
                        format!("\\f {word}: not a format of the shell"),
                        "use one of table, csv, json, ndjson",
                    ));
                }
            },
            ("\\i", file) if !file.is_empty() => Self::File(file.trim_matches('\'').to_owned()),
            _ => return Err(Error::usage(format!("{line}: unknown command"), "\\? lists the commands")),
        })
    }
}

/// Whether an input is complete: empty, a command, or statements that end with a semicolon outside of quotes and
/// comments.
fn is_complete(text: &str) -> bool {
    let text = text.trim();
    if text.is_empty() || text.starts_with('\\') {
        return true;
    }
    let tokens = Tokenizer::new(&GenericDialect {}, text).tokenize();
    // The tokenizer fails on an open quote or comment.
    let Ok(tokens) = tokens else { return false };
    tokens.iter().rfind(|token| !matches!(token, Token::Whitespace(_))) == Some(&Token::SemiColon)
}

/// The prompt.
pub struct Repl {
    editor: Editor<Assistant, FileHistory>,
    history: Option<PathBuf>,
}

impl std::fmt::Debug for Repl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Repl").field("history", &self.history).finish_non_exhaustive()
    }
}

impl Repl {
    /// Creates a prompt whose history is stored in `history`. Works without one if that file cannot be read or written.
    ///
    /// # Errors
    /// [`Error::Failed`] if the terminal cannot be used.
    pub fn new(history: Option<PathBuf>) -> Result<Self> {
        let config =
            Config::builder().max_history_size(MAX_HISTORY).and_then(|config| config.history_ignore_dups(true));
        let config = config.map_err(failed)?.history_ignore_space(true).completion_type(CompletionType::List).build();
        let lines = FileHistory::with_config(&config);
        let mut editor = Editor::with_history(config, lines).map_err(failed)?;
        editor.set_helper(Some(Assistant { names: Vec::new(), files: FilenameCompleter::new() }));
        if let Some(path) = &history {
            if let Some(folder) = path.parent() {
                let _ = std::fs::create_dir_all(folder);
            }
            // The file does not exist before the first session.
            let _ = editor.load_history(path);
        }
        Ok(Self { editor, history })
    }

    /// Reads the next input; `names` are completion candidates.
    ///
    /// # Errors
    /// [`Error::Usage`] for an unknown command or invalid UTF-8, [`Error::Failed`] if the terminal was closed.
    pub fn read(&mut self, names: Vec<String>) -> Result<Input> {
        if let Some(helper) = self.editor.helper_mut() {
            helper.names = names;
        }
        let text = match self.editor.readline("elmo> ") {
            Ok(text) => text,
            Err(ReadlineError::Interrupted) => return Ok(Input::Empty),
            Err(ReadlineError::Eof) => return Ok(Input::Exit),
            Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
                return Err(Error::usage(
                    "the input is not valid UTF-8",
                    "the line is discarded; check the encoding of the terminal",
                ));
            }
            Err(error) => return Err(failed(error)),
        };
        let text = text.trim();
        if text.is_empty() {
            return Ok(Input::Empty);
        }
        self.remember(text);
        match text {
            "\\q" | "quit" | "exit" | "quit;" | "exit;" => Ok(Input::Exit),
            _ if text.starts_with('\\') => Command::parse(text).map(Input::Command),
            _ => Ok(Input::Sql(text.to_owned())),
        }
    }

    fn remember(&mut self, text: &str) {
        // A line with a secret is not stored at all, as in psql: a redacted one would be another statement when recalled.
        if redact(text) != text {
            return;
        }
        // The shell works without a history file.
        if self.editor.add_history_entry(text).is_ok_and(|added| added)
            && let Some(path) = &self.history
        {
            let _ = self.editor.append_history(path);
        }
    }
}

fn failed(error: ReadlineError) -> Error {
    Error::Failed(format!("the terminal cannot be used: {error}"))
}

/// `elmo/sql_history` below `$XDG_STATE_HOME` or `~/.local/state`; `None` if neither variable is set.
pub fn default_history() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = set("XDG_STATE_HOME").or_else(|| Some(set("HOME")?.join(".local/state")))?;
    Some(base.join("elmo").join(Path::new("sql_history")))
}

/// Completes words and detects complete statements.
struct Assistant {
    names: Vec<String>,
    files: FilenameCompleter,
}

/// SQL keywords for completion.
const KEYWORDS: &[&str] = &[
    "AND",
    "AS",
    "ASC",
    "BETWEEN",
    "BY",
    "CASE",
    "COPY",
    "CREATE EXTERNAL TABLE",
    "CROSS JOIN",
    "DESC",
    "DESCRIBE",
    "DISTINCT",
    "ELSE",
    "END",
    "EXPLAIN ANALYZE",
    "FROM",
    "FULL JOIN",
    "GROUP BY",
    "HAVING",
    "INNER JOIN",
    "INSERT INTO",
    "IS NOT NULL",
    "IS NULL",
    "LEFT JOIN",
    "LIKE",
    "LIMIT",
    "LOCATION",
    "NOT",
    "OFFSET",
    "OR",
    "ORDER BY",
    "OVER",
    "PARTITION BY",
    "SELECT",
    "SET",
    "SHOW TABLES",
    "STORED AS",
    "THEN",
    "UNION ALL",
    "UNNEST",
    "VALUES",
    "WHEN",
    "WHERE",
    "WITH",
];

impl Assistant {
    /// The start of the word before the cursor, and its completions.
    fn complete_word(&self, before: &str) -> (usize, Vec<Pair>) {
        let is_part = |c: char| c.is_alphanumeric() || c == '_';
        let start =
            before.rfind(|c| !is_part(c)).map_or(0, |at| at + before[at..].chars().next().map_or(1, char::len_utf8));
        let word = &before[start..];
        if word.is_empty() {
            return (start, Vec::new());
        }
        // Completes keywords in the case of the input.
        let lower = word.chars().all(|c| !c.is_uppercase());
        let keywords = KEYWORDS.iter().map(|k| if lower { k.to_lowercase() } else { (*k).to_owned() });
        let fits = |name: &String| name.to_lowercase().starts_with(&word.to_lowercase());
        let found = self.names.iter().cloned().chain(keywords).filter(fits);
        (start, found.map(|name| Pair { display: name.clone(), replacement: name }).collect())
    }
}

impl Completer for Assistant {
    type Candidate = Pair;

    fn complete(&self, line: &str, at: usize, context: &Context<'_>) -> rustyline::Result<(usize, Vec<Pair>)> {
        let before = &line[..at];
        match before.matches('\'').count() % 2 {
            1 => self.files.complete(line, at, context),
            _ => Ok(self.complete_word(before)),
        }
    }
}

impl Validator for Assistant {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        let word = context.input().trim();
        Ok(match is_complete(word) || matches!(word, "quit" | "exit") {
            true => ValidationResult::Valid(None),
            false => ValidationResult::Incomplete,
        })
    }
}

impl Hinter for Assistant {
    type Hint = String;
}

impl Highlighter for Assistant {}

impl Helper for Assistant {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_statement_ends_with_a_semicolon_outside_of_quotes_and_comments() {
        for whole in
            ["", "SELECT 1;", "SELECT ';' ; ", "SELECT 1; -- done", "\\d", "SELECT 'it''s';", "SELECT 1; SELECT 2;"]
        {
            assert!(is_complete(whole), "{whole}");
        }
        for part in ["SELECT 1", "SELECT ';", "SELECT 1 -- ;", "SELECT /* ;", "SELECT 1; SELECT 2", "SELECT \"a;"] {
            assert!(!is_complete(part), "{part}");
        }
    }

    #[test]
    fn words_are_completed() {
        let names = ["elmo_embed(", "elmo_tokens(", "reviews"].map(str::to_owned).to_vec();
        let assistant = Assistant { names, files: FilenameCompleter::new() };
        let found = |before: &str| {
            let (start, pairs) = assistant.complete_word(before);
            (start, pairs.into_iter().map(|pair| pair.replacement).collect::<Vec<_>>())
        };
        assert_eq!(found("SELECT elmo_e"), (7, vec!["elmo_embed(".to_owned()]));
        assert_eq!(found("SELECT * FROM Rev"), (14, vec!["reviews".to_owned()]));
        assert_eq!(found("sel"), (0, vec!["select".to_owned()]));
        assert_eq!(found("SELECT é"), (7, Vec::new()));
        assert_eq!(found("SELECT "), (7, Vec::new()));
    }

    #[test]
    fn lines_with_secrets_are_not_remembered() {
        let folder = tempfile::tempdir().unwrap();
        let history = folder.path().join("history");
        let mut repl = Repl::new(Some(history.clone())).unwrap();
        for line in [
            "SELECT 1;",
            "SELECT * FROM 'https://me:hunter2@host/a.parquet';",
            "COPY (SELECT 1) TO 'az://container/a.csv?sv=2024-11-04&sig=hunter2';",
            "\\d 's3://key:hunter2@bucket/a.parquet'",
            "CREATE EXTERNAL TABLE t STORED AS CSV LOCATION 's3://b/a.csv' OPTIONS ('aws.secret_access_key' 'hunter2');",
            "SELECT 2;",
        ] {
            repl.remember(line);
        }
        let stored = std::fs::read_to_string(history).unwrap();
        assert!(stored.contains("SELECT 1;") && stored.contains("SELECT 2;"), "{stored}");
        assert!(!stored.contains("hunter2"), "{stored}");
    }

    #[test]
    fn commands() {
        assert_eq!(Command::parse("\\d").unwrap(), Command::Sql("SHOW TABLES".into()));
        assert_eq!(Command::parse("\\d 'a b.parquet';").unwrap(), Command::Sql("DESCRIBE 'a b.parquet'".into()));
        assert_eq!(Command::parse("\\f csv").unwrap(), Command::Format(Format::Csv));
        assert_eq!(Command::parse("\\i 'a b.sql'").unwrap(), Command::File("a b.sql".into()));
        for wrong in ["\\x", "\\f parquet", "\\f", "\\i"] {
            assert!(Command::parse(wrong).is_err(), "{wrong}");
        }
    }
}
