//! The workers of a cluster: addresses in the command line, the addresses of a DNS name, or a file that may change.

use std::{fmt, path::PathBuf, str::FromStr, sync::Arc, time::Duration};

use futures::future::join_all;
use tokio::time::timeout;
use url::Url;

use super::{
    error::ClusterError,
    peers::{Peers, name_of},
    service::{Greeting, hello},
};

/// How long a worker may take to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// Where the addresses of the workers are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Workers {
    /// `HOST:PORT,HOST:PORT`
    Listed(Vec<String>),
    /// `dns:NAME:PORT`: all addresses of a name, such as that of a headless Kubernetes service.
    Dns(String),
    /// A file with a `HOST:PORT` per line, read again for every query. Empty lines, and those that begin with `#`, are
    /// skipped.
    File(PathBuf),
}

impl FromStr for Workers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(name) = text.strip_prefix("dns:") {
            return Ok(Self::Dns(host_and_port(name)?));
        }
        if let Some(file) = text.strip_prefix("file:") {
            return Ok(Self::File(file.into()));
        }
        let listed = text.split(',').map(host_and_port).collect::<Result<Vec<_>, _>>();
        match listed {
            Ok(listed) => Ok(Self::Listed(listed)),
            // A path has no port.
            Err(_) if std::path::Path::new(text).is_file() => Ok(Self::File(text.into())),
            Err(reason) => Err(reason),
        }
    }
}

impl fmt::Display for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Listed(listed) => f.write_str(&listed.join(",")),
            Self::Dns(name) => write!(f, "dns:{name}"),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

/// `HOST:PORT`, with brackets around IPv6 addresses.
fn host_and_port(text: &str) -> Result<String, String> {
    let invalid = || format!("{text:?} is not HOST:PORT, such as 10.0.0.7:50051");
    let (host, port) = text.trim().rsplit_once(':').ok_or_else(invalid)?;
    let host_is_valid = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(ipv6) => ipv6.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c)),
    };
    match port.parse::<u16>() {
        Ok(port) if host_is_valid && port > 0 => Ok(format!("{host}:{port}")),
        _ => Err(invalid()),
    }
}

/// A worker that has answered.
#[derive(Debug, Clone)]
pub(super) struct Member {
    /// Its address.
    pub(super) url: Url,
    /// Its answer.
    pub(super) greeting: Greeting,
}

impl Member {
    /// The kind of its devices, `cpu` or `cuda`, on which the bits of its vectors depend.
    fn kind(&self) -> &str {
        let device = self.greeting.devices.first().map_or("cpu", String::as_str);
        device.split(':').next().unwrap_or(device)
    }
}

/// # Errors
/// [`ClusterError::Refused`] if two workers would compute other vectors of the same text.
pub(super) fn check_same_kind(members: &[Member]) -> Result<(), ClusterError> {
    let Some((first, others)) = members.split_first() else { return Ok(()) };
    let of = |member: &Member| format!("{} in {}", member.kind(), member.greeting.precision);
    match others.iter().find(|other| of(other) != of(first)) {
        None => Ok(()),
        Some(other) => Err(ClusterError::Refused {
            worker: name_of(&other.url),
            reason: format!(
                "it computes on {} and the worker at {} on {}, with other bits; use workers of one kind for a query",
                of(other),
                name_of(&first.url),
                of(first)
            ),
        }),
    }
}

impl Workers {
    /// The addresses at the moment.
    async fn addresses(&self) -> Result<Vec<String>, ClusterError> {
        let failed = |reason: String| ClusterError::List { list: self.to_string(), reason };
        let addresses = match self {
            Self::Listed(listed) => listed.clone(),
            Self::Dns(name) => {
                let found = tokio::net::lookup_host(name.as_str()).await.map_err(|e| failed(e.to_string()))?;
                found.map(|address| address.to_string()).collect()
            }
            Self::File(path) => {
                let text = tokio::fs::read_to_string(path).await.map_err(|e| failed(e.to_string()))?;
                let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
                lines.map(host_and_port).collect::<Result<_, _>>().map_err(failed)?
            }
        };
        if addresses.is_empty() {
            return Err(failed("it has no address".to_owned()));
        }
        Ok(addresses)
    }

    /// Asks all workers at once. Each answers, or an error says why it does not.
    pub(super) async fn ask(
        &self,
        peers: &Peers,
        any_version: bool,
    ) -> Result<Vec<(Url, Result<Greeting, ClusterError>)>, ClusterError> {
        let scheme = if peers.is_encrypted() { "https" } else { "http" };
        let addresses = self.addresses().await?;
        let urls = addresses.iter().map(|address| {
            let invalid =
                |e: url::ParseError| ClusterError::List { list: self.to_string(), reason: format!("{address}: {e}") };
            Url::parse(&format!("{scheme}://{address}")).map_err(invalid)
        });
        let urls: Vec<Url> = urls.collect::<Result<_, _>>()?;
        let answers = urls.into_iter().map(|url| async move {
            let answer = timeout(ANSWER, hello(peers, &url, any_version)).await;
            let silent = || ClusterError::Lost { worker: name_of(&url), reason: "no answer within 5 s".to_owned() };
            let answer = answer.unwrap_or_else(|_| Err(silent()));
            (url, answer)
        });
        Ok(join_all(answers).await)
    }

    /// The workers that can take tasks now. Those that do not answer are left out, with a warning.
    ///
    /// # Errors
    /// [`ClusterError::Refused`] if one refuses the caller; [`ClusterError::NoWorkers`] if none is left.
    pub(super) async fn members(&self, peers: &Peers) -> Result<Arc<[Member]>, ClusterError> {
        let (mut members, mut lost): (Vec<Member>, _) = (Vec::new(), Vec::new());
        for (url, answer) in self.ask(peers, false).await? {
            match answer {
                Ok(greeting) if greeting.stopping => lost.push(format!("{} is about to end", name_of(&url))),
                // The same process under two addresses.
                Ok(greeting) if members.iter().any(|other| other.greeting.id == greeting.id) => {}
                Ok(greeting) => members.push(Member { url, greeting }),
                Err(ClusterError::Lost { worker, reason }) => lost.push(format!("{worker}: {reason}")),
                Err(refused) => return Err(refused),
            }
        }
        if members.is_empty() {
            return Err(ClusterError::NoWorkers { reasons: lost.join("; ") });
        }
        for reason in lost {
            tracing::warn!("going on without a worker: {reason}");
        }
        Ok(members.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_of_one_kind() {
        let member = |host: &str, devices: &[&str], precision: &str| Member {
            url: format!("http://{host}:1").parse().unwrap(),
            greeting: Greeting {
                version: String::new(),
                id: host.to_owned(),
                devices: devices.iter().map(|device| (*device).to_owned()).collect(),
                precision: precision.to_owned(),
                models: Vec::new(),
                tasks: 0,
                stopping: false,
            },
        };
        let checked = |members: &[Member]| check_same_kind(members).map_err(|error| error.to_string());
        let (one, two) = (member("a", &["cuda:0"], "bf16"), member("b", &["cuda:1", "cuda:2"], "bf16"));
        assert_eq!(checked(&[one.clone(), two.clone()]), Ok(()));
        let refused = checked(&[one.clone(), two, member("c", &["cpu"], "bf16")]).unwrap_err();
        assert!(refused.starts_with("the worker at c:1 refuses: it computes on cpu in bf16"), "{refused}");
        assert!(checked(&[one, member("d", &["cuda:0"], "f32")]).is_err());
    }

    #[test]
    fn lists_of_workers() {
        let parsed = |text: &str| text.parse::<Workers>();
        assert_eq!(parsed("a:1, b-2.c:65535,[::1]:3").unwrap().to_string(), "a:1,b-2.c:65535,[::1]:3");
        assert_eq!(parsed("dns:elmo.svc:50051"), Ok(Workers::Dns("elmo.svc:50051".to_owned())));
        assert_eq!(parsed("file:/etc/workers"), Ok(Workers::File("/etc/workers".into())));
        for wrong in
            ["", "a", "a:", ":1", "a:0", "a:65536", "a:1,", "a b:1", "dns:elmo", "http://a:1", "[::1:5", "::1:5"]
        {
            assert!(parsed(wrong).unwrap_err().contains("HOST:PORT"), "{wrong}");
        }
    }
}
