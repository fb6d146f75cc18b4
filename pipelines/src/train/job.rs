//! What a user asks for.

use std::{fmt, path::PathBuf, str::FromStr};

use elmo::{
    ModelOptions,
    model::DeviceName,
    options::TextOptions,
    spec::{SentenceMode, SpecError, TokenizerKind},
    train::{Group, Recipe, Schedule},
};

use super::Order;
use crate::{models::ModelSpec, stores::Location};

/// A training run.
#[derive(Debug, Clone)]
pub struct TrainJob {
    /// Files, folders, patterns and URLs of the training text.
    pub shards: Vec<String>,
    /// The same of held-out text; may be empty.
    pub valid: Vec<String>,
    /// How both are read.
    pub text: TextSettings,
    /// Order of the sentences.
    pub order: Order,
    /// The vocabulary; `None`: that of the model.
    pub vocab: Option<Location>,
    /// Where the model begins.
    pub model: ModelSource,
    /// Words that the vocabulary should have, and the file that says so.
    pub words: Option<(usize, String)>,
    /// The settings of the step, whose rows are those of all processes. Its schedule does not yet know the length of the run.
    pub recipe: Recipe,
    /// Most rows that a process computes at a time.
    pub part_rows: usize,
    /// Parts of a window that a process computes one after the other.
    pub accumulate: usize,
    /// Processes of the run: more than in the group in a dry run, in which one process tries its share.
    pub processes: usize,
    /// Those of them on this machine, as far as it is known.
    pub neighbours: usize,
    /// The processes, as this one sees them.
    pub group: Group,
    /// The length of the run.
    pub until: Until,
    /// Folder of the run.
    pub output: PathBuf,
    /// Device.
    pub device: DeviceName,
    /// Threads on a CPU.
    pub threads: usize,
    /// The held-out perplexity is also measured before the first step.
    pub measure_first: bool,
    /// Steps between two measurements of the held-out perplexity; `None`: as checkpoints.
    pub eval_every: Option<u64>,
    /// The run ends when so many measurements in a row are no better than the best one.
    pub patience: Option<u64>,
    /// Steps between two lines of `steps.jsonl`.
    pub log_every: u64,
    /// Steps between two checkpoints; `None`: a tenth of the run, at most 1,250.
    pub checkpoint_every: Option<u64>,
    /// Checkpoints that are kept.
    pub keep_checkpoints: usize,
    /// Folder of a store to which they are copied.
    pub upload: Option<Location>,
    /// What happens when a loss is not finite.
    pub on_spike: OnSpike,
    /// Remove an earlier run.
    pub overwrite: bool,
    /// Do not use the network for the initial model.
    pub offline: bool,
}

/// How text is read.
#[derive(Debug, Clone)]
pub struct TextSettings {
    /// Column of texts, or of lists of tokens.
    pub column: String,
    /// The tokenizer.
    pub tokenizer: TokenizerKind,
    /// Whether rows are cut into sentences.
    pub sentences: SentenceMode,
    /// Sentences that are shuffled together.
    pub block_sentences: usize,
    /// What the model records for its users.
    pub record: TextOptions,
    /// Rows that are no text are left out.
    pub skip_bad_rows: bool,
}

/// Where the model begins.
#[derive(Debug, Clone)]
pub enum ModelSource {
    /// Random values.
    Random(ModelOptions),
    /// An existing model. Its LM head is kept if it has one, and is for the same vocabulary.
    Model(ModelSpec),
    /// A safetensors file with all tensors, `softmax/W` and `softmax/b` among them.
    Tensors {
        /// Sizes.
        options: ModelOptions,
        /// The file.
        path: PathBuf,
    },
}

/// The length of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Until {
    /// So many steps.
    Steps(u64),
    /// So many passes over the corpus, by counted tokens.
    Epochs(f64),
}

impl Until {
    /// Steps of the run when an epoch predicts so many words in each direction and a step so many.
    pub(super) fn steps(self, of_epoch: u64, of_step: u64) -> u64 {
        match self {
            Self::Steps(steps) => steps,
            Self::Epochs(epochs) => ((of_epoch as f64 * epochs / of_step as f64) as u64).max(1),
        }
    }
}

/// The schedule of a run whose length is known.
pub(super) fn schedule_for(schedule: Schedule, steps: u64) -> Schedule {
    match schedule {
        Schedule::Cosine { warm_up, final_ratio, .. } => Schedule::Cosine { warm_up, total: steps, final_ratio },
        other => other,
    }
}

/// What happens when the loss jumps, or is not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnSpike {
    /// The run ends.
    Stop,
    /// The run goes back to the last checkpoint and passes over the text that did it.
    Rollback,
    /// The run goes on if the loss is finite, and ends otherwise.
    Ignore,
}

impl OnSpike {
    /// The legal words.
    pub const WORDS: &'static [&'static str] = &["stop", "rollback", "ignore"];
}

impl FromStr for OnSpike {
    type Err = SpecError;

    fn from_str(word: &str) -> Result<Self, SpecError> {
        match word {
            "stop" => Ok(Self::Stop),
            "rollback" => Ok(Self::Rollback),
            "ignore" => Ok(Self::Ignore),
            _ => Err(SpecError::Value { option: "on-spike", value: word.to_owned(), legal: Self::WORDS.to_vec() }),
        }
    }
}

impl fmt::Display for OnSpike {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stop => "stop",
            Self::Rollback => "rollback",
            Self::Ignore => "ignore",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: bilm-tf makes int(tokens / batch) batches per epoch; here the rest of an epoch counts too.
    #[test]
    fn the_length_of_a_run() {
        assert_eq!(Until::Steps(7).steps(1000, 30), 7);
        assert_eq!(Until::Epochs(1.0).steps(1000, 30), 33);
        assert_eq!(Until::Epochs(2.0).steps(1000, 30), 66);
        assert_eq!(Until::Epochs(0.01).steps(1000, 30), 1);
        let cosine = Schedule::Cosine { warm_up: 2, total: 0, final_ratio: 0.1 };
        assert_eq!(schedule_for(cosine, 9), Schedule::Cosine { warm_up: 2, total: 9, final_ratio: 0.1 });
        assert_eq!(schedule_for(Schedule::Constant, 9), Schedule::Constant);
    }
}
