//! Opens the output of a partition, and finds where to read it from.

use std::{ops::Range, time::Duration};

use tokio::sync::{mpsc, oneshot, watch};

use super::{
    StreamError, TopicPartition,
    chain::{self, Dataset, OnGap, position},
    files::{FileOutput, Files},
    job::Started,
    output::Owned,
    partition::{self, Ended, Inbox, Order, Parts},
    source::{self, Assigned, Source},
    transaction::{Committer, Records, TopicOutput},
};
use crate::error::{Error, Result};

/// Between two questions to brokers that do not answer.
const PAUSE: Duration = Duration::from_secs(1);

/// Opens outputs.
pub(super) struct Opener {
    pub(super) target: Open,
    pub(super) start: source::Start,
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
        source: &Source,
        owned: &Owned,
        assigned: &Assigned,
        start: oneshot::Sender<i64>,
        (inbox, mut orders): Incoming,
    ) -> Result<Ended> {
        let opened = async {
            let first = || first(source, owned, assigned, self.start);
            match &self.target {
                Open::Files(opened) => {
                    let (dataset, files) = opened.as_ref();
                    let hint = hint(assigned);
                    let chain = dataset.chain::<_, Error>(&owned.source, first, hint.as_ref()).await?;
                    let (at, gap, high) = self.position(source, &owned.source, chain.end()).await?;
                    Ok::<_, Error>((
                        at,
                        high,
                        Opened::Files(Box::new(FileOutput::new(files, owned.clone(), chain, gap))),
                    ))
                }
                Open::Topic(records, committer) => {
                    let committed = committed(source, owned, assigned).await;
                    let end = match committed {
                        Some(offset) => offset,
                        None => first().await?,
                    };
                    let (at, _, high) = self.position(source, &owned.source, end).await?;
                    // The group's offset is the record of what is done, so it has to say where the partition began.
                    if committed.is_none()
                        && let Err(error) = source.ownership().commit(&owned.source, owned.epoch, at, "")
                    {
                        tracing::debug!(partition = %owned.source, reason = %error, "the first offset was not committed");
                    }
                    let records = records.clone();
                    let output = TopicOutput::new(owned.clone(), at, records, committer.clone());
                    Ok((at, high, Opened::Topic(output)))
                }
            }
        };
        // A store that does not answer must not keep a partition that was taken away.
        let (at, high, output) = tokio::select! {
            opened = opened => opened?,
            () = taken_away(&mut orders) => return Ok(Ended::NotBegun),
        };
        tracing::info!(partition = %owned.source, offset = at, "assigned");
        // The loop ends after all tasks.
        let _ = self.started.send(Started { source: owned.source.clone(), epoch: owned.epoch, at, high });
        if start.send(at).is_err() {
            source.seek(&owned.source, owned.epoch, source::Start::At(at));
        }
        match output {
            Opened::Files(output) => partition::run(parts, owned, at, inbox, orders, *output).await,
            Opened::Topic(output) => partition::run(parts, owned, at, inbox, orders, output).await,
        }
    }

    /// Where to read, given the end of the output; the messages that are lost before it; and the end of the partition.
    async fn position(
        &self,
        source: &Source,
        partition: &TopicPartition,
        end: i64,
    ) -> Result<(i64, Option<Range<i64>>, i64)> {
        let client = source.client();
        let range = outlast(partition, || client.watermarks(partition)).await;
        let found = position(partition, end, range, self.on_gap)?;
        if let Some(gap) = &found.gap {
            tracing::warn!(%partition, from = gap.start, to = gap.end, "the broker has deleted these messages; going on behind them");
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

/// The first offset of a partition without output.
async fn first(source: &Source, owned: &Owned, assigned: &Assigned, start: source::Start) -> Result<i64> {
    let client = source.client();
    let (low, high) = outlast(&owned.source, || client.watermarks(&owned.source)).await;
    Ok(match if assigned.appeared { source::Start::Beginning } else { start } {
        source::Start::At(offset) => offset,
        source::Start::Beginning => low,
        source::Start::End => high,
        source::Start::Timestamp(time) => {
            let wanted = std::slice::from_ref(&owned.source);
            let found = outlast(&owned.source, || client.offsets_for_time(wanted, time)).await;
            found.into_iter().flatten().next().unwrap_or(high)
        }
    })
}

/// The hint of the group, as the chain knows it.
fn hint(assigned: &Assigned) -> Option<chain::Hint> {
    match &assigned.committed {
        source::Hint::At { offset, metadata } => Some(chain::Hint { end: *offset, object: metadata.clone() }),
        _ => None,
    }
}

/// The offset that the group has committed. A transaction of a process that was killed hides it until the broker aborts it.
async fn committed(source: &Source, owned: &Owned, assigned: &Assigned) -> Option<i64> {
    let (client, wanted) = (source.client(), std::slice::from_ref(&owned.source));
    let mut hint = assigned.committed.clone();
    loop {
        match hint {
            source::Hint::At { offset, .. } => return Some(offset),
            source::Hint::None => return None,
            source::Hint::Unknown(reason) => {
                tracing::warn!(partition = %owned.source, reason, "the committed offset is not known; asking again");
                tokio::time::sleep(PAUSE).await;
                let asked = outlast(&owned.source, || client.committed(wanted)).await;
                hint = asked.into_iter().next().unwrap_or(source::Hint::None);
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
                tracing::warn!(%partition, %error, "the brokers do not answer; asking until they do");
                said = true;
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}
