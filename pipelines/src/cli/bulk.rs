//! What the commands of bulk jobs share: the options of the output, and how a job is run and reported. The job is in
//! [`crate::bulk`].

use std::{sync::Arc, time::Duration};

use clap::{ArgAction, Args, ValueHint, builder::BoolishValueParser};

use super::{
    CommonArgs,
    args::{block_on, one_of, positive},
    inputs::InputArgs,
    print, print_json, shutdown,
};
use crate::{
    bulk::{self, BulkJob, BulkReport, Units, dry_run::dry_run},
    error::{Error, Exit, Result},
    redact::redact,
    report::{bytes, count, table},
    sink::Codec,
    stage::Stage,
    stores::Stores,
};

/// Where a job writes, and how.
#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
pub(super) struct OutputArgs {
    /// Folder for the Parquet files, a path or URL
    #[arg(short, long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    output: Option<String>,

    /// Input rows per file [default: about 128 MiB before compression]
    ///
    /// Files are durable as a whole, so a crash loses the rows that are computed and in no published file: those of the file that is being
    /// filled, of rows in flight, and of complete files that wait to be published, up to three of the default size. With --cluster, these
    /// are up to four for each unit.
    #[arg(long, value_name = "N", value_parser = positive)]
    rows_per_file: Option<usize>,

    /// Size of a row group in MiB before compression
    ///
    /// Larger row groups compress better, smaller ones need less memory to read.
    #[arg(long, value_name = "N", default_value = "64", value_parser = positive, hide_short_help = true)]
    row_group_mb: usize,

    /// Compression codec
    #[arg(long, value_name = "CODEC", default_value = "zstd", value_parser = one_of::<Codec>(Codec::WORDS))]
    compression: Codec,

    /// Delete the output of an earlier job and start again
    ///
    /// --overwrite=false resumes, overriding the environment and elmo.toml.
    #[arg(long, value_name = "BOOL", action = ArgAction::Set, hide_possible_values = true, num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true", hide_default_value = true, value_parser = BoolishValueParser::new())]
    overwrite: bool,

    /// Before resuming, compare the SHA-256 of every file with the manifest, and rewrite damaged files
    ///
    /// Without it, only the sizes are compared.
    #[arg(long)]
    check: bool,

    /// Read the inputs and print an estimate of rows, tokens, size and time; write nothing
    #[arg(short = 'n', long)]
    dry_run: bool,

    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

/// How long an interrupted job waits for devices: about the time of the largest published model for a batch on a few
/// cores.
const GRACE_PERIOD: Duration = Duration::from_secs(30);

impl OutputArgs {
    /// The job; `example` is a command line for messages.
    pub(super) fn job(&self, input: &InputArgs, window_rows: usize, example: &str) -> Result<BulkJob> {
        let inputs = input.inputs(example)?;
        let help = format!("for example: {example}; or set ELMO_OUTPUT, or output in elmo.toml");
        let output = self.output.clone().ok_or_else(|| Error::usage("no output was given", help))?;
        Ok(BulkJob {
            inputs,
            reading: input.reading(),
            limit: input.limit(),
            output,
            column: input.column.clone(),
            id: input.id.clone(),
            keep: input.keep.clone(),
            types: input.types,
            infer_rows: input.infer_rows,
            rows_per_file: self.rows_per_file.map(|rows| rows as u64),
            row_group_bytes: (self.row_group_mb as u64).saturating_mul(1 << 20),
            codec: self.compression,
            window_rows,
            overwrite: self.overwrite,
            check: self.check,
            grace: GRACE_PERIOD,
        })
    }
}

/// Who computes the columns of a job.
pub(super) struct Computing {
    /// Describes the columns, and computes them unless `units` do.
    pub(super) stage: Arc<dyn Stage>,
    /// Other processes that compute whole parts.
    pub(super) units: Option<Arc<dyn Units>>,
}

impl From<Arc<dyn Stage>> for Computing {
    fn from(stage: Arc<dyn Stage>) -> Self {
        Self { stage, units: None }
    }
}

/// Runs a job, or tries it, and prints its report.
pub(super) fn run(
    job: &BulkJob,
    args: &OutputArgs,
    common: &CommonArgs,
    computing: impl AsyncFnOnce(&Stores) -> Result<Computing>,
) -> Result<Exit> {
    let progress = common.progress();
    let outcome = block_on(async {
        let stop = shutdown::requested("the current rows are durable")?;
        let stores = Stores::from_env();
        let Computing { stage, units } = computing(&stores).await?;
        if args.dry_run {
            let plan = dry_run(job, stage.as_ref(), &stores).await?;
            match args.json {
                true => print_json(&plan)?,
                false => print(&plan.to_string())?,
            }
            return Ok(None);
        }
        bulk::run_by(job, stage.as_ref(), units.as_deref(), &stores, stop, progress.as_ref()).await.map(Some)
    });
    // The job did not begin if there was an error before, or for a dry run.
    progress.finish();
    match outcome {
        Ok(None) => Ok(Exit::Done),
        Ok(Some(report)) => {
            let printed = if args.json { print_json(&report) } else { print(&text(&report)) };
            let rejected = report.counts.errors + report.counts.malformed;
            let exit = if rejected > 0 { Exit::Rejected } else { Exit::Done };
            match printed {
                // The reader of the report is gone, but the exit code still tells whether rows were rejected.
                Err(Error::BrokenPipe) => Ok(exit),
                printed => printed.map(|()| exit),
            }
        }
        Err(error @ Error::Interrupted { again: true, begun, .. }) => {
            let args = std::env::args_os().map(|arg| arg.to_string_lossy().into_owned());
            let command = shutdown::resume_command(args, job.overwrite && begun);
            // A redacted command would not work.
            if redact(&command) == command {
                super::logging::note(&format!("to resume: {command}"));
            }
            Err(error)
        }
        Err(error) => Err(error),
    }
}

fn text(report: &BulkReport) -> String {
    let counts = &report.counts;
    let mut rows = vec![
        ("output", report.output.clone()),
        ("files", format!("{}, {}", count(report.parts as u64), bytes(report.bytes))),
        ("rows in", count(counts.rows_in)),
        ("rows out", count(counts.rows_out)),
        ("tokens", count(counts.tokens)),
    ];
    let more = [
        ("NULL texts", counts.nulls),
        ("empty texts", counts.empty),
        ("truncated rows", counts.truncated),
        ("rows with an error", counts.errors),
        ("rows skipped", counts.skipped),
        ("malformed rows", counts.malformed),
        ("rows resumed", report.resumed_rows),
        ("files left out", report.files_left_out),
    ];
    rows.extend(more.into_iter().filter(|(_, n)| *n > 0).map(|(name, n)| (name, count(n))));
    rows.extend(report.malformed_rows.iter().map(|place| ("  at", place.clone())));
    if report.resumed_rows < counts.rows_in {
        let time = format!("{:.1} s, {} tokens/s", report.seconds, count(report.tokens_per_second as u64));
        rows.push(("time", time));
    }
    table(&rows)
}
