//! Which files of an output are parts of its job, and which others are mistaken for parts.

use std::collections::BTreeSet;

use super::{
    entry::PartEntry,
    names::{parse_part, part_name},
};

/// The parts of a job by their names: those that have an entry, and those that may lack one.
pub(crate) struct Members<'m> {
    entries: BTreeSet<&'m str>,
    /// Parts that the job has or is about to publish: a part is published before its entry is written.
    parts: usize,
    /// That of the job; `None` inside when it has none, outside when the job is not known.
    fingerprint: Option<Option<String>>,
}

impl<'m> Members<'m> {
    /// Those of a job with this fingerprint, of which `parts` are published or about to be.
    pub(super) fn new(
        entries: impl IntoIterator<Item = &'m PartEntry>,
        parts: usize,
        fingerprint: Option<Option<String>>,
    ) -> Self {
        let entries = entries.into_iter().map(|entry| entry.file.as_str()).collect();
        Self { entries, parts, fingerprint }
    }

    /// Whether a file is a part of the job.
    pub(crate) fn has(&self, file: &str) -> bool {
        let fingerprint = self.fingerprint.as_ref().map(Option::as_deref);
        let is_own = || parse_part(file).is_some_and(|p| p.number < self.parts && Some(p.fingerprint) == fingerprint);
        self.entries.contains(file) || is_own()
    }

    /// Whether a file is the part that the job publishes next.
    pub(crate) fn is_next(&self, file: &str) -> bool {
        let next = self.parts.checked_sub(1).zip(self.fingerprint.as_ref());
        !self.entries.contains(file)
            && next.is_some_and(|(number, fingerprint)| part_name(number, fingerprint.as_deref()) == file)
    }

    /// Files that are no parts of the job, but that readers of the folder take for parts: Parquet files, and whatever is
    /// called `part-*`.
    pub(crate) fn strays<'n>(&self, files: impl IntoIterator<Item = &'n str>) -> Vec<String> {
        let read = |name: &&str| name.starts_with("part-") || name.ends_with(".parquet");
        files.into_iter().filter(read).filter(|name| !self.has(name)).map(str::to_owned).collect()
    }
}

/// Number of parts that a job has or is about to publish, when `last` is its last entry.
pub(super) fn parts_after(last: Option<&PartEntry>) -> usize {
    let Some(last) = last else { return 1 };
    let number = parse_part(&last.file).map_or(0, |part| part.number);
    number.saturating_add(1 + usize::from(!last.last))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bulk::manifest::Counts;

    fn entry(file: &str, last: bool) -> PartEntry {
        let (start, end, counts) = (Default::default(), Default::default(), Counts::default());
        PartEntry { file: file.into(), start, end, last, bytes: 1, sha256: String::new(), rows_digest: None, counts }
    }

    #[test]
    fn a_part_may_lack_its_entry_and_nothing_else_may() {
        for (last, count) in [(false, 3), (true, 2)] {
            // The entry of part 0 is lost.
            let entries = [entry("part-00001-1a2b3c4d.parquet", last)];
            let members = Members::new(&entries, parts_after(entries.last()), Some(Some("1a2b3c4d".to_owned())));
            for number in 0..4 {
                let name = part_name(number, Some("1a2b3c4d"));
                assert_eq!(members.has(&name), number < count, "{name}");
                assert_eq!(members.is_next(&name), !last && number == 2, "{name}");
            }
            let files = [
                "part-00000-1a2b3c4d.parquet",
                "part-00001-ffffffff.parquet",
                "part-00001.parquet",
                "part-x",
                "more.parquet",
                "notes.csv",
            ];
            assert_eq!(members.strays(files), files[1..5]);
        }
        assert!(Members::new([], parts_after(None), Some(None)).is_next("part-00000.parquet"));
        assert!(!Members::new([], parts_after(None), None).has("part-00000.parquet"));
    }
}
