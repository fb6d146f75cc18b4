//! To whom an output belongs: the settings that everybody who writes into a dataset shares.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{
    ChainError,
    layout::{FOLDER, Layout},
};
use crate::{
    bulk::manifest::contrast,
    stores::{
        Location,
        create_once::{Created, create},
    },
};

/// Version of the layout and of the footers.
const FORMAT: u32 = 1;
/// Digits of a fingerprint.
const FINGERPRINT_DIGITS: usize = 16;
/// A patch release continues what another one began.
const VERSION: &str = "elmo.version";

/// Settings that must be equal for everybody who writes into a dataset: the model's fingerprint, the options of
/// embedding, the columns and their types. What may differ, such as limits of files, is not in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Version of the layout.
    format: u32,
    settings: BTreeMap<String, String>,
}

impl Identity {
    /// The identity with these settings, in the current layout.
    pub fn new(mut settings: BTreeMap<String, String>) -> Self {
        settings.remove(VERSION);
        Self { format: FORMAT, settings }
    }

    /// First digits of the SHA-256 of format and settings.
    pub fn fingerprint(&self) -> String {
        let mut hash = Sha256::new_with_prefix(self.format.to_le_bytes());
        for word in self.settings.iter().flat_map(|(key, value)| [key, value]) {
            hash.update((word.len() as u64).to_le_bytes());
            hash.update(word);
        }
        let mut digits = format!("{:x}", hash.finalize());
        digits.truncate(FINGERPRINT_DIGITS);
        digits
    }

    /// One line per difference between the recorded identity and this one.
    fn differences(&self, now: &Self) -> Vec<String> {
        if self.format != now.format {
            return vec![format!("  format: {}, but this version of elmo writes {}", self.format, now.format)];
        }
        let value = |identity: &Self, key: &str| identity.settings.get(key).cloned().unwrap_or("(not set)".into());
        let keys: BTreeSet<&String> = self.settings.keys().chain(now.settings.keys()).collect();
        let differing = keys.into_iter().filter(|key| self.settings.get(*key) != now.settings.get(*key));
        let line = |key: &String| {
            let (then, now) = contrast(&value(self, key), &value(now, key));
            format!("  {key}: was {then}, now {now}")
        };
        differing.map(line).collect()
    }
}

/// Checks that the output belongs to nothing else.
pub(super) async fn check_owner(output: &Location, layout: &Layout) -> Result<(), ChainError> {
    check_folder(output)?;
    for root in [output, &layout.root] {
        let job = root.child(FOLDER).child("job.json");
        if job.head().await?.is_some() {
            return Err(foreign(output, &job, "so it belongs to a job of elmo embed"));
        }
    }
    match layout.record().head().await? {
        Some(_) => Ok(()),
        None => match layout.root.children().await?.first() {
            Some(file) => Err(foreign(output, &layout.root.at(file.location.clone()), "but no record of a stream")),
            None => Ok(()),
        },
    }
}

/// Takes the output for this identity, or checks that it has it already.
pub(super) async fn claim(layout: &Layout, identity: &Identity) -> Result<(), ChainError> {
    let record = layout.record();
    // Strings and numbers are always serialised, in the order of the fields and keys.
    let bytes = serde_json::to_vec_pretty(identity).unwrap_or_default();
    let Created::Existed(found) = create(&record, bytes.into()).await? else { return Ok(()) };
    same(layout, identity, &found)
}

/// Checks that the output, if it was begun, was begun with this identity. Returns whether it was begun.
pub(super) async fn compare(layout: &Layout, identity: &Identity) -> Result<bool, ChainError> {
    let Some(found) = layout.record().get().await? else { return Ok(false) };
    same(layout, identity, &found).map(|()| true)
}

fn same(layout: &Layout, identity: &Identity, found: &[u8]) -> Result<(), ChainError> {
    let record = layout.record();
    let found: Identity =
        elmo::json::from_slice(found).map_err(|reason| ChainError::Damaged { file: record.to_string(), reason })?;
    let differences = found.differences(identity);
    match differences.is_empty() {
        true => Ok(()),
        false => Err(ChainError::Differs { output: layout.root.to_string(), differences }),
    }
}

fn foreign(output: &Location, file: &Location, what: &'static str) -> ChainError {
    let name = file
        .path
        .prefix_match(&output.path)
        .map(|parts| parts.map(|part| part.as_ref().to_owned()).collect::<Vec<_>>().join("/"));
    ChainError::Foreign { output: output.to_string(), file: name.unwrap_or_else(|| file.to_string()), what }
}

fn check_folder(output: &Location) -> Result<(), ChainError> {
    let path = output.local_path().unwrap_or_default();
    match path.ancestors().find(|path| path.exists()).filter(|path| !path.is_dir()) {
        Some(file) => Err(ChainError::NoFolder { output: output.to_string(), file: file.display().to_string() }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(settings: &[(&str, &str)]) -> Identity {
        Identity::new(settings.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn the_version_of_the_program_is_not_part_of_the_identity() {
        let (old, new) = (identity(&[("a", "b"), (VERSION, "1")]), identity(&[("a", "b"), (VERSION, "2")]));
        assert_eq!(old, new);
    }

    /// Expected by `sha256sum`, as for the fingerprint of a bulk job: format 1 as 4 bytes, then each word after its length:
    /// `printf '\1\0\0\0\1\0\0\0\0\0\0\0a\2\0\0\0\0\0\0\0bc' | sha256sum`.
    #[test]
    fn the_fingerprint_is_that_of_the_settings() {
        assert_eq!(identity(&[("a", "bc")]).fingerprint(), "90d1fb65d0b35060");
    }

    #[test]
    fn differences_name_the_setting_and_both_values() {
        let (then, now) = (identity(&[("a", "1"), ("b", "2")]), identity(&[("a", "1"), ("b", "3"), ("c", "4")]));
        assert_eq!(then.differences(&now), ["  b: was 2, now 3", "  c: was (not set), now 4"]);
        assert!(then.differences(&then).is_empty());
        let newer = Identity { format: FORMAT + 1, ..then.clone() };
        assert_eq!(newer.differences(&then), ["  format: 2, but this version of elmo writes 1"]);
    }
}
