//! A schema registry that goes away under a running stream.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

use super::{
    broker::{self, Broker, Record},
    running::Running,
    streaming::Stream,
};

const ELMO: &str = env!("CARGO_BIN_EXE_elmo");
const PATIENCE: Duration = Duration::from_secs(60);

/// A registry that has the same schema under every id from 1 on.
struct Registry {
    address: String,
    /// It breaks all connections.
    away: Arc<AtomicBool>,
    /// Those that it broke.
    broken: Arc<AtomicUsize>,
}

impl Registry {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let (away, broken) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let (is_away, count) = (Arc::clone(&away), Arc::clone(&broken));
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                match is_away.load(SeqCst) {
                    true => drop(count.fetch_add(1, SeqCst)),
                    // A client that goes away is no mistake.
                    false => drop(answer(client)),
                }
            }
        });
        Self { address, away, broken }
    }
}

fn answer(mut client: TcpStream) -> std::io::Result<()> {
    let (mut head, mut part) = (Vec::new(), [0; 4096]);
    while !head.windows(4).any(|window| window == b"\r\n\r\n") {
        match client.read(&mut part)? {
            0 => return Ok(()),
            n => head.extend_from_slice(&part[..n]),
        }
    }
    let schema = r#"{"type": "record", "name": "review", "fields": [{"name": "text", "type": "string"}]}"#;
    let (status, body) = match String::from_utf8_lossy(&head).contains("/schemas/ids/0") {
        true => ("404 Not Found", serde_json::json!({"error_code": 40403, "message": "Schema not found"})),
        false => ("200 OK", serde_json::json!({ "schema": schema })),
    };
    let body = body.to_string();
    write!(client, "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// Avro with Confluent's framing: a zero, the schema's id, and the only field, a text after its length as a zigzag varint
/// (Avro 1.12, "Binary encoding"; Confluent, "Wire format").
fn framed(id: u8, text: &str) -> Vec<u8> {
    let mut bytes = vec![0, 0, 0, 0, id];
    let mut length = 2 * text.len();
    while length >= 128 {
        bytes.push(u8::try_from(length % 128).unwrap() + 128);
        length /= 128;
    }
    bytes.push(u8::try_from(length).unwrap());
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

/// Messages of schemas that are known are written meanwhile, the others wait, and none is rejected.
#[test]
#[ignore = "needs the broker that scripts/services starts, so Java 17 and Maven"]
fn a_registry_that_is_away_costs_no_message() {
    let (broker, registry) = (Broker::shared(), Registry::start());
    let topic = broker.topic("registry", 1);
    let mut written = Vec::new();
    let mut produce = |id: u8| {
        let from = written.len();
        let records = (from..from + 20).map(|n| Record::new(0, framed(id, &broker::text(n)))).collect();
        written.extend(broker.produce(&topic, records).into_iter().map(|record| (record.partition, record.offset)));
        written.clone()
    };
    produce(3);
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().to_str().unwrap();
    let stream = Stream::bare(ELMO, &broker, &topic, &topic.name, output)
        .with("--model tiny --threads 1 --format avro --max-age 500ms --metrics 127.0.0.1:0 -v")
        .with(&format!("--schema-registry {}", registry.address));
    let mut running = Running::start(&stream);
    running.wait_for(output, 20, PATIENCE);
    registry.away.store(true, SeqCst);
    produce(3);
    running.wait_for(output, 40, PATIENCE);
    let all = produce(4);
    running.wait("the registry is asked again and again", PATIENCE, |_| registry.broken.load(SeqCst) > 5);
    assert_eq!(running.metric("elmo_stream_rows_total"), 40.0);
    registry.away.store(false, SeqCst);
    running.wait_for(output, 60, PATIENCE);
    assert_eq!(running.metric("elmo_stream_rejected_total"), 0.0);
    running.node.signal("-TERM");
    assert_eq!(running.node.wait(), Some(0), "{}", running.node.stderr());
    stream.dataset().check_offsets(&topic.name, all);
    assert_eq!(stream.dataset().strings("text")[59].as_deref(), Some(broker::text(59).as_str()));
}
