//! Copies of checkpoints in a store.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use futures::TryStreamExt;
use object_store::{ObjectStoreExt, PutMode, path::Path as StorePath};
use sha2::{Digest, Sha256};

use super::{JOURNALS, LISTING, MODEL, MODEL_FILES, staged::Staged};
use crate::{
    error::{Error, Result},
    sink::copy,
    stores::{Location, Obstacle, StoreError, sync::sync, writable::check_folder},
    train::{
        checkpoint::{Checkpoints, Digested, FILES, Found, Manifest, RunState, STATE, folder_name, hex, step_of},
        error::TrainFault,
        model,
        settings::Settings,
    },
};

/// Folders below that of the copies, files included: `step-N/model/FILE`.
const DEPTH: usize = 3;

/// The copies of a run.
#[derive(Debug, Clone)]
pub(in crate::train) struct Copies {
    folder: Location,
    /// How many are kept.
    keep: usize,
}

/// What a copy consists of, and the state in it.
#[derive(Debug)]
pub(in crate::train) struct Copied {
    pub(in crate::train) state: RunState,
    listing: Manifest,
    folder: Location,
}

/// The objects of one copy.
#[derive(Debug, Default)]
struct Objects {
    paths: Vec<StorePath>,
    is_complete: bool,
    /// There is an object that no copy has.
    has_others: bool,
}

impl Copies {
    pub(in crate::train) fn new(folder: Location, keep: usize) -> Self {
        Self { folder, keep: keep.max(1) }
    }

    /// Where they are.
    pub(in crate::train) fn folder(&self) -> &Location {
        &self.folder
    }

    /// Checks that copies can be made.
    ///
    /// # Errors
    /// [`Error::Usage`] for what is no folder, [`Error::Io`] or [`StoreError`] when it cannot be written to.
    pub(in crate::train) async fn check_writable(&self) -> Result<()> {
        if let Some(folder) = self.folder.local_path() {
            return match Obstacle::to_folder(&folder) {
                Some(obstacle) => Err(Error::usage(
                    format!("--upload {}: {obstacle}", self.folder),
                    "give a folder; it is created if it does not exist",
                )),
                None => check_folder(&folder),
            };
        }
        // Of a name that no other object has.
        let probe = self.folder.child(&format!(".elmo-probe-{}", uuid::Uuid::new_v4().simple()));
        let written = probe.put("probe".into(), PutMode::Overwrite).await;
        written.map_err(|e| StoreError::request("write", &probe, e))?;
        Ok(probe.delete().await?)
    }

    /// The newest complete copy. Its tensors are checked when it is fetched. Warns of newer ones whose state is damaged.
    ///
    /// # Errors
    /// [`StoreError`] when the store fails, [`TrainFault::DamagedCopy`] when there are copies, but none can be read.
    pub(in crate::train) async fn newest(&self) -> Result<Option<Copied>> {
        let all = self.list().await?;
        let mut damaged = None;
        for (&step, _) in all.iter().rev().filter(|(_, objects)| objects.is_complete) {
            match self.open(step).await {
                Err(error) if matches!(error.module(), Some(TrainFault::DamagedCopy { .. })) => {
                    tracing::warn!("{error}");
                    damaged.get_or_insert(error);
                }
                opened => return opened.map(Some),
            }
        }
        damaged.map_or(Ok(None), Err)
    }

    /// Reads the state of a copy.
    async fn open(&self, step: u64) -> Result<Copied> {
        let folder = self.folder.child(&folder_name(step));
        let damaged = |reason: String| Error::from(TrainFault::DamagedCopy { copy: folder.to_string(), reason });
        let listing = listing_of(&folder).await?.ok_or_else(|| damaged(format!("{LISTING} has gone")))?;
        let listing = listing.map_err(damaged)?;
        let bytes = folder.child(STATE).get().await?.ok_or_else(|| damaged(format!("{STATE} is missing")))?;
        let sha256 = hex(Sha256::new_with_prefix(&bytes));
        if !listing.files.contains(&Digested { file: STATE.to_owned(), bytes: bytes.len() as u64, sha256 }) {
            return Err(damaged(format!("{STATE} is not what was written: its size or SHA-256 differs")));
        }
        let state: RunState = serde_json::from_slice(&bytes).map_err(|e| damaged(format!("{STATE}: {e}")))?;
        match state.counters.step == step {
            true => Ok(Copied { state, listing, folder }),
            false => Err(damaged(format!("{STATE} is of another checkpoint"))),
        }
    }

    /// Refuses copies of another run.
    ///
    /// # Errors
    /// [`TrainFault::Differs`]; as [`Copies::newest`].
    pub(super) async fn check(&self, settings: &Settings) -> Result<()> {
        let differences = self.newest().await?.map(|newest| newest.state.settings.differences(settings));
        match differences.filter(|differences| !differences.is_empty()) {
            Some(differences) => {
                Err(TrainFault::Differs { output: PathBuf::from(self.folder.to_string()), differences }.into())
            }
            None => Ok(()),
        }
    }

    /// Copies a checkpoint, unless it is there, and removes the oldest copies.
    ///
    /// # Errors
    /// [`StoreError`].
    pub(super) async fn add(&self, staged: &Staged) -> Result<(), StoreError> {
        let folder = self.folder.child(&folder_name(staged.step));
        if !is_there(&folder, staged).await? {
            // The files of another copy of this step are replaced one by one.
            folder.child(LISTING).delete().await?;
            let mut files = Vec::new();
            for name in &staged.files {
                let path = staged.folder.join(name);
                let file = tokio::fs::File::open(&path).await.map_err(|e| StoreError::local("read", &path, e))?;
                let (bytes, sha256) = copy(&folder.child(name), file, &path).await?;
                files.push(Digested { file: name.clone(), bytes, sha256 });
                crate::crash::train::in_upload();
            }
            let listing = folder.child(LISTING);
            let text = serde_json::to_vec_pretty(&Manifest::new(staged.step, files))
                .map_err(|e| StoreError::local("write", &staged.folder, e.into()))?;
            let written = listing.put(text.into(), PutMode::Overwrite).await;
            written.map_err(|e| StoreError::request("write", &listing, e))?;
            listing.sync()?;
        }
        self.rotate().await
    }

    /// Removes copies that are older than the newest complete ones.
    async fn rotate(&self) -> Result<(), StoreError> {
        let all = self.list().await?;
        let kept = all.iter().rev().filter(|(_, objects)| objects.is_complete).take(self.keep);
        let Some(oldest) = kept.map(|(&step, _)| step).min() else { return Ok(()) };
        self.remove(all.into_iter().filter(|(step, _)| *step < oldest)).await
    }

    /// Removes those after a step, to which a run has gone back.
    ///
    /// # Errors
    /// [`StoreError`].
    pub(super) async fn remove_after(&self, step: u64) -> Result<(), StoreError> {
        let all = self.list().await?;
        self.remove(all.into_iter().filter(|(other, _)| *other > step).rev()).await
    }

    /// Removes all of them: the run starts over.
    ///
    /// # Errors
    /// [`StoreError`].
    pub(in crate::train) async fn clear(&self) -> Result<(), StoreError> {
        self.remove(self.list().await?.into_iter().rev()).await
    }

    async fn remove(&self, copies: impl Iterator<Item = (u64, Objects)>) -> Result<(), StoreError> {
        for (step, objects) in copies {
            let folder = self.folder.child(&folder_name(step));
            // From now on it is not complete.
            folder.child(LISTING).delete().await?;
            for path in objects.paths {
                self.folder.at(path).delete().await?;
            }
            // A process that was killed leaves unfinished files on a disk. Nobody writes to a copy that is removed.
            folder.sweep(1, Duration::ZERO, is_ours).await?;
            // Folders of a disk are not objects; what else is in them stays.
            for folder in [folder.child(MODEL), folder].iter().filter_map(Location::local_path) {
                let _ = fs::remove_dir(folder);
            }
        }
        Ok(())
    }

    /// All copies by their steps. A folder of such a name is that of another program if it has other files and no list.
    async fn list(&self) -> Result<BTreeMap<u64, Objects>, StoreError> {
        let enters = |name: &str| step_in(name).is_some() || name == MODEL;
        let found = self.folder.below(&self.folder.path, DEPTH, enters).await?;
        let mut copies = BTreeMap::<u64, Objects>::new();
        for path in found.into_iter().map(|meta| meta.location) {
            let Some(parts) = path.prefix_match(&self.folder.path) else { continue };
            let name = parts.map(|part| part.as_ref().to_owned()).collect::<Vec<_>>().join("/");
            let Some((folder, file)) = name.split_once('/') else { continue };
            let Some(step) = step_in(folder) else { continue };
            let objects = copies.entry(step).or_default();
            objects.is_complete |= file == LISTING;
            match file == LISTING || is_copied(file) {
                true => objects.paths.push(path),
                // Files of the system, such as .nfs0123.
                false => objects.has_others |= !file.rsplit('/').next().is_some_and(|name| name.starts_with('.')),
            }
        }
        // On a disk, a copy of which nothing is complete is a folder all the same.
        for step in self.folder.local_path().map(|folder| steps_in(&folder)).unwrap_or_default() {
            copies.entry(step).or_default();
        }
        copies.retain(|_, objects| objects.is_complete || !objects.has_others);
        Ok(copies)
    }
}

/// Steps of the copies in a folder of a disk; none where it does not exist.
fn steps_in(folder: &Path) -> Vec<u64> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| step_in(entry.file_name().to_str()?)).collect()
}

/// The step of the copy in a folder of this name.
fn step_in(name: &str) -> Option<u64> {
    step_of(name).filter(|step| folder_name(*step) == name)
}

/// Whether a copy has a file of this name, beside its list.
fn is_copied(name: &str) -> bool {
    match name.strip_prefix(MODEL).and_then(|name| name.strip_prefix('/')) {
        Some(name) => MODEL_FILES.contains(&name),
        None => FILES.contains(&name) || JOURNALS.contains(&name),
    }
}

/// Whether a copy consists of files of this name.
fn is_ours(name: &str) -> bool {
    name == LISTING || [&FILES[..], &JOURNALS, &MODEL_FILES].concat().contains(&name)
}

impl Copied {
    /// The checkpoint that [`Copied::fetch`] makes.
    pub(in crate::train) fn found(&self, checkpoints: &Checkpoints) -> Found {
        Found { path: checkpoints.path(self.state.counters.step), state: self.state.clone() }
    }

    /// Where it is.
    pub(in crate::train) fn folder(&self) -> &Location {
        &self.folder
    }

    /// Copies it to the folder of a run: journals and model first, so that where there is the checkpoint, there are they.
    ///
    /// # Errors
    /// [`StoreError`] when the store fails, [`TrainFault::DamagedCopy`] when a file is not what was written, [`Error::Io`] when
    /// the disk fails.
    pub(in crate::train) async fn fetch(&self, run: &Path, checkpoints: &Checkpoints) -> Result<()> {
        let partial = checkpoints.begin_partial().map_err(|source| Error::io(run, source))?;
        for file in self.listing.files.iter().filter(|file| is_copied(&file.file)) {
            self.fetch_file(file, &partial).await?;
        }
        let placed = || -> io::Result<()> {
            for name in JOURNALS.iter().filter(|name| partial.join(name).exists()) {
                fs::rename(partial.join(name), run.join(name))?;
            }
            if partial.join(MODEL).exists() {
                model::clear_exports(run)?;
                fs::rename(partial.join(MODEL), run.join(model::EXPORTED))?;
            }
            sync(run)
        };
        placed().map_err(|source| Error::io(run, source))?;
        model::finish_export(run)?;
        let path = checkpoints.finish_partial(&partial, self.state.counters.step);
        path.map(drop).map_err(|source| Error::io(&partial, source))
    }

    async fn fetch_file(&self, listed: &Digested, partial: &Path) -> Result<()> {
        let (location, path) = (self.folder.child(&listed.file), partial.join(&listed.file));
        let damaged = |reason: &str| TrainFault::DamagedCopy {
            copy: self.folder.to_string(),
            reason: format!("{} {reason}", listed.file),
        };
        let disk = |source| Error::io(&path, source);
        let store = |e| Error::from(StoreError::request("read", &location, e));
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(disk)?;
        }
        let found = match location.store.get(&location.path).await {
            Err(object_store::Error::NotFound { .. }) => return Err(damaged("is missing").into()),
            found => found.map_err(store)?,
        };
        let mut file = File::create_new(&path).map_err(disk)?;
        let (mut stream, mut hash, mut bytes) = (found.into_stream(), Sha256::new(), 0);
        while let Some(part) = stream.try_next().await.map_err(store)? {
            file.write_all(&part).map_err(disk)?;
            hash.update(&part);
            bytes += part.len() as u64;
        }
        file.sync_all().map_err(disk)?;
        match bytes == listed.bytes && hex(hash) == listed.sha256 {
            true => Ok(()),
            false => Err(damaged("is not what was written: its size or SHA-256 differs").into()),
        }
    }
}

/// The list of the files of a copy; `None` if there is none, the inner error if it cannot be understood.
async fn listing_of(folder: &Location) -> Result<Option<Result<Manifest, String>>, StoreError> {
    let Some(bytes) = folder.child(LISTING).get().await? else { return Ok(None) };
    Ok(Some(Manifest::parse(&bytes).map_err(|reason| format!("{LISTING}: {reason}"))))
}

/// Whether the checkpoint of this copy was copied before.
async fn is_there(folder: &Location, staged: &Staged) -> Result<bool, StoreError> {
    let Some(Ok(there)) = listing_of(folder).await? else { return Ok(false) };
    let own = fs::read(staged.folder.join(super::MANIFEST)).ok().and_then(|bytes| Manifest::parse(&bytes).ok());
    Ok(own.is_some_and(|own| own.files.iter().all(|file| there.files.contains(file))))
}
