//! Failing stores, and two jobs on one output.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering},
};

use bytes::Bytes;
use elmo_pipelines::{
    Exit,
    bulk::{
        BulkJob,
        dry_run::dry_run,
        manifest::{Manifest, ManifestError},
    },
    sink::Codec,
    stores::Stores,
};
use futures::{FutureExt, TryStreamExt};
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt, PutPayload, memory::InMemory, path::Path};

use crate::{
    common::{Hashing, job, plain, run},
    faulty::{Fault, Faulty, Plan},
    frozen::{At, Gate, Shared, View},
    repair::other_hardware,
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
/// and starts over with other settings. The request of the first job then fails, and changes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_lost_its_lease_replaces_no_part_of_its_successor() {
    // The first part is uploaded in chunks, or in one request.
    for input in ["in/a.txt", "in/b.txt"] {
        let shared = Arc::new(Shared::default());
        let from = inputs().await.get(&Path::from(input)).await.unwrap().bytes().await.unwrap();
        shared.inner.put(&Path::from("in/text.txt"), from.into()).await.unwrap();
        let gate = Gate::new(At::Publishing);
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

/// What lies in the output when a job begins that will be stopped.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Before {
    Nothing,
    /// A part is lost, and an entry is torn.
    Damage,
    /// A job of other settings, which the job that is stopped overwrites.
    Other,
}

fn small_job(rows_per_file: u64, overwrite: bool) -> BulkJob {
    let input = "memory://faulty/in/b.txt".to_owned();
    BulkJob { inputs: vec![input], rows_per_file: Some(rows_per_file), overwrite, ..the_job() }
}

async fn prepare(before: Before) -> Arc<Shared> {
    let shared = Arc::new(Shared::default());
    let (rows, store) = (crate::common::lines(25).into_bytes(), &shared.inner);
    store.put(&Path::from("in/b.txt"), rows.into()).await.unwrap();
    if before == Before::Nothing {
        return shared;
    }
    run(&small_job(10, false), &Hashing::default(), &view(&shared, None)).await.unwrap();
    if before == Before::Damage {
        let found = outcome(store).await;
        let part = found.keys().find(|name| plain(name) == "out/part-00001.parquet").unwrap();
        store.delete(&Path::from(part.as_str())).await.unwrap();
        store.put(&Path::from("out/_elmo/part-00002.json"), "{".into()).await.unwrap();
    }
    shared
}

fn view(shared: &Arc<Shared>, gate: Option<Arc<Gate>>) -> Stores {
    let stores = Stores::with_settings([]);
    stores.insert_with_uploads("memory://faulty", Arc::new(View { shared: Arc::clone(shared), gate }));
    stores
}

/// Stops a job at one request, lets a successor run, and lets the job go on; false when it has fewer requests. Its bits
/// differ from those of the successor, so that whatever it changes shows.
async fn stopped_at(request: u64, before: Before, successor: BulkJob) -> bool {
    let shared = prepare(before).await;
    let gate = Gate::new(At::Request(request));
    let stores = view(&shared, Some(Arc::clone(&gate)));
    let job = small_job(if before == Before::Other { 7 } else { 10 }, before == Before::Other);
    let mut first = tokio::spawn(async move { run(&job, &other_hardware(), &stores).await.map(drop) });
    let is_stopped = tokio::select! {
        _ = &mut first => false,
        reached = gate.reached.acquire() => { reached.unwrap().forget(); true }
    };
    if !is_stopped {
        return false;
    }
    let case = format!("request {request} of a job on {before:?}, before one with {:?}", successor.rows_per_file);
    let succeeded = run(&successor, &Hashing::default(), &view(&shared, None)).await;
    succeeded.unwrap_or_else(|error| panic!("{case}: {error}"));
    let written = outcome(&shared.inner).await;
    // A lease that was renewed less than half a minute ago is not read again, because no other job can have acquired it.
    tokio::time::sleep(std::time::Duration::from_secs(31)).await;
    gate.released.add_permits(1);
    let _ = first.await.unwrap();
    let found = outcome(&shared.inner).await;
    let differing: Vec<&String> =
        found.keys().chain(written.keys()).filter(|name| found.get(*name) != written.get(*name)).collect();
    assert!(differing.is_empty(), "{case}: {differing:?}");
    true
}

/// A job stops anywhere, and goes on after a successor has finished: with the same settings, or with others.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_goes_on_after_its_successor_changes_nothing() {
    let mut cases = Vec::new();
    for (before, successor) in [
        (Before::Nothing, small_job(10, false)),
        (Before::Nothing, small_job(9, true)),
        (Before::Damage, small_job(10, false)),
        (Before::Damage, small_job(9, true)),
        (Before::Other, small_job(10, true)),
        (Before::Other, small_job(9, true)),
    ] {
        // From the first request on it holds the lease, and the cases wait side by side.
        cases.extend((1..100).map(|request| tokio::spawn(stopped_at(request, before, successor.clone()))));
    }
    let mut stopped = 0;
    for case in cases {
        stopped += u32::from(case.await.unwrap());
    }
    assert!(stopped > 6 * 30, "only {stopped} requests were seen");
}

/// A dry run asks what a job would ask, and leaves nothing behind.
#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_probes_the_store() {
    let store = inputs().await;
    let stores = Stores::with_settings([]);
    stores.insert("memory://faulty", Arc::<InMemory>::clone(&store));
    dry_run(&the_job(), &Hashing::default(), &stores).await.unwrap();
    assert!(outcome(&store).await.is_empty());
    for checks in [false, true] {
        let store = Arc::new(Unconditional { inner: InMemory::new(), checks });
        store.inner.put(&Path::from("in/a.txt"), crate::common::lines(25).into()).await.unwrap();
        let stores = Stores::with_settings([]);
        stores.insert("memory://faulty", Arc::<Unconditional>::clone(&store));
        let error = dry_run(&the_job(), &Hashing::default(), &stores).await.unwrap_err();
        assert_eq!(error.exit(), Exit::Storage);
        assert!(error.report().contains("does not honour conditional writes (If-None-Match)"), "{}", error.report());
        assert!(outcome(&store.inner).await.is_empty());
    }
}
