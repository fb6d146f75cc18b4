//! The prompt: statements of several lines, history, completion, and commands.

use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
};

use rustyline::{
    CompletionType, Config, Context, Editor, Helper,
    completion::{Completer, Pair},
    error::ReadlineError,
    highlight::Highlighter,
    hint::Hinter,
    history::FileHistory,
    validate::Validator,
};

use super::{
    command::Command,
    complete::{Completion, complete},
    names::Names,
    scan::Scan,
};
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
    /// A command.
    Command(Command),
    /// An empty line, or a statement discarded with Ctrl-C.
    Empty,
    /// End of input.
    Exit,
}

/// The prompt.
pub struct Prompt {
    editor: Editor<Assistant, FileHistory>,
    history: Option<PathBuf>,
    unfinished: Unfinished,
}

impl std::fmt::Debug for Prompt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prompt").field("history", &self.history).finish_non_exhaustive()
    }
}

impl Prompt {
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
        editor.set_helper(Some(Assistant::default()));
        if let Some(path) = &history {
            if let Some(folder) = path.parent() {
                let _ = std::fs::create_dir_all(folder);
            }
            // The file does not exist before the first session.
            let _ = editor.load_history(path);
        }
        Ok(Self { editor, history, unfinished: Unfinished::default() })
    }

    /// Reads the next input; `names` are completion candidates.
    ///
    /// # Errors
    /// [`Error::Usage`] for an unknown command or invalid UTF-8, [`Error::Failed`] if the terminal was closed.
    pub fn read(&mut self, names: Names) -> Result<Input> {
        if let Some(helper) = self.editor.helper_mut() {
            helper.names = names;
        }
        loop {
            if let Some(helper) = self.editor.helper_mut() {
                helper.before.clone_from(&self.unfinished.0);
            }
            let line = match self.editor.readline(self.unfinished.prompt()) {
                Ok(line) => line,
                Err(ReadlineError::Interrupted) => {
                    self.unfinished.0.clear();
                    return Ok(Input::Empty);
                }
                Err(ReadlineError::Eof) => return Ok(Input::Exit),
                Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
                    return Err(Error::usage(
                        "the input is not valid UTF-8",
                        "the line is discarded; check the encoding of the terminal",
                    ));
                }
                Err(error) => return Err(failed(error)),
            };
            if let Some(taken) = self.unfinished.take(&line) {
                let Taken { text, typed } = taken;
                self.remember(&text);
                return typed;
            }
        }
    }

    fn remember(&mut self, text: &str) {
        // A line with a secret is not stored at all, as in psql: a redacted one would be another statement when recalled.
        if text.is_empty() || redact(text) != text {
            return;
        }
        // A history that cannot be kept is no reason to stop.
        if self.editor.add_history_entry(text).is_ok_and(|added| added)
            && let Some(path) = &self.history
        {
            let _ = self.editor.append_history(path);
        }
    }
}

/// A complete input, and its text for the history.
struct Taken {
    text: String,
    typed: Result<Input>,
}

impl Taken {
    fn nothing() -> Self {
        Self { text: String::new(), typed: Ok(Input::Empty) }
    }
}

/// The lines of a statement that is not complete yet.
#[derive(Debug, Default)]
struct Unfinished(String);

impl Unfinished {
    /// The prompt for the next line, which shows what is open, as in psql.
    fn prompt(&self) -> &'static str {
        let Self(text) = self;
        match Scan::new(text).open.and_then(|open| text[open..].chars().next()) {
            _ if text.is_empty() => "elmo> ",
            None => "   -> ",
            Some('"') => "  \"-> ",
            Some('/') => "  *-> ",
            Some('$') => "  $-> ",
            Some(_) => "  '-> ",
        }
    }

    /// Takes a line. `None` if the statement goes on. A command between the lines of a statement leaves it as it is.
    fn take(&mut self, line: &str) -> Option<Taken> {
        let word = line.trim();
        let is_first = self.0.is_empty();
        if Scan::new(&self.0).open.is_none() {
            let typed = match word.trim_end_matches(';').trim_end() {
                _ if word.starts_with('\\') => Some(Command::parse(word).map(Input::Command)),
                "quit" | "exit" if is_first => Some(Ok(Input::Command(Command::Quit))),
                "help" if is_first => Some(Ok(Input::Command(Command::Help))),
                "quit" | "exit" | "help" => Some(Err(Error::usage(
                    "the statement before this line is not complete",
                    "end it with a semicolon, discard it with Ctrl-C, or leave with \\q",
                ))),
                _ if is_first && word.starts_with('.') => Some(Err(Command::dot(word))),
                _ => None,
            };
            if let Some(typed) = typed {
                return Some(Taken { text: word.to_owned(), typed });
            }
        }
        if !is_first {
            self.0.push('\n');
        }
        self.0.push_str(line);
        let scan = Scan::new(&self.0);
        if scan.is_blank() {
            self.0.clear();
            return Some(Taken::nothing());
        }
        scan.is_complete().then(|| {
            let text = std::mem::take(&mut self.0).trim().to_owned();
            Taken { typed: Ok(Input::Sql(text.clone())), text }
        })
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

/// Completes words.
#[derive(Debug, Default)]
struct Assistant {
    names: Names,
    /// The lines of the statement before the edited one.
    before: String,
}

impl Completer for Assistant {
    type Candidate = Pair;

    fn complete(&self, line: &str, at: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<Pair>)> {
        let earlier = if self.before.is_empty() { String::new() } else { format!("{}\n", self.before) };
        let Completion { start, candidates } = complete(&format!("{earlier}{}", &line[..at]), &self.names);
        let pair = |text: String| Pair { display: text.clone(), replacement: text };
        // A quotation that was opened on an earlier line is not completed.
        Ok(match start.checked_sub(earlier.len()) {
            Some(start) => (start, candidates.into_iter().map(pair).collect()),
            None => (at, Vec::new()),
        })
    }
}

impl Validator for Assistant {}

impl Hinter for Assistant {
    type Hint = String;
}

impl Highlighter for Assistant {}

impl Helper for Assistant {}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the lines make, and the prompt after each that leaves a statement incomplete.
    fn typed(lines: &[&str]) -> Vec<String> {
        let mut unfinished = Unfinished::default();
        let outcome = |taken: Taken| match taken.typed {
            Ok(Input::Sql(sql)) => sql,
            Ok(typed) => format!("{typed:?}"),
            Err(error) => error.to_string(),
        };
        lines.iter().map(|line| unfinished.take(line).map_or_else(|| unfinished.prompt().to_owned(), outcome)).collect()
    }

    #[test]
    fn statements_have_several_lines() {
        assert_eq!(typed(&["SELECT 1", "FROM t;"]), ["   -> ", "SELECT 1\nFROM t;"]);
        assert_eq!(typed(&["SELECT 'a", "b', \"c", "\";"]), ["  '-> ", "  \"-> ", "SELECT 'a\nb', \"c\n\";"]);
        assert_eq!(typed(&["SELECT /* a", "*/ 1;"]), ["  *-> ", "SELECT /* a\n*/ 1;"]);
        assert_eq!(typed(&["", "  ", "-- nothing", "SELECT 1;"]), ["Empty", "Empty", "Empty", "SELECT 1;"]);
    }

    #[test]
    fn words_without_a_semicolon() {
        assert_eq!(
            typed(&["help", "exit", "quit;", "\\q"]),
            ["Command(Help)", "Command(Quit)", "Command(Quit)", "Command(Quit)"]
        );
        assert_eq!(typed(&[".tables"]), [".tables: unknown command; did you mean \\d?"]);
        // Inside of a statement, and inside of a quotation.
        assert_eq!(
            typed(&["SELECT 1", "exit", "\\timing", "AS n;"]),
            [
                "   -> ",
                "the statement before this line is not complete",
                "Command(Set { name: \"timing\", value: None })",
                "SELECT 1\nAS n;"
            ]
        );
        assert_eq!(
            typed(&["SELECT '", "exit", "\\q", "';"]),
            ["  '-> ", "  '-> ", "  '-> ", "SELECT '\nexit\n\\q\n';"]
        );
    }

    #[test]
    fn words_are_completed_after_other_lines() {
        let (before, history) = ("SELECT\n 'é' AS e,".to_owned(), FileHistory::new());
        let assistant = Assistant { names: Names::default(), before };
        let (start, pairs) = assistant.complete("é, dis", 7, &Context::new(&history)).unwrap();
        assert_eq!((start, pairs[0].replacement.as_str()), (4, "distinct"));
        let assistant = Assistant { before: "SELECT * FROM '".to_owned(), ..assistant };
        assert!(assistant.complete("x", 1, &Context::new(&history)).unwrap().1.is_empty());
    }

    #[test]
    fn lines_with_secrets_are_not_remembered() {
        let folder = tempfile::tempdir().unwrap();
        let history = folder.path().join("history");
        let mut prompt = Prompt::new(Some(history.clone())).unwrap();
        for line in [
            "SELECT 1;",
            "SELECT * FROM 'https://me:hunter2@host/a.parquet';",
            "COPY (SELECT 1) TO 'az://container/a.csv?sv=2024-11-04&sig=hunter2';",
            "\\d 's3://key:hunter2@bucket/a.parquet'",
            "CREATE EXTERNAL TABLE t STORED AS CSV LOCATION 's3://b/a.csv' OPTIONS ('aws.secret_access_key' 'hunter2');",
            "CREATE EXTERNAL TABLE t STORED AS CSV\nLOCATION 's3://b/a.csv' OPTIONS ('aws.secret_access_key'\n'hunter2');",
            "SELECT 2;",
        ] {
            prompt.remember(line);
        }
        let stored = std::fs::read_to_string(history).unwrap();
        assert!(stored.contains("SELECT 1;") && stored.contains("SELECT 2;"), "{stored}");
        assert!(!stored.contains("hunter2"), "{stored}");
    }
}
