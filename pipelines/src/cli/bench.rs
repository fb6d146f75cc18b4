//! `elmo bench`: its arguments. The measurement is in [`crate::diagnose::bench`].

use clap::{Args, ValueHint};
use serde::Serialize;

use super::{
    EngineArgs, ModelArgs,
    args::{block_on, one_of, positive},
    print, print_json,
};
use crate::{
    diagnose::{
        bench::{
            self, Bench, BenchReport,
            bulk::{self, BulkBench},
            drift::{self, Drift, DriftReport},
        },
        sizes::Size,
    },
    error::{Exit, Result},
    stores::Stores,
};

/// The help of `--model`, which other commands have with another default.
const MODEL: &str = "The model: a directory, a zip, a URL of either, or a built-in model [default: random weights of --size; with --drift, books]";

/// Measure tokens/s, padding, cache hits and GFLOP/s, relative to the matrix products of this machine
///
/// The ceiling is the speed of the matrix products alone, with the shapes of the model and in the same precision, measured in the
/// same run. The share of the ceiling can be compared between machines. Speed does not depend on the weights, so random weights
/// suffice: without --model, and without ELMO_MODEL and model in elmo.toml, those of --size small are measured.
///
/// With --constant, everything that `elmo embed` or `elmo stream` does beside the model is measured instead.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo bench --size tiny --seconds 2
  elmo bench --model tiny --text reviews.jsonl --seconds 2 --json
  elmo bench --text reviews.jsonl --precision int8 --drift
  elmo bench --constant 1024 --rows 20000
  elmo bench --constant 1024 --brokers localhost:9092",
    mut_arg("model", |model| model.help(MODEL).long_help(MODEL))
)]
pub(super) struct BenchArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// Random weights of a published size instead of a model [default: small, if no model is given]
    #[arg(long, value_name = "SIZE", value_parser = one_of::<Size>(Size::WORDS), help_heading = "Model", conflicts_with_all = ["model", "options", "weights"])]
    size: Option<Size>,

    /// Embed the column text of this file or URL [default: built-in English text]
    #[arg(long, value_name = "URL", value_hint = ValueHint::FilePath, help_heading = "Measurement")]
    text: Option<String>,

    /// Duration of the measurement in seconds, after warming up
    #[arg(long, value_name = "N", default_value = "10", value_parser = positive, help_heading = "Measurement")]
    seconds: usize,

    /// Also measure the speed-up of each optimisation of the engine on the CPU
    #[arg(long, help_heading = "Measurement")]
    savings: bool,

    /// Instead of the speed, measure how far the vectors of --precision are from those in f32
    ///
    /// For each layer the largest difference and the relative root mean square, that is the root mean square of the differences over
    /// that of the numbers; for whole texts the cosine of both vectors, and the share whose nearest other text stays the same. Up to 1,000 distinct texts of at most 4 KiB are compared.
    #[arg(long, conflicts_with = "savings", help_heading = "Measurement")]
    drift: bool,

    /// Print the report as JSON
    #[arg(long, help_heading = "Measurement")]
    json: bool,

    #[command(flatten)]
    constant: ConstantArgs,

    #[cfg(feature = "kafka")]
    #[command(flatten)]
    stream: stream::StreamArgs,

    #[command(flatten)]
    engine: EngineArgs,
}

pub(super) fn run(args: &BenchArgs) -> Result<Exit> {
    if let Some(width) = args.constant.constant {
        return args.constant.run(width, args);
    }
    let report = block_on(async {
        let data = match (args.size, args.model.spec_if_given()) {
            (Some(size), _) => size.model()?,
            // Drift depends on the weights.
            (None, None) if !args.drift => Size::Small.model()?,
            (None, _) => args.model.open(&Stores::from_env()).await?,
        };
        let settings = args.engine.settings();
        if args.drift {
            let drift = Drift { data, settings, text: args.text.clone() };
            return Ok(Report::Drift(drift::run(drift).await?));
        }
        let report =
            bench::run(Bench { data, settings, text: args.text.clone(), seconds: args.seconds, savings: args.savings })
                .await?;
        Ok(Report::Speed(report))
    })?;
    match (args.json, &report) {
        (true, report) => print_json(report)?,
        (false, Report::Speed(report)) => print(&report.to_string())?,
        (false, Report::Drift(report)) => print(&report.to_string())?,
    }
    Ok(Exit::Done)
}

#[derive(Serialize)]
#[serde(untagged)]
enum Report {
    Speed(BenchReport),
    Drift(DriftReport),
}

/// A job without a model.
#[derive(Debug, Args)]
#[command(next_help_heading = "Without a model")]
struct ConstantArgs {
    /// Replace the model by a constant vector of N numbers, and measure a bulk job, or with --brokers a stream
    ///
    /// A bulk job reads the column text of --text, or else files of short texts that are written in every input format. A stream reads
    /// a topic of its own, which is filled with JSON messages and deleted. Rows per second are compared with those of the Parquet
    /// encoder alone.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..), conflicts_with_all = ["size", "model", "options", "weights", "savings", "drift"])]
    constant: Option<u16>,

    /// Rows of each file, or messages of the topic
    #[arg(long, value_name = "N", default_value = "2000000", value_parser = positive)]
    rows: usize,

    /// Folder or URL for the files, which are kept [default: a temporary folder, which is removed]
    #[arg(short, long, value_name = "DIR", value_hint = ValueHint::DirPath, requires = "constant")]
    output: Option<String>,
}

impl ConstantArgs {
    fn run(&self, width: u16, args: &BenchArgs) -> Result<Exit> {
        #[cfg(feature = "kafka")]
        if let Some(brokers) = &args.stream.brokers {
            return args.stream.run(brokers, self, width, args.json);
        }
        let (text, output) = (args.text.clone(), self.output.clone());
        let report = block_on(bulk::run(BulkBench { text, output, rows: self.rows, width }))?;
        match args.json {
            true => print_json(&report)?,
            false => print(&report.to_string())?,
        }
        Ok(Exit::Done)
    }
}

#[cfg(feature = "kafka")]
mod stream {
    use std::env;

    use clap::Args;

    use super::ConstantArgs;
    use crate::{
        cli::{
            args::{block_on, positive},
            print, print_json,
        },
        diagnose::bench::stream::{self, StreamBench},
        error::{Error, Exit, Result},
        stores::Stores,
        stream::source::{Given, Settings},
    };

    /// A stream without a model.
    #[derive(Debug, Args)]
    #[command(next_help_heading = "Without a model")]
    pub(super) struct StreamArgs {
        /// Brokers, HOST:PORT separated by commas
        #[arg(long, value_name = "BROKERS", requires = "constant", conflicts_with = "text")]
        pub(super) brokers: Option<String>,

        /// Partitions of the topic
        #[arg(long, value_name = "N", default_value = "4", value_parser = positive)]
        partitions: usize,

        /// A property of librdkafka, KEY=VALUE; repeat it for several
        #[arg(short = 'X', long = "kafka", value_name = "KEY=VALUE", requires = "brokers")]
        kafka: Vec<String>,
    }

    impl StreamArgs {
        pub(super) fn run(&self, brokers: &str, constant: &ConstantArgs, width: u16, json: bool) -> Result<Exit> {
            let name = format!("elmo-bench-{}", uuid::Uuid::new_v4().simple());
            let kafka = Settings::new(Given {
                brokers: brokers.to_owned(),
                topics: vec![name.clone()],
                group: name,
                secrets: None,
                environment: env::vars_os().collect(),
                kafka: self.kafka.clone(),
            })?;
            let folder = tempfile::tempdir().map_err(|e| Error::Failed(format!("no temporary folder: {e}")))?;
            let address = constant.output.clone().unwrap_or_else(|| folder.path().to_string_lossy().into_owned());
            let output = Stores::from_env().locate(&address)?;
            let partitions = i32::try_from(self.partitions).unwrap_or(i32::MAX);
            let bench = StreamBench { kafka, output, rows: constant.rows, partitions, width };
            let report = block_on(stream::run(bench))?;
            match json {
                true => print_json(&report)?,
                false => print(&report.to_string())?,
            }
            Ok(Exit::Done)
        }
    }
}
