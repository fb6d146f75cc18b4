//! Reads the contents of an output before a job writes to it, with concurrent requests.

use std::collections::{BTreeMap, HashMap};

use futures::{StreamExt, TryStreamExt, stream};
use object_store::ObjectMeta;

use super::{
    DONE, FOLDER, JOB, ManifestError, PARTIAL,
    entry::{Counts, Part, PartEntry},
    job::{Continuation, Job},
    names::{entry_name, parse_entry, parse_part},
    records::read,
};
use crate::stores::{Location, local::name_of_staged};

/// The record of a stream, which `stream::chain` writes.
const STREAM: &str = "stream.json";
/// Concurrent requests.
pub(super) const REQUESTS: usize = 32;
/// Entries that may be missing before the last one. Names are not trusted: one may have any number.
const MAX_LOST: usize = 10_000;

/// Entries that exist, by the numbers of their parts; `None` for one that cannot be parsed.
pub(super) type Entries = BTreeMap<usize, Option<PartEntry>>;

/// Contents of an output.
#[derive(Debug)]
pub(super) struct Existing {
    output: Location,
    folder: Location,
    /// The recorded job; `None` when it is missing or cannot be parsed.
    pub(super) job: Option<Job>,
    /// There is the record of a stream, which writes here.
    is_stream: bool,
    /// There is a `job.json`, even if it cannot be parsed.
    pub(super) has_job: bool,
    pub(super) has_totals: bool,
    pub(super) has_partial: bool,
    pub(super) entries: Entries,
    /// Objects in the folder of the parts.
    pub(super) files: Vec<ObjectMeta>,
}

/// How a job starts on an existing output.
#[derive(Debug)]
pub(super) enum Start {
    /// There is no part with a manifest entry. Parts of this job without one are replaced.
    Begin,
    Resume {
        parts: Vec<Part>,
        /// Entries after the last valid one, which cannot be parsed. Their parts count as not written.
        torn: Vec<usize>,
        continuation: Continuation,
    },
}

impl Existing {
    pub(super) async fn read(output: &Location, folder: &Location) -> Result<Self, ManifestError> {
        let (files, records, job) = futures::try_join!(
            async {
                let mut files = output.children().await?;
                // Parts that another process wrote and nobody published; see `remove_staged`.
                files.retain(|file| {
                    let staged = file.location.filename().and_then(name_of_staged);
                    staged.and_then(parse_part).is_none()
                });
                Ok::<_, ManifestError>(files)
            },
            async { Ok(folder.children().await?) },
            read_job(folder),
        )?;
        let has = |name: &str| records.iter().any(|record| record.location.filename() == Some(name));
        let has_job = job.is_some() || has(JOB);
        let mut entries =
            if has_job || !records.is_empty() { read_entries(folder, &records).await? } else { Entries::new() };
        let job = job.flatten();
        job.iter().for_each(|job| without_others(&mut entries, job));
        Ok(Self {
            output: output.clone(),
            folder: folder.clone(),
            job,
            is_stream: has(STREAM),
            has_job,
            has_totals: has(DONE),
            has_partial: has(PARTIAL),
            entries,
            files,
        })
    }

    /// Whether there is a manifest, or what is left of one.
    pub(super) fn has_manifest(&self) -> bool {
        self.has_job || !self.entries.is_empty()
    }

    /// How `now` starts here.
    pub(super) async fn start(&self, now: &Job) -> Result<Start, ManifestError> {
        let continuation = match &self.job {
            Some(then) => then
                .continued_by(now, &self.totals())
                .map_err(|differences| ManifestError::Differs { output: self.output.to_string(), differences })?,
            None if self.entries.is_empty() => return self.check_begin(now).map(|()| Start::Begin),
            None => self.lost_job(now)?,
        };
        let (mut parts, torn) = chain(&self.folder, &self.entries)?;
        self.find_damaged(&mut parts).await?;
        Ok(Start::Resume { parts, torn, continuation })
    }

    /// Totals of all entries.
    fn totals(&self) -> Counts {
        self.entries.values().flatten().collect()
    }

    /// Without a single entry, the folder may hold parts of this job only.
    fn check_begin(&self, now: &Job) -> Result<(), ManifestError> {
        if self.is_stream {
            let (output, file) = (self.output.to_string(), format!("{FOLDER}/{STREAM}"));
            return Err(ManifestError::Foreign { output, file, manifest: false });
        }
        let fingerprint = now.fingerprint();
        match self.files.iter().find(|file| !has_fingerprint(file, fingerprint.as_deref())) {
            Some(file) => Err(foreign(&self.output, file, false)),
            None => Ok(()),
        }
    }

    /// The recorded settings are lost. The fingerprints in the names of the parts tell whether `now` has the same
    /// settings; the inputs are known by the digests of their rows only.
    fn lost_job(&self, now: &Job) -> Result<Continuation, ManifestError> {
        let fingerprint = now.fingerprint();
        let entries = || self.entries.values().flatten();
        let is_own = |name: &str| {
            fingerprint.is_some() && parse_part(name).is_some_and(|name| name.fingerprint == fingerprint.as_deref())
        };
        let files = self.files.iter().filter_map(|file| file.location.filename());
        let others = files.filter(|name| parse_part(name).is_some()).chain(entries().map(|entry| entry.file.as_str()));
        if others.into_iter().all(is_own) && now.policies_fit(&self.totals()) {
            return Ok(Continuation { job: now.clone(), changed: (0..now.inputs.len()).collect() });
        }
        Err(ManifestError::JobLost { file: self.folder.child(JOB).to_string() })
    }

    /// Finds parts whose file is missing or has another size than its entry.
    async fn find_damaged(&self, parts: &mut [Part]) -> Result<(), ManifestError> {
        let sizes: HashMap<&str, u64> =
            self.files.iter().filter_map(|file| Some((file.location.filename()?, file.size))).collect();
        for part in parts {
            let Part::Durable(entry) = &*part else { continue };
            // A listing may be incomplete, and a part that is wrongly taken for lost is written again; so ask for it by
            // name.
            let size = match sizes.get(entry.file.as_str()) {
                Some(size) => Some(*size),
                None => self.output.child(&entry.file).head().await?.map(|meta| meta.size),
            };
            if size != Some(entry.bytes) {
                *part = Part::Damaged(entry.clone());
            }
        }
        Ok(())
    }
}

/// `Some(None)` when the job cannot be parsed.
async fn read_job(folder: &Location) -> Result<Option<Option<Job>>, ManifestError> {
    match read::<Job>(&folder.child(JOB)).await {
        Err(ManifestError::Broken { .. }) => Ok(Some(None)),
        found => Ok(found?.map(|job| Some(job.normalized()))),
    }
}

/// Reads the entries in a listing, and the following ones by name, in case the listing is incomplete.
pub(super) async fn read_entries(folder: &Location, records: &[ObjectMeta]) -> Result<Entries, ManifestError> {
    let numbers = records.iter().filter_map(|record| parse_entry(record.location.filename()?));
    let reads: Vec<_> = numbers.map(|number| read_entry(folder, number)).collect();
    let found: Vec<_> = stream::iter(reads).buffer_unordered(REQUESTS).try_collect().await?;
    let mut entries: Entries = found.into_iter().flatten().collect();
    loop {
        let next = entries.last_key_value().map_or(Some(0), |(last, _)| last.checked_add(1));
        let Some(next) = next else { return Ok(entries) };
        let Some((number, entry)) = read_entry(folder, next).await? else { return Ok(entries) };
        entries.insert(number, entry);
    }
}

async fn read_entry(folder: &Location, number: usize) -> Result<Option<(usize, Option<PartEntry>)>, ManifestError> {
    match read::<PartEntry>(&folder.child(&entry_name(number))).await {
        Err(ManifestError::Broken { .. }) => Ok(Some((number, None))),
        found => Ok(found?.map(|entry| (number, Some(entry)))),
    }
}

/// Entries of parts with another fingerprint count as ones that cannot be parsed: a job that lost its lease, and ended,
/// created them late.
pub(super) fn without_others(entries: &mut Entries, job: &Job) {
    let fingerprint = job.fingerprint();
    for entry in entries.values_mut() {
        entry.take_if(|entry| parse_part(&entry.file).is_some_and(|name| name.fingerprint != fingerprint.as_deref()));
    }
}

/// The parts in order, up to the last entry that can be parsed, and the numbers of the entries after it.
pub(super) fn chain(folder: &Location, entries: &Entries) -> Result<(Vec<Part>, Vec<usize>), ManifestError> {
    let broken = |number: usize, reason: String| {
        Err(ManifestError::Broken { file: folder.child(&entry_name(number)).to_string(), reason })
    };
    let last = entries.iter().rev().find(|(_, entry)| entry.is_some()).map(|(number, _)| *number);
    let count = last.map_or(0, |last| last.saturating_add(1));
    let lost = count.saturating_sub(entries.len());
    if lost > MAX_LOST {
        return broken(count - 1, format!("{lost} entries before it are missing"));
    }
    let mut parts = Vec::<Part>::new();
    for number in 0..count {
        let Some(entry) = entries.get(&number).and_then(Option::as_ref) else {
            parts.push(Part::Lost);
            continue;
        };
        if let Some(reason) = entry.break_after(number, parts.last().and_then(Part::entry)) {
            return broken(number, reason);
        }
        parts.push(Part::Durable(entry.clone()));
    }
    Ok((parts, entries.range(count..).map(|(number, _)| *number).collect()))
}

/// Whether a file has the name of a part with this fingerprint.
pub(super) fn has_fingerprint(file: &ObjectMeta, fingerprint: Option<&str>) -> bool {
    let name = file.location.filename().and_then(parse_part);
    name.is_some_and(|name| name.fingerprint.is_some() && name.fingerprint == fingerprint)
}

pub(super) fn foreign(output: &Location, file: &ObjectMeta, manifest: bool) -> ManifestError {
    let file = file.location.filename().unwrap_or_default().to_owned();
    ManifestError::Foreign { output: output.to_string(), file, manifest }
}
