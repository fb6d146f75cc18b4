//! What is durable: the account of a bulk job, beside its output.
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
//! the lock is stopped by the first entry that it tries to create; before it publishes a part it asks whether the lock is
//! still its own. A part without an entry is no part: the next run
//! writes it again, to the same bytes.

mod lock;

use std::collections::{BTreeMap, HashMap, HashSet};

use object_store::{ObjectMeta, PutMode, path::Path};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use thiserror::Error;

use self::lock::{LEASE, Lock};
use crate::{
    source::{InputFile, Position},
    stores::{Location, StoreError},
};

/// Folder of the account inside an output.
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
    #[error("{output} holds {file}, but no account of a job")]
    Foreign {
        /// The output.
        output: String,
        /// One of the files.
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

impl ManifestError {
    /// What to do next.
    pub fn help(&self) -> Option<String> {
        match self {
            Self::Store(_) => None,
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
        self.rows_in += more.rows_in;
        self.rows_out += more.rows_out;
        self.nulls += more.nulls;
        self.empty += more.empty;
        self.truncated += more.truncated;
        self.errors += more.errors;
        self.skipped += more.skipped;
        self.sentences += more.sentences;
        self.tokens += more.tokens;
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

/// The account of one job, opened and locked.
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
    lock: Lock,
}

impl Manifest {
    /// Opens the account of an output, or begins one; `overwrite` removes what an earlier job left.
    ///
    /// # Errors
    /// [`ManifestError::Locked`] when another job writes there, [`ManifestError::Differs`] when the account is of a job
    /// with other settings or inputs, [`ManifestError::Foreign`] when files lie there without an account,
    /// [`ManifestError::Broken`] when an entry cannot be parsed, [`ManifestError::Overtaken`] when another job begins
    /// the account at the same moment, [`ManifestError::Store`] when the store fails.
    pub async fn open(output: &Location, job: &Job, overwrite: bool) -> Result<Self, ManifestError> {
        let folder = output.child(FOLDER);
        let lock = Lock::take(output, &folder).await?;
        let (parts, damaged) = (Vec::new(), Vec::new());
        let mut manifest = Self { output: output.clone(), folder, parts, damaged, done: false, lock };
        match manifest.take_up(job, overwrite).await {
            Ok(()) => Ok(manifest),
            Err(error) => {
                let foreign = matches!(error, ManifestError::Foreign { .. });
                let folder = manifest.folder.local_path().filter(|_| foreign);
                manifest.close().await;
                if let Some(folder) = folder {
                    // What the lock made; a folder with more in it stays.
                    let _ = std::fs::remove_file(folder.join("lock")).and_then(|()| std::fs::remove_dir(&folder));
                }
                Err(error)
            }
        }
    }

    /// Begins the account or reads it, now that nobody else does.
    async fn take_up(&mut self, job: &Job, overwrite: bool) -> Result<(), ManifestError> {
        sweep(&self.output)?;
        let name = self.folder.child("job.json");
        if overwrite && name.head().await?.is_some() {
            self.remove().await?;
        }
        match read::<Job>(&name).await? {
            None => self.begin(&name, job).await,
            Some(then) if then == *job => self.resume().await,
            Some(then) => Err(then.differs(job, &self.output)),
        }
    }

    async fn begin(&self, name: &Location, job: &Job) -> Result<(), ManifestError> {
        check_empty(&self.output).await?;
        create(name, job).await
    }

    async fn resume(&mut self) -> Result<(), ManifestError> {
        loop {
            let Some(entry) = self.read_entry(self.parts.len()).await? else { break };
            let found = self.output.child(&entry.file).head().await?.map(|meta| meta.size);
            if found != Some(entry.bytes) {
                self.damaged.push(self.parts.len());
            }
            self.parts.push(entry);
        }
        // Totals alone prove nothing: entries may have been removed.
        let totals = read::<Counts>(&self.folder.child("done.json")).await?;
        let complete = self.parts.last().is_some_and(|part| part.last);
        self.done = complete && totals == Some(self.totals());
        Ok(())
    }

    /// An entry; one that cannot be read and is the last counts as not written, as its part is made again to the same
    /// bytes.
    async fn read_entry(&self, part: usize) -> Result<Option<PartEntry>, ManifestError> {
        let name = self.entry(part);
        match read::<PartEntry>(&name).await {
            Err(ManifestError::Broken { .. }) if self.entry(part + 1).head().await?.is_none() => {
                tracing::warn!(file = %name, "cannot be read; its part is written again");
                name.delete().await?;
                Ok(None)
            }
            read => read,
        }
    }

    /// Removes the parts and entries of an earlier job, entries last: a crash in between leaves an account that can be
    /// overwritten again. Looks first: where there is anything else, all of it stays.
    async fn remove(&self) -> Result<(), ManifestError> {
        let (parts, entries) = own_files(&self.output, &self.folder).await?;
        for part in parts {
            self.output.at(part.location).delete().await?;
        }
        self.folder.child("done.json").delete().await?;
        self.folder.child(PARTIAL).delete().await?;
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
    /// local lock or the account is gone, [`ManifestError::Store`] when the store fails.
    pub async fn hold(&self) -> Result<(), ManifestError> {
        self.lock.hold(&self.folder).await?;
        let job = self.folder.child("job.json");
        match job.head().await? {
            Some(_) => Ok(()),
            None => Err(ManifestError::Vanished { file: job.to_string() }),
        }
    }

    /// Everything that the account speaks of is there.
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
        self.folder.child(&format!("part-{part:05}.json"))
    }

    /// Where part `part` goes.
    pub fn part(&self, part: usize) -> Location {
        self.output.child(&part_name(part))
    }

    /// Where a job that is asked to stop puts aside the rows of the part that is not complete.
    pub fn partial(&self) -> Location {
        self.folder.child(PARTIAL)
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

    /// Enters a part that is durable.
    ///
    /// # Errors
    /// [`ManifestError::Overtaken`] when there is another entry for this part, [`ManifestError::Broken`] when what is
    /// there cannot be parsed, [`ManifestError::Store`] when the store fails.
    pub async fn enter(&mut self, part: PartEntry) -> Result<(), ManifestError> {
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
        self.parts.iter().map(|part| part.bytes).sum()
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
    format!("part-{part:05}.parquet")
}

fn is_entry(path: &Path) -> bool {
    path.filename().is_some_and(|name| name.starts_with("part-") && name.ends_with(".json"))
}

/// Whether we give such names. Others write `part-00000-….parquet`, which is none of our business.
fn is_part_name(name: &str) -> bool {
    let number = name.strip_prefix("part-").and_then(|rest| rest.strip_suffix(".parquet"));
    number.is_some_and(|number| number.len() >= 5 && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Removes what a killed job left half written: the local store writes `NAME#1` beside `NAME` and renames it.
fn sweep(output: &Location) -> Result<(), ManifestError> {
    let Some(folder) = output.local_path() else { return Ok(()) };
    let failed = |path: &std::path::Path, e| ManifestError::from(StoreError::local("remove", path, e));
    for folder in [folder.join(FOLDER), folder] {
        for entry in std::fs::read_dir(&folder).map_err(|e| failed(&folder, e))? {
            let path = entry.map_err(|e| failed(&folder, e))?.path();
            if path.file_name().and_then(|name| name.to_str()).is_some_and(is_staged) {
                std::fs::remove_file(&path).map_err(|e| failed(&path, e))?;
            }
        }
    }
    Ok(())
}

fn is_staged(name: &str) -> bool {
    let Some((name, number)) = name.rsplit_once('#') else { return false };
    let entry = name.strip_prefix("part-").is_some_and(|rest| rest.ends_with(".json"));
    let ours = is_part_name(name) || entry || matches!(name, "job.json" | "done.json" | PARTIAL);
    ours && !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// Reads the job and the parts of an output without locking it; `None` when there is no account.
///
/// # Errors
/// [`ManifestError::Store`] when the store fails, [`ManifestError::Broken`] when an entry cannot be parsed.
pub async fn look(output: &Location) -> Result<Option<(Job, Vec<PartEntry>)>, ManifestError> {
    let folder = output.child(FOLDER);
    let Some(job) = read::<Job>(&folder.child("job.json")).await? else { return Ok(None) };
    let mut parts = Vec::new();
    while let Some(part) = read(&folder.child(&format!("part-{:05}.json", parts.len()))).await? {
        parts.push(part);
    }
    Ok(Some((job, parts)))
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
    match look(output).await? {
        None => check_empty(output).await.map(|()| Outlook::New),
        Some(_) if overwrite => own_files(output, &output.child(FOLDER)).await.map(|_| Outlook::Overwritten),
        Some((then, _)) if then != *job => Err(then.differs(job, output)),
        Some((_, parts)) if parts.last().is_some_and(|part| part.last) => Ok(Outlook::Complete),
        Some((_, parts)) => Ok(Outlook::Begun { rows: parts.iter().map(|part| part.counts.rows_in).sum() }),
    }
}

fn foreign(output: &Location, file: &ObjectMeta) -> ManifestError {
    let file = file.location.filename().unwrap_or_default().to_owned();
    ManifestError::Foreign { output: output.to_string(), file }
}

async fn check_empty(output: &Location) -> Result<(), ManifestError> {
    match output.children().await?.first() {
        Some(file) => Err(foreign(output, file)),
        None => Ok(()),
    }
}

/// Parts and entries of an earlier job, or an error when there is anything else in the output.
async fn own_files(output: &Location, folder: &Location) -> Result<(Vec<ObjectMeta>, Vec<ObjectMeta>), ManifestError> {
    let entries: Vec<_> = folder.children().await?.into_iter().filter(|object| is_entry(&object.location)).collect();
    // A part beyond the last entry was written by a job that was killed before it could enter it.
    let ours: HashSet<String> = (0..=entries.len()).map(part_name).collect();
    let is_ours = |object: &ObjectMeta| object.location.filename().is_some_and(|name| ours.contains(name));
    let (parts, others): (Vec<_>, Vec<_>) = output.children().await?.into_iter().partition(is_ours);
    others.first().map_or(Ok((parts, entries)), |file| Err(foreign(output, file)))
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
    match location.put(bytes.into(), PutMode::Create).await {
        Ok(_) => Ok(location.sync()?),
        Err(object_store::Error::AlreadyExists { .. }) => match read::<T>(location).await? {
            Some(there) if there == *value => Ok(()),
            _ => Err(ManifestError::Overtaken { file: location.to_string() }),
        },
        Err(e) => Err(StoreError::request("write", location, e).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
