//! A store in trouble: a proxy in front of a store's server, which answers with 500 and 503, breaks connections, cuts
//! answers short or says nothing, before or after a request was applied; or is not there at all.

use std::{
    collections::BTreeSet,
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

/// The state of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Weather {
    /// This percentage of the requests fails, each in another way.
    Fails(u64),
    /// It takes connections, and never answers.
    Silent,
    /// It gets half of what is written to it, and the connection breaks.
    Halves,
    /// It does what it is told to write, and never answers.
    Swallows,
    /// It refuses with 403, and repeats the request and its headers, as S3 does.
    Denies,
    /// Nobody listens.
    Gone,
}

/// What the client sees of a request that fails.
#[derive(Debug, Clone, Copy)]
enum Answer {
    Status(&'static str),
    Broken,
    Silent,
    /// Half of the answer.
    Cut,
    /// Nothing, after half of the request.
    Half,
}

/// What becomes of requests that fail, in turn; and whether they are applied all the same.
const FAULTS: [(Answer, bool); 9] = [
    (Answer::Status("503 Slow Down"), false),
    (Answer::Broken, true),
    (Answer::Status("500 Internal Server Error"), false),
    (Answer::Cut, true),
    (Answer::Silent, false),
    (Answer::Status("503 Slow Down"), true),
    (Answer::Broken, false),
    (Answer::Status("500 Internal Server Error"), true),
    (Answer::Silent, true),
];

/// Above the ports of well-known services and below those of outgoing connections, so that nobody takes the port while the
/// store is gone.
const PORTS: std::ops::Range<u64> = 20_000..32_000;
/// Proxies so far, and ports that were not free. The port of a proxy that is gone is no other's: its client still asks there.
static NUMBER: AtomicU64 = AtomicU64::new(0);
/// A request that takes longer is a mistake of the test.
const PATIENCE: Duration = Duration::from_secs(60);

/// The proxy.
pub(crate) struct Proxy {
    address: SocketAddr,
    state: Arc<State>,
}

struct State {
    /// The server, `HOST:PORT`.
    server: String,
    weather: Mutex<Weather>,
    /// Requests since the weather changed, and those of them that failed.
    requests: AtomicU64,
    failed: AtomicU64,
    /// Parquet files that were created by a request whose client was not told so.
    lost: Mutex<BTreeSet<String>>,
}

impl Proxy {
    /// Before the server at `url`, which is `http://HOST:PORT`. Everything succeeds until the weather changes.
    pub(crate) fn before(url: &str) -> Self {
        let server = url.strip_prefix("http://").unwrap().to_owned();
        let state = State {
            server,
            weather: Mutex::new(Weather::Fails(0)),
            requests: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            lost: Mutex::default(),
        };
        let numbers = std::iter::repeat_with(|| u64::from(std::process::id()) + NUMBER.fetch_add(1, SeqCst));
        let ports = numbers.map(|number| PORTS.start + mixed(number) % (PORTS.end - PORTS.start));
        let mut listeners = ports.take(1000).filter_map(|port| TcpListener::bind(("127.0.0.1", port as u16)).ok());
        let listener = listeners.next().expect("no port is free");
        let proxy = Self { address: listener.local_addr().unwrap(), state: Arc::new(state) };
        proxy.listen(listener);
        proxy
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Changes the weather. Requests that are under way fail if nobody is there any more.
    pub(crate) fn set(&self, weather: Weather) {
        let before = std::mem::replace(&mut *self.state.weather.lock().unwrap(), weather);
        self.state.requests.store(0, SeqCst);
        self.state.failed.store(0, SeqCst);
        match (before, weather) {
            (Weather::Gone, Weather::Gone) => {}
            // The listener ends when it has taken one more connection.
            (_, Weather::Gone) => while TcpStream::connect(self.address).is_ok() {},
            (Weather::Gone, _) => self.listen(TcpListener::bind(self.address).unwrap()),
            _ => {}
        }
    }

    /// Requests that failed since the weather changed.
    pub(crate) fn failed(&self) -> u64 {
        self.state.failed.load(SeqCst)
    }

    /// Parquet files that were created by a request whose client was not told so.
    pub(crate) fn lost(&self) -> usize {
        self.state.lost.lock().unwrap().len()
    }

    fn listen(&self, listener: TcpListener) {
        let state = Arc::clone(&self.state);
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if state.weather() == Weather::Gone {
                    return;
                }
                let state = Arc::clone(&state);
                // A connection that breaks is what this is for.
                thread::spawn(move || state.serve(client).ok());
            }
        });
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.set(Weather::Gone);
    }
}

impl State {
    fn weather(&self) -> Weather {
        *self.weather.lock().unwrap()
    }

    /// One request, after which the connection is closed.
    fn serve(&self, mut client: TcpStream) -> io::Result<()> {
        client.set_read_timeout(Some(PATIENCE))?;
        let request = Request::read(&mut client)?;
        match self.fault(&request) {
            Some((Answer::Half, _)) => {
                self.failed.fetch_add(1, SeqCst);
                self.forward_half(&request)
            }
            Some((answer, applied)) => {
                self.failed.fetch_add(1, SeqCst);
                let bytes = if applied { self.forward(&request)? } else { Vec::new() };
                self.remember_lost(&request, &bytes);
                fail(&mut client, &request, answer, &bytes)
            }
            None => {
                let bytes = self.forward(&request)?;
                if self.weather() == Weather::Gone {
                    self.remember_lost(&request, &bytes);
                    return Ok(());
                }
                client.write_all(&bytes)
            }
        }
    }

    /// How the next request fails, if it does.
    fn fault(&self, request: &Request) -> Option<(Answer, bool)> {
        let number = self.requests.fetch_add(1, SeqCst);
        let percent = match self.weather() {
            Weather::Fails(percent) => percent,
            Weather::Silent | Weather::Gone => return Some((Answer::Silent, false)),
            Weather::Halves => return (!request.body.is_empty()).then_some((Answer::Half, false)),
            Weather::Swallows => return (!request.body.is_empty()).then_some((Answer::Silent, true)),
            Weather::Denies => return Some((Answer::Status("403 Forbidden"), false)),
        };
        // The second one in any case, so that a low percentage has an effect on few requests.
        let fails = percent > 0 && (number == 1 || mixed(number) % 100 < percent);
        let turn = usize::try_from(self.failed.load(SeqCst)).unwrap() + usize::try_from(percent).unwrap();
        fails.then(|| FAULTS[turn % FAULTS.len()])
    }

    fn forward(&self, request: &Request) -> io::Result<Vec<u8>> {
        let mut server = TcpStream::connect(&self.server)?;
        server.set_read_timeout(Some(PATIENCE))?;
        let (first, rest) = request.head.split_once("\r\n").unwrap_or((&request.head, ""));
        write!(server, "{first}\r\nConnection: close\r\n{rest}")?;
        server.write_all(&request.body)?;
        let mut answer = Vec::new();
        server.read_to_end(&mut answer)?;
        Ok(answer)
    }

    /// The server has the whole head, and waits for the rest of the body when the connection breaks.
    fn forward_half(&self, request: &Request) -> io::Result<()> {
        let mut server = TcpStream::connect(&self.server)?;
        server.write_all(request.head.as_bytes())?;
        server.write_all(&request.body[..request.body.len() / 2])?;
        server.shutdown(Shutdown::Both)
    }

    fn remember_lost(&self, request: &Request, answer: &[u8]) {
        let path = request.head.split(' ').nth(1).unwrap_or_default();
        let is_created = answer.get(9..12) == Some(b"200");
        if request.head.starts_with("PUT ") && path.ends_with(".parquet") && is_created {
            self.lost.lock().unwrap().insert(path.to_owned());
        }
    }
}

/// Answers a request that fails, or does not.
fn fail(client: &mut TcpStream, request: &Request, answer: Answer, bytes: &[u8]) -> io::Result<()> {
    match answer {
        Answer::Status(status) => {
            let body = error_body(status, request);
            write!(client, "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Type: application/xml\r\n")?;
            write!(client, "Content-Length: {}\r\n\r\n{body}", body.len())
        }
        Answer::Broken | Answer::Half => client.shutdown(Shutdown::Both),
        Answer::Cut => client.write_all(&bytes[..bytes.len() / 2]),
        // Until the client gives up.
        Answer::Silent => client.read(&mut [0]).map(drop),
    }
}

/// As S3 has them: <https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html>.
fn error_body(status: &str, request: &Request) -> String {
    let head = request.head.replace(['<', '&'], " ");
    let key = head.split("Credential=").nth(1).and_then(|rest| rest.split('/').next()).unwrap_or_default();
    let token = head.lines().find_map(|line| line.strip_prefix("x-amz-security-token: ")).unwrap_or_default();
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{status}</Code><Message>The request was refused</Message>\
         <AWSAccessKeyId>{key}</AWSAccessKeyId><Token-0>{token}</Token-0><CanonicalRequest>{head}</CanonicalRequest></Error>"
    )
}

/// A request whose body has a known length: those of the stores' clients do.
struct Request {
    /// With the empty line at its end.
    head: String,
    body: Vec<u8>,
}

impl Request {
    fn read(client: &mut TcpStream) -> io::Result<Self> {
        const END: &[u8] = b"\r\n\r\n";
        let (mut bytes, mut part) = (Vec::new(), [0; 16 << 10]);
        let end = loop {
            if let Some(at) = bytes.windows(END.len()).position(|window| window == END) {
                break at + END.len();
            }
            match client.read(&mut part)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => bytes.extend_from_slice(&part[..n]),
            }
        };
        let mut body = bytes.split_off(end);
        let head = String::from_utf8(bytes).map_err(io::Error::other)?;
        let length = head.to_ascii_lowercase();
        let length = length.lines().find_map(|line| line.strip_prefix("content-length: ")?.trim().parse().ok());
        let have = body.len();
        body.resize(length.unwrap_or(0), 0);
        if have < body.len() {
            client.read_exact(&mut body[have..])?;
        }
        Ok(Self { head, body })
    }
}

/// A number that depends on `n` in no visible way (SplitMix64).
fn mixed(n: u64) -> u64 {
    let z = n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
