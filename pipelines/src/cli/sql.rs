//! `elmo sql`: its arguments, and the loop of the shell. Queries run in [`crate::sql`].

use std::{
    io::{self, IsTerminal},
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
    time::{Duration, Instant},
};

use clap::{Args, ValueHint};
use elmo::mix::ScalarMix;
use elmo_udfs::Statement;

use super::{
    CommonArgs,
    args::{Bytes, EngineArgs, ModelArgs, block_on, one_of, positive},
    embed::read_mix,
    logging,
    shutdown::{self, Signals},
};
#[cfg(feature = "cluster")]
use crate::cluster::{Address, Cluster};
use crate::{
    error::{Error, Exit, Result},
    models::ModelSpec,
    report::{Progress, Silent, count},
    sql::{Answer, COMMANDS, Command, Format, Remote, Repl, Settings, Show, Sql, SqlError, Typed, default_history},
    stores::{INTERACTIVE_RETRY_FOR, RETRY_FOR, Stores},
};

/// Query files with SQL: embed, compare and average texts in place
///
/// The SQL is that of Apache DataFusion with the functions elmo_embed, elmo_tokens, elmo_word, elmo_similarity and
/// others (SELECT * FROM elmo_functions()). Files, folders, patterns and URLs are tables. A query embeds each text
/// once, and only where its vector is needed: ORDER BY id LIMIT 10 embeds ten texts. Without -c and -f, it is an
/// interactive shell on a terminal, and otherwise runs the statements on standard input.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo sql -c \"SELECT id, elmo_embed(text) FROM 'reviews.jsonl' ORDER BY id DESC LIMIT 3\"
  elmo sql -c \"COPY (SELECT id, elmo_embed(text) AS embedding FROM 'reviews.jsonl') TO 'v.parquet'\"
  elmo sql --format csv -c \"SELECT id, elmo_similarity(text, 'Too slow.') FROM 'reviews.jsonl'\"

The default model is tiny. Name another one with --model, and further ones with --add-model.")]
pub(super) struct SqlArgs {
    /// Run these statements and exit; may be repeated
    #[arg(short, long, value_name = "SQL", conflicts_with = "file")]
    command: Vec<String>,

    /// Run the statements in a file (- is standard input) and exit; may be repeated
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    file: Vec<PathBuf>,

    /// Format of results
    ///
    /// table shows the first rows for people; the other formats write all rows. arrow and parquet allow one result
    /// only.
    #[arg(long, value_name = "FORMAT", default_value = "table", value_parser = one_of::<Format>(Format::WORDS))]
    format: Format,

    /// Maximum number of rows of a table, after which the query is cancelled
    #[arg(long, value_name = "N", default_value = "100", value_parser = positive)]
    max_rows: usize,

    /// Memory limit, such as 512MB or 4GB [default: none]
    ///
    /// It covers sorts, joins, groups and buffered vectors. Operators that exceed it spill to disk if they can.
    #[arg(long, value_name = "SIZE")]
    memory_limit: Option<Bytes>,

    /// Add a model that SQL can name: elmo_embed(text, model => 'NAME'); may be repeated
    #[arg(long, value_name = "NAME=MODEL")]
    add_model: Vec<NamedModel>,

    /// Add a scalar mix that SQL can name: elmo_embed(text, layers => 'NAME'); may be repeated
    ///
    /// FILE is a JSON file as for elmo embed --layers. layers => 'mix' is the mix.json in the folder of the model.
    #[arg(long, value_name = "NAME=FILE")]
    add_mix: Vec<NamedMix>,

    /// Run queries on the cluster of the scheduler at HOST:PORT [default: run in this process]
    ///
    /// This process still writes the results.
    #[cfg(feature = "cluster")]
    #[arg(long, value_name = "SCHEDULER")]
    cluster: Option<Address>,

    /// History file of the shell, or none [default: elmo/sql_history in the user's state folder]
    ///
    /// Lines with passwords, SAS tokens or signed URLs are not stored.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    history: Option<PathBuf>,

    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    engine: EngineArgs,
}

/// A model and its name in SQL.
#[derive(Debug, Clone)]
struct NamedModel {
    name: String,
    spec: ModelSpec,
}

impl FromStr for NamedModel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, model) = text
            .split_once('=')
            .filter(|(name, model)| !name.is_empty() && !model.is_empty())
            .ok_or("it must be NAME=MODEL, such as de=models/german")?;
        let spec = model.parse().map_err(|e: crate::models::ModelsError| e.to_string())?;
        Ok(Self { name: name.to_owned(), spec })
    }
}

/// The file of a scalar mix and its name in SQL.
#[derive(Debug, Clone)]
struct NamedMix {
    name: String,
    file: String,
}

impl FromStr for NamedMix {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        let (name, file) = text
            .split_once('=')
            .filter(|(name, file)| !name.is_empty() && !file.is_empty())
            .ok_or("it must be NAME=FILE, such as sentiment=mixes/sentiment.json")?;
        Ok(Self { name: name.to_owned(), file: file.to_owned() })
    }
}

impl SqlArgs {
    /// The models by name, the default model first.
    fn models(&self) -> Result<Vec<(String, ModelSpec)>> {
        let default = self.model.spec_if_given().cloned().unwrap_or(ModelSpec::Tiny);
        let mut models = vec![(default.name(), default)];
        for NamedModel { name, spec } in &self.add_model {
            if models.iter().any(|(known, _)| known == name) {
                return Err(Error::usage(format!("two models are named {name}"), "give one of them another name"));
            }
            models.push((name.clone(), spec.clone()));
        }
        if models.iter().all(|(name, _)| name != "tiny") {
            models.push(("tiny".to_owned(), ModelSpec::Tiny));
        }
        Ok(models)
    }

    /// The scalar mixes by name.
    fn mixes(&self) -> Result<Vec<(String, ScalarMix)>> {
        let named = self.add_mix.iter();
        named.map(|NamedMix { name, file }| Ok((name.clone(), read_mix("--add-mix", file)?))).collect()
    }

    #[cfg(feature = "cluster")]
    fn remote(&self) -> Option<Arc<dyn Remote>> {
        self.cluster.clone().map(|address| Arc::new(Cluster::new(address)) as _)
    }

    #[cfg(not(feature = "cluster"))]
    fn remote(&self) -> Option<Arc<dyn Remote>> {
        None
    }

    fn show(&self) -> Show {
        Show { format: self.format, max_rows: self.max_rows }
    }

    /// The statements to run; `None` for the shell.
    fn texts(&self) -> Result<Option<Vec<Text>>> {
        if !self.command.is_empty() {
            let given = self.command.iter().map(|sql| Text { sql: sql.clone(), file: None });
            return Ok(Some(given.collect()));
        }
        if !self.file.is_empty() {
            return self.file.iter().map(|file| Text::read(file)).collect::<Result<_>>().map(Some);
        }
        match io::stdin().is_terminal() {
            true => Ok(None),
            false => Ok(Some(vec![Text::read(Path::new("-"))?])),
        }
    }
}

/// Statements, and the file that contains them.
struct Text {
    sql: String,
    file: Option<String>,
}

impl Text {
    /// Reads a file; `-` is standard input.
    fn read(path: &Path) -> Result<Self> {
        let (read, file) = match path.as_os_str() == "-" {
            true => (io::read_to_string(io::stdin()), "standard input".to_owned()),
            false => (std::fs::read_to_string(path), path.display().to_string()),
        };
        let text = read.map_err(|e| Error::usage(format!("{file}: {e}"), "give SQL statements, in UTF-8"))?;
        // Editors on Windows write a byte order mark.
        let sql = text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text);
        Ok(Self { sql, file: Some(file) })
    }

    fn parse(&self, sql: &Sql) -> Result<Vec<Statement>> {
        sql.parse(&self.sql).map_err(|error| match (error, &self.file) {
            (error, Some(file)) => {
                let (message, exit, help) = (format!("{file}: {error}"), error.exit(), error.help());
                SqlError { message, exit, help }.into()
            }
            (error, None) => error,
        })
    }
}

pub(super) fn run(args: &SqlArgs, common: &CommonArgs) -> Result<Exit> {
    let (models, mixes) = (args.models()?, args.mixes()?);
    if args.format.is_binary() && io::stdout().is_terminal() {
        return Err(Error::usage(
            "this format cannot be shown on a terminal",
            "redirect it to a file: elmo sql … > result.parquet",
        ));
    }
    let texts = args.texts()?;
    let ended = block_on(async {
        let settings = Settings {
            models,
            mixes,
            offline: args.model.offline(),
            engine: args.engine.settings(),
            remote: args.remote(),
            memory_limit: args.memory_limit.map(|bytes| bytes.0),
        };
        // At the prompt a person waits for the answer.
        let budget = if texts.is_none() { INTERACTIVE_RETRY_FOR } else { RETRY_FOR };
        let stores = Stores::from_env().retrying_for(budget);
        let (sql, signals) = (Sql::new(settings, &stores)?, Signals::listen(texts.is_none())?);
        let mut shell = Shell { sql, common, show: args.show(), signals };
        match texts {
            Some(texts) => shell.script(&texts).await.map(|()| Exit::Done),
            None => shell.talk(args.history.clone()).await.map(|()| Exit::Done),
        }
    });
    if let Err(error @ Error::Stopped) = &ended {
        logging::report(error, common);
        shutdown::leave(error.exit() as u8);
    }
    ended
}

/// How long a cancelled statement may take to remove its incomplete files.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(5);

/// Waits until all tasks have ended. Blocks, because all threads that could wake a task may be busy.
fn wait_for_cleanup() {
    let tasks = tokio::runtime::Handle::current().metrics();
    let began = Instant::now();
    while tasks.num_alive_tasks() > 0 && began.elapsed() < CLEANUP_TIMEOUT {
        std::thread::sleep(Duration::from_millis(10));
    }
    // Tasks remove files on other threads, which may outlive them.
    std::thread::sleep(Duration::from_millis(100));
}

struct Shell<'a> {
    sql: Sql,
    common: &'a CommonArgs,
    show: Show,
    signals: Signals,
}

impl Shell<'_> {
    /// Runs statements up to the first error. All texts are parsed before the first statement runs.
    async fn script(&mut self, texts: &[Text]) -> Result<()> {
        let parsed = texts.iter().map(|text| text.parse(&self.sql)).collect::<Result<Vec<_>>>()?;
        let statements: Vec<_> = parsed.into_iter().flatten().collect();
        if statements.is_empty() {
            return Err(Error::usage("there is no statement", "give one: -c 'SELECT 1'"));
        }
        let mut results = 0;
        for statement in statements {
            if self.show.format.is_binary() && results == 1 {
                return Err(Error::usage("this format allows one result only", "run one query at a time, or use COPY"));
            }
            let answer = self.one(statement).await?;
            results += usize::from(answer.rows.is_some());
            self.note_rest(answer);
        }
        Ok(())
    }

    /// Runs one statement until it ends or is cancelled.
    async fn one(&mut self, statement: Statement) -> Result<Answer> {
        // A progress bar would be mixed with the rows.
        let rows_here = io::stdout().is_terminal() && self.show.format != Format::Table;
        // The progress of a cluster is not known here.
        let progress: Arc<dyn Progress> =
            if rows_here || self.sql.is_on_cluster() { Arc::new(Silent) } else { self.common.progress().into() };
        let (sql, show, task_progress) = (self.sql.clone(), self.show, Arc::clone(&progress));
        self.signals.begin();
        // A task of its own, because fetching a model and running a function block.
        let mut running = tokio::spawn(async move {
            let out = Box::new(io::BufWriter::new(io::stdout()));
            sql.run(statement, show, task_progress.as_ref(), out).await
        });
        let ended = tokio::select! {
            ended = &mut running => ended.unwrap_or_else(|e| Err(Error::Failed(format!("the statement failed: {e}")))),
            () = self.signals.cancelled() => {
                match self.sql.stop() {
                    true => running.abort(),
                    // Too late to cancel: the statement reports what it has done.
                    false => if let Ok(Err(error)) = (&mut running).await {
                        logging::report(&error, self.common);
                    },
                }
                wait_for_cleanup();
                Err(Error::Stopped)
            }
        };
        progress.finish();
        if self.signals.end() {
            logging::report(&Error::Stopped, self.common);
            shutdown::leave(Exit::Interrupted as u8);
        }
        ended
    }

    fn note_rest(&self, answer: Answer) {
        if answer.more {
            let rows = count(self.show.max_rows as u64);
            logging::note(&format!(
                "only the first {rows} rows are shown; use --max-rows for more, or another --format for all"
            ));
        }
    }

    /// The shell: an error ends a statement, not the session.
    async fn talk(mut self, history: Option<PathBuf>) -> Result<()> {
        let history = match history {
            Some(path) if path.as_os_str() == "none" => None,
            path => path.or_else(default_history),
        };
        let mut repl = Repl::new(history)?;
        logging::note(concat!("elmo ", env!("CARGO_PKG_VERSION"), ": SQL with ELMo; \\? for help, \\q to quit"));
        loop {
            let names = self.sql.names().await;
            // Reading blocks this thread until a line is typed.
            let typed = tokio::task::block_in_place(|| repl.read(names));
            let ended = match typed {
                Ok(Typed::End) => return Ok(()),
                Ok(Typed::Nothing) => Ok(()),
                Ok(Typed::Sql(sql)) => self.answer(&Text { sql, file: None }).await,
                Ok(Typed::Command(command)) => self.obey(command).await,
                Err(error @ Error::Usage { .. }) => Err(error),
                Err(error) => return Err(error),
            };
            match ended {
                Err(Error::BrokenPipe) => return Err(Error::BrokenPipe),
                Err(error) => logging::report(&error, self.common),
                Ok(()) => {}
            }
        }
    }

    async fn obey(&mut self, command: Command) -> Result<()> {
        match command {
            Command::Help => super::print(COMMANDS),
            Command::Format(format) => {
                self.show.format = format;
                Ok(())
            }
            Command::File(file) => self.answer(&Text::read(Path::new(&file))?).await,
            Command::Sql(sql) => self.answer(&Text { sql, file: None }).await,
        }
    }

    async fn answer(&mut self, text: &Text) -> Result<()> {
        for statement in text.parse(&self.sql)? {
            let started = Instant::now();
            let answer = self.one(statement).await?;
            let seconds = started.elapsed().as_secs_f64();
            match answer.rows {
                Some(_) if answer.more => self.note_rest(answer),
                Some(1) => logging::note(&format!("1 row, {seconds:.2} s")),
                Some(rows) => logging::note(&format!("{} rows, {seconds:.2} s", count(rows))),
                None => logging::note(&format!("done, {seconds:.2} s")),
            }
        }
        Ok(())
    }
}
