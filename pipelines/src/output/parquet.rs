//! The Parquet files of an output: listing, opening, reading rows.

use std::{fmt, sync::Arc};

use arrow::array::RecordBatch;
use futures::TryStreamExt;
use parquet::{
    arrow::{ParquetRecordBatchStreamBuilder, async_reader::ParquetRecordBatchStream},
    errors::ParquetError,
};

use crate::{
    error::{Error, Result},
    source::parquet::contain,
    stores::{
        Location, StoreError, Stores,
        file::{StoreFile, cause},
    },
    stream::chain::tiling::StreamFolder,
};

/// Rows per batch.
const BATCH_ROWS: usize = 1024;

/// A Parquet file whose footer has been read.
pub(crate) type OpenFile = ParquetRecordBatchStreamBuilder<StoreFile>;

/// The files at an address.
#[derive(Debug)]
pub(super) struct Listing {
    /// The folder that holds them.
    pub(super) folder: Location,
    /// Parquet files in the order of their names, with their sizes.
    pub(super) files: Vec<(Location, u64)>,
    /// Names of the other files in the folder.
    pub(super) others: Vec<String>,
    /// The address names the folder, not one file in it.
    pub(super) is_folder: bool,
    /// The dataset of a stream, whose files are in folders of their partitions.
    pub(super) stream: Option<StreamFolder>,
}

impl Listing {
    /// Lists the folder at `address`, or the one Parquet file there.
    ///
    /// # Errors
    /// [`StoreError`] when the address is wrong or the store fails, [`Error::Input`] when there is no Parquet file.
    pub(super) async fn of(address: &str, stores: &Stores) -> Result<Self> {
        let location = stores.locate(address)?;
        // The name of a folder may end in `.parquet` too.
        if address.ends_with(".parquet")
            && let Some(meta) = location.head().await?
        {
            let folder = location.at(location.path.parent().unwrap_or_default());
            return Ok(Self {
                folder,
                files: vec![(location, meta.size)],
                others: Vec::new(),
                is_folder: false,
                stream: None,
            });
        }
        if let Some(stream) = StreamFolder::find(&location).await? {
            let (files, others) = stream.files().await?;
            return match files.is_empty() {
                true => Err(no_files(&location)),
                false => Ok(Self { folder: location, files, others, is_folder: true, stream: Some(stream) }),
            };
        }
        let (files, others): (Vec<_>, Vec<_>) =
            location.children().await?.into_iter().partition(|meta| meta.location.as_ref().ends_with(".parquet"));
        if files.is_empty() {
            return Err(no_files(&location));
        }
        let files = files.into_iter().map(|meta| (location.at(meta.location), meta.size)).collect();
        let others = others.iter().filter_map(|meta| meta.location.filename()).map(str::to_owned).collect();
        Ok(Self { folder: location, files, others, is_folder: true, stream: None })
    }
}

/// The error for a folder without Parquet files.
pub(super) fn no_files(folder: &Location) -> Error {
    Error::Input {
        file: folder.to_string(),
        row: None,
        reason: "no Parquet file here".into(),
        help: Some("give a .parquet file, or the folder that --output named".into()),
    }
}

/// The Parquet files at an address in the order of their names.
pub(crate) async fn parquet_files(address: &str, stores: &Stores) -> Result<Vec<Location>> {
    Ok(Listing::of(address, stores).await?.files.into_iter().map(|(file, _)| file).collect())
}

/// Opens a file and reads its footer.
pub(crate) async fn open_file(location: &Location) -> Result<OpenFile> {
    let size = location.head().await?.ok_or_else(|| unreadable(location, &"no such file"))?.size;
    let file = StoreFile { store: Arc::clone(&location.store), path: location.path.clone(), size };
    contain(ParquetRecordBatchStreamBuilder::new(file)).await.map_err(|e| read_error(location, e))
}

/// A stream over the rows of a file.
pub(super) async fn read_rows(location: &Location) -> Result<ParquetRecordBatchStream<StoreFile>> {
    open_file(location).await?.with_batch_size(BATCH_ROWS).build().map_err(|e| read_error(location, e))
}

/// The next batch of a file; `None` at its end.
pub(super) async fn next_batch(
    rows: &mut ParquetRecordBatchStream<StoreFile>,
    location: &Location,
) -> Result<Option<RecordBatch>> {
    contain(rows.try_next()).await.map_err(|e| read_error(location, e))
}

/// Separates failures of the store from damaged files.
fn read_error(location: &Location, error: ParquetError) -> Error {
    match cause(error) {
        Ok(source) => StoreError::request("read", location, *source).into(),
        Err(reason) => unreadable(location, &reason),
    }
}

/// The error for a file that is damaged or not Parquet.
pub(crate) fn unreadable(location: &Location, reason: &dyn fmt::Display) -> Error {
    Error::Input {
        file: location.to_string(),
        row: None,
        reason: format!("not a readable Parquet file: {reason}"),
        help: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_that_fails_is_no_damaged_file() {
        let location = Stores::with_settings([]).locate("/folder/part.parquet").unwrap();
        let down = object_store::Error::Generic { store: "S3", source: "503".into() };
        let error = read_error(&location, ParquetError::External(Box::new(down)));
        assert!(error.module::<StoreError>().is_some(), "{error}");
        let error = read_error(&location, ParquetError::General("no magic number".into()));
        assert!(matches!(error, Error::Input { .. }), "{error}");
    }
}
