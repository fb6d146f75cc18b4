//! Files that a worker stages for a COPY and that the client publishes.
//!
//! A worker sends a [`Record`] before the first byte of each file, so that the client can delete it if the worker is lost, and
//! another one when the file is complete. Only the client publishes, after all workers have succeeded; a worker that is resumed
//! too late cannot. See [`Staged`].

use std::{
    fs, io,
    path::{Path as FilePath, PathBuf},
    sync::Arc,
};

use arrow::{
    array::{AsArray, RecordBatch, StringArray},
    datatypes::{DataType, Field, Schema, SchemaRef},
};
use async_trait::async_trait;
use datafusion::common::{DataFusionError, Result as PlanResult, plan_datafusion_err};
use futures::{StreamExt, stream};
use object_store::{MultipartUpload, ObjectStoreExt, PutPayload, PutResult, Result, UploadPart, path::Path};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::{error::external, output_folder::remove_empty_folders};
use crate::{
    sink::Staged,
    stores::{
        Location, Stores,
        local::hidden_name,
        uploads::{self, Handle},
    },
};

/// Files that are deleted at the same time.
const DISCARDS: usize = 32;

/// A message from a worker about a COPY.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Record {
    /// A file is about to be written.
    Begun(UnnamedFile),
    /// A file is complete.
    Complete(UnnamedFile),
    /// All files of the task are complete. They have this many rows in total.
    Done { rows: u64 },
}

/// A staged file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct UnnamedFile {
    /// `scheme://bucket/`
    pub(super) origin: String,
    /// Path in the store after publication.
    pub(super) path: String,
    pub(super) staged: Staged,
}

impl UnnamedFile {
    /// # Errors
    /// If its store cannot be set up.
    pub(super) fn location(&self, stores: &Stores) -> PlanResult<Location> {
        let path = Path::parse(&self.path).map_err(external)?;
        Ok(stores.locate(&self.origin).map_err(external)?.at(path))
    }

    fn has_name_of(&self, other: &Self) -> bool {
        (&self.origin, &self.path) == (&other.origin, &other.path)
    }
}

impl Record {
    /// One column of JSON texts.
    pub(crate) fn schema() -> SchemaRef {
        Arc::new(Schema::new(vec![Field::new("record", DataType::Utf8, false)]))
    }

    pub(crate) fn to_batch(&self) -> PlanResult<RecordBatch> {
        let json = serde_json::to_string(self).map_err(external)?;
        Ok(RecordBatch::try_new(Self::schema(), vec![Arc::new(StringArray::from(vec![json]))])?)
    }

    pub(crate) fn of_batch(batch: &RecordBatch) -> PlanResult<Vec<Self>> {
        let records = batch.columns().first().and_then(|column| column.as_string_opt::<i32>());
        let records =
            records.ok_or_else(|| plan_datafusion_err!("a worker of another version of elmo wrote the files"))?;
        records.iter().flatten().map(|json| serde_json::from_str(json).map_err(external)).collect()
    }
}

/// Where a worker writes the files of a task.
#[derive(Debug)]
pub(super) struct Unnamed {
    stores: Stores,
    /// Tells attempts to write the same file apart.
    attempt: u32,
    records: UnboundedSender<Record>,
}

impl Unnamed {
    /// The receiver closes when all writers are dropped.
    pub(super) fn new(stores: &Stores, attempt: u32) -> (Arc<Self>, UnboundedReceiver<Record>) {
        let (records, receiver) = unbounded_channel();
        (Arc::new(Self { stores: stores.clone(), attempt, records }), receiver)
    }

    /// Begins a file.
    pub(super) async fn begin(self: &Arc<Self>, origin: &str, path: &Path) -> Result<Box<dyn MultipartUpload>> {
        let at = |staged| UnnamedFile { origin: origin.to_owned(), path: path.to_string(), staged };
        let unknown = |error: DataFusionError| object_store::Error::Generic { store: "elmo", source: Box::new(error) };
        let location = at(Staged::Local { name: String::new() }).location(&self.stores).map_err(unknown)?;
        let is_local = location.local_path().is_some();
        let (file, upload, handle) = if is_local {
            let staged = Staged::of_attempt(&location, self.attempt, None);
            let file = at(staged.clone());
            self.send(Record::Begun(file.clone()));
            let hidden = staged.hidden(&location).unwrap_or(location);
            (file, hidden.store.put_multipart(&hidden.path).await?, None)
        } else {
            let (upload, handle) = uploads::start(&location).await?;
            let handle = handle.ok_or_else(|| object_store::Error::NotImplemented {
                operation: "finishing an upload of another process".to_owned(),
                implementer: location.store.to_string(),
            })?;
            let file = at(Staged::Upload { id: handle.id().clone(), chunks: Vec::new() });
            self.send(Record::Begun(file.clone()));
            (file, upload, Some(handle))
        };
        Ok(Box::new(UnnamedUpload { upload, handle, file, to: Arc::clone(self) }))
    }

    /// Writes a small file.
    pub(super) async fn write(self: &Arc<Self>, origin: &str, path: &Path, content: PutPayload) -> Result<()> {
        let mut upload = self.begin(origin, path).await?;
        let written = async {
            // Completing an upload without chunks creates an empty file.
            if content.content_length() > 0 {
                upload.put_part(content).await?;
            }
            upload.complete().await.map(drop)
        };
        let written = written.await;
        if written.is_err() {
            // The error that led here is the one to report.
            let _ = upload.abort().await;
        }
        written
    }

    fn send(&self, record: Record) {
        // The receiver is dropped with the query.
        let _ = self.records.send(record);
    }
}

/// An upload that is staged, not published, when its writer completes it.
#[derive(Debug)]
struct UnnamedUpload {
    upload: Box<dyn MultipartUpload>,
    /// Of a store.
    handle: Option<Handle>,
    file: UnnamedFile,
    to: Arc<Unnamed>,
}

#[async_trait]
impl MultipartUpload for UnnamedUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        self.upload.put_part(data)
    }

    async fn complete(&mut self) -> Result<PutResult> {
        match (&self.handle, &mut self.file.staged) {
            (Some(handle), Staged::Upload { chunks, .. }) => {
                let sent = handle.chunks();
                *chunks = sent.ok_or_else(|| object_store::Error::Generic {
                    store: "upload",
                    source: "a chunk of the upload is missing".into(),
                })?;
            }
            _ => drop(self.upload.complete().await?),
        }
        self.to.send(Record::Complete(self.file.clone()));
        Ok(PutResult { e_tag: None, version: None })
    }

    async fn abort(&mut self) -> Result<()> {
        self.upload.abort().await
    }
}

/// The files that a task has begun.
#[derive(Debug, Default)]
pub(crate) struct UnnamedFiles {
    begun: Vec<UnnamedFile>,
    complete: Vec<UnnamedFile>,
}

impl UnnamedFiles {
    pub(crate) fn add(&mut self, record: &Record) {
        match record {
            Record::Begun(file) => self.begun.push(file.clone()),
            Record::Complete(file) => {
                self.begun.retain(|begun| !(begun.has_name_of(file) && begun.staged.is_of_attempt(&file.staged)));
                self.complete.push(file.clone());
            }
            Record::Done { .. } => {}
        }
    }

    /// Takes the complete files; `None` if some files are incomplete.
    pub(super) fn take_complete(&mut self) -> Option<Vec<UnnamedFile>> {
        self.begun.is_empty().then(|| std::mem::take(&mut self.complete))
    }

    /// Deletes the files that are not published, and local folders below `folder` that become empty; also `folder` itself if the
    /// flag is set. On failure, hidden files or chunks of uploads remain.
    pub(crate) async fn discard(&mut self, stores: &Stores, folder: Option<&(PathBuf, bool)>) {
        let begun = std::mem::take(&mut self.begun).into_iter().map(|file| (file, false));
        let complete = std::mem::take(&mut self.complete).into_iter().map(|file| (file, true));
        let files: Vec<_> = begun.chain(complete).collect();
        let above: Vec<PathBuf> =
            files.iter().filter_map(|(file, _)| file.location(stores).ok()?.local_path()).collect();
        let discarded = stream::iter(files).map(|(file, is_complete)| async move {
            let location = file.location(stores).ok()?;
            match is_complete {
                true => file.staged.discard_complete(&location).await.ok(),
                false => file.staged.try_discard(&location).await.ok(),
            }
        });
        let failed =
            discarded.buffer_unordered(DISCARDS).filter(|done| std::future::ready(done.is_none())).count().await;
        if failed > 0 {
            // Paths may hold values of rows.
            tracing::warn!("unfinished files of a COPY that could not be deleted: {failed}");
        }
        if let Some((root, with_root)) = folder {
            remove_empty_folders(root, *with_root, above);
        }
    }
}

/// Deletes the hidden files of an attempt to write a file, or files below a folder.
///
/// # Errors
/// If a folder cannot be read, or a file not be deleted.
pub(super) fn sweep(target: &FilePath, attempt: u32) -> io::Result<()> {
    let folder = if target.is_dir() { target } else { target.parent().unwrap_or(target) };
    let (staged, is_folder) = (hidden_name("", attempt), target.is_dir());
    // A file has its folder for itself only if it is the target.
    let name = if is_folder { None } else { target.file_name().map(|name| name.to_string_lossy().into_owned()) };
    let is_one = |found: &str| {
        // As long as it is written, it is hidden once more; see the local store.
        let found = found.split_once('#').map_or(found, |(found, _)| found.strip_prefix('.').unwrap_or(found));
        match &name {
            Some(name) => found == hidden_name(name, attempt),
            None => found.starts_with('.') && found.ends_with(staged.trim_start_matches('.')),
        }
    };
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            if is_folder && entry.file_type()?.is_dir() {
                folders.push(entry.path());
            } else if entry.file_name().to_str().is_some_and(is_one) {
                match fs::remove_file(entry.path()) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_files_of_one_attempt_are_swept() {
        let folder = tempfile::tempdir().unwrap();
        let all = [
            "a.csv",
            ".a.csv.staged-1",
            "..a.csv.staged-1#1",
            "..a.csv.staged-1#12",
            ".a.csv.staged-11",
            ".b.csv.staged-1",
            ".a.csv.staged-2",
            "p=1/.c.csv.staged-1",
            "p=1/..c.csv.staged-1#3",
            "p=1/c.csv",
        ];
        let left = |target: &str, attempt| {
            fs::create_dir_all(folder.path().join("p=1")).unwrap();
            all.iter().for_each(|file| fs::write(folder.path().join(file), "").unwrap());
            sweep(&folder.path().join(target), attempt).unwrap();
            all.into_iter().filter(|file| folder.path().join(file).exists()).collect::<Vec<_>>()
        };
        assert_eq!(left("", 1), ["a.csv", ".a.csv.staged-11", ".a.csv.staged-2", "p=1/c.csv"]);
        let others = [
            "a.csv",
            ".a.csv.staged-11",
            ".b.csv.staged-1",
            ".a.csv.staged-2",
            "p=1/.c.csv.staged-1",
            "p=1/..c.csv.staged-1#3",
            "p=1/c.csv",
        ];
        assert_eq!(left("a.csv", 1), others);
        assert_eq!(left("a.csv", 3), all);
        assert!(sweep(&folder.path().join("none/"), 1).is_ok());
    }
}
