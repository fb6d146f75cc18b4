//! The options of bulk jobs that say what is read.

use std::{cmp::Ordering, str::FromStr};

use clap::{
    ArgMatches, Args, Command, FromArgMatches, ValueHint,
    builder::{PossibleValuesParser, TypedValueParser},
};
use elmo::spec::SpecError;

use super::args::{one_of, positive, precedence};
use crate::{
    error::{Error, Result},
    source::{Delimiter, Format, InferRows, Keep, KeptTypes, OnMalformed, Reading, STDIN},
};

/// Which rows and columns are read.
#[derive(Debug, Args)]
#[command(next_help_heading = "Input")]
pub(super) struct InputArgs {
    #[command(flatten)]
    files: Files,

    /// Format of all inputs, where names do not tell it: auto (by name), text, csv, tsv, jsonl, parquet or arrow
    ///
    /// Standard input is lines of text unless the format is given. Parquet on standard input is copied to a temporary file
    /// of the same size; other formats are read as they come. If the format is given, all files of a folder are read.
    #[arg(long, value_name = "FORMAT", default_value = "auto", value_parser = formats(), hide_possible_values = true)]
    input_format: FormatArg,

    /// Character between the cells of CSV and TSV, such as ';' or '\t' [default: a comma; in TSV a tab]
    #[arg(long, value_name = "CHAR", allow_hyphen_values = true)]
    delimiter: Option<Delimiter>,

    /// The first line of CSV and TSV is a row; columns are called column_1, column_2, …
    #[arg(long)]
    no_header: bool,

    /// Read only the first N rows of all inputs: a trial
    ///
    /// The limit is part of the job: without it, or with another one, the job is another job with another output.
    #[arg(long, value_name = "N", value_parser = positive)]
    limit: Option<usize>,

    /// Column of the texts: strings, binary (checked to be UTF-8) or lists of tokens
    ///
    /// A list is one tokenised sentence. Its byte offsets refer to the tokens joined by single spaces.
    #[arg(long, value_name = "NAME", default_value = "text")]
    pub(super) column: String,

    /// Column to keep as the first one of the output, regardless of --keep
    #[arg(long, value_name = "NAME")]
    pub(super) id: Option<String>,

    /// Columns to copy to the output: names, all or none
    ///
    /// Folders called KEY=VALUE are columns too, as in year=2024/month=7/a.parquet.
    #[arg(long, value_name = "COL,…|all|none", default_value = "all", value_parser = clap::value_parser!(Keep))]
    pub(super) keep: Keep,

    /// Types of kept CSV and JSON columns: guess (from the first rows, without changing a value: 007 is a string, 1.10 a
    /// number) or string (as written)
    #[arg(long, value_name = "TYPES", default_value = "guess", value_parser = one_of::<KeptTypes>(KeptTypes::WORDS))]
    pub(super) types: KeptTypes,

    /// Rows of each CSV and JSON file from which columns and types are inferred, or all
    ///
    /// A JSON key that only later rows have ends the job with an error if all columns are kept. With all, JSON files are
    /// read twice. Of CSV at most the first 64 MiB are looked at, and of standard input the first MiB.
    #[arg(long, value_name = "N|all", default_value_t, hide_short_help = true)]
    pub(super) infer_rows: InferRows,

    /// How to handle malformed rows: fail ends the job, skip leaves them out and counts them
    ///
    /// Malformed are CSV and TSV rows with another number of cells than the first line or with bytes that are not UTF-8, and
    /// lines of JSON that are not one object. A value of another type than its column's always ends the job.
    #[arg(long, value_name = "WHAT", default_value = "fail", value_parser = one_of::<OnMalformed>(OnMalformed::WORDS))]
    on_malformed: OnMalformed,
}

impl InputArgs {
    /// The inputs, in the order in which they were given; `example` is a command line for messages.
    ///
    /// # Errors
    /// [`Error::Usage`] when there are none, or standard input is not the only one.
    pub(super) fn inputs(&self, example: &str) -> Result<Vec<String>> {
        let inputs = &self.files.0;
        if inputs.is_empty() {
            let help = format!("for example: {example}; or set ELMO_INPUT, or input in elmo.toml");
            return Err(Error::usage("no input was given", help));
        }
        if inputs.iter().any(|input| input == STDIN) && inputs.len() > 1 {
            return Err(Error::usage("- (stdin) cannot be combined with other inputs", "read them in two jobs"));
        }
        Ok(inputs.clone())
    }

    /// How the inputs are read.
    pub(super) fn reading(&self) -> Reading {
        Reading {
            format: self.input_format.0,
            delimiter: self.delimiter,
            no_header: self.no_header,
            malformed: self.on_malformed,
        }
    }

    /// Maximum number of rows.
    pub(super) fn limit(&self) -> Option<u64> {
        self.limit.map(|rows| rows as u64)
    }
}

/// The value of `--input-format`; `None` for `auto`.
#[derive(Debug, Clone, Copy)]
struct FormatArg(Option<Format>);

impl FromStr for FormatArg {
    type Err = SpecError;

    fn from_str(word: &str) -> Result<Self, SpecError> {
        Ok(Self(Format::from_word(word)))
    }
}

fn formats() -> impl TypedValueParser<Value = FormatArg> {
    PossibleValuesParser::new(Format::WORDS).try_map(|word| word.parse::<FormatArg>())
}

/// The inputs: arguments and values of `--input`, in the order in which they were given. Those of the command line override
/// those of the environment, which override those of the file.
#[derive(Debug, Clone)]
pub(super) struct Files(pub(super) Vec<String>);

/// The options of [`Files`] for clap.
#[derive(Debug, Args)]
#[command(next_help_heading = "Input")]
struct FileOptions {
    /// Files, folders, glob patterns or URLs; - is standard input
    ///
    /// The formats are .txt (one row per line), .csv and .tsv (with a header), .jsonl, .ndjson and .json (objects in lines, or
    /// an array of objects), .parquet, .arrow and .arrows, each also compressed as .gz or .zst.
    #[arg(value_name = "INPUT", value_hint = ValueHint::AnyPath, help_heading = None::<&'static str>)]
    inputs: Vec<String>,

    /// Inputs as an option, which may be given several times, and which ELMO_INPUT and elmo.toml set
    ///
    /// Inputs on the command line, in either form, override those of the environment, which override those of elmo.toml.
    #[arg(short, long, num_args = 1.., value_name = "INPUT", value_hint = ValueHint::AnyPath)]
    input: Vec<String>,
}

impl Args for Files {
    fn augment_args(command: Command) -> Command {
        FileOptions::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        FileOptions::augment_args_for_update(command)
    }
}

impl FromArgMatches for Files {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let options = FileOptions::from_arg_matches(matches)?;
        let rank = |id| matches.value_source(id).map_or(0, precedence);
        Ok(Self(match rank("inputs").cmp(&rank("input")) {
            Ordering::Greater => options.inputs,
            Ordering::Less => options.input,
            Ordering::Equal => {
                let places = |id| matches.indices_of(id).into_iter().flatten();
                let mut all: Vec<(usize, String)> = places("inputs").zip(options.inputs).collect();
                all.extend(places("input").zip(options.input));
                all.sort_by_key(|(place, _)| *place);
                all.into_iter().map(|(_, input)| input).collect()
            }
        }))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
