//! `--memory-limit`: what spills gives the same rows with a small limit, and what does not says what helps.

use crate::{
    place::Place,
    sql::{sql, value},
};

/// 60,000 rows of 230 bytes, 14 MB, as Parquet and CSV. No two texts are equal.
fn rows_of_14_mb() -> Place {
    let place = Place::new();
    let rows = "SELECT value AS id, value % 1000 AS grp, concat(md5(value::text), repeat(md5((value % 77)::text), 6)) AS text, \
                (value * 7919) % 60000 AS x FROM range(0, 60000)";
    let made = sql(&place, &["-c", &format!("COPY ({rows}) TO 't.parquet'; COPY ({rows}) TO 't.csv'")]);
    assert_eq!(made.code, Some(0), "{made:?}");
    place
}

/// 4 MB are less than a third of the rows. Expected: numbers by hand, from how the rows are made.
#[test]
fn groups_windows_and_sorts_spill() {
    let place = rows_of_14_mb();
    for file in ["t.parquet", "t.csv"] {
        let one = |query: &str| {
            let ended = sql(&place, &["--memory-limit", "4MB", "--format", "csv", "-c", query]);
            assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{query}");
            ended.out.lines().nth(1).unwrap().to_owned()
        };
        // Groups and windows do not depend on the format.
        if file == "t.parquet" {
            assert_eq!(one(&format!("SELECT count(DISTINCT text) FROM '{file}'")), "60000");
            assert_eq!(
                one(&format!("SELECT grp, count(DISTINCT text) FROM '{file}' GROUP BY grp ORDER BY grp LIMIT 1")),
                "0,60"
            );
            assert_eq!(one(&format!("SELECT count(*) FROM (SELECT DISTINCT * FROM '{file}')")), "60000");
            // 0 + 1 + … + 59 in each of 1,000 groups.
            let ranks = format!(
                "SELECT sum(r) FROM (SELECT row_number() OVER (PARTITION BY grp ORDER BY text DESC) - 1 AS r FROM '{file}')"
            );
            assert_eq!(one(&ranks), "1770000");
            let ranks = format!("SELECT max(r) FROM (SELECT row_number() OVER (ORDER BY text) AS r FROM '{file}')");
            assert_eq!(one(&ranks), "60000");
        }
        for (order, to) in [("text", "m.parquet"), ("concat(10000 - grp, text)", "m.csv"), ("x", "m.jsonl")] {
            assert_eq!(one(&format!("COPY (SELECT * FROM '{file}' ORDER BY {order}) TO '{to}'")), "60000");
            // One partition, so that the window sees the rows as the file has them.
            let descents = format!(
                "SET datafusion.execution.target_partitions = 1; \
                 SELECT count(*) AS n FROM (SELECT {order} AS k, lag({order}) OVER () AS before FROM '{to}') WHERE k < before"
            );
            assert_eq!(sql(&place, &["--format", "csv", "-c", &descents]).out, "n\n0\n", "{file} by {order}");
        }
    }
}

/// Rows of 96 kB, far more than is assumed of a string: the file says how large its rows are.
#[test]
fn large_rows_are_few_in_a_batch() {
    let place = Place::new();
    let rows = "SELECT value AS id, repeat(md5(value::text), 3000) AS text FROM range(0, 300)";
    let made = sql(
        &place,
        &["-c", "SET datafusion.execution.batch_size = 10", "-c", &format!("COPY ({rows}) TO 'l.parquet'")],
    );
    assert_eq!(made.code, Some(0), "{made:?}");
    let copy = "COPY (SELECT * FROM 'l.parquet' ORDER BY text) TO 'm.parquet'";
    let ended = sql(&place, &["--memory-limit", "20MB", "-c", copy]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(value(&place, "SELECT count(DISTINCT text) FROM 'm.parquet'"), 300);
}

/// Lines of 140 bytes, 0.5 MB. The rows of a query with vectors of tokens come in batches of 16, which once shared the buffers
/// of many lines, and each was counted with all of them.
#[test]
fn lines_are_counted_once() {
    let place = Place::new();
    let line = |i: usize| format!("{:05} {}\n", i * 7919 % 4000, "word ".repeat(26));
    place.write("t.txt", (0..4000).map(line).collect::<String>());
    for query in ["SELECT text, elmo_tokens(text) AS v", "SELECT md5(text) AS text, elmo_tokens(text) AS v"] {
        let copy = format!("COPY ({query} FROM 't.txt' ORDER BY text) TO 'out.parquet'");
        let ended = sql(&place, &["--memory-limit", "20MB", "-c", &copy]);
        assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{query}");
        let descents = "SET datafusion.execution.target_partitions = 1; \
                        SELECT count(*) AS n FROM (SELECT text AS k, lag(text) OVER () AS before FROM 'out.parquet') \
                        WHERE k < before";
        assert_eq!(sql(&place, &["--format", "csv", "-c", descents]).out, "n\n0\n");
        assert_eq!(value(&place, "SELECT count(*) FROM 'out.parquet'"), 4000);
    }
}

/// Columns of all kinds in files of all formats. Expected: the results without a limit.
#[test]
fn a_limit_changes_no_result() {
    let place = Place::new();
    let columns = "value AS id, arrow_cast(concat('v', value % 300, repeat('q', 20)), 'Utf8View') AS v, \
                   arrow_cast(concat('d', value % 50), 'Dictionary(Int32, Utf8)') AS d, \
                   CASE WHEN value % 5 > 0 THEN concat('t', value % 70) END AS text, value % 7 AS part";
    for rest in [
        "TO 'm.parquet'",
        "TO 'm.arrow'",
        "TO 'm.csv'",
        "TO 'm.jsonl'",
        "TO 'm/' STORED AS PARQUET PARTITIONED BY (part)",
    ] {
        let made = sql(&place, &["-c", &format!("COPY (SELECT {columns} FROM range(0, 9000)) {rest}")]);
        assert_eq!(made.code, Some(0), "{made:?}");
    }
    let lines = sql(&place, &["--format", "csv", "-c", "SELECT v FROM 'm.csv'"]);
    place.write("m.txt", lines.out);
    let queries = |name: &str| match name {
        "m.txt" => "SELECT text, count(*) FROM 'm.txt' WHERE text > 'v2' GROUP BY text ORDER BY text".to_owned(),
        name => format!(
            "SELECT text, min(v), max(d), count(*) FROM '{name}' GROUP BY text ORDER BY text; \
             SELECT id, v, d, lag(v) OVER (ORDER BY text, id), row_number() OVER (PARTITION BY d ORDER BY v, id) \
             FROM '{name}' WHERE v > 'v2' ORDER BY d, id; \
             SELECT count(*) FROM '{name}' a JOIN '{name}' b ON a.v = b.v AND a.id < b.id"
        ),
    };
    for name in ["m.parquet", "m.arrow", "m.csv", "m.jsonl", "m/", "m.txt"] {
        let limited = |limit: &[&str]| {
            let ended = sql(&place, &[limit, &["--format", "csv", "-c", &queries(name)]].concat());
            assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{name} {limit:?}");
            ended.out
        };
        let expected = limited(&[]);
        assert!(expected.lines().count() > 100, "{name}: {expected}");
        assert_eq!(limited(&["--memory-limit", "8MB"]), expected, "{name}");
    }
}

#[test]
fn what_does_not_spill_says_what_helps() {
    let place = rows_of_14_mb();
    let limited = |query: &str| sql(&place, &["--memory-limit", "4MB", "--format", "csv", "-c", query]);
    let two = "SELECT count(DISTINCT text), count(DISTINCT id) FROM 't.parquet'";
    let join = "SELECT count(*) AS n FROM 't.parquet' a JOIN 't.parquet' b USING (text)";
    let partitions = |rest: &str| {
        format!("COPY (SELECT * FROM 't.parquet') TO 'parts/' STORED AS PARQUET PARTITIONED BY (grp) {rest}")
    };
    for (query, operator, help) in [
        (two, "AggregateStream", "count the rows of SELECT DISTINCT x"),
        (join, "HashJoinInput", "select fewer rows and columns before it"),
        (&partitions(""), "ParquetSink", "OPTIONS (max_row_group_bytes 100000)"),
    ] {
        let ended = limited(query);
        assert_eq!(ended.code, Some(1), "{query}: {ended:?}");
        let (message, hint) = ended.err.split_once("  help: ").unwrap();
        assert!(message.starts_with("error: out of memory: ") && message.contains(operator), "{query}: {ended:?}");
        assert!(
            message.contains("of 4.0 MB it can get ") && message.contains("; the largest are "),
            "{query}: {ended:?}"
        );
        assert!(hint.contains(help) && hint.contains("increase --memory-limit"), "{query}: {ended:?}");
        // Folders of partitions are called after values of rows.
        assert!(!ended.err.contains("grp="), "{query}: {ended:?}");
    }
    // What the hints say.
    let found = limited(
        "SELECT (SELECT count(*) FROM (SELECT DISTINCT text FROM 't.parquet')) AS a, \
                                (SELECT count(*) FROM (SELECT DISTINCT id FROM 't.parquet')) AS b",
    );
    assert_eq!(found.out, "a,b\n60000,60000\n", "{found:?}");
    let found = limited(
        "SELECT count(*) AS n FROM (SELECT text FROM 't.parquet' WHERE id < 10) a JOIN 't.parquet' b USING (text)",
    );
    assert_eq!(found.out, "n\n10\n", "{found:?}");
}
