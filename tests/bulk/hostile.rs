//! Inputs that are damaged, malicious or huge.

use std::{
    fs,
    io::Write,
    path::Path,
    process::{Command, ExitStatus, Stdio},
    sync::Arc,
    thread,
    time::Duration,
};

use arrow::{
    array::{ArrayRef, RecordBatch, StringArray},
    ipc::writer::{FileWriter, IpcWriteOptions},
};
use elmo_pipelines::{
    source::{self, InferRows, Keep, Plan, Position, Request, Rows},
    stores::Stores,
};
use parquet::{arrow::ArrowWriter, basic::Compression, file::properties::WriterProperties};
use proptest::prelude::*;

use crate::common::{Place, lines, strings, vectors};

const MIB: u64 = 1 << 20;

/// Runs the program; returns its exit code, its output, and its peak memory in bytes.
fn measured(place: &Place, words: &str) -> (ExitStatus, String, u64) {
    let log = fs::File::create(place.path("log")).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_elmo"))
        .current_dir(place.path(""))
        .args(words.split_whitespace())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap();
    let mut most = 0;
    let status = loop {
        most = most.max(peak_memory(child.id()).unwrap_or(0));
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        thread::sleep(Duration::from_millis(20));
    };
    (status, fs::read_to_string(place.path("log")).unwrap(), most)
}

/// `VmHWM`, which the kernel keeps as long as the process lives.
fn peak_memory(process: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// So many MB in words of 10 kB, so that the model has little to do and the rows have much to carry.
fn huge(megabytes: usize) -> String {
    let word = "x".repeat(10_000);
    format!("A short beginning. {}", vec![word; 100 * megabytes].join(" "))
}

fn write_rows(place: &Place, format: &str, texts: &[&str]) -> String {
    let name = format!("{}.{format}", texts.len());
    let mut file = fs::File::create(place.path(&name)).unwrap();
    let column: ArrayRef = Arc::new(StringArray::from(texts.to_vec()));
    let batch = RecordBatch::try_from_iter([("text", column)]).unwrap();
    match format {
        "txt" => texts.iter().for_each(|text| writeln!(file, "{text}").unwrap()),
        "csv" => {
            writeln!(file, "text").unwrap();
            texts.iter().for_each(|text| writeln!(file, "\"{text}\"").unwrap());
        }
        "jsonl" => texts.iter().for_each(|text| writeln!(file, "{{\"text\": \"{text}\"}}").unwrap()),
        "arrow" => {
            let mut writer = FileWriter::try_new(file, &batch.schema()).unwrap();
            writer.write(&batch).unwrap();
            writer.finish().unwrap();
        }
        _ => {
            let mut writer = ArrowWriter::try_new(file, batch.schema(), None).unwrap();
            writer.write(&batch).unwrap();
            writer.close().unwrap();
        }
    }
    name
}

#[test]
fn a_huge_cell_harms_no_neighbour_and_needs_bounded_memory() {
    let place = Place::new();
    let small: Vec<String> = lines(60).lines().map(str::to_owned).collect();
    let small: Vec<&str> = small.iter().map(String::as_str).collect();
    // A reader of lines and a reader of pages have the most to carry.
    for (format, megabytes) in [("txt", 100), ("csv", 20), ("jsonl", 20), ("parquet", 100), ("arrow", 20)] {
        let huge = huge(megabytes);
        let mut with = small.clone();
        with.insert(30, &huge);
        let words = "embed -q --model tiny --threads 1 --keep none --input";
        let plain = write_rows(&place, format, &small);
        let (status, said, base) = measured(&place, &format!("{words} {plain} --output plain-{format}"));
        assert!(status.success(), "{format}: {said}");
        let name = write_rows(&place, format, &with);
        let (status, said, most) = measured(&place, &format!("{words} {name} --output with-{format}"));
        assert!(status.success(), "{format}: {said}");
        assert!(most < base + 1024 * MIB, "{format}: {} MiB, {} MiB without the cell", most / MIB, base / MIB);
        let plain = vectors(&place.rows(&format!("plain-{format}")));
        let mut with = vectors(&place.rows(&format!("with-{format}")));
        assert!(with.remove(30).is_some(), "{format}: the huge cell has no vector");
        assert!(with == plain, "{format}: a neighbour of the huge cell has another vector");
        fs::remove_file(place.path(&name)).unwrap();
    }
}

/// The memory of a decoder grows with its columns; 20,480 rows of these would take 5 GiB.
#[test]
fn many_columns_need_bounded_memory() {
    let place = Place::new();
    let columns = 30_000;
    let names: String = (0..columns).map(|n| format!(",c{n}")).collect();
    place.write("wide.csv", format!("text{names}\n{}", format!("one{}\n", ",1".repeat(columns)).repeat(3)));
    place.write("narrow.csv", "text\none\n");
    place.write("count.sql", "SELECT count(text) AS n FROM 'wide.csv'");
    let words = "embed -q --model tiny --threads 1 --keep none --input";
    let (_, _, base) = measured(&place, &format!("{words} narrow.csv --output narrow"));
    for words in [format!("{words} wide.csv --output wide"), "sql -q --format csv -f count.sql".to_owned()] {
        let (status, said, most) = measured(&place, &words);
        assert!(status.success(), "{words}: {said}");
        assert!(most < base + 512 * MIB, "{words}: {} MiB, {} MiB of one column", most / MIB, base / MIB);
    }
    assert_eq!(place.rows("wide").num_rows(), 3);
}

/// `size` bytes of `byte` after `head`, packed to next to nothing.
fn bomb(path: &Path, head: &[u8], byte: u8, size: u64) {
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        use tokio::io::AsyncWriteExt;
        let file = tokio::fs::File::create(path).await.unwrap();
        let mut encoder = async_compression::tokio::write::ZstdEncoder::new(file);
        encoder.write_all(head).await.unwrap();
        let block = vec![byte; MIB as usize];
        for _ in 0..size / MIB {
            encoder.write_all(&block).await.unwrap();
        }
        encoder.shutdown().await.unwrap();
    });
}

#[test]
fn bombs_end_in_an_error_before_memory_does() {
    let place = Place::new();
    place.write("plain.txt", "one\n");
    let words = "embed -q --model tiny --threads 1 --input";
    let (_, _, base) = measured(&place, &format!("{words} plain.txt --output plain"));
    let cases: [(&str, &[u8], &str); 3] = [
        ("line.txt.zst", b"", "the line is longer than"),
        ("quote.csv.zst", b"id,text\n1,fine\n2,\"", "more than 512 MiB"),
        ("string.jsonl.zst", b"{\"text\": \"fine\"}\n{\"text\": \"", "more than 512 MiB"),
    ];
    for (name, head, reason) in cases {
        bomb(&place.path(name), head, b'a', 800 * MIB);
        assert!(fs::metadata(place.path(name)).unwrap().len() < MIB);
        let (status, said, most) = measured(&place, &format!("{words} {name} --output out-{name}"));
        assert_eq!(status.code(), Some(3), "{name}: {said}");
        assert!(said.contains(name) && said.contains(reason), "{name}: {said}");
        assert!(most < base + 1280 * MIB, "{name}: {} MiB", most / MIB);
    }
}

/// Reads a file to its end. Whatever is in it, this returns.
fn drain(path: &Path) -> Result<u64, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let stores = Stores::with_settings([]);
        let inputs = [path.display().to_string()];
        let files = source::list(&stores, &inputs, None).await.map_err(|e| e.to_string())?;
        let infer_rows = InferRows(Some(1000));
        let request = Request { keep: Keep::All, reserved: vec!["error".into()], infer_rows, ..Request::texts("text") };
        let plan = Plan::resolve(files, &request).await.map_err(|e| e.to_string())?;
        let mut rows = Rows::new(Arc::new(plan), Position::default());
        let mut n = 0;
        while let Some(slice) = rows.next().await.map_err(|e| e.to_string())? {
            n += slice.len() as u64;
        }
        Ok(n)
    })
}

fn batch() -> RecordBatch {
    let text: ArrayRef = Arc::new(StringArray::from_iter_values((0..40).map(|i| format!("row {i}"))));
    let word: ArrayRef = Arc::new((0..40).map(|i| ["a", "b"].get(i % 3)).collect::<StringArray>());
    RecordBatch::try_from_iter([("text", text), ("word", word)]).unwrap()
}

fn parquet(compression: Compression) -> Vec<u8> {
    let properties = WriterProperties::builder().set_compression(compression).build();
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut bytes, batch().schema(), Some(properties)).unwrap();
    writer.write(&batch()).unwrap();
    writer.close().unwrap();
    bytes
}

fn arrow(packed: bool) -> Vec<u8> {
    let zstd = packed.then_some(arrow::ipc::CompressionType::ZSTD);
    let options = IpcWriteOptions::default().try_with_compression(zstd).unwrap();
    let mut writer = FileWriter::try_new_with_options(Vec::new(), &batch().schema(), options).unwrap();
    writer.write(&batch()).unwrap();
    writer.into_inner().unwrap()
}

fn originals() -> Vec<(&'static str, Vec<u8>)> {
    let csv = (0..40).fold("text,word\n".to_owned(), |all, i| all + &format!("\"row {i}\",a\n"));
    let json = (0..40).fold(String::new(), |all, i| all + &format!("{{\"text\": \"row {i}\", \"n\": {i}}}\n"));
    vec![
        ("a.parquet", parquet(Compression::UNCOMPRESSED)),
        ("b.parquet", parquet(Compression::SNAPPY)),
        ("c.arrow", arrow(false)),
        ("d.arrow", arrow(true)),
        ("e.csv", csv.into_bytes()),
        ("f.jsonl", json.into_bytes()),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    /// Damaged files give rows or an error; they neither panic nor hang nor kill the process.
    #[test]
    fn damaged_files(
        file in 0_usize..6,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let (name, mut bytes) = originals().swap_remove(file);
        for (at, to) in changes {
            let at = at.index(bytes.len());
            bytes[at] = to;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let place = Place::new();
        place.write(name, &bytes);
        // Additional rows can only come from line ends that the damage created.
        if let Ok(rows) = drain(&place.path(name)) {
            prop_assert!(rows <= 45, "{} rows", rows);
        }
    }
}

/// No message of a library contains it, so it can only come from data.
const MARK: &str = "Zq7x";

/// Cells after which a reader might quote something.
fn hostile_cells() -> Vec<String> {
    let beginnings = [
        "",
        "true",
        "5",
        "2024-01-01",
        "2024-01-01T10:30:00.5",
        "' to value of Int64 type ",
        "x' as type 'Int64' for ",
    ];
    beginnings.iter().map(|beginning| format!("{beginning}{MARK}' got 7")).collect()
}

#[test]
fn no_error_shows_what_a_cell_holds() {
    let place = Place::new();
    let check = |name: &str, content: String, must_fail: bool| {
        place.write(name, content);
        let ended = drain(&place.path(name));
        assert!(!must_fail || ended.is_err(), "{name}: {ended:?}");
        assert!(!format!("{ended:?}").contains(MARK), "{ended:?}");
    };
    for first in ["true", "5", "2024-01-01", "2024-01-01T10:30:00.25Z"] {
        let json_first =
            if first.contains('T') || first.contains("-01") { format!("\"{first}\"") } else { first.to_owned() };
        let csv_rows = format!("text,n\n{}", format!("a,{first}\n").repeat(1001));
        let rows =
            |wrap: &dyn Fn(&str) -> String| format!("{{\"text\": \"a\", \"n\": {}}}\n", wrap(&json_first)).repeat(1001);
        let is_string = json_first.starts_with('"');
        for cell in hostile_cells() {
            check("a.csv", format!("{csv_rows}a,\"{cell}\"\n"), true);
            check("b.csv", format!("{csv_rows}a,{cell},{cell}\n"), true);
            check("c.csv", format!("{csv_rows}{cell},\"{cell}\n"), true);
            let cell = serde_json::json!(cell).to_string();
            let wraps: [&dyn Fn(&str) -> String; 2] = [&|v| v.to_owned(), &|v| format!("{{\"x\": [{v}]}}")];
            for wrap in wraps {
                let rows = rows(wrap);
                check("d.jsonl", format!("{rows}{{\"text\": \"a\", \"n\": {}}}\n", wrap(&cell)), !is_string);
                check("e.jsonl", format!("{rows}{{\"text\": \"a\", \"n\": {{\"y\": [{cell}]}}, 7}}\n"), true);
                check("f.jsonl", format!("{rows}{{\"text\": [{cell}]}}\n"), true);
                check("g.jsonl", format!("{rows}[{cell}]\n{cell}\n"), true);
                check("h.jsonl", format!("{rows}{{\"text\": {cell}"), true);
            }
            check("i.jsonl", format!("[{{\"text\": {cell}, \"n\": 1}} {cell}]\n"), true);
            check("j.jsonl", format!("{{\"text\": {cell}\n"), true);
        }
    }
}

/// What a query casts, and an array with an item that is no object.
#[test]
fn no_error_of_a_query_shows_what_a_cell_holds() {
    let place = Place::new();
    place.write("a.txt", format!("5{MARK}\n"));
    place.write("b.json", format!("[{{\"text\": \"{MARK}\"}}, \"{MARK}\"]\n"));
    place.write("c.csv", format!("n,text\n{}{MARK},a\n", "1,a\n".repeat(2000)));
    place.write("d.jsonl", format!("{}{{\"n\": [\"{MARK}\"]}}\n", "{\"n\": 1}\n".repeat(2000)));
    let kinds = ["BOOLEAN", "INT", "DOUBLE", "DATE", "TIME", "TIMESTAMP", "DECIMAL(5, 2)", "INTERVAL"];
    let casts = kinds.map(|kind| format!("SELECT CAST(text AS {kind}) FROM 'a.txt'"));
    let reads = ["b.json", "c.csv", "d.jsonl"].map(|name| format!("SELECT * FROM '{name}'"));
    for query in casts.iter().chain(&reads) {
        let done = Command::new(env!("CARGO_BIN_EXE_elmo"))
            .current_dir(place.path(""))
            .args(["sql", "-q", "-c", query])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(!done.status.success() && !said.contains(MARK), "{query}: {said}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Names of columns may be shown, and damage can make one of a cell.
    #[test]
    fn no_error_of_a_damaged_file_shows_what_a_cell_holds(
        file in 0_usize..6,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let (name, mut bytes) = originals().swap_remove(file);
        // Of the same length, so that all offsets in binary files remain valid.
        let places: Vec<usize> = (0..bytes.len().saturating_sub(4)).filter(|&at| bytes[at..].starts_with(b"row ")).collect();
        places.into_iter().for_each(|at| bytes[at..at + 4].copy_from_slice(MARK.as_bytes()));
        for (at, to) in changes {
            let at = at.index(bytes.len());
            bytes[at] = to;
        }
        let place = Place::new();
        place.write(name, &bytes);
        if let Err(said) = drain(&place.path(name)) {
            prop_assert!(!said.contains(MARK) || said.contains("; existing columns: "), "{}", said);
        }
    }
}

/// Damage to the first line of a CSV file, or a missing one, turns cells into names of columns, and JSON has keys.
#[test]
fn names_of_columns_are_cut_off_and_escaped() {
    let place = Place::new();
    let long = format!("{}{MARK}", "a cell with a long text ".repeat(20));
    let many: String = (0..100).map(|i| format!(",{i}")).collect();
    place.write("a.csv", format!("\"\u{1b}[31mred\n{long}\",\"{long}\"{many}\n{}\n", ",".repeat(101)));
    place.write("b.jsonl", format!("{{\"text\": {{\"{long}\": 1, \"{long}2\": 1}}}}\n"));
    place.write("c.jsonl", format!("{{\"text\": \"a\", \"{long}\": {{}}}}\n"));
    place.write("d.csv", format!("text,{long}\n{}a,x\n", "a,1\n".repeat(1001)));
    let row = |n: &str| format!("{{\"text\": \"a\", \"{long}\": {n}}}\n");
    place.write("e.jsonl", row("[1]").repeat(1001) + &row("5"));
    for name in ["a.csv", "b.jsonl", "c.jsonl", "d.csv", "e.jsonl"] {
        let said = drain(&place.path(name)).unwrap_err();
        assert!(!said.contains(MARK) && !said.contains(char::is_control) && said.len() < 1000, "{name}: {said}");
    }
}

#[test]
fn undamaged_files_are_read_whole() {
    let place = Place::new();
    for (name, bytes) in originals() {
        place.write(name, bytes);
        assert_eq!(drain(&place.path(name)), Ok(40), "{name}");
    }
}

#[test]
fn strange_names_of_files_and_columns() {
    let place = Place::new();
    let odd = "spaces and #5 100% ünï [x]";
    place.write(&format!("in/{odd}.csv"), "id,my text\n1,one\n");
    let program = |words: &[&str]| {
        let done = Command::new(env!("CARGO_BIN_EXE_elmo")).current_dir(place.path("")).args(words).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    };
    let input = format!("in/{odd}.csv");
    for (output, input) in [("a", "in"), ("b", input.as_str())] {
        program(&["embed", "-q", "--model", "tiny", "--column", "my text", "--input", input, "--output", output]);
        assert_eq!(strings(&place.rows(output), "my text"), [Some("one".to_owned())]);
    }
}

#[test]
fn standard_input_is_read_once() {
    let place = Place::new();
    let run = |more: &[&str]| {
        let mut child = Command::new(env!("CARGO_BIN_EXE_elmo"))
            .current_dir(place.path(""))
            .args(["embed", "-q", "--model", "tiny", "--input", "-", "--output", "out"])
            .args(more)
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(lines(12).as_bytes()).unwrap();
        let done = child.wait_with_output().unwrap();
        (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
    };
    assert_eq!(run(&[]).0, Some(0));
    assert_eq!(place.rows("out").num_rows(), 12);
    let (code, said) = run(&[]);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("cannot be read again") && said.contains("--overwrite"), "{said}");
    assert_eq!(run(&["--overwrite"]).0, Some(0));
}
