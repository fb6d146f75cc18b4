//! Every kind of file, alone and mixed.

use std::sync::Arc;

use arrow::{
    array::{
        Array, ArrayRef, AsArray, BooleanArray, Decimal128Array, DictionaryArray, FixedSizeBinaryArray, Float32Array,
        Int64Array, IntervalMonthDayNanoArray, LargeStringArray, ListArray, NullArray, RecordBatch, StringArray,
        StringViewArray, StructArray, UnionArray,
    },
    compute::cast,
    datatypes::{DataType, Field, Float64Type, Int8Type, Int32Type, IntervalMonthDayNano, Schema, UnionFields},
    ipc::writer::{FileWriter, StreamWriter},
};
use async_compression::tokio::write::{GzipEncoder, ZstdEncoder};
use elmo::{EmbedSpec, spec::OnError};
use elmo_pipelines::{
    Error, Exit,
    bulk::BulkJob,
    bulk::dry_run::dry_run,
    source::{self, InferRows, Keep, KeptTypes, Plan, Request},
    stores::Stores,
};
use parquet::{
    arrow::{ArrowWriter, arrow_writer::ArrowWriterOptions, encode_arrow_schema},
    data_type::{ByteArray, ByteArrayType, Int96, Int96Type},
    file::{metadata::KeyValue, properties::WriterProperties, writer::SerializedFileWriter},
    schema::parser::parse_message_type,
};
use tokio::io::AsyncWriteExt;

use crate::common::{Hashing, Place, assert_own_vectors, hashed, run, run_local, strings, vectors};

const TEXTS: [&str; 5] = ["first", "two words", "", "with \"quotes\", a comma", "naïve 日本語 🙂 \u{20000}"];

fn batch(text: ArrayRef) -> RecordBatch {
    let id: ArrayRef = Arc::new(Int64Array::from_iter_values(0..text.len() as i64));
    RecordBatch::try_from_iter([("id", id), ("text", text)]).unwrap()
}

fn text() -> ArrayRef {
    Arc::new(StringArray::from(TEXTS.to_vec()))
}

fn csv() -> Vec<u8> {
    let rows = TEXTS.iter().enumerate().map(|(i, t)| format!("{i},\"{}\"\n", t.replace('"', "\"\"")));
    std::iter::once("id,text\n".to_owned()).chain(rows).collect::<String>().into_bytes()
}

fn json() -> Vec<u8> {
    // Characters outside ASCII as pairs of escapes, as Python's json writes them.
    let escaped = |text: &str| -> String {
        let unit = |unit: u16| if unit < 128 { char::from(unit as u8).to_string() } else { format!("\\u{unit:04x}") };
        serde_json::json!(text).to_string().encode_utf16().map(unit).collect()
    };
    let rows = TEXTS.iter().enumerate().map(|(i, t)| format!("{{\"id\": {i}, \"text\": {}}}\n", escaped(t)));
    rows.collect::<String>().into_bytes()
}

fn parquet(batch: &RecordBatch) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), None).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
    bytes
}

fn arrow_file(batch: &RecordBatch) -> Vec<u8> {
    let mut writer = FileWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    writer.write(batch).unwrap();
    writer.into_inner().unwrap()
}

fn arrow_stream(batch: &RecordBatch) -> Vec<u8> {
    let mut writer = StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    writer.write(batch).unwrap();
    writer.into_inner().unwrap()
}

pub(crate) async fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzipEncoder::new(Vec::new());
    encoder.write_all(bytes).await.unwrap();
    encoder.shutdown().await.unwrap();
    encoder.into_inner()
}

async fn zstd(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = ZstdEncoder::new(Vec::new());
    encoder.write_all(bytes).await.unwrap();
    encoder.shutdown().await.unwrap();
    encoder.into_inner()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_format_plain_and_packed() {
    let place = Place::new();
    let (csv, json) = (csv(), json());
    let (file, stream) = (arrow_file(&batch(text())), arrow_stream(&batch(text())));
    // Two gzip members, one after the other, are one file.
    let (head, tail) = json.split_at(json.len() / 2);
    let members = [gzip(head).await, gzip(tail).await].concat();
    let files = [
        ("a.csv", csv.clone()),
        ("b.csv.gz", gzip(&csv).await),
        ("c.csv.zst", zstd(&csv).await),
        ("d.jsonl", json.clone()),
        ("e.ndjson.gz", members),
        ("f.jsonl.zst", zstd(&json).await),
        ("g.parquet", parquet(&batch(text()))),
        ("h.arrow", file.clone()),
        ("i.arrow.zst", zstd(&file).await),
        ("j.arrows", stream.clone()),
        ("k.arrow.gz", gzip(&stream).await),
    ];
    for (name, bytes) in &files {
        place.write(&format!("in/{name}"), bytes);
    }
    let report = run_local(&place.job("in", "out")).await.unwrap();
    assert_eq!(report.counts.rows_out as usize, files.len() * TEXTS.len());
    let rows = place.rows("out");
    assert_own_vectors(&rows);
    // CSV has no way to write an empty string that is not NULL.
    let texts = strings(&rows, "text").into_iter().map(Option::unwrap_or_default);
    let expected = std::iter::repeat_n(TEXTS, files.len()).flatten();
    assert!(texts.eq(expected));
    let ids = strings(&rows, "id");
    assert!(ids.chunks(TEXTS.len()).all(|file| file.iter().flatten().eq(["0", "1", "2", "3", "4"])), "{ids:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn lines_and_their_ends() {
    let place = Place::new();
    place.write("in/a.txt", "\u{feff}one\r\ntwo\n\nfour");
    place.write("in/b.txt", "");
    place.write("in/c.txt.gz", gzip(b"five\nsix\n").await);
    run_local(&place.job("in", "out")).await.unwrap();
    let rows = place.rows("out");
    let texts: Vec<_> = strings(&rows, "text").into_iter().flatten().collect();
    assert_eq!(texts, ["one", "two", "", "four", "five", "six"]);
    assert_own_vectors(&rows);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_that_is_no_utf8_is_that_rows_fault_alone() {
    let place = Place::new();
    place.write("a.txt", b"fine\n\xffbad\nalso fine\n");
    let error = run_local(&place.job("a.txt", "fail")).await.unwrap_err();
    assert_eq!(error.exit(), Exit::Input);
    assert!(matches!(&error, Error::Input { file, row: Some(1), .. } if file.ends_with("a.txt")), "{error:?}");
    let with = |on_error| Hashing { spec: EmbedSpec { on_error, ..EmbedSpec::default() }, ..Hashing::default() };
    let stores = Stores::with_settings([]);
    let report = run(&place.job("a.txt", "null"), &with(OnError::Null), &stores).await.unwrap();
    assert_eq!((report.counts.rows_out, report.counts.errors), (3, 1));
    let rows = place.rows("null");
    assert_eq!(strings(&rows, "text")[1].as_deref(), Some("\u{fffd}bad"));
    assert_eq!(strings(&rows, "error"), [None, Some("not UTF-8".to_owned()), None]);
    let report = run(&place.job("a.txt", "skip"), &with(OnError::Skip), &stores).await.unwrap();
    assert_eq!((report.counts.rows_in, report.counts.rows_out, report.counts.skipped), (3, 2, 1));
    let texts: Vec<_> = strings(&place.rows("skip"), "text").into_iter().flatten().collect();
    assert_eq!(texts, ["fine", "also fine"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_encoding_of_strings() {
    let place = Place::new();
    let words: Vec<Option<&str>> = vec![Some("a"), None, Some("a"), Some("a long one that no view holds inline")];
    let plain: ArrayRef = Arc::new(StringArray::from(words.clone()));
    let runs = |end| {
        let (ends, values) = (Field::new("run_ends", end, false), Field::new("values", DataType::Utf8, true));
        cast(&plain, &DataType::RunEndEncoded(ends.into(), values.into())).unwrap()
    };
    let columns: [(&str, ArrayRef); 6] = [
        ("runs16", runs(DataType::Int16)),
        ("runs64", runs(DataType::Int64)),
        ("utf8", Arc::new(StringArray::from(words.clone()))),
        ("large", Arc::new(LargeStringArray::from(words.clone()))),
        ("view", Arc::new(StringViewArray::from(words.clone()))),
        ("dictionary", Arc::new(words.into_iter().collect::<DictionaryArray<Int32Type>>())),
    ];
    let mut expected = None;
    for (name, column) in columns {
        place.write(&format!("{name}.arrow"), arrow_file(&batch(column)));
        run_local(&place.job(&format!("{name}.arrow"), name)).await.unwrap();
        let found = vectors(&place.rows(name));
        assert_eq!(*expected.get_or_insert_with(|| found.clone()), found, "{name}");
    }
    run_local(&place.job("*.arrow", "mixed")).await.unwrap();
    let once = expected.unwrap();
    assert_eq!(vectors(&place.rows("mixed")), vec![once; 6].concat());
    let bytes = [Some("four"), None, Some("fün")].map(|word| word.map(str::as_bytes));
    let fixed = FixedSizeBinaryArray::try_from_sparse_iter_with_size(bytes.into_iter(), 4).unwrap();
    place.write("fixed/a.arrow", arrow_file(&batch(Arc::new(fixed))));
    run_local(&place.job("fixed", "out-fixed")).await.unwrap();
    assert_eq!(vectors(&place.rows("out-fixed")), [Some(hashed(b"four")), None, Some(hashed("fün".as_bytes()))]);
}

/// Lists are tokens in each of Arrow's five layouts, of strings in any encoding.
#[tokio::test(flavor = "multi_thread")]
async fn every_layout_of_lists() {
    let place = Place::new();
    let stores = Stores::with_settings([]);
    let tiny = crate::common::tiny(EmbedSpec::default());
    let mut builder = arrow::array::ListBuilder::new(arrow::array::StringBuilder::new());
    for _ in 0..2 {
        builder.append_value([Some("It"), Some("rained")]);
        builder.append_null();
    }
    let list: ArrayRef = Arc::new(builder.finish());
    let item = |kind| Arc::new(Field::new_list_field(kind, true));
    let (ends, values) = (Field::new("run_ends", DataType::Int32, false), Field::new("values", DataType::Utf8, true));
    let kinds = [
        DataType::List(item(DataType::Utf8)),
        DataType::LargeList(item(DataType::LargeUtf8)),
        DataType::FixedSizeList(item(DataType::Utf8), 2),
        DataType::ListView(item(DataType::Utf8View)),
        DataType::LargeListView(item(DataType::Utf8)),
        DataType::List(item(DataType::RunEndEncoded(ends.into(), values.into()))),
        DataType::List(item(DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::Utf8)))),
    ];
    place.write("text.jsonl", "{\"text\": \"It rained\"}\n");
    run(&place.job("text.jsonl", "expected"), tiny.as_ref(), &stores).await.unwrap();
    let expected = vectors(&place.rows("expected")).remove(0);
    for (n, kind) in kinds.iter().enumerate() {
        let column = cast(&list, kind).unwrap().slice(1, 3);
        place.write(&format!("in/{n}.arrow"), arrow_file(&batch(Arc::clone(&column))));
        run(&place.job(&format!("in/{n}.arrow"), &format!("out{n}")), tiny.as_ref(), &stores).await.unwrap();
        assert_eq!(vectors(&place.rows(&format!("out{n}"))), [None, expected.clone(), None], "{kind}");
    }
    run(&BulkJob { keep: Keep::None, ..place.job("in", "all") }, tiny.as_ref(), &stores).await.unwrap();
    assert_eq!(place.rows("all").num_rows(), 3 * kinds.len());
}

/// What Parquet cannot hold is refused before anything is embedded, a dry run included; see the format's
/// LogicalTypes.md.
#[tokio::test(flavor = "multi_thread")]
async fn kept_columns_that_parquet_cannot_hold() {
    let place = Place::new();
    let stores = Stores::with_settings([]);
    let numbers: ArrayRef = Arc::new(Int64Array::from(vec![1]));
    let fields = UnionFields::try_new([0], [Field::new("a", DataType::Int64, true)]).unwrap();
    let union = UnionArray::try_new(fields, vec![0].into(), None, vec![Arc::clone(&numbers)]).unwrap();
    let union: ArrayRef = Arc::new(union);
    let inside =
        StructArray::from(vec![(Arc::new(Field::new("u", union.data_type().clone(), true)), Arc::clone(&union))]);
    let decimal = Decimal128Array::from(vec![1]).with_precision_and_scale(5, -2).unwrap();
    let interval = IntervalMonthDayNanoArray::from(vec![IntervalMonthDayNano::new(1, 2, 3)]);
    let columns: [ArrayRef; 5] = [
        union,
        Arc::new(inside),
        Arc::new(decimal),
        Arc::new(interval),
        Arc::new(StructArray::new_empty_fields(1, None)),
    ];
    let mut files = vec![
        ("a.jsonl".to_owned(), b"{\"text\": \"a\", \"odd\": {}}\n".to_vec()),
        ("b.jsonl".to_owned(), b"{\"text\": \"a\", \"odd\": 1}\n{\"text\": \"a\", \"odd\": {\"x\": 1}}\n".to_vec()),
    ];
    for (n, odd) in columns.into_iter().enumerate() {
        let text: ArrayRef = Arc::new(StringArray::from(vec!["a"]));
        let rows = RecordBatch::try_from_iter([("text", text), ("odd", odd)]).unwrap();
        files.push((format!("{n}.arrow"), arrow_file(&rows)));
    }
    for (name, content) in files {
        place.write(&name, content);
        let job = place.job(&name, &format!("out-{name}"));
        let ran = run_local(&job).await.unwrap_err();
        let dry = dry_run(&job, &Hashing::default(), &stores).await.unwrap_err();
        for error in [ran, dry] {
            assert_eq!(error.exit(), Exit::Input);
            let said = error.to_string();
            assert!(said.contains(&name) && said.contains("\"odd\"") && said.contains("--keep"), "{said}");
        }
        run_local(&BulkJob { keep: Keep::Columns(vec!["text".into()]), ..job }).await.unwrap();
    }
}

/// Python writes a lone surrogate as an escape: json.dumps("a\ud800b").
#[tokio::test(flavor = "multi_thread")]
async fn half_a_pair_of_json_is_replaced_wherever_it_comes() {
    let place = Place::new();
    let row = "{\"text\": \"a\\ud800b\", \"k\": [\"\\udc00\"]}\n";
    let plain = "{\"text\": \"a\", \"k\": [\"b\"]}\n".repeat(1500);
    place.write("a.jsonl", format!("{row}{plain}{row}"));
    let report = run_local(&large(place.job("a.jsonl", "out"))).await.unwrap();
    assert_eq!((report.counts.rows_out, report.counts.errors), (1502, 0));
    let texts = strings(&place.rows("out"), "text");
    assert_eq!([texts[0].as_deref(), texts[1501].as_deref()], [Some("a\u{fffd}b"); 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_of_words_are_taken_as_tokens() {
    let place = Place::new();
    let mut builder = arrow::array::ListBuilder::new(arrow::array::StringBuilder::new());
    builder.append_value([Some("It"), Some("rained"), Some(".")]);
    builder.append_null();
    let list: ListArray = builder.finish();
    place.write("a.parquet", parquet(&batch(Arc::new(list))));
    place.write("b.jsonl", "{\"text\": [\"It\", \"rained\", \".\"], \"id\": 7}\n");
    place.write("c.jsonl", "{\"text\": \"It rained.\"}\n");
    let stores = Stores::with_settings([]);
    let tiny = crate::common::tiny(EmbedSpec::default());
    let job =
        |input: &str, output: &str| elmo_pipelines::bulk::BulkJob { keep: Keep::None, ..place.job(input, output) };
    let mut both = job("a.parquet", "out");
    both.inputs.push(place.path("b.jsonl").display().to_string());
    run(&both, tiny.as_ref(), &stores).await.unwrap();
    let found = vectors(&place.rows("out"));
    run(&job("c.jsonl", "string"), tiny.as_ref(), &stores).await.unwrap();
    let string = vectors(&place.rows("string")).remove(0);
    assert_eq!(found, [string.clone(), None, string]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_output_may_lie_in_the_input_and_nothing_gives_nothing() {
    let place = Place::new();
    place.write("in/a.txt", "one\n");
    run_local(&place.job("in", "in/out")).await.unwrap();
    let again = run_local(&place.job("in", "in/out")).await.unwrap();
    assert_eq!(again.resumed_rows, 1);
    place.write("b.txt", "");
    let report = run_local(&place.job("b.txt", "empty")).await.unwrap();
    assert_eq!((report.counts.rows_in, report.parts), (0, 1));
    assert_eq!(place.rows("empty").num_columns(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_a_folder_that_are_not_read_are_counted_and_links_add_no_rows() {
    let place = Place::new();
    for name in ["a.txt", "_data.jsonl", "_sub/b.txt", "c.md"] {
        place.write(&format!("in/{name}"), "{\"text\": \"one\"}\n");
    }
    std::os::unix::fs::symlink(place.path("in/a.txt"), place.path("in/link.txt")).unwrap();
    let report = run_local(&place.job("in", "out")).await.unwrap();
    assert_eq!((report.counts.rows_in, report.files_left_out), (1, 3));
    let report = run_local(&place.job("in/*.txt", "pattern")).await.unwrap();
    assert_eq!((report.counts.rows_in, report.files_left_out), (1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_is_named_with_file_and_row() {
    let place = Place::new();
    let cases: [(&str, &[u8], &str); 8] = [
        ("a.csv", b"id,text\n1,x\n2\n", "a.csv: after row"),
        ("b.jsonl", b"{\"text\": \"x\"}\n{\"text\": \n", "b.jsonl: after row"),
        ("c.jsonl", b"[1, 2]\n", "c.jsonl"),
        ("d.csv.gz", b"not gzip at all", "the compressed data are damaged"),
        ("e.parquet", b"PAR1 this is no parquet PAR1", "e.parquet: after row 0"),
        ("f.arrow", b"<html><body>not found</body></html>", "no"),
        ("g.csv", b"txet\nx\n", "did you mean \"txet\"?"),
        ("h.jsonl", b"{}\n", "no column \"text\""),
    ];
    for (name, bytes, said) in cases {
        place.write(name, bytes);
        let error = run_local(&place.job(name, &format!("out-{name}"))).await.unwrap_err();
        assert_eq!(error.exit(), Exit::Input, "{name}: {error}");
        assert!(error.to_string().contains(said) && error.to_string().contains(name), "{name}: {error}");
    }
    let cut = gzip(&lots()).await;
    place.write("cut.txt.gz", &cut[..cut.len() - 20]);
    let error = run_local(&place.job("cut.txt.gz", "out-cut")).await.unwrap_err();
    assert!(error.to_string().contains("the file is cut off"), "{error}");
}

/// Rows are counted from 0, after the header; a cell of two lines is one row.
#[tokio::test(flavor = "multi_thread")]
async fn the_row_that_is_named_is_the_broken_one() {
    let place = Place::new();
    let csv = |rows: usize, broken: &str| {
        format!("text,n\n\"two\nlines\",1\n{}{broken}\na,1\n", "a,1\n".repeat(rows - 1)).into_bytes()
    };
    let json = |rows: usize, broken: &str| {
        format!("{}{broken}\n{{\"text\": \"a\", \"n\": 1}}\n", "{\"text\": \"a\", \"n\": 1}\n".repeat(rows))
            .into_bytes()
    };
    for rows in [5, 998, 1501, 1502, 1503, 1504] {
        let mut latin1 = csv(rows, "?,1");
        let at = latin1.iter().position(|&byte| byte == b'?').unwrap();
        latin1[at] = 0xff;
        for (n, (extension, content)) in [
            ("csv", csv(rows, "a")),
            ("csv", csv(rows, "a,1,2")),
            ("csv", latin1),
            ("jsonl", json(rows, "{\"text\": \"a\", \"n\": }")),
            ("jsonl", json(rows, "]")),
        ]
        .into_iter()
        .enumerate()
        {
            let name = format!("{rows}-{n}.{extension}");
            place.write(&name, content);
            let error = run_local(&large(place.job(&name, &format!("out-{name}")))).await.unwrap_err().to_string();
            assert!(error.contains(&format!("after row {rows}: ")) && !error.contains("for line"), "{error}");
        }
        // In the rows that are looked at, such a value only makes the column one of strings.
        let name = format!("{rows}.csv");
        place.write(&name, csv(rows, "a,x"));
        let ran = run_local(&large(place.job(&name, &format!("out-{name}")))).await;
        let error = ran.err().map(|error| error.to_string());
        assert_eq!(error.is_some(), rows > 1000, "{error:?}");
        let named = |said: String| said.contains(&format!("after row {rows}: ")) && said.contains("column \"n\"");
        assert!(error.is_none_or(named));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_remedy_is_for_what_is_broken() {
    let place = Place::new();
    let packed = zstd(&lots()).await;
    let (parquet, arrow) = (parquet(&batch(text())), arrow_file(&batch(text())));
    let utf16: Vec<u8> = "\u{feff}text\na\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
    let swapped: Vec<u8> = utf16.chunks(2).flat_map(|pair| [pair[1], pair[0]]).collect();
    let damaged = "download or create it again";
    for (name, content, said) in [
        ("a.txt.zst", &packed[..packed.len() / 2], damaged),
        ("b.csv.gz", b"not gzip at all", damaged),
        ("c.parquet", &parquet[..parquet.len() - 9], damaged),
        ("d.arrow", &arrow[..arrow.len() / 2], damaged),
        ("e.csv", &utf16, "iconv -f utf-16 "),
        ("f.jsonl", &swapped, "iconv -f utf-16 "),
        ("g.csv", b"text\n\xff\n", "iconv -f latin1 "),
        ("h.jsonl", b"{\"text\": \"\xff\"}\n", "iconv -f latin1 "),
    ] {
        place.write(name, content);
        let error = run_local(&place.job(name, &format!("out-{name}"))).await.unwrap_err();
        let help = error.help().unwrap_or_default();
        assert!(help.contains(said) && !help.contains("--types"), "{name}: {error}; {help}");
    }
}

/// The rows of a whole file at once.
fn large(job: BulkJob) -> BulkJob {
    BulkJob { window_rows: 2000, rows_per_file: Some(2000), ..job }
}

fn lots() -> Vec<u8> {
    crate::common::lines(1000).into_bytes()
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_counted_without_reading_everything() {
    let place = Place::new();
    place.write("in/a.parquet", parquet(&batch(text())));
    place.write("in/b.txt", lots());
    // Lines of one length, so that any sample of the file is representative.
    place.write("in/c.txt", (0..50_000).map(|i| format!("{i:0>99}\n")).collect::<String>());
    place.write("in/d.txt.gz", gzip(&lots()).await);
    let stores = Stores::with_settings([]);
    let files = source::list(&stores, &[place.path("in").display().to_string()], None).await.unwrap();
    let request = Request::texts("text");
    let plan = Arc::new(Plan::resolve(files, &request).await.unwrap());
    let mut counted = Vec::new();
    for number in 0..4 {
        counted.push(plan.count(number, 500_000, None).await.unwrap());
    }
    assert_eq!(counted.iter().map(|c| c.exact).collect::<Vec<_>>(), [true, true, false, true]);
    assert_eq!([counted[0].rows, counted[1].rows, counted[3].rows], [5, 1000, 1000]);
    assert!(counted[2].rows.abs_diff(50_000) < 500, "{:?}", counted[2]);
    let plan = dry_run(&place.job("in", "no/such/folder"), &Hashing::default(), &stores).await.unwrap();
    assert_eq!((plan.rows, plan.rows_exact, plan.files), (52_005, true, 4));
    assert!(!place.path("no").exists());
}

/// Parquet stores equal texts once, so that its footer says little about their size.
#[tokio::test(flavor = "multi_thread")]
async fn the_size_of_texts_that_parquet_stores_once() {
    let place = Place::new();
    let texts: ArrayRef = Arc::new(StringArray::from_iter_values((0..20_000).map(|i| "x".repeat(100 + i % 2))));
    place.write("a.parquet", parquet(&batch(texts)));
    let stores = Stores::with_settings([]);
    let plan = dry_run(&place.job("a.parquet", "out"), &Hashing::default(), &stores).await.unwrap();
    assert_eq!((plan.rows, plan.rows_exact, plan.text_bytes), (20_000, true, 2_010_000));
}

#[tokio::test(flavor = "multi_thread")]
async fn empty_files_agree_with_every_other() {
    let place = Place::new();
    let none = RecordBatch::new_empty(batch(text()).schema());
    place.write("in/a.csv", "");
    place.write("in/b.jsonl", "\n \n");
    place.write("in/c.arrow", arrow_file(&none));
    place.write("in/d.parquet", parquet(&none));
    place.write("in/e.csv", "id,text\n");
    place.write("in/f.csv", "id,text\n7,here\n");
    let nulls: ArrayRef = Arc::new(NullArray::new(2));
    place.write("in/g.parquet", parquet(&batch(nulls)));
    run_local(&place.job("in", "out")).await.unwrap();
    assert_eq!(strings(&place.rows("out"), "text"), [Some("here".to_owned()), None, None]);
    place.write("only/a.jsonl", "");
    assert_eq!(run_local(&place.job("only", "nothing")).await.unwrap().counts.rows_in, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn kept_values_are_those_of_the_file_or_the_job_ends() {
    let place = Place::new();
    let json = |later: &str| format!("{}{later}\n", "{\"text\": \"a\", \"price\": 1}\n".repeat(1000));
    let csv = |later: &str| format!("text,price\n{}{later}\n", "a,1\n".repeat(1000));
    let secret = "patient Jane Roe";
    for (name, content) in [
        ("a.jsonl", json("{\"text\": \"b\", \"price\": 1.99}")),
        ("b.jsonl", json(&format!("{{\"text\": \"b\", \"price\": \"{secret}\"}}"))),
        ("c.csv", csv(&format!("{secret},1.99"))),
    ] {
        place.write(name, content);
        let error = run_local(&place.job(name, &format!("out-{name}"))).await.unwrap_err();
        let said = format!("{error} {}", error.help().unwrap_or_default());
        assert!(said.contains(name) && said.contains("--types string"), "{said}");
        assert!(!said.contains("Jane") && !said.contains("1.99"), "data in {said}");
        let written = BulkJob { types: KeptTypes::Strings, ..place.job(name, &format!("written-{name}")) };
        run_local(&written).await.unwrap();
        let prices = strings(&place.rows(&format!("written-{name}")), "price");
        let last = if name == "b.jsonl" { secret } else { "1.99" };
        assert_eq!((prices[0].as_deref(), prices[1000].as_deref()), (Some("1"), Some(last)));
    }
    place.write("d.csv", "text,zip\na,00123\nb,4\n");
    run_local(&place.job("d.csv", "zips")).await.unwrap();
    assert_eq!(strings(&place.rows("zips"), "zip"), [Some("00123".to_owned()), Some("4".to_owned())]);
    place.write("e.csv", "id,text,id\n1,a,2\n");
    let error = run_local(&place.job("e.csv", "twice")).await.unwrap_err();
    assert!(error.to_string().contains("two columns are named \"id\""), "{error}");
}

/// 2^53 + 1 is the first integer that a double does not hold, 2^24 + 1 the first that a single does not.
#[tokio::test(flavor = "multi_thread")]
async fn numbers_that_would_change_are_refused_with_their_row() {
    let place = Place::new();
    let csv = |first: &str, later: &str| format!("text,n\n{}a,{later}\n", format!("a,{first}\n").repeat(1002));
    let json = |first: &str, later: &str| {
        format!("{}{{\"n\": {later}}}\n", format!("{{\"text\": \"a\", \"n\": {first}}}\n").repeat(1002))
    };
    let long = "9007199254740993";
    for (name, content) in [
        ("a.csv", csv("0.5", long)),
        ("b.csv", csv("5", "007")),
        ("c.jsonl", json("0.5", long)),
        ("d.jsonl", json("{\"x\": [0.5]}", &format!("{{\"x\": [1, {long}]}}"))),
        ("e.jsonl", json("{\"x\": 5}", "{\"x\": \"007\"}")),
        ("f.csv", csv("0.5", "1e400")),
        ("g.csv", csv("0.5", "0.1234567890123456789")),
        ("h.csv", csv("2024-01-01", "2024-01-01T10:30:00")),
        ("i.csv", csv("2024-01-01 10:30:00", "2024-01-01 10:30:00.0001")),
        ("j.csv", csv("2024-01-01T10:30:00Z", "2024-01-01T10:30:00+02:00")),
        ("k.csv", csv("2024-01-01T10:30:00", "2024-01-01T10:30:00Z")),
        ("l.csv", csv("true", "yes")),
        ("m.jsonl", json("0.5", "1e400")),
        ("n.jsonl", json("{\"x\": [0.5]}", "{\"x\": [12345678901234567890]}")),
        ("o.jsonl", json("{\"x\": [{\"y\": 5}]}", "{\"x\": [{\"y\": 12345678901234567890}]}")),
        ("p.jsonl", json("true", "\"yes\"")),
    ] {
        place.write(name, content);
        let error = run_local(&large(place.job(name, &format!("out-{name}")))).await.unwrap_err();
        let said = format!("{error} {}", error.help().unwrap_or_default());
        assert!(
            said.contains("after row 1002: ") && said.contains("\"n\"") && said.contains("--types string"),
            "{said}"
        );
        let written = BulkJob { types: KeptTypes::Strings, ..large(place.job(name, &format!("written-{name}"))) };
        run_local(&written).await.unwrap();
    }
    // In the rows that are looked at, inside a list: strings, as at the top level.
    place.write("list.jsonl", "{\"text\": \"a\", \"n\": [1]}\n{\"text\": \"a\", \"n\": [12345678901234567890]}\n");
    run_local(&place.job("list.jsonl", "list")).await.unwrap();
    let lists = Arc::clone(&place.rows("list")["n"]);
    let items = lists.as_list::<i32>().values().as_string::<i32>();
    assert_eq!(items.iter().flatten().collect::<Vec<_>>(), ["1", "12345678901234567890"]);
    // Integers in one file, fractions in another: the column is Float64, which must hold them all.
    place.write("ints/a.csv", format!("text,n\na,{long}\n"));
    place.write("ints/b.csv", "text,n\na,0.5\n");
    let error = run_local(&place.job("ints", "out-ints")).await.unwrap_err().to_string();
    assert!(error.contains("a.csv: after row 0: ") && error.contains("Float64"), "{error}");
    let single: ArrayRef = Arc::new(Float32Array::from(vec![0.5]));
    let text: ArrayRef = Arc::new(StringArray::from(vec!["a"]));
    place.write("single/a.parquet", parquet(&RecordBatch::try_from_iter([("text", text), ("n", single)]).unwrap()));
    place.write("single/b.csv", "text,n\na,16777216\nb,16777217\n");
    let error = run_local(&place.job("single", "out-single")).await.unwrap_err().to_string();
    assert!(error.contains("b.csv: after row 1: ") && error.contains("Float32"), "{error}");
    let exact = "text,n\na,-9007199254740992\nb,1e300\nc,0.1\nd,\n";
    place.write("exact.csv", exact);
    run_local(&place.job("exact.csv", "exact")).await.unwrap();
    let numbers: Vec<_> = place.rows("exact")["n"].as_primitive::<Float64Type>().iter().collect();
    assert_eq!(numbers, [Some(-9007199254740992.0), Some(1e300), Some(0.1), None]);
}

/// Slices of rows as they are read, and the error that ends them.
async fn slices(place: &Place, name: &str) -> (Vec<usize>, Option<String>) {
    let inputs = [place.path(name).display().to_string()];
    let files = source::list(&Stores::with_settings([]), &inputs, None).await.unwrap();
    let request = Request { keep: Keep::All, infer_rows: InferRows(Some(1000)), ..Request::texts("text") };
    let plan = Arc::new(Plan::resolve(files, &request).await.unwrap());
    let mut rows = source::Rows::new(plan, source::Position::default());
    let mut sizes = Vec::new();
    loop {
        match rows.next().await {
            Ok(Some(slice)) => sizes.push(slice.len()),
            Ok(None) => return (sizes, None),
            Err(error) => return (sizes, Some(error.to_string())),
        }
    }
}

/// Batches are bounded by rows and by bytes, and a broken row does not affect the rows before it.
#[tokio::test(flavor = "multi_thread")]
async fn csv_and_json_are_decoded_in_batches() {
    let place = Place::new();
    let csv = |text: &str, rows: usize, last: &str| format!("text,n\n{}{last}", format!("{text},1\n").repeat(rows));
    let json = |text: &str, rows: usize, last: &str| {
        format!("{}{last}", format!("{{\"text\": \"{text}\", \"n\": {{\"x\": 1}}}}\n").repeat(rows))
    };
    let long = "x".repeat(300_000);
    // A character as a pair of escapes: rows that are rewritten before they are decoded.
    let escaped = "\\ud83d\\ude42".repeat(10);
    for (name, content, rows, max) in [
        ("a.csv", csv("short", 20_000, ""), 20_000, 8192),
        ("b.jsonl", json("short", 20_000, ""), 20_000, 8192),
        ("c.jsonl", json(&escaped, 20_000, ""), 20_000, 8192),
        ("d.csv", csv(&long, 40, ""), 40, 4),
        ("e.jsonl", json(&long, 40, ""), 40, 4),
    ] {
        place.write(name, content);
        let (sizes, error) = slices(&place, name).await;
        assert_eq!((sizes.iter().sum::<usize>(), error), (rows, None), "{name}");
        assert!(sizes.iter().all(|&size| size <= max) && sizes.len() <= 2 + rows / max * 2, "{name}: {sizes:?}");
    }
    for (name, content) in [
        ("g.csv", csv("a", 1502, "a,b,c\na,1\n")),
        ("h.csv", csv("a", 1502, "a,b\na,1\n")),
        ("i.csv", csv("a", 1502, "a,\"1\n")),
        ("j.jsonl", json("a", 1502, "{\"text\": {}}\n")),
        ("k.jsonl", json("a", 1502, "{\"text\": \"\n")),
        ("l.jsonl", json(&escaped, 1502, "{\"text\": \"a\", \"n\": {\"x\": 0.5}}\n")),
        ("m.jsonl", json(&escaped, 1502, "{\"text\": \"a\", \"n\": [1]}\n")),
        ("n.jsonl", json(&escaped, 15_020, "}\n")),
    ] {
        place.write(name, &content);
        let (sizes, error) = slices(&place, name).await;
        let rows = if name == "n.jsonl" { 15_020 } else { 1502 };
        assert_eq!(sizes.iter().sum::<usize>(), rows, "{name}: {error:?}");
        assert!(error.as_ref().is_some_and(|e| e.contains(&format!("after row {rows}: "))), "{name}: {error:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_that_are_null_in_one_json_file_may_be_words_in_another() {
    let place = Place::new();
    place.write("words/a.jsonl", "{\"text\": null}\n".repeat(1001) + "{\"text\": [\"late\", \"words\"]}\n");
    place.write("words/b.jsonl", "{\"text\": [\"two\", \"words\"]}\n");
    place.write("text.jsonl", "{\"text\": null}\n".repeat(1001) + "{\"text\": \"late\"}\n");
    for (input, rows, last) in [("words", 1003, "two words"), ("text.jsonl", 1002, "late")] {
        let inputs = [place.path(input).display().to_string()];
        let files = source::list(&Stores::with_settings([]), &inputs, None).await.unwrap();
        let request = Request { infer_rows: InferRows(Some(1000)), ..Request::texts("text") };
        let plan = Arc::new(Plan::resolve(files, &request).await.unwrap());
        let mut source = source::Rows::new(plan, source::Position::default());
        let mut texts = Vec::new();
        while let Some(slice) = source.next().await.unwrap() {
            let shown = arrow::util::display::ArrayFormatter::try_new(&slice.text, &Default::default()).unwrap();
            texts.extend((0..slice.len()).map(|row| shown.value(row).to_string()));
        }
        let spelt = texts.last().unwrap().replace(['[', ']', ','], "");
        assert_eq!((texts.len(), texts[0].as_str(), spelt.as_str()), (rows, "", last));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dictionaries_of_several_files_need_not_fit_together() {
    let place = Place::new();
    for file in 0..3 {
        let kinds: DictionaryArray<Int8Type> =
            (0..100).map(|i| format!("kind {file} {i}")).collect::<Vec<_>>().iter().map(String::as_str).collect();
        let kinds: ArrayRef = Arc::new(kinds);
        let rows = RecordBatch::try_from_iter([("text", Arc::clone(&kinds)), ("kind", kinds)]).unwrap();
        place.write(&format!("in/{file}.parquet"), parquet(&rows));
        place.write(&format!("in/{file}.arrow"), arrow_file(&rows));
    }
    run_local(&BulkJob { window_rows: 1000, rows_per_file: Some(1000), ..place.job("in", "out") }).await.unwrap();
    let rows = place.rows("out");
    assert_eq!(rows.num_rows(), 600);
    assert_eq!(strings(&rows, "kind"), strings(&rows, "text"));
    assert_own_vectors(&rows);
}

/// A Parquet file whose footer says that its columns are dictionaries, as pyarrow writes them of any type.
fn parquet_of_dictionaries(plain: &RecordBatch) -> Vec<u8> {
    let dictionary = |field: &Arc<Field>| {
        let kind = DataType::Dictionary(Box::new(DataType::Int32), Box::new(field.data_type().clone()));
        field.as_ref().clone().with_data_type(kind)
    };
    let said = Schema::new(plain.schema().fields().iter().map(dictionary).collect::<Vec<_>>());
    let footer = KeyValue::new("ARROW:schema".to_owned(), encode_arrow_schema(&said));
    let properties = WriterProperties::builder().set_key_value_metadata(Some(vec![footer])).build();
    let options = ArrowWriterOptions::new().with_properties(properties).with_skip_arrow_metadata(true);
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new_with_options(&mut bytes, plain.schema(), options).unwrap();
    writer.write(plain).unwrap();
    writer.close().unwrap();
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn dictionaries_of_any_type_in_parquet_are_read_as_plain_values() {
    let place = Place::new();
    let columns: [(&str, ArrayRef); 5] = [
        ("text", Arc::new(StringArray::from(vec!["a", "b"]))),
        ("bool", Arc::new(BooleanArray::from(vec![Some(true), None]))),
        ("decimal", Arc::new(Decimal128Array::from(vec![12, -5]).with_precision_and_scale(5, 1).unwrap())),
        ("fixed", Arc::new(FixedSizeBinaryArray::try_from_iter([*b"ab", *b"cd"].into_iter()).unwrap())),
        ("number", Arc::new(Int64Array::from(vec![7, 8]))),
    ];
    let plain = RecordBatch::try_from_iter_with_nullable(columns.map(|(n, c)| (n, c, true))).unwrap();
    place.write("a.parquet", parquet_of_dictionaries(&plain));
    run_local(&place.job("a.parquet", "out")).await.unwrap();
    let rows = place.rows("out");
    for name in ["text", "bool", "decimal", "fixed", "number"] {
        assert_eq!(&rows[name], &plain[name], "{name}");
    }
    assert_own_vectors(&rows);
}

/// INT96 is the nanoseconds of the day, then the Julian day (as Spark, Hive and Impala write it).
#[tokio::test(flavor = "multi_thread")]
async fn times_of_old_files_keep_their_year() {
    // Julian days from the table of the US Naval Observatory; 1970-01-01 is 2440588.
    let days = [(2_305_448, "1600-01-01"), (2_440_588, "1970-01-01"), (5_373_484, "9999-12-31")];
    let schema = parse_message_type("message m { required int96 at; required binary text (UTF8); }").unwrap();
    let mut bytes = Vec::new();
    let mut file = SerializedFileWriter::new(&mut bytes, Arc::new(schema), Arc::default()).unwrap();
    let mut group = file.next_row_group().unwrap();
    let noon = 12 * 3600 * 1_000_000_000_u64 + 123_456_000;
    let times = days.map(|(day, _)| {
        let mut time = Int96::new();
        time.set_data(noon as u32, (noon >> 32) as u32, day);
        time
    });
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int96Type>().write_batch(&times, None, None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&["a", "b", "c"].map(ByteArray::from), None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    file.close().unwrap();
    let place = Place::new();
    place.write("a.parquet", bytes);
    run_local(&place.job("a.parquet", "out")).await.unwrap();
    let times = cast(&place.rows("out")["at"], &DataType::Utf8).unwrap();
    let expected: Vec<_> = days.iter().map(|(_, day)| Some(format!("{day}T12:00:00.123456"))).collect();
    assert_eq!(times.as_string::<i32>().iter().map(|t| t.map(str::to_owned)).collect::<Vec<_>>(), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn packed_parquet_is_unpacked() {
    let place = Place::new();
    let bytes = parquet(&batch(text()));
    place.write("in/a.parquet.gz", gzip(&bytes).await);
    place.write("in/b.parquet.zst", zstd(&bytes).await);
    run_local(&place.job("in", "out")).await.unwrap();
    assert_eq!(place.rows("out").num_rows(), 10);
    place.write("bomb.parquet.zst", zstd(&vec![0; 64 << 20]).await);
    let error = run_local(&place.job("bomb.parquet.zst", "none")).await.unwrap_err();
    assert!(error.to_string().contains("decompresses to more than 200 times its size"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn cut_off_files_are_no_short_files() {
    let place = Place::new();
    place.write("a.csv", "id,text\n1,\"abc\n2,x\n3,y\n");
    let error = run_local(&place.job("a.csv", "a")).await.unwrap_err();
    assert!(error.to_string().contains("never closed"), "{error}");
    let whole = arrow_file(&batch(text()));
    place.write("b.arrow", &whole[..whole.len() - 6]);
    let error = run_local(&place.job("b.arrow", "b")).await.unwrap_err();
    assert!(error.to_string().contains("cut off"), "{error}");
    let made = std::process::Command::new("mkfifo").arg(place.path("c.txt")).status().unwrap();
    assert!(made.success());
    let error = run_local(&place.job("c.txt", "c")).await.unwrap_err();
    assert!(error.to_string().contains("a pipe or device"), "{error}");
}
