//! Models from directories, zips and web servers, and the cache.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
};

use elmo::{ModelData, lm_head::LmHeadData, model_dir::WeightsFormat, weights::Tensor};

use crate::place::Place;

/// The body of a 404 response.
const MISSING: &str = "<!DOCTYPE html>\n<html>\n<body>\nNo such page\n</body>\n</html>\n";

/// A web server for one folder. It counts requests, and can respond with an HTML page to all of them.
struct Server {
    address: String,
    requests: Arc<AtomicUsize>,
    closed: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(folder: PathBuf, answer_with_page: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(AtomicUsize::new(0));
        let closed = Arc::new(AtomicBool::new(false));
        let (counter, end) = (Arc::clone(&requests), Arc::clone(&closed));
        let thread = thread::spawn(move || {
            for stream in listener.incoming().take_while(|_| !end.load(Ordering::SeqCst)) {
                counter.fetch_add(1, Ordering::SeqCst);
                let _ = answer(stream.unwrap(), &folder, answer_with_page);
            }
        });
        Self { address, requests, closed, thread: Some(thread) }
    }

    /// Closes the port, so that connections are refused.
    fn close(&mut self) {
        self.closed.store(true, Ordering::SeqCst);
        // The thread checks the flag after accepting one more connection.
        let _ = TcpStream::connect(self.address.trim_start_matches("http://"));
        self.thread.take().unwrap().join().unwrap();
    }

    fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }
}

fn answer(mut stream: TcpStream, folder: &Path, page: bool) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    while lines.next().transpose()?.is_some_and(|line| !line.is_empty()) {}
    let mut words = request.split(' ');
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let found = fs::read(folder.join(path.trim_start_matches('/')));
    let (status, body) = match (page, found) {
        (true, _) => ("200 OK", b"<html><body>Please log in</body></html>".to_vec()),
        (false, Ok(body)) => ("200 OK", body),
        (false, Err(_)) => ("404 Not Found", MISSING.into()),
    };
    let length = body.len();
    write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nETag: \"{length}\"\r\nConnection: close\r\n\r\n")?;
    if method == "GET" {
        stream.write_all(&body)?;
    }
    stream.flush()
}

fn place() -> Place {
    let place = Place::new();
    place.write("plain.txt", "It rained.\n");
    place.exits("model convert tiny served/model --to safetensors", 0);
    place.exits("model convert tiny served/pair --to allennlp", 0);
    zip(&place.path("served/pair"), &place.path("served/model.zip"), "elmo/");
    place
}

fn zip(folder: &Path, zip: &Path, prefix: &str) {
    let mut writer = zip::ZipWriter::new(fs::File::create(zip).unwrap());
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = format!("{prefix}{}", path.file_name().unwrap().to_str().unwrap());
        writer.start_file(name, zip::write::SimpleFileOptions::default()).unwrap();
        let mut bytes = Vec::new();
        fs::File::open(path).unwrap().read_to_end(&mut bytes).unwrap();
        writer.write_all(&bytes).unwrap();
    }
    writer.finish().unwrap();
}

fn fingerprint(place: &Place, words: &str) -> String {
    place.exits(&format!("model info {words} --json"), 0).json()["fingerprint"].as_str().unwrap().to_owned()
}

#[test]
fn the_same_model_from_everywhere() {
    let place = place();
    let server = Server::start(place.path("served"), false);
    let server = &server.address;
    let expected = fingerprint(&place, "tiny");
    let file = format!("file://{}", place.path("served/model").display());
    for words in [
        "served/model",
        "served/pair",
        "served/model.zip",
        "--options served/pair/tiny_options.json --weights served/pair/tiny_weights.hdf5",
        &file,
        &format!("{server}/model"),
        &format!("{server}/model/"),
        &format!("{server}/model.zip"),
        &format!("--options {server}/pair/tiny_options.json --weights {server}/pair/tiny_weights.hdf5"),
    ] {
        assert_eq!(fingerprint(&place, words), expected, "{words}");
    }
}

#[test]
fn fetched_once_and_then_taken_from_the_cache() {
    let place = place();
    let server = Server::start(place.path("served"), false);
    let url = format!("{}/model", server.address);
    assert_eq!(place.run(&format!("model info {url} --offline")).code, Some(4));
    assert_eq!(server.requests(), 0, "offline means no request at all");
    let first = fingerprint(&place, &url);
    let asked = server.requests();
    assert_eq!(fingerprint(&place, &format!("{url} --offline")), first);
    assert_eq!(server.requests(), asked, "offline means no request at all");

    // A damaged file is detected and fetched again.
    let weights = find(&place.path("cache"), "weights.safetensors").unwrap();
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    assert_eq!(place.run(&format!("model info {url} --offline")).code, Some(4));
    assert_eq!(fingerprint(&place, &url), first);

    // A model that changed on the server is fetched again.
    let options = place.path("served/model/options.json");
    let text = fs::read_to_string(&options).unwrap();
    fs::write(&options, text.replace("\"relu\"", "\"tanh\"")).unwrap();
    assert_eq!(fingerprint(&place, &url), first, "the same length and the same ETag: unchanged");
    fs::write(&options, text.replace("\"relu\"", "\"tanh\"  ")).unwrap();
    assert_ne!(fingerprint(&place, &url), first);
}

fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    fs::read_dir(folder).unwrap().find_map(|entry| {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => find(&path, name),
            false => path.file_name().is_some_and(|file| file == name).then_some(path),
        }
    })
}

#[test]
fn a_server_that_is_gone_does_not_stop_a_cached_model() {
    let place = place();
    let mut server = Server::start(place.path("served"), false);
    let url = format!("{}/model", server.address);
    let first = fingerprint(&place, &url);
    server.close();
    let ended = place.exits(&format!("model info {url} --json"), 0);
    assert_eq!(ended.json()["fingerprint"], first);
    assert!(ended.err.contains("using the cached one"), "{ended:?}");
    // Another model of the same server is not in the cache.
    place.exits(&format!("model info {url}.zip"), 5);
}

#[test]
fn a_page_for_people_is_no_model() {
    let place = place();
    let server = Server::start(place.path("served"), true);
    let server = &server.address;
    for words in [
        format!("{server}/model"),
        format!("{server}/model.zip"),
        format!("--options served/pair/tiny_options.json --weights {server}/w.hdf5"),
    ] {
        let ended = place.exits(&format!("model info {words}"), 4);
        assert!(ended.err.contains("this is an HTML or XML page"), "{ended:?}");
        assert!(ended.err.contains("  help: "), "{ended:?}");
    }
    let left = fs::read_dir(place.path("cache/models/content")).map_or(0, Iterator::count);
    assert_eq!(left, 0, "nothing of it stays in the cache");
}

#[test]
fn what_is_missing_is_named() {
    let place = place();
    let server = Server::start(place.path("served"), false);
    let server = &server.address;
    let ended = place.exits(&format!("model info {server}/none"), 5);
    assert!(ended.err.contains("/none/options.json") && ended.err.contains("404 Not Found"), "{ended:?}");
    assert!(!ended.err.contains("html") && !ended.err.contains("No such page"), "{ended:?}");
    assert_eq!(ended.err.lines().count(), 2, "the error and its help: {ended:?}");
    fs::remove_file(place.path("served/model/weights.safetensors")).unwrap();
    let ended = place.exits(&format!("model info {server}/model"), 5);
    assert!(ended.err.contains("/model/weights.hdf5"), "{ended:?}");
}

#[test]
fn names_that_are_not_used_are_told() {
    let place = Place::new();
    let fixtures = Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("../tests/fixtures/hdf5");
    fs::copy(fixtures.join("options.json"), place.path("options.json")).unwrap();
    fs::copy(fixtures.join("surplus.hdf5"), place.path("weights.hdf5")).unwrap();
    for command in ["info", "verify"] {
        let ended = place.exits(&format!("model {command} --options options.json --weights weights.hdf5"), 0);
        assert!(ended.out.contains("names in the weights are not used"), "{ended:?}");
    }
}

#[test]
fn a_model_is_written_to_local_places_only() {
    let place = place();
    let url = format!("file://{}", place.path("by-url").display());
    place.exits(&format!("model convert tiny {url} --to hdf5"), 0);
    assert!(place.path("by-url/weights.hdf5").is_file());
    place.exits("model convert tiny s3://bucket/model --to hdf5", 2);
    assert!(!place.path("s3:").exists());
    // A failure to write is not the fault of the model.
    let ended = place.exits("model convert tiny /proc/model --to hdf5", 5);
    assert!(ended.err.contains("cannot write /proc") && ended.err.contains("  help: "), "{ended:?}");
}

/// The file is part of the model for every command that opens it.
#[test]
fn a_broken_mix_is_the_fault_of_the_model() {
    let place = place();
    for mix in ["{", "[0, 0, 0]", "{\"scalars\": []}", "{\"scalars\": [0, 0, 0], \"gamma\": 1e30}"] {
        place.write("served/model/mix.json", mix);
        for words in [
            "model info served/model",
            "model verify served/model",
            "model convert served/model new --to hdf5",
            "embed --model served/model --input plain.txt --output out",
            "bench --model served/model --seconds 1",
        ] {
            let ended = place.exits(words, 4);
            assert!(ended.out.contains("mix.json: ") || ended.err.contains("mix.json: "), "{words}: {ended:?}");
        }
        let sql = "elmo sql --model served/model -c \"SELECT elmo_embed('It rained.')\"";
        let ended = place.shell(sql);
        assert_eq!(ended.code, Some(4), "{mix}: {ended:?}");
        assert!(ended.err.contains("mix.json: "), "{ended:?}");
    }
}

/// Writes `tiny` with an LM head of four words.
fn with_head(place: &Place, name: &str) {
    let (model, folder) = (ModelData::tiny(), place.path(name));
    let width = model.options.lstm.projection_dim;
    model.save(&folder, WeightsFormat::Safetensors).unwrap();
    let words = ["<S>", "</S>", "<UNK>", "rain"].map(str::to_owned).to_vec();
    let (weight, bias) = (vec![0.5; 4 * width], vec![0.5; 4]);
    let weight = Tensor { shape: vec![4, width], data: weight };
    LmHeadData::new(words, weight, Tensor { shape: vec![4], data: bias }).unwrap().save(&folder).unwrap();
}

#[test]
fn a_broken_lm_head_is_the_fault_of_the_model() {
    let place = Place::new();
    with_head(&place, "good");
    let good = place.exits("model verify good", 0);
    assert!(good.out.contains("ok    LM head: 4 words, and a softmax of finite numbers"), "{good:?}");
    let softmax = fs::read(place.path("good/softmax.safetensors")).unwrap();
    // The values come last.
    let not_a_number = [&softmax[..softmax.len() - 4], &f32::NAN.to_le_bytes()].concat();
    let cut = softmax[..softmax.len() / 2].to_vec();
    let (head, vocab) = ("softmax.safetensors", "vocab.txt");
    for (number, (file, content, part)) in [
        (head, Some(cut), "softmax.safetensors"),
        (head, Some(Vec::new()), "softmax.safetensors"),
        (head, Some(not_a_number), "NaN"),
        (vocab, Some(b"<S>\n</S>\n<UNK>\n".to_vec()), "has 3 words, but softmax.safetensors has rows for 4"),
        (vocab, Some(b"<S>\n</S>\nrained\nrain\n".to_vec()), "<UNK> is missing"),
        (vocab, Some(b"<S>\n</S>\n<UNK>\n<S>\n".to_vec()), "occurs twice"),
        (vocab, None, "vocab.txt: missing, but softmax.safetensors is there"),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("bad-{number}");
        with_head(&place, &name);
        match content {
            Some(content) => place.write(&format!("{name}/{file}"), content),
            None => fs::remove_file(place.path(&name).join(file)).unwrap(),
        }
        let verified = place.exits(&format!("model verify {name}"), 4);
        assert!(verified.out.contains("FAIL  LM head: ") && verified.out.contains(part), "{verified:?}");
        assert!(verified.out.contains("the model is bad"), "{verified:?}");
        for layout in ["safetensors", "safetensors-f16", "hdf5"] {
            let refused = place.exits(&format!("model convert {name} new --to {layout}"), 4);
            assert!(refused.err.contains(part), "{layout}: {refused:?}");
            assert!(!place.path("new").exists(), "{layout}");
        }
        // The pair has no place for it.
        place.exits(&format!("model convert {name} pair-{number} --to allennlp"), 0);
    }
    // Models of other programs have a vocabulary without a softmax.
    for file in [head, vocab] {
        fs::remove_file(place.path("good").join(file)).unwrap();
        let without = place.exits("model verify good", 0);
        assert!(!without.out.contains("LM head"), "{without:?}");
        place.exits(&format!("model convert good without-{file} --to hdf5"), 0);
    }
}

#[test]
fn a_zip_that_leaves_its_folder_is_refused() {
    let place = place();
    zip(&place.path("served/pair"), &place.path("evil.zip"), "../");
    let ended = place.exits("model info evil.zip", 4);
    assert!(ended.err.contains("leaves the archive's folder"), "{ended:?}");
}

/// The fingerprint is that of `elmo model info`; 52 is the perplexity of `books` on a whole book.
#[test]
fn books_is_the_default_and_a_language_model() {
    let place = Place::new();
    place.write("a.txt", "She sat down by the fire and began to read .\n");
    let info = place.exits("model info --json", 0).json();
    assert_eq!((&info["model"], &info["untrained"], &info["dimension"]), (&"books".into(), &false.into(), &256.into()));
    assert_eq!(info["text"]["tokenizer"], "moses");
    let ended = place.exits("embed --input a.txt --output out", 0);
    assert!(!ended.err.contains("untrained"), "{ended:?}");
    let made_by = &place.exits("inspect out --json", 0).json()["made_by"];
    assert_eq!(made_by["elmo.fingerprint"], info["fingerprint"]);
    // The model records it, and it came with the model.
    assert!(made_by["elmo.state"].as_str().is_some_and(|state| state.starts_with("warm:")), "{made_by}");
    let query = "SELECT elmo_perplexity(text)['average'] < 200 AND elmo_perplexity('fire the to sat began')['average'] > 500 \
                 AS natural FROM 'a.txt'";
    let natural = place.elmo().args(["sql", "-q", "--format", "csv", "-c", query]).output().unwrap();
    assert_eq!(String::from_utf8(natural.stdout).unwrap(), "natural\ntrue\n");
}

#[test]
fn float16_is_another_model_of_half_the_size() {
    let place = Place::new();
    place.exits("model convert books whole --to safetensors", 0);
    let size = |name: &str| fs::metadata(place.path(name)).unwrap().len();
    let before = place.exits("model info books --json", 0).json()["fingerprint"].clone();
    // `books` was rounded already: nothing changes but the size, and the LM head comes along.
    let half = place.exits("model convert whole half --to safetensors-f16 --json", 0).json();
    assert_eq!((&half["fingerprint_before"], &half["fingerprint_after"]), (&before, &before));
    let (whole, half) = (size("whole/weights.safetensors"), size("half/weights.safetensors"));
    assert!(half < whole * 51 / 100, "{whole} {half}");
    let written = |file: &str| fs::read(place.path(&format!("half/{file}"))).unwrap();
    for file in ["vocab.txt", "warm_state.safetensors", "MODEL.md"] {
        assert_eq!(written(file), elmo_file(file), "{file}");
    }
    // It is written with its words. The header of a safetensors file begins with its length.
    let values = |bytes: Vec<u8>| {
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        bytes[8 + header..].to_vec()
    };
    let head = "softmax.safetensors";
    assert_eq!(values(written(head)), values(elmo_file(head)));
    // `tiny` was not.
    let tiny = place.exits("model convert tiny tiny-half --to safetensors-f16 --json", 0).json();
    assert_ne!(tiny["fingerprint_before"], tiny["fingerprint_after"]);
    assert_eq!(place.exits("model verify tiny-half", 0).code, Some(0));
}

fn elmo_file(name: &str) -> Vec<u8> {
    elmo::BuiltIn::Books.file(name).unwrap().to_vec()
}

/// A folder with the name of a built-in model is named with its path.
#[test]
fn a_built_in_model_is_not_taken_for_a_folder_of_its_name() {
    let place = Place::new();
    place.write("books/options.json", "{}");
    let info = place.exits("model info books", 0);
    assert!(info.err.contains("./books names the folder"), "{info:?}");
    place.exits("model info ./books", 4);
}
