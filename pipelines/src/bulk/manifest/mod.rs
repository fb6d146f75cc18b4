//! What is durable: the manifest of a bulk job, beside its output.
//!
//! ```text
//! OUTPUT/part-00000.parquet     data: nothing but Parquet lies in the folder itself
//! OUTPUT/_elmo/job.json         what the job is: settings that change results, and its inputs
//! OUTPUT/_elmo/part-00000.json  one entry per part that is durable, written after the part
//! OUTPUT/_elmo/done.json        totals: the job is finished
//! OUTPUT/_elmo/partial.arrows   rows of a part that is not complete, put aside by a job that was asked to stop
//! OUTPUT/_elmo/lock             held while a job runs
//! ```
//!
//! Job, entries and totals are created once and never changed ([`PutMode::Create`]), so a second writer that slips past
//! the lock is stopped by the first entry that it tries to create; before it publishes a part it asks whether the lock
//! is still its own. A part without an entry is no part: the next run writes it again, to the same bytes. Each entry
//! begins where the one before it ends, which is checked before anybody goes on from there.
//!
//! Parts are numbered with five digits. From 100,000 on a letter says how many digits there are (`a` six, `b` seven,
//! …), so that names sort as their numbers do: `part-99999`, `part-a100000`, …, `part-a999999`, `part-b1000000`.

mod lock;

use std::collections::{BTreeMap, HashMap};

use object_store::{ObjectMeta, PutMode};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use thiserror::Error;

use self::lock::{LEASE, Lock};
use crate::{
    error::{Exit, Fault},
    source::{InputFile, Position},
    stores::{Location, StoreError},
};

/// Folder of the manifest inside an output.
pub const FOLDER: &str = "_elmo";
/// Rows of a part that is not complete.
const PARTIAL: &str = "partial.arrows";
/// Differences that an error lists.
const MOST_DIFFERENCES: usize = 20;

/// Why an output cannot be written to.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// The store fails.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The output was begun with other settings or other inputs.
    #[error("{output} was begun by a job that differs:\n{}", differences.join("\n"))]
    Differs {
        /// The output.
        output: String,
        /// One line per setting: there, here.
        differences: Vec<String>,
    },
    /// Another job writes to the output.
    #[error("{output}: another job is writing there ({holder})")]
    Locked {
        /// The output.
        output: String,
        /// Who, as far as is known.
        holder: String,
    },
    /// Another job created this entry after us.
    #[error("{file}: another job has written this part; this job stops so that nothing is written twice")]
    Overtaken {
        /// The entry.
        file: String,
    },
    /// There are files in the output that no manifest knows.
    #[error("{output} holds {file}, {}", unknown(*manifest))]
    Foreign {
        /// The output.
        output: String,
        /// One of the files.
        file: String,
        /// There is a manifest, which does not know it.
        manifest: bool,
    },
    /// The output, or something above it, is a file.
    #[error("{output}: {file} is a file, and an output is a folder")]
    NoFolder {
        /// The output.
        output: String,
        /// The file.
        file: String,
    },
    /// Something that the job wrote is not there any more.
    #[error("{file}: this job wrote it, and it is gone or another one now")]
    Vanished {
        /// The file.
        file: String,
    },
    /// An entry that is no entry.
    #[error("{file}: not an entry of a manifest: {reason}")]
    Broken {
        /// The entry.
        file: String,
        /// What is wrong.
        reason: String,
    },
    /// A part that was lost or damaged was written again, and other bytes came out.
    #[error("{file} was lost or damaged, and what was written in its place differs from what the manifest says")]
    Part {
        /// The part.
        file: String,
    },
}

fn unknown(manifest: bool) -> &'static str {
    if manifest { "which its job did not write" } else { "but no manifest of a job" }
}

impl Fault for ManifestError {
    fn exit(&self) -> Exit {
        match self {
            Self::Store(error) => error.exit(),
            Self::Differs { .. } | Self::NoFolder { .. } => Exit::Usage,
            _ => Exit::Storage,
        }
    }

    fn help(&self) -> Option<String> {
        match self {
            Self::Store(error) => error.help(),
            Self::Differs { .. } => Some(
                "use the settings and inputs of that job to go on with it, another --output, or --overwrite".into(),
            ),
            Self::Locked { .. } => Some(format!(
                "wait for it, or give another --output; a job in an object store that died is free after {} s",
                LEASE.as_secs()
            )),
            Self::Overtaken { .. } => Some("run one job per output".into()),
            Self::Foreign { .. } => {
                Some("give an empty --output; --overwrite removes the parts of an earlier job and nothing else".into())
            }
            Self::NoFolder { .. } => Some("give the name of a folder as --output; it is made when needed".into()),
            Self::Vanished { .. } => {
                Some("leave the output alone while a job runs; the same command again writes what is missing".into())
            }
            Self::Broken { .. } | Self::Part { .. } => Some("begin anew with --overwrite".into()),
        }
    }
}

/// One file of the input, as it was when the job began.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputRecord {
    /// Path or URL.
    pub file: String,
    /// Bytes.
    pub size: u64,
    /// Etag, or time of the last change.
    pub version: Option<String>,
}

impl From<&InputFile> for InputRecord {
    fn from(file: &InputFile) -> Self {
        Self { file: file.to_string(), size: file.size, version: file.version.clone() }
    }
}

/// What a job is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// Everything that changes the bytes of the output.
    pub settings: BTreeMap<String, String>,
    /// The files, in the order in which they are read.
    pub inputs: Vec<InputRecord>,
}

impl Job {
    fn differs(&self, now: &Self, output: &Location) -> ManifestError {
        ManifestError::Differs { output: output.to_string(), differences: self.differences(now) }
    }

    /// One line per difference between the job that began an output and this one.
    fn differences(&self, now: &Self) -> Vec<String> {
        let keys: std::collections::BTreeSet<&String> = self.settings.keys().chain(now.settings.keys()).collect();
        let value = |job: &Self, key: &str| job.settings.get(key).cloned().unwrap_or_else(|| "(not set)".into());
        let mut lines: Vec<String> = keys
            .into_iter()
            .filter(|key| self.settings.get(*key) != now.settings.get(*key))
            .map(|key| {
                let (then, now) = contrast(&value(self, key), &value(now, key));
                format!("  {key}: there {then}, now {now}")
            })
            .collect();
        let known: BTreeMap<&str, &InputRecord> = self.inputs.iter().map(|i| (i.file.as_str(), i)).collect();
        for input in &now.inputs {
            match known.get(input.file.as_str()) {
                None => lines.push(format!("  input {}: not there then", input.file)),
                Some(then) if *then != input => lines.push(format!("  input {}: changed since", input.file)),
                Some(_) => {}
            }
        }
        let still: std::collections::BTreeSet<&str> = now.inputs.iter().map(|i| i.file.as_str()).collect();
        let gone = self.inputs.iter().filter(|then| !still.contains(then.file.as_str()));
        lines.extend(gone.map(|then| format!("  input {}: not there now", then.file)));
        if lines.is_empty() && self.inputs != now.inputs {
            lines.push("  the inputs come in another order".to_owned());
        }
        if lines.len() > MOST_DIFFERENCES {
            let more = lines.len() - MOST_DIFFERENCES;
            lines.truncate(MOST_DIFFERENCES);
            lines.push(format!("  and {more} more"));
        }
        lines
    }
}

/// Two long lists of values without what both begin and end with, and no longer than people read.
fn contrast(then: &str, now: &str) -> (String, String) {
    const LONG: usize = 200;
    if then.len().max(now.len()) <= LONG {
        return (then.to_owned(), now.to_owned());
    }
    let (a, b): (Vec<&str>, Vec<&str>) = (then.split(", ").collect(), now.split(", ").collect());
    let head = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
    let (a, b) = (&a[head..], &b[head..]);
    let tail = a.iter().rev().zip(b.iter().rev()).take_while(|(a, b)| a == b).count();
    let shown = |values: &[&str]| {
        let differing = values[..values.len() - tail].join(", ");
        let line: String = differing.chars().take(LONG).collect();
        let dots = |needed: bool| if needed { "\u{2026}" } else { "" };
        let pieces = [dots(head > 0), &line, dots(tail > 0 || line.len() < differing.len())];
        pieces.into_iter().filter(|piece| !piece.is_empty()).collect::<Vec<_>>().join(" ")
    };
    (shown(a), shown(b))
}

/// Counts of rows and tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Rows read.
    pub rows_in: u64,
    /// Rows written.
    pub rows_out: u64,
    /// NULL texts.
    pub nulls: u64,
    /// Empty or blank texts.
    pub empty: u64,
    /// Rows with a cut sentence.
    pub truncated: u64,
    /// Rows with an error.
    pub errors: u64,
    /// Rows left out because of an error.
    pub skipped: u64,
    /// Sentences given to the biLM.
    pub sentences: u64,
    /// Tokens given to the biLM.
    pub tokens: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, more: Self) {
        // Read from files that anybody can edit.
        let add = |total: &mut u64, more: u64| *total = total.saturating_add(more);
        add(&mut self.rows_in, more.rows_in);
        add(&mut self.rows_out, more.rows_out);
        add(&mut self.nulls, more.nulls);
        add(&mut self.empty, more.empty);
        add(&mut self.truncated, more.truncated);
        add(&mut self.errors, more.errors);
        add(&mut self.skipped, more.skipped);
        add(&mut self.sentences, more.sentences);
        add(&mut self.tokens, more.tokens);
    }
}

/// A part that is durable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartEntry {
    /// Name of the file in the output.
    pub file: String,
    /// First row of the input in it.
    pub start: Position,
    /// The row after the last.
    pub end: Position,
    /// Nothing comes after it.
    pub last: bool,
    /// Size of the file.
    pub bytes: u64,
    /// SHA-256 of the file, hexadecimal.
    pub sha256: String,
    /// What is in it.
    pub counts: Counts,
}

impl PartEntry {
    /// Why it cannot come after these: rows would be missing or come twice.
    fn break_after(&self, before: &[Self]) -> Option<String> {
        let (file, start) = (part_name(before.len()), before.last().map(|part| part.end).unwrap_or_default());
        if self.file != file {
            return Some(format!("it is of {}, and here should be that of {file}", self.file));
        }
        if before.last().is_some_and(|part| part.last) {
            return Some("the entry before it is of the last part".to_owned());
        }
        let (rows, end, at) =
            (self.counts.rows_in, self.end, |at: Position| format!("row {} of file {}", at.row, at.file));
        if self.start != start {
            return Some(format!("it begins with {}, and should with {}", at(self.start), at(start)));
        }
        let fits = match end.file.checked_sub(start.file) {
            Some(0) => end.row.checked_sub(start.row) == Some(rows),
            // How many rows are left in the first file, the entry does not say.
            Some(_) => rows >= end.row,
            None => false,
        };
        (!fits).then(|| format!("it counts {rows} rows from {} to {}", at(start), at(end)))
    }
}

/// The manifest of one job, opened and locked.
#[derive(Debug)]
pub struct Manifest {
    output: Location,
    folder: Location,
    /// Parts that are durable, in order.
    pub parts: Vec<PartEntry>,
    /// Those of them whose file is gone or has another size than was written.
    pub damaged: Vec<usize>,
    /// The job had ended before.
    pub done: bool,
    /// Rows of a part that is not complete lie beside the entries.
    put_aside: bool,
    lock: Lock,
}

impl Manifest {
    /// Opens the manifest of an output, or begins one; `overwrite` removes what an earlier job left.
    ///
    /// # Errors
    /// [`ManifestError::Locked`] when another job writes there, [`ManifestError::Differs`] when the manifest is of a job
    /// with other settings or inputs, [`ManifestError::Foreign`] when files lie there that no manifest knows,
    /// [`ManifestError::NoFolder`] when a file is where the output should be, [`ManifestError::Broken`] when an entry
    /// cannot be parsed or does not follow from the one before it, [`ManifestError::Overtaken`] when another job begins
    /// the manifest at the same moment, [`ManifestError::Store`] when the store fails.
    pub async fn open(output: &Location, job: &Job, overwrite: bool) -> Result<Self, ManifestError> {
        check_folder(output)?;
        let folder = output.child(FOLDER);
        let lock = Lock::take(output, &folder).await?;
        let (output, parts, damaged) = (output.clone(), Vec::new(), Vec::new());
        let mut manifest = Self { output, folder, parts, damaged, done: false, put_aside: false, lock };
        match manifest.take_up(job, overwrite).await {
            Ok(()) => Ok(manifest),
            Err(error) => {
                let foreign = matches!(error, ManifestError::Foreign { .. });
                if let Some(folder) = manifest.folder.local_path().filter(|_| foreign) {
                    // What the lock made, while it is held; a folder with more in it stays.
                    let _ = std::fs::remove_file(folder.join("lock")).and_then(|()| std::fs::remove_dir(&folder));
                }
                manifest.close().await;
                Err(error)
            }
        }
    }

    /// Begins the manifest or reads it, now that nobody else does.
    async fn take_up(&mut self, job: &Job, overwrite: bool) -> Result<(), ManifestError> {
        let name = self.folder.child("job.json");
        self.put_aside = self.partial().head().await?.is_some();
        let manifest = name.head().await?.is_some();
        if overwrite && manifest {
            self.remove().await?;
        }
        let then = match read::<Job>(&name).await {
            Err(ManifestError::Broken { .. }) if is_bare(&self.output).await? => {
                tracing::warn!(file = %name, "cannot be read, and there is no part yet; the job begins anew");
                name.delete().await?;
                None
            }
            then => then?,
        };
        match then {
            None => self.begin(&name, job).await?,
            Some(then) if then == *job => self.resume().await?,
            Some(then) => return Err(then.differs(job, &self.output)),
        }
        sweep(&self.output, manifest).await
    }

    async fn begin(&mut self, name: &Location, job: &Job) -> Result<(), ManifestError> {
        check_empty(&self.output).await?;
        self.remove_partial().await?;
        create(name, job).await
    }

    async fn resume(&mut self) -> Result<(), ManifestError> {
        let (parts, torn) = entries(&self.folder).await?;
        if let Some(torn) = torn {
            tracing::warn!(file = %torn, "cannot be read; its part is written again");
            torn.delete().await?;
        }
        for part in parts {
            let found = self.output.child(&part.file).head().await?.map(|meta| meta.size);
            if found != Some(part.bytes) {
                self.damaged.push(self.parts.len());
            }
            self.parts.push(part);
        }
        self.done = self.is_done().await?;
        self.tell_others().await;
        Ok(())
    }

    /// Names Parquet files in the output that are no parts of this job: whoever reads the folder reads them too.
    async fn tell_others(&self) {
        let parts = self.parts.len() + usize::from(self.position().is_some());
        let Ok(objects) = self.output.children().await else { return };
        for name in objects.iter().filter_map(|object| object.location.filename()) {
            if name.ends_with(".parquet") && number(name, ".parquet").is_none_or(|part| part >= parts) {
                tracing::warn!(file = %self.output.child(name), "not of this job, but whoever reads the folder reads it too");
            }
        }
    }

    /// Whether the totals are there. The entries are the truth: totals that say something else are removed, and the job
    /// writes them again.
    async fn is_done(&self) -> Result<bool, ManifestError> {
        let name = self.folder.child("done.json");
        let totals = match read::<Counts>(&name).await {
            Ok(None) => return Ok(false),
            Err(ManifestError::Broken { .. }) => None,
            totals => totals?,
        };
        let done = self.position().is_none() && totals == Some(self.totals());
        if !done {
            tracing::warn!(file = %name, "does not say what the entries say; written again when the job ends");
            name.delete().await?;
        }
        Ok(done)
    }

    /// Removes the parts and entries of an earlier job, entries last: a crash in between leaves a manifest that can be
    /// overwritten again. Looks first: where there is anything else, all of it stays.
    async fn remove(&mut self) -> Result<(), ManifestError> {
        let (parts, entries) = own_files(&self.output, &self.folder).await?;
        for part in parts {
            self.output.at(part.location).delete().await?;
        }
        self.folder.child("done.json").delete().await?;
        self.remove_partial().await?;
        for entry in entries.into_iter().rev() {
            self.folder.at(entry.location).delete().await?;
        }
        self.folder.child("job.json").delete().await?;
        Ok(())
    }

    /// Makes sure that the output is still this job's: the lock is held, and nobody took the folder away.
    ///
    /// # Errors
    /// [`ManifestError::Overtaken`] when another job has taken the lease over, [`ManifestError::Vanished`] when the
    /// local lock or the manifest is gone, [`ManifestError::Store`] when the store fails.
    pub async fn hold(&self) -> Result<(), ManifestError> {
        self.lock.hold(&self.folder).await?;
        let job = self.folder.child("job.json");
        match job.head().await? {
            Some(_) => Ok(()),
            None => Err(ManifestError::Vanished { file: job.to_string() }),
        }
    }

    /// Everything that the manifest speaks of is there.
    async fn check_whole(&self) -> Result<(), ManifestError> {
        let there = |objects: Vec<ObjectMeta>| -> HashMap<String, u64> {
            objects.into_iter().filter_map(|o| Some((o.location.filename()?.to_owned(), o.size))).collect()
        };
        let (parts, entries) = (there(self.output.children().await?), there(self.folder.children().await?));
        for (number, part) in self.parts.iter().enumerate() {
            let entry = self.entry(number);
            let vanished = |file: &Location| Err(ManifestError::Vanished { file: file.to_string() });
            if parts.get(&part.file) != Some(&part.bytes) {
                return vanished(&self.output.child(&part.file));
            }
            if !entry.path.filename().is_some_and(|name| entries.contains_key(name)) {
                return vanished(&entry);
            }
        }
        Ok(())
    }

    fn entry(&self, part: usize) -> Location {
        entry(&self.folder, part)
    }

    /// Where part `part` goes.
    pub fn part(&self, part: usize) -> Location {
        self.output.child(&part_name(part))
    }

    /// Where a job that is asked to stop puts aside the rows of the part that is not complete.
    pub fn partial(&self) -> Location {
        self.folder.child(PARTIAL)
    }

    /// Removes the rows that an earlier run put aside, if it did.
    ///
    /// # Errors
    /// [`ManifestError::Store`] when the store fails.
    pub async fn remove_partial(&mut self) -> Result<(), ManifestError> {
        if self.put_aside {
            self.partial().delete().await?;
            self.put_aside = false;
        }
        Ok(())
    }

    /// The folder of the parts.
    pub fn output(&self) -> &Location {
        &self.output
    }

    /// Where the next part begins; `None` when the last part is there.
    pub fn position(&self) -> Option<Position> {
        match self.parts.last() {
            None => Some(Position::default()),
            Some(part) if part.last => None,
            Some(part) => Some(part.end),
        }
    }

    /// Appends the entry of a durable part.
    ///
    /// # Errors
    /// [`ManifestError::Overtaken`] when there is another entry for this part, [`ManifestError::Store`] when the store
    /// fails.
    pub async fn append(&mut self, part: PartEntry) -> Result<(), ManifestError> {
        create(&self.entry(self.parts.len()), &part).await?;
        self.parts.push(part);
        Ok(())
    }

    /// Totals over all parts.
    pub fn totals(&self) -> Counts {
        let mut totals = Counts::default();
        self.parts.iter().for_each(|part| totals += part.counts);
        totals
    }

    /// Bytes of all parts.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().fold(0, |bytes, part| bytes.saturating_add(part.bytes))
    }

    /// Ends the job.
    ///
    /// # Errors
    /// [`ManifestError::Overtaken`] when there are other totals, [`ManifestError::Broken`] when they cannot be parsed,
    /// [`ManifestError::Store`] when the store fails.
    pub async fn finish(&mut self) -> Result<(), ManifestError> {
        self.hold().await?;
        self.check_whole().await?;
        create(&self.folder.child("done.json"), &self.totals()).await?;
        self.done = true;
        Ok(())
    }

    /// Lets the next job in; a job that dies is let go of by the system or by time.
    pub async fn close(self) {
        self.lock.release().await;
    }
}

/// Name of a part in the output.
pub fn part_name(part: usize) -> String {
    format!("{}.parquet", stem(part))
}

fn entry(folder: &Location, part: usize) -> Location {
    folder.child(&format!("{}.json", stem(part)))
}

/// What the names of a part and its entry begin with; they sort as the numbers do.
fn stem(part: usize) -> String {
    let more = part.checked_ilog10().unwrap_or_default().saturating_sub(4);
    let letter = (b'a'..=b'z').nth(more.saturating_sub(1) as usize).filter(|_| more > 0);
    format!("part-{}{part:05}", letter.map(char::from).map(String::from).unwrap_or_default())
}

/// The part that a name belongs to, if we give such names. Others write `part-00000-….parquet`, which is none of our
/// business.
fn number(name: &str, extension: &str) -> Option<usize> {
    let own = name.strip_suffix(extension)?;
    let digits = own.strip_prefix("part-")?.trim_start_matches(|c: char| c.is_ascii_lowercase());
    digits.parse().ok().filter(|number| stem(*number) == own)
}

/// Removes what a killed job left half written: the local store writes `NAME#1` beside `NAME` and renames it. Beside
/// the parts only where there was a manifest before: else nothing there is ours.
async fn sweep(output: &Location, manifest: bool) -> Result<(), ManifestError> {
    let Some(output) = output.local_path() else { return Ok(()) };
    let swept = tokio::task::spawn_blocking(move || {
        remove_staged(&output.join(FOLDER), is_of_account)?;
        if manifest { remove_staged(&output, |name| number(name, ".parquet").is_some()) } else { Ok(()) }
    });
    swept.await.map_err(|e| StoreError::local("remove", std::path::Path::new(FOLDER), std::io::Error::other(e)))?
}

fn remove_staged(folder: &std::path::Path, is_ours: fn(&str) -> bool) -> Result<(), ManifestError> {
    let failed = |path: &std::path::Path, e| ManifestError::from(StoreError::local("remove", path, e));
    let is_staged = |name: &str| {
        let parts = name.rsplit_once('#');
        parts.is_some_and(|(name, n)| is_ours(name) && !n.is_empty() && n.bytes().all(|byte| byte.is_ascii_digit()))
    };
    for entry in std::fs::read_dir(folder).map_err(|e| failed(folder, e))? {
        let path = entry.map_err(|e| failed(folder, e))?.path();
        if path.file_name().and_then(|name| name.to_str()).is_some_and(is_staged) {
            std::fs::remove_file(&path).map_err(|e| failed(&path, e))?;
        }
    }
    Ok(())
}

fn is_of_account(name: &str) -> bool {
    matches!(name, "job.json" | "done.json" | PARTIAL) || number(name, ".json").is_some()
}

/// Reads the job and the parts of an output without locking it; `None` when there is no manifest. An entry that cannot
/// be read and is the last counts as not written, as for the job that goes on.
///
/// # Errors
/// [`ManifestError::Store`] when the store fails, [`ManifestError::Broken`] when an entry cannot be parsed or does not
/// follow from the one before it.
pub async fn look(output: &Location) -> Result<Option<(Job, Vec<PartEntry>)>, ManifestError> {
    let folder = output.child(FOLDER);
    let Some(job) = read::<Job>(&folder.child("job.json")).await? else { return Ok(None) };
    Ok(Some((job, entries(&folder).await?.0)))
}

/// The entries in their order, and the one behind them that cannot be read, if there is such: as its part is made again
/// to the same bytes, it counts as not written.
async fn entries(folder: &Location) -> Result<(Vec<PartEntry>, Option<Location>), ManifestError> {
    let mut parts = Vec::new();
    loop {
        let name = entry(folder, parts.len());
        let part = match read::<PartEntry>(&name).await {
            Ok(None) => return Ok((parts, None)),
            Err(ManifestError::Broken { .. }) if entry(folder, parts.len() + 1).head().await?.is_none() => {
                return Ok((parts, Some(name)));
            }
            Ok(Some(part)) => part,
            Err(error) => return Err(error),
        };
        if let Some(reason) = part.break_after(&parts) {
            return Err(ManifestError::Broken { file: name.to_string(), reason });
        }
        parts.push(part);
    }
}

/// What a job would find in its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "lowercase")]
pub enum Outlook {
    /// Nothing.
    New,
    /// An earlier job's files, which it would remove.
    Overwritten,
    /// Parts of its own: it would go on.
    Begun {
        /// Rows of the input that are done.
        rows: u64,
    },
    /// All parts.
    Complete,
}

/// Looks at an output as [`Manifest::open`] would, but locks and changes nothing.
///
/// # Errors
/// As [`Manifest::open`], except that a lock is not looked at.
pub async fn outlook(output: &Location, job: &Job, overwrite: bool) -> Result<Outlook, ManifestError> {
    check_folder(output)?;
    let folder = output.child(FOLDER);
    if overwrite && folder.child("job.json").head().await?.is_some() {
        return own_files(output, &folder).await.map(|_| Outlook::Overwritten);
    }
    let found = match look(output).await {
        Err(ManifestError::Broken { .. }) if is_bare(output).await? => None,
        found => found?,
    };
    match found {
        None => check_empty(output).await.map(|()| Outlook::New),
        Some((then, _)) if then != *job => Err(then.differs(job, output)),
        Some((_, parts)) if parts.last().is_some_and(|part| part.last) => Ok(Outlook::Complete),
        Some((_, parts)) => Ok(Outlook::Begun { rows: parts.iter().map(|part| part.counts.rows_in).sum() }),
    }
}

/// Where a folder would have to be made in a file, the system's error names neither.
fn check_folder(output: &Location) -> Result<(), ManifestError> {
    let path = output.local_path().unwrap_or_default();
    match path.ancestors().find(|path| path.exists()).filter(|path| !path.is_dir()) {
        Some(file) => Err(ManifestError::NoFolder { output: output.to_string(), file: file.display().to_string() }),
        None => Ok(()),
    }
}

fn foreign(output: &Location, file: &ObjectMeta, manifest: bool) -> ManifestError {
    let file = file.location.filename().unwrap_or_default().to_owned();
    ManifestError::Foreign { output: output.to_string(), file, manifest }
}

async fn check_empty(output: &Location) -> Result<(), ManifestError> {
    match output.children().await?.first() {
        Some(file) => Err(foreign(output, file, false)),
        None => Ok(()),
    }
}

/// Whether there is neither a part nor an entry.
async fn is_bare(output: &Location) -> Result<bool, ManifestError> {
    Ok(output.children().await?.is_empty() && entry_files(&output.child(FOLDER)).await?.is_empty())
}

/// The entries that are there, by the numbers of their parts.
async fn entry_files(folder: &Location) -> Result<BTreeMap<usize, ObjectMeta>, ManifestError> {
    let numbered = |object: ObjectMeta| Some((number(object.location.filename()?, ".json")?, object));
    Ok(folder.children().await?.into_iter().filter_map(numbered).collect())
}

/// Parts and entries of an earlier job, or an error when there is anything else in the output.
async fn own_files(output: &Location, folder: &Location) -> Result<(Vec<ObjectMeta>, Vec<ObjectMeta>), ManifestError> {
    let entries = entry_files(folder).await?;
    let parts = match entries.last_key_value() {
        None => 1,
        // A part beyond the last entry was written by a job that was killed before it could enter it.
        Some((&last, _)) => last + 1 + usize::from(!is_last(&entry(folder, last)).await?),
    };
    let part = |object: &ObjectMeta| number(object.location.filename()?, ".parquet");
    let is_ours = |object: &ObjectMeta| part(object).is_some_and(|part| part < parts);
    let (parts, others): (Vec<_>, Vec<_>) = output.children().await?.into_iter().partition(is_ours);
    let entries = entries.into_values().collect();
    others.first().map_or(Ok((parts, entries)), |file| Err(foreign(output, file, true)))
}

/// Whether an entry says that nothing comes after its part; one that cannot be read does not.
async fn is_last(entry: &Location) -> Result<bool, ManifestError> {
    match read::<PartEntry>(entry).await {
        Err(ManifestError::Broken { .. }) => Ok(false),
        found => Ok(found?.is_some_and(|part| part.last)),
    }
}

async fn read<T: DeserializeOwned>(location: &Location) -> Result<Option<T>, ManifestError> {
    let Some(bytes) = location.get().await? else { return Ok(None) };
    let broken = |e: serde_json::Error| ManifestError::Broken { file: location.to_string(), reason: e.to_string() };
    serde_json::from_slice(&bytes).map(Some).map_err(broken)
}

/// Creates an entry. A request that was applied but whose answer was lost is tried again by the store and then finds
/// our own entry, which is no conflict.
async fn create<T: Serialize + DeserializeOwned + PartialEq>(
    location: &Location,
    value: &T,
) -> Result<(), ManifestError> {
    let broken = |e: serde_json::Error| ManifestError::Broken { file: location.to_string(), reason: e.to_string() };
    let bytes = serde_json::to_vec_pretty(value).map_err(broken)?;
    let mut again = true;
    loop {
        match location.put(bytes.clone().into(), PutMode::Create).await {
            Ok(_) => return Ok(location.sync()?),
            Err(object_store::Error::AlreadyExists { .. }) => {}
            Err(e) => return Err(StoreError::request("write", location, e).into()),
        }
        match read::<T>(location).await {
            Ok(Some(there)) if there == *value => return Ok(()),
            Ok(_) => return Err(ManifestError::Overtaken { file: location.to_string() }),
            // Nobody writes half of one: a disk lost the rest.
            Err(ManifestError::Broken { .. }) if again => location.delete().await?,
            Err(error) => return Err(error),
        }
        again = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sort_as_numbers_do() {
        let numbers =
            [0, 9, 10, 99_998, 99_999, 100_000, 100_001, 999_999, 1_000_000, 9_999_999, 10_000_000, usize::MAX];
        let names = numbers.map(part_name);
        assert!(names.is_sorted(), "{names:?}");
        assert_eq!(names.each_ref().map(|name| number(name, ".parquet")), numbers.map(Some));
        // As the documentation of this module has them.
        assert_eq!(
            (names[0].as_str(), names[4].as_str(), names[5].as_str(), names[8].as_str()),
            ("part-00000.parquet", "part-99999.parquet", "part-a100000.parquet", "part-b1000000.parquet")
        );
        let others = ["part-0.parquet", "part-100000.parquet", "part-b100000.parquet", "part-a00001.parquet"];
        for name in others.into_iter().chain(["part-+0001.parquet", "part-.parquet", "part-00001.json", "part-00001-x"])
        {
            assert_eq!(number(name, ".parquet"), None, "{name}");
        }
    }

    /// One file of 10 rows and one of 5, in parts of 6 rows; counted by hand.
    #[test]
    fn an_entry_follows_from_the_one_before_it() {
        let entry = |n, start, end, rows_in, last| {
            let at = |(file, row)| Position { file, row };
            let counts = Counts { rows_in, ..Counts::default() };
            let (file, sha256) = (part_name(n), String::new());
            PartEntry { file, start: at(start), end: at(end), last, bytes: 1, sha256, counts }
        };
        let parts =
            [entry(0, (0, 0), (0, 6), 6, false), entry(1, (0, 6), (1, 2), 6, false), entry(2, (1, 2), (2, 0), 3, true)];
        for n in 0..parts.len() {
            assert_eq!(parts[n].break_after(&parts[..n]), None);
        }
        let broken = [
            // Exchanged, copied, and beyond the last.
            (0, parts[1].clone()),
            (1, PartEntry { file: part_name(1), ..parts[0].clone() }),
            (2, PartEntry { file: part_name(2), ..parts[1].clone() }),
            (3, entry(3, (2, 0), (2, 0), 0, false)),
            // Edited: the end, the start, and how many rows.
            (0, entry(0, (0, 0), (0, 7), 6, false)),
            (0, entry(0, (0, 1), (0, 6), 5, false)),
            (1, entry(1, (0, 6), (0, 5), 0, false)),
            (1, entry(1, (0, 6), (1, 2), 1, false)),
        ];
        for (n, entry) in broken {
            assert!(entry.break_after(&parts[..n]).is_some(), "{n}: {entry:?}");
        }
    }

    #[test]
    fn of_long_lists_only_the_difference_is_shown() {
        let list = |middle: &str| {
            let names: Vec<String> = (0..9000).map(|i| format!("c{i}: Int64")).collect();
            format!("{}, {middle}{}", names[..4000].join(", "), names[4000..].join(", "))
        };
        let (then, now) = contrast(&list(""), &list("x: Utf8, "));
        assert_eq!((then.as_str(), now.as_str()), ("\u{2026} \u{2026}", "\u{2026} x: Utf8 \u{2026}"));
        assert_eq!(contrast("a", "b"), ("a".to_owned(), "b".to_owned()));
        let (_, now) = contrast("a", &"é".repeat(9000));
        assert_eq!(now.chars().count(), 202);
    }
}
