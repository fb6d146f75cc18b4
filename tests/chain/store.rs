//! A store in memory whose requests to create data objects have a fate.

use std::{
    collections::VecDeque,
    fmt,
    future::pending,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use futures::stream::BoxStream;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions,
    PutOptions, PutPayload, PutResult, Result, memory::InMemory, path::Path,
};
use tokio::sync::Notify;

/// What happens to a request that creates a data object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Fine,
    /// Its answer is lost, and it was applied or not.
    Lost {
        applied: bool,
    },
    /// It is never answered: its process is killed meanwhile.
    Hangs {
        applied: bool,
    },
    /// As before, and the request arrives later, when [`Scripted::land`] is called.
    Late,
    /// It fails without being applied, and before it is repeated all late requests arrive.
    Delayed,
    /// 403.
    Forbidden,
    /// The store does not know such requests.
    Unsupported,
    /// 400, with the code of S3 for an object above 5 GiB.
    TooLarge,
}

#[derive(Debug, Default)]
pub(crate) struct Scripted {
    pub(crate) inner: InMemory,
    /// Of the next requests.
    pub(crate) fates: Mutex<VecDeque<Fate>>,
    late: Mutex<Vec<(Path, PutPayload, PutOptions)>>,
    /// A request hangs.
    pub(crate) hangs: Notify,
}

impl Scripted {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    pub(crate) fn then(&self, fates: impl IntoIterator<Item = Fate>) {
        self.fates.lock().unwrap().extend(fates);
    }

    /// Late requests arrive.
    pub(crate) async fn land(&self) {
        let late = std::mem::take(&mut *self.late.lock().unwrap());
        for (at, payload, options) in late {
            // Whether its condition held is nobody's concern any more.
            let _ = self.inner.put_opts(&at, payload, options).await;
        }
    }
}

impl fmt::Display for Scripted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Scripted")
    }
}

fn lost() -> object_store::Error {
    object_store::Error::Generic { store: "scripted", source: "no answer".into() }
}

#[async_trait]
impl ObjectStore for Scripted {
    async fn put_opts(&self, at: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        if at.extension() != Some("parquet") {
            return self.inner.put_opts(at, payload, options).await;
        }
        let fate = self.fates.lock().unwrap().pop_front().unwrap_or(Fate::Fine);
        match fate {
            Fate::Fine => self.inner.put_opts(at, payload, options).await,
            Fate::Lost { applied } => {
                if applied {
                    self.inner.put_opts(at, payload, options).await?;
                }
                Err(lost())
            }
            Fate::Hangs { applied } => {
                if applied {
                    let _ = self.inner.put_opts(at, payload, options).await;
                }
                self.hangs.notify_one();
                pending().await
            }
            Fate::Late => {
                self.late.lock().unwrap().push((at.clone(), payload, options));
                self.hangs.notify_one();
                pending().await
            }
            Fate::Delayed => {
                self.land().await;
                Err(lost())
            }
            Fate::Forbidden => {
                Err(object_store::Error::PermissionDenied { path: at.to_string(), source: "403".into() })
            }
            Fate::TooLarge => {
                let answer = "400 Bad Request: <Error><Code>EntityTooLarge</Code></Error>";
                Err(object_store::Error::Generic { store: "S3", source: answer.into() })
            }
            Fate::Unsupported => Err(object_store::Error::NotSupported { source: "no".into() }),
        }
    }

    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        panic!("a chain is never extended by an upload in parts");
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

    fn list_with_offset(&self, prefix: Option<&Path>, offset: &Path) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
