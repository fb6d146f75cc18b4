//! Training: one step of the biLM as a language model, by the recipe of bilm-tf unless told otherwise.
//!
//! ```text
//! sentences --packer--> Window --Trainer::step--> StepReport
//!                       Window --Evaluation::window--> Evaluated
//! Trainer --snapshot--> Snapshot --restore--> Trainer, bit for bit
//! ```
//!
//! | file | what it has |
//! |---|---|
//! | `sentence.rs`, `packer.rs`, `places.rs`, `window.rs` | sentences to windows: what a step reads |
//! | `recipe.rs` | the settings that determine the numbers of a run |
//! | `initial.rs` | initial values |
//! | `trainer.rs`, `lane.rs`, `pool.rs` | the step: threads, gradients, update |
//! | `loss.rs`, `sampler.rs` | softmax over all words or over the target and negatives |
//! | `optimizer.rs`, `schedule.rs` | Adagrad and AdamW, learning rates |
//! | `random.rs`, `draws.rs` | random numbers as functions of seed and step; dropout |
//! | `collective/` | sums over the processes of a run: Gloo and NCCL |
//! | `evaluation.rs` | held-out perplexity of a run, or of any model with an LM head |
//! | `snapshot.rs` | the whole state of a run |
//! | `mix_fit.rs` | fits a scalar mix and a linear head to labelled vectors |
//! | `memory.rs` | how freed memory is kept for the next step |
//!
//! The model is the one of inference ([`crate::model::BiLm`]). Reading shards, checkpoints and commands are elsewhere.

mod collective;
mod draws;
mod error;
mod evaluation;
mod initial;
mod lane;
mod loss;
mod memory;
mod mix_fit;
mod optimizer;
mod packer;
mod places;
mod pool;
mod random;
mod recipe;
mod sampler;
mod schedule;
mod sentence;
mod snapshot;
mod trainer;
mod window;
mod words;

pub use collective::{Busy, Cause, Collective, CollectiveError, Group, LISTENER, Limits, Meeting, MeetingError, RUN};
pub use draws::{Draws, Place};
pub use error::TrainError;
pub use evaluation::{Evaluated, Evaluation};
pub use initial::{initial_softmax, initial_weights};
pub use memory::keep_freed_memory;
pub use mix_fit::{Labelled, LayerVectors, MixData, MixFit, MixHead, MixLayers, MixRecipe, MixSettings, fit_mix};
pub use optimizer::Optimizer;
pub use packer::{Boundaries, Direction, Packer};
pub use places::Places;
pub use random::{Purpose, Random};
pub use recipe::{Classes, Recipe};
pub use sampler::{LogUniform, Negatives};
pub use schedule::Schedule;
pub use sentence::{Sentence, SentenceList};
pub use snapshot::{Counters, Saved, Snapshot, Values};
pub use trainer::{LanguageModel, Resources, StepReport, Trainer};
pub use window::{Stream, Window};
pub use words::Words;
