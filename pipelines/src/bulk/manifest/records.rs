//! Reads and creates the JSON files of the manifest.

use bytes::Bytes;
use elmo::json;
use object_store::PutMode;
use serde::{Serialize, de::DeserializeOwned};

use super::{ManifestError, lock::Lock};
use crate::stores::{
    Location, StoreError,
    create_once::{self, Created, version},
};

/// How often a file is written while others change it.
const ATTEMPTS: usize = 3;

/// Reads a file of the manifest; `None` when there is none.
pub(super) async fn read<T: DeserializeOwned>(location: &Location) -> Result<Option<T>, ManifestError> {
    let Some(bytes) = location.get().await? else { return Ok(None) };
    json::from_slice(&bytes).map(Some).map_err(|reason| broken(location, reason))
}

/// Creates a file of the manifest, unless it exists with the same content, as after a retry of a request that was applied.
/// A torn one is replaced. In an object store so is any other one, if the lock is still held: a job that lost it may have
/// created the file late.
pub(super) async fn create<T>(location: &Location, value: &T, lock: &Lock) -> Result<(), ManifestError>
where
    T: Serialize + DeserializeOwned + PartialEq,
{
    let bytes = to_bytes(location, value)?;
    let found = match create_once::create(location, bytes.clone()).await? {
        Created::Ours => return Ok(()),
        Created::Existed(found) => serde_json::from_slice::<T>(&found),
    };
    match found {
        Ok(found) if found == *value => Ok(()),
        Ok(_) if location.local_path().is_some() => Err(ManifestError::Overtaken { file: location.to_string() }),
        _ => write(location, bytes, lock).await,
    }
}

/// Creates or replaces a file of the manifest, if the lock is held.
pub(super) async fn replace<T: Serialize>(location: &Location, value: &T, lock: &Lock) -> Result<(), ManifestError> {
    write(location, to_bytes(location, value)?, lock).await
}

/// Empties a file of the manifest, if it exists and the lock is held. An empty file counts as none. It is not deleted,
/// because a store does not delete conditionally: the file could be a successor's.
pub(super) async fn clear(location: &Location, lock: &Lock) -> Result<(), ManifestError> {
    match location.head().await? {
        None => Ok(()),
        Some(_) => write(location, Bytes::new(), lock).await,
    }
}

/// The version that is replaced is read before the lease is verified, so it is not one that a successor has written. If this
/// process stops right then, and the successor leaves or writes the same bytes, the request may still be applied: the worst
/// is a lost entry, which the successor's next run writes again.
async fn write(location: &Location, bytes: Bytes, lock: &Lock) -> Result<(), ManifestError> {
    lock.verify().await?;
    if location.local_path().is_some() {
        let put = location.put(bytes, PutMode::Overwrite).await;
        put.map_err(|e| StoreError::request("write", location, e))?;
        return Ok(location.sync()?);
    }
    let mut mode = PutMode::Create;
    for _ in 0..ATTEMPTS {
        match location.put(bytes.clone(), mode).await {
            Ok(_) => return Ok(()),
            Err(
                object_store::Error::AlreadyExists { .. }
                | object_store::Error::Precondition { .. }
                | object_store::Error::NotFound { .. },
            ) => {}
            Err(e) => return Err(StoreError::request("write", location, e).into()),
        }
        mode = match location.get_versioned().await? {
            // An earlier attempt wrote it, and its answer was lost.
            Some((found, _)) if found == bytes => return Ok(()),
            Some((_, meta)) => PutMode::Update(version(&meta)),
            None => PutMode::Create,
        };
        lock.ask().await?;
    }
    Err(ManifestError::Overtaken { file: location.to_string() })
}

fn to_bytes<T: Serialize>(location: &Location, value: &T) -> Result<Bytes, ManifestError> {
    serde_json::to_vec_pretty(value).map(Into::into).map_err(|e| broken(location, json::reason(&e)))
}

fn broken(location: &Location, reason: String) -> ManifestError {
    ManifestError::Broken { file: location.to_string(), reason }
}
