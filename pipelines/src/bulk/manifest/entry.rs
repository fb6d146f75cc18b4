//! Manifest entries: what is in a part, and how parts follow each other.

use serde::{Deserialize, Serialize};

use super::names::parse_part;
use crate::source::Position;

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
    /// Rows with a truncated sentence.
    pub truncated: u64,
    /// Rows with an error.
    pub errors: u64,
    /// Rows skipped because of an error.
    pub skipped: u64,
    /// Rows left out because they were not valid in their format.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub malformed: u64,
    /// Sentences given to the biLM.
    pub sentences: u64,
    /// Tokens given to the biLM.
    pub tokens: u64,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, more: Self) {
        // Entries are files that users can edit, so the sum may overflow.
        let add = |total: &mut u64, more: u64| *total = total.saturating_add(more);
        add(&mut self.rows_in, more.rows_in);
        add(&mut self.rows_out, more.rows_out);
        add(&mut self.nulls, more.nulls);
        add(&mut self.empty, more.empty);
        add(&mut self.truncated, more.truncated);
        add(&mut self.errors, more.errors);
        add(&mut self.skipped, more.skipped);
        add(&mut self.malformed, more.malformed);
        add(&mut self.sentences, more.sentences);
        add(&mut self.tokens, more.tokens);
    }
}

impl<'c> FromIterator<&'c PartEntry> for Counts {
    fn from_iter<I: IntoIterator<Item = &'c PartEntry>>(entries: I) -> Self {
        let mut totals = Self::default();
        entries.into_iter().for_each(|entry| totals += entry.counts);
        totals
    }
}

/// The entry of a durable part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartEntry {
    /// Name of the file in the output.
    pub file: String,
    /// First input row of the part.
    pub start: Position,
    /// The row after its last.
    pub end: Position,
    /// No part follows.
    pub last: bool,
    /// Size of the file.
    pub bytes: u64,
    /// SHA-256 of the file, hexadecimal.
    pub sha256: String,
    /// Digest of the input rows, as they were read; `None` when the rows have a type without one, and in format 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows_digest: Option<String>,
    /// What is in it.
    pub counts: Counts,
}

impl PartEntry {
    /// Why this entry cannot be that of part `number`, after `previous`: rows would be missing or duplicated.
    /// `previous` is `None` when the entry before it is lost.
    pub(super) fn break_after(&self, number: usize, previous: Option<&Self>) -> Option<String> {
        if parse_part(&self.file).is_none_or(|name| name.number != number) {
            return Some(format!("it names {}, which is not part {number}", self.file));
        }
        if previous.is_some_and(|previous| previous.last) {
            return Some("the entry before it is that of the last part".to_owned());
        }
        let at = |at: Position| format!("row {} of file {}", at.row, at.file);
        let known = if number == 0 { Some(Position::default()) } else { previous.map(|previous| previous.end) };
        let start = known.unwrap_or(self.start);
        if self.start != start {
            return Some(format!("it begins with {}, and should with {}", at(self.start), at(start)));
        }
        let (rows, end) = (self.counts.rows_in, self.end);
        let fits = match end.file.checked_sub(start.file) {
            Some(0) => end.row.checked_sub(start.row) == Some(rows),
            // How many rows are left in the first file, the entry does not record.
            Some(_) => rows >= end.row,
            None => false,
        };
        (!fits).then(|| format!("it counts {rows} rows from {} to {}", at(start), at(end)))
    }
}

/// A part that the manifest has, or should have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Part {
    /// The file and its entry exist.
    Durable(PartEntry),
    /// The file is missing, or differs from the entry.
    Damaged(PartEntry),
    /// The entry is missing or cannot be parsed, and a later one exists.
    Lost,
}

impl Part {
    /// The entry, unless it is lost.
    pub(crate) fn entry(&self) -> Option<&PartEntry> {
        match self {
            Self::Durable(entry) | Self::Damaged(entry) => Some(entry),
            Self::Lost => None,
        }
    }

    pub(crate) fn is_durable(&self) -> bool {
        matches!(self, Self::Durable(_))
    }
}

#[cfg(test)]
mod tests {
    use super::{super::names::part_name, *};

    /// One file of 10 rows and one of 5, in parts of 6 rows; counted by hand.
    #[test]
    fn an_entry_follows_from_the_one_before_it() {
        let entry = |n, start, end, rows_in, last| {
            let at = |(file, row)| Position { file, row };
            let counts = Counts { rows_in, ..Counts::default() };
            let (file, sha256, rows_digest) = (part_name(n, None), String::new(), None);
            PartEntry { file, start: at(start), end: at(end), last, bytes: 1, sha256, rows_digest, counts }
        };
        let parts =
            [entry(0, (0, 0), (0, 6), 6, false), entry(1, (0, 6), (1, 2), 6, false), entry(2, (1, 2), (2, 0), 3, true)];
        let before = |n: usize| n.checked_sub(1).map(|n| &parts[n]);
        for (n, part) in parts.iter().enumerate() {
            assert_eq!(part.break_after(n, before(n)), None);
            // The entry before it is lost.
            assert_eq!(part.break_after(n, None), None);
        }
        let broken = [
            // Exchanged, copied, and beyond the last.
            (0, parts[1].clone()),
            (1, PartEntry { file: part_name(1, None), ..parts[0].clone() }),
            (2, PartEntry { file: part_name(2, None), ..parts[1].clone() }),
            (3, entry(3, (2, 0), (2, 0), 0, false)),
            // Edited: the end, the start, and how many rows.
            (0, entry(0, (0, 0), (0, 7), 6, false)),
            (0, entry(0, (0, 1), (0, 6), 5, false)),
            (1, entry(1, (0, 6), (0, 5), 0, false)),
            (1, entry(1, (0, 6), (1, 2), 1, false)),
        ];
        for (n, entry) in broken {
            assert!(entry.break_after(n, before(n)).is_some(), "{n}: {entry:?}");
        }
    }
}
