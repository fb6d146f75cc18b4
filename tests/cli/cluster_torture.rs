//! Workers and clients that die, stand still and return at random; `scripts/torture-cluster` runs it.

use std::{
    collections::BTreeMap,
    env, fs, thread,
    time::{Duration, Instant},
};

use crate::{
    cluster::{sql, texts},
    node::Node,
    place::Place,
};

const WORKERS: usize = 3;
const ROWS: usize = 24_000;
/// How long a run may take, with workers that stand still.
const MOST: Duration = Duration::from_secs(180);

/// Numbers from a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    fn millis(&mut self, most: u64) -> Duration {
        Duration::from_millis(self.below(most))
    }
}

fn number(name: &str, default: u64) -> u64 {
    env::var(name)
        .ok()
        .map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text}")))
}

/// The workers, each with an address of its own.
struct Workers<'p> {
    place: &'p Place,
    nodes: Vec<Node>,
}

impl<'p> Workers<'p> {
    fn start(place: &'p Place) -> Self {
        let node = |_| Node::start(place.elmo(), "cluster worker --bind 127.0.0.1:0 --threads 1");
        Self { place, nodes: (0..WORKERS).map(node).collect() }
    }

    fn list(&self) -> String {
        self.nodes.iter().map(|node| node.address.as_str()).collect::<Vec<_>>().join(",")
    }

    /// Another process at the address of one that is gone.
    fn restart(&mut self, at: usize) {
        self.nodes[at].signal("-KILL");
        self.nodes[at].wait();
        let words = format!("cluster worker --bind {} --threads 1", self.nodes[at].address);
        self.nodes[at] = Node::start(self.place.elmo(), &words);
    }

    /// Something happens to a worker; returns what.
    fn disturb(&mut self, random: &mut Random) -> String {
        let at = random.below(WORKERS as u64) as usize;
        let what = ["killed", "stopped", "stopped for a while", "ended", "restarted"][random.below(5) as usize];
        match what {
            "killed" => self.nodes[at].signal("-KILL"),
            "stopped" => self.nodes[at].signal("-STOP"),
            "stopped for a while" => {
                self.nodes[at].signal("-STOP");
                thread::sleep(random.millis(25_000));
                self.nodes[at].signal("-CONT");
            }
            "ended" => self.nodes[at].signal("-TERM"),
            _ => self.restart(at),
        }
        format!("worker {at} was {what}")
    }

    /// All of them are there again, and do nothing.
    fn recover(&mut self) {
        let began = Instant::now();
        loop {
            for at in 0..WORKERS {
                self.nodes[at].signal("-CONT");
                if self.nodes[at].child.try_wait().unwrap().is_some() {
                    self.restart(at);
                }
            }
            let status = self.place.elmo().args(["cluster", "status", "--json", &self.list()]).output().unwrap();
            let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
            let is_idle = |worker: &serde_json::Value| worker["tasks"] == 0 && worker["stopping"] == false;
            if status.as_array().unwrap().iter().all(is_idle) {
                return;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "workers are not idle: {status}");
            thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Names and contents of all files of a folder, also of hidden ones; not those of its manifest.
fn contents(place: &Place, folder: &str) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(place.path(folder)).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.filter(|path| path.is_file());
    files.map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap())).collect()
}

/// Waits until a client ends; returns its exit code.
fn end(client: &mut Node) -> Option<i32> {
    let began = Instant::now();
    loop {
        if let Some(status) = client.child.try_wait().unwrap() {
            return status.code();
        }
        assert!(began.elapsed() < MOST, "the client does not end: {}", client.stderr());
        thread::sleep(Duration::from_millis(20));
    }
}

/// Every run ends with the rows of an undisturbed one: the files of a bulk job to the byte, those of a COPY with each row once,
/// and nothing else in their folders.
#[test]
#[ignore = "50 runs take a quarter of an hour; scripts/torture-cluster runs them"]
fn torture() {
    let (runs, seed) = (number("TORTURE_RUNS", 50), number("TORTURE_SEED", u64::from(std::process::id())));
    println!("TORTURE_SEED={seed}");
    let mut random = Random(seed);
    let place = Place::new();
    place.write("rows.jsonl", texts(ROWS, 20));
    let job = "embed -q --model tiny --input rows.jsonl --keep id --rows-per-file 1500";
    place.exits(&format!("{job} --output here"), 0);
    let expected = contents(&place, "here");
    let mut workers = Workers::start(&place);
    for run in 0..runs {
        let is_job = run % 2 == 0;
        let copy = format!(
            "SET datafusion.execution.objectstore_writer_buffer_size = 100000; \
             SET datafusion.execution.parquet.max_row_group_size = 200; \
             COPY (SELECT id, elmo_embed(text || '{run}') AS v FROM 'rows.jsonl') TO 'there/' STORED AS PARQUET \
             OPTIONS (overwrite true)"
        );
        let begin = || {
            let mut command = place.elmo();
            match is_job {
                true => command.args(format!("{job} --output there --cluster {}", workers.list()).split(' ')),
                false => command.args(["sql", "-q", "--model", "tiny", "--cluster", &workers.list(), "-c", &copy]),
            };
            Node::spawn(command, "")
        };
        let mut client = begin();
        let mut happened = Vec::new();
        if random.below(5) == 0 {
            thread::sleep(random.millis(6000));
            client.signal("-KILL");
            end(&mut client);
            happened.push("the client was killed".to_owned());
            client = begin();
        }
        for _ in 0..=random.below(2) {
            thread::sleep(random.millis(5000));
            happened.push(workers.disturb(&mut random));
        }
        let mut code = end(&mut client);
        // All three are gone at the same time: the same command goes on.
        while code == Some(5) {
            happened.push("no worker was left".to_owned());
            workers.recover();
            let list = workers.list();
            let mut command = place.elmo();
            match is_job {
                true => command.args(format!("{job} --output there --cluster {list}").split(' ')),
                false => command.args(["sql", "-q", "--model", "tiny", "--cluster", &list, "-c", &copy]),
            };
            client = Node::spawn(command, "");
            code = end(&mut client);
        }
        let what = format!("run {run} of seed {seed}: {}", happened.join(", "));
        assert_eq!(code, Some(0), "{what}: {}", client.stderr());
        workers.recover();
        let found = contents(&place, "there");
        if is_job {
            assert!(found.keys().eq(expected.keys()), "{what}: {:?}", found.keys());
            let differing = found.iter().filter(|(name, bytes)| expected[*name] != **bytes);
            assert_eq!(differing.map(|(name, _)| name).collect::<Vec<_>>(), Vec::<&String>::new(), "{what}");
        } else {
            assert!(found.keys().all(|name| !name.starts_with('.')), "{what}: {:?}", found.keys());
            let counts = "SELECT count(*), count(DISTINCT id), sum(id), count(v) FROM 'there/'";
            let counted = sql(&place, &["--format", "csv", "-c", counts]).out;
            let sum = ROWS * (ROWS - 1) / 2;
            assert_eq!(counted.lines().last(), Some(format!("{ROWS},{ROWS},{sum},{ROWS}").as_str()), "{what}");
        }
        println!("{what}: each row once");
        fs::remove_dir_all(place.path("there")).unwrap();
    }
}
