//! Parts are published in order while others are computed.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::Bytes;
use elmo::{EmbedSpec, spec::OnError};
use elmo_pipelines::{
    Error,
    bulk::{self, BulkJob},
    report::Silent,
    stores::Stores,
};
use futures::TryStreamExt;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt, path::Path};
use tokio::sync::{Notify, Semaphore};

use crate::{
    common::{Hashing, Place, job, lines, plain, run, run_local},
    frozen::{At, Gate, Shared, View},
};

/// Parts of 10 rows, in a store whose requests to publish a part may be held back.
async fn store(text: impl Into<Bytes>) -> Arc<Shared> {
    let shared = Arc::new(Shared::default());
    shared.inner.put(&Path::from("in/a.txt"), text.into().into()).await.unwrap();
    shared
}

fn stores(shared: &Arc<Shared>, gate: Option<&Arc<Gate>>) -> Stores {
    let stores = Stores::with_settings([]);
    let view = View { shared: Arc::clone(shared), gate: gate.cloned() };
    stores.insert_with_uploads("memory://faulty", Arc::new(view));
    stores
}

fn the_job() -> BulkJob {
    job("memory://faulty/in", "memory://faulty/out")
}

/// Parts and entries, by name; `job.json` holds the version of the input.
async fn outcome(shared: &Shared) -> BTreeMap<String, Bytes> {
    let objects: Vec<ObjectMeta> = shared.inner.list(Some(&Path::from("out"))).try_collect().await.unwrap();
    let mut found = BTreeMap::new();
    for meta in objects.into_iter().filter(|meta| !meta.location.as_ref().ends_with("job.json")) {
        let bytes = shared.inner.get(&meta.location).await.unwrap().bytes().await.unwrap();
        found.insert(plain(meta.location.as_ref()), bytes);
    }
    found
}

async fn undisturbed() -> BTreeMap<String, Bytes> {
    undisturbed_with(25).await
}

async fn undisturbed_with(rows: usize) -> BTreeMap<String, Bytes> {
    let shared = store(lines(rows)).await;
    run(&the_job(), &Hashing::default(), &stores(&shared, None)).await.unwrap();
    outcome(&shared).await
}

/// Waits until the first part is about to be published and the stage has so many rows.
async fn until(gate: &Gate, stage: &Hashing, rows: usize) {
    gate.reached.acquire().await.unwrap().forget();
    has_rows(stage, rows).await;
}

async fn has_rows(stage: &Hashing, rows: usize) {
    let reached = async {
        while stage.rows.load(Ordering::SeqCst) < rows {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(60), reached).await;
    assert!(waited.is_ok(), "the stage is not given {rows} rows");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rows_of_the_next_part_are_computed_while_a_part_is_published() {
    let shared = store(lines(25)).await;
    let (gate, stage) = (Gate::new(At::Publishing), Arc::new(Hashing::default()));
    let stores = stores(&shared, Some(&gate));
    let job = tokio::spawn({
        let stage = Arc::clone(&stage);
        async move { run(&the_job(), stage.as_ref(), &stores).await }
    });
    until(&gate, &stage, 20).await;
    assert!(!outcome(&shared).await.contains_key("out/part-00000.parquet"), "it is not published yet");
    gate.released.add_permits(10);
    job.await.unwrap().unwrap();
    assert!(outcome(&shared).await == undisturbed().await);
}

/// At least as many parts of one row group as row groups of one part: four, on as many cores.
#[tokio::test(flavor = "multi_thread")]
async fn several_parts_are_encoded_while_the_first_one_is_published() {
    let at_once = std::thread::available_parallelism().map_or(1, usize::from).clamp(2, 4);
    let shared = store(lines(255)).await;
    let (gate, stage) = (Gate::new(At::Publishing), Arc::new(Hashing::default()));
    let stores = stores(&shared, Some(&gate));
    let job = tokio::spawn({
        let stage = Arc::clone(&stage);
        async move { run(&the_job(), stage.as_ref(), &stores).await }
    });
    until(&gate, &stage, 10 * at_once).await;
    assert!(
        outcome(&shared).await.keys().all(|name| !name.contains("part-")),
        "nothing is published before the first part"
    );
    gate.released.add_permits(100);
    job.await.unwrap().unwrap();
    assert!(outcome(&shared).await == undisturbed_with(255).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_fails_in_the_next_part_leaves_the_complete_one() {
    let mut text = lines(25).into_bytes();
    let row_12 = lines(12).len();
    text[row_12] = 0xff;
    let shared = store(text).await;
    let spec = EmbedSpec { on_error: OnError::Fail, ..EmbedSpec::default() };
    let (gate, stage) = (Gate::new(At::Publishing), Arc::new(Hashing { spec, ..Hashing::default() }));
    let stores = stores(&shared, Some(&gate));
    let job = tokio::spawn({
        let stage = Arc::clone(&stage);
        async move { run(&the_job(), stage.as_ref(), &stores).await }
    });
    until(&gate, &stage, 14).await;
    gate.released.add_permits(10);
    let error = job.await.unwrap().unwrap_err();
    assert!(error.to_string().contains("a.txt, row 12"), "{error}");
    let found = outcome(&shared).await;
    let parts: Vec<&str> = found.keys().map(String::as_str).filter(|name| name.contains("part-")).collect();
    assert_eq!(parts, ["out/_elmo/part-00000.json", "out/part-00000.parquet"]);
    assert!(shared.uploads.lock().unwrap().is_empty(), "an upload was left behind");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interruption_while_a_part_is_published_keeps_it_and_rows_of_the_next() {
    let shared = store(lines(255)).await; // more than may wait for the first part
    let (gate, stage, stop) = (Gate::new(At::Publishing), Arc::new(Hashing::default()), Arc::new(Notify::new()));
    let held = stores(&shared, Some(&gate));
    let job = tokio::spawn({
        let (stage, stop) = (Arc::clone(&stage), Arc::clone(&stop));
        let job = BulkJob { grace: Duration::from_secs(30), ..the_job() };
        async move { bulk::run(&job, stage.as_ref(), &held, stop.notified(), &Silent).await }
    });
    until(&gate, &stage, 18).await;
    stop.notify_one();
    gate.released.add_permits(10);
    let error = job.await.unwrap().unwrap_err();
    let Error::Interrupted { rows, again: true, begun: true } = error else { panic!("{error}") };
    assert!((11..255).contains(&rows), "the first part and rows after it: {rows}");
    let found = outcome(&shared).await;
    assert!(found.contains_key("out/_elmo/part-00000.json") && found.contains_key("out/_elmo/partial.arrows"));
    let again = Hashing::default();
    let report = run(&the_job(), &again, &stores(&shared, None)).await.unwrap();
    assert_eq!((report.resumed_rows, again.rows.into_inner() as u64), (rows, 255 - rows));
    assert!(outcome(&shared).await == undisturbed_with(255).await);
}

/// All chunks in flight are computed when the job is interrupted, and their columns are built one after the other: 8 chunks of 4 rows.
#[tokio::test(flavor = "multi_thread")]
async fn an_interruption_keeps_rows_whose_columns_are_being_built() {
    let place = Place::new();
    place.write("a.txt", lines(255));
    let released = Arc::new(Semaphore::new(0));
    let stage = Arc::new(Hashing { built: Some(Arc::clone(&released)), ..Hashing::default() });
    let stop = Arc::new(Notify::new());
    let the_job = BulkJob { rows_per_file: Some(1000), grace: Duration::from_secs(30), ..place.job("a.txt", "out") };
    let job = tokio::spawn({
        let (stage, stop, job) = (Arc::clone(&stage), Arc::clone(&stop), the_job.clone());
        async move { bulk::run(&job, stage.as_ref(), &Stores::with_settings([]), stop.notified(), &Silent).await }
    });
    has_rows(&stage, 32).await;
    stop.notify_one();
    released.add_permits(1);
    let error = job.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Interrupted { rows: 32, again: true, begun: true }), "{error:?}");
    let report = run_local(&the_job).await.unwrap();
    assert_eq!((report.resumed_rows, report.counts.rows_out), (32, 255));
}

/// A store that does not take the first part: the job ends after the grace period, and the next one computes all rows again.
#[tokio::test(flavor = "multi_thread")]
async fn an_interruption_waits_for_parts_no_longer_than_for_rows() {
    let shared = store(lines(255)).await;
    let (gate, stage, stop) = (Gate::new(At::Publishing), Arc::new(Hashing::default()), Arc::new(Notify::new()));
    let held = stores(&shared, Some(&gate));
    let job = tokio::spawn({
        let (stage, stop) = (Arc::clone(&stage), Arc::clone(&stop));
        let job = BulkJob { grace: Duration::from_millis(100), ..the_job() };
        async move { bulk::run(&job, stage.as_ref(), &held, stop.notified(), &Silent).await }
    });
    until(&gate, &stage, 18).await;
    stop.notify_one();
    let ended = tokio::time::timeout(Duration::from_secs(60), job).await.expect("the job waits for the store");
    let error = ended.unwrap().unwrap_err();
    assert!(matches!(error, Error::Interrupted { rows: 0, again: true, begun: true }), "{error}");
    assert!(outcome(&shared).await.keys().all(|name| !name.contains("part")), "nothing was published");
    let report = run(&the_job(), &Hashing::default(), &stores(&shared, None)).await.unwrap();
    assert_eq!(report.resumed_rows, 0);
    assert!(outcome(&shared).await == undisturbed_with(255).await);
}
