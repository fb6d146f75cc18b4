//! Why a run cannot begin or go on.

use std::path::PathBuf;

use elmo::train::TrainError;
use thiserror::Error;

use crate::{
    error::{Exit, Fault},
    report::bytes,
};

/// Why a run cannot begin or go on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TrainFault {
    /// The folder holds a run with other settings.
    #[error("{output} holds a run with other settings:\n{}", indented(differences))]
    Differs {
        /// The folder of the run.
        output: PathBuf,
        /// One line per difference.
        differences: Vec<String>,
    },
    /// The corpus, or the held-out text, is not what it was when the run began.
    #[error("{output}: the {what} of this run has changed since it began:\n{}", indented(differences))]
    Corpus {
        /// The folder of the run.
        output: PathBuf,
        /// Which text.
        what: &'static str,
        /// One line per difference.
        differences: Vec<String>,
    },
    /// There are checkpoints, but none of them is complete.
    #[error("{folder}: no checkpoint is undamaged:\n{}", indented(problems))]
    Damaged {
        /// The folder of the checkpoints.
        folder: PathBuf,
        /// One line per checkpoint.
        problems: Vec<String>,
    },
    /// The folder holds something else.
    #[error("{output} contains {file}, which no run of `elmo train` has written there")]
    Foreign {
        /// The folder.
        output: PathBuf,
        /// The file.
        file: String,
    },
    /// Another process trains there.
    #[error("{output}: another process trains there")]
    Locked {
        /// The folder.
        output: PathBuf,
    },
    /// Another run was begun there while the text of this one was read.
    #[error("{output}: another run was begun there in the meantime")]
    Begun {
        /// The folder.
        output: PathBuf,
    },
    /// The vocabulary cannot be used for training.
    #[error("{file}: {reason}")]
    Vocabulary {
        /// The file.
        file: String,
        /// Why.
        reason: String,
    },
    /// A file of the run cannot be written.
    #[error("{path}: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
        /// The last checkpoint that is complete.
        last: Option<PathBuf>,
    },
    /// The loss has jumped, or the loss, a gradient or a weight is not finite.
    #[error("{reason}; {}{}", last_good(last), if *went_back { ", and going back did not help" } else { "" })]
    Spike {
        /// The step, and what is wrong.
        reason: String,
        /// It is a loss that jumped: the run could go on.
        is_finite: bool,
        /// The last checkpoint.
        last: Option<PathBuf>,
        /// The run has gone back to checkpoints, in vain.
        went_back: bool,
    },
    /// The run ended with an error of the text, after its state was written.
    #[error("{error}; the state after step {step} is in {}", checkpoint.display())]
    Saved {
        /// The error.
        error: Box<crate::error::Error>,
        /// Steps that were made.
        step: u64,
        /// The checkpoint.
        checkpoint: PathBuf,
    },
    /// The run does not fit into memory.
    #[error(
        "weights, gradients and the state of the optimiser take {}, but only {} of memory are free",
        bytes(*needed),
        bytes(*available)
    )]
    Memory {
        /// Bytes without activations, which come on top of them.
        needed: u64,
        /// Bytes that are free.
        available: u64,
    },
    /// A step failed.
    #[error(transparent)]
    Step(TrainError),
    /// Another process of the run has failed.
    #[error("process {rank} of this run has failed; its own message says why")]
    Elsewhere {
        /// The process.
        rank: usize,
    },
    /// A process of the run reads other text, or has other settings, than process 0.
    #[error("process {rank} of this run is not one of the same run as process 0:\n{}", indented(differences))]
    Unequal {
        /// The process.
        rank: usize,
        /// One line per difference.
        differences: Vec<String>,
    },
    /// A process of the run was killed.
    #[error("process {rank} of this run was killed by signal {signal}; the others were ended")]
    Killed {
        /// The process.
        rank: usize,
        /// The signal.
        signal: i32,
    },
    /// The run was interrupted.
    #[error("interrupted after step {step}, whose state is in {}", checkpoint.display())]
    Interrupted {
        /// Steps that were made.
        step: u64,
        /// The checkpoint.
        checkpoint: PathBuf,
    },
}

fn indented(lines: &[String]) -> String {
    lines.iter().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
}

fn last_good(last: &Option<PathBuf>) -> String {
    match last {
        Some(last) => format!("the last good checkpoint is {}", last.display()),
        None => "there is no checkpoint yet".to_owned(),
    }
}

impl From<TrainError> for TrainFault {
    fn from(error: TrainError) -> Self {
        Self::Step(error)
    }
}

impl Fault for TrainFault {
    fn exit(&self) -> Exit {
        match self {
            Self::Differs { .. } | Self::Foreign { .. } | Self::Step(TrainError::Recipe(_)) => Exit::Usage,
            Self::Corpus { .. } | Self::Vocabulary { .. } => Exit::Input,
            Self::Damaged { .. } | Self::Locked { .. } | Self::Begun { .. } | Self::Write { .. } => Exit::Storage,
            Self::Spike { .. } | Self::Step(_) | Self::Elsewhere { .. } | Self::Killed { .. } => Exit::Failed,
            Self::Unequal { .. } | Self::Memory { .. } => Exit::Usage,
            Self::Interrupted { .. } => Exit::Interrupted,
            Self::Saved { error, .. } => error.exit(),
        }
    }

    fn help(&self) -> Option<String> {
        let help = match self {
            Self::Differs { .. } => {
                "give the settings of that run to go on with it, or another --output, or --overwrite to begin anew"
            }
            Self::Corpus { .. } => {
                "restore the files as they were; or train on the new text with another --output and --init, which begins \
                 with the weights of this run"
            }
            Self::Damaged { .. } => "begin anew with --overwrite, or restore a checkpoint from a backup",
            Self::Foreign { .. } => "give an empty or new folder as --output",
            Self::Locked { .. } => "wait for it, or give another --output",
            Self::Begun { .. } => "run the same command again to go on with that run, or give another --output",
            Self::Vocabulary { .. } => {
                "negatives are drawn by the rank of a word, so the most frequent words must come first: write the \
                 vocabulary with elmo vocab, or remove the counts if they are of another text"
            }
            Self::Write { last: Some(last), .. } => {
                return Some(format!(
                    "make room on the disk and run the same command again: it goes on from {}",
                    last.display()
                ));
            }
            Self::Write { .. } => "make room on the disk and run the same command again",
            Self::Memory { .. } => {
                "give a smaller --size, or a vocabulary of fewer words (elmo vocab --size); --optimizer adagrad takes less than \
                 adamw"
            }
            Self::Saved { error, .. } => {
                let first = error.help().map_or_else(String::new, |help| format!("{help}; "));
                return Some(format!("{first}the same command, without --overwrite, goes on from there"));
            }
            Self::Spike { went_back: true, .. } => {
                "begin anew with a lower --learning-rate, a lower --clip-norm, or a --warm-up"
            }
            Self::Spike { is_finite: true, .. } => {
                "give --on-spike rollback, which goes back and passes over the text that did it, or --on-spike ignore if the \
                 text explains the jump; or begin anew with a lower --learning-rate or a --warm-up"
            }
            Self::Spike { .. } => {
                "give --on-spike rollback, which goes back and passes over the text that did it; or begin anew with a lower \
                 --learning-rate"
            }
            Self::Step(TrainError::Collective(_)) => {
                "another process of the run has ended or does not answer: its messages say why. The same command goes on from \
                 the last checkpoint"
            }
            Self::Step(TrainError::Device(_)) => {
                "if memory is short, run again with fewer --threads on a CPU, or begin anew (--overwrite) with fewer --rows or \
                 --lanes; --dry-run measures the memory"
            }
            Self::Step(_) | Self::Elsewhere { .. } => return None,
            Self::Unequal { .. } => "give all processes the same arguments, and the same files",
            Self::Killed { signal: libc::SIGKILL, .. } => {
                "if memory was short, give fewer --rows and more --accumulate; the same command, without --overwrite, goes on \
                 from the last checkpoint"
            }
            Self::Killed { .. } => "the same command, without --overwrite, goes on from the last checkpoint",
            Self::Interrupted { .. } => "run the same command again, without --overwrite, to go on",
        };
        Some(help.to_owned())
    }
}
