//! `elmo stream status`: where the output of each partition ends, and how far it is behind the broker.

use std::{collections::BTreeMap, fmt};

use serde::Serialize;

use super::{
    TopicPartition,
    chain::{self, HintCheck, PartitionStatus},
    source::{self, Hint, Settings},
};
use crate::{
    error::Result,
    report::{count, grid},
    stores::Location,
};

/// The state of an output.
#[derive(Debug, Serialize)]
pub struct StreamStatus {
    /// The output.
    pub output: String,
    /// Its partitions in the order of their names.
    pub partitions: Vec<PartitionLine>,
}

/// The state of one partition.
#[derive(Debug, Serialize)]
pub struct PartitionLine {
    /// What the output holds.
    #[serde(flatten)]
    pub chain: PartitionStatus,
    /// Behind the last message of the broker; `None` without brokers, and for a topic that does not exist any more.
    pub high_watermark: Option<i64>,
    /// Messages of the broker that are not in the output.
    pub lag: Option<i64>,
}

/// Reads the state of an output, and asks the brokers if there are settings for them. The group is not joined.
///
/// # Errors
/// As [`chain::status`]; [`StreamError`](super::StreamError) when the brokers refuse or do not answer.
pub async fn status(output: &Location, generation: u32, kafka: Option<&Settings>) -> Result<StreamStatus> {
    let Some(kafka) = kafka else {
        let line = |chain| PartitionLine { chain, high_watermark: None, lag: None };
        let found = chain::status(output, generation, &BTreeMap::new()).await?;
        return Ok(StreamStatus { output: output.to_string(), partitions: found.into_iter().map(line).collect() });
    };
    // The footers of all objects are read once, so the brokers are asked before.
    let partitions = chain::partitions(output, generation).await?;
    let asked = source::ask_offsets(kafka, &partitions).await?;
    let hints = asked.iter().filter_map(|(partition, asked)| match &asked.committed {
        Hint::At { offset, metadata } => {
            Some((partition.clone(), chain::Hint { end: *offset, object: metadata.clone() }))
        }
        _ => None,
    });
    let with = chain::status(output, generation, &hints.collect()).await?;
    let line = |chain: PartitionStatus| {
        let partition = TopicPartition::new(chain.topic.as_str(), chain.partition);
        let high_watermark = asked.get(&partition).and_then(|asked| asked.range).map(|(_, high)| high);
        let lag = high_watermark.map(|high| (high - chain.end).max(0));
        PartitionLine { chain, high_watermark, lag }
    };
    Ok(StreamStatus { output: output.to_string(), partitions: with.into_iter().map(line).collect() })
}

impl fmt::Display for StreamStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let header = ["partition", "end", "watermark", "lag", "files", "rows", "newest", "written", "hint"];
        let number = |number: Option<i64>| number.map_or_else(|| "-".to_owned(), |n| n.to_string());
        let row = |line: &PartitionLine| {
            let chain = &line.chain;
            let newest = chain.newest.as_ref();
            let name = |object: &str| object.rsplit('/').next().unwrap_or_default().to_owned();
            vec![
                format!("{}[{}]", chain.topic, chain.partition),
                chain.end.to_string(),
                number(line.high_watermark),
                number(line.lag),
                count(chain.objects as u64),
                count(chain.rows),
                newest.map_or_else(|| "-".to_owned(), |newest| name(&newest.object)),
                newest.map_or_else(|| "-".to_owned(), |newest| newest.written.format("%Y-%m-%d %H:%M:%SZ").to_string()),
                match &chain.hint {
                    HintCheck::Absent => "none".to_owned(),
                    HintCheck::Agrees => "agrees".to_owned(),
                    HintCheck::Disagrees(reason) => format!("not used: {reason}"),
                },
            ]
        };
        let rows: Vec<Vec<String>> = self.partitions.iter().map(row).collect();
        f.write_str(&grid(&header, &rows))
    }
}
