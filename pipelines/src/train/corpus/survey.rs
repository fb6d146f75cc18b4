//! What is in the shards: read once before a run begins, so that bad input ends it before the first step.

use std::{
    collections::HashSet,
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

use elmo::columns::{Tokens, for_each_sentence};
use futures::{StreamExt, TryStreamExt, stream};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::runtime::Handle;

use super::Corpus;
use crate::{
    error::{Error, Result},
    source::{Position, Rows},
};

/// More tokens in a sentence are worth a warning: the sentences that a step reads are in memory and in checkpoints.
pub(in crate::train) const LONG: usize = 1000;
/// Tokens of a sentence that has a hash.
pub(in crate::train) const LONG_ENOUGH: usize = 6;

/// A shard as it was when the run began.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::train) struct Shard {
    pub(in crate::train) file: String,
    /// As stored, compressed.
    pub(in crate::train) bytes: u64,
    /// Of the file, when these figures were found.
    version: Option<String>,
    /// SHA-256 of its sentences, with their rows, and tokens, whatever the format and compression.
    pub(in crate::train) sha256: String,
    pub(in crate::train) sentences: u64,
    pub(in crate::train) tokens: u64,
    /// Tokens that are not in the vocabulary.
    pub(in crate::train) unknown: u64,
    /// Rows that are no text and were left out.
    pub(in crate::train) bad_rows: u64,
}

impl Shard {
    /// The last part of its name: a corpus may be moved.
    pub(in crate::train) fn name(&self) -> &str {
        self.file.rsplit('/').next().unwrap_or(&self.file)
    }
}

/// What is in all shards.
#[derive(Debug, Default)]
pub(in crate::train) struct Survey {
    pub(in crate::train) shards: Vec<Shard>,
    /// Occurrences of each word of the vocabulary in the shards that were read.
    pub(in crate::train) counts: Vec<u64>,
    /// Sentences of more than [`LONG`] tokens in the shards that were read.
    pub(in crate::train) long: u64,
    /// Hashes of the sentences that [`Hashes`] asks for.
    pub(in crate::train) hashes: HashSet<u64>,
    /// Tokens of each sentence, in the order of the text, if they are wanted.
    pub(in crate::train) lengths: Vec<u32>,
}

impl Survey {
    pub(in crate::train) fn sentences(&self) -> u64 {
        self.shards.iter().map(|shard| shard.sentences).sum()
    }

    pub(in crate::train) fn tokens(&self) -> u64 {
        self.shards.iter().map(|shard| shard.tokens).sum()
    }

    pub(in crate::train) fn unknown(&self) -> u64 {
        self.shards.iter().map(|shard| shard.unknown).sum()
    }

    pub(in crate::train) fn bad_rows(&self) -> u64 {
        self.shards.iter().map(|shard| shard.bad_rows).sum()
    }

    /// What an epoch predicts in each direction: every token, and the end of every sentence.
    pub(in crate::train) fn predictions(&self) -> u64 {
        self.tokens() + self.sentences()
    }
}

/// Which hashes of sentences a survey collects. Short sentences have none: they occur twice by chance.
#[derive(Debug, Clone)]
pub(in crate::train) enum Hashes {
    None,
    All,
    /// Those of another text.
    Common(Arc<HashSet<u64>>),
}

/// What a survey collects of sentences.
#[derive(Debug, Clone)]
pub(in crate::train) struct Wanted {
    pub(in crate::train) hashes: Hashes,
    /// The lengths of all of them.
    pub(in crate::train) lengths: bool,
}

/// Reads all shards, several at a time; those that are what `known` says are not read again.
pub(super) async fn survey(corpus: &Arc<Corpus>, wanted: &Wanted, known: &[Shard], threads: usize) -> Result<Survey> {
    let one = |number: usize| {
        let (corpus, wanted) = (Arc::clone(corpus), wanted.clone());
        let unchanged = known.get(number).filter(|shard| is_unchanged(&corpus, number, shard)).cloned();
        async move {
            if let Some(shard) = unchanged {
                return Ok(Survey { shards: vec![shard], ..Survey::default() });
            }
            let runtime = Handle::current();
            // Tokenising and hashing take a core.
            let read = tokio::task::spawn_blocking(move || runtime.block_on(of_shard(&corpus, &wanted, number)));
            read.await.map_err(|e| Error::Failed(format!("a thread that reads the corpus died: {e}")))?
        }
    };
    let all: Vec<_> = (0..corpus.files().len()).map(one).collect();
    let mut total = Survey { counts: vec![0; corpus.words.len()], ..Survey::default() };
    let mut parts = stream::iter(all).buffered(threads);
    while let Some(part) = parts.try_next().await? {
        total.shards.extend(part.shards);
        total.hashes.extend(part.hashes);
        total.lengths.extend(part.lengths);
        total.long += part.long;
        total.counts.iter_mut().zip(part.counts).for_each(|(sum, n)| *sum += n);
    }
    Ok(total)
}

fn is_unchanged(corpus: &Corpus, number: usize, shard: &Shard) -> bool {
    let file = &corpus.files()[number];
    shard.file == file.to_string() && shard.bytes == file.size && shard.version == file.version
}

async fn of_shard(corpus: &Corpus, wanted: &Wanted, number: usize) -> Result<Survey> {
    let file = &corpus.files()[number];
    let mut rows = Rows::new(corpus.shard(number)?, Position::default());
    let mut found = Survey { counts: vec![0; corpus.words.len()], ..Survey::default() };
    let (mut sentences, mut tokens, mut unknown, mut bad_rows) = (0, 0, 0, 0);
    let mut digest = Sha256::new();
    while let Some(slice) = rows.next().await? {
        let bad =
            for_each_sentence(&slice.text, corpus.reading.tokenizer, corpus.reading.sentences, |row, sentence| {
                // A run resumes from a row, so empty rows count.
                digest.update((slice.start.row + row as u64).to_le_bytes());
                sentences += 1;
                tokens += sentence.len() as u64;
                for token in sentence.iter() {
                    digest.update((token.len() as u32).to_le_bytes());
                    digest.update(token);
                    let id = corpus.words.id(token).unwrap_or(corpus.words.unknown());
                    unknown += u64::from(id == corpus.words.unknown());
                    found.counts[id as usize] += 1;
                }
                digest.update(u32::MAX.to_le_bytes());
                found.long += u64::from(sentence.len() > LONG);
                if wanted.lengths {
                    found.lengths.push(u32::try_from(sentence.len()).unwrap_or(u32::MAX));
                }
                if sentence.len() >= LONG_ENOUGH {
                    found.hash(&wanted.hashes, sentence);
                }
            })?;
        corpus.check_rows(number, slice.start.row, &bad)?;
        bad_rows += bad.len() as u64;
    }
    let sha256 = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    let (bytes, version) = (file.size, file.version.clone());
    let file = file.to_string();
    found.shards = vec![Shard { file, bytes, version, sha256, sentences, tokens, unknown, bad_rows }];
    Ok(found)
}

impl Survey {
    fn hash(&mut self, hashes: &Hashes, sentence: Tokens<'_>) {
        let mut hasher = DefaultHasher::new();
        sentence.iter().for_each(|word| word.hash(&mut hasher));
        let hash = hasher.finish();
        let wanted = match hashes {
            Hashes::None => false,
            Hashes::All => true,
            Hashes::Common(other) => other.contains(&hash),
        };
        if wanted {
            self.hashes.insert(hash);
        }
    }
}

/// What differs between the corpus of a run and the one that was found now. Names do not matter while the contents are the
/// same, shard by shard: a corpus may be moved and be compressed otherwise.
pub(in crate::train) fn differences(run: &[Shard], now: &[Shard]) -> Vec<String> {
    if run.iter().map(|shard| &shard.sha256).eq(now.iter().map(|shard| &shard.sha256)) {
        return Vec::new();
    }
    let (before, after) = (below_common(run), below_common(now));
    let mut lines = Vec::new();
    for (shard, name) in run.iter().zip(&before) {
        match now.iter().zip(&after).find(|(_, other)| *other == name) {
            None => lines.push(format!("{}: is missing", shard.file)),
            Some((other, _)) if other.sha256 != shard.sha256 => lines.push(changed(shard, other)),
            Some(_) => {}
        }
    }
    let new = now.iter().zip(&after).filter(|(_, name)| !before.contains(name));
    lines.extend(new.map(|(shard, _)| format!("{}: is new", shard.file)));
    if lines.is_empty() {
        lines.push("the shards are in another order".to_owned());
    }
    lines
}

fn changed(run: &Shard, now: &Shard) -> String {
    format!(
        "{}: changed; it had {} sentences and {} tokens, and has {} and {}",
        run.file, run.sentences, run.tokens, now.sentences, now.tokens
    )
}

/// Names below the folder that all shards have in common, without the suffix of a compression.
fn below_common(shards: &[Shard]) -> Vec<&str> {
    let folder = |shard: &Shard| shard.file.rfind('/').map_or(0, |end| end + 1);
    let first = shards.first().map_or("", |shard| &shard.file[..folder(shard)]);
    let in_all = |end: &usize| shards.iter().all(|shard| shard.file.starts_with(&first[..*end]));
    let mut ends = first.match_indices('/').map(|(at, _)| at + 1).filter(in_all);
    let common = ends.next_back().unwrap_or(0);
    shards.iter().map(|shard| uncompressed(&shard.file[common..])).collect()
}

fn uncompressed(name: &str) -> &str {
    let suffixes = [".gz", ".zst", ".bz2", ".xz"];
    suffixes.iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(file: &str, sha256: &str) -> Shard {
        let (bytes, version) = (1, None);
        let (sentences, tokens, unknown, bad_rows) = (3, 9, 0, 0);
        Shard { file: file.into(), bytes, version, sha256: sha256.into(), sentences, tokens, unknown, bad_rows }
    }

    #[test]
    fn a_moved_corpus_is_the_same_and_a_changed_one_is_described() {
        let run = [shard("/old/a.txt", "1"), shard("/old/b.txt", "2")];
        assert!(differences(&run, &[shard("/new/a.txt", "1"), shard("/new/b.txt", "2")]).is_empty());
        let changed = differences(&run, &[shard("/old/a.txt", "3"), shard("/old/c.txt", "4")]).join("\n");
        for part in ["/old/a.txt: changed; it had 3", "/old/b.txt: is missing", "/old/c.txt: is new"] {
            assert!(changed.contains(part), "{changed}");
        }
        assert_eq!(differences(&run, &[run[1].clone(), run[0].clone()]), ["the shards are in another order"]);
    }

    /// Names are compared as paths: folders of languages or days have files of one name.
    #[test]
    fn files_of_one_name_in_several_folders_are_different_shards() {
        let run = [shard("/old/lang=de/0.txt", "1"), shard("/old/lang=en/0.txt", "2")];
        assert!(differences(&run, &run).is_empty());
        assert!(differences(&run, &[shard("/new/lang=de/0.txt", "1"), shard("/new/lang=en/0.txt", "2")]).is_empty());
        let changed = differences(&run, &[run[0].clone(), shard("/old/lang=en/0.txt", "3")]);
        assert_eq!(changed.len(), 1, "{changed:?}");
        assert!(changed[0].starts_with("/old/lang=en/0.txt: changed"), "{changed:?}");
    }

    #[test]
    fn a_corpus_may_be_compressed_otherwise() {
        let run = [shard("/old/a.txt.gz", "1"), shard("/old/b.txt.gz", "2")];
        assert!(differences(&run, &[shard("/old/a.txt", "1"), shard("/old/b.txt.zst", "2")]).is_empty());
        let changed = differences(&run, &[shard("/old/a.txt", "1"), shard("/old/b.txt.zst", "3")]);
        assert!(changed.len() == 1 && changed[0].starts_with("/old/b.txt.gz: changed"), "{changed:?}");
    }
}
