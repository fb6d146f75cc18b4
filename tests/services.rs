//! The bulk job against servers that speak the real protocols: S3 (moto) and Azure Blob (Azurite).
//!
//! `scripts/services` starts both, makes a bucket and a container `elmo-test`, says where the servers are in the variables
//! that the clouds' own tools read, and runs these tests. Without it they are skipped.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{env, path::Path, process::Command, sync::Arc};

use elmo::{ColumnEmbedder, Elmo, EmbedSpec};
use elmo_pipelines::{
    bulk::{self, BulkJob, BulkReport},
    manifest::{Manifest, ManifestError},
    report::Silent,
    sink::Codec,
    source::{Keep, KeptTypes},
    stage::EmbedStage,
    stores::Stores,
};
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};

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
        rows_per_file: Some(100),
        row_group_bytes: 64 << 20,
        codec: Codec::Zstd,
        window_rows: 64,
        overwrite: false,
        grace: std::time::Duration::from_secs(1),
    }
}

async fn run(job: &BulkJob, stores: &Stores) -> elmo_pipelines::Result<BulkReport> {
    let columns = ColumnEmbedder::new(&Elmo::tiny().unwrap(), EmbedSpec::default()).unwrap();
    let width = columns.width();
    let stage = EmbedStage::new(columns, width);
    bulk::run(job, stage.as_ref(), stores, std::future::pending(), &Silent).await
}

/// The same job on the server and on the local disk must give the same bytes; a second run must find it done, and a
/// second job must be kept out while one is running.
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
        let name = format!("part-{part:05}.parquet");
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

fn uuid() -> String {
    format!("{:x}", std::process::id())
}

/// pyarrow is the reader that refuses a file whose tensor type has no dimension names. Where the items are not nullable,
/// as ours, it knows no tensor (its own have nullable items) and shows the fixed-size list that lies below.
fn read_by_pyarrow(folder: &Path) {
    let Some(python) = env::var_os("ELMO_TEST_PYTHON") else {
        eprintln!("skipped: not read by pyarrow, as ELMO_TEST_PYTHON is not set; scripts/services sets it");
        return;
    };
    let script = "
import sys, pyarrow as pa, pyarrow.parquet as pq
table = pq.read_table(sys.argv[1] + '/part-00000.parquet')
assert table.num_rows == 100, table.num_rows
kind = table.schema.field('embedding').type
assert pa.types.is_fixed_size_list(kind) and kind.value_type == pa.float32() and kind.list_size == 64, kind
footer = pq.ParquetFile(sys.argv[1] + '/part-00000.parquet').metadata.metadata
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

/// What a server may do to a client, without one: memory behaves as S3 does here.
#[tokio::test(flavor = "multi_thread")]
async fn memory() {
    let stores = Stores::with_settings([]);
    let memory: Arc<dyn ObjectStore> = Arc::new(object_store::memory::InMemory::new());
    stores.insert("s3://elmo-memory", memory);
    contract(&stores, "s3://elmo-memory").await;
}
