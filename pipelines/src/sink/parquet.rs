//! The writer of one Parquet file.

use arrow::{array::RecordBatch, datatypes::SchemaRef};
use parquet::errors::ParquetError;

use super::{
    Encoding, Fence, SinkError, Staged,
    groups::Groups,
    publish, staged,
    upload::{Buffering, Upload},
};
use crate::stores::{Location, StoreError, UploadId};

/// A file that is complete.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Written {
    /// Rows in it.
    pub rows: u64,
    /// Its size.
    pub bytes: u64,
    /// Its SHA-256, hexadecimal.
    pub sha256: String,
}

/// Writes one file, which appears complete when the writer is closed by [`create`](Self::create), or by
/// [`complete`](Self::complete) and [`Complete::replace`], and never if it is dropped before.
pub struct PartWriter {
    location: Location,
    groups: Groups,
    upload: Upload,
}

impl std::fmt::Debug for PartWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PartWriter")
            .field("location", &self.location)
            .field("rows", &self.groups.rows())
            .finish_non_exhaustive()
    }
}

impl PartWriter {
    /// Begins a file.
    ///
    /// # Errors
    /// [`SinkError::Encode`] when Parquet has no type for a column.
    pub fn new(
        location: Location,
        schema: &SchemaRef,
        encoding: &Encoding,
        buffering: Buffering,
    ) -> Result<Self, SinkError> {
        let groups = Groups::new(schema, encoding).map_err(|e| error(&location, &e))?;
        let upload = Upload::new(location.clone(), buffering);
        Ok(Self { location, groups, upload })
    }

    /// Begins a file that another process publishes under the name of `location`: see [`Staged`]. Returns the id of the upload,
    /// by which that process can abort it; `None` on a local disk. There `attempt` tells the files of several attempts apart.
    ///
    /// # Errors
    /// As [`PartWriter::new`]; [`SinkError::Store`] when the store fails, or does not know uploads by ids.
    pub async fn staged(
        location: Location,
        schema: &SchemaRef,
        encoding: &Encoding,
        attempt: u32,
    ) -> Result<(Self, Option<UploadId>), SinkError> {
        let groups = Groups::new(schema, encoding).map_err(|e| error(&location, &e))?;
        let (upload, id) = staged::begin(&location, attempt).await?;
        Ok((Self { location: upload.location.clone(), groups, upload }, id))
    }

    /// Finishes a file of [`PartWriter::staged`], with these key-value pairs in its footer. It has no name yet, but is durable.
    ///
    /// # Errors
    /// [`SinkError::Encode`] or [`SinkError::Store`] when the rest cannot be encoded or written. Then there is no file.
    pub async fn stage(mut self, footer: &[(String, String)]) -> Result<(Written, Staged), SinkError> {
        if let Err(error) = self.finish(footer).await {
            self.abort().await;
            return Err(error);
        }
        let (rows, upload) = (self.groups.rows(), self.upload);
        let (bytes, sha256) = upload.digest();
        Ok((Written { rows, bytes, sha256 }, staged::finish(upload).await?))
    }

    /// Adds rows, which other threads encode; waits while as many row groups as allowed are being encoded.
    ///
    /// # Errors
    /// [`SinkError::Encode`] when rows, these or earlier ones, do not match the schema, [`SinkError::Store`] when the store fails.
    pub async fn write(&mut self, batch: &RecordBatch) -> Result<(), SinkError> {
        self.groups.push(batch).await.map_err(|e| error(&self.location, &e))?;
        self.send().await
    }

    /// Hands the bytes of complete row groups to the upload.
    async fn send(&mut self) -> Result<(), SinkError> {
        let bytes = self.groups.take();
        if bytes.is_empty() {
            return Ok(());
        }
        let sent = self.upload.write(bytes.into()).await;
        sent.map_err(|e| StoreError::request("write", &self.location, e).into())
    }

    /// Finishes the file, with these key-value pairs in its footer, and creates it by one conditional request. The file is
    /// durable when this returns. The writer must hold the file as a whole ([`Buffering::Whole`]).
    ///
    /// # Errors
    /// [`SinkError::Exists`] when another file has its name, unless it has the same bytes, as after a retry;
    /// [`SinkError::Encode`] or [`SinkError::Store`] when the rest cannot be encoded or written.
    pub async fn create(mut self, footer: &[(String, String)]) -> Result<Written, SinkError> {
        self.finish(footer).await?;
        let (rows, upload) = (self.groups.rows(), self.upload);
        let (bytes, sha256) = upload.digest();
        publish::create(upload).await?;
        Ok(Written { rows, bytes, sha256 })
    }

    /// Finishes the file, with these key-value pairs in its footer, without publishing it: its bytes are encoded, and all but the last ones
    /// are with the store. `None` if it was cancelled before.
    ///
    /// # Errors
    /// [`SinkError::Encode`] or [`SinkError::Store`] when the rest cannot be encoded or written. Then, and after a cancellation, there is no
    /// file.
    pub async fn complete(
        mut self,
        footer: &[(String, String)],
        cancelled: impl Future<Output = ()>,
    ) -> Result<Option<Complete>, SinkError> {
        let finished = tokio::select! {
            biased;
            () = cancelled => Ok(false),
            finished = self.finish(footer) => finished.map(|()| true),
        };
        if let Ok(true) = finished {
            let (rows, upload) = (self.groups.rows(), self.upload);
            let (bytes, sha256) = upload.digest();
            return Ok(Some(Complete { written: Written { rows, bytes, sha256 }, upload }));
        }
        self.abort().await;
        finished.map(|_| None)
    }

    /// Number of row groups that have begun.
    pub fn row_groups(&self) -> usize {
        self.groups.begun()
    }

    async fn finish(&mut self, footer: &[(String, String)]) -> Result<(), SinkError> {
        self.groups.finish(footer).await.map_err(|e| error(&self.location, &e))?;
        self.send().await
    }

    /// Discards the file, and the chunks of it that the store has.
    pub async fn abort(self) {
        self.upload.abort().await;
    }
}

/// A file that is complete and not published.
pub struct Complete {
    written: Written,
    upload: Upload,
}

impl std::fmt::Debug for Complete {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Complete").field("written", &self.written).finish_non_exhaustive()
    }
}

impl Complete {
    /// Publishes it in place of a file that an earlier writer may have left. The file is durable when this returns.
    ///
    /// # Errors
    /// The fence's, when the output belongs to another process, or [`SinkError::Store`]. After an error the file does not exist, or, when
    /// only syncing failed, may not survive a power failure.
    pub async fn replace<F: Fence>(self, fence: &F) -> Result<Written, F::Error> {
        publish::replace(self.upload, fence).await?;
        Ok(self.written)
    }

    /// Discards the file, and the chunks of it that the store has.
    pub async fn abort(self) {
        self.upload.abort().await;
    }
}

fn error(location: &Location, error: &ParquetError) -> SinkError {
    SinkError::Encode { file: location.to_string(), reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, Int64Array};
    use object_store::memory::InMemory;
    use parquet::{
        arrow::ArrowWriter,
        file::{metadata::KeyValue, properties::WriterProperties},
    };

    use super::*;
    use crate::{sink::Codec, stores::Stores};

    fn rows() -> RecordBatch {
        RecordBatch::try_from_iter([("id", Arc::new(Int64Array::from_iter(0..100)) as ArrayRef)]).unwrap()
    }

    fn encoding() -> Encoding {
        Encoding { vectors: "vector".into(), codec: Codec::Zstd, row_group_bytes: 1 << 20 }
    }

    async fn writer(location: &Location, rows: &RecordBatch) -> PartWriter {
        let schema = rows.schema();
        let mut writer = PartWriter::new(location.clone(), &schema, &encoding(), Buffering::Whole).unwrap();
        writer.write(rows).await.unwrap();
        writer
    }

    fn location() -> Location {
        let stores = Stores::with_settings([]);
        stores.insert("memory://x", Arc::new(InMemory::new()));
        stores.locate("memory://x/out/00000.parquet").unwrap()
    }

    /// Pairs that are given at the end are where Arrow's writer puts those of its properties: before the schema.
    #[tokio::test]
    async fn the_footer_is_that_of_arrow_s_writer() {
        let (location, rows, pairs) = (location(), rows(), [("b", "1"), ("a", "2")]);
        let given = pairs.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let written = writer(&location, &rows).await.create(&given).await.unwrap();
        let bytes = location.get().await.unwrap().unwrap();

        let properties = encoding().properties(&rows.schema()).unwrap();
        let pairs = pairs.map(|(key, value)| KeyValue::new(key.to_owned(), value.to_owned()));
        let properties =
            WriterProperties::into_builder(properties).set_key_value_metadata(Some(pairs.to_vec())).build();
        let mut arrow = ArrowWriter::try_new(Vec::new(), rows.schema(), Some(properties)).unwrap();
        arrow.write(&rows).unwrap();
        assert!(bytes == arrow.into_inner().unwrap());
        assert_eq!((written.rows, written.bytes), (100, bytes.len() as u64));
    }

    #[tokio::test]
    async fn a_file_is_created_once() {
        let (location, rows) = (location(), rows());
        let [first, again, other, dropped] = [100, 100, 99, 98].map(|count| rows.slice(0, count));
        let first = writer(&location, &first).await.create(&[]).await.unwrap();
        // As after an attempt whose answer was lost.
        assert_eq!(writer(&location, &again).await.create(&[]).await.unwrap(), first);
        let error = writer(&location, &other).await.create(&[]).await.unwrap_err();
        assert!(matches!(error, SinkError::Exists { .. }), "{error}");
        assert_eq!(error.to_string(), "memory://x/out/00000.parquet exists");
        drop(writer(&location.child("never"), &dropped).await);
        assert!(location.child("never").head().await.unwrap().is_none());
    }
}
