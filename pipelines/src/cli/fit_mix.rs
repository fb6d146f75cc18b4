//! `elmo fit-mix`: its arguments. The job is in [`crate::fit_mix`].

use std::{path::PathBuf, str::FromStr, thread};

use clap::{ArgMatches, Args, Command, FromArgMatches, ValueHint, parser::ValueSource};
use elmo::{
    EmbedSpec,
    spec::{OnError, SentenceMode, StateMode, TokenizerKind},
    train::MixSettings,
};

use super::{
    CommonArgs, EngineArgs, ModelArgs,
    args::{block_on, one_of, positive},
    mixes::is_file_of_mix,
    print, print_json, shutdown,
    train::unused,
};
use crate::{
    error::{Error, Exit, Result},
    fit_mix::{Data, FitMixJob, TagColumns, fit_mix},
    models::Cache,
    stores::Stores,
};

/// Fit a scalar mix of the layers to labelled data, and compare it with simpler vectors
///
/// The biLM stays as it is. Weights of its layers and a scale are learned together with a linear classifier of tokens, or of
/// texts by the maximum over their tokens. The weights and the scale are written as mix.json, which --layers reads. Beside
/// the mix, the same classifier is fitted to a biLM of the same sizes with random weights, to the token layer and to the
/// top layer.
#[derive(Debug, Args)]
#[command(
    override_usage = "elmo fit-mix [OPTIONS] --train <INPUT>... --dev <INPUT>...",
    after_help = "\
Examples:
  elmo fit-mix --train train.conll --dev dev.conll --output entities.json
  elmo fit-mix --train train.csv --dev dev.csv --label kind --epochs 5 --output kinds.json
  elmo embed reviews.jsonl --layers entities.json --output vectors

docs/mix.md describes the data, the classifier and the measures."
)]
pub(super) struct FitMixArgs {
    // The first field: the others take their values out of the matches.
    #[command(flatten)]
    of_texts: OfTexts,

    /// Files to learn from: files, folders, glob patterns or URLs
    ///
    /// Without --label, they are text with a token and its tag on each line, in columns, and a blank line between sentences, as
    /// in the CoNLL shared tasks. With --label they are files of any format that elmo embed reads.
    #[arg(long, num_args = 1.., value_name = "INPUT", value_hint = ValueHint::AnyPath, help_heading = "Data")]
    train: Vec<String>,

    /// Files to measure on, which also choose the best pass and the best seed
    #[arg(long, num_args = 1.., value_name = "INPUT", value_hint = ValueHint::AnyPath, help_heading = "Data")]
    dev: Vec<String>,

    /// Column of the labels of texts
    #[arg(long, value_name = "NAME", help_heading = "Data")]
    label: Option<String>,

    /// Column of texts, or of lists of tokens, with --label
    #[arg(long, value_name = "NAME", default_value = "text", help_heading = "Data")]
    column: String,

    /// Column of tokens in tagged sentences, from 1 [default: the first]
    #[arg(long, value_name = "N", value_parser = positive, conflicts_with = "label", help_heading = "Data")]
    token_column: Option<usize>,

    /// Column of tags in tagged sentences, from 1 [default: the last]
    #[arg(long, value_name = "N", value_parser = positive, conflicts_with = "label", help_heading = "Data")]
    tag_column: Option<usize>,

    /// Tokenizer of texts [default: the one that the model records, else moses]
    #[arg(long, value_name = "TOKENIZER", value_parser = one_of::<TokenizerKind>(TokenizerKind::WORDS), help_heading = "Data")]
    tokenizer: Option<TokenizerKind>,

    /// Split texts into sentences, split or off [default: as the model records, else split]
    #[arg(long, value_name = "MODE", value_parser = one_of::<SentenceMode>(SentenceMode::WORDS), help_heading = "Data")]
    sentences: Option<SentenceMode>,

    /// LSTM state at the start of a sentence, zero or warm [default: the one that the model records, else zero]
    #[arg(long, value_name = "STATE", value_parser = ["zero", "warm"], hide_short_help = true, help_heading = "Data")]
    state: Option<String>,

    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    fit: FitArgs,

    /// The mix with the best score, a path or URL
    #[arg(short, long, value_name = "FILE", default_value = "mix.json", value_hint = ValueHint::FilePath, help_heading = "Output")]
    output: String,

    /// Replace a mix that exists
    #[arg(long, help_heading = "Output")]
    overwrite: bool,

    /// Folder for the layers of all tokens, which later fits find there [default: features in elmo's cache directory]
    ///
    /// They take 4 bytes per number: 4 x layers x width for each token, once for the model and once for every random biLM.
    /// The folder can be deleted at any time.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, help_heading = "Output")]
    features: Option<PathBuf>,

    /// Print the report as JSON
    #[arg(long, help_heading = "Output")]
    json: bool,

    #[command(flatten)]
    engine: EngineArgs,
}

/// An option of the command line that only texts with --label have. In the environment or in elmo.toml, it may be meant for other
/// commands.
#[derive(Debug)]
struct OfTexts(Option<&'static str>);

impl Args for OfTexts {
    fn augment_args(command: Command) -> Command {
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        command
    }
}

impl FromArgMatches for OfTexts {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let is_given = |option: &&str| matches.value_source(option) == Some(ValueSource::CommandLine);
        Ok(Self(["column", "tokenizer"].into_iter().find(is_given)))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// What determines a fit.
#[derive(Debug, Args)]
#[command(next_help_heading = "Fit")]
struct FitArgs {
    /// Seeds; a fit is made for each
    #[arg(long, value_name = "N,…", default_value = "1,2,3")]
    seeds: Seeds,

    /// What is fitted beside the mix: all (random biLM, token layer, top layer) or none
    #[arg(long, value_name = "WHICH", default_value = "all", value_parser = ["all", "none"])]
    baselines: String,

    /// Normalise each layer before it is weighted; mix.json says so to its readers
    #[arg(long)]
    layer_norm: bool,

    /// Probability with which a number of the mixed vector is dropped
    #[arg(long, value_name = "P", default_value = "0.2", value_parser = probability)]
    dropout: f64,

    /// Factor of the sum of the squared layer scalars in the loss: a large one keeps the weights equal
    #[arg(long, value_name = "X", default_value = "0.001", value_parser = not_negative)]
    l2: f64,

    /// Learning rate of Adam
    #[arg(long, value_name = "X", default_value = "0.005", value_parser = above_zero)]
    learning_rate: f64,

    /// Sentences or texts of a batch
    #[arg(long, value_name = "N", default_value = "32", value_parser = positive)]
    batch: usize,

    /// Most passes over the training data
    #[arg(long, value_name = "N", default_value = "40", value_parser = positive)]
    epochs: usize,

    /// End a fit when so many passes in a row are no better than the best one
    #[arg(long, value_name = "N", default_value = "10", value_parser = positive)]
    patience: usize,
}

/// The value of `--seeds`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seeds(Vec<u64>);

impl FromStr for Seeds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let seeds: Result<Vec<u64>, _> = text.split(',').map(|seed| seed.trim().parse()).collect();
        let seeds = seeds.map_err(|_| "it must be whole numbers separated by commas, such as 1,2,3".to_owned())?;
        match seeds.iter().enumerate().find(|(place, seed)| seeds[..*place].contains(seed)) {
            Some((_, seed)) => Err(format!("seed {seed} is given twice")),
            None => Ok(Self(seeds)),
        }
    }
}

fn number(text: &str) -> Result<f64, String> {
    text.parse::<f64>().ok().filter(|number| number.is_finite()).ok_or_else(|| "it must be a number".to_owned())
}

fn above_zero(text: &str) -> Result<f64, String> {
    number(text).and_then(|x| if x > 0.0 { Ok(x) } else { Err("it must be above 0".to_owned()) })
}

fn not_negative(text: &str) -> Result<f64, String> {
    number(text).and_then(|x| if x >= 0.0 { Ok(x) } else { Err("it must not be negative".to_owned()) })
}

fn probability(text: &str) -> Result<f64, String> {
    let legal = |x: &f64| (0.0..1.0).contains(x);
    number(text).and_then(|x| Some(x).filter(legal).ok_or_else(|| "it must be at least 0 and below 1".to_owned()))
}

pub(super) fn run(args: &FitMixArgs, common: &CommonArgs) -> Result<Exit> {
    for (inputs, option) in [(&args.train, "--train"), (&args.dev, "--dev")] {
        if inputs.is_empty() {
            let help = "for example: elmo fit-mix --train train.conll --dev dev.conll";
            return Err(Error::usage(format!("{option} was not given"), help));
        }
    }
    if let (OfTexts(Some(option)), None) = (&args.of_texts, &args.label) {
        return Err(unused(&format!("--{option}"), "--label"));
    }
    if !is_file_of_mix(&args.output) {
        let message = format!("--output {}: --layers reads a mix from a file whose name ends in .json", args.output);
        return Err(Error::usage(message, "give it such a name, for example mix.json"));
    }
    let progress = common.progress();
    let report = block_on(async {
        let stop = shutdown::requested("the current batch is done")?;
        let stores = Stores::from_env();
        let job = args.job(&stores).await?;
        fit_mix(job, &stores, stop, progress.as_ref()).await
    })?;
    match args.json {
        true => print_json(&report)?,
        false => print(&report.to_string())?,
    }
    Ok(Exit::Done)
}

impl FitMixArgs {
    async fn job(&self, stores: &Stores) -> Result<FitMixJob> {
        let model = self.model.open(stores).await?;
        let recorded = model.options.spec();
        let state = self.state.as_deref().map(str::parse::<StateMode>).transpose().map_err(elmo::Error::from)?;
        let spec = EmbedSpec {
            tokenizer: self.tokenizer.unwrap_or(recorded.tokenizer),
            sentences: self.sentences.unwrap_or(recorded.sentences),
            state: state.unwrap_or(recorded.state),
            on_error: OnError::Fail,
            ..recorded
        };
        let data = match &self.label {
            Some(label) => Data::Texts { column: self.column.clone(), label: label.clone() },
            None => Data::Tags(TagColumns { token: self.token_column, tag: self.tag_column }),
        };
        let settings = self.engine.settings();
        let cores = || thread::available_parallelism().map_or(1, usize::from);
        let fit = &self.fit;
        Ok(FitMixJob {
            train: self.train.clone(),
            dev: self.dev.clone(),
            data,
            model,
            threads: settings.threads.unwrap_or_else(cores),
            settings,
            spec,
            layer_norm: fit.layer_norm,
            output: stores.locate(&self.output)?,
            overwrite: self.overwrite,
            cache: self.features.clone().unwrap_or_else(|| Cache::from_env().dir().with_file_name("features")),
            fit: MixSettings {
                dropout: fit.dropout,
                l2: fit.l2,
                learning_rate: fit.learning_rate,
                batch: fit.batch,
                epochs: fit.epochs,
                patience: fit.patience,
            },
            seeds: fit.seeds.0.clone(),
            baselines: fit.baselines == "all",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_out_of_range_are_refused() {
        assert_eq!("1, 2,30".parse(), Ok(Seeds(vec![1, 2, 30])));
        assert_eq!("1,2,1".parse::<Seeds>(), Err("seed 1 is given twice".to_owned()));
        assert!(["", "a", "-1", "1,,2"].iter().all(|text| text.parse::<Seeds>().is_err()));
        assert!(["0", "0.5", "0.999"].iter().all(|text| probability(text).is_ok()));
        assert!(["1", "-0.1", "NaN", "x"].iter().all(|text| probability(text).is_err()));
        assert!(above_zero("0").is_err() && not_negative("0").is_ok() && not_negative("inf").is_err());
    }
}
