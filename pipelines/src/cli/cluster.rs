//! `elmo cluster`: the arguments of its processes. The cluster is in [`crate::cluster`].

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};

use super::{
    CommonArgs,
    args::{Bytes, EngineArgs, block_on, threads},
    logging, shutdown,
};
use crate::{
    cluster::{Address, ClusterError, Executor, ExecutorSettings, Scheduler},
    error::{Exit, Result},
    stores::Stores,
};

/// Run a cluster: one scheduler, and one executor per machine or GPU
///
/// Submit work with elmo sql --cluster and elmo embed --cluster. Executors open files and models by the paths and URLs
/// of the query, with their own credentials. All processes must have the same version. There is no authentication and
/// no encryption: run a cluster in a private network only.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo cluster scheduler --bind 10.0.0.1
  elmo cluster executor --scheduler 10.0.0.1 --bind 10.0.0.2 --device cuda:0
  elmo sql --cluster 10.0.0.1 -c \"SELECT id, elmo_embed(text) FROM 's3://bucket/reviews/*.parquet'\"")]
pub(super) struct ClusterCommand {
    #[command(subcommand)]
    process: Process,
}

#[derive(Debug, Subcommand)]
enum Process {
    Scheduler(SchedulerArgs),
    Executor(Box<ExecutorArgs>),
}

/// Run the scheduler, which assigns tasks to executors
///
/// The scheduler opens no models and reads no files. Executors and clients must be able to connect to it, and it to the
/// executors.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo cluster scheduler
  elmo cluster scheduler --bind 0.0.0.0:50050 --host 10.0.0.1")]
struct SchedulerArgs {
    /// Address to listen on, HOST or HOST:PORT; port 0 selects a free port
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:50050")]
    bind: Address,

    /// Host name under which executors reach the scheduler [default: the host of --bind]
    #[arg(long, value_name = "HOST")]
    host: Option<String>,
}

/// Run an executor, which runs tasks: reading, filtering, embedding, grouping
///
/// Start one per machine, or one per GPU with --device. The scheduler and the clients must be able to connect to it. It
/// keeps results until they are fetched. After a signal, it exits when its running tasks are done.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo cluster executor --threads 2
  elmo cluster executor --scheduler 10.0.0.1 --bind 10.0.0.2 --device cuda:1")]
struct ExecutorArgs {
    /// Address of the scheduler, HOST or HOST:PORT
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:50050")]
    scheduler: Address,

    /// Address to serve results on, HOST or HOST:PORT; port 0 selects a free port
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    bind: Address,

    /// Port on which the scheduler connects; 0 selects a free port
    #[arg(long, value_name = "PORT", default_value = "0")]
    control_port: u16,

    /// Host name under which others reach the executor [default: the address used to reach the scheduler]
    #[arg(long, value_name = "HOST")]
    host: Option<String>,

    /// Number of concurrent tasks; they share the devices [default: number of cores]
    #[arg(long, value_name = "N", value_parser = threads)]
    slots: Option<usize>,

    /// Folder in which to create a folder for results [default: the temporary folder]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    work_dir: Option<PathBuf>,

    /// Memory limit for all tasks together, such as 4GB [default: 70 % of the memory]
    ///
    /// It covers sorts, joins, groups and buffered vectors.
    #[arg(long, value_name = "SIZE")]
    memory_limit: Option<Bytes>,

    /// Do not use the network for models: use local files and the cache, or fail
    #[arg(long)]
    offline: bool,

    #[command(flatten)]
    engine: EngineArgs,
}

pub(super) fn run(command: ClusterCommand, common: &CommonArgs) -> Result<Exit> {
    match command.process {
        Process::Scheduler(args) => scheduler(&args, common),
        Process::Executor(args) => executor(*args, common),
    }
}

fn scheduler(args: &SchedulerArgs, _: &CommonArgs) -> Result<Exit> {
    block_on(async {
        let stop = shutdown::ended()?;
        let scheduler = Scheduler::bind(&args.bind, args.host.as_deref()).await?;
        logging::note(&format!("scheduler at {}: ready", scheduler.address()));
        tokio::select! {
            served = scheduler.serve() => served?,
            () = stop => {}
        }
        Ok(Exit::Done)
    })
}

fn executor(args: ExecutorArgs, _: &CommonArgs) -> Result<Exit> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    block_on(async {
        let slots = args.slots.unwrap_or(cores);
        let settings = ExecutorSettings {
            scheduler: args.scheduler,
            bind: args.bind,
            control_port: args.control_port,
            host: args.host,
            slots,
            work_dir: args.work_dir,
            memory_limit: args.memory_limit.map(|bytes| bytes.0.get() as u64),
            offline: args.offline,
            engine: args.engine.settings(),
        };
        let executor = Executor::new(settings, &Stores::from_env())?;
        let address = executor.address();
        let ready = || logging::note(&format!("executor at {address}: ready, slots: {slots}"));
        // No task is running yet, so a signal ends the process.
        tokio::select! {
            registered = executor.wait_for_scheduler() => registered?,
            () = shutdown::ended()? => return Ok(Exit::Done),
        }
        // Ballista handles signals itself: after the first, running tasks end.
        let (asked, twice) = shutdown::asked_twice()?;
        tokio::select! {
            served = executor.serve(ready) => served?,
            () = twice => return Ok(Exit::Interrupted),
        }
        match asked() {
            true => Ok(Exit::Done),
            false => Err(ClusterError::Evicted { executor: address.to_string() }.into()),
        }
    })
}
