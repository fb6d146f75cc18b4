//! Objects that are created once and never changed, and the probe that a store supports them.
//!
//! All coordination between processes rests on two conditional writes: `If-None-Match: *` creates an object only if it
//! does not exist, and `If-Match: ETAG` replaces it only if no other process has. Some servers accept these headers and
//! ignore them, or check them without a lock; [`probe`] detects both.

use bytes::Bytes;
use futures::future::join_all;
use object_store::{ObjectMeta, PutMode, UpdateVersion};

use super::{Location, StoreError};
use crate::reply::summary;

/// Concurrent creates of the probe's object.
const RACERS: usize = 8;
/// Bytes of the probe's object. A server that checks and then writes is caught more easily with a body that takes time.
const PROBE_BYTES: usize = 200 << 10;
/// Attempts of the probe, since an earlier job may have left its object behind.
const ATTEMPTS: usize = 3;

/// Result of [`create`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Created {
    /// The object was created with the given bytes, now or by an earlier attempt.
    Ours,
    /// The object existed with other bytes, which are these.
    Existed(Bytes),
}

/// Creates an object if it does not exist. On a local disk it is synced.
///
/// A retry of a request that was applied finds the object that the first attempt created, so an object with the same
/// bytes counts as created.
///
/// # Errors
/// [`StoreError`] when the store fails.
pub async fn create(location: &Location, bytes: Bytes) -> Result<Created, StoreError> {
    loop {
        match location.put(bytes.clone(), PutMode::Create).await {
            Ok(_) => {}
            Err(object_store::Error::AlreadyExists { .. }) => match location.get().await? {
                Some(found) if found != bytes => return Ok(Created::Existed(found)),
                Some(_) => {}
                // It was deleted in between.
                None => continue,
            },
            Err(e) => return Err(StoreError::request("create", location, e)),
        }
        return location.sync().map(|()| Created::Ours);
    }
}

/// The version of an object, for [`PutMode::Update`].
pub(crate) fn version(meta: &ObjectMeta) -> UpdateVersion {
    UpdateVersion { e_tag: meta.e_tag.clone(), version: meta.version.clone() }
}

/// Checks that the store honours conditional writes, with an object that it creates at `location` and deletes again: of
/// several concurrent creates exactly one must succeed, its bytes must be stored, and an update of an old version must
/// fail. A local file system is not checked. Costs 13 requests, eight of them concurrent, with 200 kB each.
///
/// # Errors
/// [`StoreError::Unconditional`] when it does not, [`StoreError::Request`] when a request fails for another reason.
pub async fn probe(location: &Location) -> Result<(), StoreError> {
    probed(location, true).await
}

/// As [`probe`], for those who create objects but update none: the second condition is not checked.
///
/// # Errors
/// As [`probe`].
pub async fn probe_create(location: &Location) -> Result<(), StoreError> {
    probed(location, false).await
}

async fn probed(location: &Location, updates: bool) -> Result<(), StoreError> {
    if location.local_path().is_some() {
        return Ok(());
    }
    let mut attempts = 1..ATTEMPTS;
    loop {
        let outcome = match race(location).await {
            Ok(Some((winner, meta))) if updates => update(location, &winner, version(&meta)).await.map(|()| true),
            Ok(Some(_)) => Ok(true),
            Ok(None) => Ok(false),
            Err(error) => Err(error),
        };
        let deleted = location.delete().await;
        match outcome {
            Ok(true) => return deleted,
            // The object of an earlier probe disturbs only the first attempt.
            Ok(false) | Err(StoreError::Unconditional { .. }) if attempts.next().is_some() => {}
            Ok(false) => return Err(unconditional(location, CREATE, "an object that was deleted still exists")),
            Err(error) => return Err(error),
        }
    }
}

const CREATE: &str = "If-None-Match";
const UPDATE: &str = "If-Match";

/// Races creates of one object and returns what is stored; `None` when the object existed before.
async fn race(location: &Location) -> Result<Option<(Bytes, ObjectMeta)>, StoreError> {
    let bodies = bodies(RACERS);
    let answers = join_all(bodies.iter().map(|body| location.put(body.clone(), PutMode::Create))).await;
    let mut winners = Vec::new();
    for (body, answer) in bodies.iter().zip(answers) {
        if succeeded(location, CREATE, answer)? {
            winners.push(body);
        }
    }
    if winners.len() > 1 {
        let reason = format!("{} of {RACERS} concurrent creates of one object succeeded", winners.len());
        return Err(unconditional(location, CREATE, &reason));
    }
    let Some((found, meta)) = location.get_versioned().await? else {
        return Err(unconditional(location, CREATE, "an object that was created does not exist"));
    };
    match winners.first() {
        Some(winner) if **winner != found => {
            Err(unconditional(location, CREATE, "the object holds the bytes of a create that failed"))
        }
        // No create may report success when the answer to the one that did was lost.
        None if !bodies.contains(&found) => Ok(None),
        _ => Ok(Some((found, meta))),
    }
}

/// Updates one version of the object twice; the second update must fail.
async fn update(location: &Location, first: &Bytes, version: UpdateVersion) -> Result<(), StoreError> {
    let bodies = bodies(2);
    for body in &bodies {
        let answer = location.put(body.clone(), PutMode::Update(version.clone())).await;
        if succeeded(location, UPDATE, answer)? && *body == bodies[1] {
            return Err(unconditional(location, UPDATE, "an update of an old version succeeded"));
        }
    }
    match location.get().await? {
        Some(found) if found == bodies[0] => Ok(()),
        Some(found) if found == *first => {
            Err(unconditional(location, UPDATE, "an update of the current version failed"))
        }
        _ => Err(unconditional(location, UPDATE, "an update that failed changed the object")),
    }
}

/// Whether a conditional write succeeded; an error when it failed for any other reason than its condition.
fn succeeded<T>(
    location: &Location,
    header: &'static str,
    answer: object_store::Result<T>,
) -> Result<bool, StoreError> {
    match answer {
        Ok(_) => Ok(true),
        Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }) => Ok(false),
        Err(e @ (object_store::Error::NotImplemented { .. } | object_store::Error::NotSupported { .. })) => {
            Err(unconditional(location, header, &summary(&e)))
        }
        Err(e) => Err(StoreError::request("write", location, e)),
    }
}

/// Different bodies that no other probe writes.
fn bodies(count: usize) -> Vec<Bytes> {
    let id = uuid::Uuid::new_v4();
    let line = |n: usize| format!("{id} {n}\n");
    (0..count).map(|n| line(n).repeat(PROBE_BYTES.div_ceil(line(n).len())).into()).collect()
}

fn unconditional(location: &Location, header: &'static str, reason: &str) -> StoreError {
    StoreError::Unconditional { address: location.to_string(), header, reason: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures::TryStreamExt;
    use object_store::{ObjectStore, memory::InMemory};

    use super::*;
    use crate::stores::Stores;

    fn memory() -> (Arc<InMemory>, Location) {
        let (store, stores) = (Arc::new(InMemory::new()), Stores::with_settings([]));
        stores.insert("memory://x", Arc::<InMemory>::clone(&store));
        (store, stores.locate("memory://x/out/_elmo/probe").unwrap())
    }

    #[tokio::test]
    async fn an_object_is_created_once() {
        let (_, object) = memory();
        assert_eq!(create(&object, "a".into()).await.unwrap(), Created::Ours);
        assert_eq!(create(&object, "a".into()).await.unwrap(), Created::Ours);
        assert_eq!(create(&object, "b".into()).await.unwrap(), Created::Existed("a".into()));
    }

    #[tokio::test]
    async fn the_probe_accepts_a_store_with_conditions_and_leaves_nothing_behind() {
        let (store, object) = memory();
        probe(&object).await.unwrap();
        // A job that was killed left its object behind.
        object.put("old".into(), PutMode::Overwrite).await.unwrap();
        probe(&object).await.unwrap();
        assert!(store.list(None).try_collect::<Vec<_>>().await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn a_local_file_system_is_not_probed() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("a/probe");
        probe(&Stores::with_settings([]).locate(missing.to_str().unwrap()).unwrap()).await.unwrap();
        assert!(!missing.parent().unwrap().exists());
    }
}
