//! Implements the async Parquet reader's file interface for an object in a store.

use std::{ops::Range, sync::Arc};

use bytes::Bytes;
use futures::{FutureExt, TryFutureExt, future::BoxFuture};
use object_store::{ObjectStore, ObjectStoreExt, path::Path};
use parquet::{
    arrow::{arrow_reader::ArrowReaderOptions, async_reader::AsyncFileReader},
    errors::{ParquetError, Result},
    file::metadata::{ParquetMetaData, ParquetMetaDataReader},
};

/// A Parquet file in a store. The size is known from the listing: Azure does not support requests for a suffix.
#[derive(Debug, Clone)]
pub(crate) struct StoreFile {
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) path: Path,
    pub(crate) size: u64,
}

fn external(error: object_store::Error) -> ParquetError {
    ParquetError::External(Box::new(error))
}

impl AsyncFileReader for StoreFile {
    fn get_bytes(&mut self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes>> {
        self.store.get_range(&self.path, range).map_err(external).boxed()
    }

    fn get_byte_ranges(&mut self, ranges: Vec<Range<u64>>) -> BoxFuture<'_, Result<Vec<Bytes>>> {
        async move { self.store.get_ranges(&self.path, &ranges).await.map_err(external) }.boxed()
    }

    fn get_metadata<'a>(
        &'a mut self,
        options: Option<&'a ArrowReaderOptions>,
    ) -> BoxFuture<'a, Result<Arc<ParquetMetaData>>> {
        async move {
            let size = self.size;
            let reader = ParquetMetaDataReader::new().with_arrow_reader_options(options);
            reader.load_and_finish(self, size).await.map(Arc::new)
        }
        .boxed()
    }
}

/// The store's error that caused a Parquet error, or else the message of the Parquet library.
pub(crate) fn cause(error: ParquetError) -> std::result::Result<Box<object_store::Error>, String> {
    let ParquetError::External(inner) = error else { return Err(error.to_string()) };
    match inner.downcast::<object_store::Error>() {
        Ok(error) => Ok(error),
        // The writer wraps the error of its sink once more.
        Err(inner) => inner.downcast::<ParquetError>().map_or_else(|e| Err(e.to_string()), |e| cause(*e)),
    }
}
