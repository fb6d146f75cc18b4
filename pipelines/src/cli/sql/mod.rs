//! `elmo sql`: its arguments. Queries run in [`crate::sql`].

mod session;
mod shell;

use std::{
    io::{self, IsTerminal},
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
};

use clap::{Args, ValueHint};
use elmo::BuiltIn;
use elmo_udfs::Statement;

use self::{session::Session, shell::Shell};
#[cfg(feature = "cluster")]
use super::cluster::CredentialArgs;
use super::{
    CommonArgs,
    args::{Bytes, EngineArgs, ModelArgs, block_on, one_of, positive},
    logging,
    mixes::{NamedMix, read_mixes},
    shutdown::{self, Signals},
};
#[cfg(feature = "cluster")]
use crate::cluster::{Cluster, Workers};
use crate::{
    error::{Error, Exit, Result},
    models::ModelSpec,
    sql::{Expanded, Format, OutputOptions, Remote, Screen, Settings, ShellSettings, Sql, SqlError},
    stores::{INTERACTIVE_RETRY_FOR, RETRY_FOR, Stores},
};

/// Query files with SQL, and embed, compare and average their texts
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

The default model is books. Name another one with --model, and further ones with --add-model.")]
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

    /// Maximum number of rows that --format table shows; the query is then cancelled
    #[arg(long, value_name = "N", default_value = "100", value_parser = positive)]
    max_rows: usize,

    /// Memory limit, such as 512MB or 4GB [default: none]
    ///
    /// It covers what sorts, joins, groups, embeddings, the cache of vectors and writers hold, not the model. Operators
    /// that exceed it spill to disk if they can.
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

    /// Run queries on workers: HOST:PORT,HOST:PORT, dns:NAME:PORT, or a file with a HOST:PORT per line [default: in this process]
    ///
    /// They read the tables, and write the files of COPY and INSERT, by the same paths and URLs as this process.
    #[cfg(feature = "cluster")]
    #[arg(long, value_name = "WORKERS")]
    cluster: Option<Workers>,

    #[cfg(feature = "cluster")]
    #[command(flatten)]
    credentials: CredentialArgs,

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

impl SqlArgs {
    /// The models by name, the default model first.
    fn models(&self) -> Result<Vec<(String, ModelSpec)>> {
        let default = self.model.spec_if_given().cloned().unwrap_or_default();
        let mut models = vec![(default.name(), default)];
        for NamedModel { name, spec } in &self.add_model {
            if models.iter().any(|(known, _)| known == name) {
                return Err(Error::usage(format!("two models are named {name}"), "give one of them another name"));
            }
            models.push((name.clone(), spec.clone()));
        }
        for model in BuiltIn::ALL {
            if models.iter().all(|(name, _)| name != model.name()) {
                models.push((model.name().to_owned(), ModelSpec::BuiltIn(model)));
            }
        }
        Ok(models)
    }

    #[cfg(feature = "cluster")]
    fn remote(&self) -> Result<Option<Arc<dyn Remote>>> {
        let Some(workers) = &self.cluster else { return Ok(None) };
        Ok(Some(Arc::new(Cluster::new(workers.clone(), &self.credentials.read()?)?)))
    }

    #[cfg(not(feature = "cluster"))]
    fn remote(&self) -> Result<Option<Arc<dyn Remote>>> {
        Ok(None)
    }

    fn output(&self) -> OutputOptions {
        let width = Screen::of_stdout().map(|screen| screen.columns);
        OutputOptions { format: self.format, max_rows: self.max_rows, expanded: Expanded::Off, width }
    }

    /// The statements to run; `None` for the shell.
    fn scripts(&self) -> Result<Option<Vec<Script>>> {
        if !self.command.is_empty() {
            let given = self.command.iter().map(|sql| Script { sql: sql.clone(), file: None });
            return Ok(Some(given.collect()));
        }
        if !self.file.is_empty() {
            return self.file.iter().map(|file| Script::read(file)).collect::<Result<_>>().map(Some);
        }
        match io::stdin().is_terminal() {
            true => Ok(None),
            false => Ok(Some(vec![Script::read(Path::new("-"))?])),
        }
    }
}

/// Statements, and the file that contains them.
struct Script {
    sql: String,
    file: Option<String>,
}

impl Script {
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

/// Makes the allocator return freed blocks of 1 MiB or more to the operating system at once. By default glibc raises this
/// threshold to 32 MiB, and keeps freed blocks of vectors in the heaps of its threads.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn return_freed_memory() {
    const BLOCK_BYTES: libc::c_int = 1 << 20;
    // SAFETY: both settings take any number, and no other thread runs yet.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, BLOCK_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 2 * BLOCK_BYTES);
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn return_freed_memory() {}

pub(super) fn run(args: &SqlArgs, common: &CommonArgs) -> Result<Exit> {
    let (models, mixes) = (args.models()?, read_mixes(&args.add_mix)?);
    if args.format.is_binary() && io::stdout().is_terminal() {
        return Err(Error::usage(
            "this format cannot be shown on a terminal",
            "redirect it to a file: elmo sql … > result.parquet",
        ));
    }
    let scripts = args.scripts()?;
    if args.memory_limit.is_some() {
        return_freed_memory();
    }
    let ended = block_on(async {
        let settings = Settings {
            models,
            mixes,
            offline: args.model.offline(),
            engine: args.engine.settings(),
            remote: args.remote()?,
            memory_limit: args.memory_limit.map(|bytes| bytes.0),
        };
        // At the prompt a user waits for the result.
        let budget = if scripts.is_none() { INTERACTIVE_RETRY_FOR } else { RETRY_FOR };
        let stores = Stores::from_env().retrying_for(budget);
        let (sql, signals) = (Sql::new(settings, &stores)?, Signals::listen(scripts.is_none())?);
        let mut session = Session { sql, common, signals };
        match scripts {
            Some(scripts) => session.run_script(&scripts, args.output()).await?,
            None => {
                let shell = Shell::new(session, ShellSettings::new(args.format, args.max_rows));
                shell.run(args.history.clone(), &args.model.spec()).await?
            }
        }
        Ok(Exit::Done)
    });
    if let Err(error @ Error::Stopped) = &ended {
        logging::report(error, common);
        shutdown::leave(error.exit() as u8);
    }
    ended
}
