//! `elmo vocab`: its arguments. The work is in [`crate::train::vocab`].

use std::{env, path::PathBuf};

use clap::{Args, ValueHint};
use elmo::spec::{SentenceMode, TokenizerKind};

use super::{
    CommonArgs,
    args::{Bytes, block_on, one_of, positive, threads},
    inputs::Files,
    print, print_json,
};
use crate::{
    error::{Error, Exit, Result},
    source,
    stores::Stores,
    train::vocab::{self, VocabJob},
};

/// Count the words of a corpus and write a vocabulary for training
///
/// The vocabulary has a word per line, the most frequent first, after its three special tokens. Beside vocab.txt are
/// vocab.counts.tsv and vocab.stats.json. The result does not depend on threads or memory.
#[derive(Debug, Args)]
#[command(after_help = "\
The special tokens are <S> and </S>, the boundaries of a sentence, and <UNK>, all other words.

Examples:
  elmo vocab --input 'corpus/shard-*.txt' --output vocab.txt --size 50000
  elmo vocab reviews.jsonl --tokenizer moses --output words.txt --min-count 2")]
pub(super) struct VocabArgs {
    #[command(flatten)]
    files: Files,

    /// The vocabulary, a path or URL
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    output: String,

    /// Column of texts, or of lists of tokens
    #[arg(long, value_name = "NAME", default_value = "text")]
    column: String,

    /// How texts become tokens: whitespace (already tokenised), moses or words
    #[arg(long, value_name = "KIND", default_value = "whitespace", value_parser = one_of::<TokenizerKind>(TokenizerKind::WORDS))]
    tokenizer: TokenizerKind,

    /// Cut texts into sentences, split or off [default: off with --tokenizer whitespace, else split]
    #[arg(long, value_name = "MODE", value_parser = one_of::<SentenceMode>(SentenceMode::WORDS))]
    sentences: Option<SentenceMode>,

    /// Most words of the vocabulary, special tokens included [default: all]
    #[arg(long, value_name = "N", value_parser = positive)]
    size: Option<usize>,

    /// Leave out words that occur less often
    #[arg(long, value_name = "N", default_value = "1", value_parser = positive)]
    min_count: usize,

    /// Rows that are not text: fail ends the command, skip leaves them out and counts them
    #[arg(long, value_name = "WHAT", default_value = "fail", value_parser = ["fail", "skip"])]
    on_error: String,

    /// Replace a vocabulary that exists
    #[arg(long)]
    overwrite: bool,

    /// Memory for counts; above it, temporary files are used
    #[arg(long, value_name = "SIZE", default_value = "2GB")]
    memory: Bytes,

    /// Folder for temporary files [default: that of the system]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, hide_short_help = true)]
    spill_dir: Option<PathBuf>,

    /// Threads that count [default: one per core]
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<usize>,

    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &VocabArgs, _: &CommonArgs) -> Result<Exit> {
    let report = block_on(async {
        let stores = Stores::from_env();
        let inputs = &args.files.0;
        if inputs.is_empty() {
            return Err(Error::usage("no input was given", "for example: elmo vocab corpus.txt --output vocab.txt"));
        }
        let whole = args.tokenizer == TokenizerKind::Whitespace;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let output = stores.locate(&args.output)?;
        vocab::run(VocabJob {
            inputs: source::list(&stores, inputs, None).await?,
            column: args.column.clone(),
            tokenizer: args.tokenizer,
            sentences: args.sentences.unwrap_or(if whole { SentenceMode::Off } else { SentenceMode::Split }),
            skip_bad_rows: args.on_error == "skip",
            size: args.size.unwrap_or(usize::MAX),
            min_count: args.min_count as u64,
            output,
            overwrite: args.overwrite,
            memory: args.memory.0.get(),
            spill_folder: args.spill_dir.clone().unwrap_or_else(env::temp_dir),
            threads: args.threads.unwrap_or(cores),
        })
        .await
    })?;
    match args.json {
        true => print_json(&report)?,
        false => print(&report.to_string())?,
    }
    Ok(if report.bad_rows > 0 { Exit::Rejected } else { Exit::Done })
}
