//! The corpus of a run: its shards, what is in them, and its sentences in the order of an epoch.

mod blocks;
mod order;
mod stream;
mod survey;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use elmo::{
    RowError,
    spec::{SentenceMode, TokenizerKind},
};

use self::order::MAX_SHARDS;
pub use self::order::Order;
pub(super) use self::{
    stream::{Passes, Sentences, StreamPosition},
    survey::{Hashes, LONG, LONG_ENOUGH, Shard, Survey, Wanted, differences},
};
use super::{start::is_of_run, words::Words};
use crate::{
    error::{Error, Result},
    source::{self, InputFile, Plan, Request},
    stores::{Location, Stores},
};

/// How rows become sentences and blocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reading {
    pub(super) tokenizer: TokenizerKind,
    pub(super) sentences: SentenceMode,
    /// Sentences of a block.
    pub(super) block_sentences: usize,
}

/// A corpus.
#[derive(Debug)]
pub(super) struct Corpus {
    plan: Plan,
    files: Vec<InputFile>,
    reading: Reading,
    pub(super) words: Arc<Words>,
    order: Order,
    seed: u64,
    /// Rows that are no text are left out.
    skip_bad_rows: bool,
}

/// What a corpus is read from, and how.
#[derive(Debug)]
pub(super) struct Shards<'j> {
    pub(super) inputs: &'j [String],
    /// Folder of the run: what it writes there is no text.
    pub(super) run: Option<&'j Location>,
    pub(super) column: &'j str,
    pub(super) reading: Reading,
    pub(super) order: Order,
    pub(super) seed: u64,
    pub(super) skip_bad_rows: bool,
}

/// The path of a local file or folder that exists, without links.
fn real_path(location: &Location) -> Option<PathBuf> {
    location.local_path()?.canonicalize().ok()
}

/// Whether a file is one that the run in a folder writes.
fn is_written(file: &InputFile, run: &Path) -> bool {
    let file = file.location.as_ref().and_then(real_path);
    let within = file.as_ref().and_then(|file| file.strip_prefix(run).ok());
    within.and_then(Path::to_str).is_some_and(is_of_run)
}

impl Corpus {
    /// Finds the shards.
    ///
    /// # Errors
    /// [`SourceError`](crate::source::SourceError) when there are none, or when they lack the column; [`Error::Usage`] for
    /// standard input, which cannot be read again.
    pub(super) async fn open(stores: &Stores, shards: Shards<'_>, words: &Arc<Words>) -> Result<Self> {
        if shards.inputs.iter().any(|input| input == source::STDIN) {
            let help = "write the text to a file first: it is read several times, also once for each direction";
            return Err(Error::usage("the text cannot be standard input", help));
        }
        let mut files = source::list(stores, shards.inputs, None).await?;
        let run = shards.run.and_then(real_path);
        let is_of_run = |file: &InputFile| run.as_ref().is_some_and(|run| is_written(file, run));
        if files.iter().all(is_of_run) {
            let file = files.first().map(ToString::to_string).unwrap_or_default();
            return Err(Error::usage(format!("{file}: is a file of the run"), "give the text that the run is to read"));
        }
        files.retain(|file| !is_of_run(file));
        // By name, however the inputs were given.
        files.sort_by_key(ToString::to_string);
        if files.len() > MAX_SHARDS {
            return Err(Error::usage(
                format!("the corpus has {} files, more than {MAX_SHARDS}", files.len()),
                "join them: shards of 50 to 100 MB are read best",
            ));
        }
        let plan = Plan::resolve(files.clone(), &Request::texts(shards.column)).await?;
        let Shards { reading, order, seed, skip_bad_rows, .. } = shards;
        Ok(Self { plan, files, reading, words: Arc::clone(words), order, seed, skip_bad_rows })
    }

    /// Reads all of it, and describes it. Shards that are what `known` says are not read again.
    ///
    /// # Errors
    /// Those of the source; [`Error::Input`] for a row that is no text, or when there is no sentence.
    pub(super) async fn survey(self: &Arc<Self>, wanted: &Wanted, known: &[Shard], threads: usize) -> Result<Survey> {
        let survey = survey::survey(self, wanted, known, threads).await?;
        if survey.sentences() == 0 {
            let file = self.files.first().map(ToString::to_string).unwrap_or_default();
            let help = Some("check the files and the column of the text".to_owned());
            return Err(Error::Input { file, row: None, reason: "there are no sentences".to_owned(), help });
        }
        Ok(survey)
    }

    /// The shards, by name.
    pub(super) fn files(&self) -> &[InputFile] {
        &self.files
    }

    /// A plan that reads one shard.
    pub(super) fn shard(&self, number: usize) -> Result<Arc<Plan>> {
        let plan = self.plan.only(number).ok_or_else(|| Error::Failed(format!("there is no shard {number}")))?;
        Ok(Arc::new(plan))
    }

    /// Refuses rows that are no text, unless they are left out.
    fn check_rows(&self, shard: usize, start: u64, bad: &[(usize, RowError)]) -> Result<()> {
        let Some((row, error)) = bad.first().filter(|_| !self.skip_bad_rows) else { return Ok(()) };
        Err(Error::Input {
            file: self.files[shard].to_string(),
            row: Some(start + *row as u64),
            reason: error.to_string(),
            help: Some("give --on-error skip to leave such rows out".to_owned()),
        })
    }
}
