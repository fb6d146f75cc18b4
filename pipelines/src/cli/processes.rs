//! Starts the processes of a training run on one machine, one for each GPU, and ends them together.
//!
//! Each of them is this program with the same arguments, and with the variables that torchrun sets. They are in process groups
//! of their own: Ctrl-C of a terminal reaches this process alone, which passes it on once.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    io::{self, BufRead, BufReader, Read},
    net::Ipv4Addr,
    os::{
        fd::AsRawFd,
        unix::process::{CommandExt, ExitStatusExt},
    },
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::Duration,
};

use elmo::train::{LISTENER, Meeting, RUN};
use tokio::{net::TcpSocket, sync::mpsc, time::sleep};

use super::shutdown::{Request, Requests};
use crate::{
    error::{Error, Exit, Result},
    train::TrainFault,
};

/// How long the others may take to end by themselves when one has failed. They look for those that are missing for two seconds,
/// and process 0 waits as long for the others.
const GRACE: Duration = Duration::from_secs(8);

/// Where the processes compute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Places {
    /// So many processes on the CPU.
    Cpu(usize),
    /// One process for each of these GPUs.
    Gpus(Vec<usize>),
}

impl Places {
    /// Number of processes.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Cpu(processes) => *processes,
            Self::Gpus(gpus) => gpus.len(),
        }
    }
}

/// Refuses a command that each of several processes would repeat.
///
/// # Errors
/// [`Error::Usage`] when this is one of several, also where variables are missing that a run would need.
pub(super) fn refuse(command: &str) -> Result<()> {
    let found = match Meeting::from_env(|name| env::var(name).ok()) {
        Ok(None) => return Ok(()),
        Ok(Some(Meeting { rank, size, .. })) => format!("the environment says that this is process {rank} of {size}"),
        // A run would need more variables than the number of the process and that of all processes.
        Err(error) if is_one_of_several(&|name| env::var(name).ok()) => {
            format!("the environment is that of one of several: {error}")
        }
        // One of these alone is of other use.
        Err(_) => return Ok(()),
    };
    Err(Error::usage(
        format!("elmo {command} is one process, but {found}"),
        format!(
            "start it once: several GPUs of a machine are given as --device cuda:0,1; in a script that torchrun or srun has \
             started, env -u RANK -u WORLD_SIZE -u SLURM_PROCID elmo {command}"
        ),
    ))
}

/// Whether a launcher has numbered this process among others.
fn is_one_of_several(variable: &dyn Fn(&str) -> Option<String>) -> bool {
    let number = |name: &str| variable(name)?.parse::<usize>().ok();
    [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")]
        .into_iter()
        .any(|(rank, size)| number(rank).is_some() && number(size).is_some_and(|size| size > 1))
}

/// How a process has ended.
struct Ended {
    rank: usize,
    status: ExitStatus,
}

/// Runs the processes until all have ended.
///
/// # Errors
/// [`TrainFault::Killed`] when one was killed; [`Error::Failed`] when the system refuses one. A process that fails by itself
/// has said why.
pub(super) fn run(places: &Places) -> Result<Exit> {
    let failed = |e: io::Error| Error::Failed(format!("cannot start the processes of the run: {e}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    // Before the first process, so that no signal is lost.
    let requests = {
        let _entered = runtime.enter();
        Requests::listen()?
    };
    // Kept until process 0 has it, so that no other program can take the port.
    let socket = free_port().map_err(failed)?;
    let (send, ended) = mpsc::unbounded_channel();
    let mut running = BTreeMap::new();
    let token = uuid::Uuid::new_v4().to_string();
    for rank in 0..places.len() {
        let started = start(places, rank, &socket, &token).and_then(|child| {
            running.insert(rank, child.id());
            watch(rank, child, &send)
        });
        if let Err(error) = started {
            kill(&running, libc::SIGKILL);
            return Err(failed(error));
        }
    }
    drop(socket);
    let (asked, killed, first) = (false, BTreeSet::new(), Vec::new());
    runtime.block_on(Supervisor { running, ended, requests, asked, killed, first }.run())
}

/// A socket with a port of its own, at which nothing listens yet: those that come too early try again.
fn free_port() -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.bind((Ipv4Addr::LOCALHOST, 0).into())?;
    Ok(socket)
}

fn start(places: &Places, rank: usize, socket: &TcpSocket, token: &str) -> io::Result<Child> {
    let mut command = Command::new(env::current_exe()?);
    command.args(env::args_os().skip(1)).stdin(Stdio::null()).process_group(0);
    let size = places.len().to_string();
    for (name, value) in [
        ("RANK", rank.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("WORLD_SIZE", size.clone()),
        ("LOCAL_WORLD_SIZE", size),
        ("MASTER_ADDR", "127.0.0.1".to_owned()),
        ("MASTER_PORT", socket.local_addr()?.port().to_string()),
        (RUN, token.to_owned()),
    ] {
        command.env(name, value);
    }
    for name in ["TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"] {
        command.env_remove(name);
    }
    // libtorch's own messages repeat our errors, with addresses of its code.
    if env::var_os("TORCH_CPP_LOG_LEVEL").is_none() {
        command.env("TORCH_CPP_LOG_LEVEL", "FATAL");
    }
    if let Places::Gpus(gpus) = places {
        command.env("CUDA_VISIBLE_DEVICES", visible(gpus[rank], env::var("CUDA_VISIBLE_DEVICES").ok().as_deref()));
    }
    if rank > 0 {
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        // Process 0 warns for all.
        if env::var_os("ELMO_LOG").is_none_or(|filter| filter.is_empty()) {
            command.env("ELMO_LOG", "error");
        }
    }
    if rank == 0 {
        leave(socket, &mut command);
    }
    #[cfg(target_os = "linux")]
    let parent = std::process::id() as libc::pid_t;
    #[cfg(target_os = "linux")]
    // SAFETY: `prctl` and `getppid` may be called between fork and exec. The parent is the main thread, which lives as long as the
    // run.
    unsafe {
        command.pre_exec(move || match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            // A parent that ended before the call sends no signal.
            0 if libc::getppid() == parent => Ok(()),
            0 => Err(io::ErrorKind::NotConnected.into()),
            _ => Err(io::Error::last_os_error()),
        });
    }
    command.spawn()
}

/// Leaves a socket open in a process.
fn leave(socket: &TcpSocket, command: &mut Command) {
    let number = socket.as_raw_fd();
    command.env(LISTENER, number.to_string());
    // SAFETY: `fcntl` may be called between fork and exec. The socket is open until the process was started.
    unsafe {
        command.pre_exec(move || match libc::fcntl(number, libc::F_SETFD, 0) {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
}

/// GPU `number` of those that this process sees, as `CUDA_VISIBLE_DEVICES` names it.
fn visible(number: usize, own: Option<&str>) -> String {
    let named = own.and_then(|own| own.split(',').nth(number)).map(str::trim).filter(|name| !name.is_empty());
    named.map_or_else(|| number.to_string(), str::to_owned)
}

/// Waits for a process in a thread of its own, and passes its messages on.
fn watch(rank: usize, mut child: Child, send: &mpsc::UnboundedSender<(usize, Child)>) -> io::Result<()> {
    let send = send.clone();
    let messages = child
        .stderr
        .take()
        .map(|stderr| thread::Builder::new().name("elmo messages".to_owned()).spawn(move || prefixed(rank, stderr)));
    let messages = messages.transpose()?;
    thread::Builder::new().name("elmo process".to_owned()).spawn(move || {
        wait_for_end(child.id());
        if let Some(messages) = messages {
            let _ = messages.join(); // it does not panic
        }
        let _ = send.send((rank, child)); // received until the last one has ended
    })?;
    Ok(())
}

/// Waits until a process has ended, and leaves its status and its number where they are: a signal for it still finds nobody else.
fn wait_for_end(pid: u32) {
    // SAFETY: all zeros are a valid value of the plain structure, which the call writes.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    loop {
        // SAFETY: as above.
        let outcome = unsafe { libc::waitid(libc::P_PID, pid, &mut info, libc::WEXITED | libc::WNOWAIT) };
        if outcome == 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return;
        }
    }
}

/// Writes the lines of a process with its number.
fn prefixed(rank: usize, stderr: impl Read) {
    let mut lines = BufReader::new(stderr);
    let mut line = Vec::new();
    while lines.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end_matches('\n');
        match text.strip_prefix('{') {
            Some(rest) => super::logging::write_stderr(&format!("{{\"rank\":{rank},{rest}\n")),
            None => super::logging::write_stderr(&format!("process {rank}: {text}\n")),
        }
        line.clear();
    }
}

fn kill(running: &BTreeMap<usize, u32>, signal: libc::c_int) {
    for &pid in running.values() {
        // SAFETY: a child whose status was not taken, so that its number is not that of another process.
        unsafe { libc::kill(pid as libc::pid_t, signal) };
    }
}

/// The processes, and what has happened.
struct Supervisor {
    /// Process numbers by rank.
    running: BTreeMap<usize, u32>,
    ended: mpsc::UnboundedReceiver<(usize, Child)>,
    requests: Requests,
    /// A signal was passed on.
    asked: bool,
    /// Those that were ended here, because another one has failed or the user did not want to wait.
    killed: BTreeSet<usize>,
    /// Those that have ended, in order.
    first: Vec<Ended>,
}

impl Supervisor {
    async fn run(mut self) -> Result<Exit> {
        while !self.running.is_empty() {
            // One that was interrupted alone leaves the others waiting.
            let is_missing = |ended: &Ended| !is_good(ended.status) || (is_interrupted(ended.status) && !self.asked);
            let has_failed = self.first.iter().any(is_missing);
            tokio::select! {
                ended = self.ended.recv() => match ended {
                    Some((rank, mut child)) => {
                        self.running.remove(&rank);
                        let status = child.wait().unwrap_or_else(|_| ExitStatus::from_raw(libc::SIGKILL));
                        self.first.push(Ended { rank, status });
                    }
                    None => break,
                },
                request = self.requests.next() => self.pass_on(request),
                () = sleep(GRACE), if has_failed => self.end_all(),
            }
        }
        outcome(&self.first, &self.killed, self.asked)
    }

    /// The first signal asks all processes to end, and the second one ends them.
    fn pass_on(&mut self, request: Request) {
        match (self.asked, request) {
            (true, Request::Hangup) => {}
            (true, _) => self.kill_all(),
            (false, Request::Interrupt) => kill(&self.running, libc::SIGINT),
            (false, _) => kill(&self.running, libc::SIGTERM),
        }
        self.asked = true;
    }

    /// Ends those that do not notice that another one has failed.
    fn end_all(&mut self) {
        for rank in self.running.keys().filter(|rank| !self.killed.contains(rank)) {
            tracing::error!("process {rank} does not answer, and is ended");
        }
        self.kill_all();
    }

    fn kill_all(&mut self) {
        kill(&self.running, libc::SIGKILL);
        self.killed.extend(self.running.keys());
    }
}

/// Whether a process has done what it should: also when it was interrupted.
fn is_good(status: ExitStatus) -> bool {
    let good = [Exit::Done, Exit::Rejected, Exit::Interrupted];
    good.iter().any(|exit| status.code() == Some(*exit as i32))
}

fn is_interrupted(status: ExitStatus) -> bool {
    status.code() == Some(Exit::Interrupted as i32)
}

/// How the run has ended. What another program killed is the cause, then what failed with a code of its own, then what failed
/// first. Processes that were ended here (`ours`) are no cause, and neither are those that a signal reached before they could
/// listen to it.
fn outcome(all: &[Ended], ours: &BTreeSet<usize>, asked: bool) -> Result<Exit> {
    let is_asked = |ended: &Ended| asked && matches!(ended.status.signal(), Some(libc::SIGINT | libc::SIGTERM));
    let is_cause = |ended: &&Ended| !is_good(ended.status) && !ours.contains(&ended.rank) && !is_asked(ended);
    let failed = || all.iter().filter(is_cause);
    if let Some((rank, signal)) = failed().find_map(|ended| Some((ended.rank, ended.status.signal()?))) {
        return Err(TrainFault::Killed { rank, signal }.into());
    }
    let of = |ended: &Ended| ended.status.code().and_then(Exit::of_code).unwrap_or(Exit::Failed);
    let is_interruption = all.iter().any(|ended| is_interrupted(ended.status));
    if is_interruption && failed().all(|ended| of(ended) == Exit::Failed) {
        // One that a signal has ended before its first step was missed by the others.
        return Ok(Exit::Interrupted);
    }
    let with_code = failed().find(|ended| ended.status.code() != Some(Exit::Failed as i32));
    if let Some(cause) = with_code.or_else(|| failed().next()) {
        return Ok(of(cause));
    }
    if !ours.is_empty() || all.iter().any(|ended| is_interrupted(ended.status) || is_asked(ended)) {
        return Ok(Exit::Interrupted);
    }
    Ok(all.iter().find(|ended| ended.rank == 0).map_or(Exit::Failed, of))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(rank: usize, raw: i32) -> Ended {
        Ended { rank, status: ExitStatus::from_raw(raw) }
    }

    /// By hand; an exit code is in the second byte of a status of wait(2), a signal in the first.
    #[test]
    fn the_cause_of_an_end_is_the_first_failure_that_is_no_consequence() {
        let exit = |all: &[Ended]| outcome(all, &BTreeSet::new(), false).unwrap();
        assert_eq!(exit(&[ended(1, 0), ended(0, 0)]), Exit::Done);
        assert_eq!(exit(&[ended(1, 6 << 8), ended(0, 6 << 8)]), Exit::Rejected);
        assert_eq!(exit(&[ended(1, 130 << 8), ended(0, 130 << 8)]), Exit::Interrupted);
        assert_eq!(exit(&[ended(0, 1 << 8), ended(1, 3 << 8), ended(2, 1 << 8)]), Exit::Input);
        assert_eq!(exit(&[ended(0, 1 << 8), ended(1, 0)]), Exit::Failed);
        let all = [ended(0, 1 << 8), ended(2, libc::SIGKILL)];
        let error = outcome(&all, &BTreeSet::new(), false).unwrap_err().to_string();
        assert!(error.contains("process 2") && error.contains("signal 9"), "{error}");
    }

    /// Those that were ended here do not hide the one that failed, nor that the user did not want to wait.
    #[test]
    fn what_was_ended_here_is_no_cause() {
        let full_disk = [ended(0, 5 << 8), ended(1, libc::SIGKILL)];
        assert_eq!(outcome(&full_disk, &[1].into(), false).unwrap(), Exit::Storage);
        let impatient = [ended(0, libc::SIGKILL), ended(1, libc::SIGKILL)];
        assert_eq!(outcome(&impatient, &[0, 1].into(), true).unwrap(), Exit::Interrupted);
        let early = [ended(0, libc::SIGINT), ended(1, libc::SIGINT)];
        assert_eq!(outcome(&early, &BTreeSet::new(), true).unwrap(), Exit::Interrupted);
        assert!(outcome(&early, &BTreeSet::new(), false).is_err());
        let alone = [ended(1, 130 << 8), ended(0, libc::SIGKILL)];
        assert_eq!(outcome(&alone, &[0].into(), false).unwrap(), Exit::Interrupted);
        let missed = [ended(1, 130 << 8), ended(0, 1 << 8), ended(2, 1 << 8)];
        assert_eq!(outcome(&missed, &BTreeSet::new(), false).unwrap(), Exit::Interrupted);
        let full_disk = [ended(1, 130 << 8), ended(0, 5 << 8)];
        assert_eq!(outcome(&full_disk, &BTreeSet::new(), false).unwrap(), Exit::Storage);
    }

    /// As the system says it.
    #[test]
    fn a_port_is_kept_and_nothing_listens_there_yet() {
        let socket = free_port().unwrap();
        let address = socket.local_addr().unwrap();
        let taken = std::net::TcpListener::bind(address).unwrap_err();
        let early = std::net::TcpStream::connect(address).unwrap_err();
        assert_eq!((taken.kind(), early.kind()), (io::ErrorKind::AddrInUse, io::ErrorKind::ConnectionRefused));
    }

    #[test]
    fn a_process_sees_one_gpu() {
        assert_eq!(visible(1, None), "1");
        assert_eq!(visible(1, Some("4, 6,7")), "6");
        assert_eq!(visible(0, Some("GPU-8a, GPU-9b")), "GPU-8a");
        assert_eq!(visible(0, Some("")), "0");
    }
}
