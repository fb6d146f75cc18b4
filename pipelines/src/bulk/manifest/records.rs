//! Files of the manifest: JSON that is read and created.

use serde::{Serialize, de::DeserializeOwned};

use super::ManifestError;
use crate::stores::{Location, StoreError};
use object_store::PutMode;

/// Reads a file of the manifest; `None` when there is none.
pub(super) async fn read<T: DeserializeOwned>(location: &Location) -> Result<Option<T>, ManifestError> {
    let Some(bytes) = location.get().await? else { return Ok(None) };
    serde_json::from_slice(&bytes).map(Some).map_err(|e| broken(location, &e))
}

/// Creates a file of the manifest. A request that was applied but whose answer was lost is retried by the store and then
/// finds our own file, which is no conflict.
pub(super) async fn create<T>(location: &Location, value: &T) -> Result<(), ManifestError>
where
    T: Serialize + DeserializeOwned + PartialEq,
{
    let bytes = to_bytes(location, value)?;
    let mut retry = true;
    loop {
        match location.put(bytes.clone(), PutMode::Create).await {
            Ok(_) => return Ok(location.sync()?),
            Err(object_store::Error::AlreadyExists { .. }) => {}
            Err(e) => return Err(StoreError::request("write", location, e).into()),
        }
        match read::<T>(location).await {
            Ok(Some(found)) if found == *value => return Ok(()),
            Ok(_) => return Err(ManifestError::Overtaken { file: location.to_string() }),
            // No job writes half a file: a power failure lost the rest.
            Err(ManifestError::Broken { .. }) if retry => location.delete().await?,
            Err(error) => return Err(error),
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
