//! Polls the workers of a query every second: for its progress, and to detect a worker that hangs.
//!
//! A worker answers on its compute runtime. HTTP/2 pings are answered by another runtime, so they do not detect a deadlock there.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use datafusion::{
    common::{DataFusionError, runtime::SpawnedTask},
    physical_plan::metrics::{ExecutionPlanMetricsSet, Gauge, MetricBuilder},
};
use futures::{StreamExt, future::join_all, stream};
use tokio::time::timeout;
use url::Url;

use super::{
    cluster_exec::Rows,
    error::ClusterError,
    live::{Embedded, QueryId},
    peers::{Peers, name_of},
    service::{SILENCE, progress},
};
use crate::error::Error;

/// Polling interval.
const INTERVAL: Duration = Duration::from_secs(1);
/// Timeout of one poll.
const ANSWER: Duration = Duration::from_secs(10);

/// The workers that run tasks of a query.
pub(super) type Used = Arc<Mutex<BTreeSet<Url>>>;

/// See the module.
#[derive(Debug, Clone)]
pub(super) struct Watch {
    peers: Arc<Peers>,
    /// Rows embedded, tokens, and tokens with padding, of all workers; `None` if only hangs are to be detected.
    counts: Option<[Gauge; 3]>,
}

/// One execution of a query that is polled.
pub(super) struct Watching {
    watch: Watch,
    query: QueryId,
    used: Used,
}

impl Watch {
    /// Reports the progress in `metrics`, if given.
    pub(super) fn new(peers: &Arc<Peers>, metrics: Option<&ExecutionPlanMetricsSet>) -> Self {
        let gauge = |metrics, name| MetricBuilder::new(metrics).global_gauge(name);
        let counts =
            metrics.map(|metrics| ["rows_embedded", "tokens", "padded_tokens"].map(|name| gauge(metrics, name)));
        Self { peers: Arc::clone(peers), counts }
    }

    pub(super) fn begin(&self, query: QueryId) -> Watching {
        Watching { watch: self.clone(), query, used: Used::default() }
    }

    fn show(&self, embedded: Embedded) {
        let Some(counts) = &self.counts else { return };
        let values = [embedded.rows, embedded.tokens, embedded.padded_tokens];
        for (gauge, value) in counts.iter().zip(values) {
            gauge.set_max(usize::try_from(value).unwrap_or(usize::MAX));
        }
    }
}

impl Watching {
    pub(super) fn workers(&self) -> Used {
        Arc::clone(&self.used)
    }

    /// Passes `rows` through; ends with [`ClusterError::Lost`] if a worker hangs.
    pub(super) fn over(self, rows: Rows) -> Rows {
        let (peers, query, used) = (Arc::clone(&self.watch.peers), self.query, self.workers());
        let (last, lost) = (self.watch.clone(), SpawnedTask::spawn(self.lost()));
        let next = |(mut rows, mut lost): (Rows, Option<SpawnedTask<ClusterError>>)| async move {
            let ended = async {
                match &mut lost {
                    Some(lost) => lost.await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                row = rows.next() => Some((row?, (rows, lost))),
                ended = ended => {
                    let error = ended.map_or_else(
                        |panic| DataFusionError::ExecutionJoin(Box::new(panic)),
                        |lost| DataFusionError::External(Box::new(Error::from(lost))),
                    );
                    Some((Err(error), (stream::empty().boxed(), None)))
                }
            }
        };
        let rows = stream::unfold((rows, Some(lost)), next).fuse();
        if last.counts.is_none() {
            return rows.boxed();
        }
        // A last poll: the final counts.
        let end = async move {
            let used: Vec<Url> = used.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect();
            let answers = join_all(used.iter().map(|url| timeout(INTERVAL, progress(&peers, url, query)))).await;
            last.show(sum(answers.into_iter().filter_map(|answer| answer.ok()?.ok())));
        };
        rows.chain(stream::once(end).filter_map(async |()| None)).boxed()
    }

    /// Polls until a worker has not answered for [`SILENCE`].
    async fn lost(self) -> ClusterError {
        let mut answered: HashMap<Url, (Instant, Embedded)> = HashMap::new();
        loop {
            tokio::time::sleep(INTERVAL).await;
            let used: Vec<Url> = self.used.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect();
            let ask =
                async |url: Url| (url.clone(), timeout(ANSWER, progress(&self.watch.peers, &url, self.query)).await);
            for (url, answer) in join_all(used.into_iter().map(ask)).await {
                let now = Instant::now();
                let known = answered.entry(url.clone()).or_insert((now, Embedded::default()));
                match answer {
                    Ok(Ok(embedded)) => *known = (now, embedded),
                    // Not connected: the worker may have finished its tasks and exited. If not, reading its rows fails.
                    Ok(Err(_)) => known.0 = now,
                    Err(_) if now - known.0 > SILENCE => {
                        let reason = "no message for a minute".to_owned();
                        return ClusterError::Lost { worker: name_of(&url), reason };
                    }
                    Err(_) => {}
                }
            }
            self.watch.show(sum(answered.values().map(|(_, embedded)| *embedded)));
        }
    }
}

fn sum(all: impl Iterator<Item = Embedded>) -> Embedded {
    all.fold(Embedded::default(), |mut sum, embedded| {
        sum += embedded;
        sum
    })
}
