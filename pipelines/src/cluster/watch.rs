//! How a query goes on that workers run: asks each of them once a second.
//!
//! A worker answers on the threads that compute. So one whose threads stand still is taken for lost, though it answers the pings
//! of HTTP/2.

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

/// Interval of the questions.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long an answer may take, until the question is asked again.
const ANSWER: Duration = Duration::from_secs(10);

/// The workers that have a task of a query.
pub(super) type Used = Arc<Mutex<BTreeSet<Url>>>;

/// See the module.
#[derive(Debug, Clone)]
pub(super) struct Watch {
    peers: Arc<Peers>,
    /// Rows and tokens that the workers have embedded, and tokens with padding; if somebody wants to know.
    counts: Option<[Gauge; 3]>,
}

/// A query that is watched.
pub(super) struct Watching {
    watch: Watch,
    query: QueryId,
    used: Used,
}

impl Watch {
    /// Writes the progress to `metrics`, if there are any.
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

    /// The rows of the query, or the error that a worker was lost.
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
        // What was embedded since the last question.
        let end = async move {
            let used: Vec<Url> = used.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect();
            let answers = join_all(used.iter().map(|url| timeout(INTERVAL, progress(&peers, url, query)))).await;
            last.show(sum(answers.into_iter().filter_map(|answer| answer.ok()?.ok())));
        };
        rows.chain(stream::once(end).filter_map(async |()| None)).boxed()
    }

    /// Ends when a worker is lost.
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
                    // One that is gone may have done its part; if not, whoever reads from it notices.
                    Ok(Err(_)) => known.0 = now,
                    Err(_) if now - known.0 > SILENCE => {
                        let reason = "it has said nothing for a minute".to_owned();
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
