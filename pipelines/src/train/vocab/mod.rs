//! Counts the words of a corpus and writes a vocabulary.
//!
//! The vocabulary is a list of words by falling frequency after `<S>`, `</S>` and `<UNK>`; the number of a line is the id of
//! its word (`bilm-tf`, `README.md`, section "Training a biLM on a new corpus"). The order matters: the sampled softmax
//! draws words by their rank. The result does not depend on the number of threads or on the memory.
//!
//! Beside `vocab.txt` are `vocab.counts.tsv`, with the word and its count on each line, and `vocab.stats.json`.

mod counter;
mod ranking;

use std::{fmt, io, path::PathBuf, sync::Arc};

use arrow::array::ArrayRef;
use bytes::Bytes;
use elmo::{
    chars::{BEGIN_SENTENCE_TOKEN, END_SENTENCE_TOKEN, is_cut},
    columns::for_each_sentence,
    lm_head::UNKNOWN,
    spec::{SentenceMode, TokenizerKind},
};
use object_store::PutMode;
use serde::Serialize;
use tokio::{sync::mpsc, task::JoinSet};

use self::{
    counter::{Counter, merge},
    ranking::Ranking,
};
use crate::{
    error::{Error, Result},
    report::{count, table},
    source::{InputFile, Plan, Position, Request, Rows},
    stores::{Location, StoreError},
};

/// The first lines of every vocabulary.
const SPECIAL: [&str; 3] = [BEGIN_SENTENCE_TOKEN, END_SENTENCE_TOKEN, UNKNOWN];
/// `bilm-tf` skips a line with this word, so that the ids after it shift.
const SKIPPED_LINE: &str = "!!!MAXTERMID";
/// Readers of vocabularies refuse longer lines.
const MAX_WORD_BYTES: usize = 60 << 10;
/// Ids of characters per token in the published models, two of which mark the ends of the word.
const CHARACTERS: usize = 50;
/// Longer sentences are probably not sentences.
const LONG_SENTENCE: usize = 1000;
/// A larger share of the tokens outside of the vocabulary is a warning.
const MANY_UNKNOWN: f64 = 0.05;
/// Column batches that wait for a thread.
const QUEUE: usize = 4;

/// What to count, and where to.
#[derive(Debug)]
pub struct VocabJob {
    /// The corpus.
    pub inputs: Vec<InputFile>,
    /// Column of texts, or of lists of tokens.
    pub column: String,
    /// How a text becomes tokens.
    pub tokenizer: TokenizerKind,
    /// Whether a text is cut into sentences first.
    pub sentences: SentenceMode,
    /// Rows that cannot be read are left out and counted, instead of an error.
    pub skip_bad_rows: bool,
    /// Most words of the vocabulary, the three special ones included.
    pub size: usize,
    /// Occurrences that a word needs.
    pub min_count: u64,
    /// The vocabulary.
    pub output: Location,
    /// Replace a vocabulary that exists.
    pub overwrite: bool,
    /// Bytes of memory for counts; above it, temporary files are used.
    pub memory: usize,
    /// Folder for temporary files.
    pub spill_folder: PathBuf,
    /// Threads that count.
    pub threads: usize,
}

/// What was counted, as written to `vocab.stats.json`.
#[derive(Debug, Clone, Serialize, PartialEq)]
pub struct VocabReport {
    /// The tokenizer.
    pub tokenizer: &'static str,
    /// Whether texts were cut into sentences.
    pub sentence_mode: &'static str,
    /// Files that were read.
    pub files: usize,
    /// Sentences with at least one token.
    pub sentences: u64,
    /// Tokens. An epoch of training predicts `tokens + sentences` words in each direction.
    pub tokens: u64,
    /// Different words.
    pub types: u64,
    /// Lines of the vocabulary, the three special ones included.
    pub words: usize,
    /// Share of the tokens whose words are in the vocabulary.
    pub coverage: f64,
    /// Occurrences of the last word of the vocabulary.
    pub lowest_count: u64,
    /// Different words that are longer than the 48 bytes that a published model reads.
    pub cut_types: u64,
    /// Their occurrences.
    pub cut_tokens: u64,
    /// Rows that could not be read and were left out.
    pub bad_rows: u64,
    /// What may be wrong with the corpus.
    pub warnings: Vec<String>,
}

/// What a thread has seen.
#[derive(Debug, Default)]
struct Seen {
    sentences: u64,
    long_sentences: u64,
    special: u64,
    /// Tokens that cannot be a line of the file.
    unwritable: u64,
    /// Tokens with characters that other programs take for white space.
    odd_spaces: u64,
    bad_rows: u64,
}

/// Counts and writes.
///
/// # Errors
/// [`SourceError`](crate::source::SourceError) when the corpus cannot be read, [`Error::Input`] for a row that is no text or
/// a corpus without words, [`Error::Usage`] when the output exists, [`StoreError`] when it cannot be written.
pub async fn run(job: VocabJob) -> Result<VocabReport> {
    check_absent(&job).await?;
    let plan = Arc::new(Plan::resolve(job.inputs.clone(), &Request::texts(&job.column)).await?);
    let job = Arc::new(job);
    let (seen, counters) = count_all(&job, &plan).await?;
    let (min_count, size) = (job.min_count, job.size.saturating_sub(SPECIAL.len()));
    let merged = tokio::task::spawn_blocking(move || ranked(counters, size, min_count)).await;
    let (ranking, cut) = merged.map_err(died)?.map_err(|error| disk(&job, &error))?;
    if ranking.types == 0 {
        let help = Some(format!("check the files, and --column {}", job.column));
        let file = job.inputs.first().map(ToString::to_string).unwrap_or_default();
        return Err(Error::Input { file, row: None, reason: "the corpus contains no words".into(), help });
    }
    let report = report(&job, &seen, &ranking, cut);
    write(&job, &report, ranking.into_words()).await?;
    Ok(report)
}

async fn check_absent(job: &VocabJob) -> Result<()> {
    if !job.overwrite && job.output.head().await?.is_some() {
        let help = "a model that was trained with it needs it as it is; give another name, or --overwrite";
        return Err(Error::usage(format!("{} exists", job.output), help));
    }
    Ok(())
}

/// Reads all rows; threads count their words.
async fn count_all(job: &Arc<VocabJob>, plan: &Arc<Plan>) -> Result<(Seen, Vec<Counter>)> {
    let (columns, received) = mpsc::channel::<(Position, ArrayRef)>(QUEUE);
    let received = Arc::new(tokio::sync::Mutex::new(received));
    let mut threads = JoinSet::new();
    for _ in 0..job.threads {
        let (job, received) = (Arc::clone(job), Arc::clone(&received));
        threads.spawn_blocking(move || count_some(&job, &received));
    }
    drop(received);
    let mut rows = Rows::new(Arc::clone(plan), Position::default());
    while let Some(slice) = rows.next().await? {
        // Nobody receives after an error of a thread, which is reported below.
        if columns.send((slice.start, slice.text)).await.is_err() {
            break;
        }
    }
    drop(columns);
    let (mut all, mut counters) = (Seen::default(), Vec::new());
    while let Some(counted) = threads.join_next().await {
        let (seen, counter) = counted.map_err(died)??;
        all.add(&seen);
        counters.push(counter);
    }
    Ok((all, counters))
}

type Columns = tokio::sync::Mutex<mpsc::Receiver<(Position, ArrayRef)>>;

/// Counts columns until there are no more. After an error, no more are read.
fn count_some(job: &VocabJob, columns: &Columns) -> Result<(Seen, Counter)> {
    let counted = count_all_of(job, columns);
    if counted.is_err() {
        columns.blocking_lock().close();
    }
    counted
}

fn count_all_of(job: &VocabJob, columns: &Columns) -> Result<(Seen, Counter)> {
    let (mut seen, mut counter) = (Seen::default(), Counter::new(job.memory / job.threads));
    loop {
        let next = columns.blocking_lock().blocking_recv();
        let Some((start, column)) = next else { return Ok((seen, counter)) };
        let bad = for_each_sentence(&column, job.tokenizer, job.sentences, |_, words| {
            seen.sentences += 1;
            seen.long_sentences += u64::from(words.len() > LONG_SENTENCE);
            words.iter().for_each(|word| seen.word(word, &mut counter));
        })?;
        if let Some((row, error)) = bad.first().filter(|_| !job.skip_bad_rows) {
            return Err(Error::Input {
                file: job.inputs.get(start.file).map(ToString::to_string).unwrap_or_default(),
                row: Some(start.row + *row as u64),
                reason: error.to_string(),
                help: Some("give --on-error skip to leave such rows out".to_owned()),
            });
        }
        seen.bad_rows += bad.len() as u64;
        counter.spill_if_full(&job.spill_folder).map_err(|error| disk(job, &error))?;
    }
}

impl Seen {
    fn word(&mut self, word: &str, counter: &mut Counter) {
        if SPECIAL.contains(&word) {
            self.special += 1;
        } else if word.is_empty() || word.len() > MAX_WORD_BYTES || word.contains(['\n', '\r']) || word == SKIPPED_LINE
        {
            self.unwritable += 1;
        } else {
            let odd = |c: char| c == '\u{a0}' || ('\u{1c}'..='\u{1f}').contains(&c);
            self.odd_spaces += u64::from(word.contains(odd));
            counter.add(word);
        }
    }

    fn add(&mut self, other: &Self) {
        self.sentences += other.sentences;
        self.long_sentences += other.long_sentences;
        self.special += other.special;
        self.unwritable += other.unwritable;
        self.odd_spaces += other.odd_spaces;
        self.bad_rows += other.bad_rows;
    }
}

/// Words that are longer than the published models read.
#[derive(Debug, Clone, Copy, Default)]
struct CutWords {
    types: u64,
    tokens: u64,
}

fn ranked(counters: Vec<Counter>, size: usize, min_count: u64) -> io::Result<(Ranking, CutWords)> {
    let (mut ranking, mut cut) = (Ranking::new(size, min_count), CutWords::default());
    merge(counters, |word, count| {
        if is_cut(&word, CHARACTERS) {
            cut.types += 1;
            cut.tokens += count;
        }
        ranking.add(word, count);
    })?;
    Ok((ranking, cut))
}

fn report(job: &VocabJob, seen: &Seen, ranking: &Ranking, cut: CutWords) -> VocabReport {
    let (words, covered, lowest_count) = ranking.summary();
    let tokens = ranking.tokens + seen.special + seen.unwritable;
    let coverage = (covered + seen.special) as f64 / tokens.max(1) as f64;
    let mut report = VocabReport {
        tokenizer: job.tokenizer.as_str(),
        sentence_mode: job.sentences.as_str(),
        files: job.inputs.len(),
        sentences: seen.sentences,
        tokens,
        types: ranking.types,
        words: words + SPECIAL.len(),
        coverage,
        lowest_count,
        cut_types: cut.types,
        cut_tokens: cut.tokens,
        bad_rows: seen.bad_rows,
        warnings: Vec::new(),
    };
    report.warnings = warnings(&report, seen);
    report
}

fn warnings(report: &VocabReport, seen: &Seen) -> Vec<String> {
    let share =
        |part: u64| format!("{} ({:.2} % of the tokens)", count(part), 100.0 * part as f64 / report.tokens as f64);
    let unknown = 1.0 - report.coverage;
    let all = [
        (unknown > MANY_UNKNOWN).then(|| {
            let percent = 100.0 * unknown;
            format!("{percent:.1} % of the tokens are not in the vocabulary: give a larger --size or a smaller --min-count")
        }),
        (report.cut_tokens > 0).then(|| {
            let tokens = share(report.cut_tokens);
            format!("words longer than the 48 bytes that the published models read: {tokens}; a model with a larger \
                     max_characters_per_token reads more")
        }),
        (seen.special > 0).then(|| {
            format!("<S>, </S> or <UNK> in the text: {}; sentences get their boundaries in training", share(seen.special))
        }),
        (seen.unwritable > 0).then(|| {
            let tokens = share(seen.unwritable);
            format!("tokens that cannot be in a vocabulary, because they are empty, contain a line break or are too long: {tokens}")
        }),
        (seen.odd_spaces > 0).then(|| {
            let tokens = share(seen.odd_spaces);
            format!("tokens with a no-break space or a separator (U+001C to U+001F), where bilm-tf cuts: {tokens}")
        }),
        (seen.long_sentences > 0).then(|| {
            let sentences = count(seen.long_sentences);
            format!("sentences with more than {LONG_SENTENCE} tokens: {sentences}; is there one sentence per line?")
        }),
        (seen.bad_rows > 0).then(|| format!("rows that could not be read: {}", count(seen.bad_rows))),
    ];
    all.into_iter().flatten().collect()
}

/// Writes the three files, the vocabulary last: where it exists, the others do too.
async fn write(job: &VocabJob, report: &VocabReport, words: Vec<(Box<str>, u64)>) -> Result<()> {
    let (mut lines, mut counts) = (SPECIAL.join("\n"), String::new());
    lines.push('\n');
    for (word, count) in words {
        lines.push_str(&word);
        lines.push('\n');
        // A word holds no tab: tokenizers cut there. Of a list of tokens it may; the count is behind the last one.
        counts.push_str(&format!("{word}\t{count}\n"));
    }
    let statistics = serde_json::to_string_pretty(report).map_err(|e| Error::Failed(e.to_string()))?;
    put(&beside(&job.output, "counts.tsv"), counts.into()).await?;
    put(&beside(&job.output, "stats.json"), format!("{statistics}\n").into()).await?;
    put(&job.output, lines.into()).await
}

/// `vocab.txt` and `counts.tsv` are `vocab.counts.tsv`.
fn beside(output: &Location, suffix: &str) -> Location {
    let path = output.path.as_ref();
    let stem = path.strip_suffix(".txt").unwrap_or(path);
    output.at(object_store::path::Path::from(format!("{stem}.{suffix}")))
}

async fn put(location: &Location, bytes: Bytes) -> Result<()> {
    location.put(bytes, PutMode::Overwrite).await.map_err(|e| StoreError::request("write", location, e))?;
    Ok(location.sync()?)
}

fn died(error: tokio::task::JoinError) -> Error {
    Error::Failed(format!("a thread died: {error}"))
}

fn disk(job: &VocabJob, error: &io::Error) -> Error {
    let folder = job.spill_folder.display();
    Error::Failed(format!("temporary files of counts in {folder}: {error}; give more --memory or another --spill-dir"))
}

impl fmt::Display for VocabReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = vec![
            ("sentences", count(self.sentences)),
            ("tokens", count(self.tokens)),
            ("different words", count(self.types)),
            (
                "vocabulary",
                format!(
                    "{} words, the last of which occurs {} times",
                    count(self.words as u64),
                    count(self.lowest_count)
                ),
            ),
            ("coverage", format!("{:.2} % of the tokens", 100.0 * self.coverage)),
        ];
        rows.extend(self.warnings.iter().map(|warning| ("warning", warning.clone())));
        f.write_str(&table(&rows))
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::BinaryArray;

    use super::*;
    use crate::stores::Stores;

    /// The other threads still receive, but nothing is sent any more: the corpus is not read to its end.
    #[test]
    fn a_bad_row_ends_the_reading() {
        let (columns, received) = mpsc::channel::<(Position, ArrayRef)>(QUEUE);
        let received = Arc::new(tokio::sync::Mutex::new(received));
        let job = VocabJob {
            inputs: Vec::new(),
            column: "text".to_owned(),
            tokenizer: TokenizerKind::Whitespace,
            sentences: SentenceMode::Off,
            skip_bad_rows: false,
            size: 9,
            min_count: 1,
            output: Stores::with_settings([]).locate("vocab.txt").unwrap(),
            overwrite: false,
            memory: 1 << 20,
            spill_folder: PathBuf::new(),
            threads: 2,
        };
        let column: ArrayRef = Arc::new(BinaryArray::from(vec![&b"\xff"[..]]));
        columns.try_send((Position::default(), column)).unwrap();
        assert!(count_some(&job, &received).is_err());
        assert!(columns.is_closed());
    }
}
