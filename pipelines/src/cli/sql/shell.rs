//! The loop of the shell: an error or Ctrl-C ends a statement, not the session.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use elmo_udfs::Statement;
use parking_lot::Mutex;

use super::{
    super::logging,
    Script,
    session::{Session, stdout},
};
use crate::{
    error::{Error, Result},
    models::ModelSpec,
    redact::redact,
    report::count,
    sql::{
        Command, Format, FunctionHelp, Input, Outcome, OutputOptions, Prompt, Screen, ShellSettings, default_history,
        help, page,
    },
};

/// Width of explanations if stdout is not a terminal.
const DEFAULT_COLUMNS: usize = 100;

/// A session at the prompt.
pub(super) struct Shell<'a> {
    session: Session<'a>,
    settings: ShellSettings,
}

impl<'a> Shell<'a> {
    pub(super) fn new(session: Session<'a>, settings: ShellSettings) -> Self {
        Self { session, settings }
    }

    /// Reads and runs inputs until the user leaves. `model` is the default model, for the first line.
    pub(super) async fn run(mut self, history: Option<PathBuf>, model: &ModelSpec) -> Result<()> {
        let history = match history {
            Some(path) if path.as_os_str() == "none" => None,
            path => path.or_else(default_history),
        };
        let mut prompt = Prompt::new(history)?;
        let version = env!("CARGO_PKG_VERSION");
        logging::note(&format!("elmo {version}: SQL with ELMo, model {model}; \\? for help, \\q to quit"));
        loop {
            let names = self.session.sql.names().await;
            // Reading blocks this thread until a line is typed.
            let ended = match tokio::task::block_in_place(|| prompt.read(names)) {
                Ok(Input::Exit | Input::Command(Command::Quit)) => return Ok(()),
                Ok(Input::Empty) => Ok(()),
                Ok(Input::Sql(sql)) => self.execute_all(&Script { sql, file: None }).await,
                Ok(Input::Command(command)) => self.run_command(command).await,
                Err(error @ Error::Usage { .. }) => Err(error),
                Err(error) => return Err(error),
            };
            match ended {
                Err(Error::BrokenPipe) => return Err(Error::BrokenPipe),
                Err(error) => logging::report(&error, self.session.common),
                Ok(()) => {}
            }
        }
    }

    async fn run_command(&mut self, command: Command) -> Result<()> {
        match command {
            // The loop has ended.
            Command::Quit => Ok(()),
            Command::Help => self.page(&help()),
            Command::Tables => self.tables().await,
            Command::Functions(name) => self.functions(name.as_deref()).await,
            Command::Settings => self.page(&self.settings.list()),
            Command::Set { name, value } => {
                logging::note(&self.settings.set(&name, value.as_deref())?);
                Ok(())
            }
            Command::File(file) => self.execute_all(&Script::read(Path::new(&file))?).await,
            Command::Sql(sql) => self.execute_all(&Script { sql, file: None }).await,
        }
    }

    /// Lists the tables of the user, without DataFusion's own views.
    async fn tables(&mut self) -> Result<()> {
        if self.session.sql.names().await.has_no_table() {
            logging::note("there are no tables yet; files are tables: SELECT * FROM 'reviews.parquet' LIMIT 3;");
            return Ok(());
        }
        let sql = "SELECT CASE table_schema WHEN 'public' THEN table_name ELSE table_schema || '.' || table_name END \
                   AS name, CASE table_type WHEN 'VIEW' THEN 'view' ELSE 'table' END AS kind \
                   FROM information_schema.tables WHERE table_schema <> 'information_schema' ORDER BY name";
        self.execute_all(&Script { sql: sql.to_owned(), file: None }).await
    }

    async fn functions(&mut self, name: Option<&str>) -> Result<()> {
        let columns = Screen::of_stdout().map_or(DEFAULT_COLUMNS, |screen| screen.columns);
        match self.session.sql.function_help(name, columns)? {
            FunctionHelp::One(text) => self.page(&text),
            FunctionHelp::Several(sql) => self.execute_all(&Script { sql, file: None }).await,
        }
    }

    fn page(&self, text: &str) -> Result<()> {
        page(redact(text).as_bytes(), self.settings.pager)
    }

    async fn execute_all(&mut self, text: &Script) -> Result<()> {
        for statement in text.parse(&self.session.sql)? {
            let started = Instant::now();
            let (outcome, table) = self.execute(statement).await?;
            let seconds = started.elapsed().as_secs_f64();
            page(&table, self.settings.pager)?;
            self.note(outcome, seconds);
        }
        Ok(())
    }

    /// Runs a statement. A table is returned, because a pager has to run after the statement: Ctrl-C then belongs to
    /// the pager. Other formats are printed row by row.
    async fn execute(&mut self, statement: Statement) -> Result<(Outcome, Vec<u8>)> {
        let ShellSettings { expanded, format, max_rows, .. } = self.settings;
        let width = Screen::of_stdout().map(|screen| screen.columns);
        let options = OutputOptions { format, max_rows, expanded, width };
        let buffer = Buffer::default();
        let out = if format == Format::Table { Box::new(buffer.clone()) } else { stdout() };
        let outcome = self.session.execute(statement, options, out).await?;
        let table = std::mem::take(&mut *buffer.0.lock());
        Ok((outcome, table))
    }

    /// Notes the number of rows, the duration, and what the table does not show.
    fn note(&self, outcome: Outcome, seconds: f64) {
        let time = if self.settings.timing { format!(", {seconds:.2} s") } else { String::new() };
        logging::note(&match outcome.rows {
            Some(_) if outcome.truncated => {
                let rows = count(self.settings.max_rows as u64);
                format!("only the first {rows} rows are shown{time}; \\set max_rows N shows more, \\f csv all")
            }
            Some(1) => format!("1 row{time}"),
            Some(rows) => format!("{} rows{time}", count(rows)),
            None => format!("done{time}"),
        });
        if outcome.hidden_columns > 0 {
            let columns = count(outcome.hidden_columns as u64);
            logging::note(&format!("columns that do not fit the terminal: {columns}; \\x shows all"));
        }
    }
}

/// An output in memory.
#[derive(Debug, Clone, Default)]
struct Buffer(Arc<Mutex<Vec<u8>>>);

impl Write for Buffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
