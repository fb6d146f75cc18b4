//! What the options for inputs change: which files are read, as what, and how many rows of them.

use std::{fs, sync::atomic::Ordering};

use arrow::{
    array::{Array, AsArray},
    compute::cast,
    datatypes::{DataType, Date32Type, Int64Type},
};
use elmo_pipelines::{
    Error, Exit,
    bulk::{self, BulkJob, dry_run::dry_run, manifest::OutputState},
    source::{Format, InferRows, Keep, KeptTypes, OnMalformed, Reading},
    stores::Stores,
};

use crate::{
    common::{Hashing, Place, assert_own_vectors, lines, part, parts, run, run_local, strings},
    inputs::gzip,
    resume::StopAfter,
};

/// The names and types of an output's columns, without those that the job adds.
fn kept(place: &Place, output: &str) -> Vec<(String, DataType)> {
    let schema = place.rows(output).schema();
    let kept = schema.fields().iter().take(schema.fields().len() - 3);
    kept.map(|field| (field.name().clone(), field.data_type().clone())).collect()
}

fn named<const N: usize>(columns: [(&str, DataType); N]) -> Vec<(String, DataType)> {
    columns.map(|(name, kind)| (name.to_owned(), kind)).to_vec()
}

/// Expected: what DuckDB 2.0 returns for `read_csv('**/*.csv', hive_partitioning = true)` on the same folders, in the order
/// of the paths.
#[tokio::test(flavor = "multi_thread")]
async fn folders_of_hive_partitions_are_columns() {
    let place = Place::new();
    for (folder, text) in [
        ("year=2023/day=2023-12-31/tag=a%20b%2Fc", "one"),
        ("year=2024/day=2024-02-29/tag=__HIVE_DEFAULT_PARTITION__", "two"),
        ("year=2024/day=__HIVE_DEFAULT_PARTITION__/tag=01", "three"),
    ] {
        place.write(&format!("in/{folder}/x.csv"), format!("id,text\n7,{text}\n"));
    }
    // More rows than one batch has.
    place.write("in/year=2025/day=2025-01-01/tag=z/x.csv", "id,text\n".to_owned() + &"8,four\n".repeat(9000));
    let job = BulkJob { rows_per_file: Some(10_000), window_rows: 8192, ..place.job("in", "out") };
    run_local(&job).await.unwrap();
    let rows = place.rows("out");
    assert_own_vectors(&rows);
    let (int, utf8) = (DataType::Int64, DataType::Utf8);
    let expected =
        [("id", int.clone()), ("text", utf8.clone()), ("year", int), ("day", DataType::Date32), ("tag", utf8)];
    assert_eq!(kept(&place, "out"), named(expected));
    let years = rows.column_by_name("year").unwrap().as_primitive::<Int64Type>();
    assert_eq!(years.values()[..3], [2023, 2024, 2024]);
    assert!(years.values()[3..].iter().all(|year| *year == 2025) && years.len() == 9003);
    let days = rows.column_by_name("day").unwrap().as_primitive::<Date32Type>();
    // Days since 1970, by `date -d 2023-12-31 +%s` / 86400.
    assert_eq!(
        (0..4).map(|i| days.is_valid(i).then(|| days.value(i))).collect::<Vec<_>>(),
        [Some(19722), Some(19782), None, Some(20089)]
    );
    let tags = strings(&rows, "tag");
    assert_eq!(tags[..4], [Some("a b/c".to_owned()), None, Some("01".to_owned()), Some("z".to_owned())]);
}

/// Expected: the columns do not depend on how the same file is named.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_has_its_partitions_however_it_is_named() {
    let place = Place::new();
    place.write("data/a=1/b=x/raw/c=2/x.txt", "line\n");
    place.write("data/plain/x.txt", "line\n");
    let (int, utf8) = (DataType::Int64, DataType::Utf8);
    let all = [("text", utf8.clone()), ("a", int.clone()), ("b", utf8.clone()), ("c", int.clone())];
    for (number, (input, expected)) in [
        ("data/a=1", named(all.clone())),
        ("data/a=*/b=*/**/*.txt", named(all.clone())),
        ("data/a=1/b=x", named(all)),
        ("data/a=1/b=x/raw/c=2/x.txt", named([("text", utf8.clone()), ("c", int)])),
        ("data/plain", named([("text", utf8)])),
    ]
    .into_iter()
    .enumerate()
    {
        let output = format!("out-{number}");
        run_local(&place.job(input, &output)).await.unwrap();
        assert_eq!(kept(&place, &output), expected, "{input}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_beside_columns_of_the_files() {
    let place = Place::new();
    // DuckDB: the folder's value counts, at the place of the file's column.
    place.write("in/year=2024/x.csv", "year,text\n1999,one\n");
    // A file without the folder keeps its column.
    place.write("in/y.csv", "year,text\n2000,two\n");
    run_local(&place.job("in", "out")).await.unwrap();
    assert_eq!(kept(&place, "out"), named([("year", DataType::Int64), ("text", DataType::Utf8)]));
    assert_eq!(strings(&place.rows("out"), "year"), [Some("2000".to_owned()), Some("2024".to_owned())]);
    // A file that lacks a key has NULL there, as with columns.
    place.write("some/a=1/x.txt", "one\n");
    place.write("some/x.txt", "two\n");
    run_local(&place.job("some", "null")).await.unwrap();
    assert_eq!(strings(&place.rows("null"), "a"), [Some("1".to_owned()), None]);
    // As any other column they can be left out, be the id, and stay as they are written.
    let id = BulkJob { id: Some("a".into()), keep: Keep::None, ..place.job("some/a=1", "id") };
    run_local(&id).await.unwrap();
    assert_eq!(kept(&place, "id"), named([("a", DataType::Int64)]));
    let written = BulkJob { types: KeptTypes::Strings, ..place.job("some/a=1", "written") };
    run_local(&written).await.unwrap();
    assert_eq!(kept(&place, "written"), named([("text", DataType::Utf8), ("a", DataType::Utf8)]));
    // The texts are those of the file, whatever its folder is called.
    place.write("texts/text=en/x.txt", "of the file\n");
    run_local(&place.job("texts", "own")).await.unwrap();
    let own = cast(place.rows("own").column_by_name("text").unwrap(), &DataType::Utf8).unwrap();
    assert_eq!(own.as_string::<i32>().value(0), "of the file");
}

fn text_of(place: &Place, output: &str) -> Vec<String> {
    strings(&place.rows(output), "text").into_iter().map(Option::unwrap_or_default).collect()
}

fn reading(format: Option<Format>, delimiter: &str, no_header: bool) -> Reading {
    let delimiter = Some(delimiter).filter(|text| !text.is_empty()).map(|text| text.parse().unwrap());
    Reading { format, delimiter, no_header, ..Reading::default() }
}

/// Expected: the same two rows in every way of writing them.
#[tokio::test(flavor = "multi_thread")]
async fn cells_and_arrays_of_every_kind() {
    let place = Place::new();
    let array = "[\n  {\"id\": 1, \"text\": \"a, b\"},\n  {\"id\": 2,\n \"text\": \"c\\td]\"}\n]\n";
    place.write("a.tsv", "id\ttext\n1\ta, b\n2\t\"c\td]\"\n");
    place.write("b.csv", "id;text\n1;a, b\n2;\"c\td]\"\n");
    place.write("c.txt", "id|text\n1|a, b\n2|c\td]\n");
    place.write("d.csv", "1,\"a, b\"\n2,\"c\td]\"\n");
    place.write("e.json", array);
    place.write("f.json", "{\"id\": 1, \"text\": \"a, b\"}\n{\"id\": 2, \"text\": \"c\\td]\"}\n");
    place.write("g.json.gz", gzip(array.as_bytes()).await);
    place.write("h.tsv.gz", gzip(b"id\ttext\n1\ta, b\n2\t\"c\td]\"\n").await);
    place.write("i", "id,text\n1,\"a, b\"\n2,\"c\td]\"\n");
    place.write("folder/j.log", array);
    let none = reading(None, "", false);
    for (input, reading, column) in [
        ("a.tsv", none, "text"),
        ("b.csv", reading(None, ";", false), "text"),
        ("c.txt", reading(Some(Format::Csv), "|", false), "text"),
        ("d.csv", reading(None, "", true), "column_2"),
        ("e.json", none, "text"),
        ("f.json", none, "text"),
        ("g.json.gz", none, "text"),
        ("h.tsv.gz", none, "text"),
        ("i", reading(Some(Format::Csv), "", false), "text"),
        ("folder", reading(Some(Format::Json), "", false), "text"),
    ] {
        let output = format!("out-{input}");
        let job = BulkJob { reading, column: column.into(), ..place.job(input, &output) };
        run_local(&job).await.unwrap();
        let rows = place.rows(&output);
        let id = rows.schema().field(0).name().clone();
        assert_eq!(strings(&rows, &id), ["1", "2"].map(|id| Some(id.to_owned())), "{input}");
        assert_eq!(strings(&rows, column), ["a, b", "c\td]"].map(|text| Some(text.to_owned())), "{input}");
        // The reading is part of the job.
        let again = run_local(&job).await.unwrap();
        assert_eq!(again.resumed_rows, 2);
    }
    let other = BulkJob { reading: reading(Some(Format::Tsv), "", false), ..place.job("a.tsv", "out-a.tsv") };
    let error = run_local(&other).await.unwrap_err().to_string();
    assert!(error.contains("input-format: was (not set), now tsv"), "{error}");
    let useless = BulkJob { reading: reading(None, ";", false), ..place.job("e.json", "out") };
    assert_eq!(run_local(&useless).await.unwrap_err().exit(), Exit::Usage);
    for cut in ["[{\"text\": \"a\"}", "[{\"text\": \"a\"} {\"text\": \"b\"}]", "[{\"text\": \"a\"}] 7"] {
        place.write("cut.json", cut);
        let error = run_local(&place.job("cut.json", "cut")).await.unwrap_err();
        assert!(error.exit() == Exit::Input && error.to_string().contains("array"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_is_of_all_files_in_order() {
    let place = Place::new();
    place.write("in/a.txt", lines(7));
    place.write("in/b.txt", lines(30));
    place.write("in/c.txt", lines(30));
    run_local(&place.job("in", "all")).await.unwrap();
    let all = text_of(&place, "all");
    let stores = Stores::with_settings([]);
    // Within the first part, at its end, within the second file, at the end of a file, and beyond the last row.
    for limit in [3, 10, 25, 37, 67, 100] {
        let output = format!("out-{limit}");
        let job = BulkJob { limit: Some(limit), ..place.job("in", &output) };
        let expected = limit.min(67);
        let dry = dry_run(&job, &Hashing::default(), &stores).await.unwrap();
        assert_eq!((dry.rows, dry.rows_exact, dry.rows_left), (expected, true, expected));
        let stage = Hashing::default();
        let report = run(&job, &stage, &stores).await.unwrap();
        assert_eq!((report.counts.rows_in, report.counts.rows_out), (expected, expected));
        assert_eq!(report.parts as u64, expected.div_ceil(10));
        assert_eq!(text_of(&place, &output), all[..expected as usize]);
        // Complete: nothing is read again.
        let stage = Hashing::default();
        assert_eq!(run(&job, &stage, &stores).await.unwrap().resumed_rows, expected);
        assert_eq!(stage.rows.load(Ordering::SeqCst), 0);
        assert_eq!(dry_run(&job, &stage, &stores).await.unwrap().rows_left, 0);
    }
    // Another limit is another job, and says so.
    for (limit, now) in [(Some(11), "now 11"), (None, "now (not set)")] {
        let error = run_local(&BulkJob { limit, ..place.job("in", "out-10") }).await.unwrap_err().to_string();
        assert!(error.contains("limit: was 10") && error.contains(now), "{error}");
    }
}

/// Lost parts are written again with the same rows, and an interrupted trial ends at the same row.
#[tokio::test(flavor = "multi_thread")]
async fn a_limited_job_is_repaired_and_resumed() {
    let place = Place::new();
    place.write("in/a.txt", lines(7));
    place.write("in/b.txt", lines(30));
    let job = |output: &str| BulkJob { limit: Some(25), ..place.job("in", output) };
    run_local(&job("calm")).await.unwrap();
    let calm = parts(&place.path("calm"));
    run_local(&job("torn")).await.unwrap();
    for number in [0, 2] {
        fs::remove_file(part(&place.path("torn"), number)).unwrap();
    }
    run_local(&job("torn")).await.unwrap();
    assert!(parts(&place.path("torn")) == calm);
    let progress = StopAfter::new(12);
    let stop = progress.stop.notified();
    let stopped = bulk::run(&job("stopped"), &Hashing::default(), &Stores::with_settings([]), stop, &progress).await;
    assert!(matches!(stopped, Err(Error::Interrupted { .. })));
    run_local(&job("stopped")).await.unwrap();
    assert!(parts(&place.path("stopped")) == calm);
}

/// Rows and lines counted by hand.
#[tokio::test(flavor = "multi_thread")]
async fn malformed_rows_are_left_out_and_counted() {
    let place = Place::new();
    let good = |n: usize| format!("{n},row {n}\n");
    let rows = |from: usize, to: usize| (from..to).map(good).collect::<String>();
    place.write("a.csv", format!("id,text\n{}\n3\n{}1,2,3\n{}", rows(0, 3), rows(4, 22), rows(23, 40)));
    let json = |n: usize| format!("{{\"id\": {n}, \"text\": \"row {n}\"}}\n");
    let objects = |from: usize, to: usize| (from..to).map(json).collect::<String>();
    place.write("b.jsonl", format!("{}\n{{\"id\": 3\n{}[22]\n{}", objects(0, 3), objects(4, 22), objects(23, 40)));
    for (input, reasons) in [
        ("a.csv", ["line 6: 1 cells instead of 2", "line 25: 3 cells instead of 2"]),
        ("b.jsonl", ["line 5: not valid JSON at byte 8 of the line", "line 24: not a JSON object"]),
    ] {
        let skip = Reading { malformed: OnMalformed::Skip, ..Reading::default() };
        let infer_rows = InferRows(Some(2));
        let job =
            |output: &str, reading| BulkJob { reading, infer_rows, ..place.job(input, &format!("{output}-{input}")) };
        let report = run_local(&job("skip", skip)).await.unwrap();
        assert_eq!((report.counts.rows_in, report.counts.rows_out, report.counts.malformed), (40, 38, 2));
        assert_eq!((report.counts.nulls, report.counts.errors, report.counts.skipped), (0, 0, 0));
        let places: Vec<String> =
            reasons.iter().map(|reason| format!("{}, {reason}", place.path(input).display())).collect();
        assert_eq!(report.malformed_rows, places);
        let expected: Vec<String> = (0..40).filter(|n| ![3, 22].contains(n)).map(|n| format!("row {n}")).collect();
        assert_eq!(text_of(&place, &format!("skip-{input}")), expected);
        assert_own_vectors(&place.rows(&format!("skip-{input}")));
        // The parts hold the rows of the same numbers: a lost one is written again with the same bytes.
        let whole = parts(&place.path(&format!("skip-{input}")));
        fs::remove_file(part(&place.path(&format!("skip-{input}")), 2)).unwrap();
        run_local(&job("skip", skip)).await.unwrap();
        assert!(parts(&place.path(&format!("skip-{input}"))) == whole);
        // Otherwise the row ends the job.
        let error = run_local(&job("fail", Reading::default())).await.unwrap_err();
        assert!(error.exit() == Exit::Input && error.to_string().contains("row 3:"), "{error}");
        assert!(error.help().unwrap().contains("--on-malformed skip"), "{error:?}");
        // A job with such rows left out is another one without that.
        let error = run_local(&job("skip", Reading::default())).await.unwrap_err().to_string();
        assert!(error.contains("on-malformed: was skip, now (not set)"), "{error}");
    }
}

/// A job that ended at a malformed row goes on when such rows are to be left out.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_goes_on_with_malformed_rows_left_out() {
    let place = Place::new();
    let rows: String = (0..60).map(|n| if n == 35 { "1,2,3\n".to_owned() } else { format!("{n},row {n}\n") }).collect();
    // Behind the rows from which the schema is inferred.
    place.write("a.csv", format!("id,text\n{rows}"));
    let job = |output: &str, malformed| {
        let reading = Reading { malformed, ..Reading::default() };
        BulkJob { reading, infer_rows: InferRows(Some(10)), ..place.job("a.csv", output) }
    };
    run_local(&job("calm", OnMalformed::Skip)).await.unwrap();
    let error = run_local(&job("out", OnMalformed::Fail)).await.unwrap_err().to_string();
    assert!(error.contains("after row 35: "), "{error}");
    let report = run_local(&job("out", OnMalformed::Skip)).await.unwrap();
    assert_eq!((report.resumed_rows, report.counts.rows_out, report.counts.malformed), (30, 59, 1));
    assert!(parts(&place.path("out")) == parts(&place.path("calm")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_key_of_json_is_not_lost() {
    let place = Place::new();
    let plain = "{\"text\": \"a\", \"o\": {\"x\": 1}}\n".repeat(50);
    let late = "{\"text\": \"b\", \"o\": {\"x\": 2}, \"late\": \"kept\"}\n";
    let nested = "{\"text\": \"b\", \"o\": {\"x\": 2, \"inner\": \"kept\"}}\n";
    for (name, row, key) in [("a.jsonl", late, "late"), ("b.jsonl", nested, "inner")] {
        place.write(name, format!("{plain}{row}"));
        let job = |output: &str, rows| BulkJob {
            infer_rows: InferRows(rows),
            ..place.job(name, &format!("{output}-{name}"))
        };
        let error = run_local(&job("few", Some(10))).await.unwrap_err();
        let said = error.to_string();
        assert!(error.exit() == Exit::Input && said.contains(name) && said.contains("row 50: "), "{said}");
        assert!(
            said.contains(&format!("the key {key:?}")) && error.help().unwrap().contains("--infer-rows all"),
            "{error:?}"
        );
        run_local(&job("all", None)).await.unwrap();
        let rows = place.rows(&format!("all-{name}"));
        let shown = format!("{:?}", rows.columns());
        assert!(shown.contains("kept"), "{shown}");
    }
    // A key that nobody asked for may come at any time.
    let keep = Keep::Columns(vec!["o".into()]);
    run_local(&BulkJob { keep, infer_rows: InferRows(Some(10)), ..place.job("a.jsonl", "some") }).await.unwrap();
    // By default keys are looked for in 20,480 rows.
    place.write("c.jsonl", format!("{}{late}", plain.repeat(400)));
    let large = BulkJob {
        rows_per_file: Some(100_000),
        window_rows: 8192,
        infer_rows: InferRows::default(),
        ..place.job("c.jsonl", "default")
    };
    run_local(&large).await.unwrap();
    assert_eq!(strings(&place.rows("default"), "late").last().unwrap().as_deref(), Some("kept"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_column_to_embed_may_have_the_name_of_an_added_one() {
    let place = Place::new();
    place.write("a.csv", "id,embedding\n1,text\n");
    let job = |keep| BulkJob { column: "embedding".into(), keep, ..place.job("a.csv", "out") };
    let error = run_local(&job(Keep::All)).await.unwrap_err();
    let said = error.to_string();
    assert!(said.contains("column \"embedding\"") && said.contains("--keep"), "{said}");
    run_local(&job(Keep::Columns(vec!["id".into()]))).await.unwrap();
}

/// What an interrupted job says is durable, a dry run finds, and the next run does not do again.
#[tokio::test(flavor = "multi_thread")]
async fn rows_that_are_safe_are_not_computed_again() {
    let place = Place::new();
    place.write("a.txt", lines(100));
    let stores = Stores::with_settings([]);
    let job = BulkJob { rows_per_file: Some(40), ..place.job("a.txt", "out") };
    let progress = StopAfter::new(50);
    let stopped = bulk::run(&job, &Hashing::default(), &stores, progress.stop.notified(), &progress).await;
    let Err(Error::Interrupted { rows: safe, .. }) = stopped else { panic!("{stopped:?}") };
    assert!(safe > 40 && safe < 100, "rows of the open part were saved: {safe}");
    let dry = dry_run(&job, &Hashing::default(), &stores).await.unwrap();
    assert_eq!(dry.output, OutputState::Begun { rows: safe });
    assert_eq!((dry.rows, dry.rows_left), (100, 100 - safe));
    let shown = dry.to_string();
    assert!(shown.contains(&format!("resumes after {safe} rows; about {} rows", 100 - safe)), "{shown}");
    let stage = Hashing::default();
    let report = run(&job, &stage, &stores).await.unwrap();
    assert_eq!(report.resumed_rows, safe);
    assert_eq!(stage.rows.load(Ordering::SeqCst) as u64, 100 - safe);
}
