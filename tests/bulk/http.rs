//! Inputs from an HTTP server, whose files may change between requests.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    ops::Range,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use arrow::{
    array::{ArrayRef, RecordBatch, StringArray},
    ipc::{
        MetadataVersion,
        writer::{FileWriter, IpcWriteOptions},
    },
};

use elmo_pipelines::{
    Exit,
    bulk::{self, BulkJob},
    report::Silent,
    source::Keep,
    stores::Stores,
};
use parquet::arrow::ArrowWriter;

use crate::common::{Hashing, Place, assert_own_vectors, lines, run_local, strings};

/// The answer to a request for the file: its etag, its length in the header, and the number of bytes that are sent.
type Answer = (&'static str, usize, usize);

/// Serves `content` under any name; HEAD returns etag `a`; the first answer to GET is `first`, all others are `then`.
fn server(content: String, first: Answer, then: Answer) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/a.txt", listener.local_addr().unwrap());
    let gets = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&gets);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let request = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
            let request: Vec<String> = request.take_while(|line| !line.is_empty()).collect();
            // What asks for the rest of a broken answer gets all of it once more: no ranges here.
            let is_whole = !request.iter().any(|line| line.to_ascii_lowercase().starts_with("range:"));
            let (etag, length, sent) = match request.first().is_some_and(|line| line.starts_with("HEAD")) {
                true => ("a", content.len(), 0),
                false if counted.fetch_add(usize::from(is_whole), Ordering::Relaxed) == 0 => first,
                false => then,
            };
            let head = "HTTP/1.1 200 OK\r\nConnection: close\r\nLast-Modified: Thu, 01 Jan 1970 00:00:00 GMT";
            let _ =
                write!(stream, "{head}\r\nETag: \"{etag}\"\r\nContent-Length: {length}\r\n\r\n{}", &content[..sent]);
        }
    });
    (address, gets)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_downloaded_is_what_was_listed() {
    let place = Place::new();
    let content = lines(100);
    let all = content.len();
    let job = |address: String, output: &str| BulkJob { inputs: vec![address], ..place.job("none", output) };
    let (whole, broken) = (("a", all, all), ("a", all, all / 2));
    for (output, first) in [("calm", whole), ("broken", broken)] {
        let (address, gets) = server(content.clone(), first, whole);
        run_local(&job(address, output)).await.unwrap();
        let rows = place.rows(output);
        assert_own_vectors(&rows);
        assert_eq!(strings(&rows, "text").into_iter().flatten().collect::<Vec<_>>().join("\n") + "\n", content);
        assert_eq!(gets.load(Ordering::Relaxed), if output == "calm" { 1 } else { 2 });
    }
    // Another etag, and fewer bytes than were announced.
    for (output, other) in [("other", ("b", all, all)), ("short", ("a", all / 2, all / 2))] {
        let (address, _) = server(content.clone(), other, other);
        let error = run_local(&job(address, output)).await.unwrap_err();
        assert!(error.to_string().contains("changed or removed while it was read"), "{error}");
        assert_eq!(error.exit(), Exit::Input);
    }
    let (address, gets) = server(content.clone(), broken, broken);
    let error = run_local(&job(address, "never")).await.unwrap_err();
    assert_eq!((error.exit(), gets.load(Ordering::Relaxed)), (Exit::Storage, 3), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_server_does_not_hold_up_an_interruption() {
    let place = Place::new();
    // The kernel accepts connections, but no process answers.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/a.txt", listener.local_addr().unwrap());
    let job = BulkJob { inputs: vec![address], ..place.job("none", "out") };
    let (began, shutdown) = (Instant::now(), tokio::time::sleep(Duration::from_millis(50)));
    let error = bulk::run(&job, &Hashing::default(), &Stores::with_settings([]), shutdown, &Silent).await.unwrap_err();
    assert_eq!(error.exit(), Exit::Interrupted, "{error}");
    // Not a measurement: a store is given up after two minutes.
    assert!(began.elapsed() < Duration::from_secs(60));
    assert!(!place.path("out").exists());
}

/// A server that counts the bytes that it sends, and the files that it sends whole.
struct Counting {
    address: String,
    sent: AtomicUsize,
    whole: AtomicUsize,
    ranged: bool,
    files: BTreeMap<String, Vec<u8>>,
}

impl Counting {
    fn new(files: BTreeMap<String, Vec<u8>>, ranged: bool) -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let (sent, whole) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let server = Arc::new(Self { address, sent, whole, ranged, files });
        let this = Arc::clone(&server);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (this, stream) = (Arc::clone(&this), stream.unwrap());
                std::thread::spawn(move || this.answer(stream));
            }
        });
        server
    }

    fn answer(&self, mut stream: TcpStream) {
        let request = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
        let request: Vec<String> = request.take_while(|line| !line.is_empty()).collect();
        let Some((method, rest)) = request.first().and_then(|line| line.split_once(" /")) else { return };
        let file = &self.files[rest.split(' ').next().unwrap()];
        let range =
            request.iter().find_map(|line| line.to_ascii_lowercase().strip_prefix("range: bytes=").map(str::to_owned));
        let range = range.filter(|_| self.ranged).map(|range| {
            let (from, to) = range.split_once('-').unwrap();
            match from.parse::<usize>() {
                Ok(from) => from..to.parse().map_or(file.len(), |to: usize| file.len().min(to + 1)),
                Err(_) => file.len() - to.parse::<usize>().unwrap()..file.len(),
            }
        });
        let (status, part) = match &range {
            Some(range) => (
                format!("206 Partial Content\r\nContent-Range: bytes {}-{}/{}", range.start, range.end - 1, file.len()),
                range.clone(),
            ),
            None => ("200 OK".to_owned(), 0..file.len()),
        };
        let ranges = if self.ranged { "Accept-Ranges: bytes\r\n" } else { "" };
        let head = format!(
            "HTTP/1.1 {status}\r\n{ranges}ETag: \"1\"\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
            part.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        if method == "HEAD" {
            return;
        }
        for chunk in file[part].chunks(64 << 10) {
            if stream.write_all(chunk).is_err() {
                return;
            }
            self.sent.fetch_add(chunk.len(), Ordering::SeqCst);
        }
        self.whole.fetch_add(usize::from(range.is_none()), Ordering::SeqCst);
    }

    /// Bytes and whole files that were sent since the last call.
    fn counts(&self) -> (usize, usize) {
        (self.sent.swap(0, Ordering::SeqCst), self.whole.swap(0, Ordering::SeqCst))
    }
}

/// Texts of 8 kB, ten MiB in all, with the digits of a linear congruential generator, so that Parquet cannot compress them.
fn long_texts() -> Vec<String> {
    let mut seed = 7_u64;
    let mut digits = move || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        format!("{seed:016x}")
    };
    (0..1280).map(|_| (0..512).map(|_| digits()).collect()).collect()
}

fn files() -> BTreeMap<String, Vec<u8>> {
    let texts = long_texts();
    let csv = texts.iter().fold("text\n".to_owned(), |all, text| all + text + "\n");
    let json = texts.iter().fold(String::new(), |all, text| all + "{\"text\": \"" + text + "\"}\n");
    let text: ArrayRef = Arc::new(StringArray::from(texts));
    let short: ArrayRef = Arc::new(StringArray::from_iter_values((0..text.len()).map(|i| format!("row {i}"))));
    let batch = RecordBatch::try_from_iter([("text", Arc::clone(&text))]).unwrap();
    // DataFusion does not read other alignments from a stream.
    let options = IpcWriteOptions::try_new(8, false, MetadataVersion::V5).unwrap();
    let mut arrow = FileWriter::try_new_with_options(Vec::new(), &batch.schema(), options).unwrap();
    (0..5).for_each(|part| arrow.write(&batch.slice(256 * part, 256)).unwrap());
    let parquet = |columns: [(&str, &ArrayRef); 2]| {
        let batch = RecordBatch::try_from_iter(columns.map(|(name, column)| (name, Arc::clone(column)))).unwrap();
        let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.into_inner().unwrap()
    };
    BTreeMap::from([
        ("a.csv".to_owned(), csv.clone().into_bytes()),
        ("b.jsonl".to_owned(), json.into_bytes()),
        ("c.arrow".to_owned(), arrow.into_inner().unwrap()),
        ("d.parquet".to_owned(), parquet([("text", &text), ("other", &short)])),
        ("e.parquet".to_owned(), parquet([("text", &short), ("other", &text)])),
        ("f.csv".to_owned(), b"text\nshort\n".to_vec()),
        ("g.txt".to_owned(), csv.into_bytes()),
    ])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_downloaded_once_and_of_parquet_what_is_read() {
    let place = Place::new();
    for ranged in [false, true] {
        let server = Counting::new(files(), ranged);
        for (name, content) in &server.files {
            let output = format!("{name}-{ranged}");
            let job = place.job("none", &output);
            let inputs = vec![format!("{}/{name}", server.address)];
            let job = BulkJob { inputs, keep: Keep::None, window_rows: 2000, rows_per_file: Some(2000), ..job };
            let report = run_local(&job).await.unwrap();
            assert_eq!(
                report.counts.rows_in,
                if name == "f.csv" {
                    1
                } else if name == "g.txt" {
                    1281
                } else {
                    1280
                }
            );
            let (sent, whole) = server.counts();
            match (ranged, name.ends_with(".parquet")) {
                (true, true) => assert_eq!(whole, 0, "{name}"),
                _ => assert_eq!((sent, whole), (content.len(), 1), "{name}, ranges: {ranged}"),
            }
            // Ten MiB in a column that is not read.
            assert!(!(ranged && name == "e.parquet") || sent < content.len() / 10, "{sent} bytes of {name}");
        }
    }
}

/// When a file is read line by line, the kernel buffers some MiB more than were requested.
#[test]
fn a_query_downloads_no_file_twice() {
    let place = Place::new();
    let mut files = files();
    let rows = "1,some words of a row\n".repeat(3 << 20);
    files.insert("big.csv".to_owned(), format!("n,text\n{rows}").into_bytes());
    for ranged in [false, true] {
        let server = Counting::new(files.clone(), ranged);
        for (name, content) in server.files.iter().filter(|(name, _)| *name != "g.txt") {
            for (query, limited) in
                [("SELECT text FROM '{}' LIMIT 1", true), ("SELECT count(*), max(text) FROM '{}'", false)]
            {
                let query = query.replace("{}", &format!("{}/{name}", server.address));
                let done = Command::new(env!("CARGO_BIN_EXE_elmo"))
                    .current_dir(place.path(""))
                    .args(["sql", "-q", "-c", &query])
                    .output()
                    .unwrap();
                assert!(done.status.success(), "{query}: {}", String::from_utf8_lossy(&done.stderr));
                let (sent, whole) = server.counts();
                // Bytes of an answer that the kernel has buffered may be requested again as a range.
                let most = content.len() + (content.len() / 10).max(if ranged { 6 << 20 } else { 0 });
                assert!(whole <= 1 && sent <= most, "{query}: {sent} bytes, {whole} whole files, ranges: {ranged}");
                let is_little = sent < content.len() / 2;
                assert!(!(limited && name == "big.csv") || is_little, "{query}: {sent} bytes, ranges: {ranged}");
            }
        }
    }
}

/// What a server is asked: the method, the path, the range if there is one, and the number of GETs before.
struct Asked {
    method: String,
    path: String,
    range: Option<Range<usize>>,
    gets: usize,
}

impl Asked {
    fn of(stream: &TcpStream, gets: usize) -> Option<Self> {
        let lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
        let lines: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
        let mut words = lines.first()?.split(' ').map(str::to_owned);
        let range = lines.iter().find_map(|line| {
            let line = line.to_ascii_lowercase();
            let (from, to) = line.strip_prefix("range: bytes=")?.split_once('-')?;
            Some(from.parse().ok()?..to.parse::<usize>().map_or(usize::MAX, |last| last + 1))
        });
        Some(Self { method: words.next()?, path: words.next()?, range, gets })
    }

    /// The bytes that are asked for, of a file of `size` bytes.
    fn part(&self, size: usize) -> Range<usize> {
        self.range.as_ref().map_or(0..size, |range| range.start..range.end.min(size))
    }
}

/// Status and headers, and the body.
type Answered = (String, Vec<u8>);
type Answers = Box<dyn Fn(&Asked) -> Answered + Send>;
/// Of a range and its bytes: the range and the bytes that are sent, and what is added to the size of the file.
type Part = fn(Range<usize>, Vec<u8>) -> (Range<usize>, usize, Vec<u8>);

fn answering(answers: Answers) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        let mut gets = 0;
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let Some(asked) = Asked::of(&stream, gets) else { continue };
            let (head, body) = answers(&asked);
            let _ = stream.write_all(format!("HTTP/1.1 {head}\r\nConnection: close\r\n\r\n").as_bytes());
            if asked.method == "GET" {
                gets += 1;
                let _ = stream.write_all(&body);
            }
        }
    });
    address
}

/// A Parquet file of 300 kB, of which little is read: the texts `word 0` to `word 39`.
fn parquet_of(word: &str) -> Vec<u8> {
    let short: ArrayRef = Arc::new(StringArray::from_iter_values((0..40).map(|i| format!("{word} {i}"))));
    let long: ArrayRef = Arc::new(StringArray::from_iter_values(&long_texts()[..40]));
    let batch = RecordBatch::try_from_iter([("text", short), ("other", long)]).unwrap();
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.into_inner().unwrap()
}

/// Servers of the file `old`, later of `new`: what is wrong with each, and whether the rows of `old` must come all the same.
fn liars(old: &[u8], new: &[u8]) -> Vec<(&'static str, bool, Answers)> {
    const VERSION: &str = "ETag: \"1\"\r\nAccept-Ranges: bytes";
    let (old, new, size) = (old.to_vec(), new.to_vec(), old.len());
    let whole = move |file: &[u8], head: &str| (format!("200 OK\r\n{head}\r\nContent-Length: {size}"), file.to_vec());
    let part = |asked: Range<usize>, total: usize, head: &str, body: Vec<u8>| {
        let (first, last, length) = (asked.start, asked.end - 1, body.len());
        let range = format!("Content-Range: bytes {first}-{last}/{total}\r\nContent-Length: {length}");
        (format!("206 Partial Content\r\n{head}\r\n{range}"), body)
    };
    let ranged = |file: &Vec<u8>, answer: Part| -> Answers {
        let file = file.clone();
        Box::new(move |asked| match asked.range {
            Some(_) => {
                let bytes = asked.part(size);
                let (said, more, body) = answer(bytes.clone(), file[bytes].to_vec());
                part(said, size + more, VERSION, body)
            }
            None => whole(&file, VERSION),
        })
    };
    let (first, then) = (old.clone(), new.clone());
    let unversioned: Answers = Box::new(move |asked| {
        let file = if asked.gets == 0 { &first } else { &then };
        match asked.range {
            Some(_) => part(asked.part(size), size, "X: y", file[asked.part(size)].to_vec()),
            None => whole(file, "Accept-Ranges: bytes"),
        }
    });
    let half = old[..size / 2].to_vec();
    let broken: Answers = Box::new(move |asked| match asked.gets {
        0 => (whole(&half, "X: y").0, half.clone()),
        _ => whole(&new, "X: y"),
    });
    let redirect: Answers = {
        let old = old.clone();
        Box::new(move |asked| match asked.path.as_str() {
            "/b" => whole(&old, VERSION),
            _ => ("302 Found\r\nLocation: /b\r\nContent-Length: 0".to_owned(), Vec::new()),
        })
    };
    let whole_for_part: Answers = {
        let old = old.clone();
        Box::new(move |_| whole(&old, VERSION))
    };
    vec![
        ("another total", false, ranged(&old, |asked, body| (asked, 1, body))),
        ("more than the part", false, ranged(&old, |asked, body| (asked, 0, [body, b"more".to_vec()].concat()))),
        ("less than the part", false, ranged(&old, |asked, body| (asked, 0, body[1..].to_vec()))),
        ("another part", false, ranged(&old, |asked, body| (0..asked.len(), 0, body))),
        ("the whole file for a part", true, whole_for_part),
        ("a redirect", true, redirect),
        ("no version, and another file after the first answer", true, unversioned),
        ("no version, and another file after a broken answer", false, broken),
    ]
}

/// Whatever a server sends, the rows are those of one file, or there is an error.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_lies_gives_no_wrong_rows() {
    let place = Place::new();
    let (old, new) = (parquet_of("old"), parquet_of("new"));
    assert_eq!(old.len(), new.len());
    for (n, (name, is_read, answers)) in liars(&old, &new).into_iter().enumerate() {
        let (output, address) = (format!("out{n}"), answering(answers));
        let keep = Keep::Columns(vec!["text".to_owned()]);
        let inputs = vec![format!("{address}/a.parquet")];
        let job = BulkJob { inputs, keep, window_rows: 2000, rows_per_file: Some(2000), ..place.job("none", &output) };
        match run_local(&job).await {
            Ok(_) => {
                assert!(is_read, "{name}: no error");
                let expected: Vec<_> = (0..40).map(|i| Some(format!("old {i}"))).collect();
                assert_eq!(strings(&place.rows(&output), "text"), expected, "{name}");
            }
            Err(error) => assert!(!is_read, "{name}: {error}"),
        }
    }
}
