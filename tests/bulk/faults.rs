//! Failing stores, and two jobs on one output.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering},
};

use bytes::Bytes;
use elmo_pipelines::{
    Exit,
    bulk::BulkJob,
    bulk::manifest::{Manifest, ManifestError},
    sink::Codec,
    stores::Stores,
};
use futures::{FutureExt, TryStreamExt};
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt, PutPayload, memory::InMemory, path::Path};
use tokio::sync::Semaphore;

use crate::{
    common::{Hashing, job, plain, run},
    faulty::{Fault, Faulty, Plan},
    frozen::{Gate, Shared, View},
    unconditional::Unconditional,
};

fn fine() -> Plan {
    Arc::new(|_| Fault::None)
}

/// Two files: the first part is large enough to be uploaded in chunks, three small ones follow.
async fn inputs() -> Arc<InMemory> {
    let store = Arc::new(InMemory::new());
    let wide: String = (0..10).map(|i| format!("{i} {}\n", "x".repeat(900_000))).collect();
    store.put(&Path::from("in/a.txt"), PutPayload::from(wide.into_bytes())).await.unwrap();
    store.put(&Path::from("in/b.txt"), PutPayload::from(crate::common::lines(25).into_bytes())).await.unwrap();
    store
}

fn the_job() -> BulkJob {
    BulkJob { codec: Codec::None, ..job("memory://faulty/in", "memory://faulty/out") }
}

async fn attempt(store: Faulty) -> elmo_pipelines::Result<()> {
    let stores = Stores::with_settings([]);
    stores.insert("memory://faulty", Arc::new(store));
    run(&the_job(), &Hashing::default(), &stores).await.map(drop)
}

/// Parts, entries and totals, by name.
async fn outcome(store: &InMemory) -> BTreeMap<String, Bytes> {
    let objects: Vec<ObjectMeta> = store.list(Some(&Path::from("out"))).try_collect().await.unwrap();
    let mut found = BTreeMap::new();
    for meta in objects {
        let bytes = store.get(&meta.location).await.unwrap().bytes().await.unwrap();
        found.insert(meta.location.to_string(), bytes);
    }
    found
}

/// Expires a lease that could not be deleted. The clock of this store cannot be set, so the lease is deleted; another
/// test takes over one that has expired.
async fn a_minute_later(store: &InMemory) {
    let lock = Path::from("out/_elmo/lock");
    if store.head(&lock).await.is_ok() {
        store.delete(&lock).await.unwrap();
    }
}

async fn undisturbed() -> BTreeMap<String, Bytes> {
    let store = inputs().await;
    attempt(Faulty::new(&store, fine())).await.unwrap();
    let calm = outcome(&store).await;
    let names: Vec<String> = calm.keys().map(|name| plain(name)).collect();
    let expected = [
        "out/_elmo/done.json",
        "out/_elmo/job.json",
        "out/_elmo/part-00000.json",
        "out/_elmo/part-00001.json",
        "out/_elmo/part-00002.json",
        "out/_elmo/part-00003.json",
        "out/part-00000.parquet",
        "out/part-00001.parquet",
        "out/part-00002.parquet",
        "out/part-00003.parquet",
    ];
    assert_eq!(names, expected);
    let first = calm.iter().find(|(name, _)| plain(name) == "out/part-00000.parquet");
    assert!(first.is_some_and(|(_, bytes)| bytes.len() > 8 << 20), "not large enough to be uploaded in chunks");
    calm
}

/// `job.json` holds the version of each input, which differs in every run of this test.
fn without_job(mut objects: BTreeMap<String, Bytes>) -> BTreeMap<String, Bytes> {
    objects.remove("out/_elmo/job.json");
    objects
}

#[tokio::test(flavor = "multi_thread")]
async fn any_request_may_fail() {
    let calm = without_job(undisturbed().await);
    for fault in [Fault::Before, Fault::After] {
        let mut request = 0;
        loop {
            let store = inputs().await;
            let faulty = Faulty::new(&store, Arc::new(move |n| if n == request { fault } else { Fault::None }));
            let requests = Arc::clone(&faulty.requests);
            if let Err(error) = attempt(faulty).await {
                assert_eq!(error.exit(), Exit::Storage, "request {request}, {fault:?}: {error}");
            }
            if requests.load(Ordering::SeqCst) <= request {
                break;
            }
            a_minute_later(&store).await;
            attempt(Faulty::new(&store, fine())).await.unwrap();
            assert!(without_job(outcome(&store).await) == calm, "request {request}, {fault:?}");
            request += 1;
        }
        assert!(request > 20, "only {request} requests were seen");
    }
}

/// The connection breaks once in every request that creates, changes or deletes something, before or after it was
/// applied. The job survives, and does not take its own objects for another job's.
#[tokio::test(flavor = "multi_thread")]
async fn broken_connections_do_not_end_a_job() {
    let calm = without_job(undisturbed().await);
    for which in 0..2 {
        for done in [false, true] {
            let store = inputs().await;
            let plan = move |n| if n % 2 == which { Fault::Reset { done } } else { Fault::None };
            attempt(Faulty::new(&store, Arc::new(plan))).await.unwrap();
            assert!(without_job(outcome(&store).await) == calm, "{which}, {done}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_requests_may_fail() {
    let calm = without_job(undisturbed().await);
    for seed in 0..20_u64 {
        let store = inputs().await;
        let mut runs = 0;
        loop {
            let plan = move |n: u64| match mixed(seed * 1_000_003 + runs * 1009 + n) % 40 {
                0 | 1 => Fault::Before,
                2 | 3 => Fault::After,
                _ => Fault::None,
            };
            match attempt(Faulty::new(&store, Arc::new(plan))).await {
                Ok(()) => break,
                Err(error) => assert_eq!(error.exit(), Exit::Storage, "{error}"),
            }
            a_minute_later(&store).await;
            runs += 1;
            assert!(runs < 500, "the job never ends");
        }
        let mut found = without_job(outcome(&store).await);
        found.remove("out/_elmo/lock");
        assert!(found == calm, "seed {seed}, after {runs} failures");
    }
}

/// SplitMix64.
fn mixed(n: u64) -> u64 {
    let z = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_that_ends_early_does_not_change_a_job() {
    let calm = without_job(undisturbed().await);
    let store = inputs().await;
    // Memory answers at once.
    let (seen, second) = (Arc::clone(&store), Path::from("out/_elmo/part-00001.json"));
    let two_are_durable = move || seen.head(&second).now_or_never().is_some_and(|found| found.is_ok());
    let stop = move |_| if two_are_durable() { Fault::Before } else { Fault::None };
    attempt(Faulty::new(&store, Arc::new(stop))).await.unwrap_err();
    a_minute_later(&store).await;
    let short = attempt(Faulty::new(&store, Arc::new(|_| Fault::Short))).await.unwrap_err();
    assert!(matches!(short.module(), Some(ManifestError::Differs { .. })), "{short}");
    assert!(short.to_string().contains("b.txt: removed since"), "{short}");
    a_minute_later(&store).await;
    attempt(Faulty::new(&store, fine())).await.unwrap();
    assert!(without_job(outcome(&store).await) == calm);
}

fn nothing() -> elmo_pipelines::bulk::manifest::Job {
    serde_json::from_str(r#"{"settings": {}, "inputs": []}"#).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn one_job_at_a_time_in_an_object_store() {
    let store = Arc::new(InMemory::new());
    let stores = Stores::with_settings([]);
    stores.insert("memory://two", Arc::<InMemory>::clone(&store));
    let output = stores.locate("memory://two/out").unwrap();
    let mut first = Manifest::open(&output, &nothing(), false).await.unwrap();
    let second = Manifest::open(&output, &nothing(), false).await.unwrap_err();
    assert!(matches!(&second, ManifestError::Locked { holder, .. } if holder.contains("last heard of")), "{second}");
    a_minute_later(&store).await;
    let mut second = Manifest::open(&output, &nothing(), false).await.unwrap();
    let entry = |part: usize, sha256: &str| {
        let counts = elmo_pipelines::bulk::manifest::Counts::default();
        let file = format!("part-{part:05}.parquet");
        elmo_pipelines::bulk::manifest::PartEntry {
            file,
            start: Default::default(),
            end: Default::default(),
            last: false,
            bytes: 1,
            sha256: sha256.to_owned(),
            rows_digest: None,
            counts,
        }
    };
    second.append(entry(0, "a")).await.unwrap();
    // The same entry twice is harmless, a different one is not.
    first.append(entry(0, "a")).await.unwrap();
    second.append(entry(1, "b")).await.unwrap();
    let overtaken = first.append(entry(1, "c")).await.unwrap_err();
    assert!(matches!(overtaken, ManifestError::Overtaken { .. }), "{overtaken}");
    second.close().await;
    Manifest::open(&output, &nothing(), false).await.unwrap().close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_is_refused_gives_the_lock_back() {
    let store = inputs().await;
    attempt(Faulty::new(&store, fine())).await.unwrap();
    let stores = Stores::with_settings([]);
    stores.insert("memory://faulty", Arc::<InMemory>::clone(&store));
    let other = BulkJob { rows_per_file: Some(3), ..the_job() };
    for _ in 0..2 {
        let refused = run(&other, &Hashing::default(), &stores).await.unwrap_err();
        assert!(matches!(refused.module(), Some(ManifestError::Differs { .. })), "{refused}");
    }
}

/// In such a store there is no lock, so nothing is written.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_without_conditional_writes_is_rejected() {
    for checks in [false, true] {
        let store = Arc::new(Unconditional { inner: InMemory::new(), checks });
        store.inner.put(&Path::from("in/a.txt"), crate::common::lines(25).into()).await.unwrap();
        let stores = Stores::with_settings([]);
        stores.insert("memory://faulty", Arc::<Unconditional>::clone(&store));
        let error = run(&the_job(), &Hashing::default(), &stores).await.unwrap_err();
        assert_eq!(error.exit(), Exit::Storage);
        let report = error.report();
        assert!(report.starts_with("memory://faulty/out/_elmo/probe: the object store does not honour"), "{report}");
        assert!(report.contains("(If-None-Match): ") && report.contains(" concurrent creates"), "{report}");
        assert!(error.help().unwrap().contains("supports conditional writes"), "{error:?}");
        assert!(outcome(&store.inner).await.is_empty());
    }
}

/// A job stops when all that is left of a part is one request, for longer than its lease lasts. Another job takes over
/// and begins anew with other settings. The request of the first job then fails, and changes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_lost_its_lease_replaces_no_part_of_its_successor() {
    // The first part is uploaded in chunks, or in one request.
    for input in ["in/a.txt", "in/b.txt"] {
        let shared = Arc::new(Shared::default());
        let from = inputs().await.get(&Path::from(input)).await.unwrap().bytes().await.unwrap();
        shared.inner.put(&Path::from("in/text.txt"), from.into()).await.unwrap();
        let gate = Arc::new(Gate { reached: Semaphore::new(0), released: Semaphore::new(0) });
        let stores = |gate| {
            let stores = Stores::with_settings([]);
            stores.insert_with_uploads("memory://faulty", Arc::new(View { shared: Arc::clone(&shared), gate }));
            stores
        };
        let (frozen, successor) = (stores(Some(Arc::clone(&gate))), stores(None));
        let first = tokio::spawn(async move { run(&the_job(), &Hashing::default(), &frozen).await });
        gate.reached.acquire().await.unwrap().forget();

        let other = BulkJob { rows_per_file: Some(9), overwrite: true, ..the_job() };
        run(&other, &Hashing::default(), &successor).await.unwrap();
        let written = outcome(&shared.inner).await;
        gate.released.add_permits(1);
        let error = first.await.unwrap().unwrap_err();
        assert!(matches!(error.module(), Some(ManifestError::Overtaken { .. })), "{input}: {error}");
        assert!(outcome(&shared.inner).await == written, "{input}: a part was replaced");
        assert!(shared.uploads.lock().unwrap().is_empty(), "{input}: an upload was left behind");
    }
}
