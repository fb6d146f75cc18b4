//! The manifest of a bulk job: what is durable, recorded beside the output.
//!
//! ```text
//! OUTPUT/part-00000-1a2b3c4d.parquet  a part; the folder itself contains Parquet files only
//! OUTPUT/_elmo/job.json               identity of the job: settings that change results, and inputs
//! OUTPUT/_elmo/part-00000.json        entry of a durable part, created after the part
//! OUTPUT/_elmo/done.json              totals: the job is finished
//! OUTPUT/_elmo/partial.arrows         complete rows of the open part, saved by an interrupted job
//! OUTPUT/_elmo/lock                   held while a job runs
//! ```
//!
//! The life cycle of an output: [`Manifest::open`] acquires the `lock`, reads what exists (`existing`) and decides
//! whether this job may continue it (`job`). Every part that is published gets an entry (`entry`); each entry begins
//! where the one before it ends. [`Manifest::finish`] checks that the folder holds the parts of the manifest and no
//! others.
//!
//! Entries and totals are created ([`PutMode::Create`](object_store::PutMode::Create)), so a second writer that slips past
//! the lock is stopped by the first entry that it tries to create. A part without an entry does not count: the next run
//! writes it again. A part that is lost or damaged is written again together with its entry, because other hardware may give other
//! bytes: the entry is emptied before the part is published and written after it, so that a crash in between leaves a part
//! without an entry. In an object store every write to a file that exists names the version that it replaces, which was read
//! before the lease was verified: a job that lost its lease changes no file of its successor (`records`).

mod entry;
mod error;
mod existing;
mod job;
mod lock;
mod members;
mod names;
mod output;
mod overwrite;
mod records;
mod state;

use std::collections::HashMap;

use futures::{StreamExt, TryStreamExt, stream};
use object_store::ObjectMeta;
use sha2::{Digest, Sha256};

pub(super) use self::state::{Survey, survey};
pub(crate) use self::{
    entry::Part,
    job::contrast,
    members::Members,
    output::{Recorded, read, read_totals},
};
pub use self::{
    entry::{Counts, PartEntry},
    error::ManifestError,
    job::{InputRecord, Job},
    names::part_name,
    state::{OutputState, output_state},
};
use self::{
    existing::{Existing, Start},
    lock::Lock,
    names::entry_name,
};
use crate::{
    sink::Fence,
    source::Position,
    stores::{Location, Obstacle, StoreError},
};

/// Folder of the manifest inside an output.
pub const FOLDER: &str = "_elmo";
/// Identity of the job.
const JOB: &str = "job.json";
/// Totals of a finished job.
const DONE: &str = "done.json";
/// Complete rows of the open part.
const PARTIAL: &str = "partial.arrows";
/// Files whose digests are computed at the same time.
const DIGESTS: usize = 4;

/// The manifest of one job, opened and locked.
#[derive(Debug)]
pub struct Manifest {
    output: Location,
    folder: Location,
    job: Job,
    /// `job.json` differs from `job`.
    unrecorded: bool,
    /// Indices of inputs whose content has to be compared before the job is recorded.
    changed_inputs: Vec<usize>,
    /// In order. The last one is not [`Part::Lost`].
    parts: Vec<Part>,
    /// The totals are recorded: the job is finished.
    done: bool,
    /// Saved rows of the open part exist.
    has_partial: bool,
    lock: Lock,
}

impl Manifest {
    /// Opens the manifest of an output, or begins one; `overwrite` removes what an earlier job left.
    ///
    /// # Errors
    /// [`ManifestError::Locked`] when another job writes there, [`ManifestError::Differs`] when the manifest is of a job
    /// with other settings or inputs, [`ManifestError::JobLost`] when that cannot be determined,
    /// [`ManifestError::Foreign`] when there are files that no manifest names, [`ManifestError::Unlisted`] when there are
    /// files that are mistaken for parts of a finished job, [`ManifestError::NoFolder`] when the output cannot be a folder,
    /// [`ManifestError::Broken`] when an entry does not follow from the one before it, [`ManifestError::Overtaken`] when
    /// another job begins the manifest at the same moment, [`ManifestError::Store`] when the store fails.
    pub async fn open(output: &Location, job: &Job, overwrite: bool) -> Result<Self, ManifestError> {
        check_folder(output)?;
        let folder = output.child(FOLDER);
        let lock = Lock::acquire(output, &folder).await?;
        let mut manifest = Self {
            output: output.clone(),
            folder,
            job: job.clone(),
            unrecorded: false,
            changed_inputs: Vec::new(),
            parts: Vec::new(),
            done: false,
            has_partial: false,
            lock,
        };
        match manifest.start(overwrite).await {
            Ok(()) => Ok(manifest),
            Err(error) => {
                let foreign = matches!(error, ManifestError::Foreign { .. });
                if let Some(folder) = manifest.folder.local_path().filter(|_| foreign) {
                    // Only the files that the lock created; the folder is kept if it contains others.
                    let _ = std::fs::remove_file(folder.join("lock")).and_then(|()| std::fs::remove_dir(&folder));
                }
                manifest.close().await;
                Err(error)
            }
        }
    }

    /// Begins the manifest or reads it, now that the lock is held.
    async fn start(&mut self, overwrite: bool) -> Result<(), ManifestError> {
        let existing = Existing::read(&self.output, &self.folder).await?;
        let had_manifest = existing.has_manifest();
        if overwrite && (had_manifest || !existing.files.is_empty()) {
            let parts = overwrite::own_parts(&self.output, &existing, &self.job).await?;
            overwrite::remove((&self.output, &self.folder), &existing, &parts, &self.lock).await?;
            self.begin().await?;
        } else {
            self.has_partial = existing.has_partial;
            match existing.start(&self.job).await? {
                Start::Begin => self.begin_on(&existing).await?,
                Start::Resume { parts, torn, continuation } => {
                    self.unrecorded = existing.job.as_ref() != Some(&continuation.job);
                    (self.job, self.changed_inputs, self.parts) = (continuation.job, continuation.changed, parts);
                    self.resume(&existing, &torn).await?;
                }
            }
        }
        overwrite::remove_staged(&self.output, had_manifest).await
    }

    async fn begin(&self) -> Result<(), ManifestError> {
        records::create(&self.folder.child(JOB), &self.job, &self.lock).await
    }

    /// Begins where there is no entry: what an earlier run of this job left is replaced.
    async fn begin_on(&mut self, existing: &Existing) -> Result<(), ManifestError> {
        if existing.has_job {
            let name = self.folder.child(JOB);
            tracing::warn!(file = %name, "cannot be parsed, and no part has an entry; the job starts over");
        }
        if !existing.files.is_empty() {
            let parts = existing.files.len();
            tracing::warn!(output = %self.output, parts, "the manifest is lost; the parts of this job are written again");
        }
        if existing.has_totals {
            records::clear(&self.folder.child(DONE), &self.lock).await?;
        }
        self.remove_partial().await?;
        self.begin().await
    }

    async fn resume(&mut self, existing: &Existing, torn: &[usize]) -> Result<(), ManifestError> {
        for &number in torn.iter().filter(|_| self.position().is_some()) {
            tracing::warn!(file = %self.entry(number), "cannot be parsed; its part is written again");
        }
        self.done = existing.has_totals && self.is_done().await?;
        if self.done {
            return self.check_unlisted(&existing.files);
        }
        self.warn_of_strays(&existing.files);
        Ok(())
    }

    /// Names files in the output that are no parts of this job, and that [`finish`](Self::finish) will not accept.
    fn warn_of_strays(&self, files: &[ObjectMeta]) {
        for name in self.members().strays(file_names(files)) {
            tracing::warn!(file = %self.output.child(&name), "not of this job, but readers of the folder read it too");
        }
    }

    fn members(&self) -> Members<'_> {
        let parts = self.parts.len() + usize::from(self.position().is_some());
        Members::new(self.parts.iter().filter_map(Part::entry), parts, Some(self.job.fingerprint()))
    }

    /// Whether the totals are those of the entries. Others are emptied, and written again when the job finishes.
    async fn is_done(&self) -> Result<bool, ManifestError> {
        let name = self.folder.child(DONE);
        let totals = match records::read::<Counts>(&name).await {
            Ok(None) => return Ok(false),
            Err(ManifestError::Broken { .. }) => None,
            totals => totals?,
        };
        let done = self.position().is_none() && totals == Some(self.totals());
        if !done {
            tracing::warn!(file = %name, "differs from the entries; written again when the job finishes");
            records::clear(&name, &self.lock).await?;
        }
        Ok(done)
    }

    /// Inputs with another name or version than recorded. The caller of [`Manifest::open`] compares the rows that were
    /// read from them before the job continues.
    pub(super) fn changed_inputs(&self) -> &[usize] {
        &self.changed_inputs
    }

    /// Records the current job if its inputs or its on-error changed.
    ///
    /// # Errors
    /// As [`Manifest::hold`].
    pub(super) async fn record(&mut self) -> Result<(), ManifestError> {
        if !self.unrecorded {
            return Ok(());
        }
        self.lock.verify().await?;
        // The saved rows were computed with the recorded settings and inputs.
        self.remove_partial().await?;
        records::replace(&self.folder.child(JOB), &self.job, &self.lock).await?;
        self.unrecorded = false;
        self.changed_inputs.clear();
        Ok(())
    }

    /// Checks that the output is still this job's: the lock is held, and the manifest exists.
    ///
    /// # Errors
    /// [`ManifestError::Overtaken`] when another job has acquired the lease, [`ManifestError::Vanished`] when the lock file
    /// or the manifest was deleted, [`ManifestError::Store`] when the store fails.
    pub async fn hold(&self) -> Result<(), ManifestError> {
        let job = self.folder.child(JOB);
        let found = job.head().await?;
        // Last: whatever follows happens soon after it.
        self.lock.verify().await?;
        match found {
            Some(_) => Ok(()),
            None => Err(ManifestError::Vanished { file: job.to_string() }),
        }
    }

    /// As [`Manifest::hold`], after this job has published `file`.
    ///
    /// # Errors
    /// As [`Manifest::hold`].
    pub(super) async fn hold_published(&self, file: &str) -> Result<(), ManifestError> {
        let held = self.hold().await;
        self.withdraw_if_overtaken(file, held).await
    }

    /// Returns `outcome`. If it is that a successor owns the output, deletes `file`, which this job has just published.
    async fn withdraw_if_overtaken(&self, file: &str, outcome: Result<(), ManifestError>) -> Result<(), ManifestError> {
        if matches!(outcome, Err(ManifestError::Overtaken { .. }))
            && let Err(error) = self.withdraw(file).await
        {
            tracing::warn!(%file, %error, "the part was published after another job had taken over; delete it");
        }
        outcome
    }

    /// Deletes an entry of this job, unless the owner of the output has the same settings: then it may be the owner's.
    async fn withdraw_entry(&self, location: &Location, entry: &PartEntry) {
        let withdrawn = async {
            let owner = records::read::<Job>(&self.folder.child(JOB)).await?;
            let is_other = owner.is_some_and(|job| job.fingerprint() != self.job.fingerprint());
            if is_other && records::read::<PartEntry>(location).await?.as_ref() == Some(entry) {
                location.delete().await?;
            }
            Ok::<_, ManifestError>(())
        };
        if let Err(error) = withdrawn.await {
            tracing::warn!(file = %location, %error, "the entry was created after another job had taken over; delete it");
        }
    }

    /// Deletes a file of this job, unless the owner of the output has the same settings and so parts of the same names.
    async fn withdraw(&self, file: &str) -> Result<(), ManifestError> {
        let owner = records::read::<Job>(&self.folder.child(JOB)).await?;
        if owner.is_some_and(|job| job.fingerprint() != self.job.fingerprint()) {
            self.output.child(file).delete().await?;
        }
        Ok(())
    }

    /// SHA-256 of the job as it is recorded, hexadecimal.
    pub(super) fn job_digest(&self) -> String {
        self.job.digest()
    }

    /// The fence that prevents a job that lost its lock from replacing files of its successor.
    pub(super) fn fence(&self) -> &impl Fence<Error = crate::error::Error> {
        &self.lock
    }

    fn entry(&self, part: usize) -> Location {
        self.folder.child(&entry_name(part))
    }

    /// Name of the file of part `part`.
    pub(super) fn part_file(&self, part: usize) -> String {
        match self.parts.get(part).and_then(Part::entry) {
            Some(entry) => entry.file.clone(),
            None => part_name(part, self.job.fingerprint().as_deref()),
        }
    }

    /// Location of part `part`.
    pub(super) fn part(&self, part: usize) -> Location {
        self.output.child(&self.part_file(part))
    }

    /// Locations of parts that have no entry yet, by their numbers.
    pub(super) fn new_parts(&self) -> impl Fn(usize) -> Location + use<> {
        let (output, fingerprint) = (self.output.clone(), self.job.fingerprint());
        move |part| output.child(&part_name(part, fingerprint.as_deref()))
    }

    /// Where the saved rows of the open part are.
    pub(super) fn partial(&self) -> Location {
        self.folder.child(PARTIAL)
    }

    /// Deletes the saved rows of the open part, if there are any.
    ///
    /// # Errors
    /// [`ManifestError::Store`] when the store fails.
    pub(super) async fn remove_partial(&mut self) -> Result<(), ManifestError> {
        if self.has_partial {
            self.partial().delete().await?;
            self.has_partial = false;
        }
        Ok(())
    }

    /// The folder of the parts.
    pub fn output(&self) -> &Location {
        &self.output
    }

    /// The parts that the manifest has, in order.
    pub(super) fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Whether nothing is left to do.
    pub(super) fn is_complete(&self) -> bool {
        self.done && self.parts.iter().all(Part::is_durable)
    }

    /// Numbers of the parts that have to be written again.
    pub(super) fn damaged(&self) -> Vec<usize> {
        (0..self.parts.len()).filter(|&part| !self.parts[part].is_durable()).collect()
    }

    /// Where the next part begins; `None` when the last part exists.
    pub fn position(&self) -> Option<Position> {
        match self.parts.last().and_then(Part::entry) {
            None => Some(Position::default()),
            Some(part) if part.last => None,
            Some(part) => Some(part.end),
        }
    }

    /// Where part `part` begins; `None` when the entry before it is lost.
    pub(super) fn start_of(&self, part: usize) -> Option<Position> {
        match part.checked_sub(1) {
            None => Some(Position::default()),
            Some(before) => self.parts.get(before)?.entry().map(|entry| entry.end),
        }
    }

    /// Computes the SHA-256 of every part and compares it with its entry.
    ///
    /// # Errors
    /// [`ManifestError::Store`] when the store fails.
    pub(super) async fn check_digests(&mut self) -> Result<(), ManifestError> {
        let check = |part: &Part| {
            let file = part.entry().filter(|_| part.is_durable()).map(|entry| (entry.clone(), self.output.clone()));
            async move {
                match file {
                    Some((entry, output)) => Ok(sha256(&output.child(&entry.file)).await? == entry.sha256),
                    None => Ok::<_, StoreError>(true),
                }
            }
        };
        let checks: Vec<_> = self.parts.iter().map(check).collect();
        let same: Vec<bool> = stream::iter(checks).buffered(DIGESTS).try_collect().await?;
        for (part, same) in self.parts.iter_mut().zip(same) {
            if let (false, Part::Durable(entry)) = (same, &*part) {
                *part = Part::Damaged(entry.clone());
            }
        }
        Ok(())
    }

    /// Prepares for publishing part `number`, which ends at `end` and has rows of this digest: the output is still this job's. The
    /// entry of a part that is written again is emptied.
    ///
    /// # Errors
    /// [`ManifestError`] when the output belongs to another process, or when a part that is written again has other rows.
    pub(super) async fn prepare(
        &mut self,
        number: usize,
        end: Position,
        rows: Option<&str>,
    ) -> Result<(), ManifestError> {
        self.hold().await?;
        if number < self.parts().len() {
            self.check_repair(number, end, rows)?;
            self.retract(number).await?;
        }
        Ok(())
    }

    /// Checks that part `part`, written again, matches the part that it replaces: it ends where the next part begins,
    /// and was made of the same rows.
    ///
    /// # Errors
    /// [`ManifestError::Repair`] when it does not.
    fn check_repair(&self, part: usize, end: Position, rows: Option<&str>) -> Result<(), ManifestError> {
        let failed =
            |reason: &str| Err(ManifestError::Repair { file: self.part(part).to_string(), reason: reason.to_owned() });
        let entry = self.parts.get(part).and_then(Part::entry);
        let next = self.parts.get(part + 1).and_then(Part::entry);
        let expected = entry.map(|entry| entry.end).or(next.map(|next| next.start));
        if expected.is_some_and(|expected| expected != end) {
            return failed("it would end at another row than the part that it replaces");
        }
        let digests = entry.and_then(|entry| entry.rows_digest.as_deref()).zip(rows);
        match digests {
            Some((then, now)) if then != now => failed("its input rows are not those that were read the first time"),
            _ => Ok(()),
        }
    }

    /// Empties the entry of a part that is about to be published again, and the totals.
    ///
    /// # Errors
    /// [`ManifestError::Overtaken`] when another job has taken over, [`ManifestError::Store`] when the store fails.
    async fn retract(&mut self, part: usize) -> Result<(), ManifestError> {
        if self.done {
            records::clear(&self.folder.child(DONE), &self.lock).await?;
            self.done = false;
        }
        records::clear(&self.entry(part), &self.lock).await
    }

    /// Creates the entry of a part that was published again.
    ///
    /// # Errors
    /// As [`Manifest::append`]; [`ManifestError::Broken`] when the next entry does not follow from it.
    pub(super) async fn restore(&mut self, part: usize, entry: PartEntry) -> Result<(), ManifestError> {
        self.enter(part, &entry).await?;
        let next = self.parts.get(part + 1).and_then(Part::entry);
        let reason = next.and_then(|next| next.break_after(part + 1, Some(&entry)));
        self.parts[part] = Part::Durable(entry);
        match reason {
            Some(reason) => Err(ManifestError::Broken { file: self.entry(part + 1).to_string(), reason }),
            None => Ok(()),
        }
    }

    /// Creates the entry of part `part`. If the output was a successor's by then, the entry and the part are deleted again.
    async fn enter(&self, part: usize, entry: &PartEntry) -> Result<(), ManifestError> {
        let location = self.entry(part);
        let created = match records::create(&location, entry, &self.lock).await {
            Ok(()) => self.lock.verify().await,
            failed => failed,
        };
        if matches!(created, Err(ManifestError::Overtaken { .. })) {
            self.withdraw_entry(&location, entry).await;
        }
        self.withdraw_if_overtaken(&entry.file, created).await
    }

    /// Appends the entry of a durable part.
    ///
    /// # Errors
    /// [`ManifestError::Overtaken`] when there is another entry for this part, [`ManifestError::Store`] when the store
    /// fails.
    pub async fn append(&mut self, entry: PartEntry) -> Result<(), ManifestError> {
        self.enter(self.parts.len(), &entry).await?;
        self.parts.push(Part::Durable(entry));
        Ok(())
    }

    /// Totals over all parts.
    pub fn totals(&self) -> Counts {
        self.parts.iter().filter_map(Part::entry).collect()
    }

    /// Totals over the parts that need not be written again.
    pub(super) fn durable_totals(&self) -> Counts {
        self.parts.iter().filter(|part| part.is_durable()).filter_map(Part::entry).collect()
    }

    /// Size of all parts, in bytes.
    pub fn bytes(&self) -> u64 {
        let entries = self.parts.iter().filter_map(Part::entry);
        entries.fold(0, |bytes, entry| bytes.saturating_add(entry.bytes))
    }

    /// Finishes the job: everything that the manifest names exists, and no other part does.
    ///
    /// # Errors
    /// As [`Manifest::hold`]; [`ManifestError::Vanished`] when a part or an entry was deleted,
    /// [`ManifestError::Unlisted`] when there are files that are mistaken for parts, [`ManifestError::Overtaken`] when there are other totals,
    /// [`ManifestError::Broken`] when they cannot be parsed.
    pub async fn finish(&mut self) -> Result<(), ManifestError> {
        self.hold().await?;
        let (files, records) = futures::try_join!(self.output.children(), self.folder.children())?;
        self.check_whole(&files, &records)?;
        self.check_unlisted(&files)?;
        records::create(&self.folder.child(DONE), &self.totals(), &self.lock).await?;
        self.done = true;
        Ok(())
    }

    /// Checks that every file that the manifest names exists.
    fn check_whole(&self, files: &[ObjectMeta], records: &[ObjectMeta]) -> Result<(), ManifestError> {
        let sizes = |objects: &[ObjectMeta]| -> HashMap<String, u64> {
            objects.iter().filter_map(|o| Some((o.location.filename()?.to_owned(), o.size))).collect()
        };
        let (files, records) = (sizes(files), sizes(records));
        let vanished = |file: Location| Err(ManifestError::Vanished { file: file.to_string() });
        for (number, part) in self.parts.iter().enumerate() {
            let Some(entry) = part.entry() else { return vanished(self.entry(number)) };
            if files.get(&entry.file) != Some(&entry.bytes) {
                return vanished(self.output.child(&entry.file));
            }
            if !records.contains_key(&entry_name(number)) {
                return vanished(self.entry(number));
            }
        }
        Ok(())
    }

    /// Checks that the output holds no file that is mistaken for a part.
    fn check_unlisted(&self, files: &[ObjectMeta]) -> Result<(), ManifestError> {
        let files = self.members().strays(file_names(files));
        match files.is_empty() {
            true => Ok(()),
            false => Err(ManifestError::Unlisted { output: self.output.to_string(), files }),
        }
    }

    /// Releases the lock. The lock of a job that is killed is released by the kernel, or its lease expires.
    pub async fn close(self) {
        self.lock.release().await;
    }
}

fn check_folder(output: &Location) -> Result<(), ManifestError> {
    match output.local_path().and_then(|path| Obstacle::to_folder(&path)) {
        Some(obstacle) => Err(ManifestError::NoFolder { output: output.to_string(), obstacle }),
        None => Ok(()),
    }
}

fn file_names(files: &[ObjectMeta]) -> impl Iterator<Item = &str> {
    files.iter().filter_map(|file| file.location.filename())
}

/// SHA-256 of a file, hexadecimal; of no bytes when it does not exist.
pub(crate) async fn sha256(location: &Location) -> Result<String, StoreError> {
    let failed = |e| StoreError::request("read", location, e);
    let mut hash = Sha256::new();
    let got = object_store::ObjectStoreExt::get(&*location.store, &location.path).await;
    let mut body = match got {
        Ok(found) => found.into_stream(),
        Err(object_store::Error::NotFound { .. }) => return Ok(format!("{:x}", hash.finalize())),
        Err(error) => return Err(failed(error)),
    };
    while let Some(bytes) = body.try_next().await.map_err(failed)? {
        hash.update(&bytes);
    }
    Ok(format!("{:x}", hash.finalize()))
}
