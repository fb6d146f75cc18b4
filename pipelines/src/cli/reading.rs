//! The options of commands that score texts: how a text becomes sentences, and where a sentence begins.

use clap::Args;
use elmo::{
    EmbedSpec, ModelOptions,
    spec::{SentenceMode, StateMode, TokenizerKind},
};

use super::{args::one_of, embed::Asked};
use crate::error::Result;

/// States in which a sentence can begin. With a carried one, the score of a row would depend on the rows before it.
const STATES: &[&str] = &["zero", "warm"];

/// How texts are read.
#[derive(Debug, Args)]
#[command(next_help_heading = "Text")]
pub(super) struct ReadingArgs {
    /// Tokenizer: moses, words, or whitespace for tokenised text [default: the one that the model records, else moses]
    #[arg(long, value_name = "TOKENIZER", value_parser = one_of::<TokenizerKind>(TokenizerKind::WORDS))]
    tokenizer: Option<TokenizerKind>,

    /// Split texts into sentences (split), or treat each text as one sentence (off) [default: as the model records, else split]
    #[arg(long, value_name = "MODE", value_parser = one_of::<SentenceMode>(SentenceMode::WORDS))]
    sentences: Option<SentenceMode>,

    /// LSTM state at the start of a sentence: zero, or warm (a constant of the model) [default: the one that the model
    /// records, else zero]
    #[arg(long, value_name = "STATE", value_parser = one_of::<StateMode>(STATES), hide_short_help = true)]
    state: Option<StateMode>,
}

impl ReadingArgs {
    /// The settings for a model, `spec` with what was asked for or what the model records.
    pub(super) fn spec(&self, model: &ModelOptions, spec: EmbedSpec) -> Result<EmbedSpec> {
        Asked::new(spec, self.tokenizer, self.sentences, self.state).for_model(model)
    }
}
