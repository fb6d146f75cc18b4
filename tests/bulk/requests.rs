//! The number of requests that a job sends to an object store, and how many of them are concurrent.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use async_trait::async_trait;
use elmo_pipelines::{bulk::BulkJob, stores::Stores};
use futures::{StreamExt, stream, stream::BoxStream};
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, memory::InMemory, path::Path,
};

use crate::common::{Hashing, job, lines, run};

/// An in-memory store that delays its answers and counts requests.
#[derive(Debug, Default)]
struct Slow {
    inner: InMemory,
    requests: AtomicUsize,
    running: AtomicUsize,
    /// Most requests that ran at the same time.
    concurrent: AtomicUsize,
}

impl fmt::Display for Slow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Slow")
    }
}

impl Slow {
    async fn request<T>(&self, work: impl Future<Output = T>) -> T {
        self.requests.fetch_add(1, Ordering::SeqCst);
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.concurrent.fetch_max(running, Ordering::SeqCst);
        // On the single thread of the test, all other tasks send their requests before this one is answered.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        self.running.fetch_sub(1, Ordering::SeqCst);
        work.await
    }

    /// Requests since the last call, and how many ran at the same time.
    fn take(&self) -> (usize, usize) {
        (self.requests.swap(0, Ordering::SeqCst), self.concurrent.swap(0, Ordering::SeqCst))
    }
}

#[async_trait]
impl ObjectStore for Slow {
    async fn put_opts(&self, at: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.request(self.inner.put_opts(at, payload, options)).await
    }

    async fn put_multipart_opts(&self, at: &Path, options: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.request(self.inner.put_multipart_opts(at, options)).await
    }

    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        self.request(self.inner.get_opts(at, options)).await
    }

    fn delete_stream(&self, at: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.requests.fetch_add(1, Ordering::SeqCst);
        self.inner.delete_stream(at)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.requests.fetch_add(1, Ordering::SeqCst);
        stream::iter([self.inner.list(prefix)]).flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.request(self.inner.list_with_delimiter(prefix)).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.request(self.inner.copy_opts(from, to, options)).await
    }
}

const PARTS: usize = 100;

#[tokio::test]
async fn a_job_of_many_parts_is_resumed_with_concurrent_requests() {
    let store = Arc::new(Slow::default());
    store.inner.put(&Path::from("a.txt"), PutPayload::from(lines(PARTS).into_bytes())).await.unwrap();
    let stores = Stores::with_settings([]);
    stores.insert("memory://slow", Arc::<Slow>::clone(&store));
    let job = BulkJob { rows_per_file: Some(1), ..job("memory://slow/a.txt", "memory://slow/out") };
    assert_eq!(run(&job, &Hashing::default(), &stores).await.unwrap().parts, PARTS);
    store.take();
    let report = run(&job, &Hashing::default(), &stores).await.unwrap();
    assert_eq!(report.resumed_rows, PARTS as u64);
    let (requests, concurrent) = store.take();
    // One request per entry; the rest are the input, two listings, job, totals and lock.
    assert!((PARTS..PARTS + 30).contains(&requests), "{requests} requests");
    assert!(concurrent >= 16, "{concurrent} requests at a time");
    // Inputs of a known version are not read again.
    let again = BulkJob { check: true, ..job.clone() };
    run(&again, &Hashing::default(), &stores).await.unwrap();
    let (checked, _) = store.take();
    assert_eq!(checked, requests + PARTS, "a check reads every part once");
    // Deletions are concurrent too.
    run(&BulkJob { overwrite: true, rows_per_file: Some(1000), ..job }, &Hashing::default(), &stores).await.unwrap();
    assert!(store.take().1 >= 16);
}
