//! COPY: results without rows, its options, the format of its target, and what lies in its place.

use std::{fs, os::unix::fs::symlink, process::Command};

use parquet::file::reader::{FileReader, SerializedFileReader};
use serde_json::json;

use crate::{
    place::{Ended, Place},
    sql::{rows, sql, value},
};

fn runs(place: &Place, statement: &str) {
    let ended = sql(place, &["-c", statement]);
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{statement}");
}

/// Runs a statement that is refused with `said`, and with a hint that contains `help`.
fn refused(place: &Place, statement: &str, code: i32, said: &str, help: &str) -> Ended {
    let ended = sql(place, &["-c", statement]);
    assert_eq!(ended.code, Some(code), "{statement}: {ended:?}");
    assert!(ended.err.contains(said), "{statement}: {ended:?}");
    let hint = ended.err.split_once("  help: ").map(|(_, hint)| hint).unwrap_or_default();
    assert!(hint.contains(help) && !hint.is_empty(), "{statement}: {ended:?}");
    ended
}

/// The names of the files below a folder.
fn files(place: &Place, folder: &str) -> Vec<String> {
    let found = place.shell(&format!("find {folder} -type f | sort"));
    found.out.lines().map(str::to_owned).collect()
}

/// Expected: units in the footers, by which readers other than Arrow's go; the time by hand, 19,723 days and 10 hours after 1970.
#[test]
fn times_have_the_units_of_parquet() {
    let place = Place::new();
    place.write("times.csv", "id,at\n1,2024-01-01T10:00:00\n");
    let query = "SELECT id, at, arrow_cast(at, 'Date64') AS date, arrow_cast('01:00:00', 'Time32(Second)') AS time, \
                 named_struct('at', at) AS inside, [at] AS list FROM 'times.csv'";
    runs(&place, &format!("COPY ({query}) TO 'one.parquet'"));
    runs(&place, &format!("COPY ({query}) TO 'parts/' STORED AS PARQUET PARTITIONED BY (id)"));
    assert_eq!(place.shell(&format!("elmo sql -q --format parquet -c \"{query}\" > printed.parquet")).code, Some(0));
    for (file, expected) in [("one.parquet", 5), (&files(&place, "parts")[0], 5), ("printed.parquet", 5)] {
        let reader = SerializedFileReader::new(fs::File::open(place.path(file)).unwrap()).unwrap();
        let columns = reader.metadata().file_metadata().schema_descr().columns().to_vec();
        let kinds = columns.iter().map(|column| format!("{:?}", column.logical_type_ref()));
        assert_eq!(kinds.filter(|kind| kind.contains("MILLIS")).count(), expected, "{file}: {columns:?}");
    }
    // Folders are named after the value as it is.
    let dates = "SELECT 1 AS one, arrow_cast(DATE '2020-01-02', 'Date64') AS day";
    runs(&place, &format!("COPY ({dates}) TO 'dates/' STORED AS PARQUET PARTITIONED BY (day)"));
    assert!(files(&place, "dates")[0].starts_with("dates/day=2020-01-02"), "{:?}", files(&place, "dates"));
    let stored = "SELECT arrow_cast(at, 'Int64') AS at FROM 'one.parquet'";
    assert_eq!(value(&place, stored), json!((19_723 * 24 + 10) * 3_600_000_i64));
    let table = "CREATE EXTERNAL TABLE t (at TIMESTAMP(0)) STORED AS PARQUET LOCATION 'table/'";
    let ended = sql(&place, &["-c", table, "-c", "INSERT INTO t VALUES ('2024-01-01T10:00:00')"]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.err.contains("for which Parquet has no type") && ended.err.contains("timestamp(3)"), "{ended:?}");
}

const NO_ROWS: &str =
    "SELECT value AS id, concat('t', value) AS text, value % 2 AS part FROM range(0, 5) WHERE value > 7";
/// Expected: the columns of the query; sums by hand, 0 + … + 9.
#[test]
fn copy_of_no_rows_leaves_a_table_without_rows() {
    let place = Place::new();
    let (typed, views) = ("id,Int64 text,Utf8 part,Int64", "id,Int64 text,Utf8View part,Int64");
    // Cells without values have no type, and folders without values are strings.
    let untyped = "id,Null text,Null part,Null";
    for (to, rest, columns) in [
        ("parquet/", "STORED AS PARQUET", views),
        ("arrow/", "STORED AS ARROW", typed),
        ("csv/", "STORED AS CSV", untyped),
        ("tsv/", "STORED AS TSV", untyped),
        ("gzip/", "STORED AS CSV OPTIONS (compression gzip)", untyped),
        ("parts/", "STORED AS PARQUET PARTITIONED BY (part)", "id,Int64 text,Utf8View part,Utf8"),
        ("cells/", "STORED AS CSV PARTITIONED BY (part)", "id,Null text,Null part,Utf8"),
        ("one.parquet", "", views),
        ("one.arrow", "", typed),
        ("one.csv", "", untyped),
        ("one.tsv.gz", "", untyped),
    ] {
        let query = |condition: &str| {
            format!(
                "SELECT value AS id, arrow_cast(concat('t', value), 'Utf8') AS text, value % 2 AS part FROM range(0, 10) \
                 WHERE {condition}"
            )
        };
        let copy = |condition: &str, option: &str| {
            let rest = match rest.strip_suffix(')').filter(|_| rest.contains("OPTIONS")) {
                Some(rest) => format!("{rest}, {option} true)"),
                None => format!("{rest} OPTIONS ({option} true)"),
            };
            format!("COPY ({}) TO '{to}' {rest}", query(condition))
        };
        runs(&place, &format!("COPY ({}) TO '{to}' {rest}", query("value > 17")));
        let found = format!("SELECT id, text, part FROM '{to}'; DESCRIBE '{to}'");
        let found = sql(&place, &["--format", "csv", "-c", &found]);
        let described: Vec<String> = columns.split(' ').map(|column| column.to_owned() + ",").collect();
        let lines: Vec<&str> = found.out.lines().collect();
        assert_eq!(lines[..2], ["id,text,part", "column_name,data_type,is_nullable"], "{to}: {found:?}");
        assert!(lines.len() == 5, "{to}: {found:?}");
        assert!(lines[2..].iter().zip(&described).all(|(line, column)| line.starts_with(column)), "{to}: {found:?}");
        if !to.ends_with('/') {
            continue;
        }
        // The folder holds a file now.
        let lie = "COPY writes to an empty folder, and 1 file lies in this one";
        refused(&place, &format!("COPY ({}) TO '{to}' {rest}", query("true")), 2, lie, "overwrite");
        // Rows that are added have their types, and no rows add nothing.
        runs(&place, &copy("true", "append"));
        assert_eq!(value(&place, &format!("SELECT sum(id) FROM '{to}'")), 45, "{to}");
        let before = files(&place, to);
        runs(&place, &copy("value > 17", "append"));
        assert_eq!(files(&place, to), before, "{to}");
        // No rows replace rows.
        runs(&place, &copy("value > 17", "overwrite"));
        assert_eq!(value(&place, &format!("SELECT count(*) FROM '{to}'")), 0, "{to}");
        assert_eq!(files(&place, to).len(), 1, "{to}");
    }
}

/// JSON lines have no columns without rows.
#[test]
fn copy_of_no_rows_to_json_lines_leaves_an_empty_file() {
    let place = Place::new();
    for (to, rest) in
        [("rows/", "STORED AS JSON"), ("parts/", "STORED AS JSON PARTITIONED BY (part)"), ("one.jsonl", "")]
    {
        runs(&place, &format!("COPY ({NO_ROWS}) TO '{to}' {rest}"));
        assert_eq!(value(&place, &format!("SELECT count(*) FROM '{to}'")), 0, "{to}");
        let declared = format!("CREATE EXTERNAL TABLE t (id BIGINT, text VARCHAR) STORED AS JSON LOCATION '{to}'");
        let found = sql(&place, &["--format", "csv", "-c", &format!("{declared}; SELECT id, text FROM t")]);
        assert_eq!(found.out, "id,text\n", "{to}: {found:?}");
    }
}

/// A file of vectors names its model even without rows. Expected: the footer of a file with rows.
#[test]
fn a_file_without_rows_names_its_model() {
    let place = Place::new();
    let copy = |to: &str, condition: &str| {
        runs(
            &place,
            &format!(
                "COPY (SELECT id, elmo_embed(text) AS v FROM 'reviews.jsonl' WHERE {condition}) TO '{to}' STORED AS PARQUET"
            ),
        );
        let shown = place.exits(&format!("inspect {} --json", files(&place, to)[0]), 0).json();
        let described = sql(&place, &["--format", "csv", "-c", &format!("DESCRIBE '{to}'")]);
        (shown, described.out)
    };
    let (none, some) = (copy("none/", "id < 0"), copy("some/", "id = 0"));
    for field in ["made_by", "columns"] {
        assert_eq!(none.0[field], some.0[field]);
    }
    assert!(none.0["made_by"]["elmo.fingerprint"].is_string() && none.0["rows"] == 0, "{none:?}");
    assert_eq!(none.1, some.1);
}

#[test]
fn partitions_by_all_columns_are_refused() {
    let place = Place::new();
    let copy = |rest: &str| format!("COPY (SELECT 1 AS a, 2 AS b) TO 'rows/' STORED AS PARQUET {rest}");
    for explain in ["", "EXPLAIN ", "EXPLAIN ANALYZE "] {
        refused(
            &place,
            &format!("{explain}{}", copy("PARTITIONED BY (a, b)")),
            2,
            "COPY … PARTITIONED BY (a, b): these are all columns of the query",
            "leave out one of them",
        );
    }
    let list = "COPY (SELECT 1 AS a, [2] AS b) TO 'rows/' STORED AS PARQUET PARTITIONED BY (b)";
    refused(&place, list, 2, "COPY … PARTITIONED BY b: values of b cannot be names of folders", "CAST(b AS VARCHAR)");
    assert!(!place.path("rows").exists());
    let keep = "OPTIONS ('execution.keep_partition_by_columns' true)";
    runs(&place, &copy(&format!("PARTITIONED BY (a, b) {keep}")));
    assert_eq!(rows(&place, "SELECT a, b FROM 'rows/'"), [json!({"a": 1, "b": 2})]);
}

/// CREATE TABLE AS refuses the same query. A table for people shows both columns, and CSV has them in their order.
#[test]
fn columns_of_the_same_name_are_refused() {
    let place = Place::new();
    let query = "SELECT a.id, b.id FROM (VALUES (1)) AS a (id) JOIN (VALUES (2)) AS b (id) ON a.id < b.id";
    let said = "the query has several columns called id, of which readers find one";
    let help = "with AS, such as \"id\" AS \"id_2\"";
    for target in ["x.parquet", "x.csv", "x.tsv", "x.jsonl", "x.arrow"] {
        for explain in ["", "EXPLAIN ", "EXPLAIN ANALYZE "] {
            refused(&place, &format!("{explain}COPY ({query}) TO '{target}'"), 2, &format!("COPY: {said}"), help);
        }
        assert!(!place.path(target).exists());
    }
    for format in ["json", "ndjson", "parquet"] {
        let ended = sql(&place, &["--format", format, "-c", query]);
        assert_eq!((ended.code, ended.out.as_str()), (Some(2), ""), "{format}: {ended:?}");
        assert!(ended.err.contains(&format!("--format {format}: {said}")), "{ended:?}");
    }
    assert_eq!(sql(&place, &["--format", "csv", "-c", query]).out, "id,id\n1,2\n");
    assert_eq!(sql(&place, &["-c", query]).code, Some(0));
    runs(&place, "COPY (SELECT 1 AS id, 2 AS \"ID\") TO 'x.csv'");
}

/// Expected: the values of the query.
#[test]
fn values_with_equals_signs_are_partitions() {
    let place = Place::new();
    for (format, folder) in [("PARQUET", "parquet"), ("CSV", "csv")] {
        let copy = "COPY (SELECT 1 AS id, 'It rained.' AS text, 'a=b' AS k, '=' AS l)";
        runs(&place, &format!("{copy} TO '{folder}/' STORED AS {format} PARTITIONED BY (k, l)"));
        let found = rows(&place, &format!("SELECT id, k, l FROM '{folder}/' WHERE k = 'a=b'"));
        assert_eq!(found, [json!({"id": 1, "k": "a=b", "l": "="})], "{folder}");
    }
    // As Hive and Spark write it.
    place.write("csv/k=c%3Dd/l=e/x.csv", "id,text\n2,It snowed.\n");
    place.exits("embed -q --model tiny csv --output vectors", 0);
    assert_eq!(rows(&place, "SELECT k FROM 'vectors' ORDER BY k"), [json!({"k": "a=b"}), json!({"k": "c=d"})]);
}

/// A value that is too long for a name. It is one of a row, so the error does not quote it.
#[test]
fn a_partition_that_cannot_be_written_is_an_error_without_its_value() {
    let place = Place::new();
    let copy = |rows: usize| {
        format!(
            "COPY (SELECT value AS id, CASE value WHEN 0 THEN repeat('secret', 50) ELSE 'short' END AS text, \
             repeat('x', 100) AS more FROM range(0, {rows})) TO 'new/rows/' STORED AS CSV PARTITIONED BY (text)"
        )
    };
    // A small file is written at the end, and a large one in parts.
    for (rows, folder_exists) in [(2, false), (200_000, false), (2, true)] {
        if folder_exists {
            fs::create_dir_all(place.path("new/rows")).unwrap();
        }
        let said = "new/rows/text=…/";
        let ended = refused(&place, &copy(rows), 5, said, "left(text, 50)");
        assert!(!ended.err.contains("secret") && ended.err.contains("name too long"), "{ended:?}");
        assert_eq!(place.path("new/rows").exists(), folder_exists, "{rows}");
        assert_eq!(files(&place, ".").len(), 1, "{rows}");
    }
}

/// Expected: the texts that the test wrote.
#[test]
fn stored_as_says_what_separates_the_cells() {
    let place = Place::new();
    let copy = |to: &str, rest: &str| format!("COPY (SELECT 1 AS id, 'a b' AS text) TO '{to}' {rest}");
    for (to, rest, written) in [
        ("a.tsv", "STORED AS TSV", "id\ttext\n1\ta b\n"),
        ("a.txt", "STORED AS tsv", "id\ttext\n1\ta b\n"),
        ("b.tsv", "STORED AS CSV OPTIONS (delimiter ';')", "id;text\n1;a b\n"),
        ("b.csv", "STORED AS TSV OPTIONS ('format.delimiter' ',')", "id,text\n1,a b\n"),
    ] {
        runs(&place, &copy(to, rest));
        assert_eq!(fs::read_to_string(place.path(to)).unwrap(), written, "{to} {rest}");
    }
    // The files of a folder are called .tsv, by which FROM knows their separator.
    for (to, rest) in [
        ("rows/", "STORED AS TSV"),
        ("zst/", "STORED AS TSV OPTIONS (compression zstd)"),
        ("parts.tsv", "PARTITIONED BY (id)"),
        ("parts/", "STORED AS TSV PARTITIONED BY (id)"),
    ] {
        runs(&place, &copy(to, rest));
        let name = &files(&place, to)[0];
        assert!(name.ends_with(if to == "zst/" { ".tsv.zst" } else { ".tsv" }), "{name}");
        assert_eq!(rows(&place, &format!("SELECT id, text FROM '{to}'")), [json!({"id": 1, "text": "a b"})], "{to}");
    }
    for (to, stored_as, by_name) in [
        ("x.tsv", "CSV", "TSV"),
        ("x.tsv.gz", "CSV", "TSV"),
        ("x.csv", "TSV", "CSV"),
        ("x.csv", "PARQUET", "CSV"),
        ("x.jsonl", "CSV", "JSON"),
    ] {
        let said = format!("{to}: STORED AS {stored_as} contradicts the extension, by which FROM reads {by_name}");
        refused(&place, &copy(to, &format!("STORED AS {stored_as}")), 2, &said, &format!("STORED AS {by_name}"));
        assert!(!place.path(to).exists());
    }
    // Tables of files with tabs.
    place.write("logs/a.tsv", "id\ttext\n7\ta,b\n");
    place.write("logs/b.csv", "id,text\n8,c\n");
    place.write("tabs.txt", "id\ttext\n7\ta,b\n");
    for location in ["logs/", "logs/a.tsv", "tabs.txt"] {
        let create = format!("CREATE EXTERNAL TABLE t STORED AS TSV LOCATION '{location}'; SELECT * FROM t");
        let found = sql(&place, &["--format", "csv", "-c", &create]);
        assert_eq!(found.out, "id,text\n7,\"a,b\"\n", "{location}: {found:?}");
    }
    for (location, columns) in [("logs/", ""), ("new/", "(id BIGINT, text VARCHAR)")] {
        let create = format!("CREATE EXTERNAL TABLE t {columns} STORED AS TSV LOCATION '{location}'");
        let count = format!("{create}; INSERT INTO t SELECT 8, 'a,b'; SELECT sum(id) AS n FROM t");
        let found = sql(&place, &["--format", "csv", "-c", &count]);
        assert!(found.out.ends_with(if columns.is_empty() { "n\n15\n" } else { "n\n8\n" }), "{found:?}");
        assert_eq!(value(&place, &format!("SELECT max(id) FROM '{location}*.tsv'")), 8);
    }
}

/// Parquet's INTERVAL counts milliseconds, and those of DataFusion nanoseconds.
#[test]
fn types_that_parquet_cannot_hold_are_refused() {
    let place = Place::new();
    let query = "SELECT interval '1 day' AS step, 1 AS a";
    let said = "column \"step\" is Interval(MonthDayNano), which Parquet cannot hold";
    let create = "CREATE EXTERNAL TABLE t (step INTERVAL, a BIGINT) STORED AS PARQUET LOCATION 'rows/'";
    for statement in [
        format!("COPY ({query}) TO 'steps.parquet'"),
        format!("COPY ({query}) TO 'rows/' STORED AS PARQUET PARTITIONED BY (a)"),
        format!("EXPLAIN COPY ({query}) TO 'steps.parquet'"),
        format!("{create}; INSERT INTO t {query}"),
    ] {
        refused(&place, &statement, 2, said, "CAST(\"step\" AS VARCHAR)");
    }
    let ended = sql(&place, &["--format", "parquet", "-c", query]);
    assert!(ended.code == Some(2) && ended.err.contains(said), "{ended:?}");
    // Cast, and in Arrow.
    runs(&place, "COPY (SELECT CAST(interval '1 day' AS VARCHAR) AS step) TO 'steps.parquet'");
    runs(&place, &format!("COPY ({query}) TO 'steps.arrow'"));
}

#[test]
fn explain_shows_what_happens_to_the_files_of_the_folder() {
    let place = Place::new();
    for option in ["append", "overwrite"] {
        let copy =
            format!("COPY (SELECT 1 AS id) TO 'rows/' STORED AS PARQUET OPTIONS ({option} true, compression snappy)");
        let plan = sql(&place, &["-c", &format!("EXPLAIN FORMAT INDENT {copy}")]);
        assert_eq!(plan.code, Some(0), "{plan:?}");
        assert!(
            plan.out.contains(&format!("{option} true")) && plan.out.contains("format.compression snappy"),
            "{plan:?}"
        );
        assert!(plan.out.contains("DataSinkExec"), "{plan:?}");
        let plan = sql(&place, &["-c", &format!("EXPLAIN ANALYZE {copy}")]);
        assert!(plan.out.contains(&format!("AtomicWriteExec: sink, {option}=true")), "{plan:?}");
    }
}

#[test]
fn options_that_do_not_exist_are_refused_with_those_that_do() {
    let place = Place::new();
    place.write("a.csv", "id\n1\n");
    let copy = |to: &str, options: &str| format!("COPY (SELECT 1 AS id) TO '{to}' OPTIONS ({options})");
    let create = |kind: &str, options: &str| {
        format!("CREATE EXTERNAL TABLE t STORED AS {kind} LOCATION 'a.csv' OPTIONS ({options})")
    };
    for (statement, said, help) in [
        (
            copy("x.csv", "compresion gzip"),
            "COPY … OPTIONS: CSV has no option \"compresion\"",
            "did you mean compression? ",
        ),
        (copy("x.csv", "'format.has_haeder' true"), "no option \"has_haeder\"", "did you mean has_header? "),
        (copy("x.csv", "apend true"), "no option \"apend\"", "did you mean append? "),
        (copy("x.parquet", "max_row_group_sise 7"), "PARQUET has no option", "did you mean max_row_group_size? "),
        (copy("x.parquet", "'format.encodin::id' 'plain'"), "no option \"encodin::id\"", "encoding"),
        (copy("x.parquet", "'execution.keep_partition_columns' true"), "no option", "keep_partition_by_columns"),
        (copy("x.arrow", "compression zstd"), "ARROW has no option \"compression\"", "legal options are append, "),
        (copy("x.jsonl", "zebra 1"), "JSON has no option \"zebra\"", "legal options are append, compression, "),
        (copy("x.csv", "compression gzpi"), "compression: ", "gzip, zstd, bzip2, xz"),
        (copy("x.csv", "has_header maybe"), "has_header: ", "true or false"),
        (copy("x.csv", "delimiter 'ab'"), "delimiter: ", "one ASCII character"),
        (copy("rows/", "append true, append true"), "COPY … OPTIONS: append is given twice", "once"),
        (
            create("CSV", "'format.delimeter' ';'"),
            "CREATE EXTERNAL TABLE … OPTIONS: CSV has no",
            "did you mean delimiter? ",
        ),
        (create("TSV", "'format.delimeter' ';'"), "TSV has no option", "did you mean delimiter? "),
        (create("JSON", "compression lz4"), "compression: ", "gzip, zstd, bzip2, xz"),
        (create("ARROW", "compression gzip"), "ARROW has no option", "ARROW has none"),
        (create("CSV", "'aws.region' 'x'"), "no option \"aws.region\"", "legal options are "),
    ] {
        refused(&place, &statement, 2, said, help);
        refused(&place, &format!("EXPLAIN {statement}"), 2, said, help);
    }
    for to in ["x.csv.bz2", "x.csv.xz", "x.jsonl.lz4", "x.cvs"] {
        let said = format!("{to}: COPY cannot write files with this extension");
        refused(&place, &copy(to, "append false"), 2, &said, ".gz or .zst");
    }
    let said = "x.csv.bz2: COPY cannot write files with this extension";
    refused(&place, "COPY (SELECT 1 AS id) TO 'x.csv.bz2' STORED AS CSV", 2, said, ".gz or .zst");
    refused(&place, "COPY (SELECT 1 AS id) TO 'rows'", 2, "rows: a folder needs STORED AS", "PARQUET");
    // The compression is given.
    runs(&place, "COPY (SELECT 1 AS id) TO 'x.csv.bz2' STORED AS CSV OPTIONS (compression bzip2)");
    assert!(fs::read(place.path("x.csv.bz2")).unwrap().starts_with(b"BZh"));
}

/// Expected: links stay links, and the file that one names has the rows.
#[test]
fn copy_to_a_link_writes_the_file_that_it_names() {
    let place = Place::new();
    place.write("real.csv", "id\n1\n");
    place.write("blob", "before");
    place.write("folder/README.md", "about");
    let link = |to: &str, name: &str| symlink(to, place.path(name)).unwrap();
    link("real.csv", "link.csv");
    link("link.csv", "second.csv");
    link("blob", "blob.csv");
    link("folder", "linked");
    link("nowhere/x.csv", "broken.csv");
    link("nowhere", "gone");
    link("loop.csv", "loop.csv");
    // Large enough to be uploaded in parts.
    let many = "SELECT value AS id, repeat('x', 100) AS text FROM range(0, 200000)";
    for (to, file, query, sum) in [
        ("link.csv", "real.csv", "SELECT 7 AS id", 7),
        ("second.csv", "real.csv", many, 199_999 * 100_000_i64),
        ("blob.csv", "blob", "SELECT 7 AS id", 7),
    ] {
        runs(&place, &format!("COPY ({query}) TO '{to}'"));
        assert!(place.path(to).is_symlink() && !place.path(file).is_symlink(), "{to}");
        assert_eq!(value(&place, &format!("SELECT sum(id) FROM '{to}'")), sum, "{to}");
    }
    runs(&place, "COPY (SELECT 7 AS id) TO 'linked/new.csv'");
    runs(&place, "COPY (SELECT 7 AS id) TO 'linked/rows' STORED AS CSV");
    assert_eq!(value(&place, "SELECT sum(id) FROM 'folder'"), 14);
    // An error leaves what was there.
    let before = fs::read(place.path("real.csv")).unwrap();
    assert_eq!(
        sql(&place, &["-c", "COPY (SELECT 1 / (value - 9) AS id FROM range(0, 10)) TO 'link.csv'"]).code,
        Some(3)
    );
    assert_eq!(fs::read(place.path("real.csv")).unwrap(), before);
    for (to, rest, said) in [
        ("broken.csv", "", "broken.csv is a link to nowhere/x.csv, which does not exist"),
        ("gone/x.csv", "", "gone is a link to nowhere, which does not exist"),
        ("gone/", "STORED AS CSV", "gone is a link to nowhere, which does not exist"),
        ("loop.csv", "", "loop.csv is a link that leads to itself"),
        ("real.csv/x.csv", "", "real.csv is a file, and COPY needs a folder there"),
        ("real.csv/", "", "real.csv is a file, and COPY needs a folder there"),
        ("link.csv/x/y", "STORED AS CSV", "link.csv is a file, and COPY needs a folder there"),
        ("blob", "STORED AS PARQUET", "blob is a file, and COPY needs a folder there"),
        ("real.csv", "PARTITIONED BY (part)", "real.csv is a file, and COPY needs a folder there"),
    ] {
        for explain in ["", "EXPLAIN "] {
            let copy = format!("{explain}COPY (SELECT 1 AS id, 2 AS part) TO '{to}' {rest}");
            refused(&place, &copy, 2, said, "");
        }
    }
    assert_eq!(fs::read(place.path("real.csv")).unwrap(), before);
    assert!(place.path("broken.csv").is_symlink() && !place.path("nowhere").exists());
    // A pipe is not replaced.
    assert_eq!(Command::new("mkfifo").arg(place.path("pipe.csv")).status().unwrap().code(), Some(0));
    refused(&place, "COPY (SELECT 1 AS id) TO 'pipe.csv'", 2, "pipe.csv: is a pipe or device", "--format");
    refused(&place, "COPY (SELECT 1 AS id) TO '/dev/stdout' STORED AS CSV", 2, "is a file", "");
}

#[test]
fn the_output_of_embed_is_no_file_and_no_broken_link() {
    let place = Place::new();
    place.write("text.csv", "text\nIt rained.\n");
    place.write("other.csv", "before");
    let link = |to: &str, name: &str| symlink(to, place.path(name)).unwrap();
    fs::create_dir(place.path("folder")).unwrap();
    link("folder", "linked");
    link("nowhere", "gone");
    link("loop", "loop");
    for (output, said) in [
        ("gone", "gone is a link to nowhere, which does not exist, but an output must be a folder"),
        ("gone/below", "gone is a link to nowhere, which does not exist, but an output must be a folder"),
        ("loop", "loop is a link that leads to itself, but an output must be a folder"),
        ("other.csv", "other.csv is a file, but an output must be a folder"),
    ] {
        let ended = place.exits(&format!("embed -q --model tiny text.csv -o {output}"), 2);
        assert!(ended.err.contains(said) && ended.err.contains("  help: "), "{output}: {ended:?}");
    }
    assert!(place.path("gone").is_symlink() && !place.path("nowhere").exists());
    place.exits("embed -q --model tiny text.csv -o linked", 0);
    assert!(place.path("linked").is_symlink() && place.path("folder/_elmo").exists());
}

#[test]
fn a_folder_without_data_is_one_error_however_it_is_written() {
    let place = Place::new();
    place.write("notes/README.md", "nothing to read");
    place.write("hidden/_a.csv", "id\n1\n");
    fs::create_dir(place.path("e")).unwrap();
    for name in ["e", "e/", "./e", "notes", "notes/", "hidden/"] {
        let folder = name.trim_end_matches('/');
        let said = format!("error: {folder}/: the folder has no file that is read as a table\n");
        refused(&place, &format!("SELECT * FROM '{name}'"), 3, &said, ".parquet");
    }
    // A table may have the name.
    runs(&place, "CREATE TABLE e AS SELECT 1 AS id; SELECT * FROM e; DROP TABLE IF EXISTS e");
}
