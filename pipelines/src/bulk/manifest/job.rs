//! Identity of a job: which settings and inputs an output was begun with, and which it can be resumed with.
//!
//! | compared | by |
//! |---|---|
//! | settings that change the bytes of parts | value |
//! | the program | the declared [`FORMAT`] of the parts, not its version: a patch release can resume older jobs |
//! | on-error, on-malformed | the finished parts: they may change unless the parts contain a row to which they were applied |
//! | inputs | name, size and version; if name or version differ, by the digests of the rows that were read |

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{entry::Counts, names::FINGERPRINT_DIGITS};
use crate::source::{InputFile, OnMalformed};

/// Format of the parts that this version writes. It changes when the same settings and inputs give other rows or bytes,
/// except for the version of the program in the footers. Format 2 has the same bytes as format 1 and other names.
const FORMAT: u32 = 2;
/// The format of manifests that do not record one. Their parts have names without a fingerprint.
const FIRST_FORMAT: u32 = 1;
/// A setting in manifests of format 1 and in footers. It is not part of the identity.
const VERSION: &str = "elmo.version";
/// The setting for rows that cannot be embedded.
const ON_ERROR: &str = "on-error";
/// The setting for malformed rows, which is recorded when it is not `fail`.
const ON_MALFORMED: &str = OnMalformed::SETTING;
/// Differences that an error lists.
const MAX_DIFFERENCES: usize = 20;

/// One input file, as it was when the job began.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputRecord {
    /// Path or URL.
    pub file: String,
    /// Size, in bytes.
    pub size: u64,
    /// Etag, or modification time.
    pub version: Option<String>,
}

impl From<&InputFile> for InputRecord {
    fn from(file: &InputFile) -> Self {
        Self { file: file.to_string(), size: file.size, version: file.version.clone() }
    }
}

/// Identity of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// Format of the parts.
    #[serde(default = "first_format")]
    pub format: u32,
    /// Every setting that changes the bytes of the output.
    pub settings: BTreeMap<String, String>,
    /// The files, in the order in which they are read.
    pub inputs: Vec<InputRecord>,
}

fn first_format() -> u32 {
    FIRST_FORMAT
}

/// How a job continues a recorded one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Continuation {
    /// The identity to record from now on.
    pub(super) job: Job,
    /// Indices of inputs that have another name or version, and the same size.
    pub(super) changed: Vec<usize>,
}

impl Job {
    /// A job of the current format.
    pub fn new(mut settings: BTreeMap<String, String>, inputs: Vec<InputRecord>) -> Self {
        settings.remove(VERSION);
        Self { format: FORMAT, settings, inputs }
    }

    /// First digits of the SHA-256 of the format and the settings, without on-error and on-malformed, which may differ on
    /// resume; `None` in format 1.
    pub fn fingerprint(&self) -> Option<String> {
        if self.format == FIRST_FORMAT {
            return None;
        }
        let mut hash = Sha256::new_with_prefix(self.format.to_le_bytes());
        for word in self.settings.iter().filter(|(key, _)| !may_change(key)).flat_map(|(key, value)| [key, value]) {
            hash.update((word.len() as u64).to_le_bytes());
            hash.update(word);
        }
        let mut digits = format!("{:x}", hash.finalize());
        digits.truncate(FINGERPRINT_DIGITS);
        Some(digits)
    }

    /// SHA-256 of the job, hexadecimal.
    pub(super) fn digest(&self) -> String {
        // Strings and numbers are always serialised, in the order of the fields and keys.
        format!("{:x}", Sha256::digest(serde_json::to_vec(self).unwrap_or_default()))
    }

    /// Removes recorded settings that are not part of the identity.
    pub(super) fn normalized(mut self) -> Self {
        self.settings.remove(VERSION);
        self
    }

    /// How `now` continues this job, whose finished parts have `totals`.
    ///
    /// # Errors
    /// One line per difference, when it cannot.
    pub(super) fn continued_by(&self, now: &Self, totals: &Counts) -> Result<Continuation, Vec<String>> {
        let changed = self.changed_inputs(&now.inputs);
        let differences = self.setting_differences(now, totals);
        match changed {
            Some(changed) if differences.is_empty() => {
                Ok(Continuation { job: Self { format: self.format, ..now.clone() }, changed })
            }
            _ => Err(self.differences(now, totals)),
        }
    }

    /// Inputs that have another name or version; `None` when the number of files or a size differs.
    pub(crate) fn changed_inputs(&self, now: &[InputRecord]) -> Option<Vec<usize>> {
        let pairs = || self.inputs.iter().zip(now);
        let comparable = self.inputs.len() == now.len() && pairs().all(|(then, now)| then.size == now.size);
        comparable.then(|| pairs().enumerate().filter(|(_, (then, now))| then != now).map(|(index, _)| index).collect())
    }

    fn setting_differences(&self, now: &Self, totals: &Counts) -> Vec<String> {
        if !(FIRST_FORMAT..=FORMAT).contains(&self.format) {
            return vec![format!("  format: {}, but this version of elmo knows formats up to {FORMAT}", self.format)];
        }
        let keys: BTreeSet<&String> = self.settings.keys().chain(now.settings.keys()).collect();
        let value = |job: &Self, key: &str| job.settings.get(key).cloned().unwrap_or_else(|| "(not set)".into());
        let fits = |key: &str| match key {
            ON_ERROR => now.on_error_fits(totals),
            ON_MALFORMED => totals.malformed == 0,
            _ => false,
        };
        let differs = |key: &&String| self.settings.get(*key) != now.settings.get(*key) && !fits(key);
        let line = |key: &String| {
            let (then, now) = contrast(&value(self, key), &value(now, key));
            format!("  {key}: was {then}, now {now}")
        };
        keys.into_iter().filter(differs).map(line).collect()
    }

    /// Whether parts with these counts would be the same with this job's on-error and on-malformed.
    pub(super) fn policies_fit(&self, totals: &Counts) -> bool {
        self.on_error_fits(totals) && (totals.malformed == 0 || self.settings.contains_key(ON_MALFORMED))
    }

    /// Whether parts with these counts would be the same with this job's on-error.
    fn on_error_fits(&self, totals: &Counts) -> bool {
        match self.settings.get(ON_ERROR).map(String::as_str) {
            Some("null") => totals.skipped == 0,
            Some("skip") => totals.skipped == totals.errors,
            _ => totals.errors == 0 && totals.skipped == 0,
        }
    }

    /// One line per difference between the job that began an output and this one.
    pub(super) fn differences(&self, now: &Self, totals: &Counts) -> Vec<String> {
        let mut lines = self.setting_differences(now, totals);
        let known: BTreeMap<&str, &InputRecord> = self.inputs.iter().map(|i| (i.file.as_str(), i)).collect();
        for input in &now.inputs {
            match known.get(input.file.as_str()) {
                None => lines.push(format!("  input {}: added since", input.file)),
                Some(then) if *then != input => lines.push(format!("  input {}: changed since", input.file)),
                Some(_) => {}
            }
        }
        let still: BTreeSet<&str> = now.inputs.iter().map(|i| i.file.as_str()).collect();
        let gone = self.inputs.iter().filter(|then| !still.contains(then.file.as_str()));
        lines.extend(gone.map(|then| format!("  input {}: removed since", then.file)));
        if lines.is_empty() && self.inputs != now.inputs {
            lines.push("  the inputs are in another order".to_owned());
        }
        if lines.len() > MAX_DIFFERENCES {
            let more = lines.len() - MAX_DIFFERENCES;
            lines.truncate(MAX_DIFFERENCES);
            lines.push(format!("  and {more} more"));
        }
        lines
    }
}

fn may_change(setting: &str) -> bool {
    matches!(setting, ON_ERROR | ON_MALFORMED)
}

/// Two long lists of values, without their common start and end and truncated for display.
pub(crate) fn contrast(then: &str, now: &str) -> (String, String) {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn job(settings: &[(&str, &str)], inputs: &[(&str, u64, &str)]) -> Job {
        let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        let input = |(file, size, version): &(&str, u64, &str)| InputRecord {
            file: (*file).to_owned(),
            size: *size,
            version: Some((*version).to_owned()),
        };
        Job::new(settings.iter().map(owned).collect(), inputs.iter().map(input).collect())
    }

    fn counts(errors: u64, skipped: u64) -> Counts {
        Counts { errors, skipped, ..Counts::default() }
    }

    #[test]
    fn on_error_may_change_until_it_is_applied_to_a_row() {
        let with = |word| job(&[("on-error", word)], &[]);
        for (then, now, errors, skipped, continues) in [
            ("fail", "null", 0, 0, true),
            ("fail", "skip", 0, 0, true),
            ("null", "fail", 0, 0, true),
            ("null", "fail", 1, 0, false),
            ("null", "skip", 1, 0, false),
            ("null", "null", 1, 0, true),
            ("skip", "null", 1, 1, false),
            ("skip", "skip", 1, 1, true),
        ] {
            let found = with(then).continued_by(&with(now), &counts(errors, skipped));
            assert_eq!(found.is_ok(), continues, "{then} to {now} after {errors} errors: {found:?}");
            assert_eq!(with(then).fingerprint(), with(now).fingerprint());
        }
    }

    #[test]
    fn the_version_of_the_program_is_not_part_of_the_identity() {
        let old = r#"{"settings": {"elmo.version": "0.0.1", "a": "b"}, "inputs": []}"#;
        let old: Job = serde_json::from_str(old).unwrap();
        let old = old.normalized();
        assert_eq!((old.format, old.fingerprint()), (FIRST_FORMAT, None));
        let now = job(&[("elmo.version", "0.0.2"), ("a", "b")], &[]);
        let continued = old.continued_by(&now, &Counts::default()).unwrap();
        assert_eq!(continued, Continuation { job: old.clone(), changed: Vec::new() });
        let newer = Job { format: FORMAT + 1, ..now.clone() };
        assert!(newer.continued_by(&now, &Counts::default()).unwrap_err()[0].contains("format: 3"));
    }

    #[test]
    fn inputs_of_another_version_are_compared_by_content() {
        let then = job(&[], &[("/a/1.txt", 5, "monday"), ("/a/2.txt", 6, "monday")]);
        let changed = |now: &[_]| then.continued_by(&job(&[], now), &Counts::default()).map(|found| found.changed);
        assert_eq!(changed(&[("/a/1.txt", 5, "monday"), ("/a/2.txt", 6, "monday")]), Ok(vec![]));
        assert_eq!(changed(&[("/a/1.txt", 5, "monday"), ("/a/2.txt", 6, "friday")]), Ok(vec![1]));
        assert_eq!(changed(&[("/b/1.txt", 5, "monday"), ("/b/2.txt", 6, "friday")]), Ok(vec![0, 1]));
        let size = changed(&[("/a/1.txt", 5, "monday"), ("/a/2.txt", 7, "monday")]).unwrap_err();
        assert_eq!(size, ["  input /a/2.txt: changed since"]);
        changed(&[("/a/1.txt", 5, "monday")]).unwrap_err();
    }

    /// Expected by `sha256sum` of the bytes: format 2 as 4 bytes, then each word after its length as 8 bytes, little
    /// endian: `printf '\2\0\0\0\1\0\0\0\0\0\0\0a\2\0\0\0\0\0\0\0bc' | sha256sum`.
    #[test]
    fn the_fingerprint_is_that_of_the_settings() {
        let found = job(&[("a", "bc"), ("on-error", "fail"), ("elmo.version", "1")], &[("x", 1, "y")]).fingerprint();
        assert_eq!(found.as_deref(), Some("233f4d83"));
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
