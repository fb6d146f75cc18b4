//! Requests for the objects of a partition: listing them, and reading what a footer says.

use std::{collections::BTreeMap, sync::Arc};

use futures::TryStreamExt;
use object_store::ObjectMeta;
use parquet::file::metadata::ParquetMetaDataReader;

use super::{ChainError, layout, span::Span};
use crate::{
    source::parquet::contain,
    stores::{
        Location, StoreError,
        file::{StoreFile, cause},
    },
    stream::TopicPartition,
};

/// Bytes at the end of an object that are read first. They hold the whole footer of a usual object.
const PREFETCH: usize = 32 << 10;

/// Reads the footer of an object; `None` when it does not exist.
pub(super) async fn read(location: &Location, partition: &TopicPartition) -> Result<Option<Span>, ChainError> {
    match location.head().await? {
        Some(meta) => read_listed(location, meta, partition).await,
        None => Ok(None),
    }
}

/// As [`read`], for an object that was listed.
pub(super) async fn read_listed(
    location: &Location,
    meta: ObjectMeta,
    partition: &TopicPartition,
) -> Result<Option<Span>, ChainError> {
    let mut file = StoreFile { store: Arc::clone(&location.store), path: location.path.clone(), size: meta.size };
    let reader = ParquetMetaDataReader::new().with_prefetch_hint(Some(PREFETCH));
    let damaged = |reason: String| ChainError::Damaged { file: location.to_string(), reason };
    let metadata = match contain(reader.load_and_finish(&mut file, meta.size)).await {
        Ok(metadata) => metadata,
        Err(error) => match cause(error) {
            Ok(source) if matches!(*source, object_store::Error::NotFound { .. }) => return Ok(None),
            Ok(source) => return Err(StoreError::request("read", location, *source).into()),
            Err(reason) => return Err(damaged(reason)),
        },
    };
    let pairs = metadata.file_metadata().key_value_metadata().into_iter().flatten();
    let pairs: BTreeMap<String, String> =
        pairs.map(|pair| (pair.key.clone(), pair.value.clone().unwrap_or_default())).collect();
    let span = Span::parse(&pairs).unwrap_or_else(|| Err("its footer has no stream.start".into())).map_err(damaged)?;
    let start = location.path.filename().and_then(layout::start_of);
    if (&span.partition, Some(span.start)) != (partition, start) {
        return Err(damaged(format!("its footer says that it holds {} from offset {}", span.partition, span.start)));
    }
    Ok(Some(span))
}

/// The objects of a partition in the order of their offsets, those after `after` only. Other files are left out.
pub(super) async fn list(folder: &Location, after: Option<i64>) -> Result<BTreeMap<i64, ObjectMeta>, StoreError> {
    let start = |meta: &ObjectMeta| meta.location.filename().and_then(layout::start_of);
    let wanted =
        |meta: ObjectMeta| Some((start(&meta).filter(|start| after.is_none_or(|after| *start > after))?, meta));
    if folder.local_path().is_some() {
        return Ok(folder.below(&folder.path, 1, |_| false).await?.into_iter().filter_map(wanted).collect());
    }
    let listed = match after {
        Some(after) => folder.store.list_with_offset(Some(&folder.path), &folder.child(&layout::name(after)).path),
        None => folder.store.list(Some(&folder.path)),
    };
    // A store need not list in any order.
    let found = listed.try_filter_map(|meta| std::future::ready(Ok(wanted(meta)))).try_collect().await;
    found.map_err(|e| StoreError::request("list", folder, e))
}
