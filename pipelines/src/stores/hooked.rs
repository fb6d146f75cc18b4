//! A store in memory for tests, which asks before it answers a request.

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use futures::{StreamExt, TryStreamExt, future::BoxFuture, stream::BoxStream};
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, memory::InMemory, path::Path,
};

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    Read,
    /// For the metadata alone.
    Head,
    Write,
    Delete,
    List,
}

type Hook = Arc<dyn Fn(Asked, Path) -> BoxFuture<'static, Result<()>> + Send + Sync>;

/// Memory with a hook, whose errors are those of the requests.
#[derive(Clone)]
pub(crate) struct Hooked {
    pub(crate) inner: Arc<InMemory>,
    hook: Hook,
}

impl Hooked {
    pub(crate) fn new(hook: impl Fn(Asked, Path) -> BoxFuture<'static, Result<()>> + Send + Sync + 'static) -> Self {
        Self { inner: Arc::default(), hook: Arc::new(hook) }
    }

    async fn ask(&self, asked: Asked, at: &Path) -> Result<()> {
        (self.hook)(asked, at.clone()).await
    }
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hooked")
    }
}

impl fmt::Display for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hooked")
    }
}

#[async_trait]
impl ObjectStore for Hooked {
    async fn put_opts(&self, at: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.ask(Asked::Write, at).await?;
        self.inner.put_opts(at, payload, options).await
    }

    async fn put_multipart_opts(&self, at: &Path, options: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.ask(Asked::Write, at).await?;
        self.inner.put_multipart_opts(at, options).await
    }

    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        self.ask(if options.head { Asked::Head } else { Asked::Read }, at).await?;
        self.inner.get_opts(at, options).await
    }

    fn delete_stream(&self, at: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let store = self.clone();
        let delete = move |path: Result<Path>| {
            let store = store.clone();
            async move {
                let path = path?;
                store.ask(Asked::Delete, &path).await?;
                store.inner.delete(&path).await.map(|()| path)
            }
        };
        at.then(delete).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (store, prefix) = (self.clone(), prefix.cloned());
        let listed = async move {
            store.ask(Asked::List, &prefix.clone().unwrap_or_default()).await?;
            Ok::<_, object_store::Error>(store.inner.list(prefix.as_ref()))
        };
        futures::stream::once(listed).try_flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.ask(Asked::List, prefix.unwrap_or(&Path::default())).await?;
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.ask(Asked::Write, to).await?;
        self.inner.copy_opts(from, to, options).await
    }
}
