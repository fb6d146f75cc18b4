//! `elmo sql`: result formats, files as tables, COPY, errors and cancellation. The prompt is in `shell.rs`.

use std::{
    fs,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use arrow::{
    array::{Array, AsArray, RecordBatch},
    datatypes::{DataType, Float32Type, Int64Type},
    ipc::reader::StreamReader,
};
use parquet::{
    arrow::arrow_reader::ParquetRecordBatchReaderBuilder,
    basic::{Compression, Encoding},
    file::reader::{FileReader, SerializedFileReader},
};
use serde_json::Value;

use crate::place::{Ended, Place, snapshot};

/// Runs `elmo sql -q` with these arguments.
pub(crate) fn sql(place: &Place, words: &[&str]) -> Ended {
    let output = place.elmo().args(["sql", "-q"]).args(words).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ended { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
}

/// The rows of a statement's result as JSON objects.
pub(crate) fn rows(place: &Place, statement: &str) -> Vec<Value> {
    let ended = sql(place, &["--format", "ndjson", "-c", statement]);
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{statement}: {ended:?}");
    ended.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The value of a result of one row and one column.
pub(crate) fn value(place: &Place, statement: &str) -> Value {
    let rows = rows(place, statement);
    assert_eq!(rows.len(), 1, "{statement}: {rows:?}");
    rows[0].as_object().unwrap().values().next().unwrap().clone()
}

/// A folder with a CSV file of three rows, one of them with an empty text.
fn small() -> Place {
    let place = Place::new();
    place.write("a.csv", "id,text\n1,It rained.\n2,\n3,\"We stayed in, and read.\"\n");
    place
}

#[test]
fn the_first_words_of_the_readme_embed_ten_rows_and_no_more() {
    let place = Place::new();
    let rows_of = "COPY (SELECT * FROM 'reviews.jsonl') TO 'reviews.parquet'";
    assert_eq!(sql(&place, &["-c", rows_of]).code, Some(0));
    let query = "SELECT id, elmo_embed(text) FROM 'reviews.parquet' WHERE lang = 'en' ORDER BY id DESC LIMIT 10";
    let shown = sql(&place, &["-c", query]);
    assert_eq!(shown.out.lines().filter(|line| line.contains("…] (256)")).count(), 10, "{shown:?}");
    let analysed = sql(&place, &["-c", &format!("EXPLAIN ANALYZE {query}")]);
    assert!(analysed.out.contains("rows_embedded=10,"), "{analysed:?}");
}

#[test]
fn a_table_shows_vectors_short_and_stops_at_its_last_row() {
    let place = small();
    let shown = sql(&place, &["-c", "SELECT id, text, elmo_embed(text) IS NULL AS nothing FROM 'a.csv' ORDER BY id"]);
    // Written by hand.
    let expected = "\
+----+-------------------------+---------+
| id | text                    | nothing |
+----+-------------------------+---------+
| 1  | It rained.              | false   |
| 2  | NULL                    | true    |
| 3  | We stayed in, and read. | false   |
+----+-------------------------+---------+
";
    assert_eq!(shown.out, expected);
    let output = place.elmo().args(["sql", "--max-rows", "2", "-c", "SELECT id FROM 'a.csv'"]).output().unwrap();
    let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(out.lines().count(), 6, "{out}");
    assert!(err.contains("only the first 2 rows are shown; use --max-rows for more"), "{err}");
    let nothing = sql(&place, &["-c", "SELECT id FROM 'a.csv' WHERE id > 3"]);
    assert_eq!(nothing.out, "+----+\n| id |\n+----+\n+----+\n");
    let nulls = sql(&place, &["-c", "SELECT NULL AS n, [NULL] AS l"]);
    assert!(nulls.out.contains("| NULL | [NULL] |"), "{nulls:?}");
}

/// A library that splits cells of more than 65,535 columns takes the square of their length.
#[test]
fn a_cell_of_a_table_has_one_line_however_long_it_is() {
    let place = Place::new();
    let shown = sql(&place, &["-c", "SELECT repeat('ab ', 100000) AS a, E'c\\td\\ne' AS b"]);
    let (text, blank) = ("ab ".repeat(100_000), " ".repeat(300_000));
    let lines: Vec<&str> = shown.out.lines().collect();
    assert_eq!(lines.len(), 6, "{}", shown.out.len());
    assert_eq!(lines[3..5], [format!("| {text} | c\\td |"), format!("| {blank} | e    |")]);
}

/// DataFusion calls some of these errors internal, and one quotes values.
#[test]
fn a_call_with_other_types_is_an_error_of_the_statement() {
    let place = small();
    let sorted =
        "COPY (SELECT elmo_tokens(text) v, elmo_embed(text) e FROM 'a.csv' ORDER BY length(v), e) TO 'x.parquet'";
    for (statement, said, help) in [
        (sorted, "a function takes String, and its argument is List\n", "array_length(…) is the number of items"),
        (
            "SELECT length(elmo_embed('a'))",
            "character_length(FixedSizeList(256 x non-null Float32)): no form of this function takes these arguments\n",
            "its forms are character_length(String); ",
        ),
        ("SELECT upper([1])", "upper(List(Int64)): no form of this function", "its forms are upper(String); "),
        ("SELECT sum([1])", "sum(List(Int64)): no form of this function", "its forms are sum(Decimal)"),
        ("SELECT max(v) FROM (VALUES ([[1.5]]), ([[2.5]])) t (v)", "min and max do not compare values", "max(v[1])"),
    ] {
        let ended = sql(&place, &["-c", statement]);
        assert_eq!(ended.code, Some(2), "{statement}: {ended:?}");
        assert!(ended.err.starts_with(&format!("error: {said}")), "{statement}: {ended:?}");
        assert!(
            ended.err.split_once("  help: ").is_some_and(|(_, hint)| hint.contains(help)),
            "{statement}: {ended:?}"
        );
        assert!(!ended.err.contains("bug") && !ended.err.contains("2.5"), "{statement}: {ended:?}");
    }
    assert_eq!(sql(&place, &["-c", &sorted.replace("length(v)", "array_length(v)")]).code, Some(0));
}

#[test]
fn formats_for_programs_hold_every_row_and_every_number() {
    let place = small();
    let query = "SELECT id, text, elmo_embed(text) AS v FROM 'a.csv' ORDER BY id";
    let lines = rows(&place, query);
    let array: Vec<Value> = serde_json::from_str(&sql(&place, &["--format", "json", "-c", query]).out).unwrap();
    assert_eq!(array, lines);
    assert_eq!(lines.len(), 3);
    assert_eq!((&lines[1]["text"], &lines[1]["v"]), (&Value::Null, &Value::Null));
    let csv = sql(&place, &["--format", "csv", "-c", query]).out;
    let csv: Vec<&str> = csv.lines().collect();
    assert_eq!((csv[0], csv[2]), ("id,text,v", "2,,"));
    // JSON in a CSV cell has the same numbers.
    let quoted = csv[1].strip_prefix("1,It rained.,\"").unwrap().strip_suffix('"').unwrap();
    assert_eq!(serde_json::from_str::<Value>(quoted).unwrap(), lines[0]["v"]);
    for (format, read) in [("arrow", from_arrow as fn(&[u8]) -> RecordBatch), ("parquet", from_parquet)] {
        let output = place.elmo().args(["sql", "-q", "--format", format, "-c", query]).output().unwrap();
        let batch = read(&output.stdout);
        assert_eq!(batch.column(0).as_primitive::<Int64Type>().values(), &[1, 2, 3], "{format}");
        let vectors = batch.column(2).as_fixed_size_list();
        let first: Vec<f64> =
            vectors.value(0).as_primitive::<Float32Type>().values().iter().map(|v| (*v).into()).collect();
        let said: Vec<f64> =
            lines[0]["v"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32 as f64).collect();
        assert_eq!(first, said, "{format}");
        assert!(vectors.is_null(1), "{format}");
    }
    assert_eq!(sql(&place, &["--format", "json", "-c", "SELECT 1 WHERE false"]).out, "[]\n");
    assert_eq!(sql(&place, &["--format", "csv", "-c", "SELECT 1 AS one WHERE false"]).out, "one\n");
}

fn from_arrow(bytes: &[u8]) -> RecordBatch {
    let batches: Vec<RecordBatch> = StreamReader::try_new(bytes, None).unwrap().map(Result::unwrap).collect();
    arrow::compute::concat_batches(&batches[0].schema(), &batches).unwrap()
}

fn from_parquet(bytes: &[u8]) -> RecordBatch {
    let reader = ParquetRecordBatchReaderBuilder::try_new(bytes::Bytes::copy_from_slice(bytes)).unwrap();
    let batches: Vec<RecordBatch> = reader.build().unwrap().map(Result::unwrap).collect();
    arrow::compute::concat_batches(&batches[0].schema(), &batches).unwrap()
}

/// Expected values: the output of `elmo embed` on the same rows.
#[test]
fn copy_writes_what_embed_writes() {
    let place = Place::new();
    place.exits("embed -q --input reviews.jsonl --id id --keep none --output job", 0);
    let copy = "COPY (SELECT id, elmo_embed(text) AS embedding FROM 'reviews.jsonl') TO 'copy.parquet'";
    assert_eq!(sql(&place, &["-c", copy]).code, Some(0));
    let part = place.part("job", 0);
    let same =
        format!("SELECT count(*) FROM '{part}' a JOIN 'copy.parquet' b USING (id) WHERE a.embedding = b.embedding");
    assert_eq!(value(&place, &same), 200);
    let open = |path: &str| SerializedFileReader::new(fs::File::open(place.path(path)).unwrap()).unwrap();
    let pairs = |path: &str| footer(&place, path);
    assert_eq!(pairs("copy.parquet"), pairs(&part));
    let copied = open("copy.parquet");
    let vectors = copied.metadata().row_group(0).column(1);
    assert!(vectors.encodings().any(|encoding| encoding == Encoding::BYTE_STREAM_SPLIT), "{vectors:?}");
    assert!(vectors.statistics().is_none() && vectors.dictionary_page_offset().is_none());
    assert!(matches!(vectors.compression(), Compression::ZSTD(_)));
    let id = copied.metadata().row_group(0).column(0);
    assert!(id.statistics().is_some());
    // A copy of the copy has the same type and footer. Its field has all settings of the footer, and so have further copies.
    for (from, to) in [("copy.parquet", "again.parquet"), ("again.parquet", "last.parquet")] {
        let copy = format!("COPY (SELECT * FROM '{from}') TO '{to}'");
        assert_eq!(sql(&place, &["-c", &copy]).code, Some(0));
        assert_eq!(pairs(to), pairs("copy.parquet"));
    }
    let schema = |path: &str| {
        let file = fs::File::open(place.path(path)).unwrap();
        ParquetRecordBatchReaderBuilder::try_new(file).unwrap().schema().field_with_name("embedding").unwrap().clone()
    };
    assert_eq!(schema("again.parquet").data_type(), schema("copy.parquet").data_type());
    assert_eq!(schema("last.parquet"), schema("again.parquet"));
    assert!(matches!(schema("copy.parquet").data_type(), DataType::FixedSizeList(_, 256)));
    place.exits("inspect copy.parquet", 0);
}

/// Options that SQL has in common with the command: `--normalize`, `--max-tokens`, and a scalar mix, by name or in the
/// model's folder. Expected values: the vectors and the footer of `elmo embed`, bit for bit.
#[test]
fn options_of_embed_give_the_same_vectors_and_footers() {
    let place = Place::new();
    place.exits("model convert tiny own --to safetensors", 0);
    place.write("own/mix.json", r#"{"scalars": [2, 0, -1], "gamma": 1.5, "layer_norm": true}"#);
    place.write("sentiment.json", r#"{"scalars": [-0.5, 1.2, 0.3], "gamma": 0.9}"#);
    for (number, (flags, options)) in [
        ("--normalize l2 --max-tokens 5", "normalize => 'l2', max_tokens => 5"),
        ("--layers all --normalize l2", "layers => 'all', normalize => 'l2'"),
        ("--max-tokens 4 --on-long truncate", "max_tokens => 4, on_long => 'truncate'"),
        ("--layers sentiment.json", "layers => 'sentiment'"),
        ("--add-mix sentiment=sentiment.json --layers sentiment", "layers => 'sentiment'"),
        ("--layers own/mix.json --normalize l2", "layers => 'mix', normalize => 'l2'"),
    ]
    .into_iter()
    .enumerate()
    {
        for (level, function, column) in [("sentence", "elmo_embed", "embedding"), ("token", "elmo_tokens", "tokens")] {
            let job = format!("job-{number}-{level}");
            let input = "--model own --input reviews.jsonl --id id --keep none";
            place.exits(&format!("embed -q {input} --level {level} {flags} --output {job}"), 0);
            let (part, copy) = (place.part(&job, 0), format!("{job}.parquet"));
            let select = format!("SELECT id, {function}(text, {options}) AS {column} FROM 'reviews.jsonl'");
            let ended = sql(
                &place,
                &[
                    "--model",
                    "own",
                    "--add-mix",
                    "sentiment=sentiment.json",
                    "-c",
                    &format!("COPY ({select}) TO '{copy}'"),
                ],
            );
            assert_eq!(ended.code, Some(0), "{ended:?}");
            let sorted = |path: &str| {
                let rows = from_parquet(&fs::read(place.path(path)).unwrap());
                let order = arrow::compute::sort_to_indices(&rows["id"], None, None).unwrap();
                arrow::compute::take(&rows[column], &order, None).unwrap().to_data()
            };
            assert_eq!(sorted(&copy), sorted(&part), "{flags}");
            assert_eq!(footer(&place, &copy), footer(&place, &part), "{flags}");
        }
    }
    // The settings that two columns share. The fields name those that they do not.
    let two = "COPY (SELECT elmo_embed(text, max_tokens => 9) AS a, elmo_embed(text, max_tokens => 9, normalize => 'l2') AS b \
               FROM 'reviews.jsonl') TO 'two.parquet'";
    assert_eq!(sql(&place, &["-c", two]).code, Some(0));
    let pairs = footer(&place, "two.parquet");
    assert!(pairs.contains(&("elmo.max_tokens".to_owned(), Some("9".to_owned()))), "{pairs:?}");
    assert!(pairs.iter().all(|(key, _)| key != "elmo.normalize"), "{pairs:?}");
    let rows = from_parquet(&fs::read(place.path("two.parquet")).unwrap());
    let of = |column: &str| rows.schema().field_with_name(column).unwrap().metadata().get("elmo.normalize").cloned();
    assert_eq!((of("a"), of("b")), (None, Some("l2".to_owned())));
}

#[test]
fn scalar_mixes_have_names_and_files() {
    let place = small();
    place.write("m.json", r#"{"scalars": [0, 0, 0]}"#);
    place.write("bad.json", r#"{"scalars": []}"#);
    let of = |mixes: &[&str], statement: &str| {
        let mixes = mixes.iter().flat_map(|mix| ["--add-mix", mix]);
        sql(&place, &mixes.chain(["--format", "csv", "-c", statement]).collect::<Vec<_>>())
    };
    // The mix with equal scalars is the mean of the layers.
    let same = "SELECT elmo_l2(elmo_embed('It rained.', layers => 'm'), elmo_embed('It rained.')) < 1e-6 AS same";
    assert_eq!(of(&["m=m.json"], same).out, "same\ntrue\n");
    place.write("elmo.toml", "[sql]\nadd-mix = ['m=m.json', 'n=m.json']\n");
    assert_eq!(of(&[], same).out, "same\ntrue\n");
    fs::remove_file(place.path("elmo.toml")).unwrap();
    for (mixes, expected) in [
        (&["m"][..], "it must be NAME=FILE, such as sentiment=mixes/sentiment.json"),
        (&["top=m.json"], "a scalar mix cannot be named \"top\", which is a built-in value of layers"),
        (&["mix=m.json"], "a scalar mix cannot be named \"mix\""),
        (&["m=m.json", "m=m.json"], "two scalar mixes are named m"),
        (&["m=none.json"], "--add-mix none.json: No such file"),
        (&["m=bad.json"], "bad.json: a scalar mix needs one finite scalar per layer"),
        (&["m=m.json"], "legal values are average, top, token, 0, 1, 2, all, m\n"),
    ] {
        let refused = of(mixes, "SELECT elmo_embed('a', layers => 'n')");
        assert!(refused.code == Some(2) && refused.err.contains(expected), "{refused:?}");
        // The command refuses the same.
        let mixes: String = mixes.iter().map(|mix| format!("--add-mix {mix} ")).collect();
        let refused = place.exits(&format!("embed --model tiny reviews.jsonl --output no {mixes} --layers n"), 2);
        assert!(refused.err.contains(expected), "{refused:?}");
    }
    let listed = "SELECT name, model, scalars, gamma, layer_norm FROM elmo_mixes()";
    assert_eq!(of(&["m=m.json"], listed).out, "name,model,scalars,gamma,layer_norm\nm,,\"[0.0,0.0,0.0]\",1.0,false\n");
    // Both commands read the names of one settings file.
    place.write("elmo.toml", "add-mix = ['m=m.json']\nmodel = 'tiny'\n");
    assert_eq!(of(&[], same).out, "same\ntrue\n");
    place.exits("embed -q reviews.jsonl --output named --layers m --keep none", 0);
    fs::remove_file(place.path("elmo.toml")).unwrap();
    place.exits("embed -q reviews.jsonl --model tiny --output of-file --layers m.json --keep none", 0);
    let bytes = |job: &str| fs::read(place.path(&place.part(job, 0))).unwrap();
    assert!(bytes("named") == bytes("of-file"));
}

/// The commands of docs/sql.md, one after the other in one folder.
#[test]
fn the_commands_of_the_page_run() {
    let place = Place::new();
    // A copy of review 0 under another number.
    let reviews = fs::read_to_string(place.path("reviews.jsonl")).unwrap();
    let copy = reviews.lines().next().unwrap().replace("\"id\": 0", "\"id\": 1000");
    place.write("reviews.jsonl", format!("{reviews}{copy}\n"));
    let clone = std::env::var_os("CARGO_MANIFEST_DIR").unwrap();
    let page = fs::read_to_string(std::path::Path::new(&clone).join("../docs/sql.md")).unwrap();
    let commands: Vec<_> = page.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert_eq!(commands.len(), 2, "{commands:?}");
    for command in commands {
        let ended = place.shell(&format!("set -e; export ELMO_FORMAT=csv\n{command}"));
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let ids: Vec<i64> = ended.out.lines().filter_map(|line| line.split(',').next()?.parse().ok()).collect();
        if command.contains("LIMIT 10") {
            // DataFusion's own distance gives the same order.
            let expected = "SELECT id FROM 'vectors' ORDER BY cosine_distance(embedding, elmo_embed('Was the room quiet?')) LIMIT 10";
            let expected: Vec<i64> = rows(&place, expected).iter().map(|row| row["id"].as_i64().unwrap()).collect();
            assert_eq!(ids, expected);
        } else {
            // Counted by a join instead.
            let removed = "SELECT count(DISTINCT a.id) FROM 'reviews.jsonl' a JOIN 'reviews.jsonl' b ON b.id < a.id \
                           WHERE elmo_similarity(a.text, b.text) > 0.99";
            assert_eq!(201 - ids.len() as u64, value(&place, removed).as_u64().unwrap());
            assert!(ids.contains(&0) && !ids.contains(&1000), "{ids:?}");
        }
    }
}

/// The `elmo.*` pairs of a footer, sorted.
fn footer(place: &Place, path: &str) -> Vec<(String, Option<String>)> {
    let file = SerializedFileReader::new(fs::File::open(place.path(path)).unwrap()).unwrap();
    let pairs = file.metadata().file_metadata().key_value_metadata().cloned().unwrap_or_default();
    let pairs = pairs.into_iter().filter(|pair| pair.key.starts_with("elmo.")).map(|pair| (pair.key, pair.value));
    let mut pairs: Vec<_> = pairs.collect();
    pairs.sort();
    pairs
}

/// DataFusion silently writes them to the folder of another value.
#[test]
fn null_in_a_partition_column_is_rejected() {
    let place = small();
    let copy = |kind: &str| {
        format!("COPY (SELECT id, {kind} AS kind FROM 'a.csv') TO 'folders/' STORED AS PARQUET PARTITIONED BY (kind)")
    };
    let refused = sql(&place, &["-c", &copy("CASE WHEN id > 1 THEN 'late' END")]);
    assert_eq!(refused.code, Some(3), "{refused:?}");
    assert!(refused.err.contains("PARTITIONED BY kind: a row has NULL in this column"), "{refused:?}");
    assert!(!place.path("folders").exists());
    let whole = copy("CASE WHEN id > 1 THEN 'late' ELSE 'early' END");
    assert_eq!(sql(&place, &["-c", &whole]).code, Some(0));
    assert!(place.path("folders/kind=late").exists() && place.path("folders/kind=early").exists());
}

/// An invalid or truncated compressed file is invalid input, not a storage error.
#[test]
fn an_invalid_compressed_file_is_invalid_input() {
    let place = small();
    place.write("none.csv.gz", "id,text\n1,a\n");
    place.write("rows.jsonl", "{\"id\": 1}\n".repeat(9999));
    let torn = place.shell("gzip -c rows.jsonl | head -c 60 > torn.jsonl.gz");
    assert_eq!(torn.code, Some(0), "{torn:?}");
    for file in ["none.csv.gz", "torn.jsonl.gz"] {
        let refused = sql(&place, &["-c", &format!("SELECT count(*) FROM '{file}'")]);
        assert_eq!(refused.code, Some(3), "{refused:?}");
    }
}

/// Editors on Windows write one.
#[test]
fn a_file_of_statements_may_begin_with_a_byte_order_mark() {
    let place = small();
    place.write("statements.sql", "\u{feff}SELECT 6 * 7 AS n;\n");
    assert_eq!(sql(&place, &["--format", "csv", "-f", "statements.sql"]).out, "n\n42\n");
}

#[test]
fn copy_applies_its_options_and_its_targets_extension() {
    let place = small();
    let copy = "COPY (SELECT id, elmo_tokens(text) AS t FROM 'a.csv') TO 'out.parquet' \
                OPTIONS ('format.compression' 'snappy', 'format.metadata::elmo.pooling' 'mine')";
    assert_eq!(sql(&place, &["-c", copy]).code, Some(0));
    let file = SerializedFileReader::new(fs::File::open(place.path("out.parquet")).unwrap()).unwrap();
    let columns = file.metadata().row_group(0).columns();
    assert!(columns.iter().all(|column| column.compression() == Compression::SNAPPY));
    let numbers = columns.iter().find(|column| column.column_path().string().contains("embedding")).unwrap();
    assert!(numbers.encodings().any(|encoding| encoding == Encoding::BYTE_STREAM_SPLIT), "{numbers:?}");
    let pairs = file.metadata().file_metadata().key_value_metadata().unwrap();
    let pooling = pairs.iter().find(|pair| pair.key == "elmo.pooling").and_then(|pair| pair.value.clone());
    assert_eq!(pooling.as_deref(), Some("mine"));
    // Row groups are limited by size: 25 rows have 25 KiB of vectors.
    let groups = "COPY (SELECT elmo_embed(text || CAST(id AS VARCHAR)) AS v FROM 'reviews.jsonl') TO 'groups.parquet' \
                  OPTIONS ('format.max_row_group_bytes' '25600')";
    assert_eq!(sql(&place, &["-c", "SET datafusion.execution.batch_size = 10", "-c", groups]).code, Some(0));
    let file = SerializedFileReader::new(fs::File::open(place.path("groups.parquet")).unwrap()).unwrap();
    assert!(file.metadata().num_row_groups() > 1, "{}", file.metadata().num_row_groups());
    let counted = place.exits("inspect groups.parquet --json", 0).json();
    assert_eq!((&counted["vectors"]["count"], &counted["vectors"]["width"]), (&200.into(), &256.into()), "{counted}");
    let plain = "COPY (SELECT id, length(text) AS n FROM 'a.csv' WHERE elmo_embed(text)[1] < 9) TO 'plain.parquet'";
    assert_eq!(sql(&place, &["-c", plain]).code, Some(0));
    let file = SerializedFileReader::new(fs::File::open(place.path("plain.parquet")).unwrap()).unwrap();
    let pairs = file.metadata().file_metadata().key_value_metadata().cloned().unwrap_or_default();
    assert!(pairs.iter().all(|pair| !pair.key.starts_with("elmo.")), "no vector is in it: {pairs:?}");
    let analysed = "EXPLAIN ANALYZE COPY (SELECT elmo_embed(text) AS v FROM 'a.csv') TO 'analysed.parquet'";
    assert_eq!(sql(&place, &["-c", analysed]).code, Some(0));
    let file = SerializedFileReader::new(fs::File::open(place.path("analysed.parquet")).unwrap()).unwrap();
    let pairs = file.metadata().file_metadata().key_value_metadata().cloned().unwrap_or_default();
    assert!(pairs.iter().any(|pair| pair.key == "elmo.fingerprint"), "{pairs:?}");
    // A statement that cannot be written is rejected before an existing file is touched.
    let before = fs::read(place.path("a.csv")).unwrap();
    assert_eq!(sql(&place, &["-c", "COPY (SELECT elmo_embed(text) AS v FROM 'a.csv') TO 'a.csv'"]).code, Some(2));
    assert_eq!(fs::read(place.path("a.csv")).unwrap(), before);
    // Files can be read under the name they were written to. Gzip and zstd files begin with a magic number.
    let packed: [(&str, &[u8]); 11] = [
        ("csv", b"id"),
        ("tsv", b"id"),
        ("TSV.gz", b"\x1f\x8b"),
        ("tsv.zst", b"\x28\xb5\x2f\xfd"),
        ("json", b"{"),
        ("jsonl", b"{"),
        ("ndjson", b"{"),
        ("csv.gz", b"\x1f\x8b"),
        ("jsonl.gz", b"\x1f\x8b"),
        ("json.gz", b"\x1f\x8b"),
        ("NDJSON.ZST", b"\x28\xb5\x2f\xfd"),
    ];
    for (ending, first) in packed {
        let copy = format!("COPY (SELECT id FROM 'a.csv') TO 'ids.{ending}'");
        assert_eq!(sql(&place, &["-c", &copy]).code, Some(0));
        assert_eq!(value(&place, &format!("SELECT sum(id) FROM 'ids.{ending}'")), 6, "{ending}");
        assert!(fs::read(place.path(&format!("ids.{ending}"))).unwrap().starts_with(first), "{ending}");
    }
    for ending in ["txt", "parquet.gz", "zst"] {
        let refused = sql(&place, &["-c", &format!("EXPLAIN COPY (SELECT id FROM 'a.csv') TO 'ids.{ending}'")]);
        assert_eq!(refused.code, Some(2));
        assert!(
            refused.err.contains("COPY cannot write files with this extension") && refused.err.contains("  help: "),
            "{refused:?}"
        );
    }
    let said = "COPY (SELECT id FROM 'a.csv') TO 'odd.txt' STORED AS CSV";
    assert_eq!(sql(&place, &["-c", said]).code, Some(0));
    assert!(fs::read_to_string(place.path("odd.txt")).unwrap().starts_with("id\n"));
    // A file in place of a folder, and a folder that cannot hold files.
    for (target, code) in [("a.csv/x.csv", 2), ("a.csv/x.parquet", 2), ("/proc/x.csv", 5)] {
        let refused = sql(&place, &["-c", &format!("COPY (SELECT id FROM 'a.csv') TO '{target}'")]);
        assert_eq!(refused.code, Some(code), "{refused:?}");
        assert!(!refused.err.contains("Internal") && !refused.err.contains("bug"), "{refused:?}");
    }
    for pattern in ["what?.csv", "x[1].csv", "*.jsonl"] {
        let refused = sql(&place, &["-c", &format!("COPY (SELECT id FROM 'a.csv') TO '{pattern}'")]);
        assert!(refused.code == Some(2) && refused.err.contains("must not be a pattern"), "{refused:?}");
    }
    let said = "COPY (SELECT id FROM 'a.csv') TO 'odd.csv.gz' STORED AS csv";
    assert_eq!(sql(&place, &["-c", said]).code, Some(0));
    assert_eq!(value(&place, "SELECT sum(id) FROM 'odd.csv.gz'"), 6);
}

/// DataFusion alone would complete a file with the rows before the error.
#[test]
fn a_failed_copy_leaves_existing_files() {
    let place = small();
    place.write("many.jsonl", (0..30_000).map(|id| format!("{{\"id\": {id}}}\n")).collect::<String>());
    let before = "what was there before\n";
    for ending in ["parquet", "csv", "jsonl", "arrow", "csv.gz"] {
        let out = format!("out.{ending}");
        for statement in [
            format!("COPY (SELECT id, 1 / (id - 29999) AS x FROM 'many.jsonl') TO '{out}'"),
            format!("EXPLAIN ANALYZE COPY (SELECT id, 1 / (id - 29999) AS x FROM 'many.jsonl') TO '{out}'"),
            format!(
                "COPY (SELECT elmo_embed(text, on_long => 'error', sentences => 'off') AS v FROM 'long.jsonl') TO '{out}'"
            ),
        ] {
            place.write("long.jsonl", format!("{{\"text\": \"{}\"}}\n", "a ".repeat(600)));
            place.write(&out, before);
            let ended = sql(&place, &["-c", "SET datafusion.execution.batch_size = 1000", "-c", &statement]);
            assert!(matches!(ended.code, Some(2 | 3)), "{statement}: {ended:?}");
            assert_eq!(fs::read_to_string(place.path(&out)).unwrap(), before, "{statement}");
            fs::remove_file(place.path(&out)).unwrap();
            sql(&place, &["-c", &statement]);
            let left: Vec<_> = fs::read_dir(place.path(".")).unwrap().map(|file| file.unwrap().file_name()).collect();
            assert!(!left.iter().any(|name| name.to_string_lossy().starts_with("out.")), "{statement}: {left:?}");
        }
    }
    // The writer fails after it has written other rows.
    place.write("out.csv", before);
    place.write("out.jsonl", before);
    for statement in [
        "COPY (SELECT CAST('2024-01-01' AS TIMESTAMP) AS t) TO 'out.csv' OPTIONS ('format.timestamp_format' '%z')",
        "COPY (SELECT map([1], [id]) AS m FROM 'many.jsonl') TO 'out.jsonl'",
        "COPY (SELECT arrow_cast(CASE WHEN id < 29999 THEN id ELSE 9223372036854775807 END, 'Timestamp(Second, None)') AS t \
         FROM 'many.jsonl') TO 'out.csv'",
    ] {
        let ended = sql(&place, &["-c", "SET datafusion.execution.batch_size = 1000", "-c", statement]);
        assert!(!matches!(ended.code, Some(0)), "{statement}: {ended:?}");
        for out in ["out.csv", "out.jsonl"] {
            assert_eq!(fs::read_to_string(place.path(out)).unwrap(), before, "{statement}");
        }
    }
    // Writes to a folder are all-or-nothing.
    let files = |folder: &str| {
        let found = place.shell(&format!("find {folder} -type f"));
        found.out.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let folder = "COPY (SELECT id % 7 AS f, 1 / (id - 29999) AS x FROM 'many.jsonl') TO 'parts/' STORED AS CSV PARTITIONED BY (f)";
    let several = "SET datafusion.execution.soft_max_rows_per_output_file = 2000; \
                   SET datafusion.execution.batch_size = 1000";
    assert_ne!(sql(&place, &["-c", several, "-c", folder]).code, Some(0));
    assert!(files(".").iter().all(|file| !file.starts_with("./parts")), "{:?}", files("."));
    assert_eq!(sql(&place, &["-c", several, "-c", &folder.replace("29999", "30000")]).code, Some(0));
    assert!(files("parts").len() >= 7, "{:?}", files("parts"));
    assert_eq!(value(&place, "SELECT count(*) FROM 'parts/**/*.csv'"), 30_000);
    // One file cannot be committed: another file is in place of its folder.
    fs::create_dir(place.path("odd")).unwrap();
    place.write("odd/p=13", before);
    let odd = "COPY (SELECT id, id % 40 AS p FROM 'many.jsonl') TO 'odd/' STORED AS CSV PARTITIONED BY (p) \
               OPTIONS (append true)";
    assert_eq!(sql(&place, &["-c", odd]).code, Some(5));
    assert_eq!(files("odd"), ["odd/p=13"]);
    // INSERT is all-or-nothing.
    fs::create_dir(place.path("grows")).unwrap();
    let table = "CREATE EXTERNAL TABLE t (id BIGINT) STORED AS PARQUET LOCATION 'grows/'";
    let insert = "INSERT INTO t SELECT id / (id - 29999) FROM 'many.jsonl'";
    assert_ne!(sql(&place, &["-c", table, "-c", insert]).code, Some(0));
    let strict = "CREATE EXTERNAL TABLE t (id BIGINT NOT NULL) STORED AS PARQUET LOCATION 'grows/'";
    let null = "INSERT INTO t SELECT CASE WHEN id < 29999 THEN id END FROM 'many.jsonl'";
    assert_ne!(sql(&place, &["-c", several, "-c", strict, "-c", null]).code, Some(0));
    assert_eq!(fs::read_dir(place.path("grows")).unwrap().count(), 0);
}

#[test]
fn files_folders_and_patterns_are_tables() {
    let place = small();
    let shell = |line: &str| assert_eq!(place.shell(line).code, Some(0), "{line}");
    shell("mkdir -p logs 'an odd name [1]*' && gzip -k a.csv && cp a.csv logs/b.csv && cp a.csv logs/c.csv");
    shell("printf 'It rained.\\nAll day.\\n' > lines.txt && gzip -k lines.txt");
    shell("cp a.csv 'an odd name [1]*/x y.csv'");
    for statement in ["COPY (SELECT * FROM 'a.csv') TO 'a.parquet'", "COPY (SELECT * FROM 'a.csv') TO 'a.arrow'"] {
        assert_eq!(sql(&place, &["-c", statement]).code, Some(0));
    }
    // By hand: 1 + 2 + 3, once per file.
    let absolute = place.path("a.csv").display().to_string();
    let url = format!("file://{absolute}");
    for (name, sum) in [
        ("a.csv", 6),
        ("a.csv.gz", 6),
        ("a.parquet", 6),
        ("a.arrow", 6),
        ("./a.csv", 6),
        ("logs/*.csv", 12),
        ("logs", 12),
        ("logs/", 12),
        ("an odd name [1]*/x y.csv", 6),
        (&absolute, 6),
        (&url, 6),
    ] {
        assert_eq!(value(&place, &format!("SELECT sum(id) FROM '{name}'")), sum, "{name}");
    }
    assert_eq!(value(&place, "SELECT sum(stars) > 0 FROM 'reviews.jsonl'"), true);
    for name in ["lines.txt", "lines.txt.gz"] {
        assert_eq!(value(&place, &format!("SELECT max(text) FROM '{name}'")), "It rained.", "{name}");
    }
    let created = "CREATE EXTERNAL TABLE t STORED AS TEXT LOCATION 'lines.txt'; SELECT count(*) FROM t";
    assert_eq!(sql(&place, &["--format", "csv", "-c", created]).out, "count(*)\n2\n");
    // A folder without data files does not hide a table of the same name.
    shell("mkdir made");
    let created = "CREATE TABLE made AS SELECT 1 AS one; SELECT one FROM made";
    assert_eq!(sql(&place, &["--format", "csv", "-c", created]).out, "one\n1\n");
    let created = "CREATE TABLE \"a.b\" AS SELECT 1 AS one; SELECT one FROM \"a.b\"";
    assert_eq!(sql(&place, &["--format", "csv", "-c", created]).out, "one\n1\n");
    // A file that is replaced within a session is read anew.
    let twice = "COPY (SELECT 100 AS a) TO 'st.parquet'; SELECT sum(a) FROM 'st.parquet'; \
                 COPY (SELECT 200 AS a) TO 'st.parquet'; SELECT sum(a) AS s FROM 'st.parquet' WHERE a = 200";
    assert!(sql(&place, &["--format", "csv", "-c", twice]).out.ends_with("s\n200\n"));
    let created = "CREATE EXTERNAL TABLE t STORED AS CSV LOCATION 'logs/'; SELECT count(*) FROM t";
    assert_eq!(sql(&place, &["--format", "csv", "-c", created]).out, "count(*)\n6\n");
}

/// The result must not depend on which file comes first.
#[test]
fn schemas_of_several_files_are_merged_without_loss() {
    let place = Place::new();
    let copy = |select: &str, to: &str| {
        let ended = sql(&place, &["-c", &format!("COPY ({select}) TO '{to}'")]);
        assert_eq!(ended.code, Some(0), "{ended:?}");
    };
    copy("SELECT 1 AS a", "more/1.parquet");
    copy("SELECT 2 AS a, 'x' AS b", "more/2.parquet");
    let expected = [serde_json::json!({"a": 1, "b": null}), serde_json::json!({"a": 2, "b": "x"})];
    assert_eq!(rows(&place, "SELECT a, b FROM 'more' ORDER BY a"), expected);
    copy("SELECT 1 AS a", "types/1.parquet");
    copy("SELECT 2.5::double AS a", "types/2.parquet");
    let ended = sql(&place, &["-c", "SELECT * FROM 'types'"]);
    assert!(ended.code == Some(2) && ended.err.contains("the column a is Int64 in "), "{ended:?}");
    place.write("lines/1.jsonl", "{\"a\": 1}\n");
    place.write("lines/2.jsonl", "{\"a\": 2.5}\n");
    assert_eq!(value(&place, "SELECT sum(a) FROM 'lines'"), 3.5);
    // Single values of other kinds are strings.
    place.write("lines/3.jsonl", "{\"a\": true}\n{\"a\": \"x\"}\n");
    let strings: Vec<Value> = rows(&place, "SELECT a FROM 'lines'").into_iter().map(|row| row["a"].clone()).collect();
    assert_eq!(strings, ["1", "2.5", "true", "x"]);
    place.write("order/1.csv", "a,b\n1,2\n");
    place.write("order/2.csv", "b,a\n3,4\n");
    let ended = sql(&place, &["-c", "SELECT * FROM 'order'"]);
    assert!(ended.code == Some(2) && ended.err.contains("in another order"), "{ended:?}");
    // Two settings: the merged column has neither.
    copy("SELECT elmo_embed('a', layers => 'top') AS v", "made/1.parquet");
    copy("SELECT elmo_embed('a') AS v", "made/2.parquet");
    copy("SELECT * FROM 'made'", "made.parquet");
    let file = SerializedFileReader::new(fs::File::open(place.path("made.parquet")).unwrap()).unwrap();
    let pairs = file.metadata().file_metadata().key_value_metadata().cloned().unwrap_or_default();
    assert!(pairs.iter().all(|pair| pair.key != "elmo.layers"), "{pairs:?}");
    place.write("empty.parquet", "");
    assert_eq!(sql(&place, &["-c", "SELECT * FROM 'empty.parquet'"]).code, Some(3));
}

#[test]
fn several_models_by_name() {
    let place = small();
    place.exits("model convert tiny other --to safetensors", 0);
    let words = |statement: &'static str| {
        ["--model", "other", "--add-model", "third=other", "--format", "csv", "-c", statement]
    };
    let models = sql(&place, &words("SELECT name FROM elmo_models() ORDER BY 1"));
    assert_eq!(models.out, "name\nbooks\nother\nthird\ntiny\n", "{models:?}");
    let same = "SELECT elmo_embed('It rained.') = elmo_embed('It rained.', model => 'third') AS same";
    assert_eq!(sql(&place, &words(same)).out, "same\ntrue\n");
    let unknown = sql(&place, &words("SELECT elmo_embed('It rained.', model => 'fourth')"));
    assert_eq!(unknown.code, Some(2));
    assert!(unknown.err.contains("no model \"fourth\"; known models: books, other, third, tiny"), "{unknown:?}");
    for statement in ["SELECT elmo_embed('It rained.')", "SELECT * FROM elmo_models()"] {
        let gone = sql(&place, &["--model", "/nowhere", "-c", statement]);
        assert!(gone.code == Some(4) && gone.err.contains("no model /nowhere"), "{statement}: {gone:?}");
    }
    let twice = sql(&place, &["--add-model", "books=other", "-c", "SELECT 1"]);
    assert_eq!(twice.code, Some(2), "{twice:?}");
}

/// A cached fingerprint avoids reading the weights. A wrong one is detected and corrected when the model is opened.
#[test]
fn a_fingerprint_is_cached_until_the_models_files_change() {
    let place = small();
    place.exits("model convert tiny other --to safetensors", 0);
    // One bit differs from `tiny`, whose fingerprint is built in and never cached.
    let weights = place.path("other/weights.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    // Fingerprints of files written within the last seconds are not cached.
    std::thread::sleep(Duration::from_secs(4));
    let ask = |statement: &str| sql(&place, &["--model", "other", "--format", "csv", "-c", statement]);
    let described = || ask("SELECT fingerprint FROM elmo_models() WHERE name = 'other'").out;
    let first = described();
    let fingerprint = first.lines().nth(1).unwrap().to_owned();
    let note = fs::read_dir(place.path("cache/models/fingerprints")).unwrap().next().unwrap().unwrap().path();
    let wrong = fs::read_to_string(&note).unwrap().replace(&fingerprint, &"0".repeat(64));
    fs::write(&note, wrong).unwrap();
    assert_eq!(described(), format!("fingerprint\n{}\n", "0".repeat(64)), "the weights were read");
    let opened = ask("SELECT elmo_embed('It rained.') IS NULL");
    assert!(opened.err.contains("the model changed since it was described"), "{opened:?}");
    assert_eq!(described(), first);
    assert_eq!(ask("SELECT elmo_embed('It rained.') IS NULL AS n").out, "n\nfalse\n");
}

#[test]
fn scripts_come_from_files_and_from_standard_input() {
    let place = small();
    place.write(
        "s.sql",
        "-- a view\nCREATE VIEW v AS SELECT id FROM 'a.csv';\nSELECT max(id) AS m FROM v; SELECT 'a;b' AS s;\n",
    );
    let expected = "m\n3\ns\na;b\n";
    assert_eq!(sql(&place, &["--format", "csv", "-f", "s.sql"]).out, expected);
    assert_eq!(place.shell("elmo sql -q --format csv < s.sql").out, expected);
    assert_eq!(place.shell("elmo sql -q --format csv -f - < s.sql").out, expected);
    place.write("wrong.sql", "SELECT 1;\nSELECT (2;\n");
    let wrong = sql(&place, &["-f", "s.sql", "-f", "wrong.sql"]);
    assert_eq!((wrong.code, wrong.out.as_str()), (Some(2), ""), "{wrong:?}");
    assert!(wrong.err.starts_with("error: wrong.sql: ") && wrong.err.contains("Line: 2"), "{wrong:?}");
    // If one statement is invalid, none is run.
    let broken = sql(&place, &["--format", "csv", "-c", "SELECT 1; SELEC 2"]);
    assert_eq!((broken.code, broken.out.as_str()), (Some(2), ""), "{broken:?}");
    let two = sql(&place, &["--format", "arrow", "-c", "SELECT 1; SELECT 2"]);
    assert_eq!(two.code, Some(2), "{two:?}");
    let closed = place.shell("{ elmo sql -q --format csv -c \"SELECT * FROM 'reviews.jsonl'\"; echo $? > code; } | head -n 1 > /dev/null; cat code");
    assert_eq!((closed.out.as_str(), closed.err.as_str()), ("0\n", ""));
}

#[test]
fn settings_hold_for_the_session() {
    let place = small();
    let plan = |set: &str| sql(&place, &["-c", &format!("{set} EXPLAIN SELECT elmo_embed(text) FROM 'a.csv'")]).out;
    assert!(plan("").contains("EmbedExec"));
    assert!(!plan("SET elmo.rules = false;").contains("EmbedExec"));
}

#[test]
fn errors() {
    let place = small();
    place.write("b.jsonl", "{\"id\": 1}\n");
    fs::create_dir(place.path("mixed")).unwrap();
    fs::copy(place.path("a.csv"), place.path("mixed/a.csv")).unwrap();
    fs::copy(place.path("b.jsonl"), place.path("mixed/b.jsonl")).unwrap();
    place.write("bad.csv", format!("id,text\n{}x,y\n", "1,y\n".repeat(2000)));
    place.write("latin1.txt", b"caf\xe9\n");
    let statements = [
        "SELEC 1",
        "",
        "SELECT 1 FROM nothing",
        "SELECT 1 FROM 'nothing.parquet'",
        "SELECT 1 FROM 'mixed'",
        "SELECT txt FROM 'a.csv'",
        "SELECT elmo_embe(text) FROM 'a.csv'",
        "SELECT elmo_embed(text, pooling => 'sum') FROM 'a.csv'",
        "SELECT elmo_embed(id) FROM 'a.csv'",
        "SELECT elmo_cosine(elmo_embed(text), [1.0, 2.0]) FROM 'a.csv'",
        "SELECT sum(id) FROM 'bad.csv'",
        "SELECT text FROM 'latin1.txt'",
        "SELECT 1 FROM 's3://key:secret@bucket/x.parquet'",
        "COPY (SELECT 1) TO '/proc/elmo/x.parquet'",
        "COPY (SELECT 1) TO 'az://container/t.csv?sig=hunter2'",
        "COPY (SELECT elmo_embed(text) AS v FROM 'a.csv') TO 'a.csv'",
        "CREATE EXTERNAL TABLE t STORED AS XML LOCATION 'a.xml'",
        "COPY (SELECT 1) TO 'x.csv' STORED AS XML",
        "CREATE EXTERNAL TABLE t STORED AS PARQUET LOCATION 'mixed/'",
        "CREATE EXTERNAL TABLE t (a INT) STORED AS TEXT LOCATION 'latin1.txt'",
    ];
    let shown =
        statements.map(|statement| sql(&place, &["-c", statement]).shown(&format!("sql -q -c \"{statement}\"")));
    snapshot("errors-sql", &shown.join("\n"));
}

/// The error names the invalid file of a folder, whether schema inference or the scan finds it.
#[test]
fn an_error_names_the_invalid_file() {
    let place = small();
    let fails = |statement: &str, file: &str, reason: &str| {
        let ended = sql(&place, &["-c", statement]);
        assert_eq!(ended.code, Some(3), "{statement}: {ended:?}");
        assert!(ended.err.contains(&format!("{file}: ")) && ended.err.contains(reason), "{statement}: {ended:?}");
        assert!(!ended.err.contains("secret") && !ended.err.contains("bug"), "{statement}: {ended:?}");
    };
    let folders = ["csv", "json", "parquet", "arrow", "torn"];
    folders.iter().for_each(|name| fs::create_dir(place.path(name)).unwrap());
    for part in 0..20 {
        let id = if part == 13 { "secret" } else { "1" };
        place.write(&format!("csv/{part}.csv"), format!("id\n7\n{id}\n"));
        place.write(&format!("json/{part}.jsonl"), format!("{{\"id\": {id}}}\n"));
    }
    let made = place.shell(
        "elmo sql -q -c \"COPY (SELECT value AS id, repeat('a', 9) AS t FROM range(0, 20000)) TO 'parquet/a.parquet'\" && \
         cp parquet/a.parquet parquet/b.parquet && cp parquet/a.parquet torn/a.parquet && \
         head -c 3000 parquet/a.parquet > torn/b.parquet && \
         elmo sql -q -c \"COPY (SELECT value AS id FROM range(0, 20000)) TO 'arrow/a.arrow'\" && \
         head -c 300 arrow/a.arrow > arrow/b.arrow",
    );
    assert_eq!(made.code, Some(0), "{made:?}");
    // Damages a data page.
    let damaged = place.path("parquet/b.parquet");
    let mut bytes = fs::read(&damaged).unwrap();
    let middle = bytes.len() / 3;
    bytes[middle..middle + 200].fill(0x55);
    fs::write(&damaged, bytes).unwrap();
    let csv = "CREATE EXTERNAL TABLE t (id BIGINT) STORED AS CSV LOCATION 'csv/' OPTIONS ('format.has_header' 'true')";
    fails(
        &format!("{csv}; SELECT sum(id) FROM t"),
        "csv/13.csv",
        "after row 1: Parser error: Error while parsing value '…' as type 'Int64' for column \"id\"",
    );
    // With a declared schema, and with an inferred one.
    let json = "CREATE EXTERNAL TABLE t (id BIGINT) STORED AS NDJSON LOCATION 'json/'";
    fails(&format!("{json}; SELECT sum(id) FROM t"), "json/13.jsonl", "after row 0: Json error");
    fails(
        "CREATE EXTERNAL TABLE t STORED AS JSON LOCATION 'json/*.jsonl'",
        "json/13.jsonl",
        "after row 0: Json error: line 1 of the file: not valid JSON",
    );
    fails("SELECT * FROM 'json'", "json/13.jsonl", "after row 0: Json error: line 1 of the file: not valid JSON");
    fails("SELECT max(id), max(t) FROM 'parquet' WHERE id % 3 = 0", "parquet/b.parquet", "");
    fails("SELECT * FROM 'torn'", "torn/b.parquet", "Invalid Parquet file");
    let given =
        "CREATE EXTERNAL TABLE t (id BIGINT, t VARCHAR) STORED AS PARQUET LOCATION 'torn/'; SELECT max(t) FROM t";
    fails(given, "torn/b.parquet", "Invalid Parquet file");
    // Schema inference skips `_SUCCESS`, so the error must not name it.
    place.write("torn/_SUCCESS", "");
    fails("CREATE EXTERNAL TABLE t STORED AS PARQUET LOCATION 'torn/'", "torn/b.parquet", "Invalid Parquet file");
    place.write("zst/a.csv.zst", [7; 90]);
    fails("SELECT * FROM 'zst/a.csv.zst'", "zst/a.csv.zst", "");
    let given =
        "CREATE EXTERNAL TABLE t (a INT) STORED AS CSV LOCATION 'zst/a.csv.zst' OPTIONS ('format.compression' 'zstd')";
    fails(&format!("{given}; SELECT * FROM t"), "zst/a.csv.zst", "");
    // Damages the body of an Arrow file, which schema inference does not read.
    let mut body = fs::read(place.path("arrow/a.arrow")).unwrap();
    let from = body.len() / 2;
    body[from..from + 600].fill(0xff);
    fs::create_dir(place.path("bodies")).unwrap();
    fs::copy(place.path("arrow/a.arrow"), place.path("bodies/a.arrow")).unwrap();
    fs::write(place.path("bodies/b.arrow"), body).unwrap();
    fails("SELECT max(id) FROM 'bodies'", "bodies/b.arrow", "");
    fails("SELECT * FROM 'arrow'", "arrow/b.arrow", "truncated");
    // An error of an expression does not name a file.
    let ended = sql(&place, &["-c", "SELECT 1 / (id - 7) FROM 'csv/1.csv'"]);
    assert!(ended.code == Some(3) && !ended.err.contains("csv"), "{ended:?}");
}

/// Readers and functions quote the values that they reject. Neither the file's reader nor an expression may show them.
#[test]
fn errors_contain_no_row_values() {
    let place = Place::new();
    // Schema inference and scan of JSON: a line that is an array, arrays with items that are not objects or that are cut
    // off, other types.
    place.write("array.json", "[{\"text\": \"planted marker\"}, {\"text\": \"planted marker");
    place.write("array.jsonl", "[\"planted marker\"]\n");
    place.write("items.json", "[{\"id\": 1}, \"planted marker\"]");
    place.write("types.jsonl", "{\"id\": [{\"planted marker\": 1}]}\n{\"id\": \"planted marker\"}\n");
    place.write("values.jsonl", "{\"id\": 1}\n{\"id\": \"planted marker\"}\n");
    place.write("text.csv", "text\nplanted marker\n");
    let items = "STORED AS JSON LOCATION 'items.json' OPTIONS ('format.newline_delimited' 'false'); SELECT * FROM t";
    let of_text = |expression: &str| format!("SELECT {expression} FROM 'text.csv'");
    for statement in [
        "SELECT * FROM 'array.json'".to_owned(),
        "SELECT * FROM 'array.jsonl'".to_owned(),
        "SELECT * FROM 'types.jsonl'".to_owned(),
        "CREATE EXTERNAL TABLE t STORED AS JSON LOCATION 'array.json'".to_owned(),
        format!("CREATE EXTERNAL TABLE t {items}"),
        format!("CREATE EXTERNAL TABLE t (id BIGINT) {items}"),
        "CREATE EXTERNAL TABLE t (id BIGINT) STORED AS JSON LOCATION 'values.jsonl'; SELECT * FROM t".to_owned(),
        of_text("CAST(text AS BOOLEAN)"),
        of_text("CAST(text AS INTERVAL)"),
        of_text("CAST(text AS TIMESTAMP)"),
        of_text("to_time(text)"),
        of_text("to_timestamp(text, '%Y')"),
        of_text("regexp_like('a', text || '(')"),
        of_text("regexp_replace('a', 'b', 'c', text)"),
        of_text("map([text, text], [1, 2])"),
        format!("CREATE TABLE t AS {}", of_text("to_time(text)")),
        format!("COPY ({}) TO 'out.csv'", of_text("to_time(text)")),
    ] {
        let ended = sql(&place, &["-c", &statement]);
        assert!(matches!(ended.code, Some(2 | 3)), "{statement}: {ended:?}");
        assert!(!ended.err.is_empty() && !ended.err.contains("marker"), "{statement}: {ended:?}");
    }
    // Names of the statement are shown.
    let dropped = sql(&place, &["-c", "DROP TABLE reviews"]);
    assert!(dropped.err.contains("reviews"), "{dropped:?}");
}

#[test]
fn too_little_memory_is_an_error_that_names_the_flag() {
    let place = Place::new();
    let query = "SELECT elmo_tokens(repeat(text, 300), layers => 'all') FROM 'reviews.jsonl'";
    let ended = sql(&place, &["--memory-limit", "1MB", "--format", "csv", "-c", query]);
    assert_eq!(ended.code, Some(1), "{:?}", ended.err);
    assert!(ended.err.contains("raise --memory-limit"), "{:?}", ended.err);
}

#[test]
fn an_interrupted_copy_leaves_what_was_there() {
    let place = Place::new();
    place.write("a.txt", "It rained all day, and we stayed in and read what there was.\n".repeat(100_000));
    place.write("before.csv", "what was there before\n");
    // Distinct texts, as equal ones are embedded once. Small batches, so that the writer receives many.
    let rows = "SELECT elmo_embed(concat(text, random()::text)) AS v FROM 'a.txt'";
    for (out, rows) in [
        ("out.parquet", rows),
        ("before.csv", "SELECT value FROM range(0, 1000000000)"),
        ("out.csv", "SELECT value FROM range(0, 1000000000)"),
    ] {
        let copy = format!("COPY ({rows}) TO '{out}'");
        let words = ["sql", "-q", "--threads", "1", "-c", "SET datafusion.execution.batch_size = 10", "-c", &copy];
        let child = place.elmo().args(words).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_secs(3));
        let told = Instant::now();
        Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(130), "{out}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(told.elapsed() < Duration::from_secs(30));
        let left: Vec<_> = fs::read_dir(place.path("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(left.iter().all(|name| !name.to_string_lossy().starts_with("out.")), "{left:?}");
        assert!(left.iter().all(|name| !name.to_string_lossy().starts_with("before.csv#")), "{left:?}");
    }
    assert_eq!(fs::read_to_string(place.path("before.csv")).unwrap(), "what was there before\n");
}

/// A CSV file of several megabytes of multi-line cells: splitting it would split cells.
#[test]
fn quoted_cells_have_several_lines() {
    let place = Place::new();
    let rows: String = (0..60_000).map(|id| format!("{id},\"a\nb {id}\nc\"\n")).collect();
    place.write("lines.csv", format!("id,text\n{rows}"));
    let query = "SELECT count(*), sum(id), min(length(text)) FROM 'lines.csv' WHERE text LIKE 'a%c'";
    let counted = place.elmo().args(["sql", "-q", "--format", "csv", "-c", query]).output().unwrap();
    let out = String::from_utf8(counted.stdout).unwrap();
    // By hand: 60,000 rows, 0 + … + 59,999 = 59,999 · 30,000, and "a\nb 0\nc" has seven characters.
    assert_eq!(out.lines().last(), Some("60000,1799970000,7"), "{}", String::from_utf8_lossy(&counted.stderr));
}
