//! A store that fails, and two jobs on one output.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use async_trait::async_trait;
use bytes::Bytes;
use elmo_pipelines::{
    Exit,
    bulk::BulkJob,
    bulk::manifest::{Manifest, ManifestError},
    sink::Codec,
    stores::Stores,
};
use futures::{FutureExt, StreamExt, TryStreamExt, stream::BoxStream};
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartId, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, UploadPart,
    client::{HttpError, HttpErrorKind},
    memory::InMemory,
    multipart::{MultipartStore, PartId},
    path::Path,
};
use tokio::sync::Semaphore;

use crate::common::{Hashing, job, run};

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    /// Fine.
    None,
    /// 500, 503, or a timeout before the server did anything.
    Before,
    /// The server did it, but the answer was lost.
    After,
    /// A list ends early, as if there were no more.
    Short,
    /// The connection broke at a request that is not sent again by itself, before or after the server did it.
    Reset { done: bool },
}

/// Which request fails, by its number since the store was made.
type Plan = Arc<dyn Fn(u64) -> Fault + Send + Sync>;

/// Memory, with faults.
#[derive(Clone)]
struct Faulty {
    inner: Arc<InMemory>,
    plan: Plan,
    requests: Arc<AtomicU64>,
}

impl fmt::Debug for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

fn reset() -> object_store::Error {
    let source = HttpError::new(HttpErrorKind::Interrupted, std::io::Error::from(std::io::ErrorKind::ConnectionReset));
    object_store::Error::Generic { store: "faulty", source: Box::new(source) }
}

fn failure() -> object_store::Error {
    object_store::Error::Generic { store: "faulty", source: "503 Service Unavailable".into() }
}

impl Faulty {
    fn new(inner: &Arc<InMemory>, plan: Plan) -> Self {
        Self { inner: Arc::clone(inner), plan, requests: Arc::default() }
    }

    fn fault(&self) -> Fault {
        (self.plan)(self.requests.fetch_add(1, Ordering::SeqCst))
    }

    async fn request<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        match self.fault() {
            Fault::Before => Err(failure()),
            Fault::After => work.await.and(Err(failure())),
            Fault::None | Fault::Short | Fault::Reset { .. } => work.await,
        }
    }

    /// One that stores do not send again by themselves.
    async fn change<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        match (self.plan)(self.requests.load(Ordering::SeqCst)) {
            Fault::Reset { done } => {
                self.requests.fetch_add(1, Ordering::SeqCst);
                if done { work.await.and(Err(reset())) } else { Err(reset()) }
            }
            _ => self.request(work).await,
        }
    }
}

#[async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(&self, at: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        let overwrites = options.mode == PutMode::Overwrite;
        let put = self.inner.put_opts(at, payload, options);
        if overwrites { self.request(put).await } else { self.change(put).await }
    }

    async fn put_multipart_opts(&self, at: &Path, options: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        let upload = self.request(self.inner.put_multipart_opts(at, options)).await?;
        Ok(Box::new(FaultyUpload { upload, store: self.clone() }))
    }

    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        self.request(self.inner.get_opts(at, options)).await
    }

    fn delete_stream(&self, at: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let store = self.clone();
        at.then(move |path| {
            let store = store.clone();
            async move {
                let path = path?;
                store.change(store.inner.delete(&path)).await.map(|()| path)
            }
        })
        .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.fault() {
            Fault::None | Fault::Reset { .. } => self.inner.list(prefix),
            Fault::Short => self.inner.list(prefix).take(1).boxed(),
            Fault::Before | Fault::After => futures::stream::once(async { Err(failure()) }).boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        match self.fault() {
            Fault::None | Fault::Reset { .. } => self.inner.list_with_delimiter(prefix).await,
            Fault::Short => {
                let mut list = self.inner.list_with_delimiter(prefix).await?;
                list.objects.truncate(1);
                Ok(list)
            }
            Fault::Before | Fault::After => Err(failure()),
        }
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.request(self.inner.copy_opts(from, to, options)).await
    }
}

#[derive(Debug)]
struct FaultyUpload {
    upload: Box<dyn MultipartUpload>,
    store: Faulty,
}

#[async_trait]
impl MultipartUpload for FaultyUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let part = self.upload.put_part(data);
        let store = self.store.clone();
        Box::pin(async move { store.request(part).await })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        self.store.request(self.upload.complete()).await
    }

    async fn abort(&mut self) -> Result<()> {
        self.upload.abort().await
    }
}

fn fine() -> Plan {
    Arc::new(|_| Fault::None)
}

/// Two files; the first part is large enough to go up in pieces, three small ones follow.
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

/// A minute goes by: a lease that nobody could give back is nobody's. This store's clock cannot be moved, so it is taken
/// away; that an old one is taken over is tested beside it.
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
    let names: Vec<&str> = calm.keys().map(String::as_str).collect();
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
    assert!(calm["out/part-00000.parquet"].len() > 8 << 20, "not large enough to go up in pieces");
    calm
}

/// `job.json` names the version of each input, which every run of this test gives anew.
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

/// Every request that creates, changes or deletes something breaks once, some of them before and some after they were
/// applied; the job does not end, and nobody else was there.
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
    assert!(short.to_string().contains("b.txt: not there now"), "{short}");
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
            counts,
        }
    };
    second.enter(entry(0, "a")).await.unwrap();
    // The same work twice is no harm, other work is.
    first.enter(entry(0, "a")).await.unwrap();
    second.enter(entry(1, "b")).await.unwrap();
    let overtaken = first.enter(entry(1, "c")).await.unwrap_err();
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

/// A store that accepts conditional writes and does not honour them.
#[derive(Debug)]
struct Unconditional {
    inner: InMemory,
    /// It checks the condition, but another request may come before the write.
    checks: bool,
}

impl fmt::Display for Unconditional {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Unconditional")
    }
}

#[async_trait]
impl ObjectStore for Unconditional {
    async fn put_opts(&self, at: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        if self.checks && options.mode == PutMode::Create && self.inner.head(at).await.is_ok() {
            return Err(object_store::Error::AlreadyExists { path: at.to_string(), source: "there".into() });
        }
        tokio::task::yield_now().await;
        self.inner.put(at, payload).await
    }

    async fn put_multipart_opts(&self, at: &Path, options: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(at, options).await
    }

    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        self.inner.get_opts(at, options).await
    }

    fn delete_stream(&self, at: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(at)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
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

/// A store whose uploads have ids, as two jobs see it.
#[derive(Debug, Default)]
struct Shared {
    inner: InMemory,
    /// Chunks by number, of uploads by id.
    uploads: Mutex<BTreeMap<String, BTreeMap<usize, PutPayload>>>,
}

/// One job's view of a store: its requests that publish a part may be held back, and to it every lease has expired.
#[derive(Debug, Clone)]
struct View {
    shared: Arc<Shared>,
    gate: Option<Arc<Gate>>,
}

/// Where requests wait.
#[derive(Debug)]
struct Gate {
    reached: Semaphore,
    released: Semaphore,
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("View")
    }
}

impl View {
    /// A job that stops before the store sees the request.
    async fn freeze(&self) {
        if let Some(gate) = &self.gate {
            gate.reached.add_permits(1);
            gate.released.acquire().await.unwrap().forget();
        }
    }

    fn no_upload(id: &str) -> object_store::Error {
        object_store::Error::NotFound { path: id.to_owned(), source: "NoSuchUpload".into() }
    }
}

#[async_trait]
impl ObjectStore for View {
    async fn put_opts(&self, at: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        if at.extension() == Some("parquet") {
            self.freeze().await;
        }
        self.shared.inner.put_opts(at, payload, options).await
    }

    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        panic!("an upload without an id");
    }

    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        let mut found = self.shared.inner.get_opts(at, options).await?;
        if at.filename() == Some("lock") {
            found.meta.last_modified -= chrono::TimeDelta::seconds(61);
        }
        Ok(found)
    }

    fn delete_stream(&self, at: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.shared.inner.delete_stream(at)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.shared.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.shared.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.shared.inner.copy_opts(from, to, options).await
    }
}

/// As S3 does it: an upload that was aborted cannot be completed.
#[async_trait]
impl MultipartStore for View {
    async fn create_multipart(&self, _: &Path) -> Result<MultipartId> {
        let mut uploads = self.shared.uploads.lock().unwrap();
        let id = format!("upload {}", uploads.len());
        uploads.insert(id.clone(), BTreeMap::new());
        Ok(id)
    }

    async fn put_part(&self, _: &Path, id: &MultipartId, index: usize, data: PutPayload) -> Result<PartId> {
        let mut uploads = self.shared.uploads.lock().unwrap();
        uploads.get_mut(id).ok_or_else(|| Self::no_upload(id))?.insert(index, data);
        Ok(PartId { content_id: index.to_string() })
    }

    async fn complete_multipart(&self, at: &Path, id: &MultipartId, parts: Vec<PartId>) -> Result<PutResult> {
        self.freeze().await;
        let chunks = self.shared.uploads.lock().unwrap().remove(id).ok_or_else(|| Self::no_upload(id))?;
        assert_eq!(parts.len(), chunks.len());
        let bytes = chunks.into_values().flatten().collect::<PutPayload>();
        self.shared.inner.put(at, bytes).await
    }

    async fn abort_multipart(&self, _: &Path, id: &MultipartId) -> Result<()> {
        self.shared.uploads.lock().unwrap().remove(id).map(drop).ok_or_else(|| Self::no_upload(id))
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
