//! Inputs of an HTTP server, which may have another file a moment later.

use std::{
    io::{BufRead, BufReader, Write},
    net::TcpListener,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use elmo_pipelines::{
    Exit,
    bulk::{self, BulkJob},
    report::Silent,
    stores::Stores,
};

use crate::common::{Hashing, Place, assert_own_vectors, lines, run_local, strings};

/// What is sent for a request for the file: its etag, its length by the header, and how much of it comes.
type Answer = (&'static str, usize, usize);

/// Serves `content` under any name; HEAD speaks of etag `a`, and the answers to GET are `first`, then for ever `then`.
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
    // Connections are made by the kernel; nobody answers.
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
