//! Errors about memory in words: which operator needs how much, what the others have, and what helps.

use std::borrow::Cow;

/// The message for an error of a memory pool. Other errors of resources, such as those about disks, are returned as they are.
pub(super) fn message(text: &str) -> String {
    let Some((consumers, reason)) = text.rsplit_once("\nError: ") else { return text.to_owned() };
    let reason = without_path(reason);
    let held: Vec<String> = consumers.lines().skip(1).filter_map(held).collect();
    match held.is_empty() {
        true => format!("out of memory: {reason}"),
        false => format!("out of memory: {reason}; the largest are {}", held.join(", ")),
    }
}

/// `AggregateStream[0] (9.0 MB)` of `  AggregateStream[0]#1(can spill: false) consumed 9.0 MB, peak 9.0 MB,`
fn held(line: &str) -> Option<String> {
    let (name, rest) = line.trim().rsplit_once('#')?;
    let (_, size) = rest.split_once(" consumed ")?;
    let (size, _) = size.split_once(", peak ")?;
    (size != "0.0 B").then(|| format!("{} ({size})", without_path(name)))
}

/// `ParquetSink needs …` of `ParquetSink[folder/text=It rained/x.parquet] needs …`: folders of PARTITIONED BY are called after
/// values of rows.
fn without_path(text: &str) -> Cow<'_, str> {
    let path = text.split_once("ParquetSink[").and_then(|(before, rest)| Some((before, rest.rsplit_once(']')?)));
    path.map_or(text.into(), |(before, (_, after))| format!("{before}ParquetSink{after}").into())
}

/// The operator that an error is about, and what helps.
const REMEDIES: [(&[&str], &str); 6] = [
    (
        &["AggregateStream"],
        "aggregates without GROUP BY do not spill: instead of count(DISTINCT x) beside other aggregates, count the rows of \
         SELECT DISTINCT x; or increase --memory-limit",
    ),
    (
        &["HashJoinInput", "CrossJoinExec", "NestedLoopJoin", "PiecewiseMergeJoin", "SymmetricHashJoin"],
        "a join holds its smaller input in memory and does not spill: select fewer rows and columns before it, or increase \
         --memory-limit",
    ),
    (
        &["TopK", "PartitionedTopK"],
        "ORDER BY … LIMIT does not spill: reduce the number of rows after LIMIT, or increase --memory-limit",
    ),
    (&["RecursiveQuery"], "a recursive query holds the rows of a step in memory: increase --memory-limit"),
    (
        &["ParquetSink"],
        "a writer holds a row group of each of its files: OPTIONS (max_row_group_bytes 100000) makes them smaller; or write \
         fewer partitions, or increase --memory-limit",
    ),
    (
        &["disk space"],
        "SET datafusion.runtime.max_temp_directory_size = '200G' allows more temporary files, in the folder that TMPDIR names; \
         or increase --memory-limit",
    ),
];
/// For operators that spill, and all others.
const OTHERWISE: &str = "increase --memory-limit; or reduce the rows per batch with SET datafusion.execution.batch_size = 16, if \
                         rows are large, and the partitions with SET datafusion.execution.target_partitions = 1";

/// What to do about an error of resources.
pub(super) fn help(text: &str) -> &'static str {
    let reason = text.rsplit_once("\nError: ").map_or(text, |(_, reason)| reason);
    let about = |name: &&&str| reason.starts_with(**name) || (name.contains(' ') && reason.contains(**name));
    let remedy = REMEDIES.iter().find(|(names, _)| names.iter().any(|name| about(&name)));
    remedy.map_or(OTHERWISE, |(_, help)| help)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text is that of `datafusion-execution` 55.2 around that of our pool.
    const TEXT: &str = "Additional allocation failed for AggregateStream[0] with top memory consumers (across reservations) as:\n  \
        AggregateStream[1]#4(can spill: false) consumed 9.0 MB, peak 9.0 MB,\n  \
        RepartitionExec[0]#1(can spill: true) consumed 0.0 B, peak 128.2 KB.\nError: \
        AggregateStream[0] needs 9.0 MB more than the 9.0 MB that it has, and of 20.0 MB it can get 2.0 MB";

    #[test]
    fn an_operator_and_what_others_have() {
        assert_eq!(
            message(TEXT),
            "out of memory: AggregateStream[0] needs 9.0 MB more than the 9.0 MB that it has, and of 20.0 MB it can get 2.0 MB; \
             the largest are AggregateStream[1] (9.0 MB)"
        );
        let writer = TEXT.replace("AggregateStream[0] needs", "ParquetSink[a/text=It [rained]/x.parquet] needs");
        let writer = writer.replace("AggregateStream[1]#", "ParquetSink[a/text=It] rained#5/x.parquet]#");
        let said = message(&writer);
        assert!(said.starts_with("out of memory: ParquetSink needs 9.0 MB"), "{said}");
        assert!(said.ends_with("; the largest are ParquetSink (9.0 MB)"), "{said}");
        assert!(help(&writer).contains("max_row_group_bytes"));
        assert!(help(TEXT).contains("SELECT DISTINCT x"));
        assert_eq!(help(&TEXT.replace("Error: AggregateStream", "Error: ExternalSorter")), OTHERWISE);
        assert!(
            help("The used disk space during the spilling process has exceeded").contains("max_temp_directory_size")
        );
    }
}
