//! Runs statements until they end or are cancelled, and scripts of them.

use std::{
    io::{self, IsTerminal},
    sync::Arc,
    time::{Duration, Instant},
};

use elmo_udfs::Statement;

use super::{
    super::{CommonArgs, logging, shutdown},
    Script,
};
use crate::{
    cli::shutdown::Signals,
    error::{Error, Exit, Result},
    report::{Progress, Silent, count},
    sql::{Format, Out, Outcome, OutputOptions, Sql},
};

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

/// Stdout as the output of a statement.
pub(super) fn stdout() -> Out {
    Box::new(io::BufWriter::new(io::stdout()))
}

/// A SQL session that reacts to signals.
pub(super) struct Session<'a> {
    pub(super) sql: Sql,
    pub(super) common: &'a CommonArgs,
    pub(super) signals: Signals,
}

impl Session<'_> {
    /// Runs statements up to the first error. All scripts are parsed before the first statement runs.
    pub(super) async fn run_script(&mut self, scripts: &[Script], options: OutputOptions) -> Result<()> {
        let parsed = scripts.iter().map(|script| script.parse(&self.sql)).collect::<Result<Vec<_>>>()?;
        let statements: Vec<_> = parsed.into_iter().flatten().collect();
        if statements.is_empty() {
            return Err(Error::usage("there is no statement", "give one: -c 'SELECT 1'"));
        }
        let mut results = 0;
        for statement in statements {
            if options.format.is_binary() && results == 1 {
                return Err(Error::usage("this format allows one result only", "run one query at a time, or use COPY"));
            }
            let outcome = self.execute(statement, options, stdout()).await?;
            results += usize::from(outcome.rows.is_some());
            report_truncation(outcome, options);
        }
        Ok(())
    }

    /// Runs one statement until it ends or is cancelled.
    pub(super) async fn execute(&mut self, statement: Statement, options: OutputOptions, out: Out) -> Result<Outcome> {
        // A progress bar would be mixed with the rows.
        let rows_here = io::stdout().is_terminal() && options.format != Format::Table;
        let progress: Arc<dyn Progress> = if rows_here { Arc::new(Silent) } else { self.common.progress().into() };
        let (sql, task_progress) = (self.sql.clone(), Arc::clone(&progress));
        self.signals.begin();
        // A task of its own, because fetching a model and running a function block.
        let mut running = tokio::spawn(async move { sql.run(statement, options, task_progress.as_ref(), out).await });
        let ended = tokio::select! {
            ended = &mut running => ended.unwrap_or_else(|e| Err(Error::Failed(format!("the statement failed: {e}")))),
            () = self.signals.cancelled() => {
                progress.finish();
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
}

/// Notes what a table of a script does not show.
fn report_truncation(outcome: Outcome, options: OutputOptions) {
    if outcome.truncated {
        let rows = count(options.max_rows as u64);
        logging::note(&format!(
            "only the first {rows} rows are shown; use --max-rows for more, or another --format for all"
        ));
    }
    if outcome.hidden_columns > 0 {
        let columns = count(outcome.hidden_columns as u64);
        logging::note(&format!("columns that do not fit the terminal: {columns}; another --format writes all"));
    }
}
