//! `elmo model info|convert|verify`: their arguments. The work is in [`crate::models`].

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};

use super::{
    EngineArgs, ModelArgs,
    args::{self, one_of},
    print, print_json,
};
use crate::{
    error::{Error, Exit, Fault, Result},
    models::{
        Cache, ModelSpec, Models, Place,
        check::{self, Report},
        convert::{self, Converted, Layout},
        info::Info,
    },
    stores::{INTERACTIVE_RETRY_FOR, Stores},
};

/// Describe, convert or check a model
#[derive(Debug, Args)]
#[command(
    subcommand_required = true,
    arg_required_else_help = true,
    after_help = "\
Examples:
  elmo model info books
  elmo model convert books model-st --to safetensors
  elmo model verify books"
)]
pub(super) struct ModelCommand {
    #[command(subcommand)]
    command: ModelSubcommand,
}

#[derive(Debug, Subcommand)]
enum ModelSubcommand {
    Info(InfoArgs),
    Convert(ConvertArgs),
    Verify(VerifyArgs),
}

/// The model, as a positional argument or by `--model`.
#[derive(Debug, Args)]
struct Which {
    /// The model: a directory, a zip, a URL, books or tiny, as for --model [default: books]
    #[arg(value_name = "MODEL", id = "which", value_hint = ValueHint::AnyPath, conflicts_with_all = ["model", "options", "weights"])]
    which: Option<ModelSpec>,

    #[command(flatten)]
    model: ModelArgs,
}

impl Which {
    fn spec(&self) -> ModelSpec {
        self.which.clone().unwrap_or_else(|| self.model.spec())
    }
}

/// Print the options, size, files and fingerprint of a model
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo model info books
  elmo model info books --json")]
struct InfoArgs {
    #[command(flatten)]
    which: Which,

    /// Also print the names and shapes of all tensors
    #[arg(long)]
    tensors: bool,

    /// Print the report as JSON, including tensors
    #[arg(long)]
    json: bool,
}

/// Convert a model to another layout
///
/// Only safetensors-f16 changes numbers. The output directory must be new or empty. The written model is read back, and its
/// fingerprint must be that of the numbers that were to be written.
#[derive(Debug, Args)]
#[command(
    override_usage = "elmo model convert [OPTIONS] --to <LAYOUT> [MODEL] <OUT>",
    after_help = "\
Examples:
  elmo model convert books model-st --to safetensors
  elmo model convert --model model-st model-pair --to allennlp"
)]
struct ConvertArgs {
    /// The model (unless --model is given) and the directory to write
    #[arg(value_name = "[MODEL] OUT", num_args = 1..=2, required = true, value_hint = ValueHint::AnyPath)]
    places: Vec<String>,

    /// Layout of the written model
    ///
    /// safetensors writes a directory that opens fastest, hdf5 a directory with weights in the bilm-tf layout, and
    /// allennlp the pair of files that AllenNLP reads. safetensors-f16 rounds every number to float16: the directory has
    /// half the size, and is another model with another fingerprint.
    #[arg(long, value_name = "LAYOUT", value_parser = one_of::<Layout>(Layout::WORDS))]
    to: Layout,

    /// Also store the start state of --state warm, which otherwise every process computes
    ///
    /// A stored state has another identity than a computed one: jobs that were begun with --state warm and the model without it
    /// are refused when they go on with the new one.
    #[arg(long)]
    warm_state: bool,

    /// Print the report as JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    model: ModelArgs,
}

/// Check the files, shapes, numbers and fingerprint of a model, and run a forward pass
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo model verify books
  elmo model verify books --json

The exit code is 4 if a check fails.")]
struct VerifyArgs {
    #[command(flatten)]
    which: Which,

    /// Expected fingerprint, at least the first 12 of its 64 hexadecimal digits
    #[arg(long, value_name = "HEX")]
    fingerprint: Option<String>,

    /// Print the report as JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    engine: EngineArgs,
}

pub(super) fn run(command: &ModelCommand) -> Result<Exit> {
    match &command.command {
        ModelSubcommand::Info(args) => info(args),
        ModelSubcommand::Convert(args) => convert(args),
        ModelSubcommand::Verify(args) => verify(args),
    }
}

fn info(args: &InfoArgs) -> Result<Exit> {
    let spec = args.which.spec();
    let info = with_models(args.which.model.offline(), async |models| {
        let files = models.locate(&spec).await?;
        let data = models.resolve(&spec).await?;
        Ok(Info::of(&spec, &data, &files.list()))
    })?;
    match args.json {
        true => print_json(&info)?,
        false => print(&info.text(args.tensors))?,
    }
    Ok(Exit::Done)
}

fn convert(args: &ConvertArgs) -> Result<Exit> {
    let (spec, out) = match args.places.as_slice() {
        // The default would write `books` into a folder that was meant as the model.
        [_] if args.model.spec_if_given().is_none() => {
            let help = "name the model, then the directory to write: elmo model convert books OUT --to safetensors";
            return Err(Error::usage("one place was given", help));
        }
        [out] => (args.model.spec(), out),
        [model, out] if args.model.spec_if_given().is_none() => (model.parse()?, out),
        _ => return Err(Error::usage("two models were given", "name the model once, then the directory to write")),
    };
    let out = local_directory(out)?;
    if args.warm_state && args.to == Layout::AllenNlp {
        return Err(Error::usage(
            "the layout allennlp cannot store a warm state",
            "leave out --warm-state, or choose another --to",
        ));
    }
    let report = with_models(args.model.offline(), async |models| {
        let files = models.locate(&spec).await?;
        let mut data = models.resolve(&spec).await?;
        let is_new = args.warm_state && data.warm_state.is_none();
        if is_new {
            let settings = elmo::EmbedderSettings {
                devices: vec![elmo::engine::DeviceChoice::Cpu],
                threads: Some(1),
                ..elmo::EmbedderSettings::default()
            };
            data.warm_state = Some(elmo::Elmo::from_data(data.clone(), &settings)?.warm_state()?);
        }
        let converted = convert::convert(&data, &files, args.to, &out)?;
        Ok(Converted { note: converted.note.or(is_new.then_some(convert::WARM_STATE_STORED)), ..converted })
    })?;
    match args.json {
        true => print_json(&report)?,
        false => print(&report.to_string())?,
    }
    Ok(Exit::Done)
}

/// The directory to write. As a path, `s3://bucket/model` would create a folder called `s3:`.
fn local_directory(out: &str) -> Result<PathBuf> {
    match out.parse::<Place>()? {
        Place::Local(path) => Ok(path),
        place @ Place::Remote(_) => Err(Error::usage(
            format!("{place}: models are written to local directories only"),
            "name a local directory, and copy the model from there",
        )),
    }
}

fn verify(args: &VerifyArgs) -> Result<Exit> {
    let spec = args.which.spec();
    let report = with_models(args.which.model.offline(), async |models| {
        let (data, files) = match models.open(&spec).await {
            Ok(opened) => opened,
            // A model that cannot be opened is a result of this command; a store that fails is an error.
            Err(error) if error.exit() == Exit::Model => return Ok(Report::unreadable(&spec, &error)),
            Err(error) => return Err(error.into()),
        };
        let mut report = check::of_data(&spec, &data, &files, args.fingerprint.as_deref());
        if report.is_good() {
            report.checks.push(check::forward(&args.engine.load(data).await?));
        }
        Ok(report)
    })?;
    match args.json {
        true => print_json(&report)?,
        false => print(&report.to_string())?,
    }
    Ok(if report.is_good() { Exit::Done } else { Exit::Model })
}

fn with_models<T>(offline: bool, work: impl AsyncFnOnce(Models<'_>) -> Result<T>) -> Result<T> {
    args::block_on(async {
        let stores = Stores::from_env().retrying_for(INTERACTIVE_RETRY_FOR);
        let cache = Cache::from_env();
        work(Models { stores: &stores, cache: &cache, offline }).await
    })
}
