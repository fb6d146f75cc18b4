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

#[cfg(test)]
mod tests {
    use chrono::DateTime;

    use super::{chain::Newest, *};

    /// A partition with files, and one without, of which the broker knows nothing. Written by hand.
    #[test]
    fn the_table_has_a_line_for_each_partition() {
        let newest = Newest {
            object: "topic=mails/partition=0/00000000000000001000.parquet".into(),
            bytes: 7,
            rows: 499,
            written: DateTime::from_timestamp(1_795_334_400, 0).unwrap(),
        };
        let mails = PartitionStatus {
            topic: "mails".into(),
            partition: 0,
            start: 0,
            end: 1500,
            newest: Some(newest),
            objects: 2,
            rows: 1499,
            head: HintCheck::Agrees,
            hint: HintCheck::Agrees,
        };
        let reviews = PartitionStatus {
            topic: "reviews".into(),
            partition: 11,
            end: 0,
            newest: None,
            objects: 0,
            rows: 0,
            hint: HintCheck::Absent,
            ..mails.clone()
        };
        let partitions = vec![
            PartitionLine { chain: mails, high_watermark: Some(1510), lag: Some(10) },
            PartitionLine { chain: reviews, high_watermark: None, lag: None },
        ];
        let shown = StreamStatus { output: "out".into(), partitions }.to_string();
        let expected = "\
partition    end   watermark  lag  files  rows   newest                        written               hint
mails[0]     1500  1510       10   2      1,499  00000000000000001000.parquet  2026-11-22 08:00:00Z  agrees
reviews[11]  0     -          -    0      0      -                             -                     none
";
        assert_eq!(shown, expected);
    }
}
