//! Counts words exactly in bounded memory.
//!
//! Each thread counts in a hash map. A map that exceeds its share of the memory is written to a temporary file as a *run*:
//! its words in the order of their bytes. At the end all runs and maps are merged, which gives every word once, with its
//! sum, in the order of the bytes.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    fs::File,
    io::{self, BufReader, BufWriter, Read, Seek, Write},
    path::Path,
};

/// Bytes of a map entry beside those of the word: the key's pointer and length, the count, the slot's overhead at the
/// usual load, and the allocator's header.
pub(super) const ENTRY_BYTES: usize = 56;

/// Counts the words of one thread.
#[derive(Debug)]
pub(super) struct Counter {
    counts: foldhash::HashMap<Box<str>, u64>,
    bytes: usize,
    limit: usize,
    runs: Vec<File>,
}

impl Counter {
    /// A counter that takes about `limit` bytes of memory.
    pub(super) fn new(limit: usize) -> Self {
        Self { counts: foldhash::HashMap::default(), bytes: 0, limit, runs: Vec::new() }
    }

    /// Counts a word.
    pub(super) fn add(&mut self, word: &str) {
        if let Some(count) = self.counts.get_mut(word) {
            *count += 1;
        } else {
            self.bytes += ENTRY_BYTES + word.len();
            self.counts.insert(word.into(), 1);
        }
    }

    /// Writes the counts to a file in `folder` if they take too much memory.
    ///
    /// # Errors
    /// The disk's.
    pub(super) fn spill_if_full(&mut self, folder: &Path) -> io::Result<()> {
        if self.bytes <= self.limit {
            return Ok(());
        }
        let mut out = BufWriter::new(tempfile::tempfile_in(folder)?);
        for (word, count) in self.take_sorted() {
            write_entry(&mut out, &word, count)?;
        }
        let mut file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.rewind()?;
        self.runs.push(file);
        Ok(())
    }

    fn take_sorted(&mut self) -> Vec<(Box<str>, u64)> {
        self.bytes = 0;
        let mut sorted: Vec<_> = std::mem::take(&mut self.counts).into_iter().collect();
        sorted.sort_unstable();
        sorted
    }
}

/// A sorted sequence of words with counts.
enum Run {
    Memory(std::vec::IntoIter<(Box<str>, u64)>),
    Disk(BufReader<File>),
}

impl Run {
    fn next(&mut self) -> io::Result<Option<(Box<str>, u64)>> {
        match self {
            Self::Memory(entries) => Ok(entries.next()),
            Self::Disk(file) => read_entry(file),
        }
    }
}

/// Writes a word and its count for [`read_entry`].
///
/// # Errors
/// The disk's.
pub(super) fn write_entry(out: &mut impl Write, word: &str, count: u64) -> io::Result<()> {
    let length = u32::try_from(word.len()).map_err(io::Error::other)?;
    out.write_all(&length.to_le_bytes())?;
    out.write_all(word.as_bytes())?;
    out.write_all(&count.to_le_bytes())
}

/// The next word and its count; `None` at the end.
///
/// # Errors
/// The disk's.
pub(super) fn read_entry(file: &mut impl Read) -> io::Result<Option<(Box<str>, u64)>> {
    let mut length = [0; 4];
    match file.read_exact(&mut length) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let mut word = vec![0; u32::from_le_bytes(length) as usize];
    file.read_exact(&mut word)?;
    let mut count = [0; 8];
    file.read_exact(&mut count)?;
    let word = String::from_utf8(word).map_err(io::Error::other)?;
    Ok(Some((word.into_boxed_str(), u64::from_le_bytes(count))))
}

/// Merges all counts: calls `each` with every word once, in the order of the bytes.
///
/// # Errors
/// The disk's, and those of `each`.
pub(super) fn merge(counters: Vec<Counter>, mut each: impl FnMut(Box<str>, u64) -> io::Result<()>) -> io::Result<()> {
    let mut runs = Vec::new();
    for mut counter in counters {
        runs.push(Run::Memory(counter.take_sorted().into_iter()));
        runs.extend(counter.runs.into_iter().map(|file| Run::Disk(BufReader::new(file))));
    }
    let mut heads = BinaryHeap::new();
    for (index, run) in runs.iter_mut().enumerate() {
        heads.extend(run.next()?.map(|(word, count)| Reverse((word, index, count))));
    }
    let mut open: Option<(Box<str>, u64)> = None;
    while let Some(Reverse((word, index, count))) = heads.pop() {
        heads.extend(runs[index].next()?.map(|(word, count)| Reverse((word, index, count))));
        match &mut open {
            Some((last, sum)) if *last == word => *sum += count,
            _ => {
                if let Some((last, sum)) = open.replace((word, count)) {
                    each(last, sum)?;
                }
            }
        }
    }
    open.map_or(Ok(()), |(last, sum)| each(last, sum))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Any split over counters, with and without runs on disk, gives the counts of a plain loop.
        #[test]
        fn counts_are_those_of_a_plain_loop(
            words in prop::collection::vec(("[ab\u{e9}\u{1F600}]{0,3}", 0usize..3), 0..400),
            limit in prop::sample::select(vec![0usize, 200, 1 << 20]),
        ) {
            let folder = tempfile::tempdir().unwrap();
            let mut counters: Vec<_> = (0..3).map(|_| Counter::new(limit)).collect();
            let mut expected = std::collections::BTreeMap::<Vec<u8>, u64>::new();
            for (word, thread) in &words {
                counters[*thread].add(word);
                counters[*thread].spill_if_full(folder.path()).unwrap();
                *expected.entry(word.clone().into_bytes()).or_default() += 1;
            }
            let mut merged = Vec::new();
            merge(counters, |word, count| {
                merged.push((word.as_bytes().to_vec(), count));
                Ok(())
            })
            .unwrap();
            prop_assert_eq!(merged, expected.into_iter().collect::<Vec<_>>());
        }
    }
}
