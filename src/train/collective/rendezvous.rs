//! Where the processes of a run meet, as torchrun, Kubernetes and Slurm say it.

#[cfg(elmo_c10d)]
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

use thiserror::Error;

/// The port that PyTorch uses when none is given.
const PORT: u16 = 29_500;
/// A number that processes on one machine have in common when `elmo train` has started them.
pub const RUN: &str = "ELMO_RUN";
/// The number of a socket that listens at the port already, which `elmo train` leaves to process 0.
pub const LISTENER: &str = "ELMO_LISTENER";

/// The variables are not those of a run of several processes.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum MeetingError {
    /// A variable is not what it should be.
    #[error("the environment variable {name} is {value:?}, and should be {should}")]
    Value {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it should be.
        should: String,
    },
    /// A variable is missing.
    #[error("the environment variable {name} is not set, but {because}")]
    Missing {
        /// The variable.
        name: &'static str,
        /// Why it is needed.
        because: String,
    },
}

impl MeetingError {
    /// What to do.
    pub fn help(&self) -> &'static str {
        match self {
            Self::Missing { name: "MASTER_ADDR", .. } => {
                "give all processes MASTER_ADDR, the name of the machine of process 0, and MASTER_PORT, a free port there"
            }
            _ => {
                "each process of a run needs RANK (its number, from 0), WORLD_SIZE (how many there are), MASTER_ADDR and \
                 MASTER_PORT: torchrun sets them, srun its own; for a run of one process, unset RANK and WORLD_SIZE"
            }
        }
    }
}

/// One process of a run of several, and where they meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meeting {
    /// Number of this process, from 0.
    pub rank: usize,
    /// Processes of the run.
    pub size: usize,
    /// Number of this process on its machine, from 0, if it was given.
    pub local_rank: Option<usize>,
    /// Processes on this machine, if that is known.
    pub local_size: Option<usize>,
    /// Machine of process 0.
    pub host: String,
    /// Port of the key-value store there.
    pub port: u16,
    /// A socket that listens there, so that no other program can take the port.
    pub listener: Option<i32>,
    /// The store runs already, in the agent of torchrun; otherwise process 0 opens it.
    pub has_store: bool,
    /// Tells the keys of this run in the store from those of others, and of its earlier attempts.
    pub run: String,
}

impl Meeting {
    /// Reads `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, or those of Slurm;
    /// `None` when the process was started alone.
    ///
    /// # Errors
    /// [`MeetingError`].
    pub fn from_env(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, MeetingError> {
        let variable = |name: &'static str| variable(name).filter(|value| !value.is_empty());
        let number = |name: &'static str| -> Result<Option<usize>, MeetingError> {
            let parse = |value: String| match value.parse() {
                Ok(number) => Ok(number),
                Err(_) => Err(MeetingError::Value { name, value, should: "a whole number".to_owned() }),
            };
            variable(name).map(parse).transpose()
        };
        let is_slurm = variable("RANK").is_none() && variable("SLURM_PROCID").is_some();
        let (rank, local_rank) = if is_slurm { ("SLURM_PROCID", "SLURM_LOCALID") } else { ("RANK", "LOCAL_RANK") };
        let size = match is_slurm {
            // Of the step that `srun` has started. The script of `sbatch` has the tasks of the whole job, and is one process.
            true => number("SLURM_STEP_NUM_TASKS")?,
            false => number("WORLD_SIZE")?,
        };
        let wrong = |name, value: usize, should: String| MeetingError::Value { name, value: value.to_string(), should };
        let (this, size) = match (number(rank)?, size) {
            (None, None | Some(1)) => return Ok(None),
            (Some(_), None) if is_slurm => return Ok(None),
            (Some(this), Some(size)) => (this, size),
            (None, Some(size)) => {
                let because = format!("WORLD_SIZE is {size}");
                return Err(MeetingError::Missing { name: "RANK", because });
            }
            (Some(this), None) => {
                let because = format!("RANK is {this}");
                return Err(MeetingError::Missing { name: "WORLD_SIZE", because });
            }
        };
        if size == 0 {
            let name = if is_slurm { "SLURM_STEP_NUM_TASKS" } else { "WORLD_SIZE" };
            return Err(wrong(name, size, "the number of processes, at least 1".to_owned()));
        }
        if this >= size {
            return Err(wrong(rank, this, format!("below the number of processes, {size}")));
        }
        if size == 1 {
            return Ok(None);
        }
        let (own, local_size) = (number(local_rank)?, number("LOCAL_WORLD_SIZE")?);
        if let Some((own, local_size)) = own.zip(local_size).filter(|(own, size)| own >= size) {
            return Err(wrong(local_rank, own, format!("below LOCAL_WORLD_SIZE, {local_size}")));
        }
        let port = match variable("MASTER_PORT") {
            None => PORT,
            Some(value) => match value.parse() {
                Ok(port) if port > 0 => port,
                _ => {
                    let should = "the number of a port, 1 to 65535".to_owned();
                    return Err(MeetingError::Value { name: "MASTER_PORT", value, should });
                }
            },
        };
        let one_node = ["SLURM_STEP_NUM_NODES", "SLURM_NNODES"].into_iter().find_map(variable) == Some("1".to_owned());
        let host = match variable("MASTER_ADDR") {
            Some(host) => host,
            None if is_slurm && one_node => "127.0.0.1".to_owned(),
            None => {
                let because = format!("this is process {this} of {size}, and it must find process 0");
                return Err(MeetingError::Missing { name: "MASTER_ADDR", because });
            }
        };
        // Processes of another run that come to the same port find none of these keys.
        let names = ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", RUN];
        let run: Vec<String> = names.into_iter().filter_map(variable).collect();
        Ok(Some(Self {
            rank: this,
            size,
            local_rank: own,
            local_size,
            host,
            port,
            listener: variable(LISTENER).and_then(|number| number.parse().ok()),
            has_store: variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True"),
            run: format!("elmo/{}", run.join("/")),
        }))
    }

    /// Whether this process opens the key-value store.
    #[cfg(elmo_c10d)]
    pub(super) fn is_server(&self) -> bool {
        self.rank == 0 && !self.has_store
    }

    /// The address of this machine on the network that leads to process 0.
    ///
    /// # Errors
    /// When there is no way to process 0, or its name stands for this machine alone although others have processes.
    #[cfg(elmo_c10d)]
    pub(super) fn own_address(&self) -> std::io::Result<String> {
        let own = route((self.host.as_str(), self.port).to_socket_addrs()?.next())?;
        let is_alone =
            self.local_size == Some(self.size) || self.host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
        if own.is_loopback() && !is_alone && self.local_size.is_some() {
            let reason = format!("on this machine, {} is {own}, which other machines cannot reach", self.host);
            return Err(std::io::Error::other(reason));
        }
        Ok(own.to_string())
    }
}

/// The name of this machine.
#[cfg(elmo_c10d)]
pub(super) fn host_name() -> String {
    let mut name = [0_u8; 256];
    // SAFETY: the buffer has one byte more than may be written, so that the name ends with a NUL.
    let code = unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(0);
    match code {
        0 if end > 0 => String::from_utf8_lossy(&name[..end]).into_owned(),
        _ => "a machine without a name".to_owned(),
    }
}

/// The own address of a connection to another one. Sends nothing: the system only chooses a route.
#[cfg(elmo_c10d)]
fn route(to: Option<SocketAddr>) -> std::io::Result<IpAddr> {
    let to = to.ok_or_else(|| std::io::Error::other("the name has no address"))?;
    let any = if to.is_ipv6() { IpAddr::from(Ipv6Addr::UNSPECIFIED) } else { Ipv4Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(to)?;
    Ok(socket.local_addr()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<Meeting>, MeetingError> {
        Meeting::from_env(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
    }

    /// The variables are those that the documents of torchrun and of Slurm list.
    #[test]
    fn torchrun_and_slurm_say_who_a_process_is() {
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&[("WORLD_SIZE", "1"), ("RANK", "0"), ("MASTER_ADDR", "a")]), Ok(None));
        let torchrun = [
            ("RANK", "5"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("MASTER_ADDR", "node-0"),
            ("MASTER_PORT", "1234"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCHELASTIC_RESTART_COUNT", "2"),
            ("TORCHELASTIC_RUN_ID", "job"),
        ];
        let expected = Meeting {
            rank: 5,
            size: 8,
            local_rank: Some(1),
            local_size: Some(4),
            host: "node-0".to_owned(),
            port: 1234,
            listener: None,
            has_store: true,
            run: "elmo/job/2".to_owned(),
        };
        assert_eq!(read(&torchrun), Ok(Some(expected)));
        let slurm =
            [("SLURM_PROCID", "3"), ("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_LOCALID", "3"), ("SLURM_NNODES", "1")];
        let found = read(&slurm).unwrap().unwrap();
        assert_eq!((found.rank, found.size, found.local_rank, found.host.as_str()), (3, 4, Some(3), "127.0.0.1"));
        assert_eq!((found.port, found.has_store), (29_500, false));
        // A script of `sbatch` runs a single task of a job that may have more.
        assert_eq!(read(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_NNODES", "2")]), Ok(None));
    }

    #[test]
    fn variables_that_contradict_each_other_are_named() {
        let text = |variables: &[(&str, &str)]| read(variables).unwrap_err().to_string();
        assert!(text(&[("WORLD_SIZE", "2")]).contains("RANK is not set, but WORLD_SIZE is 2"));
        assert!(text(&[("RANK", "1")]).contains("WORLD_SIZE is not set"));
        assert!(text(&[("RANK", "x"), ("WORLD_SIZE", "2")]).contains("RANK is \"x\""));
        assert!(text(&[("RANK", "2"), ("WORLD_SIZE", "2")]).contains("below the number of processes, 2"));
        assert!(text(&[("RANK", "1"), ("WORLD_SIZE", "1")]).contains("below the number of processes, 1"));
        assert!(text(&[("RANK", "0"), ("WORLD_SIZE", "0")]).contains("WORLD_SIZE is \"0\""));
        assert!(text(&[("RANK", "-1"), ("WORLD_SIZE", "2")]).contains("RANK is \"-1\""));
        let local = [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "2")];
        assert!(text(&local).contains("LOCAL_RANK is \"2\", and should be below LOCAL_WORLD_SIZE, 2"));
        assert!(text(&[("RANK", "1"), ("WORLD_SIZE", "2")]).contains("MASTER_ADDR is not set"));
        let port = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "99999")];
        assert!(text(&port).contains("MASTER_PORT is \"99999\""));
        let slurm = [("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_NNODES", "2")];
        assert!(text(&slurm).contains("MASTER_ADDR is not set, but this is process 1 of 2"));
        for (variables, help) in [(&slurm[..], "the machine of process 0"), (&[("WORLD_SIZE", "2")], "unset RANK")] {
            assert!(read(variables).unwrap_err().help().contains(help));
        }
    }
}
