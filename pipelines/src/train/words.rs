//! The vocabulary of a run.

use std::{collections::HashMap, path::Path, sync::Arc};

use elmo::{
    chars::{BEGIN_SENTENCE_TOKEN, END_SENTENCE_TOKEN},
    lm_head::{UNKNOWN, parse_vocab},
    train::Boundaries,
};
use sha2::{Digest, Sha256};

use super::error::TrainFault;
use crate::{
    error::{Error, Result},
    stores::Location,
};

/// Occurrences of a word whose rank is compared with its count.
const FREQUENT: u64 = 10;

/// Words by rank: the id of a word is the number of its line.
#[derive(Debug)]
pub(super) struct Words {
    list: Arc<[Arc<str>]>,
    ids: foldhash::HashMap<Arc<str>, u32>,
    boundaries: Boundaries,
    unknown: u32,
    /// SHA-256 of the words.
    pub(super) sha256: String,
}

impl Words {
    /// Reads a vocabulary and compares its order with the counts beside it.
    ///
    /// # Errors
    /// [`Error::Usage`] when the file is missing or a folder, [`elmo::Error::LmHead`] when it is no vocabulary,
    /// [`TrainFault::Vocabulary`] when its words are not in the order of their counts.
    pub(super) async fn read(location: &Location) -> Result<Self> {
        if location.local_path().is_some_and(|path| path.is_dir()) {
            return Err(Error::usage(format!("{location}: is a folder"), "name the file of the vocabulary"));
        }
        let Some(bytes) = location.get().await? else {
            let help = "elmo vocab writes one: elmo vocab --input SHARDS --output vocab.txt";
            return Err(Error::usage(format!("{location}: no such file"), help));
        };
        let words = Self::of_list(parse_vocab(&bytes, Path::new(&location.to_string()))?);
        let stem = location.path.as_ref().strip_suffix(".txt").unwrap_or(location.path.as_ref());
        let counts = location.at(object_store::path::Path::from(format!("{stem}.counts.tsv")));
        if let Some(bytes) = counts.get().await? {
            check_order(words.list(), &bytes).map_err(|reason| TrainFault::Vocabulary {
                file: location.to_string(),
                reason: format!("{reason} in {counts}"),
            })?;
        }
        Ok(words)
    }

    /// The vocabulary of a list that was checked.
    pub(super) fn of_list(list: Vec<String>) -> Self {
        let list: Arc<[Arc<str>]> = list.into_iter().map(Arc::from).collect();
        let mut digest = Sha256::new();
        let mut ids = foldhash::HashMap::with_capacity_and_hasher(list.len(), Default::default());
        for (id, word) in list.iter().enumerate() {
            digest.update(&**word);
            digest.update("\n");
            ids.insert(Arc::clone(word), id as u32);
        }
        let special = |word: &str| ids.get(word).copied().unwrap_or_default();
        let boundaries = Boundaries { begin: special(BEGIN_SENTENCE_TOKEN), end: special(END_SENTENCE_TOKEN) };
        let unknown = special(UNKNOWN);
        let sha256 = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Self { list, ids, boundaries, unknown, sha256 }
    }

    /// The id of a word of the vocabulary.
    pub(super) fn id(&self, word: &str) -> Option<u32> {
        self.ids.get(word).copied()
    }

    /// The id of `<UNK>`.
    pub(super) fn unknown(&self) -> u32 {
        self.unknown
    }

    pub(super) fn boundaries(&self) -> Boundaries {
        self.boundaries
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    pub(super) fn list(&self) -> &Arc<[Arc<str>]> {
        &self.list
    }

    /// Whether these are its words, in its order.
    pub(super) fn are<'w>(&self, words: impl Iterator<Item = &'w str>) -> bool {
        words.eq(self.list.iter().map(AsRef::as_ref))
    }

    /// Words of a text that are frequent enough to compare: ids and counts in the order of the vocabulary. Counts of rare words
    /// are chance, and a small text lacks most words of a large vocabulary.
    fn frequent(&self, counts: &[u64]) -> Vec<(usize, u64)> {
        let special = [self.boundaries.begin, self.boundaries.end, self.unknown];
        let words = counts.iter().copied().enumerate().filter(|(_, count)| *count >= FREQUENT);
        words.filter(|(id, _)| !special.contains(&(*id as u32))).collect()
    }

    /// How much further back the frequent words of a text stand than they would by their counts in it: 1 if they are sorted.
    ///
    /// The ratio of geometric means of ranks, which is what the sampler of negatives sees: it draws by the logarithm.
    pub(super) fn disorder(&self, counts: &[u64]) -> f64 {
        let mean = |counts: &mut dyn Iterator<Item = u64>| {
            let (mut sum, mut total) = (0.0, 0.0);
            for (rank, count) in counts.enumerate() {
                sum += count as f64 * (rank as f64 + 1.0).ln();
                total += count as f64;
            }
            sum / f64::max(total, 1.0)
        };
        let words: Vec<u64> = self.frequent(counts).into_iter().map(|(_, count)| count).collect();
        let mut sorted = words.clone();
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        (mean(&mut words.into_iter()) - mean(&mut sorted.into_iter())).exp()
    }

    /// The first frequent word before one that the text has more often, and the most frequent of those after it, with ids and
    /// counts.
    pub(super) fn first_out_of_order(&self, counts: &[u64]) -> Option<[(usize, u64); 2]> {
        let words = self.frequent(counts);
        // The most frequent word at each place or after it.
        let mut best: Vec<(usize, u64)> = Vec::with_capacity(words.len());
        for &(id, count) in words.iter().rev() {
            best.push(best.last().copied().filter(|(_, most)| *most > count).unwrap_or((id, count)));
        }
        let mut pairs = words.into_iter().zip(best.into_iter().rev());
        pairs.find(|((_, count), (_, most))| most > count).map(|(word, later)| [word, later])
    }
}

/// Whether words come by falling counts, as far as they are counted.
fn check_order(words: &[Arc<str>], counts: &[u8]) -> Result<(), String> {
    let lines = str::from_utf8(counts).map_err(|_| "the counts are not UTF-8".to_owned())?.lines();
    let parsed = lines.filter_map(|line| line.rsplit_once('\t'));
    let by_word: HashMap<&str, u64> = parsed.filter_map(|(word, count)| Some((word, count.parse().ok()?))).collect();
    let mut last: Option<(usize, &str, u64)> = None;
    for (line, word) in words.iter().enumerate() {
        let Some(&count) = by_word.get(&**word) else { continue };
        if let Some((before, _, lower)) = last.filter(|(_, _, lower)| *lower < count) {
            return Err(format!(
                "line {} comes after line {}, but its word is counted {count} times and the other one {lower} times",
                line + 1,
                before + 1,
            ));
        }
        last = Some((line, word, count));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(list: &[&str]) -> Words {
        Words::of_list(list.iter().map(|word| (*word).to_owned()).collect())
    }

    #[test]
    fn the_order_of_a_vocabulary_is_that_of_its_counts() {
        let counts = b"the\t9\na\tb\t5\nit\t5\nnew\t1\n";
        let list = |words: &[&str]| words.iter().map(|word| Arc::from(*word)).collect::<Vec<_>>();
        check_order(&list(&["<S>", "</S>", "<UNK>", "the", "it", "a\tb", "unseen", "new"]), counts).unwrap();
        let error = check_order(&list(&["<S>", "</S>", "<UNK>", "it", "the"]), counts).unwrap_err();
        assert!(error.contains("line 5 comes after line 4") && error.contains("9 times"), "{error}");
    }

    /// By hand: with counts 80, 40 and 20 at ranks 3, 2 and 1 instead of 1, 2 and 3, the mean logarithm of the rank is
    /// (80 ln 3 + 40 ln 2) / 140 instead of (40 ln 2 + 20 ln 3) / 140. Rare words do not count.
    #[test]
    fn disorder_is_the_ratio_of_mean_ranks() {
        let words = words(&["<S>", "</S>", "<UNK>", "a", "b", "c"]);
        assert!((words.disorder(&[0, 0, 50, 80, 40, 20]) - 1.0).abs() < 1e-12);
        let expected = (6.0 * 3.0_f64.ln() / 14.0).exp();
        assert!((words.disorder(&[0, 0, 50, 20, 40, 80]) - expected).abs() < 1e-12);
        assert!((words.disorder(&[0, 0, 50, 2, 4, 80]) - 1.0).abs() < 1e-12);
        for (counts, expected) in [
            ([9, 0, 50, 80, 40, 40], None),
            ([0, 0, 50, 80, 20, 40], Some([(4, 20), (5, 40)])),
            ([0, 0, 50, 20, 40, 80], Some([(3, 20), (5, 80)])),
            ([0, 0, 50, 2, 4, 80], None),
        ] {
            assert_eq!(words.first_out_of_order(&counts), expected);
        }
        assert_eq!((words.id("b"), words.id("nowhere"), words.unknown()), (Some(4), None, 2));
    }
}
