//! Counts the words of a corpus and writes a vocabulary.
//!
//! The vocabulary is a list of words by falling frequency after `<S>`, `</S>` and `<UNK>`; the number of a line is the id of
//! its word (`bilm-tf`, `README.md`, section "Training a biLM on a new corpus"). The order matters: the sampled softmax
//! draws words by their rank. The result does not depend on the number of threads or on the memory.
//!
//! Beside `vocab.txt` are `vocab.counts.tsv`, with the word and its count on each line, and `vocab.stats.json`.

mod counter;
mod ranking;

use std::{
    fmt,
    io::{self, Seek, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

use arrow::array::ArrayRef;
use elmo::{
    chars::{BEGIN_SENTENCE_TOKEN, END_SENTENCE_TOKEN, is_cut},
    columns::{for_each_sentence, for_each_text},
    lm_head::UNKNOWN,
    spec::{SentenceMode, TokenizerKind},
};
use serde::Serialize;
use tempfile::{SpooledData, SpooledTempFile, spooled_tempfile_in};
use tokio::{sync::mpsc, task::JoinSet};

use self::{
    counter::{Counter, merge},
    ranking::{Kept, Ranking},
};
use crate::{
    error::{Error, Result},
    report::{count, table},
    sink::copy,
    source::{InputFile, Plan, Position, Request, Rows, check_kept},
    stores::{Location, writable::check_file},
};

/// The first lines of every vocabulary.
const SPECIAL: [&str; 3] = [BEGIN_SENTENCE_TOKEN, END_SENTENCE_TOKEN, UNKNOWN];
/// Ends of the names of the files beside the vocabulary.
const COUNTS: &str = "counts.tsv";
const STATISTICS: &str = "stats.json";
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
/// The share of the memory that is for the order of the words, while their counts are still in the rest of it.
const FOR_ORDER: usize = 4;

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
    /// Rows with such characters, where they end a token.
    odd_rows: u64,
    bad_rows: u64,
}

/// Counts and writes.
///
/// # Errors
/// [`SourceError`](crate::source::SourceError) when the corpus cannot be read, [`Error::Input`] for a row that is no text or
/// a corpus without words, [`Error::Usage`] when the output exists,
/// [`SourceError::Replaced`](crate::source::SourceError::Replaced) when it is a file of the corpus,
/// [`StoreError`](crate::stores::StoreError) when it cannot be written.
pub async fn run(job: VocabJob) -> Result<VocabReport> {
    check_output(&job).await?;
    let plan = Arc::new(Plan::resolve(job.inputs.clone(), &Request::texts(&job.column)).await?);
    let job = Arc::new(job);
    let (seen, counters) = count_all(&job, &plan).await?;
    let own = Arc::clone(&job);
    let merged = tokio::task::spawn_blocking(move || ranked(counters, &own)).await;
    let ranked = merged.map_err(died)?.map_err(|error| disk(&job, &error))?;
    if ranked.types == 0 {
        let help = Some(format!("check the files, and --column {}", job.column));
        let file = job.inputs.first().map(ToString::to_string).unwrap_or_default();
        return Err(Error::Input { file, row: None, reason: "the corpus contains no words".into(), help });
    }
    let report = report(&job, &seen, &ranked);
    write(&job, &report, ranked).await?;
    Ok(report)
}

async fn check_output(job: &VocabJob) -> Result<()> {
    if !job.overwrite && job.output.head().await?.is_some() {
        let help = "a model that was trained with it needs it as it is; give another name, or --overwrite";
        return Err(Error::usage(format!("{} exists", job.output), help));
    }
    for output in [job.output.clone(), beside(&job.output, COUNTS), beside(&job.output, STATISTICS)] {
        check_kept(&job.inputs, &output)?;
    }
    check_file(&job.output)
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
    let (mut seen, mut counter) = (Seen::default(), Counter::new((job.memory - job.memory / FOR_ORDER) / job.threads));
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
        if job.tokenizer == TokenizerKind::Whitespace {
            for_each_text(&column, |text| seen.odd_rows += u64::from(has_odd_space(text)))?;
        }
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
            self.odd_spaces += u64::from(has_odd_space(word));
            counter.add(word);
        }
    }

    fn add(&mut self, other: &Self) {
        self.sentences += other.sentences;
        self.long_sentences += other.long_sentences;
        self.special += other.special;
        self.unwritable += other.unwritable;
        self.odd_spaces += other.odd_spaces;
        self.odd_rows += other.odd_rows;
        self.bad_rows += other.bad_rows;
    }
}

/// Whether there is a no-break space or a separator, which are white space for Python and bilm-tf, and not for everybody.
fn has_odd_space(text: &str) -> bool {
    // The first bytes of these characters: most texts have none of them.
    let may = |byte: u8| matches!(byte, 0x1c..=0x1f | 0xc2);
    text.bytes().any(may) && text.contains(|c: char| c == '\u{a0}' || ('\u{1c}'..='\u{1f}').contains(&c))
}

/// Words that are longer than the published models read.
#[derive(Debug, Clone, Copy, Default)]
struct CutWords {
    types: u64,
    tokens: u64,
}

/// All words, and those of the vocabulary.
struct Ranked {
    types: u64,
    tokens: u64,
    cut: CutWords,
    kept: Kept,
    /// `vocab.txt` and `vocab.counts.tsv`.
    lists: [SpooledTempFile; 2],
}

fn ranked(counters: Vec<Counter>, job: &VocabJob) -> io::Result<Ranked> {
    let (size, limit, folder) = (job.size.saturating_sub(SPECIAL.len()), job.memory / FOR_ORDER, &job.spill_folder);
    let (mut ranking, mut cut) = (Ranking::new(size, job.min_count, limit, folder.clone()), CutWords::default());
    merge(counters, |word, count| {
        if is_cut(&word, CHARACTERS) {
            cut.types += 1;
            cut.tokens += count;
        }
        ranking.add(word, count)
    })?;
    let (types, tokens) = (ranking.types, ranking.tokens);
    // Bytes of a list above which it is a file.
    let list = || io::BufWriter::new(spooled_tempfile_in(limit / 2, folder));
    let (mut lines, mut counts) = (list(), list());
    SPECIAL.iter().try_for_each(|word| writeln!(lines, "{word}"))?;
    let kept = ranking.finish(|word, count| {
        writeln!(lines, "{word}")?;
        // A word holds no tab: tokenizers cut there. Of a list of tokens it may; the count is behind the last one.
        writeln!(counts, "{word}\t{count}")
    })?;
    let complete = |list: io::BufWriter<SpooledTempFile>| -> io::Result<SpooledTempFile> {
        let mut list = list.into_inner().map_err(io::IntoInnerError::into_error)?;
        list.rewind()?;
        Ok(list)
    };
    Ok(Ranked { types, tokens, cut, kept, lists: [complete(lines)?, complete(counts)?] })
}

fn report(job: &VocabJob, seen: &Seen, ranked: &Ranked) -> VocabReport {
    let Ranked { types, kept, cut, .. } = ranked;
    let tokens = ranked.tokens + seen.special + seen.unwritable;
    let coverage = (kept.tokens + seen.special) as f64 / tokens.max(1) as f64;
    let mut report = VocabReport {
        tokenizer: job.tokenizer.as_str(),
        sentence_mode: job.sentences.as_str(),
        files: job.inputs.len(),
        sentences: seen.sentences,
        tokens,
        types: *types,
        words: kept.words + SPECIAL.len(),
        coverage,
        lowest_count: kept.lowest,
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
        (seen.odd_rows > 0).then(|| {
            let rows = count(seen.odd_rows);
            format!("rows with a no-break space or a separator (U+001C to U+001F), where words are cut, as bilm-tf does: {rows}; \
                     is a word meant to go on there?")
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
async fn write(job: &VocabJob, report: &VocabReport, ranked: Ranked) -> Result<()> {
    let [lines, counts] = ranked.lists;
    let statistics = serde_json::to_string_pretty(report).map_err(|e| Error::Failed(e.to_string()))? + "\n";
    put(&beside(&job.output, COUNTS), counts).await?;
    copy(&beside(&job.output, STATISTICS), statistics.as_bytes(), Path::new("statistics")).await?;
    put(&job.output, lines).await
}

/// `vocab.txt` and `counts.tsv` are `vocab.counts.tsv`.
fn beside(output: &Location, suffix: &str) -> Location {
    let path = output.path.as_ref();
    let stem = path.strip_suffix(".txt").unwrap_or(path);
    output.at(object_store::path::Path::from(format!("{stem}.{suffix}")))
}

async fn put(location: &Location, list: SpooledTempFile) -> Result<()> {
    let name = Path::new("a temporary file");
    match list.into_inner() {
        SpooledData::InMemory(bytes) => copy(location, bytes.get_ref().as_slice(), name).await?,
        SpooledData::OnDisk(file) => copy(location, tokio::fs::File::from_std(file), name).await?,
    };
    Ok(())
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
