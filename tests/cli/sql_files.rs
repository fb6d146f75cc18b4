//! `elmo sql` over files: what is inferred, what is refused and where the error is, folders as columns, missing names.

use serde_json::{Value, json};

use crate::{
    place::{Ended, Place},
    sql::{rows, sql, value},
};

fn refused(place: &Place, statement: &str, code: i32) -> Ended {
    let ended = sql(place, &["--format", "csv", "-c", statement]);
    assert_eq!(ended.code, Some(code), "{statement}: {ended:?}");
    assert!(!ended.err.contains("secret"), "{statement}: {ended:?}");
    ended
}

/// Expected: the numbers are those that the test wrote; sums by Gauss.
#[test]
fn csv_with_line_breaks_in_cells_is_inferred_however_large_it_is() {
    let place = Place::new();
    // Quotation marks, commas and backslashes in texts; cells that are longer than any piece of a file.
    let long = "a line, of text\n".repeat(2000);
    let texts = ["He said, \"\"no\"\",\nand left.\n\nsee \\ it", "5\\\"\"\n", long.as_str()];
    for (number, text) in texts.iter().enumerate() {
        let count = if text.len() > 1000 { 30 } else { 3000 };
        let rows = |delimiter: char| -> String {
            (0..count).map(|id| format!("{id}{delimiter}\"{text}\"{delimiter}{id}.5\n")).collect()
        };
        place.write("a.csv", format!("id,text,x\n{}", rows(',')));
        place.write("b.csv", format!("id;text;x\n{}", rows(';')));
        let expected = json!([count, count * (count - 1) / 2, "Float64"]);
        let query =
            |table: &str| format!("SELECT [count(*)::text, sum(id)::text, max(arrow_typeof(x))] AS found FROM {table}");
        let of_file = value(&place, &query("'a.csv'"));
        let shown = |value: &Value| -> Vec<String> {
            value.as_array().unwrap().iter().map(|v| v.as_str().map_or(v.to_string(), str::to_owned)).collect()
        };
        assert_eq!(shown(&of_file), shown(&expected), "text {number}");
        for (file, options) in [("a.csv", ""), ("b.csv", "OPTIONS ('format.delimiter' ';')")] {
            let create = format!("CREATE EXTERNAL TABLE t STORED AS CSV LOCATION '{file}' {options}");
            let ended = sql(&place, &["--format", "ndjson", "-c", &format!("{create}; {}", query("t"))]);
            let found: Value = serde_json::from_str(&ended.out).unwrap_or_else(|_| panic!("{ended:?}"));
            assert_eq!(shown(&found["found"]), shown(&expected), "{create}");
        }
    }
    // Types come from the first 1,000 rows, as documented: a later float does not fit.
    let numbers: String = (0..1000).map(|id| format!("{id}\n")).collect();
    place.write("c.csv", format!("n\n{numbers}0.5\n"));
    let ended = refused(&place, "SELECT max(n) FROM 'c.csv'", 3);
    assert!(ended.err.contains("c.csv: after row 1000: ") && ended.err.contains("Int64"), "{ended:?}");
    place.write("d.csv", format!("n\n0.5\n{numbers}"));
    assert_eq!(value(&place, "SELECT max(n) FROM 'd.csv'"), 999.0);
}

#[test]
fn a_json_key_of_a_late_row_is_a_column() {
    let place = Place::new();
    let row = "{\"id\": 1, \"object\": {\"a\": 1}}\n";
    let rows_before = row.repeat(1500);
    let late = "{\"id\": 2.5, \"late\": \"x\", \"object\": {\"b\": [1]}}\n";
    let array = format!("[{}, {}]", vec![row.trim(); 1500].join(",\n"), late.trim());
    for (name, text) in [("late.jsonl", &format!("{rows_before}{late}")), ("late.json", &array)] {
        place.write(name, text);
        let query = format!("SELECT * FROM '{name}' WHERE late IS NOT NULL");
        let expected = json!({"id": 2.5, "object": {"a": null, "b": [1]}, "late": "x"});
        assert_eq!(rows(&place, &query), [expected], "{name}");
    }
    place.write(
        "array.json",
        format!("[{} {}]", row.trim().to_owned() + &format!(", {}", row.trim()).repeat(1500), ", {\"late\": 1}"),
    );
    let array =
        "CREATE EXTERNAL TABLE t STORED AS JSON LOCATION 'array.json' OPTIONS ('format.newline_delimited' 'false')";
    let ended = sql(&place, &["--format", "csv", "-c", &format!("{array}; SELECT sum(late) AS s FROM t")]);
    assert_eq!(ended.out, "s\n1\n", "{ended:?}");
    // The user's limit counts.
    let create = "CREATE EXTERNAL TABLE t STORED AS JSON LOCATION 'late.jsonl'";
    let limited = format!("{create} OPTIONS ('format.schema_infer_max_rec' '1000'); SELECT late FROM t");
    refused(&place, &limited, 2);
    let ended = sql(&place, &["--format", "csv", "-c", &format!("{create}; SELECT max(late) AS m FROM t")]);
    assert_eq!(ended.out, "m\nx\n", "{ended:?}");
}

/// The row of an error is counted as by `elmo embed`: the rows before it.
#[test]
fn errors_name_the_file_and_the_row() {
    let place = Place::new();
    let cells = "1,\"two\nlines\"\n".repeat(2500);
    place.write("csv/1.csv", format!("id,text\n{cells}"));
    place.write("type.csv", format!("id,text\n{cells}secret,y\n{cells}"));
    place.write("cells.csv", format!("id,text\n{cells}1,secret,z\n{cells}"));
    place.write("first.csv", "id,text\n1,y\n1,secret,z\n");
    place.write("utf8.csv", [format!("id,text\n{cells}").as_bytes(), b"1,secret \xff\n"].concat());
    let objects = "{\"id\": 1}\n\n".repeat(2500);
    place.write("type.jsonl", format!("{objects}{{\"id\": \"secret\"}}\n{objects}"));
    place.write("syntax.jsonl", format!("{objects}{{\"id\": secret}}\n{objects}"));
    place.write("list.jsonl", format!("{objects}[\"secret\"]\n{objects}"));
    assert_eq!(place.shell("gzip -k type.csv && cp type.csv csv/2.csv").code, Some(0));
    for (file, row) in [
        ("type.csv", 2500),
        ("type.csv.gz", 2500),
        ("cells.csv", 2500),
        ("first.csv", 1),
        ("utf8.csv", 2500),
        ("syntax.jsonl", 2500),
        ("list.jsonl", 2500),
    ] {
        let ended = refused(&place, &format!("SELECT max(id), max(1) FROM '{file}'"), 3);
        assert!(ended.err.contains(&format!("{file}: after row {row}: ")), "{file}: {ended:?}");
        let kind = if file.contains("json") { "JSON" } else { "CSV" };
        let options = if file.ends_with(".gz") { "OPTIONS ('format.compression' 'gzip')" } else { "" };
        let given =
            format!("CREATE EXTERNAL TABLE t (id BIGINT, text VARCHAR) STORED AS {kind} LOCATION '{file}' {options}");
        let ended = refused(&place, &format!("{given}; SELECT id, text FROM t"), 3);
        assert!(ended.err.contains(&format!("{file}: after row {row}: ")), "{given}: {ended:?}");
    }
    let ended = refused(&place, "SELECT max(id) FROM 'csv'", 3);
    assert!(ended.err.contains("csv/2.csv: after row 2500: "), "{ended:?}");
    // A declared type. Without one, it is a column of strings.
    let given = "CREATE EXTERNAL TABLE t (id BIGINT) STORED AS JSON LOCATION 'type.jsonl'; SELECT max(id) FROM t";
    let ended = refused(&place, given, 3);
    assert!(ended.err.contains("type.jsonl: after row 2500: "), "{ended:?}");
    assert_eq!(value(&place, "SELECT count(*) FROM 'type.jsonl' WHERE id = '1'"), 5000);
    // Without the column, nothing is wrong.
    assert_eq!(value(&place, "SELECT count(text) FROM 'type.csv'"), 5001);
}

#[test]
fn two_columns_of_one_name_are_refused_with_their_file() {
    let place = Place::new();
    place.write("a.csv", "id,text,id\n1,a,2\n");
    let ended = refused(&place, "SELECT text FROM 'a.csv'", 3);
    assert!(ended.err.contains("a.csv: after row 0: two columns are named \"id\"; rename one of them"), "{ended:?}");
    place.write("a.csv", "id,text,ID\n1,a,2\n");
    assert_eq!(value(&place, "SELECT \"ID\" FROM 'a.csv'"), 2);
}

/// Expected: the rows that the test wrote.
#[test]
fn an_array_of_objects_is_a_table() {
    let place = Place::new();
    let objects: Vec<String> = (0..2000)
        .map(|id| {
            format!("{{\n  \"id\": {id},\n  \"text\": \"no ], [ or }} of {id}\",\n  \"x\": {{\"y\": [{id}]}}\n}}")
        })
        .collect();
    let array = format!("\u{feff}\n [{}]\n", objects.join(",\n"));
    place.write("a.json", &array);
    place.write("a.jsonl", &array);
    place.write("both/1.json", "[{\"id\": 1}, {\"id\": 2, \"late\": true}]");
    place.write("both/2.json", "{\"id\": 3}\n{\"id\": 4}\n");
    place.write("none.json", "[]");
    assert_eq!(place.shell("gzip -k a.json && zstd -q a.json").code, Some(0));
    for name in ["a.json", "a.jsonl", "a.json.gz", "a.json.zst"] {
        // Several threads would each read a part of the file.
        for size in [1, 10_000_000] {
            let set = format!("SET datafusion.optimizer.repartition_file_min_size = {size}");
            let query = format!(
                "SELECT count(*) AS n, sum(id) AS s, max(x['y'][1]) AS m, count(DISTINCT text) AS t FROM '{name}'"
            );
            let ended = sql(&place, &["--format", "csv", "-c", &set, "-c", &query]);
            assert_eq!(ended.out, "n,s,m,t\n2000,1999000,1999,2000\n", "{name}: {ended:?}");
            let first = format!("SELECT id FROM '{name}' LIMIT 3");
            let ended = sql(&place, &["--format", "csv", "-c", &set, "-c", &first]);
            assert_eq!(ended.out, "id\n0\n1\n2\n", "{name}: {ended:?}");
        }
    }
    // The beginning of the file tells, whatever the options say.
    for options in ["", "OPTIONS ('format.newline_delimited' 'false')"] {
        let create = format!("CREATE EXTERNAL TABLE t STORED AS JSON LOCATION 'both/' {options}");
        let ended = sql(&place, &["--format", "csv", "-c", &format!("{create}; SELECT sum(id) AS s FROM t")]);
        assert_eq!(ended.out, "s\n10\n", "{options}: {ended:?}");
    }
    assert_eq!(rows(&place, "SELECT * FROM 'both' WHERE id = 2"), [json!({"id": 2, "late": true})]);
    assert_eq!(value(&place, "SELECT count(*) FROM 'none.json'"), 0);
    for (text, row, reason) in [
        ("[{\"id\": 1}, {\"id\": 2}, 7]", 2, "not a JSON object"),
        ("[{\"id\": 1}, {\"id\": 2}, {\"id\": secret}]", 2, "not valid JSON"),
        ("[{\"id\": 1}, {\"id\": 2}", 2, "the array does not end"),
        ("[{\"id\": 1}] {\"id\": 2}", 1, "something follows the end of the array"),
        ("[{\"id\": 1} {\"id\": 2}]", 1, "not separated by single commas"),
    ] {
        place.write("wrong.json", text);
        let ended = refused(&place, "SELECT * FROM 'wrong.json'", 3);
        assert!(ended.err.contains(&format!("wrong.json: after row {row}: Json error: ")), "{text}: {ended:?}");
        assert!(ended.err.contains(reason), "{text}: {ended:?}");
        let given = "CREATE EXTERNAL TABLE t (id BIGINT) STORED AS JSON LOCATION 'wrong.json'; SELECT * FROM t";
        refused(&place, given, 3);
    }
}

/// Expected: the values as the test wrote them; `types` by hand.
#[test]
fn json_values_of_several_kinds_are_strings() {
    let place = Place::new();
    place.write(
        "a.jsonl",
        r#"{"b": 1, "a": [1, "x"], "n": 18446744073709551615, "list": [1], "s": "\ud83d\ude00 \ud800!"}
{"b": "x", "a": [true], "n": 2, "list": {"k": 1}, "s": "plain"}
{"b": 2.50, "a": [], "n": null, "list": 3, "s": null}
"#,
    );
    let found = rows(&place, "SELECT b, a, n, s FROM 'a.jsonl'");
    let expected = [
        json!({"b": "1", "a": ["1", "x"], "n": 18446744073709551615_u64 as f64, "s": "😀 \u{fffd}!"}),
        json!({"b": "x", "a": ["true"], "n": 2.0, "s": "plain"}),
        json!({"b": "2.50", "a": [], "n": null, "s": null}),
    ];
    assert_eq!(found, expected);
    // The order is that of the file.
    let described = sql(&place, &["--format", "csv", "-c", "DESCRIBE 'a.jsonl'"]);
    let names: Vec<&str> = described.out.lines().skip(1).filter_map(|line| line.split(',').next()).collect();
    assert_eq!(names, ["b", "a", "n", "list", "s"], "{described:?}");
    // No type holds a number and a list.
    let ended = refused(&place, "SELECT list FROM 'a.jsonl'", 3);
    assert!(ended.err.contains("a.jsonl: after row 0: "), "{ended:?}");
}

/// Tabs, quotation marks and line ends in cells come back. Expected: the texts that the test wrote.
#[test]
fn copy_writes_tab_separated_values_that_can_be_read() {
    let place = Place::new();
    let copy = "COPY (SELECT 1 AS id, E'a\\tb, \"c\"\\nd' AS text UNION ALL SELECT 2, 'e') TO";
    for name in ["a.tsv", "a.tsv.gz"] {
        assert_eq!(sql(&place, &["-c", &format!("{copy} '{name}'")]).code, Some(0));
        let found = rows(&place, &format!("SELECT * FROM '{name}' ORDER BY id"));
        assert_eq!(found, [json!({"id": 1, "text": "a\tb, \"c\"\nd"}), json!({"id": 2, "text": "e"})], "{name}");
    }
    let written = std::fs::read_to_string(place.path("a.tsv")).unwrap();
    assert!(written.starts_with("id\ttext\n"), "{written:?}");
    // The statement's delimiter counts.
    assert_eq!(sql(&place, &["-c", &format!("{copy} 'b.tsv' OPTIONS (delimiter ';')")]).code, Some(0));
    assert!(std::fs::read_to_string(place.path("b.tsv")).unwrap().starts_with("id;text\n"));
    // Files of a folder are called .tsv, too.
    assert_eq!(sql(&place, &["-c", &format!("{copy} 'c.tsv' PARTITIONED BY (id)")]).code, Some(0));
    assert_eq!(rows(&place, "SELECT text FROM 'c.tsv' WHERE id = 1"), [json!({"text": "a\tb, \"c\"\nd"})]);
}

/// The names and contents of the files below a folder, sorted.
fn files(place: &Place, folder: &str) -> Vec<String> {
    let listed = place.shell(&format!("find {folder} -type f -exec md5sum {{}} + | sort"));
    assert_eq!(listed.code, Some(0), "{listed:?}");
    listed.out.lines().map(str::to_owned).collect()
}

#[test]
fn copy_changes_no_files_of_others() {
    let place = Place::new();
    place.write("theirs/a.csv", "id\n1\n");
    std::fs::create_dir(place.path("ours")).unwrap();
    std::os::unix::fs::symlink(place.path("theirs"), place.path("ours/link")).unwrap();
    let copy =
        |to: &str, option: &str| format!("COPY (SELECT 7 AS id) TO '{to}' STORED AS CSV OPTIONS ({option} true)");
    let ended = refused(&place, &copy("ours/", "overwrite"), 2);
    assert!(ended.err.contains("ours/link: is a link to another folder"), "{ended:?}");
    assert_eq!(std::fs::read_to_string(place.path("theirs/a.csv")).unwrap(), "id\n1\n");
    // Appending to the output of a job would make it unreadable for the job.
    place.write("text.csv", "text\nIt rained.\n");
    place.exits("embed -q --model tiny text.csv --output vectors", 0);
    for option in ["append", "overwrite"] {
        let ended = refused(&place, &copy("vectors/", option), 2);
        assert!(ended.err.contains("holds the output of elmo embed or elmo stream"), "{ended:?}");
    }
    let table = "CREATE EXTERNAL TABLE t STORED AS PARQUET LOCATION 'vectors/'";
    for insert in ["INSERT INTO t SELECT * FROM t", "EXPLAIN ANALYZE INSERT INTO t SELECT * FROM t"] {
        let ended = refused(&place, &format!("{table}; {insert}"), 2);
        assert!(ended.err.contains("holds the output of elmo embed or elmo stream"), "{ended:?}");
    }
    // Neither would a file or folder in it, or one that a link leads to.
    let before = files(&place, "vectors");
    let part = before.iter().find(|line| line.ends_with(".parquet")).unwrap();
    let part = part.split_whitespace().last().unwrap();
    std::os::unix::fs::symlink(place.path("vectors"), place.path("linked")).unwrap();
    let targets = [part, "vectors/more.parquet", "vectors/_elmo/done.json", "vectors/a/b.csv", "linked/more.csv"];
    let to_files = targets.map(|to| format!("COPY (SELECT 1 AS id) TO '{to}'"));
    let to_folders = ["vectors/", "vectors/sub/", "vectors/_elmo/", "linked/a/b/"]
        .map(|to| format!("COPY (SELECT 1 AS id) TO '{to}' STORED AS PARQUET"));
    let table = "CREATE EXTERNAL TABLE t (id BIGINT) STORED AS CSV LOCATION 'vectors/_elmo/'";
    let insert = format!("{table}; INSERT INTO t VALUES (1)");
    for statement in to_files.into_iter().chain(to_folders).chain([insert]) {
        let ended = refused(&place, &statement, 2);
        assert!(ended.err.contains("holds the output of elmo embed or elmo stream"), "{statement}: {ended:?}");
    }
    assert_eq!(files(&place, "vectors"), before);
    assert_eq!(value(&place, "SELECT count(*) FROM 'vectors'"), 1);
    place.exits("inspect vectors", 0);
}

#[test]
fn copy_to_a_folder_that_is_not_empty_says_what_happens_to_its_files() {
    let place = Place::new();
    let copy = |from: i64, to: &str, rest: &str| {
        format!("COPY (SELECT value AS id, value % 2 AS part FROM range({from}, {})) TO '{to}' {rest}", from + 10)
    };
    for (to, rest) in [
        ("plain/", "STORED AS PARQUET"),
        ("bare", "STORED AS CSV"),
        ("named.d/", "STORED AS JSON"),
        ("parts/", "STORED AS CSV PARTITIONED BY (part)"),
        ("x.csv", "PARTITIONED BY (part)"),
    ] {
        let folder = to.trim_end_matches('/');
        let sum = || value(&place, &format!("SELECT sum(id) FROM '{folder}/'"));
        // What readers ignore does not count.
        place.write(&format!("{folder}/_SUCCESS"), "done");
        place.write(&format!("{folder}/.hidden/a.csv"), "a\n1\n");
        std::fs::create_dir(place.path(&format!("{folder}/nothing"))).unwrap();
        assert_eq!(sql(&place, &["-c", &copy(0, to, rest)]).code, Some(0), "{to}");
        assert_eq!(sum(), 45, "{to}");
        // 45 is the sum of 0 to 9 and 145 that of 10 to 19.
        let before = files(&place, folder);
        let again = copy(10, to, rest);
        for again in [again.clone(), format!("EXPLAIN ANALYZE {again}"), format!("{again} OPTIONS (overwrite false)")] {
            let ended = refused(&place, &again, 2);
            let lie = if rest.contains("PARTITIONED") { "2 files lie" } else { "1 file lies" };
            let expected = format!("/{folder}/: COPY writes to an empty folder, and {lie} in this one\n");
            assert!(ended.err.contains(&expected), "{again}: {ended:?}");
            assert!(ended.err.contains("OPTIONS (overwrite true) replaces the files"), "{again}: {ended:?}");
            assert_eq!(files(&place, folder), before, "{again}");
        }
        // Nothing is written.
        assert_eq!(sql(&place, &["-c", &format!("EXPLAIN {again}")]).code, Some(0), "{to}");
        assert_eq!(sql(&place, &["-c", &format!("{again} OPTIONS (append true)")]).code, Some(0), "{to}");
        assert_eq!(sum(), 45 + 145, "{to}");
        let both = files(&place, folder);
        assert!(before.iter().all(|file| both.contains(file)), "{to}: {both:?}");
        // A query that fails after it has written rows.
        let failing = format!(
            "COPY (SELECT 1 / (value - 29999) AS id, value % 2 AS part FROM range(0, 30000)) TO '{to}' {rest} \
             OPTIONS (overwrite true)"
        );
        let ended = sql(&place, &["-c", "SET datafusion.execution.batch_size = 1000", "-c", &failing]);
        assert_eq!((ended.code, files(&place, folder)), (Some(3), both), "{to}: {ended:?}");
        // The statement may read what it replaces. By hand: 2 * 190.
        let twice = format!("COPY (SELECT id * 2 AS id, id % 2 AS part FROM '{folder}/') TO '{to}' {rest}");
        assert_eq!(sql(&place, &["-c", &format!("{twice} OPTIONS ('overwrite' 'true')")]).code, Some(0), "{to}");
        assert_eq!(sum(), 380, "{to}");
        let after = files(&place, folder);
        assert!(
            before.iter().filter(|file| !file.contains("/_") && !file.contains("/.")).all(|file| !after.contains(file))
        );
        assert!(
            place.path(&format!("{folder}/_SUCCESS")).exists()
                && place.path(&format!("{folder}/.hidden/a.csv")).exists()
        );
    }
    // Folders of partitions that no longer exist are gone.
    let one =
        "COPY (SELECT 1 AS id, 7 AS part) TO 'parts/' STORED AS CSV PARTITIONED BY (part) OPTIONS (overwrite true)";
    assert_eq!(sql(&place, &["-c", one]).code, Some(0));
    assert!(place.path("parts/part=7").exists() && !place.path("parts/part=1").exists());
    // Files that are no data stay.
    place.write("parts/README.md", "about the parts\n");
    let refuse = "COPY (SELECT 1 AS id, 7 AS part) TO 'parts/' STORED AS CSV PARTITIONED BY (part)";
    assert!(refused(&place, refuse, 2).err.contains("2 files lie"));
    assert_eq!(sql(&place, &["-c", one]).code, Some(0));
    assert!(place.path("parts/README.md").exists());
    // One file is replaced, as before.
    for rest in ["", "OPTIONS (overwrite true)"] {
        assert_eq!(sql(&place, &["-c", &copy(0, "one.csv", rest)]).code, Some(0));
    }
    for (statement, said) in [
        (copy(0, "one.csv", "OPTIONS (append true)"), "one.csv: COPY cannot append to a file"),
        (
            copy(0, "bare", "STORED AS CSV OPTIONS (append true, overwrite true)"),
            "append and overwrite exclude each other",
        ),
        (copy(0, "bare", "STORED AS CSV OPTIONS (overwrite 7)"), "overwrite is true or false"),
    ] {
        let ended = refused(&place, &statement, 2);
        assert!(ended.err.contains(said) && ended.err.contains("  help: "), "{statement}: {ended:?}");
    }
    // The output of a job has a manifest.
    place.exits("embed reviews.jsonl --model tiny -q --limit 5 -o vectors", 0);
    let before = files(&place, "vectors");
    let over = "COPY (SELECT 1 AS id) TO 'vectors/' STORED AS PARQUET OPTIONS (overwrite true)";
    let ended = refused(&place, over, 2);
    assert!(ended.err.contains("holds the output of elmo embed"), "{ended:?}");
    assert_eq!(files(&place, "vectors"), before);
    // INSERT adds.
    let insert = "CREATE EXTERNAL TABLE t STORED AS CSV LOCATION 'bare/'; INSERT INTO t SELECT 1000, 0";
    assert_eq!(sql(&place, &["-c", insert]).code, Some(0));
    assert_eq!(value(&place, "SELECT sum(id) FROM 'bare/'"), 1380);
}

#[test]
fn a_quotation_that_is_never_closed_is_an_error() {
    let place = Place::new();
    place.write("a.csv", "id,text\n1,a\n2,\"b\n3,c\n");
    place.write("b.csv", "id;text\n1;a\n2;'b\n3;c\n");
    place.write("c.csv", format!("id,text\n{}2,\"b\n3,c\n", "1,a\n".repeat(5000)));
    place.write("fine.csv", "id,text\n1,5\" disk\n2,\"b\"\n");
    let options = "OPTIONS ('format.delimiter' ';', 'format.quote' '''')";
    let create = |columns: &str| format!("CREATE EXTERNAL TABLE t {columns} STORED AS CSV LOCATION 'b.csv' {options}");
    for (statement, file, row) in [
        ("SELECT * FROM 'a.csv'".to_owned(), "a.csv", 1),
        ("SELECT count(*) FROM 'c.csv'".to_owned(), "c.csv", 5000),
        (format!("{}; SELECT * FROM t", create("")), "b.csv", 1),
        (format!("{}; SELECT count(*) FROM t", create("(id BIGINT, text VARCHAR)")), "b.csv", 1),
    ] {
        let ended = refused(&place, &statement, 3);
        let expected = format!("{file}: after row {row}: a quotation that begins in the next row is never closed");
        assert!(ended.err.contains(&expected), "{statement}: {ended:?}");
    }
    assert_eq!(value(&place, "SELECT count(*) FROM 'fine.csv'"), 2);
}

#[test]
fn a_byte_order_mark_is_skipped() {
    let place = Place::new();
    place.write("a.jsonl", "\u{feff}{\"id\": 1}\n{\"id\": 2}\n");
    place.write("a.csv", "\u{feff}\"id\",text\n1,a\n2,b\n");
    place.write("a.json", "\u{feff}{\"id\": 1}\n{\"id\": 2}\n");
    assert_eq!(place.shell("gzip -k a.jsonl a.csv").code, Some(0));
    for file in ["a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.gz", "a.json"] {
        assert_eq!(value(&place, &format!("SELECT sum(id) FROM '{file}'")), 3, "{file}");
    }
    // Large files are read by several threads.
    place.write("b.jsonl", format!("\u{feff}{}", "{\"id\": 1, \"text\": \"It rained all day.\"}\n".repeat(300_000)));
    assert_eq!(value(&place, "SELECT sum(id) FROM 'b.jsonl'"), 300_000);
    place.write("c.csv", format!("\u{feff}id,text\n{}", "1,It rained all day and all night.\n".repeat(400_000)));
    let several = "SET datafusion.catalog.newlines_in_values = false; SELECT sum(id) AS n FROM 'c.csv'";
    assert_eq!(sql(&place, &["--format", "csv", "-c", several]).out, "n\n400000\n");
}

#[test]
fn few_files_are_open_at_the_same_time() {
    let place = Place::new();
    let files = 600;
    for number in 0..files {
        place.write(&format!("csv/{number}.csv"), format!("id,text\n{number},a\n"));
        place.write(&format!("json/{number}.jsonl"), format!("{{\"id\": {number}}}\n"));
        place.write(&format!("text/{number}.txt"), format!("{number}\n"));
    }
    let copy = "COPY (SELECT value AS id FROM range(0, 600)) TO 'parquet/' STORED AS PARQUET PARTITIONED BY (id)";
    let made = sql(&place, &["-c", &copy.replace("value AS id", "value AS id, value AS x")]);
    assert_eq!(made.code, Some(0), "{made:?}");
    for (folder, sum) in [("csv", "sum(id)"), ("json", "sum(id)"), ("text", "sum(text::bigint)"), ("parquet", "sum(x)")]
    {
        let query = format!("elmo sql -q --format csv -c \"SELECT {sum} AS n FROM '{folder}'\"");
        let ended = place.shell(&format!("ulimit -n 200; {query}"));
        assert_eq!(ended.out, format!("n\n{}\n", files * (files - 1) / 2), "{folder}: {ended:?}");
    }
}

#[test]
fn a_missing_name_is_neither_a_table_nor_a_file() {
    let place = Place::new();
    place.write("data/a.csv", "id\n1\n");
    place.write("data.d/b.csv", "id\n1\n");
    for (name, code, help) in [
        ("'revews.jsonl'", 3, Some("there is 'reviews.jsonl'")),
        ("'reviews.csv'", 3, Some("there is 'reviews.jsonl'")),
        ("revews", 2, None),
        ("reviews", 2, Some("there is 'reviews.jsonl'")),
        ("'data/b.csv'", 3, Some("there is 'data/a.csv'")),
        ("'daat/'", 3, Some("there is 'data/'")),
        ("'/nowhere/x'", 3, None),
        ("'*.nothing'", 3, None),
        ("'nothing.json'", 3, None),
        ("tabel", 2, Some("there is table1")),
        ("reviews.jsonl", 2, Some("there is a file; its name goes in quotes: 'reviews.jsonl'")),
    ] {
        let ended = refused(&place, &format!("CREATE TABLE table1 AS SELECT 1; SELECT * FROM {name}"), code);
        let plain = name.trim_matches('\'');
        let expected = format!("error: {plain}: neither a table nor a file of this name exists\n");
        assert!(ended.err.starts_with(&expected), "{name}: {ended:?}");
        match help {
            Some(help) => assert!(ended.err.contains(&format!("  help: {help}\n")), "{name}: {ended:?}"),
            None => assert!(ended.err.contains("  help: check the spelling; "), "{name}: {ended:?}"),
        }
    }
    assert_eq!(
        sql(&place, &["-c", "CREATE TABLE a AS SELECT 1; DROP TABLE IF EXISTS nothing; SELECT * FROM a"]).code,
        Some(0)
    );
}

/// Expected: what DuckDB 2.0 returns for `SELECT * FROM read_csv('**/*.csv', hive_partitioning = true)`: BIGINT, DATE or
/// VARCHAR after the columns of the files.
#[test]
fn folders_of_hive_partitions_are_columns() {
    let place = Place::new();
    for (folder, id) in [
        ("year=2023/day=2023-12-31/tag=a%20b%2Fc", 1),
        ("year=2024/day=__HIVE_DEFAULT_PARTITION__/tag=01", 2),
        ("year=2024/day=2024-02-29/tag=__HIVE_DEFAULT_PARTITION__", 3),
    ] {
        place.write(&format!("csv/{folder}/x.csv"), format!("id,text\n{id},a\n"));
        place.write(&format!("json/{folder}/x.jsonl"), format!("{{\"id\": {id}, \"text\": \"a\"}}\n"));
        place.write(&format!("text/{folder}/x.txt"), format!("{id}\n"));
        for kind in ["parquet", "arrow"] {
            let copy = format!("COPY (SELECT {id}::bigint AS id, 'a' AS text) TO '{kind}/{folder}/x.{kind}'");
            assert_eq!(sql(&place, &["-c", &copy]).code, Some(0), "{copy}");
        }
    }
    let row = |id: i64, year: i64, day: Value, tag: Value| json!({"id": id, "text": "a", "year": year, "day": day, "tag": tag});
    let expected = [
        row(1, 2023, json!("2023-12-31"), json!("a b/c")),
        row(2, 2024, Value::Null, json!("01")),
        row(3, 2024, json!("2024-02-29"), Value::Null),
    ];
    for folder in ["csv", "json", "parquet", "arrow", "csv/**/*.csv"] {
        assert_eq!(rows(&place, &format!("SELECT * FROM '{folder}' ORDER BY id")), expected, "{folder}");
        let types = sql(&place, &["--format", "csv", "-c", &format!("DESCRIBE '{folder}'")]);
        let types: Vec<&str> = types.out.lines().skip(3).collect();
        assert_eq!(types, ["year,Int64,YES", "day,Date32,YES", "tag,Utf8,YES"], "{folder}");
        let filters = [
            ("year = 2024", vec![2, 3]),
            ("year < 2024 OR day > DATE '2024-01-01'", vec![1, 3]),
            ("day IS NULL", vec![2]),
            ("day IS NOT NULL AND id > 1", vec![3]),
            ("tag = '01'", vec![2]),
            ("tag IS NULL OR id = 1", vec![1, 3]),
            ("year > 2024", vec![]),
            ("max_id = id", vec![3]),
        ];
        // One process for all of them.
        let query = |(number, (filter, _)): (usize, &(&str, Vec<i64>))| {
            format!("SELECT {number} AS n, id FROM (SELECT *, 3 AS max_id FROM '{folder}') WHERE {filter}")
        };
        let all: Vec<String> = filters.iter().enumerate().map(query).collect();
        let found = rows(&place, &format!("{} ORDER BY n, id", all.join(" UNION ALL ")));
        for (number, (filter, ids)) in filters.iter().enumerate() {
            let of_filter = found.iter().filter(|row| row["n"] == number);
            let found: Vec<i64> = of_filter.map(|row| row["id"].as_i64().unwrap()).collect();
            assert_eq!(&found, ids, "{folder}: {filter}");
        }
        let grouped =
            format!("SELECT year, count(*) AS n, min(day) AS day FROM '{folder}' GROUP BY year ORDER BY year");
        let found = rows(&place, &grouped);
        assert_eq!(found[1], json!({"year": 2024, "n": 2, "day": "2024-02-29"}), "{folder}");
        assert_eq!(value(&place, &format!("SELECT min(day)::text FROM '{folder}'")), "2023-12-31", "{folder}");
    }
    // Files that a filter rejects are not read.
    place.write("csv/year=2022/day=2022-01-01/tag=x/x.csv", "id,text\n1,\"never closed\n");
    refused(&place, "SELECT count(*) FROM 'csv' WHERE year > 2000", 3);
    std::fs::remove_dir_all(place.path("csv/year=2022")).unwrap();
    let plan = sql(&place, &["-c", "EXPLAIN SELECT id FROM 'csv' WHERE year = 2023"]);
    assert!(plan.out.contains("year=2023") && !plan.out.contains("year=2024"), "{plan:?}");
    // Lines of text have the columns, too.
    let lines = rows(&place, "SELECT * FROM 'text' WHERE year = 2024 ORDER BY text");
    assert_eq!(lines[0], json!({"text": "2", "year": 2024, "day": null, "tag": "01"}));
    assert_eq!(value(&place, "SELECT count(*) FROM 'text' WHERE day IS NOT NULL"), 2);
    assert_eq!(rows(&place, "SELECT year FROM 'text' ORDER BY year")[0], json!({"year": 2023}));
    assert!(rows(&place, "SELECT * FROM 'text' WHERE year = 2020").is_empty());
}

/// As in DuckDB, the folder's value counts.
#[test]
fn a_column_of_a_file_with_the_name_of_a_folder() {
    let place = Place::new();
    place.write("csv/year=2024/x.csv", "year,id\n1999,1\n");
    place.write("json/year=2024/x.jsonl", "{\"year\": 1999, \"id\": 1}\n");
    for folder in ["csv", "json"] {
        let query = format!("SELECT * FROM '{folder}' WHERE year = 2024");
        assert_eq!(rows(&place, &query), [json!({"id": 1, "year": 2024})], "{folder}");
    }
    // The values of a file without the folder would be lost.
    place.write("csv/y.csv", "year,id\n2000,2\n");
    let ended = refused(&place, "SELECT * FROM 'csv'", 2);
    assert!(ended.err.contains("the column year is in ") && ended.err.contains("y.csv"), "{ended:?}");
    // A file that lacks a key has NULL.
    place.write("some/a=1/x.csv", "id\n1\n");
    place.write("some/x.csv", "id\n2\n");
    assert_eq!(rows(&place, "SELECT * FROM 'some' ORDER BY id")[1], json!({"id": 2, "a": null}));
}

/// Without ORDER BY, rows come in the order of the file or the table, also from COPY and below LIMIT. Expected: the ids as the test wrote
/// them.
#[test]
fn rows_come_in_the_order_of_their_file() {
    let place = Place::new();
    let count = 40_000;
    let ids: Vec<usize> = (0..count).collect();
    place.write("a.csv", format!("id,text\n{}", ids.iter().map(|id| format!("{id},row {id}\n")).collect::<String>()));
    let lines: String = ids.iter().map(|id| format!("{{\"id\": {id}, \"text\": \"row {id}\"}}\n")).collect();
    place.write("a.jsonl", lines);
    // Row groups of 5,000 rows, which DataFusion distributes over partitions.
    let groups = "OPTIONS ('format.max_row_group_size' '5000')";
    assert_eq!(sql(&place, &["-c", &format!("COPY (SELECT * FROM 'a.csv') TO 'a.parquet' {groups}")]).code, Some(0));
    let partitions =
        "SET datafusion.execution.target_partitions = 4; SET datafusion.optimizer.repartition_file_min_size = 1";
    let ids_of = |query: &str| -> Vec<usize> {
        let ended = sql(&place, &["--format", "csv", "-c", &format!("{partitions}; {query}")]);
        assert_eq!(ended.code, Some(0), "{query}: {ended:?}");
        ended.out.lines().skip(1).map(|line| line.split(',').next().unwrap().parse().unwrap()).collect()
    };
    for file in ["a.csv", "a.jsonl", "a.parquet"] {
        assert_eq!(ids_of(&format!("SELECT id, text FROM '{file}'")), ids, "{file}");
        let odd: Vec<usize> = ids.iter().copied().filter(|id| id % 2 == 1).collect();
        assert_eq!(ids_of(&format!("SELECT id FROM '{file}' WHERE id % 2 = 1")), odd, "{file}");
        assert_eq!(ids_of(&format!("SELECT id FROM '{file}' WHERE id % 2 = 1 LIMIT 9")), odd[..9], "{file}");
        let both: Vec<usize> = [ids.clone(), odd].concat();
        let union = format!("SELECT id FROM '{file}' UNION ALL SELECT id FROM '{file}' WHERE id % 2 = 1");
        assert_eq!(ids_of(&union), both, "{file}");
        assert_eq!(ids_of(&format!("SELECT unnest([id]) AS id FROM '{file}'")), ids, "{file}");
        let copy = format!("{partitions}; COPY (SELECT id FROM '{file}' WHERE length(text) > 0) TO '{file}.csv'");
        assert_eq!(sql(&place, &["-c", &copy]).code, Some(0));
        assert_eq!(ids_of(&format!("SELECT id FROM '{file}.csv'")), ids, "{file}");
        // Without the promise, several partitions filter the rows.
        let explain = format!("EXPLAIN SELECT id FROM '{file}' WHERE id % 2 = 1");
        let plan = |keep: bool| {
            let set = format!("{partitions}; SET elmo.keep_order = {keep}");
            sql(&place, &["-c", &format!("{set}; {explain}")]).out
        };
        let (kept, free) = (plan(true), plan(false));
        // A scan of several partitions is concatenated, and one of a single partition stays single.
        assert!(!kept.contains("RoundRobin") && !free.contains("InOrderExec"), "{kept}\n{free}");
        assert!(kept.contains("InOrderExec") || free.contains("RoundRobin"), "{kept}\n{free}");
    }
    // Tables in memory, one of which begins with a small batch, and rows that are generated.
    let odd: Vec<usize> = ids.iter().copied().filter(|id| id % 2 == 1).collect();
    for rows in [
        "SELECT id FROM 'a.csv'",
        "SELECT id FROM 'a.csv' WHERE id < 3 UNION ALL SELECT id FROM 'a.csv' WHERE id >= 3",
        "SELECT value AS id FROM generate_series(0, 39999)",
    ] {
        let create = format!("CREATE TABLE t AS {rows}");
        assert_eq!(ids_of(&format!("{create}; SELECT id FROM t")), ids, "{rows}");
        assert_eq!(ids_of(&format!("{create}; SELECT id FROM t WHERE id % 2 = 1")), odd, "{rows}");
        assert_eq!(ids_of(&format!("{create}; SELECT id FROM t WHERE id % 2 = 1 LIMIT 5")), odd[..5], "{rows}");
        assert_eq!(ids_of(&format!("SELECT id FROM ({rows}) WHERE id % 2 = 1")), odd, "{rows}");
    }
}
