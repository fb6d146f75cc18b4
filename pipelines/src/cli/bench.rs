//! `elmo bench`: the words; the measurement is in [`crate::bench`].

use clap::{Args, ValueHint};

use super::{
    EngineArgs, ModelArgs,
    args::{positive, words},
};
use crate::sizes::Size;

/// Measure tokens/s, padding, cache hits and GFLOP/s, and the share of what this machine's matrix products reach
///
/// The ceiling is measured in the same run with the same libtorch, on the shapes of the model, so that the share can be
/// compared between machines. Speed does not depend on the weights: --size makes random ones of a published size.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elmo bench --size tiny --seconds 2
  elmo bench --model tiny --text reviews.jsonl --seconds 2 --json")]
pub struct BenchArgs {
    /// The model to measure.
    #[command(flatten)]
    pub model: ModelArgs,

    /// Seeded random weights of a published size instead of a model [default: small, when no model is given]
    #[arg(long, value_name = "SIZE", value_parser = words::<Size>(Size::WORDS), help_heading = "Model", conflicts_with_all = ["model", "options", "weights"])]
    pub size: Option<Size>,

    /// Text to embed: the column text of a file or URL that elmo embed reads [default: built-in English text]
    #[arg(long, value_name = "URL", value_hint = ValueHint::FilePath, help_heading = "Measurement")]
    pub text: Option<String>,

    /// Seconds to measure after warming up; longer is steadier
    #[arg(long, value_name = "N", default_value = "10", value_parser = positive, help_heading = "Measurement")]
    pub seconds: usize,

    /// Also measure what each saving of the engine is worth: one batch with it and without it, on the CPU
    #[arg(long, help_heading = "Measurement")]
    pub savings: bool,

    /// Print the report as JSON
    #[arg(long, help_heading = "Measurement")]
    pub json: bool,

    /// Where and how.
    #[command(flatten)]
    pub engine: EngineArgs,
}
