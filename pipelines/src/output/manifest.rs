//! The manifest of an output, read without its lock, and the check of the files against it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::{Serialize, Serializer};

use super::{footer::pairs_difference, opened::OutputFile};
use crate::{
    bulk::manifest::{self, Counts, Job, Members, PartEntry, Recorded},
    error::{Error, Result},
    recorded::Pairs,
    stores::Location,
};

/// Problems and file names that one sentence lists.
const MAX_LISTED: usize = 3;

/// The manifest of an output.
#[derive(Debug)]
pub(super) struct Manifest {
    recorded: Recorded,
    /// The totals; `None` while the job is not finished.
    done: Option<Counts>,
}

impl Manifest {
    /// Reads the manifest in `folder`; `None` when there is none.
    pub(super) async fn read(folder: &Location) -> Result<Option<Self>> {
        // Web servers answer in many ways that a file does not exist.
        if folder.is_http() {
            return Ok(None);
        }
        let Some(recorded) = manifest::read(folder).await? else { return Ok(None) };
        Ok(Some(Self { recorded, done: manifest::read_totals(folder).await? }))
    }

    /// The job is finished.
    pub(super) fn is_complete(&self) -> bool {
        self.done.is_some()
    }

    pub(super) fn job(&self) -> &Job {
        &self.recorded.job
    }

    pub(super) fn entries(&self) -> &[PartEntry] {
        &self.recorded.entries
    }

    /// The entry of a file.
    pub(super) fn entry(&self, file: &OutputFile) -> Option<&PartEntry> {
        self.entries().iter().find(|part| part.file == file.name())
    }

    /// Which files the job wrote.
    pub(super) fn members(&self) -> Members<'_> {
        self.recorded.members()
    }

    pub(super) async fn problem_of(&self, file: &OutputFile) -> Result<Option<Problem>> {
        let name = file.name().to_owned();
        let Some(entry) = self.entry(file) else {
            let members = self.members();
            // A job publishes a part before it writes the entry.
            let is_open = self.done.is_none() && members.is_next(&name);
            return Ok(match members.has(&name) {
                true => (!is_open).then_some(Problem::NoEntry { file: name }),
                false => Some(Problem::Unnamed { file: name }),
            });
        };
        let (found, expected) = (file.rows, entry.counts.rows_out);
        if found != expected {
            return Ok(Some(Problem::Rows { file: name, found, expected }));
        }
        let is_same = entry.bytes == file.bytes && entry.sha256 == manifest::sha256(&file.location).await?;
        Ok((!is_same).then_some(Problem::Changed { file: name }))
    }

    /// Parts that have an entry but no file.
    pub(super) fn missing(&self, files: &[OutputFile]) -> Vec<Problem> {
        let found: BTreeSet<&str> = files.iter().map(OutputFile::name).collect();
        let missing = self.entries().iter().filter(|part| !found.contains(part.file.as_str()));
        missing.map(|part| Problem::Missing { file: part.file.clone() }).collect()
    }

    /// The totals count more rows than the entries: the last entries were lost.
    pub(super) fn lost_entries(&self) -> Option<Problem> {
        let expected = self.done.as_ref()?.rows_out;
        let found: u64 = self.entries().iter().map(|part| part.counts.rows_out).sum();
        (found != expected).then_some(Problem::Entries { found, expected })
    }

    /// The manifest names other settings than the footers.
    pub(super) fn other_settings(&self, footer: &Pairs) -> Option<Problem> {
        let settings = self.job().settings.iter().filter(|(key, _)| key.starts_with("elmo."));
        let settings: BTreeMap<String, String> = settings.map(|(key, value)| (key.clone(), value.clone())).collect();
        pairs_difference(&settings, footer).map(|difference| Problem::Settings { difference })
    }
}

/// The result of checking the files of an output against its manifest.
#[derive(Debug, Clone, Default, Serialize)]
pub struct ManifestCheck {
    /// The job is finished. A single file is complete as soon as the manifest names it.
    pub complete: bool,
    /// Differences between the files and the manifest.
    pub problems: Vec<Problem>,
}

/// A difference between the files of an output and its manifest. In JSON it is the message.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Problem {
    /// A file that the manifest does not name.
    Unnamed {
        /// Its name in the folder.
        file: String,
    },
    /// A part of the job whose entry is missing or cannot be parsed.
    NoEntry {
        /// The part.
        file: String,
    },
    /// A part with another number of rows than its entry says.
    Rows {
        /// The part.
        file: String,
        /// Rows of the file.
        found: u64,
        /// Rows by the entry.
        expected: u64,
    },
    /// A part whose size or SHA-256 is not that of its entry.
    Changed {
        /// The part.
        file: String,
    },
    /// A part that has an entry but no file.
    Missing {
        /// The part.
        file: String,
    },
    /// Entries that are missing.
    Entries {
        /// Rows of all entries.
        found: u64,
        /// Rows by the totals.
        expected: u64,
    },
    /// Footers that name other settings than the manifest.
    Settings {
        /// The first difference.
        difference: String,
    },
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unnamed { file } => write!(f, "{file} is not in the manifest"),
            Self::NoEntry { file } => write!(f, "{file} has lost its entry in the manifest"),
            Self::Rows { file, found, expected } => {
                write!(f, "{file} has {found} rows, but its entry in the manifest says {expected}")
            }
            Self::Changed { file } => write!(f, "{file} has other bytes than the job wrote"),
            Self::Missing { file } => write!(f, "{file} is in the manifest but does not exist"),
            Self::Entries { found, expected } => write!(f, "the manifest has entries for {found} of {expected} rows"),
            Self::Settings { difference } => write!(f, "the footers disagree with the manifest: {difference}"),
        }
    }
}

impl Serialize for Problem {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// How to restore a part that was changed.
pub(super) fn repair_help() -> String {
    "run the elmo command of this output again with --check, which rewrites changed parts; \
     or delete them and run it without"
        .to_owned()
}

impl ManifestCheck {
    /// The problems in one sentence; `None` when there are none.
    pub fn failure(&self) -> Option<String> {
        let problems: Vec<String> = self.problems.iter().map(Problem::to_string).collect();
        (!problems.is_empty()).then(|| format!("the files do not match the manifest: {}", listed(&problems)))
    }

    /// How to repair the output; `None` when there is nothing to repair.
    pub fn help(&self) -> Option<String> {
        let any = |kind: fn(&Problem) -> bool| self.problems.iter().any(kind);
        let changed = any(|problem| matches!(problem, Problem::Rows { .. } | Problem::Changed { .. }));
        let missing = any(|problem| {
            matches!(problem, Problem::Missing { .. } | Problem::NoEntry { .. } | Problem::Entries { .. })
        });
        let unnamed = self.problems.iter().filter_map(|problem| match problem {
            Problem::Unnamed { file } => Some(file.clone()),
            _ => None,
        });
        let unnamed: Vec<String> = unnamed.collect();
        let delete = (!unnamed.is_empty())
            .then(|| format!("delete {}: readers of the folder would take it for a part", listed(&unnamed)));
        let run = match (changed, missing) {
            (true, _) => Some(repair_help()),
            (false, true) => Some("run the elmo command of this output again, which writes what is missing".into()),
            (false, false) => None,
        };
        let help: Vec<String> = delete.into_iter().chain(run).collect();
        (!help.is_empty()).then(|| help.join("; "))
    }

    /// The problems as an error; `None` when there are none.
    pub(super) fn error(&self) -> Option<Error> {
        self.failure().map(|message| Error::Check { message, help: self.help() })
    }

    /// Lines of a report.
    pub(super) fn lines(&self) -> Vec<(&'static str, String)> {
        let state = if self.complete { "complete" } else { "not finished" };
        let problems = self.problems.iter().map(|problem| ("manifest", problem.to_string()));
        let matches = self.problems.is_empty().then(|| ("manifest", "matches the files".to_owned()));
        [("job", state.to_owned())].into_iter().chain(matches).chain(problems).collect()
    }
}

/// The first items, and how many more there are.
fn listed(items: &[String]) -> String {
    let first = items[..items.len().min(MAX_LISTED)].join(", ");
    match items.len().saturating_sub(MAX_LISTED) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand.
    #[test]
    fn the_job_may_be_complete_while_files_are_missing() {
        let lines = |complete: bool, problems: Vec<Problem>| ManifestCheck { complete, problems }.lines();
        let line = |label: &'static str, text: &str| (label, text.to_owned());
        let missing = Problem::Missing { file: "p.parquet".to_owned() };
        let said = line("manifest", "p.parquet is in the manifest but does not exist");
        assert_eq!(lines(true, vec![missing]), [line("job", "complete"), said]);
        assert_eq!(lines(false, vec![]), [line("job", "not finished"), line("manifest", "matches the files")]);
    }

    #[test]
    fn the_help_names_what_to_delete() {
        let file = |n: usize| Problem::Unnamed { file: format!("part-0000{n}.parquet") };
        let check = ManifestCheck { complete: true, problems: (1..=5).map(file).collect() };
        let expected = "delete part-00001.parquet, part-00002.parquet, part-00003.parquet and 2 more: readers of the \
                        folder would take it for a part";
        assert_eq!(check.help().as_deref(), Some(expected));
        assert_eq!(ManifestCheck::default().help(), None);
    }
}
