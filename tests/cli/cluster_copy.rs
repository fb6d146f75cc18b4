//! COPY and INSERT on workers: they write the files, and the client gives them their names.

use std::{
    collections::BTreeSet,
    fs, thread,
    time::{Duration, Instant},
};

use crate::{
    cluster::{Cluster, sql, texts, wait_for_tasks},
    node::Node,
    place::{Ended, Place},
};

/// The rows that are copied.
const ROWS: &str = "SELECT id, elmo_embed(text)[1] AS v, CAST(id % 3 AS VARCHAR) AS p, \
                    CASE WHEN id % 5 > 0 THEN CAST(to_timestamp(id * 90000) AS DATE) END AS d FROM 'many/'";

/// Three files, of which each worker gets one.
fn write_files(place: &Place, rows: usize) {
    let lines = texts(3 * rows, 40);
    let lines: Vec<&str> = lines.lines().collect();
    for (number, part) in lines.chunks(rows).enumerate() {
        place.write(&format!("many/{number}.jsonl"), part.join("\n") + "\n");
    }
}

/// The paths of all files below a folder, also of hidden ones.
fn files(place: &Place, folder: &str) -> BTreeSet<String> {
    let Ok(entries) = fs::read_dir(place.path(folder)) else { return BTreeSet::new() };
    let below = entries.map(|entry| format!("{folder}/{}", entry.unwrap().file_name().to_string_lossy()));
    below.flat_map(|path| if place.path(&path).is_dir() { files(place, &path) } else { [path].into() }).collect()
}

/// Statements, one after the other.
fn all<'a>(statements: &[&'a str]) -> Vec<&'a str> {
    let each = statements.iter().flat_map(|statement| ["-c", statement]);
    ["--format", "csv"].into_iter().chain(each).collect()
}

/// Numbers of the processes that wrote the files of a folder: their names begin with one of each.
fn writers(files: &BTreeSet<String>) -> usize {
    let name = |path: &String| path.rsplit('/').next().unwrap().split(['_', '.']).next().unwrap().to_owned();
    files.iter().map(name).collect::<BTreeSet<_>>().len()
}

#[test]
fn workers_write_what_one_process_writes() {
    let place = Place::new();
    write_files(&place, 700);
    let cluster = Cluster::start(&place, 3);
    // Which format; whether each worker writes.
    for (name, format, by_workers) in [
        ("parquet", "STORED AS PARQUET", true),
        ("csv", "STORED AS CSV OPTIONS (date_format '%d.%m.%Y', null_value 'NIL', quote_style always)", true),
        ("tsv", "STORED AS TSV", true),
        ("packed", "STORED AS JSONL OPTIONS (compression gzip, compression_level 2)", true),
        ("hive", "STORED AS PARQUET PARTITIONED BY (p) OPTIONS ('format.metadata::who' 'me')", true),
        ("arrow", "STORED AS ARROW", false),
    ] {
        let copy = |folder: &str| format!("COPY ({ROWS}) TO '{folder}/{name}/' {format}");
        let there = cluster.sql(&place, &all(&[&copy("there")]));
        assert_eq!((there.code, there.out.as_str()), (Some(0), "count\n2100\n"), "{name}: {}", there.err);
        assert_eq!(sql(&place, &all(&[&copy("here")])).code, Some(0));
        let written = files(&place, &format!("there/{name}"));
        assert_eq!(writers(&written), if by_workers { 3 } else { 1 }, "{written:?}");
        let extension = |path: &String| path.rsplit('/').next().unwrap().split_once('.').unwrap().1.to_owned();
        let extensions = |files: &BTreeSet<String>| files.iter().map(extension).collect::<BTreeSet<_>>();
        assert_eq!(extensions(&written), extensions(&files(&place, &format!("here/{name}"))));
        let rows = |folder: &str| sql(&place, &all(&[&format!("SELECT * FROM '{folder}/{name}/' ORDER BY id")])).out;
        assert_eq!(rows("there"), rows("here"), "{name}");
    }
    let footer = sql(&place, &all(&["SELECT count(*) FROM 'there/hive/'"]));
    assert_eq!(footer.out, "count(*)\n2100\n");
    one_file(&place, &cluster);
    embedded_by_all(&place, &cluster);
    into_a_folder_that_has_files(&place, &cluster);
    errors(&place, &cluster);
}

/// One file is written by one worker, which gathers the rows of the others; in their order.
fn one_file(place: &Place, cluster: &Cluster) {
    let ordered = "SELECT id, text, elmo_embed(text) AS v FROM 'many/' ORDER BY text";
    let grouped =
        "SELECT id % 7 AS k, count(*) AS n, elmo_centroid(elmo_embed(text)) AS v FROM 'many/' GROUP BY id % 7";
    for (query, order) in
        [(ordered, ""), ("SELECT id, elmo_embed(text) AS v FROM 'many/'", ""), (grouped, "ORDER BY k")]
    {
        let explained = cluster.sql(place, &all(&[&format!("EXPLAIN COPY ({query}) TO 'one.parquet'")])).out;
        let places = ["PublishExec", "ClusterExec", "StageFilesExec", "DataSinkExec", "DistributedLeafExec"];
        let places = places.map(|node| explained.find(node).unwrap_or_else(|| panic!("{node}: {explained}")));
        assert!(places.is_sorted(), "{explained}");
        let copied = cluster.sql(place, &all(&[&format!("COPY ({query}) TO 'one.parquet'")]));
        assert_eq!(copied.code, Some(0), "{copied:?}");
        assert_eq!(sql(place, &all(&[&format!("COPY ({query}) TO 'here.parquet'")])).code, Some(0));
        let rows = |file: &str| sql(place, &all(&[&format!("SELECT * FROM '{file}.parquet' {order}")])).out;
        assert_eq!(rows("one"), rows("here"), "{query}");
    }
    // EXPLAIN ANALYZE writes too, and has the metrics of the worker.
    let fresh = ordered.replace("embed(text)", "embed(text || '!')");
    let analysed = format!("EXPLAIN ANALYZE COPY ({fresh}) TO 'one.parquet'");
    let analysed = cluster.sql(place, &all(&[&analysed])).out;
    let sink = analysed.lines().find(|line| line.contains("DataSinkExec")).unwrap_or_default();
    assert!(sink.contains("rows_written=2.10 K"), "{analysed}");
    // Rows of a stage below another one are counted once.
    let cluster_exec = analysed.lines().find(|line| line.contains("ClusterExec")).unwrap_or_default();
    assert!(cluster_exec.contains("rows_embedded=2.10 K"), "{analysed}");
    // Rows of the client are written by the client.
    let own = "COPY (SELECT column1 AS id, elmo_embed(column2) AS v FROM (VALUES (1, 'a'), (2, 'b'))) TO 'own.parquet'";
    assert!(!cluster.sql(place, &all(&[&format!("EXPLAIN {own}")])).out.contains("PublishExec"));
    assert_eq!(cluster.sql(place, &all(&[own])).out, "count\n2\n");
    // Names that URLs encode; a result that the client writes itself.
    let named = "COPY (SELECT id, elmo_embed(text) AS v FROM 'many/') TO 'données #1.parquet'";
    assert_eq!(cluster.sql(place, &all(&[named])).out, "count\n2100\n");
    assert_eq!(sql(place, &all(&["SELECT count(*) FROM 'données #1.parquet'"])).out, "count(*)\n2100\n");
    let query = ["--format", "parquet", "-c", "SELECT id, elmo_embed(text) AS v FROM 'many/' LIMIT 3"];
    let mut command = place.elmo();
    command.args(["sql", "-q", "--model", "tiny", "--cluster", &cluster.list]).args(query);
    let result = command.output().unwrap();
    assert!(result.status.success() && result.stdout.starts_with(b"PAR1"), "{result:?}");
    // The memory limit is that of the client.
    let limited = "COPY (SELECT CAST(text AS VARCHAR) AS t, elmo_embed(text) AS v FROM 'many/' ORDER BY t) \
                   TO 'limited.parquet'";
    let limited = cluster.sql(place, &[&["--memory-limit", "1GB"], &all(&[limited])[..]].concat());
    assert_eq!(limited.out, "count\n2100\n", "{}", limited.err);
    // A link stays, and the file that it names is replaced.
    std::os::unix::fs::symlink("one.parquet", place.path("link.parquet")).unwrap();
    let linked = "COPY (SELECT id, elmo_embed(text) AS v FROM 'many/' WHERE id < 3) TO 'link.parquet'";
    assert_eq!(cluster.sql(place, &all(&[linked])).out, "count\n3\n");
    assert!(place.path("link.parquet").is_symlink());
    assert_eq!(sql(place, &all(&["SELECT count(*) FROM 'one.parquet'"])).out, "count(*)\n3\n");
    fs::remove_file(place.path("link.parquet")).unwrap();
}

/// What is embedded above an operator that needs all rows is computed by all workers, and written by one.
fn embedded_by_all(place: &Place, cluster: &Cluster) {
    assert_eq!(sql(place, &all(&["COPY (SELECT * FROM 'many/') TO 'many.parquet'"])).code, Some(0));
    // A small file is read, sorted and embedded by one worker.
    let small =
        "COPY (SELECT id, elmo_embed(text) AS v FROM 'many.parquet' ORDER BY id DESC LIMIT 1500) TO 'small.parquet'";
    assert_eq!(cluster.sql(place, &all(&[small])).out, "count\n1500\n");
    let explained = cluster.sql(place, &all(&[&format!("EXPLAIN {small}")])).out;
    let sort_is_below = explained.split_once("StageFilesExec").is_some_and(|(_, below)| below.contains("SortExec"));
    assert!(sort_is_below, "{explained}");
    let last = sql(place, &all(&["SELECT id FROM 'small.parquet' LIMIT 1"])).out;
    assert_eq!(last, "id\n2099\n");
    // Row groups of a large file are sorted by the workers, also for a COPY of what is embedded of the first rows.
    let large = "COPY (SELECT value AS id, concat(md5(value::text), ' ', md5((-1 - value)::text)) AS text FROM range(0, 30000)) \
                 TO 'large.parquet'";
    assert_eq!(sql(place, &all(&[large])).code, Some(0));
    let last = "SELECT id, elmo_embed(text) AS v FROM 'large.parquet' ORDER BY id DESC LIMIT 10";
    for (statement, first) in
        [(last.to_owned(), "ClusterExec"), (format!("COPY ({last}) TO 'last.parquet'"), "StageFilesExec")]
    {
        let explained = cluster.sql(place, &all(&[&format!("EXPLAIN {statement}")])).out;
        let is_below = explained.split_once(first).is_some_and(|(_, below)| below.contains("SortExec: TopK(fetch=10)"));
        assert!(is_below && explained.contains("sort_order_for_reorder"), "{explained}");
    }
    assert_eq!(cluster.sql(place, &all(&[last])).out, sql(place, &all(&[last])).out);
    // Texts of their own, which no worker has in its cache.
    for (number, inner) in [
        "SELECT id, concat(text, ' a') AS text FROM 'many/' LIMIT 1500 OFFSET 100",
        "SELECT id, concat(text, ' b') AS text FROM 'many/' ORDER BY text DESC LIMIT 1500",
        "SELECT row_number() OVER (ORDER BY text DESC) AS id, concat(text, ' c') AS text FROM 'many/'",
    ]
    .into_iter()
    .enumerate()
    {
        let copy = |file: &str| format!("COPY (SELECT id, elmo_embed(text) AS v FROM ({inner})) TO '{file}'");
        let written = cluster.sql(place, &all(&[&format!("EXPLAIN ANALYZE {}", copy("there.parquet"))])).out;
        let line = |node: &str| written.lines().find(|line| line.contains(node)).unwrap_or_else(|| panic!("{written}"));
        let rows = line("DataSinkExec").split("rows_written=").nth(1).unwrap().split([',', ']']).next().unwrap();
        assert!(line("ClusterExec").contains(&format!("rows_embedded={rows}")), "{written}");
        assert!(line("RowsExec").contains("workers=3"), "{written}");
        assert_eq!(sql(place, &all(&[&copy("here.parquet")])).code, Some(0));
        let rows = |file: &str| sql(place, &all(&[&format!("SELECT * FROM '{file}'")])).out;
        assert_eq!(rows("there.parquet"), rows("here.parquet"), "{number}: {inner}");
    }
}

fn into_a_folder_that_has_files(place: &Place, cluster: &Cluster) {
    let count = |folder: &str| sql(place, &all(&[&format!("SELECT count(*) FROM '{folder}'")])).out;
    let copy = |option: &str| format!("COPY ({ROWS}) TO 'again/' STORED AS PARQUET {option}");
    assert_eq!(cluster.sql(place, &all(&[&copy("")])).code, Some(0));
    let refused = cluster.sql(place, &all(&[&copy("")]));
    assert!(refused.code == Some(2) && refused.err.contains("COPY writes to an empty folder"), "{refused:?}");
    assert_eq!(cluster.sql(place, &all(&[&copy("OPTIONS (append true)")])).code, Some(0));
    assert_eq!(count("again/"), "count(*)\n4200\n");
    assert_eq!(cluster.sql(place, &all(&[&copy("OPTIONS (overwrite true)")])).code, Some(0));
    assert_eq!(count("again/"), "count(*)\n2100\n");
    // A query without rows leaves a file with its columns.
    let none = format!("COPY (SELECT * FROM ({ROWS}) WHERE v > 1e9) TO 'none/' STORED AS PARQUET");
    assert_eq!(cluster.sql(place, &all(&[&none])).out, "count\n0\n");
    assert_eq!(sql(place, &all(&["SELECT v FROM 'none/'"])).out, "v\n");
    // INSERT, also into folders of a table with partitions.
    let table =
        "CREATE EXTERNAL TABLE t (id BIGINT, v FLOAT, p VARCHAR) STORED AS TSV PARTITIONED BY (p) LOCATION 'table/'";
    let insert = format!("INSERT INTO t SELECT id, v, p FROM ({ROWS})");
    let inserted = cluster.sql(place, &all(&[table, &insert, "SELECT count(*) AS n, sum(id) AS s FROM t"]));
    assert_eq!(inserted.out, "count\n2100\nn,s\n2100,2203950\n", "{}", inserted.err);
    let written = files(place, "table");
    assert!(written.len() == 9 && written.iter().all(|file| file.ends_with(".tsv")), "{written:?}");
}

/// An error leaves nothing.
fn errors(place: &Place, cluster: &Cluster) {
    let failed = |copy: &str, expected: &str| {
        let failed: Ended = cluster.sql(place, &all(&[copy]));
        let here = sql(place, &all(&[copy]));
        // Names of files are random, and what is wrong with a disk is wrong with that of a worker.
        let plain = |err: &str| match err.split_once("\u{2026}/") {
            Some((before, name)) => format!("{}{}", &before[before.find("write").unwrap()..], &name[16..]),
            None => err.to_owned(),
        };
        assert_eq!((failed.code, &failed.out, plain(&failed.err)), (here.code, &here.out, plain(&here.err)));
        // The message shows no value of a row.
        let is_right = failed.err.contains(expected) && !failed.err.contains("xxx");
        assert!(failed.code != Some(0) && is_right, "{}", failed.err);
        assert_eq!(files(place, "wrong"), BTreeSet::new());
        assert!(!place.path("wrong").exists());
    };
    let null = "COPY (SELECT elmo_embed(text)[1] AS v, CASE WHEN id < 900 THEN 'a' END AS p FROM 'many/') \
                TO 'wrong/' STORED AS CSV PARTITIONED BY (p)";
    failed(null, "PARTITIONED BY p: a row has NULL in this column");
    // What is computed fails in one of the tasks, after rows of the others.
    let zero = "COPY (SELECT elmo_embed(text)[1] AS v, 1 / (id - 2000) AS p FROM 'many/') TO 'wrong/' STORED AS CSV";
    failed(zero, "Divide by zero");
    let long = "COPY (SELECT id, elmo_embed(text)[1] AS v, repeat('x', 300) AS p FROM 'many/') \
                TO 'wrong/' STORED AS CSV PARTITIONED BY (p)";
    failed(long, "p=\u{2026}");
}

/// A worker that is killed or stands still costs no row; a client that is interrupted or dies leaves no file.
#[test]
fn a_copy_survives_its_workers() {
    let place = Place::new();
    write_files(&place, 3000);
    // Files are begun before their last row is written.
    let small = "SET datafusion.execution.objectstore_writer_buffer_size = 100000; \
                 SET datafusion.execution.parquet.max_row_group_size = 200";
    let copy = "COPY (SELECT id, elmo_embed(text, layers => 'all') AS v FROM 'many/') TO 'out/' STORED AS PARQUET";
    let begin = |cluster: &Cluster| {
        let mut command = place.elmo();
        command.args(["sql", "-q", "--model", "tiny", "--cluster", &cluster.list, "-c", small, "-c", copy]);
        let client = Node::spawn(command, "");
        let began = Instant::now();
        while files(&place, "out").is_empty() {
            assert!(began.elapsed() < Duration::from_secs(60), "no file was begun: {}", client.stderr());
            thread::sleep(Duration::from_millis(10));
        }
        client
    };
    for (signal, code) in [("-INT", Some(130)), ("-KILL", None)] {
        let cluster = Cluster::start(&place, 2);
        let mut client = begin(&cluster);
        client.signal(signal);
        assert_eq!(client.wait(), code, "{}", client.stderr());
        wait_for_tasks(&place, &cluster, &|tasks| tasks == 0);
        let began = Instant::now();
        while !files(&place, "out").is_empty() {
            assert!(began.elapsed() < Duration::from_secs(30), "{:?}", files(&place, "out"));
            thread::sleep(Duration::from_millis(20));
        }
    }
    for signal in ["-KILL", "-STOP"] {
        let cluster = Cluster::start(&place, 3);
        let mut client = begin(&cluster);
        cluster.workers[1].signal(signal);
        assert_eq!(client.wait(), Some(0), "{}", client.stderr());
        let names = files(&place, "out");
        assert!(names.iter().all(|name| !name.contains("/.") && name.ends_with(".parquet")), "{names:?}");
        let counted = sql(&place, &all(&["SELECT count(*), count(DISTINCT id), sum(id) FROM 'out/'"])).out;
        assert_eq!(counted.lines().last(), Some("9000,9000,40495500"), "{names:?}");
        // One that wakes up deletes what it has begun, and publishes nothing.
        cluster.workers[1].signal("-CONT");
        fs::remove_dir_all(place.path("out")).unwrap();
        cluster.workers[1].signal("-KILL");
    }
}
