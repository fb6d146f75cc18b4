//! `elmo finetune`: `elmo train` that begins with a model. The run is in [`crate::train`].

use std::path::PathBuf;

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};

use super::{
    args::{self, block_on},
    train::{self, TrainArgs},
};
use crate::{
    error::{Exit, Result},
    models::ModelSpec,
    stores::Stores,
};

const ABOUT: &str = "Continue the training of a model on the text of a domain; the same command resumes it";
const LONG_ABOUT: &str = "Continue the training of a model on the text of a domain; the same command resumes it

It is elmo train, with another beginning: weights, vocabulary and softmax are those of the model, and text is read as the model \
records it. With --valid, the held-out perplexity is also measured before the first step, and the weights of the best \
measurement are kept.";
const EXAMPLES: &str = "\
Examples:
  elmo finetune --model books --shards domain.txt --output finetuned --rows 8
  elmo finetune --shards domain.txt --valid heldout.txt --epochs 2 --rows 8 --output tuned

The exit code is 6 if rows were left out, and 4 if neither the model nor --vocab has a vocabulary.
docs/training.md describes the recipe, the files of a run, and how it is resumed.";

/// The options of `elmo train`. Those that give a new model its sizes are refused.
#[derive(Debug)]
pub(super) struct FinetuneArgs(TrainArgs);

impl Args for FinetuneArgs {
    fn augment_args(command: Command) -> Command {
        let of_train = TrainArgs::augment_args(Command::new("train"));
        command
            .about(ABOUT)
            .long_about(LONG_ABOUT)
            .override_usage("elmo finetune [OPTIONS] --shards <INPUT>... --output <DIR>")
            .after_help(EXAMPLES)
            .args(of_train.get_arguments().cloned().map(changed))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

/// An option of `elmo train` as it is here.
fn changed(arg: Arg) -> Arg {
    let refused = |_: &str| -> Result<String, String> { Err("a trained model has sizes of its own".to_owned()) };
    let help = match arg.get_id().as_str() {
        "size" => return arg.hide(true).value_parser(refused),
        "options" => return arg.hide(true).value_parser(move |text: &str| refused(text).map(PathBuf::from)),
        "init" => {
            let help = "The model: a directory, a zip, a URL of either, or a built-in model";
            return arg.long("model").short('m').default_value("books").help(help);
        }
        "vocab" => "Vocabulary, for a model without an LM head [default: that of the model]",
        "tokenizer" => {
            "How texts become tokens: whitespace (already tokenised), moses or words [default: as the model records, else moses]"
        }
        "sentences" => "Cut texts into sentences, split or off [default: as the model records, else split]",
        "epochs" => "Passes over the text, which is counted before the first step [default: 1]",
        "offline" => "Do not use the network for the model",
        _ => return arg,
    };
    arg.help(help)
}

impl FromArgMatches for FinetuneArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        TrainArgs::from_arg_matches(matches).map(Self)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0.update_from_arg_matches(matches)
    }
}

pub(super) fn run(FinetuneArgs(args): &FinetuneArgs) -> Result<Exit> {
    let spec: ModelSpec = args.init.as_deref().map(str::parse).transpose()?.unwrap_or_default();
    let model = block_on(async { args::open(&spec, args.offline, &Stores::from_env()).await })?;
    train::start(args, Some(&model.options.spec()))
}
