//! `elmo cluster`: the processes of a cluster.

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

/// Run the processes of a cluster: one scheduler, and an executor per machine or GPU
///
/// Queries come from elmo sql --cluster and elmo embed --cluster. Executors read files and models by the paths and URLs
/// of the query, with credentials of their own; all processes must be of one version. Nobody is asked who they are: whoever
/// reaches a port may run queries, so use a network of your own.
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

/// Give the parts of queries to executors
///
/// It opens no model and reads no file. Executors and clients must reach it, and it the executors.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo cluster scheduler
  elmo cluster scheduler --bind 0.0.0.0:50050 --host 10.0.0.1")]
struct SchedulerArgs {
    /// Where to listen, HOST or HOST:PORT; port 0 takes any that is free
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:50050")]
    bind: Address,

    /// What executors call this machine [default: the host of --bind]
    #[arg(long, value_name = "HOST")]
    host: Option<String>,
}

/// Run parts of queries: read, filter, embed, group
///
/// One per machine, or one per GPU with --device. The scheduler, the other executors and the clients must reach it. It
/// keeps results until they are fetched, and ends after the tasks at hand when it is told to stop.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo cluster executor --threads 2
  elmo cluster executor --scheduler 10.0.0.1 --bind 10.0.0.2 --device cuda:1")]
struct ExecutorArgs {
    /// The scheduler, HOST or HOST:PORT
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:50050")]
    scheduler: Address,

    /// Where to hand out results, HOST or HOST:PORT; port 0 takes any that is free
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    bind: Address,

    /// The port where the scheduler gives tasks; 0 takes any that is free
    #[arg(long, value_name = "PORT", default_value = "0")]
    control_port: u16,

    /// What others call this machine [default: the address from which the scheduler is reached]
    #[arg(long, value_name = "HOST")]
    host: Option<String>,

    /// Parts of queries to work on at once; they share the devices [default: as many as cores]
    #[arg(long, value_name = "N", value_parser = threads)]
    slots: Option<usize>,

    /// Folder where it makes one of its own for results, until they are fetched [default: that of temporary files]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    work_dir: Option<PathBuf>,

    /// Memory for sorts, joins, groups and vectors on their way, such as 4GB, shared by the slots [default: 70 % of what
    /// there is]
    #[arg(long, value_name = "SIZE")]
    memory_limit: Option<Bytes>,

    /// Never open a socket for a model: use what is on this machine and in the cache, or fail
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
        // As long as there is nothing to finish, a signal ends it.
        tokio::select! {
            there = executor.wait_for_scheduler() => there?,
            () = shutdown::ended()? => return Ok(Exit::Done),
        }
        // Ballista listens for signals itself: the first lets tasks at hand end.
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
