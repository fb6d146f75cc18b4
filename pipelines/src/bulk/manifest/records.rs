//! Reads and creates the JSON files of the manifest.

use object_store::PutMode;
use serde::{Serialize, de::DeserializeOwned};

use super::ManifestError;
use crate::stores::{
    Location, StoreError,
    create_once::{self, Created},
};

/// Reads a file of the manifest; `None` when there is none.
pub(super) async fn read<T: DeserializeOwned>(location: &Location) -> Result<Option<T>, ManifestError> {
    let Some(bytes) = location.get().await? else { return Ok(None) };
    serde_json::from_slice(&bytes).map(Some).map_err(|e| broken(location, &e))
}

/// Creates a file of the manifest, unless it exists with the same content, as after a retry of a request that was applied.
pub(super) async fn create<T>(location: &Location, value: &T) -> Result<(), ManifestError>
where
    T: Serialize + DeserializeOwned + PartialEq,
{
    let bytes = to_bytes(location, value)?;
    let mut retry = true;
    loop {
        let found = match create_once::create(location, bytes.clone()).await? {
            Created::Ours => return Ok(()),
            Created::Existed(found) => serde_json::from_slice::<T>(&found),
        };
        match found {
            Ok(found) if found == *value => return Ok(()),
            Ok(_) => return Err(ManifestError::Overtaken { file: location.to_string() }),
            // Files are written atomically, so this one was damaged later, for example by a power failure.
            Err(_) if retry => location.delete().await?,
            Err(error) => return Err(broken(location, &error)),
        }
        retry = false;
    }
}

/// Creates or replaces a file of the manifest, under the lock.
pub(super) async fn replace<T: Serialize>(location: &Location, value: &T) -> Result<(), ManifestError> {
    let put = location.put(to_bytes(location, value)?, PutMode::Overwrite).await;
    put.map_err(|e| StoreError::request("write", location, e))?;
    Ok(location.sync()?)
}

fn to_bytes<T: Serialize>(location: &Location, value: &T) -> Result<bytes::Bytes, ManifestError> {
    serde_json::to_vec_pretty(value).map(Into::into).map_err(|e| broken(location, &e))
}

fn broken(location: &Location, error: &serde_json::Error) -> ManifestError {
    ManifestError::Broken { file: location.to_string(), reason: error.to_string() }
}
