//! Trains a biLM: the corpus, the vocabulary, the run. The step of the model itself is in the library's `train` module.
//!
//! ```text
//! shards --corpus--> sentences in order --feed--> windows --run--> steps --checkpoint--> state on disk
//!                                                          |                          --model--> a model directory
//!                                                          +--held_out--> perplexities
//! ```
//!
//! | file | what it has |
//! |---|---|
//! | `vocab/` | `elmo vocab`: counts the words of a corpus |
//! | `words.rs` | the vocabulary of a run |
//! | `corpus/` | shards, what is in them, and the order of their sentences |
//! | `feed.rs` | windows, made ahead of the step by threads of their own |
//! | `options_file.rs` | what an options file says about training |
//! | `settings.rs` | what identifies a run, and differences |
//! | `checkpoint/` | the whole state of a run on disk |
//! | `upload/` | copies of checkpoints in a store |
//! | `room.rs` | the memory that a run needs |
//! | `start.rs` | begins a run or finds where it goes on |
//! | `together.rs` | what several processes agree on |
//! | `run.rs` | the loop |
//! | `spike.rs` | losses that jump |
//! | `held_out.rs` | perplexity of held-out text |
//! | `eval.rs` | `elmo eval`: the same of any model, and sentence by sentence |
//! | `model.rs` | the model directory |
//! | `warm.rs` | its start state |
//! | `journal.rs` | `steps.jsonl` and `valid.jsonl` |
//! | `plot/` | `elmo plot`: draws the journals |
//! | `tensorboard/` | the same numbers as event files of TensorBoard |
//! | `estimate.rs` | the dry run |

mod checkpoint;
mod corpus;
mod error;
mod estimate;
mod eval;
mod feed;
mod held_out;
mod job;
mod journal;
mod model;
mod options_file;
pub mod plot;
mod room;
mod run;
mod settings;
mod spike;
mod start;
mod tensorboard;
mod together;
mod upload;
pub mod vocab;
mod warm;
mod words;

pub(crate) use self::upload::would_read_copies;
pub use self::{
    corpus::Order,
    error::TrainFault,
    estimate::{Estimate, estimate},
    eval::{EvalJob, EvalReport, Perplexity, eval},
    job::{ModelSource, OnSpike, TextSettings, TrainJob, Until},
    options_file::OptionsFile,
    run::TrainReport,
    start::{check_processes, train},
    upload::UploadReport,
};
