//! Opens the output of a partition, and finds where to read it from.

use std::{ops::Range, time::Duration};

use tokio::sync::{mpsc, oneshot, watch};

use super::{
    StreamError, TopicPartition,
    chain::{self, Dataset, OnGap, position},
    clock,
    files::{FileOutput, Files},
    job::Started,
    output::Owned,
    partition::{self, Ended, Inbox, Order, Parts},
    source::{self, Assigned, Upstream},
    transaction::{Committer, Records, TopicOutput},
};
use crate::error::{Error, Fault as _, Result};

/// Between two questions to brokers that do not answer.
const PAUSE: Duration = Duration::from_secs(1);

/// Opens outputs.
pub(super) struct Opener {
    pub(super) target: Open,
    pub(super) on_gap: OnGap,
    /// Hears where partitions start.
    pub(super) started: mpsc::UnboundedSender<Started>,
}

/// Where rows go, opened.
pub(super) enum Open {
    Files(Box<(Dataset, Files)>),
    Topic(Records, Committer),
}

/// Messages and orders of a partition.
type Incoming = (mpsc::UnboundedReceiver<Inbox>, watch::Receiver<Order>);

/// Whether [`WITHOUT_IDS`] was logged.
static NO_ID: std::sync::Once = std::sync::Once::new();
const WITHOUT_IDS: &str = "the brokers give topics no ids (Kafka before 2.8), or not to this user: a topic that is deleted and created again is taken for \
                           the old one";

impl Opener {
    /// Whether the group's offsets say where the output ends, and not the output.
    pub(super) fn ends_by_group(&self) -> bool {
        matches!(self.target, Open::Topic(..))
    }

    /// Opens the output of a partition, says where it starts, and runs it.
    ///
    /// # Errors
    /// As [`partition::run`]; those of the output when it cannot be opened, and of the broker when it does not have the
    /// messages at which the output ends.
    pub(super) async fn run(
        &self,
        parts: &Parts,
        source: &dyn Upstream,
        owned: &Owned,
        assigned: &Assigned,
        start: oneshot::Sender<i64>,
        (inbox, mut orders): Incoming,
    ) -> Result<Ended> {
        let opened = async {
            let first = || async { Ok::<_, Error>(first(source, owned).await) };
            match &self.target {
                Open::Files(opened) => {
                    let (dataset, files) = opened.as_ref();
                    let hint = hint(assigned);
                    let id = outlast(&owned.source, || source.topic_id(&owned.source.topic)).await;
                    if id.is_none() {
                        NO_ID.call_once(|| tracing::warn!("{WITHOUT_IDS}"));
                    }
                    let chain = dataset.chain_of_topic::<_, Error>(&owned.source, id.clone(), first, hint.as_ref());
                    let chain = chain.await?;
                    let on_gap = if chain.is_new() { OnGap::Skip } else { self.on_gap };
                    let (at, gap, high) = self.position(source, &owned.source, chain.end(), on_gap).await?;
                    Ok::<_, Error>((
                        at,
                        high,
                        id,
                        Opened::Files(Box::new(FileOutput::new(files, owned.clone(), chain, gap))),
                    ))
                }
                Open::Topic(records, committer) => {
                    let committed = committed(source, owned, assigned).await;
                    let end = match committed {
                        Some(offset) => offset,
                        None => first().await?,
                    };
                    let on_gap = if committed.is_none() { OnGap::Skip } else { self.on_gap };
                    let (at, _, high) = self.position(source, &owned.source, end, on_gap).await?;
                    let output = TopicOutput::new(owned.clone(), at, records.clone(), committer.clone());
                    Ok((at, high, None, Opened::Topic(output)))
                }
            }
        };
        // A store that does not answer must not keep a partition that was taken away.
        let (at, high, topic_id, output) = tokio::select! {
            opened = opened => opened?,
            () = taken_away(&mut orders) => return Ok(Ended::NotBegun),
        };
        tracing::info!(partition = %owned.source, offset = at, "assigned");
        // The loop ends after all tasks.
        let _ = self.started.send(Started { source: owned.source.clone(), epoch: owned.epoch, at, high, topic_id });
        if start.send(at).is_err() {
            source.seek(&owned.source, owned.epoch, source::Start::At(at));
        }
        match output {
            Opened::Files(output) => partition::run(parts, owned, at, inbox, orders, *output).await,
            Opened::Topic(output) => partition::run(parts, owned, at, inbox, orders, output).await,
        }
    }

    /// Where to read, given the end of the output; the messages that are lost before it; and the end of the partition. An
    /// output that begins now loses nothing to the broker that deletes its first messages meanwhile.
    async fn position(
        &self,
        source: &dyn Upstream,
        partition: &TopicPartition,
        end: i64,
        on_gap: OnGap,
    ) -> Result<(i64, Option<Range<i64>>, i64)> {
        let range = outlast(partition, || source.watermarks(partition)).await;
        let found = position(partition, end, range, on_gap)?;
        if let Some(gap) = &found.gap {
            tracing::warn!(%partition, from = gap.start, to = gap.end, "the broker has deleted these messages; resuming after them");
        }
        Ok((found.start, found.gap, range.1))
    }
}

enum Opened {
    Files(Box<FileOutput>),
    Topic(TopicOutput),
}

/// Waits until the partition is drained before it has begun, or lost.
async fn taken_away(orders: &mut watch::Receiver<Order>) {
    loop {
        if matches!(*orders.borrow_and_update(), Order::Drain { .. }) || orders.changed().await.is_err() {
            return;
        }
    }
}

/// The first message of a partition without output. What begins elsewhere was recorded before the group was joined
/// ([`beginning`](super::beginning)).
async fn first(source: &dyn Upstream, owned: &Owned) -> i64 {
    outlast(&owned.source, || source.watermarks(&owned.source)).await.0
}

/// The hint of the group, as the chain knows it.
fn hint(assigned: &Assigned) -> Option<chain::Hint> {
    match &assigned.committed {
        source::Hint::At { offset, metadata } => Some(chain::Hint { end: *offset, object: metadata.clone() }),
        _ => None,
    }
}

/// The offset that the group has committed. A transaction of a process that was killed hides it until the broker aborts it.
async fn committed(source: &dyn Upstream, owned: &Owned, assigned: &Assigned) -> Option<i64> {
    let mut hint = assigned.committed.clone();
    loop {
        match hint {
            source::Hint::At { offset, .. } => return Some(offset),
            source::Hint::None => return None,
            source::Hint::Unknown(reason) => {
                tracing::warn!(partition = %owned.source, reason, "the committed offset is not known; asking again");
                clock::sleep(PAUSE).await;
                hint = outlast(&owned.source, || source.committed(&owned.source)).await;
            }
        }
    }
}

/// Asks the brokers until they answer. A partition that is taken away ends this.
async fn outlast<T, F: Future<Output = Result<T, StreamError>>>(partition: &TopicPartition, ask: impl Fn() -> F) -> T {
    let mut said = false;
    loop {
        match ask().await {
            Ok(answer) => return answer,
            Err(error) if said => tracing::debug!(%partition, %error, "asking the brokers again"),
            Err(error) => {
                tracing::warn!(%partition, %error, help = error.help(), "asking the brokers until they answer");
                said = true;
            }
        }
        clock::sleep(PAUSE).await;
    }
}
