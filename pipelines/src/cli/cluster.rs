//! `elmo cluster`: the arguments of its processes. The cluster is in [`crate::cluster`].

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use clap::{Args, Subcommand, ValueHint};
use serde::Serialize;
use tonic::transport::{Certificate, ClientTlsConfig, Identity, ServerTlsConfig};

use super::{
    args::{Bytes, EngineArgs, block_on},
    logging, print, print_json, shutdown,
};
use crate::{
    cluster::{Address, Cluster, ClusterError, Credentials, Greeting, Worker, WorkerSettings, Workers},
    error::{Error, Exit, Result},
    stores::Stores,
};

/// Run workers, on which elmo sql --cluster and elmo embed --cluster run queries and jobs
///
/// Start a worker per machine or GPU. There is no other process: every client coordinates its own work. Workers open files and
/// models by the paths and URLs of the query, with their own credentials. All processes must have the same version.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo cluster worker --threads 2
  elmo cluster status 127.0.0.1:50051
  elmo sql --cluster 127.0.0.1:50051 -c \"SELECT elmo_embed(text) FROM 'reviews.jsonl'\"")]
pub(super) struct ClusterCommand {
    #[command(subcommand)]
    process: Process,
}

#[derive(Debug, Subcommand)]
enum Process {
    Worker(Box<WorkerArgs>),
    Status(StatusArgs),
}

/// Run a worker, which executes parts of queries and of bulk jobs for clients
///
/// Start one per machine, or one per GPU with --device. Clients connect to it, and so do the other workers. It opens files
/// and models by the paths and URLs of the query, with its own credentials. After a signal, it exits when its tasks are done.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo cluster worker --threads 2
  elmo cluster worker --bind 10.0.0.2:50051 --device cuda:1 --token-file token --tls-cert worker.pem --tls-key worker.key")]
struct WorkerArgs {
    /// Address to listen on, HOST:PORT; port 0 selects a free port
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:50051")]
    bind: Address,

    /// Memory limit for all tasks together, such as 4GB [default: none]
    ///
    /// It covers sorts, joins, groups and buffered vectors.
    #[arg(long, value_name = "SIZE")]
    memory_limit: Option<Bytes>,

    /// Do not use the network for models: use local files and the cache, or fail
    #[arg(long)]
    offline: bool,

    /// Certificate of this worker, PEM, with those between it and the certificate authority
    #[arg(long, value_name = "FILE", requires = "tls_key", value_hint = ValueHint::FilePath)]
    tls_cert: Option<PathBuf>,

    /// Key of the certificate, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert", value_hint = ValueHint::FilePath)]
    tls_key: Option<PathBuf>,

    /// Listen beyond this machine without --token-file and --tls-cert, in a network that is trusted as a whole
    #[arg(long)]
    insecure: bool,

    #[command(flatten)]
    credentials: CredentialArgs,

    #[command(flatten)]
    engine: EngineArgs,
}

/// What a process shows to workers.
#[derive(Debug, Args)]
pub(super) struct CredentialArgs {
    /// File with the token that all processes of the cluster share
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    token_file: Option<PathBuf>,

    /// Certificate authority of the workers, PEM; connections are encrypted
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    tls_ca: Option<PathBuf>,
}

impl CredentialArgs {
    /// Reads the files.
    pub(super) fn read(&self) -> Result<Credentials> {
        let token = self.token_file.as_deref().map(read_text).transpose()?;
        let token: Option<Arc<str>> = token.map(|token| token.trim().into());
        if let (Some(token), Some(file)) = (&token, &self.token_file)
            && token.is_empty()
        {
            return Err(Error::usage(
                format!("{}: the token is empty", file.display()),
                "write one, such as that of openssl rand -hex 32",
            ));
        }
        let ca = self.tls_ca.as_deref().map(|file| read_pem(file, "CERTIFICATE")).transpose()?;
        let tls = ca.map(|ca| ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca)));
        Ok(Credentials { token, tls })
    }
}

/// A file with PEM blocks, of which one has a name that ends like this.
fn read_pem(path: &Path, name: &str) -> Result<String> {
    let text = read_text(path)?;
    match text.lines().any(|line| line.starts_with("-----BEGIN ") && line.trim_end().ends_with(&format!("{name}-----")))
    {
        true => Ok(text),
        false => Err(Error::usage(
            format!("{}: has no {}", path.display(), name.to_lowercase()),
            "give a PEM file: text with -----BEGIN and -----END lines",
        )),
    }
}

fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|e| Error::io(path, e))
}

/// Show the workers of a cluster: version, devices, open models, running tasks
///
/// Exits with 5 if one does not answer.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo cluster status 10.0.0.2:50051,10.0.0.3:50051
  elmo cluster status dns:workers.elmo.svc:50051 --token-file token --tls-ca ca.pem --json")]
struct StatusArgs {
    /// The workers: HOST:PORT,HOST:PORT, dns:NAME:PORT, or a file with a HOST:PORT per line
    #[arg(value_name = "WORKERS")]
    workers: Workers,

    #[command(flatten)]
    credentials: CredentialArgs,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(command: ClusterCommand) -> Result<Exit> {
    match command.process {
        Process::Worker(args) => worker(*args),
        Process::Status(args) => status(&args),
    }
}

fn worker(args: WorkerArgs) -> Result<Exit> {
    let mut tls = None;
    if let (Some(cert), Some(key)) = (&args.tls_cert, &args.tls_key) {
        tls = Some(
            ServerTlsConfig::new()
                .identity(Identity::from_pem(read_pem(cert, "CERTIFICATE")?, read_pem(key, "PRIVATE KEY")?)),
        );
    }
    let settings = WorkerSettings {
        bind: args.bind,
        memory_limit: args.memory_limit.map(|bytes| bytes.0),
        offline: args.offline,
        engine: args.engine.settings(),
        credentials: args.credentials.read()?,
        tls,
        insecure: args.insecure,
    };
    block_on(async {
        let worker = Worker::bind(settings, &Stores::from_env())?;
        logging::note(&format!("worker at {}: ready", worker.address()));
        let (_, twice) = shutdown::asked_twice()?;
        let stop = shutdown::ended()?;
        tokio::select! {
            served = worker.serve(stop) => served?,
            () = twice => {}
        }
        Ok(Exit::Done)
    })
}

/// A worker as JSON.
#[derive(Debug, Serialize)]
struct Status<'s> {
    address: &'s str,
    #[serde(flatten)]
    greeting: Option<&'s Greeting>,
    /// Why there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl<'s> Status<'s> {
    fn new(address: &'s str, answer: &'s Result<Greeting, ClusterError>) -> Self {
        Self { address, greeting: answer.as_ref().ok(), error: answer.as_ref().err().map(ToString::to_string) }
    }
}

/// A worker as text.
fn line(address: &str, answer: &Result<Greeting, ClusterError>) -> String {
    let greeting = match answer {
        Ok(greeting) => greeting,
        Err(error) => return format!("{address}  {error}\n"),
    };
    let Greeting { version, devices, precision, models, tasks, stopping, .. } = greeting;
    let (devices, models) = (devices.join(", "), models.join(", "));
    let models = if models.is_empty() { "none" } else { &models };
    let stopping = if *stopping { ", about to end" } else { "" };
    format!("{address}  elmo {version}, {devices} ({precision}), tasks: {tasks}{stopping}, models: {models}\n")
}

fn status(args: &StatusArgs) -> Result<Exit> {
    block_on(async {
        let cluster = Cluster::new(args.workers.clone(), &args.credentials.read()?)?;
        let answers = cluster.status().await?;
        let is_lost = answers.iter().any(|(_, answer)| answer.is_err());
        match args.json {
            true => {
                print_json(&answers.iter().map(|(address, answer)| Status::new(address, answer)).collect::<Vec<_>>())?
            }
            false => print(&answers.iter().map(|(address, answer)| line(address, answer)).collect::<String>())?,
        }
        Ok(if is_lost { Exit::Storage } else { Exit::Done })
    })
}
