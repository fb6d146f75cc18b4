//! The chain of one partition, and the request that extends it.

use std::{fmt, sync::Arc, time::Duration};

use object_store::PutMode;
use tokio::sync::Semaphore;

use super::{ChainError, ChainId, EncodedFile, Hint, HintCheck, Patience, end::Head, objects, patience::Outage};
use crate::{
    crash::stream as crash,
    reply::summary,
    stores::{Location, StoreError},
    stream::clock,
};

/// How long a partition waits for its `head.json`, which is a hint only.
const HEAD: Duration = Duration::from_secs(5);

/// The chain of a partition, as far as this process knows it.
pub struct Chain {
    pub(super) id: Arc<ChainId>,
    pub(super) end: i64,
    pub(super) newest: Option<i64>,
    pub(super) is_new: bool,
    pub(super) found: HintCheck,
    pub(super) patience: Patience,
    /// Files on the local disk that are in memory while they are sent.
    pub(super) loads: Arc<Semaphore>,
}

impl fmt::Debug for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chain").field("partition", &self.id.partition).field("end", &self.end).finish_non_exhaustive()
    }
}

/// What became of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Published {
    /// It is in the dataset, and durable.
    Ours {
        /// Its address within the output.
        key: String,
        /// The end of the chain, which is that of the file.
        end: i64,
        /// Requests that failed before.
        retries: u64,
        /// It existed: the reply to an earlier request was lost.
        existed: bool,
    },
    /// Another writer has published these offsets. The file is not in the dataset and cannot be; messages below `end` are,
    /// and are dropped. Whether the partition is still assigned to this process has to be asked.
    Foreign {
        /// The end of the chain, as far as it is known now.
        end: i64,
    },
}

impl Chain {
    /// For [`OpenFile::new`](super::OpenFile::new).
    pub fn id(&self) -> &Arc<ChainId> {
        &self.id
    }

    /// The end of the chain: the start of the next object.
    pub fn end(&self) -> i64 {
        self.end
    }

    /// Whether the hint of the consumer group was right when the chain was opened.
    pub fn found(&self) -> &HintCheck {
        &self.found
    }

    /// Whether this process has begun it, when it was opened, and there is no object: nothing is lost before its end.
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// What the consumer group may commit; `None` before the first object.
    pub fn hint(&self) -> Option<Hint> {
        let object = self.id.layout.key(&self.id.partition, self.newest?);
        Some(Hint { end: self.end, object })
    }

    /// Publishes a file by one conditional request, which is repeated for as long as the store fails. On a local disk the
    /// file and new folders are synced before this returns.
    ///
    /// Dropping the future gives up; whether the file was published by then shows when it is published again, or when the
    /// chain is opened again. A file that does not begin at the end of the chain is [`Published::Foreign`]: the file
    /// before it was.
    ///
    /// # Errors
    /// [`ChainError::Damaged`] when there is an object of this name that is none of a stream, and for a file that covers no
    /// offset; [`ChainError::Store`] when
    /// the store does not support the request or a local file cannot be synced, [`ChainError::Spill`] when the file cannot
    /// be read from the local disk.
    pub async fn publish(&mut self, file: &EncodedFile) -> Result<Published, ChainError> {
        self.publish_watched(file, |_| (), || ()).await
    }

    /// As [`publish`](Self::publish). While the file is read from the local disk into memory and sent, what `hold` returns for
    /// its size is held. `repeats` is called whenever the request is repeated after a failure.
    ///
    /// # Errors
    /// As [`publish`](Self::publish).
    pub async fn publish_watched<G>(
        &mut self,
        file: &EncodedFile,
        hold: impl Fn(u64) -> G,
        repeats: impl Fn(),
    ) -> Result<Published, ChainError> {
        let span = file.span();
        if span.start != self.end {
            return Ok(Published::Foreign { end: self.end });
        }
        let location = self.id.layout.object(&self.id.partition, span.start);
        if span.end <= span.start {
            // Its name would be that of the next object, which then could never be created.
            let reason = "a file must cover at least one offset".to_owned();
            return Err(ChainError::Damaged { file: location.to_string(), reason });
        }
        let mut outage = Outage::new(self.patience);
        let created = loop {
            match self.create(&location, file, &hold).await {
                Ok(Some(created)) => break created,
                // Another create was under way and failed, or the object was deleted. Not a failure, but not to be asked
                // for without a pause either.
                Ok(None) => clock::sleep(self.patience.first).await,
                Err(error) => {
                    outage.wait(&location, error).await?;
                    repeats();
                }
            }
        };
        let retries = outage.over(&location);
        (self.newest, self.end) = (Some(span.start), created.end());
        let existed = match created {
            Created::Foreign { end } => return Ok(Published::Foreign { end }),
            Created::Ours { existed, .. } => existed,
        };
        let key = self.id.layout.key(&self.id.partition, span.start);
        self.write_head(&key).await;
        Ok(Published::Ours { key, end: self.end, retries, existed })
    }

    /// One attempt; `None` when it has to be repeated although nothing failed.
    async fn create<G>(
        &self,
        location: &Location,
        file: &EncodedFile,
        hold: &impl Fn(u64) -> G,
    ) -> Result<Option<Created>, ChainError> {
        // Of files on the disk only a few are in memory at once, also while all requests fail.
        let permit = match file.memory() {
            0 => Some((self.loads.acquire().await.ok(), hold(file.bytes()))),
            _ => None,
        };
        let bytes = file.read().await?;
        crash::before_put();
        let put = location.put(bytes, PutMode::Create).await;
        drop(permit);
        let created = match put {
            Ok(_) => Created::Ours { end: file.span().end, existed: false },
            Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }) => {
                let Some(found) = objects::read(location, &self.id.partition).await? else { return Ok(None) };
                let ours = file.span();
                let is_ours = (&ours.writer, ours.attempt) == (&found.writer, found.attempt);
                match is_ours {
                    true => Created::Ours { end: found.end, existed: true },
                    false => Created::Foreign { end: found.end },
                }
            }
            Err(error) if is_too_large(&error) => {
                return Err(ChainError::TooLarge { file: location.to_string(), bytes: file.bytes() });
            }
            Err(error) => return Err(StoreError::request("create", location, error).into()),
        };
        // That of another writer too: the next object begins where it ends, and must not outlive it.
        sync(location).await?;
        crash::after_put();
        Ok(Some(created))
    }

    /// Writes the hint for those who have none of the consumer group. Another writer may overwrite it with an older one.
    async fn write_head(&self, key: &str) {
        let head = Head { end: self.end, object: key.to_owned() };
        // Numbers and strings are always serialised.
        let bytes = serde_json::to_vec(&head).unwrap_or_default();
        let location = self.id.layout.head(&self.id.partition);
        let put = location.put(bytes.into(), PutMode::Overwrite);
        let error = match clock::until(clock::now() + HEAD, put).await {
            Some(Ok(_)) => return,
            Some(Err(error)) => summary(&error),
            None => "no answer".to_owned(),
        };
        tracing::debug!(file = %location, error, "not written; recovery without a committed offset will list more");
    }
}

/// Whether the store takes no object of this size: the codes of S3 and Google, and of Azure.
fn is_too_large(error: &object_store::Error) -> bool {
    let shown = error.to_string();
    ["EntityTooLarge", "RequestBodyTooLarge"].iter().any(|code| shown.contains(code))
}

/// The object that has the name of a file.
enum Created {
    Ours { end: i64, existed: bool },
    Foreign { end: i64 },
}

impl Created {
    fn end(&self) -> i64 {
        match self {
            Self::Ours { end, .. } | Self::Foreign { end } => *end,
        }
    }
}

/// Syncs a local file and its folder, on a thread for such work.
pub(super) async fn sync(location: &Location) -> Result<(), StoreError> {
    let Some(path) = location.local_path() else { return Ok(()) };
    let location = location.clone();
    let synced = tokio::task::spawn_blocking(move || location.sync()).await;
    synced.unwrap_or_else(|error| Err(StoreError::local("sync", &path, std::io::Error::other(error))))
}
