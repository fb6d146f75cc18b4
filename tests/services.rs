//! Jobs against servers that speak the real protocols: S3 (moto), Azure Blob (Azurite) and Kafka.
//!
//! `scripts/services` starts them, makes a bucket and a container `elmo-test`, says where the servers are in the variables
//! that the clouds' own tools read, and runs these tests. Without it they are skipped.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[cfg(feature = "kafka")]
#[path = "services/kafka.rs"]
mod kafka;
#[path = "cli/node.rs"]
mod node;

use std::{env, path::Path, process::Command, sync::Arc, time::Duration};

use arrow::array::{ArrayRef, BinaryArray, RecordBatch};
use elmo::{ColumnEmbedder, Elmo, EmbedSpec};
use elmo_pipelines::{
    bulk::manifest::{Manifest, ManifestError},
    bulk::{self, BulkJob, BulkReport},
    report::Silent,
    sink::{Buffering, Codec, Complete, Encoding, Fence, PartWriter, SinkError},
    source::{InferRows, Keep, KeptTypes, Reading},
    stage::EmbedStage,
    stores::{Location, Stores, UploadId, create_once},
};
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutPayload};

use node::Node;

const ROWS: usize = 300;

fn input() -> String {
    (0..ROWS).map(|i| format!("Row {i} says something of its own, {} times.\n", i % 7)).collect()
}

fn job(input: &str, output: &str) -> BulkJob {
    BulkJob {
        inputs: vec![input.to_owned()],
        output: output.to_owned(),
        column: "text".into(),
        id: None,
        keep: Keep::All,
        types: KeptTypes::default(),
        infer_rows: InferRows::default(),
        reading: Reading::default(),
        limit: None,
        rows_per_file: Some(100),
        row_group_bytes: 64 << 20,
        codec: Codec::Zstd,
        window_rows: 64,
        overwrite: false,
        check: false,
        grace: std::time::Duration::from_secs(1),
    }
}

async fn run(job: &BulkJob, stores: &Stores) -> elmo_pipelines::Result<BulkReport> {
    let columns = ColumnEmbedder::new(&Elmo::tiny().unwrap(), EmbedSpec::default()).unwrap();
    let width = columns.width();
    let stage = EmbedStage::new(columns, width);
    bulk::run(job, stage.as_ref(), stores, std::future::pending(), &Silent).await
}

/// The same job on the server and on the local disk writes the same bytes, a second run finds it complete, and a second
/// job is locked out while one is running.
async fn contract(stores: &Stores, bucket: &str) {
    let prefix = format!("{bucket}/run-{}", uuid());
    let lines = stores.locate(&format!("{prefix}/input/lines.txt")).unwrap();
    lines.store.put(&lines.path, PutPayload::from(input().into_bytes())).await.unwrap();
    let remote = job(&format!("{prefix}/input/lines.txt"), &format!("{prefix}/vectors"));
    let report = run(&remote, stores).await.unwrap();
    assert_eq!((report.counts.rows_in, report.counts.rows_out, report.parts), (ROWS as u64, ROWS as u64, 3));
    let again = run(&remote, stores).await.unwrap();
    assert_eq!(again.resumed_rows, ROWS as u64);

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lines.txt");
    std::fs::write(&path, input()).unwrap();
    let local = job(path.to_str().unwrap(), folder.path().join("vectors").to_str().unwrap());
    run(&local, stores).await.unwrap();
    for part in 0..3 {
        let name = part_name(&folder.path().join("vectors"), part);
        let there = stores.locate(&format!("{prefix}/vectors/{name}")).unwrap().get().await.unwrap().unwrap();
        let here = std::fs::read(folder.path().join("vectors").join(&name)).unwrap();
        assert!(there == here, "{name} has other bytes on the server");
    }
    read_by_pyarrow(&folder.path().join("vectors"));

    let output = stores.locate(&format!("{prefix}/locked")).unwrap();
    let nothing = serde_json::from_str(r#"{"settings": {}, "inputs": []}"#).unwrap();
    let first = Manifest::open(&output, &nothing, false).await.unwrap();
    let second = Manifest::open(&output, &nothing, false).await;
    assert!(matches!(second, Err(ManifestError::Locked { .. })), "{second:?}");
    first.close().await;
    Manifest::open(&output, &nothing, false).await.unwrap().close().await;
}

/// Lets a successor take over when an upload is about to be completed: it aborts the upload, and may write the file.
struct Successor {
    file: Location,
    writes: bool,
}

impl Fence for Successor {
    type Error = SinkError;

    // moto answers 500 where S3 answers 404.
    const RETRY_FOR: Duration = Duration::from_secs(2);

    async fn verify(&self) -> Result<(), SinkError> {
        Ok(())
    }

    async fn renew(&self, upload: Option<&UploadId>) -> Result<(), SinkError> {
        let Some(upload) = upload else { return Ok(()) };
        upload.abort(&self.file).await?;
        // A successor that stops here is followed by another one.
        upload.abort(&self.file).await?;
        if self.writes {
            self.file.put("the successor's".into(), PutMode::Create).await.unwrap();
        }
        Ok(())
    }

    async fn completed(&self, _: &UploadId) {}
}

/// A file of more than a chunk, which does not compress.
async fn large_file(location: &Location) -> Complete {
    let values = BinaryArray::from_iter_values((0..12).map(|i| vec![i; 1 << 20]));
    let rows = RecordBatch::try_from_iter([("value", Arc::new(values) as ArrayRef)]).unwrap();
    let encoding = Encoding { vectors: "value".into(), codec: Codec::None, row_group_bytes: 1 << 20 };
    let mut writer = PartWriter::new(location.clone(), &rows.schema(), &encoding, Buffering::Chunk).unwrap();
    writer.write(&rows).await.unwrap();
    writer.complete(&[], std::future::pending()).await.unwrap().unwrap()
}

/// The server honours conditional writes, and an upload that was aborted cannot be completed.
async fn fence(stores: &Stores, bucket: &str) {
    let folder = stores.locate(&format!("{bucket}/fence-{}", uuid())).unwrap();
    create_once::probe(&folder.child("probe")).await.unwrap();
    assert!(folder.child("probe").head().await.unwrap().is_none());
    for writes in [false, true] {
        let file = folder.child(&format!("{writes}.parquet"));
        let successor = Successor { file: file.clone(), writes };
        let error = large_file(&file).await.replace(&successor).await.unwrap_err();
        let found = file.get().await.unwrap();
        assert_eq!(found, writes.then(|| "the successor's".into()), "{error}");
    }
    let file = folder.child("alone.parquet");
    let written = large_file(&file).await.replace(&Alone).await.unwrap();
    assert_eq!(file.head().await.unwrap().unwrap().size, written.bytes);
}

/// No other process writes.
struct Alone;

impl Fence for Alone {
    type Error = SinkError;

    const RETRY_FOR: Duration = Duration::from_secs(25);

    async fn verify(&self) -> Result<(), SinkError> {
        Ok(())
    }

    async fn renew(&self, _: Option<&UploadId>) -> Result<(), SinkError> {
        Ok(())
    }

    async fn completed(&self, _: &UploadId) {}
}

/// Name of a part of a local output.
fn part_name(output: &Path, part: usize) -> String {
    let names = std::fs::read_dir(output).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    let mut parts = names.filter(|name| name.starts_with(&format!("part-{part:05}-")));
    parts.next().unwrap()
}

fn uuid() -> String {
    format!("{:x}", std::process::id())
}

/// pyarrow rejects a file whose tensor type has no dimension names. Its own tensors have nullable items; ours are not
/// nullable, so it shows the fixed-size list instead.
fn read_by_pyarrow(folder: &Path) {
    let Some(python) = env::var_os("ELMO_TEST_PYTHON") else {
        eprintln!("skipped: not read by pyarrow, as ELMO_TEST_PYTHON is not set; scripts/services sets it");
        return;
    };
    let script = "
import glob, sys, pyarrow as pa, pyarrow.parquet as pq
first = glob.glob(sys.argv[1] + '/part-00000-*.parquet')[0]
table = pq.read_table(first)
assert table.num_rows == 100, table.num_rows
kind = table.schema.field('embedding').type
assert pa.types.is_fixed_size_list(kind) and kind.value_type == pa.float32() and kind.list_size == 64, kind
footer = pq.ParquetFile(first).metadata.metadata
assert footer[b'elmo.level'] == b'sentence', footer
";
    let done = Command::new(python).args(["-c", script]).arg(folder).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the server that scripts/services starts"]
async fn s3() {
    contract(&Stores::from_env(), "s3://elmo-test").await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the server that scripts/services starts"]
async fn azure() {
    contract(&Stores::from_env(), "az://elmo-test").await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the server that scripts/services starts"]
async fn a_fence_on_s3() {
    fence(&Stores::from_env(), "s3://elmo-test").await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the server that scripts/services starts"]
async fn a_fence_on_azure() {
    fence(&Stores::from_env(), "az://elmo-test").await;
}

/// The command without the settings in the environment of the tests.
fn without_settings(mut command: Command) -> Command {
    for (name, _) in env::vars().filter(|(name, _)| name.starts_with("ELMO_") || name == "FAILPOINTS") {
        command.env_remove(name);
    }
    command
}

/// A folder of a server that two processes of `elmo` share with this one.
struct Remote<'a> {
    stores: &'a Stores,
    url: String,
    /// Where `elmo` runs, with a cache of models of its own.
    folder: tempfile::TempDir,
}

impl Remote<'_> {
    async fn put(&self, name: &str, bytes: Vec<u8>) {
        let file = self.stores.locate(&format!("{}/{name}", self.url)).unwrap();
        file.store.put(&file.path, PutPayload::from(bytes)).await.unwrap();
    }

    async fn get(&self, name: &str) -> Vec<u8> {
        let file = self.stores.locate(&format!("{}/{name}", self.url)).unwrap();
        file.get().await.unwrap().unwrap().to_vec()
    }

    fn elmo(&self) -> Command {
        let mut elmo = without_settings(Command::new(env!("CARGO_BIN_EXE_elmo")));
        elmo.current_dir(self.folder.path()).env("ELMO_CACHE", self.folder.path().join("cache"));
        elmo
    }

    /// What `elmo` prints; `@` is the folder's URL.
    fn prints(&self, words: &[&str]) -> String {
        let words = words.iter().map(|word| word.replace('@', &self.url));
        let output = self.elmo().args(words).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

/// With model, inputs and outputs on a server, a cluster returns what one process returns. A worker that caches files
/// of stores notices that one was replaced, even by the same number of bytes within the same second.
async fn cluster(stores: &Stores, bucket: &str) {
    let folder = tempfile::tempdir().unwrap();
    let remote = Remote { stores, url: format!("{bucket}/cluster-{}", uuid()), folder };
    remote.prints(&["model", "convert", "tiny", "model", "--to", "safetensors"]);
    for file in std::fs::read_dir(remote.folder.path().join("model")).unwrap() {
        let file = file.unwrap();
        let name = file.file_name().into_string().unwrap();
        remote.put(&format!("model/{name}"), std::fs::read(file.path()).unwrap()).await;
    }
    let rows = |word: &str| -> Vec<u8> {
        let row = |id| format!("{{\"id\": {id}, \"text\": \"{word} {id} is a row of its own.\"}}\n");
        (0..ROWS).map(row).collect::<String>().into_bytes()
    };
    remote.put("in/rows.jsonl", rows("Row")).await;
    let mut worker = Node::start(remote.elmo(), "cluster worker --bind 127.0.0.1:0 --threads 1");
    let there = ["sql", "-q", "--model", "@/model", "--format", "csv", "--cluster", &worker.address, "-c"];
    let here = ["sql", "-q", "--model", "@/model", "--format", "csv", "-c"];
    let query = "SELECT id, text, elmo_embed(text) FROM '@/in/*.jsonl' ORDER BY id";
    let first = remote.prints(&[&there[..], &[query]].concat());
    assert_eq!((first.lines().count(), &first), (ROWS + 1, &remote.prints(&[&here[..], &[query]].concat())));

    // Footers of Parquet files are cached.
    let copy = |words: &[&str]| {
        let statement = "COPY (SELECT id, elmo_embed(text) AS v FROM '@/in/rows.jsonl' ORDER BY id) TO '@/v.parquet'";
        remote.prints(&[words, &[statement]].concat())
    };
    let read = "SELECT count(*) AS n, sum(v[1]) AS s FROM '@/v.parquet'";
    copy(&there);
    // Uploads of a worker that the client completes, also of many small files.
    for (words, folder) in [(&there[..], "there-parts"), (&here[..], "here-parts")] {
        let parts = format!(
            "COPY (SELECT id, elmo_embed(text)[1] AS v, CAST(id % 5 AS VARCHAR) AS p FROM '@/in/rows.jsonl') \
             TO '@/{folder}/' STORED AS CSV PARTITIONED BY (p)"
        );
        assert_eq!(remote.prints(&[words, &[&parts]].concat()), format!("count\n{ROWS}\n"));
    }
    let rows_of =
        |folder: &str| remote.prints(&[&here[..], &[&format!("SELECT * FROM '@/{folder}/' ORDER BY id")]].concat());
    assert_eq!(rows_of("there-parts"), rows_of("here-parts"));
    let before = remote.prints(&[&there[..], &[read]].concat());
    copy(&here);
    assert_eq!(remote.prints(&[&there[..], &[read]].concat()), before);
    remote.put("in/rows.jsonl", rows("Day")).await;
    copy(&here);
    let after = remote.prints(&[&there[..], &[read]].concat());
    assert_ne!(after, before);
    assert_eq!(after, remote.prints(&[&here[..], &[read]].concat()));
    // Another number in the same number of bytes; a session caches files too.
    let replace = |number: u32| format!("COPY (SELECT {number} AS n) TO '@/n.parquet'");
    let again = [&replace(1), "SELECT n FROM '@/n.parquet'", &replace(2), "SELECT n FROM '@/n.parquet'"];
    let words: Vec<&str> = again.iter().flat_map(|statement| ["-c", statement]).collect();
    for place in [&[][..], &["--cluster", &worker.address]] {
        let said = remote.prints(&[&["sql", "-q", "--format", "csv"], place, &words[..]].concat());
        assert_eq!(said, "count\n1\nn\n1\ncount\n1\nn\n2\n", "{place:?}");
        // A query without rows leaves a table without rows, and tabs make files that are read with tabs.
        let none = "COPY (SELECT n, n AS part FROM '@/n.parquet' WHERE n > 9) TO '@/none/' STORED AS PARQUET PARTITIONED BY \
                    (part) OPTIONS (overwrite true)";
        let tabs = "COPY (SELECT 1 AS n, 'a,b' AS t) TO '@/tabs/' STORED AS TSV OPTIONS (overwrite true)";
        let read =
            ["-c", none, "-c", "SELECT n, part FROM '@/none/'", "-c", tabs, "-c", "SELECT t FROM '@/tabs/*.tsv'"];
        let said = remote.prints(&[&["sql", "-q", "--format", "csv"], place, &read[..]].concat());
        assert_eq!(said, "count\n0\nn,part\ncount\n1\nt\n\"a,b\"\n", "{place:?}");
        // A query that fails replaces no file.
        let before = remote.get("n.parquet").await;
        let failing =
            format!("COPY (SELECT 1 / (id - 299) AS n FROM '{0}/in/rows.jsonl') TO '{0}/n.parquet'", remote.url);
        let failed = remote.elmo().args(["sql", "-q"]).args(place).args(["-c", &failing]).output().unwrap();
        assert!(!failed.status.success() && remote.get("n.parquet").await == before, "{place:?}: {failed:?}");
    }

    let job = "embed -q --model @/model --input @/in/rows.jsonl --keep id --rows-per-file 100 --output";
    let job: Vec<&str> = job.split(' ').collect();
    remote.prints(&[&job[..], &["@/there", "--cluster", &worker.address]].concat());
    remote.prints(&[&job[..], &["@/here"]].concat());
    let output = stores.locate(&format!("{}/here", remote.url)).unwrap();
    let parts = output.children().await.unwrap();
    assert_eq!(parts.len(), 3);
    for name in parts.iter().filter_map(|part| part.location.filename()) {
        let (there, here) = (remote.get(&format!("there/{name}")).await, remote.get(&format!("here/{name}")).await);
        assert!(there == here, "{name} has other bytes from a cluster");
    }
    worker.signal("-TERM");
    assert_eq!(worker.wait(), Some(0), "{}", worker.stderr());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the server that scripts/services starts"]
async fn a_cluster_on_s3() {
    cluster(&Stores::from_env(), "s3://elmo-test").await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the server that scripts/services starts"]
async fn a_cluster_on_azure() {
    cluster(&Stores::from_env(), "az://elmo-test").await;
}

/// A run that reads compressed shards from the server, and whose machine is lost, resumes from the copies there. It has the
/// weights of one that reads the same shards from the disk and is not interrupted.
async fn training(bucket: &str) {
    let (stores, folder) = (Stores::from_env(), tempfile::tempdir().unwrap());
    let remote = Remote { stores: &stores, url: format!("{bucket}/train-{}", uuid()), folder };
    let path = |name: &str| remote.folder.path().join(name);
    let line = |n: usize| format!("w{} w{} w{}\n", n % 7, n % 5, n % 11);
    let lines: Vec<String> = (0..400).map(line).collect();
    std::fs::create_dir(path("corpus")).unwrap();
    for (number, lines) in lines.chunks(150).enumerate() {
        let shard = path(&format!("corpus/{number}.txt"));
        std::fs::write(&shard, lines.concat()).unwrap();
        let packed = Command::new("zstd").arg("-qc").arg(&shard).output().unwrap();
        remote.put(&format!("corpus/{number}.txt.zst"), packed.stdout).await;
    }
    remote.prints(&["vocab", "corpus", "--output", "vocab.txt", "-q"]);
    remote.prints(&["vocab", "@/corpus/*.zst", "--output", "from-server.txt", "-q"]);
    assert!(std::fs::read(path("vocab.txt")).unwrap() == std::fs::read(path("from-server.txt")).unwrap());
    let train = |steps: &str, output: &str, more: &str| {
        let words = "train --vocab vocab.txt --size tiny --rows 4 --checkpoint-every 3 --device cpu --json -q";
        let words: Vec<&str> = words.split(' ').chain(["--steps", steps, "--output", output]).collect();
        remote.prints(&words.into_iter().chain(more.split(' ')).collect::<Vec<_>>())
    };
    train("8", "whole", "--shards corpus");
    let interrupted = "--shards @/corpus/*.zst --upload @/copies";
    train("5", "run", interrupted);
    std::fs::remove_dir_all(path("run")).unwrap();
    let report: serde_json::Value = serde_json::from_str(&train("8", "run", interrupted)).unwrap();
    assert_eq!(report["upload"]["step"], 8);
    for name in ["weights.safetensors", "softmax.safetensors"] {
        let read = |run: &str| std::fs::read(path(run).join(name)).unwrap();
        assert!(read("run") == read("whole"), "{name}");
    }
    // The last steps of both commands: the journal comes with the copy.
    assert_eq!(std::fs::read_to_string(path("run/steps.jsonl")).unwrap().lines().count(), 2);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the server that scripts/services starts"]
async fn a_training_run_on_s3() {
    training("s3://elmo-test").await;
}

/// The contract without a server: memory behaves like S3.
#[tokio::test(flavor = "multi_thread")]
async fn memory() {
    let stores = Stores::with_settings([]);
    let memory: Arc<dyn ObjectStore> = Arc::new(object_store::memory::InMemory::new());
    stores.insert("s3://elmo-memory", memory);
    contract(&stores, "s3://elmo-memory").await;
}
