//! Copies of checkpoints in a store, made by a task of their own while the run goes on.
//!
//! ```text
//! URL/step-0000001250/
//!   tensors.safetensors, state.json, manifest.json   the checkpoint as it is on the disk
//!   steps.jsonl, valid.jsonl                         the journals until then
//!   model/                                           the model of the best measurement, if there is one
//!   upload.json                                      size and SHA-256 of all of them
//! ```
//!
//! `upload.json` is written last and removed first: a folder that has it is complete.
//!
//! A store that fails is a warning, and the next checkpoint is copied again. While a copy is being made, at most one newer
//! checkpoint waits for its turn: of several, the newest.

mod copies;
mod staged;

use std::{
    mem,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use serde::Serialize;
use tokio::{runtime::Handle, sync::Notify, task::JoinHandle, time::timeout};

pub(super) use self::copies::{Copied, Copies};
use self::staged::Staged;
use super::{
    checkpoint::{FILES, FOLDER as CHECKPOINTS, MANIFEST, folder_name},
    journal::{STEPS, VALID},
    model::FILES as MODEL_FILES,
    settings::Settings,
};
use crate::{
    error::{Error, Result},
    source::{SourceError, would_read},
    stores::{Location, Stores},
};

/// The list of the files of a copy.
const LISTING: &str = "upload.json";
/// The folder of the model in a copy.
const MODEL: &str = "model";
const JOURNALS: [&str; 2] = [STEPS, VALID];
/// Prefix of the folders in which files wait for the store.
const PREFIX: &str = "upload-";

/// Whether an input would read the copies in a folder as text.
///
/// # Errors
/// [`SourceError::Store`] when the input is no address.
pub(crate) fn would_read_copies(stores: &Stores, input: &str, folder: &Location) -> Result<bool, SourceError> {
    let copy = folder.child(&folder_name(1));
    let of_model = MODEL_FILES.iter().map(|name| format!("{MODEL}/{name}"));
    let names = FILES.iter().chain(&JOURNALS).chain([&LISTING]).map(|name| (*name).to_owned());
    for name in names.chain(of_model) {
        if would_read(stores, input, &copy.child(&name))? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Where the checkpoints of a run are copied to.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) copies: Copies,
    /// They are not those of another run; a store that did not answer at the start is asked before the first copy.
    pub(super) is_checked: bool,
}

/// How the copies of a run ended.
#[derive(Debug, Clone, Serialize)]
pub struct UploadReport {
    /// Where they are.
    pub url: String,
    /// Step of the last one that is complete and was made or found in this process.
    pub step: Option<u64>,
    /// Why the last checkpoint is not among them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

/// The copies of a run that goes on.
#[derive(Debug)]
pub(super) struct Uploads {
    run: PathBuf,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
    has_ended: bool,
    /// Checkpoints that were handed over.
    number: u64,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug)]
struct State {
    next: Option<Staged>,
    /// The run has gone back to this step.
    remove_after: Option<u64>,
    /// There will be no other checkpoint.
    is_closed: bool,
    report: UploadReport,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_one();
    }
}

impl Uploads {
    /// Begins to wait for checkpoints. Must be called within the runtime.
    ///
    /// # Errors
    /// [`Error::Io`] when what a killed process has left cannot be removed.
    pub(super) fn start(run: &Path, target: Target, settings: Settings) -> Result<Self> {
        staged::clear(run).map_err(|source| Error::io(run, source))?;
        let report = UploadReport { url: target.copies.folder().to_string(), step: None, failed: None };
        let state = State { next: None, remove_after: None, is_closed: false, report };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Notify::new() });
        let worker = Worker { shared: Arc::clone(&shared), target, settings, remove_after: None, failed: None };
        let task = Handle::current().spawn(worker.run());
        Ok(Self { run: run.to_owned(), shared, task, has_ended: false, number: 0 })
    }

    /// Hands over a checkpoint, whose files may be removed after this call. `with_model`: with the model in the folder, which is
    /// another one than that of the checkpoint.
    pub(super) fn add(&mut self, checkpoint: &Path, step: u64, with_model: bool) {
        self.number += 1;
        match Staged::new(&self.run, checkpoint, step, self.number, with_model) {
            Ok(staged) => self.shared.change(|state| state.next = Some(staged)),
            Err(error) => {
                let reason = format!("{}: {error}", checkpoint.display());
                tracing::warn!("the checkpoint of step {step} is not copied: {reason}");
                self.shared.lock().report.failed = Some(reason);
            }
        }
    }

    /// Removes copies after a step, to which the run has gone back.
    pub(super) fn remove_after(&self, step: u64) {
        self.shared.change(|state| {
            state.next = state.next.take().filter(|next| next.step <= step);
            state.remove_after = Some(step);
        });
    }

    /// Waits for the last copy, at most for `limit`; whether it has ended. No checkpoint may be added after the first call.
    /// Blocks; must be called within the runtime.
    pub(super) fn has_ended(&mut self, limit: Duration) -> bool {
        self.shared.change(|state| state.is_closed = true);
        if !self.has_ended {
            let ended = Handle::current().block_on(timeout(limit, &mut self.task));
            if let Ok(Err(died)) = &ended {
                self.shared.lock().report.failed = Some(format!("the task that makes copies died: {died}"));
            }
            self.has_ended = ended.is_ok();
        }
        self.has_ended
    }

    /// What was copied.
    pub(super) fn report(&self) -> UploadReport {
        self.shared.lock().report.clone()
    }
}

/// What the task does next.
enum Next {
    Work(Option<Staged>),
    Wait,
    End,
}

/// The task.
struct Worker {
    shared: Arc<Shared>,
    target: Target,
    settings: Settings,
    /// Copies after this step are to be removed before another one is made.
    remove_after: Option<u64>,
    /// A checkpoint whose copy has failed.
    failed: Option<Staged>,
}

impl Worker {
    async fn run(mut self) {
        loop {
            match self.next() {
                Next::Work(staged) => self.work(staged).await,
                Next::Wait => self.shared.changed.notified().await,
                Next::End => return,
            }
        }
    }

    fn next(&mut self) -> Next {
        let mut state = self.shared.lock();
        let removal = state.remove_after.take();
        if let Some(step) = removal {
            self.remove_after = removal;
            self.failed = self.failed.take().filter(|failed| failed.step <= step);
        }
        match mem::take(&mut state.next) {
            Some(staged) => Next::Work(Some(staged)),
            None if removal.is_some() => Next::Work(None),
            // The store may answer again.
            None if state.is_closed => self.failed.take().map_or(Next::End, |staged| Next::Work(Some(staged))),
            None => Next::Wait,
        }
    }

    async fn work(&mut self, staged: Option<Staged>) {
        let made = self.make(staged.as_ref()).await;
        let Some(staged) = staged else {
            if let Err(error) = made {
                tracing::warn!(
                    "{}; copies after the step to which the run has gone back are still there",
                    error.report()
                );
            }
            return;
        };
        self.failed = None;
        let mut state = self.shared.lock();
        match made {
            Ok(()) => {
                (state.report.step, state.report.failed) = (Some(staged.step), None);
                tracing::info!("the checkpoint of step {} was copied to {}", staged.step, state.report.url);
            }
            Err(error) => {
                let reason = error.report();
                if !state.is_closed {
                    let step = staged.step;
                    tracing::warn!(
                        "the checkpoint of step {step} was not copied: {reason}; the next one is tried again"
                    );
                    self.failed = Some(staged);
                }
                state.report.failed = Some(reason);
            }
        }
    }

    async fn make(&mut self, staged: Option<&Staged>) -> Result<()> {
        let Target { copies, is_checked } = &mut self.target;
        if !*is_checked {
            copies.check(&self.settings).await?;
            *is_checked = true;
        }
        if let Some(step) = self.remove_after {
            copies.remove_after(step).await?;
            self.remove_after = None;
        }
        match staged {
            Some(staged) => Ok(copies.add(staged).await?),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        sync::atomic::{AtomicI64, Ordering},
    };

    use futures::FutureExt;

    use super::*;
    use crate::{
        stores::hooked::{Asked, Hooked},
        train::{
            checkpoint::{
                Checkpoints,
                tests::{snapshot, state},
            },
            error::TrainFault,
            held_out::Measured,
        },
    };

    /// A run on a disk, and a store that refuses to write when its budget is spent.
    struct Place {
        run: tempfile::TempDir,
        checkpoints: Checkpoints,
        copies: Copies,
        writes: Arc<AtomicI64>,
    }

    const KEEP: usize = 2;
    const ALWAYS: i64 = i64::MAX;

    fn place() -> Place {
        let writes = Arc::new(AtomicI64::new(ALWAYS));
        let budget = Arc::clone(&writes);
        let hooked = Hooked::new(move |asked, _| {
            let is_refused = asked == Asked::Write && budget.fetch_sub(1, Ordering::SeqCst) <= 0;
            let refusal = || object_store::Error::Generic { store: "hooked", source: "is away".into() };
            async move { if is_refused { Err(refusal()) } else { Ok(()) } }.boxed()
        });
        let stores = Stores::with_settings([]);
        stores.insert("memory://x", Arc::new(hooked));
        let copies = Copies::new(stores.locate("memory://x/copies").unwrap(), KEEP);
        let run = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(run.path(), KEEP);
        Place { run, checkpoints, copies, writes }
    }

    impl Place {
        /// Writes the checkpoint of a step, and all that belongs to it.
        fn checkpoint(&self, step: u64) -> PathBuf {
            let measured = Measured { step, forward: 2.0, backward: 2.0, average: 2.0, tokens: 9 };
            let state = super::super::checkpoint::RunState { best: Some(measured), ..state(step) };
            for name in JOURNALS.iter().chain(&MODEL_FILES) {
                fs::write(self.run.path().join(name), format!("{name} of step {step}")).unwrap();
            }
            self.checkpoints.write(&state, &snapshot(step), None).unwrap()
        }

        fn staged(&self, step: u64) -> Staged {
            let path = self.checkpoint(step);
            Staged::new(self.run.path(), &path, step, step, true).unwrap()
        }

        async fn newest(&self) -> Option<u64> {
            self.copies.newest().await.unwrap().map(|newest| newest.state.counters.step)
        }

        async fn names(&self) -> Vec<String> {
            let folder = self.copies.folder();
            let all = folder.below(&folder.path, 3, |_| true).await.unwrap();
            let mut names: Vec<String> = all.into_iter().map(|meta| meta.location.to_string()).collect();
            names.sort();
            names
        }
    }

    /// Everything is read back on another machine, where the model and the journals were lost too.
    #[tokio::test]
    async fn a_copy_brings_back_checkpoint_journals_and_model() {
        let place = place();
        place.copies.add(&place.staged(7)).await.unwrap();
        let other = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(other.path(), KEEP);
        let copied = place.copies.newest().await.unwrap().unwrap();
        copied.fetch(other.path(), &checkpoints).await.unwrap();
        let found = checkpoints.latest().unwrap().unwrap();
        assert_eq!(found.path, copied.found(&checkpoints).path);
        assert_eq!((found.state.counters, found.snapshot().unwrap()), (state(7).counters, snapshot(7)));
        for name in JOURNALS.iter().chain(&MODEL_FILES) {
            let text = fs::read_to_string(other.path().join(name)).unwrap();
            assert_eq!(text, format!("{name} of step 7"));
        }
        // Nothing else is left.
        let mut names: Vec<_> = fs::read_dir(other.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names.len(), 1 + JOURNALS.len() + MODEL_FILES.len(), "{names:?}");
    }

    /// A store that fails at any of its writes has the copy before, and the next try completes the new one.
    #[tokio::test]
    async fn a_copy_is_complete_or_not_there() {
        for writes in 0.. {
            let place = place();
            place.copies.add(&place.staged(1)).await.unwrap();
            place.writes.store(writes, Ordering::SeqCst);
            let staged = place.staged(2);
            let added = place.copies.add(&staged).await;
            place.writes.store(ALWAYS, Ordering::SeqCst);
            if added.is_ok() {
                // Three files of the checkpoint, two journals, six of the model, and the list.
                assert_eq!(writes, 12);
                break;
            }
            assert_eq!(place.newest().await, Some(1), "after {writes} writes");
            place.copies.add(&staged).await.unwrap();
            assert_eq!(place.newest().await, Some(2), "after {writes} writes");
        }
    }

    #[tokio::test]
    async fn the_newest_copies_are_kept_and_made_once() {
        let place = place();
        for step in [5, 10, 100] {
            place.copies.add(&place.staged(step)).await.unwrap();
        }
        let names = place.names().await;
        assert!(names.len() == 24 && names.iter().all(|name| !name.contains("step-0000000005")), "{names:?}");
        // The same checkpoint again is not written again.
        place.writes.store(0, Ordering::SeqCst);
        let path = place.checkpoints.path(100);
        place.copies.add(&Staged::new(place.run.path(), &path, 100, 101, true).unwrap()).await.unwrap();
        place.copies.remove_after(10).await.unwrap();
        assert_eq!(place.newest().await, Some(10));
        place.copies.clear().await.unwrap();
        assert_eq!((place.newest().await, place.names().await.len()), (None, 0));
    }

    /// A copy whose process was killed has left unfinished files, and in one case nothing else. Files of others stay.
    #[tokio::test]
    async fn what_a_killed_process_left_on_a_disk_goes_with_its_copy() {
        let (place, disk) = (place(), tempfile::tempdir().unwrap());
        let folder = Stores::with_settings([]).locate(disk.path().to_str().unwrap()).unwrap();
        let copies = Copies::new(folder, KEEP);
        for (name, file) in [
            ("step-0000000001", ".tensors.safetensors#1"),
            ("step-0000000002", "model/.weights.safetensors#2"),
            ("step-0000000003", ".mine.txt#1"),
        ] {
            let path = disk.path().join(name).join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "unfinished").unwrap();
        }
        for step in [2, 4, 5] {
            copies.add(&place.staged(step)).await.unwrap();
        }
        let mut left: Vec<_> = fs::read_dir(disk.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["step-0000000003", "step-0000000004", "step-0000000005"]);
        assert!(disk.path().join("step-0000000003/.mine.txt#1").exists());
    }

    /// Folders of other programs may have such names. Without files of others, what lacks a list is a copy that was not completed.
    #[tokio::test]
    async fn folders_of_others_stay() {
        let place = place();
        for name in [
            "step-0000000001/notes.txt",
            "step-0000000001/state.json",
            "step-0000000002/tensors.safetensors",
            "step-3/state.json",
        ] {
            let object = place.copies.folder().child(name);
            object.put("mine".into(), object_store::PutMode::Overwrite).await.unwrap();
        }
        let others =
            ["copies/step-0000000001/notes.txt", "copies/step-0000000001/state.json", "copies/step-3/state.json"];
        for step in [4, 5, 6] {
            place.copies.add(&place.staged(step)).await.unwrap();
        }
        // Two copies of twelve files.
        assert_eq!(place.names().await.len(), others.len() + 24);
        place.copies.clear().await.unwrap();
        assert_eq!(place.names().await, others);
    }

    /// Nothing stays of the check.
    #[tokio::test]
    async fn a_store_that_cannot_be_written_to_is_found_before_the_first_copy() {
        let place = place();
        place.copies.check_writable().await.unwrap();
        assert!(place.names().await.is_empty());
        place.writes.store(0, Ordering::SeqCst);
        let error = place.copies.check_writable().await.unwrap_err();
        assert!(error.report().contains("is away"), "{}", error.report());
        let disk = tempfile::tempdir().unwrap();
        fs::write(disk.path().join("file"), "").unwrap();
        for (name, is_writable) in [("", true), ("new/copies", true), ("file", false), ("file/copies", false)] {
            let folder = Stores::with_settings([]).locate(disk.path().join(name).to_str().unwrap()).unwrap();
            assert_eq!(Copies::new(folder, KEEP).check_writable().await.is_ok(), is_writable, "{name}");
        }
        assert_eq!(fs::read_dir(disk.path()).unwrap().count(), 1);
    }

    #[tokio::test]
    async fn a_damaged_copy_is_an_error_and_no_checkpoint() {
        for file in ["tensors.safetensors", "state.json", "manifest.json", "model/weights.safetensors", "steps.jsonl"] {
            for is_missing in [false, true] {
                let place = place();
                place.copies.add(&place.staged(3)).await.unwrap();
                let damaged = place.copies.folder().child(&format!("step-0000000003/{file}"));
                match is_missing {
                    true => damaged.delete().await.unwrap(),
                    false => drop(damaged.put("other".into(), object_store::PutMode::Overwrite).await.unwrap()),
                }
                let other = tempfile::tempdir().unwrap();
                let checkpoints = Checkpoints::new(other.path(), KEEP);
                let fetched = match place.copies.newest().await {
                    Ok(newest) => newest.unwrap().fetch(other.path(), &checkpoints).await,
                    Err(error) => Err(error),
                };
                let error = fetched.unwrap_err();
                assert!(matches!(error.module(), Some(TrainFault::DamagedCopy { .. })), "{file}: {error}");
                assert!(error.to_string().contains(file.rsplit('/').next().unwrap()), "{error}");
                assert!(checkpoints.latest().unwrap().is_none());
            }
        }
    }

    fn start(place: &Place, is_checked: bool) -> Uploads {
        let target = Target { copies: place.copies.clone(), is_checked };
        Uploads::start(place.run.path(), target, Settings::default()).unwrap()
    }

    /// Waits until the task has ended; off the threads of the runtime, as the run does.
    async fn ended(mut uploads: Uploads) -> UploadReport {
        let wait = move || {
            while !uploads.has_ended(Duration::from_secs(1)) {}
            uploads.report()
        };
        tokio::task::spawn_blocking(wait).await.unwrap()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_store_that_is_away_is_tried_again() {
        let place = place();
        fs::create_dir_all(place.run.path().join("checkpoints/upload-9")).unwrap();
        place.writes.store(0, Ordering::SeqCst);
        let mut uploads = start(&place, true);
        uploads.add(&place.checkpoint(1), 1, true);
        while uploads.report().failed.is_none() {
            tokio::task::yield_now().await;
        }
        // The one that failed is tried again at the end, when there is no newer one.
        place.writes.store(ALWAYS, Ordering::SeqCst);
        let report = ended(uploads).await;
        assert_eq!((report.step, report.failed, place.newest().await), (Some(1), None, Some(1)));

        place.writes.store(0, Ordering::SeqCst);
        let mut uploads = start(&place, true);
        uploads.add(&place.checkpoint(2), 2, true);
        let report = ended(uploads).await;
        assert!(report.step.is_none() && report.failed.unwrap().contains("is away"));
        assert_eq!(place.newest().await, Some(1));
        let folders: Vec<_> = fs::read_dir(place.run.path().join("checkpoints")).unwrap().flatten().collect();
        assert!(folders.iter().all(|folder| folder.file_name().to_string_lossy().starts_with("step-")), "{folders:?}");
    }

    /// The run has gone back: what is copied already, and what waits, is not of its text any more. The copy of step 3 may have begun,
    /// and then removes the oldest one.
    #[tokio::test(flavor = "multi_thread")]
    async fn copies_after_a_step_are_removed_before_the_next_one() {
        let place = place();
        for step in [1, 2] {
            place.copies.add(&place.staged(step)).await.unwrap();
        }
        let mut uploads = start(&place, true);
        uploads.add(&place.checkpoint(3), 3, true);
        uploads.remove_after(2);
        let report = ended(uploads).await;
        assert!(report.failed.is_none(), "{report:?}");
        assert_eq!(place.newest().await, Some(2));
    }

    /// The store did not answer when the run began, and turns out to hold another run.
    #[tokio::test(flavor = "multi_thread")]
    async fn copies_of_another_run_are_not_replaced() {
        let place = place();
        place.copies.add(&place.staged(9)).await.unwrap();
        let text = fs::read_to_string(place.checkpoints.path(9).join("state.json")).unwrap();
        assert!(text.contains("\"settings\":{}"), "the settings of this run are those of no run: {text}");
        let other: Settings = serde_json::from_str("{\"seed\": \"1\"}").unwrap();
        let target = Target { copies: place.copies.clone(), is_checked: false };
        let mut uploads = Uploads::start(place.run.path(), target, other).unwrap();
        uploads.add(&place.checkpoint(10), 10, true);
        let report = ended(uploads).await;
        assert!(report.failed.unwrap().contains("seed: not set in the run, 1 now"));
        assert_eq!(place.newest().await, Some(9));
    }
}
